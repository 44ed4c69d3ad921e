"""One run of the benchmark: contenders in turns, agreement first, a row for each as soon as it is finished."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from iclperm.base.outputs import output
from iclperm.bench import cards
from iclperm.bench.cases import (
    Measurable,
    distinct_tokens,
    even_sample,
    fair_sample,
    fair_scale,
    find_case,
    share_of,
    warm_up,
)
from iclperm.bench.contenders import ORACLE, OURS, PEER_CONTENDERS, Contender, ContenderProcess, sampled
from iclperm.bench.environments import PeerError
from iclperm.bench.machine import available_cores, busy_processors, machine
from iclperm.bench.models import MODELS, BenchModel, facts, find_model
from iclperm.bench.peers.protocol import Answers, BenchWorkload
from iclperm.bench.rows import Row, latest, read_rows, torn_bytes
from iclperm.bench.studies import StudyCase
from iclperm.errors import ConfigError

Say = Callable[[str], None]
Logprobs = npt.NDArray[np.float32]

_ORACLE_STRIDE = 3  # of a slow peer's sample of prompts, those that the oracle scores as well
_SLACK = 2.0  # a contender's error may be so many times that of unpadded transformers
_ROUNDING = 100.0  # times its tolerance that a difference is no rounding of float32's
_TIE = 1e-3  # nats by which a written token may fall short of the likeliest
_WORKER_BYTES = 1.5e9  # beside the weights
_CARD_WORKER_BYTES = 4e9  # likewise on a GPU: vLLM's 2 GiB of keys and values, CUDA's own, a batch's logits; a guess
_MEMORY_SHARE = 0.8


@dataclass(frozen=True)
class BenchOptions:
    """What to measure: ``cases`` by name or YAML file, or a ``study``; ``models`` by name, folder or hub id.

    ``peers`` None: every one that can run here. ``scale`` None: the model's own, of a study or another model what two
    cores do in about half a minute.
    """

    cases: tuple[str, ...] = ("monte_carlo",)
    models: tuple[str, ...] = ("qwen2-25m",)
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    peers: tuple[str, ...] | None = None
    repeats: int = 3
    threads: int = field(default_factory=available_cores)
    device: str = "cpu"
    scale: float | None = None
    is_whole: bool = False  # no samples: every contender scores every prompt
    seed: int = 0
    study: StudyCase | None = None

    def __post_init__(self) -> None:
        for name in self.cases:
            find_case(name)
        if self.scale is not None:
            share_of(self.scale, 1, 1)  # refuses what is no share
        _refuse_unknown("dtype", self.dtypes, ("float32", "bfloat16"))
        _refuse_unknown("peer", self.peers or (), PEER_CONTENDERS)
        cards.refuse_unknown(self.device)

    @cached_property
    def pairs(self) -> list[tuple[BenchModel, Measurable]]:
        """Every model with every case; raises ConfigError or ModelError for one that there is not."""
        if self.study is not None:
            place = self.study.model
            is_demo = place == MODELS["demo"].folder()
            return [(MODELS["demo"] if is_demo else BenchModel(place.resolve().name, place=place), self.study)]
        cases = [find_case(name) for name in self.cases]
        return [(find_model(name), case) for name in self.models for case in cases]


def run(options: BenchOptions, say: Say, out: Path | None = None) -> list[Row]:
    """Measure what the options name; rows that ``out`` already holds are not measured again.

    Each row is appended to ``out`` as it is finished. A peer that cannot run, fails or disagrees has a row that says
    why. Raises PeerError if iclperm itself or the oracle fails, or the device is not there.
    """
    if absent := cards.absence(options.device):
        raise PeerError(f"{absent}; choose another --device")
    out = None if out is None else output(out, is_folder=True)  # it is appended to: no link either
    finished = [] if out is None or not out.exists() else read_rows(out)
    if out is not None and (torn := torn_bytes(out)):
        os.truncate(out, out.stat().st_size - torn)

    def keep(row: Row) -> None:
        finished.append(row)
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            with out.open("a", encoding="utf-8") as file:
                file.write(row.to_json() + "\n")

    with tempfile.TemporaryDirectory(prefix="iclperm-bench-") as scratch:
        references: dict[tuple[str, str], Logprobs] = {}
        for (model, case), dtype in itertools.product(options.pairs, options.dtypes):
            if case.new_tokens and dtype != "float32":
                raise ConfigError(f"{case.name} writes texts, which are compared in float32 alone; leave {dtype} out")
            block = _Block(options, model, case, dtype, Path(scratch), say, references)
            for row in block.rows([row for row in finished if row.block == block.key and row.failure is None]):
                keep(row)
    return latest(finished)


class _Block:
    """One workload on one model in one dtype."""

    def __init__(
        self,
        options: BenchOptions,
        model: BenchModel,
        case: Measurable,
        dtype: str,
        scratch: Path,
        say: Say,
        references: dict[tuple[str, str], Logprobs],
    ) -> None:
        self.options, self.model, self.dtype, self.say = options, model, dtype, say
        self.scratch, self.references = scratch, references
        self.folder = model.folder()
        self.about = facts(self.folder)
        self.scale = self._scale(case)
        self.case, self.all_prompts = case.scaled(self.scale), case.num_cells
        self.key = (model.name, case.name, dtype, options.device, options.threads, self.scale, case.digest)

    def _scale(self, case: Measurable) -> float:
        known = self.model.scale if self.options.scale is None and self.options.study is None else self.options.scale
        if known is not None:
            return known
        distinct = case.distinct(self.about["vocab_size"], self.options.seed)
        return fair_scale(distinct, self.about["num_parameters"])

    def rows(self, finished: Sequence[Row]) -> Iterator[Row]:
        """Measure the contenders that have no finished row yet."""
        done = {row.contender for row in finished}
        able, unable = self._contenders(done)
        yield from (self.row(contender, failure=why) for contender, why in unable)
        if not able and OURS.name in done:
            return
        self.work = self.case.build(self.about["vocab_size"], self.options.seed)
        if self.work.max_tokens > (window := self.about["max_tokens"]):
            why = f"its longest prompt has {self.work.max_tokens} tokens, the model's window {window}"
            yield self.row(OURS, failure=f"{self.case.name} does not fit {self.model.name}: {why}")
            return
        self.say_of(f"{len(self.work.cells):,} prompts, {', '.join(['iclperm', *(each.name for each in able)])}")
        self._set_yardsticks()
        weight_bytes = self.about["num_parameters"] * (4 if self.dtype == "float32" else 2)
        for group in _groups(able, weight_bytes, self.options.device):
            yield from _Rounds(self, (OURS, *group)).rows()

    def _contenders(self, done: set[str]) -> tuple[list[Contender], list[tuple[Contender, str]]]:
        able: list[Contender] = []
        unable: list[tuple[Contender, str]] = []
        names = PEER_CONTENDERS if self.options.peers is None else self.options.peers
        for contender in (PEER_CONTENDERS[name] for name in names if name not in done):
            obstacle = contender.obstacle(self.options.device)
            if obstacle is None and self.case.new_tokens and not contender.writes:
                obstacle = "it is not asked to write texts"
            if obstacle is None:
                able.append(contender)
            elif not (contender.needs_cuda and self.options.peers is None):
                self.say_of(f"{contender.name} is skipped: {obstacle}")
                unable.append((contender, obstacle))
        return able, unable

    def _set_yardsticks(self) -> None:
        """What agreement is held against: the oracle's log-likelihoods, and float32's of all prompts."""
        self.distinct = distinct_tokens(self.work)
        mean = self.work.num_fed / len(self.work.cells)
        self.sample = self.model.sample or fair_sample(self.about["num_parameters"], mean)
        sample = even_sample(self.work, self.sample)
        self.oracle_cells = sample.cells[:: _ORACLE_STRIDE if len(sample.cells) > _ORACLE_STRIDE else 1]
        self.oracle_error, self.reference = 0.0, None
        if self.work.new_tokens:
            return
        work = self.file(replace(self.work, cells=self.oracle_cells), "oracle")
        self.oracle = self._score_once(ORACLE, "float32", work)
        if self.dtype != "float32":
            self.oracle_error = self.difference(self._score_once(ORACLE, self.dtype, work), self.oracle_cells)
            self.reference = self._float32()

    def _float32(self) -> Logprobs:
        key = (self.model.name, self.case.name)
        if key not in self.references:
            self.references[key] = self._score_once(OURS, "float32", self.file(self.work, "reference"))
        reference = self.references[key]
        error = self.difference(reference, self.work.cells)
        if not error <= (most := self._most(OURS, error)):
            raise PeerError(
                f"iclperm in float32 is {error:.2g} nats a token from the oracle on {self.case.name}, over "
                f"{most:.2g}; nothing can be held against it"
            )
        return reference

    def _score_once(self, contender: Contender, dtype: str, work: Path) -> Logprobs:
        self.say_of(f"{contender.name} in {dtype}, not timed")
        where = self.options.threads, self.options.device
        with ContenderProcess(contender, self.scratch / f"{contender.name}.log", *where) as worker:
            worker.load(self.folder, dtype, self.options.threads)
            return np.asarray(worker.score(work, self.scratch / f"{contender.name}.npy")[1], np.float32)

    def shortfall(self, texts: npt.NDArray[np.int32], cells: npt.NDArray[np.int64]) -> float:
        """The most by which a token of the texts [N, new] after the oracle's prompts fell short of its likeliest."""
        file = self.scratch / "texts.npy"
        np.save(file, texts[self._places(cells)], allow_pickle=False)
        work = self.file(replace(self.work, cells=self.oracle_cells), "judged")
        where = self.options.threads, self.options.device
        with ContenderProcess(ORACLE, self.scratch / f"{ORACLE.name}.log", *where) as worker:
            worker.load(self.folder, self.dtype, self.options.threads)
            return worker.judge(work, file)

    def _places(self, cells: npt.NDArray[np.int64]) -> list[int]:
        """Where the oracle's prompts are among ``cells``, which hold them all."""
        places = {tuple(cell): place for place, cell in enumerate(cells.tolist())}
        return [places[tuple(cell)] for cell in self.oracle_cells.tolist()]

    def difference(self, logprobs: Logprobs, cells: npt.NDArray[np.int64]) -> float:
        """Largest difference from the oracle in nats a token, over its own prompts, which are all in ``cells``."""
        chosen = logprobs[self._places(cells)]
        lengths = np.array([label.size for label in self.work.labels])
        largest = float((np.abs(chosen.astype(np.float64) - self.oracle) / lengths).max())
        return largest if np.isfinite(largest) else float("inf")

    def bound(self, contender: Contender, difference: float) -> float:
        if self.work.new_tokens:
            return max(_TIE, contender.tolerance)
        return self._most(contender, difference) if self.dtype == "float32" else _SLACK * self.oracle_error

    def _most(self, contender: Contender, difference: float) -> float:
        """In float32: its tolerance, but for one somewhat beyond it what the oracle's own rounding lets it be."""
        may_be_rounding = contender.tolerance < difference < _ROUNDING * contender.tolerance
        return max(contender.tolerance, _SLACK * self._rounding if may_be_rounding else 0.0)

    @cached_property
    def _rounding(self) -> float:
        """What the oracle in float32 is from itself in float64, which is much where logits are many and large."""
        return self.difference(self._score_once(ORACLE, "float64", self.scratch / "oracle.npz"), self.oracle_cells)

    def flips(self, logprobs: Logprobs, cells: npt.NDArray[np.int64]) -> float | None:
        """Share of prompts whose best label is not the one in float32."""
        if self.reference is None:
            return None
        expected = self.reference[cells[:, 0] * len(self.work.queries) + cells[:, 1]]
        return float((expected.argmax(axis=1) != logprobs.argmax(axis=1)).mean())

    def near_ties(self) -> float | None:
        """Share of prompts whose two best labels in float32 lie within the oracle's own error in this dtype."""
        if self.reference is None:
            return None
        best = np.partition(self.reference, -2, axis=1)[:, -2:]
        return float((best[:, 1] - best[:, 0] <= self.oracle_error).mean())

    def file(self, work: BenchWorkload, name: str) -> Path:
        return work.save(self.scratch / f"{name}.npz")

    def row(self, contender: Contender, **values: Any) -> Row:
        model, case, dtype, device, threads, scale, digest = self.key
        return Row(
            case=case, model=model, dtype=dtype, device=device, threads=threads, scale=scale, contender=contender.name,
            what=contender.what, case_what=self.case.what, case_digest=digest, new_tokens=self.case.new_tokens,
            machine=machine(device), **values,
        )  # fmt: skip

    def say_of(self, words: str) -> None:
        self.say(f"{self.model.name} {self.case.name} {self.dtype}: {words}")


@dataclass
class _Entrant:
    """A contender within its rounds."""

    contender: Contender
    worker: ContenderProcess
    work: BenchWorkload
    file: Path
    share: float
    about: dict[str, Any]
    seconds: list[float] = field(default_factory=list)


class _Rounds:
    """iclperm and some peers, in turns."""

    def __init__(self, block: _Block, contenders: Sequence[Contender]) -> None:
        self.block, self.contenders = block, contenders
        self.ours_seconds: list[float] = []
        self.linear_seconds: list[float] = []
        self.torch_linear_seconds: list[float] = []
        self.linear_library = self.fastest_product = ""
        self.others_busy: list[float] = []

    def rows(self) -> Iterator[Row]:
        with ExitStack() as stack:
            entrants: list[_Entrant] = []
            for contender in self.contenders:
                try:
                    entrants.append(self._enter(contender, stack))
                except PeerError as error:
                    yield self._failed(contender, error)
            for number, last in enumerate([False] * (self.block.options.repeats - 1) + [True]):
                self.others_busy += busy_processors()
                for entrant in list(entrants):
                    try:
                        self._pass(entrant, number)
                    except PeerError as error:
                        entrants.remove(entrant)
                        entrant.worker.stop()
                        yield self._failed(entrant.contender, error, entrant.about)
                    else:
                        if last:
                            yield self._finished(entrant)

    def _enter(self, contender: Contender, stack: ExitStack) -> _Entrant:
        """Load and warm up, while nobody else works."""
        block, options = self.block, self.block.options
        self.block.say_of(f"{contender.name} loads")
        worker = stack.enter_context(
            ContenderProcess(contender, block.scratch / f"{contender.name}.log", options.threads, options.device)
        )
        work = sampled(contender, block.work, block.sample, options.is_whole)
        loaded = worker.load(block.folder, block.dtype, options.threads)
        warmed = worker.warm(block.file(warm_up(block.work), "warm"))
        settings = {**loaded.get("settings", {}), **warmed.get("settings", {})}
        about = {"versions": loaded["versions"], "settings": settings,
                 "load_seconds": loaded["wall"], "warm_seconds": warmed["wall"]}  # fmt: skip
        file = block.file(work, contender.name)
        return _Entrant(contender, worker, work, file, self._share(contender, work), about)

    def _share(self, contender: Contender, work: BenchWorkload) -> float:
        """Of the tokens that the case costs it, those in its part."""
        if work is self.block.work:
            return 1.0
        if contender.sampling == "paths":
            return distinct_tokens(work) / self.block.distinct
        return work.num_fed / self.block.work.num_fed

    def _pass(self, entrant: _Entrant, number: int) -> None:
        name = entrant.contender.name
        answer, found = entrant.worker.score(entrant.file, self.block.scratch / f"{name}.npy")
        entrant.seconds.append(float(answer.pop("seconds")))
        self.block.say_of(
            f"{name} {number + 1}/{self.block.options.repeats} {entrant.seconds[-1]:.2f} s"
            + (f", {entrant.share:.1%} of the case" if entrant.share < 1 else "")
        )
        if number == 0:
            self._judge(entrant, found)
        entrant.about["answer"] = answer
        if entrant.contender is OURS:
            self.ours_seconds.append(entrant.seconds[-1])
            linear = entrant.worker.linear()
            self.linear_library, self.fastest_product = linear["library"], linear["fastest"]
            self.linear_seconds.append(linear["seconds"] * self.block.distinct)
            self.torch_linear_seconds.append(linear["torch"] * self.block.distinct)

    def _judge(self, entrant: _Entrant, found: Answers) -> None:
        """Agreement, before any figure; one that disagrees goes no further."""
        block, work = self.block, entrant.work
        shape = (len(work.cells), work.new_tokens or len(work.labels))
        what = "texts" if work.new_tokens else "log-likelihoods"
        if found.shape != shape:
            raise PeerError(f"{entrant.contender.name} gave {what} {found.shape} where {shape} are asked")
        if work.new_tokens:
            difference = block.shortfall(np.asarray(found, np.int32), work.cells)
        else:
            logprobs = np.asarray(found, np.float32)
            difference = block.difference(logprobs, work.cells)
            entrant.about |= {"flips": block.flips(logprobs, work.cells), "near_ties": block.near_ties()}
        entrant.about |= {"difference": difference, "bound": (bound := block.bound(entrant.contender, difference))}
        if not difference <= bound:
            raise PeerError(
                f"{entrant.contender.name} disagrees: largest difference {difference:.2g} nats a token, over "
                f"{bound:.2g}; no speed-up is given"
            )
        if not work.new_tokens and entrant.contender is OURS and block.dtype == "float32":
            block.references[block.model.name, block.case.name] = logprobs

    def _failed(self, contender: Contender, error: PeerError, about: Mapping[str, Any] | None = None) -> Row:
        if contender is OURS:
            raise error
        self.block.say_of(str(error))
        known = {key: value for key, value in (about or {}).items() if key != "answer"}
        return self.block.row(contender, failure=str(error), **known)

    def _finished(self, entrant: _Entrant) -> Row:
        answer = entrant.about.pop("answer")
        return self.block.row(
            entrant.contender,
            prompts=len(self.block.work.cells),
            all_prompts=self.block.all_prompts,
            tokens_naive=self.block.work.num_fed,
            tokens_unique=self.block.distinct,
            tokens_forwarded=round(answer["tokens"] / entrant.share),
            share=entrant.share,
            seconds=entrant.seconds,
            ours_seconds=self.ours_seconds,
            linear_seconds=self.linear_seconds,
            torch_linear_seconds=self.torch_linear_seconds,
            linear_library=self.linear_library,
            fastest_product=self.fastest_product,
            others_busy=self.others_busy,
            memory_bytes=answer.get("memory_bytes"),
            gpu_memory_bytes=answer.get("gpu_memory_bytes"),
            phases=answer.get("phases", {}),
            **entrant.about,
        )


def _groups(contenders: Sequence[Contender], weight_bytes: float, device: str) -> list[tuple[Contender, ...]]:
    """Peers that fit in memory at once, beside iclperm; on a GPU in both its and the host's."""
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * _MEMORY_SHARE
    size = int(host / (weight_bytes + _WORKER_BYTES))
    if cards.is_cuda(device):
        size = min(size, int(cards.memory_bytes(device) * _MEMORY_SHARE / (weight_bytes + _CARD_WORKER_BYTES)))
    size = max(1, size - 1)
    return [tuple(contenders[begin : begin + size]) for begin in range(0, len(contenders), size)] or [()]


def _refuse_unknown(kind: str, given: Sequence[str], known: Any) -> None:
    for name in given:
        if name not in known:
            raise ConfigError(f"there is no {kind} {name!r}; choose among {', '.join(known)}")
