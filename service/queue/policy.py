"""What a cluster's operator sets for all searches on it: a YAML file, named by `WATTUNE_POLICY` where Ray starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from service.errors import InputError
from service.reading import Amount, AmountOrZero, Strict, Switch, read_yaml
from trainables.bounds import is_place

VARIABLE = "WATTUNE_POLICY"
DEFAULT = "default"
"""Whose quota that of all users is who are not named."""


@dataclass(frozen=True)
class Policy:
    """How searches share a cluster.

    `slice_s`: how long a search keeps a gang for which others of its priority wait. `exclusive`: whether a node is one
    search's at a time. `gpu_hours`: what each user may have, by name or `DEFAULT`, without a bound where neither is
    named; of the last `period_days`, of all times if that is None. `data`: the places below which data may lie, as
    `trainables.bounds` compares them; None without a bound.
    """

    slice_s: float = 600.0
    exclusive: bool = True
    gpu_hours: Mapping[str, float] = field(default_factory=dict)
    period_days: float | None = None
    data: tuple[str, ...] | None = None

    def quota(self, user: str) -> float | None:
        """GPU-hours that a user may have; None without a bound."""
        return self.gpu_hours.get(user, self.gpu_hours.get(DEFAULT))


class _Quota(Strict):
    gpu_hours: Annotated[dict[str, AmountOrZero], Field(min_length=1)]
    period_days: Amount | None = None


def _listed(value: Any) -> Any:
    """A list all of whose entries were taken out is no word for no bound."""
    if value is None:
        raise ValueError("must be a list, [] for synthetic data alone")
    return value


def _place(text: str) -> str:
    if not is_place(text):
        raise ValueError(f"must be an absolute path, or the beginning of a URI without a password (given: {text!r})")
    return text


class _File(Strict):
    slice_minutes: Amount = Policy.slice_s / 60
    exclusive: Switch = Policy.exclusive
    quota: _Quota | None = None
    data: Annotated[list[Annotated[str, AfterValidator(_place)]] | None, BeforeValidator(_listed)] = None


def read_policy() -> Policy:
    """The policy of the file that `WATTUNE_POLICY` names, the default one where it names none.

    Raises `InputError` for a file that cannot be read or says what it cannot mean.
    """
    if not (name := os.environ.get(VARIABLE)):
        return Policy()
    try:
        fields = read_yaml(Path(name).expanduser().read_text(encoding="utf-8"))
        if not isinstance(fields, dict):
            raise InputError(f"{VARIABLE}: {name}: must be a mapping with the fields {', '.join(_File.model_fields)}")
        file = _File.model_validate(fields)
    except OSError as error:
        raise InputError(f"{VARIABLE}: {name} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        detail = error.errors()[0]
        where = ".".join(str(part) for part in detail["loc"])
        said = "unknown field" if detail["type"] == "extra_forbidden" else detail["msg"].removeprefix("Value error, ")
        raise InputError(f"{VARIABLE}: {name}: {where}: {said.replace('Input should', 'must')}") from None
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{VARIABLE}: {name}: {error}") from None
    quota = file.quota
    return Policy(
        slice_s=60 * file.slice_minutes,
        exclusive=file.exclusive,
        gpu_hours={} if quota is None else quota.gpu_hours,
        period_days=None if quota is None else quota.period_days,
        data=None if file.data is None else tuple(file.data),
    )
