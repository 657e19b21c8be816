"""What kernels take alone, on one GPU; without one it says so."""

from __future__ import annotations

import pytest
import torch

from benchmarks.measure import kernels


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("what", kernels.TABLES)
def test_says_that_it_takes_a_gpu(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        kernels.main([what])
    assert exited.value.code == 2
    assert "takes a GPU of NVIDIA's" in capsys.readouterr().err
