"""GPUs that are not there: what torch says of them, for code that asks before it computes."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from iclperm.engine import model
from iclperm.engine.kernels import triton_launch
from iclperm.engine.kernels.triton_compilation import architecture
from iclperm.engine.model import TreeModel

GIB = 1 << 30
CUDA = torch.device("cuda", 0)


@dataclass(frozen=True)
class Card:
    """A kind of GPU: its name, compute capability, and memory in bytes."""

    name: str
    capability: tuple[int, int]
    memory: int


V100 = Card("Tesla V100-SXM2-16GB", (7, 0), 16 * GIB)
T4 = Card("Tesla T4", (7, 5), 15 * GIB)
A100 = Card("NVIDIA A100-SXM4-80GB", (8, 0), 80 * GIB)
RTX_3090 = Card("NVIDIA GeForce RTX 3090", (8, 6), 24 * GIB)
H100 = Card("NVIDIA H100 80GB HBM3", (9, 0), 80 * GIB)


def plug_in(card: Card, monkeypatch: pytest.MonkeyPatch, count: int = 1) -> None:
    """From now on torch says that there are so many of a card, on which Triton's first kernel runs."""
    about = SimpleNamespace(name=card.name, total_memory=card.memory, major=card.capability[0])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: card.capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: card.name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: about)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (card.memory // 2, card.memory))
    for module in (triton_launch, model):
        monkeypatch.setattr(module, "architecture", architecture.__wrapped__)
    monkeypatch.setattr(triton_launch, "_why_no_kernel_runs", lambda device: "")


def lie_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on models say that they lie on the first card."""
    for name, said in {"device": CUDA, "devices": (CUDA,)}.items():
        place = property(lambda self, said=said: said, lambda self, value: None)
        monkeypatch.setattr(TreeModel, name, place, raising=False)
