"""What a study takes of the host's memory beside its model, from the first part to the export; the bar is 1 GB.

    python benchmarks/host_memory.py [--permutations 100] [--shots 16] [--queries 250] [--json FILE]
    python benchmarks/host_memory.py --full --json benchmarks/results/host_memory.json

Everything is as in a real study (data, tokenizer, plan, files, statistics), but for the engine, which draws its answers
from random numbers keyed by the unit. Every phase is a process of its own. Its peak counts all that is resident: the
interpreter, libraries, pages of files; ``imports`` is what was there before the phase began, torch included where the
phase needs it. The last phase is ``iclperm stats`` of a file of 20 million answers, one byte each, of which 1 % are
missing, with their states. ``--full`` are the 64 million prompts of 1000 orderings, every k up to 64, and 1000 queries.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _machine import options, publish

BAR = 1_000_000_000
SMALL = {"sets": 1, "permutations": 100, "shots": 16, "queries": 250}
FULL = {"sets": 1, "permutations": 1000, "shots": 64, "queries": 1000}
LABELS = ("world", "sport", "trade", "science")
_WORDS = ("bank", "coach", "court", "cup", "data", "deal", "goal", "gene", "law", "match", "mayor", "orbit", "price")
STATS, ANSWERS, ANSWERS_SHAPE = "stats, answers missing", "answers.npz", (10, 100, 20_000)
_STOPPED_AT = 0.3  # the share of the parts after which the first process is interrupted


class KeyedAnswers:
    """Stands where the engine stands: answers at once, the same ones for a unit whenever it is asked."""

    numerics = {"attention": "none"}  # noqa: RUF012 - as the engine's
    pack_tokens = 1  # whatever a plan's are

    def __init__(self) -> None:
        from iclperm.engine import Report

        self.report, self.totals = Report(), Report()

    def execute(self, plan: Any, units: Iterable[int]) -> Iterator[Any]:
        """Random log-likelihoods of the units of a product."""
        from iclperm.engine import UnitResult

        for unit in units:
            contexts, queries = plan.unit_contexts(unit), plan.unit_queries(unit)
            shape = (len(contexts), len(queries), plan.num_labels)
            draws = np.random.Generator(np.random.Philox(key=unit)).standard_normal(shape, dtype=np.float32)
            state = np.zeros(shape[:2], np.uint8)
            yield UnitResult(unit, contexts, queries, draws - np.float32(4), np.zeros(shape, np.bool_), state)

    def loglikelihood(self, requests: Any) -> Any:
        """The tokenizer here keeps every query apart from what is before it."""
        raise AssertionError(f"{len(requests)} prompts outside the product")


def make_study(folder: Path, sizes: dict[str, int], labels: Sequence[str] = LABELS) -> Path:
    """Data, task and a model folder that has everything but weights; the path of the study file."""
    import yaml

    from iclperm import demo
    from iclperm.study.study import Study

    texts = (" ".join(words) for words in itertools.permutations(_WORDS, 6))
    for split, count in (("train", 4 * sizes["shots"] + 64), ("test", sizes["queries"])):
        rows = [{"text": f"The {next(texts)}", "label": labels[row % len(labels)]} for row in range(count)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "name": "words",
        "data": {"train": "train.jsonl", "test": "test.jsonl"},
        "fields": {"text": "text"},
        "labels": list(labels),
        "demonstration": "Text: {{ text }}\nTopic: {{ label }}",
        "query": "Text: {{ text }}\nTopic:",
        "shots": 4,
    }
    (folder / "words.yaml").write_text(yaml.safe_dump(task, sort_keys=False))
    model = folder / "model"
    model.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).write_bytes((demo.model_path() / name).read_bytes())
    config = json.loads((demo.model_path() / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1 << 16}))
    shots = list(range(1, sizes["shots"] + 1))
    study = Study(**{**sizes, "shots": shots}, model=str(model), task=str(folder / "words.yaml"))
    (folder / "study.yaml").write_text(study.to_yaml())
    return folder / "study.yaml"


def run_study(folder: Path, stop_at: float = 1.0) -> None:
    """Runs the study with answers from nowhere; interrupted after a share of its parts."""
    import iclperm
    from iclperm.engine import Engine
    from iclperm.study.study import Study

    def progress(done: int, total: int) -> None:
        if stop_at * total <= done < total:
            raise KeyboardInterrupt

    Engine.from_pretrained = lambda *_, **__: KeyedAnswers()  # type: ignore[method-assign, assignment, return-value]
    with contextlib.suppress(KeyboardInterrupt):
        iclperm.run(Study.from_file(folder / "study.yaml"), folder / "run", progress=progress)


def write_answers(folder: Path) -> None:
    """A file of answers 0 and 1 as others make them, and of their states, beside the study."""
    generator = np.random.default_rng(0)
    correct, state = (generator.integers(0, 100, ANSWERS_SHAPE, np.uint8) < most for most in (70, 1))
    np.savez(folder / ANSWERS, correct=correct.view(np.uint8), state=state.view(np.uint8))


def command(name: str, path: Path, *arguments: str) -> None:
    """A command of ``iclperm`` on a run or a file; it must succeed, its output is not shown."""
    from iclperm.cli.main import main

    try:
        with contextlib.redirect_stdout(io.StringIO()):
            main([name, str(path), *arguments])
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"iclperm {name} ended with exit code {end.code}") from None


PHASES: dict[str, Callable[[Path], None]] = {
    "run, interrupted": lambda folder: run_study(folder, _STOPPED_AT),
    "run, continued": run_study,
    "run, finished already": run_study,
    "status": lambda folder: command("status", folder / "run"),
    "verify": lambda folder: command("verify", folder / "run"),
    "report": lambda folder: command("report", folder / "run"),
    "export": lambda folder: command("export", folder / "run", "--out", str(folder / "all.parquet")),
    STATS: lambda folder: command("stats", folder / ANSWERS),
}


def measure(phase: str, folder: Path) -> dict[str, Any]:
    """One phase in this process: seconds, bytes resident before it, and at its peak."""
    import pyarrow.parquet  # noqa: F401 - counted as imports

    if phase.startswith("run"):
        import iclperm.engine.engine
        import iclperm.runs.execute  # noqa: F401
    if phase == STATS:
        write_answers(folder)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    started = time.perf_counter()
    PHASES[phase](folder)
    seconds = time.perf_counter() - started
    peak = resident("VmHWM")
    return {"phase": phase, "seconds": seconds, "imports MB": before / 1e6, "peak MB": peak / 1e6,
            "beyond imports MB": (peak - before) / 1e6}  # fmt: skip


def resident(key: str) -> int:
    """``VmRSS`` or ``VmHWM`` of this process, in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{key}:")[1].split()[0]) * 1024


def in_own_process(phase: str, folder: Path) -> dict[str, Any]:
    """The figures of a phase, measured in a new process."""
    arguments = [sys.executable, str(Path(__file__).resolve()), "--phase", phase, "--folder", str(folder)]
    done = subprocess.run(arguments, check=True, stdout=subprocess.PIPE, text=True)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main() -> None:
    parser = options(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    for name, size in SMALL.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--full", action="store_true", help="64 million prompts; needs some 5 GB of disk")
    parser.add_argument("--folder", type=Path, help="where files go; kept. By default a temporary folder")
    parser.add_argument("--phase", choices=PHASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.phase:
        print(json.dumps(measure(arguments.phase, arguments.folder)))
        return
    sizes = FULL if arguments.full else {name: getattr(arguments, name) for name in SMALL}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(arguments.folder or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        make_study(folder, sizes)
        figures = [in_own_process(phase, folder) for phase in PHASES]
        items = [path.stat().st_size for path in (folder / "run/items").iterdir()]
    name = f"host memory of a study: {sizes}, {len(items)} files of {np.mean(items):,.0f} bytes"
    publish(name, figures, arguments.json)
    worst = max(row["beyond imports MB"] for row in figures) * 1e6
    print(f"at most {worst / 1e6:,.0f} MB beyond imports; the bar is {BAR / 1e6:,.0f} MB: "
          f"{'held' if worst <= BAR else 'MISSED'}")  # fmt: skip


if __name__ == "__main__":
    main()
