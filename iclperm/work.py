"""What a study computes: its choices drawn, its prompts as tokens, the work in units and parts; no weights."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from iclperm import demo
from iclperm.chat import TextTokenizer, chat_format
from iclperm.designs import CONTENT_FREE, CONTENT_FREE_INPUTS, Design, content_free_examples, draw
from iclperm.errors import ConfigError, DataError, ModelError, RequestError, TokenizationError
from iclperm.prompts import (
    Cell,
    Ids,
    PromptCounts,
    Prompts,
    PromptText,
    PromptTokens,
    prompt_text,
    prompt_tokens,
    tokenise,
)
from iclperm.store import MAX_PARTS, OK, OVERLONG
from iclperm.study import Scoring, Study
from iclperm.tasks import Examples, Task
from iclperm.tasks.answers import Checker, open_checker, word_checker
from iclperm.tasks.sources import Split

if TYPE_CHECKING:
    from iclperm.endpoint.bill import Bill
    from iclperm.endpoint.bill import Prompt as ApiPrompt
    from iclperm.engine.estimate import Estimate
    from iclperm.engine.footprint import Sizes
    from iclperm.engine.plan import Plan

GENERAL_CELLS_PER_PART = 4_096
GENERATED_CELLS_PER_PART = 64
API_PROMPTS_PER_UNIT = 256
_BYTES_PER_TOKEN = 4  # of English, about
LABEL_TOKENS = 16  # that a label may be written in, unless the task or the study says otherwise
UNIT_FLOPS = 2_000_000_000_000  # a kill costs at most a unit: ten seconds at the fp32 rate of two cores
UNIT_TOKENS = (1 << 12, 1 << 16)
_WINDOW_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
_SIZE_KEYS = ("vocab_size", "hidden_size", "n_embd", "num_hidden_layers", "n_layer", "num_attention_heads", "n_head")
_WEIGHT_FILES = "*.safetensors"
_TOKENIZER_FILES = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
)
_IDENTITY_KEYS = ("kind", "resample", "seed", "design", "scoring", "calibration", "on_overlong", "chat")
_ANSWER_CRITERIA = ("dev_accuracy", "majority_agreement", "global_entropy")  # no label scores; the last counts labels
_UNKNOWN = (np.zeros(1, dtype=np.int32),)  # stands for what will be generated; it is never fed
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class StudyPlan:
    """What a study will compute, before any weight is loaded; tokens as `Engine.report` counts them.

    ``num_queries`` distinct queries of all splits serve ``num_asked`` queries: examples of a class that is short count
    several times. ``num_content_free`` more are asked to calibrate by. ``num_duplicates`` rows of the data repeat
    another row, ``num_conflicting`` of them with another label. ``opening`` are the tokens that every prompt begins
    with, ``label_tokens`` the lengths of the labels. Of a study that generates, ``max_new_tokens`` is the most that a
    prompt is answered in, ``tokens_unique`` are those of the prompts, and keys and values those of a unit that decodes
    as long as it may. ``estimate`` is for this machine.
    """

    task: str
    num_sets: int
    num_permutations: int
    shots: tuple[int, ...]
    num_asked: int
    num_queries: int
    num_contexts: int
    num_prompts: int
    tokens_naive: int
    tokens_unique: int
    kv_peak_tokens: int
    kv_peak_bytes: int
    num_units: int
    num_parts: int
    num_overlong: int
    num_excluded: int
    num_duplicates: int
    num_conflicting: int
    disk_bytes: int
    opening: tuple[str, ...]
    label_tokens: tuple[int, ...]
    prompts: PromptCounts
    num_content_free: int = 0
    max_new_tokens: int | None = None
    bill: Bill | None = None
    estimate: Estimate | None = None

    @property
    def saving(self) -> float:
        """Tokens of plain prompting over distinct tokens."""
        return self.tokens_naive / self.tokens_unique

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        bill = None
        if self.bill is not None:
            bill = {**asdict(self.bill.spent), "cost": self.bill.cost, "is_estimate": self.bill.is_estimate}
        return {**asdict(self), "bill": bill, "saving": self.saving}


def plan(study: Study) -> StudyPlan:
    """What ``study`` will compute: needs data, tokenizer and the model's configuration, no weights.

    Raises the errors of `run` that can be known beforehand. O(tokens of demonstrations and queries), and a second for
    the estimate of the time, which there is none of for a device that this machine lacks.
    """
    from iclperm.engine.estimate import estimate
    from iclperm.engine.model import has_device

    work = lay_out(Setting.of(study, weights=False))
    plans = [product.plan for stage in work.stages for product in stage.products]
    is_possible = bool(plans) and study.endpoint is None and has_device(study.device)
    if not is_possible:
        return work.summary()
    assert work.setting.model is not None
    chosen: dict[str, Any] = study.model_dump(include={"device", "dtype", "memory_budget"})
    chosen["max_new_tokens"] = work.setting.max_new_tokens if work.setting.is_generated else 0
    return replace(work.summary(), estimate=estimate(work.setting.model, plans, **chosen))


def sample_prompt(
    study: Study, *, index_set: int = 0, permutation: int = 0, shots: int | None = None, query: int = 0
) -> PromptText:
    """The text of one prompt of a study, by default the first at its largest number of shots; needs no model, but for
    a chat its tokenizer.

    Raises `ConfigError` for a number of shots that the study does not run, and for a query that it does not have.
    """
    task = Task.load(study.task, study.data)
    study = resolved(study, task)
    examples = _examples(study, task)
    design = draw(study, task, examples)
    wanted = design.shots[-1] if shots is None else shots
    if wanted not in design.shots:
        raise ConfigError(f"the study does not run {wanted} shots; it runs {', '.join(map(str, design.shots))}")
    if not 0 <= query < design.num_queries:
        raise ConfigError(
            f"there is no query {query}: the data have {design.num_queries} distinct ones here; give a smaller number"
        )
    chat = None if study.chat == "none" else chat_format(study.chat or "none", task, _tokenizer_named(study))
    return prompt_text(
        design,
        task,
        examples,
        cell=(index_set, permutation, design.shots.index(wanted), query),
        scoring=study.scoring or "loglikelihood",
        chat=chat,
    )


def sample_answer(study: Study, prompt: PromptText) -> str:
    """How the right answer of a prompt that is generated for is read; raises `DataError` where it cannot be."""
    task = Task.load(study.task, study.data)
    if task.answer is None:
        return prompt.answer
    with open_checker(task.answer) as checker:
        return checker.canonical_gold(prompt.answer)


def sample_tokens(study: Study, prompt: PromptText) -> PromptTokens:
    """How the study's model reads a prompt; needs its tokenizer, no weights. Of a model behind an API that is not
    known: its tokens are bytes."""
    return prompt_tokens(prompt, _tokenizer_named(study))


def _tokenizer_named(study: Study) -> Any:
    return TextTokenizer() if study.endpoint else _tokenizer(model_folder(study, weights=False))


def uneven_labels(label_tokens: Sequence[int], normalize: str) -> list[str]:
    """What to know where labels of unequal lengths are compared by their sums."""
    if normalize != "sum" or len(set(label_tokens)) < 2:
        return []
    return [
        f"the labels have {min(label_tokens)} to {max(label_tokens)} tokens, and sums of log-likelihoods favour short "
        "ones; compare with --normalize mean"
    ]


@dataclass(frozen=True)
class Setting:
    """What the study's names stand for, and the choices drawn from them; ``examples`` by split, train first; no
    ``model`` folder for one behind an API."""

    study: Study
    task: Task
    examples: dict[str, Examples]
    design: Design
    model: Path | None

    @classmethod
    def of(cls, study: Study, *, weights: bool = True) -> Setting:
        """Reads the data, draws the design and finds the model; without ``weights`` those of a hub id stay there."""
        task = Task.load(study.task, study.data)
        asked = resolved(study, task)
        examples = _examples(asked, task)
        model = None if asked.endpoint else model_folder(asked, weights=weights)
        return cls(asked, task, examples, draw(asked, task, examples), model)

    def counts(self, asked: Sequence[str]) -> dict[str, int]:
        """Of train and the splits ``asked``: rows that repeat another row of their split, those of them whose label
        contradicts the row that was kept, and queries left out as they repeat a demonstration (or dev a test row)."""
        splits = [self.examples[split] for split in ("train", *asked)]
        return {
            "num_duplicates": sum(split.num_duplicates for split in splits),
            "num_conflicting": sum(split.num_conflicting for split in splits),
            "num_excluded": sum(split.num_excluded for split in self.design.asked if split.split in asked),
        }

    @property
    def is_generated(self) -> bool:
        """Whether answers are generated and read, not chosen by log-likelihood."""
        return self.study.scoring == "generate"

    @property
    def max_new_tokens(self) -> int:
        """The most tokens that are generated for a prompt."""
        return self.study.max_new_tokens or 0

    @property
    def stop(self) -> list[str]:
        """What ends a generated answer, but the model's own end; in a chat that alone does."""
        return [] if self.study.chat != "none" else self.task.stop or ["\n"]

    @property
    def content_free(self) -> slice:
        """Places of the content-free queries among all queries."""
        offsets, last = self.design.query_offsets, self.design.asked[-1]
        return slice(int(offsets[-2 if last.split == CONTENT_FREE else -1]), int(offsets[-1]))

    @cached_property
    def config(self) -> dict[str, Any]:
        """The model's config.json, the part on text flattened in; nothing is known of a model behind an API."""
        if self.model is None:
            return {}
        try:
            raw = json.loads((self.model / "config.json").read_bytes())
            config = {**raw, **(raw.get("text_config") or {})}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ModelError(f"'{self.model / 'config.json'}' cannot be read: {error}; give a model folder") from None
        for key in {*_WINDOW_KEYS, *_SIZE_KEYS} & set(config):
            if not isinstance(config[key], int | None):
                raise ModelError(f"'{self.model / 'config.json'}' says {key} is {config[key]!r}; give a whole number")
        return {key: value for key, value in config.items() if value is not None}

    @cached_property
    def dtype(self) -> str:
        """The dtype that the model is loaded in."""
        if self.study.dtype != "auto" or self.model is None:
            return self.study.dtype
        from iclperm.engine.model import resolved_dtype

        return resolved_dtype(self.config, device=self.study.device, dtype="auto")

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What two sessions of one run must agree on whatever its extent; content counts, not where it lies."""
        return {
            "task": self.task.name,
            "labels": list(self.task.words),
            "study": {
                **self.study.model_dump(include=set(_IDENTITY_KEYS)),
                **({} if self.study.demonstrations is None else {"demonstrations": self.study.demonstrations}),
                "shots": list(self.design.shots),
                "dtype": self.dtype,
            },
            **({"generation": self._generation} if self.is_generated else {}),
            "hashes": {
                **self._model_hashes,
                "wording": self.task.wording_hash(),
                "train": self.examples["train"].digest,
                "test": self.examples["test"].digest,
            },
        }

    @property
    def _model_hashes(self) -> dict[str, Any]:
        if self.study.endpoint is not None:
            endpoint = self.study.endpoint
            return {"endpoint": endpoint.identity if self.is_generated else endpoint.scored_identity}
        assert self.model is not None
        return {
            "model": _hash_files(self.model, ("config.json", _WEIGHT_FILES)),
            "tokenizer": _hash_files(self.model, _TOKENIZER_FILES),
        }

    @property
    def _generation(self) -> dict[str, Any]:
        return {
            "max_new_tokens": self.max_new_tokens,
            "stop": self.stop,
            "think": self.study.think,
            "draws": self.draws,
            "ends": self._ends,
        }

    @property
    def _ends(self) -> Any:
        """The ids that end a text where the model's generation configuration names them; other sources are hashed."""
        path = None if self.model is None else self.model / "generation_config.json"
        if path is None or not path.is_file():
            return None
        try:
            return json.loads(path.read_bytes()).get("eos_token_id")
        except (OSError, ValueError, AttributeError) as error:
            raise ModelError(f"'{path}' cannot be read: {error}; repair or remove it") from None

    @property
    def draws(self) -> int:
        """Texts that are generated for each prompt."""
        return self.study.endpoint.draws if self.study.endpoint is not None else 1

    @property
    def kv_token_bytes(self) -> int:
        """Bytes that the keys and values of one token take; raises `ConfigError` where config.json does not tell."""
        config = self.config
        if self.model is None:
            return 0
        try:
            num_layers = config.get("num_hidden_layers") or config["n_layer"]
            num_heads = config.get("num_attention_heads") or config["n_head"]
            head_size = config.get("head_dim") or (config.get("hidden_size") or config["n_embd"]) // num_heads
        except KeyError as error:
            raise ConfigError(
                f"'{self.model / 'config.json'}' does not tell {error}; give the folder of a language model"
            ) from None
        num_bytes = 2 if self.dtype in ("float16", "bfloat16") else 4
        return int(2 * num_layers * (config.get("num_key_value_heads") or num_heads) * head_size * num_bytes)

    @property
    def unit_tokens(self) -> int:
        """Tokens of one unit of work: some seconds of one CPU, whatever the size of the model."""
        config = self.config
        width = config.get("hidden_size") or config.get("n_embd") or 0
        num_layers = config.get("num_hidden_layers") or config.get("n_layer") or 0
        num_parameters = 12 * num_layers * width**2 + config.get("vocab_size", 0) * width
        return int(np.clip(UNIT_FLOPS // (2 * max(num_parameters, 1)), *UNIT_TOKENS))


@dataclass(frozen=True)
class Demonstrations:
    """What stood in a study's contexts and queries: its design drawn again from its data.

    ``rows`` int64 [S, P, K] are train rows in the order of the prompt, ``labels`` int64 [S, P, K] their labels;
    ``permutations`` int64 [P, K] are shared by the ``sets`` int64 [S, K], rows in default order.
    """

    rows: NDArray[np.int64]
    labels: NDArray[np.int64]
    permutations: NDArray[np.int64]
    sets: NDArray[np.int64]
    texts: dict[int, str]
    """The fields of each train row that is used, joined by spaces; without template and label."""
    hashes: dict[int, str]
    """Of the content of each of these rows."""
    _queries: dict[str, list[str]]

    @classmethod
    def of(cls, study: Study) -> Demonstrations:
        """Reads the task's data; raises `DataError` for a study whose numbers of shots have demonstrations of their
        own, and what reading data raises."""
        task = Task.load(study.task, study.data)
        examples = _examples(study, task)
        design = draw(study, task, examples)
        if len(design.orderings) > 1:
            raise DataError("with resample: per_k every k has demonstrations of its own; run with resample: none")
        (group,), train = design.orderings, examples["train"]
        used = np.unique(group.sets).tolist()
        return cls(
            rows=group.rows,
            labels=train.labels[group.rows],
            permutations=group.permutations,
            sets=group.sets,
            texts={row: _joined(train.fields[row]) for row in used},
            hashes={row: train.hashes[row] for row in used},
            _queries={
                asked.split: [_joined(examples[asked.split].fields[row]) for row in asked.rows]
                for asked in design.asked
            },
        )

    def query_texts(self, split: str) -> list[str]:
        """The fields of each distinct query of a split, joined by spaces; [Q]."""
        return self._queries[split]


def resolved(study: Study, task: Task) -> Study:
    """The study with what it leaves to its task; raises `ConfigError` where the two do not go together."""
    scoring = study.scoring or ("generate" if task.is_generated else "loglikelihood")
    study = study.model_copy(update={"chat": _resolved_chat(study)})
    if study.endpoint is not None and study.endpoint.draws > 1 and scoring != "generate":
        raise ConfigError(
            f"the endpoint's draws are {study.endpoint.draws}, but scoring is {scoring!r}; set draws to 1"
        )
    if task.is_generated and scoring != "generate":
        raise ConfigError(f"scoring is {scoring!r}, but task {task.name!r} has no labels to score; set it to generate")
    if scoring == "first_token" and study.normalize != "sum":
        raise ConfigError(f"normalize is {study.normalize!r}, but first tokens are compared as they are; set it to sum")
    if study.endpoint is not None and study.normalize == "mean":
        raise ConfigError("normalize is 'mean', but an API's tokens are not known; set it to sum or bytes")
    if scoring != "generate":
        given = {"max_new_tokens": study.max_new_tokens is not None, "think": study.think != "keep"}
        if named := [key for key, is_given in given.items() if is_given]:
            raise ConfigError(f"{named[0]} is for generated answers, but scoring is {scoring!r}; leave it out")
        return study.model_copy(update={"scoring": scoring})
    if study.calibration != "none" or study.normalize != "sum":
        key = "calibration" if study.calibration != "none" else "normalize"
        raise ConfigError(f"{key} is {getattr(study, key)!r}, but generated answers have no label scores; leave it out")
    criteria = _ANSWER_CRITERIA[: 2 if task.is_generated else 3]
    if study.criterion not in criteria:
        what = "open answers have no labels to count" if task.is_generated else "generated answers have no label scores"
        raise ConfigError(f"criterion is {study.criterion!r}, but {what}; choose {' or '.join(criteria)}")
    max_new_tokens = study.max_new_tokens or task.max_new_tokens or LABEL_TOKENS
    return study.model_copy(update={"scoring": scoring, "max_new_tokens": max_new_tokens})


def _resolved_chat(study: Study) -> str:
    if study.endpoint is None:
        return study.chat or "none"
    is_chat = study.endpoint.api == "chat"
    chat = study.chat or ("single" if is_chat else "none")
    if is_chat != (chat != "none"):
        remedy = "set chat to single or multiturn, or its api to completions" if is_chat else "set its api to chat"
        raise ConfigError(f"chat is {chat!r}, but the endpoint's api is {study.endpoint.api!r}; {remedy}")
    return chat


def _joined(fields: Mapping[str, Any]) -> str:
    return " ".join(map(str, fields.values()))


@dataclass(frozen=True)
class Product:
    """The cells that are contexts times queries.

    ``contexts`` int64 [C] and ``queries`` int64 [Q] are the numbers in `Prompts` of what ``plan`` numbers from 0 on.
    """

    plan: Plan
    contexts: NDArray[np.int64]
    queries: NDArray[np.int64]


@dataclass(frozen=True)
class Tokens:
    """Tokens of prompting one by one, distinct tokens, and the most whose keys and values are held at once."""

    naive: int = 0
    unique: int = 0
    kv_peak: int = 0

    def __add__(self, other: Tokens) -> Tokens:
        return Tokens(self.naive + other.naive, self.unique + other.unique, max(self.kv_peak, other.kv_peak))


def _examples(study: Study, task: Task) -> dict[str, Examples]:
    """The splits that a study needs, train first, content-free queries last."""
    splits: list[Split] = ["train", *study.query_counts]
    examples: dict[str, Examples] = {split: task.examples(split) for split in splits}
    if study.calibration == "contextual":
        examples[CONTENT_FREE] = content_free_examples(task, examples["train"])
    return examples


@dataclass(frozen=True)
class Part:
    """What one file holds: units of a product, or ``cells`` outside it, that ``stage`` added to the run."""

    stage: int
    product: Product | None
    units: range
    cells: list[Cell]


@dataclass(frozen=True)
class Stage:
    """What a run's growth to ``extent`` adds: cells that no earlier stage has.

    ``first_cells`` int64 [C, 3] hold the first (set, permutation, place on the K axis) of each context within the
    extent, -1 where there is none. ``tokens`` are those of the added cells; ``whole`` those of the extent, had it been
    computed at once.
    """

    extent: dict[str, int]
    num_cells: int
    products: tuple[Product, ...]
    general: list[Cell]
    first_cells: NDArray[np.int64]
    tokens: Tokens
    whole: Tokens

    @property
    def num_units(self) -> int:
        """Units of the products."""
        return sum(product.plan.num_units for product in self.products)

    def parts(self, number: int, general_cells: int = GENERAL_CELLS_PER_PART) -> Iterator[Part]:
        """The files of this stage, in the order of work; ``general_cells`` in one at most."""
        per_part = -(-self.num_units // MAX_PARTS) or 1
        for product in self.products:
            for begin in range(0, product.plan.num_units, per_part):
                yield Part(number, product, range(begin, min(begin + per_part, product.plan.num_units)), [])
        for begin in range(0, len(self.general), general_cells):
            yield Part(number, None, range(0), self.general[begin : begin + general_cells])


@dataclass(frozen=True)
class Work:
    """A setting as tokens, units and parts.

    ``right_answers`` [Q] are the right label or answer of each query, as text in its normal form. ``kept`` int64 are
    the queries that fit the context window. ``stages`` are the extents that the run has grown to,
    one after the other.
    """

    setting: Setting
    prompts: Prompts
    right_answers: list[str]
    kept: NDArray[np.int64]
    stages: tuple[Stage, ...]
    opening: tuple[str, ...]

    @property
    def tokens(self) -> Tokens:
        """Those of the last extent, had it been computed at once."""
        return self.stages[-1].whole

    @cached_property
    def parts(self) -> list[Part]:
        """Files of the whole run, in the order of their numbers."""
        least = GENERATED_CELLS_PER_PART if self.setting.is_generated else GENERAL_CELLS_PER_PART
        return [
            part
            for number, stage in enumerate(self.stages)
            for part in stage.parts(number, max(least, -(-len(stage.general) // MAX_PARTS)))
        ]

    @cached_property
    def general_cells(self) -> NDArray[np.int64]:
        """All cells outside the products, as context * Q + query."""
        cells = [cell for stage in self.stages for cell in stage.general]
        return np.array([cell.context * len(self.prompts.queries) + cell.query for cell in cells], dtype=np.int64)

    @property
    def query_states(self) -> NDArray[np.uint8]:
        """The state of each query before anything is scored, uint8 [Q]."""
        states = np.full(len(self.prompts.queries), OVERLONG, dtype=np.uint8)
        states[self.kept] = OK
        return states

    @property
    def disk_bytes(self) -> int:
        """About what the files of all parts take; of generated text a third, as it is stored compressed."""
        num_cells = sum(stage.num_cells for stage in self.stages)
        setting = self.setting
        each = 4 * setting.max_new_tokens // 3 + 32 if setting.is_generated else 4 * len(setting.task.words) + 4
        return num_cells * each + (len(self.parts) << 12)

    @property
    def begins(self) -> dict[str, int]:
        """Where each split begins among all queries."""
        offsets = self.setting.design.query_offsets.tolist()
        return {asked.split: begin for asked, begin in zip(self.setting.design.asked, offsets[:-1], strict=True)}

    @cached_property
    def published_answers(self) -> list[str]:
        """The right label or answer of each query as the data holds it, [Q]."""
        return _published_answers(self.setting)

    @cached_property
    def bill(self) -> Bill | None:
        """What an API will ask for all of it at most; None for a model on this machine."""
        if self.setting.study.endpoint is None:
            return None
        return _bill(self.setting, self.prompts, [product for stage in self.stages for product in stage.products])

    def identities(self) -> list[dict[str, Any]]:
        """What identifies the run, and each extent that it has grown to, by stage."""
        stages = [self._stage_identity(number) for number in range(len(self.stages))]
        return [{**self.setting.identity, "label_lengths": self._label_lengths(), **stages[0]}, *stages[1:]]

    def _label_lengths(self) -> dict[str, list[int]]:
        """What a label's log-likelihood can be divided by, [L] each: `Study.normalize`. Generated answers have none,
        and how many tokens an API makes of a label is not known."""
        if self.setting.is_generated:
            return {"sum": [], "mean": [], "bytes": []}
        study = self.setting.study
        strip = str.strip if study.chat != "none" else str
        texts = list(map(strip, self.setting.task.continuations()))
        ones = [1] * len(texts)
        if study.scoring == "first_token":
            return {"sum": ones, "mean": ones, "bytes": ones}
        return {
            "sum": ones,
            "mean": [] if study.endpoint else [len(ids) for ids in self.prompts.continuations],
            "bytes": [len(text.encode()) for text in texts],
        }

    def _num_odd_labels(self, stage: Stage) -> int:
        """Cells whose labels have other numbers of tokens than those of the products."""
        usual = [len(ids) for ids in self.prompts.continuations]
        return sum([len(ids) for ids in cell.continuations] != usual for cell in stage.general)

    def _stage_identity(self, number: int) -> dict[str, Any]:
        stage, setting = self.stages[number], self.setting
        has_dev = stage.extent["dev_queries"] > 0
        return {
            "extents": [stage.extent for stage in self.stages[: number + 1]],
            "dev": setting.examples["dev"].digest if has_dev else None,
            "tokens": {"naive": stage.whole.naive, "unique": stage.whole.unique},
            "counts": setting.counts(["test", "dev"] if has_dev else ["test"]),
            "work": {
                "cells": stage.num_cells,
                "units": stage.num_units,
                "parts": sum(part.stage == number for part in self.parts),
                "cut": _cut_hash(self.prompts, stage),
                "general_cells": len(stage.general),
                "odd_labels": self._num_odd_labels(stage),
            },
        }

    def summary(self) -> StudyPlan:
        """The plan in numbers."""
        setting, design = self.setting, self.setting.design
        counts = setting.counts([asked.split for asked in design.asked])
        num_content_free = len(self.prompts.queries[setting.content_free])
        return StudyPlan(
            task=setting.task.name,
            num_sets=design.num_sets,
            num_permutations=design.num_permutations,
            shots=design.shots,
            num_asked=sum(len(asked.turns) for asked in design.asked) - num_content_free,
            num_queries=design.num_queries - num_content_free,
            num_contexts=len(self.prompts.context_ids),
            num_prompts=len(self.prompts.context_ids) * len(self.kept),
            tokens_naive=self.tokens.naive,
            tokens_unique=self.tokens.unique,
            kv_peak_tokens=self.tokens.kv_peak,
            kv_peak_bytes=self.tokens.kv_peak * setting.kv_token_bytes,
            num_units=sum(stage.num_units for stage in self.stages),
            num_parts=len(self.parts),
            num_overlong=design.num_queries - len(self.kept),
            num_excluded=counts["num_excluded"],
            num_duplicates=counts["num_duplicates"],
            num_conflicting=counts["num_conflicting"],
            disk_bytes=self.disk_bytes,
            opening=self.opening,
            label_tokens=()
            if setting.is_generated or setting.model is None
            else tuple(len(ids) for ids in self.prompts.continuations),
            prompts=self.prompts.counts,
            num_content_free=num_content_free,
            max_new_tokens=setting.max_new_tokens if setting.is_generated else None,
            bill=self.bill,
        )


def lay_out(setting: Setting, grown_from: Sequence[Mapping[str, int]] = ()) -> Work:
    """Tokenises a setting's prompts and plans them; see `plan`. ``grown_from`` are the extents that the run had."""
    tokenizer = _tokenizer_of(setting)
    study = setting.study
    prompts = tokenise(
        setting.design,
        setting.task,
        setting.examples,
        tokenizer,
        study.seed,
        # What the first token of a text is, its bytes do not tell; the endpoint does.
        scoring="generate" if setting.is_generated else "loglikelihood" if study.endpoint else _scoring(study),
        chat=study.chat or "none",
    )
    _refuse_foreign_tokenizer(tokenizer, setting, prompts)
    kept = _fitting_queries(setting, prompts)
    extents = [*map(dict, grown_from), setting.study.extent]
    before: list[Mapping[str, int] | None] = [None, *extents[:-1]]
    stages = tuple(_stage(setting, prompts, kept, *pair) for pair in zip(extents, before, strict=True))
    _refuse_small_budget(setting, stages)
    opening = tuple(tokenizer.convert_ids_to_tokens(prompts.start.tolist()))
    return Work(setting, prompts, _right_answers(setting), kept, stages, opening)


@contextmanager
def open_reader(setting: Setting) -> Iterator[Checker | None]:
    """What reads generated answers; None where none are generated."""
    thinking = {"strip_think": setting.study.think == "strip", "think_is_open": _opens_thinking(setting)}
    if not setting.is_generated:
        yield None
    elif setting.task.answer is None:
        yield word_checker(setting.task.words, **thinking)
    else:
        with open_checker(setting.task.answer, **thinking) as checker:
            yield checker


def _opens_thinking(setting: Setting) -> bool:
    """Whether the chat template itself begins a block of reasoning, so that the text ends one that it does not show."""
    study = setting.study
    if study.think == "keep" or study.chat == "none" or setting.model is None:
        return False
    chat = chat_format(study.chat or "none", setting.task, _tokenizer(setting.model))
    return chat is not None and chat.generation.rstrip().endswith("<think>")


def _right_answers(setting: Setting) -> list[str]:
    """Raises `DataError` where one cannot be read, before anything is asked."""
    published = _published_answers(setting)
    if setting.task.answer is None:
        return published
    with open_reader(setting) as checker:
        assert checker is not None
        return list(map(checker.canonical_gold, published))


def _published_answers(setting: Setting) -> list[str]:
    return [setting.examples[asked.split].answers[row] for asked in setting.design.asked for row in asked.rows]


def _sizes(setting: Setting) -> Sizes:
    """What the memory that a model takes follows from; no weights."""
    from iclperm.engine.footprint import Sizes
    from iclperm.engine.model import PlainModel, load_shapes

    assert setting.model is not None
    shapes, place = load_shapes(setting.model, device=setting.study.device, dtype=setting.study.dtype)
    return Sizes.of(PlainModel(shapes), place)


def _refuse_small_budget(setting: Setting, stages: Sequence[Stage]) -> None:
    """Raises `ConfigError` where the products do not fit into the study's memory budget, however small the packs."""
    from iclperm.engine.budget import resolve_budget
    from iclperm.engine.decode import Limits
    from iclperm.engine.model import has_device

    given = setting.study.memory_budget
    if given is None or not has_device(setting.study.device):
        return
    sizes = _sizes(setting)
    try:
        for plan in (product.plan for stage in stages for product in stage.products):
            budget = resolve_budget(given, sizes.device)
            if setting.is_generated:
                limits = Limits.on(sizes.device.type, plan.pack_tokens)
                sizes.generation_limits(limits, budget, plan.max_tokens + setting.max_new_tokens, plan.tokens)
            else:
                sizes.fitted(plan, budget)
    except RequestError as error:
        raise ConfigError(str(error)) from None


def halved_peaks(work: Work) -> tuple[int, int]:
    """Bytes that a run is foretold to take at its peak, and those that it would take in packs of half the size."""
    sizes = _sizes(work.setting)
    plans = [product.plan for stage in work.stages for product in stage.products]
    peaks = [[sizes.peak(plan, sizes.largest_pack(plan) // share) for plan in plans] for share in (1, 2)]
    return max(peaks[0], default=0), max(peaks[1], default=0)


def model_folder(study: Study, *, weights: bool = True) -> Path:
    """The folder of a study's model: the bundled one, a local one, or a hub id's, fetched where it is not there yet.

    Raises `ModelError` naming the model and the remedy, `ConfigError` for a revision of a model that has none.
    """
    local = demo.model_path() if study.model == "demo" else Path(study.model)
    if local.is_dir():
        if study.revision is not None:
            raise ConfigError(
                f"revision is {study.revision!r}, but the model {study.model!r} is a folder; a hub id has revisions: "
                "leave it out"
            )
        return local
    if not _HUB_NAME.fullmatch(study.model):
        raise ModelError(f"there is no model folder {study.model!r}; give 'demo', a folder or a hub id")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = [*_TOKENIZER_FILES, "*.json", "*.model", *([_WEIGHT_FILES] if weights else [])]
    try:
        return Path(snapshot_download(study.model, revision=study.revision, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(
            f"the model {study.model!r} is neither a folder nor to be had from the hub: {reason}"
        ) from None


def _scoring(study: Study) -> Scoring:
    return study.scoring or "loglikelihood"


def _tokenizer_of(setting: Setting) -> Any:
    """That of the model; for one behind an API text stands for itself."""
    return TextTokenizer() if setting.model is None else _tokenizer(setting.model)


def _tokenizer(model: Path) -> Any:
    from iclperm.engine.model import load_tokenizer

    tokenizer = load_tokenizer(model)
    if tokenizer is None:
        raise ModelError(f"model folder '{model}' has no tokenizer; add its tokenizer.json")
    return tokenizer


def _stage(
    setting: Setting,
    prompts: Prompts,
    kept: NDArray[np.int64],
    extent: Mapping[str, int],
    before: Mapping[str, int] | None,
) -> Stage:
    """The cells of ``extent`` that are not among those of the extent ``before``: at most two products, and the rest."""
    contexts, queries = _extent_masks(setting, prompts, kept, extent)
    old_contexts, old_queries = np.zeros_like(contexts), np.zeros_like(queries)
    if before is not None:
        old_contexts, old_queries = _extent_masks(setting, prompts, kept, before)
    is_new = contexts[:, None] & queries & ~(old_contexts[:, None] & old_queries)
    general = [cell for cell in prompts.general if is_new[cell.context, cell.query]]
    factors = ((contexts & ~old_contexts, queries), (old_contexts, queries & ~old_queries))
    products = [_plan_product(setting, prompts, *pair, general) for pair in factors]
    begins = range(0, len(general), GENERAL_CELLS_PER_PART)
    costs = [_product_tokens(setting, prompts, product, general) for product in products if product]
    costs += [_general_tokens(setting, general[begin : begin + GENERAL_CELLS_PER_PART]) for begin in begins]
    tokens = sum(costs, Tokens())
    return Stage(
        extent=dict(extent),
        num_cells=int(is_new.sum()),
        products=tuple(product for product in products if product),
        general=general,
        first_cells=_first_cells(prompts, extent),
        tokens=tokens,
        whole=tokens if before is None else _stage(setting, prompts, kept, extent, None).tokens,
    )


def _extent_masks(
    setting: Setting, prompts: Prompts, kept: NDArray[np.int64], extent: Mapping[str, int]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """The contexts [C] and the queries [Q] of an extent, without the queries that are too long."""
    contexts = np.zeros(len(prompts.contexts), dtype=bool)
    contexts[prompts.context_of[: extent["sets"], : extent["permutations"]]] = True
    counts = {"test": extent["queries"], "dev": extent["dev_queries"], CONTENT_FREE: len(CONTENT_FREE_INPUTS)}
    by_split = [np.arange(len(asked.rows)) < asked.num_distinct(counts[asked.split]) for asked in setting.design.asked]
    queries = np.concatenate(by_split)
    queries[np.setdiff1d(np.arange(len(queries)), kept)] = False
    return contexts, queries


def _first_cells(prompts: Prompts, extent: Mapping[str, int]) -> NDArray[np.int64]:
    within = prompts.context_of[: extent["sets"], : extent["permutations"]]
    contexts, first = np.unique(within, return_index=True)
    cells = np.full((len(prompts.contexts), 3), -1, dtype=np.int64)
    cells[contexts] = np.stack(np.unravel_index(first, within.shape), axis=1)
    return cells


def _plan_product(
    setting: Setting,
    prompts: Prompts,
    contexts: NDArray[np.bool_],
    queries: NDArray[np.bool_],
    general: Sequence[Cell],
) -> Product | None:
    """Plans contexts [C] and queries [Q], without those that have all their cells apart; None where nothing is left."""
    from iclperm.engine.plan import ContextPaths, plan_product
    from iclperm.engine.tree import Rows

    apart = [cell for cell in general if contexts[cell.context] and queries[cell.query]]
    by_context = np.bincount([cell.context for cell in apart], minlength=len(contexts))
    by_query = np.bincount([cell.query for cell in apart], minlength=len(queries))
    wanted = contexts & (by_context < queries.sum())
    asked = np.flatnonzero(queries & (by_query < contexts.sum()))
    rows, marks, marked = _marked_rows(prompts, wanted)
    if not rows or not len(asked):
        return None
    plan = plan_product(
        ContextPaths(Rows.of(rows), Rows.of(marks)),
        [prompts.queries[query] for query in asked],
        _UNKNOWN if setting.is_generated else prompts.continuations,
        unit_tokens=_unit_tokens(setting, [prompts.queries[query] for query in asked]),
    )
    numbers = np.empty(plan.num_contexts, dtype=np.int64)
    numbers[plan.context_index] = marked
    return Product(plan, numbers, asked)


def _unit_tokens(setting: Setting, queries: Sequence[Ids]) -> int:
    """Prompt tokens of a unit: fewer where its answers, which are yet to be generated, add to its work. Of an API a
    unit is some hundred prompts: replies that are paid for are kept anyway."""
    if not setting.is_generated and setting.model is not None:
        return setting.unit_tokens
    query = float(np.mean([len(ids) for ids in queries]))  # of this product alone: it stays when the run grows
    if setting.model is None:
        return int(API_PROMPTS_PER_UNIT * query)
    return max(1, int(setting.unit_tokens * query / (query + setting.max_new_tokens)))


def api_prompt(prompts: Prompts, context: int, query: int) -> ApiPrompt:
    """One prompt as text, or as the messages of a chat."""
    ids, text = np.concatenate([prompts.contexts[context], prompts.queries[query]]), TextTokenizer()
    is_chat = bool(len(ids)) and int(ids.max()) > 255
    return text.ids_to_messages(ids) if is_chat else text.ids_to_text(ids)


def _bill(setting: Setting, prompts: Prompts, products: Sequence[Product]) -> Bill:
    from iclperm.endpoint.bill import product_bill

    choices, text = setting.study.endpoint, TextTokenizer()
    assert choices is not None
    contexts, queries = (list(map(text.ids_to_text, parts)) for parts in (prompts.contexts, prompts.queries))
    return product_bill(
        choices,
        [([contexts[c] for c in product.contexts], [queries[q] for q in product.queries]) for product in products],
        max_new_tokens=setting.max_new_tokens if setting.is_generated else 1,
        times=None if setting.is_generated else len(setting.task.words) if choices.api == "completions" else 1,
    )


def _marked_rows(prompts: Prompts, wanted: NDArray[np.bool_]) -> tuple[list[Ids], list[Ids], NDArray[np.int64]]:
    """Rows that hold every wanted context once, their marks, and the contexts at the marks."""
    rows, marks, marked = [], [], []
    missing = wanted.copy()
    for row, lengths, contexts in zip(prompts.rows, prompts.marks, prompts.marked, strict=True):
        inside = missing[contexts]
        if inside.any():
            missing[contexts] = False
            rows.append(row[: lengths[inside][-1]])
            marks.append(lengths[inside])
            marked.append(contexts[inside])
    return rows, marks, np.concatenate([*marked, np.empty(0, np.int64)])


def _product_tokens(setting: Setting, prompts: Prompts, product: Product, general: Sequence[Cell]) -> Tokens:
    """What the product costs; plain prompting would not need those of its cells that are apart. Of an API it is about
    that: its tokens are not known."""
    if setting.study.endpoint is not None:  # the plan counts bytes
        return Tokens(product.plan.tokens_naive // _BYTES_PER_TOKEN, product.plan.tokens_unique // _BYTES_PER_TOKEN)
    contexts, queries = set(product.contexts.tolist()), set(product.queries.tolist())
    twice = [cell for cell in general if cell.context in contexts and cell.query in queries]
    spared = sum(len(prompts.contexts[cell.context]) + len(prompts.queries[cell.query]) for cell in twice)
    kv_peak = product.plan.kv_peak_tokens
    if setting.is_generated:
        from iclperm.engine.decode import generation_bounds

        kv_peak = generation_bounds(product.plan, setting.max_new_tokens).kv_peak_tokens
    return Tokens(product.plan.tokens_naive - spared, product.plan.tokens_unique, kv_peak)


def _general_tokens(setting: Setting, cells: Sequence[Cell]) -> Tokens:
    from iclperm.engine.plan import plan_requests
    from iclperm.engine.tree import Rows

    requests = [
        (cell.prompt, ids) for cell in cells for ids in (_UNKNOWN if setting.is_generated else cell.continuations)
    ]
    begins = np.array([len(prompt) for prompt, _ in requests], dtype=np.int64)
    requested = plan_requests(Rows.of(list(map(np.concatenate, requests))), begins)
    return Tokens(requested.tokens_naive, requested.tokens_unique, requested.kv_peak_tokens)


def _fitting_queries(setting: Setting, prompts: Prompts) -> NDArray[np.int64]:
    """The queries whose longest prompt fits; a prompt is never cut."""
    window = _window(setting)
    fed = prompts.fed_tokens(*[setting.max_new_tokens] if setting.is_generated else [])
    fits = fed <= (window or fed.max())
    content_free = setting.content_free
    if not fits[: content_free.start].any():
        raise DataError(
            f"each of the {content_free.start} queries makes some prompt that is longer than the context window of "
            f"{window} tokens (the longest feeds {int(fed.max())}); lower {_what_is_long(setting)}"
        )
    if not fits[content_free].all():
        raise DataError(
            f"calibration is 'contextual', but its content-free queries make prompts longer than the context window of "
            f"{window} tokens ({int(fed[content_free].max())}); lower 'shots' or set calibration to none"
        )
    if not fits.all() and setting.study.on_overlong == "error":
        raise DataError(
            f"{int(np.sum(~fits))} of {len(fits)} queries make prompts longer than the context window of {window} "
            f"tokens (query {int(np.argmax(fed))}: {int(fed.max())}); lower {_what_is_long(setting)} or set "
            "on_overlong: drop"
        )
    return np.flatnonzero(fits)


def _window(setting: Setting) -> int | None:
    """The context window; where config.json leaves it to the architecture (Gemma 3 does), that tells."""
    for key in _WINDOW_KEYS:
        if setting.config.get(key):
            return int(setting.config[key])
    if setting.model is None:
        return None
    from iclperm.engine.model import load_config

    window = getattr(load_config(setting.model).get_text_config(decoder=True), "max_position_embeddings", None)
    return None if window is None else int(window)


def _what_is_long(setting: Setting) -> str:
    return "'shots' or 'max_new_tokens'" if setting.is_generated else "'shots'"


def _refuse_foreign_tokenizer(tokenizer: Any, setting: Setting, prompts: Prompts) -> None:
    """Raises `TokenizationError` where ids or BOS show that the tokenizer was made for another model."""
    whose = f"is this the own tokenizer of '{setting.model}'?"
    parts = [*prompts.contexts, *prompts.queries, *prompts.continuations]
    highest, size = max(int(ids.max(initial=0)) for ids in parts), int(setting.config.get("vocab_size") or 0)
    if size and highest >= size:
        raise TokenizationError(f"token id {highest} is out of range: the model has {size} token ids; {whose}")
    own, given = setting.config.get("bos_token_id"), tokenizer.bos_token_id
    own = {own} if isinstance(own, int) else set(own or ())
    opening = prompts.start.tolist()
    if own and given in opening and given not in own:
        raise TokenizationError(
            f"the tokenizer begins with BOS id {given}, but config.json says {min(own)}; {whose} If it is, correct "
            "bos_token_id in config.json"
        )
    if opening.count(given) > 1:
        raise TokenizationError(f"the tokenizer puts BOS (id {given}) in front of a prompt twice; repair its settings")
    unknown = tokenizer.unk_token_id
    if unknown is not None and (share := float(np.mean(np.concatenate(prompts.queries) == unknown))) > 0.5:
        raise TokenizationError(f"{share:.0%} of the queries' tokens are unknown to the tokenizer; {whose}")


def _cut_hash(prompts: Prompts, stage: Stage) -> str:
    """SHA-256 of which cells each unit holds: a part means the same to every session only if they agree.

    Cells are named by their tokens, so that prompts that come out otherwise are noticed too.
    """
    digest = hashlib.sha256(b"".join(ids.tobytes() + b"/" for ids in prompts.continuations))
    for product in stage.products:
        core = product.plan.core
        borders = (product.plan.block_offsets, core.unit_block, core.unit_context_begin, core.unit_context_end)
        for numbers in (*borders, product.plan.query_order, prompts.context_ids[product.contexts]):
            digest.update(np.asarray(numbers, dtype="<i8").tobytes())
        for query in product.queries:
            digest.update(prompts.queries[query].astype("<i4").tobytes() + b"/")
    for cell in stage.general:
        digest.update(b"".join(ids.astype("<i4").tobytes() + b"/" for ids in (cell.prompt, *cell.continuations)))
    return digest.hexdigest()


def _hash_files(folder: Path, patterns: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for path in sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}):
        digest.update(f"{path.name}:{_file_hash(path)}\n".encode())
    return digest.hexdigest()


def _file_hash(path: Path) -> str:
    # The hub's cache names large files by their SHA-256, which saves reading the weights.
    if re.fullmatch(r"[0-9a-f]{64}", path.resolve().name):
        return path.resolve().name
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
