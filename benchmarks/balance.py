"""How even the parts of a run are, what its driver costs, and how far workers would take it: measured, then simulated.

    python benchmarks/balance.py [--model FOLDER] [--sets 12] [--json benchmarks/results/balance.json]

One process of one thread runs a study and times every part. The real driver then deals as many parts to 32 and 1,024
links that answer at once, which gives its own time a part, and to links that sleep, which the simulation must foretell.
The simulation takes the part that each worker is given next from `iclperm.workers.shares.Shares`, as the driver does;
that the driver hears, deals and commits one after the other, and that cores do not slow each other, is its model.
"""

from __future__ import annotations

import heapq
import json
import os
import queue
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from _machine import options, publish

COUNTS = [1 << power for power in range(11)]
FIRST_MINUTE = 60.0
QUANTILES = (0.05, 0.5, 0.95)
PIECES = 4  # that each part is cut into, to see whether the number of parts is what limits
LINKS = (32, 1024)  # that answer at once
SLEEPERS = (8, 32)  # links that sleep
TYPICAL_SECONDS = 1.0  # of a part that a link sleeps for
PAPERS = (
    ("Qwen/Qwen2.5-0.5B", "sensitivity"),
    ("Qwen/Qwen2.5-0.5B", "search"),
    ("Qwen/Qwen2.5-7B", "sensitivity"),
    ("Qwen/Qwen2.5-7B", "curve"),
    ("Qwen/Qwen2.5-7B", "search"),
    ("google/gemma-3-27b-pt", "search"),
)
"""Models and studies of `iclperm.models.costs`, whose labels are scored."""


@dataclass(frozen=True)
class Parts:
    """Seconds of the parts of a run and of what is around them; see `simulated`."""

    seconds: Sequence[float]
    jumps: Sequence[float]
    costs: Sequence[float]
    start: float = 0.0
    deal: float = 0.0
    commit: float = 0.0

    def cut(self, pieces: int) -> Parts:
        """The same work in more parts that are alike, at no more work of the driver."""

        def each(values: Sequence[float], share: float) -> list[float]:
            return [value * share for value in values for _ in range(pieces)]

        shares = {"deal": self.deal / pieces, "commit": self.commit / pieces}
        return replace(
            self, seconds=each(self.seconds, 1 / pieces), jumps=each(self.jumps, 1.0), costs=each(self.costs, 1.0),
            **shares,
        )  # fmt: skip


def simulated(parts: Parts, workers: int) -> float:
    """When the driver has committed the last part.

    Workers come up after ``start``; part i takes one ``seconds[i]``, and ``jumps[i]`` more where its part before was
    not i - 1. The driver needs ``deal`` for each part that it gives out and ``commit`` for each first answer, one after
    the other, as `iclperm.workers.driver.Workers.tables` does. `iclperm.reference.dealing` says the same second by
    second.
    """
    from iclperm.workers.shares import Shares

    shares = Shares(range(len(parts.seconds)), dict(enumerate(parts.costs)))
    inbox: list[tuple[float, int, int]] = [(parts.start, number, number) for number in range(workers)]
    part_of: dict[int, int] = {}
    idle: list[int] = []
    clock, sent = 0.0, workers

    def deal_out() -> None:
        nonlocal clock, sent
        while idle and (part := shares.next(idle[0])) is not None:
            worker = idle.pop(0)
            clock += parts.deal
            follows = part_of.get(worker) == part - 1
            part_of[worker] = part
            done = clock + parts.seconds[part] + (0.0 if follows else parts.jumps[part])
            heapq.heappush(inbox, (done, sent, worker))
            sent += 1

    while True:
        deal_out()
        if shares.is_done:
            return clock
        when, _, worker = heapq.heappop(inbox)
        clock = max(clock, when)
        idle.append(worker)
        if worker in part_of and shares.answered(part_of[worker]):
            deal_out()
            clock += parts.commit


def scaling(study: str, parts: Parts, driver: Mapping[int, Mapping[str, float]]) -> list[dict[str, Any]]:
    """The simulation of a study by 1 to 1,024 workers that are up; below 0.9, what would gain most.

    ``driver`` has its seconds a part by numbers of links: those of the fewest that are no less than the workers count.
    """

    def beside(count: int) -> Parts:
        return replace(parts, start=0.0, **driver[min(links for links in driver if links >= count)])

    alone, rows = simulated(beside(1), 1), []
    for count in COUNTS:
        there = beside(count)
        seconds = simulated(there, count)
        efficiency = alone / seconds / count
        without = {"driver": replace(there, deal=0.0, commit=0.0), "few parts": there.cut(PIECES)}
        limit = "" if efficiency >= 0.9 else min(without, key=lambda name: simulated(without[name], count))
        rows.append({
            "what": "simulated", "study": study, "parts": len(parts.seconds), "workers": count, "seconds": seconds,
            "with start-up": seconds + parts.start if parts.start else None, "speed-up": alone / seconds,
            "efficiency": efficiency, "limited by": limit,
        })  # fmt: skip
    return rows


class Timed:
    """What answers a run (`iclperm.runs.scorers.Scorer`), with the seconds of each part: until its answer is there, by
    the clock and of the processor, and until it is committed."""

    def __init__(self, scorer: Any) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.commits: list[float] = []
        self._scorer = scorer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scorer, name)

    def tables(self, parts: Sequence[int], claims: Any, checker: Any) -> Generator[Any]:
        """See `iclperm.runs.scorers.Scorer`."""
        with closing(self._scorer.tables(parts, claims, checker)) as answers:
            while True:
                began, began_cpu = time.perf_counter(), time.process_time()
                if (answered := next(answers, None)) is None:
                    return
                self.wall.append(time.perf_counter() - began)
                self.cpu.append(time.process_time() - began_cpu)
                began = time.perf_counter()
                yield answered
                self.commits.append(time.perf_counter() - began)


def timed_run(study: Any, limits: Any, scorer: Callable[[Any], Any]) -> Timed:
    """Runs a study into a folder that goes, answered by what ``scorer`` makes of its work."""
    from iclperm.runs.execute import run_one

    made: list[Timed] = []

    def local(work: Any) -> Any:
        made.append(Timed(scorer(work)))
        return made[0]

    with tempfile.TemporaryDirectory() as folder:
        run_one(study, Path(folder) / "run", False, False, None, limits, local=local)
    return made[0]


class Link:
    """A link to no worker: it answers every part with random numbers, ``seconds[part]`` after it was asked."""

    def __init__(self, work: Any, seconds: Callable[[int], float]) -> None:
        self._work = work
        self._seconds = seconds
        self._said: queue.SimpleQueue[tuple[float, bytes | None]] = queue.SimpleQueue()

    def send(self, message: bytes) -> None:
        """See `iclperm.workers.pool.Link`."""
        from iclperm.workers.member import surroundings
        from iclperm.workers.messages import packed, unpacked

        head, _ = unpacked(message)
        if head["is"] == "load":
            about = {**surroundings(), "numerics": {"attention": "none"}, "digest": None}
            self._said.put((0.0, packed({"is": "ready", "run": head["run"], **about})))
        elif head["is"] == "part":
            due = time.monotonic() + self._seconds(head["part"])
            answer = {"is": "answer", "run": 1, "part": head["part"], "tokens": 1}
            self._said.put((due, packed(answer, self._rows(head["part"]))))

    def receive(self) -> bytes | None:
        """See `iclperm.workers.pool.Link`."""
        due, message = self._said.get()
        time.sleep(max(0.0, due - time.monotonic()))
        return message

    def why(self) -> str:
        """See `iclperm.workers.pool.Link`."""
        return "it was closed"

    def close(self) -> None:
        """See `iclperm.workers.pool.Link`."""
        self._said.put((0.0, None))

    def _rows(self, number: int) -> Any:
        import pyarrow as pa

        part = self._work.parts[number]
        plan = part.product.plan
        prompts = sum(plan.unit_contexts(unit).size * plan.unit_queries(unit).size for unit in part.units)
        labels = len(self._work.prompts.continuations)
        logprob = np.random.default_rng(number).normal(-2.0, 1.0, prompts * labels).astype(np.float32)
        lists = pa.FixedSizeListArray.from_arrays(pa.array(logprob), labels)
        return pa.table({"logprob": lists, "state": pa.array(np.zeros(prompts, np.uint8))})


def driven(study: Any, limits: Any, count: int, seconds: Callable[[int], float]) -> Timed:
    """The study's run by the real driver and so many links."""
    from iclperm.workers.driver import PoolOf
    from iclperm.workers.pool import Pool

    works: list[Any] = []
    with closing(
        PoolOf(lambda _: count, lambda _: Pool(count, lambda _: Link(works[0], seconds)), is_mixed=False)
    ) as pools:

        def workers(work: Any) -> Any:
            works.append(work)
            return pools(work)

        return timed_run(study, limits, workers)


def start_up(work: Any) -> float:
    """Seconds until a worker of this machine is ready for its first part."""
    from iclperm.workers.local import local_workers

    began = time.perf_counter()
    with closing(local_workers(1, is_mixed=False)) as pools:
        assert pools(work).numerics
    return time.perf_counter() - began


def predictions(study: str, costs: np.ndarray, model: Timed) -> list[dict[str, Any]]:
    """Predicted and actual seconds of parts, by the clock and of the processor, in a table.

    The parts of the first minute, or of the first tenth where that is less, say what a predicted operation takes; the
    ratios are of the others.
    """
    rows = []
    for clock, taken in {"clock": model.wall, "processor": model.cpu}.items():
        actual = np.array(taken)
        first = max(1, min(int(np.searchsorted(np.cumsum(model.wall), FIRST_MINUTE)), len(actual) // 10))
        predicted = costs * actual[:first].sum() / costs[:first].sum()
        ratios = (actual / predicted)[first:]
        if first == len(actual):
            raise SystemExit(f"{first} part is too few to foretell others; give more --sets")
        low, middle, high = np.quantile(ratios, QUANTILES)
        rows.append({
            "what": "part", "study": study, "seconds of the": clock, "parts": len(actual), "calibrated by": first,
            "mean": actual.mean(), "CV predicted": costs.std() / costs.mean(),
            "CV actual": actual.std() / actual.mean(), "dearest / mean": actual.max() / actual.mean(),
            "actual / predicted 5%": low, "50%": middle, "95%": high,
            "rest / predicted rest": actual[first:].sum() / predicted[first:].sum(),
        })  # fmt: skip
    return rows


def jump_flops(work: Any) -> np.ndarray:
    """About the operations that a part takes more where the part before it was not the worker's: those of a path."""
    facts, found = work.setting.facts, []
    for part in work.parts:
        plan = part.product.plan
        length = int(plan.context_lengths[plan.unit_contexts(part.units.start)[0]]) if part.units.start else 0
        found.append(facts.flops(length, 0, length * length // 2))
    return np.array(found)


def of_the_papers(hub_id: str, kind: str, rate: float) -> tuple[str, Parts]:
    """A study of the papers as parts on GPUs of so many TFLOP/s; the path that a jump computes again is left out."""
    from iclperm.engine.facts import unit_flops
    from iclperm.engine.plain_model import read_facts
    from iclperm.models.costs import STUDIES, WORKLOADS, study_plan
    from iclperm.models.papers import paper_models
    from iclperm.runs.limits import OF_A_GPU

    (model,) = (model for model in paper_models() if model.hub_id == hub_id)
    with model.folder() as folder:
        facts = read_facts(folder, device="cpu", dtype="bfloat16")
    (study,) = (study for study in STUDIES if study.name == kind)
    flops = unit_flops(facts, study_plan(study, WORKLOADS[0], OF_A_GPU.tokens_of_unit(facts.decoder_parameters)))
    per_part = -(-len(flops) // OF_A_GPU.parts)
    costs = np.add.reduceat(flops, range(0, len(flops), per_part))
    return f"{hub_id} {kind}", Parts(costs / (rate * 1e12), np.zeros(len(costs)), costs)


def measured_and_simulated(given: Any) -> list[dict[str, Any]]:
    """All figures, in the order of the module's words."""
    from iclperm import Study
    from iclperm.runs.costs import part_flops
    from iclperm.runs.layout import lay_out
    from iclperm.runs.limits import DEFAULT, WorkLimits
    from iclperm.runs.scorers import LocalModel
    from iclperm.runs.setting import ResolvedStudy

    sizes = {"sets": given.sets, "permutations": given.permutations, "queries": given.queries}
    study = Study(model=given.model, shots=[0, 1, 2, 4, 8], seed=1, **sizes)
    work = lay_out(ResolvedStudy.of(study))
    name, costs = f"{Path(given.model).name} on mini_news", part_flops(work)
    alone = timed_run(study, DEFAULT, LocalModel)
    figures = predictions(name, costs, alone)
    start = start_up(work)
    figures.append({"what": "start-up", "study": name, "workers": 1, "seconds": start})

    fine = max(1, work.tokens.unique // given.driver_parts)
    driver: dict[str, dict[int, dict[str, float]]] = {"as it is": {}, "fine": {}}
    for cut, limits in {"as it is": DEFAULT, "fine": WorkLimits(unit_tokens=(fine, fine))}.items():
        for count in LINKS:
            timed = driven(study, limits, count, lambda _: 0.0)
            each = (sum(timed.wall) + sum(timed.commits)) / len(timed.wall)
            commit = float(np.mean(timed.commits))
            driver[cut][count] = {"deal": each - commit, "commit": commit}
            figures.append({
                "what": "driver", "study": f"{name}, cut {cut}", "parts": len(timed.wall), "workers": count,
                "ms a part": 1e3 * each, "of these commit": 1e3 * commit, "parts a second": 1 / each,
            })  # fmt: skip

    seconds = np.array(alone.cpu)
    rate = costs.sum() / seconds.sum()
    measured = Parts(seconds, jump_flops(work) / rate, costs, start)
    share = TYPICAL_SECONDS / seconds.mean()
    for count in SLEEPERS:
        timed = driven(study, DEFAULT, count, lambda part: seconds[part] * share)
        actual = sum(timed.wall) + sum(timed.commits)
        there = replace(
            measured, seconds=seconds * share, jumps=np.zeros(len(costs)), start=0.0, **driver["as it is"][LINKS[0]]
        )
        foretold = simulated(there, count)
        figures.append({
            "what": "links that sleep", "study": name, "parts": len(costs), "workers": count, "seconds": actual,
            "simulated": foretold, "simulated / actual": foretold / actual,
        })  # fmt: skip
    return [*figures, *scaling(name, measured, driver["as it is"])]


def of_all_papers(figures: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The papers' studies, begun on a GPU, simulated with the driver that was measured with the most parts."""
    from iclperm.models.tables import DEFAULT_RATE

    driver = {
        row["workers"]: {
            "deal": 1e-3 * (row["ms a part"] - row["of these commit"]), "commit": 1e-3 * row["of these commit"]
        }
        for row in figures
        if row["what"] == "driver" and row["study"].endswith("cut fine")
    }  # fmt: skip
    return [row for paper in PAPERS for row in scaling(*of_the_papers(*paper, DEFAULT_RATE), driver)]


def main() -> None:
    parser = options(__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo", help="the model of the measured study")
    parser.add_argument("--sets", type=int, default=12)
    parser.add_argument("--permutations", type=int, default=20)
    parser.add_argument("--queries", type=int, default=300)
    parser.add_argument("--driver-parts", type=int, default=1000, help="parts of the run without workers")
    parser.add_argument("--no-papers", action="store_true", help="leave out the studies of the papers")
    parser.add_argument("--measured", type=Path, help="take what was measured from this file, and simulate the papers'")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before PyTorch is loaded
    if given.measured:
        papers = {f"{hub_id} {kind}" for hub_id, kind in PAPERS}
        recorded = json.loads(given.measured.read_text(encoding="utf-8"))["figures"]
        figures = [row for row in recorded if row["study"] not in papers]
    else:
        figures = measured_and_simulated(given)
    figures += [] if given.no_papers else of_all_papers(figures)
    publish("balance", figures, given.json)


if __name__ == "__main__":
    main()
