"""What a search runs next: it explores, watches the machine, measures finalists, and goes on where it was."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import yaml

from search_spaces.layout import Layout
from service.answers.candidates import candidates
from service.answers.overview import contests
from service.problem import Problem
from service.result import Purpose, TrialResult
from service.sampling.agenda import RETRIES, Agenda, CalibrationAgenda, SearchAgenda, Spent, settled
from service.sampling.finalists import contenders
from service.sampling.study import SearchStudy
from service.spec import parse_spec
from service.step import Step, Wish
from tests.service.records import PLENTY, Plenty, Room
from trainables.status import Status

SPEC: dict[str, Any] = {
    "name": "agenda",
    "model": "tiny-llama",
    "data": "synthetic",
    "sequence_length": 64,
    "global_batch_size": 8,
    "cluster": {"gpus_per_node": 2, "accelerator": "cpu"},
    "objectives": {"tokens_per_s": "maximize", "joules_per_token": "minimize"},
    "space": {"tensor_parallel_size": [1, 2], "zero_stage": [0, 2, 3], "micro_batch_size": [1, 2], "precision": "fp32"},
    "sampler": "random",
    "finalists": {"count": 0},
    "sentinel_every": 0,
}


def spec_of(**changes: Any) -> Problem:
    return parse_spec(yaml.safe_dump(SPEC | changes))


def agenda_of(spec: Problem, results: tuple[TrialResult, ...] = (), **arguments: Any) -> SearchAgenda:
    study = SearchStudy("search", spec.legal.layouts, spec.goals, spec.sampler, spec.seed)
    study.recall([result for result in settled(results) if result.purpose == "search"])
    return SearchAgenda(study, spec, results=results, **arguments)


def outcome(trial_id: str, step: Step, **metrics: float) -> TrialResult:
    """Faster layouts take more energy, so that all are on the front."""
    rate = 100.0 + step.layout.micro_batch_size + 10 * step.layout.zero_stage + 3 * step.layout.tensor_parallel_size
    figures: dict[str, float | None] = {"tokens_per_s": rate, "joules_per_token": rate / 100, **metrics}
    return TrialResult(trial_id, step.layout, Status.OK, metrics=figures, purpose=step.purpose)


def run(
    agenda: Agenda, trials: int = 1000, change: Callable[[TrialResult], TrialResult] = lambda result: result
) -> list[TrialResult]:
    """Run the agenda to its end, or as many trials of it, one at a time; what became of each."""
    results: list[TrialResult] = []
    while len(results) < trials and (step := agenda.next(f"t{len(results)}", PLENTY)) is not None:
        results.append(change(outcome(f"t{len(results)}", step)))
        agenda.take(results[-1])
    return results


def purposes(results: list[TrialResult]) -> str:
    """One letter a trial: s for search, w for the sentinel that watches, f for finalist."""
    return "".join(
        {"search": "s", "sentinel": "w", "finalist": "f", "placement": "p"}[result.purpose] for result in results
    )


def test_ends_when_the_trials_are_used_up() -> None:
    assert len(run(agenda_of(spec_of(budget={"trials": 3})))) == 3


def test_ends_when_the_space_is_used_up() -> None:
    spec = spec_of(budget={"trials": 100})
    assert {result.layout for result in run(agenda_of(spec))} == set(spec.legal.layouts)


def test_ends_when_the_wall_time_is_used_up() -> None:
    agenda = agenda_of(spec_of(budget={"wall_time_s": 0.2}))
    assert agenda.next("a", PLENTY) is not None
    time.sleep(0.25)
    assert agenda.next("b", PLENTY) is None


def test_waiting_for_the_first_gang_is_no_time_of_the_search() -> None:
    agenda = agenda_of(spec_of(budget={"wall_time_s": 100}), spent=Spent(wall_time_s=99.9))
    time.sleep(0.2)
    assert agenda.elapsed_s == 99.9
    began = time.monotonic()
    assert agenda.next("a", PLENTY) is not None
    time.sleep(0.2)
    assert 100.05 < agenda.elapsed_s <= 99.9 + time.monotonic() - began
    assert agenda.closed
    assert agenda.next("b", PLENTY) is None


class Turn(Plenty):
    """Lends whatever is asked for, while it is the search's turn."""

    mine = True

    def free(self) -> int | None:
        return super().free() if self.mine else None

    def lend(self, trial_id: str, wishes: Sequence[Wish]) -> int | None:
        return super().lend(trial_id, wishes) if self.mine else None


def test_the_turns_of_others_are_no_time_of_the_search() -> None:
    agenda, turn = agenda_of(spec_of()), Turn()
    step = agenda.next("a", turn)
    assert step is not None
    turn.mine = False
    assert agenda.next("b", turn) is None
    before = agenda.elapsed_s
    time.sleep(0.1)
    assert agenda.elapsed_s > before, "a trial is under way"
    agenda.take(outcome("a", step))
    assert agenda.next("b", turn) is None
    paused = agenda.elapsed_s
    time.sleep(0.3)
    assert agenda.next("b", turn) is None
    assert agenda.elapsed_s == paused
    assert not agenda.over
    turn.mine = True
    began = time.monotonic()
    assert agenda.next("b", turn) is not None
    assert paused <= agenda.elapsed_s <= paused + time.monotonic() - began


def test_ends_when_the_gpu_hours_are_used_up() -> None:
    """A trial of 0.1 s on two GPUs is 0.2 GPU-seconds."""
    for hours, goes_on in ((0.15 / 3600, False), (1.0, True)):
        agenda = agenda_of(spec_of(budget={"gpu_hours": hours}))
        began = time.monotonic()
        step = agenda.next("a", PLENTY)
        assert step is not None
        time.sleep(0.1)
        agenda.take(outcome("a", step))
        assert 0.19 < agenda.gpu_seconds <= 2 * (time.monotonic() - began)
        assert (agenda.next("b", PLENTY) is not None) == goes_on


def test_ends_when_it_is_stopped() -> None:
    agenda = agenda_of(spec_of())
    assert agenda.next("a", PLENTY) is not None
    agenda.stopped = True
    assert agenda.next("b", PLENTY) is None


def test_the_budget_is_what_is_left_of_it() -> None:
    earlier = tuple(run(agenda_of(spec_of(budget={"trials": 4}))))
    spent = Spent(wall_time_s=100.0, gpu_seconds=3600.0)
    cases: list[tuple[dict[str, Any], bool]] = [
        ({"trials": 4}, False),
        ({"trials": 5}, True),
        ({"wall_time_s": 99}, False),
        ({"wall_time_s": 200}, True),
        ({"gpu_hours": 1}, False),
        ({"gpu_hours": 1.1}, True),
    ]
    for budget, more in cases:
        agenda = agenda_of(spec_of(budget=budget), earlier, spent=spent)
        assert (agenda.next("t", PLENTY) is not None) == more, budget


def test_each_trial_is_given_the_front_so_far() -> None:
    agenda = agenda_of(spec_of())
    first = agenda.next("a", PLENTY)
    assert first is not None
    assert first.front == ()
    agenda.take(outcome("a", first, tokens_per_s=10.0, joules_per_token=1.0))
    second = agenda.next("b", PLENTY)
    assert second is not None
    assert second.front == ({"tokens_per_s": 10.0, "joules_per_token": 1.0},)
    agenda.take(outcome("b", second, tokens_per_s=20.0, joules_per_token=0.5))
    third = agenda.next("c", PLENTY)
    assert third is not None
    assert third.front == ({"tokens_per_s": 20.0, "joules_per_token": 0.5},)


def test_the_sentinel_is_the_first_layout_that_ended_well_and_comes_back_again_and_again() -> None:
    failing = iter([Status.CRASH, Status.OOM])
    agenda = agenda_of(spec_of(sentinel_every=3, budget={"trials": 8}))
    results = run(agenda, change=lambda result: replace(result, status=next(failing, Status.OK)))
    assert purposes(results) == "ssssss" + "wss"
    assert {result.layout for result in results if result.purpose == "sentinel"} == {results[2].layout}
    asked = [result.layout for result in results if result.purpose == "search"]
    assert len(asked) == len(set(asked)) == 8
    assert len(agenda.front()) == 6, "a sentinel is no point of the front"


def test_how_far_the_sentinel_moved_is_known() -> None:
    def warming(result: TrialResult) -> TrialResult:
        return replace(result, metrics={"tokens_per_s": 90.0 if result.purpose == "sentinel" else 100.0})

    agenda = agenda_of(spec_of(sentinel_every=2, budget={"trials": 4}))
    run(agenda, change=warming)
    assert {metric: move.share for metric, move in agenda.drifts().items()} == {"tokens_per_s": pytest.approx(-0.1)}
    assert agenda_of(spec_of()).drifts() == {}


def test_finalists_are_the_ends_of_the_front_measured_in_rounds() -> None:
    agenda = agenda_of(spec_of(finalists={"count": 3, "repeats": 2}, budget={"trials": 6}))
    results = run(agenda)
    assert purposes(results) == "ssssss" + "ffffff"
    explored, measured = results[:6], [result.layout for result in results[6:]]
    assert set(measured[:3]) == set(measured[3:])
    rates = {result.layout: result.metrics["tokens_per_s"] or 0.0 for result in explored}
    assert len(set(measured)) == 3
    assert {max(rates, key=rates.__getitem__), min(rates, key=rates.__getitem__)} < set(measured)
    assert agenda.next("more", PLENTY) is None


def test_finalists_wait_for_the_trials_under_way() -> None:
    agenda = agenda_of(spec_of(finalists={"count": 1, "repeats": 2}, budget={"trials": 2}))
    steps = {trial_id: agenda.next(trial_id, PLENTY) for trial_id in ("a", "b")}
    first, second = steps["a"], steps["b"]
    assert first is not None
    assert second is not None
    agenda.take(outcome("a", first, tokens_per_s=1.0, joules_per_token=1.0))
    assert agenda.next("c", PLENTY) is None
    agenda.take(outcome("b", second, tokens_per_s=2.0, joules_per_token=0.5))
    side_by_side = [agenda.next("c", PLENTY), agenda.next("d", PLENTY)]
    assert side_by_side == [Step(second.layout, Purpose.FINALIST)] * 2


def test_a_search_without_a_front_has_no_finalists() -> None:
    agenda = agenda_of(spec_of(finalists={"count": 2}, budget={"trials": 2}))
    assert purposes(run(agenda, change=lambda result: replace(result, status=Status.OOM, metrics={}))) == "ss"


def test_exploring_leaves_the_finalists_their_time() -> None:
    """A finalist is 2 s and a window of 8 s: two of them, two times each, are 40 s."""
    finalists = {"count": 2, "repeats": 2, "window_s": 8}
    results = tuple(run(agenda_of(spec_of(budget={"trials": 4}))))
    results = tuple(replace(r, metrics=r.metrics | {"warmup_time_s": 1.5, "trial_overhead_s": 0.5}) for r in results)
    for wall_time_s, spent_s, purpose in ((200, 150, "search"), (200, 165, "finalist"), (60, 20, "search")):
        spec = spec_of(finalists=finalists, budget={"wall_time_s": wall_time_s})
        step = agenda_of(spec, results, spent=Spent(spent_s)).next("t", PLENTY)
        assert step is not None
        assert step.purpose == purpose
    spec = spec_of(finalists=finalists, budget={"wall_time_s": 60})
    step = agenda_of(spec, results, spent=Spent(31)).next("t", PLENTY)
    assert step is not None
    assert step.purpose == "finalist", "at most half of the time is kept for them"
    spec = spec_of(finalists=finalists, budget={"gpu_hours": 200 / 3600})
    step = agenda_of(spec, results, spent=Spent(gpu_seconds=125)).next("t", PLENTY)
    assert step is not None
    assert step.purpose == "finalist"
    assert agenda_of(spec, results, spent=Spent(gpu_seconds=201)).next("t", PLENTY) is None


@pytest.mark.parametrize(
    ("explore", "budget", "spent", "begins"),
    [
        ("gang", {"wall_time_s": 100}, Spent(wall_time_s=69), True),
        ("gang", {"wall_time_s": 100}, Spent(wall_time_s=71), False),
        ("gang", {"wall_time_s": 50}, Spent(wall_time_s=24), True),  # at most half of the time is kept back
        ("gang", {"gpu_hours": 200 / 3600}, Spent(gpu_seconds=141), False),  # on two GPUs
        ("slices", {"gpu_hours": 200 / 3600}, Spent(gpu_seconds=169), True),  # on one
        ("slices", {"gpu_hours": 200 / 3600}, Spent(gpu_seconds=171), False),
    ],
)
def test_no_trial_begins_that_would_not_end_in_time(
    explore: str, budget: dict[str, float], spent: Spent, begins: bool
) -> None:
    """One takes 30 s by the median of three."""
    spec = {"measurement": {"explore": explore}, "budget": {"trials": 4} | budget}
    results = run(agenda_of(spec_of(budget={"trials": 3})))
    times = zip(results, (1.0, 29.0, 90.0), strict=True)
    results = [replace(r, metrics=r.metrics | {"warmup_time_s": s, "trial_overhead_s": 1.0}) for r, s in times]
    agenda = agenda_of(spec_of(**spec), tuple(results), spent=spent)
    assert (agenda.next("t", PLENTY) is not None) == begins


@pytest.mark.parametrize("done", range(14))
def test_a_search_goes_on_where_it_was(done: int) -> None:
    """Whatever a search had done when it was broken off, the rest is what it would have run."""
    spec = spec_of(finalists={"count": 2, "repeats": 2}, sentinel_every=4, budget={"trials": 8})
    whole = run(agenda_of(spec))
    assert purposes(whole) == "sssss" + "wsss" + "fwff" + "f"
    agenda = agenda_of(spec, tuple(whole[:done]))
    assert agenda.to_come >= len(whole) - done
    rest = run(agenda)
    assert purposes(whole[:done] + rest) == purposes(whole)
    explored = [result.layout for result in whole[:done] + rest if result.purpose == "search"]
    assert len(set(explored)) == 8
    if done >= 9:  # what explored is the same, and so are the finalists and their order
        assert [result.layout for result in rest] == [result.layout for result in whole[done:]]
    assert agenda.to_come == 0


def noisy(spread: float, seed: int = 0) -> Callable[[TrialResult], TrialResult]:
    """Figures that lie apart by up to a share of them, the same for the same trial of a layout."""
    seen: Counter[tuple[Layout, Purpose]] = Counter()

    def change(result: TrialResult) -> TrialResult:
        seen[result.layout, result.purpose] += 1
        draw = random.Random(f"{result.layout.label} {result.purpose} {seen[result.layout, result.purpose]} {seed}")
        factor = 1 + spread * draw.uniform(-1, 1)
        return replace(result, metrics={name: (value or 0.0) * factor for name, value in result.metrics.items()})

    return change


def open_ends(results: list[TrialResult], spec: Problem) -> list[str]:
    return contests(spec.goals.among(candidates(results)))


SPEED = {"objectives": {"tokens_per_s": "maximize"}}


def test_a_layout_that_the_finalists_turn_out_worse_than_is_measured_too() -> None:
    """All finalists are half as fast again as they were first: the next best leads, measured once."""
    spec = spec_of(**SPEED, finalists={"count": 2, "repeats": 3}, budget={"trials": 6})

    def slower(result: TrialResult) -> TrialResult:
        if result.purpose == "search" or result.layout not in chosen:
            return result
        return replace(result, metrics={"tokens_per_s": (result.metrics["tokens_per_s"] or 0.0) / 2})

    explored = run(agenda_of(spec), trials=6)
    ordered = sorted(explored, key=lambda result: -(result.metrics["tokens_per_s"] or 0.0))
    chosen = {result.layout for result in contenders(explored, spec.goals, 2)}
    (next_best,) = [result.layout for result in ordered if result.layout not in chosen][:1]
    results = run(agenda_of(spec), change=slower)
    again = [result.layout for result in results if result.purpose == "finalist"]
    planned = 3 * len(chosen)
    assert set(again[:planned]) == chosen
    assert again[planned:].count(next_best) == 3
    assert len(again) == planned + 4, "and once more what it is held against"
    assert again[planned:].index(next_best) < 2, "side by side"
    assert open_ends(results, spec) == []
    record = candidates(results)
    assert max(record, key=lambda one: one.metrics["tokens_per_s"]).layout == next_best


@pytest.mark.parametrize("seed", range(4))
def test_the_last_trials_go_to_who_was_measured_least(seed: int) -> None:
    """Whoever is measured again turns out half as fast, so that again and again one leads that was measured once."""
    spec = spec_of(**SPEED, finalists={"count": 2, "repeats": 3}, budget={"trials": 12}, seed=seed)

    def slower(result: TrialResult) -> TrialResult:
        share = 0.5 if result.purpose == "finalist" else 1.0
        return replace(result, metrics={"tokens_per_s": share * (result.metrics["tokens_per_s"] or 0.0)})

    again = [result.layout for result in run(agenda_of(spec), change=slower) if result.purpose == "finalist"]
    planned, first, last = again[:6], again[6:10], again[10:]
    assert sorted(Counter(first).values()) == [1, 3], "the one that leads, and once more what it is held against"
    assert len(last) == 2, "as many extra trials as the finalists had are over"
    assert len(set(last)) == 1
    assert last[0] not in planned + first


def test_layouts_that_cannot_be_told_apart_are_measured_on() -> None:
    """Layouts that differ by less than measurements of one do: two rounds of both ends, and as many trials again."""
    spec = spec_of(finalists={"count": 2, "repeats": 2}, budget={"trials": 12})
    results = run(agenda_of(spec), change=noisy(0.2))
    again = [result.layout for result in results if result.purpose == "finalist"]
    assert len(again) == 2 * 4, "as many again as were planned"
    assert open_ends(results, spec)
    agenda = agenda_of(spec)
    exact = [result.layout for result in run(agenda) if result.purpose == "finalist"]
    assert len(exact) == 4
    assert agenda.to_come == 0


def test_the_time_ends_what_is_undecided() -> None:
    spec = spec_of(finalists={"count": 2, "repeats": 2}, budget={"trials": 8, "wall_time_s": 3600})
    change = noisy(0.2)
    results = tuple(run(agenda_of(spec), trials=8 + 4, change=change))
    assert agenda_of(spec, results).next("t", PLENTY) is not None
    assert agenda_of(spec, results, spent=Spent(3600)).next("t", PLENTY) is None


@pytest.mark.parametrize("seed", range(20))
def test_a_search_ends_decided_or_with_twice_the_finalists_trials(seed: int) -> None:
    spec = spec_of(finalists={"count": 3, "repeats": 2}, budget={"trials": 9}, seed=seed)
    results = run(agenda_of(spec), change=noisy(0.003 * (seed + 1), seed))
    again = sum(result.purpose == "finalist" for result in results)
    most = 3 * 2 + 3 * 2
    assert again <= most
    assert again == most or not open_ends(results, spec)


@pytest.mark.parametrize("done", range(9, 20))
def test_what_is_measured_on_is_the_same_for_a_search_that_is_resumed(done: int) -> None:
    spec = spec_of(finalists={"count": 2, "repeats": 2}, sentinel_every=4, budget={"trials": 8})
    whole = run(agenda_of(spec), change=noisy(0.2))
    assert purposes(whole) == "sssss" + "wsss" + "fwff" + "f" + "fwff" + "f"
    change = noisy(0.2)
    earlier = tuple(change(outcome(result.trial_id, Step(result.layout, result.purpose))) for result in whole[:done])
    assert list(earlier) == whole[:done]
    agenda = agenda_of(spec, earlier)
    rest = run(agenda, change=change)
    assert [(r.layout, r.purpose) for r in rest] == [(r.layout, r.purpose) for r in whole[done:]]
    assert agenda.to_come == 0


def test_a_layout_that_comes_to_nothing_when_measured_again_is_not_asked_for_ever() -> None:
    spec = spec_of(finalists={"count": 2, "repeats": 3}, budget={"trials": 6})
    best = max(run(agenda_of(spec), trials=6), key=lambda result: result.metrics["tokens_per_s"] or 0.0).layout

    def crashing(result: TrialResult) -> TrialResult:
        crashed = result.purpose == "finalist" and result.layout == best
        return replace(result, status=Status.CRASH, metrics={}, cause="gone") if crashed else result

    results = run(agenda_of(spec), change=crashing)
    assert sum(result.layout == best for result in results) == 1 + 3
    assert "measured once" in open_ends(results, spec)[0]


def test_trials_that_are_run_again_are_not_planned_twice() -> None:
    """Two gangs: the last trial of the rounds fails by the machines while the one before is under way."""
    spec = spec_of(**SPEED, finalists={"count": 1, "repeats": 2}, budget={"trials": 1})
    agenda = agenda_of(spec, tuple(run(agenda_of(spec), trials=1)))
    a, b = agenda.next("a", PLENTY), agenda.next("b", PLENTY)
    assert a is not None
    assert a == b
    assert not agenda.take(faulty(outcome("b", a)))
    agenda.take(outcome("a", a))
    assert agenda.next("c", PLENTY) == a
    assert agenda.next("d", PLENTY) is None
    agenda.take(outcome("c", a))
    assert (agenda.next("e", PLENTY), agenda.to_come) == (None, 0)


def faulty(result: TrialResult) -> TrialResult:
    return replace(result, status=Status.CRASH, metrics={}, infrastructure=True)


@pytest.mark.parametrize("purpose", ["search", "sentinel", "finalist"])
def test_a_trial_that_the_machines_failed_is_run_again_and_then_given_up(purpose: str) -> None:
    spec = spec_of(finalists={"count": 1, "repeats": 2}, sentinel_every=4, budget={"trials": 5})
    agenda = agenda_of(spec)
    victims: list[TrialResult] = []

    def change(result: TrialResult) -> TrialResult:
        mine = result.purpose == purpose and (not victims or victims[0].layout == result.layout)
        if not mine or len(victims) > RETRIES:
            return result
        victims.append(faulty(result))
        return victims[-1]

    results = run(agenda, change=change)
    assert len(victims) == RETRIES + 1
    where = results.index(victims[0])
    assert results[where : where + RETRIES + 1] == victims, "at once"
    assert [r.infrastructure for r in agenda.results].count(True) == 1, "the last failure counts"
    assert agenda.results == settled(results)
    explored = [r.layout for r in agenda.results if r.purpose == "search"]
    assert len(explored) == len(set(explored)) == 5


def test_a_failure_of_the_machines_is_not_told_to_the_study() -> None:
    agenda = agenda_of(spec_of(budget={"trials": 2}))
    first = agenda.next("a", PLENTY)
    assert first is not None
    assert not agenda.take(faulty(outcome("a", first)))
    again = agenda.next("b", PLENTY)
    assert again == first
    assert agenda.take(outcome("b", first))
    resumed = agenda_of(spec_of(budget={"trials": 2}), (faulty(outcome("a", first)), outcome("b", first)))
    assert [result.status for result in resumed.results] == ["ok"]
    assert len(run(resumed)) == 1


def test_a_calibration_runs_its_layouts_once_each() -> None:
    spec = spec_of(budget={"trials": 1})
    layouts = spec.legal.layouts[:3]
    agenda = CalibrationAgenda(spec, spec.legal.layouts[1:])
    agenda.change(layouts)
    assert (agenda.sought, agenda.to_come) == (3, 3)
    results = run(agenda)
    assert [result.layout for result in results] == list(layouts)
    assert {result.purpose for result in results} == {"calibration"}
    assert agenda.to_come == 0


SIZES = {"cluster": {"gpus_per_node": 4, "accelerator": "cpu"}}
SPACE = {"num_gpus": [1, 2, 4], "zero_stage": [0, 2], "micro_batch_size": [1, 2], "precision": "fp32"}


def test_layouts_of_all_sizes_fill_the_workers_and_none_waits_for_ever() -> None:
    """Each trial takes as long as any other: in each round those under way end, then others are begun."""
    spec, room = spec_of(**SIZES, space=SPACE, sampler="exhaustive"), Room(4)
    agenda, rounds, number = agenda_of(spec), list[list[int]](), 0
    while not agenda.over:
        begun = {}
        while (step := agenda.next(f"t{number}", room)) is not None:
            begun[f"t{number}"], number = step, number + 1
        rounds.append([step.layout.num_gpus for step in begun.values()])
        for trial_id, step in begun.items():
            room.release(trial_id)
            agenda.take(outcome(trial_id, step))
    explored = sorted(result.layout.num_gpus for result in agenda.results)
    assert explored == sorted(layout.num_gpus for layout in spec.legal.layouts)
    assert [sum(sizes) for sizes in rounds[:-2]] == [4] * (len(rounds) - 2 - (rounds[-1] == []))


def test_one_that_was_passed_over_too_often_goes_before_all_others() -> None:
    spec, room = spec_of(**SIZES, space=SPACE), Room(3)
    agenda = agenda_of(spec, workers=4)
    sizes = []
    for number in range(200):
        if (step := agenda.next(f"t{number}", room)) is None:
            break
        sizes.append(step.layout.num_gpus)
        room.release(f"t{number}")
        agenda.take(outcome(f"t{number}", step))
    assert 4 not in sizes, "of which there are never as many free"
    assert not agenda.over
    assert len(sizes) <= sum(layout.num_gpus < 4 for layout in spec.legal.layouts)
    room.workers = 4
    step = agenda.next("again", room)
    assert step is not None
    assert step.layout.num_gpus == 4


def test_layouts_of_one_size_are_drawn_when_they_are_run() -> None:
    agenda, room = agenda_of(spec_of(), workers=4), Room(4)
    first = agenda.next("a", room)
    assert first is not None
    assert (agenda.next("b", room), agenda.waiting) != (None, [])
    assert agenda.next("c", room) is None
    assert agenda.waiting == [], "what is learnt until there is room may bring another"


def test_those_that_explore_run_side_by_side_and_finalists_alone() -> None:
    spec = spec_of(
        **SIZES, space=SPACE | {"num_gpus": [1], "micro_batch_size": [1, 2, 4, 8]}, finalists={"count": 1, "repeats": 2}
    )
    agenda, room = agenda_of(spec, workers=4), Room(4)
    steps = {name: agenda.next(name, room) for name in "abcd"}
    assert {room.lent[name] for name in steps} == {Wish(1, alone=False)}
    for name, step in steps.items():
        assert step is not None
        room.release(name)
        agenda.take(outcome(name, step))
    finalist = agenda.next("e", room)
    assert finalist is not None
    assert (finalist.purpose, room.lent["e"]) == (Purpose.FINALIST, Wish(1, alone=True))
    assert agenda.next("f", room) is None
    assert not agenda.over


def test_what_was_drawn_ahead_is_not_begun_once_the_time_is_the_finalists() -> None:
    spec = spec_of(**SIZES, space=SPACE)
    agenda, room = agenda_of(spec), Room(4)
    first = agenda.next("a", room)
    assert first is not None
    waiting = [one.step.layout for one in agenda.waiting]
    assert waiting
    agenda.problem = replace(spec, budget=replace(spec.budget, wall_time_s=1e-9))
    agenda.draw(4)
    assert agenda.waiting == []
    assert agenda.study.ask() == waiting[0], "it is handed out first should there be time after all"
