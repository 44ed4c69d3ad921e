"""Greedy generation over the tree: prompts are encoded once a distinct token, then all live rows go on in lockstep.

A *row* is a distinct prompt with what was generated after it. Prompts that wait have forward passes to themselves as
long as they fill them; any other pass takes one token of every live row, then as many tokens of prompts as there is
room for. A row that ends makes place for the next prompt of its unit at once. Keys and values lie in slots of one pool:
those of a piece of the tree are freed with the last row beneath it, a row's own with the row. A row is let in only if
the pool can hold it to its last token, so nothing is ever swapped out.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from iclperm.engine.device import fixed_precision
from iclperm.engine.executor import Report
from iclperm.engine.forward import TreeForward
from iclperm.engine.kernels.head import LikeliestIds
from iclperm.engine.link import Mark
from iclperm.engine.model import TreeModel
from iclperm.engine.pack_rows import running
from iclperm.engine.plain_model import PlainModel
from iclperm.engine.plan import Plan
from iclperm.engine.rows import Branches, Lanes, LiveRow, PackBuilder, Segment, Slots
from iclperm.engine.shapes import padded_rows
from iclperm.engine.texts import INVALID, LENGTH, Ending, Generated
from iclperm.engine.tree import IntArray, PrefixTree, Rows, TokenArray, build_tree, path_to_token, path_tokens
from iclperm.errors import OutOfMemory, PlanError, RequestError, is_out_of_memory
from iclperm.reference.generation import generate_one

# Live rows at most: a layer's overhead is spread over them, and products of 512 rows run at their full rate. On two
# cores 512 decode 1.1 to 1.25 times as fast as 256 (25 M parameters), for twice the keys and values.
_LIVE_ROWS = 512
_PACK_TOKENS = 1024
# Context paths that the pool has room for beside the rows' own tokens: a straggler keeps its path while others go on.
_LIVE_PATHS = 4


class Bounds(NamedTuple):
    """The most that a run of all units may take: tokens forwarded, and tokens whose keys and values are alive."""

    tokens: int
    kv_peak_tokens: int


@dataclass(frozen=True)
class GenerationLimits:
    """Live rows, tokens of a forward pass, and tokens whose keys and values are alive, at most.

    Packs of fewer than ``least_pack`` tokens take no less memory.
    """

    rows: int
    pack_tokens: int
    kv_tokens: int | None = None  # None: as many as so many rows want
    least_pack: int = 1

    @classmethod
    def on(cls, device: torch.device, pack_tokens: int) -> GenerationLimits:
        """The default on a device; new tokens come in small numbers, so prompts go in packs of 1024 at most."""
        size = min(pack_tokens, _PACK_TOKENS)
        return cls(min(size, _LIVE_ROWS), size, least_pack=padded_rows(1, device))

    def halved(self) -> GenerationLimits:
        """Half the rows and packs; raises OutOfMemory if there are no fewer."""
        least = self.least_pack
        if self.rows == 1 and self.pack_tokens <= least:
            raise OutOfMemory(
                f"generation does not fit in memory even with one live row and packs of {self.pack_tokens} tokens; "
                "use fewer shots, fewer max_new_tokens, a smaller model or dtype, or a machine with more memory"
            )
        return replace(self, rows=max(1, self.rows // 2), pack_tokens=max(least, self.pack_tokens // 2))


@dataclass(frozen=True)
class _Step:
    """A pack that was launched: when its layers begin, end, and its head ends; the rows that a token is chosen for, in
    its order; the tokens on the device, and what waits for them."""

    tree: TreeForward
    marks: tuple[Mark, Mark, Mark]
    rows: list[LiveRow]
    token_ids: torch.Tensor
    choice: Callable[[], LikeliestIds]


class Decoder:
    """The loop: prompts in, texts out. Pool and path survive from unit to unit, nothing else.

    ``kv_tokens`` slots, of which a text takes ``longest`` at most; ``held`` are segments of contexts by node that a
    later unit may go on from. As long as the same rows go on, and no prompt, a GPU makes each step from the one before.
    """

    def __init__(
        self, model: TreeModel, limits: GenerationLimits, kv_tokens: int, longest: int, ending: Ending
    ) -> None:
        self._model, self._limits, self._ending = model, limits, ending
        self.kv_tokens = kv_tokens
        self.slots = Slots(kv_tokens)
        self.held: dict[int, Segment] = {}
        self._pool = model.pool(kv_tokens)
        self._lanes = Lanes(limits.rows, longest) if model.attends_live_rows else None
        self._rows: list[LiveRow] = []  # ascending numbers
        self._opening: deque[LiveRow] = deque()  # of the rows, those whose prompt is not encoded
        self._num_filled = 0
        self._num_missing = 0  # tokens of their prompts that are in no pack yet
        self._untimed: list[tuple[Mark, Mark]] = []  # of packs that nothing was read of since the last that was read

    def run(self, prompts: Iterable[list[Segment]], report: Report) -> list[Generated]:
        """The text after every prompt, in their order, paths coming in tree order."""
        waiting = _Peekable(prompts)
        texts: dict[int, Generated] = {}
        with self._model.attached():
            while waiting or self._rows:
                step: _Step | None = self._next_pack(waiting, report)
                while step is not None:
                    ahead = self._next_step(step, report) if self._may_run_ahead(step) else None
                    self._read(step, texts, report)
                    step = ahead or (self._next_step(step, report) if self._goes_on(step) else None)
        return [texts[number] for number in range(len(texts))]

    def release(self, segment: Segment) -> None:
        """One row fewer is beneath a segment; the last one frees it."""
        segment.num_waiting -= 1
        if not segment.num_waiting:
            self.slots.give(segment.slots)
            self._num_filled -= segment.filled
            segment.slots, segment.filled = [], 0

    def _next_pack(self, waiting: _Peekable, report: Report) -> _Step | None:
        """The live rows' next tokens with as much of the prompts as there is room for, launched."""
        builder, readers = self._fill(waiting)
        if not len(builder):
            raise PlanError(
                f"the {self.kv_tokens} tokens of keys and values hold no row; this is a defect of iclperm, "
                "please report it"
            )
        step = self._launched(self._model.stage(builder.pack(), self._pool), readers, report)
        for segment in builder.fresh:
            segment.filled, segment.fresh = segment.filled + segment.fresh, 0
        return step

    def _fill(self, waiting: _Peekable) -> tuple[PackBuilder, list[LiveRow]]:
        """The next pack, and the rows that a token is chosen for, in its order.

        Prompts that fill a pack have it to themselves, so that as many rows as may be go on together.
        """
        builder = PackBuilder(self._limits.pack_tokens, self._num_filled)
        while self._num_missing < builder.room and self._let_in(waiting):
            pass
        readers = [row for row in self._rows if row.ids] if self._num_missing < builder.room else []
        if self._lanes is None:
            for row in readers:
                builder.go_on(row)
        elif readers:
            for row in readers:
                if row.lane < 0:
                    self._lanes.enter(row)
            builder.go_on_in_lanes(readers, self._lanes.rows(readers))
        self._num_missing -= builder.room
        while self._opening and builder.encode(self._opening[0].path):
            readers.append(self._opening.popleft())
        self._num_missing += builder.room
        return builder, readers

    def _let_in(self, waiting: _Peekable) -> bool:
        """Whether the next prompt is live now: the pool holds it to its last token, whatever the others do."""
        if not waiting or len(self._rows) >= self._limits.rows:
            return False
        path = waiting.first
        own = self._ending.max_new_tokens - 1
        closed = [segment for segment in path if not segment.slots]
        num_closed = sum(segment.tokens.size for segment in closed)
        if self.slots.num_used + num_closed + own > self.kv_tokens:
            return False
        row = LiveRow(waiting.take(), path)
        for segment in closed:
            segment.slots = self.slots.take(segment.tokens.size)
        row.slots = self.slots.take(own)
        self._rows.append(row)
        self._opening.append(row)
        self._num_missing += num_closed
        return True

    def _launched(self, tree: TreeForward, readers: list[LiveRow], report: Report) -> _Step | None:
        """The step of a pack that is ready; None if no token is chosen in it."""
        link, started = self._model.link, time.perf_counter()
        begin = link.mark()
        with running(tree.pack, None):
            hidden = self._model.run(tree)
        forwarded = link.mark()
        report.count(tree.pack, tree)
        self._num_filled += len(tree.pack)
        for row in readers:
            if row.ids:
                row.num_own += 1
        if not readers:
            self._untimed.append((begin, forwarded))
            return None
        token_ids, choice = self._model.choose(hidden, tree)
        if link.is_asynchronous:
            report.seconds["host"] += time.perf_counter() - started
        return _Step(tree, (begin, forwarded, link.mark()), readers, token_ids, choice)

    def _next_step(self, step: _Step, report: Report) -> _Step | None:
        """One more token of each row of a step, launched."""
        return self._launched(self._model.go_on(step.tree, step.token_ids), step.rows, report)

    def _goes_on(self, step: _Step) -> bool:
        """Whether the next pack is made of the same rows alone: all that are live, so there is no place for others."""
        return step.tree.pack.is_live and len(step.rows) == len(self._rows)

    def _may_run_ahead(self, step: _Step) -> bool:
        """Whether the next step may run before the tokens of this one are known: no text has as many as it may."""
        most = self._ending.max_new_tokens
        has_room = self._goes_on(step) and all(len(row.ids) + 1 < most for row in step.rows)
        return has_room and self._model.link.is_asynchronous

    def _read(self, step: _Step, texts: dict[int, Generated], report: Report) -> None:
        """Wait for a step's tokens, and give each row its own."""
        choice = step.choice()
        for row, token, logprob, is_finite in zip(
            step.rows, choice.token.tolist(), choice.logprob.tolist(), choice.is_finite.tolist(), strict=True
        ):
            if row.is_over:  # which was not known when the step was launched
                report.discarded_tokens += 1
                continue
            finish = self._accept(row, token if is_finite else -1, logprob)
            if finish is not None:
                texts[row.number] = self._ending.result(row.ids, finish, row.logprob, row.num_tokens)
                self._finish(row)
        begin, forwarded, end = step.marks
        for passed in (*self._untimed, (begin, forwarded)):
            report.seconds["forward"] += self._model.link.seconds(*passed)
        self._untimed.clear()
        report.seconds["head"] += self._model.link.seconds(forwarded, end)

    def _accept(self, row: LiveRow, token: int, logprob: float) -> str | None:
        """Give a row its next token; how it ends, None if it goes on. -1 is none."""
        if self._lanes is None:
            if row.ids:
                slot = row.slot(row.num_own - 1)
                row.remember(slot, slot + 1)
            else:
                for segment in row.path:
                    for begin, end in segment.slots:
                        row.remember(begin, end)
        if token < 0:
            return INVALID
        row.num_tokens += 1
        row.logprob += logprob
        return self._ending.after(row.ids, token)

    def _finish(self, row: LiveRow) -> None:
        row.is_over = True
        self._rows.remove(row)
        self._num_filled -= row.num_own
        self.slots.give(row.slots)
        if self._lanes is not None:
            self._lanes.leave(row)
        for segment in row.path:
            self.release(segment)


class _Peekable:
    """Prompts yet to come; ``first`` is the next one."""

    def __init__(self, prompts: Iterable[list[Segment]]) -> None:
        self._prompts = iter(prompts)
        self._number = 0
        self._next = next(self._prompts, None)

    def __bool__(self) -> bool:
        return self._next is not None

    @property
    def first(self) -> list[Segment]:
        assert self._next is not None
        return self._next

    def take(self) -> int:
        """Go on to the next prompt; the number of this one."""
        self._next = next(self._prompts, None)
        self._number += 1
        return self._number - 1


class RowLimit:
    """How many rows memory is known to hold; one for the life of an engine. ``may_shrink`` as of `PackLimit`."""

    def __init__(self) -> None:
        self._limits: GenerationLimits | None = None
        self.may_shrink = False

    def fit(self, limits: GenerationLimits) -> GenerationLimits:
        """``limits``, or fewer rows where memory has run out before."""
        known = self._limits
        if known is None or known.rows >= limits.rows:
            return limits
        return replace(limits, rows=known.rows, pack_tokens=min(limits.pack_tokens, known.pack_tokens))

    def shrink(self, tried: GenerationLimits) -> GenerationLimits:
        """Half of what was tried, remembered; raises OutOfMemory if that might change results or is nothing."""
        halved = tried.halved()
        if not self.may_shrink:
            raise OutOfMemory(
                f"generation does not fit in memory with {tried.rows} live rows in packs of {tried.pack_tokens} "
                "tokens, and smaller ones are not known to give the same bits; start anew with "
                f"pack_tokens={halved.rows}, fewer shots or a smaller model"
            )
        self._limits = halved
        return halved


class UnitPrompts(NamedTuple):
    """The prompts of one unit: how a decoder gets them, and the tokens that they are predicted to take."""

    name: str
    prompts: Callable[[Decoder], Iterator[list[Segment]]]
    tokens: Callable[[Decoder], int]  # tokens of prompts that will be forwarded
    held_after: int  # tokens of the path whose keys and values are alive when the unit is done


def _kv_bound(tokens: int, prompts: int, depth: int, path: int, limits: GenerationLimits, max_new_tokens: int) -> int:
    """Most tokens of keys and values that a unit may hold at once, which are as many slots of the pool.

    The unit has ``prompts`` prompts of ``tokens`` distinct tokens together. The longest has ``depth`` tokens, of which
    ``path`` are its context. Raises RequestError if the limit cannot hold the longest with all that is generated.
    """
    own = max_new_tokens - 1
    everything = tokens + min(prompts, limits.rows) * own
    wanted = _LIVE_PATHS * path + limits.rows * (depth - path + own)
    if limits.kv_tokens is None:
        return min(everything, max(wanted, depth + own))
    if limits.kv_tokens < min(everything, depth + own):
        raise RequestError(
            f"memory for the keys and values of {limits.kv_tokens} tokens cannot hold the longest prompt of {depth} "
            f"tokens with {max_new_tokens} new ones; raise memory_budget, or use fewer shots or new tokens"
        )
    return min(everything, max(wanted, depth + own), limits.kv_tokens)


def generation_bounds(plan: Plan, max_new_tokens: int, limits: GenerationLimits | None = None) -> Bounds:
    """The most that generation over a plan forwards, and holds at once, in tokens; unlike scoring it may take less.

    ``limits`` are those of a CPU by default, in the plan's packs. O(units).
    """
    limits = limits or GenerationLimits.on(torch.device("cpu"), plan.pack_tokens)
    distinct = np.array([np.unique(block.target_token).size for block in plan.blocks])
    depth = _longest_prompt(plan)
    tokens, peak = 0, 0
    for unit in range(plan.num_units):
        fed, prompts = int(plan.core.unit_tokens[unit]), plan.unit_contexts(unit).size
        prompts *= int(distinct[plan.core.unit_block[unit]])
        tokens += fed + prompts * (max_new_tokens - 1)
        # A unit that starts anew encodes its path, too.
        most = fed + plan.core.query_base
        peak = max(peak, _kv_bound(most, prompts, depth, plan.core.query_base, limits, max_new_tokens))
    return Bounds(tokens, peak)


def _longest_prompt(plan: Plan) -> int:
    return plan.core.query_base + max(block.max_depth for block in plan.blocks)


def generate_rows(
    model: TreeModel, rows: Rows, ending: Ending, limits: GenerationLimits, limit: RowLimit, report: Report
) -> list[Generated]:
    """The text after every row of token ids; equal rows are generated once."""
    tree, nodes = build_tree(rows)
    ends, which = np.unique(np.asarray(tree.token_offsets)[nodes + 1] - 1, return_inverse=True)
    branches = Branches(tree, ends)
    work = UnitPrompts("the call", lambda decoder: branches.beneath(None), lambda decoder: tree.num_tokens, 0)

    def slots(fitted: GenerationLimits) -> int:
        return _kv_bound(tree.num_tokens, ends.size, tree.max_depth, 0, fitted, ending.max_new_tokens)

    longest = tree.max_depth + ending.max_new_tokens - 1
    report.tokens_expected = tree.num_tokens + ends.size * (ending.max_new_tokens - 1)
    (texts,) = _run(model, [work], slots, longest, ending, limits, limit, report)
    report.tokens_naive += int(rows.lengths[np.unique(which, return_index=True)[1]].sum())
    report.tokens_unique += tree.num_tokens
    return [texts[place] for place in which.tolist()]


def generate_units(
    model: TreeModel,
    plan: Plan,
    units: Iterable[int],
    ending: Ending,
    limits: GenerationLimits,
    limit: RowLimit,
    report: Report,
) -> Iterator[tuple[int, list[Generated]]]:
    """Each unit with its texts [c * q], context-major; units are taken one at a time, each after its predecessor's."""
    unit = -1

    def works() -> Iterator[UnitPrompts]:
        nonlocal unit
        for unit in units:
            yield _unit_work(plan, unit)

    def slots(fitted: GenerationLimits) -> int:
        return generation_bounds(plan, ending.max_new_tokens, fitted).kv_peak_tokens

    longest = _longest_prompt(plan) + ending.max_new_tokens - 1
    for texts in _run(model, works(), slots, longest, ending, limits, limit, report):
        ends, places = _places(plan, unit)
        yield unit, [texts[begin + place] for begin in range(0, len(texts), ends.size) for place in places.tolist()]


def _run(
    model: TreeModel,
    works: Iterable[UnitPrompts],
    slots: Callable[[GenerationLimits], int],
    longest: int,
    ending: Ending,
    limits: GenerationLimits,
    limit: RowLimit,
    report: Report,
) -> Iterator[list[Generated]]:
    """The texts of each unit. Where memory runs out, the unit starts again with half the rows; where the model was
    changed since, nothing is kept."""
    decoder: Decoder | None = None
    condition = model.condition
    for work in works:
        texts = None
        if (now := model.condition) != condition:
            decoder, condition = None, now
        while texts is None:
            fitted = limit.fit(limits)
            if decoder is None:
                decoder = Decoder(model, fitted, slots(fitted), longest, ending)
            texts = _attempt(decoder, work, report)
            if texts is None:
                decoder = None
                if not model.copied.give_up():
                    limit.shrink(fitted)
                    report.num_splits += 1
                model.release_cached_memory()
        yield texts


def _attempt(decoder: Decoder, work: UnitPrompts, report: Report) -> list[Generated] | None:
    """A unit's texts; None if memory ran out. On return the failed tensors are gone."""
    cost = report.open_unit = Report(whole=report)
    try:
        predicted = work.tokens(decoder)
        texts = decoder.run(work.prompts(decoder), cost)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None
    finally:
        report.open_unit = None
        report.add(cost)
    # The last token of a text is not fed, but where the logits after it were not finite.
    fed = sum(text.num_tokens - (text.finish != INVALID) for text in texts)
    report.tokens_naive += fed
    report.tokens_unique += fed
    report.tokens_generated += sum(text.num_tokens for text in texts)
    measured = cost.tokens_forwarded - cost.discarded_tokens, decoder.slots.num_used
    planned = predicted + fed, work.held_after
    if measured != planned or cost.kv_peak_tokens > decoder.kv_tokens:
        raise PlanError(
            f"{work.name} forwarded and went on holding (tokens) {measured} where the plan says {planned}, and held "
            f"{cost.kv_peak_tokens} of {decoder.kv_tokens}; this is a defect of iclperm, please report it"
        )
    return texts


def _unit_work(plan: Plan, unit: int) -> UnitPrompts:
    contexts = plan.unit_contexts(unit)
    ends, _ = _places(plan, unit)
    branches = Branches(plan.blocks[int(plan.core.unit_block[unit])], ends)
    last_leaf = int(plan.core.held_after(unit))
    tree = plan.contexts
    leaves = np.flatnonzero(tree.subtree_end == np.arange(1, tree.num_nodes + 1))
    first_path = set(_chain(tree, int(leaves[plan.core.unit_leaf_begin[unit]])))

    def prompts(decoder: Decoder) -> Iterator[list[Segment]]:
        kept = {node: segment for node, segment in decoder.held.items() if node in first_path}
        for segment in [segment for node, segment in decoder.held.items() if node not in kept]:
            decoder.release(segment)
        segments: dict[int, Segment] = {}
        for segment in kept.values():
            segment.num_waiting = 0
        trunks = [_grow(tree, node, kept, segments, ends.size) for node in plan.context_nodes[contexts].tolist()]
        _grow(tree, last_leaf, kept, segments, 1)
        decoder.held = {node: segments[node] for node in _chain(tree, last_leaf)}
        return (path for trunk in trunks for path in branches.beneath(trunk))

    def tokens(decoder: Decoder) -> int:
        return int(plan.core.predict(unit, max(decoder.held, default=0))[0])

    return UnitPrompts(f"unit {unit}", prompts, tokens, path_tokens(tree, last_leaf).size)


def _chain(tree: PrefixTree, node: int) -> list[int]:
    """The nodes from below the root to ``node``."""
    chain: list[int] = []
    while node > 0:
        chain.append(node)
        node = int(tree.parent[node])
    return chain[::-1]


def _grow(
    tree: PrefixTree, node: int, kept: dict[int, Segment], segments: dict[int, Segment], num_rows: int
) -> Segment | None:
    """The segment of a context's last node, with ``num_rows`` more rows beneath it and its ancestors."""
    segment: Segment | None = None
    for number in _chain(tree, node):
        if number not in segments:
            begin, end = tree.token_offsets[number], tree.token_offsets[number + 1]
            new = Segment(tree.tokens[begin:end], int(tree.depth[number]), segment, 0)
            segments[number] = kept.get(number, new)
        segment = segments[number]
        segment.num_waiting += num_rows
    return segment


def _places(plan: Plan, unit: int) -> tuple[IntArray, IntArray]:
    """The distinct tokens of its block that a unit's queries end with, and the place among them of each query.

    Raises RequestError unless the plan has one placeholder of one token for every query.
    """
    block = plan.blocks[int(plan.core.unit_block[unit])] if plan.blocks else None
    if block is None or plan.num_labels != 1 or (np.diff(block.row_offsets) != 1).any():
        raise RequestError(
            "a plan for generation has one continuation of one token, which is never fed; make it with "
            "plan_product(contexts, queries, [[0]])"
        )
    ends, places = np.unique(block.target_token[block.row_items], return_inverse=True)
    return ends, places


def generate_plainly(model: PlainModel, rows: Iterable[TokenArray], ending: Ending, report: Report) -> list[Generated]:
    """As ``generate_rows``, prompt by prompt through transformers: any architecture."""
    known: dict[bytes, Generated] = {}
    order = []
    started = time.perf_counter()
    for prompt in rows:
        key = prompt.tobytes()
        order.append(key)
        if key not in known:
            known[key] = _one_plainly(model, prompt, ending, report)
    report.seconds["forward"] += time.perf_counter() - started
    return [known[key] for key in order]


def _one_plainly(model: PlainModel, prompt: TokenArray, ending: Ending, report: Report) -> Generated:
    try:
        with model.plainly() as plain, fixed_precision():
            steps = generate_one(plain, prompt.tolist(), ending.max_new_tokens, ending.eos_ids, ending.stops)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(
            f"a prompt of {prompt.size} tokens with {ending.max_new_tokens} new ones does not fit in memory; use fewer "
            "shots or new tokens, a smaller model or dtype, or a machine with more memory"
        ) from error
    ids: list[int] = []
    finish: str | None = LENGTH
    for step in steps:
        finish = ending.after(ids, step.token) if step.is_finite else INVALID
        if finish is not None:
            break
    report.tokens_naive += prompt.size + len(steps) - 1
    report.tokens_unique += prompt.size + len(steps) - 1
    report.tokens_forwarded += prompt.size + len(steps) - 1
    report.scored_rows += len(steps)
    report.attention_pairs += (prompt.size + len(steps) - 1) * (prompt.size + len(steps)) // 2
    report.tokens_generated += len(steps)
    report.tell()
    return ending.result(ids, finish or LENGTH, sum(step.logprob for step in steps), len(steps))


def plain_unit_rows(plan: Plan, unit: int) -> Iterator[TokenArray]:
    """The prompts of a unit's contexts and queries, context-major."""
    ends, places = _places(plan, unit)
    block = plan.blocks[int(plan.core.unit_block[unit])]
    for context in plan.unit_contexts(unit):
        prefix = path_tokens(plan.contexts, int(plan.context_nodes[context]))
        for place in places.tolist():
            yield np.concatenate([prefix, path_to_token(block, int(ends[place]))])
