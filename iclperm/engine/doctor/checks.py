"""The first-use check, finding by finding: where one fails the library's own takes its place, and the rest goes on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from iclperm.engine.doctor.privacy import first_line, without_names
from iclperm.engine.kernelcheck import kernel_checks
from iclperm.engine.model import PlainModel, TreeModel
from iclperm.engine.selfcheck import check_agreement, layers_agree, refuse_unless_causal, rows_are_invariant


@dataclass(frozen=True)
class CheckFinding:
    """What a check found of a ``part`` (attention, layers, head, model, tree).

    ``passed`` is None for what is told and not judged; ``reason`` says why not. ``error`` is the largest, as a share of
    the numbers that went into a result, where it was measured and there was a result.
    """

    name: str
    part: str
    passed: bool | None
    seconds: float
    error: float | None = None
    tolerance: float | None = None
    reason: str = ""


def checked(model: PlainModel, pack_tokens: int) -> Iterator[CheckFinding]:
    """Every check of the first use, in its order; after one that fails the model runs the library's own there."""
    if not isinstance(model, TreeModel):
        yield _judged("a causal model", "model", lambda: refuse_unless_causal(model))
        return
    yield from _kernels(model)
    layers = _judged("decoder layers against transformers'", "layers", lambda: layers_agree(model))
    if not layers.passed:
        model.use_transformers_layers()
    yield layers
    has_equal_bits: list[bool] = []
    agreement = _judged(
        "whole model against plain scoring", "tree", lambda: has_equal_bits.append(check_agreement(model))
    )
    yield agreement
    if agreement.passed:
        yield _row_invariance(lambda: all(has_equal_bits) and rows_are_invariant(model, pack_tokens))


def _kernels(model: TreeModel) -> Iterator[CheckFinding]:
    instead = {
        "attention": model.use_torch_attention,
        "layers": model.use_transformers_layers,
        "head": model.use_logits,
    }
    started = time.perf_counter()
    try:
        for check in kernel_checks(model):
            if not check.is_right:
                instead[check.part]()
            is_measured = math.isfinite(check.error)  # JSON has no infinity
            yield CheckFinding(
                f"{check.name} kernel",
                check.part,
                check.is_right,
                check.seconds,
                check.error if is_measured else None,
                check.tolerance if is_measured else None,
                without_names(check.reason),
            )
    except Exception as error:  # memory ran out, or the check itself is at fault
        yield CheckFinding("kernels", "model", False, time.perf_counter() - started, reason=first_line(error))


def _judged(name: str, part: str, judge: Callable[[], bool | None]) -> CheckFinding:
    """What a judge says: False, or an error, is a failure."""
    started = time.perf_counter()
    try:
        reason = "the numbers are not those of the reference" if judge() is False else ""
    except Exception as error:  # a compiler's, a driver's, memory: it is told, and the rest goes on
        reason = first_line(error)
    return CheckFinding(name, part, not reason, time.perf_counter() - started, reason=reason)


def _row_invariance(judge: Callable[[], bool]) -> CheckFinding:
    """Not a fault where it is not so: results are told to hold for one size of packs."""
    verdicts: list[bool] = []
    found = _judged("a row's bits in any company", "tree", lambda: verdicts.append(judge()))
    if not found.passed or all(verdicts):
        return found
    reason = "they may differ: results hold to the last bit for one size of packs"
    return CheckFinding(found.name, found.part, None, found.seconds, reason=reason)
