"""The order of a pipeline's passes and messages is the one in which torch and DeepSpeed run them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from deepspeed.runtime.pipe.schedule import TrainSchedule
from torch import nn
from torch.distributed.pipelining import schedules as torch_schedules

from search_spaces.layout import Layout
from search_spaces.messages import Message, Post, Reduce, Run, Script, Wait, scripts
from search_spaces.schedules import Action, Pass, orders
from trainables.engines.megatron.pipeline import _MANY_STAGES, _ONE_STAGE

ONE_STAGE = [(ranks, 1, microbatches) for ranks in (2, 3, 6) for microbatches in (ranks, ranks + 1, 3 * ranks)]
INTERLEAVED = [
    (ranks, virtual, microbatches)
    for ranks in (2, 3, 6)
    for virtual in (2, 4)
    for microbatches in (ranks, ranks + 1, 4 * ranks)
]
V_SHAPED = [(ranks, 2, microbatches) for ranks in (2, 3, 6) for microbatches in (ranks, 2 * ranks - 1, 4 * ranks + 1)]
SHAPES = [
    (schedule, *shape)
    for schedule, shapes in {
        "gpipe": ONE_STAGE,
        "1f1b": ONE_STAGE,
        "interleaved_1f1b": INTERLEAVED,
        "interleaved_zero_bubble": INTERLEAVED,
        "zbv_zero_bubble": V_SHAPED,
    }.items()
    for shape in shapes
]


def layout_of(schedule: str, ranks: int, virtual: int, microbatches: int, engine: str = "megatron") -> Layout:
    return Layout(
        engine,
        ranks,
        microbatches,
        pipeline_parallel_size=ranks,
        pipeline_schedule=schedule,
        virtual_pipeline_stages=virtual,
    )


class RecordingStage:
    """What torch's schedules ask of a stage; all that they do with it goes to `steps`."""

    has_backward = True
    submod = nn.Identity()

    def __init__(self, layout: Layout, stage: int, rank: int, steps: list[Any]) -> None:
        self.stage_index, self.group_rank, self.steps = stage, rank, steps
        self.num_stages, self.group_size = layout.pipeline_stages, layout.pipeline_parallel_size
        self.is_first, self.is_last = stage == 0, stage == layout.pipeline_stages - 1
        self.rank_of = {s: r for r in range(self.group_size) for s in layout.stages_of(r)}
        self.backward = Pass.INPUT if layout.splits_backward else Pass.BACKWARD

    def forward_one_chunk(self, chunk: int, *args: Any, **kwargs: Any) -> None:
        self.steps.append(Run(Action(self.stage_index, Pass.FORWARD, chunk)))

    def backward_one_chunk(self, chunk: int, *args: Any, full_backward: bool = True, **kwargs: Any) -> None:
        assert full_backward == (self.backward is Pass.BACKWARD)
        self.steps.append(Run(Action(self.stage_index, self.backward, chunk)))

    def backward_weight_one_chunk(self, chunk: int, *args: Any, **kwargs: Any) -> None:
        self.steps.append(Run(Action(self.stage_index, Pass.WEIGHT, chunk)))

    def get_fwd_recv_ops(self, chunk: int) -> list[Any]:
        return self._operations(Action(self.stage_index - 1, Pass.FORWARD, chunk), self.stage_index)

    def get_fwd_send_ops(self, chunk: int) -> list[Any]:
        return self._operations(Action(self.stage_index, Pass.FORWARD, chunk), self.stage_index + 1)

    def get_bwd_recv_ops(self, chunk: int) -> list[Any]:
        return self._operations(Action(self.stage_index + 1, self.backward, chunk), self.stage_index)

    def get_bwd_send_ops(self, chunk: int) -> list[Any]:
        return self._operations(Action(self.stage_index, self.backward, chunk), self.stage_index - 1)

    def _operations(self, action: Action, to: int) -> list[Any]:
        if not (0 <= action.stage < self.num_stages and 0 <= to < self.num_stages):
            return []
        message = Message(self.rank_of[action.stage], self.rank_of[to], action)
        return [SimpleNamespace(message=message, peer=message.sender + message.receiver - self.group_rank)]

    def perform_reduce_grad(self, *args: Any) -> None:
        ran = [step.action for step in self.steps if isinstance(step, Run)]
        if self.group_size < self.num_stages:  # else it is the end of the step
            self.steps.append(Reduce(next(action for action in reversed(ran) if action.stage == self.stage_index)))

    def _hand_over(self, *args: Any) -> None:
        """What stages on one rank give each other is no message."""

    set_local_fwd_input = set_local_bwd_input = get_local_bwd_output = _hand_over


def torch_script(layout: Layout, rank: int, monkeypatch: pytest.MonkeyPatch) -> Script:
    steps: list[Any] = []
    one = layout.pipeline_schedule in _ONE_STAGE

    def post(operations: Sequence[Any], desc: str | None = None) -> list[Any]:
        batch = tuple(operation.message for operation in operations)
        line = () if one or not batch else (batch[0].sender, batch[0].receiver)
        steps.extend([Post(batch, line)] if batch else [])
        return [batch]

    def wait(works: Sequence[Any]) -> None:
        steps.extend(Wait(batch) for batch in works if batch)

    monkeypatch.setattr(torch_schedules, "_batch_p2p", post)
    monkeypatch.setattr(torch_schedules, "_wait_batch_p2p", wait)
    stages: Any = [RecordingStage(layout, stage, rank, steps) for stage in layout.stages_of(rank)]
    classes: dict[str, Any] = {**_ONE_STAGE, **_MANY_STAGES}
    schedule = classes[layout.pipeline_schedule](stages[0] if one else stages, layout.gradient_accumulation_steps)
    monkeypatch.setattr(schedule, "_initialize_stage" if one else "_initialize_stages", lambda *args: None)
    schedule._step_microbatches()
    return tuple(steps)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_torch_runs_the_same(shape: tuple[str, int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    layout = layout_of(*shape)
    ours = scripts(layout)
    for rank in range(layout.pipeline_parallel_size):
        assert ours[rank] == torch_script(layout, rank, monkeypatch)
        assert orders(layout)[rank] == tuple(step.action for step in ours[rank] if isinstance(step, Run))


@pytest.mark.parametrize(("ranks", "virtual", "microbatches"), ONE_STAGE)
def test_deepspeed_runs_the_same(ranks: int, virtual: int, microbatches: int) -> None:
    layout = layout_of("1f1b", ranks, virtual, microbatches, "deepspeed")
    assert scripts(layout) == tuple(deepspeed_script(ranks, microbatches, rank) for rank in range(ranks))


def deepspeed_script(ranks: int, microbatches: int, rank: int) -> Script:
    """Of each kind of instruction, the n-th is for microbatch n."""
    seen: Counter[str] = Counter()
    steps: list[Any] = []
    ends = {
        "SendActivation": (rank, rank + 1, Pass.FORWARD),
        "RecvActivation": (rank - 1, rank, Pass.FORWARD),
        "SendGrad": (rank, rank - 1, Pass.BACKWARD),
        "RecvGrad": (rank + 1, rank, Pass.BACKWARD),
    }
    runs = {"ForwardPass": Pass.FORWARD, "BackwardPass": Pass.BACKWARD}
    for instructions in TrainSchedule(microbatches, ranks, rank):
        for name in (instruction.name for instruction in instructions):
            if name in runs:
                steps.append(Run(Action(rank, runs[name], seen[name])))
            elif name in ends:
                sender, receiver, step = ends[name]
                batch = (Message(sender, receiver, Action(sender, step, seen[name])),)
                steps += [Post(batch), Wait(batch)]
            seen[name] += 1
    return tuple(steps)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_microbatch_goes_once_through_every_stage(shape: tuple[str, int, int, int]) -> None:
    layout = layout_of(*shape)
    backward = {Pass.INPUT, Pass.WEIGHT} if layout.splits_backward else {Pass.BACKWARD}
    passes: defaultdict[tuple[int, int], list[Pass]] = defaultdict(list)
    for rank, order in enumerate(orders(layout)):
        assert {action.stage for action in order} == set(layout.stages_of(rank))
        for stage, step, microbatch in order:
            passes[stage, microbatch].append(step)
    assert len(passes) == layout.pipeline_stages * layout.gradient_accumulation_steps
    for steps in passes.values():
        assert steps[0] is Pass.FORWARD
        assert set(steps[1:]) == backward
        assert len(steps) == 1 + len(backward)


def test_no_pipeline_has_no_passes_of_its_own() -> None:
    assert orders(Layout("megatron", 4, 16)) == scripts(Layout("megatron", 4, 16)) == ((),)


def test_1f1b_by_hand() -> None:
    first, last = orders(layout_of("1f1b", 2, 1, 3))
    f, b = Pass.FORWARD, Pass.BACKWARD
    assert [(action.step, action.microbatch) for action in first] == [(f, 0), (f, 1), (b, 0), (f, 2), (b, 1), (b, 2)]
    assert [(action.step, action.microbatch) for action in last] == [(f, 0), (b, 0), (f, 1), (b, 1), (f, 2), (b, 2)]
