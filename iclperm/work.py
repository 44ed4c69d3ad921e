"""What a study computes: its choices drawn, its prompts as tokens, the work in units and parts; no weights."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from iclperm import demo
from iclperm.designs import Design, draw
from iclperm.errors import ConfigError, DataError, ModelError
from iclperm.prompts import Cell, PromptCounts, Prompts, PromptText, prompt_text, tokenise
from iclperm.store import MAX_PARTS, OK, OVERLONG
from iclperm.study import Study
from iclperm.tasks import Examples, Task

if TYPE_CHECKING:
    from iclperm.engine.plan import Plan

GENERAL_CELLS_PER_PART = 4_096
UNIT_FLOPS = 2_000_000_000_000  # a kill costs at most a unit: ten seconds at the fp32 rate of two cores
UNIT_TOKENS = (1 << 12, 1 << 16)
_WINDOW_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
_WEIGHT_FILES = "*.safetensors"
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class StudyPlan:
    """What a study will compute, before any weight is loaded; tokens as `Engine.report` counts them.

    ``num_duplicates`` rows of the data repeat another row, ``num_conflicting`` of them with another label.
    """

    task: str
    num_sets: int
    num_permutations: int
    shots: tuple[int, ...]
    num_queries: int
    num_contexts: int
    num_prompts: int
    tokens_naive: int
    tokens_unique: int
    kv_peak_tokens: int
    num_units: int
    num_parts: int
    num_overlong: int
    num_duplicates: int
    num_conflicting: int
    disk_bytes: int
    prompts: PromptCounts

    @property
    def saving(self) -> float:
        """Tokens of plain prompting over distinct tokens."""
        return self.tokens_naive / self.tokens_unique

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        return {**asdict(self), "saving": self.saving}


def plan(study: Study) -> StudyPlan:
    """What ``study`` will compute: needs data, tokenizer and the model's configuration, no weights.

    Raises the errors of `run` that can be known beforehand. O(tokens of demonstrations and queries).
    """
    return lay_out(Setting.of(study, weights=False)).summary()


def sample_prompt(
    study: Study, *, index_set: int = 0, permutation: int = 0, shots: int | None = None, query: int = 0
) -> PromptText:
    """The text of one prompt of a study, by default the first at its largest number of shots; needs no model.

    Raises `ConfigError` for a number of shots that the study does not run.
    """
    task = Task.load(study.task)
    train, test = task.examples("train"), task.examples("test")
    design = draw(study, task, train, test)
    wanted = design.shots[-1] if shots is None else shots
    if wanted not in design.shots:
        raise ConfigError(f"the study does not run {wanted} shots; it runs {', '.join(map(str, design.shots))}")
    return prompt_text(design, task, train, test, cell=(index_set, permutation, design.shots.index(wanted), query))


@dataclass(frozen=True)
class Setting:
    """What the study's names stand for, and the choices drawn from them."""

    study: Study
    task: Task
    train: Examples
    test: Examples
    design: Design
    model: Path

    @classmethod
    def of(cls, study: Study, *, weights: bool = True) -> Setting:
        """Reads the data, draws the design and finds the model; without ``weights`` those of a hub id stay there."""
        task = Task.load(study.task)
        train, test = task.examples("train"), task.examples("test")
        return cls(study, task, train, test, draw(study, task, train, test), model_folder(study, weights=weights))

    @property
    def num_duplicates(self) -> int:
        """Rows of train and test that repeat another row of their split."""
        return self.train.num_duplicates + self.test.num_duplicates

    @property
    def num_conflicting(self) -> int:
        """Duplicates whose label contradicts the row that was kept."""
        return self.train.num_conflicting + self.test.num_conflicting

    @cached_property
    def config(self) -> dict[str, Any]:
        """The model's config.json, the part on text flattened in."""
        try:
            config = json.loads((self.model / "config.json").read_bytes())
        except (OSError, ValueError) as error:
            raise ModelError(f"'{self.model / 'config.json'}' cannot be read: {error}; give a model folder") from None
        return {**config, **config.get("text_config", {})}

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What two sessions of one run must agree on, before tokenisation; content counts, not where it lies."""
        choices = self.study.model_dump(include={"kind", "sets", "permutations", "queries", "seed", "dtype"})
        return {
            "task": self.task.name,
            "labels": list(self.task.words),
            "study": {**choices, "on_overlong": self.study.on_overlong, "shots": list(self.design.shots)},
            "hashes": {
                "model": _hash_files(self.model, ("config.json", _WEIGHT_FILES)),
                "tokenizer": _hash_files(self.model, _TOKENIZER_FILES),
                "wording": self.task.wording_hash(),
                "train": self.train.digest,
                "test": self.test.digest,
            },
        }

    @property
    def kv_token_bytes(self) -> int:
        """Bytes that the keys and values of one token take; raises `ConfigError` where config.json does not tell."""
        config = self.config
        try:
            num_layers = config.get("num_hidden_layers") or config["n_layer"]
            num_heads = config.get("num_attention_heads") or config["n_head"]
            head_size = config.get("head_dim") or (config.get("hidden_size") or config["n_embd"]) // num_heads
        except KeyError as error:
            raise ConfigError(
                f"memory_budget: the model's config.json does not tell {error}; leave the budget out"
            ) from None
        num_bytes = 2 if self.study.dtype in ("float16", "bfloat16") else 4
        return int(2 * num_layers * (config.get("num_key_value_heads") or num_heads) * head_size * num_bytes)

    @property
    def kv_tokens(self) -> int | None:
        """How many tokens' keys and values fit the memory budget; None without a budget."""
        budget = self.study.memory_budget
        return None if budget is None else budget // self.kv_token_bytes

    @property
    def unit_tokens(self) -> int:
        """Tokens of one unit of work: some seconds of one CPU, whatever the size of the model."""
        config = self.config
        width = config.get("hidden_size") or config.get("n_embd") or 0
        num_layers = config.get("num_hidden_layers") or config.get("n_layer") or 0
        num_parameters = 12 * num_layers * width**2 + config.get("vocab_size", 0) * width
        return int(np.clip(UNIT_FLOPS // (2 * max(num_parameters, 1)), *UNIT_TOKENS))


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


@dataclass(frozen=True)
class Work:
    """A setting as tokens, units and parts.

    ``kept`` int64 are the queries that fit the context window. Parts are first groups of the product's units, then
    groups of the ``general`` cells; ``tokens`` are those of both.
    """

    setting: Setting
    prompts: Prompts
    kept: NDArray[np.int64]
    product: Product | None
    general: list[Cell]
    tokens: Tokens

    @property
    def num_units(self) -> int:
        """Units of the product."""
        return self.product.plan.num_units if self.product else 0

    @property
    def units_per_part(self) -> int:
        """Consecutive units that share a file."""
        return -(-self.num_units // MAX_PARTS) or 1

    @property
    def num_product_parts(self) -> int:
        """The parts that hold units of the product; those of general cells follow."""
        return -(-self.num_units // self.units_per_part)

    @property
    def num_parts(self) -> int:
        """Files of the whole run."""
        return self.num_product_parts + -(-len(self.general) // GENERAL_CELLS_PER_PART)

    def part_units(self, part: int) -> range:
        """The units of a part of the product."""
        return range(part * self.units_per_part, min((part + 1) * self.units_per_part, self.num_units))

    def part_cells(self, part: int) -> list[Cell]:
        """The cells of a general part."""
        begin = (part - self.num_product_parts) * GENERAL_CELLS_PER_PART
        return self.general[begin : begin + GENERAL_CELLS_PER_PART]

    @cached_property
    def first_cells(self) -> NDArray[np.int64]:
        """The first (set, permutation, position in shots) of each context, int64 [C, 3]."""
        _, first = np.unique(self.prompts.context_of, return_index=True)
        return np.stack(np.unravel_index(first, self.prompts.context_of.shape), axis=1)

    @property
    def query_states(self) -> NDArray[np.uint8]:
        """The state of each query before anything is scored, uint8 [Q]."""
        states = np.full(len(self.prompts.queries), OVERLONG, dtype=np.uint8)
        states[self.kept] = OK
        return states

    def identity(self) -> dict[str, Any]:
        """What identifies the run."""
        return {
            **self.setting.identity,
            "tokens": {"naive": self.tokens.naive, "unique": self.tokens.unique},
            "work": {
                "contexts": len(self.prompts.context_ids),
                "units": self.num_units,
                "parts": self.num_parts,
                "cut": _cut_hash(self.product),
                "general_cells": len(self.general),
                "excluded": self.setting.design.num_excluded,
                "duplicates": self.setting.num_duplicates,
                "conflicting": self.setting.num_conflicting,
            },
        }

    def summary(self) -> StudyPlan:
        """The plan in numbers."""
        design, num_labels = self.setting.design, len(self.setting.task.words)
        num_prompts = len(self.prompts.context_ids) * len(self.kept)
        return StudyPlan(
            task=self.setting.task.name,
            num_sets=len(design.sets),
            num_permutations=len(design.permutations),
            shots=design.shots,
            num_queries=len(design.queries),
            num_contexts=len(self.prompts.context_ids),
            num_prompts=num_prompts,
            tokens_naive=self.tokens.naive,
            tokens_unique=self.tokens.unique,
            kv_peak_tokens=self.tokens.kv_peak,
            num_units=self.num_units,
            num_parts=self.num_parts,
            num_overlong=len(design.queries) - len(self.kept),
            num_duplicates=self.setting.num_duplicates,
            num_conflicting=self.setting.num_conflicting,
            disk_bytes=num_prompts * (4 * num_labels + 4) + (self.num_parts << 12),
            prompts=self.prompts.counts,
        )


def lay_out(setting: Setting) -> Work:
    """Tokenises a setting's prompts and plans them; see `plan`."""
    from iclperm.engine.model import load_tokenizer

    tokenizer = load_tokenizer(setting.model)
    if tokenizer is None:
        raise ModelError(f"model folder '{setting.model}' has no tokenizer; add its tokenizer.json")
    prompts = tokenise(setting.design, setting.task, setting.train, setting.test, tokenizer, setting.study.seed)
    kept = _fitting_queries(setting, prompts)
    fits = np.isin(np.arange(len(prompts.queries)), kept)
    general = [cell for cell in prompts.general if fits[cell.query]]
    product = _plan_product(setting, prompts, kept, general)
    begins = range(0, len(general), GENERAL_CELLS_PER_PART)
    costs = [_general_tokens(setting, general[begin : begin + GENERAL_CELLS_PER_PART]) for begin in begins]
    tokens = sum(costs, _product_tokens(prompts, product, general))
    return Work(setting, prompts, kept, product, general, tokens)


def model_folder(study: Study, *, weights: bool = True) -> Path:
    """The folder of a study's model: the bundled one, a local one, or a hub id's, fetched where it is not there yet.

    Raises `ModelError` naming the model and the remedy.
    """
    if study.model == "demo":
        return demo.model_path()
    if Path(study.model).is_dir():
        return Path(study.model)
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


def _plan_product(
    setting: Setting, prompts: Prompts, kept: NDArray[np.int64], general: Sequence[Cell]
) -> Product | None:
    """Plans contexts and queries, without those that have all their cells apart; None where that leaves nothing."""
    from iclperm.engine.plan import ContextPaths, plan_product
    from iclperm.engine.tree import Rows

    num_contexts = len(prompts.context_ids)
    by_context, by_query = Counter(cell.context for cell in general), Counter(cell.query for cell in general)
    has_cells = np.array([by_context[context] < len(kept) for context in range(num_contexts)], dtype=bool)
    queries = np.array([query for query in kept if by_query[int(query)] < num_contexts], dtype=np.int64)
    if not has_cells.any() or not len(queries):
        return None
    cells = prompts.context_of.ravel()
    is_inside = has_cells[cells]
    by_row = np.split(is_inside, np.cumsum([len(marks) for marks in prompts.marks])[:-1])
    rows = [(row, marks[inside]) for row, marks, inside in zip(prompts.rows, prompts.marks, by_row, strict=True)]
    rows = [(row, marks) for row, marks in rows if len(marks)]
    plan = plan_product(
        ContextPaths(Rows.of([row for row, _ in rows]), Rows.of([marks for _, marks in rows])),
        [prompts.queries[query] for query in queries],
        prompts.continuations,
        unit_tokens=setting.unit_tokens,
        kv_tokens=setting.kv_tokens,
    )
    contexts = np.empty(plan.num_contexts, dtype=np.int64)
    contexts[plan.context_index] = cells[is_inside]
    return Product(plan, contexts, queries)


def _product_tokens(prompts: Prompts, product: Product | None, general: Sequence[Cell]) -> Tokens:
    """What the product costs; plain prompting would not need those of its cells that are apart."""
    if product is None:
        return Tokens()
    contexts, queries = set(product.contexts.tolist()), set(product.queries.tolist())
    twice = [cell for cell in general if cell.context in contexts and cell.query in queries]
    spared = sum(len(prompts.contexts[cell.context]) + len(prompts.queries[cell.query]) for cell in twice)
    return Tokens(product.plan.tokens_naive - spared, product.plan.tokens_unique, product.plan.kv_peak_tokens)


def _general_tokens(setting: Setting, cells: Sequence[Cell]) -> Tokens:
    from iclperm.engine.plan import plan_requests
    from iclperm.engine.tree import Rows

    requests = [(cell.prompt, ids) for cell in cells for ids in cell.continuations]
    begins = np.array([len(prompt) for prompt, _ in requests], dtype=np.int64)
    requested = plan_requests(Rows.of(list(map(np.concatenate, requests))), begins, kv_tokens=setting.kv_tokens)
    return Tokens(requested.tokens_naive, requested.tokens_unique, requested.kv_peak_tokens)


def _fitting_queries(setting: Setting, prompts: Prompts) -> NDArray[np.int64]:
    """The queries whose longest prompt fits; a prompt is never cut."""
    window = next((int(setting.config[key]) for key in _WINDOW_KEYS if setting.config.get(key)), None)
    fed = prompts.fed_tokens()
    fits = fed <= (window or fed.max())
    if not fits.any():
        raise DataError(f"every prompt is longer than the context window of {window} tokens; lower 'shots'")
    if not fits.all() and setting.study.on_overlong == "error":
        raise DataError(
            f"{int(np.sum(~fits))} of {len(fits)} queries make prompts longer than the context window of {window} "
            f"tokens (query {int(np.argmax(fed))}: {int(fed.max())}); lower 'shots' or set on_overlong: drop"
        )
    return np.flatnonzero(fits)


def _cut_hash(product: Product | None) -> str | None:
    """SHA-256 of which cells each unit holds: a part means the same to every session only if they agree."""
    if product is None:
        return None
    core = product.plan.core
    borders: Mapping[str, NDArray[Any]] = {
        "blocks": product.plan.block_offsets,
        "block": core.unit_block,
        "begin": core.unit_context_begin,
        "end": core.unit_context_end,
    }
    content = json.dumps({name: numbers.tolist() for name, numbers in borders.items()}) + str(product.plan.pack_tokens)
    return hashlib.sha256(content.encode()).hexdigest()


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
