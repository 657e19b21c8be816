"""A spec with power limits is run where a person said so, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from service import InputError, jobs, search
from service.calibrate import calibrate
from service.cli import main
from service.home import Home
from service.problem import Problem
from service.spec import dump_spec, parse_spec
from tests.service.records import problem

GPUS = {"gpus_per_node": 2, "accelerator": "h200"}
REFUSED = r"^space\.power_limit_w: it sets the power limits of GPUs, which takes --allow-power-limits$"


def limited(*limits: int | None) -> Problem:
    return problem(cluster=GPUS, space={"power_limit_w": list(limits), "num_gpus": [1, 2]})


def test_only_limits_take_leave() -> None:
    assert not problem(cluster=GPUS).sets_power_limits
    assert not limited(None).sets_power_limits
    assert limited(None, 400).sets_power_limits
    assert {layout.power_limit_w for layout in limited(None, 400).legal.layouts} == {None, 400}
    assert parse_spec(dump_spec(limited(None, 400))).legal.layouts == limited(None, 400).legal.layouts


@pytest.mark.usefixtures("home")
def test_without_leave_nothing_starts() -> None:
    for refused in (
        lambda: search.run(limited(None, 400)),
        lambda: calibrate(limited(400)),
        lambda: jobs.submit(limited(400), "http://127.0.0.1:1", "http://127.0.0.1:1"),
    ):
        with pytest.raises(InputError, match=REFUSED):
            refused()


def test_a_submitted_search_is_allowed_over_there_as_it_was_here() -> None:
    assert jobs._allowed(False, False) == ""
    assert jobs._allowed(True, True) == " --allow-trainer --allow-power-limits"
    for command in ("run", "submit", "resume"):
        assert "--allow-power-limits" in CliRunner().invoke(main, [command, "--help"]).stdout


def test_plan_needs_no_leave_and_predicts_what_a_limit_costs(home: Home, tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(dump_spec(limited(None, 300)))
    planned = CliRunner().invoke(main, ["plan", str(tmp_path / "spec.yaml"), "--all"])
    assert planned.exit_code == 0, planned.stderr
    assert "300W" in planned.stdout


@pytest.mark.parametrize(
    ("limit", "words"),
    [(0, "greater than or equal to 1"), (400.5, "power_limit_w"), ("low", "power_limit_w"), (900, "data sheet")],
)
def test_what_is_no_limit_is_refused(limit: object, words: str) -> None:
    with pytest.raises(InputError, match=words):
        problem(cluster=GPUS, space={"power_limit_w": [limit]})
