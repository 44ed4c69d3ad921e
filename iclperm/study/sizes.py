"""How much memory an engine may use: bytes, or a share of what is free; no torch unless a device is asked."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from iclperm.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

Budget: TypeAlias = int | float | str
"""Bytes (an int, or text such as "4GiB" and "500MB"), or a share of what is free (0.5, "50%")."""

_FORM = re.compile(r"(\d+(?:\.\d+)?)\s*(%|[kmgt]i?b|b)?", re.IGNORECASE)
_POWERS = "bkmgt"
_CONTROL_GROUP = Path("/sys/fs/cgroup")
_SHARE_OF_DEVICE = 0.85


def parse_budget(given: Budget) -> int | float:
    """Bytes as an int >= 1, a share of what is free as a float in (0, 1]; raises ValueError for anything else."""
    value = _number(given) if isinstance(given, str) else given
    is_share = isinstance(value, float) and 0 < value <= 1
    is_size = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if value is None or not (is_share or is_size):
        raise ValueError('give bytes, as 2000000000 or "2GB" or "2GiB", or a share of what is free, as 0.5 or "50%"')
    return value


def resolve_budget(given: Budget, device: torch.device, held: int = 0) -> int:
    """A budget in bytes; of ``held`` bytes that are in use already, a share counts its part as if they were free.

    Raises RequestError for what is no budget.
    """
    try:
        budget = parse_budget(given)
    except ValueError as error:
        raise RequestError(f"memory_budget is {given!r}; {error}") from None
    return budget if isinstance(budget, int) else int(budget * (free_bytes(device) + held))


def free_bytes(device: torch.device) -> int:
    """What is free on a device; of the host, what the system and this process's control group leave."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    return min(_free_on_host(), _free_in_group())


def room_to_generate(budget: int | None, devices: Iterable[torch.device]) -> int:
    """Bytes that generation may fill: the budget given, else most of the accelerators' memory; 0 if nothing bounds it.

    All of a pool is allocated on an accelerator; what is free there would make results depend on other processes.
    """
    return budget or int(_SHARE_OF_DEVICE * device_bytes(devices))


def device_bytes(devices: Iterable[torch.device]) -> int:
    """All the memory that accelerators have, in use or not; 0 for a host."""
    import torch

    cards = [device for device in devices if device.type == "cuda"]
    return sum(int(torch.cuda.get_device_properties(card).total_memory) for card in cards)


def bytes_in_words(size: int) -> str:
    """A size in MiB, or in GiB from one on."""
    return f"{size / (1 << 30):.2f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.1f} MiB"


def _number(text: str) -> int | float | None:
    """The value of a text; None if it has none."""
    if (found := _FORM.fullmatch(text.strip())) is None:
        return None
    number, unit = found[1], (found[2] or "").lower()
    if unit == "%":
        return float(number) / 100
    if not unit:
        return float(number) if "." in number else int(number)
    base = 1024 if "i" in unit else 1000
    return int(float(number) * base ** _POWERS.index(unit[0]))


def _free_on_host() -> int:
    info = Path("/proc/meminfo")
    found = re.search(r"^MemAvailable:\s+(\d+) kB", info.read_text(), re.MULTILINE) if info.exists() else None
    # Where the system does not tell what is available, all of its memory counts as free.
    return int(found[1]) * 1024 if found else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _free_in_group() -> int:
    most, now = _CONTROL_GROUP / "memory.max", _CONTROL_GROUP / "memory.current"
    if not (most.exists() and now.exists()) or (limit := most.read_text().strip()) == "max":
        return 1 << 62
    return max(0, int(limit) - int(now.read_text()))
