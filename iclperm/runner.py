"""From a study to its results: one loop over a plan, resumable, whatever the kind of study."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import secrets
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iclperm import demo
from iclperm.designs import Design, draw
from iclperm.errors import ConfigError, DataError, ModelError, RunError
from iclperm.prompts import Cell, PromptCounts, Prompts, PromptText, prompt_text, tokenise
from iclperm.store import MAX_PARTS, OK, OVERLONG, STATES, DamagedItem, RunFolder, writable
from iclperm.study import Study
from iclperm.tasks import Examples, Task, builtin_tasks

if TYPE_CHECKING:
    from iclperm.engine import Engine
    from iclperm.engine.engine import UnitResult
    from iclperm.engine.plan import Plan
    from iclperm.stats import Curve
    from iclperm.studies.sensitivity import SensitivitySummary

Progress = Callable[[int, int], None]
"""Told the number of finished parts and of all parts, at the start and after each."""

GENERAL_CELLS_PER_PART = 4_096
UNIT_FLOPS = 2_000_000_000_000  # a kill costs at most a unit: ten seconds at the fp32 rate of two cores
UNIT_TOKENS = (1 << 12, 1 << 16)
_PENDING = 255
_WINDOW_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
_MODEL_FILES = ("config.json", "*.safetensors")
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class StudyPlan:
    """What a study will compute, before any weight is loaded; tokens as `Engine.report` counts them."""

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
    disk_bytes: int
    prompts: PromptCounts

    @property
    def saving(self) -> float:
        """Tokens of plain prompting over distinct tokens."""
        return self.tokens_naive / self.tokens_unique

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        return {**asdict(self), "saving": self.saving}


@dataclass(frozen=True)
class RunReport:
    """What a run cost and met; ``tokens_forwarded`` sums all sessions but killed ones, ``seconds`` is this call's."""

    tokens_naive: int
    tokens_unique: int
    tokens_forwarded: int
    num_parts: int
    num_parts_resumed: int
    num_quarantined: int
    num_general_cells: int
    num_excluded: int
    seconds: float


@dataclass(frozen=True)
class Run:
    """A finished run. Distinct contexts are stored once; the properties spread them over all cells.

    ``shots`` are the K axis, ``labels`` the words of the L axis, ``gold`` int64 [Q] the right labels. ``context_of``
    int64 [S, P, K] tells each cell's distinct context; ``context_logprob`` float32 [C, Q, L] (nats) and
    ``context_state`` uint8 [C, Q] (0 ok, 1 invalid, 2 overlong) are the results by context.
    """

    study: Study
    task: str
    labels: tuple[str, ...]
    shots: tuple[int, ...]
    gold: NDArray[np.int64]
    context_of: NDArray[np.int64]
    context_logprob: NDArray[np.float32]
    context_state: NDArray[np.uint8]
    report: RunReport
    folder: Path | None

    @cached_property
    def correct(self) -> NDArray[np.uint8]:
        """1 where the most likely label is the right one (ties: the lowest label index), uint8 [S, P, K, Q]."""
        right = (np.argmax(self.context_logprob, axis=-1) == self.gold) & (self.context_state == OK)
        return np.asarray(right[self.context_of], dtype=np.uint8)

    @cached_property
    def state(self) -> NDArray[np.uint8]:
        """0 ok, 1 invalid, 2 overlong; uint8 [S, P, K, Q]."""
        return self.context_state[self.context_of]

    @cached_property
    def label_logprob(self) -> NDArray[np.float32]:
        """Summed log-likelihood of each label in nats, NaN where the state is not ok; float32 [S, P, K, Q, L]."""
        return self.context_logprob[self.context_of]

    def summary(self) -> SensitivitySummary:
        """Order and selection sensitivity and what else is said about the largest number of shots."""
        from iclperm.studies.sensitivity import sensitivity_summary

        return sensitivity_summary(
            self.correct[:, :, -1],
            self.label_logprob[:, :, -1],
            self.gold,
            self.state[:, :, -1],
            tokens=self.report,
            seed=self.study.seed,
        )

    def curve(self) -> Curve | None:
        """Accuracy over the numbers of shots; None where only one was run."""
        from iclperm.stats import curve

        return curve(self.correct, self.state) if len(self.shots) > 1 else None

    def write_report(self, folder: str | Path | None = None) -> list[Path]:
        """Writes figures and report.json into ``folder``, by default the run's own; returns their paths."""
        from iclperm.report import write_report

        target = folder or self.folder
        if target is None:
            raise RunError("this run is in memory only; name a folder for its report")
        with writable(Path(target)):
            Path(target).mkdir(parents=True, exist_ok=True)
            return write_report(
                target,
                self.summary(),
                curve=self.curve(),
                shots=self.shots,
                title=f"{self.task}, {Path(self.study.model).name}",
                chance=1 / len(self.labels),
            )


def plan(study: Study) -> StudyPlan:
    """What ``study`` will compute: needs data and tokenizer, loads no weights.

    Raises the errors of `run` that can be known beforehand. O(tokens of demonstrations and queries).
    """
    return _lay_out(_Setting.of(study)).summary()


def run(study: Study, out: str | Path | None = None, *, progress: Progress | None = None) -> Run:
    """Runs a study, or what is missing of it in the run folder ``out``; without ``out`` results are kept in memory.

    Raises `ConfigError`, `DataError`, `TokenizationError` or `ModelError` for what does not fit, `RunError` for a
    folder of another run, `RunStopped` where the folder cannot be written. Cost: the plan's distinct tokens, each once.
    """
    started = time.perf_counter()
    setting = _Setting.of(study)
    if out is not None and (finished := _finished(Path(out), setting)) is not None:
        return finished
    work = _lay_out(setting)
    folder = None if out is None else RunFolder.create(out, work.identity(), _canonical_study(study), work.tables())
    scores = _Scores.of(work)
    quarantined = 0 if folder is None else _recover(folder, scores)
    missing = [part for part in range(work.num_parts) if part not in scores.parts]
    forwarded = _compute(work, missing, scores, folder, progress) if missing else 0
    report = RunReport(
        tokens_naive=work.plan.tokens_naive,
        tokens_unique=work.plan.tokens_unique,
        tokens_forwarded=forwarded if folder is None else _tokens_forwarded(folder),
        num_parts=work.num_parts,
        num_parts_resumed=work.num_parts - len(missing),
        num_quarantined=quarantined,
        num_general_cells=len(work.prompts.general),
        num_excluded=work.setting.design.num_excluded,
        seconds=time.perf_counter() - started,
    )
    return Run(
        study=study,
        task=setting.task.name,
        labels=setting.task.words,
        shots=setting.design.shots,
        gold=work.prompts.gold,
        context_of=work.prompts.context_of,
        context_logprob=scores.logprob,
        context_state=scores.state,
        report=report,
        folder=None if folder is None else folder.path,
    )


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


def open_run(path: str | Path) -> Run:
    """A finished run from its folder alone; needs neither model nor data.

    Raises `RunError` for a folder that is no run, is not finished, or is damaged (naming the file).
    """
    started = time.perf_counter()
    folder = RunFolder.open(path)
    recorded = folder.plan
    cells, queries = folder.table("demonstrations"), folder.table("queries")
    names = np.array(cells["contexts"].to_pylist(), dtype=np.int64)
    context_ids, context_of = np.unique(names, return_inverse=True)
    states = np.array([STATES.index(state) for state in queries["state"].to_pylist()], dtype=np.uint8)
    scores = _Scores.empty(context_ids, states, len(recorded["labels"]))
    for part, file in folder.parts().items():
        scores.fill(part, folder.read(file))
    if len(scores.parts) < recorded["work"]["parts"]:
        done, total = len(scores.parts), recorded["work"]["parts"]
        raise RunError(f"{path} is not finished ({done} of {total} parts); run the same study into it to continue")
    report = RunReport(
        tokens_naive=recorded["tokens"]["naive"],
        tokens_unique=recorded["tokens"]["unique"],
        tokens_forwarded=_tokens_forwarded(folder),
        num_parts=len(scores.parts),
        num_parts_resumed=len(scores.parts),
        num_quarantined=0,
        num_general_cells=recorded["work"]["general_cells"],
        num_excluded=recorded["work"]["excluded"],
        seconds=time.perf_counter() - started,
    )
    return Run(
        study=Study.from_file(folder.path / "study.yaml"),
        task=recorded["task"],
        labels=tuple(recorded["labels"]),
        shots=tuple(recorded["study"]["shots"]),
        gold=queries["gold"].to_numpy().astype(np.int64),
        context_of=context_of.reshape(recorded["study"]["sets"], recorded["study"]["permutations"], -1),
        context_logprob=scores.logprob,
        context_state=scores.state,
        report=report,
        folder=folder.path,
    )


@dataclass(frozen=True)
class _Setting:
    """What the study's names stand for, and the choices drawn from them."""

    study: Study
    task: Task
    train: Examples
    test: Examples
    design: Design
    model: Path

    @classmethod
    def of(cls, study: Study) -> _Setting:
        task = Task.load(study.task)
        train, test = task.examples("train"), task.examples("test")
        return cls(study, task, train, test, draw(study, task, train, test), model_folder(study))

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What two sessions of one run must agree on, before tokenisation; content counts, not where it lies."""
        choices = self.study.model_dump(include={"kind", "sets", "permutations", "queries", "seed", "dtype"})
        return {
            "task": self.task.name,
            "labels": list(self.task.words),
            "study": {**choices, "on_overlong": self.study.on_overlong, "shots": list(self.design.shots)},
            "hashes": {
                "model": _hash_files(self.model, _MODEL_FILES),
                "tokenizer": _hash_files(self.model, _TOKENIZER_FILES),
                "wording": self.task.wording_hash(),
                "train": self.train.digest,
                "test": self.test.digest,
            },
        }


@dataclass(frozen=True)
class _Work:
    """A setting as tokens and units. ``kept`` int64 are the queries that fit the context window."""

    setting: _Setting
    prompts: Prompts
    kept: NDArray[np.int64]
    plan: Plan

    @property
    def units_per_part(self) -> int:
        return -(-self.plan.num_units // MAX_PARTS)

    @property
    def num_unit_parts(self) -> int:
        return -(-self.plan.num_units // self.units_per_part)

    @property
    def general(self) -> list[Cell]:
        fits = np.isin(np.arange(len(self.prompts.queries)), self.kept)
        return [cell for cell in self.prompts.general if fits[cell.query]]

    @property
    def num_parts(self) -> int:
        return self.num_unit_parts + -(-len(self.general) // GENERAL_CELLS_PER_PART)

    @cached_property
    def context_numbers(self) -> NDArray[np.int64]:
        """The context of `Prompts` behind each distinct context of the plan, int64 [C]."""
        numbers = np.empty(self.plan.num_contexts, dtype=np.int64)
        numbers[self.plan.context_index] = self.prompts.context_of.ravel()
        return numbers

    @cached_property
    def first_cells(self) -> NDArray[np.int64]:
        """The first (set, permutation, position in shots) of each context, int64 [C, 3]."""
        _, first = np.unique(self.prompts.context_of, return_index=True)
        return np.stack(np.unravel_index(first, self.prompts.context_of.shape), axis=1)

    def states(self) -> NDArray[np.uint8]:
        """The state of each query before anything is scored, uint8 [Q]."""
        states = np.full(len(self.prompts.queries), OVERLONG, dtype=np.uint8)
        states[self.kept] = OK
        return states

    def identity(self) -> dict[str, Any]:
        """The content of plan.json."""
        return {
            **self.setting.identity,
            "tokens": {"naive": self.plan.tokens_naive, "unique": self.plan.tokens_unique},
            "work": {
                "contexts": self.plan.num_contexts,
                "units": self.plan.num_units,
                "parts": self.num_parts,
                "pack_tokens": self.plan.pack_tokens,
                "general_cells": len(self.general),
                "excluded": self.setting.design.num_excluded,
            },
        }

    def summary(self) -> StudyPlan:
        design, labels = self.setting.design, len(self.setting.task.words)
        return StudyPlan(
            task=self.setting.task.name,
            num_sets=len(design.sets),
            num_permutations=len(design.permutations),
            shots=design.shots,
            num_queries=len(design.queries),
            num_contexts=self.plan.num_contexts,
            num_prompts=self.plan.num_contexts * len(self.kept),
            tokens_naive=self.plan.tokens_naive,
            tokens_unique=self.plan.tokens_unique,
            kv_peak_tokens=self.plan.kv_peak_tokens,
            num_units=self.plan.num_units,
            num_parts=self.num_parts,
            num_overlong=len(design.queries) - len(self.kept),
            disk_bytes=self.plan.num_contexts * len(self.kept) * (4 * labels + 4) + (self.num_parts << 12),
            prompts=self.prompts.counts,
        )

    def tables(self) -> dict[str, pa.Table]:
        """What third parties need to read the items: the demonstrations of each context, and the queries."""
        setting, design = self.setting, self.setting.design
        cells = list(np.ndindex(*self.prompts.context_of.shape[:2]))
        orderings = design.orderings
        hashes, words = setting.train.hashes, setting.task.words
        demonstrations = {
            "set": pa.array([index_set for index_set, _ in cells], pa.int32()),
            "permutation": pa.array([permutation for _, permutation in cells], pa.int32()),
            "examples": pa.array([orderings[cell].tolist() for cell in cells], pa.list_(pa.int32())),
            "content_hashes": pa.array([[hashes[row] for row in orderings[cell]] for cell in cells]),
            "shots": pa.array([list(design.shots)] * len(cells), pa.list_(pa.int32())),
            "contexts": pa.array(
                [self.prompts.context_ids[self.prompts.context_of[cell]].tolist() for cell in cells],
                pa.list_(pa.int64()),
            ),
        }
        queries = {
            "query": pa.array(range(len(design.queries)), pa.int32()),
            "example": pa.array(design.queries, pa.int32()),
            "content_hash": pa.array([setting.test.hashes[row] for row in design.queries]),
            "gold": pa.array(self.prompts.gold, pa.int16()),
            "label": pa.array([words[label] for label in self.prompts.gold]),
            "state": pa.array([STATES[state] for state in self.states()]),
        }
        return {"demonstrations": pa.table(demonstrations), "queries": pa.table(queries)}

    def rows(
        self,
        contexts: NDArray[np.int64],
        queries: NDArray[np.int64],
        logprob: NDArray[np.float32],
        state: NDArray[np.uint8],
    ) -> pa.Table:
        """Items as a table, one row for each context [N], query [N], label log-likelihoods [N, L] and state [N]."""
        index_set, permutation, place = self.first_cells[contexts].T
        is_missing = state != OK
        num_labels = logprob.shape[1]
        predictions = np.where(is_missing, 0, np.argmax(logprob, axis=1))
        lists = pa.ListArray.from_arrays(
            pa.array(np.arange(len(contexts) + 1) * num_labels, pa.int32()),
            pa.array(logprob.ravel(), pa.float32()),
            mask=pa.array(is_missing),
        )
        return pa.table(
            {
                "context": pa.array(self.prompts.context_ids[contexts], pa.int64()),
                "set": pa.array(index_set, pa.int32()),
                "permutation": pa.array(permutation, pa.int32()),
                "shots": pa.array(np.array(self.setting.design.shots)[place], pa.int32()),
                "query": pa.array(queries, pa.int32()),
                "gold": pa.array(self.prompts.gold[queries], pa.int16()),
                "prediction": pa.array(predictions, pa.int16(), mask=is_missing),
                "label_logprob": lists,
                "state": pa.array([STATES[code] for code in state]).dictionary_encode(),
            }
        )


class _Scores:
    """Results by distinct context, filled from tables of items."""

    def __init__(self, context_ids: NDArray[np.int64], logprob: NDArray[np.float32], state: NDArray[np.uint8]) -> None:
        self._order = np.argsort(context_ids)
        self._sorted_ids = context_ids[self._order]
        self.logprob = logprob
        self.state = state
        self.parts: set[int] = set()

    @classmethod
    def empty(cls, context_ids: NDArray[np.int64], query_states: NDArray[np.uint8], num_labels: int) -> _Scores:
        shape = (len(context_ids), len(query_states))
        state = np.broadcast_to(np.where(query_states == OK, _PENDING, query_states).astype(np.uint8), shape).copy()
        return cls(context_ids, np.full((*shape, num_labels), np.nan, dtype=np.float32), state)

    @classmethod
    def of(cls, work: _Work) -> _Scores:
        return cls.empty(work.prompts.context_ids, work.states(), len(work.setting.task.words))

    def fill(self, part: int, table: pa.Table) -> None:
        contexts = self._order[np.searchsorted(self._sorted_ids, table["context"].to_numpy())]
        queries = table["query"].to_numpy()
        state = np.array([STATES.index(name) for name in table["state"].to_pylist()], dtype=np.uint8)
        values = table["label_logprob"].combine_chunks().flatten().to_numpy()
        is_ok = state == OK
        self.state[contexts, queries] = state
        self.logprob[contexts[is_ok], queries[is_ok]] = values.reshape(-1, self.logprob.shape[2])
        self.parts.add(part)


def model_folder(study: Study) -> Path:
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

    patterns = [*_MODEL_FILES, *_TOKENIZER_FILES, "*.json", "*.model"]
    try:
        return Path(snapshot_download(study.model, revision=study.revision, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(
            f"the model {study.model!r} is neither a folder nor to be had from the hub: {reason}"
        ) from None


def _lay_out(setting: _Setting) -> _Work:
    from iclperm.engine.model import load_tokenizer
    from iclperm.engine.plan import ContextPaths, plan_product
    from iclperm.engine.tree import Rows

    tokenizer = load_tokenizer(setting.model)
    if tokenizer is None:
        raise ModelError(f"model folder '{setting.model}' has no tokenizer; add its tokenizer.json")
    study = setting.study
    prompts = tokenise(setting.design, setting.task, setting.train, setting.test, tokenizer, study.seed)
    kept = _fitting_queries(study, prompts, _context_window(_model_config(setting.model)))
    return _Work(
        setting=setting,
        prompts=prompts,
        kept=kept,
        plan=plan_product(
            ContextPaths(Rows.of(prompts.rows), Rows.of(prompts.marks)),
            [prompts.queries[query] for query in kept],
            prompts.continuations,
            unit_tokens=_unit_tokens(setting.model),
            kv_tokens=_kv_tokens(study, _model_config(setting.model)),
        ),
    )


def _unit_tokens(model: Path) -> int:
    """Tokens of one unit of work: some seconds of one CPU, whatever the size of the model."""
    num_parameters = sum(file.stat().st_size for file in model.glob("*.safetensors")) // 4
    return int(np.clip(UNIT_FLOPS // (2 * max(num_parameters, 1)), *UNIT_TOKENS))


def _fitting_queries(study: Study, prompts: Prompts, window: int | None) -> NDArray[np.int64]:
    """The queries whose longest prompt fits; a prompt is never cut."""
    fed = prompts.fed_tokens()
    fits = fed <= (window or fed.max())
    if not fits.any():
        raise DataError(f"every prompt is longer than the context window of {window} tokens; lower 'shots'")
    if not fits.all() and study.on_overlong == "error":
        raise DataError(
            f"{int(np.sum(~fits))} of {len(fits)} queries make prompts longer than the context window of {window} "
            f"tokens (query {int(np.argmax(fed))}: {int(fed.max())}); lower 'shots' or set on_overlong: drop"
        )
    return np.flatnonzero(fits)


def _context_window(config: Mapping[str, Any]) -> int | None:
    return next((int(config[key]) for key in _WINDOW_KEYS if config.get(key)), None)


def _kv_tokens(study: Study, config: Mapping[str, Any]) -> int | None:
    """How many tokens' keys and values fit the memory budget; None without a budget."""
    if study.memory_budget is None:
        return None
    try:
        num_layers = config.get("num_hidden_layers") or config["n_layer"]
        num_heads = config.get("num_attention_heads") or config["n_head"]
        head_size = config.get("head_dim") or (config.get("hidden_size") or config["n_embd"]) // num_heads
    except KeyError as error:
        raise ConfigError(
            f"memory_budget: the model's config.json does not tell {error}; leave the budget out"
        ) from None
    num_bytes = 2 if study.dtype in ("float16", "bfloat16") else 4
    token_bytes = 2 * num_layers * (config.get("num_key_value_heads") or num_heads) * head_size * num_bytes
    return study.memory_budget // int(token_bytes)


def _model_config(model: Path) -> dict[str, Any]:
    try:
        config = json.loads((model / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"'{model / 'config.json'}' cannot be read: {error}; give a model folder") from None
    return {**config, **config.get("text_config", {})}


def _finished(path: Path, setting: _Setting) -> Run | None:
    """The run in this folder if it is this setting's and nothing is missing; no tokenizer or model is loaded."""
    try:
        folder = RunFolder.open(path)
        if any(folder.plan.get(key) != value for key, value in setting.identity.items()):
            return None
        return open_run(path)
    except RunError:
        return None


def _recover(folder: RunFolder, scores: _Scores) -> int:
    """Reads back what is done; damaged files are set aside, their number is returned."""
    quarantined = 0
    for part, file in folder.parts().items():
        try:
            scores.fill(part, folder.read(file))
        except DamagedItem:
            folder.set_aside(file)
            quarantined += 1
    return quarantined


def _compute(
    work: _Work, missing: Sequence[int], scores: _Scores, folder: RunFolder | None, progress: Progress | None
) -> int:
    """Scores the missing parts, one file each; returns the tokens forwarded."""
    from iclperm.engine import Engine

    study = work.setting.study
    engine = Engine.from_pretrained(work.setting.model, device=study.device, dtype=study.dtype)
    session = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(4)}"
    environment, before = _environment(engine), engine.totals.tokens_forwarded
    if folder is not None:
        _refuse_other_numerics(folder, environment)
        folder.write_session(session, environment)
    done = work.num_parts - len(missing)
    tell = progress or (lambda _done, _total: None)
    tell(done, work.num_parts)
    try:
        with closing(_tables(work, missing, engine)) as tables:
            for part, table in tables:
                if folder is not None:
                    folder.write(part, table)
                scores.fill(part, table)
                done += 1
                tell(done, work.num_parts)
    finally:
        forwarded = engine.totals.tokens_forwarded - before
        if folder is not None:
            folder.write_session(session, {**environment, "tokens_forwarded": forwarded})
    return forwarded


def _tables(work: _Work, missing: Sequence[int], engine: Engine) -> Generator[tuple[int, pa.Table]]:
    size = work.units_per_part
    product_parts = [part for part in missing if part < work.num_unit_parts]
    units = {part: range(part * size, min((part + 1) * size, work.plan.num_units)) for part in product_parts}
    wanted = [unit for part in product_parts for unit in units[part]]
    # Closed even when the run is interrupted here: only then does the engine count what it forwarded.
    with closing(cast("Generator[UnitResult]", engine.execute(work.plan, wanted))) as results:
        for part in product_parts:
            yield part, pa.concat_tables(_product_rows(work, islice(results, len(units[part]))))
    for part in missing[len(product_parts) :]:
        begin = (part - work.num_unit_parts) * GENERAL_CELLS_PER_PART
        yield part, _general_rows(work, work.general[begin : begin + GENERAL_CELLS_PER_PART], engine)


def _product_rows(work: _Work, results: Iterable[UnitResult]) -> Iterator[pa.Table]:
    general = np.array([cell.context * len(work.prompts.queries) + cell.query for cell in work.general], dtype=np.int64)
    for result in results:
        contexts = np.repeat(work.context_numbers[result.contexts], len(result.queries))
        queries = np.tile(work.kept[result.queries], len(result.contexts))
        inside = ~np.isin(contexts * len(work.prompts.queries) + queries, general)
        logprob = result.logprob.reshape(len(contexts), -1)
        yield work.rows(contexts[inside], queries[inside], logprob[inside], result.state.ravel()[inside])


def _general_rows(work: _Work, cells: Sequence[Cell], engine: Engine) -> pa.Table:
    scores = engine.loglikelihood([(cell.prompt, ids) for cell in cells for ids in cell.continuations])
    return work.rows(
        np.array([cell.context for cell in cells], dtype=np.int64),
        np.array([cell.query for cell in cells], dtype=np.int64),
        scores.logprob.reshape(len(cells), -1),
        scores.state.reshape(len(cells), -1).max(axis=1),
    )


def _environment(engine: Engine) -> dict[str, Any]:
    """Versions and what decides about the last bits of a result; never a setting that could hold a secret."""
    numerics = {**engine.numerics, "processor": _processor()}
    versions = {name: _version(name) for name in ("iclperm", "numpy", "pyarrow", "tokenizers")}
    return {
        "numerics": numerics,
        "versions": {**versions, "python": platform.python_version()},
        "platform": platform.platform(),
    }


def _refuse_other_numerics(folder: RunFolder, environment: dict[str, Any]) -> None:
    for session in folder.sessions():
        for key, here in environment["numerics"].items():
            if session["numerics"].get(key) != here and session.get("tokens_forwarded") != 0:
                there = session["numerics"].get(key)
                raise RunError(
                    f"{folder.path} was computed with {key} {there}, here it is {here}, and results could differ in "
                    "the last bits; continue where it began or give another folder"
                )


def _tokens_forwarded(folder: RunFolder) -> int:
    return sum(session.get("tokens_forwarded", 0) for session in folder.sessions())


def _canonical_study(study: Study) -> str:
    """The study with paths that hold from any working directory."""
    named = {"demo", *builtin_tasks()}
    paths = {key: value for key, value in (("task", study.task), ("model", study.model)) if value not in named}
    absolute = {key: str(Path(value).resolve()) for key, value in paths.items() if Path(value).exists()}
    return study.model_copy(update=absolute).to_yaml()


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


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    return names[0] if names else platform.processor() or platform.machine()
