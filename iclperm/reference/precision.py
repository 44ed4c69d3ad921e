"""A model of half precision computed in float32, with the very weights that it has, one operation at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_HALF = (torch.bfloat16, torch.float16)
_linear: Callable[..., torch.Tensor] = torch.nn.functional.linear
# What takes rows out of a table: the rows are made float32, not the table.
_LOOKUPS = (torch.nn.functional.embedding, torch.embedding, torch.index_select, torch.Tensor.__getitem__,
            torch.Tensor.index_select)  # fmt: skip
_GROUPED = tuple(
    getattr(owner, name)
    for owner, name in ((torch.nn.functional, "grouped_mm"), (torch, "_grouped_mm"))
    if hasattr(owner, name)
)
MOST_NUMBERS = 16 << 20
"""Of a matrix, that are float32 at once."""


@contextmanager
def in_float32() -> Iterator[None]:
    """Within: what torch would compute in half precision is computed in float32; nothing of a model is changed.

    Numbers are made float32 where an operation takes them, and what asks for half precision gets float32. Memory: the
    weights of one operation, of a matrix at most 64 MiB at a time, and one expert's. Functions of other libraries
    compute as ever.
    """
    with _InFloat32():
        yield


class _InFloat32(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # An attribute is no operation, and weights that are moved to where they are needed stay what they are.
        if func.__name__ == "__get__" or (func is torch.Tensor.to and args[0].dtype in _HALF):
            return func(*args, **kwargs)
        if func in _LOOKUPS:
            return _wide(func(*args, **kwargs))
        if func is _linear:
            return _by_outputs(*args, **kwargs)
        if func in _GROUPED and kwargs.keys() == {"offs"}:
            return _by_groups(*args, **kwargs)
        return func(*_wide(args), **_wide(kwargs))


def _wide(given: Any) -> Any:
    """float32 for numbers of half precision and for the dtype itself, wherever they stand; all else as it is."""
    if isinstance(given, torch.Tensor):
        return given.float() if given.dtype in _HALF else given
    if isinstance(given, torch.dtype):
        return torch.float32 if given in _HALF else given
    if isinstance(given, dict):
        return {key: _wide(each) for key, each in given.items()}
    return type(given)(map(_wide, given)) if type(given) in (list, tuple) else given


def _by_outputs(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight.T + bias in float32, some outputs at a time."""
    step = max(1, MOST_NUMBERS // weight.shape[-1]) if weight.ndim == 2 else weight.shape[0]
    parts = [
        _linear(
            _wide(x), _wide(weight[begin : begin + step]), None if bias is None else _wide(bias[begin : begin + step])
        )
        for begin in range(0, weight.shape[0], step)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _by_groups(x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Rows of x up to each of ``offs`` times a matrix of ``weight`` [groups, in, out] in float32, group after group."""
    ends = offs.tolist()
    out = torch.zeros(x.shape[0], weight.shape[2], device=x.device)
    for begin, end, matrix in zip([0, *ends], ends, weight, strict=False):
        out[begin:end] = _wide(x[begin:end]) @ _wide(matrix)
    return out
