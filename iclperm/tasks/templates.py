"""Jinja2 templates of task files and of models' chats: one sandbox, and limits that end every rendering.

A template is code that other people wrote. It reaches nothing but the values that it is given, and its time, memory and
output are limited. A template of a task whose every single step is short is rendered in this process, under a clock
that its loops look at; all others are rendered in a process that is killed at the limit (`iclperm.base.worker`).
"""

from __future__ import annotations

import atexit
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cache, lru_cache, wraps
from typing import Any, Literal

from jinja2 import StrictUndefined, TemplateError, Undefined, meta, nodes, pass_context
from jinja2 import Template as CompiledTemplate
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.visitor import NodeTransformer

from iclperm.base.worker import Overtime, Worker, WorkerError
from iclperm.errors import ConfigError, DataError
from iclperm.tasks.sentences import first_sentence

Language = Literal["task", "chat"]
"""What a template may be written in: the little that a task needs, or all that transformers gives to a chat."""

MAX_LOOP_DEPTH = 2
MAX_PROCESS_MEMORY = 1 << 30  # of address space, where templates are rendered apart
_MAX_ROWS_PER_CALL = 512
_MAX_CALL_CHARS = 1 << 20  # of JSON, that rows are sent in; one row may have more
_MAX_REPLY_CHARS = 1 << 18  # after which a reply ends; one text may have more

# What a task's template may hold: no macro, import, power or product.
_ALLOWED_NODES = (
    nodes.Template, nodes.Output, nodes.TemplateData, nodes.Const, nodes.Name, nodes.Getattr, nodes.Getitem,
    nodes.Slice, nodes.Filter, nodes.Call, nodes.Keyword, nodes.If, nodes.CondExpr, nodes.Compare, nodes.Operand,
    nodes.And, nodes.Or, nodes.Not, nodes.Test, nodes.Concat, nodes.Add, nodes.Sub, nodes.Neg, nodes.List,
    nodes.Tuple, nodes.For, nodes.Dict, nodes.Pair, nodes.Assign,
)  # fmt: skip
_ALLOWED_FILTERS = frozenset({
    "capitalize", "default", "first", "first_sentence", "float", "int", "items", "join", "last", "length", "list",
    "lower", "map", "replace", "regex_replace", "reverse", "round", "string", "title", "tojson", "trim", "truncate",
    "upper",
})  # fmt: skip
_ALLOWED_METHODS: tuple[tuple[type, frozenset[str]], ...] = (
    (str, frozenset({
        "capitalize", "count", "endswith", "find", "index", "isdigit", "lower", "lstrip", "removeprefix",
        "removesuffix", "replace", "rsplit", "rstrip", "split", "startswith", "strip", "title", "upper",
    })),
    (list, frozenset({"count", "index"})),
    (tuple, frozenset({"count", "index"})),
    (dict, frozenset({"get", "items", "keys", "values"})),
)  # fmt: skip
_LONG_FILTERS = frozenset({"map", "regex_replace", "tojson"})  # may last, or grow, whatever they are applied to

# A step takes a time and a memory proportional to what it is applied to, except with these arguments.
_STEPS = (
    nodes.Filter, nodes.Call, nodes.Test, nodes.Getitem, nodes.Compare, nodes.Concat, nodes.Add, nodes.Sub, nodes.List,
    nodes.Tuple, nodes.Dict, nodes.Assign,
)  # fmt: skip
_GROWING = (nodes.Concat, nodes.Add, nodes.List, nodes.Tuple, nodes.Dict)  # what a 'set' holds nothing of
_NEED_FIXED_ARGUMENTS = frozenset({"lstrip", "replace", "round", "rstrip", "strip", "trim", "truncate"})
_MAX_SHORT_STEPS = 64
_MAX_FIXED_CHARS = 64
_MAX_FIXED_NUMBER = 1 << 16


@dataclass(frozen=True)
class RenderLimits:
    """What rendering may take: ``seconds`` of processor time for one row, and as much for all rows that are rendered
    together and ``seconds_a_row`` more for each; ``chars`` are the most characters of one text."""

    seconds: float = 5.0
    seconds_a_row: float = 0.01
    chars: int = 1 << 20


class RenderError(Exception):
    """A rendering was stopped, ``at`` which of the rows, by what, in a few words."""

    def __init__(self, at: int, reason: str) -> None:
        super().__init__(reason)
        self.at = at


class TooManyChars(RenderError):
    """The text has more characters than the limit."""


class TooSlow(RenderError):
    """The time is over."""


class ProcessFailed(RenderError):
    """The process in which templates are rendered died, mostly for want of memory."""


class Template:
    """One template of a task file; raises `ConfigError` for anything beyond inserting and choosing text.

    ``variables`` are the names that it reads, ``optional`` those of them of which it asks whether they are defined.
    ``is_short`` says that none of its steps can last, so that it is rendered
    in this process.
    """

    def __init__(self, name: str, source: str, limits: RenderLimits = RenderLimits()) -> None:
        self.name = name
        self._source = source
        self._limits = limits
        self._sandbox = Sandbox("task", limits)
        try:
            tree = self._sandbox.parse(source)
            self._refuse_the_harmful(tree)
            self.variables = frozenset(meta.find_undeclared_variables(tree)) - {"range"}
            self.optional = frozenset(_asked_for(tree)) & self.variables
            self.is_short = _is_short(tree)
            self._compiled = self._sandbox.compiled(tree)
        except ConfigError:
            raise
        except Exception as error:  # Jinja2's own, or Python's where an expression is too deep or a number too long
            raise ConfigError(f"the template {name!r} is not valid: {_first_line(_shown(error))}; repair it") from None

    def render(self, values: Mapping[str, Any]) -> str:
        """The text of one row; raises as `render_all` does."""
        (text,) = self.render_all([values])
        return text

    def render_all(self, rows: Sequence[Mapping[str, Any]], places: Sequence[str] | None = None) -> list[str]:
        """The text of each row, in order.

        Raises `DataError`, which begins with the row's place where ``places`` are given: for a name that the row lacks,
        for more than 1 Mi characters, for more than 5 seconds of processor time, and for more than that and a hundredth
        of a second a row for all rows so far. O(rows); some tenths of a second where a process has to start.
        """
        try:
            return list(self._rendered_here(rows) if self.is_short else self._rendered_apart(rows))
        except RenderError as error:
            place = f"{places[error.at]}: " if places else ""
            problem = (
                f"renders more than {self._limits.chars} characters"
                if isinstance(error, TooManyChars)
                else f"cannot be rendered: {_first_line(error)}"
            )
            remedy = "" if "; " in problem else "; correct the template, or this row's data"
            raise DataError(f"{place}the template {self.name!r} {problem}{remedy}") from None

    def _rendered_here(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
        begin = time.thread_time()
        for at, row in enumerate(rows):
            yield self._sandbox.text(self._compiled, row, at)
            _refuse_slow(at, time.thread_time() - begin, self._limits)

    def _rendered_apart(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
        read = [{name: row[name] for name in self.variables if name in row} for row in rows]
        return rendered_apart("task", self._source, read, self._limits)

    def _refuse_the_harmful(self, tree: nodes.Template) -> None:
        for node in tree.find_all(nodes.Node):
            if not isinstance(node, _ALLOWED_NODES):
                used = type(node).__name__
                raise ConfigError(f"the template {self.name!r} uses {used!r}, which is not allowed; say it without")
        if any(next(each.find_all(_GROWING), None) for each in tree.find_all(nodes.Assign)):
            raise ConfigError(
                f"the template {self.name!r} puts texts together in a 'set', which could grow; say it without"
            )
        if any(loop.recursive for loop in tree.find_all(nodes.For)) or _loop_depth(tree) > MAX_LOOP_DEPTH:
            raise ConfigError(f"the template {self.name!r} nests loops deeper than {MAX_LOOP_DEPTH}; use fewer")


def parsed_task_template(source: str) -> nodes.Template:
    """The tree of a task's template, before anything in it is refused; raises what Jinja2 does."""
    return Sandbox("task", RenderLimits()).parse(source)


def rendered_apart(
    language: Language, source: str, rows: Sequence[Mapping[str, Any]], limits: RenderLimits
) -> Iterator[str]:
    """The text of each row, in order, rendered in a process that is killed at the limits; raises `RenderError`.

    The first row goes alone, so that a template that never ends costs one row's limit; then more and more go at once.
    """
    used, at, most, alone_until = 0.0, 0, 1, 0
    while at < len(rows):
        some = _first_of(rows, at, most if at >= alone_until else 1)
        payload = {"language": language, "source": source, "limits": astuple(limits), "rows": f"[{','.join(some)}]"}
        try:
            reply = _worker().call(payload, limits.seconds + limits.seconds_a_row * (len(some) - 1))
        except (Overtime, WorkerError) as error:
            if len(some) > 1:  # which of them it was shows one by one
                alone_until = at + len(some)
                continue
            is_late = isinstance(error, Overtime)
            raise TooSlow(at, _over(limits.seconds)) if is_late else ProcessFailed(at, str(error)) from None
        for outcome in reply["outcomes"]:
            if "text" not in outcome:
                raise _ERRORS[outcome["error"]](at, outcome["reason"])
            yield outcome["text"]
            at += 1
        used += reply["seconds"]
        _refuse_slow(at - 1, used, limits)
        most = min(8 * most, _MAX_ROWS_PER_CALL)


def render_rows(payload: Mapping[str, Any]) -> dict[str, Any]:
    """The other side of `rendered_apart`, in the process that may be killed: an outcome for each of the first rows, a
    text or what stopped it, and the processor time that they took."""
    begin, outcomes, length = time.process_time(), [], 0
    for at, row in enumerate(json.loads(payload["rows"])):
        try:
            sandbox, template = _compiled(payload["language"], payload["source"], tuple(payload["limits"]))
            text = sandbox.text(template, row, at)
        except RenderError as error:
            outcomes.append({"error": type(error).__name__, "reason": str(error)})
            break
        outcomes.append({"text": text})
        length += len(text)
        if length > _MAX_REPLY_CHARS:
            break
    return {"outcomes": outcomes, "seconds": time.process_time() - begin}


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja2 without anything that reaches beyond the values it is given, or that differs from one time to the next.

    Nothing is computed while a template is compiled. Products and sums, and whatever is shown, are held against a size.
    In the language of tasks there are no functions and only a few filters and methods of text, and every loop and
    filter looks at the clock. The language of chats is what transformers gives, without the date and chance.
    """

    intercepted_binops = frozenset({"+", "*"})

    def __init__(self, language: Language, limits: RenderLimits) -> None:
        is_task = language == "task"
        super().__init__(
            undefined=StrictUndefined if is_task else Undefined,
            autoescape=False,
            keep_trailing_newline=is_task,
            trim_blocks=not is_task,
            lstrip_blocks=not is_task,
            extensions=[] if is_task else [_GenerationTag, "jinja2.ext.loopcontrols"],
            finalize=pass_context(lambda _, value: self._bounded(value)),  # needs a context, so never when compiling
            optimized=False,
        )
        self._is_task = is_task
        self._limits = limits
        self._deadline = 0.0
        if is_task:
            self.globals.clear()
            self.globals["range"] = _range
            made = {**self.filters, "join": self._join, "replace": self._replace, "regex_replace": _regex_replace}
            made["first_sentence"] = lambda text: first_sentence(str(text))
            self.filters = {name: self._watched(made[name]) for name in _ALLOWED_FILTERS} | {"each": self._each}
        else:
            self.filters["tojson"] = _to_json
            self.globals["raise_exception"] = _raise_exception
            del self.filters["random"], self.globals["lipsum"]

    def compiled(self, tree: nodes.Template) -> CompiledTemplate:
        """A template that can be rendered; a task's loops and ``~`` become filters, which the sandbox watches."""
        return self.from_string(_Watch().visit(tree) if self._is_task else tree)

    def text(self, template: CompiledTemplate, values: Mapping[str, Any], at: int) -> str:
        """What a template makes of one row's values; raises `RenderError` ``at`` this row."""
        pieces, length = [], 0
        self._deadline = time.thread_time() + self._limits.seconds  # its own time counts, not that of other processes
        try:
            for piece in template.generate(values):
                pieces.append(piece)
                length += len(piece)
                if length > self._limits.chars:
                    raise TooManyChars(at, f"it writes more than {self._limits.chars} characters")
        except RenderError:
            raise
        except Exception as error:  # an expression can divide by zero, overflow, fail an assertion of Jinja2, ...
            raise RenderError(at, _shown(error)) from None
        return "".join(pieces)

    def is_safe_callable(self, obj: Any) -> bool:
        if not self._is_task:
            return super().is_safe_callable(obj)
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        return obj is _range or any(isinstance(owner, kind) and name in names for kind, names in _ALLOWED_METHODS)

    def call(self, context: Any, obj: Any, *arguments: Any, **options: Any) -> Any:
        owner = getattr(obj, "__self__", None)
        if self._is_task and isinstance(owner, str) and getattr(obj, "__name__", "") == "replace":
            return self._replace(owner, *arguments, **options)
        return super().call(context, obj, *arguments, **options)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, str | list | tuple) and isinstance(other, int) and len(one) * other > self._most:
                    raise self._too_much("holds")
        return self._bounded(super().call_binop(context, operator, left, right))

    @property
    def _most(self) -> int:
        return self._limits.chars

    def _too_much(self, verb: str) -> ValueError:
        return ValueError(f"it {verb} more than {self._most} characters")

    def _bounded(self, value: Any) -> Any:
        """The value, if it does not hold too much."""
        if isinstance(value, str):
            if len(value) > self._most:
                raise self._too_much("holds")
            return value
        left, inside = self._most, [value]
        while inside:
            item = inside.pop()
            left -= len(item) if isinstance(item, str | list | tuple | dict) else 1
            if left < 0:
                raise self._too_much("holds")
            if isinstance(item, list | tuple | dict):
                inside += item.values() if isinstance(item, dict) else item
        return value

    def _join(self, values: Iterable[Any], separator: Any = "") -> str:
        pieces, between = [str(self._bounded(value)) for value in values], str(separator)
        if sum(map(len, pieces)) + len(between) * len(pieces) > self._most:
            raise self._too_much("joins")
        return between.join(pieces)

    def _replace(self, text: Any, old: str, new: str, count: int | None = None) -> str:
        before, old, new = str(text), str(old), str(new)
        times = before.count(old) if count is None or count < 0 else min(before.count(old), count)
        if len(before) + times * (len(new) - len(old)) > self._most:
            raise self._too_much("writes")
        return before.replace(old, new, times)

    def _each(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self._refuse_overtime()
            yield value

    def _watched(self, filter_: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(filter_)
        def watched(*arguments: Any, **options: Any) -> Any:
            self._refuse_overtime()
            return filter_(*map(self._bounded, arguments), **options)

        return watched

    def _refuse_overtime(self) -> None:
        if time.thread_time() > self._deadline:
            raise ValueError(_over(self._limits.seconds))


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


class _GenerationTag(Extension):
    """``{% generation %}`` marks what an assistant writes, for training; here it is only what stands in it."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Scope:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _range(*bounds: int) -> range:
    return safe_range(*bounds)


def _regex_replace(text: str, pattern: str, repl: str, count: int = 0) -> str:
    """As lm-evaluation-harness has it; only in the process that is killed at the limit, see `_LONG_FILTERS`."""
    replaced: str = re.sub(pattern, repl, text, count=count)
    return replaced


def _asked_for(tree: nodes.Template) -> Iterator[str]:
    """The names that a template holds against `is defined` or gives a default."""
    asked = [test.node for test in tree.find_all(nodes.Test) if test.name in ("defined", "undefined")]
    asked += [filter_.node for filter_ in tree.find_all(nodes.Filter) if filter_.name == "default" and filter_.node]
    return (node.name for node in asked if isinstance(node, nodes.Name))


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


_ERRORS: dict[str, type[RenderError]] = {kind.__name__: kind for kind in (RenderError, TooManyChars, TooSlow)}


@cache
def _worker() -> Worker:
    worker = Worker("iclperm.tasks.templates:render_rows", memory=MAX_PROCESS_MEMORY)
    atexit.register(worker.close)
    return worker


@lru_cache(maxsize=8)
def _compiled(language: Language, source: str, limits: tuple[Any, ...]) -> tuple[Sandbox, CompiledTemplate]:
    sandbox = Sandbox(language, RenderLimits(*limits))
    try:
        return sandbox, sandbox.compiled(sandbox.parse(source))
    except Exception as error:  # Jinja2's own, or Python's where it is nested too deeply
        raise RenderError(0, _shown(error)) from None


def _first_of(rows: Sequence[Mapping[str, Any]], begin: int, most: int) -> list[str]:
    """The rows from ``begin`` on that are sent together, as JSON: at least one."""
    some: list[str] = []
    length = 0
    for row in rows[begin : begin + most]:
        try:
            encoded = json.dumps(row)
        except (TypeError, ValueError, RecursionError) as error:
            raise RenderError(begin + len(some), _shown(error)) from None
        length += len(encoded)
        if some and length > _MAX_CALL_CHARS:
            break
        some.append(encoded)
    return some


def _refuse_slow(at: int, used: float, limits: RenderLimits) -> None:
    """Raises `TooSlow` where the rows up to ``at`` took more processor time than so many may."""
    most = limits.seconds + limits.seconds_a_row * (at + 1)
    if used > most:
        raise TooSlow(at, f"{_over(most)} for {at + 1} rows")


def _over(seconds: float) -> str:
    return f"it takes more than {seconds:g} seconds"


def _is_short(tree: nodes.Template) -> bool:
    """Whether a task's template has few steps, and none that can last or grow beyond a small multiple of its row.

    Loops may be among them, since they look at the clock at every turn.
    """
    steps = list(tree.find_all(_STEPS))
    return len(steps) <= _MAX_SHORT_STEPS and all(map(_is_short_step, steps))


def _is_short_step(step: nodes.Node) -> bool:
    match step:
        case nodes.Filter(name=name) if name in _LONG_FILTERS:
            return False
        case nodes.Assign():
            return isinstance(step.node, nodes.Const)
        case nodes.Filter(name=name) | nodes.Call(node=nodes.Getattr(attr=name)):
            arguments = [*step.args, *(keyword.value for keyword in step.kwargs)]
            kinds = nodes.Const if name in _NEED_FIXED_ARGUMENTS else (nodes.Const, nodes.Name)
            is_plain = all(isinstance(argument, kinds) and _is_small(argument) for argument in arguments)
            return is_plain and step.dyn_args is None and step.dyn_kwargs is None
        case nodes.Call():
            return False
        case nodes.Concat() | nodes.Add() | nodes.List() | nodes.Tuple() | nodes.Dict():  # holds all its parts at once
            return not any(map(_makes_list, step.find_all((nodes.Filter, nodes.Call))))
    return True


def _is_small(argument: nodes.Expr) -> bool:
    if not isinstance(argument, nodes.Const):
        return True
    if isinstance(argument.value, int | float):
        return abs(argument.value) <= _MAX_FIXED_NUMBER
    return len(str(argument.value)) <= _MAX_FIXED_CHARS


def _makes_list(step: nodes.Expr) -> bool:
    called = getattr(step, "node", None)
    name = step.name if isinstance(step, nodes.Filter) else getattr(called, "attr", "split")
    return name in ("items", "keys", "list", "reverse", "rsplit", "split", "values")


def _shown(error: Exception) -> str:
    """What went wrong, in the words of Jinja2 or Python where they are any."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, MemoryError):
        return "it needs too much memory"
    return str(error) or type(error).__name__


def _first_line(problem: object) -> str:
    """Jinja2 adds lines about its own code."""
    return str(problem).splitlines()[0]


def _loop_depth(node: nodes.Node) -> int:
    deepest = max((_loop_depth(child) for child in node.iter_child_nodes()), default=0)
    return deepest + isinstance(node, nodes.For)
