"""The workloads: what is scored, as token ids drawn from a seed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from iclperm.bench.peers.protocol import BenchWorkload
from iclperm.engine import ContextPaths, plan_product
from iclperm.engine.tree import Rows
from iclperm.errors import RequestError

_BOS, _FIRST_ID = 1, 100  # ids below are left to labels
_FOUR = ((11,), (12,), (13,), (14,))
_FOUR_LONG = ((11, 21), (11, 22, 23), (12, 24), (13, 25, 26))
_FOURTEEN = tuple((11 + number, *range(31 + 2 * number, 31 + 2 * number + number % 3)) for number in range(14))


@dataclass(frozen=True)
class Case:
    """P orderings of K demonstrations, cut after the numbers of shots in ``shots``, before Q queries and L labels.

    Demonstrations and queries have 32 to 48 tokens. ``is_shared`` False: every ordering has demonstrations of its own.
    """

    name: str
    what: str
    num_shots: int
    permutations: int
    shots: tuple[int, ...]
    queries: int
    labels: tuple[tuple[int, ...], ...] = _FOUR
    is_shared: bool = True

    def scaled(self, scale: float) -> Case:
        """About that share of the work: fewer orderings, then fewer queries."""
        if not 0 < scale <= 1:
            raise RequestError(f"scale is {scale}; give a share of the work, more than 0 and at most 1")
        permutations = max(1, int(self.permutations * scale))
        queries = max(1, round(self.permutations * self.queries * scale / permutations))
        return replace(self, permutations=permutations, queries=min(queries, self.queries))

    def build(self, vocab_size: int, seed: int = 0) -> BenchWorkload:
        """All prompts of the case; equal for equal arguments."""
        rng = np.random.default_rng([seed, self.num_shots, self.is_shared])

        def drawn(count: int) -> list[np.ndarray[tuple[int], np.dtype[np.int32]]]:
            return [rng.integers(_FIRST_ID, vocab_size, rng.integers(32, 49), np.int32) for _ in range(count)]

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
        )


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


def distinct_tokens(work: BenchWorkload) -> int:
    """Tokens that have to be forwarded for a whole workload if each distinct prefix is forwarded once."""
    paths = ContextPaths(Rows.of(work.paths), Rows.of(work.marks))
    return plan_product(paths, work.queries, work.labels).tokens_unique


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
