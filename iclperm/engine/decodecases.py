"""What decoding rows' kernels are checked with, in a model's own sizes, and how far they are from float64 there."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from iclperm.engine.kernelcases import (
    and_magnitudes,
    compared_heads,
    heads_of,
    largest_error,
    on_device,
    scored_low,
    with_bound,
    with_sinks,
)
from iclperm.engine.kernels.attention import prepare
from iclperm.engine.kernels.chunks import CHUNK, PIECE
from iclperm.engine.kernels.live import LiveSlots
from iclperm.engine.kernels.rule import AttentionRule, LayerStates
from iclperm.engine.model import TreeModel
from iclperm.engine.plan import LiveRows, Pack
from iclperm.engine.tables import PackTables
from iclperm.reference.attention import path_attention

_PATHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 193)
_LONGEST = {"cpu": 300, "cuda": 4096}
_SHARING = {"cpu": 20, "cuda": 480}
"""Rows of one context: on a GPU more than an item of any shape takes, and with those alone as many as ever live."""
_ALL_COMPARED, _COMPARED_STEP = 256, 7
"""Rows of which each is held against the reference, which takes its time; one of so many of those after them."""
_OWN = (1, 2, 31, 32, 33, 63, 64, 65)  # their tokens after it
_UNUSED = 40  # slots of a row that it has not come to
_SMALL_WINDOWS = (20, 200)
"""One that has left all behind that rows share, and one within which every shipped size has whole tiles."""
_PADDING = 5
_DENSE_ROWS = 256


def decode_errors(model: TreeModel, _pack_tokens: int) -> Iterator[float]:
    """With the model's heads and dimensions, in each of its windows, with its soft-cap and with sinks where its heads
    have some; none where it never runs.

    Rows alone on paths of 1 to 4,096 positions (300 on a CPU) and many rows beneath one context, each with slots of its
    own that it has not come to, beside keys and values that are NaN and may not be seen; then a second step that
    follows from the first.
    """
    if not model.attends_live_rows:
        return
    facts, case, windows = model.facts, decode_case(model), {0}
    if facts.num_window_layers:  # the model's own may be longer than any path
        windows.update(min(small, facts.window) for small in (facts.window, *_SMALL_WINDOWS))
    for has_sinks, window in itertools.product(facts.sink_choices, sorted(windows)):
        rule = AttentionRule(facts.head_size**-0.5, facts.attention_softcap, window)
        own = case.with_sinks() if has_sinks else case
        for device in model.devices:
            yield own.error(rule, device, is_by_head=model.layers == "transformers")


def decode_case(model: TreeModel) -> DecodeCase:
    """What a model's rows are checked with."""
    facts, place = model.facts, model.device.type
    group = facts.num_heads // facts.num_kv_heads
    # All heads where strides decide what is compiled; on a CPU two show that each has its own keys.
    num_kv = min(2, facts.num_kv_heads) if place == "cpu" else facts.num_kv_heads
    longest = min(_LONGEST[place], facts.max_tokens)
    return DecodeCase.of(longest, num_kv * group, num_kv, facts.head_size, model.dtype, _SHARING[place])


@dataclass(frozen=True)
class DecodeCase:
    """Live rows by the slots of their paths, of which ``lengths`` are used, and what two steps attend with.

    The rows from ``first_sharing`` on share ``context`` positions.
    """

    paths: list[npt.NDArray[np.int64]]
    lengths: list[int]
    first_sharing: int
    context: int
    steps: tuple[LayerStates, LayerStates]

    @classmethod
    def of(
        cls, longest: int, num_heads: int, num_kv_heads: int, head_size: int, dtype: torch.dtype, num_sharing: int
    ) -> DecodeCase:
        """Paths of up to ``longest`` positions, of which at least 4 are needed."""
        alone = sorted({*(path for path in _PATHS if path < longest), *_at_chunks(longest - 1), longest - 1})
        own = [size for size in _OWN if size < longest - 2]
        context = longest - 1 - max(own)
        base, free = np.arange(longest), longest
        paths, lengths = [], []
        for number in range(len(alone) + num_sharing):
            is_alone = number < len(alone)
            shared, used = (alone[number] - 1, 1) if is_alone else (context, own[number % len(own)])
            paths.append(np.concatenate([base[:shared], np.arange(free, free + used + _UNUSED)]))
            lengths.append(shared + used)
            free += used + _UNUSED
        is_used = np.zeros(free, bool)
        for path, length in zip(paths, lengths, strict=True):
            is_used[path[: length - 1]] = True
        return cls(
            paths, lengths, len(alone), context, _steps(len(paths), num_heads, num_kv_heads, head_size, dtype, is_used)
        )

    def with_sinks(self) -> DecodeCase:
        """The same with a sink a head."""
        first, second = self.steps
        return replace(self, steps=(with_sinks(first), with_sinks(second)))

    def attended(self, rule: AttentionRule, device: torch.device, *, is_by_head: bool = False) -> list[torch.Tensor]:
        """What the kernels give on a device, for the rows of each step; queries may lie head by head, as transformers'
        layers hand them over."""
        k_pool, v_pool = (pool.to(device) for pool in self._pools(rule))
        num_rows = self.steps[0].q.shape[0]
        tables, slots = PackTables.alone(self._pack(), device, num_rows), LiveSlots()
        outputs: list[torch.Tensor] = []
        for step in self.steps:
            if outputs:
                tables.advance(torch.zeros(len(self.paths), dtype=torch.int32, device=device))
            q, k, v = (each.to(device) for each in (step.q, step.k, step.v))
            if is_by_head:
                q = q.transpose(0, 1).contiguous().transpose(0, 1)
            attend = prepare(tables.pack, num_rows, "triton", _DENSE_ROWS, tables, slots)
            sinks = on_device(step.sinks, device)
            outputs.append(attend(LayerStates(q, k, v, k_pool, v_pool, sinks=sinks), rule))
        return outputs

    def launched(self, rule: AttentionRule, device: torch.device) -> Callable[[], tuple[torch.Tensor]]:
        """The first step's attention alone, on what lies on the device; it may be run any number of times."""
        step, num_rows = self.steps[0], self.steps[0].q.shape[0]
        q, k, v, k_pool, v_pool = (each.to(device) for each in (step.q, step.k, step.v, *self._pools(rule)))
        states = LayerStates(q, k, v, k_pool, v_pool, sinks=on_device(step.sinks, device))
        attend = prepare(
            self._pack(), num_rows, "triton", _DENSE_ROWS, PackTables.alone(self._pack(), device, num_rows), LiveSlots()
        )

        @torch.inference_mode()
        def launch() -> tuple[torch.Tensor]:
            return (attend(states, rule),)

        return launch

    def error(self, rule: AttentionRule, device: torch.device, *, is_by_head: bool = False) -> float:
        """How far the rows of ``attended`` are from the reference, in ``compared_heads`` of each."""
        num_kv, num_rows, rows = self.steps[0].k.shape[1], len(self.paths), self._compared_rows()
        # Rows with as many tokens of their own come after one another at even distances: among them too all in turn.
        some = -(-num_kv // len(rows))
        heads = torch.stack([compared_heads(each + each // len(_OWN), num_kv, some) for each in range(len(rows))])
        k_pool, v_pool = self._pools(rule)
        errors = []
        for number, ours in enumerate(self.attended(rule, device, is_by_head=is_by_head)):
            step = replace(self.steps[number], k_pool=k_pool, v_pool=v_pool)
            theirs, bound = with_bound(self._expected(step, rule, number, rows, heads), k_pool[: 1 + max(self.lengths)])
            errors.append(float("inf") if ours[num_rows:].count_nonzero() else 0.0)
            errors.append(largest_error(heads_of(ours[rows], heads, num_kv), theirs, bound))
            newest = [int(path[length - 1 + number]) for path, length in zip(self.paths, self.lengths, strict=True)]
            k_pool[newest], v_pool[newest] = step.k[:num_rows], step.v[:num_rows]
        return max(errors)

    def _compared_rows(self) -> list[int]:
        last = len(self.paths) - 1
        return [*range(min(_ALL_COMPARED, last)), *range(_ALL_COMPARED, last, _COMPARED_STEP), last]

    def _pools(self, rule: AttentionRule) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values before the first step; NaN is what all windows of rows that share have just left behind, and
        what only those of the first of them still hold."""
        k_pool, v_pool = self.steps[0].k_pool.clone(), self.steps[0].v_pool.clone()
        if 1 < rule.window < self.context:
            behind = self.context - rule.window
            k_pool[behind - 1], v_pool[behind] = torch.nan, torch.nan
            v_pool[behind + 2] = torch.nan
        return k_pool, v_pool

    def _expected(
        self, states: LayerStates, rule: AttentionRule, step: int, rows: list[int], heads: torch.Tensor
    ) -> torch.Tensor:
        """Row after row from its own keys alone, values ``and_magnitudes`` of some heads."""
        num_kv, found = states.k.shape[1], []
        for row, some in zip(rows, heads, strict=True):
            path, position = self.paths[row], self.lengths[row] - 1 + step
            # What a window has left behind is cut off: a weight of zero times NaN is NaN.
            seen = path[max(0, position + 1 - rule.window) if rule.window else 0 : position]
            keys, values = (
                torch.cat([pool[seen], new[row : row + 1]])[:, some]
                for pool, new in ((states.k_pool, states.k), (states.v_pool, states.v))
            )
            q = heads_of(states.q[row : row + 1], some[None], num_kv)
            sinks = None if states.sinks is None else states.sinks.view(num_kv, -1)[some].flatten()
            found.append(
                path_attention(q, keys, and_magnitudes(values), scaling=rule.scaling, softcap=rule.softcap, sinks=sinks)
            )
        return torch.cat(found)

    def _pack(self) -> Pack:
        num_rows = len(self.paths)
        width = -(-max(path.size for path in self.paths) // PIECE) * PIECE
        lanes = np.arange(num_rows)[::-1]
        shared = np.zeros(num_rows, np.int32)
        shared[self.first_sharing + 1 :] = self.context
        places = [lane * width + np.arange(path.size) for lane, path in zip(lanes, self.paths, strict=True)]
        live = LiveRows(
            num_lanes=num_rows,
            width=width,
            lanes=lanes.astype(np.int32),
            lengths=np.array([path.size for path in self.paths], np.int32),
            shared=shared,
            changed_place=np.concatenate(places),
            changed_slot=np.concatenate(self.paths).astype(np.int32),
        )
        return Pack.of(
            token_ids=np.zeros(num_rows), positions=np.array(self.lengths) - 1, visit_row_offsets=[num_rows],
            held_tokens=0, live=live,
        )  # fmt: skip


def _steps(
    num_rows: int, num_heads: int, num_kv_heads: int, head_size: int, dtype: torch.dtype, is_used: npt.NDArray[np.bool_]
) -> tuple[LayerStates, LayerStates]:
    """What two steps attend with, beside slots that hold NaN where no path has used them."""
    generator = torch.Generator("cpu").manual_seed(0)

    def drawn(count: int, heads: int) -> torch.Tensor:
        return torch.randn(count, heads, head_size, generator=generator, device="cpu").to(dtype)

    k_pool, v_pool = drawn(is_used.size, num_kv_heads), drawn(is_used.size, num_kv_heads)
    k_pool[~is_used], v_pool[~is_used] = torch.nan, torch.nan

    def step() -> LayerStates:
        # Scores spread by more than one nat: of equal weights, long paths would give means near nothing. Those of some
        # rows come to where a soft-cap is flat.
        q, k, v = (drawn(num_rows + _PADDING, heads) for heads in (num_heads, num_kv_heads, num_kv_heads))
        q *= 2
        q[::3] *= 8
        q[0] = scored_low(k[0], num_heads)  # the key that the first row sees alone
        return LayerStates(q, k, v, k_pool, v_pool)

    return step(), step()


def _at_chunks(longest: int) -> set[int]:
    """Paths that end where a chunk does, one before and one after."""
    return {path for end in range(CHUNK, longest, 4 * CHUNK) for path in range(end - 1, end + 2) if path < longest}
