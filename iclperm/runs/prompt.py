"""The prompt of one cell of a finished run, exactly as it was scored, to take elsewhere."""

from __future__ import annotations

import json
import pprint
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from iclperm.errors import ConfigError, DamagedItem, DataError, RunError
from iclperm.prompts.chat import ChatFormat, Message, chat_format
from iclperm.prompts.contexts import context_id, joint_context
from iclperm.prompts.design import Design, Orderings, SplitQueries, draw
from iclperm.prompts.encode import JointEncoder, split_labels
from iclperm.prompts.render import DesignTexts
from iclperm.report.notebook import prompt_html
from iclperm.report.parts import plain
from iclperm.runs.folder import RunFolder
from iclperm.runs.run import FinishedRun, near_notes
from iclperm.runs.run_texts import (
    RunPrompts,
    damaged_texts,
    kept_prompts,
    other_data,
    recorded_folder,
    refuse_other_data,
    text_tokens,
    tokenizer_at_hand,
)
from iclperm.runs.setting import resolved, study_examples, study_model_folder, tokenizer_hash
from iclperm.stats import Interval
from iclperm.stats.grades import graded_mean
from iclperm.stats.intervals import bounded, jackknife_interval, wilson_interval
from iclperm.study.states import OK
from iclperm.study.study import Study
from iclperm.tasks.row_choices import OwnChoices
from iclperm.tasks.task import Examples, Task

Format = Literal["text", "chat", "python", "json"]
_ASKED = "asked"
_MOST_COMPARED = 500  # queries that a placeholder is tried with
_LEVEL = 0.95
_PUT_IN = re.compile(r"\{\{ *\w+ *\}\}")
_MOST_LABELS = 10  # of which all are told; of more the lowest
_FEW_QUERIES = 10  # below, an interval of a label's recall can be over fifty points wide


@dataclass(frozen=True)
class RunPrompt:
    """The prompt of one set, permutation and number of shots of a run, and how accurate it was there.

    ``demonstrations`` are its demonstrations as the task words them, in order; ``labels`` what the study compared as
    continuations of the prompt, none where the model writes its answer. ``query`` is the number of the test query that
    it ends in; without one it ends in ``placeholders``: what stands, by field of the task, for a query to be filled in.
    ``accuracy`` is that on the run's test queries, with its ``interval`` for other queries; where ``is_held_out``, no
    test query had a say in the choice of this prompt. ``notes`` say where the prompt comes from and what it is worth.
    """

    set: int
    permutation: int
    shots: int
    query: int | None
    text: str
    """As the model read it, without the special token that its tokenizer puts in front; "" of a chat that an API
    renders."""
    messages: tuple[Message, ...]
    """Of a study whose prompts are chats; else none."""
    demonstrations: tuple[str, ...]
    labels: tuple[str, ...]
    placeholders: dict[str, str]
    accuracy: float
    interval: Interval
    num_queries: int
    """Distinct test queries that `accuracy` is about."""
    context_ids: tuple[int, ...] | None
    """Token ids of what stands before the query, compared with those that were scored; None where the model's
    tokenizer is not at hand."""
    token_ids: tuple[int, ...] | None
    """Token ids of the whole prompt up to the label; None without a query too."""
    is_held_out: bool = True
    notes: tuple[str, ...] = ()
    by_label: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Of every label how many of its distinct test queries were answered right, and how many there are; nothing of a
    task without labels."""
    measure: str = "accuracy"
    """What `accuracy` is called: of graded answers the mean of the metric."""
    commonest: tuple[str, float] | None = None
    """The label that most test queries have, by weight, and the accuracy of naming it always."""

    def formatted(self, form: Format | None = None) -> str:
        """The prompt as ``text``, as JSON of ``chat`` messages, as a ``python`` literal, or as ``json``, with all that
        is known of it; by default chat for a chat.

        Raises `ConfigError` for messages of a study that was no chat, and for the text of a chat that an API renders.
        """
        if form == "chat" and not self.messages:
            raise ConfigError("the prompts of this run are no chats; give the format text or python")
        if form == "text" and not self.text:
            raise ConfigError("the run's API renders its chats, so their text is not known; give the format chat")
        if form == "json":
            return json.dumps(self.to_dict(), indent=1, ensure_ascii=False)
        if form == "python":
            value: Any = list(self.messages) or self.text
            return pprint.pformat(value, width=100, sort_dicts=False)
        if form == "chat" or (form is None and self.messages):
            return json.dumps(list(self.messages), indent=1, ensure_ascii=False)
        return self.text

    def to_dict(self) -> dict[str, Any]:
        """The prompt and what is known of it, JSON-safe."""
        content: dict[str, Any] = plain(self)
        if self.measure == "accuracy":
            del content["measure"]
        return {"k": self.shots, **content}

    def said(self) -> list[str]:
        """Where the prompt is from, how accurate it was, and how to use it, in lines."""
        bounds = f" ({self.interval.low:.1%} to {self.interval.high:.1%}, 95 %)" if self.interval.low >= 0 else ""
        lines = [
            f"set {self.set}, permutation {self.permutation}, k = {self.shots}",
            *self.notes,
            f"{self.measure} on {self.num_queries:,} test queries, "
            f"{'which had no say in the choice' if self.is_held_out else 'which this prompt was chosen by'}: "
            f"{self.accuracy:.1%}{bounds}",
            *self._said_by_label(),
        ]
        if self.placeholders:
            fields = ", ".join(f"{marker} by the query's {name}" for name, marker in self.placeholders.items())
            lines.append(f"to ask: replace {fields}; no marker occurs elsewhere, and nothing else changes")
        if self.labels:
            lines.append(f"the model was to go on with one of {', '.join(map(repr, self.labels))}")
        return lines

    def _said_by_label(self) -> Iterator[str]:
        """What the accuracy says of single labels, and whether naming the commonest one would do as well."""
        if self.commonest and self.interval.low <= self.commonest[1]:
            label, share = self.commonest
            how = "is worse than" if self.interval.high < share else "cannot be told from"
            yield f"that {how} always naming {label!r}, which is right in {share:.1%} of these queries"
        asked = {label: counts for label, counts in self.by_label.items() if counts[1]}
        lowest = sorted(asked, key=lambda label: asked[label][0] / asked[label][1])[:_MOST_LABELS]
        shown = [label for label in asked if label in lowest]
        if shown:
            which = "by label" if len(shown) == len(asked) else f"the {len(shown)} lowest of {len(asked)} labels"
            yield f"right {which}: " + ", ".join("{} of {} {!r}".format(*asked[label], label) for label in shown)
        if few := [label for label in asked if asked[label][1] < _FEW_QUERIES]:
            yield f"fewer than {_FEW_QUERIES} queries, too few to tell how good it is: {_named(few)}"
        if never := [label for label in self.by_label if label not in asked]:
            yield f"no test query asks for {_named(never)}: nothing here says how good the prompt is on that"

    def __str__(self) -> str:
        return self.formatted()

    def _repr_html_(self) -> str:
        return prompt_html(self.said(), str(self))


def _named(labels: Sequence[str]) -> str:
    shown = ", ".join(map(repr, labels[:_MOST_LABELS]))
    return shown if len(labels) <= _MOST_LABELS else f"{shown} and {len(labels) - _MOST_LABELS} more"


def run_prompt(
    run: FinishedRun,
    index_set: int,
    permutation: int,
    shots: int,
    query: int | Mapping[str, Any] | None = None,
    *,
    is_held_out: bool = True,
    notes: tuple[str, ...] = (),
) -> RunPrompt:
    """The prompt of a cell of a run, from the texts in its folder, else from its data read again.

    ``query`` is the number of a test query, or the fields of another one by their names in the task; without it the
    prompt ends in placeholders. These two read the data, and so do folders without texts; where the data has changed
    since, they are worded by the task file alone, as far as that can be told from the folder. The data, the
    wording and (where the tokenizer can be had) the token ids are compared with what the run recorded. Raises
    `ConfigError` for a cell or a query that the run does not have, `DataError` where the data or the task are not what
    it was run with, and what reading them raises.
    """
    cell = index_set, permutation, shots
    _refuse_other_cells(run, *cell, query)
    if isinstance(query, int):
        try:
            if (kept := kept_prompts(run)) is not None:
                there = _kept_prompt(run, kept, cell, query)
                return replace(there, is_held_out=is_held_out, notes=(*notes, *there.notes))
        except DamagedItem as error:
            notes = (*notes, str(error))
    try:
        found = _reread_prompt(run, cell, query)
    except DataError as error:
        kept_open = None if isinstance(query, int) else _kept_open_prompt(run, cell, query)
        if kept_open is None:
            raise
        notes = (*notes, f"from the texts in the run's folder alone: {str(error).split(', so its prompts')[0]}")
        found = kept_open
    return replace(found, is_held_out=is_held_out, notes=(*notes, *found.notes))


def worth(run: FinishedRun, index_set: int, permutation: int, shots: int, *, is_held_out: bool) -> list[str]:
    """How accurate the prompt of a cell was, overall and by label, in the lines of `RunPrompt.said`; reads no text."""
    found = _of_cell(
        run,
        (index_set, permutation, shots),
        query=None,
        text="",
        messages=(),
        demonstrations=(),
        labels=(),
        placeholders={},
        context_ids=None,
        token_ids=None,
    )
    return replace(found, is_held_out=is_held_out).said()[1:]


def _kept_open_prompt(
    run: FinishedRun, cell: tuple[int, int, int], query: Mapping[str, Any] | None
) -> RunPrompt | None:
    """The prompt of a cell, of texts in a folder, and a query that is given or left open; None where the folder or the
    task file do not tell how that is worded."""
    try:
        kept = kept_prompts(run)
    except DamagedItem:
        return None
    task = Task.load(run.study.task, run.study.data)
    is_same = run.folder is not None and RunFolder.open(run.folder).plan["hashes"].get("wording") == task.wording_hash()
    does_more = re.search(r"\{[{%#]", _PUT_IN.sub("", task.query)) is not None  # than to put texts in their places
    if kept is None or kept.texts.chat is not None or not is_same or does_more:
        return None
    if not kept.are_those_of([cell[:2]]):
        raise damaged_texts(recorded_folder(run), "its tokens are not those of the run")
    pieces = [*kept.texts.demonstrations.values(), *kept.texts.queries["test"]]
    placeholders: dict[str, str] = {}
    known = json.dumps([*(piece.text for piece in pieces), task.query, task.instruction])
    open_fields = _with_markers(dict.fromkeys(task.fields, ""), "", known, placeholders)
    worded = task.render_query(open_fields)
    placeholders = {name: mark for name, mark in placeholders.items() if mark in worded}
    marks = "|".join(map(re.escape, placeholders.values()))
    pattern = ".*".join(map(re.escape, re.split(marks, worded))) if marks else re.escape(worded)
    if not all(re.fullmatch(pattern, piece.text, re.DOTALL) for piece in kept.texts.queries["test"]):
        return None
    if query is not None:
        worded, placeholders = task.render_query(_fields_of(task, query)), {}
    context = kept.tokens(*cell)
    return _of_cell(
        run,
        cell,
        query=None,
        text=kept.text(*cell) + worded,
        messages=(),
        demonstrations=tuple(kept.texts.demonstrations[row].worded for row in kept.rows(*cell)),
        labels=kept.texts.labels,
        placeholders=placeholders,
        context_ids=None if context is None else tuple(context.ids.tolist()),
        token_ids=None,
    )


def _kept_prompt(run: FinishedRun, kept: RunPrompts, cell: tuple[int, int, int], query: int) -> RunPrompt:
    """The prompt of a cell and a test query, of texts in a folder; raises `DamagedItem` where they are others."""
    if not kept.are_those_of([cell[:2]]):
        raise damaged_texts(recorded_folder(run), "its tokens are not those of the run")
    asked = ("test", query)
    context, whole = kept.context_tokens(*cell, asked), kept.tokens(*cell, asked)
    if kept.is_of_api:
        rows = kept.rows(*cell, asked)
        context, whole = text_tokens(kept.texts.text(rows)), text_tokens(kept.texts.text(rows, asked))
    messages = tuple(kept.messages(*cell, asked))
    return _of_cell(
        run,
        cell,
        query=query,
        text="" if messages and kept.is_of_api else kept.text(*cell, asked),
        messages=messages,
        demonstrations=tuple(kept.texts.demonstrations[row].worded for row in kept.rows(*cell, asked)),
        labels=kept.texts.after(asked),
        placeholders={},
        context_ids=None if context is None else tuple(context.ids.tolist()),
        token_ids=None if whole is None else tuple(whole.ids.tolist()),
    )


def _reread_prompt(run: FinishedRun, cell: tuple[int, int, int], query: int | Mapping[str, Any] | None) -> RunPrompt:
    """The prompt of a cell from the data read again, compared with what the run recorded; see `run_prompt`."""
    task = Task.load(run.study.task, run.study.data)
    study = resolved(run.study, task)
    examples = study_examples(study, task)
    design = draw(study, task, examples)
    recorded = _recorded(run, task, examples, cell)
    number = query if isinstance(query, int) else 0  # only where all share demonstrations
    rows, own = design.demonstrations(*cell[:2], run.shots.index(cell[2]), number), design.neighbours
    if recorded and own is None and [examples["train"].hashes[row] for row in rows] != recorded.hashes:
        raise other_data(run)
    if recorded and own is not None and own.digest != recorded.neighbours:
        raise DataError(f"'{study.neighbours}' is not what {run.folder} was run with; put that file back")
    asked, placeholders = _asked(run, task, examples, design, query)
    if recorded and (study.chat not in (None, "none") or own) and study.endpoint is None:
        whole = RunFolder.open(recorded.folder)
        if tokenizer_hash(study_model_folder(study, weights=False)) != whole.plan["hashes"].get("tokenizer"):
            raise _other_tokens(run)
    tokenizer, notes = tokenizer_at_hand(study)
    chat = chat_format(study.chat or "none", task, tokenizer)
    first = examples["test"].fields[design.queries[0].rows[0]]
    is_known = isinstance(query, int) or not task.has_row_choices
    chosen = None
    if (own_choices := examples["test"].chosen) is not None:
        chosen = [own_choices[int(row)] for row in design.queries[0].rows[[number, 0]]]
    texts = _texts(task, study, examples, rows, [asked, first], chat, chosen)
    if placeholders:
        notes = (*notes, *_cut_queries(task, texts.bare_queries[0], asked, design, examples["test"]))
        placeholders = {name: mark for name, mark in placeholders.items() if mark in texts.bare_queries[0]}
    places = texts.of_rows(rows)
    context = texts.context(places)
    context_ids = token_ids = None
    if tokenizer is not None:
        encoder = JointEncoder(tokenizer, chat.opening + texts.queries[1] if chat else None)
        ids = joint_context(context, texts.queries[1], encoder).ids
        if recorded and own is None and context_id(ids) != recorded.context:
            raise _other_tokens(run)
        context_ids = tuple(ids.tolist())
        if not placeholders and is_known:
            (split,) = split_labels(encoder, [context + texts.queries[0]], texts.after(0))
            token_ids = (*encoder.start.tolist(), *split.prompt.ids.tolist())
    is_rendered_elsewhere = chat is not None and study.endpoint is not None
    return _of_cell(
        run,
        cell,
        query=query if isinstance(query, int) else None,
        text="" if is_rendered_elsewhere else context + texts.queries[0],
        messages=tuple(texts.messages(places, 0)),
        demonstrations=tuple(_worded(task, examples["train"], rows)),
        labels=() if texts.is_open or not is_known else tuple(texts.after(0)),
        placeholders=placeholders,
        context_ids=context_ids,
        token_ids=token_ids,
        notes=notes,
    )


def _asked(
    run: FinishedRun,
    task: Task,
    examples: Mapping[str, Examples],
    design: Design,
    query: int | Mapping[str, Any] | None,
) -> tuple[dict[str, Any], dict[str, str]]:
    """The fields of the query that a prompt ends in, and the markers that stand in them for those of another."""
    if isinstance(query, int):
        return _recorded_query(run, design, examples["test"], query), {}
    if query is not None:
        return _fields_of(task, query), {}
    placeholders: dict[str, str] = {}
    texts = [*map(str, (*examples["train"].fields, *examples["test"].fields)), task.query, task.instruction]
    first = examples["test"].fields[design.queries[0].rows[0]]
    return _with_markers(first, "", json.dumps(texts), placeholders), placeholders


def _of_cell(run: FinishedRun, cell: tuple[int, int, int], **about: Any) -> RunPrompt:
    """A prompt with the accuracy of its cell; ``about`` are the fields that `RunPrompt` has beside."""
    place = run.shots.index(cell[2])
    accuracy, interval, num_queries = _accuracy(run, *cell[:2], place)
    about |= _by_label(run, *cell[:2], place)
    about |= {} if run.metric is None else {"measure": run.metric.mean}
    near = near_notes(run.report.num_near, run.report.num_near_dev)
    about["notes"] = (*about.get("notes", ()), *near)
    return RunPrompt(*cell, accuracy=accuracy, interval=interval, num_queries=num_queries, **about)


@dataclass(frozen=True)
class _RecordedCell:
    """What a run's folder says of a cell: the hashes of its demonstrations, and the name of its context; and the digest
    of the neighbours, where each query has its own."""

    folder: Path
    hashes: list[str]
    context: int
    neighbours: str | None


def _refuse_other_cells(run: FinishedRun, index_set: int, permutation: int, shots: int, query: Any) -> None:
    num_sets, num_permutations, _, num_queries = run.correct.shape
    for name, value, size in (("set", index_set, num_sets), ("permutation", permutation, num_permutations)):
        if not 0 <= value < size:
            raise ConfigError(f"there is no {name} {value}: the run has {name}s 0 to {size - 1}")
    if shots not in run.shots:
        raise ConfigError(f"the run has no prompts of {shots} shots; it has {', '.join(map(str, run.shots))}")
    if run.study.is_per_query and not isinstance(query, int):
        raise ConfigError(
            "each query of this run has demonstrations of its own; give the number of a test query, such as --query 0"
        )
    if isinstance(query, int) and not 0 <= query < num_queries:
        raise ConfigError(f"there is no query {query}: the run has test queries 0 to {num_queries - 1}")


def _recorded(
    run: FinishedRun, task: Task, examples: Mapping[str, Examples], cell: tuple[int, int, int]
) -> _RecordedCell | None:
    """What the run's folder says of a cell; raises `DataError` where task or data are not those of the run."""
    if run.folder is None:
        return None
    refuse_other_data(run, task, examples)
    table = recorded_folder(run).table("demonstrations")
    rows = table.filter(pc.and_(pc.equal(table["set"], cell[0]), pc.equal(table["permutation"], cell[1]))).to_pylist()
    for row in rows:  # with resample: per_k one for every number of shots
        if cell[2] in row["shots"]:
            context = row["contexts"][row["shots"].index(cell[2])]
            neighbours = RunFolder.open(run.folder).plan["hashes"].get("neighbours")
            return _RecordedCell(run.folder, row["content_hashes"][: cell[2]], context, neighbours)
    raise RunError(f"{run.folder} has no record of its set {cell[0]}, permutation {cell[1]}; run the study again")


def _other_tokens(run: FinishedRun) -> RunError:
    return RunError(
        f"the tokens of this prompt are not those that {run.folder} was scored with: the tokenizer, or its chat "
        f"template, of {run.study.model_name!r} has changed; put that back"
    )


def _recorded_query(run: FinishedRun, design: Design, test: Examples, number: int) -> dict[str, Any]:
    """The fields of a test query; raises `DataError` where it is another than the run's."""
    row = int(design.queries[0].rows[number])
    if run.folder is not None:
        table = recorded_folder(run).table("queries").slice(number, 1).to_pylist()[0]
        if (table["split"], table["content_hash"]) != ("test", test.hashes[row]):
            raise other_data(run)
    return test.fields[row]


def _fields_of(task: Task, given: Mapping[str, Any]) -> dict[str, Any]:
    """What the template of a query sees of a query that somebody gives."""
    if unknown := [name for name in given if name not in task.fields]:
        raise ConfigError(f"the task has no field {unknown[0]!r}; its fields are {', '.join(task.fields)}")
    return dict(given)


def _with_markers(value: Any, name: str, known: str, found: dict[str, str]) -> Any:
    """``value`` with a marker for whatever is no list and no mapping in it, of a form that no text of the data holds;
    the markers are added to ``found`` by name."""
    if isinstance(value, Mapping):
        return {
            key: _with_markers(entry, f"{name}.{key}" if name else str(key), known, found)
            for key, entry in value.items()
        }
    if isinstance(value, list | tuple):
        return [_with_markers(entry, f"{name}.{place}", known, found) for place, entry in enumerate(value)]
    marker, number = f"<<{name}>>", 1
    while marker in known:
        number += 1
        marker = f"<<{name}-{number}>>"
    found[name] = marker
    return marker


def _texts(
    task: Task,
    study: Study,
    examples: Mapping[str, Examples],
    rows: NDArray[np.int64],
    queries: list[dict[str, Any]],
    chat: ChatFormat | None,
    chosen: list[OwnChoices] | None,
) -> DesignTexts:
    """The rendered parts of one context and these queries, with choices of their own where they have some."""
    numbers = np.arange(len(queries))
    ordering = Orderings(rows[None], np.arange(len(rows))[None], (len(rows),))
    design = Design((ordering,), (SplitQueries(_ASKED, numbers, numbers, num_excluded=0),))
    asked = replace(
        examples["test"],
        split=_ASKED,
        fields=queries,
        labels=np.full(len(queries), -1),
        answers=[""] * len(queries),
        chosen=chosen,
    )
    try:
        return DesignTexts(
            design, task, {"train": examples["train"], _ASKED: asked}, study.scoring or "loglikelihood", chat
        )
    except DataError as error:
        raise ConfigError(f"the query cannot be worded: {error}; give the number of a test query") from None


def _cut_queries(task: Task, worded: str, markers: Mapping[str, Any], design: Design, test: Examples) -> Iterator[str]:
    """A note where the wording of the test queries is not their fields put in place of the markers."""
    rows = [test.fields[row] for row in design.queries[0].rows[:_MOST_COMPARED]]
    put_in = []
    for fields in rows:
        text = worded
        for marker, value in _leaves(markers, fields):
            text = text.replace(marker, value)
        put_in.append(text.strip())
    differ = sum(ours != theirs.strip() for ours, theirs in zip(put_in, task.render_queries(rows), strict=True))
    if differ:
        yield (
            f"the task's template changes what it is given ({differ} of {len(rows)} test queries are not their fields "
            "put in for the markers): word a query with run.prompt(query={...}) in Python"
        )


def _leaves(markers: Any, value: Any) -> Iterator[tuple[str, str]]:
    """Every marker with the text that stands in its place."""
    if isinstance(markers, str):
        yield markers, str(value)
        return
    pairs = (
        ((markers[key], value.get(key, "")) for key in markers)
        if isinstance(markers, Mapping)
        else zip(markers, value, strict=False)
    )
    for marker, entry in pairs:
        yield from _leaves(marker, entry)


def _worded(task: Task, train: Examples, rows: NDArray[np.int64]) -> list[str]:
    return task.render_demonstrations([train.fields[row] for row in rows], [train.answers[row] for row in rows])


def _accuracy(run: FinishedRun, index_set: int, permutation: int, place: int) -> tuple[float, Interval, int]:
    """Accuracy of one cell on test, its interval for other queries, and the number of distinct queries."""
    items = run.splits["test"]
    cell = index_set, permutation, place
    is_there = items.state[cell] == OK
    correct, weights = items.correct[cell][is_there].astype(np.float64), items.weights[is_there].astype(np.float64)
    if not len(correct):
        return np.nan, Interval(np.nan, np.nan, np.nan, _LEVEL), 0
    total = float(weights.sum())
    mean = float(correct @ weights / total)
    if np.ptp(weights) == 0 and items.metric is not None:
        return mean, graded_mean(correct), len(correct)
    if np.ptp(weights) == 0:
        return mean, wilson_interval(int(correct.sum()), len(correct), _LEVEL), len(correct)
    left_out = (correct @ weights - correct * weights) / (total - weights) if len(correct) > 1 else [np.nan]
    return mean, bounded(jackknife_interval(mean, left_out, level=_LEVEL), "accuracy"), len(correct)


def _by_label(run: FinishedRun, index_set: int, permutation: int, place: int) -> dict[str, Any]:
    """`RunPrompt.by_label` and ``commonest`` of one cell, over the queries that its accuracy is about."""
    items = run.splits["test"]
    cell = index_set, permutation, place
    is_there = items.state[cell] == OK
    gold, num_labels = items.gold[is_there], len(run.shared_labels)
    if not num_labels or not len(gold):
        return {}
    right = np.bincount(gold[items.correct[cell][is_there] > 0], minlength=num_labels)
    asked = np.bincount(gold, minlength=num_labels)
    weights = np.bincount(gold, weights=items.weights[is_there], minlength=num_labels)
    most = int(np.argmax(weights))
    counts = zip(right.tolist(), asked.tolist(), strict=True)
    return {
        "by_label": dict(zip(run.labels, counts, strict=True)),
        "commonest": (run.labels[most], float(weights[most] / weights.sum())),
    }
