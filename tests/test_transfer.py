"""Transfer of the best permutation: plain indexing, known effects, and runs that do not belong together."""

from __future__ import annotations

import json
import math
import re
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats
from tiny import make_model, make_task

import iclperm
from iclperm.errors import ConfigError, DataError, RequestError
from iclperm.report import figures
from iclperm.stats.paired import holm
from iclperm.studies.report import Run
from iclperm.studies.search import dev_scores
from iclperm.studies.transfer import TransferFindings, findings, transfer

Array = npt.NDArray[Any]
seeds = st.integers(0, 2**32 - 1)


def sources(seed: int, count: int = 3, sets: int = 4, permutations: int = 6) -> dict[str, tuple[Array, Array]]:
    """Criterion and accuracy of each of some tasks, with ties."""
    generator = np.random.default_rng(seed)
    made = np.round(generator.random((count, 2, sets, permutations)), 1) + 0.1
    return {f"task {number}": (dev, test) for number, (dev, test) in enumerate(made)}


def alike(seed: int, shared: float) -> dict[str, tuple[Array, Array]]:
    """Two tasks whose effects of permutations are `shared` in part; 10 sets, 64 permutations."""
    generator = np.random.default_rng(seed)
    common = generator.normal(size=(1, 64))
    made = {}
    for name in ("one", "other"):
        own = generator.normal(size=(1, 64))
        truth = 0.6 + 0.03 * (shared * common + math.sqrt(1 - shared**2) * own) + 0.02 * generator.normal(size=(10, 1))
        made[name] = tuple(truth + 0.01 * generator.normal(size=truth.shape) for _ in range(2))
    return made  # type: ignore[return-value]


class TestTransfer:
    @given(seeds, st.booleans())
    @settings(max_examples=40)
    def test_agrees_with_plain_indexing(self, seed: int, by_set: bool) -> None:
        given_ = sources(seed)
        found = transfer(given_, by_set=by_set)
        names = list(given_)
        best = {}
        for name, (dev, _) in given_.items():
            rows = dev.tolist() if by_set else [dev.mean(axis=0).round(12).tolist()] * len(dev)
            best[name] = [row.index(max(row)) for row in rows]
        p_values = []
        for a, b in np.ndindex(3, 3):
            test, there, own = given_[names[b]][1], best[names[a]], best[names[b]]
            values = [test[s, p] for s, p in enumerate(there)]
            at_own = [test[s, p] for s, p in enumerate(own)]
            assert found.accuracy[a, b] == pytest.approx(statistics.fmean(values))
            ratio = found.ratio[a][b]
            assert ratio.estimate == pytest.approx(sum(values) / sum(at_own))
            left_out = [(sum(values) - values[s]) / (sum(at_own) - at_own[s]) for s in range(4)]
            pseudo = [4 * ratio.estimate - 3 * value for value in left_out]
            half = scipy_stats.t.ppf(0.975, 3) * math.sqrt(statistics.variance(pseudo) / 4)
            assert (ratio.low, ratio.high) == pytest.approx((max(ratio.estimate - half, 0), ratio.estimate + half))
            gains = [value - statistics.fmean(row) for value, row in zip(values, test.tolist(), strict=True)]
            gain = found.gain[a][b]
            half = scipy_stats.t.ppf(0.975, 3) * statistics.stdev(gains) / 2
            assert gain.estimate == pytest.approx(statistics.fmean(gains))
            low, high = max(gain.estimate - half, -1), min(gain.estimate + half, 1)  # as far as accuracies can differ
            assert (gain.low, gain.high) == pytest.approx((low, high), abs=1e-9)
            error = statistics.stdev(gains) / 2
            p_values.append(2 * scipy_stats.t.sf(abs(gain.estimate) / error, 3) if error > 1e-12 else math.nan)
            assert found.rate(names[a], names[b]) == pytest.approx(
                (found.ratio[a][b].estimate + found.ratio[b][a].estimate) / 2
            )
        adjusted = np.reshape(holm(p_values), (3, 3))
        np.testing.assert_allclose(found.p_gain, adjusted, atol=1e-9)
        for a, b in np.ndindex(3, 3):
            assert found.is_gain[a, b] == (adjusted[a, b] < 0.05 and found.gain[a][b].estimate > 0)
        assert found.average == pytest.approx([test.mean() for _, test in given_.values()])
        for b, (_, test) in enumerate(given_.values()):
            top = [max(row) for row in test.tolist()] if by_set else [max(np.mean(test, axis=0).tolist())]
            assert found.maximum[b] == pytest.approx(statistics.fmean(top))
            assert found.random_ratio[b] == pytest.approx(test.mean() / found.accuracy[b, b])

    @given(seeds)
    @settings(max_examples=20)
    def test_the_order_of_sets_and_sources_changes_nothing(self, seed: int) -> None:
        given_ = sources(seed)
        order = np.random.default_rng(seed).permutation(4)
        one = transfer(given_)
        other = transfer({name: (dev[order], test[order]) for name, (dev, test) in reversed(given_.items())})
        np.testing.assert_allclose(other.accuracy, one.accuracy[::-1, ::-1])
        assert other.rate("task 0", "task 2") == pytest.approx(one.rate("task 2", "task 0"))

    def test_the_rounding_of_a_mean_breaks_no_tie(self) -> None:
        dev = np.array([[0.3, 0.1], [0.2, 0.2], [0.1, 0.3]])
        assert dev.mean(axis=0)[0] < dev.mean(axis=0)[1]  # by one rounding
        found = transfer({"a": (dev, dev), "b": (dev[:, ::-1], dev)})
        assert [chosen.tolist() for chosen in found.chosen] == [[0], [0]]

    def test_one_task_given_twice_transfers_whole(self) -> None:
        dev, test = sources(1)["task 0"]
        found = transfer({"a": (dev, test), "b": (dev, test)})
        assert found.rate("a", "b") == 1
        assert found.agreement == pytest.approx(np.ones((2, 2)))
        assert (found.ratio[0][1].low, found.ratio[0][1].high) == (1, 1)

    def test_equal_permutations_gain_nothing(self) -> None:
        flat = np.full((3, 4), 0.5)
        found = transfer({"a": (flat, flat), "b": (flat, flat)})
        assert [gain.estimate for row in found.gain for gain in row] == [0] * 4
        assert np.isnan(found.kept).all()
        assert np.isnan(found.agreement).all()

    def test_what_is_shared_transfers_and_what_is_not_does_not(self) -> None:
        kept, agreement = {}, {}
        for shared in (0.0, 1.0):
            found = [transfer(alike(seed, shared)) for seed in range(20)]
            kept[shared] = np.mean([t.kept[0, 1] for t in found])
            agreement[shared] = np.mean([t.agreement[0, 1] for t in found])
        assert kept[1.0] > 0.9
        assert abs(kept[0.0]) < 0.25
        assert agreement[1.0] > 0.9
        assert abs(agreement[0.0]) < 0.1

    def test_a_high_ratio_may_be_no_transfer_at_all(self) -> None:
        """Where orders matter little, a random permutation has nearly the accuracy of the best."""
        found = [transfer(alike(seed, 0.0)) for seed in range(20)]
        assert np.mean([t.rate("one", "other") for t in found]) > 0.85
        assert np.mean([t.random_ratio for t in found]) == pytest.approx(
            np.mean([t.rate("one", "other") for t in found]), abs=0.02
        )

    def test_one_set_and_one_permutation(self) -> None:
        alone = transfer({"a": ([[0.1, 0.2]], [[0.5, 0.6]]), "b": ([[0.2, 0.1]], [[0.7, 0.8]])})
        assert alone.accuracy.tolist() == [[0.6, 0.8], [0.5, 0.7]]
        assert math.isnan(alone.ratio[0][1].low)
        single = transfer({"a": ([[0.1]] * 3, [[0.5]] * 3), "b": ([[0.2]] * 3, [[0.7]] * 3)})
        assert single.rate("a", "b") == 1

    def test_sets_may_differ_in_number_where_a_task_chooses_once(self) -> None:
        given_ = sources(2)
        given_["task 1"] = tuple(values[:2] for values in given_["task 1"])  # type: ignore[assignment]
        assert transfer(given_).accuracy.shape == (3, 3)
        with pytest.raises(RequestError, match="task 0 has 4 sets and task 1 2; leave out by_set"):
            transfer(given_, by_set=True)


class TestFindings:
    @pytest.mark.parametrize("count", [2, 5])
    def test_sentences_tables_json_and_figure(self, count: int, tmp_path: Path) -> None:
        given_ = sources(3, count)
        found = TransferFindings(transfer(given_), transfer(given_, by_set=True), 8, ())
        told = found.conclusion()
        assert "transfer rate" in told[0].lower()
        assert re.search(r"in \d of \d+ transfers", told[-1])
        for table in found.tables(True):
            assert all(len(row) == len(table.header) for row in table.rows)
        assert len(found.tables(False)[0].rows) == count * (count - 1)
        content = json.loads(json.dumps(found.to_dict(), allow_nan=False))
        assert len(content["transfer"]["rates"]) == count * (count - 1) / 2
        for stem, plot in found.plots().items():
            assert all(path.stat().st_size > 5000 for path in figures.save(plot, tmp_path / stem))


_DATA = {"train": "train.jsonl", "test": "test.jsonl", "dev": 0.4}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A small run of the design of a search."""
    folder = tmp_path_factory.mktemp("transfer")
    study = {"model": str(make_model(folder / "model")), "task": str(make_task(folder, data=_DATA))}
    study |= {"kind": "search", "sets": 3, "permutations": 4, "queries": 9, "dev_queries": 9}
    return iclperm.run(iclperm.Study(**study), out=folder / "run")


class TestRuns:
    def test_two_runs_of_one_design(self, run: Run) -> None:
        found = findings({"here": run, "there": run})
        assert found.shots == 3
        assert found.transfer.rate("here", "there") == pytest.approx(1)
        assert found.by_set is not None
        dev = run.splits["dev"].correct[:, :, -1].mean(axis=(0, 2))
        assert found.transfer.chosen[0].tolist() == [int(dev.argmax())]

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"seed": 1}, "here has seed 0 and there 1; run both with the same 'seed'"),
            ({"permutations": 5}, "here has permutations 4 and there 5"),
            ({"resample": "per_k"}, "here has resample none and there per_k"),
            ({"criterion": "local_entropy"}, "here has criterion dev_accuracy and there local_entropy"),
        ],
    )
    def test_runs_with_other_permutations_are_refused(self, run: Run, changes: dict[str, Any], message: str) -> None:
        other = replace(run, study=run.study.model_copy(update=changes))
        with pytest.raises(ConfigError, match=re.escape(message)):
            findings({"here": run, "there": other})

    def test_another_k_is_refused_by_name(self, run: Run) -> None:
        with pytest.raises(ConfigError, match=r"here has k = 3 and there k = 4: a permutation of one is none of the"):
            findings({"here": run, "there": replace(run, shots=(4,))})

    def test_a_run_without_dev_queries_is_refused_by_name(self, run: Run) -> None:
        other = replace(run, splits={"test": run.splits["test"]})
        with pytest.raises(DataError, match="the run of there has no dev queries"):
            findings({"here": run, "there": other})

    def test_a_criterion_that_the_answers_do_not_give_is_refused_by_name(self, run: Run) -> None:
        splits = {**run.splits, "dev": replace(run.splits["dev"], has_bounds=True)}
        other = replace(run, splits=splits, study=run.study.model_copy(update={"criterion": "local_entropy"}))
        with pytest.raises(DataError, match="the run of here gives no 'local_entropy'; choose by dev_accuracy, "):
            findings({"here": other, "there": other})

    def test_one_run_is_too_few(self, run: Run) -> None:
        with pytest.raises(ConfigError, match="needs at least 2 runs, got 1"):
            findings({"here": run})

    def test_another_criterion_chooses(self, run: Run) -> None:
        other = replace(run, study=run.study.model_copy(update={"criterion": "local_entropy"}))
        found = findings({"here": other, "there": other})
        assert found.transfer.chosen[0].tolist() == [int(dev_scores(run)["local_entropy"].mean(axis=0).argmax())]


BAD_CALLS = [
    (lambda: transfer({"a": ([[1.0]], [[1.0]])}), "at least 2 tasks or models, got 1"),
    (
        lambda: transfer({"a": (np.ones((2, 3)), np.ones((2, 3))), "b": (np.ones((2, 4)), np.ones((2, 4)))}),
        "a has 3 permutations and b 4; give the same",
    ),
    (
        lambda: transfer({"a": (np.ones((2, 3)), np.ones((2, 3))), "b": (np.ones((2, 3)), np.ones((1, 3)))}),
        "b has dev [2, 3] and test [1, 3]",
    ),
    (lambda: transfer(sources(4)).rate("task 0", "nowhere"), "no source is called 'nowhere'; choose one of task 0"),
]


@pytest.mark.parametrize(("call", "message"), BAD_CALLS)
def test_bad_input_is_named(call: Any, message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)) as error:
        call()
    assert "\n" not in str(error.value)
