"""The answers of a split as an xarray Dataset: axes with names, coordinates, and NaN where there is no answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from iclperm.errors import ConfigError
from iclperm.runs.answers import Items
from iclperm.study.states import NAMES, OK

if TYPE_CHECKING:
    import xarray

AXES = ("set", "permutation", "shots", "query")


def dataset_of(
    items: Items, labels: Sequence[str], shots: Sequence[int], attributes: dict[str, Any], *, scores: bool
) -> xarray.Dataset:
    """See `iclperm.runs.run.FinishedRun.to_xarray`."""
    try:
        import xarray
    except ImportError:
        raise ConfigError("xarray is not installed; run pip install 'iclperm[xarray]', or use to_arrow()") from None
    is_there = items.state == OK
    described = {"flag_values": list(range(len(NAMES))), "flag_meanings": " ".join(NAMES)}
    found: dict[str, Any] = {
        "correct" if items.metric is None else "grade": (
            AXES,
            np.where(is_there, items.correct, np.float32(np.nan)),
            {"units": "1"},
        ),
        "state": (AXES, items.state, described),
    }
    if items.generated is not None and items.generated.error is not None:
        found["error"] = (AXES, np.where(is_there, items.generated.error[items.context_of], np.nan))
    sets, permutations, _ = items.context_of.shape
    gold = [None if right < 0 else labels[right] for right in items.gold] if labels else list(items.right_answers)
    coordinates: dict[str, Any] = {
        "set": np.arange(sets),
        "permutation": np.arange(permutations),
        "shots": list(shots),
        "query": np.arange(len(items.gold)),
        "example": ("query", items.examples),
        "weight": ("query", items.weights),
        "gold": ("query", np.array(gold, dtype=object)),
    }
    if labels:
        predicted = items.context_prediction[items.context_of]
        found["prediction"] = (AXES, np.where(is_there & (predicted >= 0), predicted, np.float32(np.nan)))
        coordinates["label"] = np.array(labels, dtype=object)
    if scores:
        if items.generated is not None:
            raise ConfigError("generated answers have no log-likelihoods of labels; leave out scores")
        found["log_likelihood"] = ((*AXES, "label"), items.label_logprob, {"units": "nat"})
    return xarray.Dataset(found, coordinates, attributes)
