"""What the CPU takes for blocks, by mode."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.measure.launches import launches_of, main, usual_ms
from service.spec import load_spec

SPECS = Path(__file__).parents[3] / "benchmarks" / "specs"

SPEC = """
model: {family: gpt, layers: 2, hidden: 64, heads: 4, ffn_hidden: 128, vocab: 128, max_sequence_length: 64}
sequence_length: 64
global_batch_size: 4
cluster: {gpus_per_node: 2, accelerator: cpu}
space: {engine: megatron, num_gpus: [1, 2], zero_stage: [0, 2], compile: false, precision: fp32}
"""


def test_each_mode_is_there_once_and_those_of_several_ranks_take_more() -> None:
    launches = launches_of([load_spec(SPECS / f"launches_{name}_cpu.yaml").located() for name in ("gpt", "moe")])
    assert len(set(launches)) == len(launches)
    modes = {mode for launch in launches for mode in launch.form[3:]}
    assert modes == {"tensor", "sequence", "context", "experts", "reduces", "gathers"}
    of_one = {launch for launch in launches if not launch.form[3:]}
    assert len(of_one) == 2 * 2 * 2, "engines, models, eager and compiled"
    for launch in set(launches) - of_one:
        of_ranks = usual_ms(launch) - usual_ms(launch._replace(form=launch.form[:3]))
        assert of_ranks >= 0
        assert of_ranks or launch.form[3:4] == ("tensor",)


@pytest.mark.slow
def test_a_row_a_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC)
    monkeypatch.setattr("sys.argv", ["launches", str(tmp_path / "spec.yaml")])
    main()
    rows = re.findall(
        r"launch megatron gpt none( reduces)? fp32 +([\d.]+) +([\d.]+) +([\d.]+)$", capfd.readouterr().out, re.M
    )
    assert [row[0] for row in rows] == ["", " reduces"]
    for _, ms, said, ratio in rows:
        assert float(ratio) == pytest.approx(float(ms) / float(said), rel=0.1)
