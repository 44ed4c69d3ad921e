"""What decoding rows' kernels are checked with, in a model's own sizes, and how far they are from float64 there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from iclperm.engine.kernels.attention import prepare
from iclperm.engine.kernels.chunks import CHUNK, PIECE
from iclperm.engine.kernels.live import LiveSlots
from iclperm.engine.kernels.rule import AttentionRule, LayerStates
from iclperm.engine.model import TreeModel
from iclperm.engine.plan import LiveRows, Pack
from iclperm.engine.tables import PackTables
from iclperm.reference.attention import path_attention

_PATHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 193)
_LONGEST = 4096
_SHARING = 150  # rows of one context: more than an item of any shape takes
_OWN = (1, 2, 31, 32, 33, 63, 64, 65)  # their tokens after it
_UNUSED = 40  # slots of a row that it has not come to
_WINDOWS = (20, 200)
"""One that has left all behind that rows share, and one within which every shipped size has whole tiles."""
_PADDING = 5
_DENSE_ROWS = 256


def decode_errors(model: TreeModel) -> Iterator[float]:
    """With the model's heads and dimensions, in each of its windows and with its soft-cap; none where torch attends.

    Rows alone on paths of 1 to 4,096 positions and many rows beneath one context, each with slots of its own that it
    has not come to, beside keys and values that are NaN and may not be seen; then a second step that follows from the
    first. Cost: below a second on a GPU, and the compilation of what a study needs as well.
    """
    if model.attention != "triton":
        return
    facts = model.facts
    longest = min(_LONGEST, facts.max_tokens)
    case = DecodeCase.of(longest, facts.num_heads, facts.num_kv_heads, facts.head_size, model.dtype, _SHARING)
    windows = {0}
    if facts.num_window_layers:  # the model's own may be longer than any path
        windows.update(min(small, facts.window) for small in (facts.window, *_WINDOWS))
    for window in sorted(windows):
        rule = AttentionRule(facts.head_size**-0.5, facts.attention_softcap, window)
        for device in model.devices:
            yield case.error(rule, device)


@dataclass(frozen=True)
class DecodeCase:
    """Live rows by the slots of their paths, of which ``lengths`` are used, and what two steps attend with.

    The rows from ``first_sharing`` on share their first positions but ``_OWN`` of them.
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
            size = own[number % len(own)]
            shared, used = (alone[number] - 1, 1) if number < len(alone) else (context, size)
            paths.append(np.concatenate([base[:shared], np.arange(free, free + used + _UNUSED)]))
            lengths.append(shared + used)
            free += used + _UNUSED
        generator = torch.Generator().manual_seed(0)

        def drawn(count: int, heads: int) -> torch.Tensor:
            return torch.randn(count, heads, head_size, generator=generator).to(dtype)

        # Scores spread by more than one nat: of equal weights, long paths would give means near nothing. Those of some
        # rows come to where a soft-cap is flat.
        num_rows = len(paths) + _PADDING
        steps = []
        k_pool, v_pool = drawn(free, num_kv_heads), drawn(free, num_kv_heads)
        is_used = np.zeros(free, bool)
        for path, length in zip(paths, lengths, strict=True):
            is_used[path[: length - 1]] = True
        k_pool[~is_used], v_pool[~is_used] = torch.nan, torch.nan
        for _ in range(2):
            q = 2 * drawn(num_rows, num_heads)
            q[::3] *= 8
            steps.append(LayerStates(q, drawn(num_rows, num_kv_heads), drawn(num_rows, num_kv_heads), k_pool, v_pool))
        return cls(paths, lengths, len(alone), context, (steps[0], steps[1]))

    def error(self, rule: AttentionRule, device: torch.device) -> float:
        """How far the rows of both steps are from the reference, those of the first and last heads."""
        k_pool, v_pool = self._pools(rule)
        there = [pool.to(device, copy=True) for pool in (k_pool, v_pool)]
        pack = self._pack()
        num_rows = self.steps[0].q.shape[0]
        tables, slots = PackTables.alone(pack, device, num_rows), LiveSlots()
        error = 0.0
        for number, step in enumerate(self.steps):
            if number:
                tables.advance(torch.zeros(len(self.paths), dtype=torch.int32, device=device))
            q, k, v = (each.to(device) for each in (step.q, step.k, step.v))
            attend = prepare(tables.pack, num_rows, "triton", _DENSE_ROWS, tables, slots)
            ours = attend(LayerStates(q, k, v, there[0], there[1]), rule)
            theirs = self._expected(replace(step, k_pool=k_pool, v_pool=v_pool), rule, number)
            error = max(error, _error(_some_heads(ours, k.shape[1]), theirs))
            newest = [int(path[length - 1 + number]) for path, length in zip(self.paths, self.lengths, strict=True)]
            k_pool[newest], v_pool[newest] = step.k[: len(newest)], step.v[: len(newest)]
        return error

    def _pools(self, rule: AttentionRule) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values before the first step; NaN is what all windows of rows that share have just left behind, and
        what only those of the first of them still hold."""
        k_pool, v_pool = self.steps[0].k_pool.clone(), self.steps[0].v_pool.clone()
        if 1 < rule.window < self.context:
            behind = self.context - rule.window
            k_pool[behind - 1], v_pool[behind] = torch.nan, torch.nan
            v_pool[behind + 2] = torch.nan
        return k_pool, v_pool

    def _expected(self, states: LayerStates, rule: AttentionRule, step: int) -> torch.Tensor:
        """Row after row from its own keys alone, of the first and last heads; zero for padding."""
        heads = _compared(states.k.shape[1])
        q = _some_heads(states.q, states.k.shape[1])
        out = torch.zeros(q.shape, dtype=torch.float64)
        for row, (path, length) in enumerate(zip(self.paths, self.lengths, strict=True)):
            position = length - 1 + step
            # What a window has left behind is cut off: a weight of zero times NaN is NaN.
            seen = path[max(0, position + 1 - rule.window) if rule.window else 0 : position]
            keys, values = (
                torch.cat([pool[seen], new[row : row + 1]])[:, heads]
                for pool, new in ((states.k_pool, states.k), (states.v_pool, states.v))
            )
            out[row : row + 1] = path_attention(
                q[row : row + 1], keys, values, scaling=rule.scaling, softcap=rule.softcap
            )
        return out

    def _pack(self) -> Pack:
        num_rows = len(self.paths)
        width = -(-max(path.size for path in self.paths) // PIECE) * PIECE
        lanes = np.arange(num_rows)[::-1]
        shared = np.zeros(num_rows, np.int32)
        shared[self.first_sharing + 1 :] = self.context
        live = LiveRows(
            num_lanes=num_rows,
            width=width,
            lanes=lanes.astype(np.int32),
            lengths=np.array([path.size for path in self.paths], np.int32),
            shared=shared,
            changed_place=np.concatenate(
                [lane * width + np.arange(path.size) for lane, path in zip(lanes, self.paths, strict=True)]
            ),
            changed_slot=np.concatenate(self.paths).astype(np.int32),
        )
        return Pack.of(
            token_ids=np.zeros(num_rows), positions=np.array(self.lengths) - 1, visit_row_offsets=[num_rows],
            held_tokens=0, live=live,
        )  # fmt: skip


def _at_chunks(longest: int) -> set[int]:
    """Paths that end where a chunk does, one before and one after."""
    return {path for end in range(CHUNK, longest, 4 * CHUNK) for path in range(end - 1, end + 2) if path < longest}


def _compared(num_kv: int) -> list[int]:
    return [0, num_kv - 1] if num_kv > 1 else [0]


def _some_heads(x: torch.Tensor, num_kv: int) -> torch.Tensor:
    """Those of the heads of x [M, Hq, d] that share the first and the last of ``num_kv`` heads of keys and values."""
    return x.reshape(x.shape[0], num_kv, -1, x.shape[2])[:, _compared(num_kv)].flatten(1, 2)


def _error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference as a share of a row's largest number."""
    ours = ours.double().cpu()
    if not torch.equal(ours.isnan(), theirs.isnan()):
        return float("inf")
    difference, scale = (ours - theirs).abs(), theirs.abs().amax(dim=(1, 2), keepdim=True)
    return float((difference / scale).where(difference > 0, 0.0).max())
