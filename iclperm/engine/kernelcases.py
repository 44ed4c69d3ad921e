"""What each kernel of ours is checked with, in a model's own sizes, and how far it is from float64 there.

An error is the largest difference as a share of the numbers that went into a result, so that rounding is the same share
everywhere; infinite where a number stands against none. Each case is small enough for float64, and copied until a
kernel has as many rows to do at once as in a study's packs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from iclperm.engine.kernels import rowwise
from iclperm.engine.kernels.attention import prepare
from iclperm.engine.kernels.rowwise import CentredNorm, RmsNorm, RowNorm
from iclperm.engine.kernels.rule import AttentionRule, LayerStates
from iclperm.engine.model import TreeModel
from iclperm.engine.plan import Pack
from iclperm.engine.tree import IntArray
from iclperm.reference import rowwise as exact
from iclperm.reference.attention import tree_attention

Span = tuple[int, int, int]
Visit = tuple[int, int, list[Span]]

_PATHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 193, 256)
_LONG = (1023, 1025, 4095, 4096)
_LONGEST = {"cpu": 300}
"""Positions of the longest path; elsewhere that of `_LONG`."""
_MANY_ROWS = (150, 70)
_SMALL_WINDOWS = (70, 200)
"""One that ends within a tile, and one within which every shipped size has whole tiles for all rows of a block."""
_LOW = -200.0
_GOLDEN = 0.618034  # multiples of it lie apart, whatever their number, but for whole ones
_DENSE_ROWS = 256
_PADDING, _ROW_MULTIPLE = 5, 16
"""Rows that no visit owns, at least; what the number of rows is a multiple of, as in every pack."""
_NUMBERS = 4096  # of a row-wise case at least: narrow rows share a program
_FEW_ROWS, _NORM_ROWS = 5, 7
_FAR = 4.0
_LARGE = 1000.0  # float16 can hold ten times as much, not the square
_GATES = (0.0, 30.0, -30.0, 100.0, -100.0, 1e4, -1e4, 1e30, -1e30)
"""Some of a case, or what is left of them in a dtype: those whose exponentials float32 cannot hold."""
_MOST_ROWS = 32768
"""Of a case and its copies, however large packs are: those of a GPU."""


def attention_errors(model: TreeModel, pack_tokens: int) -> Iterator[float]:
    """With the model's heads and dimensions, in each of its windows, with its soft-cap and with sinks where its heads
    have some; none where torch attends.

    Paths of 1 to 4,096 positions (300 on a CPU) in the pool, in the pack and in both, of one row and of many, all rows
    and some of them as in a narrowed last layer, beside slots and rows that hold NaN and may not be seen: as many as a
    pack of ``pack_tokens`` has.
    """
    if model.attention == "torch":
        return
    facts, case = model.facts, attention_case(model).copied_to(pack_tokens)
    windows = {0}
    if facts.num_window_layers:  # the model's own may be longer than any path
        windows.update(min(small, facts.window) for small in (facts.window, *_SMALL_WINDOWS))
    for has_sinks, window in itertools.product(facts.sink_choices, sorted(windows)):
        rule = AttentionRule(facts.head_size**-0.5, facts.attention_softcap, window)
        own = case.with_sinks() if has_sinks else case
        for device in model.devices:
            yield own.error(rule, model.attention, device, is_by_head=model.layers == "transformers")


def attention_case(model: TreeModel) -> AttentionCase:
    """What a model's attention is checked with."""
    facts = model.facts
    longest = min(_LONGEST.get(model.device.type, max(_LONG)), facts.max_tokens)
    group = facts.num_heads // facts.num_kv_heads
    # All heads where strides decide what is compiled; on a CPU two show that each has its own keys.
    num_kv = min(2, facts.num_kv_heads) if model.device.type == "cpu" else facts.num_kv_heads
    return AttentionCase.of(longest, num_kv * group, num_kv, facts.head_size, model.dtype, _MANY_ROWS)


@dataclass(frozen=True)
class AttentionCase:
    """What is attended with: queries, keys and values, and the visits [M rows in all] of a pack, in which all of them
    come ``copies`` times."""

    visits: list[Visit]
    states: LayerStates
    copies: int = 1

    @classmethod
    def of(
        cls,
        longest: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        many_rows: tuple[int, int],
    ) -> AttentionCase:
        """Paths of up to ``longest`` positions; two visits of as many rows as the first of ``many_rows``, and one of
        the second."""
        visits = _visits(longest, *many_rows)
        num_rows, num_slots = -(-(visits[-1][1] + _PADDING) // _ROW_MULTIPLE) * _ROW_MULTIPLE, longest
        generator = torch.Generator("cpu").manual_seed(0)

        def drawn(count: int, heads: int) -> torch.Tensor:
            return torch.randn(count, heads, head_size, generator=generator, device="cpu").to(dtype)

        # Scores spread by more than one nat: of equal weights, long paths would give means near nothing. Those of some
        # rows come to where a soft-cap is flat.
        q = 2 * drawn(num_rows, num_heads)
        q[visits[len(visits) // 2][0] :: 3] *= 8
        k = drawn(num_rows, num_kv_heads)
        alone = next(begin for begin, _, spans in visits if not spans)
        q[alone] = scored_low(k[alone], num_heads)
        states = LayerStates(
            q, k, drawn(num_rows, num_kv_heads),
            drawn(num_slots + 64, num_kv_heads), drawn(num_slots + 64, num_kv_heads),
        )  # fmt: skip
        for pool in (states.k_pool, states.v_pool):
            pool[num_slots:] = torch.nan
        # Rows that nobody attends to but themselves: what is after them, and other branches, may hold anything.
        states.k[visits[-1][0] :], states.v[visits[-2][0] :] = torch.nan, torch.nan
        return cls(visits, states)

    def with_sinks(self) -> AttentionCase:
        """The same with a sink a head."""
        return replace(self, states=with_sinks(self.states))

    def copied_to(self, num_rows: int) -> AttentionCase:
        """Copied to at most so many rows in all, or as it is if it has more."""
        return replace(self, copies=_copies(self._num_rows, num_rows))

    @property
    def _num_rows(self) -> int:
        return self.visits[-1][1]

    def attended(
        self, rule: AttentionRule, backend: str, device: torch.device, *, is_by_head: bool = False
    ) -> list[torch.Tensor]:
        """What a kernel gives on a device: for all rows, and for some of them alone as a narrowed layer has them.

        Or queries and keys lie head by head, as transformers' layers hand them over, which narrow nothing.
        """
        own, some = self.states, np.concatenate(self._some_rows())
        q, k, v = (self._copied(each.to(device)) for each in (own.q, own.k, own.v))
        k_pool, v_pool, sinks = own.k_pool.to(device), own.v_pool.to(device), on_device(own.sinks, device)
        if is_by_head:
            q, k = (each.transpose(0, 1).contiguous().transpose(0, 1) for each in (q, k))
        attend = prepare(_pack_of(self._copied_visits()), q.shape[0], backend, _DENSE_ROWS)
        whole = attend(LayerStates(q, k, v, k_pool, v_pool, sinks=sinks), rule)
        if is_by_head:
            return [whole]
        narrow = q[torch.from_numpy(_padded(some)).to(device)]
        return [whole, attend(LayerStates(narrow, k, v, k_pool, v_pool, some, sinks), rule)]

    def error(self, rule: AttentionRule, backend: str, device: torch.device, *, is_by_head: bool = False) -> float:
        """How far the rows of ``attended`` are from the reference, in ``compared_heads`` of each visit."""
        num_kv = self.states.k.shape[1]
        some = max(2, -(-num_kv // (len(self.visits) - 2)))  # so that all come up; the last two visits have no numbers
        of_visits = [compared_heads(number, num_kv, some) for number in range(len(self.visits))]
        sizes = torch.tensor([end - begin for begin, end, _ in self.visits])
        heads = torch.stack(of_visits).repeat_interleave(sizes, dim=0)
        parts = [self._expected(visit, rule, of_visit) for visit, of_visit in zip(self.visits, of_visits, strict=True)]
        theirs, bound = (torch.cat(each) for each in zip(*parts, strict=True))
        of_copies = [[np.arange(self._num_rows)] * self.copies, [each % self._num_rows for each in self._some_rows()]]
        errors = []
        # By head nothing is narrowed.
        for ours, of_copy in zip(self.attended(rule, backend, device, is_by_head=is_by_head), of_copies, strict=False):
            *copies, padding = torch.split(ours, [*map(len, of_copy), len(ours) - sum(map(len, of_copy))])
            errors.append(float("inf") if padding.count_nonzero() else 0.0)
            for copy, rows in zip(copies, map(torch.from_numpy, of_copy), strict=True):
                errors.append(largest_error(heads_of(copy, heads[rows], num_kv), theirs[rows], bound[rows]))
        return max(errors)

    def _expected(self, visit: Visit, rule: AttentionRule, heads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What some heads of keys and values are to give for a visit's rows, and of what numbers that is the sum; one
        head after the other, so that a host's check takes no memory that its study does not need."""
        own, (begin, end, _) = self.states, visit
        found = [
            tree_attention(
                by_kv_head(own.q[:end], own.k.shape[1])[:, head].flatten(1, 2),
                *(own.k[:, head], and_magnitudes(own.v[:, head])),
                *(own.k_pool[:, head], and_magnitudes(own.v_pool[:, head])),
                [visit],
                scaling=rule.scaling,
                softcap=rule.softcap,
                window=rule.window,
                sinks=None if own.sinks is None else own.sinks.view(own.k.shape[1], -1)[head].flatten(),
            )[begin:end]
            for head in heads[:, None]
        ]
        return with_bound(torch.cat(found, dim=1), own.k_pool)

    def _copied(self, x: torch.Tensor) -> torch.Tensor:
        """Rows [M + padding, ...] with what the visits own copied."""
        own, padding = x[: self._num_rows], x[self._num_rows :]
        return torch.cat([*[own] * self.copies, padding]) if self.copies > 1 else x

    def _copied_visits(self) -> list[Visit]:
        """What a copy sees of the pack is its own."""
        return [
            (begin + first, end + first, [(source, a + source * first, b + source * first) for source, a, b in spans])
            for first in range(0, self.copies * self._num_rows, self._num_rows)
            for begin, end, spans in self.visits
        ]

    def _some_rows(self) -> list[IntArray]:
        """By copy: of the first some within the long visits, and the last row of some visits; all of the others."""
        inside = [row for begin, end, _ in self.visits for row in range(begin + 3, end, 41)]
        first = np.unique([*inside, *(end - 1 for _, end, _ in self.visits[::3])])
        return [first, *(copy * self._num_rows + np.arange(self._num_rows) for copy in range(1, self.copies))]


def with_sinks(states: LayerStates) -> LayerStates:
    """Beside a sink of each head of queries: as large as scores are, no two alike, those of neighbours least; of every
    fifth -inf."""
    sinks = 0.5 + 5.0 * (torch.arange(states.q.shape[1], device="cpu") * _GOLDEN % 1.0)
    sinks[4::5] = -torch.inf
    return replace(states, sinks=sinks)


def on_device(sinks: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    return None if sinks is None else sinks.to(device)


def scored_low(key: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Queries [Hq, d] whose scores with a key [Hkv, d] are so low that exponentials of them are zero."""
    wide = key.float().repeat_interleave(num_heads // len(key), dim=0)
    size = key.shape[1] ** 0.5 / wide.square().sum(dim=1, keepdim=True).clamp(min=1e-3)
    low: torch.Tensor = _LOW * size * wide
    return low.to(key.dtype)


def _copies(num_rows: int, wanted: int) -> int:
    """How many times so many rows come, for them to be at most as many as wanted; once if they are more."""
    return max(1, most_rows(wanted) // num_rows)


def most_rows(wanted: int) -> int:
    """As many as wanted, or as a case may have."""
    return min(wanted, _MOST_ROWS)


def _padded(rows: IntArray) -> IntArray:
    """Some rows, and padding."""
    return np.append(rows, np.zeros(_PADDING, np.int64))


def compared_heads(number: int, num_kv: int, some: int) -> torch.Tensor:
    """Of ``num_kv`` heads of keys and values those that case ``number`` is held against: so many of them, in turn."""
    return (number * some + torch.arange(min(some, num_kv))) % num_kv


def heads_of(x: torch.Tensor, kv_heads: torch.Tensor, num_kv: int) -> torch.Tensor:
    """Of each row of x [M, Hq, d] the heads that share the keys and values of ``kv_heads`` [M, C] of ``num_kv``."""
    rows = torch.arange(len(x), device=x.device)[:, None]
    return by_kv_head(x, num_kv)[rows, kv_heads.to(x.device)].flatten(1, 2)


def by_kv_head(x: torch.Tensor, num_kv: int) -> torch.Tensor:
    """Heads [M, Hq, d] by whose keys and values they read, [M, Hkv, Hq / Hkv, d]."""
    return x.reshape(len(x), num_kv, x.shape[1] // num_kv, x.shape[2])


def and_magnitudes(values: torch.Tensor) -> torch.Tensor:
    """Values [M, Hkv, d] and how large they are, [M, Hkv, 2 d]: of both attention gives the sums."""
    return torch.cat([values, values.abs()], dim=2)


def with_bound(found: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What attention gives of values ``and_magnitudes``, apart: sums, and how large the numbers in each are.

    A weight that is rounded is off by a share of itself, or of the smallest normal number, and there are not more than
    ``keys`` of them.
    """
    sums, sizes = found.chunk(2, dim=2)
    return sums, sizes + len(keys) * torch.finfo(keys.dtype).smallest_normal


def _visits(longest: int, many: int, some: int) -> list[Visit]:
    """One row and many behind each path of the pool; behind a path of the pack; and behind both."""
    paths = [path for path in (*_PATHS, *_LONG) if path < longest] + [longest - 1]
    visits: list[Visit] = []

    def visit(rows: int, spans: list[Span]) -> tuple[int, int]:
        begin = visits[-1][1] if visits else 0
        visits.append((begin, begin + rows, spans))
        return begin, begin + rows

    for path in paths:
        visit(1, [(0, 0, path)])
    stem = visit(many, [(0, 0, min(193, longest - 1))])
    visit(some, [(0, 0, longest - 1)])
    root = visit(many, [])
    for begin, end in (stem, root):
        above: list[Span] = [(0, 0, min(193, longest - 1))] if begin == stem[0] else []
        for length in (1, 63, 64, 65, many):
            visit(3, [*above, (1, begin, min(begin + length, end))])
    for _ in range(2):
        visit(1, [])  # whose values are NaN, and the keys of the second
    return visits


def _pack_of(visits: list[Visit]) -> Pack:
    spans = [span for _, _, own in visits for span in own]
    before = [sum(end - begin for _, begin, end in own) for _, _, own in visits]
    positions = [first + np.arange(end - begin) for (begin, end, _), first in zip(visits, before, strict=True)]
    num_rows = visits[-1][1]
    source, begin, end = np.array(spans, np.int64).reshape(-1, 3).T
    return Pack.of(
        held_tokens=0,
        token_ids=np.zeros(num_rows, np.int32),
        positions=np.concatenate(positions),
        visit_row_offsets=[0, *(end for _, end, _ in visits)],
        visit_pos=before,
        span_offsets=np.cumsum([0, *(len(own) for _, _, own in visits)]),
        span_source=source,
        span_begin=begin,
        span_end=end,
    )


def norm_errors(model: TreeModel, pack_tokens: int) -> Iterator[float]:
    """Every width, epsilon and offset of the RMS norms in our layers: plain, in place by head, and of a sum."""
    decoder = model.fused_decoder()
    if decoder is None:
        return
    facts = model.facts
    known = {(norm.weight.numel(), norm.eps, norm.offset) for norm in decoder.norms if isinstance(norm, RmsNorm)}
    for device, (width, eps, offset) in itertools.product(model.devices, sorted(known)):
        draw = Drawing(model.dtype, device, pack_tokens)
        norm = RmsNorm(draw(width) if offset else 1 + draw(width), eps, offset)
        yield norm_error(norm, facts.num_kv_heads if width == facts.head_size else 1, draw)
        if width == facts.hidden_size:
            yield norm_of_sum_error(norm, draw)


def layer_norm_errors(model: TreeModel, pack_tokens: int) -> Iterator[float]:
    """As ``norm_errors``, of those that take the mean off, with a bias or without."""
    decoder = model.fused_decoder()
    if decoder is None:
        return
    norms = (norm for norm in decoder.norms if isinstance(norm, CentredNorm))
    known = {(norm.weight.numel(), norm.eps, norm.bias is not None) for norm in norms}
    for device, (width, eps, has_bias) in itertools.product(model.devices, sorted(known)):
        draw = Drawing(model.dtype, device, pack_tokens)
        norm = CentredNorm(1 + draw(width), eps, draw(width) if has_bias else None)
        yield norm_error(norm, 1, draw)
        if decoder.family.norms.before_mlp:
            yield norm_of_sum_error(norm, draw)


def norm_error(norm: RowNorm, num_heads: int, draw: Drawing) -> float:
    """Rows of more than one block, one of them not finite and `_extreme` ones; of several heads in place, as the layers
    take them."""
    width = norm.weight.numel()
    given = _extreme(draw(_NUMBERS // width + _NORM_ROWS, num_heads, width), norm.eps)
    given[1, 0, 0] = torch.nan
    x = draw.copied(given)
    out = norm.in_place(x) if num_heads > 1 else norm(x.view(-1, width)).view(x.shape)
    return _norm_error(norm, out, given)


def norm_of_sum_error(norm: RowNorm, draw: Drawing) -> float:
    """The norm and the sum that it leaves, which is rounded first."""
    width = norm.weight.numel()
    x, total = (_extreme(draw(_NUMBERS // width + _NORM_ROWS, width), norm.eps / 2) for _ in range(2))
    expected = x.double() + total.double()
    sums = draw.copied(total)
    out = norm.of_sum(draw.copied(x), sums)
    return max(error_of_equals(sums, expected, expected.abs()), _norm_error(norm, out, sums[: x.shape[0]]))


def _extreme(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Rows [M, ..., H], the first ones changed: zero; as they were; of mean squares about a norm's epsilon, where that
    matters, and far below it; large; of one large number, as residual streams have them; far from zero as a whole."""
    x[0] = 0.0
    x[2] *= eps**0.5
    x[3] *= eps**0.5 / 16
    x[4] *= _LARGE
    x[5, ..., -1] = -_LARGE
    x[6] += _FAR
    return x


def _norm_error(norm: RowNorm, out: torch.Tensor, x: torch.Tensor) -> float:
    if isinstance(norm, CentredNorm):
        expected = exact.layer_norm(x, norm.weight, norm.bias, eps=norm.eps)
        wide = x.double()
        summed, variance = wide.abs().mean(dim=-1, keepdim=True), wide.var(dim=-1, correction=0, keepdim=True)
        # Of numbers near their mean the difference is small; what rounds are they, and the sum that the mean is of.
        bound = (wide.abs() + summed) * (variance + norm.eps).rsqrt() * norm.weight.double().abs()
        bound = bound if norm.bias is None else bound + norm.bias.double().abs()
    else:
        assert isinstance(norm, RmsNorm)
        expected = exact.rms_norm(x, norm.weight, eps=norm.eps, offset=norm.offset)
        plain = exact.rms_norm(x, torch.ones_like(norm.weight), eps=norm.eps)
        bound = plain.abs() * (abs(norm.offset) + norm.weight.double().abs())
    return error_of_equals(out, expected, bound + torch.finfo(x.dtype).smallest_normal)


def rotation_errors(model: TreeModel, pack_tokens: int) -> Iterator[float]:
    """Queries and keys, as many columns of a head turned as the model's tables have."""
    decoder = model.fused_decoder()
    if decoder is None:
        return
    facts = model.facts
    tables = model.model.get_decoder().named_buffers()  # type: ignore[no-untyped-call]
    turned_columns = {2 * table.numel() for name, table in tables if name.endswith("inv_freq")}
    heads = sorted({facts.num_heads, facts.num_kv_heads})
    for device, num_heads, turned in itertools.product(model.devices, heads, sorted(turned_columns)):
        draw = Drawing(model.dtype, device, pack_tokens)
        neighbours = decoder.family.turns_neighbours
        yield rotation_error(num_heads, facts.head_size, turned, draw, neighbours=neighbours)


def rotation_error(num_heads: int, head_size: int, turned: int, draw: Drawing, *, neighbours: bool = False) -> float:
    """Rows of more than one block, one of them not finite, one zero, one large, one that is not turned at all; columns
    from ``turned`` on stay as they were."""
    x = draw(_NUMBERS // head_size + _FEW_ROWS, num_heads, head_size)
    x[1, 0, 0] = torch.nan
    x[0] *= _LARGE
    x[3] = 0.0
    cosines, sines = (draw(x.shape[0], turned) for _ in range(2))
    cosines[2], sines[2] = 1.0, 0.0
    if x.device.type == "cpu":  # as the layers hand them over
        cosines, sines = cosines.float(), sines.float()
    expected = exact.rotate(x, cosines, sines, neighbours=neighbours)
    sizes = sines.abs()
    sizes[:, : turned // 2] *= -1  # so that all is added up
    bound = exact.rotate(x.abs(), cosines.abs(), sizes, neighbours=neighbours)
    bound = bound + torch.finfo(x.dtype).smallest_normal  # below it there are fewer bits
    stays = x[..., turned:].clone()
    out = rowwise.rotate(*map(draw.copied, (x, cosines, sines)), neighbours=neighbours)
    if not torch.equal(out[..., turned:], draw.copied(stays)):
        return float("inf")
    return error_of_equals(out, expected, bound)


def gate_errors(model: TreeModel, pack_tokens: int) -> Iterator[float]:
    """The activation of our layers times its factor, in one matrix or two as the layers have them, or alone."""
    decoder = model.fused_decoder()
    if decoder is None:
        return
    for device in model.devices:
        draw, mlp = Drawing(model.dtype, device, pack_tokens), decoder.family.mlp
        width = model.facts.inner_size
        yield gate_error(decoder.activation, width, draw, is_packed=mlp.is_packed, is_gated=mlp.is_gated)


def gate_error(activation: nn.Module, width: int, draw: Drawing, *, is_packed: bool, is_gated: bool = True) -> float:
    """Some rows, one number of them not finite, others as large as a dtype holds."""
    gated = rowwise.gate(activation)
    assert gated is not None
    both = draw(_FEW_ROWS, 2 * width)
    both[1, 0] = torch.nan
    both[:, :width] *= 4.0
    most = torch.finfo(both.dtype).max / 16  # times a factor it is a number still
    large = torch.tensor(_GATES).clamp(-most, most)[:width]
    both[2, : len(large)], both[-1, width - len(large) : width] = large.to(both), large.to(both)
    wide, factors = both.double().chunk(2, dim=1)
    x, factor = draw.copied(both).chunk(2, dim=1)
    x, factor = (x, factor) if is_packed else (x.contiguous(), factor.contiguous())
    smallest = torch.finfo(x.dtype).smallest_normal  # below it there are fewer bits
    if not is_gated:
        return error_of_equals(gated(x, None), activation(wide), wide.abs() + smallest)
    return error_of_equals(gated(x, factor), activation(wide) * factors, (wide * factors).abs() + smallest)


class Drawing:
    """Normal numbers of a dtype on a device, the same in every process; copied up to ``most_rows`` of them."""

    def __init__(self, dtype: torch.dtype, device: torch.device, most_rows: int = 1) -> None:
        self._dtype, self._device, self._most_rows = dtype, device, most_rows
        self._generator = torch.Generator("cpu").manual_seed(0)

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator, device="cpu").to(self._dtype).to(self._device)

    def copied(self, x: torch.Tensor, most_bytes: int | None = None) -> torch.Tensor:
        """Rows x [R, ...], whole copies of them one after another, in memory of their own."""
        copies = _copies(x.shape[0], self._most_rows)
        if most_bytes is not None:
            copies = max(1, min(copies, most_bytes // x.nbytes))
        return x.repeat(copies, *[1] * (x.ndim - 1))


def error_of_equals(ours: torch.Tensor, theirs: torch.Tensor, bound: torch.Tensor) -> float:
    """As ``largest_error``, of copies of the same rows one after another; those of equal bits are judged once."""
    copies = ours.view(-1, *theirs.shape)
    is_equal = (copies == copies[0]) | (copies.isnan() & copies[0].isnan())
    others = copies[~is_equal.flatten(1).all(dim=1)]
    return max(largest_error(each, theirs, bound) for each in (copies[0], *others))


def largest_error(ours: torch.Tensor, theirs: torch.Tensor, bound: torch.Tensor) -> float:
    """The largest difference as a share of ``bound``; infinite where that is no number."""
    ours, theirs, bound = ours.double().cpu(), theirs.cpu(), bound.cpu()
    assert ours.shape == theirs.shape, f"{tuple(ours.shape)} is held against {tuple(theirs.shape)}"
    if not torch.equal(ours.isnan(), theirs.isnan()):
        return float("inf")
    difference = (ours - theirs).abs()
    # Of two infinities the difference is none; that of equal ones counts for nothing.
    errors = (difference / bound).where((ours != theirs) & ~ours.isnan(), 0.0)
    return float(errors.nan_to_num(nan=torch.inf, posinf=torch.inf).max())
