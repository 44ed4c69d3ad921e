"""What goes with accuracy: features of an ordering, and rank correlations that know which values belong together."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special

from iclperm.errors import RequestError
from iclperm.stats.intervals import Interval, _jackknife_variance, _upper
from iclperm.stats.sensitivity import FloatArray, accuracy

IntArray = npt.NDArray[np.int64]


class Correlation(NamedTuple):
    """A correlation within sets, pooled over them, with its interval; NaN where undefined."""

    estimate: float
    low: float
    high: float
    level: float
    p_value: float
    """Of no correlation, by the t test that belongs to the interval."""
    by_set: FloatArray
    """[S] the correlation in each set; NaN where feature or value is constant there."""
    num_pairs: int
    """Pairs of values that were used."""

    @property
    def interval(self) -> Interval:
        """The estimate with its interval."""
        return Interval(self.estimate, self.low, self.high, self.level)


def rank_correlation(
    feature: npt.ArrayLike, value: npt.ArrayLike, *, crossed: bool = False, level: float = 0.95
) -> Correlation:
    """Spearman's correlation of feature and value [S, N] within sets, with an interval clustered by set.

    Args:
        feature: [S, N] numbers; where it or `value` is not finite, that pair is left out.
        value: [S, N], such as the accuracy of S sets under N permutations, or the gain of N demonstrations of S sets.
        crossed: whether column n is the same thing in every set, as a shared permutation is. Then columns are left out
            one at a time too, and the interval speaks of other columns as well as of other sets.
        level: of the interval.

    Ranks are taken within each set, ties share their mean rank; the estimate is Σ of the centred products over
    √(Σ squares · Σ squares), over the sets in which both vary. The interval is `jackknife_interval` on the scale of
    artanh r, over sets and (crossed) columns; ranks are taken anew without the column. NaN below three sets or
    (crossed) columns, and where some r is 1. Raises RequestError on shapes that do not fit. Cost: O(S·N²) time if
    crossed, O(S·N·log N) if not; O(S·N) memory.
    """
    return _correlation(feature, value, crossed, level, ranked=True)


def correlation(
    feature: npt.ArrayLike, value: npt.ArrayLike, *, crossed: bool = False, level: float = 0.95
) -> Correlation:
    """Pearson's correlation of feature and value [S, N] within sets; else as `rank_correlation`."""
    return _correlation(feature, value, crossed, level, ranked=False)


def jackknife_interval(estimate: float, *left_out: npt.ArrayLike, level: float = 0.95) -> Interval:
    """`estimate` with an interval from estimates without one unit at a time: one array [n] for each kind of unit.

    The jackknife variances of the kinds (sets, permutations, queries) are added: where the kinds are crossed that
    counts the noise of single cells twice, and the interval is too wide rather than too narrow. The t quantile has
    Satterthwaite's degrees of freedom, (Σ V)²/Σ V²/(n - 1). NaN below two units of a kind, and where some estimate is
    not finite.
    """
    error, degrees = _jackknife_error(left_out)
    if not (math.isfinite(estimate) and math.isfinite(error)):
        return Interval(estimate, math.nan, math.nan, level)
    half = float(special.stdtrit(degrees, _upper(level))) * error
    return Interval(estimate, estimate - half, estimate + half, level)


def ordering_features(
    labels: npt.ArrayLike,
    names: Sequence[str],
    *,
    lengths: npt.ArrayLike | None = None,
    similarity: npt.ArrayLike | None = None,
    last: int | None = None,
) -> dict[str, FloatArray]:
    """Features of every ordering by name, each [S, P], to correlate with its accuracy.

    Args:
        labels: [S, P, K] label of the demonstration at each position, 0 first and K-1 next to the query.
        names: [L] label words; without any, labels tell nothing and nothing is made of them.
        lengths: [S, P, K] length of each demonstration, in any unit.
        similarity: [S, P, K] similarity of each demonstration to the queries (`lexical_similarity`).
        last: how many positions count as the last few; by default the number of labels (four without), at most K.

    `last label is X` (0 or 1), `longest run of one label`, `uneven label positions` (mean over labels of the distance
    of their mean position from the middle, 0 to 1), `distinct labels among the last n`; with lengths, `longer ones
    last` (Spearman's correlation of length and position within the ordering); with similarity, `similarity of the last`
    one, of the `last n`, and `similar ones last`. Within a set, a feature of how many there are of a label would be
    constant, so there is none. Raises RequestError on shapes that do not fit. Cost: O(S·P·K·(K + L)).
    """
    shown = np.asarray(labels)
    if shown.ndim != 3 or shown.size == 0 or not np.issubdtype(shown.dtype, np.integer):
        raise RequestError(f"labels must be integers of shape [S, P, K], got {shown.dtype} {list(shown.shape)}")
    if names and (shown.min() < 0 or shown.max() >= len(names)):
        wrong = shown.min() if shown.min() < 0 else shown.max()
        raise RequestError(f"labels must lie in 0..{len(names) - 1}, found {wrong}")
    num_last = min((len(names) or 4) if last is None else last, shown.shape[2])
    features = {f"last label is {name}": (shown[..., -1] == label) * 1.0 for label, name in enumerate(names)}
    if names:
        features["longest run of one label"] = _longest_run(shown)
        features["uneven label positions"] = _uneven_positions(shown, len(names))
    if names and num_last > 1:
        features[f"distinct labels among the last {num_last}"] = _distinct(shown[..., -num_last:], len(names))
    if lengths is not None:
        features["longer ones last"] = _with_position(_like(lengths, shown.shape, "lengths"))
    if similarity is not None:
        alike = _like(similarity, shown.shape, "similarity")
        features["similarity of the last to the queries"] = alike[..., -1]
        if num_last > 1:
            features[f"similarity of the last {num_last} to the queries"] = alike[..., -num_last:].mean(axis=2)
        features["similar ones last"] = _with_position(alike)
    return features


def recency_bias(
    predictions: npt.ArrayLike,
    last_labels: npt.ArrayLike,
    state: npt.ArrayLike | None = None,
    weights: npt.ArrayLike | None = None,
    *,
    level: float = 0.95,
) -> Interval:
    """How much more often the label of the last demonstration is answered than it is over all orders of its set.

    Args:
        predictions: [S, P, Q] index of the answered label; anything where the state is not ok.
        last_labels: [S, P] label of the demonstration next to the query.
        state, weights: [S, P, Q] 0 = ok, and [Q] how often each query counts.
        level: of the interval.

    The mean over orderings of the share of answers that are the last label, less the mean share of that label over the
    set's permutations; 0 where order does not matter, also for a model that prefers a label. Its interval is
    `jackknife_interval` over sets and permutations. Raises RequestError on shapes that do not fit. Cost: O(S·P·Q·L).
    After the recency bias of Zhao et al. (2021).
    """
    answers, last = np.asarray(predictions), np.asarray(last_labels)
    if answers.ndim != 3 or last.shape != answers.shape[:2]:
        raise RequestError(
            f"predictions must be [S, P, Q] and last_labels [S, P], got {list(answers.shape)} and {list(last.shape)}"
        )
    excess = np.zeros(last.shape)
    for label in np.unique(last):
        share = accuracy(answers == label, state, weights).values
        excess += np.where(last == label, share - share.mean(axis=1, keepdims=True), 0.0)
    without = [
        (total.sum() - total) / (excess.size - excess.size // len(total)) if len(total) > 1 else [math.nan]
        for total in (excess.sum(axis=1), excess.sum(axis=0))
    ]
    return jackknife_interval(float(excess.mean()), *without, level=level)


def lexical_similarity(texts: Sequence[str], queries: Sequence[str]) -> FloatArray:
    """Mean tf-idf cosine of each text with all queries, [N], 0 to 1: the words they share, rare ones counting more.

    Words are runs of letters and digits in lower case; a word in d of D documents (texts and queries) weighs
    log((1 + D)/(1 + d)) + 1. A text without words scores 0. Cost: O(words). Salton & Buckley (1988).
    """
    if not texts or not queries:
        raise RequestError(f"similarity needs at least one text and one query, got {len(texts)} and {len(queries)}")
    documents = [Counter(re.findall(r"\w+", text.lower())) for text in (*texts, *queries)]
    frequency = Counter(word for document in documents for word in document)
    weight = {word: math.log((1 + len(documents)) / (1 + count)) + 1 for word, count in frequency.items()}
    vectors = [_unit({word: count * weight[word] for word, count in document.items()}) for document in documents]
    centre: Counter[str] = Counter()
    for vector in vectors[len(texts) :]:
        centre.update(vector)
    return np.array(
        [sum(size * centre[word] for word, size in vector.items()) / len(queries) for vector in vectors[: len(texts)]]
    )


def _correlation(
    feature: npt.ArrayLike, value: npt.ArrayLike, crossed: bool, level: float, *, ranked: bool
) -> Correlation:
    x, y = (np.asarray(array, dtype=np.float64) for array in (feature, value))
    if x.ndim != 2 or x.size == 0 or x.shape != y.shape:
        raise RequestError(f"feature and value must both have shape [S, N], got {list(x.shape)} and {list(y.shape)}")
    _upper(level)  # refuses what is no level
    used = np.isfinite(x) & np.isfinite(y)
    x, y = (_scaled(np.where(used, array, np.nan)) for array in (x, y))
    ranks = (_ranks(x), _ranks(y)) if ranked else (x, y)
    products = _products(*ranks)
    estimate, varies = _pooled(products), _varies(products)
    with np.errstate(divide="ignore", invalid="ignore"):
        by_set = np.where(varies, products[0] / np.sqrt(products[1] * products[2]), np.nan)
    sets = np.flatnonzero(varies)
    left_out = [np.array([_pooled(products[:, sets[sets != s]]) for s in sets])]
    if crossed:
        left_out.append(_without_columns((x, y), ranks, ranked))
    low, high, p_value = _fisher_interval(estimate, left_out, level)
    return Correlation(estimate, low, high, level, p_value, by_set, int(used.sum()))


def _scaled(values: FloatArray) -> FloatArray:
    """`values` by the size of the largest deviation, so that a small but real spread is not taken for rounding."""
    finite = values[np.isfinite(values)]
    if not finite.size:
        return values
    shifted: FloatArray = values - finite[0]
    size = float(np.nanmax(np.abs(shifted)))
    return shifted / size if size > 0 else shifted


def _ranks(values: FloatArray) -> FloatArray:
    """Mean ranks of values [S, N] within each set, from 1; NaN where the value is."""
    ranks = np.full(values.shape, np.nan)
    for row, rank in zip(values, ranks, strict=True):
        finite = np.isfinite(row)
        ascending = np.sort(row[finite])
        below, upto = (np.searchsorted(ascending, row[finite], side) for side in ("left", "right"))
        rank[finite] = (below + upto + 1) / 2
    return ranks


def _products(x: FloatArray, y: FloatArray) -> FloatArray:
    """[3, S] centred sums of x·y, x² and y² within sets; NaN entries do not count."""
    used = np.isfinite(x)
    num = np.maximum(used.sum(axis=1, keepdims=True), 1)
    x, y = (np.where(used, array, 0.0) for array in (x, y))
    x, y = (np.where(used, array - array.sum(axis=1, keepdims=True) / num, 0.0) for array in (x, y))
    return np.array([(x * y).sum(axis=1), (x * x).sum(axis=1), (y * y).sum(axis=1)])


def _varies(products: FloatArray) -> npt.NDArray[np.bool_]:
    """[S] whether both vary in a set, beyond what rounding makes of equal values."""
    return np.asarray(np.minimum(products[1], products[2]) > 1e-12)


def _pooled(products: FloatArray) -> float:
    product, square_x, square_y = products[:, _varies(products)].sum(axis=1)
    return float(product / math.sqrt(square_x * square_y)) if square_x > 0 and square_y > 0 else math.nan


def _without_columns(
    values: tuple[FloatArray, FloatArray], ranks: tuple[FloatArray, FloatArray], ranked: bool
) -> FloatArray:
    """[N] the pooled correlation without each column; of ranks, those above it fall by 1 and those beside it by 1/2."""

    def rest(value: FloatArray, rank: FloatArray, column: int) -> FloatArray:
        gone = value[:, column : column + 1]
        lowered = rank - (value > gone) - 0.5 * (value == gone) if ranked else rank
        return np.delete(lowered, column, axis=1)

    pairs = list(zip(values, ranks, strict=True))
    return np.array(
        [_pooled(_products(*(rest(*pair, column) for pair in pairs))) for column in range(values[0].shape[1])]
    )


def _fisher_interval(estimate: float, left_out: Sequence[FloatArray], level: float) -> tuple[float, float, float]:
    """Bounds and p value from jackknife variances on the scale of artanh."""
    nothing = math.nan, math.nan, math.nan
    enough = all(len(values) >= 3 and (np.abs(values) < 1 - 1e-9).all() for values in left_out)
    if not (enough and abs(estimate) < 1 - 1e-9):
        return nothing
    centre, scaled = math.atanh(estimate), [np.arctanh(values) for values in left_out]
    error, degrees = _jackknife_error(scaled)
    if error == 0.0:
        return nothing
    interval = jackknife_interval(centre, *scaled, level=level)
    return math.tanh(interval.low), math.tanh(interval.high), float(2 * special.stdtr(degrees, -abs(centre) / error))


def _jackknife_error(left_out: Sequence[npt.ArrayLike]) -> tuple[float, float]:
    """Standard error and Satterthwaite's degrees of freedom; NaN where a kind has less than two units or a NaN."""
    values = [np.asarray(array, dtype=np.float64) for array in left_out]
    if not all(len(array) >= 2 and np.isfinite(array).all() for array in values):
        return math.nan, math.nan
    variances = np.array([_jackknife_variance(array) for array in values])
    counts = np.array([len(array) - 1.0 for array in values])
    total = float(variances.sum())
    degrees = total**2 / float((variances**2 / counts).sum()) if total > 0 else float(counts.min())
    return math.sqrt(total), degrees


def _like(values: npt.ArrayLike, shape: tuple[int, ...], name: str) -> FloatArray:
    array = np.asarray(values, dtype=np.float64)
    if array.shape != shape:
        raise RequestError(f"{name} must have the shape of labels {list(shape)}, got {list(array.shape)}")
    return array


def _longest_run(labels: npt.NDArray[Any]) -> FloatArray:
    run, longest = np.ones(labels.shape[:2]), np.ones(labels.shape[:2])
    for place in range(1, labels.shape[2]):
        run = np.where(labels[..., place] == labels[..., place - 1], run + 1, 1.0)
        longest = np.maximum(longest, run)
    return longest


def _uneven_positions(labels: npt.NDArray[Any], num_labels: int) -> FloatArray:
    """Mean over the labels that occur of |mean position - middle| / middle; 0 for one demonstration."""
    middle = (labels.shape[2] - 1) / 2
    distance, occurs = np.zeros(labels.shape[:2]), np.zeros(labels.shape[:2])
    for label in range(num_labels):
        here = labels == label
        num = here.sum(axis=2)
        mean = (here * (np.arange(labels.shape[2]) - middle)).sum(axis=2) / np.maximum(num, 1)
        distance += np.abs(mean)
        occurs += num > 0
    return np.asarray(distance / occurs / max(middle, 1.0))


def _distinct(labels: npt.NDArray[Any], num_labels: int) -> FloatArray:
    return np.asarray(sum((labels == label).any(axis=2) * 1.0 for label in range(num_labels)))


def _with_position(values: FloatArray) -> FloatArray:
    """[S, P] Spearman's correlation of values [S, P, K] with the position; 0 where they are all equal."""
    ranks = _ranks(values.reshape(-1, values.shape[2]))
    position = np.broadcast_to(np.arange(values.shape[2]) + 1.0, ranks.shape)
    product, square_x, square_y = _products(ranks, position)
    scale = np.sqrt(square_x * square_y)
    return np.asarray(np.where(scale > 1e-12, product / np.where(scale > 1e-12, scale, 1.0), 0.0)).reshape(
        values.shape[:2]
    )


def _unit(vector: Mapping[str, float]) -> dict[str, float]:
    length = math.sqrt(sum(size * size for size in vector.values()))
    return {word: size / length for word, size in vector.items()} if length else {}
