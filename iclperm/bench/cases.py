"""The workloads: what is scored, as token ids drawn from a seed, of built-in cases and of those in files."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Protocol, Self

import numpy as np
from pydantic import Field

from iclperm.bench.peers.protocol import BenchWorkload
from iclperm.engine import ContextPaths, plan_product
from iclperm.engine.tree import Rows
from iclperm.errors import ConfigError, RequestError
from iclperm.study.choices import Choices

_BOS, _FIRST_ID = 1, 100  # ids below are left to labels
_FLOPS = 2e12  # of a share that is a fair one where no other is named: half a minute of two cores, about
_SAMPLE_FLOPS = 4e11  # likewise of the prompts that stand for all of a slow peer
_MOST_SAMPLE, _FEWEST_SAMPLE = 96, 8
_FOUR = ((11,), (12,), (13,), (14,))
_FOUR_LONG = ((11, 21), (11, 22, 23), (12, 24), (13, 25, 26))
_FOURTEEN = tuple((11 + number, *range(31 + 2 * number, 31 + 2 * number + number % 3)) for number in range(14))


class Measurable(Protocol):
    """What can be measured, whole or in part."""

    @property
    def name(self) -> str: ...

    @property
    def what(self) -> str:
        """In words, without its name."""

    @property
    def digest(self) -> str:
        """Tells it from others of its name; empty for a built-in case."""

    @property
    def new_tokens(self) -> int:
        """Tokens that are written after each prompt; 0 where labels are scored."""

    @property
    def num_cells(self) -> int:
        """Prompts of all of it; asked before it is scaled."""

    def scaled(self, scale: float) -> Self:
        """About that share of the work."""

    def build(self, vocab_size: int, seed: int = 0) -> BenchWorkload:
        """All its prompts; equal for equal arguments."""

    def distinct(self, vocab_size: int, seed: int = 0) -> int:
        """Tokens that have to be forwarded for all of it."""


@dataclass(frozen=True)
class Case:
    """P orderings of K demonstrations, cut after the numbers of shots in ``shots``, before Q queries and L labels.

    Demonstrations and queries have as many tokens as ``lengths`` say, the least and the most. ``is_shared`` False:
    every ordering has demonstrations of its own.
    """

    name: str
    what: str
    num_shots: int
    permutations: int
    shots: tuple[int, ...]
    queries: int
    labels: tuple[tuple[int, ...], ...] = _FOUR
    is_shared: bool = True
    lengths: tuple[int, int] = (32, 48)
    new_tokens: int = 0
    digest: str = ""

    @property
    def num_cells(self) -> int:
        """Prompts of it."""
        return self.permutations * len(self.shots) * self.queries

    def scaled(self, scale: float) -> Case:
        """About that share of the work: fewer orderings, then fewer queries."""
        permutations, queries = share_of(scale, self.permutations, self.queries)
        return replace(self, permutations=permutations, queries=queries)

    def build(self, vocab_size: int, seed: int = 0) -> BenchWorkload:
        """All prompts of the case; equal for equal arguments."""
        rng = np.random.default_rng([seed, self.num_shots, self.is_shared])

        least, most = self.lengths

        def drawn(count: int) -> list[np.ndarray[tuple[int], np.dtype[np.int32]]]:
            return [rng.integers(_FIRST_ID, vocab_size, rng.integers(least, most + 1), np.int32) for _ in range(count)]

        queries, demonstrations = drawn(self.queries), drawn(self.num_shots)
        paths, marks = [], []
        for _ in range(self.permutations):
            ordering = [demonstrations[number] for number in rng.permutation(self.num_shots)]
            ends = np.cumsum([1, *(part.size for part in ordering)])
            paths.append(np.concatenate([[_BOS], *ordering]).astype(np.int32))
            marks.append(ends[list(self.shots)].astype(np.int32))
            demonstrations = demonstrations if self.is_shared else drawn(self.num_shots)
        contexts = self.permutations * len(self.shots)
        return BenchWorkload(
            tuple(paths),
            tuple(marks),
            tuple(queries),
            tuple(np.array(label, np.int32) for label in self.labels),
            np.stack(np.divmod(np.arange(contexts * self.queries), self.queries), axis=1),
            self.new_tokens,
        )

    def distinct(self, vocab_size: int, seed: int = 0) -> int:
        """Tokens that have to be forwarded for all of it. Cost: building it."""
        return distinct_tokens(self.build(vocab_size, seed))


_Label = Annotated[list[Annotated[int, Field(ge=2, lt=_FIRST_ID)]], Field(min_length=1)]
_Length = Annotated[int, Field(ge=1, le=100_000)]


class CaseChoices(Choices):
    """A case as a YAML file has it; ``labels`` are lists of token ids below 100, ``tokens`` the least and the most that
    a demonstration or a query has."""

    demonstrations: Annotated[int, Field(ge=1, le=10_000)]
    permutations: Annotated[int, Field(ge=1, le=100_000)]
    shots: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    queries: Annotated[int, Field(ge=1, le=1_000_000)]
    labels: Annotated[list[_Label], Field(min_length=1)] = Field(default_factory=lambda: [list(one) for one in _FOUR])
    tokens: Annotated[list[_Length], Field(min_length=2, max_length=2)] = Field(default_factory=lambda: [32, 48])
    shared: bool = True
    new_tokens: Annotated[int, Field(ge=0, le=100_000)] = 0

    def case(self, name: str) -> Case:
        """Raises ConfigError for numbers that do not go together."""
        if sorted({*self.shots}) != self.shots or self.shots[-1] > self.demonstrations:
            raise ConfigError(
                f"shots is {self.shots}; give ascending numbers up to {self.demonstrations} demonstrations"
            )
        if self.tokens[0] > self.tokens[1]:
            raise ConfigError(f"tokens is {self.tokens}; give the least and the most of a demonstration or query")
        labels = tuple(map(tuple, self.labels))
        if len(set(labels)) < len(labels):
            raise ConfigError(f"labels is {self.labels}; give every label once")
        owned = "shared" if self.shared else "of their own"
        asked = f"{self.new_tokens} new tokens" if self.new_tokens else f"{len(labels)} labels"
        what = f"K={self.demonstrations} ({owned}), P={self.permutations}, k={self.shots}, Q={self.queries}, {asked}"
        return Case(
            name, what, self.demonstrations, self.permutations, tuple(self.shots), self.queries, labels, self.shared,
            (self.tokens[0], self.tokens[1]), self.new_tokens,
            hashlib.sha256(self.to_yaml().encode()).hexdigest()[:8],
        )  # fmt: skip


def share_of(scale: float, paths: int, queries: int) -> tuple[int, int]:
    """How many paths and queries are about that share of them all: fewer paths first, then fewer queries."""
    if not 0 < scale <= 1:
        raise RequestError(f"scale is {scale}; give a share of the work, more than 0 and at most 1")
    fewer = max(1, int(paths * scale))
    return fewer, min(queries, max(1, round(paths * queries * scale / fewer)))


def fair_scale(tokens: int, num_parameters: int) -> float:
    """The share of so many distinct tokens that a machine of two cores forwards in about half a minute."""
    return min(1.0, float(f"{_FLOPS / (2 * num_parameters * tokens):.2g}"))


def fair_sample(num_parameters: int, tokens: float) -> int:
    """Prompts of so many tokens that may stand for all of a peer that forwards each of them whole."""
    return int(np.clip(_SAMPLE_FLOPS / (2 * num_parameters * tokens), _FEWEST_SAMPLE, _MOST_SAMPLE))


_MONTE_CARLO = Case("monte_carlo", "K=16, P=4, every k, Q=64, 4 one-token labels", 16, 4, tuple(range(17)), 64)
CASES = {
    case.name: case
    for case in (
        _MONTE_CARLO,
        replace(
            _MONTE_CARLO,
            name="monte_carlo_multi",
            what="the same with labels of 2 and 3 tokens",
            labels=_FOUR_LONG,
        ),
        Case("order_search", "K=8, P=128, k=8, Q=64, 4 labels", 8, 128, (8,), 64),
        Case("long", "K=64, P=1, k=0, 8, .. 64, Q=16, 4 labels", 64, 1, tuple(range(0, 65, 8)), 16),
        Case("wide", "K=8, P=2, every k, Q=64, 14 labels of 1 to 3 tokens", 8, 2, tuple(range(9)), 64, _FOURTEEN),
        Case("nothing_shared", "48 contexts of 8 demonstrations of their own, Q=1", 8, 48, (8,), 1, is_shared=False),
    )
}


def find_case(name: str) -> Case:
    """A built-in case, or that of a YAML file; raises ConfigError naming what is wrong with it."""
    if name in CASES:
        return CASES[name]
    if Path(name).suffix not in (".yaml", ".yml"):
        raise ConfigError(f"there is no case {name!r}; choose among {', '.join(CASES)}, or give a YAML file")
    read = CaseChoices.from_file(name)
    try:
        return read.case(Path(name).stem)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def distinct_tokens(work: BenchWorkload) -> int:
    """Tokens that have to be forwarded for a whole workload if each distinct prefix is forwarded once.

    What is written follows a prompt of its own: each of its tokens but the last is one more.
    """
    paths = ContextPaths(Rows.of(work.paths), Rows.of(work.marks))
    plan = plan_product(paths, work.queries, work.labels)
    return plan.tokens_unique + plan.num_contexts * len(work.queries) * max(work.new_tokens - 1, 0)


def first_paths(work: BenchWorkload, count: int) -> BenchWorkload:
    """The whole workload of the first paths alone."""
    contexts = sum(marks.size for marks in work.marks[:count])
    cells = work.cells[work.cells[:, 0] < contexts]
    return replace(work, paths=work.paths[:count], marks=work.marks[:count], cells=cells)


def even_sample(work: BenchWorkload, prompts: int, run: int = 16) -> BenchWorkload:
    """About so many prompts of the first half of the paths, which every contender scores, whatever it samples.

    They are runs of neighbours in length, so that batches pad no more than among all prompts.
    """
    pool = first_paths(work, max(1, len(work.paths) // 2))
    run = min(run, prompts)
    runs = max(1, prompts // run)
    if runs * run >= len(pool.cells):
        return work if len(pool.cells) == len(work.cells) else replace(work, cells=pool.cells)
    order = np.argsort(pool.lengths, kind="stable")
    centres = (np.arange(runs) + 0.5) / runs * (order.size - run)
    begins = (int(centre) // run * run for centre in centres)  # where batches of all prompts begin, too
    places = np.concatenate([np.arange(run) + begin for begin in begins])
    return replace(work, cells=pool.cells[order[np.unique(places)]])


def warm_up(work: BenchWorkload) -> BenchWorkload:
    """A little of it: the shortest and the middle context of the first path, a few queries.

    Who scores every query after a context, whether wanted or not, can so tell how many of them go best together.
    """
    marks = np.unique(work.marks[0][[0, work.marks[0].size // 2]])
    queries = min(8, len(work.queries))
    cells = np.stack(np.divmod(np.arange(marks.size * queries), queries), axis=1)
    return replace(work, paths=work.paths[:1], marks=(marks,), cells=cells)
