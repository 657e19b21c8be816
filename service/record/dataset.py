"""What a search trains on, as MLflow has datasets: in the table of runs, to filter by, and on the page of each run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from service.problem import Problem
from trainables.data import SYNTHETIC, DataError, TokenStream, open_tokens

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
    except DataError:
        return None
    from mlflow.entities import Dataset, DatasetInput, InputTag

    known = {"vocabulary": problem.shape.vocab, "sequence_length": problem.sequence_length}
    if problem.data == SYNTHETIC:
        name, source = SYNTHETIC, ("code", {"tags": {"mlflow.source.name": "trainables.data"}})
    else:
        name, source = _name(stream), ("local", {"uri": problem.data})
        known = {"tokens": len(stream)} | known
    kind, place = source
    made = Dataset(name, stream.digest(), kind, json.dumps(place), _schema(problem), json.dumps(known))
    return DatasetInput(made, [InputTag(CONTEXT, "training")])


def _name(stream: TokenStream) -> str:
    return stream.source.rstrip("/").rpartition("/")[2]


def _schema(problem: Problem) -> str:
    """A sample, as MLflow writes tensors: tokens, and those that follow them as targets."""
    spec = [{"type": "tensor", "tensor-spec": {"dtype": "int64", "shape": [-1, problem.sequence_length]}}]
    return json.dumps({"mlflow_tensorspec": {"features": json.dumps(spec), "targets": json.dumps(spec)}})
