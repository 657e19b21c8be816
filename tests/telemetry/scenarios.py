"""What is seen of a fake driver under the genuine binding, each time by a process that has loaded no driver yet.

A binding keeps the library that it has loaded, and an interpreter takes most of a second to import what reads it. So
one interpreter imports all but the library, by this file run as a program, and forks for each scenario.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from telemetry.devices import Device, discover, nvidia, vendors
from telemetry.sampler import Sampler
from telemetry.samples import SampleBuffer

ROOT = Path(__file__).parents[2]

AMDSMI = "amdsmi==7.0.2"
"""Its struct is what fake_amdsmi.c fills in."""

Step = dict[str, Any]


def step(full: bool = True, sleep: float = 0, **settings: object) -> Step:
    """A change of the driver's settings (None takes one back), a pause in seconds, and a reading, full or not."""
    return {"settings": settings, "full": full, "sleep": sleep}


def read_steps(steps: Sequence[Step]) -> dict[str, Any]:
    """Every device's info, and for each step the time and every device's reading."""
    devices = _discover()
    times, reads = [], []
    for each in steps:
        _take(each)
        times.append(time.monotonic_ns())
        reads.append([device.read(each["full"]) for device in devices])
    return {"infos": [asdict(device.info) for device in devices], "times": times, "reads": reads}


def sample_steps(steps: Sequence[Step]) -> list[dict[str, Any]]:
    """The rows of the genuine sampler, without nulls; a full reading is asked for at the end of a step."""
    buffer = SampleBuffer(10_000)
    sampler = Sampler(_discover(), buffer, "n")
    sampler.start()
    for each in steps:
        _take(each)
        if each["full"]:
            sampler.mark()
    sampler.stop()
    return _known(buffer, 0)


def sample_drift(rounds: int) -> list[dict[str, Any]]:
    """Rows with energy of the genuine sampler, over counters whose refreshes (`refresh`, in ms) drift.

    It looks for them twice between two steps of the drift.
    """
    nvidia.REFRESH_WATCH_S = 0.2
    buffer = SampleBuffer(10_000)
    sampler, rows = Sampler(discover(), buffer, "n"), []
    sampler.start()
    for number in range(rounds):
        refresh = 20 + 2 * number
        _take(step(refresh=refresh, sleep=0.15))
        marked_ns = time.monotonic_ns()
        sampler.mark()
        time.sleep(0.2)
        rows += [row | {"refresh": refresh} for row in _known(buffer, marked_ns) if "energy_mj" in row]
    sampler.stop()
    return rows


SCENARIOS: dict[str, Callable[..., Any]] = {
    scenario.__name__: scenario for scenario in (read_steps, sample_steps, sample_drift)
}


def compile_nvml(folder: Path) -> bool:
    """Put the fake driver, a libnvidia-ml.so.1 that the genuine binding loads, into a folder; False where nothing
    compiles it."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        return False
    library, source = folder / "libnvidia-ml.so.1", Path(__file__).with_name("fake_nvml.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o", library, source, "-lm"], check=True)
    return True


def install_amdsmi(folder: Path) -> str | None:
    """Put the genuine binding alone into a folder: in this environment it would break `import ray`. Returns why it
    cannot be had."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    try:
        done = subprocess.run(
            [*pip, "--retries", "1", "--target", str(folder), AMDSMI], capture_output=True, text=True, timeout=120
        )
    except subprocess.TimeoutExpired:
        return f"no {AMDSMI}: the package index did not answer within two minutes"
    return f"no {AMDSMI}: {done.stderr.strip()[-200:]}" if done.returncode else None


def compile_amdsmi(folder: Path, binding: Path) -> str | None:
    """Put the fake driver, a libamd_smi.so that the binding loads, into a folder. Returns why that cannot be."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        return "no C compiler to build the fake library with"
    wrapper = (binding / "amdsmi/amdsmi_wrapper.py").read_text()
    wanted = set(re.findall(r"_libraries\['libamd_smi\.so'\]\.(\w+)", wrapper))
    others = folder / "others.c"
    others.write_text("\n".join(f"__attribute__((weak)) int {name}(void) {{ return 2; }}" for name in sorted(wanted)))
    library, source = folder / "libamd_smi.so", Path(__file__).with_name("fake_amdsmi.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o", library, source, others], check=True)
    return None


class Interpreter:
    """A process that runs a module's scenarios, one at a time. `library` is the folder of the fake driver, if there is
    one."""

    def __init__(self, library: Path | None, *paths: Path, module: str = "tests.telemetry.scenarios") -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ROCM_")}
        environment |= {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, *paths))), "OMP_NUM_THREADS": "1"}
        environment |= {"LD_LIBRARY_PATH": str(library)} if library else {}
        command = [sys.executable, "-m", module]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Interpreter:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def run(self, scenario: Callable[..., Any], argument: object, **settings: object) -> tuple[Any, str]:
        """What the scenario returns, as JSON gives it, with a driver so set, and what it logged."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"scenario": scenario.__name__, "argument": argument, "settings": settings}
        self._process.stdin.write(json.dumps(request, default=str) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        assert answer["status"] == 0, answer["log"]
        return json.loads(answer["result"]), answer["log"]


def _discover() -> list[Device]:
    if "FAKE_REFRESH" not in os.environ:
        nvidia.REFRESH_NS = 0  # nobody waits for a counter that stands still
    return discover()


def _take(each: Step) -> None:
    set_driver(each["settings"])
    time.sleep(each["sleep"])


def set_driver(settings: Mapping[str, object]) -> None:
    """Change the fake driver's settings; None takes one back."""
    for name, value in settings.items():
        variable = f"FAKE_{name.upper()}"
        if value is None:
            os.environ.pop(variable, None)
        else:
            os.environ[variable] = str(value)


def _known(buffer: SampleBuffer, since_ns: int) -> list[dict[str, Any]]:
    rows = buffer.between(since_ns, time.monotonic_ns()).to_pylist()
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


def serve(scenarios: Mapping[str, Callable[..., Any]]) -> None:
    """Run scenarios, as requests for them come from an `Interpreter`."""
    vendors()  # imports them
    for line in sys.stdin:
        request = json.loads(line)
        with TemporaryFile("w+") as result, TemporaryFile("w+") as log:
            child = os.fork()
            if child == 0:
                os.dup2(log.fileno(), 2)
                status = 1
                try:
                    set_driver(request["settings"])
                    json.dump(scenarios[request["scenario"]](request["argument"]), result)
                    result.flush()
                    status = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stderr.flush()
                    os._exit(status)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            result.seek(0)
            log.seek(0)
            print(json.dumps({"status": status, "result": result.read(), "log": log.read()}), flush=True)


if __name__ == "__main__":
    serve(SCENARIOS)
