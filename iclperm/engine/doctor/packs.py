"""What packs of several sizes take, in the loop that studies run in: on the host, on the device, and in all."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from iclperm.engine.doctor.privacy import first_line
from iclperm.engine.executor import Report, execute
from iclperm.engine.footprint import Sizes
from iclperm.engine.memory import PackLimit, device_bytes, free_bytes
from iclperm.engine.model import TreeModel
from iclperm.engine.plain_model import PlainModel
from iclperm.engine.plan import Plan, plan_product
from iclperm.errors import is_out_of_memory
from iclperm.study.sizes import bytes_in_words

SIZES = (4096, 8192, 16384, 32768)
"""Tokens of a pack."""
_FIRST_ON_A_CPU = 1024
_MOST_SECONDS, _MOST_SECONDS_ON_A_CPU = 60.0, 20.0  # of one size, as the size before it foretells
_PACKS, _PACKS_ON_A_CPU = 4, 1  # a unit: the next one is made ready while one computes
_PASSES = 3  # after one that compiles and fills caches
_CONTEXT, _QUERY, _LABELS = 256, 48, 4  # tokens: a short context, and what studies ask behind one
_GAIN = 0.05
_MORE = 1.1  # times the tokens of the packs before: else they are nearly the same ones


@dataclass(frozen=True)
class PackSeconds:
    """Packs of at most ``size`` tokens, of ``tokens`` each on average. ``seconds`` are those of one from its start
    until its results are read, beside the others; ``host`` those of making it ready and launching it, ``device`` those
    between its first and last kernel. On a CPU, where host and device are one, both are None. ``fastest`` and
    ``slowest`` are the least and the most seconds of a pack in any pass. All are None, with the ``reason``, where
    nothing was timed."""

    size: int
    tokens: int
    seconds: float | None = None
    host: float | None = None
    device: float | None = None
    reason: str = ""
    fastest: float | None = None
    slowest: float | None = None

    @property
    def per_token(self) -> float | None:
        return None if self.seconds is None else self.seconds / self.tokens

    def is_surely_faster(self, other: PackSeconds) -> bool:
        """Whether even the slowest pass took a twentieth less time a token than the fastest of the other."""
        if self.slowest is None or other.fastest is None:
            return False
        return self.slowest / self.tokens < other.fastest / other.tokens * (1 - _GAIN)


def usual_pack(model: PlainModel) -> int:
    """Tokens of a model's packs at most where nobody says how many."""
    sizes = Sizes.of(model, model.device)
    usual = sizes.usual_pack(device_bytes(model.devices[:1]))
    return min(usual, sizes.most_pack or usual)


def timed_packs(model: TreeModel) -> Iterator[PackSeconds]:
    """Packs of each of `SIZES` that the layers take, memory is foretold to hold, and that do not take long; on a CPU a
    small one before them, and none after two that gained nothing."""
    is_host = model.device.type == "cpu"
    done: list[PackSeconds] = []
    for size in (_FIRST_ON_A_CPU, *SIZES) if is_host else SIZES:
        plan = product_of(model, size, _PACKS_ON_A_CPU if is_host else _PACKS)
        tokens = plan.tokens // plan.num_packs
        reason = _obstacle(model, plan) or _pointless(done, size, tokens, is_host=is_host)
        found = PackSeconds(size, size, reason=reason) if reason else _timed(model, plan)
        yield found
        if found.reason:
            return
        done.append(found)


def product_of(model: TreeModel, size: int, num_packs: int) -> Plan:
    """One context and as many queries as make packs of ``size`` tokens in one unit, with labels of one token each."""
    rng = np.random.default_rng(0)
    context = min(_CONTEXT, model.max_positions // 2)
    query = max(1, min(_QUERY, model.max_positions - context - 1))

    def ids(count: int) -> list[int]:
        return [int(number) for number in rng.integers(0, model.vocab_size, count)]

    queries = [ids(query) for _ in range(max(1, (num_packs * size - context) // query))]
    labels = [[number] for number in range(min(_LABELS, model.vocab_size))]
    return plan_product([ids(context)], queries, labels, pack_tokens=size, unit_tokens=1 << 30)


def enough(packs: Sequence[PackSeconds]) -> PackSeconds | None:
    """The smallest packs that larger ones gain less than a twentieth on, a token; None if nothing was timed."""
    done = [(each, each.per_token) for each in packs if each.per_token is not None]
    best = min((seconds for _, seconds in done), default=0.0)
    return next((each for each, seconds in done if seconds <= best * (1 + _GAIN)), None)


def _obstacle(model: TreeModel, plan: Plan) -> str:
    """Why packs cannot run; empty where they can."""
    sizes = Sizes.of(model, model.device, checks=False)
    if sizes.most_pack is not None and plan.pack_tokens > sizes.most_pack:
        return f"packs of these layers have {sizes.most_pack:,} tokens at most on this device"
    needed, free = sizes.footprint(plan).peak - sizes.weights, free_bytes(model.device)
    if needed > free:
        return f"no room: {bytes_in_words(needed)} are foretold beside the weights, {bytes_in_words(free)} are free"
    return ""


def _pointless(done: Sequence[PackSeconds], size: int, tokens: int, *, is_host: bool) -> str:
    """Why larger packs are not tried; empty where they may tell something."""
    best = enough(done)
    if best is None or done[-1].per_token is None:
        return ""
    if tokens < _MORE * done[-1].tokens:
        return f"not run: what is asked of this model fills no packs of more than {tokens:,} tokens"
    num_packs, most = (_PACKS_ON_A_CPU, _MOST_SECONDS_ON_A_CPU) if is_host else (_PACKS, _MOST_SECONDS)
    seconds = done[-1].per_token * tokens * num_packs * (1 + _PASSES)
    if seconds > most:
        return f"not run: it would take about {seconds:.0f} s"
    if is_host and list(done).index(best) <= len(done) - 3:
        return f"not run: nothing was gained from {best.size:,} tokens on"
    return ""


def _timed(model: TreeModel, plan: Plan) -> PackSeconds:
    """One unit of several packs, the median of some passes."""
    limit = PackLimit(Sizes.of(model, model.device).peak, model.device)
    rounds = []
    try:
        for _ in range(1 + _PASSES):
            report, started = Report(), time.perf_counter()
            for _unit in execute(model, plan, range(plan.num_units), report, limit):
                pass  # its values are of random ids
            seconds = time.perf_counter() - started
            rounds.append((seconds, report.seconds["host"], report.seconds["forward"] + report.seconds["head"]))
    except Exception as error:
        model.release_cached_memory()
        reason = "memory ran out" if is_out_of_memory(error) else first_line(error)
        return PackSeconds(plan.pack_tokens, plan.pack_tokens, reason=reason)
    whole, host, device = (float(np.median(column)) / report.num_packs for column in zip(*rounds[1:], strict=True))
    tokens = report.tokens_forwarded // report.num_packs
    is_known = model.link.is_asynchronous
    fastest, slowest = (pick(seconds for seconds, *_ in rounds[1:]) / report.num_packs for pick in (min, max))
    return PackSeconds(
        plan.pack_tokens,
        tokens,
        whole,
        host if is_known else None,
        device if is_known else None,
        fastest=fastest,
        slowest=slowest,
    )
