"""The claim, as far as one process and one folder can break it; what breaks it is a line."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from faults.child import Outcome
from faults.world import SENTINEL, World

DOCUMENTED = (0, 1, 2, 3)
_SHOWN = 240
_REMEDY = re.compile(r";|\bshould (be|have)\b|did you mean|--help|: use |\bor use\b")


@dataclass
class Verdict:
    """What a case came to: how it ended, and each way in which that is not what was promised."""

    ended: str = "same digest"
    findings: list[str] = field(default_factory=list)

    def add(self, about: str, findings: Sequence[str]) -> None:
        """Findings of one of several steps of a case."""
        self.findings += [f"{about}: {line}" for line in findings]


@dataclass(frozen=True)
class FaultClass:
    """One class of faults: its ``steps`` in order, each a choice that can be printed, and what tries one of them.

    ``check`` gets the world, the step and a generator of the case's own; ``fixed`` are those that the test suite tries.
    """

    name: str
    about: str
    steps: Callable[[World], Sequence[Any]]
    check: Callable[[World, Any, Random], Verdict]
    fixed: Sequence[Any] = ()


def judged(outcome: Outcome, *, may_say: Sequence[int] = DOCUMENTED, is_check: bool = False) -> list[str]:
    """What is wrong with the end of a process that was not killed: of a check (status, verify) its words are stdout."""
    return list(_judged(outcome, may_say, is_check))


def _judged(outcome: Outcome, may_say: Sequence[int], is_check: bool) -> Iterator[str]:
    said = outcome.out + outcome.err
    if SENTINEL in said:
        yield "the key was said"
    if outcome.outside:
        yield f"changed outside the folder: {', '.join(outcome.outside[:4])}"
    if outcome.is_overtime:
        yield f"hangs: still at work after {outcome.seconds:.0f} s"
        return
    if outcome.code is None:
        if not outcome.was_killed:
            yield f"died of signal {outcome.signal}: {_last(said)}"
        return
    if "Traceback (most recent call last)" in said:
        yield f"a traceback, code {outcome.code}: {_last(said)}"
        return
    if outcome.code not in may_say:
        yield f"exit code {outcome.code}, may be {', '.join(map(str, may_say))}: {_last(said)}"
    lines = [line for line in outcome.err.splitlines() if line.startswith(("error: ", "stopped; "))]
    if any(line.startswith("error: unexpected") for line in lines):
        yield f"an unexpected error: {_last(outcome.err)}"
    elif outcome.code and not (is_check and outcome.out and not lines):
        if len(lines) != 1:
            yield f"{len(lines)} error lines at exit code {outcome.code}: {_last(said)}"
        elif not _REMEDY.search(lines[0]):
            yield f"no remedy: {lines[0][:_SHOWN]}"
    if re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", said):
        yield f"control characters reach the terminal: {_last(said)!r}"


def keys_in(folder: Path) -> list[str]:
    """The files below a folder that hold the key."""
    found = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return [
        f"the key is in {path.relative_to(folder)}"
        for path in found
        if path.stat().st_size < 1 << 26 and SENTINEL.encode() in path.read_bytes()
    ]


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What is not as it was, of two of `World.snapshot`."""
    return [
        f"outside the folder {path} {'is gone' if path not in after else 'is new' if path not in before else 'changed'}"
        for path in sorted({*before, *after})
        if before.get(path) != after.get(path)
    ]


def _last(text: str) -> str:
    """The line that tells most: of damage, else the last."""
    lines = text.strip().splitlines()
    told = [line for line in lines if line.startswith(("damaged: ", "OSError", "error: unexpected"))] or lines[-1:]
    return told[0][:_SHOWN] if told else "nothing was said"
