"""The loop: class after class, case after case, each in a place of its own; what is found is repeated by a number.

python benchmarks/faults.py                                  # the fixed part of every class: minutes
python benchmarks/faults.py --hours 3 --seed 7 --json benchmarks/results/faults.json
python benchmarks/faults.py --classes system folders --whole # every step of these classes once
python benchmarks/faults.py --classes kills --seed 7 --step 41
python benchmarks/faults.py --table benchmarks/results/faults.json    # the table in docs/reliability.md
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from faults.commands import PROGRAMS_CLASS
from faults.folders import FOLDERS_CLASS
from faults.inputs import INPUTS
from faults.judge import FaultClass, Verdict, changed
from faults.kills import KILLS
from faults.replies import REPLIES
from faults.system import SYSTEM
from faults.world import World

_CLASSES = (KILLS, SYSTEM, FOLDERS_CLASS, REPLIES, INPUTS, PROGRAMS_CLASS)
CLASSES: dict[str, FaultClass] = {each.name: each for each in _CLASSES}


def main(arguments: Sequence[str] | None = None) -> int:
    """The number of findings, as an exit code of 0 or 1."""
    given = _options().parse_args(arguments)
    if given.table:
        print(table(json.loads(given.table.read_text())))
        return 0
    given.json = given.json and given.json.absolute()  # the world changes the working directory
    home = Path(tempfile.mkdtemp(prefix="iclperm-faults-")) / "world"
    try:
        is_fixed = not (given.hours or given.whole or given.step is not None)
        figures = _run(World(home, warm=2 if is_fixed else None), given)
    finally:
        shutil.rmtree(home.parent, ignore_errors=True)
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(figures, indent=1) + "\n")
    print(table(figures))
    return int(any(row["findings"] for row in figures["classes"]))


def _run(world: World, given: argparse.Namespace) -> dict[str, Any]:
    rows = {name: _Row(CLASSES[name]) for name in given.classes or CLASSES}
    ends = time.monotonic() + given.hours * 3600 if given.hours else float("inf")
    seeds = iter(range(given.seed, given.seed + (1 << 30 if given.hours else 1)))
    for seed in seeds:
        queues = [(rows[name], _numbers(world, rows[name], seed, given)) for name in rows]
        while queues and time.monotonic() < ends:
            for queue in list(queues):  # in turn, so that every class has its share of the hours
                row, numbers = queue
                if (number := next(numbers, None)) is None:
                    queues.remove(queue)
                elif time.monotonic() < ends:
                    row.try_one(world, seed, number)
        if time.monotonic() >= ends:
            break
    return {"seed": given.seed, "hours": given.hours, "classes": [row.to_dict() for row in rows.values()]}


def _numbers(world: World, row: _Row, seed: int, given: argparse.Namespace) -> Iterator[str]:
    """Which steps are tried, in which order, each as the option that repeats it: those of the test suite unless one,
    all, or all by chance are asked for."""
    if given.step is not None:
        return iter([f"--step {given.step}"])
    if given.fixed is not None:
        return iter([f"--fixed {given.fixed}"])
    if not (given.hours or given.whole):
        return iter([f"--fixed {number}" for number in range(len(row.kind.fixed))])
    numbers = list(range(len(row.steps(world))))
    if not given.whole:
        Random(f"{row.kind.name} {seed}").shuffle(numbers)
    return iter([f"--step {number}" for number in numbers])


class _Row:
    """What one class came to."""

    def __init__(self, kind: FaultClass) -> None:
        self.kind = kind
        self._steps: Sequence[Any] | None = None
        self._ended: Counter[str] = Counter()
        self._found: list[dict[str, str]] = []
        self._seconds = 0.0

    def steps(self, world: World) -> Sequence[Any]:
        """Every step of a pass."""
        if self._steps is None:
            self._steps = self.kind.steps(world)
        return self._steps

    def try_one(self, world: World, seed: int, number: str) -> None:
        """One case, and what it leaves behind removed."""
        option, place = number.split()
        step = (self.kind.fixed if option == "--fixed" else self.steps(world))[int(place)]
        before, begin = world.snapshot(), time.monotonic()
        try:
            verdict = self.kind.check(world, step, Random(f"{self.kind.name} {seed} {number}"))
        except Exception as error:  # of the machine itself: told, as it would hide what it was to find
            verdict = Verdict("the machine failed", [f"the machine failed: {type(error).__name__}: {error}"])
        verdict.findings += changed(before, world.snapshot())
        verdict.findings = [line.replace(str(world.home), "WORLD") for line in verdict.findings]
        self._seconds += time.monotonic() - begin
        self._ended["found something" if verdict.findings else verdict.ended] += 1
        again = f"python benchmarks/faults.py --classes {self.kind.name} --seed {seed} {number}"
        for line in verdict.findings:
            self._found.append({"finding": line, "case": str(step), "repeat": again})
            print(f"FOUND {step}: {line}\n      {again}", file=sys.stderr, flush=True)
        world.clean()

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        return {
            "class": self.kind.name,
            "about": self.kind.about,
            "steps": len(self._steps or ()),
            "cases": sum(self._ended.values()),
            "seconds": round(self._seconds, 1),
            "ended": dict(self._ended.most_common()),
            "findings": self._found,
        }


def table(figures: dict[str, Any]) -> str:
    """Markdown of what a run of the machine came to."""
    lines = [
        "| class | faults | cases of a pass | tried | seconds a case | cases that found something |",
        "|---|---|---|---|---|---|",
    ]
    for row in figures["classes"]:
        each = row["seconds"] / max(row["cases"], 1)
        lines.append(
            f"| `{row['class']}` | {row['about']} | {row['steps']:,} | {row['cases']:,} | {each:.1f} "
            f"| {len({found['repeat'] for found in row['findings']})} |"
        )
    return "\n".join(lines)


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", nargs="+", choices=CLASSES, metavar="NAME", help=f"of {', '.join(CLASSES)}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step", type=int, help="this step of one class alone")
    parser.add_argument("--fixed", type=int, help="this step of the fixed part of one class")
    parser.add_argument("--hours", type=float, help="steps by chance, seed after seed, until then")
    parser.add_argument("--whole", action="store_true", help="every step of a pass, once")
    parser.add_argument("--json", type=Path, help="write the figures, and every finding, to this file")
    parser.add_argument("--table", type=Path, metavar="JSON", help="print the table of such a file, and stop")
    return parser
