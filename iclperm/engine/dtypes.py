"""In which dtype a model is loaded: as asked, else as its checkpoint has it and the cards can compute with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from iclperm.engine.memory import device_bytes
from iclperm.errors import ModelError

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_FIRST_WITH_BFLOAT16 = (8, 0)
_GIB = 1 << 30


def dtype_of(name: str | torch.dtype) -> str | torch.dtype:
    """A dtype by its name, ``auto`` as it is; raises ModelError for any other."""
    wanted = name if name == "auto" or isinstance(name, torch.dtype) else getattr(torch, name, None)
    if wanted != "auto" and wanted not in _DTYPES:
        raise ModelError(f"dtype {name!r} is unknown; give auto, float32, bfloat16 or float16")
    return wanted


def fit_dtype(
    wanted: str | torch.dtype, stored: str, cards: Sequence[torch.device], num_weights: Callable[[], int]
) -> tuple[str | torch.dtype, str]:
    """The dtype on the CUDA devices ``cards`` of a model that is ``stored`` in one, and a line if it is another.

    As a rule it is ``wanted`` (``auto`` as it is), and the line "". A card older than compute capability 8.0 has no
    bfloat16: what is stored in it is loaded there in float32 if that takes at most half of the cards' memory, else in
    float16. Half of all their memory, not of what is free: results do not depend on other processes. Raises ModelError
    where bfloat16 was asked for by name.
    """
    old = next((card for card in cards if not _has_bfloat16(card)), None)
    is_bfloat16 = stored == "bfloat16" if wanted == "auto" else wanted == torch.bfloat16
    if old is None or not is_bfloat16:
        return wanted, ""
    major, minor = torch.cuda.get_device_capability(old)
    lack = f"{torch.cuda.get_device_name(old)} has no bfloat16 (its compute capability is {major}.{minor})"
    if wanted != "auto":
        raise ModelError(
            f"{lack}; give float32 or float16, or auto, which chooses by what memory holds (iclperm run --dtype auto)"
        )
    taken, there = torch.float32.itemsize * num_weights(), device_bytes(cards)
    sizes = f"{taken / _GIB:.1f} of {there / _GIB:.1f} GiB"
    if 2 * taken <= there:
        return (
            torch.float32,
            f"{lack}: the model runs in float32, whose weights take {sizes}; iclperm run --dtype float16 takes half",
        )
    return torch.float16, (
        f"{lack}: the model runs in float16, as weights in float32 would take {sizes}, more than half; where large "
        "activations overflow, answers are invalid; iclperm run --dtype float32 has none of that"
    )


def _has_bfloat16(card: torch.device) -> bool:
    # A ROCm build of torch numbers AMD's cards by another scale.
    return torch.version.hip is not None or torch.cuda.get_device_capability(card) >= _FIRST_WITH_BFLOAT16
