"""What contextual calibration (Zhao et al. 2021) changed in a run: accuracy and both sensitivities, without and with.

Both come from the same stored answers. A study of any kind has it that was run with `calibration: contextual`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from iclperm.errors import DataError
from iclperm.report.parts import Plot, Table, number, percent, plain, points_with_bounds
from iclperm.stats.calibration import CalibrationEffect, calibration_effect
from iclperm.stats.intervals import Interval, side_of

if TYPE_CHECKING:
    from iclperm.runs.run import FinishedRun

ASIDE = "calibrated"
"""Its key in report.json, where it stands beside another kind's findings."""


@dataclass(frozen=True)
class ContextualCalibration:
    """The findings: one table, no figure."""

    effect: CalibrationEffect
    """Accuracy with and without calibration and the gain, [K] each, as shares of 1."""
    shape: tuple[int, int]
    """Sets and permutations."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """None of its own."""
        return ()

    def conclusion(self) -> list[str]:
        """That predictions are calibrated, and what it changed at the largest number of shots."""
        before, after, gain = self.effect.accuracy[-1], self.effect.calibrated_accuracy[-1], self.effect.gain[-1]
        start = "Predictions are calibrated on content-free inputs (Zhao et al. 2021)"
        if math.isnan(gain.estimate):
            return [f"{start}; some context has no answer at all, so what that changed is unknown."]
        return [
            f"{start}: at k = {self.effect.shots[-1]} accuracy is {percent(after)} with it and {percent(before)} "
            f"without, a difference of {points_with_bounds(gain, unit='')} points{_verdict(gain)}."
        ]

    def tables(self, full: bool) -> list[Table]:
        """Without and with, k by k; without ``full`` at the largest k alone."""
        effect, (num_sets, num_permutations) = self.effect, self.shape
        places = range(len(effect.shots)) if full else [len(effect.shots) - 1]
        rows = [
            (
                str(effect.shots[place]),
                number(effect.accuracy[place]),
                number(effect.calibrated_accuracy[place]),
                points_with_bounds(effect.gain[place], unit=""),
                number(effect.order[place]),
                number(effect.calibrated_order[place]),
                number(effect.selection[place]),
                number(effect.calibrated_selection[place]),
            )
            for place in places
        ]
        columns = ("accuracy", "calibrated", "gain, points", "order", "calibrated", "choice", "calibrated")
        dropped = f"; {effect.dropped:.1%} of the queries are left out, not ok in some cell" if effect.dropped else ""
        return [
            Table(
                title="Without and with contextual calibration",
                header=("k", *columns),
                rows=rows,
                caption=f"Mean over {num_sets} sets, {num_permutations} orderings and {effect.num_queries:,} queries"
                f"{dropped}. Gain: with its 95 % interval. Order, choice: sensitivities (mean std) in units of "
                "accuracy, item noise included.",
            )
        ]

    def plots(self) -> dict[str, Plot]:
        """None."""
        return {}

    def to_dict(self) -> dict[str, Any]:
        """Every number, JSON-safe."""
        return dict(plain(self.effect))


def findings(run: FinishedRun) -> ContextualCalibration:
    """What calibration changed in a finished run; raises `DataError` for one without."""
    if run.study.calibration == "none" or run.content_free is None:
        raise DataError("this run has no content-free answers; run its study with calibration: contextual")
    test = run.splits["test"]
    return contextual_calibration(
        test.uncalibrated.correct, test.correct, test.state, shots=run.shots, weights=test.weights
    )


def contextual_calibration(
    uncalibrated: npt.ArrayLike,
    calibrated: npt.ArrayLike,
    state: npt.ArrayLike | None = None,
    *,
    shots: Sequence[int],
    weights: npt.ArrayLike | None = None,
) -> ContextualCalibration:
    """The findings from arrays; arguments and errors are those of `iclperm.stats.calibration.calibration_effect`."""
    effect = calibration_effect(uncalibrated, calibrated, state, shots=shots, weights=weights)
    num_sets, num_permutations = np.shape(calibrated)[:2]
    return ContextualCalibration(effect, (num_sets, num_permutations))


def _verdict(gain: Interval) -> str:
    return "" if side_of(gain, 0) else ", which cannot be told from none"
