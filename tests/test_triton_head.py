"""Triton's head: what it reads without logits is what the logits say, row by row, whatever else is in the batch.

It runs on a CUDA device, else in Triton's interpreter (`devices`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import triton_interpreter
from devices import DEVICE, DTYPES, interpreted, poisoned_empty
from tolerances import TOLERANCES
from torch import Tensor

from iclperm.engine.kernels import triton_head
from iclperm.errors import RequestError
from iclperm.reference import rowwise as reference

triton_interpreter.repair()

pytestmark = pytest.mark.gpu
# What NumPy says in the interpreter, and a GPU does not.
BEYOND_FLOAT32 = pytest.mark.filterwarnings(
    *(f"ignore:{said}:RuntimeWarning" for said in ("invalid value", "overflow encountered", "All-NaN slice"))
)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a kernel leaves unwritten is NaN, or an id that no vocabulary has."""
    monkeypatch.setattr(torch, "empty", poisoned_empty)


class Read:
    """What the kernel reads off rows and pairs."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, pairs: list[tuple[int, int]], bias: Tensor | None = None, **options: Any
    ) -> None:
        self.rows, self.ids = (np.array([pair[i] for pair in pairs], np.int32) for i in (0, 1))
        self.argmax, self.finite, self.logprob = triton_head.read_rows(
            hidden, weight, bias, self.rows, self.ids, **options
        )


def on_device(values: Tensor, dtype: str) -> Tensor:
    return values.to(DTYPES[dtype]).to(DEVICE)


def case(num_rows: int, num_ids: int, width: int, dtype: str, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden rows, weights and a bias whose logits spread to about 25."""
    rng = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(num_rows, width, generator=rng), torch.randn(num_ids, width, generator=rng)
    return (
        on_device(hidden, dtype),
        on_device(6.0 * weight / width**0.5, dtype),
        on_device(torch.randn(num_ids, generator=rng), dtype),
    )


def some_pairs(num_rows: int, num_ids: int, seed: int) -> list[tuple[int, int]]:
    """Pairs in no order, some of them twice, several ids shared by many rows, every third row without any."""
    rng = np.random.default_rng(seed)
    rows = 3 * rng.integers(0, (num_rows + 2) // 3, 40)
    shared = rng.integers(0, num_ids, 4)
    ids = np.where(rng.random(40) < 0.6, rng.choice(shared, 40), rng.integers(0, num_ids, 40))
    pairs = [(int(row), int(token)) for row, token in zip(rows, ids, strict=True)]
    return [*pairs, *pairs[:5], (0, 0), (0, num_ids - 1)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [0.0, 9.0])
@pytest.mark.parametrize(
    ("num_rows", "num_ids", "width", "least_splits"),
    [(1, 1, 8, 264), (1, 127, 16, 264), (17, 301, 40, 264), (66, 640, 96, 2), (131, 515, 64, 3), (64, 256, 33, 1)],
)
def test_agrees_with_float64(
    num_rows: int, num_ids: int, width: int, least_splits: int, softcap: float, dtype: str
) -> None:
    hidden, weight, bias = case(num_rows, num_ids, width, dtype, seed=num_rows)
    pairs = some_pairs(num_rows, num_ids, seed=num_ids)
    for given, scale in [(None, 1.0), (bias, 0.5)]:
        out = Read(hidden, weight, pairs, given, scale=scale, softcap=softcap, least_splits=least_splits)
        _, capped = reference.head_logits(hidden, weight, given, scale=scale, softcap=softcap)
        expected = torch.log_softmax(capped, dim=-1).cpu().numpy()
        assert out.finite.all()
        assert np.abs(out.logprob - expected[out.rows, out.ids]).max() <= TOLERANCES["head"][dtype]
        best = np.take_along_axis(expected, out.argmax[:, None].astype(np.int64), axis=1)[:, 0]
        assert (expected.max(axis=1) - best).max() <= TOLERANCES["head"][dtype]
        assert (out.logprob <= 0).all()


@interpreted("another card's tiles need not fit")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_tiles_of_data_centres_blackwell_agree_too(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []

    def architecture(device: torch.device) -> int:
        launched.append(device.index or 0)
        return 100

    monkeypatch.setattr(triton_head, "architecture", architecture)
    for num_rows, num_ids, width, least_splits in [(17, 301, 40, 264), (131, 515, 64, 3)]:
        test_agrees_with_float64(num_rows, num_ids, width, least_splits, 9.0, dtype)
    assert launched, "the launch does not follow the architecture"


def logits_as_given(logits: Tensor, dtype: str = "float32") -> tuple[Tensor, Tensor]:
    """Hidden rows and weights whose logits are exactly ``logits`` [R, V]."""
    return on_device(torch.eye(logits.shape[0]), dtype), on_device(logits.T.contiguous(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("least_splits", [264, 2])
def test_ties_go_to_the_lowest_id(dtype: str, least_splits: int) -> None:
    logits = torch.zeros(5, 700)
    logits[1, [9, 40, 699]] = 2.0
    logits[2, [127, 128]] = 2.0
    logits[3, [600, 650]] = 2.0
    logits[4] = -3.0  # the maximum is below what ids beyond the last would have
    read = Read(*logits_as_given(logits, dtype), [], least_splits=least_splits)
    assert read.argmax.tolist() == [0, 9, 127, 600, 0]


def test_a_likely_id_has_no_more_than_certainty() -> None:
    logits = torch.full((3, 300), -40.0)
    logits[[0, 1, 2], [0, 150, 299]] = torch.tensor([60.0, 90.0, 0.0])
    out = Read(*logits_as_given(logits), [(0, 0), (1, 150), (2, 299), (1, 0)])
    assert out.argmax.tolist() == [0, 150, 299]
    assert out.logprob.tolist() == [0.0, 0.0, 0.0, -130.0]


@BEYOND_FLOAT32
def test_extreme_logits_do_not_overflow() -> None:
    logits = torch.tensor([[3e38, -3e38, 0.0], [-3e38, -3e38, -3e38]])
    out = Read(*logits_as_given(logits), [(0, 0), (1, 2)])
    assert out.finite.all()
    np.testing.assert_allclose(out.logprob, [0.0, -np.log(3.0)], rtol=1e-6)


@BEYOND_FLOAT32
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("column", [0, 130, 299])
def test_a_row_that_is_not_finite_has_no_result_and_harms_no_other(
    column: int, bad: float, softcap: float, dtype: str
) -> None:
    hidden, weight, _ = case(3, 300, 16, dtype, seed=1)
    pairs = [(0, 5), (1, 5), (2, 5), (2, column)]
    # A dimension in which one row meets one id alone: there, and nowhere else, 3e38 times ten is infinite.
    hidden[:, 15], weight[:, 15] = 0.0, 0.0
    clean = Read(hidden, weight, pairs, softcap=softcap)
    hidden[1, 15], weight[column, 15] = (torch.nan, 0.0) if np.isnan(bad) else (3e38, np.sign(bad) * 10.0)
    out = Read(hidden, weight, pairs, softcap=softcap)
    assert out.finite.tolist() == [True, False, True]
    assert out.argmax[1] == -1
    np.testing.assert_array_equal(out.argmax[::2], clean.argmax[::2])
    np.testing.assert_array_equal(out.logprob[[0, 2, 3]], clean.logprob[[0, 2, 3]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_bits_do_not_depend_on_company_pairs_or_strides(dtype: str) -> None:
    hidden, weight, bias = case(140, 300, 64, dtype, seed=4)
    rows = [0, 63, 64, 127, 128, 139]
    together = Read(hidden, weight, [(row, 77) for row in rows], bias)
    for number, row in enumerate(rows):
        alone = Read(hidden[row : row + 1].clone(), weight, [(0, 3), (0, 77), (0, 77)], bias)
        assert alone.logprob[1] == alone.logprob[2] == together.logprob[number]
        assert alone.argmax[0] == together.argmax[row]
    wide = torch.cat([hidden, hidden], dim=1)[:, :64], torch.cat([weight, weight], dim=1)[:, 64:]
    apart = Read(*wide, [(row, 77) for row in rows], bias)
    np.testing.assert_array_equal(apart.logprob, together.logprob)


def test_logits_stay_in_float32_where_transformers_rounds_them() -> None:
    hidden, weight, _ = case(40, 200, 64, "bfloat16", seed=6)
    pairs = [(row, 7 * row % 200) for row in range(40)]
    out = Read(hidden, weight, pairs)
    exact, _ = reference.head_logits(hidden, weight)
    rounded = exact.to(torch.bfloat16).double()

    def of(logits: Tensor) -> npt.NDArray[np.float64]:
        return torch.log_softmax(logits, dim=-1).cpu().numpy()[out.rows, out.ids]

    assert np.abs(out.logprob - of(exact)).max() < 0.01 * np.abs(of(rounded) - of(exact)).max()


def test_no_rows_and_no_pairs() -> None:
    hidden, weight, _ = case(5, 30, 16, "float32", seed=7)
    none = Read(hidden[:0], weight, [])
    assert none.argmax.shape == none.finite.shape == none.logprob.shape == (0,)
    rows = Read(hidden, weight, [])
    assert rows.argmax.shape == (5,)
    assert rows.logprob.shape == (0,)


HIDDEN, WEIGHT = torch.ones(2, 4, device=DEVICE), torch.ones(3, 4, device=DEVICE)


@pytest.mark.parametrize(
    ("hidden", "weight", "bias", "message"),
    [
        (HIDDEN.double(), WEIGHT, None, "hidden is torch.float64; the head reads float32, bfloat16 and float16"),
        (HIDDEN[:, :3], WEIGHT, None, r"hidden has shape \(2, 3\) and weight \(3, 4\); "),
        (HIDDEN, WEIGHT[:0], None, r"hidden has shape \(2, 4\) and weight \(0, 4\); "),
        (HIDDEN, WEIGHT.half(), None, "weight is torch.float16 on .*, hidden torch.float32 on "),
        (HIDDEN, WEIGHT, WEIGHT[0], r"bias has shape \(4,\); 3 entries are needed"),
        (HIDDEN, torch.ones(4, 3, device=DEVICE).T, None, "the last axis of weight has stride 3; it must be contigu"),
        (HIDDEN.T.contiguous().T, WEIGHT, None, "the last axis of hidden has stride 2; it must be contiguous"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(hidden: Tensor, weight: Tensor, bias: Tensor | None, message: str) -> None:
    with pytest.raises(RequestError, match=f"^{message}"):
        Read(hidden, weight, [(0, 0)], bias)


@pytest.mark.parametrize("pair", [(2, 0), (-1, 0), (0, 3), (0, -1)])
def test_pairs_outside_the_logits_are_refused(pair: tuple[int, int]) -> None:
    with pytest.raises(RequestError, match=rf"^pair 1 is \(row {pair[0]}, id {pair[1]}\), outside logits \[2, 3\]$"):
        Read(HIDDEN, WEIGHT, [(0, 0), pair])
