"""Cards without bfloat16: what a model is loaded in there, and what is said of it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import make_model
from transformers import PreTrainedModel

from iclperm.engine import Engine
from iclperm.engine.load import load, load_shapes
from iclperm.errors import ModelError

Pretend = Callable[..., None]
NO_BFLOAT16 = r"Old card has no bfloat16 \(its compute capability is 7\.5\)"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return in_dtype(make_model(tmp_path), "bfloat16")


def in_dtype(folder: Path, dtype: str | None) -> Path:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"dtype": dtype}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Pretend:
    """This machine has cards of these compute capabilities and this memory each; models stay where they are."""

    moved = PreTrainedModel.to

    def stays(model: PreTrainedModel, *args: Any, **options: Any) -> Any:
        return model if isinstance(args[0], torch.device) else moved(model, *args, **options)

    def cards(*capabilities: tuple[int, int], memory: int = 1 << 34) -> None:
        def number(card: torch.device) -> int:
            return card.index or 0

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda card: capabilities[number(card)])
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda card: SimpleNamespace(total_memory=memory))
        monkeypatch.setattr(
            torch.cuda, "get_device_name", lambda card: "Old card" if capabilities[number(card)] < (8, 0) else "Card"
        )
        monkeypatch.setattr(PreTrainedModel, "to", stays)

    return cards


def float32_bytes(folder: Path) -> int:
    shapes, _ = load_shapes(folder, device="cpu", dtype="float32")
    return 4 * sum(parameter.numel() for parameter in shapes.parameters())


def assert_loaded(folder: Path, dtype: torch.dtype, said: str, device: str = "cuda") -> None:
    """Both that what is loaded has the dtype, and that what is estimated without weights has it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, _ = load(folder, device=device)
    assert model.dtype == dtype
    lines = [str(warning.message) for warning in caught if "bfloat16" in str(warning.message)]
    assert lines == [] if not said else len(lines) == 1
    assert all(line.startswith(said) and "--dtype" in line and "\n" not in line for line in lines)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shapes, place = load_shapes(folder, device=device)
    assert (shapes.dtype, place.type) == (dtype, "cuda")


OLD = "Old card has no bfloat16 (its compute capability is 7.5): the model runs in "


def test_float32_where_its_weights_take_half_of_the_memory_else_float16(folder: Path, pretend: Pretend) -> None:
    room = 2 * float32_bytes(folder)
    pretend((7, 5), memory=room)
    assert_loaded(folder, torch.float32, OLD + "float32, whose weights take ")
    pretend((7, 5), memory=room - 1)
    assert_loaded(folder, torch.float16, OLD + "float16, as weights in float32 would take ")
    with pytest.warns(UserWarning, match="where large activations overflow, answers are invalid"):
        load(folder, device="cuda")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_checkpoints_are_loaded_as_they_are(folder: Path, pretend: Pretend, dtype: str) -> None:
    pretend((7, 5))
    assert_loaded(in_dtype(folder, dtype), getattr(torch, dtype), "")


def test_cards_with_bfloat16_and_those_of_amd_take_it(
    folder: Path, pretend: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend((8, 0))
    assert_loaded(folder, torch.bfloat16, "")
    pretend((7, 5))
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert_loaded(folder, torch.bfloat16, "")


def test_a_checkpoint_that_names_no_dtype_goes_by_its_weights(folder: Path, pretend: Pretend) -> None:
    model, _ = load(folder, device="cpu", dtype="bfloat16")
    model.save_pretrained(folder)
    in_dtype(folder, None)
    pretend((7, 0))
    with pytest.warns(UserWarning, match=r"has no bfloat16 \(its compute capability is 7\.0\): .* in float32"):
        assert load(folder, device="cuda")[0].dtype == torch.float32


def test_bfloat16_by_name_is_refused_in_one_line(folder: Path, pretend: Pretend) -> None:
    pretend((7, 5))
    for read in (load, load_shapes, Engine.from_pretrained):
        with pytest.raises(ModelError, match=f"^{NO_BFLOAT16}; give float32 or float16, or auto, .*$"):
            read(folder, device="cuda", dtype="bfloat16")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(folder, device="cuda", dtype="float16")[0].dtype == torch.float16


def test_the_oldest_of_several_cards_decides_and_all_their_memory_counts(folder: Path, pretend: Pretend) -> None:
    pretend((8, 6), (7, 5), memory=float32_bytes(folder))
    shapes, _ = load_shapes(folder, device="balanced")
    assert shapes.dtype == torch.float32
    assert load_shapes(folder, device="cuda:0")[0].dtype == torch.bfloat16
    assert load_shapes(folder, device="cuda:1")[0].dtype == torch.float16
    assert load_shapes(folder, device="cuda:2")[0].dtype == torch.bfloat16  # one that is not there is not asked


def test_a_cpu_asks_no_card(folder: Path, pretend: Pretend) -> None:
    pretend((7, 5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(folder, device="cpu")[0].dtype == torch.float32
        assert load(folder, device="cpu", dtype="bfloat16")[0].dtype == torch.bfloat16
