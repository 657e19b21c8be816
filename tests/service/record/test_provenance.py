"""What a record says of the machine."""

from __future__ import annotations

import os

from service.record.provenance import busy, surroundings


def test_a_machine_with_more_to_do_than_cores_was_busy() -> None:
    assert busy({"cores": "2", "load_average": "17.0"}) == ["the machine was busy: load 17.0 on 2 cores"]
    assert busy({"cores": "2", "load_average": "1.9"}) == []


def test_the_load_is_asked_of_the_machine() -> None:
    told = surroundings()
    assert int(told["cores"]) == os.cpu_count()
    assert float(told["load_average"]) >= 0
