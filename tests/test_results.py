"""Results: one canonical table, however it is read; splits, weights and normalised log-likelihoods."""

import csv
import json
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from tiny import byte_level_tokenizer, make_model, make_rows, make_task, write_rows

import iclperm
from iclperm import Study
from iclperm.errors import ConfigError, RunStopped
from iclperm.prompts.tokenise import Cell
from iclperm.runs import answers, layout, setting, work
from iclperm.runs.finish import open_one
from iclperm.runs.limits import WorkLimits
from iclperm.studies.report import Run
from iclperm.study.states import INVALID

LABELS = {"Red": "Red", "Green": "Green and lush", "Blue": "Blue"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("results")


@pytest.fixture(scope="module")
def run(folder):
    """A run with dev queries, a short class and labels of several lengths."""
    torch.set_num_threads(1)
    model = make_model(folder / "model", byte_level_tokenizer())
    rows = make_rows(2, 30)
    data = {"train": "train.jsonl", "test": "test.jsonl", "dev": 0.3}
    task = make_task(folder, labels=LABELS, data=data)
    write_rows(folder / "test.jsonl", [row for number, row in enumerate(rows) if number < 4 or number % 3])
    choices = {"sets": 2, "permutations": 3, "shots": [0, 3], "queries": 12, "dev_queries": 5}
    return iclperm.run(Study(model=str(model), task=str(task), **choices), folder / "run")


def test_every_split_has_a_tensor_of_its_own(run):
    assert list(run.splits) == ["test", "dev"]
    assert run.splits["dev"].correct.shape == (2, 3, 2, 5)
    assert run.correct.shape == (2, 3, 2, 10)  # two queries of the short class, for four turns
    assert sorted(run.weights.tolist()) == [1] * 8 + [2, 2]
    assert run.report.num_oversampled == 2
    labels = run.gold[run.weights == 2]
    assert len(set(labels.tolist())) == 1
    assert run.splits["dev"].weights.tolist() == [1] * 5


def test_accuracy_counts_an_oversampled_query_as_often_as_it_is_asked(run):
    repeated = np.repeat(run.correct, run.weights, axis=-1)
    assert repeated.shape[-1] == 12
    np.testing.assert_allclose(run.summary().accuracy, repeated[:, :, -1].mean(axis=-1))
    np.testing.assert_allclose(run.curve().mean, repeated.mean(axis=(0, 1, 3)))


def test_the_canonical_table_has_every_cell_in_order(run):
    table = run.to_arrow()
    assert table.num_rows == 2 * 3 * 2 * (10 + 5)
    keys = list(zip(*(table[name].to_pylist() for name in ("set", "permutation", "shots", "query")), strict=True))
    assert table["split"].to_pylist() == ["test"] * 120 + ["dev"] * 60
    assert keys[:120] == sorted(keys[:120])
    assert keys[120:] == sorted(keys[120:])
    for row in table.to_pylist():
        items = run.splits[row["split"]]
        cell = (row["set"], row["permutation"], run.shots.index(row["shots"]), row["query"])
        assert row["correct"] == (row["prediction"] == row["gold"]) == items.correct[cell]
        scores = np.array([row[f"logprob_{label}"] for label in run.labels], dtype=np.float32)
        np.testing.assert_array_equal(scores, items.label_logprob[cell])
        assert row["weight"] == items.weights[row["query"]]
        assert row["gold"] == run.labels[items.gold[row["query"]]]


def test_pandas_sees_the_same(run):
    frame = run.to_pandas()
    test = frame[frame["split"] == "test"]
    mean = test.groupby(["set", "permutation", "shots"])["correct"].mean().to_numpy(dtype=float)
    np.testing.assert_allclose(mean.reshape(2, 3, 2), run.correct.mean(axis=-1))


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_an_export_holds_the_canonical_table(run, tmp_path, ending):
    path = run.export(tmp_path / f"deep/all.{ending}")
    expected = run.to_arrow().to_pylist()
    if ending == "parquet":
        found = pq.read_table(path).to_pylist()
    elif ending == "jsonl":
        found = [json.loads(line) for line in path.read_text().splitlines()]
    else:
        with path.open() as file:
            found = list(csv.DictReader(file))
        for row in found:
            row |= {name: int(row[name]) for name in ("set", "permutation", "shots", "query", "example", "weight")}
            row |= {name: float(row[name]) for name in row if name.startswith("logprob_")}
            row["correct"] = row["correct"] == "true"
    assert len(found) == len(expected)
    for row, other in zip(found, expected, strict=True):
        assert row.keys() == other.keys()
        for name, value in row.items():
            is_close = name.startswith("logprob_") and abs(value - other[name]) < 1e-5
            assert is_close or value == other[name], name
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_an_export_that_fails_leaves_what_was_there(run, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"all\.xlsx has no known ending; give one of \.csv, \.jsonl, \.parquet"):
        run.export(tmp_path / "all.xlsx")
    path = run.export(tmp_path / "all.jsonl")
    before = path.read_bytes()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(answers.json, "dumps", full)
    with pytest.raises(RunStopped, match="no space left on device"):
        run.export(path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["all.jsonl"]


def test_what_has_no_answer_is_null(run):
    items = run.splits["test"]
    state, prediction = items.context_state.copy(), items.context_prediction.copy()
    logprob = items.context_logprob[np.arange(len(state))]
    state[0, 0], prediction[0, 0], logprob[0, 0] = INVALID, -1, np.nan
    changed = {"context_state": state, "context_prediction": prediction, "context_logprob": logprob}
    broken = replace(run, splits={"test": replace(items, **changed)})
    context = items.context_of[0, 0, 0]
    rows = [row for row in broken.to_arrow().to_pylist() if row["state"] == "invalid"]
    assert len(rows) == np.sum(items.context_of == 0) > 0
    assert all(row["prediction"] is None and row["correct"] is None and row["logprob_Red"] is None for row in rows)
    assert broken.digest != run.digest
    assert context >= 0


def test_normalised_labels_are_compared_by_token_or_byte(run, folder):
    words = list(LABELS.values())
    num_bytes = [len(f" {word}".encode()) for word in words]
    for normalize in ("mean", "bytes"):
        other = iclperm.open_run(folder / "run", normalize=normalize)
        scale = other.splits["test"].scale
        if normalize == "bytes":
            assert scale.tolist() == num_bytes
        else:
            assert scale[1] > scale[0] >= 1
        expected = np.argmax(run.label_logprob / scale, axis=-1) == run.gold
        np.testing.assert_array_equal(other.correct, expected)
        np.testing.assert_array_equal(other.label_logprob, run.label_logprob)
        assert other.study.normalize == normalize
        assert other.digest == run.digest
        again = iclperm.run(run.study.model_copy(update={"normalize": normalize}), folder / "run")
        np.testing.assert_array_equal(again.correct, expected)
        assert again.report.num_parts_resumed == again.report.num_parts
    ways = [iclperm.open_run(folder / "run", normalize=way).splits["test"] for way in ("sum", "mean", "bytes")]
    assert len({items.context_prediction.tobytes() for items in ways}) > 1


def test_a_digest_tells_results_apart_and_nothing_else(run, folder):
    assert iclperm.open_run(folder / "run").digest == run.digest
    assert iclperm.run(run.study).digest == run.digest
    assert iclperm.run(run.study.model_copy(update={"seed": 1})).digest != run.digest


def test_a_mean_over_tokens_needs_the_same_tokens_everywhere(folder, monkeypatch):
    study = Study.from_file(folder / "run/study.yaml").model_copy(update={"normalize": "mean", "out": None})
    assert iclperm.run(study).study.normalize == "mean"
    monkeypatch.setattr(work.Work, "_num_odd_labels", lambda *_: 3)
    monkeypatch.setattr(iclperm.Engine, "from_pretrained", None)  # refused before anything is computed
    with pytest.raises(
        ConfigError, match="normalize is 'mean', but in 3 cells the labels have other numbers of tokens"
    ):
        iclperm.run(study)


def test_cells_with_labels_of_their_own_are_counted(run, folder):
    laid_out = layout.lay_out(setting.ResolvedStudy.of(Study.from_file(folder / "run/study.yaml")))
    (growth,) = laid_out.growths
    usual = laid_out.prompts.continuations
    cells = [Cell(0, 0, usual[0], usual), Cell(0, 1, usual[0], [np.append(ids, 1) for ids in usual])]
    assert laid_out._num_odd_labels(replace(growth, general=cells)) == 1
    assert laid_out._num_odd_labels(growth) == 0


def test_what_makes_numbers_doubtful_is_said(run):
    assert any("the labels have" in warning and "favour short" in warning for warning in run.warnings)
    assert not any("every answer" in warning or "counts" in warning for warning in run.warnings)
    items = run.splits["test"]
    weights = np.where(np.arange(len(items.gold)) == 3, 9, 1)
    same = replace(items, context_prediction=np.zeros_like(items.context_prediction), weights=weights)
    doubtful = replace(run, splits={"test": same})
    label = run.labels[items.gold[3]]
    assert f"every answer in every cell is {run.labels[0]!r}" in " ".join(doubtful.warnings)
    assert f"a query of the label {label!r} counts 9 times" in " ".join(doubtful.warnings)
    assert doubtful.report_content()["warnings"] == doubtful.warnings
    assert replace(run, label_tokens=(1, 1, 1)).warnings == []


def test_what_does_not_fit_into_memory_is_held_in_a_file_and_says_the_same(run):
    plain = iclperm.open_run(run.folder)
    mapped = Run.of(open_one(run.folder, limits=WorkLimits(bytes_in_memory=0)))
    items = mapped.splits["test"]
    assert all(
        isinstance(array.base, np.memmap) or isinstance(array, np.memmap)
        for array in (items.context_state, items.context_prediction)
    )
    assert isinstance(items.correct.base, np.memmap)
    assert mapped.digest == plain.digest
    assert mapped.report_content() == plain.report_content()
    sums = iclperm.stats.tensor_sums(items, weights=items.weights)
    np.testing.assert_array_equal(
        sums.accuracy.values, iclperm.stats.accuracy(plain.correct, plain.state, plain.weights).values
    )
