"""What a search trains on, as MLflow has datasets: in the table of runs, to filter by, and on the page of each run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from service.problem import Problem
from trainables.data import SYNTHETIC, DataError, open_tokens

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput

CONTEXT = "mlflow.data.context"


def dataset(problem: Problem) -> DatasetInput | None:
    """The tokens of a problem, with a digest by which they are told apart wherever they lie.

    None where there are none, where they are not in reach, and where what a trainer reads is not tokens.
    """
    if problem.data is None or problem.shape is None:
        return None
    try:
        stream = open_tokens(problem.data, problem.shape.vocab)
        digest = stream.digest()
    except (DataError, OSError):
        return None
    from mlflow.entities import Dataset, DatasetInput, InputTag

    known = {"vocabulary": problem.shape.vocab, "sequence_length": problem.sequence_length}
    if problem.data == SYNTHETIC:
        place, kind = json.dumps({"tags": {"mlflow.source.name": "trainables.data"}}), "code"
    else:
        place, kind = json.dumps({"uri": problem.data}), urlsplit(problem.data).scheme or "local"
        known = {"tokens": len(stream)} | known
    name = stream.source.rpartition("/")[2]
    made = Dataset(name, digest, kind, place, _schema(problem), json.dumps(known))
    return DatasetInput(made, [InputTag(CONTEXT, "training")])


def _schema(problem: Problem) -> str:
    """A sample, as MLflow writes tensors: tokens, and those that follow them as targets."""
    spec = [{"type": "tensor", "tensor-spec": {"dtype": "int64", "shape": [-1, problem.sequence_length]}}]
    return json.dumps({"mlflow_tensorspec": {"features": json.dumps(spec), "targets": json.dumps(spec)}})
