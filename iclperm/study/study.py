"""What to run: the validated choices of one study, in and out of YAML."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, JsonValue, field_validator

from iclperm.errors import ConfigError, UnknownKind
from iclperm.study import kinds
from iclperm.study.choices import Choices, file_and_part, refuse_other_keys, shown, yaml_in
from iclperm.study.endpoint import EndpointChoices
from iclperm.study.orderings import ORDER_DESIGNS
from iclperm.study.precision import Precision, parse_precision
from iclperm.study.sizes import parse_budget, parse_search_budget

Count = Annotated[int, Field(ge=1, le=1_000_000)]
Shots = Annotated[int, Field(ge=0, le=100_000)]
Row = Annotated[int, Field(ge=0)]
AskedSplit = Literal["test", "dev"]
Criterion = Literal[
    "dev_accuracy",
    "majority_agreement",
    "global_entropy",
    "local_entropy",
    "mutual_information",
    "dev_log_likelihood",
]
Balance = Literal["classes", "natural"]
Scoring = Literal["loglikelihood", "first_token", "generate"]
Attention = Literal["auto", "native", "triton", "torch"]
Layers = Literal["auto", "transformers"]
PackTokens = Annotated[int, Field(ge=8, le=1 << 20)]
RaceRules = Literal["calibrated", "certified"]
Cells = Literal["crossed", "blocks", "random"]
PerQuery = Literal["per query"]
Order = Literal["similar_last", "similar_first", "permuted"]
GivenSets = Annotated[list[Annotated[list[Row], Field(min_length=1)]], Field(min_length=1)]
PMI = "pmi"
"""The one value of ``normalize`` that asks the model for more."""
STATISTICS = ("normalize", "criterion", "unparsed")
"""Keys that change no answer, only what is made of them."""
EXTENT_KEYS = ("sets", "permutations", "queries", "dev_queries")
"""The keys that a finished run can be extended in."""
WAYS = ("plain", "attention", "layers", "pack_tokens")
"""Keys of how a model is run; they decide about last bits alone, which a run's numerics tell."""
RESOURCES = ("dtype", "device", "memory_budget", *WAYS)
"""Keys of a model on this machine."""
_DEVICE = re.compile(r"auto|balanced|(cpu|cuda|mps|xpu)(:\d+)?")


class Study(Choices):
    """The choices that define a study: ``sets`` x ``permutations`` x ``shots`` x ``queries`` on one model and task.

    ``model`` is ``demo``, a local folder or a hub id (with ``revision``), ``adapter`` the folder of a PEFT
    adapter to merge into it; ``task`` is the name of a built-in task or
    the path of a task file, ``data`` a folder that has its data where they are not where the task says. ``shots`` is
    one k, a list of k, ``all`` (0 to the task's own), or None for the task's own; they are prefixes of the same
    orderings, or with ``resample: per_k`` each has sets and permutations of its own. ``design`` tells which
    permutations come together (`iclperm.prompts.design.draw_permutations`). ``queries`` are test queries;
    ``dev_queries`` are scored beside them; ``cells`` tells whether every ordering is asked all test queries (crossed)
    or ``queries_per_ordering`` of its own (`iclperm.prompts.design.deal_queries`); ``balance`` tells what queries stand
    for: all classes alike, a short one oversampled, or ``natural``, the split as it is, every query once. ``normalize``
    tells what log-likelihoods of labels are compared by: their sum, the mean over tokens, over bytes, or over the
    characters of the label or choice itself, or ``pmi``, the sum less that of the label or choice after no text at all,
    which is asked once more; ``calibration: contextual`` takes out what each context makes of them by itself, seen by
    three content-free queries. ``scoring`` is how an answer is found: by the log-likelihood of every
    label, of its ``first_token`` alone, or ``generate``, greedily, up to ``max_new_tokens``, and then read; None is
    what the task asks for. ``think: strip`` takes blocks of reasoning out of generated text first, and ``unparsed``
    tells whether text that no answer could be read from counts as wrong or as missing. ``chat`` puts the prompt into
    the model's chat template (None: only for an endpoint that takes nothing
    else). ``endpoint`` names a model behind an API in place of ``model``. ``memory_budget`` is bytes (a number, "4GiB")
    or a share of what is free (0.5, "50%"); ``plain`` runs an architecture that the prefix tree does not serve, prompt
    by prompt, at the cost of every token; ``attention``, ``layers`` and ``pack_tokens`` are those of
    `iclperm.engine.engine.Engine`, for a device where something does not work; ``out`` is the run folder.
    ``demonstrations`` are sets of train rows to use instead of drawn ones, or ``per query``: then each query has its
    own, which the file ``neighbours`` names (`iclperm.prompts.neighbours.read_neighbours`), in the ``order`` of their
    similarity or in random orders (permuted, None for several ``permutations``). A ``kind`` is one of
    `iclperm.study.kinds`, with defaults of its own; some run every k up to ``shots``. ``tasks`` and ``models`` are
    those of a transfer study, ``criterion`` chooses an ordering in a search, ``budget`` (adaptive, "5 %", "2M tokens",
    "10 min", "$5") has it ask only what the choice needs, by a ``rule`` and to a ``tolerance``; ``precision``
    ("order_effect +- 0.01") has a run grow in waves until that is known, to at most its sizes, or ("plateaus +- 0.02")
    ask each trajectory of a curve until it is flat or not; ``select`` is how many
    demonstrations a selection keeps, ``options`` are those of another package's kind. Raises `ConfigError` naming the
    key, the value and the remedy.
    """

    kind: str = kinds.SENSITIVITY.name
    model: Annotated[str, Field(min_length=1)] = "demo"
    revision: str | None = None
    adapter: Annotated[str | None, Field(min_length=1, exclude_if=lambda given: given is None)] = None
    task: Annotated[str, Field(min_length=1)] = "mini_news"
    tasks: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] | None = None
    models: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] | None = None
    data: Annotated[str, Field(min_length=1)] | None = None
    sets: Count = 10
    permutations: Count = 10
    demonstrations: GivenSets | PerQuery | None = None
    neighbours: Annotated[str | None, Field(min_length=1, exclude_if=lambda given: given is None)] = None
    order: Annotated[Order | None, Field(exclude_if=lambda given: given is None)] = None
    shots: Shots | Annotated[list[Shots], Field(min_length=1)] | Literal["all"] | None = None
    resample: Literal["none", "per_k"] = "none"
    queries: Count = 500
    dev_queries: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    balance: Annotated[Balance, Field(exclude_if=lambda given: given == "classes")] = "classes"
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    design: str = "random"
    cells: Annotated[Cells, Field(exclude_if=lambda given: given == "crossed")] = "crossed"
    queries_per_ordering: Annotated[Count | None, Field(exclude_if=lambda given: given is None)] = None
    scoring: Scoring | None = None
    normalize: Literal["sum", "mean", "bytes", "characters", "pmi"] = "sum"
    calibration: Literal["none", "contextual"] = "none"
    criterion: Criterion = "dev_accuracy"
    budget: Annotated[str, Field(exclude_if=lambda given: given == "exhaustive")] = "exhaustive"
    rule: Annotated[RaceRules, Field(exclude_if=lambda given: given == "calibrated")] = "calibrated"
    tolerance: Annotated[float, Field(ge=0, lt=1, exclude_if=lambda given: given == 0.01)] = 0.01
    precision: Annotated[str | None, Field(exclude_if=lambda given: given is None)] = None
    select: Count = 6
    on_overlong: Literal["error", "drop"] = "error"
    chat: Literal["none", "single", "multiturn"] | None = None
    max_new_tokens: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    think: Literal["keep", "strip"] = "keep"
    unparsed: Literal["wrong", "drop"] = "wrong"
    endpoint: EndpointChoices | None = None
    options: Annotated[dict[str, JsonValue] | None, Field(exclude_if=lambda given: given is None)] = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Annotated[str, Field(min_length=1)] = "auto"
    memory_budget: int | float | str | None = None
    plain: Annotated[bool, Field(exclude_if=lambda given: not given)] = False
    attention: Annotated[Attention, Field(exclude_if=lambda given: given == "auto")] = "auto"
    layers: Annotated[Layers, Field(exclude_if=lambda given: given == "auto")] = "auto"
    pack_tokens: Annotated[PackTokens | None, Field(exclude_if=lambda given: given is None)] = None
    out: Annotated[str, Field(min_length=1)] | None = None

    def __init__(self, /, **choices: Any) -> None:
        kind = kinds.find(choices.get("kind", kinds.SENSITIVITY.name))
        if kind is not None and kind.is_report:
            raise ConfigError(
                f"a study's key 'kind' is {kind.name!r}, a report of a run: iclperm report RUN --kind {kind.name}"
            )
        if kind is None and choices.keys() <= type(self).model_fields.keys():
            named = kinds.in_words(map(repr, kinds.studies()))
            raise UnknownKind(
                kinds.refused(f"a study's key 'kind' is {shown(choices['kind'])}: input should be {named}")
            )
        kind = kind or kinds.SENSITIVITY  # of choices that are refused below
        for key in (*kind.keys, *kind.defaults, *kind.free):
            if key not in type(self).model_fields:
                raise ConfigError(f"{kinds.origin(kind)} names {key!r}, which is no key of a study; repair it")
        given = choices.get("demonstrations")
        sets = {"sets": len(given)} if isinstance(given, list) and given else {}
        defaults = {key: value for key, value in kind.defaults.items() if not (sets and key == "shots")}
        if given == kinds.PER_QUERY:
            sets = {"sets": 1}
            if choices.get("order") in ("similar_last", "similar_first"):
                sets["permutations"] = 1
        if isinstance(behind := choices.get("endpoint"), Mapping) and "model" not in behind and "model" in choices:
            name = choices.pop("model")
            if isinstance(name, str) and Path(name).is_dir():
                raise ConfigError(f"a study's key 'model' is the folder {name!r}, but an endpoint has a model by name")
            choices = {**choices, "endpoint": {**behind, "model": name}}
        super().__init__(**{**defaults, **sets, **_with_options(kind, choices)})
        kinds.refuse_own_demonstrations(self)
        for key in type(self).model_fields:
            is_foreign = key in kinds.KEYS and key not in kind.keys
            if is_foreign and getattr(self, key) != type(self).model_fields[key].default:
                raise ConfigError(
                    f"a study's key {key!r} is for the kind {kinds.first_with(key)}, not {kind.name}; leave it out"
                )
        if kind.check is not None:
            with kinds.calling(kind, "check"):
                kind.check(self)
        if self.adapter is not None and self.models is not None:
            raise ConfigError("a study's key 'adapter' is for one model, not for several 'models'; leave one out")
        if self.plain:
            for key in ("memory_budget", "attention", "layers", "pack_tokens"):
                if (value := getattr(self, key)) != type(self).model_fields[key].default:
                    raise ConfigError(
                        f"a study's key {key!r} is {value!r}, which is for the passes over a tree, and there are none "
                        "with 'plain'; leave one out"
                    )
        if self.endpoint is not None:
            self._refuse_local_choices()
        if self.given_sets is not None:
            self._refuse_uneven(self.given_sets)

    def _refuse_local_choices(self) -> None:
        for key in ("model", "revision", "adapter", "models", *RESOURCES):
            if getattr(self, key) != type(self).model_fields[key].default:
                raise ConfigError(
                    f"a study's key {key!r} is for a model on this machine, not for an endpoint; leave it out"
                )

    def _refuse_uneven(self, given: list[list[int]]) -> None:
        sizes = sorted({len(rows) for rows in given})
        if len(sizes) > 1:
            raise ConfigError(f"a study's key 'demonstrations' has sets of {sizes[0]} to {sizes[-1]}; give equal sizes")
        if self.sets != len(given):
            raise ConfigError(f"a study's key 'sets' is {self.sets}, but {len(given)} 'demonstrations' are given")
        if any(len(set(rows)) < len(rows) for rows in given):
            raise ConfigError("a study's key 'demonstrations' has a row twice in one set; give every row once")
        # Strategies of a selection, which runs curves, may choose the same demonstrations.
        if kinds.named(self.kind).compares_sets and len({tuple(sorted(rows)) for rows in given}) < len(given):
            raise ConfigError("a study's key 'demonstrations' holds one set twice; its order is for the permutations")
        if self.resample != "none":
            raise ConfigError("a study's key 'resample' is 'per_k', but its 'demonstrations' are given; leave one out")

    @field_validator("design")
    @classmethod
    def _known_design(cls, design: str) -> str:
        if design not in ORDER_DESIGNS:
            raise ValueError(f"input should be {kinds.in_words(map(repr, ORDER_DESIGNS))}")
        return design

    @field_validator("device")
    @classmethod
    def _known_device(cls, device: str) -> str:
        if not _DEVICE.fullmatch(device):
            raise ValueError("give auto, cpu, cuda, cuda:1, mps, xpu or balanced")
        return device

    @field_validator("memory_budget")
    @classmethod
    def _budget(cls, budget: Any) -> Any:
        return None if budget is None else parse_budget(budget)

    @field_validator("budget")
    @classmethod
    def _search_budget(cls, budget: str) -> str:
        parse_search_budget(budget)
        return budget

    @field_validator("precision")
    @classmethod
    def _known_precision(cls, precision: str | None) -> str | None:
        if precision is not None:
            parse_precision(precision)
        return precision

    @field_validator("shots")
    @classmethod
    def _distinct(cls, shots: Any) -> Any:
        if isinstance(shots, list) and len(set(shots)) < len(shots):
            raise ValueError("every number of shots should be listed once")
        return shots

    @classmethod
    def from_file(cls, path: str | Path, raw: bytes | None = None) -> Self:
        """Reads a study file, whose content is ``raw`` where the caller has read it; task file, data and model named in
        it are looked up beside it first."""
        study = super().from_file(path, raw)
        return study.model_copy(update=found_beside(study.model_dump(), Path(path).parent))

    def of_kind(self, kind: str, **changes: Any) -> Self:
        """The same choices for a run of another kind, without ``out``, ``options`` and the keys that are not for it."""
        left_out = {"out", "options", *(kinds.KEYS.keys() - kinds.named(kind).keys.keys())}
        return type(self)(**{**self.model_dump(exclude=left_out), "kind": kind, **changes})

    @property
    def given_sets(self) -> list[list[int]] | None:
        """The sets of train rows that it names; None where they are drawn, or each query has its own."""
        return self.demonstrations if isinstance(self.demonstrations, list) else None

    @property
    def is_per_query(self) -> bool:
        """Whether each query has demonstrations of its own."""
        return self.demonstrations == kinds.PER_QUERY

    @property
    def model_name(self) -> str:
        """What to call the model."""
        if self.endpoint is not None:
            return self.endpoint.model
        return self.model if self.adapter is None else f"{self.model} + {Path(self.adapter).name}"

    @property
    def is_adaptive(self) -> bool:
        """Whether what is asked follows from answers, so that most cells may never be."""
        return self.budget != "exhaustive"

    @property
    def is_in_waves(self) -> bool:
        """Whether it runs in waves, each decided from the answers before it."""
        return self.is_adaptive or self.precision is not None

    @property
    def wanted(self) -> Precision | None:
        """The precision at which a run stops; None where it is of its size."""
        return None if self.precision is None else parse_precision(self.precision)

    @property
    def query_counts(self) -> dict[AskedSplit, int]:
        """How many queries of each split are asked, test first."""
        counts: dict[AskedSplit, int] = {"test": self.queries, "dev": self.dev_queries}
        return {split: count for split, count in counts.items() if count}

    @property
    def extent(self) -> dict[str, int]:
        """How far the study goes; it can be extended without touching what there is."""
        return {key: getattr(self, key) for key in EXTENT_KEYS}

    def shot_list(self, task_shots: int) -> tuple[int, ...]:
        """The numbers of shots to run, ascending; ``task_shots`` where the study names none."""
        size = None if self.given_sets is None else len(self.given_sets[0])
        if isinstance(self.shots, list):
            return tuple(sorted(self.shots))
        shots = (task_shots if size is None else size) if self.shots in (None, "all") else int(self.shots)
        is_whole = self.shots == "all" or kinds.named(self.kind).over_all_shots
        return tuple(range(shots + 1)) if is_whole else (shots,)


def found_beside(choices: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Those of a study's choices that name tasks, data and models, as paths where these lie in a folder."""

    def found(key: str, name: Any) -> Any:
        if isinstance(name, list):
            return [found(key, each) for each in name]
        place = folder / file_and_part(str(name))[0] if key.startswith("task") else folder / str(name)
        # A data folder may be called like a built-in task.
        is_file = key.startswith("task") or key == "neighbours"
        is_there = place.is_file() if is_file else name != "demo" and place.is_dir()
        return str(folder / str(name)) if is_there else name

    named = ("task", "data", "model", "adapter", "tasks", "models", "neighbours")
    return {key: found(key, choices[key]) for key in named if choices.get(key) is not None}


def is_cut_off(raw: bytes) -> bool:
    """Whether the content of a file that was written from a study does not reach its last key, or is no YAML."""
    (*_, last) = Study.model_fields
    try:
        return last not in yaml_in(raw)
    except ConfigError:
        return True


def _with_options(kind: kinds.Kind, choices: Mapping[str, Any]) -> Mapping[str, Any]:
    """Choices whose ``options`` are all that the kind has, defaults written out."""
    given = choices.get("options")
    if kind.options is None:
        if given is not None:
            raise ConfigError(
                f"a study's key 'options' is {shown(given)}, but the kind {kind.name} has none; leave it out"
            )
        return choices
    if not isinstance(given, Mapping | None):
        return choices  # to be refused as every value of a wrong type is
    refuse_other_keys(given or {})
    model = kinds.loaded(kind, kind.options) if isinstance(kind.options, str) else kind.options
    with kinds.calling(kind, "options"):
        return {**choices, "options": model(**(given or {})).model_dump(mode="json")}
