"""What befell one rank by chance befalls none of those that it stands for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from search_spaces.composition import RankTimes, compose
from search_spaces.disturbances import undisturbed
from search_spaces.kinds import kinds
from search_spaces.layout import SCHEDULES, Layout
from search_spaces.models import PRESETS
from search_spaces.network import Network
from search_spaces.schedules import Action, Pass, order
from search_spaces.workload import Workload

WORK = Workload(replace(PRESETS["tiny-llama"], layers=16), 128, 24)
NETWORK = Network("by hand", 8, 1e11, 1e10, 1e-6, 1e-5)
PIPELINE = Layout("megatron", 8, 24, pipeline_parallel_size=8)


def step_s(late: Action, seconds: float) -> float:
    """Of a pipeline in which the rank that stands for the six in the middle was late once."""
    times = {}
    for kind in kinds(PIPELINE, WORK):
        passes = {action: 1.0 if action.step is Pass.FORWARD else 2.0 for action in order(PIPELINE, kind.pipeline_rank)}
        if len(kind.stands_for) > 1:
            passes[late] += seconds
        times[kind] = RankTimes(passes, 1.0, 500.0, 100.0, 20.0)
    return compose(PIPELINE, WORK, times, NETWORK).step_time_s


@pytest.mark.parametrize("microbatch", [3, 12, 20])
@pytest.mark.parametrize("direction", [Pass.FORWARD, Pass.BACKWARD])
def test_a_pass_that_was_late_once_is_as_long_as_its_like(microbatch: int, direction: Pass) -> None:
    assert step_s(Action(1, direction, microbatch), 5.0) == pytest.approx(step_s(Action(1, direction, 0), 0.0))


@pytest.mark.parametrize(("direction", "microbatch"), [(Pass.FORWARD, 0), (Pass.BACKWARD, 23)])
def test_what_happens_once_a_step_stays(direction: Pass, microbatch: int) -> None:
    assert step_s(Action(1, direction, microbatch), 0.5) > step_s(Action(1, direction, microbatch), 0.0) + 2.0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_phase_of_a_pipeline_has_its_own(schedule: str) -> None:
    """Passes may take longer while a pipeline fills than once it is full; those of another stage do anyway."""
    stages = {"virtual_pipeline_stages": 2} if schedule not in ("gpipe", "1f1b") else {}
    layout = replace(PIPELINE, pipeline_schedule=schedule, **stages)  # type: ignore[arg-type]
    actions = order(layout, 2)
    first_back = next(index for index, action in enumerate(actions) if action.step is not Pass.FORWARD)
    passes = {
        action: 1.0 + action.stage + (0.5 if index < first_back else 0.0) + len(action.step)
        for index, action in enumerate(actions)
    }
    assert undisturbed(passes, actions) == passes


def test_without_a_pipeline_there_are_no_passes() -> None:
    assert undisturbed({}, ()) == {}
