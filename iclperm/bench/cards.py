"""The one card that a benchmark on a GPU runs on: whether it is there, what it is, and how all see it alone."""

from __future__ import annotations

import re
from typing import Any

from iclperm.errors import ConfigError

DEVICES = re.compile(r"cpu|cuda(:\d+)?")
"""The devices that contenders are measured on."""


def refuse_unknown(device: str) -> None:
    """Raises `ConfigError` for a device that nothing is measured on."""
    if not DEVICES.fullmatch(device):
        raise ConfigError(f"device is {device!r}; the benchmark runs on cpu, cuda or cuda:0, cuda:1, ...")


def is_cuda(device: str) -> bool:
    return device.startswith("cuda")


def absence(device: str) -> str | None:
    """Why a device is not to be had on this machine; None if it is there."""
    if not is_cuda(device):
        return None
    import torch

    from iclperm.engine.load import gpus

    number = _number(device)
    if number < len(gpus()):
        return None
    return f"there is no GPU {number} that torch {torch.__version__} can use on this machine"


def visible(device: str) -> dict[str, str]:
    """The variable by which a process sees the card alone, as its first: not all contenders can be told a number."""
    if not is_cuda(device):
        return {}
    from iclperm.engine.load import gpus

    return {"CUDA_VISIBLE_DEVICES": gpus()[_number(device)]}


def within(device: str) -> str:
    """What a process that sees the card alone calls it."""
    return "cuda" if is_cuda(device) else device


def about(device: str) -> dict[str, Any]:
    """The card, its memory, and the versions its bits may depend on; empty for a CPU."""
    if not is_cuda(device):
        return {}
    import torch

    from iclperm.engine.device import gpu_versions

    place = torch.device("cuda", _number(device))
    return {"gpu": torch.cuda.get_device_name(place), "gpu_memory_bytes": memory_bytes(device), **gpu_versions(place)}


def memory_bytes(device: str) -> int:
    """All the memory of the card; 0 for a CPU."""
    if not is_cuda(device):
        return 0
    import torch

    from iclperm.engine.memory import device_bytes

    return device_bytes([torch.device("cuda", _number(device))])


def _number(device: str) -> int:
    return int(device.partition(":")[2] or 0)
