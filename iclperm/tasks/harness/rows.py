"""A task of lm-evaluation-harness, and what it makes of a row: the texts, the choices and the right answers, byte for
byte as `lm_eval.api.task.ConfigurableTask` of 0.4.13 makes them. No input, no output, no code of the file's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from iclperm.errors import ConfigError, DataError
from iclperm.tasks.filters import FiltersChoices, StepChoices
from iclperm.tasks.harness.files import read_harness
from iclperm.tasks.harness.settings import (
    DEFAULT_METRICS,
    DecodingChoices,
    HarnessChoices,
    MeasureChoices,
    Output,
    settings_of,
)
from iclperm.tasks.harness.wordings import Doc, Wording, choices_of, target_of, text_of


@dataclass(frozen=True)
class RenderedRow:
    """What a task makes of one row.

    ``queries`` are the texts up to where an answer begins: one, or one a choice where the choices are put before one
    ``continuation``. ``choices`` are the texts to choose among, or None; ``continuations`` what is scored after the
    query, each with what stands before it, none where the answer is generated. ``golds`` are the positions of the right
    choices, ``answers`` the right texts of an answer that is generated. ``description`` opens every prompt.
    """

    queries: tuple[str, ...]
    choices: tuple[str, ...] | None
    continuations: tuple[str, ...]
    golds: tuple[int, ...]
    answers: tuple[str, ...]
    description: str

    @property
    def query(self) -> str:
        """The text of the one query."""
        return self.queries[0]


@dataclass(frozen=True)
class HarnessSplits:
    """The splits of the data set by what they are for; None where the file names none. ``samples`` are demonstrations
    that the file itself holds."""

    training: str | None
    validation: str | None
    test: str | None
    fewshot: str | None
    samples: tuple[Mapping[str, Any], ...] | None = None

    @property
    def queries(self) -> str | None:
        """Where the queries are."""
        return self.test or self.validation

    @property
    def demonstrations(self) -> str | None:
        """Where the harness takes demonstrations from, unless from ``samples``."""
        if self.fewshot is None and self.samples is not None:
            return None
        return self.fewshot or self.training or self.validation or self.test


@dataclass(frozen=True)
class HarnessTask:
    """A task file, read: `from_yaml` makes one.

    ``shots`` is the number of demonstrations that the file asks for, 0 without. ``stop`` are the texts that end a
    generated one, ``generation`` how it is written, ``pipelines`` how answers are read from it, each a metric of its
    own. ``metrics`` are what is computed; ``left_out`` names those metrics and pipelines that only a `!function`
    computes. ``columns`` are those of the data that the templates read, ``optional`` those of them that a row may lack.
    """

    name: str
    output: Output
    settings: HarnessChoices
    left_out: tuple[str, ...] = ()
    _wordings: dict[str, Wording] = field(default_factory=dict, repr=False)

    @classmethod
    def from_yaml(cls, path: str | Path) -> HarnessTask:
        """Reads a file and all that it includes; raises `ConfigError` naming the key that cannot be read here."""
        return cls.from_keys(read_harness(path), Path(path).stem)

    @classmethod
    def from_keys(cls, content: Mapping[str, Any], name: str) -> HarnessTask:
        """The task of these keys, called ``name`` where they do not say. `!function`s stand as `Function`."""
        named = content.get("task")
        name = named if isinstance(named, str) else name
        settings, left_out = settings_of(content)
        task = cls(name, settings.output_type, settings, tuple(left_out))
        shots = settings.fewshot_config
        for key in ("doc_to_text", "doc_to_target", "doc_to_choice"):
            given, of_shots = getattr(settings, key), getattr(shots, key)
            task._wordings[key] = Wording(key, given)
            task._wordings[f"fewshot {key}"] = task._wordings[key] if of_shots is None else Wording(key, of_shots)
        for key, given in {
            "description": settings.description,
            "gen_prefix": settings.gen_prefix,
            "fewshot gen_prefix": settings.gen_prefix if shots.gen_prefix is None else shots.gen_prefix,
        }.items():
            task._wordings[key] = Wording(key, given, may_be_text=True)
        if settings.output_type == "multiple_choice" and settings.doc_to_choice is None:
            raise ConfigError("a 'multiple_choice' needs the key 'doc_to_choice'; add it")
        return task

    @property
    def shots(self) -> int:
        return self.settings.num_fewshot or 0

    @property
    def splits(self) -> HarnessSplits:
        keys, shots = self.settings, self.settings.fewshot_config
        samples = None if shots.samples is None else tuple(shots.samples)
        split = keys.fewshot_split if shots.split is None else shots.split
        return HarnessSplits(keys.training_split, keys.validation_split, keys.test_split, split, samples)

    @property
    def generation(self) -> DecodingChoices:
        return self.settings.generation_kwargs or DecodingChoices()

    @property
    def stop(self) -> tuple[str, ...]:
        if self.output != "generate_until":
            return ()
        until = self.generation.until
        if until is None:
            return (self.settings.fewshot_delimiter,)
        return (until,) if isinstance(until, str) else tuple(until)

    @property
    def metrics(self) -> tuple[MeasureChoices, ...]:
        if self.settings.metric_list is None:
            return tuple(MeasureChoices(metric=name) for name in DEFAULT_METRICS[self.output])
        return tuple(self.settings.metric_list)

    @property
    def pipelines(self) -> tuple[FiltersChoices, ...]:
        if self.output != "generate_until":
            return ()
        return tuple(
            self.settings.filter_list or (FiltersChoices(name="none", filter=[StepChoices(function="take_first")]),)
        )

    @property
    def columns(self) -> frozenset[str]:
        return self.columns_of(is_shown=False)[0]

    @property
    def optional(self) -> frozenset[str]:
        return self.columns_of(is_shown=False)[1]

    def columns_of(self, is_shown: bool) -> tuple[frozenset[str], frozenset[str]]:
        """``columns`` and ``optional`` of queries, or of rows that may be demonstrations as well."""
        wordings = self._wordings.values() if is_shown else self._of_queries()
        needed = frozenset[str]().union(*(wording.columns - wording.optional for wording in wordings))
        columns = frozenset[str]().union(*(wording.columns for wording in wordings))
        return columns, columns - needed

    def _of_queries(self) -> list[Wording]:
        return [wording for key, wording in self._wordings.items() if not key.startswith("fewshot ")]

    def wording(self, key: str) -> Wording:
        """What ``doc_to_text``, ``doc_to_target``, ``doc_to_choice``, ``description`` or ``gen_prefix`` makes of a
        row."""
        return self._wordings[key]

    def render(self, doc: Doc) -> RenderedRow:
        """What the task makes of one row; raises as `render_all`."""
        (row,) = self.render_all([doc])
        return row

    def render_all(self, docs: Sequence[Doc], places: Sequence[str] | None = None) -> list[RenderedRow]:
        """What the task makes of each row, in order. O(rows).

        Raises `DataError` naming the row's place: where a template fails on it, or gives no text, no list of choices or
        no right answer that could be one.
        """
        places = [f"row {number}" for number in range(1, len(docs) + 1)] if places is None else places
        parts = [self._values(key, docs, places) for key in ("doc_to_text", "doc_to_choice", "doc_to_target")]
        parts += [self._values(key, docs, places) for key in ("description", "gen_prefix")]
        return [self._row(place, *values) for place, *values in zip(places, *parts, strict=True)]

    def demonstrations(self, docs: Sequence[Doc], places: Sequence[str] | None = None) -> list[str]:
        """Each row as a demonstration, with what stands between it and the next; raises as `render_all`."""
        places = [f"row {number}" for number in range(1, len(docs) + 1)] if places is None else places
        after = self.delimiters[1]
        return [before + answer + (after if answer else "") for before, answer in self._turns(docs, places)]

    def shown_rows(self, docs: Sequence[Doc], places: Sequence[str]) -> list[tuple[str, str]]:
        """Each row as a demonstration: the text up to its answer, and the answer; raises as `render_all`, and for a
        blank answer, after which the harness leaves out what stands between two demonstrations."""
        turns = self._turns(docs, places)
        for place, (_, answer) in zip(places, turns, strict=True):
            if not answer:
                raise DataError(f"{place}: the key 'doc_to_target' gives a blank answer to show; remove the row")
        return turns

    def _turns(self, docs: Sequence[Doc], places: Sequence[str]) -> list[tuple[str, str]]:
        keys = ("doc_to_text", "doc_to_choice", "doc_to_target", "gen_prefix")
        parts = [self._values(f"fewshot {key}", docs, places) for key in keys]
        keys_of = self.settings.fewshot_config
        turns = []
        for place, text, listed, target, prefix in zip(places, *parts, strict=True):
            choices = self._choices(place, listed) if keys_of.doc_to_choice or self.settings.doc_to_choice else None
            query, target = text_of(text, choices is not None), target_of(target, choices is not None)
            if isinstance(query, int) and choices:
                query, choices = _at(place, choices, query), None
            answer = _answer(place, choices, target)
            turn = _turn(_text(place, query), answer, prefix, self.delimiters[0], "")
            turns.append((turn.removesuffix(answer), answer))
        return turns

    @property
    def delimiters(self) -> tuple[str, str]:
        """What stands between the text of a demonstration and its answer, and after a demonstration."""
        keys, shots = self.settings, self.settings.fewshot_config
        target = keys.target_delimiter if shots.target_delimiter is None else shots.target_delimiter
        return target, keys.fewshot_delimiter if shots.fewshot_delimiter is None else shots.fewshot_delimiter

    def prompts(self, doc: Doc, demonstrations: Sequence[Doc] = ()) -> tuple[str, ...]:
        """The whole prompts of one row: one, or one a choice where choices are put before the continuation."""
        row = self.render(doc)
        opening = row.description + "".join(self.demonstrations(demonstrations))
        return tuple(opening + query for query in row.queries)

    def _values(self, key: str, docs: Sequence[Doc], places: Sequence[str]) -> list[Any]:
        return self._wordings[key].values(docs, places)

    def _choices(self, place: str, listed: Any) -> tuple[str, ...]:
        choices = choices_of(listed)
        if not choices:
            raise DataError(
                f"{place}: the key 'doc_to_choice' gives {str(listed)[:60]!r}, no list of texts; repair the row or it"
            )
        return choices

    def _row(self, place: str, text: Any, listed: Any, target: Any, description: Any, prefix: Any) -> RenderedRow:
        has_choices = self.settings.doc_to_choice is not None
        choices = self._choices(place, listed) if has_choices else None
        query, gold = text_of(text, has_choices), target_of(target, has_choices)
        between = self.settings.target_delimiter
        if self.output == "multiple_choice" and isinstance(query, int) and choices is not None:
            queries = tuple(_turn(choice, None, prefix, "", "") for choice in choices)
            positions = _positions(place, query, choices)
            return RenderedRow(queries, choices, (f"{between}{gold}",), positions, (), description or "")
        queries = (_turn(_text(place, query), None, prefix, between, ""),)
        if self.output == "multiple_choice" and choices is not None:
            after, positions = tuple(between + choice for choice in choices), _positions(place, gold, choices)
            return RenderedRow(queries, choices, after, positions, (), description or "")
        answers = _answers(place, gold, choices)
        if self.output == "generate_until":
            return RenderedRow(queries, None, (), (), answers, description or "")
        return RenderedRow(queries, None, answers[:1], (), answers[:1], description or "")


def _turn(query: str, answer: str | None, prefix: str | None, between: str, after: str) -> str:
    """One turn of a prompt: a query, and its answer where there is one; the prefix opens the answer."""
    has_answer = bool(answer)
    if prefix:
        is_joined = not query or query[-1].isspace() or prefix[0].isspace()
        text = query + ("" if is_joined else between)
        return text + (_joined(prefix, str(answer)) + after if has_answer else prefix)
    return query + between + str(answer) + after if has_answer else query


def _joined(prefix: str, answer: str) -> str:
    return prefix + ("" if prefix[-1].isspace() or answer[0].isspace() else " ") + answer


def _text(place: str, query: Any) -> str:
    if not isinstance(query, str):
        raise DataError(f"{place}: the key 'doc_to_text' gives {query!r}, no text; repair the row, or the key")
    return str(query)


def _at(place: str, choices: Sequence[str], position: int) -> str:
    try:
        return choices[position]
    except IndexError:
        raise DataError(
            f"{place}: the right choice is number {position}, counted from 0, of {len(choices)}; repair the row"
        ) from None


def _answer(place: str, choices: Sequence[str] | None, target: Any) -> str:
    """The text of a demonstration's answer: of several the first."""
    if choices and isinstance(target, int):
        return _at(place, choices, target)
    answer = target[0] if isinstance(target, list) and target else target
    if not isinstance(answer, str):
        raise DataError(
            f"{place}: the key 'doc_to_target' gives {answer!r}, no text to show; write {{{{ }}}} around it"
        )
    return answer


def _positions(place: str, gold: Any, choices: Sequence[str]) -> tuple[int, ...]:
    """The positions of the right choices; none where it is not among them."""
    listed = gold if isinstance(gold, list) else [gold]
    found = []
    for one in listed:
        if isinstance(one, str) and not isinstance(gold, list):
            found += [choices.index(one)] if one in choices else []
        elif isinstance(one, int):
            found += [int(one)] if 0 <= one < len(choices) else []
        else:
            raise DataError(
                f"{place}: the key 'doc_to_target' gives {one!r}; give the position of a choice, or its text"
            )
    return tuple(found)


def _answers(place: str, gold: Any, choices: Sequence[str] | None) -> tuple[str, ...]:
    """The right texts of a generated answer."""
    if choices is not None:
        if not isinstance(gold, int):
            raise DataError(f"{place}: the key 'doc_to_target' gives {gold!r}; give the position of a choice")
        return (_at(place, choices, gold),)
    if not isinstance(gold, list):
        return (str(gold),)
    for one in gold:
        if not isinstance(one, str):
            raise DataError(f"{place}: the key 'doc_to_target' lists {one!r}, no text; write it in quotes")
    return tuple(gold)
