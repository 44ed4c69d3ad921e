"""What a sensitivity study says where each ordering was asked queries of its own: effects free of their noise, and
nothing of single orderings, which so few queries cannot tell apart."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from iclperm import stats
from iclperm.errors import DataError, RequestError
from iclperm.stats.intervals import UNSEEN_Z, bounded
from iclperm.studies.missing import missing_of_asked
from iclperm.studies.sensitivity_summary import (
    SensitivitySummary,
    components_or_why,
    ranked,
    spread_of,
)
from iclperm.studies.tokens import TokenReport, TokenSavings
from iclperm.study.states import NOT_ASKED, OK, STATES

_ESTIMATORS: tuple[stats.Estimator, ...] = ("mean_std", "rms", "c4")


def block_summary(
    correct: npt.NDArray[Any],
    state: npt.NDArray[np.uint8],
    *,
    cells: str,
    weights: npt.ArrayLike | None = None,
    classes: npt.ArrayLike | None = None,
    tokens: TokenReport | None = None,
    num_labels: int | None = None,
    seed: int = 0,
) -> SensitivitySummary:
    """What is said about sets and orders at one number of shots, by `stats.block_effects`.

    Args:
        correct: [S, P, Q] 0 or 1, or partial credit in 0..1.
        state: [S, P, Q] of `iclperm.study.states`.
        cells: the study's key.
        weights: [Q] how often each query counts.
        classes: [Q] the class of each query where blocks were dealt class by class.
        tokens: the engine's token counts.
        num_labels: of the task; None where any answer may be given.
        seed: of the interval draws.

    Accuracies and their spreads are of each ordering's own queries, whose noise is in them; the effects are free of it.
    Raises DataError where an ordering lacks answers to a class. Cost: that of `stats.block_effects`.
    """
    try:
        own = stats.own_block_components(correct, state, weights=weights, classes=classes)
        found = stats.block_effects(correct, state, weights=weights, classes=classes, seed=seed)
    except RequestError as error:
        raise DataError(f"blocks of queries cannot be compared: {error}") from error
    components = None
    if found.method == "adjusted":
        components, _ = components_or_why(correct, state, weights, classes)
    weight = np.ones(correct.shape[2]) if weights is None else np.asarray(weights)
    matrix, asked = own.accuracy, state != NOT_ASKED
    each = asked.sum(axis=2)
    used = int(np.count_nonzero((state == OK).any(axis=(0, 1))))
    size = f"{each.min():,}" if each.min() == each.max() else f"{each.min():,} to {each.max():,}"
    noise = 100 * UNSEEN_Z * math.sqrt(float(own.noise.mean()))
    warning = (
        f"each ordering was asked {size} queries of its own, which know its accuracy to ± {noise:.0f} points: single "
        "orderings are not compared, and spreads of accuracies are mostly that noise; order against selection is free "
        "of it"
    )
    return SensitivitySummary(
        accuracy=matrix,
        num_queries=used,
        num_labels=num_labels,
        dropped=0.0,
        incomplete=0.0,
        missing={**dict.fromkeys(STATES[1:], 0.0), **missing_of_asked(state, weight).by_state},
        if_wrong=None,
        if_right=None,
        bounds=None,
        mean=float(matrix.mean()),
        mean_interval=bounded(own.mean, "accuracy"),
        mean_se=own.se_queries,
        spreads={estimator: spread_of(matrix, estimator) for estimator in _ESTIMATORS},
        intervals=None,
        jackknife=None,
        components=components,
        effects=found.generalised,
        needed=None,
        best=ranked(matrix, 1.0),
        worst=ranked(matrix, 0.0),
        low_tail=ranked(matrix, 0.05),
        calibration=None,
        near_ties=None,
        tokens=None if tokens is None else TokenSavings.of(tokens),
        warnings=(warning,),
        blocks=found,
        cells=f"{size} of its own for each ordering ({cells})",
    )
