"""A study of 650 million prompts from its plan to its report: 10 sets, 1,000 permutations, k = 0 to 64, 1,000 queries.

    nice python benchmarks/scale.py [--fraction 0.1] [--folder FOLDER] [--stages plan,fill] [--json FILE]
    nice python benchmarks/scale.py --fraction 1 --json benchmarks/results/scale.json

Everything is as in a real study (data, tokenizer, plan, files, statistics), but for what scores: log-likelihoods of
four labels from random numbers keyed by the unit, the right one's raised by an effect of k, set and ordering. Every
stage is a process of its own; its peak counts all that is resident, interpreter, libraries and pages of files among
it. ``plan`` makes the messages to a worker, and the requests of all parts; ``worker`` makes the plan that such a
message tells. ``resumed`` is run again after one part in 40 was removed. The whole size takes some 13 GB of disk.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from _machine import options, publish
from host_memory import make_study, resident

WHOLE = {"sets": 10, "permutations": 1000, "shots": 64, "queries": 1000}
LEAST = {"permutations": 10, "queries": 40}
REMOVED = 40  # of the parts one in so many is removed before the run is resumed
GB = 1_000_000_000
BARS = {
    "plan": (30, 1 * GB),
    "worker": (30, 1 * GB),
    "fill": (None, 4 * GB),
    "status": (None, 4 * GB),
    "resumed": (None, 4 * GB),
    "opened": (5, 4 * GB),
    "answers": (None, 4 * GB),
    "verified": (None, 4 * GB),
    "curve": (300, 4 * GB),
    "sensitivity": (300, 4 * GB),
}
"""Seconds and bytes that a stage may take of the whole study; None where no time is promised."""
MOST_FILES = 9_000
"""In one folder, locks and what is set aside among them."""


class ScoresOfUnits:
    """A scorer (`iclperm.runs.scorers.Scorer`) that asks nobody: the same scores for a unit whenever it is asked."""

    numerics = {"attention": "none"}  # noqa: RUF012 - as the engine's
    libraries = ("iclperm", "numpy", "pyarrow")

    def __init__(self, work: Any) -> None:
        self.tokens = 0
        self.replies: dict[str, int] = {}
        self.workers: list[dict[str, Any]] = []
        self._work = work
        self._draws = np.random.Generator(np.random.Philox(key=1)).standard_normal(1 << 23, dtype=np.float32)

    def close(self) -> None:
        """Nothing to do."""

    def expect(self, numerics: Any) -> None:
        """Nothing to do: these are no numerics of a machine."""

    def tables(self, parts: Sequence[int], claims: Any, checker: Any) -> Generator[Any]:
        """See `Scorer`."""
        from iclperm.runs.scorers import Answered, rows_of

        assert checker is None
        with closing(claims.each(parts)) as claimed:
            for number in claimed:
                self.tokens += 1
                yield Answered(number, rows_of(self._work, number, self._said(number), checker), self.numerics)

    def _said(self, number: int) -> Any:
        import pyarrow as pa

        work, part = self._work, self._work.parts[number]
        if part.product is None:
            raise AssertionError("the tokenizer here keeps every query apart from what is before it")
        product, pieces = part.product, []
        for unit in part.units:
            contexts = product.contexts[product.plan.unit_contexts(unit)]
            queries = product.queries[product.plan.unit_queries(unit)]
            scores = self._of_cells(work.growths[part.growth].first_cells[contexts], work.prompts.gold[queries], unit)
            pieces.append(scores.ravel())
        values = pa.array(np.concatenate(pieces), pa.float32())
        lists = pa.FixedSizeListArray.from_arrays(values, product.plan.num_labels)
        return pa.table({"logprob": lists, "state": pa.array(np.zeros(len(lists), np.uint8))})

    def _of_cells(self, cells: Any, gold: Any, unit: int) -> Any:
        """Scores float32 [C, Q, L] of contexts by their set, permutation and place on the K axis."""
        index_set, permutation, place = cells.T
        effect = 0.3 + 0.7 * np.sqrt(place / 64) + 0.1 * np.cos(index_set) + 0.1 * np.sin(permutation + index_set)
        shape = (len(cells), len(gold), 4)
        size = int(np.prod(shape))
        begin = unit * 7919 % (len(self._draws) - min(size, len(self._draws) // 2))
        scores = np.resize(self._draws[begin : begin + size], shape) - np.float32(4)
        scores[:, np.arange(len(gold)), gold] += effect.astype(np.float32)[:, None]
        return scores


def sizes_of(fraction: float) -> dict[str, int]:
    """The study at a fraction of its prompts: fewer permutations, then fewer queries."""
    permutations = max(LEAST["permutations"], round(WHOLE["permutations"] * fraction))
    queries = max(LEAST["queries"], round(WHOLE["queries"] * fraction * WHOLE["permutations"] / permutations))
    return {**WHOLE, "permutations": permutations, "queries": min(queries, WHOLE["queries"])}


def write_study(folder: Path, sizes: dict[str, int]) -> None:
    """Data, task, model folder and study, of the kind curve."""
    from iclperm.study.study import Study

    study = Study.from_file(make_study(folder, sizes))
    study = study.model_copy(update={"kind": "curve", "shots": list(range(sizes["shots"] + 1))})
    (folder / "study.yaml").write_text(study.to_yaml())


def plan(folder: Path) -> dict[str, Any]:
    """Plans the study and makes every message to a worker, as its driver does."""
    from iclperm.runs.answering import Asked
    from iclperm.runs.layout import lay_out
    from iclperm.runs.setting import ResolvedStudy
    from iclperm.study.study import Study
    from iclperm.workers.messages import part_message, plan_message

    work = lay_out(ResolvedStudy.of(Study.from_file(folder / "study.yaml"), weights=False))
    num_bytes = 0
    for number, product in enumerate(work.products):
        message = plan_message(work, product)
        (folder / f"plan-{number}.message").write_bytes(message)
        num_bytes += len(message)
    num_bytes += sum(len(part_message(Asked.of(work, part))) for part in range(len(work.parts)))
    num_prompts = sum(growth.num_cells for growth in work.growths)
    return {"prompts": num_prompts, "parts": len(work.parts), "bytes of messages": num_bytes}


def worker(folder: Path) -> dict[str, Any]:
    """Makes a worker's plan from the driver's message."""
    from iclperm.workers.messages import plan_from, unpacked

    paths = sorted(folder.glob("plan-*.message"))
    units = [plan_from(head, table).num_units for head, table in (unpacked(path.read_bytes()) for path in paths)]
    return {"units": sum(units)}


def fill(folder: Path) -> dict[str, Any]:
    """Runs the study, or what is missing of it, with scores from nowhere."""
    from iclperm.runs.execute import run_one
    from iclperm.study.study import Study

    study = Study.from_file(folder / "study.yaml")
    report = run_one(study, folder / "run", False, False, None, local=ScoresOfUnits).report
    return {"parts": report.num_parts, "parts resumed": report.num_parts_resumed}


def resumed(folder: Path) -> dict[str, Any]:
    """Runs the study after some of its parts were removed."""
    for path in sorted((folder / "run/items").iterdir())[::REMOVED]:
        path.unlink()
    return fill(folder)


def opened(folder: Path) -> dict[str, Any]:
    """Opens the run, and looks at what is known of it without its answers."""
    import iclperm

    run = iclperm.open_run(folder / "run")
    return {"labels": len(run.labels), "k": len(run.shots)}


def answers(folder: Path) -> dict[str, Any]:
    """Reads all answers of the run."""
    import iclperm

    run = iclperm.open_run(folder / "run")
    return {"prompts": len(run.splits["test"].gold) * run.splits["test"].context_of.size}


def command(*arguments: str) -> dict[str, Any]:
    """A command of ``iclperm``; it must succeed, its output is not shown."""
    from iclperm.cli.main import main

    try:
        with contextlib.redirect_stdout(io.StringIO()):
            main(list(arguments))
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"iclperm {' '.join(arguments)} ended with exit code {end.code}") from None
    return {}


STAGES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "plan": plan,
    "worker": worker,
    "fill": fill,
    "status": lambda folder: command("status", str(folder / "run")),
    "resumed": resumed,
    "opened": opened,
    "answers": answers,
    "verified": lambda folder: command("verify", str(folder / "run")),
    "curve": lambda folder: command("report", str(folder / "run"), "--out", str(folder / "curve")),
    "sensitivity": lambda folder: command(
        "report", str(folder / "run"), "--kind", "sensitivity", "--out", str(folder / "sensitivity")
    ),
}


def measure(stage: str, folder: Path) -> dict[str, Any]:
    """One stage in this process: seconds without imports, the peak of what is resident, and what the run takes."""
    import pyarrow.parquet  # noqa: F401 - counted as imports

    if stage in ("opened", "answers"):
        import iclperm

        _ = iclperm.open_run  # what comes with it is imported where it is first named
    if stage in ("plan", "worker", "fill", "resumed"):
        import iclperm.runs.execute
        import iclperm.workers.messages
    started, processor = time.perf_counter(), time.process_time()
    about = STAGES[stage](folder)
    seconds, processor = time.perf_counter() - started, time.process_time() - processor
    peak = resident("VmHWM")
    folders = [path for path in (folder / "run").rglob("*") if path.is_dir()]
    files = [sum(1 for _ in each.iterdir()) for each in (folder / "run", *folders) if each.is_dir()]
    num_bytes = sum(path.stat().st_size for path in (folder / "run").rglob("*") if path.is_file())
    return {
        "stage": stage,
        "seconds": round(seconds, 2),
        "processor seconds": round(processor, 2),
        "peak MB": round(peak / 1e6),
        "MB on disk": round(num_bytes / 1e6),
        "most files": max(files, default=0),
        **about,
    }


def in_own_process(stage: str, folder: Path) -> dict[str, Any]:
    """The figures of a stage, measured in a new process."""
    arguments = [sys.executable, str(Path(__file__).resolve()), "--stage", stage, "--folder", str(folder)]
    done = subprocess.run(arguments, check=True, stdout=subprocess.PIPE, text=True)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def misses(figures: Sequence[dict[str, Any]]) -> list[str]:
    """The bars of the whole study that were not held."""
    found = []
    for row in figures:
        most_seconds, most_bytes = BARS[row["stage"]]
        if most_seconds is not None and row["seconds"] > most_seconds:
            found.append(f"{row['stage']}: {row['seconds']:.1f} s, the bar is {most_seconds}")
        if row["peak MB"] * 1e6 > most_bytes:
            found.append(f"{row['stage']}: {row['peak MB']:,} MB, the bar is {most_bytes / 1e6:,.0f}")
        if row["most files"] > MOST_FILES:
            found.append(f"{row['stage']}: {row['most files']:,} files in a folder, the bar is {MOST_FILES:,}")
    return found


def main() -> None:
    parser = options(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--fraction", type=float, default=0.01, help="of the 650 million prompts")
    parser.add_argument("--stages", help="some of them, by commas; by default all")
    parser.add_argument("--folder", type=Path, help="where files go; kept. By default a temporary folder")
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.stage:
        print(json.dumps(measure(arguments.stage, arguments.folder)))
        return
    sizes, stages = sizes_of(arguments.fraction), (arguments.stages or ",".join(STAGES)).split(",")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(arguments.folder or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "study.yaml").exists():
            write_study(folder, sizes)
        figures = []
        for stage in stages:
            figures.append(in_own_process(stage, folder))
            print(figures[-1], file=sys.stderr, flush=True)
    publish(f"plans at scale: {sizes}", figures, arguments.json)
    missed = misses(figures)
    print(*(missed or ["every bar was held"]), sep="\n")


if __name__ == "__main__":
    main()
