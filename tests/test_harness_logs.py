"""Sample logs of a run: as lm-evaluation-harness writes them, and read back with the run's own accuracies."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from tiny import byte_level_tokenizer, make_model, make_task, write_rows

import iclperm
from iclperm.cli import main as cli
from iclperm.errors import ConfigError
from iclperm.external import load
from iclperm.runs import harness_logs
from iclperm.studies.report import Run
from iclperm.study.states import NOT_ASKED
from iclperm.study.study import Study
from iclperm.tasks.task import BUILTIN

SIZES: dict[str, Any] = {"sets": 2, "permutations": 2, "shots": [0, 2, 4], "queries": 8}
STUDIES: dict[str, dict[str, Any]] = {
    "compared": {},
    "calibrated": {"calibration": "contextual"},
    "by_bytes": {"normalize": "bytes"},
    "written": {"scoring": "generate", "max_new_tokens": 2},
    "written_in_part": {"scoring": "generate", "max_new_tokens": 1, "unparsed": "drop"},
    "written_or_wrong": {"scoring": "generate", "max_new_tokens": 1, "unparsed": "wrong"},
    "in_part": {"cells": "random", "queries_per_ordering": 8, "queries": 24, "shots": [2]},
}


def renamed(folder: Path) -> str:
    """The headlines under names of which the model writes some and others not: it still says Business, too."""
    task = yaml.safe_load((BUILTIN / "mini_news.yaml").read_text("utf-8"))
    names = {"World": "World", "Sports": "Sports", "Business": "Economy", "Technology": "Science"}
    for split, path in task["data"].items():
        rows = map(json.loads, (BUILTIN / path).read_text("utf-8").splitlines())
        write_rows(folder / f"{split}.jsonl", [{**row, "label": names[row["label"]]} for row in rows])
    task |= {"labels": [*names.values()], "data": {split: f"{split}.jsonl" for split in task["data"]}}
    (folder / "mini_news.yaml").write_text(yaml.safe_dump(task), "utf-8")
    return str(folder / "mini_news.yaml")


@pytest.fixture(scope="module", params=STUDIES)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    study, folder = Study(**{**SIZES, **STUDIES[request.param]}), tmp_path_factory.mktemp(request.param)
    if study.unparsed == "drop" or request.param == "written_or_wrong":
        study = study.model_copy(update={"task": renamed(folder)})
    found = iclperm.run(study, folder / "run")
    assert isinstance(found, Run)
    return found


def files(folder: Path) -> dict[tuple[int, int, int], list[dict[str, Any]]]:
    found = {}
    for path in sorted(folder.glob("*")):
        named = re.fullmatch(r"samples_mini_news_k(\d+)_set(\d+)_perm(\d+)_\d{4}-\d\d-\d\dT[\d.-]+\.jsonl", path.name)
        assert named is not None
        k, index_set, permutation = map(int, named.groups())
        found[index_set, permutation, k] = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    return found


def test_logs_are_read_back_with_the_same_answers(run: Run, tmp_path: Path) -> None:
    assert run.export(tmp_path / "logs", "lm-eval") == tmp_path / "logs"
    written = files(tmp_path / "logs")
    assert len(written) == sum(1 if not k else 4 for k in run.shots)
    read = load([tmp_path / "logs"])
    for name, answers, state in zip(
        read.names, read.values, np.zeros(read.values.shape) if read.state is None else read.state, strict=True
    ):
        index_set, permutation, k = next(cell for cell in written if "_k{2}_set{0}_perm{1}_".format(*cell) in name)
        place = index_set, permutation, run.shots.index(k)
        is_asked = run.state[place] != NOT_ASKED
        rows = written[index_set, permutation, k]
        assert [row["doc_id"] for row in rows] == run.splits["test"].examples[is_asked].tolist()
        there = (run.state[place] == 0).sum()
        assert (state == 0).sum() == there
        assert answers[state == 0].sum() == run.correct[place][run.state[place] == 0].sum()
    if run.study.unparsed == "drop":
        assert any("no report by class: some rows have no exact_match" in note for note in read.notes)
    elif run.study.cells == "crossed":
        assert read.by_label is not None, read.notes  # every metric follows from what is compared


def test_a_prompt_is_that_of_the_run(run: Run, tmp_path: Path) -> None:
    run.export(tmp_path, "lm-eval")
    k = run.shots[-1]
    rows = files(tmp_path)[1, 0, k]
    query = int(np.flatnonzero(run.state[1, 0, -1] != NOT_ASKED)[0])
    found = run.prompt(index_set=1, permutation=0, shots=k, query=query)
    assert rows[0]["arguments"]["gen_args_0"]["arg_0"] == found.text
    if run.study.scoring != "generate":
        assert [each["arg_1"] for each in rows[0]["arguments"].values()] == list(found.labels)
        logprobs = [float(each[0][0]) for each in rows[0]["resps"]]
        assert logprobs == run.label_logprob[1, 0, -1, query].tolist()


@pytest.mark.filterwarnings("ignore")
def test_a_line_is_what_the_harness_writes_of_that_prompt(tmp_path: Path) -> None:
    """The harness on the same prompts, through its own tracker; whether a label was greedy is all that we lack."""
    pytest.importorskip("lm_eval")
    from lm_eval import simple_evaluate
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_file_datetime, get_file_task_name, get_sample_results_filenames

    import iclperm.integrations.lm_eval  # registers the model

    run = iclperm.run(Study(**SIZES))
    run.export(tmp_path / "ours", "lm-eval")
    ours = files(tmp_path / "ours")[1, 1, 4]
    docs = [row["doc"] for row in ours]
    write_rows(tmp_path / "docs.jsonl", docs)
    prompt = ours[0]["arguments"]["gen_args_0"]["arg_0"]
    task = {
        "task": "mini_news",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "docs.jsonl")}, "cache_dir": str(tmp_path / "cache")},
        "test_split": "test",
        "output_type": "multiple_choice",
        "description": prompt.removesuffix(docs[0]["query"]),
        "doc_to_text": "{{query}}",
        "doc_to_choice": list(run.labels),
        "doc_to_target": f"{{{{ {[*run.labels]}.index(target) }}}}",
        "metric_list": [{"metric": "acc"}],
    }
    (tmp_path / "mini_news.yaml").write_text(yaml.safe_dump(task))
    tracker = EvaluationTracker(output_path=str(tmp_path / "theirs"))
    results = simple_evaluate(
        "iclperm",
        model_args={"pretrained": "demo"},
        tasks=["mini_news"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        evaluation_tracker=tracker,
        bootstrap_iters=0,
    )
    samples = results.pop("samples")
    tracker.save_results_aggregated(results, samples)
    tracker.save_results_samples("mini_news", samples["mini_news"])
    (theirs,) = (tmp_path / "theirs").rglob("samples_*.jsonl")
    for own, line in zip(ours, theirs.read_text("utf-8").splitlines(), strict=True):
        other = json.loads(line)
        assert list(own) == list(other)
        for name in ("resps", "filtered_resps"):
            pairs = [np.array(row.pop(name)).reshape(-1, 2) for row in (own, other)]
            np.testing.assert_allclose(*(pair[:, 0].astype(float) for pair in pairs), rtol=0, atol=1e-4)
        assert {**own, "doc_id": 0} == {**other, "doc_id": 0}  # the harness was given 8 rows of the split
    names = [str(path) for path in (tmp_path / "ours").iterdir()]
    assert get_sample_results_filenames(names) == names
    assert {get_file_task_name(Path(name).name) for name in names} >= {"mini_news_k4_set1_perm1"}
    assert all(re.match(r"\d{4}-\d\d-\d\dT", get_file_datetime(Path(name).name)) for name in names)


@pytest.mark.parametrize("unparsed", ["wrong", "drop"])
def test_a_text_that_says_no_label_has_the_harness_mark(tmp_path: Path, unparsed: str) -> None:
    study = Study(**SIZES, task=renamed(tmp_path), scoring="generate", max_new_tokens=1, unparsed=unparsed)
    run = iclperm.run(study)
    run.export(tmp_path / "logs", "lm-eval")
    table = run.to_arrow().to_pylist()
    is_read = {(row["set"], row["permutation"], row["shots"], row["query"]): row["state"] == "ok" for row in table}
    assert {*is_read.values()} == {True, False}
    for (index_set, permutation, k), rows in files(tmp_path / "logs").items():
        for query, row in enumerate(rows):
            is_there = is_read[index_set, permutation, k, query]
            assert (row["filtered_resps"] == ["[invalid]"]) is not is_there
            assert (row["exact_match"] is None) is (unparsed == "drop" and not is_there)
            assert is_there or not row["exact_match"]
            assert row["arguments"]["gen_args_0"]["arg_1"]["max_gen_toks"] == 1


def test_the_command_writes_a_folder_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = iclperm.run(Study(**SIZES), tmp_path / "run")
    for code, said in ((0, ""), (2, "has sample logs, which would be read together with these; name another")):
        with pytest.raises(SystemExit) as done:
            cli.main(["export", str(run.folder), "--format", "lm-eval", "--out", str(tmp_path / "logs")])
        printed = capsys.readouterr()
        assert (done.value.code, said in printed.err) == (code, True), printed.err
    assert len(files(tmp_path / "logs")) == 9


def test_what_cannot_be_written_is_refused_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, task = make_model(tmp_path / "model", byte_level_tokenizer()), make_task(tmp_path, restricted=True)
    study = Study(**{**SIZES, "shots": [2]}, task=str(task), model=str(model))
    run = iclperm.run(study)
    with pytest.raises(ConfigError, match=r"the data of colours may not be handed on, .*; give --with-text"):
        run.export(tmp_path / "logs", "lm-eval")
    run.export(tmp_path / "logs", "lm-eval", with_text=True)
    assert len([*(tmp_path / "logs").iterdir()]) == 4
    with pytest.raises(ConfigError, match="there is no format 'csv'; give 'table' or 'lm-eval'"):
        run.export(tmp_path / "other", "csv")
    monkeypatch.setattr(harness_logs, "_MOST_FILES", 3)
    with pytest.raises(ConfigError, match=r"has 4 contexts, a file each, and 3 are written; export a \.parquet file"):
        run.export(tmp_path / "other", "lm-eval")


def test_logs_lie_in_a_folder_of_their_own(tmp_path: Path) -> None:
    run = iclperm.run(Study(**{**SIZES, "shots": [2]}), tmp_path / "run")
    with pytest.raises(ConfigError, match="is the folder of a run, which keeps its own files there; name another"):
        run.export(tmp_path / "run", "lm-eval")
    with pytest.raises(
        ConfigError, match=r"logs\.jsonl is a file's name, and several files are written; name a folder"
    ):
        run.export(tmp_path / "logs.jsonl", "lm-eval")
    assert not (tmp_path / "logs.jsonl").exists()
