"""Attention of decoding rows: exact against plain attention, blind to all but a row's path, the same in any company.

It runs on a CUDA device, else in Triton's interpreter (`devices`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import triton_interpreter
from devices import DEVICE, DTYPES, moved, poisoned_empty
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tree_attention import heads_in_turn, sink_lists
from tolerances import TOLERANCES
from torch import Tensor

from iclperm.engine.kernels import live
from iclperm.engine.kernels.chunks import CHUNK, PIECE, list_items
from iclperm.engine.kernels.live import LiveSlots
from iclperm.engine.kernels.rule import AttentionRule, LayerStates
from iclperm.engine.kernels.triton_decode import DecodeAttention
from iclperm.engine.link import DeviceLink
from iclperm.engine.plan import LiveRows, Pack
from iclperm.engine.tables import PackTables
from iclperm.errors import RequestError
from iclperm.reference.attention import path_attention

triton_interpreter.repair()
# NumPy, which the interpreter computes with, warns of NaN and Inf that are there on purpose.
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning", "ignore:invalid value:RuntimeWarning"),
]

Slots = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Scene:
    """Live rows: the pool slots of their paths, used and not yet used, and how many are used; what they attend with.

    ``shared`` are leading positions in common with the row before. Slots that no path has used hold NaN, as those of
    the newest keys do, which are in ``k`` and ``v`` alone.
    """

    paths: list[Slots]
    lengths: list[int]
    shared: list[int]
    states: LayerStates
    rule: AttentionRule

    def expected(self) -> Tensor:
        """Row after row from its own keys alone."""
        states, rule = self.states, self.rule
        out = torch.zeros(states.q.shape, dtype=torch.float64)
        for row, (path, length) in enumerate(zip(self.paths, self.lengths, strict=True)):
            used = path[: length - 1]
            keys, values = (
                torch.cat([pool[used], new[row : row + 1]])
                for pool, new in ((states.k_pool, states.k), (states.v_pool, states.v))
            )
            out[row : row + 1] = path_attention(
                states.q[row : row + 1], keys, values,
                scaling=rule.scaling, softcap=rule.softcap, window=rule.window, sinks=states.sinks,
            )  # fmt: skip
        return out

    def only(self, rows: Sequence[int]) -> Scene:
        """Some of the rows, in their order, which need not lie beside those that share their keys."""
        places = list(rows)
        states = replace(self.states, **{name: getattr(self.states, name)[places] for name in ("q", "k", "v")})
        paths = [self.paths[row] for row in places]
        lengths = [self.lengths[row] for row in places]
        return Scene(paths, lengths, common_with_the_one_before(paths, lengths), states, self.rule)


def common_with_the_one_before(paths: list[Slots], lengths: list[int]) -> list[int]:
    """Leading positions that each path has in common with the one before it, both being used there."""
    common = [0]
    for row in range(1, len(paths)):
        size = min(lengths[row - 1], lengths[row]) - 1
        same = paths[row - 1][:size] == paths[row][:size]
        common.append(int(same.argmin()) if not same.all() else size)
    return common


def scene_of(
    forks: Sequence[tuple[int, int, int, int]],
    *,
    group_size: int = 1,
    num_kv_heads: int = 1,
    head_dim: int = 16,
    dtype: str = "float32",
    softcap: float = 0.0,
    window: int = 0,
    padding: int = 0,
    sinks: list[float] | None = None,
    seed: int = 0,
) -> Scene:
    """Rows that each go on from an earlier one: (which, how much of its path at most, own positions, unused slots);
    ``sinks`` are the heads' in turn."""
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    paths, lengths = list[Slots](), list[int]()
    order = rng.permutation(sum(own + unused for _, _, own, unused in forks) + 8)
    order = np.sort(order.reshape(-1, 1), axis=1).ravel() if seed % 2 else order  # in one piece or scattered
    taken = 0
    for which, most, own, unused in forks:
        stem = paths[which % len(paths)][: min(most, lengths[which % len(paths)] - 1)] if paths else order[:0]
        fresh = order[taken : taken + own + unused]
        taken += own + unused
        paths.append(np.concatenate([stem, fresh]))
        lengths.append(stem.size + own)

    def normal(count: int, heads: int) -> Tensor:
        return torch.randn(count, heads, head_dim, generator=generator).to(DTYPES[dtype])

    num_rows, pools = len(paths), (normal(order.size, num_kv_heads), normal(order.size, num_kv_heads))
    is_used = np.zeros(order.size, bool)
    for path, length in zip(paths, lengths, strict=True):
        is_used[path[: length - 1]] = True
    for pool in pools:
        pool[~is_used] = torch.nan
    q, k, v = (normal(num_rows + padding, heads) for heads in (group_size * num_kv_heads, num_kv_heads, num_kv_heads))
    rule = AttentionRule(head_dim**-0.5, softcap, window)
    states = LayerStates(q, k, v, *pools, sinks=None if sinks is None else heads_in_turn(sinks, q.shape[1]))
    return Scene(paths, lengths, common_with_the_one_before(paths, lengths), states, rule)


def live_pack(scene: Scene, lanes: npt.NDArray[np.int32] | None = None, width: int = 0) -> Pack:
    """A pack of these rows alone."""
    num_rows = len(scene.paths)
    lanes = np.arange(num_rows, dtype=np.int32)[::-1] if lanes is None else lanes
    width = width or -(-max(path.size for path in scene.paths) // PIECE) * PIECE
    places = [int(lane) * width + np.arange(path.size) for lane, path in zip(lanes, scene.paths, strict=True)]
    live = LiveRows(
        num_lanes=int(lanes.max()) + 1,
        width=width,
        lanes=lanes.copy(),
        lengths=np.array([path.size for path in scene.paths], np.int32),
        shared=np.array(scene.shared, np.int32),
        changed_place=np.concatenate(places),
        changed_slot=np.concatenate(scene.paths).astype(np.int32),
    )
    return Pack.of(
        token_ids=np.zeros(num_rows), positions=np.array(scene.lengths) - 1, visit_row_offsets=[num_rows],
        held_tokens=0, live=live,
    )  # fmt: skip


def attend(scene: Scene) -> Tensor:
    """The kernels' output, in memory that held NaN before, brought to the CPU."""
    states = on_device(scene.states)
    tables = PackTables.alone(live_pack(scene), DEVICE, states.q.shape[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", poisoned_empty)
        return DecodeAttention(tables, LiveSlots())(states, scene.rule).cpu()


STATES = ("q", "k", "v", "k_pool", "v_pool")


def on_device(states: LayerStates) -> LayerStates:
    sinks = None if states.sinks is None else moved(states.sinks)
    return LayerStates(**{name: moved(getattr(states, name)) for name in STATES}, sinks=sinks)


def assert_same_bits(a: Tensor, b: Tensor) -> None:
    assert a.shape == b.shape
    assert a.contiguous().view(torch.uint8).equal(b.contiguous().view(torch.uint8)), (a, b)


def assert_close(scene: Scene, out: Tensor) -> None:
    name = str(out.dtype).removeprefix("torch.")
    torch.testing.assert_close(out.double(), scene.expected(), rtol=0, atol=TOLERANCES["triton_attention"][name])


BORDERS = [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 255, 256, 257, 300, 511, 512, 513, 700]
forks = st.tuples(
    st.integers(0, 99),
    st.sampled_from([0, *BORDERS, 10_000]),
    st.sampled_from(BORDERS) | st.integers(1, 40),
    st.integers(0, 20) | st.just(256),
)
scenes = st.builds(
    scene_of,
    st.lists(forks, min_size=1, max_size=8),
    group_size=st.sampled_from([1, 2, 4, 7, 17]),
    num_kv_heads=st.integers(1, 2),
    head_dim=st.sampled_from([1, 16, 40, 64, 80, 96, 128, 256]),
    dtype=st.sampled_from(list(DTYPES)),
    softcap=st.sampled_from([0.0, 0.0, 2.0, 50.0]),
    window=st.sampled_from([0, 0, 1, 5, 64, 70, 256, 257, 600]),
    padding=st.integers(0, 3),
    sinks=sink_lists,
    seed=st.integers(0, 1000),
)


@settings(max_examples=24, deadline=None)
@given(scene=scenes)
def test_agrees_with_plain_attention(scene: Scene) -> None:
    assert_close(scene, attend(scene))


@settings(max_examples=12, deadline=None)
@given(scene=scenes, choice=st.randoms(use_true_random=False))
def test_company_changes_no_bit(scene: Scene, choice: Any) -> None:
    together = attend(scene)
    rows = list(range(len(scene.paths)))
    choice.shuffle(rows)
    for some in ([rows[0]], rows[: len(rows) // 2], rows):
        if some:
            assert_same_bits(attend(scene.only(some))[: len(some)], together[some])


# Which row each goes on from, how much of its path at most, own positions, unused slots.
CONTEXT, QUERIES = (0, 0, 700, 0), [(0, 690, own, 256) for own in (40, 41, 64, 300)]
EDGES = {
    "one row": [(0, 0, 1, 0)],
    "a path of many chunks": [(0, 0, 1500, 0)],
    "rows that share all but their newest token": [CONTEXT, *[(0, 10_000, 1, 3)] * 5],
    "a context that ends within a tile": [CONTEXT, *QUERIES],
    "two contexts": [CONTEXT, *QUERIES, (0, 100, 600, 0), *[(5, 650, 30, 0)] * 3],
    "rows that share half of what their neighbours do": [(0, 0, 600, 0), *[(0, 512, 9, 0)] * 3, (0, 130, 9, 0)],
    "strangers": [(0, 0, own, 7) for own in (255, 256, 257, 1)],
}


@pytest.mark.parametrize("name", EDGES)
@pytest.mark.parametrize(("window", "sinks"), [(0, None), (33, None), (33, [2.0, -np.inf])])
def test_rows_at_the_edges_of_items(name: str, window: int, sinks: list[float] | None) -> None:
    scene = scene_of(EDGES[name], group_size=2, head_dim=24, window=window, padding=3, sinks=sinks)
    out = attend(scene)
    assert_close(scene, out)
    assert not out[len(scene.paths) :].count_nonzero()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("softcap", "window"), [(0.0, 0), (2.0, 33)])
def test_sinks_of_minus_infinity_leave_every_bit(dtype: str, softcap: float, window: int) -> None:
    scene = scene_of([CONTEXT, *QUERIES], group_size=2, head_dim=16, dtype=dtype, softcap=softcap, window=window)
    for low in (-torch.inf, -1e30):
        same = replace(scene, states=replace(scene.states, sinks=torch.full((2,), low)))
        assert_same_bits(attend(same), attend(scene))


def test_300_rows() -> None:
    scene = scene_of([(0, 0, 70, 0), *[(0, 69, 3, 20)] * 299], head_dim=16)
    assert_close(scene, attend(scene))


@pytest.mark.parametrize("group_size", [1, 7, 40, 70])
@pytest.mark.parametrize("dtype", DTYPES)
def test_groups_smaller_and_larger_than_an_item(group_size: int, dtype: str) -> None:
    scene = scene_of([CONTEXT, *QUERIES], group_size=group_size, head_dim=16, dtype=dtype)
    assert_close(scene, attend(scene))


def test_large_scores_do_not_overflow() -> None:
    scene = scene_of([CONTEXT, *QUERIES], head_dim=16)
    states = replace(scene.states, q=1e4 * scene.states.q, k=1e4 * scene.states.k, k_pool=1e4 * scene.states.k_pool)
    scene = replace(scene, states=states)
    assert_close(scene, attend(scene))


def test_takes_any_strides_on_rows_and_heads() -> None:
    plain = scene_of([CONTEXT, *QUERIES], group_size=2, num_kv_heads=2, head_dim=20)

    def heads_first(x: Tensor) -> Tensor:
        return x.transpose(0, 1).contiguous().transpose(0, 1)

    def inside_a_larger_one(x: Tensor) -> Tensor:
        return torch.cat([x, torch.full_like(x, torch.nan)], dim=2)[..., : x.shape[2]]

    states = plain.states
    strided = LayerStates(
        heads_first(states.q), inside_a_larger_one(states.k), heads_first(states.v),
        inside_a_larger_one(states.k_pool), inside_a_larger_one(heads_first(states.v_pool)),
    )  # fmt: skip
    assert_same_bits(attend(replace(plain, states=strided)), attend(plain))


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["k_pool", "v_pool"])
@pytest.mark.parametrize("position", [0, 300, 650, 720])
def test_what_is_not_finite_comes_out_of_the_rows_that_see_it(position: int, name: str, broken: float) -> None:
    """In a shared chunk, in a shared part of a chunk, and among a row's own keys."""
    scene = scene_of([CONTEXT, *QUERIES], head_dim=16)
    clean, pool = attend(scene), getattr(scene.states, name).clone()
    slot = scene.paths[2][position]
    pool[slot] = broken
    out = attend(replace(scene, states=replace(scene.states, **{name: pool})))
    seeing = [bool((path[: size - 1] == slot).any()) for path, size in zip(scene.paths, scene.lengths, strict=True)]
    assert any(seeing)
    assert not out[seeing].isfinite().any()
    unseeing = [not sees for sees in seeing]
    assert_same_bits(out[unseeing], clean[unseeing])


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_what_is_not_finite_in_a_row_stays_in_it(name: str) -> None:
    scene = scene_of([CONTEXT, *QUERIES], head_dim=16)
    clean, new = attend(scene), getattr(scene.states, name).clone()
    new[2] = torch.nan
    out = attend(replace(scene, states=replace(scene.states, **{name: new})))
    others = [0, 1, 3, 4]
    assert not out[2].isfinite().any()
    assert_same_bits(out[others], clean[others])


@pytest.mark.parametrize("name", ["k_pool", "v_pool"])
def test_what_a_window_has_left_behind_cannot_reach_a_row(name: str) -> None:
    scene = scene_of([CONTEXT, *QUERIES], head_dim=16, window=200)
    clean, pool = attend(scene), getattr(scene.states, name).clone()
    nearest = min(scene.lengths[row] for row in range(1, 5)) - 200
    pool[scene.paths[1][:nearest]] = torch.nan
    out = attend(replace(scene, states=replace(scene.states, **{name: pool})))
    assert_same_bits(out[1:], clean[1:])


def test_the_newest_keys_are_in_the_pool_afterwards() -> None:
    scene = scene_of([CONTEXT, *QUERIES], num_kv_heads=2, head_dim=16)
    states = on_device(scene.states)
    tables = PackTables.alone(live_pack(scene), DEVICE, 5)
    DecodeAttention(tables, LiveSlots())(states, scene.rule)
    newest = [int(path[length - 1]) for path, length in zip(scene.paths, scene.lengths, strict=True)]
    assert_same_bits(states.k_pool[newest], states.k)
    assert_same_bits(states.v_pool[newest], states.v)


@pytest.mark.parametrize("window", [0, 130])
def test_steps_that_go_on_have_the_bits_of_steps_made_anew(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over borders of tiles and chunks, without a list made or an upload after the first step."""
    forks = [(0, 0, 500, 0), *[(0, 480, own, 40) for own in (3, 20, 30, 31, 60)]]
    scene, steps = scene_of(forks, group_size=2, head_dim=16, window=window, sinks=[1.0, 3.0]), 20
    scene = scene.only(range(1, 6))
    rng = torch.Generator().manual_seed(1)
    made: list[str] = []
    counted(monkeypatch, live, "list_items", made)
    counted(monkeypatch, DeviceLink, "upload", made)
    tables, slots = PackTables.alone(live_pack(scene), DEVICE, 5), LiveSlots()
    states = on_device(scene.states)
    for step in range(steps):
        before = LayerStates(
            **{name: getattr(states, name).to("cpu", copy=True) for name in STATES}, sinks=scene.states.sinks
        )
        made.clear()
        going_on = DecodeAttention(tables, slots)(states, scene.rule).cpu()
        assert made.count("list_items") == (step == 0)
        assert step == 0 or not made
        assert_same_bits(going_on, attend(replace(scene, states=before)))
        tables.advance(torch.zeros(5, dtype=torch.int32, device=DEVICE))
        scene = replace(scene, lengths=[length + 1 for length in scene.lengths])
        q, k, v = (torch.randn(x.shape, generator=rng).to(DEVICE) for x in (states.q, states.k, states.v))
        states = LayerStates(q, k, v, states.k_pool, states.v_pool, sinks=states.sinks)


def counted(patch: pytest.MonkeyPatch, owner: Any, name: str, made: list[str]) -> None:
    original = getattr(owner, name)

    def counting(*args: Any, **options: Any) -> Any:
        made.append(name)
        return original(*args, **options)

    patch.setattr(owner, name, counting)


@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(1, 900), st.integers(0, 900)), min_size=1, max_size=12),
    block_rows=st.sampled_from([1, 2, 3, 9, 64]),
)
def test_items_hold_every_position_of_every_row_once(rows: list[tuple[int, int]], block_rows: int) -> None:
    lengths = np.array([length for length, _ in rows], np.int32)
    shared = np.minimum(np.array([size for _, size in rows], np.int32), lengths - 1)
    shared[1:] = np.minimum(shared[1:], lengths[:-1] - 1)
    shared[0] = 0
    items = list_items(lengths, shared, block_rows)
    walked: list[list[int]] = [[] for _ in rows]
    for row_begin, row_end, begin, end in items.shared.tolist():
        assert 0 < row_end - row_begin <= block_rows
        assert begin % CHUNK == 0
        assert end % PIECE == 0
        assert 0 < end - begin <= CHUNK
        assert (shared[row_begin + 1 : row_end] >= end).all()
        for row in range(row_begin, row_end):
            walked[row] += range(begin, end)
    for row_begin, row_end, begin, end in items.own.tolist():
        assert row_end == row_begin + 1
        assert begin // CHUNK == (end - 1) // CHUNK
        assert begin % CHUNK == 0 or begin - 1 in walked[row_begin], "nothing to go on from"
        walked[row_begin] += range(begin, end)
    for positions, length in zip(walked, lengths, strict=True):
        assert sorted(positions) == list(range(length))


def test_what_rows_share_is_read_once_a_block() -> None:
    """64 rows beneath one context of 1000 positions, with 40 of their own."""
    items = list_items(np.full(64, 1040), np.full(64, 1000), 9)
    read = items.shared[:, 3] - items.shared[:, 2]
    assert read.sum() == 8 * (1000 // PIECE * PIECE)
    assert (items.own[:, 3] - items.own[:, 2]).sum() == 64 * (40 + 1000 % PIECE)


def test_neighbours_of_two_contexts_are_not_read_together() -> None:
    """Two contexts begin alike, and one of a row's own begins as another does."""
    shared = np.array([0, 700, 700, 100, 700, 700, 710, 700])
    items = list_items(np.full(8, 740), shared, 8)
    assert sorted(items.shared[:, :2].tolist()) == [[0, 3]] * 3 + [[3, 8]] * 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(5, 4, 16, dtype=torch.float64)},
         "q is torch.float64 on .*; float32, bfloat16 or float16, and one device, are needed"),
        ({"v": torch.zeros(5, 2, 16, dtype=torch.float16)},
         "v is torch.float16 on .* and q torch.float32 on .*; float32, bfloat16 or float16, and one device, are .*"),
        ({"q": torch.zeros(5, 3, 16)}, "q has 3 heads, not a multiple up to 65535 of the 2 key-value heads of k"),
        ({"q": torch.zeros(5, 4, 257)}, "q has head dimension 257; the Triton kernel takes 1 to 256"),
        ({"q": torch.zeros(4, 4, 16)}, r"q is \[4, 4, 16\]; at least \[5, 4, 16\] is needed"),
        ({"k": torch.zeros(5, 2, 32)[..., ::2]}, r"k is not contiguous on its last axis \(stride of 2 elements\)"),
        ({"v_pool": torch.zeros(9, 2, 16)}, r"v_pool is \[9, 2, 16\]; at least \[\d+, 2, 16\] is needed"),
        ({"sinks": torch.zeros(2)}, r"sinks are torch.float32 \[2\] on .*; torch.float32 \[4\] on .* is needed"),
        ({"window": -2}, r"AttentionRule\(.*window=-2\) cannot be: .*"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    scene = scene_of([CONTEXT, *QUERIES], group_size=2, num_kv_heads=2, head_dim=16)
    given = {name: moved(changes.get(name, getattr(scene.states, name))) for name in STATES}
    rule = replace(scene.rule, window=changes.get("window", 0))
    tables = PackTables.alone(live_pack(scene), DEVICE, 5)
    with pytest.raises(RequestError, match=f"^{message}$"):
        DecodeAttention(tables, LiveSlots())(LayerStates(**given, sinks=changes.get("sinks")), rule)
