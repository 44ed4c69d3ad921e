"""Element-wise work whose result at a row depends on that row alone, bit for bit: in C++ on a CPU, else in Triton.

torch's own CPU kernels cut a tensor into chunks by its size and the thread count and treat the ends of a chunk with
other instructions, so an activation or a cosine can change in its last bit with the rows beside it. The replacements
here do not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import nn
from transformers import activations

from iclperm import _core
from iclperm.engine.kernels.attention import as_numpy

# Positions are turned into cosines in blocks of this size: below torch's threading grain, so always in one piece.
_POSITION_BLOCK = 256

_KINDS: dict[type[nn.Module], str] = {
    nn.SiLU: "silu",
    activations.SiLUActivation: "silu",
    activations.GELUTanh: "gelu_tanh",
    activations.NewGELUActivation: "gelu_tanh",
    activations.FastGELUActivation: "gelu_tanh",
    activations.GELUActivation: "gelu_erf",
    nn.GELU: "gelu_erf",
}


def runs_triton(x: torch.Tensor) -> bool:
    """Whether norms, rotations, gates and the head of ``x`` are Triton's; its kernels are imported on first use."""
    return x.device.type != "cpu"


# Exact in any instruction: comparisons, products and copies.
_EXACT = (nn.ReLU, nn.LeakyReLU, nn.Identity, activations.ReLUSquaredActivation, activations.LinearActivation)
_ACTIVATION_MODULES = {"transformers.activations", "torch.nn.modules.activation"}


def may_depend_on_company(module: nn.Module) -> bool:
    """Whether a module is an activation of torch's whose last bit may change with the rows beside a row."""
    is_activation = type(module).__module__ in _ACTIVATION_MODULES
    return is_activation and not isinstance(module, _EXACT) and activation(module) is None


def kind_of(module: nn.Module) -> str | None:
    """What our kernels call a known activation module, None for any other."""
    return None if isinstance(module, nn.GELU) and module.approximate != "none" else _KINDS.get(type(module))


def activation(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """A row-wise stand-in for a known activation module, None for any other."""
    if (kind := kind_of(module)) is None:
        return None

    def forward(x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
        _core.activate(kind, as_numpy(rows), as_numpy(out), num_threads=torch.get_num_threads())
        return out.view(x.shape)

    return forward


def gate(module: nn.Module) -> Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor] | None:
    """activation(x) * factor for rows x and factor [M, N], in the memory of x if it can; None as ``activation``.

    Without a factor activation(x).
    """
    if (kind := kind_of(module)) is None:
        return None

    def forward(x: torch.Tensor, factor: torch.Tensor | None) -> torch.Tensor:
        out = x if x.is_contiguous() else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if runs_triton(x):
            from iclperm.engine.kernels import triton_rowwise

            triton_rowwise.gate(kind, x, factor, out)
            return out
        factors = None if factor is None else as_numpy(factor)
        _core.activate(kind, as_numpy(x), as_numpy(out), factors, num_threads=torch.get_num_threads())
        return out

    return forward


@dataclass(frozen=True)
class RowNorm(ABC):
    """A norm over the last axis, computed in float32 and rounded once."""

    weight: torch.Tensor
    eps: float

    @cached_property
    def _weight_array(self) -> np.ndarray:
        return as_numpy(self.weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The norm of x [..., H], in new memory."""
        return self._run(x, torch.empty(x.shape, dtype=x.dtype, device=x.device))

    def in_place(self, x: torch.Tensor) -> torch.Tensor:
        """The norm of contiguous x [..., H], in its own memory."""
        return self._run(x, x)

    def of_sum(self, x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        """Add x [M, H] to ``total`` [M, H] in place; the norm of that, in new memory."""
        return self._run(x, torch.empty(x.shape, dtype=x.dtype, device=x.device), total)

    @abstractmethod
    def _run(self, x: torch.Tensor, out: torch.Tensor, total: torch.Tensor | None = None) -> torch.Tensor: ...


@dataclass(frozen=True)
class RmsNorm(RowNorm):
    """x / sqrt(mean(x^2) + eps) * (offset + weight)."""

    offset: float = 0.0

    def _run(self, x: torch.Tensor, out: torch.Tensor, total: torch.Tensor | None = None) -> torch.Tensor:
        if runs_triton(x):
            from iclperm.engine.kernels import triton_rowwise

            triton_rowwise.rms_norm(x, self.weight, out, total, eps=self.eps, offset=self.offset)
            return out
        _core.rms_norm(
            as_numpy(x.view(-1, x.shape[-1])),
            self._weight_array,
            as_numpy(out.view(-1, x.shape[-1])),
            None if total is None else as_numpy(total),
            eps=self.eps,
            offset=self.offset,
            num_threads=torch.get_num_threads(),
        )
        return out


@dataclass(frozen=True)
class CentredNorm(RowNorm):
    """(x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias, as torch's LayerNorm."""

    bias: torch.Tensor | None = None

    @cached_property
    def _bias_array(self) -> np.ndarray | None:
        return None if self.bias is None else as_numpy(self.bias)

    def _run(self, x: torch.Tensor, out: torch.Tensor, total: torch.Tensor | None = None) -> torch.Tensor:
        rows, normed = (each.view(-1, x.shape[-1]) for each in (x, out))
        if runs_triton(x):
            from iclperm.engine.kernels import triton_layer_norm

            triton_layer_norm.layer_norm(rows, self.weight, normed, self.bias, total, eps=self.eps)
            return out
        _core.layer_norm(
            as_numpy(rows),
            self._weight_array,
            as_numpy(normed),
            self._bias_array,
            None if total is None else as_numpy(total),
            eps=self.eps,
            num_threads=torch.get_num_threads(),
        )
        return out


def rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, *, neighbours: bool = False) -> torch.Tensor:
    """Turn the halves of each head of x [M, heads, d] in place, by tables [M, r]; columns from r on stay.

    Or columns 2 i and 2 i + 1 where ``neighbours`` are turned, by columns i and i + r / 2 of the tables all the same.
    """
    if runs_triton(x):
        from iclperm.engine.kernels import triton_rowwise

        triton_rowwise.rotate(x, cosines, sines, neighbours=neighbours)
        return x
    _core.rotate(
        as_numpy(x),
        cosines.float().numpy(),
        sines.float().numpy(),
        neighbours=neighbours,
        num_threads=torch.get_num_threads(),
    )
    return x


class RotaryTable:
    """Stands in for a rotary embedding module: cosines and sines of a position, computed once and looked up.

    Positions from ``limit`` on never occur; the table ends there, so that rotary types whose scale changes
    beyond it keep their short form. Where the module's buffers hold other numbers than they did, it begins anew.
    """

    def __init__(self, original: Callable[..., tuple[torch.Tensor, torch.Tensor]], limit: int) -> None:
        self._original = original
        self._limit = limit
        self._tables: dict[tuple[object, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        self._buffers: list[torch.Tensor] = []  # copies, as the tables left them

    def __call__(
        self, x: torch.Tensor, position_ids: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self._is_as_it_was():
            self._tables.clear()
        key = (x.dtype, x.device, args, tuple(sorted(kwargs.items())))
        num_blocks = int(position_ids.max()) // _POSITION_BLOCK + 1
        if key not in self._tables or self._tables[key][0].shape[0] < num_blocks * _POSITION_BLOCK:
            blocks = [self._block(number, x, args, kwargs) for number in range(num_blocks)]
            self._tables[key] = (torch.cat([cos for cos, _ in blocks]), torch.cat([sin for _, sin in blocks]))
            self._buffers = [buffer.clone() for buffer in self._buffers_now()]
        cos, sin = self._tables[key]
        return cos[position_ids], sin[position_ids]

    def _buffers_now(self) -> list[torch.Tensor]:
        module = getattr(self._original, "__self__", None)
        buffers = module._buffers.values() if isinstance(module, nn.Module) else ()
        return [buffer for buffer in buffers if buffer is not None]

    def _is_as_it_was(self) -> bool:
        now, before = self._buffers_now(), self._buffers
        return len(now) == len(before) and all(
            one.dtype == other.dtype and torch.equal(one, other) for one, other in zip(now, before, strict=True)
        )

    def _block(
        self, number: int, x: torch.Tensor, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        begin = number * _POSITION_BLOCK
        positions = torch.arange(begin, begin + _POSITION_BLOCK, device=x.device).clamp(max=self._limit - 1)
        # Some rotary types go on as for a long text that they have seen until they see a short one.
        self._original(x, positions[None, :1] * 0, *args, **kwargs)
        cos, sin = self._original(x, positions[None], *args, **kwargs)
        return cos[0], sin[0]
