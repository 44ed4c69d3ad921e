"""Studies whose orderings are asked queries of their own (`cells: blocks` or `random`): which is asked which."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from iclperm.errors import DataError
from iclperm.prompts.design import CONTENT_FREE, CONTENT_FREE_INPUTS, deal_queries
from iclperm.runs.setting import ResolvedStudy
from iclperm.runs.waves import Ask

_LEAST_OF_A_CLASS = 2  # one answer to queries of a class does not tell their noise


def dealt_asks(setting: ResolvedStudy, kept: NDArray[np.int64]) -> list[Ask]:
    """What each ordering is asked, of the test queries that are ``kept``, class by class where the study balances
    them; content-free queries are asked of all.

    Raises `DataError` where a class has too few queries, or an ordering is asked fewer than two of each.
    """
    study, design = setting.study, setting.design
    count, num_test = study.queries_per_ordering or 0, len(design.queries[0].rows)
    classes = _classes(setting, kept[kept < num_test])
    most = -(-count // len(classes))
    if count < _LEAST_OF_A_CLASS * len(classes):
        raise DataError(
            f"queries_per_ordering is {count}, fewer than {_LEAST_OF_A_CLASS} of each class, which do not tell their "
            f"noise; give {_LEAST_OF_A_CLASS * len(classes)} at least"
        )
    if (fewest := min(map(len, classes))) < most:
        raise DataError(
            f"queries_per_ordering is {count}, which takes {most} distinct queries of each class, but one has "
            f"{fewest}; give {fewest * len(classes)} at most, more 'queries', or set balance to natural"
        )
    shape = design.num_sets, design.num_permutations
    dealt = deal_queries(study.seed, count, shape, classes, is_even=study.cells == "blocks")
    places = tuple(range(len(design.shots)))
    asks = [Ask("test", tuple(dealt[ordering].tolist()), (ordering,), places) for ordering in np.ndindex(*shape)]
    if study.calibration == "contextual":
        asks.append(Ask(CONTENT_FREE, tuple(range(len(CONTENT_FREE_INPUTS))), tuple(np.ndindex(*shape)), places))
    return asks


def _classes(setting: ResolvedStudy, queries: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """The queries of each class, or all together where the study takes them as they come or there are no labels."""
    if setting.study.balance == "natural" or not setting.task.words:
        return [queries]
    labels = setting.examples["test"].labels[setting.design.queries[0].rows[queries]]
    return [queries[labels == label] for label in np.unique(labels)]
