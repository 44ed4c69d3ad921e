"""Triton's tree attention: exact against plain attention, blind to everything off a row's path, whatever its company.

It runs on a CUDA device, else in Triton's interpreter (`devices`).
"""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import triton_interpreter
from devices import DEVICE, DTYPES, HAS_GPU, interpreted, moved, poisoned_empty
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tree_attention import (
    NUM_SLOTS,
    Case,
    Visit,
    alone,
    assert_same_bits,
    cut,
    forests,
    random_case,
    sink_lists,
    visit_arrays,
)
from test_tree_attention import attend as attend_natively
from tolerances import TOLERANCES
from torch import Tensor
from zoo import VOCAB, ZOO

from iclperm.engine import Engine
from iclperm.engine.kernels import triton_attention
from iclperm.engine.kernels.rule import AttentionRule, LayerStates
from iclperm.engine.kernels.tiles import list_tiles
from iclperm.engine.kernels.triton_attention import TritonAttention
from iclperm.engine.plan import Pack
from iclperm.errors import ModelError, RequestError
from iclperm.reference import scoring

triton_interpreter.repair()
# NumPy, which the interpreter computes with, warns of NaN and Inf that are there on purpose.
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning", "ignore:invalid value:RuntimeWarning"),
]

# On a device its own launch configurations run; the interpreter runs all that are shipped.
ARCHITECTURES = [0] if HAS_GPU else [75, 80, 86, 90]


def pack_of(visits: list[Visit]) -> Pack:
    """A pack of these visits alone: nothing to retain, nothing to score."""
    arrays = visit_arrays(visits)
    num_rows = visits[-1][1] if visits else 0
    positions = np.zeros(num_rows, np.int32)
    for (begin, end, _), pos in zip(visits, arrays["visit_pos"], strict=True):
        positions[begin:end] = pos + np.arange(end - begin)
    return Pack.of(token_ids=np.zeros(num_rows, np.int32), positions=positions, held_tokens=0, **arrays)


def attend(case: Case, query_rows: npt.NDArray[np.int64] | None = None, arch: int = ARCHITECTURES[0]) -> Tensor:
    """The kernel's output, in memory that held NaN before, brought to the CPU."""
    rule = AttentionRule(case.scaling, case.softcap, case.window)
    inputs = [moved(x) for x in (case.q, case.k_new, case.v_new, case.k_pool, case.v_pool)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", poisoned_empty)
        states = LayerStates(*inputs, query_rows, None if case.sinks is None else moved(case.sinks))
        return TritonAttention(pack_of(case.visits), arch or None)(states, rule).cpu()


def in_dtype(case: Case, name: str) -> Case:
    tensors = {key: getattr(case, key).to(DTYPES[name]) for key in ("q", "k_new", "v_new", "k_pool", "v_pool")}
    return replace(case, **tensors)


def make_case(visits: list[Visit], padding: int, dtype: str, **choices: Any) -> Case:
    num_rows = (visits[-1][1] if visits else 0) + padding
    return in_dtype(random_case(visits, num_rows=num_rows, **choices), dtype)


cases = st.builds(
    make_case,
    forests(),
    st.integers(0, 3),
    st.sampled_from(list(DTYPES)),
    group_size=st.sampled_from([1, 2, 4, 7]),
    num_kv_heads=st.integers(1, 2),
    head_dim=st.sampled_from([1, 16, 40, 64, 80, 96, 128, 256]),
    softcap=st.sampled_from([0.0, 0.0, 2.0, 50.0]),
    window=st.sampled_from([0, 0, 1, 5, 64, 70, 200]),
    sinks=sink_lists,
    seed=st.integers(0, 1000),
)


def assert_close(case: Case, out: Tensor) -> None:
    name = str(case.q.dtype).removeprefix("torch.")
    torch.testing.assert_close(out.double(), case.expected(), rtol=0, atol=TOLERANCES["triton_attention"][name])


@settings(max_examples=40, deadline=None)
@given(case=cases, arch=st.sampled_from(ARCHITECTURES))
def test_agrees_with_plain_attention(case: Case, arch: int) -> None:
    assert_close(case, attend(case, arch=arch))


@settings(max_examples=15, deadline=None)
@given(case=cases.filter(lambda case: case.q.dtype != torch.float16))
def test_agrees_with_the_kernel_of_the_cpu(case: Case) -> None:
    name = str(case.q.dtype).removeprefix("torch.")
    torch.testing.assert_close(attend(case), attend_natively(case), rtol=0, atol=TOLERANCES["triton_attention"][name])


@pytest.mark.parametrize(
    ("visits", "group_size"),
    [
        pytest.param([(0, 300, [])], 1, id="more rows than a block holds"),
        pytest.param([(0, 90, [(0, 0, 50)])], 7, id="blocks that end between tiles"),
        pytest.param([(0, 2, [(0, 0, 70)])], 300, id="one row has more heads than a block holds lines"),
        pytest.param([(i, i + 1, [(0, 0, 130)]) for i in range(40)], 2, id="many one-row siblings"),
        pytest.param([(i, i + 1, [(0, i, i + 90)]) for i in range(40)], 2, id="many one-row strangers"),
        pytest.param([(3, 5, [(0, 5, 6)] * 130)], 1, id="a path of one-key spans"),
        pytest.param([(0, 64, []), (64, 128, [(1, 0, 64)]), (128, 130, [(1, 0, 128)])], 1, id="visits of whole tiles"),
    ],
)
@pytest.mark.parametrize("window", [0, 33])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_shapes_at_the_edges_of_blocks(visits: list[Visit], group_size: int, window: int, arch: int) -> None:
    case = random_case(visits, group_size=group_size, head_dim=24, window=window)
    assert_close(case, attend(case, arch=arch))


@pytest.mark.parametrize("sinks", [None, [2.0], [-np.inf]])
@pytest.mark.parametrize(("num_rows", "visits"), [(0, []), (5, []), (9, [(2, 5, [(0, 0, 9)])])])
def test_rows_of_no_visit_become_zero(num_rows: int, visits: list[Visit], sinks: list[float] | None) -> None:
    case = random_case(visits, num_rows=num_rows, sinks=sinks)
    out = attend(case)
    owned = torch.zeros(num_rows, dtype=torch.bool)
    for begin, end, _ in visits:
        owned[begin:end] = True
    assert_same_bits(out[~owned], torch.zeros_like(out[~owned]))
    assert not owned.any() or out[owned].abs().min() > 0


@pytest.mark.parametrize("sinks", [None, [2.0]])
def test_large_scores_do_not_overflow(sinks: list[float] | None) -> None:
    case = random_case([(0, 20, [(0, 0, 100)])], head_dim=16, sinks=sinks)
    case = replace(case, q=1e4 * case.q, k_new=1e4 * case.k_new, k_pool=1e4 * case.k_pool)
    assert_close(case, attend(case))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("softcap", "window"), [(0.0, 0), (2.0, 5)])
def test_sinks_of_minus_infinity_leave_every_bit(dtype: str, softcap: float, window: int) -> None:
    visits: list[Visit] = [(0, 20, [(0, 0, 100)]), (20, 23, [])]
    case = make_case(visits, 2, dtype, group_size=2, num_kv_heads=2, softcap=softcap, window=window)
    assert_same_bits(attend(replace(case, sinks=torch.full((4,), -torch.inf))), attend(case))
    assert_same_bits(attend(replace(case, sinks=torch.full((4,), -1e30))), attend(case))


def test_a_sink_that_is_no_number_stays_in_its_head() -> None:
    case = random_case([(0, 4, [(0, 0, 90)])], group_size=2, num_kv_heads=2, sinks=[1.0])
    out = attend(replace(case, sinks=torch.tensor([1.0, torch.nan, 1.0, 1.0])))
    assert out[:, 1].isnan().all()
    assert_same_bits(out[:, [0, 2, 3]], attend(case)[:, [0, 2, 3]])


def test_takes_any_strides_on_rows_and_heads() -> None:
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


@settings(max_examples=10, deadline=None)
@given(case=cases, at=st.integers(0, 70), arch=st.sampled_from(ARCHITECTURES))
def test_cuts_and_company_change_no_bit(case: Case, at: int, arch: int) -> None:
    together = attend(case, arch=arch)
    assert_same_bits(attend(replace(case, visits=cut(case.visits, at)), arch=arch), together)
    for visit in case.visits:
        begin, end, _ = visit
        middle = min(begin + at, end)
        for first, last in [(begin, middle), (middle, end)]:
            assert_same_bits(attend(alone(case, visit, first, last), arch=arch), together[first:last])


@settings(max_examples=15, deadline=None)
@given(case=cases, choice=st.randoms(use_true_random=False), padding=st.integers(0, 3))
def test_chosen_rows_have_the_bits_they_have_among_all(case: Case, choice: random.Random, padding: int) -> None:
    owned = [row for begin, end, _ in case.visits for row in range(begin, end)]
    rows = sorted(choice.sample(owned, choice.randint(0, len(owned))))
    q = torch.cat([case.q[rows], torch.full((padding, *case.q.shape[1:]), torch.nan, dtype=case.q.dtype)])
    out = attend(replace(case, q=q), np.array(rows, np.int64))
    assert_same_bits(out[: len(rows)], attend(case)[rows])
    assert_same_bits(out[len(rows) :], torch.zeros_like(out[len(rows) :]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "sinks"), [(0, None), (40, None), (40, [2.0, -np.inf, 9.0])])
def test_what_a_row_may_not_see_cannot_reach_it(window: int, sinks: list[float] | None, dtype: str) -> None:
    """NaN keys and values after a row, behind its window and in other branches leave its bits alone."""
    visits: list[Visit] = [(0, 20, [(0, 0, 100)]), (20, 40, [(0, 0, 100), (1, 0, 10)]), (40, 41, [(0, 120, 130)])]
    case = in_dtype(random_case(visits, group_size=2, num_kv_heads=2, head_dim=20, window=window, sinks=sinks), dtype)
    clean = attend(case)
    # Row 25 stands at position 115 and sees slots 0 .. 99, rows 0 .. 9 and 20 .. 25; in a window of 40 from slot 76 on.
    seen_slots = torch.arange(NUM_SLOTS).clamp(76 if window else 0, 99) == torch.arange(NUM_SLOTS)
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


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["q", "k_pool", "v_pool", "k_new", "v_new"])
def test_what_is_not_finite_on_the_path_comes_out(name: str, broken: float) -> None:
    case = random_case([(0, 4, [(0, 0, 90)])], sinks=[2.0])
    poisoned = getattr(case, name).clone()
    poisoned[0] = broken
    assert not attend(replace(case, **{name: poisoned}))[0].isfinite().any()


@settings(max_examples=100, deadline=None)
@given(
    visits=forests(),
    padding=st.integers(0, 3),
    block_rows=st.sampled_from([1, 2, 18, 128]),
    size=st.sampled_from([4, 16, 64]),
    window=st.sampled_from([0, 0, 1, 5, 64, 70]),
    choice=st.none() | st.randoms(use_true_random=False),
)
def test_tile_lists_hold_every_path_once(
    visits: list[Visit], padding: int, block_rows: int, size: int, window: int, choice: random.Random | None
) -> None:
    paths = {}
    for begin, end, spans in visits:
        ancestors = [key if source else ~key for source, a, b in spans for key in range(a, b)]
        paths |= {row: [*ancestors, *range(begin, row + 1)] for row in range(begin, end)}
    chosen = None if choice is None else np.array(sorted(choice.sample(sorted(paths), len(paths) // 2)), np.int64)
    rows = list(range(visits[-1][1] if visits else 0)) if chosen is None else chosen.tolist()
    num_rows = len(rows) + padding
    lists = list_tiles(pack_of(visits), num_rows, chosen, block_rows=block_rows, tile_keys=size, window=window)
    walked: dict[int, list[int]] = {}
    for row_begin, row_end, first, full_begin, full_end, last in lists.blocks.tolist():
        assert 0 < row_end - row_begin <= block_rows
        for row in range(row_begin, row_end):
            walked[row] = []
            pos = int(lists.row_pos[row])
            for number in range(first, last):
                tile, level, entry_begin, entry_end = lists.entries[number].tolist()
                if not entry_begin <= row < entry_end:
                    assert not full_begin <= number < full_end
                    continue
                visible = [
                    p for p in range(level * size, level * size + size) if p <= pos and not 0 < window <= pos - p
                ]
                assert len(visible) == size or not full_begin <= number < full_end
                walked[row] += [int(lists.keys[tile, p - level * size]) for p in visible]
    for number in range(num_rows):
        path = paths.get(rows[number], []) if number < len(rows) else []
        assert lists.row_pos[number] == len(path) - 1
        assert walked[number] == (path[-window:] if window else path)
    assert len(walked) == num_rows


def product_visits(num_tokens: int, num_queries: int) -> list[Visit]:
    """A context, and below it queries of 40 tokens with four labels of two: what packs are made of."""
    visits: list[Visit] = [(0, num_tokens, [])]
    for row in range(num_tokens, num_tokens + 48 * num_queries, 48):
        visits.append((row, row + 40, [(1, 0, num_tokens)]))
        labels = range(row + 40, row + 48, 2)
        visits += [(label, label + 2, [(1, 0, num_tokens), (1, row, row + 40)]) for label in labels]
    return visits


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256] if HAS_GPU else [80])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("softcap", "window"), [(0.0, 0), (50.0, 128)])
def test_a_pack_as_in_a_study(head_dim: int, dtype: str, softcap: float, window: int) -> None:
    """On a GPU of real size."""
    visits = product_visits(*((500, 60) if HAS_GPU else (70, 2)))
    case = make_case(visits, 3, dtype, group_size=6, num_kv_heads=2, head_dim=head_dim, softcap=softcap, window=window)
    together = attend(case)
    assert_close(case, together)
    for visit in visits[:: 37 if HAS_GPU else 4]:
        assert_same_bits(attend(alone(case, visit, visit[0], visit[1])), together[visit[0] : visit[1]])
    rows = np.array([end - 1 for _, end, _ in visits], np.int64)
    assert_same_bits(attend(replace(case, q=case.q[rows]), rows), together[rows])


def call_with(**changes: Any) -> Tensor:
    case = random_case([(0, 3, [(0, 0, 9)]), (3, 5, [(0, 0, 9), (1, 0, 3)])], group_size=2, num_kv_heads=2, head_dim=16)
    arguments = {"q": case.q, "k": case.k_new, "v": case.v_new, "k_pool": case.k_pool, "v_pool": case.v_pool}
    arguments = {name: moved(changes.pop(name, x)) for name, x in arguments.items()}
    query_rows, sinks = changes.pop("query_rows", None), changes.pop("sinks", torch.zeros(4))
    rule = AttentionRule(**({"scaling": 1.0, "softcap": 0.0, "window": 0} | changes))
    return TritonAttention(pack_of(case.visits))(
        LayerStates(**arguments, query_rows=query_rows, sinks=moved(sinks)), rule
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(5, 4, 16, dtype=torch.float64)},
         "q is torch.float64 on .*; float32, bfloat16 or float16, and one device, are needed"),
        ({"v": torch.zeros(5, 2, 16, dtype=torch.float16)},
         "v is torch.float16 on .* and q torch.float32 on .*; float32, bfloat16 or float16, and one device, are .*"),
        ({"q": torch.zeros(5, 3, 16)}, "q has 3 heads, not a multiple up to 65535 of the 2 key-value heads of k"),
        ({"q": torch.zeros(5, 4, 257)}, "q has head dimension 257; the Triton kernel takes 1 to 256"),
        ({"q": torch.zeros(5, 4, 8)}, r"k is \[5, 2, 16\]; at least \[5, 2, 8\] is needed"),
        ({"q": torch.zeros(4, 4, 16)}, r"q is \[4, 4, 16\]; at least \[5, 4, 16\] is needed"),
        ({"q": torch.zeros(1, 4, 16), "query_rows": np.array([0, 2])},
         r"q is \[1, 4, 16\]; at least \[2, 4, 16\] is needed"),
        ({"k": torch.zeros(5, 2, 32)[..., ::2]}, r"k is not contiguous on its last axis \(stride of 2 elements\)"),
        ({"sinks": torch.zeros(2)}, r"sinks are torch.float32 \[2\] on .*; torch.float32 \[4\] on .* is needed"),
        ({"sinks": torch.zeros(4).half()}, r"sinks are torch.float16 \[4\] on .*; torch.float32 \[4\] on .* is needed"),
        ({"sinks": torch.zeros(8)[::2]}, r"sinks are not contiguous \(stride of 2 elements\)"),
        ({"k_pool": torch.zeros(8, 2, 16)}, r"k_pool is \[8, 2, 16\]; at least \[9, 2, 16\] is needed"),
        ({"v_pool": torch.zeros(9, 2, 16)}, r"v_pool is \[9, 2, 16\]; at least \[150, 2, 16\] is needed"),
        ({"scaling": 0.0},
         r"AttentionRule\(scaling=0.0, .*\) cannot be: scaling must be positive, softcap and window 0 .* or positive"),
        ({"softcap": -1.0}, r"AttentionRule\(.*softcap=-1.0, .*\) cannot be: .*"),
        ({"window": -2}, r"AttentionRule\(.*window=-2\) cannot be: .*"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=f"^{message}$"):
        call_with(**changes)


def test_good_input_of_the_bad_input_test_is_accepted() -> None:
    assert call_with().isfinite().all()
    with pytest.raises(ValueError, match="negative"):  # torch itself has no tensors that run backwards
        call_with(q=torch.from_numpy(np.zeros((5, 4, 16), np.float32)[::-1]))


def test_tile_lists_are_made_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def counted(*args: Any, **options: Any) -> Any:
        made.append(options["window"])
        return list_tiles(*args, **options)

    monkeypatch.setattr(triton_attention, "list_tiles", counted)
    case = random_case([(0, 9, [(0, 0, 90)])])
    attention = TritonAttention(pack_of(case.visits))
    inputs = [x.to(DEVICE) for x in (case.q, case.k_new, case.v_new, case.k_pool, case.v_pool)]
    for _ in range(3):
        for window in (0, 20, 5000):  # a window that nobody leaves is none
            attention(LayerStates(*inputs), AttentionRule(1.0, 0.0, window))
        attention(LayerStates(inputs[0][:1], *inputs[1:], np.array([8])), AttentionRule(1.0, 0.0, 0))
    assert made == [0, 20, 0]


def requests_of(vocab: int) -> list[tuple[list[int], list[int]]]:
    """Shared stems past the window, labels with a common first token, a stranger."""
    rng = np.random.default_rng(0)
    stem = rng.integers(0, vocab, 70).tolist()
    requests = [(stem[:n], label) for n in (1, 20, 64, 70) for label in ([3], [4, 5], [4, 6, 7])]
    return [*requests, ([2, 1], [5]), ([*stem[:30], 1], stem[:3])]


@pytest.mark.parametrize("name", ["llama", "qwen2-window", "gemma2"])
def test_an_engine_on_triton_agrees_with_plain_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, requests = ZOO[name].build().to(DEVICE), requests_of(VOCAB)
    calls: list[torch.dtype] = []
    original = TritonAttention.__call__

    def counted(self: TritonAttention, *args: Any) -> Tensor:
        calls.append(args[0].q.dtype)
        return original(self, *args)

    monkeypatch.setattr(TritonAttention, "__call__", counted)
    engine = Engine(model, pack_tokens=24, self_check=False)
    assert engine.attention == "triton"
    scores = engine.loglikelihood(requests)
    assert len(calls) == engine.report.num_packs * model.config.num_hidden_layers
    assert engine.report.num_packs > 2, "keys never crossed a pack border"
    for fast, plain in zip(scores.logprob, scoring.loglikelihood(model, requests), strict=True):
        assert abs(fast - plain.logprob) <= TOLERANCES["loglikelihood per token"]["float32"] * plain.num_tokens


def test_attention_in_float64_is_refused() -> None:
    with pytest.raises(ModelError, match=NOT_SERVED):
        Engine(ZOO["llama"].build().to(DEVICE).double(), attention="triton", self_check=False)


@interpreted("a CPU is asked")
def test_triton_is_refused_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ModelError, match=r"not torch.float32 with \d+ on cpu"):
        Engine(ZOO["llama"].build(), attention="triton", self_check=False)


NOT_SERVED = (
    r"^triton attention runs float32, bfloat16 and float16 with heads of up to 256 dimensions on CUDA devices where "
    r"triton is installed, not torch.float64 with \d+ on c\w+(:0)?; choose attention='auto' "
    r"\(iclperm run --attention auto\)$"
)
