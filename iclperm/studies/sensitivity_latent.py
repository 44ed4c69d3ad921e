"""Order against selection on the logit: what a sensitivity study says near floor and ceiling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from iclperm import stats
from iclperm.errors import DataError
from iclperm.report.parts import Table, interval_words, number, percent, plain, with_bounds
from iclperm.stats import LatentComponents, TailRisk

_CEILING = 0.9
_NEAREST = 0.95  # accuracy of a single cell
_MOST_ANSWERS = 1 << 23
_CAPTION = (
    "Effects on the logit of a right answer, of one query; the intervals hold all that Gaussian effects or a jackknife "
    "allow, that of r the jackknife's. One answer a cell does not tell sigma_SPI there: all effects are smaller by "
    "about one unknown factor, r is not."
)


@dataclass(frozen=True)
class SensitivityLatent:
    """Effects on the logit at one number of shots, or why there are none."""

    components: LatentComponents | None
    """Standard deviations of the effects, in logits; None where there are none."""
    tail: TailRisk | None
    """The 5 % ordering on new queries."""
    refusal: str
    """Why the answers tell no logit; empty where they do."""
    lowest: float
    """Accuracy of the worst cell."""
    highest: float
    """Of the best."""
    num_queries: int
    """Queries that the fit is of; a sample of them where there are more than 8 million answers."""
    of_queries: int
    """Queries that there are."""

    @property
    def bound(self) -> str:
        """The bound that accuracies are near, "ceiling" or "floor": their mean within .1, or a cell within .05; empty
        where there is none."""
        if self.components is None:
            return ""
        mean = self.components.accuracy
        if mean > _CEILING or (self.highest > _NEAREST and mean >= 0.5):
            return "ceiling"
        if mean < 1 - _CEILING or self.lowest < 1 - _NEAREST:
            return "floor"
        return "ceiling" if self.highest > _NEAREST else ""

    def conclusion(self) -> list[str]:
        """One sentence where accuracies are near a bound, so that points do not compare; none elsewhere."""
        found = self.components
        if found is None or not self.bound:
            return []
        low, high = map(percent, found.order_in_accuracy())
        order, selection = with_bounds(found.order_effect), with_bounds(found.selection_effect)
        return [
            f"Near the {self.bound} the same effect moves accuracy less, so points there do not compare with points "
            f"elsewhere; logits do: one standard deviation of order is {order} (here from {low} to {high}), of choice "
            f"{selection}."
        ]

    def table(self, shots: int | None = None) -> Table:
        """Effects, r, how queries differ, and the 5 % ordering."""
        at = "" if shots is None else f" at k = {shots}"
        title = f"On the logit scale: comparable near floor and ceiling{at}"
        found = self.components
        if found is None or self.tail is None:
            return Table(title, ("", ""), [("not fitted", self.refusal)], texts=(1,))
        low, high = found.order_in_accuracy()
        queries = f"standard deviation of {self.num_queries:,} queries, what they do with set or order included"
        if self.num_queries < self.of_queries:
            queries += f"; a sample of {self.of_queries:,}"
        rows = [
            ("order effect", *_words(found.order_effect), f"one down or up: accuracy {number(low)} to {number(high)}"),
            ("selection effect", *_words(found.selection_effect), ""),
            ("r = sel. / order", *_words(found.ratio), ""),
            ("queries", number(found.query_variance**0.5, 2), "", queries),
            ("5 % ordering", number(self.tail.accuracy.estimate), interval_words(self.tail.accuracy), _TAIL),
        ]
        if found.saturated:
            rows.append(
                ("cells at a bound", str(found.saturated), "", "all right or all wrong; drawn in by half an answer")
            )
        return Table(title, ("", "logits", "95 %", ""), rows, texts=(3,), caption=_CAPTION)

    def to_dict(self) -> dict[str, Any]:
        """Every number that is shown; JSON-safe."""
        content: dict[str, Any] = plain(self)
        found = self.components
        if found is not None:
            content["components"] |= {
                "order_effect": plain(found.order_effect),
                "selection_effect": plain(found.selection_effect),
                "ratio": plain(found.ratio),
                "query_variance": found.query_variance,
                "order_in_accuracy": plain(found.order_in_accuracy()),
            }
        return content | {"bound": self.bound, "conclusion": self.conclusion()}


_TAIL = "accuracy on new queries, noise taken out, that one ordering in 20 does not reach"


def sensitivity_latent(
    correct: npt.ArrayLike,
    state: npt.ArrayLike | None = None,
    *,
    weights: npt.ArrayLike | None = None,
    seed: int = 0,
    most_answers: int = _MOST_ANSWERS,
) -> SensitivityLatent | None:
    """Effects on the logit of correct [S, P, Q], as `stats.latent_components` takes them; None for one set, permutation
    or query.

    Above `most_answers` a random sample of queries is fitted, and said to be one. Cost: O(S·P·Q) and 0.1 s.
    """
    items = np.asarray(correct)
    num_s, num_p, num_q = items.shape
    if min(items.shape) < 2:
        return None
    kept = np.arange(num_q)
    if items.size > most_answers:
        generator = np.random.default_rng([seed, *b"latent queries"])
        kept = np.sort(generator.choice(num_q, max(most_answers // (num_s * num_p), 2), replace=False))
    items = items[:, :, kept]
    states = None if state is None else np.asarray(state)[:, :, kept]
    weight = None if weights is None else np.asarray(weights)[kept]
    try:
        found = stats.latent_components(items, states, weights=weight, seed=seed)
    except DataError as error:
        return SensitivityLatent(None, None, str(error), np.nan, np.nan, len(kept), num_q)
    cells = items.mean(axis=2) if states is None else items.mean(axis=2, where=states == 0)
    low, high = float(cells.min()), float(cells.max())
    return SensitivityLatent(found, found.tail_risk(), "", low, high, found.num_queries, num_q)


def _words(interval: stats.Interval) -> tuple[str, str]:
    return number(interval.estimate, 2), interval_words(interval, 2)
