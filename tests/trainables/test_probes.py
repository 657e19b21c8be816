"""What devices attain is measured by processes that end in any case."""

from __future__ import annotations

import pytest
import torch

from trainables.probes import probe, rounds


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
def test_each_pair_meets_once_and_nobody_twice_at_a_time(ranks: int) -> None:
    met = []
    for pairs in rounds(ranks):
        at_once = [rank for pair in pairs for rank in pair]
        assert len(at_once) == len(set(at_once))
        met += pairs
    assert sorted(met) == [(one, other) for one in range(ranks) for other in range(one + 1, ranks)]


@pytest.mark.slow
def test_two_ranks_measure_themselves_and_their_link() -> None:
    probed = probe("cpu", 2)
    assert probed.errors == (None, None)
    for rank, one in enumerate(probed.attained):
        assert one is not None
        assert one.device is None
        assert 1e8 < one.flops < 1e14
        assert 1e8 < one.memory_bytes_per_s < 1e13
        assert 1e-8 < one.launch_s < 1e-2
        assert one.end_ns > one.start_ns
        assert one.all_reduce_bytes_per_s is not None
        assert one.all_reduce_bytes_per_s > 1e6
        assert one.pairs is not None
        assert list(one.pairs) == [str(1 - rank)]
        assert one.pairs[str(1 - rank)] > 1e6


@pytest.mark.slow
def test_a_device_that_is_not_there_is_an_error_in_a_line() -> None:
    probed = probe("cuda", 1, {"CUDA_VISIBLE_DEVICES": ""})
    assert probed.attained == (None,)
    assert probed.errors[0]
    assert "\n" not in probed.errors[0]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="takes a GPU")
def test_gpus_measure_themselves_and_each_other() -> None:
    count = torch.cuda.device_count()
    probed = probe("cuda", count)
    assert probed.errors == (None,) * count
    devices = [one.device for one in probed.attained if one is not None]
    assert devices == [f"GPU-{torch.cuda.get_device_properties(number).uuid}" for number in range(count)]
    for one in probed.attained:
        assert one is not None
        assert 1e13 < one.flops < 1e16
        assert 1e11 < one.memory_bytes_per_s < 1e14
        assert one.end_ns - one.start_ns == pytest.approx(8e9, rel=0.1)
        assert (one.all_reduce_bytes_per_s is None) is (count == 1)
        if one.pairs is not None:
            assert set(one.pairs) == set(devices) - {one.device}
            assert min(one.pairs.values()) > 1e9
