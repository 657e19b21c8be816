"""The values of a layout's axes as specs have them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model
from pydantic_core import PydanticKnownError

from search_spaces.axis import Axis, Range
from search_spaces.engines import ENGINES
from search_spaces.layout import AXES
from service.reading import LARGEST

AUTO = "auto"
"""What the search finds a value for by itself."""


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


def _as_list_of_lists(value: Any) -> Any:
    flat = isinstance(value, list) and value and all(isinstance(item, int) for item in value)
    return [value] if flat or not isinstance(value, list) else value


def _known(name: Any) -> Any:
    if isinstance(name, str) and name in ENGINES:
        return name
    *others, last = map(repr, ENGINES)
    raise PydanticKnownError("literal_error", {"expected": f"{', '.join(others)} or {last}"})


def _value_of(axis: Axis) -> Any:
    """The type of one value of an axis; of one whose values are lists, of a number in them."""
    if axis.name == "engine":
        return Annotated[str, BeforeValidator(_known)]
    if isinstance(axis.allowed, Range):
        number = Annotated[int, Field(strict=True, ge=axis.allowed.low, le=axis.allowed.high or LARGEST)]
        return number | None if axis.optional else number
    return Annotated[axis.type, Field(strict=True)] if axis.allowed is None else Literal[axis.allowed]


def _list_of(item: Any) -> Any:
    """A non-empty list, for which a single value may stand."""
    return Annotated[list[item], BeforeValidator(_as_list), Field(min_length=1)]


def _list_of_lists(item: Any) -> Any:
    """A non-empty list of lists, `auto`, or null for the default; a single one of them may stand for it."""
    numbers = Annotated[tuple[item, ...], Field(min_length=1, strict=False)]
    return Annotated[list[numbers | Literal["auto"] | None], BeforeValidator(_as_list_of_lists), Field(min_length=1)]


def _field_of(axis: Axis) -> tuple[Any, Any]:
    """Type and default of the field with the values of an axis."""
    item = _value_of(axis)
    if axis.lists:
        return _list_of_lists(item), [axis.default]
    if axis.default is None and not axis.optional:
        return _list_of(item) | None, None
    return _list_of(item), [axis.default]


class _Open(BaseModel):
    """Also takes what is no axis of Wattune's: whoever reads it knows whether a trainer has an axis of its own."""

    model_config = ConfigDict(extra="allow", frozen=True)


if TYPE_CHECKING:

    class SpaceSpec(_Open):
        """The values to try of each axis of a layout; see `search_spaces.layout.AXES`."""
else:
    SpaceSpec = create_model(
        "SpaceSpec",
        __base__=_Open,
        __doc__="The values to try of each axis of a layout; see `search_spaces.layout.AXES`.",
        __module__=__name__,
        **{name: _field_of(axis) for name, axis in AXES.items()},
    )
