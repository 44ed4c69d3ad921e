"""Answers as pandas, polars, Excel and lm-evaluation-harness write them: read right, or refused with what to write."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from iclperm import stats
from iclperm.errors import DataError, IclpermError
from iclperm.external import Tensor, describe, load
from iclperm.external.columns import first_repeated, number_of
from iclperm.stats import grades as grades_module
from iclperm.study.states import NO_ANSWER, OVERLONG

Array = npt.NDArray[Any]
SHARES = np.array([[0.5, 0.25, 0.75], [0.125, 1.0, 0.0], [0.25, 0.5, 0.625]])
ANSWERS = np.array([[1, 0, 1, 1], [0, 0, 1, 0], [1, 1, 1, 0]])


def written(path: Path, text: str, encoding: str = "utf-8") -> Path:
    path.write_bytes(text.encode(encoding))
    return path


def refused(path: Path | list[Path], message: str, axes: str | None = None) -> None:
    with pytest.raises(IclpermError, match=message) as found:
        load(path, axes)
    assert "\n" not in str(found.value)


def long_frame(correct: Array) -> pd.DataFrame:
    """A row an answer of correct [S, P, Q]."""
    s, p, q = (index.ravel() for index in np.indices(correct.shape))
    return pd.DataFrame({"set": s, "permutation": p, "query": q, "correct": correct.ravel()})


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    return written(path, "".join(json.dumps(row) + "\n" for row in rows))


class TestMatricesOfPandas:
    @pytest.mark.parametrize("index", [True, False])
    @pytest.mark.parametrize("header", [True, False])
    @pytest.mark.parametrize("shape", [(3, 3), (5, 4), (4, 8)])
    def test_headers_and_indexes_are_no_data(
        self, index: bool, header: bool, shape: tuple[int, int], tmp_path: Path
    ) -> None:
        generator = np.random.default_rng(shape)
        shares, answers = generator.random(shape).round(3), generator.integers(0, 2, shape)
        for values, axes, expected in ((shares, None, "SP"), (answers, "CQ", "CQ"), (answers, "SQ", "SPQ")):
            frame = pd.DataFrame(values)
            frame.to_csv(tmp_path / "a.csv", index=index, header=header)
            found = load(tmp_path / "a.csv", axes)
            assert found.axes == expected
            np.testing.assert_array_equal(found.values.squeeze(), values)

    def test_an_index_of_any_order_or_names_is_left_out(self, tmp_path: Path) -> None:
        for index in ([7, 3, 40], ["a", "b", "c"], pd.Index([1, 2, 3], name="row")):
            pd.DataFrame(SHARES, index=index).to_csv(tmp_path / "a.csv")
            np.testing.assert_array_equal(load(tmp_path / "a.csv").values, SHARES)
        pd.DataFrame(SHARES).reset_index().to_csv(tmp_path / "a.csv", index=False)
        found = load(tmp_path / "a.csv")
        np.testing.assert_array_equal(found.values, SHARES)
        assert "the first column, 'index', is taken for an index and left out" in found.notes
        again = pd.read_csv(tmp_path / "a.csv").set_index("index")
        again.index.name = "seed"
        again.to_csv(tmp_path / "b.csv")
        assert load(tmp_path / "b.csv", "SP").values.shape == (3, 3)

    def test_an_index_read_and_written_again(self, tmp_path: Path) -> None:
        pd.DataFrame(SHARES).to_csv(tmp_path / "a.csv")
        pd.read_csv(tmp_path / "a.csv").to_csv(tmp_path / "b.csv", index=False)
        assert (tmp_path / "b.csv").read_text().startswith("Unnamed: 0,0,1,2")
        np.testing.assert_array_equal(load(tmp_path / "b.csv").values, SHARES)
        pd.read_csv(tmp_path / "a.csv").to_parquet(tmp_path / "c.parquet")
        np.testing.assert_array_equal(load(tmp_path / "c.parquet").values, SHARES)
        frame = pd.DataFrame(SHARES, index=[5, 6, 8], columns=list("012"))
        frame.to_parquet(tmp_path / "d.parquet")
        assert pq.read_schema(tmp_path / "d.parquet").names[-1] == "__index_level_0__"
        np.testing.assert_array_equal(load(tmp_path / "d.parquet").values, SHARES)

    @pytest.mark.parametrize("text", ["0,1\n1,1\n0,1\n", "0\n1\n1\n", ",0,1\n0,1,0\n1,0,1\n", "0,1,1,0\n1,0,0,1\n"])
    def test_what_may_be_names_or_data_is_refused(self, text: str, tmp_path: Path) -> None:
        refused(written(tmp_path / "a.csv", text), "name the columns", "CQ")

    def test_two_columns_with_an_index_of_three(self, tmp_path: Path) -> None:
        pd.DataFrame(SHARES[:, :2]).to_csv(tmp_path / "a.csv")
        np.testing.assert_array_equal(load(tmp_path / "a.csv").values, SHARES[:, :2])
        found = load(written(tmp_path / "b.csv", ",0,0,1\n1,1,0,1\n1,0,0,1\n"), "CQ")
        assert found.state is not None
        assert (found.values.shape, found.state.tolist()[0]) == ((3, 4), [NO_ANSWER, 0, 0, 0])

    def test_one_row_that_begins_with_0_is_noted(self, tmp_path: Path) -> None:
        found = load(written(tmp_path / "a.csv", "0,1,1,0\n"))
        assert (found.values.shape, found.notes[0].split(",")[0]) == ((1, 4), "its first value")
        assert load(written(tmp_path / "b.csv", "1,1,1,0\n")).notes == ()

    def test_names_of_rows_say_the_axes(self, tmp_path: Path) -> None:
        frame = pd.DataFrame(ANSWERS.T, columns=["plain", "long", "mixed"])
        frame.rename_axis("query").to_csv(tmp_path / "a.csv")
        found = load(tmp_path / "a.csv")
        assert (found.axes, found.names) == ("CQ", ("plain", "long", "mixed"))
        np.testing.assert_array_equal(found.values, ANSWERS)
        frame.T.rename_axis("context").to_csv(tmp_path / "b.csv")
        assert load(tmp_path / "b.csv").names == ("plain", "long", "mixed")
        refused(tmp_path / "b.csv", "names its rows context: axes 'QC' must be two and begin with C", "QC")
        frame.set_axis([7, 5, 6, 9]).rename_axis("query").to_parquet(tmp_path / "c.parquet")
        np.testing.assert_array_equal(load(tmp_path / "c.parquet").values, ANSWERS)
        pd.DataFrame(SHARES).rename_axis("permutation").to_csv(tmp_path / "d.csv")
        np.testing.assert_array_equal(load(tmp_path / "d.csv").values, SHARES.T)
        refused(written(tmp_path / "e.csv", "query,a,b\n1,0,1\n1,1,1\n"), "two rows for query 1; keep one")

    def test_pivots_of_two_names_are_refused(self, tmp_path: Path) -> None:
        frame = long_frame(np.random.default_rng(3).integers(0, 2, (2, 2, 3)))
        wide = frame.pivot(index=["set", "permutation"], columns="query", values="correct")
        wide.to_csv(tmp_path / "a.csv")
        refused(tmp_path / "a.csv", "a column 'permutation' but none called correct", "PQ")

    def test_axes_of_answers_must_be_said(self, tmp_path: Path) -> None:
        np.save(tmp_path / "a.npy", ANSWERS)
        refused(tmp_path / "a.npy", "3 x 4 of answers.*write --axes QC where a row is a query and a column a context")
        for axes, expected in (("CQ", ANSWERS), ("QC", ANSWERS.T)):
            np.testing.assert_array_equal(load(tmp_path / "a.npy", axes).values, expected)
        np.save(tmp_path / "b.npy", np.where(ANSWERS, 1.0, np.nan))
        refused(tmp_path / "b.npy", "write --axes")
        np.savetxt(tmp_path / "c.csv", ANSWERS, fmt="%d", delimiter=",")
        refused(tmp_path / "c.csv", "write --axes")
        np.save(tmp_path / "d.npy", SHARES)
        assert any("--axes PS reads it the other way round" in note for note in load(tmp_path / "d.npy").notes)

    def test_summaries_are_no_data(self, tmp_path: Path) -> None:
        frame = pd.DataFrame(SHARES)
        pd.concat([frame, frame.mean().to_frame("mean").T]).to_csv(tmp_path / "a.csv")
        refused(tmp_path / "a.csv", "a row or column called mean, a summary of others; delete it")
        frame.assign(Total=frame.mean(axis=1)).to_csv(tmp_path / "b.csv")
        refused(tmp_path / "b.csv", "called Total", "SP")

    def test_names_that_are_numbers_stay_names(self, tmp_path: Path) -> None:
        pd.DataFrame(ANSWERS.T, columns=[3, 1, 7]).rename_axis("query").to_csv(tmp_path / "a.csv")
        assert load(tmp_path / "a.csv").names == ("3", "1", "7")
        np.savetxt(tmp_path / "b.csv", ANSWERS.T, fmt="%d", delimiter=",")
        assert load(tmp_path / "b.csv", "qc").names == ("context 0", "context 1", "context 2")

    def test_a_column_or_row_without_values_is_refused(self, tmp_path: Path) -> None:
        refused(written(tmp_path / "a.csv", "1,0,\n0,1,\n"), "no value in column 3", "CQ")
        refused(written(tmp_path / "b.csv", "1,0,1\n,,\n"), "no value in row 2", "CQ")


class TestExcel:
    def test_byte_order_marks(self, tmp_path: Path) -> None:
        correct = np.random.default_rng(4).integers(0, 2, (3, 4, 5))
        text = long_frame(correct).to_csv(index=False)
        for encoding in ("utf-8-sig", "utf-16", "utf-32"):
            path = written(tmp_path / "a.csv", text.replace("\n", "\r\n"), encoding)
            np.testing.assert_array_equal(load(path).values, correct)
        rows = "".join(json.dumps(row) + "\n" for row in long_frame(correct).to_dict("records"))
        for encoding in ("utf-8-sig", "utf-16"):
            np.testing.assert_array_equal(load(written(tmp_path / "a.jsonl", rows, encoding)).values, correct)
        matrix = pd.DataFrame(SHARES).to_csv(index=False, header=False)
        np.testing.assert_array_equal(load(written(tmp_path / "b.csv", matrix, "utf-8-sig")).values, SHARES)
        refused(written(tmp_path / "c.csv", text, "utf-16-le"), "zero bytes, as UTF-16 does.*save it as UTF-8")

    @pytest.mark.parametrize(("separator", "sign"), [(";", ","), (";", "."), ("\t", ","), ("|", ","), (",", ".")])
    def test_separators_and_decimal_signs(self, separator: str, sign: str, tmp_path: Path) -> None:
        s, p = (index.ravel() for index in np.indices(SHARES.shape))
        frame = pd.DataFrame({"set": s, "permutation": p, "accuracy": SHARES.ravel()})
        for table, options in ((frame, {"index": False}), (pd.DataFrame(SHARES), {}), (pd.DataFrame(SHARES), None)):
            given = {"index": False, "header": False} if options is None else options
            table.to_csv(tmp_path / "a.csv", sep=separator, decimal=sign, lineterminator="\r\n", **given)
            np.testing.assert_array_equal(load(tmp_path / "a.csv").values, SHARES)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("set;a,b\n1;2\n", "has both ';' and ','"),
            ("sep=;\nset;permutation\n", "begins with sep=;; delete this line"),
            ("set;permutation;accuracy\n0;0;0,5\n0;1;0.5\n", "writes both 0,5 and 0.5"),
            ("query,correct,weight\n0,1,\"1,000\"\n", "holds '1,000' in the column weight"),
            ("query,correct,correct\n0,1,0\n", "two columns named 'correct'"),
            ("query,Correct,correct\n0,1,0\n", "two columns named 'correct'"),
            ("query,correct\n", "has no rows"),
            ("query,correct\n0,2024-01-01\n", "holds '2024-01-01' in the column correct"),
            ("query,correct\n0,1\n,1\n", "1 rows without a value of 'query'"),
            ("query,correct\n0,1\nNA,1\n", "1 rows without a value of 'query'"),
            ("split,query,correct\ntest,0,1\n,1,1\n", "1 rows without a value of 'split'"),
            ("query,correct,state\n0,1,true\n", "true and false in the column state"),
            ("a,a\n1,0\n", "two columns named 'a'"),
            ("prompt,weight\n1,0\n", "a column 'weight' but none called correct"),
        ],
    )  # fmt: skip
    def test_refuses(self, text: str, message: str, tmp_path: Path) -> None:
        refused(written(tmp_path / "a.csv", text), message)

    @pytest.mark.parametrize(
        ("right", "wrong"),
        [("TRUE", "FALSE"), ("True", "False"), ("yes", "no"), ("Y", "N"), ("1.0", "0.0"), ("t", "f")],
    )
    def test_words_for_right_and_wrong(self, right: str, wrong: str, tmp_path: Path) -> None:
        correct = np.random.default_rng(5).integers(0, 2, (2, 3, 4))
        frame = long_frame(correct)
        frame["correct"] = np.where(frame["correct"] == 1, right, wrong)
        frame.to_csv(tmp_path / "a.csv", index=False)
        frame.to_parquet(tmp_path / "a.parquet")
        for name in ("a.csv", "a.parquet"):
            np.testing.assert_array_equal(load(tmp_path / name).values, correct)
        pd.DataFrame(np.where(ANSWERS == 1, right, wrong)).to_csv(tmp_path / "b.csv", index=False, header=False)
        np.testing.assert_array_equal(load(tmp_path / "b.csv", "CQ").values, ANSWERS)

    @pytest.mark.parametrize("nothing", ["", "NA", "nan", "NaN", "None", "-", "#N/A", "<NA>", "null", "n/a"])
    def test_words_for_nothing(self, nothing: str, tmp_path: Path) -> None:
        text = f"context,query,correct\na,0,1\na,1,{nothing}\nb,0,0\nb,1,1\n"
        found = load(written(tmp_path / "a.csv", text))
        assert found.state is not None
        assert found.state.tolist() == [[0, NO_ANSWER], [0, 0]]
        assert found.values.tolist() == [[1, 0], [0, 1]]
        found = load(written(tmp_path / "b.csv", f"{nothing},0,1\n1,1,0\n1,0,1\n"), "CQ")
        assert found.state is not None
        assert np.argwhere(found.state).tolist() == [[0, 0]]

    def test_percentages(self, tmp_path: Path) -> None:
        text = "set,permutation,accuracy\n" + "".join(
            f"{s},{p},{100 * SHARES[s, p]:g}%\n" for s, p in np.ndindex(SHARES.shape)
        )
        np.testing.assert_allclose(load(written(tmp_path / "a.csv", text)).values, SHARES)
        refused(written(tmp_path / "c.csv", text.replace("50%", "0.5")), "writes both .*% and 0.5")
        refused(written(tmp_path / "b.csv", text.replace("%", "")), "found 50; percentages are to be divided by 100")

    def test_packed_files_and_capital_endings(self, tmp_path: Path) -> None:
        (tmp_path / "a.csv").write_bytes(gzip.compress(b"query,correct\n0,1\n"))
        refused(tmp_path / "a.csv", "packed by gzip; unpack it first")
        assert load(written(tmp_path / "B.CSV", "query,correct\n0,1\n1,0\n")).values.tolist() == [[1, 0]]

    def test_prompts_of_several_lines_beside_the_answers(self, tmp_path: Path) -> None:
        correct = np.random.default_rng(6).integers(0, 2, (2, 3, 4))
        frame = long_frame(correct)
        frame.insert(0, "prompt", 'a, "b"\nquery,correct\n0,1')
        frame.to_csv(tmp_path / "a.csv", index=False)
        found = load(tmp_path / "a.csv")
        np.testing.assert_array_equal(found.values, correct)
        assert "columns not used: prompt" in found.notes
        assert "columns not used: prompt" in describe(found).warnings

    def test_names_in_other_cases_and_with_spaces(self, tmp_path: Path) -> None:
        correct = np.random.default_rng(7).integers(0, 2, (2, 3, 4))
        frame = long_frame(correct).assign(state=["ok"] * 23 + ["overlong"])
        frame.columns = ["Set", " Permutation", "QUERY", "Correct ", "State"]
        frame.to_csv(tmp_path / "a.csv")
        found = load(tmp_path / "a.csv")
        np.testing.assert_array_equal(found.values.ravel()[:-1], correct.ravel()[:-1])
        assert found.state is not None
        assert found.state.sum() == OVERLONG

    def test_two_rows_of_a_cell_name_what_was_not_used(self, tmp_path: Path) -> None:
        frame = pd.concat([long_frame(ANSWERS[None]).assign(model=name) for name in "ab"])
        frame.to_csv(tmp_path / "a.csv", index=False)
        message = r"two rows for set 0, permutation 0, query 0; call the column .* \(columns not used: model\)"
        refused(tmp_path / "a.csv", message)

    @given(st.floats(0, 1), st.sampled_from(["{:.6f}", "{:.3e}", " {:.4f} ", "{:.6g}"]), st.booleans())
    def test_numbers_are_read_as_written(self, value: float, form: str, comma: bool) -> None:
        text = form.format(value)
        assert number_of(text.replace(".", ",") if comma and "e" not in text else text) == float(text)


class TestColumnKinds:
    @pytest.mark.parametrize(
        "kind", ["category", "Int64", "boolean", "float32", "string", "large_string", "dictionary", "decimal"]
    )
    def test_parquet_of_any_kind(self, kind: str, tmp_path: Path) -> None:
        correct = np.random.default_rng(8).integers(0, 2, (3, 2, 6))
        table = pa.Table.from_pandas(long_frame(correct), preserve_index=False)
        answers, queries = table.column("correct"), table.column("query").cast(pa.string())
        if kind in ("category", "Int64", "boolean", "string"):
            frame = long_frame(correct)
            frame["correct"] = frame["correct"].astype("Int64").astype(kind)
            frame["query"] = ("q" + frame["query"].astype(str)).astype("category")
            frame["state"] = pd.Categorical(["ok"] * 35 + ["invalid"])
            frame.to_parquet(tmp_path / "a.parquet")
        else:
            states = pa.array(["ok"] * 35 + ["invalid"], pa.large_string())
            made = {
                "float32": lambda: answers.cast(pa.float32()),
                "large_string": lambda: answers.cast(pa.string()).cast(pa.large_string()),
                "dictionary": lambda: pa.chunked_array([part.dictionary_encode() for part in answers.chunks]),
                "decimal": lambda: answers.cast(pa.decimal128(22, 2)),
            }[kind]()
            table = table.set_column(3, "correct", made).set_column(2, "query", queries.dictionary_encode())
            pq.write_table(table.append_column("state", states), tmp_path / "a.parquet")
        found = load(tmp_path / "a.parquet")
        assert found.state is not None
        assert np.argwhere(found.state).tolist() == [[2, 1, 5]]
        np.testing.assert_array_equal(found.values.ravel()[:-1], correct.ravel()[:-1])

    def test_a_nullable_column_lacks_answers(self, tmp_path: Path) -> None:
        frame = long_frame(np.ones((2, 2, 3), int)).astype({"correct": "Int64"})
        frame.loc[4, "correct"] = pd.NA
        frame.to_parquet(tmp_path / "a.parquet")
        found = load(tmp_path / "a.parquet")
        assert found.state is not None
        assert np.flatnonzero(found.state).tolist() == [4]

    def test_names_of_days_and_floats(self, tmp_path: Path) -> None:
        frame = long_frame(np.random.default_rng(9).integers(0, 2, (1, 2, 12)))
        dates = frame.assign(query=pd.Timestamp("2026-01-01") + pd.to_timedelta(frame["query"], "D"))
        dates.to_parquet(tmp_path / "a.parquet")
        assert load(tmp_path / "a.parquet").values.shape == (1, 2, 12)
        floats = frame.assign(query=frame["query"].astype(float), shots=4.0)
        floats.to_csv(tmp_path / "b.csv", index=False)
        found = load(tmp_path / "b.csv")
        assert (found.shots, found.queries) == ((4,), tuple(range(12)))
        np.testing.assert_array_equal(found.values.ravel(), frame["correct"])
        floats.loc[3, "query"] = np.nan
        floats.to_parquet(tmp_path / "c.parquet")
        refused(tmp_path / "c.parquet", "1 rows without a value of 'query'")
        refused(
            lines(tmp_path / "d.jsonl", [{"query": 0, "correct": [1]}]), "lists or structures in the column correct"
        )
        frame.assign(correct=pd.Timestamp("2026-01-01")).to_parquet(tmp_path / "e.parquet")
        refused(tmp_path / "e.parquet", "in the column correct; use numbers")
        frame.iloc[:0].to_parquet(tmp_path / "f.parquet")
        refused(tmp_path / "f.parquet", "has no rows")

    def test_weights_need_not_be_whole(self, tmp_path: Path) -> None:
        correct = np.random.default_rng(10).integers(0, 2, (3, 4, 8))
        weights = np.random.default_rng(11).random(8)
        frame = long_frame(correct).assign(Weights=np.tile(weights, 12))
        frame.to_csv(tmp_path / "a.csv", index=False)
        found = load(tmp_path / "a.csv")
        assert found.weights is not None
        np.testing.assert_array_equal(found.weights, weights)
        content = describe(found).to_dict()["sensitivity"]
        np.testing.assert_allclose(content["accuracy"], stats.accuracy(correct, None, weights).values)

    @pytest.mark.parametrize("name", ["class", "Label", "gold", "target"])
    def test_classes_are_kept(self, name: str, tmp_path: Path) -> None:
        frame = long_frame(np.random.default_rng(12).integers(0, 2, (2, 3, 4)))
        frame[name] = frame["query"].map(dict(enumerate(["World", "Sports", "World", "None"])))
        frame = frame.sample(frac=1, random_state=1)
        frame.to_csv(tmp_path / "a.csv", index=False)
        found = load(tmp_path / "a.csv")
        assert found.classes == ("World", "Sports", "World", "None")
        assert not any("not used" in note for note in found.notes)
        frame.iloc[0, -1] = "Business"
        frame.to_parquet(tmp_path / "b.parquet")
        refused(tmp_path / "b.parquet", r"gives query \d two classes in the column (class|gold|label|target)")
        frame[name] = np.where(frame["query"] == 0, None, frame["query"].astype(str))
        frame.to_parquet(tmp_path / "c.parquet")
        found = load(tmp_path / "c.parquet")
        assert (found.classes, any("1 queries have no" in note for note in found.notes)) == ((), True)

    @pytest.mark.parametrize(("values", "is_tested"), [(4, True), (80, False)])
    def test_answers_at_chance_bear_no_conclusion(self, values: int, is_tested: bool, tmp_path: Path) -> None:
        frame = long_frame((np.random.default_rng(13).random((4, 4, 120)) < 0.25).astype(int))
        frame["gold"] = frame["query"].map(lambda query: f"answer {query % values}")
        frame.to_csv(tmp_path / "a.csv", index=False)
        said = describe(load(tmp_path / "a.csv")).conclusion()
        assert any("cannot be told from chance, 25.0 %" in line for line in said) == is_tested


class TestJsonLines:
    def test_keys_that_come_later(self, tmp_path: Path) -> None:
        rows = [{"query": q, "correct": True} for q in range(5)]
        later = [{"query": q, "correct": False, "state": "overlong", "note": "x"} for q in range(5, 8)]
        found = load(lines(tmp_path / "a.jsonl", rows + later))
        assert found.state is not None
        assert found.state.tolist() == [[0] * 5 + [OVERLONG] * 3]
        assert "5 rows have no state: taken as ok" in found.notes
        assert "columns not used: note" in found.notes

    def test_a_split_that_comes_later(self, tmp_path: Path) -> None:
        rows = [{"query": 0, "correct": 1}, {"query": 1, "correct": 1, "split": "dev"}]
        refused(lines(tmp_path / "a.jsonl", rows), "1 rows without a value of 'split'; fill them in")
        rows = [{"correct": 1, "query": 0, "split": "dev"}, {"split": "test", "query": 0, "correct": 0}]
        assert load(lines(tmp_path / "b.jsonl", rows)).values.tolist() == [[0]]

    def test_accuracies_and_what_is_neither(self, tmp_path: Path) -> None:
        rows = [{"set": s, "permutation": p, "accuracy": SHARES[s, p]} for s, p in np.ndindex(SHARES.shape)]
        np.testing.assert_array_equal(load(lines(tmp_path / "a.jsonl", rows)).values, SHARES)
        refused(lines(tmp_path / "b.jsonl", [{"query": 1, "score": 1}]), "neither doc_id")
        refused(lines(tmp_path / "c.jsonl", [{"query": 0, "correct": 1}, {"query": 1, "correct": "x"}]), "mixes kinds")


class TestRowsWithoutNames:
    @pytest.mark.parametrize("form", ["{s},{p},{q},{a}", "set{s},perm{p},q{q},{a}", "{q},{s};{a}"])
    def test_a_row_an_answer_without_a_first_line_is_told_what_to_write(self, form: str, tmp_path: Path) -> None:
        path = tmp_path / "a.csv"
        rows = [
            form.replace(",", ";").format(s=s, p=p, q=q, a=(s + p * q) % 2)
            for s in range(3)
            for p in range(3)
            for q in range(9)
        ]
        path.write_text("\n".join(rows) + "\n")
        want = "context,query,correct" if form.count("{") == 3 else "set,permutation,query,correct"
        refused(path, f"names no column; write a first line that does, such as {want}")

    @pytest.mark.parametrize("text", ["0,1,1\n1,0,1\n2,1,1\n", "q,a,b\n0,1,0\n1,1,1\n2,0,0\n"])
    def test_a_matrix_with_an_index_or_a_header_is_none(self, text: str, tmp_path: Path) -> None:
        (tmp_path / "a.csv").write_text(text)
        refused(tmp_path / "a.csv", "write --axes QC")


class TestHarnessLogs:
    @staticmethod
    def log(path: Path, answers: Any, **more: Any) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [
            {"doc_id": i, "acc": float(answer), **{name: value(i) for name, value in more.items()}}
            for i, answer in enumerate(answers)
        ]
        return lines(path, rows)

    def test_logs_without_hashes_pair_within_a_task_only(self, tmp_path: Path) -> None:
        one = self.log(tmp_path / "m0/samples_boolq_2026-01-01T00-00-00.jsonl", ANSWERS[0])
        two = self.log(tmp_path / "m1/samples_boolq_2026-02-01T00-00-00.123.jsonl", ANSWERS[1])
        other = self.log(tmp_path / "m1/samples_rte.jsonl", ANSWERS[2])
        np.testing.assert_array_equal(load([one, two]).values, ANSWERS[:2])
        refused([one, other], "neither doc_hash nor the documents' text.*samples_TASK.jsonl")

    def test_logs_of_different_metrics_are_no_one_study(self, tmp_path: Path) -> None:
        chosen = self.log(tmp_path / "m0/samples_news.jsonl", ANSWERS[0], doc_hash=str)
        rows = [{"doc_id": i, "exact_match": float(right), "doc_hash": str(i)} for i, right in enumerate(ANSWERS[1])]
        said = lines(tmp_path / "said.jsonl", rows)
        refused([chosen, said], "is graded by acc, and .* by exact_match: .*describe each apart")

    def test_what_rows_say_of_their_task_counts(self, tmp_path: Path) -> None:
        paths = [
            self.log(tmp_path / f"samples_{name}.jsonl", ANSWERS[i], task_name=lambda _, name=name: name[:3])
            for i, name in enumerate(("rte0", "rte1", "cola"))
        ]
        np.testing.assert_array_equal(load(paths[:2]).values, ANSWERS[:2])
        refused([paths[0], paths[2]], "named as different tasks")
        mixed = self.log(tmp_path / "samples_x.jsonl", ANSWERS[0], task_name=lambda i: f"task{i}")
        refused(mixed, "holds the tasks task0, task1, task2, task3; give one task a file")

    @pytest.mark.parametrize("key", ["doc", "question", "doc_hash"])
    def test_texts_tell_documents(self, key: str, tmp_path: Path) -> None:
        def text(i: int) -> Any:
            return {"question": f"Is {i} even?"} if key == "doc" else f"Is {i} even?"

        one = self.log(tmp_path / "samples_a.jsonl", ANSWERS[0], **{key: text})
        two = self.log(tmp_path / "samples_b.jsonl", ANSWERS[1], **{key: text})
        np.testing.assert_array_equal(load([one, two]).values, ANSWERS[:2])
        three = self.log(tmp_path / "samples_c.jsonl", ANSWERS[2], **{key: lambda i: text(i + 1)})
        refused([one, three], "doc_id 0 is another document in samples_c.jsonl than in samples_a.jsonl")

    def test_other_targets_are_other_documents(self, tmp_path: Path) -> None:
        one = self.log(tmp_path / "m0/samples_a.jsonl", ANSWERS[0], target=lambda i: i % 2)
        two = self.log(tmp_path / "m1/samples_a.jsonl", ANSWERS[1], target=lambda i: (i + 1) % 2)
        refused([one, two], "doc_id 0 is another document")

    def test_grades(self, tmp_path: Path) -> None:
        rows = [{"doc_id": i, "f1": grade} for i, grade in enumerate((0.25, 1, 0, 0.5))]
        found = load(lines(tmp_path / "samples_squad.jsonl", rows))
        assert found.values.tolist() == [[0.25, 1, 0, 0.5]]


class TestFilesPutTogether:
    def test_queries_are_matched_by_name(self, tmp_path: Path) -> None:
        one = written(tmp_path / "a.csv", "query,correct\nx,1\ny,0\nz,1\n")
        two = written(tmp_path / "b.csv", "query,correct\nz,0\ny,1\n")
        found = load([one, two])
        assert found.state is not None
        assert (found.values.tolist(), found.state.tolist()) == ([[1, 0, 1], [0, 1, 0]], [[0, 0, 0], [NO_ANSWER, 0, 0]])
        assert "queries are matched by name over the files" in found.notes
        assert describe(found).to_dict()["num_queries"] == 2


class TestGrades:
    def test_answers_with_grades_have_everything_but_tests_of_0_and_1(self, tmp_path: Path) -> None:
        grades = np.random.default_rng(13).random((4, 5, 30)).round(2)
        frame = long_frame(grades)
        frame.to_csv(tmp_path / "a.csv", index=False)
        found = load(tmp_path / "a.csv")
        assert (found.is_graded, found.values.dtype) == (True, np.float64)
        content = describe(found).to_dict()
        np.testing.assert_allclose(content["sensitivity"]["accuracy"], grades.mean(-1))
        components = stats.variance_components(grades)
        np.testing.assert_allclose(content["sensitivity"]["components"]["sigma2"]["SPI"], components.sigma2.SPI)
        assert any("answers are graded" in note for note in found.notes)
        over_shots = describe(Tensor(np.stack([grades, grades[::-1]], axis=2), "SPKQ", shots=(1, 2))).to_dict()
        np.testing.assert_allclose(over_shots["curve"]["mean"], [grades.mean()] * 2)
        json.dumps(content, allow_nan=False)

    @pytest.mark.parametrize("num", [1, 2, 4])
    def test_contexts_with_grades(self, num: int) -> None:
        grades = np.random.default_rng(14).random((num, 25))
        found = describe(Tensor(grades, "CQ", names=tuple("abcd"[:num])))
        content = found.to_dict()
        assert (content["graded"], content["mcnemar"], content["cochran_q"]) == (True, None, None)
        low, high = stats.paired_grades(grades[0], grades[-1])[3:5]
        if num == 2:
            assert (content["difference"]["low"], content["difference"]["high"]) == (low, high)
            assert "paired t" in " ".join(found.conclusion())
        if num == 4:
            np.testing.assert_allclose(content["pairs"]["low"][2], low)
        mean = grades_module.graded_mean(grades[0])
        assert content["contexts"][0]["accuracy"]["low"] == mean.low
        assert "Wilson" not in str(found.tables(True)) + str(found.conclusion())
        assert len(found.plots()) == (num > 1)

    def test_arrays_that_may_be_grades_or_accuracies_are_refused(self, tmp_path: Path) -> None:
        np.save(tmp_path / "a.npy", np.full((2, 2, 3), 0.5))
        refused(tmp_path / "a.npy", "say --axes SPQ for graded answers; for accuracies name the axes SP or SPK")
        assert load(tmp_path / "a.npy", "SPQ").is_graded
        assert not load(tmp_path / "a.npy", "SPK").is_graded
        np.savez(tmp_path / "a.npz", correct=np.full((2, 2, 3), 0.5))
        assert load(tmp_path / "a.npz").axes == "SPQ"
        np.save(tmp_path / "b.npy", np.full(5, 0.5))
        refused(tmp_path / "b.npy", "say --axes Q for graded answers")
        np.save(tmp_path / "c.npy", SHARES)
        assert (load(tmp_path / "c.npy", "QC").is_graded, load(tmp_path / "c.npy").axes) == (True, "SP")
        np.save(tmp_path / "d.npy", np.full((2, 2, 3), 1.5))
        refused(tmp_path / "d.npy", "found 1.5; divide points by their maximum", "SPQ")


def test_every_refusal_is_one_line_that_names_the_file(tmp_path: Path) -> None:
    for number, text in enumerate(("a;b,c\n", "query,correct\n0,x\n", "context,1,2\nx,y,z\n", "0,1\n0,1\n")):
        path = written(tmp_path / f"{number}.csv", text)
        with pytest.raises(IclpermError) as found:
            load(path)
        assert re.search(rf"{number}\.csv", str(found.value))
        assert isinstance(found.value, DataError) or "--axes" in str(found.value)


class Counted:
    """A name that counts how often it is looked at."""

    looks = 0

    def __init__(self, name: str) -> None:
        self.name = name

    def __hash__(self) -> int:
        Counted.looks += 1
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        Counted.looks += 1
        return isinstance(other, Counted) and self.name == other.name


def test_a_name_twice_is_found_in_linear_work():
    assert first_repeated([]) is None
    assert first_repeated(["a", "b", "c"]) is None
    assert first_repeated(["a", "b", "b", "a"]) == "b"
    assert first_repeated(Counted(f"c{number}") for number in range(3000)) is None
    assert 0 < Counted.looks <= 4 * 3000


def test_a_table_of_five_thousand_names_without_rows_is_refused(tmp_path: Path) -> None:
    names = ",".join(f"c{number}" for number in range(5_000))
    refused(written(tmp_path / "a.csv", f"{names}\n"), "has no rows")
