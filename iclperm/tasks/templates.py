"""Jinja2 templates of which only the harmless part is allowed, because task files come from other people."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from typing import Any

from jinja2 import StrictUndefined, meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from iclperm.errors import ConfigError, DataError

MAX_RENDERED_CHARS = 1 << 20
MAX_RENDER_SECONDS = 5.0
MAX_LOOP_DEPTH = 2

# No assignment, macro, import, power or product; what can still loop or grow is watched while it does, see _Sandbox.
_ALLOWED_NODES = (
    nodes.Template, nodes.Output, nodes.TemplateData, nodes.Const, nodes.Name, nodes.Getattr, nodes.Getitem,
    nodes.Slice, nodes.Filter, nodes.Call, nodes.Keyword, nodes.If, nodes.CondExpr, nodes.Compare, nodes.Operand,
    nodes.And, nodes.Or, nodes.Not, nodes.Test, nodes.Concat, nodes.Add, nodes.Sub, nodes.Neg, nodes.List,
    nodes.Tuple, nodes.For,
)  # fmt: skip
_ALLOWED_FILTERS = frozenset({
    "capitalize", "default", "first", "int", "join", "last", "length", "list", "lower", "reverse", "round", "string",
    "title", "trim", "truncate", "upper",
})  # fmt: skip
_ALLOWED_METHODS = frozenset({
    "capitalize", "endswith", "lower", "lstrip", "rstrip", "split", "startswith", "strip", "title", "upper",
})  # fmt: skip


class _Sandbox(ImmutableSandboxedEnvironment):
    """The immutable sandbox, without Jinja2's global functions and with the few filters above.

    Every loop and filter looks at the clock, and what is put together or shown is held against a size: few characters
    of a template can make many, and without end.
    """

    intercepted_binops = frozenset({"+"})

    def __init__(self) -> None:
        super().__init__(undefined=StrictUndefined, autoescape=False, keep_trailing_newline=True, finalize=_bounded)
        self.globals.clear()
        made = {**self.filters, "join": _join}
        self.filters = {name: self._watched(made[name]) for name in _ALLOWED_FILTERS} | {"each": self._each}
        self._deadline = 0.0

    def start_clock(self) -> None:
        """A rendering begins. Its own time counts, not what other processes take."""
        self._deadline = time.thread_time() + MAX_RENDER_SECONDS

    def is_safe_callable(self, obj: Any) -> bool:
        return isinstance(getattr(obj, "__self__", None), str) and obj.__name__ in _ALLOWED_METHODS

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        return _bounded(super().call_binop(context, operator, left, right))

    def _each(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self._refuse_overtime()
            yield value

    def _watched(self, filter_: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(filter_)
        def watched(*arguments: Any, **options: Any) -> Any:
            self._refuse_overtime()
            return filter_(*map(_bounded, arguments), **options)

        return watched

    def _refuse_overtime(self) -> None:
        if time.thread_time() > self._deadline:
            raise ValueError(f"it takes more than {MAX_RENDER_SECONDS:.0f} seconds")


class _Watch(NodeTransformer):
    """Puts loops and ``~`` where the sandbox can watch them."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "each", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(parts, "join", [], [], None, None, lineno=node.lineno)


class Template:
    """One template of a task file; raises `ConfigError` for anything beyond inserting and choosing text.

    ``variables`` are the names that it reads.
    """

    def __init__(self, name: str, source: str) -> None:
        self.name = name
        self._sandbox = _Sandbox()
        try:
            tree = self._sandbox.parse(source)
            self._refuse_the_harmful(tree)
            self.variables = frozenset(meta.find_undeclared_variables(tree))
            self._template = self._sandbox.from_string(_Watch().visit(tree))
        except ConfigError:
            raise
        except Exception as error:  # Jinja2's own, or Python's where an expression is too deep or a number too long
            raise ConfigError(f"the template {name!r} is not valid: {_reason(error)}; repair it") from None

    def render(self, values: Mapping[str, Any]) -> str:
        """The text for one row; raises `DataError` for a name that the row lacks, for more than 1 Mi characters and
        for more than 5 seconds."""
        pieces, length = [], 0
        self._sandbox.start_clock()
        try:
            for piece in self._template.generate(values):
                pieces.append(piece)
                length += len(piece)
                if length > MAX_RENDERED_CHARS:
                    raise DataError(f"the template {self.name!r} renders more than {MAX_RENDERED_CHARS} characters")
        except DataError:
            raise
        except Exception as error:  # an expression can divide by zero, overflow, fail an assertion of Jinja2, ...
            raise DataError(f"the template {self.name!r} cannot be rendered: {_reason(error)}") from None
        return "".join(pieces)

    def _refuse_the_harmful(self, tree: nodes.Template) -> None:
        for node in tree.find_all(nodes.Node):
            if not isinstance(node, _ALLOWED_NODES):
                raise ConfigError(f"the template {self.name!r} uses {type(node).__name__!r}, which is not allowed")
        if any(loop.recursive for loop in tree.find_all(nodes.For)) or _loop_depth(tree) > MAX_LOOP_DEPTH:
            raise ConfigError(f"the template {self.name!r} nests loops deeper than {MAX_LOOP_DEPTH}")


def _join(values: Iterable[Any], separator: Any = "") -> str:
    pieces, between = [str(_bounded(value)) for value in values], str(separator)
    if sum(map(len, pieces)) + len(between) * len(pieces) > MAX_RENDERED_CHARS:
        raise ValueError(f"it joins more than {MAX_RENDERED_CHARS} characters")
    return between.join(pieces)


def _bounded(value: Any) -> Any:
    """The value, if it does not hold too much."""
    left, inside = MAX_RENDERED_CHARS, [value]
    while inside:
        item = inside.pop()
        left -= len(item) if isinstance(item, (str, list, tuple, dict)) else 1
        if left < 0:
            raise ValueError(f"it holds more than {MAX_RENDERED_CHARS} characters")
        if isinstance(item, (list, tuple, dict)):
            inside += item.values() if isinstance(item, dict) else item
    return value


def _reason(error: Exception) -> str:
    """One line of it; Jinja2 adds lines about its own code."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return (str(error) or type(error).__name__).splitlines()[0]


def _loop_depth(node: nodes.Node) -> int:
    deepest = max((_loop_depth(child) for child in node.iter_child_nodes()), default=0)
    return deepest + isinstance(node, nodes.For)
