"""Task files of lm-evaluation-harness as tasks: multiple choice among fixed labels, and generation that regular
expressions read. What a file asks for beyond that is refused by its key; nothing in it is ever run."""

from __future__ import annotations

import ast
import re
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from iclperm.errors import ConfigError
from iclperm.study.choices import Choices
from iclperm.tasks.sources import Word
from iclperm.tasks.templates import Template

_TELLING = {"dataset_path", "doc_to_text", "doc_to_target", "doc_to_choice", "output_type", "include"}
_FILE_KINDS = {"json", "csv", "parquet"}  # data sets that are files of the user's own
_COLUMN = re.compile(r"(?P<before>\s*)\{\{\s*(?P<column>\w+)\s*\}\}(?P<after>\s*)|(?P<bare>\w+)")
_NUMBER_PATTERN = r"#### (\-?[0-9\.\,]+)"  # what the harness takes where a regex filter names none
_NEW_TOKENS = 256  # likewise, for max_gen_toks
_SHOTS = 4  # where a file names no num_fewshot, which the harness reads as 0: a study of demonstrations has some

Text = Annotated[str, Field(max_length=65_536)]
Texts = Text | list[Text]


class FilterChoices(Choices):
    """One step of a pipeline that reads the answer."""

    function: Literal["regex", "remove_whitespace", "take_first"]
    regex_pattern: Text = _NUMBER_PATTERN
    group_select: Literal[0, -1] = 0
    fallback: Literal["[invalid]"] = "[invalid]"


class PipelineChoices(Choices):
    """How an answer is read from generated text."""

    name: Word
    filter: Annotated[list[FilterChoices], Field(min_length=1)]

    @model_validator(mode="after")
    def _one_pattern(self) -> PipelineChoices:
        if sum(step.function == "regex" for step in self.filter) > 1:
            raise ValueError("a pipeline has two regex steps; one is read")
        return self

    def rule(self) -> dict[str, Any]:
        """The rule of an `Answer`."""
        steps = [step for step in self.filter if step.function == "regex"]
        if not steps:
            return {"name": self.name, "pattern": r"(?s).+"}
        return {"name": self.name, "pattern": steps[0].regex_pattern, "last": steps[0].group_select == -1}


class MetricChoices(Choices):
    """What is computed of the answers."""

    metric: Literal["acc", "acc_norm", "exact_match"]
    aggregation: Literal["mean"] = "mean"
    higher_is_better: Literal[True] = True
    ignore_case: bool = False
    ignore_punctuation: bool = False
    ignore_numbers: bool = False
    regexes_to_ignore: list[Text] = Field(default_factory=list)

    def ignored(self) -> list[str]:
        """The patterns of an `Answer` that are removed from both sides."""
        punctuation = [f"[{re.escape(string.punctuation)}]"] if self.ignore_punctuation else []
        return [*self.regexes_to_ignore, *punctuation, *(["[0-9]"] if self.ignore_numbers else [])]


class GenerationChoices(Choices):
    """Greedy decoding, and where it ends."""

    until: Texts | None = None
    max_gen_toks: Annotated[int, Field(ge=1)] = _NEW_TOKENS
    do_sample: Literal[False] = False
    temperature: Annotated[float, Field(ge=0, le=0)] = 0.0


class DemonstrationChoices(Choices):
    """Which demonstrations the harness would take; here the study draws them."""

    sampler: Literal["default", "first_n"] = "default"


class DatasetChoices(Choices):
    """How the data are loaded; remote code is not run, whatever the file trusts."""

    data_files: dict[str, Texts] | None = None
    revision: Word | None = None
    trust_remote_code: bool = False


class Harness(Choices):
    """A task file of lm-evaluation-harness, as far as it can be read; keys that only name, group or print are passed
    over."""

    task: Word | None = None
    task_alias: Any = None
    tag: Any = None
    group: Any = None
    metadata: Any = None
    should_decontaminate: Any = None
    doc_to_decontamination_query: Any = None
    dataset_path: Word
    dataset_name: Word | None = None
    dataset_kwargs: DatasetChoices = DatasetChoices()
    training_split: Word | None = None
    validation_split: Word | None = None
    test_split: Word | None = None
    fewshot_split: Word | None = None
    fewshot_config: DemonstrationChoices | None = None
    num_fewshot: Annotated[int, Field(ge=0)] = _SHOTS
    description: Text = ""
    doc_to_text: Text
    doc_to_target: Text
    doc_to_choice: Annotated[list[str | int], Field(min_length=2)] | Text | None = None
    target_delimiter: Text = " "
    fewshot_delimiter: Text = "\n\n"
    output_type: Literal["multiple_choice", "generate_until"] = "generate_until"
    generation_kwargs: GenerationChoices = GenerationChoices()
    repeats: Literal[1] = 1
    filter_list: list[PipelineChoices] | None = None
    metric_list: Annotated[list[MetricChoices], Field(min_length=1)] | None = None


def is_lm_eval(raw: Mapping[str, Any]) -> bool:
    """Whether a file's content is a task of lm-evaluation-harness: it has a key that no task of ours has."""
    return not _TELLING.isdisjoint(raw)


def from_lm_eval(raw: Mapping[str, Any], path: str | Path) -> dict[str, Any]:
    """The keys of a `Task` that makes the prompts which the harness makes of the file at ``path``, given its content.

    The columns' label is the position of a choice. The first filter pipeline reads a generated answer; the others are
    tried only where it reads none. Raises `ConfigError` naming the key that cannot be read as ours.
    """
    for key in raw:
        if key not in Harness.model_fields:
            raise ConfigError(
                f"the lm-evaluation-harness key {key!r} cannot be read here; leave it out or write a task"
            )
    harness = Harness(**raw)
    query = _query(harness.doc_to_text)
    target = _COLUMN.fullmatch(harness.doc_to_target)
    if target is None:
        raise ConfigError(
            f"the key 'doc_to_target' is {harness.doc_to_target!r}; only a column's name can be read, as {{{{answer}}}}"
        )
    column = target["column"] or target["bare"]
    fields = {name: name for name in sorted(Template("doc_to_text", query).variables)}
    if not fields or "label" in fields:
        shown = "the column 'label', a name that a task keeps for the label's word" if fields else "no column"
        raise ConfigError(f"the key 'doc_to_text' shows {shown}; show the columns of the question")
    return {
        "name": harness.task or Path(path).stem,
        "source": f"task file of lm-evaluation-harness, {Path(path).name}",
        "data": _data(harness),
        "instruction": _instruction(harness),
        "query": query,
        "separator": harness.fewshot_delimiter,
        "shots": harness.num_fewshot,
        **(
            _chosen(harness, query, fields, column)
            if harness.output_type == "multiple_choice"
            else _generated(harness, query, fields, target)
        ),
    }


def _chosen(harness: Harness, query: str, fields: dict[str, str], column: str) -> dict[str, Any]:
    """What multiple choice has of its own."""
    for key in ("filter_list", "generation_kwargs"):
        if key in harness.model_fields_set:
            raise ConfigError(f"the key {key!r} belongs to 'generate_until'; leave it out of a multiple choice")
    _refuse_metrics(harness, {"acc", "acc_norm"})
    continuation = _literal("target_delimiter", harness.target_delimiter) + "{{ label }}"
    return {
        "fields": fields,
        "label_field": column,
        "labels": dict(enumerate(_choices(harness.doc_to_choice))),
        "demonstration": query + continuation,
        "continuation": continuation,
    }


def _generated(harness: Harness, query: str, fields: dict[str, str], target: re.Match[str]) -> dict[str, Any]:
    """What generation has of its own."""
    if harness.doc_to_choice is not None:
        raise ConfigError("the key 'doc_to_choice' belongs to 'multiple_choice'; leave it out of a generation")
    _refuse_metrics(harness, {"exact_match"})
    column = target["column"] or target["bare"]
    name = "right_answer" if column == "label" else column  # a task's word "label" is taken
    shown = f"{target['before'] or ''}{{{{ {name} }}}}{target['after'] or ''}"
    until = harness.generation_kwargs.until
    stop = [harness.fewshot_delimiter] if until is None else until
    metric = harness.metric_list[0] if harness.metric_list else MetricChoices(metric="exact_match")
    return {
        "fields": {**fields, name: column},
        "answer": {
            "field": column,
            "check": "exact",
            "rules": [pipeline.rule() for pipeline in harness.filter_list or ()],
            "ignore": metric.ignored(),
            "ignore_case": metric.ignore_case,
        },
        "demonstration": query + _literal("target_delimiter", harness.target_delimiter) + shown,
        "stop": [stop] if isinstance(stop, str) else stop,
        "max_new_tokens": harness.generation_kwargs.max_gen_toks,
    }


def _query(text: str) -> str:
    """The template of a query; the name of a column alone means its value."""
    return f"{{{{ {text} }}}}" if re.fullmatch(r"\w+", text) else text


def _data(harness: Harness) -> dict[str, Any]:
    splits = {
        "train": harness.fewshot_split or harness.training_split,
        "test": harness.test_split or harness.validation_split,
        "dev": harness.validation_split if harness.test_split else None,
    }
    for split, keys in {"train": "'training_split' or 'fewshot_split'", "test": "'test_split'"}.items():
        if splits[split] is None:
            raise ConfigError(f"the file names no {split} data; give it the key {keys}")
    if splits["train"] == splits["test"]:
        raise ConfigError(
            f"the key 'fewshot_split' is {splits['train']!r}, the split of the queries; demonstrations need another"
        )
    if splits["dev"] == splits["train"]:
        splits["dev"] = None
    files = harness.dataset_kwargs.data_files
    if files is None:
        dataset = {
            "dataset": harness.dataset_path,
            "config": harness.dataset_name,
            "revision": harness.dataset_kwargs.revision,
        }
        return {key: value for key, value in {**dataset, **splits}.items() if value is not None}
    if harness.dataset_path not in _FILE_KINDS:
        raise ConfigError(f"the key 'data_files' needs a 'dataset_path' of {', '.join(sorted(_FILE_KINDS))}")
    for name in filter(None, splits.values()):
        if name not in files:
            raise ConfigError(f"the key 'data_files' names no file for the split {name!r}; add it")
    return {split: files[name] for split, name in splits.items() if name is not None}


def _instruction(harness: Harness) -> str:
    """The description without the delimiter that a task puts after its instruction."""
    description = _literal("description", harness.description)
    instruction = description.removesuffix(harness.fewshot_delimiter)
    if description and instruction in ("", description):
        raise ConfigError(f"the key 'description' must end in the fewshot_delimiter {harness.fewshot_delimiter!r}")
    return instruction


def _choices(listed: list[str | int] | str | None) -> list[str]:
    """The labels, written as a list or as a template of nothing but a list."""
    if isinstance(listed, str) and (inside := re.fullmatch(r"\s*\{\{\s*(\[.*\])\s*\}\}\s*", listed)):
        try:
            listed = ast.literal_eval(inside[1])
        except (ValueError, SyntaxError, MemoryError, RecursionError):  # MemoryError: nested too deeply to be parsed
            listed = None
    if not isinstance(listed, list) or not all(isinstance(choice, str | int) for choice in listed):
        raise ConfigError("the key 'doc_to_choice' must be a fixed list of labels; choices of each row cannot be read")
    return [str(choice) for choice in listed]


def _refuse_metrics(harness: Harness, known: set[str]) -> None:
    for metric in harness.metric_list or ():
        if metric.metric not in known:
            raise ConfigError(f"the key 'metric_list' asks for {metric.metric!r}; of {harness.output_type!r} only "
                              f"{', '.join(sorted(known))} can be had")  # fmt: skip


def _literal(key: str, text: str) -> str:
    if re.search(r"\{[{%#]", text):
        raise ConfigError(f"the key {key!r} is a template; only plain text can be read")
    return text
