"""The only loop over a plan: packs in, log-probabilities out."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedModel

from iclperm.engine.device import fixed_precision
from iclperm.engine.forward import KvPool, OneLayerPool, TreeForward
from iclperm.engine.kernels.head import Reading
from iclperm.engine.layerwise import forward_by_layer
from iclperm.engine.link import DeviceLink, Mark
from iclperm.engine.memory import PackLimit
from iclperm.engine.model import TreeModel
from iclperm.engine.offload import OffloadedPool, open_store
from iclperm.engine.pack_rows import Asked, PlannedRequests, running
from iclperm.engine.plain_model import PlainModel
from iclperm.engine.plan import Pack, Plan
from iclperm.engine.tree import IntArray, PrefixTree, path_to_token, path_tokens
from iclperm.errors import OutOfMemory, PlanError, is_out_of_memory
from iclperm.reference.scoring import next_token_logprobs

Progress = Callable[[int, int], None]
"""What is told how far a call is: tokens forwarded, and those that are expected in all."""


@dataclass
class Report:
    """What a call cost. Tokens are counted where they pass the model's first layer; seconds by phase.

    Of a GPU ``forward`` and ``head`` are its own seconds; ``host`` are those in which it was told what to do.
    """

    tokens_naive: int = 0
    tokens_unique: int = 0
    tokens_forwarded: int = 0
    recomputed_tokens: int = 0  # of the tokens forwarded, those that were before, for keys and values that did not fit
    recomputed_packs: int = 0  # of the packs, those of such tokens alone
    discarded_tokens: int = 0  # of the tokens forwarded, those of rows that had ended before a GPU could be told
    padding_rows: int = 0
    kv_peak_tokens: int = 0
    num_packs: int = 0
    num_splits: int = 0  # times that packs were halved because memory ran out
    scored_rows: int = 0
    tokens_generated: int = 0
    attention_pairs: int = 0  # query-key pairs, for one head and layer
    skipped_tokens: int = 0  # of the tokens forwarded, those of which the last layer computed keys and values alone
    skipped_pairs: int = 0  # of the attention pairs, those of skipped tokens
    looked_up_tokens: int = 0  # of the tokens forwarded, those with q, k, v reused from an earlier token of their id
    flops: float = 0.0
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    tokens_expected: int = 0  # to be forwarded in all, as far as is known; at the end those that were
    gemm_rate: Callable[[], float] = field(default=lambda: float("nan"), repr=False, compare=False)
    progress: Progress | None = field(default=None, repr=False, compare=False)
    open_unit: Report | None = field(default=None, repr=False, compare=False)
    """Of the unit that runs now, which is added when it ends."""
    whole: Report | None = field(default=None, repr=False, compare=False)
    """Of the call that this unit is of."""

    @property
    def tokens_so_far(self) -> int:
        """Tokens forwarded, those of the unit that runs now among them; another thread may ask."""
        unit = self.open_unit
        return self.tokens_forwarded + (0 if unit is None else unit.tokens_forwarded)

    @property
    def utilisation(self) -> float:
        """Share of the machine's matrix-product rate that forward and head reached; the rate is measured once."""
        seconds = self.seconds["forward"] + self.seconds["head"]
        return self.flops / seconds / self.gemm_rate() if seconds else 0.0

    def tell(self) -> None:
        """Say how far the call is to whoever asked; what that raises ends the call."""
        whole = self.whole or self
        if whole.progress is not None:
            done = whole.tokens_so_far
            whole.progress(done, max(done, whole.tokens_expected))

    def count(self, pack: Pack, tree: TreeForward) -> None:
        """Add a pack that was forwarded, and tell of it."""
        self.num_packs += 1
        self.tokens_forwarded += tree.num_tokens
        self.padding_rows += tree.num_rows - len(pack)
        self.kv_peak_tokens = max(self.kv_peak_tokens, pack.held_tokens + len(pack))
        pairs = pack.positions.astype(np.int64) + 1
        self.attention_pairs += int(pairs.sum())
        self.looked_up_tokens += tree.num_looked_up
        self.scored_rows += tree.num_scored
        if tree.is_narrowed:
            self.skipped_tokens += len(pack) - tree.num_scored
            self.skipped_pairs += int(pairs.sum() - pairs[pack.scored_rows].sum())
        self.tell()

    def add(self, other: Report) -> None:
        """Accumulate another report; peaks take the maximum."""
        for name in ("tokens_naive", "tokens_unique", "tokens_forwarded", "recomputed_tokens", "recomputed_packs",
                     "discarded_tokens", "padding_rows", "num_packs", "num_splits", "scored_rows", "tokens_generated",
                     "attention_pairs", "skipped_tokens", "skipped_pairs", "looked_up_tokens", "flops"):  # fmt: skip
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.kv_peak_tokens = max(self.kv_peak_tokens, other.kv_peak_tokens)
        for phase, seconds in other.seconds.items():
            self.seconds[phase] += seconds


@dataclass(frozen=True)
class UnitValues:
    """What a unit's packs gave, one entry a target: log-probability in nats, greedy, finite logits."""

    unit: int
    logprob: npt.NDArray[np.float32]
    is_greedy: npt.NDArray[np.bool_]
    is_finite: npt.NDArray[np.bool_]

    @classmethod
    def empty(cls, plan: Plan, unit: int) -> UnitValues:
        """Values that nothing has filled yet: NaN, and not finite."""
        size = int(plan.core.unit_num_values[unit])
        return cls(unit, np.full(size, np.nan, np.float32), np.zeros(size, bool), np.zeros(size, bool))

    def take(self, pack: Pack, reading: Reading) -> None:
        """Put what was read of a pack where it belongs."""
        self.logprob[pack.pair_out] = reading.logprob
        self.is_greedy[pack.pair_out] = reading.is_greedy
        self.is_finite[pack.pair_out] = reading.is_finite


def execute(
    model: TreeModel,
    plan: Plan,
    units: Iterable[int],
    report: Report,
    limit: PackLimit,
    numbers: IntArray | None = None,
) -> Iterator[UnitValues]:
    """Run units in the order given, adding to ``report``; path KV is kept from a unit to the next that continues it.

    ``numbers`` are what the plan's requests are called in `PackRows`. Units are taken one at a time, each after its
    predecessor's values were. The model is attached only while a unit runs, never while the caller holds the iterator;
    where it was changed meanwhile, nothing is kept. Where memory runs out, the unit starts again in smaller packs, its
    path included; the packs done before count as forwarded. Raises PlanError if the tokens forwarded or the KV alive
    differ from the prediction, OutOfMemory as ``limit`` does.
    """
    pool, held, condition = _pool(model, plan), 0, model.decoder_condition
    for unit in units:
        plan = limit.fit(plan)
        if (now := model.decoder_condition) != condition:
            pool, held, condition = _pool(model, plan), 0, now
        while (values := _attempt(model, pool, plan, unit, held, report, limit, numbers)) is None:
            plan, held = limit.fit(plan), 0
            pool = _pool(model, plan)
            model.release_cached_memory()
        held = 0 if _recomputes(plan) else plan.core.held_after(unit)
        yield values


def _recomputes(plan: Plan) -> bool:
    return plan.long_path is not None and plan.long_path.recomputes


def _pool(model: TreeModel, plan: Plan) -> KvPool:
    """An empty pool for a plan's open path, of the kind that it runs with."""
    if plan.long_path is None:
        return model.pool(plan.core.pool_slots)
    if plan.long_path.recomputes:
        return OneLayerPool(plan.core.pool_slots, model.limits)
    return OffloadedPool(plan.core.pool_slots, model.limits, open_store(model.device))


def _attempt(
    model: TreeModel,
    pool: KvPool,
    plan: Plan,
    unit: int,
    held: int,
    report: Report,
    limit: PackLimit,
    numbers: IntArray | None,
) -> UnitValues | None:
    """A unit's values; None if memory ran out and ``limit`` is lower now. On return the failed tensors are gone."""
    cost = report.open_unit = Report(whole=report)
    largest = plan.pack_tokens
    try:
        packs = list(plan.packs(unit, held))
        largest = max(map(len, packs), default=largest)
        values = UnitValues.empty(plan, unit)
        if plan.long_path is not None and plan.long_path.recomputes:
            _run_by_layer(model, pool, packs, plan.long_path.rows, values, cost)
        else:
            with model.attached():
                _run_packs(model, pool, packs, values, cost, PlannedRequests(plan, unit, numbers))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        if not model.copied.give_up():
            limit.shrink(plan, unit, largest)
            cost.num_splits += 1
        return None
    finally:
        report.open_unit = None
        report.add(cost)
    _check_prediction(plan, unit, held, cost)
    return values


def _run_packs(
    model: TreeModel, pool: KvPool, packs: list[Pack], values: UnitValues, cost: Report, asked: Asked
) -> None:
    """Packs in their order. While one computes on a device of its own, the next is made ready and the last one read."""
    link, unread = model.link, deque[_Launched]()
    tree = model.stage(packs[0], pool) if packs else None
    for number in range(len(packs)):
        started = time.perf_counter()
        assert tree is not None
        unread.append(_Launched.of(model, tree, cost, asked))
        tree = model.stage(packs[number + 1], pool) if number + 1 < len(packs) else None
        if link.is_asynchronous:
            cost.seconds["host"] += time.perf_counter() - started
        while len(unread) > link.is_asynchronous:
            unread.popleft().collect(link, values, cost)
    while unread:
        unread.popleft().collect(link, values, cost)


@dataclass(frozen=True)
class _Launched:
    """A pack that a device was told to compute, when it begins and ends with layers and head, and what will be read."""

    pack: Pack
    begin: Mark
    forwarded: Mark
    end: Mark
    reading: Callable[[], Reading] | None

    @classmethod
    def of(cls, model: TreeModel, tree: TreeForward, cost: Report, asked: Asked) -> _Launched:
        mark, pack = model.link.mark, tree.pack
        begin = mark()
        with running(pack, asked):
            hidden = model.run(tree)
        forwarded = mark()
        cost.count(pack, tree)
        reading = model.read(hidden, tree) if pack.scored_rows.size else None
        return cls(pack, begin, forwarded, mark(), reading)

    def collect(self, link: DeviceLink, values: UnitValues, cost: Report) -> None:
        """Wait for the results, and take them."""
        if self.reading is not None:
            values.take(self.pack, self.reading())
        cost.seconds["forward"] += link.seconds(self.begin, self.forwarded)
        cost.seconds["head"] += link.seconds(self.forwarded, self.end)


def _run_by_layer(
    model: TreeModel, pool: KvPool, packs: list[Pack], most_rows: int, values: UnitValues, cost: Report
) -> None:
    """A unit's packs from its path on, where one layer's keys and values are held at a time."""
    assert isinstance(pool, OneLayerPool)
    forwarded = time.perf_counter()
    with running(None, None), closing(forward_by_layer(model, pool, packs, most_rows)) as passes:
        for done in passes:
            cost.seconds["forward"] += time.perf_counter() - forwarded
            cost.count(done.pack, done.tree)
            if done.is_again:
                cost.recomputed_tokens += len(done.pack)
                cost.recomputed_packs += 1
            started = time.perf_counter()
            if done.pack.scored_rows.size:
                values.take(done.pack, model.read(done.hidden, done.tree)())
            forwarded = time.perf_counter()
            cost.seconds["head"] += forwarded - started


def _check_prediction(plan: Plan, unit: int, held: int, cost: Report) -> None:
    predicted = plan.core.predict(unit, held)
    measured = (
        cost.tokens_forwarded - cost.recomputed_tokens,
        cost.num_packs - cost.recomputed_packs,
        cost.kv_peak_tokens,
    )
    if measured != predicted:
        raise PlanError(
            f"unit {unit} forwarded (tokens, packs, KV peak) {measured} where the plan says {predicted}; "
            "this is a defect of iclperm, please report it"
        )


def execute_plain(model: PlainModel, plan: Plan, units: Iterable[int], report: Report) -> Iterator[UnitValues]:
    """As ``execute``, prompt by prompt through the unmodified model: any architecture, at the cost of every token."""
    for unit in units:
        values = UnitValues.empty(plan, unit)
        started = time.perf_counter()
        try:
            with model.plainly() as plain, fixed_precision(), running(None, None):
                _run_plain(plain, plan, values, report)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemory(
                f"a prompt of unit {unit} does not fit in memory (of up to {plan.max_tokens} tokens); "
                "use fewer shots, a smaller model or dtype, or a machine with more memory"
            ) from error
        report.seconds["forward"] += time.perf_counter() - started
        yield values


def _run_plain(model: PreTrainedModel, plan: Plan, values: UnitValues, report: Report) -> None:
    place = 0
    for prefix, tree, begin, end in _scored_trees(plan, values.unit):
        for target in range(begin, end):
            if target == begin or tree.target_token[target] != tree.target_token[target - 1]:
                prompt = [*prefix, *path_to_token(tree, int(tree.target_token[target]))]
                logprobs = next_token_logprobs(model, prompt)
                report.tokens_forwarded += len(prompt)
                report.scored_rows += 1
                report.attention_pairs += len(prompt) * (len(prompt) + 1) // 2
                report.tell()
            wanted = int(tree.target_id[target])
            finite = bool(np.isfinite(logprobs).all())
            values.is_finite[place] = finite
            values.is_greedy[place] = finite and int(logprobs.argmax()) == wanted
            values.logprob[place] = logprobs[wanted] if finite else np.nan
            place += 1


def _scored_trees(plan: Plan, unit: int) -> Iterator[tuple[list[int], PrefixTree, int, int]]:
    """The (prefix, tree, first target, end of targets) that a unit scores, in the order of its values."""
    block = int(plan.core.unit_block[unit])
    if block < 0:
        begin = int(plan.core.unit_value_begin[unit])
        yield [], plan.contexts, begin, begin + int(plan.core.unit_num_values[unit])
        return
    for context in plan.unit_contexts(unit):
        prefix = path_tokens(plan.contexts, int(plan.context_nodes[context])).tolist()
        yield prefix, plan.blocks[block], 0, plan.blocks[block].target_token.size
