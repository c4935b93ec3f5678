"""A Jinja environment for templates that came from the net.

Jinja's own sandbox keeps a template from reaching Python; it does not keep it from running for ever or from asking for
all memory. Here every step that can multiply work goes through a `Budget`: loops, calls, filters, tests, arithmetic,
comparisons, slices, and every list, dict or string that is made. A `Budget` bounds

- the number of steps, and the time they take;
- the size of any one value, written out: a list that holds one string a million times counts it a million times, so
  that nothing which walks or prints a value can take long;
- the sum of everything made.

The steps that Jinja does not let an environment intercept are found by rewriting the syntax tree (`_Rewriter`).
"""

# The checks below take the arguments of what they check, used or not; visitors are named after Jinja's nodes.
# ruff: noqa: ARG001, N802

from __future__ import annotations

import functools
import operator
import re
import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import islice
from types import GeneratorType
from typing import Any, NamedTuple

import jinja2
import jinja2.nodes as nodes
from jinja2.ext import Extension
from jinja2.runtime import Context, markup_join, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEscapeFormatter, SandboxedFormatter
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

MAX_SOURCE = 2**16  # characters of a template; published ones have a few thousand
MAX_NODES = 10_000  # of its syntax tree; Qwen2.5's has about 400
MAX_SIZE = 2**23  # characters or entries of one value, and characters of the output
MAX_ITEMS = 2**17  # entries of one list
MAX_DEPTH = 100  # lists in lists
MAX_BITS = 4096  # of an integer
MAX_WIDTH = 10_000  # that a format may pad to
MAX_SLOW = 100_000  # characters for filters that use slow patterns


class LimitError(jinja2.TemplateError):
    """The template wants more time or memory than any prompt needs."""


class Weight(NamedTuple):
    """How large a value is when it is written out."""

    size: int  # characters, about
    nodes: int
    depth: int


@dataclass(slots=True)
class Budget:
    """What one compilation or rendering may use, and what it has used."""

    steps: int = 500_000
    made: int = 2**27
    seconds: float = 1.0
    _started: float = field(init=False, default_factory=time.thread_time)
    _next_look: float = field(init=False, default=0.0)
    # id -> the container itself (so that the id stays its own) and its weight; containers never change in the sandbox
    _weights: dict[int, tuple[Any, Weight]] = field(init=False, default_factory=dict)

    def step(self) -> None:
        """Count one step."""
        self.steps -= 1
        if self.steps < 0:
            raise LimitError("it takes too many steps")
        if time.monotonic() > self._next_look:
            self._look_at_the_time()

    def _look_at_the_time(self) -> None:
        # The thread's own time counts, so that a busy machine refuses no honest template; the wall clock, which is
        # cheaper to read, says when to look again.
        left = self.seconds - (time.thread_time() - self._started)
        if left < 0:
            raise LimitError(f"it takes longer than {self.seconds:.1f} seconds")
        self._next_look = time.monotonic() + left

    def room(self, size: int) -> None:
        """Refuse a value of this size before it is made."""
        if size > MAX_SIZE:
            raise LimitError(f"it makes a value of {size:,} characters or entries; at most {MAX_SIZE:,} are allowed")

    def keep(self, value: Any) -> Any:
        """Count a value that was made, and refuse it where it is too large; gives the value."""
        if isinstance(value, str | bytes):
            self._spend(len(value))
        elif isinstance(value, GeneratorType):
            # Consumed now and counted; still something that can be walked only once, as without a budget.
            return iter(self.keep(list(islice(value, MAX_ITEMS + 1))))
        else:
            self.weigh(value)
        return value

    def weigh(self, value: Any, depth: int = 0) -> Weight:
        """The weight of a value written out; remembers it for containers, and refuses what is too large."""
        if isinstance(value, str | bytes):
            return Weight(len(value) + 2, 1, 0)
        if isinstance(value, int):
            if value.bit_length() > MAX_BITS:
                raise LimitError(f"it makes an integer of {value.bit_length():,} bits; at most {MAX_BITS} are allowed")
            return Weight(value.bit_length() // 3 + 5, 1, 0)
        if not isinstance(value, list | tuple | dict | KeysView | ValuesView | ItemsView):
            return Weight(24, 1, 0)
        known = self._weights.get(id(value))
        if known is not None:
            return known[1]
        if depth > MAX_DEPTH:
            raise LimitError(f"it nests lists more than {MAX_DEPTH} deep")
        if len(value) > MAX_ITEMS:
            raise LimitError(f"it makes a list of {len(value):,} entries; at most {MAX_ITEMS:,} are allowed")
        weight = self._sum(value.items() if isinstance(value, dict) else value, isinstance(value, dict), depth)
        self._weights[id(value)] = (value, weight)
        self._spend(len(value) + 16)
        return weight

    def _sum(self, entries: Iterable[Any], pairs: bool, depth: int) -> Weight:
        size, count, deepest = 2, 1, 0
        for entry in entries:
            for part in entry if pairs else (entry,):
                weight = self.weigh(part, depth + 1)
                size, count, deepest = size + weight.size + 2, count + weight.nodes, max(deepest, weight.depth)
            self.room(size)
        if deepest >= MAX_DEPTH:
            raise LimitError(f"it nests lists more than {MAX_DEPTH} deep")
        return Weight(size, count, deepest + 1)

    def _spend(self, size: int) -> None:
        self.room(size)
        self.made -= size
        if self.made < 0:
            raise LimitError("it makes too many strings and lists")


_budget: ContextVar[Budget] = ContextVar("budget")


@contextmanager
def spending(budget: Budget) -> Iterator[Budget]:
    """Let what a sandboxed template does in this block use this budget."""
    token = _budget.set(budget)
    try:
        yield budget
    finally:
        _budget.reset(token)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox with every step counted. Compile and render inside `spending`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters = {name: _counted_filter(name, filter_) for name, filter_ in self.filters.items()}
        self.tests = {name: _counted(test) for name, test in self.tests.items()}  # type: ignore[arg-type]
        self.filters.update({_STEP: _step, _KEEP: _keep, _CONCAT: _concat})
        del self.globals["lipsum"]  # random text, any amount of it

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Make a function known as a filter, counted like the others."""
        self.filters[name] = _counted_filter(name, function)

    def from_source(self, source: str) -> jinja2.Template:
        """Compile a template."""
        if len(source) > MAX_SOURCE:
            raise LimitError(f"it has {len(source):,} characters; at most {MAX_SOURCE:,} are allowed")
        tree = self.parse(source)
        if sum(1 for _ in tree.find_all(nodes.Node)) > MAX_NODES:
            raise LimitError(f"it has more than {MAX_NODES:,} parts")
        return self.from_string(_Rewriter(self).visit(tree))

    def concat(self, parts: Iterable[str]) -> str:
        """Join the pieces of an output; the code that Jinja generates calls this at the end of every block."""
        budget = _budget.get()
        pieces: list[str] = []
        size = 0
        for part in parts:
            pieces.append(part)
            size += len(part)
            budget.room(size)
        text = "".join(pieces)
        budget.keep(text)
        return text

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function, method or macro."""
        budget = _budget.get()
        budget.step()
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str | bytes):
            check = _METHOD_CHECKS.get(function.__name__)
            if check is not None:
                check(budget, owner, *args, **kwargs)
        elif isinstance(owner, int) and function.__name__ == "to_bytes":
            raise LimitError("it calls to_bytes, which no prompt needs")
        return budget.keep(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Context, sign: str, left: Any, right: Any) -> Any:
        """Add, multiply, take a power, or format with `%`."""
        budget = _budget.get()
        budget.step()
        _BINOP_CHECKS[sign](budget, left, right)
        return budget.keep(super().call_binop(context, sign, left, right))

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Take an item; `map(attribute="a.b.c")` comes here too, for each part of the name."""
        _budget.get().step()
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Replace `str.format` and `format_map` by ones that count what they write."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        text = value.__self__
        takes_map = value.__name__ == "format_map"

        def bounded(*args: Any, **kwargs: Any) -> str:
            if takes_map:
                (kwargs,), args = args, ()
            if isinstance(text, Markup):
                return Markup(  # noqa: S704 - the formatter escapes
                    _EscapingFormatter(self, escape=text.escape).vformat(text, args, kwargs)
                )
            return _Formatter(self).vformat(text, args, kwargs)

        return functools.update_wrapper(bounded, wrapped)


class GenerationTag(Extension):
    """`{% generation %}`: transformers marks the assistant's own text with it; for a prompt it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Any) -> nodes.Node:
        """The block's body, in a scope of its own as a call block has it."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


# Names that no template can spell, because they hold a space.
_STEP, _KEEP, _CONCAT = "count step", "keep value", "join strings"


class _Rewriter(NodeTransformer):
    """Puts calls of the budget where Jinja has no hook: loops, comparisons, slices, literals and `~`."""

    def __init__(self, environment: jinja2.Environment) -> None:
        self._environment = environment

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, self._at(node, nodes.ExprStmt, self._filter(node, nodes.Const(None), _STEP)))
        if node.test is not None:
            # A test that refuses every item would keep the body, and the count in it, from running.
            node.test = self._filter(node, node.test, _STEP)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        return self._filter(node, self.generic_visit(node), _STEP)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        return self._filter(node, self.generic_visit(node), _KEEP)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        return self._filter(node, self.generic_visit(node), _KEEP)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return self._filter(node, node, _KEEP) if node.ctx == "load" else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return self._filter(node, node, _KEEP) if isinstance(node.arg, nodes.Slice) else node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        first, *others = node.nodes
        return self._filter(node, first, _CONCAT, others)

    def _filter(self, at: nodes.Node, value: Any, name: str, args: list[nodes.Expr] | None = None) -> nodes.Filter:
        filter_: nodes.Filter = self._at(at, nodes.Filter, value, name, args or [], [], None, None)
        return filter_

    def _at(self, at: nodes.Node, kind: type[Any], *fields: Any) -> Any:
        node = kind(*fields, lineno=at.lineno, environment=self._environment)
        for child in node.iter_child_nodes():
            if child.lineno is None:
                child.set_lineno(at.lineno).set_environment(self._environment)
        return node


# With the context as an argument they are never evaluated when the template is compiled.
@jinja2.pass_context
def _step(context: Context, value: Any) -> Any:
    _budget.get().step()
    return value


@jinja2.pass_context
def _keep(context: Context, value: Any) -> Any:
    budget = _budget.get()
    budget.step()
    return budget.keep(value)


@jinja2.pass_context
def _concat(context: Context, *parts: Any) -> Any:
    budget = _budget.get()
    budget.step()
    budget.room(sum(budget.weigh(part).size for part in parts))
    return budget.keep((markup_join if context.eval_ctx.autoescape else str_join)(parts))


def _counted(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        _budget.get().step()
        return function(*args, **kwargs)

    return counted


def _counted_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    check = _FILTER_CHECKS.get(name)
    own_arguments = 0 if getattr(function, "jinja_pass_arg", None) is None else 1

    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        budget = _budget.get()
        budget.step()
        if check is not None:
            check(budget, *args[own_arguments:], **kwargs)
        return budget.keep(function(*args, **kwargs))

    return counted


class _CountedFields:
    """Fields of `str.format` that may not be padded without end, each counted."""

    def format_field(self, value: Any, format_spec: str) -> Any:
        budget = _budget.get()
        budget.step()
        _check_widths(format_spec)
        return budget.keep(super().format_field(value, format_spec))  # type: ignore[misc]


class _Formatter(_CountedFields, SandboxedFormatter):
    pass


class _EscapingFormatter(_CountedFields, SandboxedEscapeFormatter):
    pass


def _check_widths(spec: str) -> None:
    if any(int(width[:9]) > MAX_WIDTH for width in re.findall(r"\d+", spec)):
        raise LimitError(f"it pads to more than {MAX_WIDTH:,} characters")


# What an operation would make, worked out before it is made. The arguments are those of the filter, method or operator.


def _length(value: Any) -> int:
    """Characters or entries; iterators over lists know theirs."""
    return operator.length_hint(value, 1)


def _width(budget: Budget, value: Any, width: Any = 80, *_: Any, **__: Any) -> None:
    if isinstance(width, int):
        budget.room(width)


def _times(budget: Budget, left: Any, right: Any) -> None:
    for value, times in ((left, right), (right, left)):
        if isinstance(value, str | bytes | list | tuple) and isinstance(times, int):
            size = len(value) if isinstance(value, str | bytes) else budget.weigh(value).size
            budget.room(size * max(times, 0))
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > MAX_BITS:
        raise LimitError("it multiplies very large integers")


def _power(budget: Budget, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > MAX_BITS:
        raise LimitError("it takes a very large power")


def _plus(budget: Budget, left: Any, right: Any) -> None:
    budget.room(_length(left) + _length(right))


def _percent(budget: Budget, text: Any, values: Any) -> None:
    if isinstance(text, str | bytes):
        _printf(budget, text if isinstance(text, str) else text.decode("latin-1"), values)


def _printf(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> None:
    text = str(value)
    for directive in re.findall(r"%(?:\([^)]*\))?([^a-zA-Z%]*)", text):
        if "*" in directive:
            raise LimitError("it takes a width from an argument")
        _check_widths(directive)
    largest = max((budget.weigh(arg).size for arg in (*args, *kwargs.values())), default=0)
    budget.room(len(text) + text.count("%") * (largest + MAX_WIDTH // 100))


def _replace(budget: Budget, value: Any, old: Any = "", new: Any = "", *_: Any, **__: Any) -> None:
    text = value if isinstance(value, str | bytes) else str(value)
    old = old if isinstance(old, str | bytes) else str(old)
    found = text.count(old) if isinstance(text, str) == isinstance(old, str) else 0
    budget.room(len(text) + found * budget.weigh(new).size)


def _join_filter(budget: Budget, value: Any, d: Any = "", *_: Any, **__: Any) -> None:
    budget.room(budget.weigh(value).size + _length(value) * budget.weigh(d).size)


def _join_method(budget: Budget, separator: Any, parts: Any = ()) -> None:
    _join_filter(budget, parts, separator)


def _indent(budget: Budget, value: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    text = str(value)
    step = width if isinstance(width, int) else _length(width)
    budget.room(len(text) + (text.count("\n") + 1) * (max(step, 0) + 1))


def _count_argument(budget: Budget, value: Any, count: Any = 1, *_: Any, **__: Any) -> None:
    if isinstance(count, int) and count > MAX_WIDTH:
        raise LimitError(f"it asks for groups of more than {MAX_WIDTH:,}")


def _slow(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> None:
    size = sum(budget.weigh(part).size for part in (value, *args, *kwargs.values()))
    if size > MAX_SLOW:
        raise LimitError(f"it uses a slow filter on {size:,} characters; at most {MAX_SLOW:,} are allowed")


def _wordwrap(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> None:
    _slow(budget, value, *args, **kwargs)
    extra = sum(_length(part) for part in (*args, *kwargs.values()))
    budget.room((_length(value) + 1) * (extra + 1))


def _round(budget: Budget, value: Any, precision: Any = 0, *_: Any, **__: Any) -> None:
    if isinstance(precision, int) and abs(precision) > 300:
        raise LimitError("it rounds to more than 300 digits")


def _number(budget: Budget, value: Any, *_: Any, **__: Any) -> None:
    if _length(value) > MAX_BITS:
        raise LimitError("it reads a number of very many digits")


def _sum(budget: Budget, iterable: Any, attribute: Any = None, start: Any = 0) -> None:
    if not isinstance(start, int | float):
        raise LimitError("it sums something other than numbers")


def _items(budget: Budget, value: Any) -> None:
    if _length(value) > MAX_ITEMS:
        raise LimitError(f"it makes a list of {_length(value):,} entries; at most {MAX_ITEMS:,} are allowed")


def _tojson(
    budget: Budget,
    value: Any,
    ensure_ascii: Any = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: Any = False,
) -> None:
    weight = budget.weigh(value)
    step = max(indent, 0) if isinstance(indent, int) else _length(indent or "")
    between = budget.weigh(separators).size if separators is not None else 0
    budget.room(weight.size + weight.nodes * (step * weight.depth + between))


def _search_back(budget: Budget, text: Any, part: Any = "", *_: Any, **__: Any) -> None:
    # Searching from the right, and stripping, take the product of both lengths.
    if _length(text) * _length(part) > 2**30:
        raise LimitError("it searches for a very long string in a very long one")


def _split(budget: Budget, text: Any, sep: Any = None, *_: Any, **__: Any) -> None:
    _search_back(budget, text, sep)
    if type(sep) is type(text) and sep and text.count(sep) > MAX_ITEMS:
        raise LimitError(f"it splits a string into more than {MAX_ITEMS:,} parts")


def _expandtabs(budget: Budget, text: Any, tabsize: Any = 8) -> None:
    tab = "\t" if isinstance(text, str) else b"\t"
    budget.room(len(text) + text.count(tab) * (tabsize if isinstance(tabsize, int) else 1))


def _translate(budget: Budget, text: Any, table: Any = None, *_: Any, **__: Any) -> None:
    values = table.values() if isinstance(table, dict) else ()
    budget.room(len(text) * max((_length(value) for value in values), default=1))


Check = Callable[..., None]

_FILTER_CHECKS: dict[str, Check] = {
    "batch": _count_argument, "center": _width, "float": _number, "format": _printf, "indent": _indent, "int": _number,
    "join": _join_filter, "list": _items, "pprint": _slow, "replace": _replace, "round": _round,
    "slice": _count_argument, "striptags": _slow, "sum": _sum, "tojson": _tojson, "trim": _search_back,
    "urlize": _slow, "wordcount": _slow, "wordwrap": _wordwrap, "xmlattr": _slow,
}  # fmt: skip

_METHOD_CHECKS: dict[str, Check] = {
    "center": _width, "expandtabs": _expandtabs, "join": _join_method, "ljust": _width, "lstrip": _search_back,
    "replace": _replace, "rfind": _search_back, "rindex": _search_back, "rjust": _width, "rpartition": _search_back,
    "rsplit": _split, "rstrip": _search_back, "split": _split, "strip": _search_back, "translate": _translate,
    "zfill": _width,
}  # fmt: skip

_BINOP_CHECKS: dict[str, Check] = {"+": _plus, "*": _times, "**": _power, "%": _percent}
