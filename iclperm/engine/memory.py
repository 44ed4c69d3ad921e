"""How much memory there is and may be used, and what happens when it runs out."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from iclperm.engine.plan import Plan
from iclperm.engine.shapes import padded_rows
from iclperm.errors import OutOfMemory, RequestError
from iclperm.study.sizes import Budget, bytes_in_words, parse_budget

CONTROL_GROUP = Path("/sys/fs/cgroup")
_SHARE_OF_DEVICE = 0.85


def resolve_budget(given: Budget, device: torch.device, held: int = 0, control_group: Path = CONTROL_GROUP) -> int:
    """A budget in bytes; of ``held`` bytes that are in use already, a share counts its part as if they were free.

    Raises RequestError for what is no budget. ``control_group`` is where Linux keeps this process's limits.
    """
    try:
        budget = parse_budget(given)
    except ValueError as error:
        raise RequestError(f"memory_budget is {given!r}; {error}") from None
    return budget if isinstance(budget, int) else int(budget * (free_bytes(device, control_group) + held))


def refuse_budget(num_devices: int, *, plain: bool) -> None:
    """Raises RequestError where there is nothing that a budget could bound: it is one of packs on one device."""
    if plain:
        raise RequestError("memory_budget bounds the packs of a tree, and plain=True has none; leave it out")
    if num_devices > 1:
        raise RequestError("memory_budget bounds what one device holds, and the model lies on several; leave it out")


def session_budget(given: Budget | None, device: torch.device, control_group: Path = CONTROL_GROUP) -> int:
    """What the keys and values of a session may take, in bytes: by default half of what is free.

    Raises RequestError for what is no budget, and for more than there is.
    """
    budget = resolve_budget("50%" if given is None else given, device, control_group=control_group)
    if budget > (most := all_bytes(device, control_group)):
        raise RequestError(
            f"memory_budget is {given!r}, and {device} has {bytes_in_words(most)}; give less, or a share"
        )
    return budget


def all_bytes(device: torch.device, control_group: Path = CONTROL_GROUP) -> int:
    """All the memory of a device, in use or not; of the host, what this process's control group may have."""
    if device.type == "cuda":
        return device_bytes([device])
    most, host = control_group / "memory.max", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = most.read_text().strip() if most.exists() else "max"
    return host if limit == "max" else min(host, int(limit))


def free_bytes(device: torch.device, control_group: Path = CONTROL_GROUP) -> int:
    """What is free on a device; of the host, what the system and this process's control group leave."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(_free_on_host(), _free_in_group(control_group))


def room_to_generate(budget: int | None, devices: Iterable[torch.device]) -> int:
    """Bytes that generation may fill: the budget given, else most of the accelerators' memory; 0 if nothing bounds it.

    All of a pool is allocated on an accelerator; what is free there would make results depend on other processes.
    """
    return budget or int(_SHARE_OF_DEVICE * device_bytes(devices))


def device_bytes(devices: Iterable[torch.device]) -> int:
    """All the memory that accelerators have, in use or not; 0 for a host."""
    cards = [device for device in devices if device.type == "cuda"]
    return sum(int(torch.cuda.get_device_properties(card).total_memory) for card in cards)


def _free_on_host() -> int:
    info = Path("/proc/meminfo")
    found = re.search(r"^MemAvailable:\s+(\d+) kB", info.read_text(), re.MULTILINE) if info.exists() else None
    # Where the system does not tell what is available, all of its memory counts as free.
    return int(found[1]) * 1024 if found else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _free_in_group(control_group: Path) -> int:
    most, now = control_group / "memory.max", control_group / "memory.current"
    if not (most.exists() and now.exists()) or (limit := most.read_text().strip()) == "max":
        return 1 << 62
    return max(0, int(limit) - int(now.read_text()))


class PackLimit:
    """The largest packs that memory is known to hold; one for the life of an engine.

    ``pack_tokens`` is None until memory first runs out. ``may_shrink`` says that the size of a pack changes no bit;
    ``peak`` predicts the bytes that a plan takes in packs of a size on ``device``.
    """

    def __init__(self, peak: Callable[[Plan, int], int], device: torch.device) -> None:
        self._peak, self._device = peak, device
        self.pack_tokens: int | None = None
        self.may_shrink = False

    def fit(self, plan: Plan) -> Plan:
        """The plan in packs within the limit: itself if they are."""
        if self.pack_tokens is None or plan.pack_tokens <= self.pack_tokens:
            return plan
        return plan.repacked(self.pack_tokens)

    def shrink(self, plan: Plan, unit: int, tried: int) -> None:
        """Halve the packs of a unit that was tried in packs of up to ``tried`` tokens.

        Raises OutOfMemory if a matrix product would get no smaller, or if smaller packs might change results.
        """
        halved = padded_rows(tried // 2, self._device)
        if halved >= padded_rows(tried, self._device):
            raise OutOfMemory(
                f"unit {unit} does not fit in memory even in packs of {tried} tokens, the smallest there are "
                f"({self._peak(plan, halved)} bytes are foretold, the model's weights among them); "
                "use fewer shots, a smaller model or dtype, or a machine with more memory"
            )
        if not self.may_shrink:
            budget = self._peak(plan, halved)
            raise OutOfMemory(
                f"unit {unit} does not fit in memory in packs of {tried} tokens, and smaller ones are not known to "
                f"give the same bits; start anew with pack_tokens={halved}, a memory_budget of at most {budget} bytes, "
                "fewer shots or a smaller model"
            )
        self.pack_tokens = halved
