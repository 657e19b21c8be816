"""The engine that a layout names."""

from __future__ import annotations

from trainables.engines.base import Engine, Job


def build_engine(job: Job) -> Engine:
    """Lay the model out over the ranks of the default process group. Collective."""
    if job.layout.engine == "megatron":
        from trainables.engines.megatron.engine import MegatronEngine

        return MegatronEngine(job)
    from trainables.engines.deepspeed.engine import DeepSpeedEngine

    return DeepSpeedEngine(job)
