"""Tasks: where the examples are, how a demonstration and a query are worded, which labels or answers there are."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, PrivateAttr, field_validator

from iclperm.errors import ConfigError, DataError
from iclperm.study.choices import Choices, file_and_part, given_path, read_yaml, refuse_other_keys
from iclperm.tasks.answer_keys import Answer
from iclperm.tasks.examples import Content, Examples, ReadRow, compared_text, digest_of_rows, folded, fractions, ranks
from iclperm.tasks.filters import golds_text
from iclperm.tasks.harness import HALF, HarnessRows, is_harness, read_harness
from iclperm.tasks.loaders import missing_column
from iclperm.tasks.published import Split
from iclperm.tasks.row_choices import RowChoices
from iclperm.tasks.sources import Dataset, Word, found_in
from iclperm.tasks.templates import Template

__all__ = ["BUILTIN", "Dataset", "Examples", "Split", "Task", "builtin_tasks", "template_text"]

BUILTIN = Path(__file__).parent / "builtin"
_STARTER = Path(__file__).parent / "starter.yaml"
_GENERATED_STARTER = Path(__file__).parent / "starter_generated.yaml"

Text = Annotated[str, Field(max_length=65_536)]
_MAX_NAME = 64
_MOST_VALUES = 50
_NAME = rf"^[A-Za-z0-9][A-Za-z0-9_.-]{{0,{_MAX_NAME - 1}}}$"
_OF_LABELS = ("labels", "label_field", "continuation")
_NO_WORDING = ("name", "description", "source", "licence", "restricted", "data", "shots", "label_values", "label_match")
_OF_ANSWERS = {"answer", "stop", "max_new_tokens"}
_OF_CHOICES = ("choices", "gold", "letters")


class Task(Choices):
    """A task read from a YAML file; raises `ConfigError` naming the key, the value and the remedy.

    ``fields`` maps the names used in the templates to columns of the data. A classification task has ``labels``: the
    label words, or the word for each value of the data's ``label_field``; their order is the L axis. ``label_values``
    lists by word the other values that mean it, and stands for ``labels`` where there are none; with ``label_match``
    values are also found without regard to white space around them (``trim``) or to that and case (``fold``).
    ``demonstration``
    and ``continuation`` also see ``label``, the word; ``query`` does not. A generated task has ``answer`` instead, how
    the text that a model writes is read and held against a column, and a ``query`` that does not show that column.
    A task whose rows have choices of their own has ``choices`` and ``gold``, and perhaps ``letters``
    (`iclperm.tasks.row_choices`): ``label`` is then the text of a choice, in a demonstration that of the right one.
    Generated text ends at one of ``stop`` or after ``max_new_tokens``; without the latter, where a label would.
    ``instruction`` opens every prompt and is followed by ``instruction_end``, or else by the separator.
    ``shots`` is the default k. ``description``, ``source`` and ``licence`` inform only. Of a ``restricted`` task the
    data may not be handed on: run folders and pages are made without their texts unless these are asked for.
    """

    name: Annotated[str, Field(pattern=_NAME)]
    description: Text = ""
    source: Text = ""
    licence: Text = ""
    restricted: bool = False
    data: Dataset
    fields: Annotated[dict[str, Word], Field(min_length=1)]
    label_field: Word = "label"
    labels: (
        Annotated[list[Word], Field(min_length=2)] | Annotated[dict[str | int, Word], Field(min_length=2)] | None
    ) = None
    label_values: Annotated[dict[Word, list[str | int]], Field(min_length=1)] | None = None
    label_match: Literal["exact", "trim", "fold"] = "exact"
    answer: Answer | None = None
    choices: Text | Annotated[list[Text], Field(min_length=2)] | None = None
    gold: Text | None = None
    letters: Text | Annotated[list[Text], Field(min_length=2)] | None = None
    instruction: Text = ""
    instruction_end: Text | None = None
    demonstration: Text
    query: Text
    continuation: Text = " {{ label }}"
    separator: Text = "\n\n"
    stop: list[Word] = Field(["\n"])
    max_new_tokens: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    shots: Annotated[int, Field(ge=0, le=100_000)]
    _folder: Path = PrivateAttr(default_factory=Path)
    _templates: dict[str, Template] = PrivateAttr(default_factory=dict)
    _contents: dict[Split, list[Content]] = PrivateAttr(default_factory=dict)
    _num_empty: dict[Split, int] = PrivateAttr(default_factory=dict)
    _row_choices: RowChoices | None = PrivateAttr(default=None)
    _harness: HarnessRows | None = PrivateAttr(default=None)

    @field_validator("data", "answer", mode="before")
    @classmethod
    def _keyed_by_text(cls, block: Any) -> Any:
        if isinstance(block, dict):
            refuse_other_keys(block)
        return block

    @field_validator("labels")
    @classmethod
    def _distinct_words(
        cls, labels: list[str] | dict[str | int, str] | None
    ) -> list[str] | dict[str | int, str] | None:
        if labels is None:
            return None
        words = Counter(" ".join(word.split()) for word in (labels.values() if isinstance(labels, dict) else labels))
        for word, count in words.items():
            if not word:
                raise ValueError("a label word is blank; give every label a word")
            if count > 1:
                raise ValueError(f"the label word {word!r} occurs twice; give every label its own word")
        for value, count in Counter(map(str, labels)).items():
            if not value.strip() or count > 1:
                raise ValueError(f"the data's label {value!r} is blank or occurs twice; list every label once")
        return labels

    def model_post_init(self, context: Any, /) -> None:
        if "label" in self.fields and self.answer is None:
            raise ConfigError("in 'fields' the name 'label' stands for the label's word; give the field another name")
        self._refuse_mixtures()
        if self.choices is not None:
            self._row_choices = RowChoices(self.choices, str(self.gold), self.letters)
        else:
            self._refuse_ambiguous_values()
        label = set() if self.is_generated else {"label"}
        allowed = {"demonstration": {*self.fields, *label}, "query": set(self.fields), "continuation": {"label"}}
        for name, known in allowed.items():
            template = self._templates[name] = Template(name, getattr(self, name))
            if unknown := sorted(template.variables - known):
                raise ConfigError(f"the template {name!r} uses {unknown[0]!r}; it may use {', '.join(sorted(known))}")
        if not self._templates["query"].variables:
            raise ConfigError(
                "the template 'query' shows no field, so all queries are the same; write {{ }} around one of "
                f"{', '.join(self.fields)}"
            )
        if self.answer is not None:
            self._refuse_given_answers(self.answer.field)
        else:
            self._refuse_hidden_labels()
            if self.choices is None:
                self._refuse_equal_continuations()
            elif self.gold in self._templates["query"].variables:
                raise ConfigError(
                    f"the template 'query' shows {self.gold!r}, which tells the right choice; leave it out"
                )

    def _refuse_mixtures(self) -> None:
        """Either labels, or choices of each row, or an answer that the model writes."""
        if self.choices is not None or self.gold is not None or self.letters is not None:
            self._refuse_half_choices()
        if self.answer is None and self.labels is None and self.label_values is None and self.choices is None:
            raise ConfigError(
                "a task needs the key 'labels', or the key 'answer' where the model writes its answer, or 'choices' "
                "and 'gold' where each row has choices of its own"
            )
        if self.answer is None:
            return
        for key in (*_OF_LABELS, "label_values", "label_match"):
            if key in self.model_fields_set:
                raise ConfigError(
                    f"a task has the key 'answer' and the key {key!r}, which is for tasks with labels; drop one"
                )
        if self.max_new_tokens is None:
            raise ConfigError(
                "a task with the key 'answer' needs the key 'max_new_tokens', the most tokens of an answer"
            )

    def _refuse_half_choices(self) -> None:
        if self.choices is None or self.gold is None:
            raise ConfigError("the keys 'choices' and 'gold' go together, 'letters' with both; give both or none")
        for key in ("labels", "label_field", "label_values", "label_match", "answer"):
            if key in self.model_fields_set:
                raise ConfigError(f"a task has the key 'choices' and the key {key!r}; drop one")

    def _refuse_ambiguous_values(self) -> None:
        """Every word of ``label_values`` is a label, and every value of the data means one."""
        for word in self.label_values or ():
            if word not in self.words:
                raise ConfigError(f"'label_values' has {word!r}, which is no label; they are {', '.join(self.words)}")
        if self.label_values is not None and len(self.words) < 2:
            raise ConfigError("'label_values' names one label; a task needs two at least")
        self._positions()

    def _refuse_given_answers(self, column: str) -> None:
        query = self._templates["query"].variables
        for name in sorted(query):
            if self.fields[name] == column:
                raise ConfigError(f"the template 'query' shows {name!r}, the column of the answer; leave it out")
        if not self._templates["demonstration"].variables - query:
            raise ConfigError("the template 'demonstration' shows no more than 'query'; show the answer in it")

    def _refuse_hidden_labels(self) -> None:
        for name in ("demonstration", "continuation"):
            if "label" not in self._templates[name].variables:
                raise ConfigError(f"the template {name!r} does not show the label; write {{{{ label }}}} in it")

    def _refuse_equal_continuations(self) -> None:
        """Labels that differ as words may still read alike where a template cuts them."""
        try:
            texts = self.continuations()
        except DataError as error:
            raise ConfigError(str(error)) from None
        words: dict[str, str] = {}
        for word, text in zip(self.words, texts, strict=True):
            if not text.strip():
                raise ConfigError(f"the template 'continuation' makes the label {word!r} blank; show {{{{ label }}}}")
            if (other := words.setdefault(text, word)) != word:
                raise ConfigError(
                    f"the template 'continuation' makes {text!r} of both {other!r} and {word!r}; let it tell them apart"
                )

    @classmethod
    def load(cls, name: str | Path, data: str | Path | None = None) -> Self:
        """A built-in task by name, or a task file by path; raises `ConfigError` naming the tasks there are.

        ``mmlu:anatomy,virology`` is the part of a built-in task whose column ``choose`` holds one of these values,
        ``FILE.yaml:NAME`` a filter pipeline of a file of lm-evaluation-harness, or a task of a group's file.
        ``data`` is a folder to read instead of what the task names: laid out as the task's data set is on the Hub, or
        with ``train``, ``test`` and ``dev`` (also called ``validation`` or ``valid``) as .jsonl, .csv, .tsv or
        .parquet, or as ``train-*.parquet``, itself or in its sub-folder ``data``; or a folder that has such a one,
        called like the task; or, of a built-in task, what its authors publish (AG News' CSV files without a line of
        names and the like). A split that it lacks is the share that the task declares, else a `DataError` names it. It
        may be a single file, which is split by content into train, dev and test.
        """
        name = given_path(name)
        built_in, colon, values = str(name).partition(":")
        if colon and built_in in builtin_tasks():
            return cls.load(built_in, data)._part([value.strip() for value in values.split(",")])
        file, part = file_and_part(str(name))
        path = BUILTIN / f"{name}.yaml" if name in builtin_tasks() else Path(file)
        if not path.is_file():
            close = difflib.get_close_matches(built_in, builtin_tasks(), n=1)
            meant = f"did you mean {close[0]!r}? " if close else ""
            known = ", ".join(builtin_tasks())
            raise ConfigError(f"there is no task {str(name)!r}; {meant}built in: {known}, or give a task file's path")
        task = cls.from_file(path, part=part)
        if data is None:
            return task
        folder = Path(data).resolve()
        own = folder / task.name
        is_shared = folder.is_dir() and own.is_dir()
        of_ours = built_in if path.parent == BUILTIN else ""
        return task.model_copy(update={"data": found_in(own if is_shared else folder, task.data, of_ours)})

    def _part(self, values: list[str]) -> Self:
        """The task on the rows that hold one of ``values``, under a name of its own."""
        if self.data.choose is None:
            raise ConfigError(f"task {self.name!r} has no parts to choose from; give its name alone")
        if not all(values):
            raise ConfigError(f"the task {self.name!r} is followed by ':' and a blank {self.data.choose}; name one")
        name = "-".join([self.name, *(re.sub(r"[^A-Za-z0-9_.-]+", "_", value) for value in values)])
        if len(name) > _MAX_NAME:
            name = f"{name[: _MAX_NAME - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
        return self.model_copy(update={"name": name, "data": self.data.model_copy(update={"keep": values})})

    @classmethod
    def from_file(cls, path: str | Path, raw: bytes | None = None, part: str = "") -> Self:
        """Reads a task file, ours or one of lm-evaluation-harness, whose content is ``raw`` where the caller has read
        it; its data files are relative to its folder. ``part`` is a filter pipeline of a harness file, or a task of a
        group's."""
        path = given_path(path)
        try:
            content = read_harness(path, raw)
            harness = HarnessRows(content, Path(path), part) if is_harness(content) else None
            if harness is None and part:
                raise ConfigError(
                    f"what follows the colon, {part!r}, is for a file of lm-evaluation-harness; leave it out"
                )
            task = cls(**(read_yaml(path, raw) if harness is None else harness.keys))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
        task._harness = harness
        task._folder = Path(path).resolve().parent
        return task

    @property
    def is_generated(self) -> bool:
        """Whether the model writes its answer, instead of choosing among labels."""
        return self.answer is not None

    @property
    def words(self) -> tuple[str, ...]:
        """The label words, in the order of the L axis; none where answers are generated."""
        if isinstance(self.labels, dict):
            return tuple(self.labels.values())
        return tuple(self.labels or self.label_values or ())

    @property
    def has_row_choices(self) -> bool:
        """Whether each row has choices of its own, instead of the labels of all."""
        return self.choices is not None

    @property
    def classes(self) -> tuple[str, ...]:
        """What demonstrations and queries are balanced over: the label words, or one class of all examples."""
        return self.words or ("all",)

    def examples(self, split: Split) -> Examples:
        """Reads one split; raises `DataError` naming file and line of what does not fit. O(rows).

        A split that is a share of another holds the content whose hash lies in its part of [0, 1): the same whatever
        the order of the rows and the seed of a study, and on one side only, however often a row is repeated. With
        ``data.stratify`` it is the rank of the hash within its label that does, so that every label has its share.
        """
        if getattr(self.data, split, None) is None:
            raise ConfigError(
                f"task {self.name!r} has no {split!r} data; name a file, or a share of train, under 'data'"
            )
        contents = self._split_contents(split)
        kept: dict[str, Content] = {}
        num_conflicting = sum(row.answer != kept.setdefault(row.hash, row).answer for row in contents)
        return Examples(
            split=split,
            fields=[row.fields for row in kept.values()],
            labels=np.array([row.label for row in kept.values()], dtype=np.int64),
            answers=[row.answer for row in kept.values()],
            hashes=list(kept),
            num_duplicates=len(contents) - len(kept),
            num_conflicting=num_conflicting,
            digest=digest_of_rows([row.fields, row.answer] if self.is_generated else row.told for row in kept.values()),
            chosen=[row.chosen for row in kept.values() if row.chosen] if self.has_row_choices else None,
        )

    def opening(self) -> str:
        """The text before the first demonstration."""
        end = self.separator if self.instruction_end is None else self.instruction_end
        return self.instruction + end if self.instruction else ""

    @property
    def notes(self) -> list[str]:
        """What was decided about its data and should be known, in a line each."""
        is_halved = self.data.test == HALF
        of_file = [] if self._harness is None else self._harness.notes(is_halved=is_halved)
        empty = [
            f"{number:,} row{'s' if number > 1 else ''} of {split} ha{'ve' if number > 1 else 's'} no text in "
            f"{' and '.join(map(repr, self.fields.values()))}, and are asked and shown so; take them out, or set "
            "drop_blank: true under 'data', which leaves out each row with a blank column"
            for split, number in self._num_empty.items()
            if number
        ]
        return [*self.data.notes, *of_file, *empty]

    def render_demonstration(self, fields: Mapping[str, Any], label: str | int) -> str:
        """One demonstration's text, without the separator that follows it. It shows the right label or choice, by its
        text (`Examples.answers`) or the position of a label."""
        return self._templates["demonstration"].render(self._shown(fields, label))

    def render_query(self, fields: Mapping[str, Any]) -> str:
        """One query's text, up to where the label or the answer begins."""
        return self._templates["query"].render(fields)

    def render_queries(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """`render_query` of many rows at once, which is quicker where the template needs a process of its own."""
        return self._templates["query"].render_all(rows)

    def render_demonstrations(self, rows: Sequence[Mapping[str, Any]], labels: Sequence[str | int]) -> list[str]:
        """`render_demonstration` of many rows at once."""
        return self._templates["demonstration"].render_all(
            [self._shown(fields, label) for fields, label in zip(rows, labels, strict=True)]
        )

    def _shown(self, fields: Mapping[str, Any], label: str | int) -> Mapping[str, Any]:
        """What the template of a demonstration sees."""
        if self.is_generated:
            return fields
        return {**fields, "label": label if isinstance(label, str) else self.words[label]}

    def render_choices(self, fields: Mapping[str, Any]) -> list[str]:
        """The texts of a row's own choices, in order; raises `DataError` for what `RowChoices.texts` does."""
        if self._row_choices is None:
            raise ConfigError(f"task {self.name!r} has labels, and no choices of each row; read its words")
        (texts,) = self._row_choices.texts([fields])
        return list(texts)

    def continuations(self) -> list[str]:
        """The text of each label after a query, [L]; the one text "" where answers are generated, none where each row
        has choices of its own (`continued`)."""
        return [""] if self.is_generated else self.continued(self.words)

    def continued(self, answers: Sequence[str]) -> list[str]:
        """The text of each label or choice after a query."""
        return self._templates["continuation"].render_all([{"label": answer} for answer in answers])

    def wording_hash(self) -> str:
        """SHA-256 of all that turns a row into text, and generated text into an answer."""
        wording = self.model_dump(mode="json", exclude=set(_NO_WORDING))
        # Tasks with labels keep the hashes that they had before there were others.
        for key in _OF_LABELS if self.answer else _OF_ANSWERS - self.model_fields_set:
            del wording[key]
        for key in ("labels", "label_field") if self.has_row_choices else _OF_CHOICES:
            del wording[key]
        if self.instruction_end is None:
            del wording["instruction_end"]
        if self._harness is not None:
            wording["harness"] = self._harness.digest
        if self.answer:
            wording["answer"] = self.answer.model_dump(mode="json", exclude_defaults=True)
        return hashlib.sha256(json.dumps(wording, sort_keys=True).encode()).hexdigest()

    def _split_contents(self, split: Split) -> list[Content]:
        source, start, end = self.data.part(split)
        rows = self._read(source)
        place = ranks(rows) if self.data.stratify else fractions(rows)
        contents = [row for row in rows if start <= place[row.hash] < end]
        if not contents:
            raise DataError(
                f"task {self.name!r}: its shares leave the split {split!r} no rows; change them under 'data'"
            )
        return contents

    def _read(self, split: Split) -> list[Content]:
        if split not in self._contents:
            positions = self._positions()
            is_shown = split == "train"
            columns = (self._columns, ()) if self._harness is None else self._harness.columns(is_shown)
            found = self.data.rows(self._folder, split, *map(dict.fromkeys, columns))
            kept = [(place, row) for place, row in found if not (self.data.drop_blank and self._is_blank(place, row))]
            if not kept:
                raise DataError(f"task {self.name!r}: every row of {split!r} is blank in a column that it uses")
            if self._harness is not None:
                rows = self._harness.rows(kept, is_shown)
            else:
                self._refuse_unknown_labels(kept, positions)
                self._num_empty[split] = sum(
                    not "".join(str(row.get(column, "")) for column in self.fields.values()).strip() for _, row in kept
                )
                rows = self._chosen_rows(kept) if self._row_choices else [self._row(*each, positions) for each in kept]
            # What the model gets to read counts: fields that differ elsewhere make the same prompt.
            texts = self._templates["query"].render_all([row.fields for row in rows], [row.place for row in rows])
            own = [row.chosen.texts if row.chosen else () for row in rows]
            continued = iter(self.continued([choice for choices in own for choice in choices]))
            compared = [
                compared_text(text, [next(continued) for _ in choices])
                for text, choices in zip(texts, own, strict=True)
            ]
            self._contents[split] = [
                Content(hashlib.sha256(text.encode()).hexdigest(), *row[1:])
                for row, text in zip(rows, compared, strict=True)
            ]
        return self._contents[split]

    def _chosen_rows(self, found: Sequence[tuple[str, Mapping[str, Any]]]) -> list[ReadRow]:
        """Rows with choices of their own; names that are no fields are columns."""
        assert self._row_choices is not None
        rows = [{**row, **self._fields(place, row)} for place, row in found]
        places = [place for place, _ in found]
        chosen = self._row_choices.of_rows(rows, places)
        return [
            ReadRow(place, {name: row[name] for name in self.fields}, 0, own.texts[own.gold[0]], own)
            for place, row, own in zip(places, rows, chosen, strict=True)
        ]

    def _fields(self, place: str, row: Mapping[str, Any]) -> dict[str, Any]:
        """What the templates see of a row; raises `DataError` where one of its columns is missing or holds nothing."""
        for column in self._columns:
            if column not in row:
                raise missing_column(place, column, row)
            if row[column] is None:
                raise DataError(f"{place}: the column {column!r} holds no value; fill it in or remove the row")
        return {name: row[column] for name, column in self.fields.items()}

    def _positions(self) -> dict[str, int]:
        """The place of the label that each value of the data means; raises `ConfigError` for a value of two."""
        positions: dict[str, int] = {}
        if self.has_row_choices:
            return positions
        values = [*(self.labels or ()), *(self.label_values or ())]
        words = [*self.words, *(self.label_values or ())] if self.labels is not None else values
        pairs = [*zip(values, words, strict=True)]
        pairs += [(value, word) for word, others in (self.label_values or {}).items() for value in others]
        for value, word in pairs:
            place = self.words.index(word)
            key = self._label_key(value)
            if positions.setdefault(key, place) != place:
                other = self.words[positions[key]]
                raise ConfigError(
                    f"the data's label {str(value)!r} would mean both {other!r} and {word!r}; let it mean one"
                )
        return positions

    def _label_key(self, value: Any) -> str:
        text = str(value)
        if self.label_match == "exact":
            return text
        return text.strip() if self.label_match == "trim" else folded(text)

    def _is_blank(self, place: str, row: Mapping[str, Any]) -> bool:
        for column in self._columns:
            if column not in row:
                raise missing_column(place, column, row)
            if row[column] is None or not str(row[column]).strip():
                return True
        return False

    def _refuse_unknown_labels(
        self, rows: Sequence[tuple[str, Mapping[str, Any]]], positions: Mapping[str, int]
    ) -> None:
        """Raises `DataError` for labels that the task does not know: all of them, with their numbers of rows."""
        if self.is_generated or self.has_row_choices:
            return
        column = self.label_field
        strange = [
            (place, str(row[column]))
            for place, row in rows
            if row.get(column) is not None and self._label_key(row[column]) not in positions
        ]
        if not strange:
            return
        place, first = strange[0]
        shown = repr(first) if first.strip() else "blank"
        known = list(dict.fromkeys(map(str, self.labels or self.words)))
        counts = Counter(value for _, value in strange)
        spelt = {folded(word): word for word in known}
        others = [
            f"{value!r} ({count:,} row{'s' if count > 1 else ''})"
            + (f", which may mean {spelt[folded(value)]!r}" if folded(value) in spelt else "")
            for value, count in counts.most_common(_MOST_VALUES)
        ]
        message = f"{place}: {column!r} is {shown}; the labels are {', '.join(known)}"
        is_variant = any(folded(value) in spelt for value in counts)
        if len(counts) > 1 or is_variant:
            left = len(counts) - len(others)
            message += f"; in {len(strange):,} rows there are others: {', '.join(others)}"
            message += f" and {left:,} more" if left else ""
            message += "; list them under 'label_values'" + (", or set label_match: fold" if is_variant else "")
        else:
            message += "; correct the row, or list what it means under 'label_values'"
        raise DataError(message)

    @property
    def _gold_column(self) -> str:
        return self.label_field if self.answer is None else self.answer.field

    @property
    def _columns(self) -> tuple[str, ...]:
        """The columns of the data that are used."""
        others = sorted(self._row_choices.variables - self.fields.keys()) if self._row_choices else [self._gold_column]
        return (*self.fields.values(), *others)

    def _row(self, place: str, row: Mapping[str, Any], positions: Mapping[str, int]) -> ReadRow:
        fields = self._fields(place, row)
        label, answer = self._gold(place, row[self._gold_column], positions)
        return ReadRow(place, fields, label, answer)

    def _gold(self, place: str, value: Any, positions: Mapping[str, int]) -> tuple[int, str]:
        """The class and the right answer of a row."""
        text = str(value)
        shown = repr(text) if text.strip() else "blank"
        if self.is_generated:
            if self.answer is not None and self.answer.has_several_golds:
                given = value.get("text") if isinstance(value, Mapping) else value  # as SQuAD is published
                listed = given if isinstance(given, list) else [text]
                if not listed or not text.strip():
                    raise DataError(f"{place}: the answer {self._gold_column!r} is {shown}; give a text, or several")
                return 0, golds_text([*map(str, listed)])
            if not isinstance(value, str | int | float) or not text.strip():
                raise DataError(f"{place}: the answer {self._gold_column!r} is {shown}; give a text or a number")
            return 0, text
        position = positions[self._label_key(value)]
        return position, self.words[position]


def builtin_tasks() -> list[str]:
    """The names of the tasks that come with the package."""
    return sorted(path.stem for path in BUILTIN.glob("*.yaml"))


def template_text(name: str, generated: bool = False) -> str:
    """A commented task file to start from: it works as it stands for a train.csv beside it, with columns text and
    label, or question and answer where answers are ``generated``.

    Raises `ConfigError` for a name that a task cannot have.
    """
    if not re.fullmatch(_NAME, name):
        raise ConfigError(
            f"the task name {name!r} must be letters, digits, '_', '.' and '-', at most {_MAX_NAME} of them"
        )
    starter = _GENERATED_STARTER if generated else _STARTER
    return starter.read_text(encoding="utf-8").replace("NAME", name)
