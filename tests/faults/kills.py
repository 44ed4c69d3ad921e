"""SIGKILL at any moment, once or several times, to one, two or three processes on one folder; then the same command."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

from faults.child import KILL_AFTER, KILL_BEFORE, Fault, run, started
from faults.judge import FaultClass, Verdict, judged, keys_in
from faults.world import STUDIES, Work, World

_ROUNDS = 6


class Kill(NamedTuple):
    study: str
    processes: int
    round: int


def steps(_world: World) -> Sequence[Kill]:
    """Every kind of study, by one, two and three processes, several times."""
    return [Kill(study, processes, number) for number in range(_ROUNDS) for processes in (1, 2, 3) for study in STUDIES]


def check(world: World, step: Kill, random: Random) -> Verdict:
    """Kills at a random operation of the folder or a random call of a function, as often as the step says."""
    verdict, folder = Verdict(), world.place() / "run"
    for number, work in enumerate(world.sessions(step.study, folder)):
        extent = world.extent(step.study)[number]
        for _ in range(random.randint(1, 3)):
            killed_once(world, step.processes, work, folder, extent, random, verdict)
    return continued(world, step.study, folder, verdict)


def killed_once(
    world: World,
    processes: int,
    work: Work,
    folder: Path,
    extent: tuple[int, int],
    random: Random,
    verdict: Verdict,
) -> None:
    """Processes that begin together, each killed somewhere; what one of them had finished stays."""
    there = items_of(folder)
    children = [
        started(work, folder, world.scratch, _kill(extent, random), name=f"child-{number}")
        for number in range(processes)
    ]
    for number, child in enumerate(children):
        verdict.add(f"process {number}", judged(child.outcome(60), may_say=(0,)))
    after = items_of(folder)
    verdict.findings += [f"{name} is gone or changed" for name, raw in there.items() if after.get(name) != raw]
    if (folder / "plan.json").exists():
        verdict.add("verify", judged(world.call(["verify", str(folder)], folder), may_say=(0, 3), is_check=True))


def continued(world: World, study: str, folder: Path, verdict: Verdict) -> Verdict:
    """The same command without a fault, which must lead to the digest of the undisturbed run."""
    work = world.sessions(study, folder)[-1]
    verdict.add("continued", judged(run(work, folder, world.scratch), may_say=(0,)))
    verdict.findings += same_digest(world, study, folder)
    verdict.findings += keys_in(folder)
    return verdict


def same_digest(world: World, study: str, folder: Path) -> list[str]:
    """Empty where a folder has the digest of the undisturbed run."""
    wanted, found = world.digest(study), world.found_digest(folder)
    return [] if found == wanted else [f"the digest is {found or 'none'}, undisturbed it is {wanted}"]


def items_of(folder: Path) -> dict[str, bytes]:
    """The finished parts in a folder, or in those of its runs, with their bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("items/*.parquet")}


def _kill(extent: tuple[int, int], random: Random) -> Fault:
    operations, calls = extent
    if random.random() < 0.5:
        return Fault(calls=random.randint(1, calls))
    return Fault(at=random.randrange(operations), how=random.choice([KILL_BEFORE, KILL_AFTER]))


FIXED = (Kill("sensitivity", 1, 0), Kill("grown", 2, 0), Kill("transfer", 3, 0))
KILLS = FaultClass("kills", "SIGKILL at any moment, one to three processes", steps, check, FIXED)
