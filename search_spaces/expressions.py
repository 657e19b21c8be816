"""A language of small expressions, such as ``heads % tensor_parallel_size == 0``: Python's own, less what can do harm.

Python's parser reads them and an interpreter of a few kinds of nodes works them out: numbers, texts, `True`, `False`,
`None`, names, `+ - * // / %`, comparisons, `in` a list, `and`, `or`, `not`, `X if C else Y`, `min`, `max`, and `round`
to a whole number. Nothing else is let in: no attributes, subscripts, powers or other calls. Texts, depth and numbers
are bounded, so that no expression takes longer to work out than to read. Unlike in Python, what is neither true nor
false decides nothing, switches are no numbers, and values of different kinds cannot be compared: each is a mistake.
"""

from __future__ import annotations

import ast
import math
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

Value = int | float | str | bool | None

LONGEST = 500
"""Characters of an expression, and of a text that it comes to."""

DEEPEST = 32
"""Operations within each other."""

LARGEST = 10**18
"""Of numbers, by their magnitude."""


class ExpressionError(ValueError):
    """What is wrong with an expression, in one line."""


@dataclass(frozen=True)
class Expression:
    """An expression that was read by `parse`; `text` is what it was read from."""

    text: str

    @cached_property
    def _tree(self) -> ast.expr:
        return _parsed(self.text)

    @cached_property
    def names(self) -> frozenset[str]:
        """Names that it takes the values of."""
        return frozenset(_names(self._tree))

    def value(self, names: Mapping[str, Value]) -> Value:
        """What it comes to where `names` are the values of names. Raises `ExpressionError`."""
        return self._worked_out(names, every=False)

    def check(self, names: Mapping[str, Value]) -> Value:
        """As `value`, but works out what a condition leaves out as well, and takes a division by zero for one by one.

        So any value of the right type shows whether names and types are right. Raises `ExpressionError`.
        """
        return self._worked_out(names, every=True)

    def holds(self, names: Mapping[str, Value]) -> bool:
        """Whether it is true. Raises `ExpressionError` where it comes to something else than true or false."""
        return _truth(self.value(names))

    def _worked_out(self, names: Mapping[str, Value], every: bool) -> Value:
        return _Interpreter(names, every).value(self._tree)


@lru_cache(maxsize=4096)
def parse(text: str) -> Expression:
    """The expression of a text. Raises `ExpressionError` for one that is none, or of what is not let in."""
    expression = Expression(text)
    _ = expression.names
    return expression


def _parsed(text: str) -> ast.expr:
    if len(text) > LONGEST:
        raise ExpressionError(f"an expression has at most {LONGEST} characters, not {len(text)}")
    source = text.strip()
    if not source:
        raise ExpressionError("the expression is empty")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is not let in anyway
            tree = ast.parse(source, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # ValueError: a null byte
        reason = error.msg if isinstance(error, SyntaxError) else "it cannot be read"
        raise ExpressionError(reason.splitlines()[0]) from None
    _admit(tree, source, DEEPEST)
    return tree


def _admit(node: ast.expr, source: str, depth: int) -> None:
    """Raise `ExpressionError` for a node of `source` that is not let in."""
    if depth == 0:
        raise ExpressionError(f"more than {DEEPEST} operations lie within each other")
    operands = _operands(node)
    if operands is None:
        named = source.encode()[node.col_offset : node.end_col_offset].decode(errors="replace")
        raise ExpressionError(f"{named[:60]!r} is not let in; there are {_LET_IN}")
    for operand in operands:
        _admit(operand, source, depth - 1)


def _operands(node: ast.expr) -> Sequence[ast.expr] | None:
    """What a node works on; None for one that is not let in. Raises `ExpressionError` where there is more to say."""
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None as value):
            _bounded(value)
            return ()
        case ast.Name():
            return ()
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _ARITHMETIC:
            return left, right
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.UAdd(), operand=operand):
            return (operand,)
        case ast.BoolOp(values=values):
            return values
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return test, body, orelse
        case ast.Compare(left=left, ops=signs, comparators=others):
            if any(isinstance(sign, ast.In | ast.NotIn) for sign in signs[:-1]):
                raise ExpressionError("nothing is compared with a list; put `and` between")
            return left, *(operand for pair in zip(signs, others, strict=True) for operand in _compared(*pair))
        case ast.Call(func=ast.Name(id="round"), args=[number], keywords=[]):
            return (number,)
        case ast.Call(func=ast.Name(id="min" | "max" as name), args=args, keywords=[]):
            if len(args) < 2:
                raise ExpressionError(f"{name} takes two or more numbers")
            return args
    return None


def _compared(sign: ast.cmpop, other: ast.expr) -> list[ast.expr]:
    """What a comparison compares with: of `in`, each of the list."""
    if isinstance(sign, ast.In | ast.NotIn):
        if not isinstance(other, ast.List | ast.Tuple | ast.Set):
            raise ExpressionError("`in` takes a list such as ['a', 'b']")
        return other.elts
    if type(sign) not in _COMPARISONS:
        raise ExpressionError("`is` is not let in; compare with ==")
    return [other]


_LET_IN = (
    "numbers, texts, names, + - * // / %, comparisons, in [...], and, or, not, X if C else Y, min(), max() and round()"
)


def _names(node: ast.expr) -> set[str]:
    if isinstance(node, ast.Name):
        return {node.id}
    return set().union(*map(_names, _operands(node) or ()))


_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
}
_DIVISIONS = (ast.FloorDiv, ast.Div, ast.Mod)

_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


class _Interpreter:
    """Works out nodes that were admitted; with `every`, also those that Python would leave out, as none need be."""

    def __init__(self, names: Mapping[str, Value], every: bool) -> None:
        self.names, self.every = names, every

    def value(self, node: ast.expr) -> Value:
        match node:
            case ast.Constant(value=bool() | int() | float() | str() | None as value):
                return value
            case ast.Name(id=name):
                if name not in self.names:
                    raise ExpressionError(f"unknown name {name!r}")
                return self.names[name]
            case ast.BinOp(left=left, op=sign, right=right):
                return self._arithmetic(sign, self.value(left), self.value(right))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return not _truth(self.value(operand))
            case ast.UnaryOp(op=sign, operand=operand):
                number = _number(self.value(operand))
                return -number if isinstance(sign, ast.USub) else number
            case ast.BoolOp(op=word, values=values):
                return self._joined(all if isinstance(word, ast.And) else any, map(self._truth, values))
            case ast.IfExp(test=test, body=body, orelse=orelse):
                chosen, other = (body, orelse) if self._truth(test) else (orelse, body)
                if self.every:
                    self.value(other)
                return self.value(chosen)
            case ast.Compare(left=left, ops=signs, comparators=others):
                return self._joined(all, self._comparisons(left, signs, others))
            case ast.Call(func=ast.Name(id=name), args=args):
                numbers = [_number(self.value(one)) for one in args]
                if name == "round":
                    return round(numbers[0])
                return min(numbers) if name == "min" else max(numbers)
        raise AssertionError(f"{ast.dump(node)} was admitted")

    def _truth(self, node: ast.expr) -> bool:
        return _truth(self.value(node))

    def _joined(self, join: Callable[[Iterable[bool]], bool], truths: Iterable[bool]) -> bool:
        return join(list(truths) if self.every else truths)

    def _comparisons(self, left: ast.expr, signs: Sequence[ast.cmpop], others: Sequence[ast.expr]) -> Iterator[bool]:
        one = self.value(left)
        for sign, node in zip(signs, others, strict=True):
            if isinstance(sign, ast.In | ast.NotIn):
                within = [_equal(one, self.value(each)) for each in _compared(sign, node)]
                yield any(within) == isinstance(sign, ast.In)
                return
            other = self.value(node)
            if isinstance(sign, ast.Eq | ast.NotEq):
                yield _equal(one, other) == isinstance(sign, ast.Eq)
            elif isinstance(one, str) and isinstance(other, str):
                yield _COMPARISONS[type(sign)](one, other)
            else:
                yield _COMPARISONS[type(sign)](_number(one), _number(other))
            one = other

    def _arithmetic(self, sign: ast.operator, left: Value, right: Value) -> Value:
        if isinstance(sign, ast.Add) and isinstance(left, str) and isinstance(right, str):
            return _bounded(left + right)
        one, other = _number(left), _number(right)
        if other == 0 and isinstance(sign, _DIVISIONS):
            if not self.every:
                raise ExpressionError("division by zero")
            other = 1
        return _bounded(_ARITHMETIC[type(sign)](one, other))


def _equal(one: Value, other: Value) -> bool:
    """Whether two values are the same; what can never be is refused, as it is a mistake."""
    if one is not None and other is not None and _kind(one) != _kind(other):
        raise ExpressionError(f"{one!r} is {_kind(one)} and {other!r} {_kind(other)}: they are never equal")
    return one == other


def _truth(value: Value) -> bool:
    if not isinstance(value, bool):
        raise ExpressionError(f"{value!r} is {_kind(value)}, not true or false")
    return value


def _number(value: Value) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ExpressionError(f"{value!r} is {_kind(value)}, not a number")
    return value


def _kind(value: Value) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true or false"
    return "a text" if isinstance(value, str) else "a number"


def _bounded(value: Value) -> Value:
    if isinstance(value, str) and len(value) > LONGEST:
        raise ExpressionError(f"a text has at most {LONGEST} characters")
    if isinstance(value, int | float) and not (math.isfinite(value) and abs(value) <= LARGEST):
        raise ExpressionError(f"numbers are at most {LARGEST:.0e}")
    return value
