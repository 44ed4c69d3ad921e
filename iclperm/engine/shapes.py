"""How many rows a matrix product is given, so that the bits of a row do not depend on how many there are.

On a CPU a product splits its rows among the threads; a share of fewer than 4 rows, or no multiple of 4, takes another
code path and other bits (measured: MKL, fp32, 2 threads: 9, 10 and 11 rows differ from all of 12 to 2048). On a GPU the
library picks a kernel by the shape, so there are few shapes, and the same ones whatever the processor beside it.
"""

from __future__ import annotations

import torch

_CPU_MULTIPLE = 8
# A tile of the products' usual kernels, which reading a layer's weights takes as long as multiplying with.
_GPU_MULTIPLE = 128
_STEPS_AN_OCTAVE = 8  # padding is an eighth of the rows at most, from 1,024 on


def padded_rows(num_rows: int, device: torch.device) -> int:
    """The rows that a product on ``device`` is run with for ``num_rows`` of them.

    On a CPU it follows the number of threads, on a GPU the number alone: 128, 256, ..., 1024, 1152, ..., 2048, 2304,
    ..., in eight steps from one power of two to the next.
    """
    step, least = _step(num_rows - 1, device), _least(device)
    return -(-max(num_rows, least) // step) * step


def whole_rows(most: int, device: torch.device) -> int:
    """The most rows up to ``most`` that are run without padding; where none are, the fewest that any product has."""
    step = _step(most, device)
    return max(padded_rows(1, device), most // step * step)


def pack_sizes(most: int, device: torch.device) -> list[int]:
    """Numbers of rows that products are run with, ascending, as far as they are below ``most``, and ``most`` itself."""
    sizes, size = [], padded_rows(1, device)
    while size < most:
        sizes.append(size)
        size = padded_rows(size + 1, device)
    return [*sizes, most]


def _least(device: torch.device) -> int:
    return _CPU_MULTIPLE * torch.get_num_threads() if device.type == "cpu" else _GPU_MULTIPLE


def _step(num_rows: int, device: torch.device) -> int:
    if device.type == "cpu":
        return _CPU_MULTIPLE
    return max(_GPU_MULTIPLE, (1 << max(1, num_rows).bit_length() - 1) // _STEPS_AN_OCTAVE)
