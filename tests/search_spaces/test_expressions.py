"""The language of rules and templates: it agrees with Python where both have an answer, and refuses all else by its own
error."""

from __future__ import annotations

import pickle
import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_spaces.expressions import DEEPEST, LARGEST, LONGEST, ExpressionError, Value, parse

NAMES: dict[str, Value] = {
    "heads": 6,
    "tensor_parallel_size": 4,
    "share": 0.25,
    "attention": "flash",
    "compile": True,
    "nothing": None,
}


def evaluated(text: str) -> Value:
    return parse(text).value(NAMES)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("heads % tensor_parallel_size == 0", False),
        ("heads // tensor_parallel_size * 3 - -1", 4),
        ("heads / tensor_parallel_size", 1.5),
        ("1 <= tensor_parallel_size < heads", True),
        ("attention in ['flash', 'sdpa'] and not compile", False),
        ("attention not in ('flash',)", False),
        ("'--' + attention", "--flash"),
        ("'flash' if attention == 'flash' and compile else None", "flash"),
        ("min(heads, tensor_parallel_size, 5) + max(0.5, share)", 4.5),
        ("nothing == None", True),
        ("heads == 6.0", True),
        ("compile or unknown", True),
        (" heads ", 6),
    ],
)
def test_it_is_python_s_arithmetic(text: str, value: Value) -> None:
    assert evaluated(text) == value
    assert type(evaluated(text)) is type(value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is empty"),
        ("heads %", "invalid syntax"),
        ("heads\n+ 1", "invalid syntax"),
        ("2 ** 9 ** 9", "is not let in; there are numbers"),
        ("1 << 9", "not let in"),
        ("attention.upper()", "'attention.upper\\(\\)' is not let in"),
        ("().__class__", "not let in"),
        ("attention[0]", "not let in"),
        ("__import__('os')", "not let in"),
        ("min(heads)", "min takes two or more"),
        ("min(1, *[1, 2])", "'\\*\\[1, 2\\]' is not let in"),
        ("max(1, 2, key=abs)", "not let in"),
        ("[heads for heads in [1]]", "not let in"),
        ("lambda: 1", "not let in"),
        ("(heads := 3)", "not let in"),
        ("f'{heads}'", "not let in"),
        ("b'x'", "not let in"),
        ("1j", "not let in"),
        ("...", "not let in"),
        ("~heads", "not let in"),
        ("heads is None", "compare with =="),
        ("attention in 'flash'", "takes a list"),
        ("heads in [1] == compile", "put `and` between"),
        ("ü.x + 1", "'ü.x' is not let in"),
        ("'%s' % heads", "'%s' is a text, not a number"),
        ("'ab' * 3", "is a text, not a number"),
        ("compile + 1", "True is true or false, not a number"),
        ("-attention", "not a number"),
        ("min(heads, attention)", "not a number"),
        ("heads and compile", "6 is a number, not true or false"),
        ("not attention", "not true or false"),
        ("1 if heads else 2", "not true or false"),
        ("attention == 3", "'flash' is a text and 3 a number: they are never equal"),
        ("attention in ['flash', 3]", "never equal"),
        ("compile == 1", "never equal"),
        ("attention < 3", "not a number"),
        ("heads > None", "not a number"),
        ("tensor_paralel_size", "unknown name 'tensor_paralel_size'"),
        ("heads // (heads - 6)", "division by zero"),
        ("1.0 % 0", "division by zero"),
        ("1000000000 * 1000000000 * 2", "numbers are at most 1e\\+18"),
        ("1e999", "numbers are at most"),
        ("9" * 60, "numbers are at most"),
        ("1" + "0" * LONGEST, "at most 500 characters, not 501"),
        ("not " * (DEEPEST + 1) + "compile", "operations lie within each other"),
        ("(" * 240 + "1" + ")" * 240, "too many nested"),
        ("\0", "cannot be read|null"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(text: str, reason: str) -> None:
    with pytest.raises(ExpressionError, match=reason) as refused:
        evaluated(text)
    assert "\n" not in str(refused.value)


def test_a_check_works_out_what_python_would_leave_out() -> None:
    for text in ("compile or missing", "1 if compile else missing", "heads < 1 < missing", "not compile and missing"):
        with pytest.raises(ExpressionError, match="unknown name 'missing'"):
            parse(text).check(NAMES)
    assert parse("heads // (heads - 6)").check(NAMES) == 6


def test_names_and_holding() -> None:
    expression = parse("heads % tensor_parallel_size == 0 and attention in ['flash', x]")
    assert expression.names == {"heads", "tensor_parallel_size", "attention", "x"}
    assert not expression.holds(NAMES)
    with pytest.raises(ExpressionError, match="6 is a number, not true or false"):
        parse("heads").holds(NAMES)
    assert pickle.loads(pickle.dumps(expression)) == expression


numbers = st.integers(-1000, 1000) | st.floats(-1000, 1000, allow_subnormal=False).filter(lambda x: abs(x) > 1e-6)
arithmetic = st.recursive(
    numbers.map(repr) | st.sampled_from(["heads", "tensor_parallel_size", "share"]),
    lambda inner: (
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/", "//", "%"]), inner).map(" ".join).map("({})".format)
        | inner.map("-({})".format)
        | st.tuples(inner, inner).map(lambda two: f"min({two[0]}, {two[1]})")
        | st.tuples(inner, inner, inner, inner).map(lambda f: f"({f[0]} if {f[1]} <= {f[2]} else {f[3]})")
    ),
    max_leaves=8,
)


@given(arithmetic)
def test_it_agrees_with_python(text: str) -> None:
    try:
        value = evaluated(text)
    except ExpressionError as error:
        reason = str(error)
        if "division by zero" in reason:
            with pytest.raises(ZeroDivisionError):
                eval(text, {}, dict(NAMES))
        else:
            assert reason.startswith(("numbers are at most", "an expression has at most"))
        return
    expected: Any = eval(text, {}, dict(NAMES))
    assert value == expected
    assert type(value) is type(expected)
    assert isinstance(value, int | float)
    assert abs(value) <= LARGEST


WORDS = """+ - * / // % ** == != < <= > >= ( ) [ ] , . : = 0 1 2.5 'a' " and or not in is if else lambda for min max
await yield None True f'{x}' { } \\ heads attention compile nothing"""
words = st.sampled_from(WORDS.split())


@given(st.lists(words, max_size=20).map(" ".join) | st.text(max_size=30) | st.text(string.printable, max_size=60))
def test_any_text_has_a_plain_value_or_is_refused(text: str) -> None:
    for work in (lambda: evaluated(text), lambda: parse(text).check(NAMES)):
        try:
            value = work()
        except ExpressionError as error:
            value = str(error)
            assert "\n" not in value
        assert value is None or isinstance(value, bool | int | float | str)
