"""The kernels' Python side: head readings, rotary tables and activations against what they stand in for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tolerances import TOLERANCES
from torch import nn
from transformers import activations
from zoo import ZOO

from iclperm.engine.kernels import head, rowwise

ROWS, VOCAB = 13, 301


def logits(dtype: torch.dtype) -> torch.Tensor:
    values = 6 * torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(0))
    values[3, 7] = torch.nan
    values[4, 0] = torch.inf
    values[5, 2] = -torch.inf
    values[6, [10, 20]] = 40.0  # a tie: the lowest id wins
    return values.to(dtype)


@pytest.mark.parametrize("softcap", [0.0, 7.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_both_readings_agree_with_a_plain_log_softmax(dtype: torch.dtype, softcap: float) -> None:
    rng = np.random.default_rng(0)
    pair_row = np.sort(rng.integers(0, ROWS, 60)).astype(np.int32)
    pair_id = rng.integers(0, VOCAB, 60).astype(np.int32)
    pair_row[30:32], pair_id[30:32] = 6, (10, 20)
    given = logits(dtype)
    capped = given.double()
    if softcap:
        capped = softcap * torch.tanh(capped / softcap)
    expected = torch.log_softmax(capped, dim=-1).numpy()[pair_row, pair_id]
    is_finite = torch.isfinite(given).all(dim=-1).numpy()[pair_row]  # an infinite logit is broken, capped or not
    assert 0 < is_finite.sum() < 60
    paths = [head.read_logits] if dtype == torch.float16 else [head.read_logits, torch_reading]
    for read in paths:
        reading = read(given, softcap, pair_row, pair_id)
        np.testing.assert_array_equal(reading.is_finite, is_finite)
        assert np.isnan(reading.logprob[~is_finite]).all()
        error = np.abs(reading.logprob - expected)[is_finite]
        assert error.max() <= TOLERANCES["logprob"]["float32"]
        greedy = capped.argmax(dim=-1).numpy()[pair_row] == pair_id
        np.testing.assert_array_equal(reading.is_greedy, greedy & is_finite)
        assert reading.is_greedy[30:32].tolist() == [True, False]


@pytest.mark.parametrize("softcap", [0.0, 7.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_whole_distributions_agree_with_a_plain_log_softmax(dtype: torch.dtype, softcap: float) -> None:
    given = logits(dtype)
    capped = softcap * torch.tanh(given.double() / softcap) if softcap else given.double()
    found, is_finite = head.distributions(given, softcap), torch.isfinite(given).all(dim=-1)
    assert found.dtype == torch.float32
    assert found[~is_finite].isnan().all()
    error = (found.double() - torch.log_softmax(capped, dim=-1))[is_finite].abs()
    assert error.max() <= TOLERANCES["logprob"]["float32"]


def test_a_distribution_over_many_unlikely_ids_sums_to_one() -> None:
    given = torch.full((2, 1 << 18), -17.75)
    given[:, :64] = 0.0
    assert (head.distributions(given, 0.0).double().exp().sum(dim=-1) - 1).abs().max() <= 4e-6


def torch_reading(given: torch.Tensor, softcap: float, pair_row: np.ndarray, pair_id: np.ndarray) -> head.Reading:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head, "NATIVE", ())
        return head.read_logits(given, softcap, pair_row, pair_id)


MODULES = [nn.SiLU(), activations.SiLUActivation(), activations.GELUTanh(), activations.NewGELUActivation(),
           activations.GELUActivation(), activations.FastGELUActivation(), nn.GELU()]  # fmt: skip


@pytest.mark.parametrize("module", MODULES, ids=lambda module: type(module).__name__)
def test_activations_equal_the_modules_they_stand_in_for(module: nn.Module) -> None:
    x = 4 * torch.randn(1, 9, 37, generator=torch.Generator().manual_seed(0))
    forward = rowwise.activation(module)
    assert forward is not None
    error = (forward(x).double() - module(x.double())).abs() / x.abs()
    assert error.max() <= TOLERANCES["activation"]["float32"]


def test_unknown_activations_are_left_alone() -> None:
    assert rowwise.activation(nn.ReLU()) is None
    assert rowwise.activation(nn.GELU(approximate="tanh")) is None
    assert rowwise.activation(nn.Linear(2, 2)) is None


@pytest.mark.parametrize("name", ["llama", "llama3-rope-tied", "gemma3"])
def test_rotary_tables_hold_the_module_s_own_cosines(name: str) -> None:
    model = ZOO[name].build()
    rotary = model.model.rotary_emb
    table = rowwise.RotaryTable(rotary.forward, limit=256)
    x = torch.zeros(1, 5, 8)
    positions = torch.tensor([[255, 3, 0, 3, 17]])
    kinds = [("sliding_attention",), ("full_attention",)] if name == "gemma3" else [()]
    for kind in kinds:
        for ours, theirs in zip(table(x, positions, *kind), rotary(x, positions, *kind), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-7)
            assert torch.equal(ours[0, 1], ours[0, 3])
