"""Jinja2 templates of which only the harmless part is allowed, because task files come from other people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import StrictUndefined, TemplateError, meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment

from iclperm.errors import ConfigError, DataError

MAX_RENDERED_CHARS = 1 << 20
MAX_LOOP_DEPTH = 2

# No assignment, macro, import, power or product: what is left cannot loop or grow beyond the row that it is given.
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
    """The immutable sandbox, without Jinja2's global functions and with the few filters above."""

    def __init__(self) -> None:
        super().__init__(undefined=StrictUndefined, autoescape=False, keep_trailing_newline=True)
        self.globals.clear()
        self.filters = {name: made for name, made in self.filters.items() if name in _ALLOWED_FILTERS}

    def is_safe_callable(self, obj: Any) -> bool:
        return isinstance(getattr(obj, "__self__", None), str) and obj.__name__ in _ALLOWED_METHODS


class Template:
    """One template of a task file; raises `ConfigError` for anything beyond inserting and choosing text.

    ``variables`` are the names that it reads.
    """

    def __init__(self, name: str, source: str) -> None:
        self.name = name
        sandbox: SandboxedEnvironment = _Sandbox()
        try:
            tree = sandbox.parse(source)
            self._refuse_the_harmful(tree)
            self.variables = frozenset(meta.find_undeclared_variables(tree))
            self._template = sandbox.from_string(source)
        except TemplateError as error:
            raise ConfigError(f"the template {name!r} is not valid: {error}") from None

    def render(self, values: Mapping[str, Any]) -> str:
        """The text for one row; raises `DataError` for a name that the row lacks and for more than 1 Mi characters."""
        pieces, length = [], 0
        try:
            for piece in self._template.generate(values):
                pieces.append(piece)
                length += len(piece)
                if length > MAX_RENDERED_CHARS:
                    raise DataError(f"the template {self.name!r} renders more than {MAX_RENDERED_CHARS} characters")
        except (TemplateError, TypeError, ValueError, RecursionError) as error:
            raise DataError(f"the template {self.name!r} cannot be rendered: {error}") from None
        return "".join(pieces)

    def _refuse_the_harmful(self, tree: nodes.Template) -> None:
        for node in tree.find_all(nodes.Node):
            if not isinstance(node, _ALLOWED_NODES):
                raise ConfigError(f"the template {self.name!r} uses {type(node).__name__!r}, which is not allowed")
        if any(loop.recursive for loop in tree.find_all(nodes.For)) or _loop_depth(tree) > MAX_LOOP_DEPTH:
            raise ConfigError(f"the template {self.name!r} nests loops deeper than {MAX_LOOP_DEPTH}")


def _loop_depth(node: nodes.Node) -> int:
    deepest = max((_loop_depth(child) for child in node.iter_child_nodes()), default=0)
    return deepest + isinstance(node, nodes.For)
