"""The first-use check, finding by finding: where one fails the library's own takes its place, and the rest goes on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from iclperm.engine.doctor.privacy import first_line, without_names
from iclperm.engine.kernelcheck import kernel_checks
from iclperm.engine.kernels.launching import PARTS
from iclperm.engine.model import TreeModel
from iclperm.engine.plain_model import PlainModel
from iclperm.engine.selfcheck import (
    Fallbacks,
    check_agreement,
    layers_agree,
    refuse_unless_causal,
    rows_are_invariant,
)
from iclperm.errors import KernelError, NoNumbers

WITHOUT_TREE = "the prefix tree"
"""What is told of, by this name, where a model cannot be run through it."""


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
    fallen = Fallbacks(model)
    yield from _kernels(model, pack_tokens, fallen)
    layers = _judged("decoder layers against transformers'", "layers", lambda: layers_agree(model))
    if not layers.passed:
        fallen.give_up("layers", "decoder layers", layers.reason)
    yield layers
    yield from _whole(model, pack_tokens, fallen)


def _kernels(model: TreeModel, pack_tokens: int, fallen: Fallbacks) -> Iterator[CheckFinding]:
    started = time.perf_counter()
    try:
        for check in kernel_checks(model, pack_tokens):
            if not check.is_right:
                fallen.give_up(check.part, check.name, check.reason)
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
    except Exception as error:  # memory ran out, a device is lost, or the check itself is at fault
        yield CheckFinding("kernels", "model", False, time.perf_counter() - started, reason=first_line(error))


def _whole(model: TreeModel, pack_tokens: int, fallen: Fallbacks) -> Iterator[CheckFinding]:
    """The whole model; again where a kernel fails in a shape that it was not launched in alone."""
    failed: list[KernelError] = []
    numberless: list[NoNumbers] = []
    has_equal_bits: list[bool] = []

    def agrees() -> None:
        try:
            has_equal_bits.append(check_agreement(model))
        except KernelError as error:
            failed.append(error)
            raise
        except NoNumbers as error:
            numberless.append(error)
            raise

    agreement = _judged("whole model against plain scoring", "tree", agrees)
    part = PARTS.get(failed[0].kernel, "") if failed else ""
    if part and part not in fallen.parts:
        name = f"{failed[0].kernel} kernel"
        fallen.give_up(part, name, agreement.reason)
        yield CheckFinding(f"{name} in the whole model", part, False, agreement.seconds, reason=agreement.reason)
        yield from _whole(model, pack_tokens, fallen)
        return
    yield replace(agreement, part="model") if numberless else agreement  # its weights', whatever runs them
    if agreement.passed:
        yield _row_invariance(lambda: all(has_equal_bits) and rows_are_invariant(model, pack_tokens))


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
