"""The packed-tree attention kernel: exact against plain attention, and blind to everything off a row's path."""

import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import TOLERANCES
from torch import Tensor

from iclperm import _core
from iclperm.reference.attention import tree_attention as plain_attention

ISAS = _core.available_isas()
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
NUM_SLOTS = 150

Span = tuple[int, int, int]
Visit = tuple[int, int, list[Span]]


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("ICLPERM_ISA", request.param)
    assert _core.isa() == request.param
    return str(request.param)


@dataclass(frozen=True)
class Case:
    """Inputs of one call: tensors of one dtype, and visits as the oracle takes them."""

    q: Tensor
    k_new: Tensor
    v_new: Tensor
    k_pool: Tensor
    v_pool: Tensor
    visits: list[Visit]
    softcap: float = 0.0
    window: int = 0
    temper: float = 1.0  # of the usual scaling
    sinks: Tensor | None = None

    @property
    def scaling(self) -> float:
        return float(self.temper * self.q.shape[-1] ** -0.5)

    def expected(self) -> Tensor:
        return plain_attention(
            self.q, self.k_new, self.v_new, self.k_pool, self.v_pool, self.visits,
            scaling=self.scaling, softcap=self.softcap, window=self.window, sinks=self.sinks,
        )  # fmt: skip


def as_numpy(x: Tensor) -> npt.NDArray[np.generic]:
    return (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()


def visit_arrays(visits: list[Visit]) -> dict[str, npt.NDArray[np.int64]]:
    spans = [span for _, _, own in visits for span in own]
    rows = [visits[0][0], *(end for _, end, _ in visits)] if visits else [0]
    counts = [len(own) for _, _, own in visits]
    return {
        "visit_row_offsets": np.array(rows, dtype=np.int64),
        "visit_pos": np.array([sum(e - b for _, b, e in own) for _, _, own in visits], dtype=np.int64),
        "span_offsets": np.cumsum([0, *counts], dtype=np.int64),
        "span_source": np.array([source for source, _, _ in spans], dtype=np.int64),
        "span_begin": np.array([begin for _, begin, _ in spans], dtype=np.int64),
        "span_end": np.array([end for _, _, end in spans], dtype=np.int64),
    }


def attend(case: Case, num_threads: int = 1, query_rows: npt.NDArray[np.int64] | None = None) -> Tensor:
    """The kernel's output, in memory that held NaN before."""
    out = torch.full(case.q.shape, torch.nan, dtype=case.q.dtype)
    tensors = (case.q, case.k_new, case.v_new, case.k_pool, case.v_pool, out)
    _core.tree_attention(
        *map(as_numpy, tensors),
        **visit_arrays(case.visits),
        scaling=case.scaling,
        softcap=case.softcap,
        window=case.window,
        sinks=None if case.sinks is None else case.sinks.numpy(),
        num_threads=num_threads,
        query_rows=query_rows,
    )
    return out


def random_case(
    visits: list[Visit],
    *,
    num_rows: int | None = None,
    group_size: int = 1,
    num_kv_heads: int = 1,
    head_dim: int = 16,
    dtype: str = "float32",
    softcap: float = 0.0,
    window: int = 0,
    temper: float = 1.0,
    sinks: list[float] | None = None,
    seed: int = 0,
) -> Case:
    """``sinks`` are the heads' in turn."""
    rng = torch.Generator().manual_seed(seed)
    rows = (visits[-1][1] if visits else 0) if num_rows is None else num_rows

    def normal(count: int, heads: int) -> Tensor:
        return torch.randn(count, heads, head_dim, generator=rng).to(DTYPES[dtype])

    return Case(
        q=normal(rows, group_size * num_kv_heads),
        k_new=normal(rows, num_kv_heads),
        v_new=normal(rows, num_kv_heads),
        k_pool=normal(NUM_SLOTS, num_kv_heads),
        v_pool=normal(NUM_SLOTS, num_kv_heads),
        visits=visits,
        softcap=softcap,
        window=window,
        temper=temper,
        sinks=None if sinks is None else heads_in_turn(sinks, group_size * num_kv_heads),
    )


def heads_in_turn(sinks: list[float], num_heads: int) -> Tensor:
    return torch.tensor([sinks[head % len(sinks)] for head in range(num_heads)])


SINKS = [-np.inf, -1e30, -20.0, -1.0, 0.0, 1.5, 4.0, 8.0, 80.0, 1e4, 1e30]
sink_lists = st.none() | st.lists(st.sampled_from(SINKS), min_size=1, max_size=5)


@st.composite
def spans_of(draw: st.DrawFn, num_rows: int) -> list[Span]:
    """Any path: slices of the pool and of the pack's earlier rows, some of them empty."""
    spans = []
    for _ in range(draw(st.integers(0, 4))):
        source = draw(st.integers(0, 1)) if num_rows else 0
        begin = draw(st.integers(0, (NUM_SLOTS, num_rows)[source]))
        end = draw(st.integers(begin, min(begin + 100, (NUM_SLOTS, num_rows)[source])))
        spans.append((source, begin, end))
    return spans


@st.composite
def forests(draw: st.DrawFn) -> list[Visit]:
    """Visits in pack order; many repeat the path of the one before, as siblings do, or go on from it."""
    visits: list[Visit] = []
    row = draw(st.integers(0, 2))
    for _ in range(draw(st.integers(0, 6))):
        length = draw(st.sampled_from([0, 1, 1, 2, 3, 7, 40, 64, 65]))
        origin = draw(st.sampled_from(["new", "sibling", "child"])) if visits else "new"
        if origin == "new":
            spans = draw(spans_of(row))
        elif origin == "sibling":
            spans = visits[-1][2]
        else:
            spans = [*visits[-1][2], (1, visits[-1][0], visits[-1][1])]
        visits.append((row, row + length, spans))
        row += length
    return visits


cases = st.builds(
    lambda visits, padding, **choices: random_case(
        visits, num_rows=(visits[-1][1] if visits else 0) + padding, **choices
    ),
    forests(),
    st.integers(0, 3),
    group_size=st.sampled_from([1, 2, 7]),
    num_kv_heads=st.integers(1, 2),
    head_dim=st.sampled_from([1, 8, 20, 64, 80, 128, 256]),
    dtype=st.sampled_from(list(DTYPES)),
    softcap=st.sampled_from([0.0, 0.0, 2.0, 50.0]),
    window=st.sampled_from([0, 0, 1, 5, 64, 70, 200]),
    temper=st.sampled_from([1.0, 1.0, 1.0, 0.0, -1.5]),
    sinks=sink_lists,
    seed=st.integers(0, 1000),
)


def dtype_name(case: Case) -> str:
    return str(case.q.dtype).removeprefix("torch.")


def assert_close(case: Case, out: Tensor) -> None:
    torch.testing.assert_close(
        out.double(), case.expected(), rtol=0, atol=TOLERANCES["tree_attention"][dtype_name(case)]
    )


def assert_same_bits(a: Tensor, b: Tensor) -> None:
    is_same = as_numpy(a.contiguous()).tobytes() == as_numpy(b.contiguous()).tobytes()
    assert is_same, (a, b)  # without a comparison of the bytes in words, which takes minutes


@pytest.mark.parametrize("path", ISAS)
@settings(max_examples=60, deadline=None)
@given(case=cases)
def test_agrees_with_plain_attention(path: str, case: Case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ICLPERM_ISA", path)
        assert _core.isa() == path
        assert_close(case, attend(case))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("steps", [(3.0, 3.0), (0.0, 40.0), (12.0, 2.0), (-9.0, 7.5)], ids=str)
def test_scores_may_rise_from_tile_to_tile(isa: str, steps: tuple[float, float], dtype: str) -> None:
    """So that what was summed up is scaled again, by much or by little, or stays; in one row and many."""
    case = random_case([(0, 1, [(0, 0, 150)]), (1, 8, [(0, 0, 150)])], head_dim=16, dtype=dtype)
    lift = torch.zeros(NUM_SLOTS)
    lift[64:128], lift[128:] = steps[0], sum(steps)
    q, k_pool = case.q.clone(), case.k_pool.clone()
    q[..., 0], k_pool[..., 0] = 4.0, lift[:, None].to(k_pool.dtype)  # times a scaling of a fourth
    case = replace(case, q=q, k_pool=k_pool)
    assert_close(case, attend(case))


@pytest.mark.parametrize(
    ("visits", "group_size"),
    [
        pytest.param([(0, 300, [])], 1, id="more lines than an item holds"),
        pytest.param([(0, 90, [(0, 0, 50)])], 7, id="blocks that end between tiles"),
        pytest.param([(0, 2, [(0, 0, 70)])], 300, id="one row has more heads than an item holds lines"),
        pytest.param([(i, i + 1, [(0, 0, 130)]) for i in range(40)], 2, id="many one-row siblings"),
        pytest.param([(3, 5, [(0, 5, 6)] * 130)], 1, id="a path of one-key spans"),
    ],
)
@pytest.mark.parametrize("window", [0, 33])
def test_shapes_at_the_edges_of_blocks(isa: str, visits: list[Visit], group_size: int, window: int) -> None:
    case = random_case(visits, group_size=group_size, head_dim=24, window=window)
    assert_close(case, attend(case, num_threads=2))


def test_takes_any_strides_on_rows_and_heads(isa: str) -> None:
    plain = random_case([(0, 30, [(0, 3, 90)])], group_size=2, num_kv_heads=2, head_dim=20)

    def heads_first(x: Tensor) -> Tensor:
        return x.transpose(0, 1).contiguous().transpose(0, 1)

    def inside_a_larger_pool(x: Tensor) -> Tensor:
        return torch.cat([x, torch.full_like(x, torch.nan)], dim=2)[..., : x.shape[2]]

    strided = replace(
        plain,
        q=heads_first(plain.q),
        k_new=heads_first(plain.k_new),
        k_pool=inside_a_larger_pool(plain.k_pool),
        v_pool=inside_a_larger_pool(heads_first(plain.v_pool)),
    )
    assert not strided.q.is_contiguous()
    assert_same_bits(attend(strided), attend(plain))


@pytest.mark.parametrize("sinks", [None, [2.0]])
def test_rows_of_no_visit_become_zero(isa: str, sinks: list[float] | None) -> None:
    case = random_case([(2, 5, [(0, 0, 9)])], num_rows=8, sinks=sinks)
    out = attend(case)
    assert_same_bits(out[:2], torch.zeros_like(out[:2]))
    assert_same_bits(out[5:], torch.zeros_like(out[5:]))
    assert out[2:5].abs().min() > 0


@pytest.mark.parametrize("sinks", [None, [2.0]])
def test_large_scores_do_not_overflow(isa: str, sinks: list[float] | None) -> None:
    case = random_case([(0, 20, [(0, 0, 100)])], head_dim=8, sinks=sinks)
    case = replace(case, q=1e4 * case.q, k_new=1e4 * case.k_new, k_pool=1e4 * case.k_pool)
    assert_close(case, attend(case))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("softcap", "window"), [(0.0, 0), (2.0, 5)])
def test_sinks_of_minus_infinity_leave_every_bit(isa: str, dtype: str, softcap: float, window: int) -> None:
    visits: list[Visit] = [(0, 20, [(0, 0, 100)]), (20, 23, [])]
    case = random_case(visits, group_size=2, num_kv_heads=2, dtype=dtype, softcap=softcap, window=window)
    assert_same_bits(attend(replace(case, sinks=torch.full((4,), -torch.inf))), attend(case))
    assert_same_bits(attend(replace(case, sinks=torch.full((4,), -3e38))), attend(case))
    assert not attend(replace(case, sinks=torch.full((4,), 3e38))).count_nonzero()


def test_a_sink_is_its_own_heads_and_takes_no_scale(isa: str) -> None:
    """A row that sees one key of score s gives sigmoid(s - sink) of its value."""
    case = random_case([(0, 1, [])], group_size=3, num_kv_heads=2, head_dim=8, temper=0.5)
    case = replace(case, sinks=torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0, 3.0]))
    keys, values = (x[0].double().repeat_interleave(3, dim=0) for x in (case.k_new, case.v_new))
    scores = case.scaling * (case.q[0].double() * keys).sum(dim=1)
    expected = torch.sigmoid(scores - case.sinks)[:, None] * values
    torch.testing.assert_close(attend(case)[0].double(), expected, rtol=0, atol=TOLERANCES["tree_attention"]["float32"])
    torch.testing.assert_close(case.expected()[0], expected, rtol=0, atol=1e-12)


def test_a_sink_that_is_no_number_stays_in_its_head(isa: str) -> None:
    case = random_case([(0, 4, [(0, 0, 90)])], group_size=2, num_kv_heads=2, sinks=[1.0])
    out = attend(replace(case, sinks=torch.tensor([1.0, torch.nan, 1.0, 1.0])))
    assert out[:, 1].isnan().all()
    assert_same_bits(out[:, [0, 2, 3]], attend(case)[:, [0, 2, 3]])


def cut(visits: list[Visit], at: int) -> list[Visit]:
    """The same paths, every span cut after ``at`` keys, with an empty span between."""

    def pieces(span: Span) -> list[Span]:
        source, begin, end = span
        middle = min(begin + at, end)
        return [(source, begin, middle), (source, middle, middle), (source, middle, end)]

    return [(first, last, [piece for span in spans for piece in pieces(span)]) for first, last, spans in visits]


def alone(case: Case, visit: Visit, first: int, last: int) -> Case:
    """Rows [first, last) of one visit as a call of their own: everything before them lies in the pool."""
    begin, _, spans = visit
    moved = [(0, b + source * NUM_SLOTS, e + source * NUM_SLOTS) for source, b, e in [*spans, (1, begin, first)]]
    return replace(
        case,
        q=case.q[first:last],
        k_new=case.k_new[first:last],
        v_new=case.v_new[first:last],
        k_pool=torch.cat([case.k_pool, case.k_new]),
        v_pool=torch.cat([case.v_pool, case.v_new]),
        visits=[(0, last - first, moved)],
    )


def test_few_rows_of_heads_with_the_same_keys_are_shared_out() -> None:
    """64 rows of four heads would all fit into one work item, which one thread works on."""
    num_keys = 1 << 15  # so that a thread that comes late still finds its part
    case = random_case([(row, row + 1, [(0, 0, num_keys)]) for row in range(64)], group_size=4, head_dim=128)
    case = replace(case, k_pool=torch.randn(num_keys, 1, 128), v_pool=torch.randn(num_keys, 1, 128))

    before, mine_before = time.process_time(), time.thread_time()
    while (mine := time.thread_time() - mine_before) < 0.1:
        attend(case, num_threads=2)
    assert time.process_time() - before - mine > mine / 4


@pytest.mark.parametrize("path", ISAS)
@settings(max_examples=25, deadline=None)
@given(case=cases, at=st.integers(0, 70), threads=st.integers(1, 3))
def test_cuts_company_and_threads_change_no_bit(path: str, case: Case, at: int, threads: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ICLPERM_ISA", path)
        together = attend(case)
        assert_same_bits(attend(case, num_threads=threads), together)
        assert_same_bits(attend(replace(case, visits=cut(case.visits, at)), num_threads=threads), together)
        for visit in case.visits:
            begin, end, _ = visit
            middle = min(begin + at, end)
            for first, last in [(begin, middle), (middle, end)]:
                assert_same_bits(attend(alone(case, visit, first, last)), together[first:last])


def test_one_row_at_a_time_gives_the_same_bits(isa: str) -> None:
    case = random_case([(0, 70, [(0, 10, 100)])], group_size=2, head_dim=24, softcap=20.0, window=50)
    together = attend(case)
    for row in range(70):
        assert_same_bits(attend(alone(case, case.visits[0], row, row + 1)), together[row : row + 1])


@st.composite
def live_rows(draw: st.DrawFn) -> list[Visit]:
    """Rows that decode: each one token at the end of a path that begins as others' and goes on in slots of its own."""
    shared, own = draw(st.integers(1, 90)), draw(st.integers(0, 55))
    visits = []
    for row in range(draw(st.integers(2, 6))):
        begin = shared + draw(st.integers(0, NUM_SLOTS - shared - own)) if draw(st.booleans()) else shared
        visits.append((row, row + 1, [(0, 0, shared), (0, begin, begin + own)]))
    return visits


@pytest.mark.parametrize("path", ISAS)
@settings(max_examples=40, deadline=None)
@given(
    visits=live_rows(),
    group_size=st.sampled_from([1, 4, 7, 9, 16, 17]),
    head_dim=st.sampled_from([1, 20, 64, 80, 256]),
    window=st.sampled_from([0, 0, 1, 17, 40, 64]),
    dtype=st.sampled_from(list(DTYPES)),
    softcap=st.sampled_from([0.0, 2.0]),
)
def test_rows_that_decode_have_the_bits_of_rows_that_are_read_together(
    path: str, visits: list[Visit], **of: Any
) -> None:
    """Few lines attend to a tile where it lies, many to one that is gathered: the same row among others is of many."""
    case = random_case(visits, num_kv_heads=2, **of)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ICLPERM_ISA", path)
        out = attend(case, num_threads=2)
        assert_close(case, out)
        for row, _, spans in visits:
            gathered = attend(first_of_many(case, row, spans))
            assert_same_bits(gathered[:1], out[row : row + 1])
            among_others = attend(elsewhere_no_numbers(case, row, spans), num_threads=2)
            assert_same_bits(among_others[row : row + 1], out[row : row + 1])


def elsewhere_no_numbers(case: Case, row: int, spans: list[Span]) -> Case:
    """The same with NaN in every slot and row that one row does not see."""
    seen = np.zeros(len(case.k_pool), bool)
    for _, begin, end in spans:
        seen[begin:end] = True
    slots, rows = ~torch.from_numpy(seen), torch.arange(len(case.k_new)) != row

    def poisoned(x: Tensor, unseen: Tensor) -> Tensor:
        return x.masked_fill(unseen[:, None, None], torch.nan)

    return replace(
        case,
        k_pool=poisoned(case.k_pool, slots),
        v_pool=poisoned(case.v_pool, slots),
        k_new=poisoned(case.k_new, rows),
        v_new=poisoned(case.v_new, rows),
    )


def first_of_many(case: Case, row: int, spans: list[Span]) -> Case:
    """A row as the first of a visit of twenty, which see its keys and one another's."""
    again = [row] * 20
    return replace(
        case, q=case.q[again], k_new=case.k_new[again], v_new=case.v_new[again], visits=[(0, len(again), spans)]
    )


@pytest.mark.parametrize("path", ISAS)
@settings(max_examples=25, deadline=None)
@given(case=cases, choice=st.randoms(use_true_random=False), padding=st.integers(0, 3), threads=st.integers(1, 3))
def test_chosen_rows_have_the_bits_they_have_among_all(
    path: str, case: Case, choice: random.Random, padding: int, threads: int
) -> None:
    owned = [row for begin, end, _ in case.visits for row in range(begin, end)]
    rows = sorted(choice.sample(owned, choice.randint(0, len(owned))))
    q = torch.cat([case.q[rows], torch.full((padding, *case.q.shape[1:]), torch.nan, dtype=case.q.dtype)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ICLPERM_ISA", path)
        out = attend(replace(case, q=q), num_threads=threads, query_rows=np.array(rows, np.int64))
        assert_same_bits(out[: len(rows)], attend(case)[rows])
    assert_same_bits(out[len(rows) :], torch.zeros_like(out[len(rows) :]))


@pytest.mark.parametrize("sinks", [None, [2.0, -np.inf, 9.0]])
def test_what_a_row_may_not_see_cannot_reach_it(isa: str, sinks: list[float] | None) -> None:
    """NaN keys and values after a row, behind its window and in other branches leave its bits alone."""
    visits: list[Visit] = [(0, 20, [(0, 0, 100)]), (20, 40, [(0, 0, 100), (1, 0, 10)]), (40, 41, [(0, 120, 130)])]
    case = random_case(visits, group_size=2, num_kv_heads=2, head_dim=20, window=40, sinks=sinks)
    clean = attend(case)
    # Row 25 stands at position 115 and sees positions 76 .. 115: slots 76 .. 99, rows 0 .. 9, rows 20 .. 25.
    seen_slots = torch.arange(NUM_SLOTS).clamp(76, 99) == torch.arange(NUM_SLOTS)
    seen_rows = torch.zeros(41, dtype=torch.bool)
    seen_rows[:10] = seen_rows[20:26] = True

    def poisoned(x: Tensor, seen: Tensor) -> Tensor:
        return torch.where(seen[:, None, None], x, torch.nan)

    dirty = attend(
        replace(
            case,
            k_new=poisoned(case.k_new, seen_rows),
            v_new=poisoned(case.v_new, seen_rows),
            k_pool=poisoned(case.k_pool, seen_slots),
            v_pool=poisoned(case.v_pool, seen_slots),
        )
    )
    assert_same_bits(dirty[25], clean[25])
    assert dirty[26:].isnan().all()


@pytest.mark.parametrize("name", ["q", "k_pool", "v_pool", "k_new", "v_new"])
@pytest.mark.parametrize("sinks", [None, [2.0]])
def test_nan_on_the_path_comes_out(isa: str, name: str, sinks: list[float] | None) -> None:
    case = random_case([(0, 4, [(0, 0, 90)])], sinks=sinks)
    poisoned = getattr(case, name).clone()
    poisoned[0] = torch.nan
    assert attend(replace(case, **{name: poisoned}))[0].isnan().all()


def test_default_isa_is_the_best_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ICLPERM_ISA", raising=False)
    assert _core.isa() == ISAS[-1]
    assert ISAS[0] == "baseline"


OWN_THREADS = """
import sys
import numpy as np
from iclperm import _core

assert "torch" not in sys.modules
x = np.linspace(-9, 9, 300 * 4096, dtype=np.float32).reshape(300, 4096)
one, three = np.empty_like(x), np.empty_like(x)
_core.activate("silu", x, one, num_threads=1)
for _ in range(20):
    three[:] = np.nan
    _core.activate("silu", x, three, num_threads=3)
    assert one.tobytes() == three.tobytes()
print(_core.thread_backend())
import torch
print(_core.thread_backend())
"""


def test_threads_are_torchs_where_torch_is_loaded() -> None:
    run = subprocess.run(
        [sys.executable, "-P", "-c", OWN_THREADS], capture_output=True, text=True, env=dict(os.environ)
    )
    assert run.returncode == 0, run.stderr
    before, after = run.stdout.split()
    assert before == "std"
    if sys.platform == "linux":
        assert after == "gomp"
