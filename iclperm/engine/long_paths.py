"""What is done where the keys and values of a path are over the memory budget: the cheaper of two ways, by prediction.

Either gives the bits that memory for all of them would. `offload` reads them back layer by layer, `layerwise` computes
them anew; a pack as small as it takes is the third choice, where the budget leaves it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from iclperm.engine.facts import ModelFacts, PassCosts
from iclperm.engine.footprint import Footprint, Sizes, largest_within, too_small
from iclperm.engine.offload import room_in_store, store_rate
from iclperm.engine.plan import OFFLOAD, RECOMPUTE, LongPath, Plan
from iclperm.engine.shapes import padded_rows, whole_rows
from iclperm.errors import RequestError

# Packs of so many tokens lose little to what every pack costs: where the budget leaves them, nothing else is looked at.
_LARGE_PACK = 256
# Where all keys and values fit in smaller packs, another way must be expected to be so much faster.
_MUCH_FASTER = 2.0
_SAMPLED_UNITS = 32
_TILE_KEYS = 256  # that a window's read is rounded to


@dataclass(frozen=True)
class Rates:
    """Floating-point operations a second of forward passes, and bytes a second of the store's reads."""

    flops: float
    store: float

    @classmethod
    def measured(cls, facts: ModelFacts, gemm_rate: float, place: torch.device, plan: Plan) -> Rates:
        """Those of this machine; a tenth of a second beside the rate of matrix products, which is given."""
        share = PassCosts.on(place.type).reached_share(facts.hidden_size)
        return cls(gemm_rate * share, store_rate(place, plan.core.pool_slots * facts.kv_token_bytes))

    @classmethod
    def assumed(cls, place: torch.device) -> Rates:
        """Where the choice must not depend on a measurement: on a host those of a few cores, else of a large GPU."""
        return cls(2e11, 2e9) if place.type == "cpu" else cls(4e14, 2e10)


@dataclass(frozen=True)
class _Candidate:
    way: LongPath
    pack_tokens: int
    launches: float  # seconds that packs cost however few their tokens
    extra: float  # seconds of reads, or of what is computed again

    @property
    def seconds(self) -> float:
        return self.launches + self.extra


def fitted(
    sizes: Sizes,
    facts: ModelFacts,
    plan: Plan,
    budget: int | None,
    *,
    may_recompute: bool,
    rates: Callable[[Plan], Rates],
) -> Plan:
    """The plan in packs, and with the way of running a long path, that ``budget`` bytes hold; itself if it is.

    ``may_recompute``: layers of ours run, and the size of a pack changes no bit. ``rates`` are asked for only where the
    usual way is refused, or leaves small packs alone. Raises RequestError if no way is within the budget.
    """
    try:
        at_hand = sizes.fitted(plan, budget)
    except RequestError:
        at_hand = None
    if at_hand is not None and (budget is None or at_hand.pack_tokens >= min(_LARGE_PACK, sizes.largest_pack(plan))):
        return at_hand
    assert budget is not None
    plan = sizes.fitted(plan, None)
    footprints, pack_sizes = sizes.footprints(plan), sizes.pack_sizes(plan)
    costs = _Costs(facts, plan, rates(plan), sizes.device)
    others = [_offloaded, *([_recomputed] if may_recompute else [])]
    candidates = (find(sizes, plan, budget, footprints, costs) for find in others)
    found = sorted((each for each in candidates if each is not None), key=lambda each: each.seconds)
    if at_hand is not None:
        slow = costs.launches(at_hand.pack_tokens) + costs.forward
        if not found or slow < _MUCH_FASTER * (found[0].seconds + costs.forward):
            return at_hand
    if not found:
        ways: list[LongPath | None] = [None, LongPath(OFFLOAD)]
        if may_recompute:
            ways.append(LongPath(RECOMPUTE, _least_rows(plan, pack_sizes[0], sizes.device)))
        least = min((footprints(pack_sizes[0], way) for way in ways), key=lambda each: each.peak)
        raise too_small(budget, pack_sizes[0], least)
    best = found[0]
    way = replace(best.way, seconds=best.extra, other_seconds=found[1].extra if len(found) > 1 else None)
    return replace(plan if best.pack_tokens == plan.pack_tokens else plan.repacked(best.pack_tokens), long_path=way)


class _Costs:
    """Seconds that a plan is expected to take, by what differs between the ways of running it."""

    def __init__(self, facts: ModelFacts, plan: Plan, rates: Rates, place: torch.device) -> None:
        self._facts, self._plan, self._rates = facts, plan, rates
        self._layer_seconds = PassCosts.on(place.type).layer_seconds
        self._units = np.asarray(plan.core.unit_tokens, np.int64)
        lengths = plan.context_lengths
        self._path = int(plan.core.query_base)
        self._read = float(lengths.mean()) if lengths.size else float(self._path)
        self.forward = facts.flops(plan.tokens, plan.scored_rows, plan.attention_pairs) / rates.flops

    def launches(self, pack_tokens: int) -> float:
        """What packs cost however few their tokens."""
        return self._num_packs(pack_tokens) * self._facts.num_layers * self._layer_seconds

    def reads(self, pack_tokens: int) -> float:
        """Every pack reads what it attends to of its path, in layers with a window that much of it."""
        facts = self._facts
        in_window = min(self._read, facts.window + _TILE_KEYS + 0.0)
        rows = (facts.num_layers - facts.num_window_layers) * self._read + facts.num_window_layers * in_window
        return self._num_packs(pack_tokens) * rows * facts.kv_token_bytes / facts.num_layers / self._rates.store

    def again(self, pack_tokens: int, rows: int) -> float:
        """Every group of ``rows`` rows computes its path again, and a unit that which the unit before it had."""
        path, facts, core = self._path, self._facts, self._plan.core
        some = np.linspace(0, self._units.size - 1, min(_SAMPLED_UNITS, self._units.size)).astype(int)
        known = np.mean([core.predict(int(unit), 0)[0] - self._units[unit] for unit in some]) if some.size else 0.0
        num_groups = -(-np.maximum(0, self._units + known - rows) // max(1, rows - path))
        num_paths = float(num_groups.sum()) + self._units.size * known / max(1, path)
        one = facts.flops(path, 0, path * (path + 1) // 2) / self._rates.flops
        return num_paths * (one + -(-path // pack_tokens) * facts.num_layers * self._layer_seconds)

    def _num_packs(self, pack_tokens: int) -> int:
        return int((-(-self._units // pack_tokens)).sum())


def _offloaded(
    sizes: Sizes, plan: Plan, budget: int, footprints: Callable[[int, LongPath | None], Footprint], costs: _Costs
) -> _Candidate | None:
    """The largest packs, since each reads its path; None if none fit, or the store has no room."""
    way = LongPath(OFFLOAD)
    size = largest_within(budget, sizes.pack_sizes(plan), lambda size: footprints(size, way).peak)
    if size is None or plan.core.pool_slots * sizes.kv > room_in_store(sizes.device):
        return None
    return _Candidate(way, size, costs.launches(size), costs.reads(size))


def _recomputed(
    sizes: Sizes, plan: Plan, budget: int, footprints: Callable[[int, LongPath | None], Footprint], costs: _Costs
) -> _Candidate | None:
    """The best size of packs, of halves of the largest, with all the rows that it leaves room for."""
    found: list[_Candidate] = []
    size, least = sizes.pack_sizes(plan)[-1], padded_rows(1, sizes.device)
    while size >= least:
        left = budget - footprints(size, LongPath(RECOMPUTE)).peak
        # No unit has more rows, padded, with its path.
        most = int(plan.core.unit_tokens.max(initial=0)) + _least_rows(plan, size, sizes.device)
        rows = min(left // sizes.hidden, most)
        if rows >= _least_rows(plan, size, sizes.device):
            way = LongPath(RECOMPUTE, int(rows))
            found.append(_Candidate(way, size, costs.launches(size), costs.again(size, way.rows)))
        size = whole_rows(size // 2, sizes.device) if size // 2 >= least else 0
    return min(found, key=lambda each: each.seconds, default=None)


def _least_rows(plan: Plan, pack_tokens: int, device: torch.device) -> int:
    """Rows that the longest path and one pack take, each piece of the path padded."""
    path = plan.core.pool_slots
    padding = padded_rows(0, device) * (-(-path // pack_tokens) + 2)
    return int(path + padding + padded_rows(pack_tokens, device))
