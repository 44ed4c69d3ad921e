"""Workers against one process: the same study by one process of one thread, then by workers of one thread each.

``python benchmarks/workers.py [--workers 2] [--model FOLDER] [--repeats 3]``. Each run is a process of its own; its
seconds are those from the first answer that is waited for to the last, without loading, and those of the whole call
beside them. The parts of all runs must be the same bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from _machine import machine

BAR = 1.8
RUN = """
import json, sys, time
import iclperm
from iclperm.runs.limits import WorkLimits

choices = json.loads(sys.argv[1])
workers, out, told = choices.pop("workers"), sys.argv[2], []
began = time.perf_counter()
limits = WorkLimits(unit_tokens=(8192, 8192))
iclperm.run(iclperm.Study(**choices), out, workers=workers, limits=limits,
            progress=lambda done, total: told.append((done, time.perf_counter())))
print(json.dumps({"answering": told[-1][1] - told[0][1], "all": time.perf_counter() - began, "parts": told[-1][0]}))
"""


def seconds_of(workers: int | None, out: Path, given: argparse.Namespace) -> dict[str, float]:
    """What one run took; ``workers`` None is one process."""
    choices = {"model": given.model, "sets": given.sets, "permutations": 8, "shots": [0, 2, 4, 8],
               "queries": given.queries, "seed": 1, "workers": workers}  # fmt: skip
    ran = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(choices), str(out)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return {name: float(value) for name, value in json.loads(ran.stdout).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--sets", type=int, default=8)
    parser.add_argument("--queries", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {"one process": [], f"{given.workers} workers": []}
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for repeat in range(given.repeats):  # in turn, so that what else the machine does meets both alike
            for name, workers in zip(found, (None, given.workers), strict=True):
                out = Path(folder) / f"{name} {repeat}"
                found[name].append(seconds_of(workers, out, given))
                files.append(sorted(path.name for path in (out / "items").iterdir()))
        assert all(each == files[0] for each in files), "parts differ"
    medians = {
        name: {phase: statistics.median(run[phase] for run in runs) for phase in runs[0]}
        for name, runs in found.items()
    }
    alone, together = medians.values()
    ratio = alone["answering"] / together["answering"]
    load = os.getloadavg()[0]
    print(json.dumps(machine()))
    for name, each in medians.items():
        print(f"{name:12} {each['answering']:7.1f} s answering {each['parts']:.0f} parts, {each['all']:7.1f} s in all")
    print(f"{ratio:.2f} x the speed, load average {load:.1f}: the bar is {BAR} for 2 workers on 2 quiet cores")
    if given.json:
        given.json.write_text(
            json.dumps({"machine": machine(), "load": load, "ratio": ratio, **found}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
