"""Ways to train a layout; each in a module of its own, imported only where it is used."""

from __future__ import annotations

from trainables.engines.base import Engine, Job


def build_engine(job: Job) -> Engine:
    """Lay the model out over the ranks of the default process group. Collective."""
    if job.config.engine == "megatron":
        from trainables.engines.megatron import MegatronEngine

        return MegatronEngine(job)
    from trainables.engines.deepspeed import DeepSpeedEngine

    return DeepSpeedEngine(job)
