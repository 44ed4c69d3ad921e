"""The benchmark of one's own: the prompts of a study, texts that are written, cases from files, figure and sentence."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from test_bench import fake
from tiny import byte_level_tokenizer, make_model, make_task

import iclperm
from iclperm import Study, bench
from iclperm.bench import contenders, measure
from iclperm.bench import machine as machines
from iclperm.bench.cases import CASES, distinct_tokens, fair_sample, fair_scale, find_case
from iclperm.bench.contenders import ORACLE, OURS, ContenderProcess
from iclperm.bench.environments import PeerError
from iclperm.bench.figure import block_plot
from iclperm.bench.machine import busy_processors
from iclperm.bench.measure import BenchOptions
from iclperm.bench.models import MODELS, find_model
from iclperm.bench.rows import Row, read_rows
from iclperm.bench.studies import StudyCase
from iclperm.bench.table import render, sentence, why_not_quoted
from iclperm.cli import main as cli
from iclperm.engine.tokenizer import load_tokenizer
from iclperm.errors import ConfigError, ModelError, RequestError

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    make_model(folder / "model", byte_level_tokenizer())
    make_task(folder)
    return folder


def study_in(world: Path, **changes: object) -> Study:
    given = {"model": str(world / "model"), "task": str(world / "colours.yaml"), "sets": 2, "permutations": 3,
             "shots": [0, 3], "queries": 6}  # fmt: skip
    return Study(**{**given, **changes})


def test_the_prompts_are_those_of_the_run(world, tmp_path):
    study = study_in(world)
    case = StudyCase.of(study, "mine")
    work, planned = case.build(0), iclperm.plan(study)
    assert len(work.cells) == case.num_prompts == case.num_cells
    assert distinct_tokens(work) == case.distinct(0) == planned.tokens_unique
    assert work.num_fed == planned.tokens_naive
    iclperm.run(study, tmp_path / "run")
    tokenizer = load_tokenizer(world / "model")
    run = iclperm.open_run(tmp_path / "run")
    texts = {
        run.prompt(index_set=s, permutation=p, shots=k, query=q).text
        for s in range(2) for p in range(3) for k in (0, 3) for q in range(6)
    }  # fmt: skip
    assert {tokenizer.decode(ids).removeprefix("<s>") for ids in work.prompts()} == texts


def test_a_share_is_of_whole_orderings_then_of_queries_and_is_said(world):
    case = StudyCase.of(study_in(world), "mine")
    half, least = case.scaled(0.5), case.scaled(1 / 36)
    assert (half.num_paths, half.num_queries) == (3, 6)
    assert (least.num_paths, least.num_queries) == (1, 1)
    assert case.what.startswith("all prompts of a study of 2 sets x 3 orders, k=0, 3, of colours")
    share = 100 * half.num_prompts / case.num_cells
    assert half.what.startswith(f"{share:.3g} % of the prompts of a study")
    assert len(half.build(0).cells) == half.num_prompts < case.num_prompts
    assert StudyCase.of(study_in(world, seed=1), "mine").digest != case.digest == half.digest


def test_a_fair_share_is_what_two_cores_do_in_a_while():
    assert fair_scale(1_000, 1_000_000) == 1
    assert fair_scale(100_000, 100_000_000) == 0.1
    assert [fair_sample(parameters, 300) for parameters in (10**6, 25 * 10**6, 2 * 10**9)] == [96, 26, 8]


def test_what_cannot_be_replayed_is_one_line(world):
    endpoint = {"base_url": "http://localhost:1/v1", "model": "far"}
    with pytest.raises(ConfigError, match=r"^mine asks 'far' behind an API, .* give --model a folder"):
        StudyCase.of(study_in(world, model="demo", endpoint=endpoint, scoring="generate"), "mine")
    with pytest.raises(ConfigError, match=r"^mine is a recommend, of several runs; give one of the folders"):
        StudyCase.of(Study(kind="recommend"), "mine")
    with pytest.raises(ConfigError, match=r"^mine gives every query its own demonstrations"):
        StudyCase.of(Study(demonstrations="per query", neighbours="n.npy", permutations=1, sets=1), "mine")
    given = {"quick": True, "whole": False, "threads": 1, "peers": None, "device": "cpu", "seed": 0}
    with pytest.raises(ConfigError, match=r"^--case is 'long', but a study is measured"):
        bench.options(**given, study=study_in(world), name="mine", cases="long")
    written = study_in(world, scoring="generate", max_new_tokens=2)
    options = bench.options(**given, study=written, name="mine", dtypes="bfloat16")
    with pytest.raises(ConfigError, match=r"^mine writes texts, which are compared in float32 alone"):
        measure.run(options, print)
    with pytest.raises(ModelError, match=r"^there is no model folder '/nowhere'"):
        find_model("/nowhere")


def test_a_case_of_a_file_is_what_it_says(tmp_path):
    file = tmp_path / "short.yaml"
    file.write_text(
        "demonstrations: 3\npermutations: 2\nshots: [0, 3]\nqueries: 4\ntokens: [5, 6]\nlabels: [[11], [12, 13]]\n"
    )
    case = find_case(str(file))
    work = case.build(300)
    assert (case.name, len(work.cells), len(work.labels)) == ("short", 2 * 2 * 4, 2)
    assert {query.size for query in work.queries} <= {5, 6}
    file.write_text(file.read_text().replace("queries: 4", "queries: 5"))
    assert find_case(str(file)).digest != case.digest
    for wrong, told in (
        ("shots: [3, 0]", r"shots is \[3, 0\]; give ascending numbers"),
        ("shots: [4]", r"shots is \[4\]; give ascending numbers"),
        ("tokens: [6, 5]", r"tokens is \[6, 5\]"),
        ("labels: [[11], [11]]", "give every label once"),
        ("demos: 1", "has no key 'demos'"),
    ):
        key = wrong.split(":")[0]
        lines = [line for line in file.read_text().splitlines() if not line.startswith(f"{key}:")]
        other = tmp_path / "wrong.yaml"
        other.write_text("\n".join([*lines, wrong]))
        with pytest.raises(ConfigError, match=told):
            find_case(str(other))
    with pytest.raises(ConfigError, match=r"choose among monte_carlo, .*, or give a YAML file"):
        find_case("no_such")


@pytest.fixture(scope="module")
def written(world, tmp_path_factory):
    """A study that writes texts: ours, plain transformers, and a fake that always writes the same token."""
    folder, said = tmp_path_factory.mktemp("written"), []
    wrong = replace(
        fake(folder, "wrong", "return np.full((len(work.cells), 3), 7, np.int32), {'tokens': 1}"), writes=True
    )
    study = study_in(world, scoring="generate", max_new_tokens=3, permutations=2, queries=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(contenders.PEER_CONTENDERS, "wrong", wrong)
        options = BenchOptions(
            study=StudyCase.of(study, "mine"), dtypes=("float32",), peers=("plain", "wrong", "prefix_reuse"),
            repeats=1, threads=1, scale=1.0,
        )  # fmt: skip
        out = folder / "rows.jsonl"
        rows = measure.run(options, said.append, out)
        files = bench.write_beside(rows, out)
    return {row.contender: row for row in rows}, files, said


def test_texts_are_judged_by_plain_transformers(written):
    rows, _, _ = written
    assert rows["iclperm"].difference <= rows["iclperm"].bound == 1e-3
    assert rows["plain"].agrees
    assert rows["plain"].speed_up > 0
    assert "wrong disagrees: largest difference" in rows["wrong"].failure
    assert rows["prefix_reuse"].failure == "it is not asked to write texts"
    ours = rows["iclperm"]
    assert ours.new_tokens == 3
    assert ours.tokens_forwarded == ours.tokens_unique < rows["plain"].tokens_forwarded


def test_table_figure_and_sentence_lie_beside_the_rows(written):
    rows, files, _ = written
    assert [file.name for file in files] == ["rows.md", "rows.png", "rows.svg"]
    table = files[0].read_text()
    told = sentence(list(rows.values()))
    assert "Nothing to quote: one round does not tell how far to trust it; give --repeats 3.\n" in table
    assert "To quote" not in table
    assert told.startswith(f"On {rows['iclperm'].prompts:,} prompts of mine (")
    assert "times as fast as transformers (length-sorted batches)" in told
    assert "every token written is the likeliest" in told
    assert "wrong" not in told
    assert files[1].read_bytes().startswith(b"\x89PNG")
    assert sentence([rows["iclperm"]]) == ""


def rows_of_a_case(*seconds: float) -> list[Row]:
    machine = {"processor": "Fast CPU", "cores": 2}
    return [
        Row("c", "m", "float32", "cpu", 2, 1.0, name, difference=1e-6, bound=1e-4, seconds=[each], ours_seconds=[1.0],
            prompts=10, tokens_naive=100, tokens_unique=50, tokens_forwarded=50, memory_bytes=10**9,
            linear_seconds=[0.5], torch_linear_seconds=[1.0], fastest_product="oneDNN", machine=machine,
            phases={"total": 1.0})
        for name, each in zip(("iclperm", "plain", "vllm"), seconds, strict=True)
    ]  # fmt: skip


def test_the_sentence_has_the_closest_first_and_those_that_are_faster(tmp_path):
    rows = rows_of_a_case(1.0, 4.0, 0.5)
    assert sentence(rows) == (
        "On 10 prompts of c (100 tokens one by one, 50 forwarded) with m in float32, iclperm took 1 s on 2 cores of "
        "Fast CPU: 0.5 times as fast as vLLM (prefix caching) and 4 times as fast as transformers (length-sorted "
        "batches); all log-likelihoods agree to 1e-06 nats."
    )
    files = bench.write_beside([*rows, *(replace(row, dtype="bfloat16") for row in rows)], tmp_path / "two.jsonl")
    names = {f"two-m-c-{dtype}.{form}" for dtype in ("float32", "bfloat16") for form in ("png", "svg")}
    assert {file.name for file in files} == {"two.md", *names}
    assert block_plot([replace(row, difference=1.0) for row in rows]) is None  # nobody agrees


def test_a_sentence_is_made_of_rounds_that_agree_alone():
    """A median of disturbed rounds said 46 times where a quiet machine gave 2.8."""
    rows = rows_of_a_case(1.0, 120.0, 1.0)
    ours, plain, _ = [replace(row, seconds=3 * row.seconds, ours_seconds=[1.0] * 3) for row in rows]
    assert why_not_quoted([ours, plain]) == ""
    assert f"To quote: {sentence([ours, plain])}" in render([ours, plain])
    assert "120 times as fast as transformers (length-sorted batches); all" in sentence([ours, plain])
    shared = replace(plain, share=0.25)
    assert "480 times as fast as transformers (length-sorted batches) (scaled from 25.0% of its work)" in sentence(
        [ours, shared]
    )
    wide = replace(plain, seconds=[120.0, 120.0, 169.0])
    assert why_not_quoted([ours, wide]).startswith(
        "rounds of the same work differ (plain by 1.41 x; 1.3 x may); measure"
    )
    assert "To quote" not in render([ours, wide])
    assert "(plain by 1.31 x; 1.3 x may)" in why_not_quoted([ours, replace(plain, seconds=[100.0, 130.1])])
    slow = replace(plain, ours_seconds=[1.0, 1.5, 1.0])  # of the group that this peer ran in
    busy = replace(slow, others_busy=[0.1, 1.94, 0.0])
    assert "(iclperm by 1.5 x; 1.3 x may), and other programs kept 1.9 processors busy; measure" in why_not_quoted(
        [ours, busy]
    )
    assert sentence([ours, replace(busy, ours_seconds=[1.0] * 3)]).endswith(
        "; all log-likelihoods agree to 1e-06 nats, and other programs kept 1.9 processors busy."
    )
    assert why_not_quoted([ours, replace(plain, seconds=[120.0])]).startswith("one round does not tell")
    one = [replace(row, threads=1) for row in (ours, plain)]
    assert "on 1 core of Fast CPU" in sentence(one)


def test_a_sentence_says_no_more_than_was_measured():
    rows = rows_of_a_case(1.0, 4.0, 2.0)
    crowded = [replace(row, threads=99, difference=3.01e-6, prompts=10, all_prompts=1_200) for row in rows]
    told = sentence(crowded)
    assert told.startswith("On 10 of the 1,200 prompts of c (")
    assert "iclperm took 1 s on 2 cores of Fast CPU with 99 threads: " in told
    assert told.endswith("; all log-likelihoods agree to 4e-06 nats.")
    assert sentence([replace(row, all_prompts=10) for row in rows]) == sentence(rows)


def test_what_is_given_is_not_what_quick_chooses():
    given = {"whole": False, "threads": 1, "peers": None, "device": "cpu", "seed": 0}
    assert [(found.repeats, found.scale) for found in (
        bench.options(quick=False, **given), bench.options(quick=True, **given),
        bench.options(quick=True, **given, scale=0.5), bench.options(quick=True, **given, repeats=2, scale=None),
    )] == [(3, None), (1, 0.05), (1, 0.5), (2, 0.05)]  # fmt: skip
    for scale in (0.0, -1.0, 2.0, float("nan")):
        with pytest.raises(RequestError, match=rf"^scale is {scale}; give a share of the work, more than 0"):
            bench.options(quick=True, **given, scale=scale)


@pytest.mark.parametrize(
    ("cpuinfo", "told"),
    [
        (
            "cpu family\t: 26\nmodel\t\t: 2\nmodel name\t: EPYC\nflags\t: avx2\n\ncpu family\t: 6\n",
            "A (family 26, model 2)",
        ),
        ("processor\t: 0\nBogoMIPS\t: 50.00\nCPU part\t: 0xd0c\n", "A"),
        ("cpu family\t: SH4\nmodel\t: 3\n", "A"),
        ("", "A"),
    ],
    ids=["x86", "arm", "words", "nothing"],
)
def test_a_processor_is_told_with_its_generation(cpuinfo, told):
    facts = machines._told(cpuinfo)
    assert machines._with_generation("A", facts) == told
    assert facts.get("flags", "avx2") == "avx2"


def test_processors_that_work_are_counted():
    if not Path("/proc/stat").exists():
        assert busy_processors() == []
        return
    worker = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.3)
        (busy,) = busy_processors(1.0)
    finally:
        worker.kill()
        worker.wait()
    assert 0.3 < busy <= os.cpu_count() + 0.1


def test_the_oracle_sees_a_text_that_is_not_the_likeliest(world, tmp_path):
    work = replace(CASES["monte_carlo"].scaled(1 / 256).build(200), new_tokens=2)
    work = replace(work, cells=work.cells[:2])
    model = MODELS["demo"].folder()
    with ContenderProcess(OURS, tmp_path / "ours.log", 1) as ours:
        ours.load(model, "float32", 1)
        _, texts = ours.score(work.save(tmp_path / "work.npz"), tmp_path / "texts.npy")
    with ContenderProcess(ORACLE, tmp_path / "oracle.log", 1) as oracle:
        oracle.load(model, "float32", 1)
        right = oracle.judge(tmp_path / "work.npz", tmp_path / "texts.npy")
        texts[1, 1] += 1
        np.save(tmp_path / "texts.npy", texts)
        assert right <= 1e-3 < oracle.judge(tmp_path / "work.npz", tmp_path / "texts.npy")


def test_a_run_s_folder_is_measured_by_the_command(world, tmp_path, monkeypatch, capsys):
    iclperm.run(study_in(world), tmp_path / "run")
    for name in ("OURS", "ORACLE"):
        monkeypatch.setattr(measure, name, fake(tmp_path, {"OURS": "iclperm", "ORACLE": "oracle"}[name]))
    out = tmp_path / "own.jsonl"
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", str(tmp_path / "run"), "--peer", "prefix_reuse", "--repeats", "1", "--threads", "1", "--out",
                  str(out), "--model", str(world / "model")])  # fmt: skip
    assert ended.value.code == 0
    shown, told = capsys.readouterr()
    assert "## run on model in float32" in shown
    assert f"wrote {out}" in told
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {(row["case"], row["prompts"]) for row in rows if not row["failure"]} == {("run", 2 * 3 * 2 * 6 - 5 * 6)}


def test_another_model_without_the_study_s_adapter_is_said(world, tmp_path, monkeypatch, capsys):
    (file := tmp_path / "own.yaml").write_text(study_in(world, adapter="trained").to_yaml())
    monkeypatch.setattr(bench, "run", lambda *_: [])
    for more, said in (
        (["--model", str(world / "model")], "without the study's adapter (trained)"),
        ([], "has an adap"),
    ):
        with pytest.raises(SystemExit):
            cli.main(["bench", str(file), "--peer", "prefix_reuse", "--json", *more])
        assert said in capsys.readouterr().err


def test_the_yardstick_is_the_fastest_product_known():
    assert [row.times_linear for row in rows_of_a_case(1.0, 4.0, 0.5)] == [2.0, 8.0, 1.0]


@pytest.mark.parametrize("length", [1, 14, -2])
def test_a_row_that_was_not_written_to_its_end_is_measured_again(tmp_path, monkeypatch, length):
    monkeypatch.setattr(measure, "OURS", fake(tmp_path, "iclperm"))
    monkeypatch.setattr(measure, "ORACLE", fake(tmp_path, "oracle"))
    options = BenchOptions(models=("demo",), dtypes=("float32",), peers=(), repeats=1, threads=1, scale=0.01)
    file = tmp_path / "rows.jsonl"
    first = Row("other", "demo", "float32", "cpu", 1, 1.0, "iclperm").to_json() + "\n"
    file.write_text(first + first[:length])
    with pytest.warns(UserWarning, match=r"rows\.jsonl: its last row was not written to the end, and is left out"):
        rows = measure.run(options, lambda _: None, file)
    assert [row.case for row in rows] == ["other", "monte_carlo"]
    assert file.read_text().startswith(first)
    assert read_rows(file) == rows


def test_a_file_of_something_else_is_refused_before_a_study_is_read_and_keeps_its_bytes(tmp_path, capsys):
    file = tmp_path / "notes.jsonl"
    for content in ("a line without an end", '{"case": 1}\n', '{"case": 1}\n{"case": "m'):
        file.write_text(content)
        with pytest.raises(SystemExit) as ended:
            cli.main(["bench", str(tmp_path / "no-study.yaml"), "--out", str(file)])
        assert ended.value.code == 1
        assert "notes.jsonl: not a row of the benchmark" in capsys.readouterr().err
        assert file.read_text() == content


def test_rounding_of_the_oracle_itself_is_no_disagreement(tmp_path, monkeypatch):
    """A contender beyond its tolerance may be as far off as twice what transformers is from float64 there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measure, "OURS", replace(OURS, tolerance=1e-12))
    monkeypatch.setattr(measure, "_SLACK", 1e3)  # ours differs from transformers by rounding, as that does from float64
    monkeypatch.setattr(measure, "_ROUNDING", 1e15)
    options = BenchOptions(
        cases=("monte_carlo",), models=("demo",), dtypes=("float32",), peers=(), scale=0.02, repeats=1, threads=1
    )
    said: list[str] = []
    (row,) = measure.run(options, said.append)
    assert row.failure is None
    assert 1e-12 < row.difference <= row.bound
    assert 1e-8 < row.bound / 1e3 < 1e-4, "the oracle in float32 beside itself in float64"
    assert any("oracle in float64" in line for line in said)
    monkeypatch.setattr(measure, "_SLACK", 1e-6)
    with pytest.raises(PeerError, match="iclperm disagrees: largest difference"):
        measure.run(options, said.append)


@pytest.mark.parametrize("has_out", [False, True])
def test_an_interrupt_says_what_is_kept(has_out, tmp_path, monkeypatch, capsys) -> None:
    """Rounds that were not finished are not."""

    def interrupted(*_: Any) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "run", interrupted)
    out = tmp_path / "rows.jsonl"
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "--quick", *(["--out", str(out)] if has_out else [])])
    where = f"{out} has 0 rows" if has_out else "nothing is kept without --out"
    assert ended.value.code == 3
    assert capsys.readouterr().err == f"stopped; {where}: rounds that were not finished are run anew\n"
