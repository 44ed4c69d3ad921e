"""Row-wise functions in float64: what the fused kernels between and after the matrix products must compute."""

from collections.abc import Callable

import torch
from torch import Tensor


def gate(activation: Callable[[Tensor], Tensor], x: Tensor, factor: Tensor | None) -> Tensor:
    """activation(x) of x [M, N], torch's own, times factor [M, N] if there is one. Float64 [M, N]."""
    activated = activation(x.double())
    return activated if factor is None else activated * factor.double()


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, offset: float = 0.0) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (offset + weight) over the last axis of x [..., H]. Float64 [..., H]."""
    wide = x.double()
    scale = (wide.square().mean(dim=-1, keepdim=True) + eps).rsqrt()
    return wide * scale * (offset + weight.double())


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float) -> Tensor:
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last axis of x [..., H]. Float64 [..., H]."""
    wide = x.double()
    off = wide - wide.mean(dim=-1, keepdim=True)
    normed = off * (off.square().mean(dim=-1, keepdim=True) + eps).rsqrt() * weight.double()
    return normed if bias is None else normed + bias.double()


def rotate(x: Tensor, cosines: Tensor, sines: Tensor, *, neighbours: bool = False) -> Tensor:
    """Columns i and i + r / 2 of each head of x [M, heads, d] turned by tables [M, r], the others as they are.

    Float64 [M, heads, d]. Rotary embedding (Su et al., 2021, eq. 34) with the halves of a head as the pairs; or its
    columns 2 i and 2 i + 1, turned by columns i and i + r / 2 of the tables, too.
    """
    turned = cosines.shape[1]
    if neighbours:
        halves = torch.cat([x[..., 0:turned:2], x[..., 1:turned:2], x[..., turned:]], dim=-1)
        out = rotate(halves, cosines, sines)
        pairs = torch.stack(out[..., :turned].chunk(2, dim=-1), dim=-1)
        return torch.cat([pairs.flatten(-2), out[..., turned:]], dim=-1)
    wide, cos, sin = x.double(), cosines.double()[:, None], sines.double()[:, None]
    low, high = wide[..., : turned // 2], wide[..., turned // 2 : turned]
    return torch.cat([wide[..., :turned] * cos + torch.cat([-high, low], dim=-1) * sin, wide[..., turned:]], dim=-1)


def head_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None = None, *, scale: float = 1.0, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Logits [R, V] of hidden [R, H] and weight [V, H] before and after the soft-cap (0: none), in float64.

    scale * (hidden weight^T + bias), then softcap * tanh(logits / softcap).
    """
    logits = hidden.double() @ weight.double().T
    if bias is not None:
        logits = logits + bias.double()
    logits = logits * scale
    return logits, softcap * torch.tanh(logits / softcap) if softcap else logits
