"""The benchmark: iclperm against the tools in use, each in a process of its own, on one machine and in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from iclperm.base.files import write_whole
from iclperm.bench import cards
from iclperm.bench.cases import CASES
from iclperm.bench.contenders import PEER_CONTENDERS
from iclperm.bench.environments import PeerError, environment, peers_apart
from iclperm.bench.figure import block_plot
from iclperm.bench.machine import available_cores
from iclperm.bench.measure import BenchOptions, run
from iclperm.bench.models import MODELS
from iclperm.bench.rows import Row, read_rows
from iclperm.bench.studies import StudyCase
from iclperm.bench.table import render
from iclperm.errors import ConfigError
from iclperm.report.figures import save
from iclperm.study.study import Study

__all__ = [
    "BenchOptions",
    "PeerError",
    "Row",
    "listing",
    "options",
    "prepare",
    "read_rows",
    "render",
    "run",
    "write_beside",
]

_ROUNDS = {"repeats": 3, "scale": None}
_QUICK = {"repeats": 1, "scale": 0.05}


def options(
    *,
    quick: bool,
    whole: bool,
    threads: int | None,
    study: Study | None = None,
    name: str = "",
    cases: str | None = None,
    models: str | None = None,
    dtypes: str | None = None,
    **given: Any,
) -> BenchOptions:
    """From the words of the command line; names have commas between them, or are ``all``.

    ``quick`` chooses one round of a twentieth, on the bundled model, where nothing else is given.
    Of a ``study``, which is called ``name``, its own model and dtype are the default; else a case is measured.
    """
    for key, value in (_QUICK if quick else _ROUNDS).items():
        given[key] = value if given.get(key) is None else given[key]
    known = {"float32": None, "bfloat16": None}
    case = None
    if study is not None:
        if cases is not None:
            raise ConfigError(f"--case is {cases!r}, but a study is measured; leave one of them out")
        if models is not None:
            study = study.model_copy(update={"model": models, "revision": None, "adapter": None, "endpoint": None})
        case = StudyCase.of(study, name)
        dtypes = dtypes or ("bfloat16" if study.dtype == "bfloat16" and not case.new_tokens else "float32")
    return BenchOptions(
        cases=_names(cases or "monte_carlo", CASES),
        models=_names(models or ("demo" if quick else "qwen2-25m"), MODELS),
        dtypes=_names(dtypes or "float32,bfloat16", known),
        peers=_peers(given.pop("peers")),
        is_whole=whole,
        threads=threads or available_cores(),
        study=case,
        **given,
    )


def write_beside(rows: Sequence[Row], out: Path) -> list[Path]:
    """The table as Markdown and a figure of each block, beside the file of the rows; returns their paths."""
    table = out.with_suffix(".md")
    write_whole(table, render(rows).encode(), durable=False)
    written = [table]
    blocks = [list(block) for _, block in groupby(sorted(rows, key=lambda row: row.block), key=lambda row: row.block)]
    for block in blocks:
        if (plot := block_plot(block)) is not None:
            words = "" if len(blocks) == 1 else f"-{'-'.join(block[0].block[:3])}".replace("/", "-")
            written += save(plot, out.with_name(out.stem + words))
    return written


def prepare(names: str, say: Callable[[str], None], device: str = "cpu") -> bool:
    """Make the environments of these peers on a device; whether all could be made.

    A failure is said, and the next one is tried. Raises `ConfigError` for a device that is none.
    """
    cards.refuse_unknown(device)
    is_done = True
    for wanted in [environment(name, device) for name in _names(names, peers_apart())]:
        try:
            wanted.prepare(say)
        except PeerError as error:
            say(f"error: {error}")
            is_done = False
    return is_done


def listing(device: str) -> str:
    """Cases, models and peers, one a line; raises `ConfigError` for a device that is none."""
    cards.refuse_unknown(device)
    obstacles = {name: peer.obstacle(device) for name, peer in PEER_CONTENDERS.items()}
    peers = {name: f"{peer.what}{_doubt(obstacles[name])}" for name, peer in PEER_CONTENDERS.items()}
    scales = {name: f"{model.scale:.3g} of a case" for name, model in MODELS.items()}
    parts = {"cases": {name: case.what for name, case in CASES.items()}, "models": scales, "peers": peers}
    return "\n".join(
        line for title, lines in parts.items() for line in (title, *(f"  {k:<18} {v}" for k, v in lines.items()))
    )


def _doubt(obstacle: str | None) -> str:
    return "" if obstacle is None else f" - not here: {obstacle}"


def _peers(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else _names(text, PEER_CONTENDERS)


def _names(text: str, known: Iterable[str]) -> tuple[str, ...]:
    return tuple(known) if text == "all" else tuple(name.strip() for name in text.split(",") if name.strip())
