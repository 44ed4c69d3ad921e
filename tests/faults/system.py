"""Every single operation of a run on its folder refused by the system in turn, or the last that the process did."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from faults.child import ALL_WRITES, KILL_AFTER, KILL_BEFORE, LASTING, READ, Fault, run
from faults.judge import FaultClass, Verdict, judged
from faults.kills import continued, items_of, same_digest
from faults.world import World

HOW = {
    "ENOSPC, from then on": (ALL_WRITES | LASTING, errno.ENOSPC),
    "EROFS, from then on": (ALL_WRITES | LASTING, errno.EROFS),
    "EIO": (ALL_WRITES, errno.EIO),
    "EACCES": (ALL_WRITES, errno.EACCES),
    "killed before": (ALL_WRITES, KILL_BEFORE),
    "killed after": (ALL_WRITES, KILL_AFTER),
}
HOW_READ = {"EIO at reading": (READ, errno.EIO), "EACCES at reading": (READ, errno.EACCES)}
STUDIES = ("sensitivity", "grown", "search", "transfer")
LOOKS = ("status", "verify", "report", "export")


class Refusal(NamedTuple):
    study: str
    state: str
    how: str
    at: int
    look: str = "run"


def steps(world: World) -> Sequence[Refusal]:
    """Each operation of each study, by every way of failing; reading also of a half-finished folder, and of looks."""
    found = []
    for study in STUDIES:
        for at in range(world.extent(study)[-1][0]):
            found += [Refusal(study, "", how, at) for how in HOW]
        for state in ("half", "finished"):
            looks = ("run", *(LOOKS if state == "finished" else LOOKS[:2]))
            for look in looks if study in STUDIES[:2] else ("run",):
                for at in range(world.num_reads(study, state, look)):
                    found += [Refusal(study, state, how, at, look) for how in HOW_READ]
    return found


def check(world: World, step: Refusal, _random: Random) -> Verdict:
    """One operation fails; then the same command without a fault."""
    kinds, how = {**HOW, **HOW_READ}[step.how]
    fault = Fault(kinds, step.at, how)
    place = world.copy(step.study, step.state) if step.state else world.place()
    folder, verdict = place / "run", Verdict()
    if step.look != "run":
        done = run(world.look(step.look, folder), place, world.scratch, fault)
        verdict.add(step.look, judged(done, is_check=step.look in LOOKS[:2]))
        if done.code == 0 and step.look == "verify" and world.digest(step.study).split(":")[-1] not in done.out:
            verdict.findings.append("verify: the digest is another")
        verdict.ended = f"exit code {done.code}"
        if step.state == "finished":
            verdict.findings += same_digest(world, step.study, folder)
        return verdict
    works = world.sessions(step.study, folder)
    if not step.state:
        for work in works[:-1]:
            run(work, folder, world.scratch)
    there = items_of(folder)
    done = run(works[-1], folder, world.scratch, fault)
    may_say = (0, 1, 3) if step.how in HOW_READ else (0, 3)
    verdict.add("run", judged(done, may_say=may_say))
    verdict.ended = f"exit code {done.code}, then the same digest" if done.code is not None else "killed, then the same"
    if how > 0 and len(done.operations) <= step.at:
        verdict.ended = "never came so far"
    after = items_of(folder)
    verdict.findings += [f"{name} is gone or changed" for name, raw in there.items() if after.get(name) != raw]
    return continued(world, step.study, folder, verdict)


FIXED = (
    *(Refusal("sensitivity", "", how, at) for how in HOW for at in (5, 62, 78)),
    *(Refusal("sensitivity", "finished", "EIO at reading", 3, look) for look in ("run", *LOOKS)),
    Refusal("transfer", "", "killed after", 30),
)
SYSTEM = FaultClass("system", "each write, sync, rename, unlink and read refused, or the last one", steps, check, FIXED)
