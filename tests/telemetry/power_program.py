"""Sets power limits of the fake driver's GPUs as it is told, a line of JSON each, and answers with a line each.

Run as a program beside the fake driver: `{"check": [watts]}`, `{"set": [index, watts]}`, `{"restore": index}`,
`{"holds": [index, watts]}`, `{"close": null}`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from telemetry.devices import discover
from telemetry.power import PowerLimits


def answer(limits: PowerLimits, asked: dict[str, Any]) -> Any:
    ((what, argument),) = asked.items()
    try:
        if what == "check":
            return limits.check(argument)
        if what == "set":
            return limits.set(*argument)
        if what == "holds":
            return limits.holds(*argument)
        return limits.close() if what == "close" else limits.restore(argument)
    except OSError as error:
        return str(error)


def main() -> None:
    limits = PowerLimits(discover())
    for line in sys.stdin:
        print(json.dumps(answer(limits, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
