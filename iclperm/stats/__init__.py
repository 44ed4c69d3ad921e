"""Estimators over named axes: S sets, P permutations, K shots, Q queries, L labels.

Pure functions of stored arrays: none of them calls a model.
"""

from iclperm.stats.calibration import Calibration, calibration, near_tie_rate
from iclperm.stats.components import Effects, VarianceComponents, explain_components, variance_components
from iclperm.stats.intervals import (
    Interval,
    NeededDesign,
    SensitivityIntervals,
    clustered_se,
    effect_interval,
    generalized_interval,
    jackknife_ratio_interval,
    needed_design,
    skewness_warnings,
    wilson_interval,
)
from iclperm.stats.sensitivity import (
    Accuracy,
    Curve,
    Estimator,
    accuracy,
    c4,
    curve,
    order_sensitivity,
    selection_sensitivity,
    sensitivity_ratio,
)

__all__ = [
    "Accuracy",
    "Calibration",
    "Curve",
    "Effects",
    "Estimator",
    "Interval",
    "NeededDesign",
    "SensitivityIntervals",
    "VarianceComponents",
    "accuracy",
    "c4",
    "calibration",
    "clustered_se",
    "curve",
    "effect_interval",
    "explain_components",
    "generalized_interval",
    "jackknife_ratio_interval",
    "near_tie_rate",
    "needed_design",
    "order_sensitivity",
    "selection_sensitivity",
    "sensitivity_ratio",
    "skewness_warnings",
    "variance_components",
    "wilson_interval",
]
