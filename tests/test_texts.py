"""Texts that a run folder keeps: every prompt without data or tokenizer, outside what identifies the run."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from scoring_server import scoring_server
from tiny import byte_level_tokenizer, dummy_prefix_tokenizer, greedy_tokenizer, make_model, make_rows, make_task
from transformers import AutoModelForCausalLM, AutoTokenizer

import iclperm
from iclperm import Study
from iclperm.cli import main as cli
from iclperm.demo import model_path
from iclperm.errors import DamagedItem
from iclperm.runs.layout import lay_out
from iclperm.runs.run_texts import kept_prompts, prompts_again
from iclperm.runs.setting import ResolvedStudy
from iclperm.studies import prompts as viewed
from iclperm.tasks.task import Task, builtin_tasks

SIZES = {"sets": 2, "permutations": 3, "shots": [0, 3], "queries": 6, "seed": 3}
TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
NAME, CHECKSUM = "texts.parquet", "texts.parquet.sha256"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Model folders by what their tokenizers do at the joins."""
    made = {}
    for name, tokenizer in {
        "joins": byte_level_tokenizer(),
        "a space in front": dummy_prefix_tokenizer(),
        "merges across": greedy_tokenizer(),
    }.items():
        tokenizer.chat_template = TEMPLATE
        made[name] = make_model(tmp_path_factory.mktemp("model"), tokenizer)
    return made


@pytest.fixture(scope="module")
def finished(tmp_path_factory, models):
    """A finished run in a folder, with its task beside it; tests that change it take a copy."""
    place = tmp_path_factory.mktemp("finished")
    task = make_task(place)
    iclperm.run(Study(task=str(task), model=str(models["joins"]), **SIZES), place / "run")
    return place


@pytest.fixture
def folder(finished, tmp_path):
    return Path(shutil.copytree(finished / "run", tmp_path / "run"))


CASES = {
    "joins": ("joins", {}, {}),
    "an instruction": ("joins", {}, {"instruction": "Name the colour."}),
    "a space in front": ("a space in front", {}, {}),
    "merges across": ("merges across", {}, {"separator": ""}),
    "every k its own": ("joins", {"resample": "per_k"}, {}),
    "a single message": ("joins", {"chat": "single"}, {}),
    "turns": ("joins", {"chat": "multiturn"}, {"instruction": "Name the colour."}),
}


@pytest.mark.parametrize("case", CASES)
def test_every_prompt_is_put_together_of_what_is_kept(case, tmp_path, models):
    model, choices, changes = CASES[case]
    run = iclperm.run(Study(task=str(make_task(tmp_path, **changes)), model=str(models[model]), **SIZES, **choices))
    again, notes = prompts_again(run)
    kept_run = iclperm.run(run.study, tmp_path / "run")
    prompts = lay_out(ResolvedStudy.of(run.study)).prompts  # the oracle: what is scored
    general = {(cell.context, cell.query): cell.prompt for cell in prompts.general}
    for path in tmp_path.glob("*.jsonl"):
        path.unlink()
    (tmp_path / "colours.yaml").unlink()
    kept = kept_prompts(iclperm.open_run(tmp_path / "run"))
    assert kept is not None
    assert notes == []
    pieces, num_apart = prompts.pieces.texts, 0
    for s, p, (k, shots), q in [
        (s, p, pair, q) for s in range(2) for p in range(3) for pair in enumerate(run.shots) for q in range(6)
    ]:
        context = prompts.context_of[s, p, k]
        joined = np.concatenate([prompts.contexts[context], prompts.queries[q]])
        num_apart += (context, q) in general
        for found in (kept, again):
            tokens = found.tokens(s, p, shots, ("test", q))
            assert tokens.ids.tolist() == general.get((context, q), joined).tolist()
            assert found.tokens(s, p, shots).ids.tolist() == prompts.contexts[context].tolist()
            text = found.text(s, p, shots, ("test", q))
            assert text.endswith(pieces.queries[q])
            assert text.startswith(pieces.opening)
            assert len(tokens.ends) == len(tokens.ids)
            assert tokens.ends[-1] <= len(text)
            assert (np.diff(tokens.ends) >= 0).all()
    assert (num_apart > 0) == (case in ("a space in front", "merges across"))
    assert bool(kept.texts.contexts) == (case == "merges across")
    shown, _ = viewed.viewer_of(iclperm.open_run(tmp_path / "run"), np.arange(3))
    for s, p, shots in [(s, p, shots) for s in range(2) for p in range(3) for shots in run.shots]:
        group = next(group for group in shown["groups"] if shots in group["shots"])
        places = [group["sets"][s][place] for place in group["orders"][p]][:shots]
        said = "".join(shown["demonstrations"][place][0] for place in places)
        assert shown["opening"][0] + said == kept.text(s, p, shots)
    assert bool(shown["own"]) == (case in ("a space in front", "merges across"))
    assert kept_run.prompt(index_set=1, permutation=2, query=4).token_ids == tuple(
        kept.tokens(1, 2, 3, ("test", 4)).ids.tolist()
    )


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_of_an_api_texts_are_kept_without_ids(api, tmp_path):
    weights = AutoModelForCausalLM.from_pretrained(model_path()).eval(), AutoTokenizer.from_pretrained(model_path())
    weights[1].chat_template = TEMPLATE
    sizes = {"sets": 1, "permutations": 2, "shots": 2, "queries": 4}
    with scoring_server(*weights) as server:
        endpoint = {"base_url": server.url, "model": server.model, "api": api}
        scoring = "generate" if api == "chat" else "loglikelihood"
        run = iclperm.run(Study(endpoint=endpoint, scoring=scoring, **sizes), tmp_path / "run")
    table = pq.read_table(tmp_path / "run" / NAME)
    assert [ids for ids in table["ids"].to_pylist() if ids] == []
    kept = kept_prompts(run)
    assert kept.is_of_api
    assert kept.tokens(0, 1, 2, ("test", 3)) is None
    assert iclperm.verify(tmp_path / "run").damage == []
    prompt = run.prompt(index_set=0, permutation=1, query=3)
    assert [message["role"] for message in prompt.messages] == (["user"] if api == "chat" else [])
    whole = prompt.messages[0]["content"] if api == "chat" else prompt.text
    assert all(demonstration in whole for demonstration in prompt.demonstrations)
    shown, _ = viewed.viewer_of(run, np.arange(2))
    assert (shown["has_tokens"], shown["own"], shown["is_likeness"]) == (False, None, api == "chat")
    (tmp_path / "run" / NAME).unlink()
    assert iclperm.open_run(tmp_path / "run").prompt(index_set=0, permutation=1, query=3) == prompt
    iclperm.run(run.study, tmp_path / "run")  # asks nothing: the server is gone
    other = with_rows(table, lambda rows: [{**row, "text": row["text"] and row["text"].upper()} for row in rows])
    damaged(tmp_path / "run", lambda _: other)
    (line,) = iclperm.verify(tmp_path / "run").damage
    assert "its tokens are not those of the run" in line


def test_it_is_small_and_outside_what_identifies_the_run(finished, tmp_path):
    run = iclperm.open_run(finished / "run")
    bare = iclperm.run(run.study, tmp_path / "bare", with_text=False)
    assert not (tmp_path / "bare" / NAME).exists()
    assert not (tmp_path / "bare" / CHECKSUM).exists()
    plans = [json.loads((place / "plan.json").read_text()) for place in (finished / "run", tmp_path / "bare")]
    assert plans[0] == plans[1]
    assert run.digest == bare.digest
    raw = (finished / "run" / NAME).read_bytes()
    assert (finished / "run" / CHECKSUM).read_text() == f"{hashlib.sha256(raw).hexdigest()}  {NAME}\n"
    table = pq.read_table(finished / "run" / NAME)
    texts = [text for text in table["text"].to_pylist() if text]
    assert len(texts) == len(set(texts))  # each distinct piece once
    assert len(raw) < 20_000


def test_a_run_without_them_gets_them_and_one_that_wants_none_loses_them(folder):
    study = iclperm.open_run(folder).study
    before = (folder / NAME).read_bytes()
    for name in (NAME, CHECKSUM):  # a folder of an earlier version; one killed before the checksum was written
        (folder / name).unlink()
        assert kept_prompts(iclperm.open_run(folder)) is None
        assert iclperm.verify(folder).damage == []
        iclperm.run(study, folder)
        assert (folder / NAME).read_bytes() == before
    iclperm.run(study, folder, with_text=False)
    assert not (folder / NAME).exists()
    assert iclperm.open_run(folder).prompt(index_set=0, permutation=0, query=0).text  # of the data


def test_a_run_that_grows_keeps_the_texts_of_all(folder):
    study = iclperm.open_run(folder).study
    iclperm.run(study.model_copy(update={"sets": 3, "queries": 9}), folder, extend=True)
    kept = kept_prompts(iclperm.open_run(folder))
    assert len(kept.texts.queries["test"]) == 9
    assert kept.are_those_of(np.ndindex(3, 3))
    assert iclperm.verify(folder).damage == []


def damaged(folder: Path, change) -> None:
    """Changes the table and its checksum, as anyone can."""
    table = change(pq.read_table(folder / NAME))
    pq.write_table(table, folder / NAME)
    digest = hashlib.sha256((folder / NAME).read_bytes()).hexdigest()
    (folder / CHECKSUM).write_text(f"{digest}  {NAME}\n")


def with_rows(table: pa.Table, change) -> pa.Table:
    return pa.Table.from_pylist(change(table.to_pylist()), schema=table.schema)


def first_of(kind: str, /, **changes):
    """Changes the first row of a kind."""

    def change(rows):
        row = next(row for row in rows if row["kind"] == kind)
        row.update(changes)
        return rows

    return lambda table: with_rows(table, change)


HOSTILE = {
    "another query": first_of("query", text="Thing: something else\nColour:"),
    "a number below 0": first_of("demonstration", ids=[-1], ends=[1]),
    "tokens beyond the text": first_of("query", ids=[1], ends=[10_000]),
    "tokens without places": first_of("query", ids=[1, 2], ends=[1]),
    "tokens that go back": first_of("query", ids=[1, 2], ends=[5, 3]),
    "a kind that there is not": first_of("query", kind="joke"),
    "no opening": lambda table: with_rows(table, lambda rows: [row for row in rows if row["kind"] != "opening"]),
    "queries in disorder": lambda table: with_rows(table, lambda rows: rows[::-1]),
    "a column less": lambda table: table.drop_columns(["ids"]),
    "no notes": lambda table: table.replace_schema_metadata({}),
    "more rows than there can be": lambda table: pa.concat_tables([table] * (1 << 13)),
}


@pytest.mark.parametrize("how", [*HOSTILE, "other bytes", "no Parquet"])
def test_damage_is_named_with_its_remedy_and_blocks_no_number(how, folder, finished):
    digest, study = iclperm.open_run(folder).digest, iclperm.open_run(folder).study
    before = (folder / NAME).read_bytes()
    if how in HOSTILE:
        damaged(folder, HOSTILE[how])
    else:
        raw = before[:-9] if how == "no Parquet" else before[:100] + b"?" + before[101:]
        (folder / NAME).write_bytes(raw)
    run = iclperm.open_run(folder)
    with pytest.raises(DamagedItem, match=r"texts\.parquet is damaged: .*; run the study again, which writes it anew"):
        kept_prompts(run)
    assert run.digest == digest
    found = iclperm.verify(folder)
    assert [line.split(" is damaged")[0] for line in found.damage] == [str(folder / NAME)]
    assert found.digest == digest
    prompt = run.prompt(index_set=0, permutation=1, query=2)
    assert any("texts.parquet is damaged" in note for note in prompt.notes)
    assert prompt.text == iclperm.open_run(finished / "run").prompt(index_set=0, permutation=1, query=2).text
    data, notes = viewed.viewer_of(run, np.arange(3))
    assert data is not None
    assert any("texts.parquet is damaged" in note for note in notes)
    iclperm.run(study, folder)
    assert (folder / NAME).read_bytes() == before
    assert [path.name for path in (folder / "quarantine").iterdir()] == [NAME]
    assert iclperm.verify(folder).damage == []


def test_other_tokens_are_found_by_the_names_of_their_contexts(folder):
    damaged(folder, first_of("demonstration", ids=[5], ends=[1]))
    (line,) = iclperm.verify(folder).damage
    assert "its tokens are not those of the run" in line
    run = iclperm.open_run(folder)
    data, (reason,) = viewed.viewer_of(run, np.arange(3))
    assert data is None
    assert "tokens are not those that were scored" in reason


@pytest.fixture
def call():
    def run(*arguments):
        done = CliRunner().invoke(cli.cli, [str(argument) for argument in arguments], standalone_mode=False)
        if done.exception is not None:
            raise done.exception
        return done

    return run


def test_the_built_in_tasks_whose_data_may_not_be_handed_on_are_restricted():
    assert [name for name in builtin_tasks() if Task.load(name).restricted] == ["nyt_locations", "nyt_topics"]


def test_texts_of_a_restricted_task_are_kept_nowhere_unless_asked_for(tmp_path, models, call):
    task = make_task(tmp_path, restricted=True)
    open_hash, restricted_hash = (
        Task.load(make_task(tmp_path)).wording_hash(),
        Task.load(make_task(tmp_path, restricted=True)).wording_hash(),
    )
    assert open_hash == restricted_hash  # a run stays the same run
    words = make_rows(2, 30)[0]["text"]
    line = "note: the data of colours may not be handed on, so texts are left out; --with-text keeps them"
    flags = [
        "--task",
        task,
        "--model",
        models["joins"],
        "--sets",
        2,
        "--permutations",
        2,
        "--shots",
        3,
        "--queries",
        30,
    ]
    out = tmp_path / "run"
    assert line in call("run", *flags, "--out", out).stderr.splitlines()
    assert not (out / NAME).exists()
    assert line in call("report", out).stderr.splitlines()
    assert words not in (out / "report.html").read_text()
    assert "The data of colours may not be handed on" in (out / "report.html").read_text()
    assert line not in call("report", out, "--with-text").stderr
    assert words in (out / "report.html").read_text()
    assert line not in call("run", *flags, "--out", out, "--with-text").stderr
    assert (out / NAME).exists()
    task.unlink()  # the folder remembers it
    assert line in call("report", out).stderr.splitlines()
    assert words not in (out / "report.html").read_text()
    call("report", out, "--with-text")
    assert words in (out / "report.html").read_text()


def test_a_command_can_leave_texts_out(tmp_path, models, call):
    flags = ["--task", make_task(tmp_path), "--model", models["joins"], "--sets", 1, "--permutations", 2, "--shots", 3]
    done = call("run", *flags, "--queries", 6, "--out", tmp_path / "run", "--without-text")
    assert not (tmp_path / "run" / NAME).exists()
    assert "may not be handed on" not in done.stderr
