"""How many stages ahead kernels load: as shipped, or as `iclperm doctor` found it faster on this very device.

Stages decide when a kernel loads, never what it computes: a choice is kept only where it gave the same bits. So results
name none, and a file that is lost, damaged or of another device costs nothing but time.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from iclperm.base.environment import cache_folder
from iclperm.base.files import read_given, write_whole
from iclperm.engine.device import driver_version
from iclperm.engine.kernels.triton_launch import installed_version
from iclperm.errors import IclpermError, is_out_of_memory, said_by

NAME = "kernels.json"
"""In the user's cache folder: ``{"format": 1, "devices": [{"is": {...}, "stages": {variant: stages}}]}``."""
MOST_STAGES = 8
_FORMAT = 1
_MOST_BYTES = 1 << 20
_MOST_DEVICES = 32


@dataclass
class _Trial:
    stages: int | None
    asked: dict[str, int] = field(default_factory=dict)


_trial: ContextVar[_Trial | None] = ContextVar("stages that are tried", default=None)


def num_stages(variant: str, shipped: int, device: torch.device) -> int:
    """The stages of a variant of a kernel at launch: those that are tried, else those kept, else those shipped."""
    trial = _trial.get()
    if trial is not None:
        trial.asked[variant] = shipped
        return trial.stages or shipped
    return _kept(device).get(variant, shipped) if device.type == "cuda" else shipped


def launched(variant: str, shipped: int, device: torch.device, launch: Callable[[int], object]) -> None:
    """Launches a variant of a kernel with its `num_stages`; raises what the launch raises.

    A kept choice that the device does not launch, as of a file that was changed, is passed over from then on, with a
    line, and the shipped one launched in its place.
    """
    stages = num_stages(variant, shipped, device)
    try:
        launch(stages)
    except Exception as error:
        if stages == shipped or _trial.get() is not None or is_out_of_memory(error):
            raise
        launch(shipped)
        _kept(device).pop(variant, None)
        warnings.warn(
            f"{NAME} in the cache folder keeps {stages} stages for {variant}, which {device} does not launch "
            f"({said_by(error)}): it runs as shipped; iclperm doctor chooses anew",
            stacklevel=3,
        )


@contextmanager
def trying(stages: int | None) -> Iterator[Mapping[str, int]]:
    """Within, every kernel that leaves its stages open is launched with so many, or as shipped; those that were, with
    the stages shipped, are in what this gives."""
    trial = _Trial(stages)
    token = _trial.set(trial)
    try:
        yield trial.asked
    finally:
        _trial.reset(token)


def keep(device: torch.device, stages: Mapping[str, int]) -> Path:
    """Keeps what was found on a device beside what is kept of others; raises `OSError`, or `RuntimeError` for a user
    without a home."""
    place, own = cache_folder() / NAME, identity(device)
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        entries = _entries(place)
    except (OSError, ValueError):
        entries = []
    mine: dict[str, int] = next((entry["stages"] for entry in entries if entry["is"] == own), {})
    others = [entry for entry in entries if entry["is"] != own][-_MOST_DEVICES + 1 :]
    content = {"format": _FORMAT, "devices": [*others, {"is": own, "stages": {**mine, **stages}}]}
    write_whole(place, json.dumps(content, indent=1).encode() + b"\n")
    _kept.cache_clear()
    return place


@cache
def identity(device: torch.device) -> Mapping[str, str]:
    """What a choice of stages holds for: a kind of device with its driver, the compiler's versions and our sources."""
    major, minor = torch.cuda.get_device_capability(device)
    return {
        "device": torch.cuda.get_device_name(device),
        "capability": f"{major}.{minor}",
        "driver": driver_version() or "unknown",
        "torch": torch.__version__,
        "triton": installed_version() or "none",
        "kernels": _sources(),
    }


@cache
def _sources() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("triton_*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@cache
def _kept(device: torch.device) -> dict[str, int]:
    """What is kept of a device, by variant, but what it did not launch; nothing, with a warning, where the file is not
    understood."""
    try:
        place = cache_folder() / NAME
        entries = _entries(place)
    except (FileNotFoundError, NotADirectoryError, RuntimeError):  # nothing was kept yet; no home
        return {}
    except (OSError, ValueError, IclpermError) as error:
        warnings.warn(
            f"{NAME} in the cache folder is not understood ({error}) and is passed over: kernels run as shipped; "
            "iclperm doctor writes it anew",
            stacklevel=2,
        )
        return {}
    kept: dict[str, int] = next((entry["stages"] for entry in entries if entry["is"] == identity(device)), {})
    return kept


def _entries(place: Path) -> list[dict[str, Any]]:
    """The entries of a file; raises `ValueError` in a few words for what is none of ours."""
    try:
        content = json.loads(read_given(place, _MOST_BYTES))
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ValueError(f"it is not of format {_FORMAT}")
    entries = content.get("devices")
    if not isinstance(entries, list) or not all(map(_is_entry, entries)):
        raise ValueError("it holds no list of devices with their stages")
    return entries


def _is_entry(entry: object) -> bool:
    return (
        isinstance(entry, dict)
        and entry.keys() == {"is", "stages"}
        and isinstance(entry["is"], dict)
        and isinstance(entry["stages"], dict)
        and all(type(stages) is int and 1 <= stages <= MOST_STAGES for stages in entry["stages"].values())
    )
