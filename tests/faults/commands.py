"""Other programs that look for faults by chance: each gets a seed, and its exit code says whether it found any."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

from faults.child import Outcome
from faults.judge import FaultClass, Verdict, judged
from faults.world import World

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS: Mapping[str, tuple[str, ...]] = {
    "tests/fuzz_core.py": ("--seed", "{seed}", "--cases", "2000"),  # every binding of the C++ core
}
"""Scripts and their arguments; one that is not there is left out."""
LIMIT_S = 600.0
_RUNS = 20


class Program(NamedTuple):
    script: str
    run: int


def steps(_world: World) -> Sequence[Program]:
    """Each program several times, by other seeds."""
    return [Program(script, number) for number in range(_RUNS) for script in PROGRAMS if (ROOT / script).is_file()]


def check(world: World, step: Program, random: Random) -> Verdict:
    """One program with a seed of its own."""
    given = [argument.format(seed=random.randrange(1 << 30)) for argument in PROGRAMS[step.script]]
    environment = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    try:
        done = subprocess.run(
            [sys.executable, "-X", "faulthandler", ROOT / step.script, *given],
            cwd=ROOT, env=environment, timeout=LIMIT_S, capture_output=True, text=True, errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Verdict("hangs", [f"{step.script} {' '.join(given)}: still at work after {LIMIT_S:.0f} s"])
    code = done.returncode
    outcome = Outcome(None if code < 0 else code, max(0, -code), done.stdout[-4000:], done.stderr[-4000:])
    return Verdict("nothing found", [f"{' '.join(given)}: {line}" for line in judged(outcome, may_say=(0,))])


PROGRAMS_CLASS = FaultClass("programs", "programs of their own, such as the fuzzer of the C++ core", steps, check)
