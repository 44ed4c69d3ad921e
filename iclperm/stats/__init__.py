"""Estimators over named axes: S sets, P permutations, K shots, Q queries, L labels.

Pure functions of stored arrays: none of them calls a model. What a single study needs lies in modules of its own:
`search`, `criteria`, `search_curves` and `winners_curse`; `plateau`; `convergence`; `demonstrations`, `reliability` and
`choosing`; `features` and `texts`. `correlation`, `paired` and `tensor` serve them all.
"""

from iclperm.base.help import fields_in_help
from iclperm.stats.block_curves import BlockCurve, bends, block_curve
from iclperm.stats.blocks import BlockEffects, OwnBlockComponents, block_effects, own_block_components
from iclperm.stats.calibration import (
    Calibration,
    CalibrationEffect,
    calibrated_scores,
    calibration,
    calibration_effect,
    content_free_prior,
    near_tie_rate,
)
from iclperm.stats.classes import (
    ClassScores,
    Confusion,
    EffectiveItems,
    class_scores,
    confusion,
    effective_items,
)
from iclperm.stats.comparison import (
    Comparison,
    Contrast,
    Jackknifed,
    compare,
    jackknife_covariance,
    jackknifed_effects,
    log_sensitivity,
)
from iclperm.stats.components import (
    Effects,
    VarianceComponents,
    explain_components,
    nested_components,
    variance_components,
)
from iclperm.stats.convergence import MeanError, NeededSizes, mean_error, needed_sizes
from iclperm.stats.correlation import Correlation, rank_correlation
from iclperm.stats.demonstrations import Score, demonstration_scores, shapley
from iclperm.stats.designs import (
    DesignedEffects,
    PermutationBlocks,
    designed_effects,
    designed_mean,
    permutation_blocks,
)
from iclperm.stats.grades import paired_grades
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
from iclperm.stats.latent import LatentComponents, LatentPower, TailRisk, latent_components
from iclperm.stats.paired import (
    cochran_q,
    holm,
    intraclass_correlation,
    mcnemar,
    paired_interval,
    paired_se,
    pairwise_mcnemar,
    product_bootstrap,
    stratified_mcnemar,
)
from iclperm.stats.plateau import curve_error, plateau_shares
from iclperm.stats.pooling import PooledEstimate, SizeSlope, pool, slope
from iclperm.stats.reliability import Reliability, split_half
from iclperm.stats.search import gap_closed, share_of_oracle
from iclperm.stats.sensitivity import (
    Accuracy,
    AccuracyBounds,
    Curve,
    Estimator,
    accuracy,
    accuracy_bounds,
    c4,
    common_accuracy,
    curve,
    order_sensitivity,
    selection_sensitivity,
    sensitivity_ratio,
)
from iclperm.stats.tensor import TensorSums, tensor_sums
from iclperm.stats.verdicts import paired_difference
from iclperm.stats.winners_curse import expected_maximum, winners_curse

__all__ = [
    "Accuracy",
    "AccuracyBounds",
    "BlockCurve",
    "BlockEffects",
    "Calibration",
    "CalibrationEffect",
    "ClassScores",
    "Comparison",
    "Confusion",
    "Contrast",
    "Correlation",
    "Curve",
    "DesignedEffects",
    "EffectiveItems",
    "Effects",
    "Estimator",
    "Interval",
    "Jackknifed",
    "LatentComponents",
    "LatentPower",
    "MeanError",
    "NeededDesign",
    "NeededSizes",
    "OwnBlockComponents",
    "PermutationBlocks",
    "PooledEstimate",
    "Reliability",
    "Score",
    "SensitivityIntervals",
    "SizeSlope",
    "TailRisk",
    "TensorSums",
    "VarianceComponents",
    "accuracy",
    "accuracy_bounds",
    "bends",
    "block_curve",
    "block_effects",
    "c4",
    "calibrated_scores",
    "calibration",
    "calibration_effect",
    "class_scores",
    "clustered_se",
    "cochran_q",
    "common_accuracy",
    "compare",
    "confusion",
    "content_free_prior",
    "curve",
    "curve_error",
    "demonstration_scores",
    "designed_effects",
    "designed_mean",
    "effect_interval",
    "effective_items",
    "expected_maximum",
    "explain_components",
    "gap_closed",
    "generalized_interval",
    "holm",
    "intraclass_correlation",
    "jackknife_covariance",
    "jackknife_ratio_interval",
    "jackknifed_effects",
    "latent_components",
    "log_sensitivity",
    "mcnemar",
    "mean_error",
    "near_tie_rate",
    "needed_design",
    "needed_sizes",
    "nested_components",
    "order_sensitivity",
    "own_block_components",
    "paired_difference",
    "paired_grades",
    "paired_interval",
    "paired_se",
    "pairwise_mcnemar",
    "permutation_blocks",
    "plateau_shares",
    "pool",
    "product_bootstrap",
    "rank_correlation",
    "selection_sensitivity",
    "sensitivity_ratio",
    "shapley",
    "share_of_oracle",
    "skewness_warnings",
    "slope",
    "split_half",
    "stratified_mcnemar",
    "tensor_sums",
    "variance_components",
    "wilson_interval",
    "winners_curse",
]

for _name in __all__:
    if isinstance(globals()[_name], type):
        fields_in_help(globals()[_name])
