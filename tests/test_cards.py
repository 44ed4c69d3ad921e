"""What runs on which GPU, as far as it is known before anything is computed; the cards are simulated."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from cards import A100, CUDA, H100, RTX_3090, T4, V100, Card, lie_there, plug_in
from transformers import PreTrainedModel
from zoo import ZOO

from iclperm.engine.footprint import Sizes
from iclperm.engine.kernels import triton_launch
from iclperm.engine.model import TreeModel
from iclperm.engine.plain_model import PlainModel

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
_OURS, _TORCH = ("triton", True, True), ("torch", False, False)
_TAKES_MORE = "float32 takes a compute capability of 7.5, and this one has 7.0"


@pytest.fixture(autouse=True)
def nothing_is_said_yet() -> Iterator[None]:
    triton_launch._say_once.cache_clear()
    yield
    triton_launch._say_once.cache_clear()


def served(model: PreTrainedModel, **options: str) -> tuple[TreeModel, list[str]]:
    """The model as it would be served, and what is said of it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = TreeModel(model, **options)
    return made, [str(each.message) for each in caught]


@dataclass(frozen=True)
class OnCard:
    card: Card
    dtype: torch.dtype
    runs: tuple[str, bool, bool]
    """The attention; whether our layers and our head may run."""
    reason: str = ""


CASES = [
    OnCard(V100, SINGLE, _TORCH, _TAKES_MORE),
    OnCard(V100, HALF, _TORCH, _TAKES_MORE.replace("float32", "float16")),
    OnCard(T4, SINGLE, _OURS),
    OnCard(T4, HALF, ("triton", True, False)),
    OnCard(T4, BRAIN, _TORCH, "bfloat16 takes a compute capability of 8.0, and this one has 7.5"),
    *(OnCard(card, dtype, _OURS) for card in (A100, RTX_3090, H100) for dtype in (HALF, BRAIN, SINGLE)),
    OnCard(H100, torch.float64, _TORCH, "Triton's kernels take no float64"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.card.name} {case.dtype}")
def test_what_runs_on_a_card(case: OnCard, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ZOO["llama"].build().to(case.dtype)
    plug_in(case.card, monkeypatch)
    lie_there(monkeypatch)
    made, said = served(model)
    assert (made.attention, made._may_fuse, made._may_fuse_head) == case.runs
    if case.reason:
        assert said == [
            f"iclperm's kernels do not run on cuda:0 ({case.reason}): torch's operations attend and transformers' own "
            "layers run, which is slower"
        ]
    else:
        assert not said
    assert not served(model)[1], "what was said once is said again"
    ways = Sizes.of(PlainModel(model), CUDA)
    assert (ways.dense is not None) == (made.attention == "torch"), "plans foretell another attention than runs"
    assert bool(ways.first) == made._may_fuse
    assert (ways.logits == 0) == made._may_fuse_head


@pytest.mark.parametrize(
    ("lacks", "reason"),
    [
        ("triton", "Triton is not installed"),
        ("cuda", "Triton's kernels run on NVIDIA GPUs"),
        ("compiler", "RuntimeError: Failed to find C compiler."),
    ],
)
def test_whatever_is_missing_is_said_once(lacks: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ZOO["llama"].build()
    plug_in(A100, monkeypatch)
    lie_there(monkeypatch)
    if lacks == "triton":
        find = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, *rest: None if name == "triton" else find(name, *rest)
        )
    elif lacks == "cuda":
        monkeypatch.setattr(torch.version, "hip", "6.4")
    else:
        monkeypatch.setattr(triton_launch, "_why_no_kernel_runs", lambda device: reason)
    made, said = served(model)
    assert len(said) == 1
    assert f"({reason})" in said[0]
    assert "\n" not in said[0]
    assert (made.attention, made._may_fuse, made._may_fuse_head) == _TORCH
    assert not served(model)[1]


def test_wide_heads_are_attended_by_torch_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ZOO["llama"].build()
    plug_in(A100, monkeypatch)
    lie_there(monkeypatch)
    monkeypatch.setattr("iclperm.engine.kernels.triton_launch.MAX_HEAD_DIM", 4)
    monkeypatch.setattr("iclperm.engine.architecture.MAX_HEAD_DIM", 4)
    made, said = served(model)
    assert said == [
        f"torch's operations attend on cuda:0, which is slower: heads have {made.facts.head_size} dimensions, and "
        "iclperm's kernel takes up to 4"
    ]
    assert (made.attention, made._may_fuse, made._may_fuse_head) == ("torch", True, True)
    assert not served(model, attention="torch")[1], "said of what was asked for"


def test_nothing_is_said_of_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ZOO["llama"].build()
    plug_in(V100, monkeypatch)
    lie_there(monkeypatch)
    assert not served(model, attention="torch", layers="transformers")[1]


def test_nothing_is_said_on_a_cpu() -> None:
    assert not served(ZOO["llama"].build())[1]
    assert not served(ZOO["llama"].build().half())[1]
