"""Whether a tokenizer's regular expression can be searched for in bounded time.

Tokenizers cut text with Oniguruma, which backtracks: a pattern such as `(a+)+$` tries more ways to match a run of n
letters than any machine can count, and at its limit of retries the library panics. A pattern is taken apart here and
passes where the steps of one attempt to match grow no faster than the text. Those of published models do; what this
reader does not know is refused as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

MAX_LENGTH = 10_000  # characters of a pattern; published ones have a few hundred
MAX_SIZE = 20_000  # of a pattern with its counted repetitions written out
MAX_DEPTH = 30  # groups in groups
MAX_STEPS = 4096  # of one attempt to match, on a text of any length
MAX_STEPS_PER_CHAR = 32  # and these for each character of it
MANY = 64  # more repetitions than this count as without limit


class PatternError(Exception):
    """Why a pattern is not accepted, as the end of a sentence that begins with the pattern."""


@dataclass(frozen=True, slots=True)
class _Char:
    """Anything that matches exactly one character."""

    literal: str | None = None


@dataclass(frozen=True, slots=True)
class _Assertion:
    """Matches no character, or fails; `inner` is what a lookaround looks for."""

    inner: _Node | None = None


@dataclass(frozen=True, slots=True)
class _Sequence:
    items: tuple[_Node, ...]


@dataclass(frozen=True, slots=True)
class _Choice:
    branches: tuple[_Node, ...]


@dataclass(frozen=True, slots=True)
class _Repeat:
    body: _Node
    low: int
    high: int | None
    possessive: bool = False  # never gives back what it took


@dataclass(frozen=True, slots=True)
class _Atomic:
    """A group that never gives back what it took."""

    body: _Node


_Node = _Char | _Assertion | _Sequence | _Choice | _Repeat | _Atomic


@dataclass(frozen=True, slots=True)
class _Linear:
    """At most `fixed + per_char * n` of something, on a text of n characters."""

    fixed: int = 0
    per_char: int = 0

    def __add__(self, other: _Linear) -> _Linear:
        return _Linear(self.fixed + other.fixed, self.per_char + other.per_char)

    def __mul__(self, other: _Linear) -> _Linear:
        if self.per_char and other.per_char:
            raise PatternError("repeats several parts one after another before a part that can fail")
        per_char = self.fixed * other.per_char + self.per_char * other.fixed
        return _Linear(min(self.fixed * other.fixed, _TOO_MANY), min(per_char, _TOO_MANY))


@dataclass(frozen=True, slots=True)
class _Cost:
    """What an attempt to match a part takes."""

    ways: _Linear  # in which it matches, each of them tried where the rest of the pattern fails
    steps: _Linear  # for all of them
    failure: _Linear  # steps until it is clear that it does not match


_ONE = _Linear(1)
_TOO_MANY = 10**6


def check_pattern(pattern: str, *, may_match_nothing: bool = True) -> None:
    """Refuse a pattern that could take more than linear time for an attempt, or that is of an unknown kind.

    Args:
        pattern: Oniguruma's Ruby syntax, as in tokenizer.json.
        may_match_nothing: whether the empty string is an acceptable match.

    Raises:
        PatternError: with what is wrong.
    """
    if len(pattern) > MAX_LENGTH:
        raise PatternError(f"has {len(pattern):,} characters; at most {MAX_LENGTH:,} are read")
    node = _Reader(pattern).read()
    if _size(node) > MAX_SIZE:
        raise PatternError(f"repeats so much that written out it has more than {MAX_SIZE:,} parts")
    if not may_match_nothing and _may_be_empty(node):
        raise PatternError("can match nothing at all, between any two characters")
    steps = _cost(node, can_fail=False).steps
    if steps.fixed > MAX_STEPS or steps.per_char > MAX_STEPS_PER_CHAR:
        raise PatternError("takes very many steps to match")


def _size(node: _Node) -> int:
    match node:
        case _Char() | _Assertion(None):
            return 1
        case _Assertion(inner) if inner is not None:
            return 1 + _size(inner)
        case _Sequence(parts) | _Choice(parts):
            return 1 + sum(map(_size, parts))
        case _Repeat(body, low, high):
            return _size(body) * max(low, high or 1, 1)
        case _Atomic(body):
            return _size(body)
    raise AssertionError(node)


def _may_be_empty(node: _Node) -> bool:
    match node:
        case _Char():
            return False
        case _Assertion():
            return True
        case _Sequence(items):
            return all(map(_may_be_empty, items))
        case _Choice(branches):
            return any(map(_may_be_empty, branches))
        case _Repeat(body, low, _):
            return low == 0 or _may_be_empty(body)
        case _Atomic(body):
            return _may_be_empty(body)
    raise AssertionError(node)


def _may_fail(node: _Node) -> bool:
    """Whether there is a place in some text at which this does not match."""
    match node:
        case _Sequence(items):
            return any(map(_may_fail, items))
        case _Choice(branches):
            return all(map(_may_fail, branches))
        case _Repeat(body, low, _):
            return low > 0 and _may_fail(body)
        case _Atomic(body):
            return _may_fail(body)
    return True


def _cost(node: _Node, *, can_fail: bool) -> _Cost:
    """The cost where the rest of the pattern `can_fail`; where it cannot, the first way to match is all."""
    match node:
        case _Assertion(inner) if inner is not None:
            steps = _ONE + _cost(inner, can_fail=False).steps
            return _Cost(_ONE, steps, steps)
        case _Sequence(items):
            return _cost_of_sequence(items, can_fail=can_fail)
        case _Choice(branches):
            return _cost_of_choice(branches, can_fail=can_fail)
        case _Repeat():
            return _cost_of_repeat(node, can_fail=can_fail and not node.possessive)
        case _Atomic(body):
            return _cost(body, can_fail=False)
    return _Cost(_ONE, _ONE, _ONE)


def _cost_of_sequence(items: Iterable[_Node], *, can_fail: bool) -> _Cost:
    """Each way of a part is tried with each way of those before it, up to the last part that can fail."""
    parts = list(items)
    last = len(parts) - 1
    while last >= 0 and not can_fail and not _may_fail(parts[last]):
        last -= 1
    ways, steps, failure = _ONE, _ONE, _ONE
    for index, part in enumerate(parts):
        settled = index >= last and not can_fail  # what comes behind cannot fail: it matches once
        cost = _cost(part, can_fail=not settled)
        if index < last or not settled:
            failure = failure + ways * cost.steps
            steps = steps + ways * cost.steps
            ways = ways * cost.ways
        else:
            failure = failure + (ways * cost.failure if index == last else _Linear())
            steps = steps + ways * cost.failure + cost.steps if index == last else steps + cost.steps
    return _Cost(ways if can_fail else _ONE, steps, failure)


def _cost_of_choice(branches: Iterable[_Node], *, can_fail: bool) -> _Cost:
    """Every branch is tried in turn; where the first character decides, one of them."""
    branches = list(branches)
    costs = [_cost(branch, can_fail=can_fail) for branch in branches]
    ways = steps = failure = _Linear()
    for cost in costs:
        ways, steps, failure = ways + cost.ways, steps + cost.steps, failure + cost.failure
    if not can_fail:
        ways = _ONE
    elif _begin_differently(branches):
        ways = _Linear(max(cost.ways.fixed for cost in costs), max(cost.ways.per_char for cost in costs))
    return _Cost(ways, steps, failure)


def _cost_of_repeat(node: _Repeat, *, can_fail: bool) -> _Cost:
    low, high = node.low, node.high
    if (high is None or high > 1) and _may_be_empty(node.body):
        raise PatternError("repeats a part that can match nothing")
    # The next repetition may fail, but then the one before it stays, unless more are required.
    body = _cost(node.body, can_fail=can_fail or low > 1)
    if high is None or high > MANY:
        if body.ways != _ONE or body.steps.per_char:
            raise PatternError("repeats a part that can itself match in several ways, or at any length")
        each = body.steps.fixed
        ways = _Linear(0, 1) if can_fail and low != high else _ONE
        return _Cost(ways, _Linear(each, each), _Linear(each * max(low, 1)))
    ways, steps, power = _Linear(int(low == 0)), _ONE, _ONE
    for count in range(1, high + 1):
        steps = steps + power * body.steps
        power = power * body.ways
        ways = ways + power if count >= low else ways
    failure = steps if low else _ONE
    return _Cost(ways if can_fail else _ONE, steps, failure)


def _begin_differently(branches: Iterable[_Node]) -> bool:
    """Whether the first character already decides which branch can match."""
    firsts = []
    for branch in branches:
        first = branch.items[0] if isinstance(branch, _Sequence) and branch.items else branch
        if not isinstance(first, _Char) or first.literal is None:
            return False
        firsts.append(first.literal.casefold())
    return len(set(firsts)) == len(firsts)


_COUNTS = re.compile(r"\{(?:(\d{1,6})(?:(,)(\d{1,6})?)?|,(\d{1,6}))\}", re.ASCII)
_FLAGS = re.compile(r"\?[im]*(?:-[im]*)?:", re.ASCII)
_ONE_OF = frozenset("dDwWsShH")  # classes by a letter
_CONTROL = frozenset("tnrfae")
_BORDERS = frozenset("bBAzZG")
_PROPERTY = re.compile(r"\{\^?[A-Za-z0-9_ -]{1,40}\}", re.ASCII)
_CODE = re.compile(r"x\{[0-9A-Fa-f]{1,8}\}|x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}", re.ASCII)


class _Reader:
    """Takes a pattern apart by descent."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._depth = 0

    def read(self) -> _Node:
        self._take("(?i)")  # here only: further on it would take the rest of the pattern with it
        node = self._choice()
        if self._at < len(self._pattern):
            raise PatternError("closes a group that it did not open")
        return node

    def _next(self) -> str:
        return self._pattern[self._at : self._at + 1]

    def _take(self, text: str) -> bool:
        found = self._pattern.startswith(text, self._at)
        self._at += len(text) if found else 0
        return found

    def _choice(self) -> _Node:
        branches = [self._sequence()]
        while self._take("|"):
            branches.append(self._sequence())
        return branches[0] if len(branches) == 1 else _Choice(tuple(branches))

    def _sequence(self) -> _Node:
        items = []
        while self._next() not in ("", "|", ")"):
            items.append(self._repeated(self._atom()))
        return items[0] if len(items) == 1 else _Sequence(tuple(items))

    def _repeated(self, node: _Node) -> _Node:
        """What follows a part to repeat it, several times over where the pattern says so."""
        for _ in range(4):
            counts = _COUNTS.match(self._pattern, self._at)
            if counts is not None:
                self._at = counts.end()
                low = int(counts[1] or 0)
                high = int(counts[3] or counts[4]) if counts[3] or counts[4] else None if counts[2] else low
                if high is not None and high < low:
                    raise PatternError(f"counts from {low} to {high}")
                node = _Repeat(node, low, high)
                self._take("?")
            elif self._next() in ("*", "+", "?") and self._next():
                low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}[self._next()]
                self._at += 1
                possessive = self._take("+")
                node = _Repeat(node, low, high, possessive)
                if not possessive:
                    self._take("?")
            else:
                return node
        raise PatternError("repeats a repetition several times over")

    def _atom(self) -> _Node:
        char = self._next()
        self._at += 1
        if char == "(":
            return self._group()
        if char == "[":
            return self._class()
        if char == "\\":
            return self._escape()
        if char in "^$":
            return _Assertion()
        if char in "*+?":
            raise PatternError("repeats nothing")
        return _Char(None if char == "." else char)

    def _group(self) -> _Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise PatternError(f"has groups more than {MAX_DEPTH} deep")
        looks = any(self._take(sign) for sign in ("?=", "?!", "?<=", "?<!"))
        atomic = not looks and self._take("?>")
        if not looks and not atomic and self._next() == "?":
            flags = _FLAGS.match(self._pattern, self._at)
            if flags is None:
                raise PatternError(f"has a group of an unsupported kind, ({self._pattern[self._at : self._at + 5]}...")
            self._at = flags.end()
        node = self._choice()
        if not self._take(")"):
            raise PatternError("leaves a group open")
        self._depth -= 1
        return _Assertion(node) if looks else _Atomic(node) if atomic else node

    def _class(self) -> _Node:
        """A class in brackets, with others inside it; which characters it holds does not matter here."""
        depth, first = 1, True
        while depth:
            char = self._next()
            self._at += 1
            if not char:
                raise PatternError("leaves a class in brackets open")
            if char == "\\":
                self._at += 1
            elif char == "[":
                depth += 1
                if depth > MAX_DEPTH:
                    raise PatternError(f"has classes more than {MAX_DEPTH} deep")
                first = True
                continue
            elif char == "^" and first:
                continue
            elif char == "]" and not first:
                depth -= 1
            first = False
        return _Char()

    def _escape(self) -> _Node:
        char = self._next()
        code = _CODE.match(self._pattern, self._at)
        self._at += 1
        if not char:
            raise PatternError("ends in a backslash")
        if code is not None:
            self._at = code.end()
            return _Char()
        if char in "pP":
            named = _PROPERTY.match(self._pattern, self._at)
            if named is None:
                raise PatternError("has a \\p without the name of a property in braces")
            self._at = named.end()
            return _Char()
        if char in _BORDERS:
            return _Assertion()
        if char in _ONE_OF or char in _CONTROL:
            return _Char()
        if char.isascii() and char.isalnum():
            raise PatternError(f"has the unsupported escape \\{char}")
        return _Char(char)
