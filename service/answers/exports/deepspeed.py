"""DeepSpeed's JSON configuration of a layout of the `deepspeed` engine: the one that its trials run with."""

from __future__ import annotations

from service.answers.exports import Export
from trainables.engines.deepspeed.configuration import configuration, not_expressible

EXPORT = Export(("deepspeed",), "deepspeed", configuration, not_expressible)
