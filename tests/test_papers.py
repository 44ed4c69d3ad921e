"""The arithmetic of the figures that arXiv 2511.09700 and arXiv 2503.22002 print, by the functions that make ours.

What follows from a paper's own columns is checked within the rounding of what it prints. What does not is a record
here, so that nobody fits it.
"""

from __future__ import annotations

import math
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

import iclperm
from iclperm import stats
from iclperm.prompts.design import draw_permutations
from iclperm.stats.search import gap_closed, search, share_of_oracle
from iclperm.stats.winners_curse import expected_maximum
from iclperm.studies.transfer import transfer

Array = npt.NDArray[Any]


class Cell(NamedTuple):
    """A row of Tables 2 to 4 of arXiv 2511.09700, with the digits it was printed with."""

    order: float
    selection: float
    ratio: float
    digits: int = 4

    @property
    def bounds(self) -> tuple[float, float]:
        """What r can be, given that the sensitivities were rounded."""
        half = 0.5 * 10.0**-self.digits
        return (self.selection - half) / (self.order + half), (self.selection + half) / (self.order - half)

    @property
    def follows(self) -> bool:
        """Whether some r within those bounds rounds to the printed one."""
        low, high = self.bounds
        return low <= self.ratio + 0.005 and high >= self.ratio - 0.005


CELLS = {
    "all": Cell(0.01970, 0.02251, 1.14, 5),
    "Qwen2.5-0.5B": Cell(0.0223, 0.0245, 1.10),
    "Qwen2.5-7B": Cell(0.0119, 0.0155, 1.30),
    "Gemma-3-27B": Cell(0.0157, 0.0262, 1.67),
    "GPT-5-Nano": Cell(0.0234, 0.0198, 0.85),
    "classification": Cell(0.0226, 0.0246, 1.09),
}
GENERATION = Cell(0.0154, 0.0222, 1.46)
"""Record: its columns give 1.44."""


class Row(NamedTuple):
    """A row of Table 7: each task under its own best permutation and under the other's."""

    own: tuple[float, float]
    transferred: tuple[float, float]
    rate: float


QWEN_7B = Row(own=(0.616, 0.244), transferred=(0.593, 0.207), rate=0.905)
AVERAGE = Row(own=(0.439, 0.188), transferred=(0.400, 0.145), rate=0.798)
"""Record: its columns give .841."""


class Searched(NamedTuple):
    """A cell of Tables 5 and 6."""

    average: float
    highest_dev: float
    maximum: float


DBPEDIA, GSM8K = Searched(0.774, 0.795, 0.800), Searched(0.658, 0.669, 0.696)


def additive(order: float, selection: float) -> Array:
    """Accuracies [10, 10] with these standard deviations over permutations and over sets, and no interaction."""
    levels = np.linspace(-1, 1, 10)
    levels = levels / levels.std(ddof=1)
    return 0.7 + np.add.outer(selection * levels, order * levels)


def transfer_rate(own: tuple[float, float], transferred: tuple[float, float]) -> float:
    """As arXiv 2511.09700 defines it, of a row's columns."""
    return (transferred[0] / own[0] + transferred[1] / own[1]) / 2


def rates(row: Row) -> tuple[float, float]:
    """Least and largest transfer rate, given that accuracies were rounded to three digits."""
    values = []
    for shift in product((-0.0005, 0.0005), repeat=4):
        own = (row.own[0] + shift[0], row.own[1] + shift[1])
        values.append(transfer_rate(own, (row.transferred[0] + shift[2], row.transferred[1] + shift[3])))
    return min(values), max(values)


def searched(cell: Searched, num_queries: int = 1000) -> Any:
    """A search over three orderings of one set whose columns are those of the cell."""
    third = 3 * cell.average - cell.highest_dev - cell.maximum
    accuracies = [round(num_queries * share) for share in (cell.maximum, cell.highest_dev, third)]
    correct = np.arange(num_queries) < np.array(accuracies)[:, None]
    return search([[0.0, 1.0, 0.0]], correct[None])


@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
def test_r_follows_from_the_two_sensitivities(cell: Cell) -> None:
    accuracy = additive(cell.order, cell.selection)
    assert stats.order_sensitivity(accuracy) == pytest.approx(cell.order)
    assert stats.selection_sensitivity(accuracy) == pytest.approx(cell.selection)
    assert round(stats.sensitivity_ratio(accuracy), 2) == cell.ratio
    assert cell.follows


def test_record_the_printed_r_of_generation_does_not_follow() -> None:
    assert round(stats.sensitivity_ratio(additive(GENERATION.order, GENERATION.selection)), 2) == 1.44
    assert not GENERATION.follows
    # "68 % of the influence of selection" is 1/1.46; the columns give 69 %
    assert (round(100 / GENERATION.ratio), round(100 * GENERATION.order / GENERATION.selection)) == (68, 69)


def test_what_is_said_of_the_sensitivities() -> None:
    overall = CELLS["all"]
    assert round(100 * (overall.selection / overall.order - 1)) == 14
    assert round(100 / overall.ratio) == 88
    assert CELLS["Qwen2.5-0.5B"].order / CELLS["Qwen2.5-7B"].order == pytest.approx(2, abs=0.2)
    llama_on_dbpedia = 0.08791
    assert round(100 * 2 * llama_on_dbpedia, 1) == 17.6  # "± 17.6 points" is two standard deviations


def test_item_noise_alone_is_as_large_as_the_printed_order_sensitivity() -> None:
    """At 500 queries and 75 % accuracy, orderings that do not differ at all show the printed spread."""
    alike = np.random.default_rng(0).random((200, 10, 500)) < 0.75
    assert stats.order_sensitivity(alike.mean(axis=2)) == pytest.approx(CELLS["all"].order, rel=0.1)
    assert math.sqrt(0.75 * 0.25 / 500) == pytest.approx(0.019, abs=5e-4)


@pytest.mark.parametrize(("cell", "closed", "share", "by_chance"), [(DBPEDIA, 81, 99.4, 96.8), (GSM8K, 29, 96.1, 94.5)])
def test_gap_closed_beside_the_share_of_the_oracle(
    cell: Searched, closed: float, share: float, by_chance: float
) -> None:
    found = searched(cell)
    columns = [found.average.estimate, found.highest_dev.estimate, found.maximum.estimate]
    assert columns == pytest.approx(cell)
    assert round(100 * found.gap_closed.estimate) == closed == round(100 * gap_closed(*cell))
    assert round(100 * found.share.estimate, 1) == pytest.approx(share)
    assert int(1000 * share_of_oracle(cell.average, cell.maximum) + 0.5) / 10 == by_chance


def test_what_is_said_of_the_search() -> None:
    gain = DBPEDIA.highest_dev - DBPEDIA.average
    assert (round(100 * gain, 1), round(100 * gain / DBPEDIA.average, 1)) == (2.1, 2.7)
    assert round(100 * (GSM8K.highest_dev - GSM8K.average), 1) == 1.1
    assert share_of_oracle(DBPEDIA.highest_dev, DBPEDIA.maximum) > 0.99  # "99 % at P = 128"
    assert share_of_oracle(GSM8K.highest_dev, GSM8K.maximum) > 0.95


def test_most_of_a_lead_of_the_oracle_can_be_luck() -> None:
    """Orderings that do not differ at all lead their average by as much as GSM8K's Max: 3.8 points."""
    lead = expected_maximum(128) * math.sqrt(0.658 * 0.342 / 500)
    assert lead > GSM8K.maximum - GSM8K.average


def test_the_transfer_rate_follows_from_its_columns() -> None:
    rate = transfer_rate(QWEN_7B.own, QWEN_7B.transferred)
    assert rate == pytest.approx(0.9055, abs=5e-5)
    low, high = rates(QWEN_7B)
    assert low <= QWEN_7B.rate <= high
    # the same by the study's own route: two permutations, each the best of one task
    (gsm8k, math_), (to_gsm8k, to_math) = QWEN_7B.own, QWEN_7B.transferred
    on_test = {"GSM8K": [[gsm8k, to_gsm8k]], "MATH": [[to_math, math_]]}
    dev = {"GSM8K": [[1.0, 0.0]], "MATH": [[0.0, 1.0]]}
    found = transfer({name: (dev[name], on_test[name]) for name in dev})
    assert found.rate("GSM8K", "MATH") == pytest.approx(rate)


def test_record_the_average_transfer_rate_does_not_follow() -> None:
    """A mean of the models' rates need not be the rate of their mean columns, so it may be right; it is not checked."""
    rate = transfer_rate(AVERAGE.own, AVERAGE.transferred)
    assert round(rate, 3) == 0.841
    low, high = rates(AVERAGE)
    assert not low <= AVERAGE.rate <= high


def test_designs_of_the_papers() -> None:
    search_study = iclperm.Study(kind="search", task="ag_news")
    assert (search_study.sets, search_study.permutations) == (10, 128)
    assert (search_study.queries, search_study.dev_queries) == (500, 1000)
    curve_study = iclperm.Study(kind="curve", task="ag_news")
    sets, permutations, shots = curve_study.sets, curve_study.permutations, curve_study.shot_list(8)
    assert (sets, permutations, shots) == (5, 20, tuple(range(21)))
    assert sets * permutations == 100  # "100 total permutations per dataset-model pair"
    assert (sets * permutations * len(shots[1:]) + 1) * curve_study.queries == 512_256
    sensitivity_study = iclperm.Study(kind="sensitivity")
    assert (sensitivity_study.sets, sensitivity_study.permutations) == (10, 10)


@pytest.mark.parametrize(("num_classes", "shots"), [(4, 8), (9, 18), (10, 20), (14, 28)])
def test_two_demonstrations_a_class_have_enough_orders(num_classes: int, shots: int) -> None:
    assert shots == 2 * num_classes
    permutations = draw_permutations(0, 128, shots)
    assert len({tuple(row) for row in permutations.tolist()}) == 128


def test_the_mean_over_permutations_is_the_curve_of_2503_22002() -> None:
    """µ_k = 1/P · Σ accuracy of the k-prefix, and over trials."""
    correct = np.random.default_rng(1).integers(0, 2, (5, 20, 4, 16))
    assert stats.curve(correct).mean == pytest.approx(correct.mean(axis=(0, 1, 3)))
