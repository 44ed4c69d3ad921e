"""The benchmark: iclperm against the tools in use, each in a process of its own, on one machine and in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from iclperm.bench import cards
from iclperm.bench.cases import CASES
from iclperm.bench.contenders import PEER_CONTENDERS
from iclperm.bench.environments import PeerError, environment, peers_apart
from iclperm.bench.measure import BenchOptions, Row, available_cores, read_rows, run
from iclperm.bench.models import MODELS
from iclperm.bench.table import render

__all__ = ["BenchOptions", "PeerError", "Row", "listing", "options", "prepare", "read_rows", "render", "run"]

_QUICK = {"models": "demo", "repeats": 1, "scale": 0.05}


def options(*, quick: bool, whole: bool, threads: int | None, **given: Any) -> BenchOptions:
    """From the words of the command line; names have commas between them, or are ``all``."""
    given |= _QUICK if quick else {}
    dtypes = {"float32": None, "bfloat16": None}
    return BenchOptions(
        cases=_names(given.pop("cases"), CASES),
        models=_names(given.pop("models"), MODELS),
        dtypes=_names(given.pop("dtypes"), dtypes),
        peers=_peers(given.pop("peers")),
        is_whole=whole,
        threads=threads or available_cores(),
        **given,
    )


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
