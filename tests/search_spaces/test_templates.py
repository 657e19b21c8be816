"""What templates come to: an argument stays one argument, and a whole expression keeps its type."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_spaces.expressions import Expression, ExpressionError, Value
from search_spaces.templates import fill, fill_data

NAMES: dict[str, Value] = {
    "size": 4,
    "batch": 48,
    "compile": True,
    "rate": 1e-5,
    "text": "a b; {size} $HOME",
    "nothing": None,
}


@pytest.mark.parametrize(
    ("template", "value"),
    [
        ("", ""),
        ("plain", "plain"),
        ("--tp={size}", "--tp=4"),
        ("{size}", 4),
        ("{ batch // (2 * size) }", 6),
        ("{batch // size}x{size}", "12x4"),
        ("{compile}", True),
        ("compile={compile}", "compile=true"),
        ("{rate}", 1e-5),
        ("lr {rate}", "lr 1e-05"),
        ("{nothing}", None),
        ("{'--fp8' if size > 8 else None}", None),
        ("{text}", "a b; {size} $HOME"),
        ("<{text}>", "<a b; {size} $HOME>"),
        ('{{"size": {size}}}', '{"size": 4}'),
        ("{{size}}", "{size}"),
    ],
)
def test_what_templates_come_to(template: str, value: Value) -> None:
    assert fill(template, NAMES) == value
    assert type(fill(template, NAMES)) is type(value)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{sizes}", "'{sizes}': unknown name 'sizes'"),
        ("a{", "'a{': '{' stands alone; write it twice"),
        ("a}b", "'}' stands alone"),
        ("{{size}", "'}' stands alone"),
        ("{}", "'{}': the expression is empty"),
        ("{size +}", "invalid syntax"),
        ("{size}{nothing}", "None can only stand alone"),
        ("{size // 0}", "division by zero"),
        ("{open('x')}", "not let in"),
    ],
)
def test_what_is_wrong_with_a_template(template: str, reason: str) -> None:
    with pytest.raises(ExpressionError, match=reason):
        fill(template, NAMES)


def test_nested_data_keep_their_types() -> None:
    data = {"training": {"steps": 10, "batch": "{batch}", "on": [True, None, "{compile}", "x{size}"]}, "n": "{nothing}"}
    assert fill_data(data, NAMES) == {
        "training": {"steps": 10, "batch": 48, "on": [True, None, True, "x4"]},
        "n": None,
    }
    with pytest.raises(ExpressionError, match="unknown name 'x'"):
        fill_data({"a": [{"b": "{x}"}]}, NAMES)
    assert fill_data({"a": "{batch // (size - 4)}"}, NAMES, Expression.check) == {"a": 48}


@given(st.text())
def test_braces_that_are_written_twice_are_plain(text: str) -> None:
    assert fill(text.replace("{", "{{").replace("}", "}}"), {}) == text


@given(st.text(alphabet="{}size + 'x\\\""))
def test_any_text_is_filled_or_refused(text: str) -> None:
    try:
        value: Any = fill(text, NAMES)
    except ExpressionError as error:
        value = str(error)
        assert "\n" not in value
    assert isinstance(value, str | int)
