"""What every benchmark prints beside its figures: the machine, the versions, and quantiles of repeated runs."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """Processor, cores and versions."""
    from iclperm.bench.machine import machine as host  # after a benchmark has settled its environment

    versions = {name: importlib.metadata.version(name) for name in ("iclperm", "torch", "transformers", "numpy")}
    return {**host(), **versions}


def timed(work: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Wall seconds of ``repeats`` runs: minimum, median, maximum."""
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return {"min": min(seconds), "median": statistics.median(seconds), "max": max(seconds)}


def options(description: str) -> argparse.ArgumentParser:
    """A parser with the options all benchmarks share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--repeats", type=int, default=5, help="runs of each case")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser


def publish(name: str, figures: list[dict[str, Any]], path: Path | None) -> None:
    """Print a table of the figures under the machine that made them; write them as JSON if asked."""
    about = machine()
    print(f"# {name}")
    print("  ".join(f"{key}={value}" for key, value in about.items()))
    columns = list(dict.fromkeys(key for row in figures for key in row))
    table = [columns, *([_text(row.get(column)) for column in columns] for row in figures)]
    widths = [max(len(line[i]) for line in table) for i in range(len(columns))]
    for line in table:
        print(
            "  ".join(
                cell.rjust(width) if i else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
        )
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"benchmark": name, "machine": about, "figures": figures}, indent=1) + "\n")


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.3e}"
    return f"{value:,}" if isinstance(value, int) else "" if value is None else str(value)
