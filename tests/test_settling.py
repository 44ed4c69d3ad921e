"""How scores, curves and verdicts settle: against slices of the answers, identities, and planted truths."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import iclperm
from iclperm import Study
from iclperm.errors import RequestError
from iclperm.reference import curves
from iclperm.reference import settling as reference
from iclperm.report.figures import save
from iclperm.runs.identity import index_orders
from iclperm.stats import settling as stats
from iclperm.stats.convergence import Axis
from iclperm.stats.correlation import pooled_rank_correlation, rank_correlation
from iclperm.stats.demonstrations import demonstration_scores
from iclperm.stats.plateau import plateau
from iclperm.stats.tensor import segment_sums
from iclperm.studies.convergence import convergence_findings

Array = npt.NDArray[Any]
S, P, K, Q = 3, 12, 5, 48
SHOTS = tuple(range(K + 1))


def run(
    seed: int, shape: tuple[int, int, int, int] = (S, P, K, Q), worth: float = 0.1, gain: float = 0.02
) -> tuple[Array, Array]:
    """Answers [S, P, K + 1, Q] and orders [P, K]: every demonstration adds what it is worth wherever it stands."""
    generator = np.random.default_rng(seed)
    num_sets, num_permutations, num, num_queries = shape
    orders = np.stack([generator.permutation(num) for _ in range(num_permutations)])
    value = gain + worth * generator.standard_normal((num_sets, num)) / 2
    chance = np.zeros((num_sets, num_permutations, num + 1))
    chance[:, :, 1:] = np.cumsum(value[:, orders], axis=2)
    chance = np.clip(0.5 + chance, 0.05, 0.95)[..., None] + generator.uniform(-0.04, 0.04, num_queries)
    return (generator.random(chance.shape) < chance).astype(np.uint8), orders


def blocks(correct: Array, size: int = 1, weights: Array | None = None, **choices: Any) -> stats.BlockSums:
    edges = np.array([*range(0, correct.shape[3], size), correct.shape[3]])
    given_shots = choices.pop("shots", tuple(range(correct.shape[2])))
    right = segment_sums(correct, edges, weights)
    return stats.blocks_of(correct, edges, weights, shots=given_shots, right=right, **choices)


@pytest.fixture(scope="module")
def found() -> Any:
    """The findings of a run of 4 x 20 x 7 x 128."""
    correct, orders = run(12, (4, 20, 6, 128))
    return convergence_findings(correct, shots=range(7), orders=orders, resamples=60)


class TestRanks:
    @given(st.integers(0, 10_000), st.integers(2, 6))
    @settings(max_examples=40)
    def test_agree_with_counting(self, seed: int, num: int) -> None:
        generator = np.random.default_rng(seed)
        x, y = generator.integers(0, 4, (2, 3, num)).astype(float)
        x[0, 0] = math.nan
        found = pooled_rank_correlation(x, y)
        assert found == pytest.approx(reference.pooled_rank_correlation(x, y), nan_ok=True)
        assert found == pytest.approx(rank_correlation(x, y).estimate, nan_ok=True)


class TestParts:
    @pytest.mark.parametrize("axis", ["permutations", "queries"])
    def test_scores_are_those_of_the_sliced_answers(self, axis: Axis) -> None:
        correct, orders = run(1)
        total = {"permutations": P, "queries": Q}[axis]
        size = total // 3
        found = stats.settling(blocks(correct), axis, [size], orders, resamples=6, seed=5)
        whole = demonstration_scores(correct.mean(axis=3), orders, SHOTS, stats.SCORE_NAMES)
        place = {"permutations": 1, "queries": 3}[axis]
        with_whole: dict[str, list[float]] = {name: [] for name in stats.SCORE_NAMES}
        with_other: dict[str, list[float]] = {name: [] for name in stats.SCORE_NAMES}
        for row in stats._drawn(axis, size, total, 6, 5):
            parts = []
            for levels in (row[:size], row[size : 2 * size]):
                kept = np.sort(levels)
                cells = np.take(correct, kept, place).mean(axis=3)
                own = orders[kept] if axis == "permutations" else orders
                parts.append(demonstration_scores(cells, own, SHOTS, stats.SCORE_NAMES))
            for name in stats.SCORE_NAMES:
                one, other = (part[name].values for part in parts)
                with_whole[name].append(reference.pooled_rank_correlation(one, whole[name].values))
                with_other[name].append(reference.pooled_rank_correlation(one, other))
        assert tuple(found.scores) == stats.SCORE_NAMES
        for name, score in found.scores.items():
            np.testing.assert_allclose(score.with_whole[0], np.quantile(with_whole[name], stats.QUANTILES))
            np.testing.assert_allclose(score.with_other[0], np.quantile(with_other[name], stats.QUANTILES))

    @pytest.mark.parametrize(("axis", "place", "total"), [("sets", 0, S), ("permutations", 1, P), ("queries", 3, Q)])
    def test_the_curve_is_that_of_the_sliced_answers(self, axis: Axis, place: int, total: int) -> None:
        correct, _ = run(2)
        size = max(1, total // 2)
        found = stats.settling(blocks(correct), axis, [size], resamples=8, seed=3)
        parts = [np.take(correct, row[:size], place).mean(axis=3) for row in stats._drawn(axis, size, total, 8, 3)]
        means = np.array([part.mean(axis=(0, 1)) for part in parts])
        low, middle, high = np.quantile(means, stats.QUANTILES, axis=0)
        widened = math.sqrt(1 - size / total)
        np.testing.assert_allclose(found.curve[0, :, 1], middle)
        low, high = (np.clip(middle + (end - middle) / widened, 0, 1) for end in (low, high))
        np.testing.assert_allclose(found.curve[0, :, 0], low, atol=1e-12)
        np.testing.assert_allclose(found.curve[0, :, 2], high, atol=1e-12)
        spread = np.mean([part.std(axis=1, ddof=1).mean(axis=0) for part in parts], axis=0)
        np.testing.assert_allclose(found.spread[0], spread)
        np.testing.assert_allclose(found.curve[-1, :, 1], correct.mean(axis=(0, 1, 3)))
        assert np.isnan(found.curve[-1, :, [0, 2]]).all()

    def test_verdicts_are_those_of_the_plateau(self) -> None:
        correct, orders = run(3, gain=0.0, worth=0.02, shape=(4, 6, 6, 300))
        found = stats.settling(blocks(correct, firsts=(2, 4)), "queries", [150], orders, margin=0.1, resamples=3)
        assert [verdict.first for verdict in found.verdicts] == [2, 4]
        for verdict in found.verdicts:
            expected = plateau(correct, shots=range(7), first=verdict.first, margin=0.1)
            assert verdict.whole == expected.overall.state
            agreeing = []
            for row in stats._drawn("queries", 150, 300, 3, 0):
                part = plateau(correct[..., np.sort(row[:150])], shots=range(7), first=verdict.first, margin=0.1)
                agreeing.append(np.mean(part.state == expected.state))
            assert verdict.same_single[0] == pytest.approx(np.mean(agreeing))

    def test_the_error_behind_a_verdict_is_that_of_the_components(self) -> None:
        correct, _ = run(4, shape=(4, 6, 5, 40))
        of = blocks(correct, firsts=(4,)).differences[0]
        mean, se = reference.mean_difference(correct[:, :, 4].astype(float), correct[:, :, 5].astype(float))
        found = stats.mean_error(of.once, np.ones(40), least=curves.unseen_error(40))
        assert (found.mean, found.se) == pytest.approx((mean, se))

    @pytest.mark.parametrize("axis", ["sets", "permutations", "queries"])
    def test_the_whole_agrees_with_itself_and_halves_say_how_much_that_is(self, axis: Axis) -> None:
        correct, orders = run(5)
        found = stats.settling(blocks(correct, 4, firsts=(2,)), axis, [], orders, resamples=8)
        assert found.num_parts == (1,)
        for score in found.scores.values():
            np.testing.assert_allclose(score.with_whole, 1)
            assert (score.with_other < 1).all()
        assert bool(found.scores) == (axis != "sets")
        (verdict,) = found.verdicts
        assert verdict.same[0] == 1
        assert math.isnan(verdict.same_other[0])
        np.testing.assert_allclose(verdict.states.sum(axis=1), 1)

    def test_noise_agrees_with_its_whole_but_not_with_a_disjoint_part(self) -> None:
        """The trap: scores of worthless demonstrations look the more settled the larger the part is."""
        correct, orders = run(6, (4, 40, 6, 64), worth=0.0, gain=0.0)
        found = stats.settling(blocks(correct), "permutations", [20], orders, resamples=20)
        marginal = found.scores["marginal"]
        assert marginal.with_whole[0, 1] > 0.6
        assert abs(marginal.with_other[0, 1]) < 0.3

    def test_planted_worth_settles(self) -> None:
        correct, orders = run(7, (4, 40, 6, 200), worth=0.12, gain=0.0)
        member = stats.settling(blocks(correct, 8), "permutations", [5, 20], orders, resamples=20).scores["member"]
        assert member.with_other[1, 1] > 0.8
        assert member.with_other[1, 1] > member.with_other[0, 1]

    def test_the_band_is_that_of_fresh_permutations(self) -> None:
        """90 % of means over n fresh permutations lie within ± 1.645·sd/√n, whatever share of the run n is."""
        generator = np.random.default_rng(8)
        level = np.clip(0.5 + 0.1 * generator.standard_normal(200), 0.1, 0.9)
        correct = (generator.random((1, 200, 1, 4000)) < level[None, :, None, None]).astype(np.uint8)
        found = stats.settling(blocks(correct, 100, shots=(4,)), "permutations", [20, 150], resamples=400)
        for place, size in enumerate((20, 150)):
            low, _, high = found.curve[place, 0]
            assert high - low == pytest.approx(2 * 1.645 * level.std() / math.sqrt(size), rel=0.2)

    def test_a_weight_counts_as_queries_written_out(self) -> None:
        correct, orders = run(9, (3, 6, 5, 20))
        weights = np.tile([1, 2], 10)
        found = stats.settling(blocks(correct, 2, weights, firsts=(2,)), "permutations", [3], orders, resamples=5)
        written = blocks(correct.repeat(weights, axis=3), 3, firsts=(2,))
        expected = stats.settling(written, "permutations", [3], orders, resamples=5)
        np.testing.assert_allclose(found.curve, expected.curve)
        for name, score in found.scores.items():
            np.testing.assert_allclose(score.with_whole, expected.scores[name].with_whole, atol=1e-9)

    def test_shots_that_allow_fewer_scores(self) -> None:
        correct, orders = run(10)
        some = stats.settling(
            blocks(correct[:, :, [0, 2, 5]], shots=(0, 2, 5)), "permutations", [4], orders, resamples=3
        )
        assert tuple(some.scores) == ("prefix", "member")
        assert stats.settling(blocks(correct), "permutations", [4], None, resamples=3).scores == {}
        assert blocks(correct, firsts=(4, 5, 8)).differences[0].first == 4
        assert len(blocks(correct, firsts=(4, 5, 8)).differences) == 1

    def test_what_does_not_fit_is_refused(self) -> None:
        correct, _ = run(11)
        with pytest.raises(RequestError, match=r"sizes must lie in 1..12"):
            stats.settling(blocks(correct), "permutations", [13])
        with pytest.raises(RequestError, match="resamples be at least 2"):
            stats.settling(blocks(correct), "permutations", [3], resamples=1)
        with pytest.raises(RequestError, match="right answers by block"):
            stats.blocks_of(correct, [0, Q], shots=SHOTS, right=np.ones((S, P, K + 1, 2)))


class TestStudy:
    def test_tables_figures_and_json(self, found: Any, tmp_path: Path) -> None:
        titles = [table.title for table in found.tables(full=True)]
        for axis in ("permutations", "queries"):
            assert f"Scores of demonstrations from fewer {axis}" in titles
        assert "Plateau verdicts from smaller designs" in titles
        assert sum(title.startswith("The averaged curve from fewer") for title in titles) == 3
        assert set(found.plots()) == {
            "convergence", "convergence_curves", "convergence_scores", "convergence_plateaus"
        }  # fmt: skip
        for stem, plot in found.plots().items():
            assert all(path.stat().st_size > 5_000 for path in save(plot, tmp_path / stem))
        content = json.loads(json.dumps(found.to_dict(), allow_nan=False))["settling"]
        assert content["queries"]["sizes"] == list(found.queries.sizes)
        assert content["permutations"]["sizes"] == [5, 10, 20]
        assert len(content["permutations"]["scores"]["member"]["with_other"]) == 3
        assert content["permutations"]["verdicts"][0]["first"] == 4

    def test_words_are_those_of_the_numbers(self, found: Any) -> None:
        lines = "\n".join(found.conclusion())
        best = found.settling.axes[0].scores["marginal"].with_other[-1, 1]
        assert f"another run of 20 permutations by marginal {best:.2f}" in lines
        assert "The averaged curve from k = 4 to 6 is" in lines

    def test_without_orders_there_are_no_scores(self) -> None:
        correct, _ = run(13)
        found = convergence_findings(correct, shots=SHOTS, resamples=40)
        assert not any(axis.scores for axis in found.settling.axes)
        assert "convergence_scores" not in found.plots()

    def test_one_context_has_nothing_to_settle(self) -> None:
        correct, _ = run(14)
        assert convergence_findings(correct[:1, :1], shots=SHOTS).settling is None
        assert convergence_findings(correct[:, :, :1], shots=(0,)).settling is None

    def test_orders_of_a_run_are_its_own(self, tmp_path: Path) -> None:
        study = Study(sets=2, permutations=4, shots=[0, 1, 2, 4], queries=8, out=str(tmp_path / "run"))
        made = iclperm.run(study)
        orders = index_orders(made)
        assert orders.shape == (2, 4, 4)
        rows = made.demonstrations.rows
        for s in range(2):
            np.testing.assert_array_equal(np.unique(rows[s])[orders[s]], rows[s])
        np.testing.assert_array_equal(index_orders(replace(made, folder=None)), orders)
        per_k = iclperm.run(Study(sets=2, permutations=2, shots=[2, 4], queries=8, resample="per_k"))
        assert index_orders(per_k) is None
        assert per_k.findings("convergence").settling is not None
