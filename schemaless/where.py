"""Where: the one small language of conditions, for triggers over bodies and for indexes over fields.

    condition  = all_of {"or" all_of}
    all_of     = single {"and" single}
    single     = "not" single | "(" condition ")" | test
    test       = path ("==" | "!=" | "<" | "<=" | ">" | ">=") literal
               | path ["not"] "in" "(" literal {"," literal} ")"
               | path "is" ["not"] "null"
    path       = part {"." part}      a part is a word such as fare_amount, or anything within backquotes
    literal    = "text" as in JSON | 'text' without escapes | number | true | false

The contract's list form `[{field, op, value}]` means the same as its tests joined by `and`. Logic is SQL's: a test of
a missing member, of null, or of a value of another type is unknown, `not` leaves it unknown, and unknown doesn't hold.
Numbers compare by value, and a boolean is no number. Evaluation can't raise.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from enum import StrEnum
from typing import Any, NamedTuple

from schemaless.errors import Invalid

TEXT_CHARACTERS_MAX = 1_000
NODES_MAX = 64
DEPTH_MAX = 16

Literal = str | int | float | Decimal | bool | bytes
"""Indexes replace literals by values of their fields' types (with_literals), so decimals and bytes may occur."""


class ComparisonSign(StrEnum):
    """The comparisons, by their names in the list form."""

    EQ = "eq"
    NE = "ne"
    LT = "lt"
    LTE = "lte"
    GT = "gt"
    GTE = "gte"


_SIGNS = dict(zip(("==", "!=", "<", "<=", ">", ">="), ComparisonSign, strict=True))
_SIGN_OF = {found: sign for sign, found in _SIGNS.items()}
_FUNCTIONS: Mapping[ComparisonSign, Callable[[Any, Any], bool]] = dict(
    zip(ComparisonSign, (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge), strict=True)
)

_Test = Callable[[Mapping[str, Any]], bool | None]
"""Returns None when the answer is unknown."""


@dataclass(frozen=True, slots=True)
class Comparison:
    path: tuple[str, ...]
    operator: ComparisonSign
    literal: Literal


@dataclass(frozen=True, slots=True)
class IsNull:
    path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Not:
    inner: Expression


@dataclass(frozen=True, slots=True)
class AllOf:
    parts: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class AnyOf:
    """Holds when one part does. `in` is one whose parts compare with ==."""

    parts: tuple[Expression, ...]


Expression = Comparison | IsNull | Not | AllOf | AnyOf


@dataclass(frozen=True, slots=True)
class Where:
    """A condition. Two are equal when their expressions are. str() gives the text form, which parses to the same."""

    expression: Expression
    _test: _Test = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_test", _compiled(self.expression))

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Returns whether the condition is true. Never raises, whatever JSON value is where."""
        return self._test(values) is True

    @property
    def names(self) -> frozenset[str]:
        """The dotted paths that are tested."""
        return frozenset(".".join(leaf.path) for leaf in _leaves(self.expression))

    def with_literals(self, convert: Callable[[str, Literal], Literal]) -> Where:
        """Returns the condition with other literals. `convert` gets the dotted path and the literal of each test."""
        return Where(_converted(self.expression, convert))

    def __str__(self) -> str:
        return _text(self.expression)


def parse_where(given: object, at: str = "where") -> Where:
    """Returns the condition of a text or of a list of {field, op, value}. Raises Invalid, with what was expected."""
    if isinstance(given, str):
        return Where(_Parser(given, at).whole())
    if isinstance(given, Sequence) and not isinstance(given, bytes):
        return Where(_from_list(given, at))
    raise Invalid(at, "must be text such as 'status == \"done\"', or a list of {field, op, value}")


# List form


def _from_list(items: Sequence[object], at: str) -> Expression:
    if not 1 <= len(items) <= NODES_MAX:
        raise Invalid(at, f"must have 1 to {NODES_MAX} conditions, not {len(items)}")
    found = tuple(_from_item(item, f"{at}[{n}]") for n, item in enumerate(items))
    return found[0] if len(found) == 1 else AllOf(found)


def _from_item(item: object, at: str) -> Expression:
    if not isinstance(item, Mapping) or set(item) != {"field", "op", "value"}:
        raise Invalid(at, "must be an object with exactly the members field, op and value")
    path, value = item["field"], item["value"]
    if not isinstance(path, str) or not all(path.split(".")) or "`" in path:
        raise Invalid(f"{at}.field", "must be a dotted path such as fare.amount, without empty parts or backquotes")
    if item["op"] not in list(ComparisonSign):
        raise Invalid(f"{at}.op", f"must be one of {', '.join(ComparisonSign)}")
    is_finite = not isinstance(value, float) or math.isfinite(value)
    if not isinstance(value, str | int | float | bool) or not is_finite:
        raise Invalid(f"{at}.value", "must be text, a finite number, true or false")
    return Comparison(tuple(path.split(".")), ComparisonSign(item["op"]), value)


# Text form

_WORDS = frozenset({"and", "or", "not", "in", "is", "null", "true", "false"})
_TOKEN = re.compile(
    r"""\s*(?:
        (?P<text>"(?:[^"\\]|\\.)*"|'[^']*')
      | (?P<number>-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?(?![\w.]))
      | (?P<path>(?:[^\W\d][\w-]*|`[^`]+`)(?:\.(?:[^\W\d][\w-]*|`[^`]+`))*)
      | (?P<sign>==|!=|<=|>=|<|>|\(|\)|,)
    )""",
    re.VERBOSE | re.DOTALL,
)
_WORD = re.compile(r"[^\W\d][\w-]*")
_PART = re.compile(r"`([^`]+)`|([^.`]+)")


class _Token(NamedTuple):
    kind: str  # text, number, path, word or sign; "" at the end
    text: str
    position: int  # of its first character, from 1


class _Parser:
    """Reads one text by recursive descent."""

    def __init__(self, text: str, at: str) -> None:
        self._at = at
        if len(text) > TEXT_CHARACTERS_MAX:
            raise Invalid(at, f"must have at most {TEXT_CHARACTERS_MAX} characters, not {len(text)}")
        self._tokens = list(self._scan(text))
        self._next = 0
        self._depth = 0
        self._nodes = 0

    def whole(self) -> Expression:
        found = self._condition()
        if self._peek.kind:
            raise self._expected("`and`, `or` or the end")
        return found

    def _scan(self, text: str) -> Iterator[_Token]:
        end = 0
        while text[end:].strip():
            match = _TOKEN.match(text, end)
            if match is None:
                position = end + len(text[end:]) - len(text[end:].lstrip())
                what = "a path, a literal, a comparison (== for equality) or a parenthesis"
                raise Invalid(self._at, f"position {position + 1}: expected {what}, found {text[position:][:40]!r}")
            kind = match.lastgroup or ""
            found = match[kind]
            yield _Token("word" if found in _WORDS else kind, found, match.start(kind) + 1)
            end = match.end()
        yield _Token("", "", len(text) + 1)

    @property
    def _peek(self) -> _Token:
        return self._tokens[self._next]

    def _take(self, *texts: str) -> bool:
        """Moves over a word or sign if it comes next."""
        if self._peek.kind in ("word", "sign") and self._peek.text in texts:
            self._next += 1
            return True
        return False

    def _require(self, text: str) -> None:
        if not self._take(text):
            raise self._expected(f"`{text}`")

    def _expected(self, what: str) -> Invalid:
        found = f"{self._peek.text[:40]!r}" if self._peek.kind else "the end"
        return Invalid(self._at, f"position {self._peek.position}: expected {what}, found {found}")

    def _counted(self, found: Expression) -> Expression:
        self._nodes += 1
        if self._nodes > NODES_MAX:
            raise Invalid(self._at, f"has more than {NODES_MAX} tests and operators")
        return found

    def _condition(self) -> Expression:
        parts = [self._all_of()]
        while self._take("or"):
            parts.append(self._all_of())
        return parts[0] if len(parts) == 1 else self._counted(AnyOf(tuple(parts)))

    def _all_of(self) -> Expression:
        parts = [self._single()]
        while self._take("and"):
            parts.append(self._single())
        return parts[0] if len(parts) == 1 else self._counted(AllOf(tuple(parts)))

    def _single(self) -> Expression:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise Invalid(self._at, f"position {self._peek.position}: nested deeper than {DEPTH_MAX}")
        if self._take("not"):
            found = self._counted(Not(self._single()))
        elif self._take("("):
            found = self._condition()
            self._require(")")
        else:
            found = self._test()
        self._depth -= 1
        return found

    def _test(self) -> Expression:
        if self._peek.kind != "path":
            raise self._expected("a path such as fare.amount, `not` or `(`")
        path = tuple(quoted or plain for quoted, plain in _PART.findall(self._peek.text))
        self._next += 1
        if self._take("is"):
            negated = self._take("not")
            self._require("null")
            found = self._counted(IsNull(path))
        elif (negated := self._take("not")) or (self._peek.kind, self._peek.text) == ("word", "in"):
            self._require("in")
            found = self._one_of(path)
        elif self._peek.text in _SIGNS:
            sign = _SIGNS[self._peek.text]
            self._next += 1
            found = self._counted(Comparison(path, sign, self._literal()))
        else:
            raise self._expected("==, !=, <, <=, >, >=, `in (…)`, `is null` or `is not null`")
        return self._counted(Not(found)) if negated else found

    def _one_of(self, path: tuple[str, ...]) -> Expression:
        self._require("(")
        parts = [self._counted(Comparison(path, ComparisonSign.EQ, self._literal()))]
        while self._take(","):
            parts.append(self._counted(Comparison(path, ComparisonSign.EQ, self._literal())))
        self._require(")")
        return parts[0] if len(parts) == 1 else self._counted(AnyOf(tuple(parts)))

    def _literal(self) -> Literal:
        kind, text, _ = self._peek
        found: Literal | None = None
        if kind == "text":
            found = self._text(text)
        elif kind == "number":
            found = int(text) if text.lstrip("-").isdigit() else float(text)
            if isinstance(found, float) and math.isinf(found):
                raise self._expected("a number that isn't so large")
        elif text in ("true", "false"):
            found = text == "true"
        if found is None:
            hint = " (`is null` asks for null)" if text == "null" else ""
            raise self._expected(f"text in quotes, a number, true or false{hint}")
        self._next += 1
        return found

    def _text(self, quoted: str) -> str:
        if quoted[0] == "'":
            return quoted[1:-1]
        try:
            return str(json.loads(quoted, strict=False))
        except ValueError as error:
            raise self._expected("text with the escapes of JSON") from error


# Evaluation


def _compiled(found: Expression) -> _Test:
    match found:
        case Comparison():
            return _compiled_comparison(found)
        case IsNull():
            value_of = _lookup(found.path)
            return lambda values: value_of(values) is None
        case Not():
            inner = _compiled(found.inner)
            return lambda values: None if (answer := inner(values)) is None else not answer
        case AllOf():
            return _joined([_compiled(part) for part in found.parts], decides=False)
        case AnyOf():
            return _joined([_compiled(part) for part in found.parts], decides=True)


def _joined(tests: Sequence[_Test], decides: bool) -> _Test:
    """Returns the test of several: one answer `decides`, else one unknown makes it unknown."""

    def test(values: Mapping[str, Any]) -> bool | None:
        answer: bool | None = not decides
        for single in tests:
            if (found := single(values)) is decides:
                return decides
            if found is None:
                answer = None
        return answer

    return test


def _compiled_comparison(found: Comparison) -> _Test:
    value_of, compare, literal = _lookup(found.path), _FUNCTIONS[found.operator], found.literal
    kinds = _kinds_with(literal)

    def test(values: Mapping[str, Any]) -> bool | None:
        value = value_of(values)
        if type(value) not in kinds or value != value:  # noqa: PLR0124  NaN has no order
            return None
        return compare(value, literal)

    return test


def _kinds_with(literal: Literal) -> frozenset[type]:
    """Returns the types that a literal is compared with."""
    numbers = frozenset[type]({int, float, Decimal})
    kind = type(literal)
    return numbers if kind in numbers else frozenset({kind})


def _lookup(path: tuple[str, ...]) -> Callable[[Mapping[str, Any]], Any]:
    first, rest = path[0], path[1:]
    if not rest:
        return lambda values: values.get(first)

    def value_of(values: Mapping[str, Any]) -> Any:
        found = values.get(first)
        for part in rest:
            if not isinstance(found, dict):
                return None
            found = found.get(part)
        return found

    return value_of


# Walks


def _leaves(found: Expression) -> Iterator[Comparison | IsNull]:
    match found:
        case Comparison() | IsNull():
            yield found
        case Not():
            yield from _leaves(found.inner)
        case AllOf() | AnyOf():
            for part in found.parts:
                yield from _leaves(part)


def _converted(found: Expression, convert: Callable[[str, Literal], Literal]) -> Expression:
    match found:
        case Comparison():
            return replace(found, literal=convert(".".join(found.path), found.literal))
        case IsNull():
            return found
        case Not():
            return Not(_converted(found.inner, convert))
        case AllOf() | AnyOf():
            return replace(found, parts=tuple(_converted(part, convert) for part in found.parts))


def _text(found: Expression) -> str:
    if (members := _members(found)) is not None:
        path, literals = members
        return f"{_path_text(path)} in ({', '.join(_literal_text(literal) for literal in literals)})"
    match found:
        case Comparison():
            return f"{_path_text(found.path)} {_SIGN_OF[found.operator]} {_literal_text(found.literal)}"
        case IsNull():
            return f"{_path_text(found.path)} is null"
        case Not(IsNull(path)):
            return f"{_path_text(path)} is not null"
        case Not():
            return f"not {_inner_text(found.inner)}"
        case AllOf():
            return " and ".join(_inner_text(part) for part in found.parts)
        case AnyOf():
            return " or ".join(_inner_text(part) for part in found.parts)


def _inner_text(found: Expression) -> str:
    is_joined = isinstance(found, AllOf | AnyOf) and _members(found) is None
    return f"({_text(found)})" if is_joined else _text(found)


def _members(found: Expression) -> tuple[tuple[str, ...], list[Literal]] | None:
    """Returns path and literals of what `in` writes."""
    if not isinstance(found, AnyOf):
        return None
    tests = [part for part in found.parts if isinstance(part, Comparison) and part.operator is ComparisonSign.EQ]
    paths = {test.path for test in tests}
    return (
        (tests[0].path, [test.literal for test in tests])
        if len(tests) == len(found.parts) and len(paths) == 1
        else None
    )


def _path_text(path: Sequence[str]) -> str:
    parts = [part if _WORD.fullmatch(part) else f"`{part}`" for part in path]
    return f"`{path[0]}`" if len(path) == 1 and path[0] in _WORDS else ".".join(parts)


def _literal_text(literal: Literal) -> str:
    return json.dumps(literal) if isinstance(literal, str | bool | int | float) else repr(literal)
