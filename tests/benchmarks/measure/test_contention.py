"""What can be tried of it without GPUs: that two ranks come through with the same counts, and what it needs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore
from torch.multiprocessing.spawn import spawn

from benchmarks.measure import drawn
from benchmarks.measure.contention import Bench, Contention, main, table
from search_spaces.network import Collective
from trainables.platforms.cpu import PLATFORM as CPU

SIZE = 2**16


def measure(rank: int, folder: Path) -> None:
    dist.init_process_group(CPU.backend, store=FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    bench = Bench(CPU, CPU.take(rank), SIZE, round_s=0.02)
    bench.heat(0.02)
    found = [bench.measure(kind, SIZE, rounds=3) for kind in (Collective.ALL_REDUCE, Collective.ALL_GATHER)]
    assert bench.agreed(rank + 3.5) == 4
    torch.save([(one.kind.value, one.size, one.seconds, one.paced) for one in found], folder / f"{rank}")
    dist.destroy_process_group(bench.real)


@pytest.mark.slow
def test_two_ranks_measure_by_the_same_counts(tmp_path: Path) -> None:
    spawn(measure, (tmp_path,), nprocs=2)
    of_first, of_second = (torch.load(tmp_path / f"{rank}") for rank in range(2))
    assert [found[:3] for found in of_first] == [found[:3] for found in of_second]
    for (kind, size, seconds, paced), expected in zip(of_first, ("all_reduce", "all_gather"), strict=True):
        assert (kind, size) == (expected, SIZE)
        assert seconds > 0
        assert paced > 0.99, "the stand-in takes no less than the other did"


def test_a_row_is_a_kind_and_a_size() -> None:
    row = table([Contention(Collective.ALL_REDUCE, 32 * 2**20, 0.0015, 0.55, 0.512, 1.004, 40e-6, 61e-6)]).splitlines()[
        -1
    ]
    assert row.split() == ["all_reduce", "of", "32", "MiB", "1.500", "0.55", "0.51", "1.00", "40", "61"]


@pytest.mark.parametrize("main", [main, drawn.main])
@pytest.mark.skipif(torch.cuda.device_count() >= 2, reason="there are GPUs")
def test_a_machine_without_gpus_is_told_in_one_line(
    main: Callable[[list[str]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
