"""Answers from files: what is read, what is said of it, and what is refused in one line."""

from __future__ import annotations

import errno
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest

from iclperm import external, stats
from iclperm.cli import main as cli_main
from iclperm.errors import DataError, IclpermError, RequestError
from iclperm.external import Tensor, contexts, describe, load
from iclperm.runs.answers import write_tables
from iclperm.stats import paired

Array = npt.NDArray[Any]


def answered(shape: tuple[int, ...], seed: int = 0) -> Array:
    generator = np.random.default_rng(seed)
    return (generator.random(shape) < 0.3 + 0.4 * generator.random(shape[-1])).astype(np.uint8)


def saved(path: Path, values: Any) -> Path:
    np.save(path, values)
    return path


def long_table(correct: Array, shots: tuple[int, ...] = (0, 2, 4), **more: Any) -> pa.Table:
    """As `iclperm export` writes it: a row a cell of correct [S, P, K, Q]."""
    s, p, k, q = (index.ravel() for index in np.indices(correct.shape))
    columns = {"split": ["test"] * correct.size, "set": s, "permutation": p, "shots": np.array(shots)[k], "query": q}
    answers = {"correct": correct.ravel().astype(bool), "prediction": ["x"] * correct.size}
    return pa.table({**columns, **answers, **more})


def log_rows(answers: Array, filter_name: str = "none", metric: str = "acc", first: int = 0) -> list[dict[str, Any]]:
    return [
        {
            "doc_id": first + i,
            "doc_hash": f"h{first + i}",
            "filter": filter_name,
            metric: float(answer),
            "doc": {"a": 1},
        }
        for i, answer in enumerate(answers)
    ]


def write_log(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def check(found: Any) -> dict[str, Any]:
    """Findings are whole: sentences, tables of equal rows, figures that draw, and JSON."""
    assert all(isinstance(line, str) and line for line in found.conclusion())
    for full in (False, True):
        for table in found.tables(full):
            assert {len(row) for row in table.rows} == {len(table.header)}, table.title
            assert all(isinstance(cell, str) for row in table.rows for cell in row)
    content: dict[str, Any] = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    return content


class TestArrays:
    @pytest.mark.parametrize(
        ("shape", "axes"), [((12,), "CQ"), ((1, 9), "CQ"), ((9, 1), "CQ"), ((3, 4, 9), "SPQ"), ((3, 4, 2, 9), "SPKQ")]
    )
    @pytest.mark.parametrize("kind", [np.uint8, np.bool_, np.int64, np.float32])
    def test_what_axes_mean_by_default(self, shape: tuple[int, ...], axes: str, kind: Any, tmp_path: Path) -> None:
        correct = answered(shape)
        found = load(saved(tmp_path / "a.npy", correct.astype(kind)))
        assert found.axes == axes
        assert found.values.dtype == np.uint8
        np.testing.assert_array_equal(found.values.reshape(shape), correct)
        assert found.values.shape[-1] == max(shape)
        assert found.state is None
        check(describe(found))

    def test_a_matrix_of_shares_is_accuracies(self, tmp_path: Path) -> None:
        matrix = np.random.default_rng(1).random((5, 6))
        found = load(saved(tmp_path / "a.npy", matrix))
        assert (found.axes, found.values.dtype) == ("SP", np.float64)
        content = check(describe(found))
        assert content["spreads"]["mean_std"]["order"] == stats.order_sensitivity(matrix)
        assert content["spreads"]["rms"]["ratio"] == stats.sensitivity_ratio(matrix, "rms")
        assert content["jackknife"]["low"] == stats.jackknife_ratio_interval(matrix).low
        assert content["intervals"]["ratio"]["high"] == stats.generalized_interval(matrix).ratio.high
        (plot,) = describe(found).plots().values()
        assert plot.size[0] > 0

    def test_axes_say_it_otherwise_and_in_any_order(self, tmp_path: Path) -> None:
        correct = answered((3, 4, 2, 9))
        path = saved(tmp_path / "a.npy", correct.transpose(3, 1, 0, 2))
        found = load(path, axes="qpsk")
        np.testing.assert_array_equal(found.values, correct)
        assert found.axes == "SPKQ"
        one_set = load(saved(tmp_path / "b.npy", correct[0, :, 0]), axes="PQ")
        assert (one_set.axes, one_set.values.shape) == ("SPQ", (1, 4, 9))
        check(describe(one_set))
        accuracies = load(saved(tmp_path / "c.npy", correct.mean(-1)), axes="SPK")
        content = check(describe(accuracies))
        assert content["curve"]["mean"] == pytest.approx(stats.curve(correct).mean.tolist())

    @pytest.mark.parametrize(
        ("axes", "message"),
        [
            ("SPX", "distinct letters of S, P, K, Q and C, got 'SPX'"),
            ("SSQ", "distinct letters"),
            ("SP", "names 2 axes, the array has 3"),
            ("CPQ", "contexts C go with queries Q alone"),
            ("SKP", None),
            ("SPC", "contexts C go with"),
        ],
    )
    def test_refuses_axes(self, axes: str, message: str | None, tmp_path: Path) -> None:
        path = saved(tmp_path / "a.npy", answered((3, 4, 9)))
        if message is None:
            assert load(path, axes).axes == "SPK"
            return
        with pytest.raises(RequestError, match=message):
            load(path, axes)

    def test_nan_is_no_answer(self, tmp_path: Path) -> None:
        correct = answered((3, 4, 9)).astype(float)
        correct[1, 2, 5] = np.nan
        found = load(saved(tmp_path / "a.npy", correct))
        assert found.notes == ("1 of 108 answers are missing",)
        content = check(describe(found))
        np.testing.assert_array_equal(
            content["sensitivity"]["accuracy"],
            stats.accuracy(np.nan_to_num(correct).astype(int), np.isnan(correct).astype(int)).values,
        )

    @pytest.mark.parametrize(
        ("values", "axes", "message"),
        [
            (np.full((2, 2, 3), 7), None, "answers 0 and 1, found 7"),
            (
                np.full((2, 2, 3), 0.5),
                None,
                "along Q, found 0.5; say --axes SPQ for graded answers; for accuracies name the axes SP or SPK",
            ),
            (np.full((2, 2), 77.4), None, "0..1, found 77.4; percentages"),
            (np.full((2, 2), np.nan), None, "found nan"),
            (np.array([["a"]]), None, "must hold numbers"),
            (np.zeros((0, 3)), None, "must hold numbers"),
            (np.zeros((2,) * 5), None, "needs a letter for each"),
            (np.zeros((2, 3)), "KQ", None),
            (np.zeros((2, 3)) + 0.5, "SK", "need the axes S and P"),
        ],
    )
    def test_refuses_values(self, values: Array, axes: str | None, message: str | None, tmp_path: Path) -> None:
        path = saved(tmp_path / "a.npy", values)
        if message is None:
            assert load(path, axes).axes == "SPKQ"
            return
        with pytest.raises(IclpermError, match=message) as refused:
            load(path, axes)
        assert "\n" not in str(refused.value)

    def test_archives_bring_state_weights_and_shots(self, tmp_path: Path) -> None:
        correct = answered((3, 4, 2, 9))
        state = np.zeros_like(correct)
        state[0, 0, 0, 3] = 2
        weights = np.arange(1, 10)
        np.savez(tmp_path / "a.npz", correct=correct, state=state, weights=weights, shots=np.array([1, 4]))
        found = load(tmp_path / "a.npz")
        assert found.shots == (1, 4)
        content = check(describe(found))
        expected = stats.accuracy(correct, state, weights).values
        np.testing.assert_allclose(content["curve"]["mean"], expected.mean(axis=(0, 1)))
        assert content["curve"]["shots"] == [1, 4]
        np.savez(tmp_path / "b.npz", correct)
        assert load(tmp_path / "b.npz").axes == "SPKQ"
        np.savez(tmp_path / "c.npz", one=correct, two=correct)
        with pytest.raises(DataError, match="holds one, two; it needs one array, or one named correct"):
            load(tmp_path / "c.npz")
        np.savez(tmp_path / "d.npz", correct=correct, shots=[1])
        with pytest.raises(DataError, match=r"shots \[1\]; give 2"):
            load(tmp_path / "d.npz")
        np.savez(tmp_path / "e.npz", correct=correct, state=state[0])
        with pytest.raises(DataError, match="make them alike"):
            load(tmp_path / "e.npz")
        np.savez(tmp_path / "f.npz", correct=correct, weights=[1.5] * 8)
        with pytest.raises(DataError, match="one number a query"):
            load(tmp_path / "f.npz")
        np.savez(tmp_path / "g.npz", correct=correct, weights=[-1.5, *[1] * 8])
        with pytest.raises(DataError, match="weights below 0"):
            load(tmp_path / "g.npz")
        np.savez(tmp_path / "h.npz", correct=correct, weights=[1.5, *[1] * 8], classes=list("aabbccaab"))
        found = load(tmp_path / "h.npz")
        assert (found.weights is not None and found.weights[:2].tolist(), found.classes) == (
            [1.5, 1],
            tuple("aabbccaab"),
        )

    def test_nothing_is_unpickled_and_nothing_unpacked_beyond_the_cap(self, tmp_path: Path) -> None:
        np.save(tmp_path / "a.npy", np.array([[{}]], dtype=object), allow_pickle=True)
        np.savez(tmp_path / "a.npz", np.array([{}], dtype=object), allow_pickle=True)
        for name in ("a.npy", "a.npz"):
            with pytest.raises(DataError, match=r"a\.np[yz] is not a \.np[yz] file"):
                load(tmp_path / name)
        with zipfile.ZipFile(tmp_path / "b.npz", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("a.npy", bytes(1_000_000))
        assert (tmp_path / "b.npz").stat().st_size < 20_000
        with pytest.raises(DataError, match=r"unpacked, takes .* the most is"):
            load(tmp_path / "b.npz", most_bytes=20_000)
        with pytest.raises(DataError, match="the most is"):
            load(saved(tmp_path / "c.npy", np.zeros((30, 1000), np.uint8)), most_bytes=20_000)

    def test_a_header_that_promises_more_than_is_there_allocates_nothing(self, tmp_path: Path) -> None:
        with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive, archive.open("correct.npy", "w") as file:
            header = {"descr": "|u1", "fortran_order": False, "shape": (1 << 30, 1 << 30)}
            np.lib.format.write_array_header_1_0(file, header)
            file.write(bytes(8))
        with pytest.raises(DataError, match=r"a\.npz is not .*: it is shorter than its header says"):
            load(tmp_path / "a.npz")

    @pytest.mark.parametrize("shape", ["(9223372036854775807, 9)", f"({1 << 64},)", "(True, 3)", "(3, -3)", "(1.5, 3)"])
    @pytest.mark.parametrize("kind", ["npy", "npz"])
    def test_a_shape_that_no_array_has_is_refused(self, shape: str, kind: str, tmp_path: Path) -> None:
        header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(117) + b"\n"
        raw = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(27)
        path = tmp_path / f"a.{kind}"
        if kind == "npy":
            path.write_bytes(raw)
        else:
            with zipfile.ZipFile(path, "w") as archive:
                archive.writestr("correct.npy", raw)
        with pytest.raises(DataError, match=rf"a\.{kind} is not a \.{kind} file that can be read: (it|shape) is"):
            load(path)

    @pytest.mark.parametrize(
        ("name", "reader", "error"),
        [
            ("a.npz", "numpy.load", MemoryError()),
            ("a.parquet", "pyarrow.parquet.ParquetFile", pa.ArrowMemoryError("malloc of size 8 failed")),
            ("a.csv", "pyarrow.csv.read_csv", pa.ArrowMemoryError("malloc of size 8 failed")),
            ("a.jsonl", "json.loads", OSError(errno.ENOMEM, "Cannot allocate memory")),
        ],
        ids=lambda given: given if isinstance(given, str) and given.startswith("a.") else "",
    )
    def test_too_little_memory_is_no_fault_of_the_file(
        self,
        name: str,
        reader: str,
        error: Exception,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        def full(*_: Any, **__: Any) -> None:
            raise error

        np.savez(tmp_path / "a.npz", answered((2, 3, 4)))
        table = long_table(answered((2, 3, 1, 4)), (0,))
        pq.write_table(table, tmp_path / "a.parquet")
        pa_csv.write_csv(table, tmp_path / "a.csv")
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
        assert load(tmp_path / name)
        monkeypatch.setattr(reader, full)
        with pytest.raises(SystemExit) as ended:
            cli_main.main(["stats", str(tmp_path / name)])
        assert ended.value.code == 3
        assert capsys.readouterr().err.startswith("error: out of memory; what is finished is kept")

    @pytest.mark.parametrize("name", ["a.npy", "a.npz", "a.parquet", "a.csv", "a.jsonl"])
    @pytest.mark.parametrize("content", [b"", b"\xff\xfe no file\n\0", b"PK\x03\x04broken", b"{}\n", b'{"a": [[[\n'])
    def test_damaged_files_are_refused_in_one_line(self, name: str, content: bytes, tmp_path: Path) -> None:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(IclpermError) as refused:
            load(tmp_path / name)
        assert name in str(refused.value)
        assert "\n" not in str(refused.value)

    def test_refuses_other_files(self, tmp_path: Path) -> None:
        (tmp_path / "a.pkl").write_bytes(b"")
        with pytest.raises(DataError, match=r"ends in '\.pkl'; give \.npy"):
            load(tmp_path / "a.pkl")
        with pytest.raises(DataError, match="cannot be read: No such file"):
            load(tmp_path / "nothing.npy")
        with pytest.raises(DataError, match=r"no samples_\*\.jsonl"):
            load(tmp_path)
        with pytest.raises(RequestError, match="at least one file"):
            load([])
        paths = [saved(tmp_path / f"{i}.npy", answered((3, 4, 9))) for i in range(2)]
        with pytest.raises(DataError, match=r"0\.npy has the axes SPQ: only contexts"):
            load(paths)


class TestTables:
    @pytest.mark.parametrize("ending", ["csv", "parquet", "jsonl"])
    def test_long_tables_in_any_order(self, ending: str, tmp_path: Path) -> None:
        correct = answered((3, 4, 3, 9), 2)
        table = long_table(correct)
        table = table.take(np.random.default_rng(3).permutation(len(table)))
        path = write_tables(iter([table]), tmp_path / f"a.{ending}")
        found = load(path)
        np.testing.assert_array_equal(found.values, correct)
        assert (found.axes, found.shots, found.state, found.weights) == ("SPKQ", (0, 2, 4), None, None)
        content = check(describe(found))
        np.testing.assert_allclose(content["curve"]["mean"], stats.curve(correct).mean)
        assert content["over_shots"]["shots"] == [0, 2, 4]
        correlations = paired.intraclass_correlations(stats.variance_components(correct[:, :, -1]))
        assert content["intraclass_correlations"]["same_set"] == pytest.approx(correlations.same_set)

    def test_what_is_not_ok_or_not_there_is_missing(self, tmp_path: Path) -> None:
        correct = answered((2, 3, 1, 8), 4)
        state, answers = ["ok"] * correct.size, correct.ravel().astype(object)
        state[5], answers[5] = "overlong", None
        table = long_table(correct, (4,), state=state, weight=[2] * correct.size)
        table = table.set_column(5, "correct", [pa.array(answers.tolist())])
        path = write_tables(iter([table.slice(1)]), tmp_path / "a.parquet")
        found = load(path)
        assert found.state is not None
        assert np.argwhere(found.state).tolist() == [[0, 0, 0, 0], [0, 0, 0, 5]]
        assert found.weights is not None
        assert found.weights.tolist() == [2] * 8
        expected = stats.accuracy(found.values[:, :, 0], found.state[:, :, 0], found.weights).values
        np.testing.assert_allclose(check(describe(found))["sensitivity"]["accuracy"], expected)

    def test_the_test_split_is_read(self, tmp_path: Path) -> None:
        test, dev = answered((2, 3, 1, 8), 5), answered((2, 3, 1, 5), 6)
        other = long_table(dev, (4,))
        other = other.set_column(0, "split", [["dev"] * len(other)])
        path = write_tables(iter([pa.concat_tables([other, long_table(test, (4,))])]), tmp_path / "a.parquet")
        found = load(path)
        np.testing.assert_array_equal(found.values, test)
        assert "only the split test is described" in describe(found).warnings
        np.testing.assert_array_equal(load(write_tables(iter([other]), tmp_path / "b.csv")).values, dev)

    def test_contexts_and_accuracies_have_tables_too(self, tmp_path: Path) -> None:
        correct = answered((3, 20), 7)
        c, q = (index.ravel() for index in np.indices(correct.shape))
        table = pa.table({"context": np.array(["b", "a", "c"])[c], "query": q, "correct": correct.ravel()})
        found = load(write_tables(iter([table]), tmp_path / "a.csv"))
        assert (found.axes, found.names) == ("CQ", ("a", "b", "c"))
        np.testing.assert_array_equal(found.values, correct[[1, 0, 2]])
        matrix = np.random.default_rng(8).random((3, 4))
        s, p = (index.ravel() for index in np.indices(matrix.shape))
        table = pa.table({"set": s, "permutation": p, "accuracy": matrix.ravel()})
        found = load(write_tables(iter([table]), tmp_path / "b.parquet"))
        np.testing.assert_array_equal(found.values, matrix)
        with pytest.raises(DataError, match="lacks 1 of 12 cells"):
            load(write_tables(iter([table.slice(0, 11)]), tmp_path / "c.parquet"))

    def test_plain_matrices(self, tmp_path: Path) -> None:
        matrix = np.random.default_rng(9).random((4, 5)).round(4)
        np.savetxt(tmp_path / "a.csv", matrix, delimiter=",")
        np.testing.assert_allclose(load(tmp_path / "a.csv").values, matrix)
        (tmp_path / "b.csv").write_text("p0,p1\n0.5,0.25\n0.75,1\n")
        assert load(tmp_path / "b.csv").values.tolist() == [[0.5, 0.25], [0.75, 1]]
        (tmp_path / "c.csv").write_text("1,0,1\n0,0,1\n")
        assert load(tmp_path / "c.csv", "CQ").values.tolist() == [[1, 0, 1], [0, 0, 1]]
        (tmp_path / "d.csv").write_text("name,p1\nx,0.25\n")
        with pytest.raises(RequestError, match="has the columns 'name, p1'; call them"):
            load(tmp_path / "d.csv")
        with pytest.raises(DataError, match=r"neither a matrix of numbers \(column 'name'\).*holds 'x' in the column"):
            load(tmp_path / "d.csv", "SP")

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"correct": [2] * 12}, "answers 0 and 1, or grades between, along Q, found 2"),
            (
                {"correct": ["maybe"] * 12},
                "holds 'maybe' in the column correct; use numbers, 0 and 1, or true and false",
            ),
            ({"query": [0] * 12}, "two rows for set 0, permutation 0, shots 4, query 0; call the column"),
            ({"query": [None] + [0] * 11}, "1 rows without a value of 'query'"),
            ({"weight": [1, 2] * 6}, "one query two weights"),
            ({"weight": [-1.5] * 12}, "at least 0 in the column weight, found -1.5"),
            ({"shots": [1.5] * 12}, "whole numbers in the column shots, found 1.5"),
            ({"split": ["a"] * 6 + ["b"] * 6}, "holds the splits a, b"),
            ({"context": [0] * 12}, "one way to name a cell"),
        ],
    )
    def test_refuses_tables(self, change: dict[str, Any], message: str, tmp_path: Path) -> None:
        table = long_table(answered((1, 4, 1, 3), 10), (4,))
        for name, column in change.items():
            if name in table.column_names:
                table = table.drop([name])
            table = table.append_column(name, [column])
        pq.write_table(table, tmp_path / "a.parquet")
        with pytest.raises(DataError, match=message) as refused:
            load(tmp_path / "a.parquet")
        assert "\n" not in str(refused.value)

    def test_refuses_a_tensor_beyond_the_cap_and_missing_columns(self, tmp_path: Path) -> None:
        table = pa.table({"set": [0, 1], "permutation": [0, 1], "query": [0, 1], "correct": [0, 1]})
        pq.write_table(table, tmp_path / "a.parquet")
        assert load(tmp_path / "a.parquet").values.shape == (2, 2, 2)
        with pytest.raises(RequestError, match="names its own axes by its columns"):
            load(tmp_path / "a.parquet", axes="SPQ")
        places = np.arange(600)
        pq.write_table(
            pa.table({"set": places, "permutation": places, "query": places, "correct": places * 0}),
            tmp_path / "b.parquet",
        )
        with pytest.raises(DataError, match=r"the tensor \[600, 600, 600\] of .* the most is"):
            load(tmp_path / "b.parquet", most_bytes=1 << 20)
        pq.write_table(pa.table({"set": [0], "correct": [1]}), tmp_path / "c.parquet")
        with pytest.raises(DataError, match="none named query"):
            load(tmp_path / "c.parquet")
        pq.write_table(pa.table({"set": [0], "accuracy": [0.5]}), tmp_path / "d.parquet")
        with pytest.raises(DataError, match="no columns set and permutation"):
            load(tmp_path / "d.parquet")


class TestContexts:
    def test_two_contexts(self, tmp_path: Path) -> None:
        correct = answered((2, 40), 11)
        content = check(describe(load(saved(tmp_path / "a.npy", correct), "CQ")))
        expected = paired.mcnemar(*correct)
        assert content["mcnemar"] == pytest.approx(expected._asdict())
        assert content["cochran_q"] is None
        assert content["contexts"][0]["accuracy"] == pytest.approx(
            stats.wilson_interval(int(correct[0].sum()), 40)._asdict()
        )

    def test_many_contexts(self, tmp_path: Path) -> None:
        correct = answered((6, 60), 12)
        correct[0] = 1
        found = describe(load(saved(tmp_path / "a.npy", correct), "CQ"))
        content = check(found)
        assert content["cochran_q"] == pytest.approx(paired.cochran_q(correct)._asdict())
        np.testing.assert_allclose(content["pairs"]["adjusted"], paired.pairwise_mcnemar(correct).adjusted)
        assert "the contexts differ" in " ".join(found.conclusion())
        assert set(found.plots()) == {"contexts"}

    def test_equal_contexts_are_not_called_equal(self, tmp_path: Path) -> None:
        correct = np.broadcast_to(answered((40,), 13), (3, 40))
        found = describe(load(saved(tmp_path / "a.npy", correct), "CQ"))
        assert "cannot be told apart, which does not prove them equal" in " ".join(found.conclusion())
        two = describe(load(saved(tmp_path / "b.npy", correct[:2]), "CQ"))
        assert "does not prove them equal" in " ".join(two.conclusion())

    def test_too_many_for_pairs_and_for_a_figure(self, tmp_path: Path) -> None:
        found = describe(load(saved(tmp_path / "a.npy", answered((61, 9), 14)), "CQ"))
        assert check(found)["pairs"] is None
        assert "61 contexts are too many to test pair by pair" in " ".join(found.warnings)
        assert found.plots() == {}

    def test_no_common_query_is_refused(self) -> None:
        with pytest.raises(DataError, match="no query was answered in every context"):
            contexts(np.ones((2, 2), np.uint8), np.eye(2))
        with pytest.raises(RequestError, match=r"\[C, Q\]"):
            contexts(np.ones(3, np.uint8))

    def test_permuting_queries_changes_nothing(self) -> None:
        correct = answered((4, 30), 15)
        order = np.random.default_rng(16).permutation(30)
        assert contexts(correct).to_dict() == contexts(correct[:, order]).to_dict()

    def test_the_figure_draws(self, tmp_path: Path) -> None:
        from iclperm.report.figures import save

        names = [f"samples_a_rather_long_task_name_of_$the$_harness_2026-01-0{i}.jsonl" for i in range(5)]
        found = contexts(answered((5, 30), 17), names=names)
        paths = save(found.plots()["contexts"], tmp_path / "contexts")
        assert all(path.stat().st_size > 1000 for path in paths)


class TestSampleLogs:
    def test_files_of_one_task_are_contexts(self, tmp_path: Path) -> None:
        correct = answered((3, 30), 18)
        paths = [write_log(tmp_path / f"m{i}" / "samples_agnews.jsonl", log_rows(row)) for i, row in enumerate(correct)]
        for given in (paths, tmp_path, [tmp_path]):
            found = load(given)
            np.testing.assert_array_equal(found.values, correct)
            assert found.names == tuple(f"m{i}/samples_agnews.jsonl" for i in range(3))
            assert "answers are the metric acc" in found.notes
        assert check(describe(found))["num_queries"] == 30
        twice = load([paths[0], paths[0]])
        assert twice.names == ("m0/samples_agnews.jsonl #1", "m0/samples_agnews.jsonl #2")

    def test_documents_are_matched_by_number(self, tmp_path: Path) -> None:
        one, two = answered((2, 10), 19)
        first = write_log(tmp_path / "samples_a.jsonl", log_rows(one))
        second = write_log(tmp_path / "samples_b.jsonl", log_rows(two, first=0)[::-1][:8])
        found = load([first, second])
        np.testing.assert_array_equal(found.values[0], one)
        np.testing.assert_array_equal(found.values[1, 2:], two[2:])
        assert found.state is not None
        assert np.count_nonzero(found.state, axis=1).tolist() == [0, 2]
        content = check(describe(found))
        assert (content["num_queries"], round(content["dropped"], 6)) == (8, 0.2)

    def test_filters_are_contexts(self, tmp_path: Path) -> None:
        one, two = answered((2, 10), 20)
        rows = log_rows(one, "strict-match", "exact_match") + log_rows(two, "flexible-extract", "exact_match")
        found = load(write_log(tmp_path / "samples_gsm8k.jsonl", rows))
        assert found.names == ("samples_gsm8k.jsonl (strict-match)", "samples_gsm8k.jsonl (flexible-extract)")
        np.testing.assert_array_equal(found.values, [one, two])

    def test_one_log_is_one_accuracy(self, tmp_path: Path) -> None:
        answers = answered((50,), 21)
        found = describe(load(write_log(tmp_path / "samples_a.jsonl", log_rows(answers))))
        check(found)
        assert f"Accuracy is {100 * answers.mean():.1f} %" in found.conclusion()[1]

    @pytest.mark.parametrize(
        ("rows", "message"),
        [
            ([{"doc_id": 0, "bleu": 0.3}], "line 1 has none of the metrics acc, exact_match"),
            ([{"doc_id": 0, "acc": 30}], "line 1 has acc = 30 for doc_id 0; it must be 0 or 1"),
            ([{"doc_id": 0, "acc": 1}, {"doc_id": 0, "acc": 0}], "two rows for doc_id 0"),
            ([{"doc_id": [1], "acc": 1}], "it must be 0 or 1, or a grade between, for a number or a name"),
            ([{"other": 1}], "neither doc_id"),
            ([[1]], "line 1 is no object but list"),
        ],
    )
    def test_refuses_logs(self, rows: list[Any], message: str, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=message):
            load(write_log(tmp_path / "samples_a.jsonl", rows))

    def test_different_tasks_are_not_compared(self, tmp_path: Path) -> None:
        rows = log_rows(answered((4,), 22))
        other = [{**row, "doc_hash": "other"} for row in rows]
        paths = [write_log(tmp_path / f"samples_{n}.jsonl", part) for n, part in (("a", rows), ("b", other))]
        with pytest.raises(
            DataError, match=r"doc_id 0 is another document in samples_b\.jsonl than in samples_a\.jsonl"
        ):
            load(paths)
        with pytest.raises(DataError, match="describe them apart"):
            load([paths[0], saved(tmp_path / "x.npy", answered((4,)))])
        with pytest.raises(RequestError, match="sample logs have the axes CQ"):
            load(paths[0], axes="SPQ")


def test_one_row_files_are_put_together(tmp_path: Path) -> None:
    correct = answered((3, 12), 23)
    paths = [saved(tmp_path / f"{i}.npy", row) for i, row in enumerate(correct)]
    found = load(paths)
    np.testing.assert_array_equal(found.values, correct)
    assert found.names == ("0.npy", "1.npy", "2.npy")
    with pytest.raises(DataError, match="9 and 12 queries"):
        load([*paths, saved(tmp_path / "x.npy", answered((9,)))])


def test_names_cannot_steer_a_terminal(tmp_path: Path) -> None:
    path = write_log(tmp_path / "samples_a\x1b[31m.jsonl", log_rows(answered((5,), 24)))
    found = describe(load(path))
    assert "\x1b" not in "".join([*found.conclusion(), *found.warnings, found.tables(True)[0].rows[0][0]])


def test_axes_are_checked_where_they_are_described() -> None:
    with pytest.raises(RequestError, match="axes must be SP, SPK, SPQ, SPKQ or CQ, got 'QS'"):
        describe(Tensor(np.ones((2, 2)), "QS"))


def test_columns_that_are_called_by_words_are_not_taken_for_an_axis(tmp_path: Path) -> None:
    answers = np.random.default_rng(3).random((40, 3)) < (0.3, 0.6, 0.9)
    path = tmp_path / "wide.csv"
    np.savetxt(path, answers, fmt="%d", delimiter=",", header="prompt_a,prompt_b,prompt_c", comments="")
    with pytest.raises(
        RequestError, match="has the columns 'prompt_a, prompt_b, prompt_c'; call them query and correct"
    ):
        load(path)
    found = load(path, axes="QC")
    np.testing.assert_array_equal(found.values, answers.T)
    assert "the contexts differ" in " ".join(describe(found).conclusion())


def test_the_folder_gives_its_public_names() -> None:
    for name in external.__all__:
        assert getattr(external, name) is not None
    assert dir(external) == sorted(external.__all__)
    with pytest.raises(AttributeError, match=r"module 'iclperm\.external' has no attribute 'nothing'"):
        _ = external.nothing
