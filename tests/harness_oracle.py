"""lm-evaluation-harness itself, held against `HarnessTask`: its `ConfigurableTask` on rows that are made up.

`made_up` looks which columns a file's templates read, and of what kind they must be, and makes rows of them;
`differences` renders them both ways and names what is not byte for byte the same.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, nodes
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks._yaml_loader import load_yaml

from iclperm.tasks.harness import ExactMatch, HarnessTask

logging.getLogger("lm_eval").setLevel(logging.CRITICAL)
NUM_ROWS = 4
_TEXTS = ("It's a {column} of 3", " a “{column}”, or\ntwo ", "{column}: \\n {{{{ x }}}} 100%", "ünï {column} # [1]")
_LIST = 5  # entries of a list
_KEYS = ("doc_to_text", "doc_to_choice", "doc_to_target", "description", "gen_prefix")
_PARSER = Environment()


class Rows(list[dict[str, Any]]):
    """A split as the harness wants it: rows that know their columns."""

    @property
    def features(self) -> dict[str, Any]:
        return dict.fromkeys(key for row in self for key in row)


class Splits(dict[str, Rows]):
    """A data set in which every split has the same rows."""

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        super().__init__()
        self._rows = Rows(rows)

    def __missing__(self, split: str) -> Rows:
        return self._rows


class _Shape:
    """What is known of a value that templates read."""

    def __init__(self) -> None:
        self.parts: dict[str, _Shape] = {}
        self.kind = ""
        self.values: list[Any] = []
        self.may_be_none = False
        self.may_be_missing = False
        self.element_of: _Shape | None = None

    def at(self, name: str) -> _Shape:
        return self.parts.setdefault(name, _Shape())

    def value(self, column: str, number: int) -> Any:
        if self.element_of is not None:
            listed = self.element_of.value("", number)
            return listed[(3 * number + 1) % len(listed)]
        if self.kind == "dicts":
            return [{name: part.value(f"{name}{at}", number) for name, part in self.parts.items()} for at in range(4)]
        if self.parts:
            return {name: part.value(name, number) for name, part in self.parts.items()}
        if self.values:
            return self.values[number % len(self.values)]
        match self.kind:
            case "list":
                return [f"{'ABCDE'[at]} {_TEXTS[at % 4].format(column='choice')} {at}" for at in range(_LIST)]
            case "index":
                return number % 2 + 1
            case "digits":
                return str(number % 2 + 1)
        return f"{_TEXTS[number % 4].format(column=column)} {number}" + " words" * 8


def made_up(config: Mapping[str, Any], count: int = NUM_ROWS) -> list[dict[str, Any]]:
    """Rows with the columns that the templates of a file read, of the kinds that they need."""
    shapes: dict[str, _Shape] = {}
    for key in _KEYS:
        given = config.get(key)
        if isinstance(given, str):
            if given.isidentifier() and key.startswith("doc_to"):
                shapes.setdefault(given, _Shape())
            else:
                _look(_PARSER.parse(given), shapes)
    choices = config.get("doc_to_choice")
    if isinstance(choices, str) and (shape := _whole(choices, shapes)):
        shape.kind = "list"
    rows = [
        {
            name: None if shape.may_be_none and number % 2 else shape.value(name, number)
            for name, shape in shapes.items()
            if not (shape.may_be_missing and number % 2)
        }
        for number in range(count)
    ]
    target = config.get("doc_to_target")
    shape = _whole(target, shapes) if isinstance(target, str) else None
    if shape is not None and not (shape.values or shape.element_of or shape.kind or shape.parts):
        _point(config, rows, target)
    if any("multi_choice_regex" in str(each) for each in config.get("filter_list") or ()):
        for row in rows:
            row.setdefault("choices", [f"option {letter}" for letter in "ABCD"])
    return rows


def _point(config: Mapping[str, Any], rows: list[dict[str, Any]], target: str) -> None:
    """Lets the target, a column or what stands in it, be right answers: positions, choices, texts, several texts."""
    path = [target] if target.isidentifier() else _path(_only(target))
    for number, row in enumerate(rows):
        place: Any = row
        for name in path[:-1]:
            place = place[name]
        if str(config.get("output_type", "generate_until")).startswith("loglikelihood"):
            continue
        if config.get("doc_to_choice") is None:
            if number % 2 and not target.isidentifier() and len(target) == len(target.strip()):
                place[path[-1]] = [f"gold {number}", "it's another"]
            elif target.isidentifier() and number % 2:
                place[path[-1]] = [f"gold {number}", "another"]
            continue
        harness = ConfigurableTask(config=_runnable(config, rows))
        listed = harness.doc_to_choice(row)
        at = (number + 1) % len(listed)
        place[path[-1]] = at if number % 2 == 0 or config["output_type"] != "multiple_choice" else listed[at]


def _only(text: str) -> nodes.Expr:
    (output,) = _PARSER.parse(text.strip()).find_all(nodes.Output)
    (shown,) = output.nodes
    while isinstance(shown, nodes.Call | nodes.Filter | nodes.Getattr) and not _path(shown):
        shown = shown.node
    return shown


def _whole(text: str, shapes: dict[str, _Shape]) -> _Shape | None:
    """The shape of the one value that a key is."""
    if text.isidentifier():
        return shapes.get(text)
    outputs = list(_PARSER.parse(text.strip()).find_all(nodes.Output))
    if len(outputs) != 1 or len(outputs[0].nodes) != 1:
        return None
    shown = outputs[0].nodes[0]
    return _shape(shown, shapes) if _path(shown) else None


def _path(node: nodes.Node) -> list[str]:
    """The names that lead to a value; none for what is computed."""
    match node:
        case nodes.Name():
            return [node.name]
        case nodes.Getattr():
            above = _path(node.node)
            return [*above, node.attr] if above and node.attr not in {*dir(str), "index", "items"} else []
        case nodes.Getitem(arg=nodes.Const(value=str())):
            above = _path(node.node)
            return [*above, node.arg.value] if above else []
    return []


def _shape(node: nodes.Node, shapes: dict[str, _Shape]) -> _Shape | None:
    names = _path(node)
    if not names:
        return None
    shape = shapes.setdefault(names[0], _Shape())
    for name in names[1:]:
        shape = shape.at(name)
    return shape


def _look(tree: nodes.Template, shapes: dict[str, _Shape]) -> None:
    known = {name.name for name in tree.find_all(nodes.Name) if name.ctx == "store"} | {"range", "loop"}
    for node in tree.find_all(nodes.Name):
        if node.name not in known:
            shapes.setdefault(node.name, _Shape())
    for node in tree.find_all((nodes.Getattr, nodes.Getitem)):
        _shape(node, shapes)
    for node in tree.find_all(nodes.Node):
        _learn(node, shapes)
    for name in known:
        shapes.pop(name, None)


def _learn(node: nodes.Node, shapes: dict[str, _Shape]) -> None:
    match node:
        case nodes.Call(node=nodes.Getattr(attr="index", node=listed), args=[sought]):
            inner = sought
            while isinstance(inner, nodes.Call):
                inner = inner.node.node
            asked = _shape(inner, shapes)
            if asked is None:
                return
            if isinstance(listed, nodes.List):
                asked.values = [part.value for part in listed.items]
            elif (shape := _shape(listed, shapes)) is not None:
                shape.kind = "list"
                asked.element_of = shape
        case nodes.Getitem(node=listed, arg=nodes.Const(value=int())) if shape := _shape(listed, shapes):
            shape.kind = shape.kind or "list"
        case nodes.Getitem(node=nodes.List(items=items), arg=at):
            inner = at.left if isinstance(at, nodes.Sub) else at
            if (shape := _shape(inner, shapes)) is not None:
                first = 1 if isinstance(at, nodes.Sub) else 0
                shape.values = [first + number for number in range(len(items))]
        case nodes.Getitem(node=listed, arg=at) if shape := _shape(at, shapes):
            shape.kind = "index"
            if (of := _shape(listed, shapes)) is not None:
                of.kind = "list"
        case nodes.Sub(left=nodes.Filter(name="int", node=left)) if shape := _shape(left, shapes):
            shape.kind = "digits"
        case nodes.Sub(left=left) if shape := _shape(left, shapes):
            shape.kind = "index"
        case nodes.Filter(name="int", node=inner) if shape := _shape(inner, shapes):
            shape.kind = "digits"
        case nodes.Filter(name="join" | "length", node=inner) if shape := _shape(inner, shapes):
            shape.kind = "list"
        case nodes.Filter(name="map", node=inner, kwargs=[nodes.Keyword(value=nodes.Const(value=name))]):
            if (shape := _shape(inner, shapes)) is not None:
                shape.kind = "dicts"
                shape.at(name)
        case nodes.Compare(expr=inner, ops=[nodes.Operand(op="eq", expr=nodes.Const(value=value))]):
            if (shape := _shape(inner, shapes)) is not None:
                shape.values.append(value)
        case nodes.Test(name="none", node=inner) if shape := _shape(inner, shapes):
            shape.may_be_none = True
        case nodes.Test(name="defined", node=inner) if shape := _shape(inner, shapes):
            shape.may_be_missing = True


def _runnable(config: Mapping[str, Any], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A configuration that the harness builds without a network: rows of ours, no metric that it would download."""
    keys = {key: copy.deepcopy(value) for key, value in config.items() if key not in ("tag", "group", "task_list")}
    keys["custom_dataset"] = lambda **_: Splits(rows)
    for key in ("metadata", "dataset_kwargs"):
        keys.pop(key, None)
    listed = [metric for metric in keys.get("metric_list") or () if not metric.get("hf_evaluate")]
    if keys.get("metric_list"):
        keys["metric_list"] = listed or [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]
    return keys


class _Drawn:
    """A sampler that takes the demonstrations it is given."""

    def __init__(self, docs: Sequence[dict[str, Any]]) -> None:
        self._docs = docs

    def sample(self, n: int, eval_doc: Any = None) -> Sequence[dict[str, Any]]:
        return self._docs[:n]


def differences(path: Path, shots: Sequence[int] = (0, 2), count: int = NUM_ROWS) -> Iterator[str]:
    """What `HarnessTask` makes otherwise than the harness of the file at ``path``; nothing where all is the same."""
    config = load_yaml(path, resolve_func=False)
    rows = made_up(config, count)
    ours, theirs = HarnessTask.from_yaml(path), ConfigurableTask(config=_runnable(config, rows))
    yield from _differs("output", ours.output, theirs.OUTPUT_TYPE)
    yield from _differs("shots", ours.shots, theirs.config.num_fewshot or 0)
    rendered = ours.render_all(rows)
    examples = [*(ours.splits.samples or rows[1:])]
    theirs.sampler = _Drawn(examples)
    for number, (doc, row) in enumerate(zip(rows, rendered, strict=True)):
        theirs.multiple_input = isinstance(theirs.doc_to_text(doc), int)
        for shown in shots:
            context = theirs.fewshot_context(doc, shown, gen_prefix=theirs.doc_to_prefix(doc))
            contexts = tuple(context) if isinstance(context, list) else (context,)
            made = theirs.construct_requests(doc, context, metadata=("made up", number, 1))
            yield from _differs(f"row {number}, {shown} shots", ours.prompts(doc, examples[:shown]), contexts)
            yield from _differs(
                f"row {number}, continuations", _requests(ours, doc, examples[:shown], row), _args(made)
            )
        yield from _gold_differences(ours, theirs, doc, row, f"row {number}")
        if ours.output == "generate_until":
            yield from _read_differences(ours, theirs, doc, row, f"row {number}")


def _requests(ours: HarnessTask, doc: Any, examples: Any, row: Any) -> list[tuple[str, ...]]:
    prompts = ours.prompts(doc, examples)
    if ours.output == "generate_until":
        return [(prompts[0], *ours.stop)]
    if ours.output == "loglikelihood_rolling":
        return [row.continuations]
    return [(prompt, after) for prompt in prompts for after in row.continuations]


def _args(made: Any) -> list[tuple[str, ...]]:
    if not isinstance(made, list):
        made = [made]
    if made[0].request_type == "generate_until":
        return [(made[0].args[0], *_listed(made[0].args[1]["until"]))]
    requests = [each.args for each in made]
    return (
        requests[: len(requests) // 2] if any(each[0] == "" for each in requests[1:]) and requests[0][0] else requests
    )


def _listed(until: Any) -> list[str]:
    return [until] if isinstance(until, str) else list(until)


def _gold_differences(ours: HarnessTask, theirs: Any, doc: Any, row: Any, place: str) -> Iterator[str]:
    target = theirs.doc_to_target(doc)
    theirs.multiple_target = len(target) if isinstance(target, list) else 0
    if ours.output == "multiple_choice":
        kept, theirs._metric_fn_list = theirs._metric_fn_list, {"acc": None}
        for at in range(len(row.choices)):
            results = [(-1.0 if other == at else -2.0, False) for other in range(len(row.choices))]
            right = theirs.process_results(doc, results)["acc"] == 1.0
            yield from _differs(f"{place}, is {at} right", at in row.golds, right)
        theirs._metric_fn_list = kept
    elif ours.output == "generate_until" and theirs.config.doc_to_choice is None:
        golds = tuple(target) if isinstance(target, list) else (str(target),)
        yield from _differs(f"{place}, golds", row.answers, golds)


def _read_differences(ours: HarnessTask, theirs: Any, doc: Any, row: Any, place: str) -> Iterator[str]:
    """Made-up answers through every pipeline, and the metric of each."""
    names = [metric.metric for metric in ours.metrics]
    texts = [f"{before}{gold}{after}" for gold in row.answers[:1] for before, after in _AROUND] + list(_ANSWERS)
    for text in texts:
        made = theirs.construct_requests(doc, "", metadata=("made up", 0, 1))
        made.resps = [text] * max(pipeline.num_texts for pipeline in ours.pipelines)
        for theirs_of in theirs._filters:
            theirs_of.apply([made])
        for pipeline in ours.pipelines:
            found = pipeline.read(made.resps, doc.get("choices") or ())
            expected = made.filtered_resps[pipeline.name]
            yield from _differs(f"{place}, {pipeline.name} of {text[:40]!r}", found, expected)
            for metric in ours.metrics:
                if metric.metric == "exact_match" and "exact_match" in names and isinstance(expected, str):
                    kept, theirs._metric_fn_list = theirs._metric_fn_list, {"exact_match": _exact(theirs)}
                    right = theirs.process_results(doc, [expected])["exact_match"] == 1.0
                    theirs._metric_fn_list = kept
                    yield from _differs(
                        f"{place}, {text[:40]!r} is right", _match(metric).is_right(found, row.answers), right
                    )


def _exact(theirs: Any) -> Any:
    return theirs._metric_fn_list["exact_match"]


def _match(metric: Any) -> ExactMatch:
    patterns = tuple(metric.regexes_to_ignore or ())
    return ExactMatch(patterns, metric.ignore_case, metric.ignore_punctuation, metric.ignore_numbers)


_AROUND = (("", ""), (" ", "\n"), ("The answer is ", "."), ("#### ", ""), ("So the final answer is (", ")."))
_ANSWERS = (
    "",
    "A",
    "(B)",
    "The answer is (C).",
    "The final answer is $1,234.",
    "#### 5",
    "Answer: D",
    "yes",
    "12 and 7",
)


def _differs(what: str, ours: Any, theirs: Any) -> Iterator[str]:
    if ours != theirs:
        yield f"{what}: {str(ours)[:300]!r}, the harness has {str(theirs)[:300]!r}"
