"""Answers from elsewhere keep what their files say: names, weights, states and indices; and sentences say it too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pytest

import iclperm
from iclperm import stats
from iclperm.errors import DataError, RequestError
from iclperm.external import Tensor, describe, load
from iclperm.external.tensor import of_array

Array = npt.NDArray[Any]


def answers(seed: int, shape: tuple[int, ...] = (4, 5, 60), chance: Any = 0.6) -> Array:
    found: Array = (np.random.default_rng(seed).random(shape) < chance).astype(np.uint8)
    return found


def table(correct: Array, **names: Any) -> pd.DataFrame:
    """A row an answer of correct [S, P, Q]; `names` are what an axis calls its levels."""
    index = dict(zip(("set", "permutation", "query"), np.indices(correct.shape), strict=True))
    called = {
        axis: np.asarray(names.get(axis, range(places.max() + 1)))[places.ravel()] for axis, places in index.items()
    }
    return pd.DataFrame(called | {"correct": correct.ravel()})


def compared(folder: Path, *tables: pd.DataFrame, shared: tuple[str, ...]) -> Any:
    paths = [folder / f"{letter}.csv" for letter in "abc"[: len(tables)]]
    for path, each in zip(paths, tables, strict=True):
        each.to_csv(path, index=False)
    return iclperm.compare(paths, shared=shared)


class TestWhatIsShared:
    """Before, level i of one file was level i of the other, whatever the files called them."""

    WORDS = ("sets", "permutations", "queries")

    def test_levels_of_one_name_are_compared(self, tmp_path: Path) -> None:
        one, other = answers(1), answers(2)
        mixed = np.random.default_rng(3).permutation(60)
        names = {"set": [7, 1, 2, 3], "query": [f"q{i}" for i in range(60)]}
        first = table(one, **names)
        second = table(other[:, :, mixed], set=names["set"], query=np.array(names["query"])[mixed])
        found = compared(tmp_path, first, second, shared=self.WORDS).pairs[0].comparison
        assert found.accuracy[0][:3] == pytest.approx(stats.compare(one, other).accuracy[0][:3])

    def test_what_one_lacks_is_left_out_and_said(self, tmp_path: Path) -> None:
        one, other = answers(1), answers(2)
        found = compared(tmp_path, table(one), table(other, query=range(20, 80)), shared=self.WORDS)
        expected = stats.compare(one[:, :, 20:], other[:, :, :40])
        assert found.pairs[0].comparison.num_queries == (40, 40)
        assert found.pairs[0].comparison.accuracy[0][:3] == pytest.approx(expected.accuracy[0][:3])
        assert any("40 of 60 queries are compared" in line for line in found.warnings)

    def test_other_names_are_refused(self, tmp_path: Path) -> None:
        tables = table(answers(1)), table(answers(2), query=[f"x{i}" for i in range(60)])
        with pytest.raises(RequestError, match=r"only 0 are called alike \(a.csv calls them 0, 1, 2, … and b.csv"):
            compared(tmp_path, *tables, shared=self.WORDS)

    def test_arrays_are_still_compared_level_by_level(self, tmp_path: Path) -> None:
        for name, seed in (("a", 1), ("b", 2)):
            np.save(tmp_path / f"{name}.npy", answers(seed))
        found = iclperm.compare([tmp_path / "a.npy", tmp_path / "b.npy"], shared=self.WORDS)
        assert found.pairs[0].comparison.accuracy[0] == stats.compare(answers(1), answers(2)).accuracy[0]

    def test_what_is_not_known_is_not_said(self, tmp_path: Path) -> None:
        paths = [tmp_path / "a.npy", tmp_path / "b.npy"]
        for seed, path in enumerate(paths):
            np.save(path, answers(seed))
        assert "are taken to have nothing in common" in " ".join(iclperm.compare(paths).conclusion())

    def test_how_a_file_was_read_is_said(self, tmp_path: Path) -> None:
        tables = table(answers(1)).assign(seed=1), table(answers(2))
        assert "a.csv: columns not used: seed" in compared(tmp_path, *tables, shared=()).warnings


class TestWeightsOfContexts:
    def files(self, folder: Path, weights: Any = None) -> list[Path]:
        given = np.where(np.arange(100) < 50, 1, 9)
        for name, weight in zip("ab", (given, given if weights is None else weights), strict=True):
            chance = np.where(np.arange(100) < 50, 0.9, 0.2)
            correct = answers(ord(name), (100,), chance)
            frame = pd.DataFrame({"query": range(100), "correct": correct, "weight": weight})
            frame.to_csv(folder / f"{name}.csv", index=False)
        return [folder / "a.csv", folder / "b.csv"]

    @pytest.mark.parametrize("number", [1, 2])
    def test_accuracy_by_weight_stands_beside(self, number: int, tmp_path: Path) -> None:
        paths = self.files(tmp_path)[:number]
        tables = [pd.read_csv(path) for path in paths]
        expected = [np.average(each.correct, weights=each.weight) for each in tables]
        found = describe(load(paths))
        assert found.to_dict()["by_weight"] == pytest.approx(expected)
        line = next(line for line in found.conclusion() if "by the weights" in line)
        assert all(f"{100 * share:.1f} %" in line for share in expected)
        assert found.tables(full=True)[0].header[-1] == "by weight"

    def test_two_weights_of_a_query_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"b.csv gives query 0 the weight 2, another file 1; give it one"):
            load(self.files(tmp_path, weights=np.full(100, 2)))

    def test_matrices_have_none(self, tmp_path: Path) -> None:
        np.save(tmp_path / "a.npy", answers(1, (30,)))
        found = describe(load([tmp_path / "a.npy", tmp_path / "a.npy"]))
        assert found.to_dict()["by_weight"] is None


class TestArchives:
    def test_what_is_not_read_is_said(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "a.npz", correct=answers(1), labels=np.arange(60))
        assert load(tmp_path / "a.npz").notes == ("arrays not used: labels",)

    def test_weight_is_weights(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "a.npz", correct=answers(1), weight=np.arange(60))
        assert np.array_equal(load(tmp_path / "a.npz").weights, np.arange(60))  # type: ignore[arg-type]
        np.savez(tmp_path / "b.npz", correct=answers(1), weight=np.arange(60), weights=np.arange(60))
        with pytest.raises(DataError, match="both weights and weight; keep one"):
            load(tmp_path / "b.npz")

    def test_states_may_be_words(self, tmp_path: Path) -> None:
        state = np.full((4, 5, 60), "OK ")
        state[0, 0, 3] = "bad"
        np.savez(tmp_path / "a.npz", correct=answers(1), state=state)
        found = load(tmp_path / "a.npz").state
        assert found is not None
        assert np.argwhere(found).tolist() == [[0, 0, 3]]

    def test_states_that_may_mean_either_are_refused(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "a.npz", correct=answers(1), state=np.ones((4, 5, 60), bool))
        with pytest.raises(DataError, match="state of the kind bool; write 0"):
            load(tmp_path / "a.npz")


class TestIndicesOfPandas:
    """pandas keeps an index 0, 1, 2, … in a file's metadata alone."""

    def test_its_name_says_what_rows_are(self, tmp_path: Path) -> None:
        shares = pd.DataFrame(np.random.default_rng(0).random((4, 3)), columns=["0", "1", "2"])
        shares.rename_axis("permutation").to_parquet(tmp_path / "a.parquet")
        found = load(tmp_path / "a.parquet")
        assert (found.axes, found.notes) == ("SP", ())
        assert np.array_equal(found.values, shares.to_numpy().T)

    def test_it_may_be_a_column_of_a_long_table(self, tmp_path: Path) -> None:
        frame = pd.DataFrame({"correct": answers(1, (40,))}).rename_axis("query")
        frame.to_parquet(tmp_path / "a.parquet")
        assert np.array_equal(load(tmp_path / "a.parquet").values, answers(1, (1, 40)))

    def test_columns_on_two_levels_are_no_answers(self, tmp_path: Path) -> None:
        columns = pd.MultiIndex.from_product([[0, 1], [0, 1]])
        for index in (True, False):
            pd.DataFrame(answers(1, (50, 4)), columns=columns).to_csv(tmp_path / "a.csv", index=index)
            with pytest.raises(DataError):
                load(tmp_path / "a.csv", "QC")


class TestBlankRows:
    @pytest.mark.parametrize("blank", [";;;", " ; ;;"])
    def test_rows_that_say_nothing_are_left_out(self, blank: str, tmp_path: Path) -> None:
        text = table(answers(1)).to_csv(index=False, sep=";")
        (tmp_path / "a.csv").write_text(text + f"{blank}\n" * 3)
        assert np.array_equal(load(tmp_path / "a.csv").values, answers(1))

    def test_a_row_that_says_less_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "a.csv").write_text(table(answers(1)).to_csv(index=False) + "0,,7,1\n")
        with pytest.raises(DataError, match="without a value of 'permutation'"):
            load(tmp_path / "a.csv")


class TestSentences:
    def described(self, correct: Array) -> Any:
        return describe(of_array(correct, "SPQ", "x"))

    def test_the_r_of_a_needed_design_is_named(self) -> None:
        lead = 0.15 * np.random.default_rng(2).standard_normal((5, 6, 1))
        found = self.described(answers(5, (5, 6, 80), 0.5 + lead))
        summary = found.to_dict()["sensitivity"]
        line = next(line for line in found.conclusion() if "would settle it" in line)
        assert (
            f"if r (root mean square, of accuracies over as many queries) is {summary['needed']['ratio']:.2f}" in line
        )

    def test_components_below_0_make_no_r_of_1(self) -> None:
        """Of sums with estimates below 0 r is not 1, as was said beside an r of another size."""
        found = next(
            found
            for found in (self.described(answers(seed, (4, 5, 30))) for seed in range(50))
            if any("neither sets nor permutations" in line for line in found.warnings)
        )
        assert found.to_dict()["sensitivity"]["effects"]["ratio"]["estimate"] != pytest.approx(1)
        assert not any("r is 1" in line for line in found.warnings)

    def test_spreads_that_were_not_seen_have_no_interval(self) -> None:
        same = np.repeat(answers(1, (1, 1, 60)), 20, 0).reshape(4, 5, 60)
        summary = self.described(same).to_dict()["sensitivity"]
        for part in ("intervals", "effects"):
            assert {summary[part][of]["high"] for of in ("order", "selection", "ratio")} == {None}

    def test_sets_that_do_nothing_leave_no_r_of_zero_width(self) -> None:
        chance = np.linspace(0.4, 0.8, 5)[:, None]
        found = self.described(np.repeat(answers(0, (1, 5, 60), chance), 4, 0))
        assert "[0.0" not in found.conclusion()[1].split("another choice")[1]
        assert not any("r = choice / order" in line for line in found.conclusion())

    @pytest.mark.parametrize(
        ("shape", "others"),
        [((1, 5, 60), "orders and queries"), ((5, 1, 60), "sets and queries"), ((1, 1, 60), "queries")],
    )
    def test_an_interval_speaks_of_what_varied(self, shape: tuple[int, ...], others: str) -> None:
        row = self.described(answers(1, shape)).tables(full=True)[0].rows[0]
        assert row[2].endswith(f"for other {others}")


def test_the_names_of_levels_are_kept(tmp_path: Path) -> None:
    table(answers(1), set=list("dcba")).to_csv(tmp_path / "a.csv", index=False)
    found: Tensor = load(tmp_path / "a.csv")
    assert (found.sets, found.permutations, found.queries) == (tuple("abcd"), tuple(range(5)), tuple(range(60)))
