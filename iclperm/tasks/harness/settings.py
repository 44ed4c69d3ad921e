"""The keys of a task file of lm-evaluation-harness, and which of its parts a `!function` takes out of reach."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from iclperm.errors import ConfigError
from iclperm.study.choices import Choices
from iclperm.tasks.filters import FiltersChoices
from iclperm.tasks.harness.files import Function
from iclperm.tasks.sources import Word

Text = Annotated[str, Field(max_length=65_536)]
Output = Literal["multiple_choice", "generate_until", "loglikelihood", "loglikelihood_rolling"]
Wanted = str | int | list[Any] | dict[Any, Any]
"""What ``doc_to_text`` and the like may be: a column's name, a template, a position, or the texts themselves."""

DEFAULT_METRICS: dict[Output, tuple[str, ...]] = {
    "multiple_choice": ("acc", "acc_norm"),
    "generate_until": ("exact_match",),
    "loglikelihood": ("perplexity", "acc"),
    "loglikelihood_rolling": ("word_perplexity", "byte_perplexity", "bits_per_byte"),
}
NEW_TOKENS = 256  # the harness's, for max_gen_toks
RENDERED = "have the harness render its rows, which runs them: iclperm tasks from-harness NAME"
_IGNORED = ("tag", "group", "task_alias", "metadata", "should_decontaminate", "doc_to_decontamination_query")
_NOT_HERE = {  # keys that change what a model sees or how it is judged, and have no way here
    "use_prompt": "name its templates with 'doc_to_text' and 'doc_to_target'",
    "doc_to_image": "models of texts alone are studied here",
    "doc_to_audio": "models of texts alone are studied here",
    "class": "the task is a class of Python",
}


class MeasureChoices(Choices):
    """What is computed of the answers, and what is held against nothing there."""

    metric: Word
    aggregation: Word | None = None
    higher_is_better: bool | None = None
    ignore_case: bool = False
    ignore_punctuation: bool = False
    ignore_numbers: bool = False
    regexes_to_ignore: list[Text] | None = None
    hf_evaluate: bool = False
    weight_by_size: bool = False
    average: Word | None = None
    num_fewshot: int | None = None


class DecodingChoices(Choices):
    """How a text is written, and where it ends."""

    until: list[Text] | Text | None = None
    max_gen_toks: Annotated[int, Field(ge=1)] | None = None
    max_new_tokens: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    max_length: Annotated[int, Field(ge=1)] | None = None
    do_sample: bool | None = None
    temperature: Annotated[float | int, Field(ge=0)] | None = None
    top_p: float | int | None = None
    top_k: int | None = None
    num_beams: Literal[1] = 1

    @property
    def most_tokens(self) -> int:
        """Of a text; the harness's own number where the file has none."""
        given = (self.max_gen_toks, self.max_new_tokens, self.max_tokens, self.max_completion_tokens)
        return next((count for count in given if count is not None), NEW_TOKENS)

    @property
    def is_sampled(self) -> bool:
        """Whether chance decides; else the likeliest token is written."""
        return bool(self.do_sample) and self.temperature != 0


class FewshotChoices(Choices):
    """What is different for demonstrations: where they are, and how they are worded."""

    sampler: Literal["default", "first_n"] = "default"
    split: Word | None = None
    samples: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    fewshot_indices: list[int] | None = None
    doc_to_text: Wanted | None = None
    doc_to_choice: Wanted | None = None
    doc_to_target: Wanted | None = None
    gen_prefix: Text | None = None
    fewshot_delimiter: Text | None = None
    target_delimiter: Text | None = None


class LoadingChoices(Choices):
    """How the data are loaded; remote code is not run, whatever the file trusts."""

    data_files: dict[str, str | list[str]] | str | list[str] | None = None
    data_dir: Word | None = None
    revision: Word | None = None
    split: Word | None = None
    field: Word | None = None
    cache_dir: Word | None = None
    trust_remote_code: bool = False


class HarnessChoices(Choices):
    """The keys that a task file may have, as the harness has them."""

    task: Word | None = None
    dataset_path: Word | None = None
    dataset_name: Word | None = None
    dataset_kwargs: LoadingChoices = LoadingChoices()
    training_split: Word | None = None
    validation_split: Word | None = None
    test_split: Word | None = None
    fewshot_split: Word | None = None
    fewshot_config: FewshotChoices = FewshotChoices()
    num_fewshot: Annotated[int, Field(ge=0, le=100_000)] | None = None
    description: Text = ""
    doc_to_text: Wanted
    doc_to_target: Wanted
    doc_to_choice: Wanted | None = None
    gen_prefix: Text | None = None
    target_delimiter: Text = " "
    fewshot_delimiter: Text = "\n\n"
    output_type: Output = "generate_until"
    generation_kwargs: DecodingChoices | None = None
    repeats: Annotated[int, Field(ge=1)] = 1
    unsafe_code: Literal[False] = False
    filter_list: Annotated[list[FiltersChoices], Field(min_length=1)] | None = None
    metric_list: Annotated[list[MeasureChoices], Field(min_length=1)] | None = None

    @field_validator("doc_to_text", "doc_to_target", "doc_to_choice")
    @classmethod
    def _short(cls, given: Wanted | None) -> Wanted | None:
        if isinstance(given, str) and len(given) > 65_536:
            raise ValueError("longer than 65536 characters; shorten it")
        return given


def settings_of(content: Mapping[str, Any]) -> tuple[HarnessChoices, list[str]]:
    """The keys of a file, checked, and the names of the metrics and pipelines that a `!function` computes, which are
    left out.

    A key that is null counts as not there. Raises `ConfigError` naming the key that cannot be read, or that only a
    `!function` could give.
    """
    keys = {key: _without_null(value) for key, value in content.items() if value is not None and key not in _IGNORED}
    for key, remedy in _NOT_HERE.items():
        if key in keys:
            raise ConfigError(f"the key {key!r} cannot be read here; {remedy}, or {RENDERED}")
    left_out: list[str] = []
    for key, part in (("metric_list", "metric"), ("filter_list", "name")):
        if isinstance(keys.get(key), list):
            kept = [entry for entry in keys[key] if not _functions(entry)]
            lost = [entry for entry in keys[key] if _functions(entry)]
            left_out += [_name_in(entry, part) for entry in lost]
            if lost and not kept:
                raise _needs_harness(key, _functions(lost[0])[0])
            keys[key] = kept
    for key, value in keys.items():
        for function in _functions(value):
            raise _needs_harness(key, function)
    for key in ("process_docs", "process_results", "custom_dataset"):
        if key in keys:
            raise ConfigError(f"the key {key!r} is {keys[key]!r}, no function; leave it out")
    return HarnessChoices(**keys), left_out


def _needs_harness(key: str, function: Function) -> ConfigError:
    return ConfigError(f"the key {key!r} is !function {function.name}, and no function is run here; {RENDERED}")


def _functions(value: Any) -> list[Function]:
    """Every `Function` within a value."""
    if isinstance(value, Function):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [function for part in parts for function in _functions(part)]


def _name_in(entry: Any, part: str) -> str:
    named = entry.get(part) if isinstance(entry, dict) else entry
    return named.name.rpartition(".")[2] if isinstance(named, Function) else str(named)


def _without_null(value: Any) -> Any:
    """A block without the keys that are null; rows of samples keep theirs."""
    if not isinstance(value, dict):
        return value
    return {key: part for key, part in value.items() if part is not None}
