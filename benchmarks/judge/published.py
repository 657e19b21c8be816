"""The cost and memory models against layouts that others measured and published, on machines and software of theirs.

    python -m benchmarks.judge.published TABLE.csv [--seeds 5] [--rows]

A table has one row a measurement, with the columns `COLUMNS`; `hw_*` hold what a machine had other than its data sheet
says, the network as GB/s of a GPU. A layout is predicted as one of its `framework`, where what that does otherwise is
known (`search_spaces.engines.others`), else as one of the `megatron` engine's, so that a part of an error is what one
program does otherwise than another. Stages that a row does not name are as even as can be. Printed are, by source:

- the mean and the largest error in step time, also by precision, by data sheet; what is left of it once all
  predictions of the source are multiplied by one factor; and after a fit to `COUNT` of its layouts, drawn at random,
  each accelerator's apart, on the others;
- within each group, of one model on one cluster, the rank correlation of step times, and how much slower than the best
  the layout is that is foretold to be the best;
- the error in peak memory, where it was published, by what was published of it;
- which layouts that ran are refused, and by what, and which that ran out of memory are called safe;
- what cannot be expressed, and why, and what of a model is not modelled.

Microbatches that a row's `notes` call "not said" are those that the program makes unless it is told.
"""

from __future__ import annotations

import argparse
import csv
import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from scipy.stats import spearmanr

from search_spaces import memory
from search_spaces.cost import Coefficients, data_sheet, predict
from search_spaces.hardware import ACCELERATORS, Accelerator
from search_spaces.layout import Layout
from search_spaces.models import FAMILIES, ModelShape
from search_spaces.rules import refusal
from search_spaces.space import canonical
from search_spaces.workload import Workload
from service.answers.tables import render
from service.fitting import Observation, ratios, shifted, shifts

COUNT = 12
"""Layouts of a source that coefficients are fitted to."""

FEWEST = 3
"""Layouts of a group from which on their order says something."""

SIZES = ("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab", "num_experts", "experts_per_token")
"""Columns of a model, which are fields of `ModelShape`."""

WIDE = "heads wider than hidden / heads"
"""What a row says of a model that has such heads. It has no sizes then."""

QWEN3_30B, QWEN3_235B = (
    ModelShape("llama", *sizes, 151_936, 40_960, False, 1_000_000.0, 128, 8, 0.001, head_dim=128)
    for sizes in ((48, 2048, 32, 4, 768), (94, 4096, 64, 4, 1536))
)
WIDE_MODELS = {"qwen3_30b_a3b": QWEN3_30B, "qwen3_235b_a22b": QWEN3_235B}
"""Such models by name, as the configurations have them that were published with the weights: their feed-forward
networks are `moe_intermediate_size` wide."""

SPREAD_FURTHER = "experts spread over tensor-parallel ranks"
"""What there is of layouts with more expert-parallel ranks than hold the same dense parameters. Here these share each
expert."""

NOT_MODELLED = "norms of queries and of keys"
"""What the models of `WIDE_MODELS` have besides."""

FRAMEWORKS = {
    "Megatron-LM": "megatron-lm-2022",
    "Megatron-DeepSpeed": "megatron-lm-2022",
    "Megatron-LM 0.14": "megatron-lm",
    "Megatron-Bridge": "megatron-bridge",
    "torchtitan": "torchtitan",
    "Composer FSDP": "composer",
    "InternEvo": "internevo",
}
"""The engine as whose a framework's layouts are predicted."""

COLUMNS = (
    *("id", "source", "group", "framework", "model", "family", *SIZES, "tie", "seq"),
    *("gpu", "num_gpus", "gpus_per_node"),
    *("tp", "pp", "vp", "cp", "ep", "zero", "shard_copies", "mbs", "gbs", "recompute", "precision", "reduce_precision"),
    *("seq_parallel", "async_tp", "fused", "schedule", "stage_layers", "overlap_grad", "overlap_param", "status"),
    *("step_time_s", "memory_gib", "memory_kind", "hw_memory_gib", "hw_memory_TBps", "hw_power_w", "hw_network_GBps"),
    "unexpressed",
)


IN_2024 = "202412"
"""What `path` has in it, a column that a table may have besides, of torchtitan's benchmarks of December 2024."""

NOT_SAID = "microbatch"
"""How `notes` begin, a column that a table may have besides, where others did not publish the microbatch."""


@dataclass(frozen=True)
class Published:
    """A measurement of others. `unexpressed`: why it cannot be said here, and then all below it are None.
    `not_modelled`: what its model has that no model here does.

    `layout` is without settings that have no effect. `refused`: rule and reason by which the layout is none here;
    `share` and `band` of its memory. `coefficients`: of its machine, by data sheet and as published. `step_time_s` is
    None where memory ran out.
    """

    row: str
    source: str
    group: str
    ran_out: bool
    step_time_s: float | None
    memory_gib: float | None
    memory_kind: str
    unexpressed: str | None = None
    layout: Layout | None = None
    work: Workload | None = None
    coefficients: Coefficients | None = None
    refused: tuple[str, str] | None = None
    not_modelled: str | None = None

    @property
    def timed(self) -> tuple[Observation, Coefficients] | None:
        """What it took, and the coefficients of its machine; None where it cannot be predicted."""
        if self.layout is None or self.work is None or self.coefficients is None or self.step_time_s is None:
            return None
        if self.refused is not None and not self.is_too_big:
            return None
        return Observation(self.layout, self.work, self.step_time_s, None), self.coefficients

    @property
    def is_too_big(self) -> bool:
        """Whether the memory model alone refuses it."""
        return self.refused is not None and self.refused[0] == "memory_fits"

    @property
    def memory_error(self) -> float | None:
        """Of the peak, relative to what was published."""
        if self.layout is None or self.work is None or self.memory_gib is None or self.timed is None:
            return None
        return memory.estimate(self.layout, self.work).peak_bytes / 2**30 / self.memory_gib - 1


def read(path: Path) -> list[Published]:
    """The rows of a table. Raises ValueError, which names the row, or OSError if it cannot be read."""
    with path.open(newline="", encoding="utf-8") as file:
        table = csv.DictReader(file)
        lacking = [name for name in COLUMNS if name not in (table.fieldnames or ())]
        if lacking:
            raise ValueError(f"{path}: no column {', '.join(lacking)}")
        found = []
        for number, row in enumerate(table, start=1):
            try:
                found.append(_published(row))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path}: row {number}: {error}") from None
    if not found:
        raise ValueError(f"{path}: no rows")
    return found


def _published(row: Mapping[str, str]) -> Published:
    def number(name: str) -> float | None:
        return float(row[name]) if row[name] else None

    seconds, ran_out = number("step_time_s"), row["status"] == "oom"
    if seconds is None and not ran_out:
        raise ValueError("no step_time_s, and status is not oom")
    facts = (row["id"], row["source"], row["group"], ran_out, seconds, number("memory_gib"), row["memory_kind"])
    if (reason := _unexpressed(row)) is not None:
        return Published(*facts, unexpressed=reason)
    work, coefficients = _machine(row)
    # Memory that is not known refuses nothing, so that the layout is settled up to its last axis.
    roomy = replace(work, accelerator=replace(work.accelerator, memory_gib=None))
    layout = canonical(_layout(row, work.shape.layers), roomy)
    lacking = NOT_MODELLED if row["model"] in WIDE_MODELS else None
    return Published(*facts, None, layout, work, coefficients, refusal(layout, work), lacking)


def _unexpressed(row: Mapping[str, str]) -> str | None:
    """Why a model, layout or machine cannot be said here: what the table says, an accelerator that is not known, and
    experts on more ranks than Wattune spreads them over."""
    parts = [part.strip() for part in row["unexpressed"].split(";")]
    known = row["model"] in WIDE_MODELS
    reasons = [part for part in parts if part and not part.startswith("accelerator ") and not (known and part == WIDE)]
    if data_sheet(row["gpu"]) is None:
        reasons.insert(0, f"accelerator {row['gpu']}")
    if not reasons and not known and row["family"] not in FAMILIES:
        reasons.append(f"models of the family {row['family'] or 'that the row does not name'}")
    if _spreads_further(row):
        reasons.append(SPREAD_FURTHER)
    return "; ".join(reasons) or None


def _spreads_further(row: Mapping[str, str]) -> bool:
    """Whether experts are on so many ranks that some of a tensor-parallel group must have others than the rest."""
    tensor, experts = int(row["tp"]), int(row["ep"])
    ranks = int(row["num_gpus"]) // (int(row["pp"]) * tensor)
    return experts > ranks and ranks * tensor % experts == 0


def _machine(row: Mapping[str, str]) -> tuple[Workload, Coefficients]:
    """What is trained, on which machine, and what is to be expected of that."""
    sheet, coefficients = ACCELERATORS[row["gpu"]], data_sheet(row["gpu"])
    assert coefficients is not None
    length, model = int(row["seq"]), WIDE_MODELS.get(row["model"])
    if model is None:
        sizes = {name: int(row[name]) for name in SIZES}
        model = ModelShape(row["family"], **sizes, max_sequence_length=length, tie_embeddings=row["tie"] == "1")
    gib, terabytes, watts, gigabytes = (
        float(row[name]) if row[name] else None
        for name in ("hw_memory_gib", "hw_memory_TBps", "hw_power_w", "hw_network_GBps")
    )
    coefficients = coefficients.stated(
        network_bytes_per_s=None if gigabytes is None else 1e9 * gigabytes, power_limit_w=watts
    )
    if terabytes is not None:
        coefficients = _with_memory(coefficients, sheet, 1e12 * terabytes)
    device = sheet if gib is None else replace(sheet, memory_gib=gib)
    work = Workload(model, length, int(row["gbs"]), device, gpus_per_node=int(row["gpus_per_node"]))
    return work, coefficients


def _with_memory(coefficients: Coefficients, sheet: Accelerator, bytes_per_s: float) -> Coefficients:
    """Of a device whose memory has another bandwidth than the data sheet's."""
    assert sheet.memory_bytes_per_s is not None
    ratio = bytes_per_s / sheet.memory_bytes_per_s
    return replace(
        coefficients,
        memory_bytes_per_s=ratio * coefficients.memory_bytes_per_s,
        eager_bytes_per_s=ratio * coefficients.eager_bytes_per_s,
        states_bytes_per_s=ratio * coefficients.states_bytes_per_s,
    )


def _engine(row: Mapping[str, str]) -> str:
    """llm-foundry's benchmarks sum gradients in bf16 in the tables of May 2023 alone, whose PyTorch was another (mixed
    precision PURE in `scripts/train/benchmarking/README.md`, commit 300cc5c, DEFAULT from commit b2a43a1 on). Those of
    torchtitan have their dates in the names of their files."""
    engine = FRAMEWORKS.get(row["framework"], "megatron")
    if engine == "composer" and row["reduce_precision"] == "bf16":
        return "composer-torch-1"
    return "torchtitan-2024" if engine == "torchtitan" and IN_2024 in (row.get("path") or "") else engine


def _layout(row: Mapping[str, str], layers: int) -> Layout:
    stages = int(row["pp"]) * int(row["vp"])
    given = tuple(map(int, row["stage_layers"].split("-"))) if row["stage_layers"] else None
    return Layout(
        engine=_engine(row),
        num_gpus=int(row["num_gpus"]),
        global_batch_size=int(row["gbs"]),
        micro_batch_size=_micro_batch_size(row),
        tensor_parallel_size=int(row["tp"]),
        pipeline_parallel_size=int(row["pp"]),
        virtual_pipeline_stages=int(row["vp"]),
        context_parallel_size=int(row["cp"]),
        expert_parallel_size=int(row["ep"]),
        zero_stage=int(row["zero"]),
        data_parallel_replicate_size=int(row["shard_copies"]),
        recompute=row["recompute"],
        precision=row["precision"],
        reduce_precision=row["reduce_precision"],
        sequence_parallel=row["seq_parallel"] == "1",
        async_tensor_parallel=row["async_tp"] == "1",
        compile=row["fused"] == "1",
        pipeline_schedule=row["schedule"],
        stage_layers=given if given or layers % stages == 0 else _even(layers, stages),
        overlap_grad_reduce=row["overlap_grad"] == "1",
        overlap_param_gather=row["overlap_param"] == "1",
    )


def _micro_batch_size(row: Mapping[str, str]) -> int:
    """torchtitan divides a rank's batch into as many microbatches as a pipeline has ranks unless it is told otherwise
    (`pipeline_parallel_microbatches` in `torchtitan/parallelisms/pipelining_utils.py`, commit 9dec370)."""
    given, ranks = int(row["mbs"]), int(row["pp"])
    if row["framework"] != "torchtitan" or ranks == 1 or not (row.get("notes") or "").startswith(NOT_SAID):
        return given
    local, left = divmod(int(row["gbs"]) * ranks * int(row["tp"]) * int(row["cp"]), int(row["num_gpus"]))
    return local // ranks if left == 0 and local % ranks == 0 else given


def _even(layers: int, stages: int) -> tuple[int, ...]:
    """Stages as even as can be, the larger ones in the middle."""
    each, left = divmod(layers, stages)
    before = (stages - left) // 2
    return tuple(each + (before <= stage < before + left) for stage in range(stages))


def by_source(rows: Iterable[Published]) -> dict[str, list[Published]]:
    """The rows of each source, in their order."""
    found: defaultdict[str, list[Published]] = defaultdict(list)
    for one in rows:
        found[one.source].append(one)
    return dict(found)


def by_source_and_precision(rows: Iterable[Published]) -> dict[str, list[Published]]:
    """The rows of each source, and then those of each of its precisions, where it has more than one."""
    found: dict[str, list[Published]] = {}
    for source, these in by_source(rows).items():
        found[source] = these
        precisions = dict.fromkeys(one.layout.precision for one in these if one.layout is not None)
        for precision in precisions if len(precisions) > 1 else ():
            alike = [one for one in these if one.layout is not None and one.layout.precision == precision]
            found[f"{source} {precision}"] = alike
    return found


def times(rows: Sequence[Published], seeds: int) -> str:
    """Errors in step time by source, and by its precisions if it has several: by data sheet, with one factor, and
    fitted."""
    lines = []
    for source, these in by_source_and_precision(rows).items():
        timed = [one.timed for one in these if one.timed is not None]
        if not timed:
            continue
        slower = [ratios(observed, sheet)[0] for observed, sheet in timed]
        middle = statistics.median(slower)
        errors, scaled = [abs(ratio - 1) for ratio in slower], [abs(ratio / middle - 1) for ratio in slower]
        line = [source, str(len(timed)), f"{statistics.mean(errors):.1%}", f"{max(errors):.1%}", f"{middle - 1:+.1%}"]
        line.append(f"{statistics.mean(scaled):.1%}")
        held_out = _fitted(timed, seeds)
        lines.append([*line, f"{statistics.mean(held_out):.1%}" if held_out else ""])
    headings = ["step time", "layouts", "data sheet", "largest", "median, signed", "one factor", f"fitted to {COUNT}"]
    return render(headings, lines)


def _fitted(timed: Sequence[tuple[Observation, Coefficients]], seeds: int) -> list[float]:
    """Errors on what a fit was not made of; none where a source has too few layouts.

    Each accelerator has coefficients of its own, as `wattune calibrate` keeps them: fitted to its own of the layouts
    drawn, or to all of them where none is of it.
    """
    if len(timed) <= COUNT:
        return []
    errors = []
    for seed in range(seeds):
        drawn = random.Random(seed).sample(range(len(timed)), COUNT)
        known = defaultdict(list)
        for index in drawn:
            known[timed[index][0].work.accelerator].append(timed[index])
        by = {accelerator: shifts(its) for accelerator, its in known.items()}
        others = [pair for index, pair in enumerate(timed) if index not in drawn]
        if any(observed.work.accelerator not in by for observed, _ in others):
            in_common = shifts([timed[index] for index in drawn])
        for observed, sheet in others:
            own = by.get(observed.work.accelerator)
            errors.append(abs(ratios(observed, shifted(sheet, in_common if own is None else own))[0] - 1))
    return errors


def orders(rows: Sequence[Published]) -> str:
    """Rank correlation, and what the foretold best loses, within each group of several layouts that are not all alike,
    and on average."""
    lines, correlations, losses = [], [], []
    for source, these in by_source(rows).items():
        groups: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        for one in these:
            if one.timed is not None:
                observed, sheet = one.timed
                foretold = predict(observed.layout, observed.work, sheet).step_time_s
                groups[one.group].append((foretold, observed.step_time_s))
        for group, pairs in groups.items():
            if len(pairs) < FEWEST or any(len(set(side)) == 1 for side in zip(*pairs, strict=True)):
                continue
            correlation = float(spearmanr(*zip(*pairs, strict=True)).statistic)
            loss = min(pairs)[1] / min(measured for _, measured in pairs) - 1
            lines.append([source, group, str(len(pairs)), f"{correlation:.2f}", f"{loss:.1%}"])
            correlations.append(correlation)
            losses.append(loss)
    if not lines:
        return f"No group has {FEWEST} layouts or more."
    means = ["mean", "", "", f"{statistics.mean(correlations):.2f}", f"{statistics.mean(losses):.1%}"]
    return render(["order", "model and cluster", "layouts", "rank correlation", "loss of the best"], [*lines, means])


def peaks(rows: Sequence[Published]) -> str:
    """Errors in peak memory by source and by what was published of it."""
    errors: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for one in rows:
        if one.memory_error is not None:
            errors[one.source, one.memory_kind].append(one.memory_error)
    lines = []
    for key, each in errors.items():
        off = [abs(error) for error in each]
        row = [*key, str(len(each)), f"{statistics.mean(off):.1%}", f"{max(off):.1%}"]
        lines.append([*row, f"{statistics.median(each):+.1%}"])
    return render(["memory", "published", "layouts", "mean error", "largest", "median, signed"], lines)


def refusals(rows: Sequence[Published]) -> str:
    """Layouts that ran and are refused, by source and rule, and those that ran out of memory by band."""
    ran = [one for one in rows if one.layout is not None and not one.ran_out]
    wrong = Counter((one.source, one.refused[0]) for one in ran if one.refused is not None)
    example = {(one.source, one.refused[0]): f"{one.row}: {one.refused[1]}" for one in ran if one.refused is not None}
    lines = [[*key, str(count), example[key]] for key, count in wrong.items()]
    parts = [f"{wrong.total()} of {len(ran)} layouts that ran are refused."]
    parts += [render(["source", "refused by", "layouts", "for example"], lines)] if lines else []
    bands = Counter(
        memory.band(one.layout, one.work) for one in rows if one.ran_out and one.layout and one.work is not None
    )
    if bands:
        parts.append("ran out of memory: " + ", ".join(f"{count} {band}" for band, count in bands.items()))
    return "\n".join(parts)


def unexpressed(rows: Sequence[Published]) -> str:
    """What cannot be said here, by source and reason."""
    counts = Counter((one.source, one.unexpressed) for one in rows if one.unexpressed is not None)
    lines = [[source, str(count), reason or ""] for (source, reason), count in counts.items()]
    return render(["source", "layouts", "cannot be expressed"], lines) if lines else "All can be expressed."


def not_modelled(rows: Sequence[Published]) -> str:
    """What the models of some layouts have besides, by source."""
    counts = Counter((one.source, one.not_modelled) for one in rows if one.not_modelled is not None)
    lines = [[source, str(count), lacking or ""] for (source, lacking), count in counts.items()]
    return render(["source", "layouts", "not modelled"], lines) if lines else "Nothing of the models is left out."


def listing(rows: Sequence[Published]) -> str:
    """One row a layout that is predicted."""
    lines = []
    for one in rows:
        if one.timed is None or one.work is None:
            continue
        observed, sheet = one.timed
        foretold = predict(observed.layout, observed.work, sheet)
        parts = sorted(foretold.parts.items(), key=lambda part: -part[1])[:5]
        share = memory.estimate(observed.layout, observed.work).share
        lines.append(
            [
                one.row,
                observed.layout.label,
                str(observed.layout.gradient_accumulation_steps),
                f"{observed.step_time_s:.3f}",
                f"{foretold.step_time_s:.3f}",
                f"{foretold.step_time_s / observed.step_time_s - 1:+.1%}",
                "" if share is None else f"{share:.0%}",
                "" if one.memory_error is None else f"{one.memory_error:+.1%}",
                ", ".join(f"{name} {seconds / foretold.step_time_s:.0%}" for name, seconds in parts),
            ]
        )
    return render(["row", "layout", "microbatches", "s", "predicted", "error", "share", "memory error", "most"], lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--seeds", type=int, default=5, help="draws of the layouts that coefficients are fitted to")
    parser.add_argument("--rows", action="store_true", help="print every layout, too")
    arguments = parser.parse_args(argv)
    try:
        rows = read(arguments.table)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        parser.error(" ".join(str(error).split()))
    parts = [listing(rows)] if arguments.rows else []
    parts += [times(rows, arguments.seeds), orders(rows), peaks(rows), refusals(rows)]
    parts += [unexpressed(rows), not_modelled(rows)]
    print("\n\n".join(parts))


if __name__ == "__main__":
    main()
