"""The callbacks of the hook, in the trainers of those libraries where these are installed."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.trainables.conftest import RunRanks
from tests.trainables.test_command import COMMAND, request
from trainables.command import TRIAL_DIR
from trainables.foreign.steps import HOOK


# Transformers' Trainer is searched in tests/service/test_trainer_searches.py.
@pytest.mark.parametrize("library", [pytest.param("transformers", marks=pytest.mark.slow), "lightning"])
def test_a_trainer_with_the_callback_is_measured(library: str, run_ranks: RunRanks) -> None:
    pytest.importorskip(library)
    program = {"transformers": "huggingface_program.py", "lightning": "lightning_program.py"}[library]
    arguments = ("python", str(Path(__file__).parent / program), TRIAL_DIR)
    (outcome,) = run_ranks(
        replace(request(library, ranks=1), program=replace(COMMAND, arguments=arguments), deadline_s=240)
    )
    assert (outcome.status, outcome.cause) == ("ok", None)
    assert outcome.report is not None
    timing = outcome.report.timings[8]
    # A step has two microbatches, and a loss; the last one's is logged after it.
    steps = len(timing.warmup_steps_s) + len(timing.window_steps_s)
    assert steps - 1 <= len(outcome.report.losses) <= steps


@pytest.mark.parametrize("name", ["wattune_huggingface", "wattune_lightning"])
def test_a_callback_can_be_imported_where_its_library_is_not(name: str) -> None:
    libraries = ["transformers", "lightning", "pytorch_lightning"]
    program = f"import sys; sys.modules.update(dict.fromkeys({libraries})); import {name}"
    subprocess.run([sys.executable, "-c", program], cwd=HOOK, check=True)
