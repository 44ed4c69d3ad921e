"""The same study through the engine and through an API on the same weights; and what an API may not do to a run."""

import json
import shutil
import socket
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from faulty_server import faulty_server, prompt_of
from scoring_server import MODEL, scoring_server
from tolerances import TOLERANCES
from transformers import AutoModelForCausalLM, AutoTokenizer

import iclperm
from iclperm import Study
from iclperm.cli import main as cli
from iclperm.demo import data_path, model_path
from iclperm.endpoint import Spent
from iclperm.endpoint.ledger import Ledger
from iclperm.errors import ConfigError, RunError, RunStopped
from iclperm.runs import audit
from iclperm.runs.folder import RunFolder
from iclperm.study.states import API_MISSING, OK, OVERLONG

TOLERANCE = TOLERANCES["loglikelihood per token"]["float32"]
SIZES = {"sets": 2, "permutations": 2, "shots": [0, 2], "queries": 4}
SENTINEL = "sentinel-7f3a9c1d5e"
CHAT = (
    "{{ bos_token }}{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def weights():
    return AutoModelForCausalLM.from_pretrained(model_path()).eval(), AutoTokenizer.from_pretrained(model_path())


def behind(server, **choices):
    return {"base_url": server.url, "model": server.model, "api": "completions", **choices}


def test_log_likelihoods_of_a_study_agree(weights, tmp_path):
    through_engine = iclperm.run(Study(**SIZES))
    with scoring_server(*weights) as server:
        study = Study(endpoint=behind(server), **SIZES)
        through_api = iclperm.run(study, tmp_path / "run")
        num_asked = len(server.seen)
        again = iclperm.run(study, tmp_path / "run")
        assert len(server.seen) == num_asked > 0
    np.testing.assert_allclose(through_api.label_logprob, through_engine.label_logprob, atol=TOLERANCE * 4, rtol=0)
    np.testing.assert_array_equal(through_api.correct, through_engine.correct)
    assert again.digest == through_api.digest == audit.verify(tmp_path / "run").digest
    assert through_api.title == f"mini_news, {MODEL}"
    assert (through_api.report.num_listed, through_api.report.num_bounds) == (0, 0)  # whole labels, all of them values
    assert not [warning for warning in through_api.warnings if "API" in warning]
    assert through_api.summary().printed == pytest.approx(through_engine.summary().printed, nan_ok=True)


def test_first_tokens_of_a_study_agree(weights):
    through_engine = iclperm.run(Study(scoring="first_token", **SIZES))
    with scoring_server(*weights) as server:
        through_api = iclperm.run(Study(scoring="first_token", endpoint=behind(server), **SIZES))
    np.testing.assert_allclose(through_api.label_logprob, through_engine.label_logprob, atol=TOLERANCE, rtol=0)


def test_generated_answers_of_a_study_agree(weights, tmp_path):
    choices = {"scoring": "generate", "max_new_tokens": 8, **SIZES}  # of which a label and its end take two
    through_engine = iclperm.run(Study(**choices))
    with scoring_server(*weights) as server:
        through_api = iclperm.run(Study(endpoint=behind(server), **choices), tmp_path / "run")
    columns = [
        "set",
        "permutation",
        "shots",
        "query",
        "gold",
        "prediction",
        "correct",
        "state",
        "text",
        "rule",
        "finish",
    ]
    assert through_api.to_arrow().select(columns).equals(through_engine.to_arrow().select(columns))
    assert set(through_api.to_arrow()["finish"].to_pylist()) == {"stop"}
    assert through_api.correct.any()


@pytest.fixture(scope="module")
def transformers_serve(tmp_path_factory):
    """The URL and the folder of a real server: the demo's weights with a chat template."""
    from transformers.cli.serve import Serve

    folder = tmp_path_factory.mktemp("serve") / "demo"
    shutil.copytree(model_path(), folder)
    (folder / "chat_template.jinja").write_text(CHAT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve = Serve(force_model=str(folder), host="127.0.0.1", port=port, device="cpu", non_blocking=True)
    for _ in range(600):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
            break
        except OSError:
            time.sleep(0.05)
    yield f"http://127.0.0.1:{port}/v1", str(folder)
    serve.kill_server()


@pytest.mark.parametrize("chat", ["single", "multiturn"])
def test_chats_of_a_study_agree_with_a_real_server(chat, transformers_serve):
    url, folder = transformers_serve
    choices = {"scoring": "generate", "max_new_tokens": 2, "chat": chat, **SIZES}
    through_engine = iclperm.run(Study(model=folder, **choices))
    through_api = iclperm.run(Study(endpoint={"base_url": url, "model": folder}, **choices))
    columns = ["set", "permutation", "shots", "query", "prediction", "correct", "state"]
    ours, theirs = through_engine.to_arrow(), through_api.to_arrow()
    assert theirs.select(columns).equals(ours.select(columns))
    assert [text.strip() for text in theirs["text"].to_pylist()] == [text.strip() for text in ours["text"].to_pylist()]


def test_labels_named_in_a_sentence_are_counted_by_the_rule_that_read_them(tmp_path, monkeypatch):
    replies = [" World", " The category is World.", " World or Sports, hard to say.", " No idea."]
    queries = {}
    monkeypatch.setattr("faulty_server.answer_to", lambda text: replies[queries.setdefault(text, len(queries)) % 4])
    sizes = {"sets": 1, "permutations": 2, "shots": 2, "queries": 4, "scoring": "generate", "max_new_tokens": 9}
    with faulty_server() as server:
        study = Study(endpoint={**behind(server), "api": "chat", "concurrency": 1}, unparsed="wrong", **sizes)
        run = iclperm.run(study, tmp_path / "run")
    assert len(queries) == 8
    rows = run.to_arrow().to_pylist()
    read_as = {row["text"]: (row["state"], row["prediction"], row["rule"]) for row in rows}
    assert read_as == {
        " World": ("ok", "World", "first line"),
        " The category is World.": ("ok", "World", "one label named"),
        " World or Sports, hard to say.": ("unparsed", None, "several labels named"),
        " No idea.": ("unparsed", None, None),
    }
    shares = {use["rule"]: use["share"] for use in run.report_content()["generation"]["rules"]}
    assert shares == {"first line": 0.25, "one label named": 0.25, "several labels named": 0.25}
    assert run.generation.by_shots[-1].unparsed == 0.5
    (table,) = (table for table in run.generation.tables(full=False) if table.title == "How answers were read")
    assert {row[0]: row[1] for row in table.rows} == dict.fromkeys(shares, "25.0%")


def test_a_run_is_continued_where_replies_are_missing_and_pays_for_nothing_twice(tmp_path):
    faults = ["ok"] * 5 + ["401"] + ["ok"] * 100
    endpoint = {"api": "chat", "concurrency": 1}
    choices = {"scoring": "generate", "max_new_tokens": 3, **SIZES}
    with faulty_server(faults) as server:
        study = Study(endpoint={**behind(server), **endpoint}, **choices)
        with pytest.raises(RunStopped, match="run the same command"):
            iclperm.run(study, tmp_path / "run")
        assert 0 < server.paid.total() <= 5
        run = iclperm.run(study, tmp_path / "run")
        assert set(server.paid.values()) == {1}
        assert run.report.num_parts == 1
        assert (run.splits["test"].generated.state != API_MISSING).all()
        planned = iclperm.plan(study)
    assert planned.bill.spent.requests == planned.num_prompts == server.paid.total()
    assert run.report.num_requests == planned.num_prompts  # of both sessions
    assert (run.report.num_prompt_tokens, run.report.num_cached_tokens) > (0, 0)
    assert iclperm.open_run(tmp_path / "run").report.num_reply_tokens == run.report.num_reply_tokens > 0
    assert planned.estimate is None


def test_a_refusal_is_missing_and_never_wrong(tmp_path):
    with faulty_server(["refusal"]) as server:
        study = Study(
            endpoint={**behind(server), "api": "chat", "concurrency": 1}, scoring="generate", max_new_tokens=3, **SIZES
        )
        run = iclperm.run(study, tmp_path / "run")
    state = run.splits["test"].generated.state
    assert np.count_nonzero(state == API_MISSING) == 1
    assert np.count_nonzero(run.splits["test"].context_state == API_MISSING) == 1
    assert run.generation.by_shots[0].refused + run.generation.by_shots[1].refused > 0


def test_a_budget_stops_a_run_resumably(tmp_path):
    with faulty_server() as server:
        tight = behind(server, api="chat", concurrency=1, max_requests=4)
        choices = {"scoring": "generate", "max_new_tokens": 3, **SIZES}
        with pytest.raises(RunStopped, match="max_requests"):
            iclperm.run(Study(endpoint=tight, **choices), tmp_path / "run")
        assert server.paid.total() == 4
        wider = Study(endpoint={**tight, "max_requests": 1000}, **choices)
        run = iclperm.run(wider, tmp_path / "run")
        assert set(server.paid.values()) == {1}
    assert (run.splits["test"].generated.state != API_MISSING).all()


def multi(folder):
    """A task file over the demo's articles: a label of two tokens, and one whose first token is never likely."""
    data = {split: str(data_path() / f"{split}.jsonl") for split in ("train", "dev", "test")}
    labels = {"World": "World", "Sports": "Sports games", "Business": "Business", "Technology": "Zx"}
    content = {
        "name": "multi",
        "data": data,
        "fields": {"text": "text"},
        "labels": labels,
        "demonstration": "Article: {{ text }}\nAnswer: {{ label }}",
        "query": "Article: {{ text }}\nAnswer:",
        "shots": 4,
    }
    (folder / "multi.yaml").write_text(json.dumps(content))
    return str(folder / "multi.yaml")


def test_first_tokens_that_an_api_lists_are_the_engines_and_bounds_are_no_values(weights, tmp_path):
    choices = {"task": multi(tmp_path), "scoring": "first_token", **SIZES, "shots": 2, "queries": 8}
    through_engine = iclperm.run(Study(**choices))
    with scoring_server(*weights, echoes=False) as server:
        with pytest.raises(ConfigError, match="name its tokenizer"):
            iclperm.run(Study(endpoint=behind(server), **choices), tmp_path / "none")
        assert len(server.seen) <= 3
        endpoint = behind(server, tokenizer=str(model_path()))
        run = iclperm.run(Study(endpoint=endpoint, **choices), tmp_path / "run")
        num_asked = len(server.seen)
        with pytest.raises(RunError, match="tokenizer"):
            iclperm.run(Study(endpoint={**endpoint, "tokenizer": "another"}, **choices), tmp_path / "run")
        assert len(server.seen) == num_asked
        with pytest.raises(ConfigError, match="calibration needs all"):
            iclperm.run(Study(endpoint=endpoint, calibration="contextual", **choices))
        with pytest.raises(ConfigError, match="lists first tokens only"):
            iclperm.run(Study(endpoint=endpoint, normalize="bytes", **{**choices, "scoring": "loglikelihood"}))
    is_ok = run.state == OK
    np.testing.assert_array_equal(run.correct[is_ok], through_engine.correct[is_ok])
    assert run.correct[..., run.gold == 1].any()  # a label of two tokens is found
    assert 0 < run.report.num_bounds < run.report.num_listed
    assert run.report.num_listed == is_ok.sum() * 4
    for opened in (run, iclperm.open_run(tmp_path / "run")):
        share = f"{run.report.num_bounds / run.report.num_listed:.1%} of the log-likelihoods of labels are upper bounds"
        assert [warning for warning in opened.warnings if warning.startswith(share)]
        assert not opened.splits["test"].has_scores
        assert opened.summary().calibration is None
        assert opened.summary().near_ties is None
    with pytest.raises(ConfigError, match="lists first tokens only"):
        iclperm.open_run(tmp_path / "run", normalize="bytes")


def test_a_prompt_that_an_api_finds_too_long_stops_the_run_unless_it_is_dropped(tmp_path):
    def long(body):
        is_long = len(server.seen) % 5 == 0
        return '400 {"message": "too many", "code": "context_length_exceeded"}' if is_long else "ok"

    with faulty_server([long] * 1000) as server:
        choices = {"scoring": "generate", "max_new_tokens": 3, **SIZES}
        choices["endpoint"] = behind(server, api="chat", concurrency=1)
        with pytest.raises(RunStopped, match=r"prompts are too long for faulty-1 \(too many\); start another run"):
            iclperm.run(Study(**choices), tmp_path / "error")
        assert not list((tmp_path / "error/items").iterdir())
        run = iclperm.run(Study(on_overlong="drop", **choices), tmp_path / "drop")
    assert np.count_nonzero(run.splits["test"].generated.state == OVERLONG) > 0


def test_a_model_that_takes_no_temperature_is_said_to_draw(tmp_path):
    def hot(body):
        return '400 {"message": "\'temperature\' is not supported"}' if "temperature" in body else "ok"

    choices = {"scoring": "generate", "max_new_tokens": 3, **SIZES}

    def about_draws(run):
        return [warning for warning in run.warnings if "answers are draws" in warning]

    with faulty_server([hot] * 6 + ["401"] + ["ok"] * 100) as server:
        study = Study(endpoint=behind(server, api="chat", concurrency=1), **choices)
        with pytest.raises(RunStopped, match="401"):
            iclperm.run(study, tmp_path / "run")
        assert "temperature" in server.seen[0]
        run = iclperm.run(study, tmp_path / "run")  # learnt by the session before
        assert not [body for body in server.seen[1:] if "temperature" in body]
        (warning,) = about_draws(run)
        assert "set the endpoint's draws" in warning
        assert run.report.num_drawn == server.paid.total()
        assert warning in iclperm.open_run(tmp_path / "run").report_content()["warnings"]
        greedy = iclperm.run(Study(endpoint=behind(server, api="chat"), **choices))
        drawn = iclperm.run(Study(endpoint=behind(server, api="chat", draws=2, temperature=None), **choices))
    assert not about_draws(greedy)
    assert not about_draws(drawn)


def test_a_process_counts_what_it_spent_itself(tmp_path):
    def another(count):
        if count == 3:
            with Ledger(tmp_path / "run") as ledger:
                ledger.append("another's", model=server.model, spent=Spent(1, 10**9), reply=None)

    with faulty_server() as server:
        server.after_reply = another
        endpoint = behind(server, api="chat", concurrency=1)
        run = iclperm.run(Study(endpoint=endpoint, scoring="generate", max_new_tokens=3, **SIZES), tmp_path / "run")
        assert run.report.tokens_forwarded == sum(len(prompt) + 2 for prompt in server.paid)
    with Ledger(tmp_path / "run") as ledger:
        assert ledger.spent.prompt_tokens > 10**9


def test_a_damaged_reply_is_told_and_paid_for_again(tmp_path):
    choices = {"scoring": "generate", "max_new_tokens": 3, **SIZES}
    with faulty_server(["ok"] * 5 + ["401"] + ["ok"] * 100) as server:
        study = Study(endpoint=behind(server, api="chat", concurrency=1), **choices)
        with pytest.raises(RunStopped):
            iclperm.run(study, tmp_path / "run")
        (session,) = (tmp_path / "run/api").glob("*.jsonl")
        session.write_bytes(session.read_bytes().replace(b"answer ", b"reply  ", 1))
        (told,) = audit.verify(tmp_path / "run").damage
        assert told.startswith(f"{session} is damaged in line 2")  # the first says that it is sent
        run = iclperm.run(study, tmp_path / "run")
        assert sorted(server.paid.values())[-2:] == [1, 2]
        with Ledger(tmp_path / "run") as ledger:
            assert ledger.spent.requests == server.paid.total()
    assert run.report.num_damaged_replies == 1
    for opened in (run, iclperm.open_run(tmp_path / "run")):
        assert [warning for warning in opened.warnings if "1 kept replies of the API are damaged" in warning]
    found = audit.verify(tmp_path / "run")
    assert (len(found.damage), found.digest) == (1, run.digest)


def test_what_checks_answers_is_recorded(tmp_path):
    pytest.importorskip("math_verify")
    data = Path(__file__).parent / "fixtures/math"
    with faulty_server() as server:
        endpoint = behind(server, api="chat")
        study = Study(task="math", data=str(data), endpoint=endpoint, sets=1, permutations=1, shots=1, queries=2)
        iclperm.run(study, tmp_path / "math")
        iclperm.run(Study(endpoint=endpoint, scoring="generate", **SIZES), tmp_path / "words")
    checking = {"math-verify", "sympy", "latex2sympy2-extended"}
    (record,) = RunFolder.open(tmp_path / "math").sessions()
    assert all(record["versions"][name] for name in checking)
    (record,) = RunFolder.open(tmp_path / "words").sessions()
    assert not checking & set(record["versions"])


def test_draws_are_a_variance_component(tmp_path):
    with faulty_server() as server:
        endpoint = behind(server, api="chat", draws=3, temperature=None)
        study = Study(endpoint=endpoint, scoring="generate", max_new_tokens=3, **SIZES)
        run = iclperm.run(study, tmp_path / "run")
        assert set(server.paid.values()) == {3}
    generated = run.splits["test"].generated
    assert (generated.num_draws, generated.num_right.max()) == (3, 0)
    assert run.generation.by_shots[-1].draw_variance == 0
    rows = iclperm.open_run(tmp_path / "run").to_arrow()
    assert rows.num_rows == 2 * 2 * 2 * 4
    assert "draw" in json.dumps(run.report_content())


def test_the_key_reaches_no_file_of_a_run(tmp_path, monkeypatch, capfd, caplog):
    monkeypatch.setenv("ICLPERM_TEST_KEY", SENTINEL)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with faulty_server(["401", "ok"]) as server:
        choices = {"scoring": "generate", "max_new_tokens": 3, **SIZES}
        study = Study(endpoint=behind(server, api="chat", api_key_env="ICLPERM_TEST_KEY"), **choices)
        send_keys = {"ICLPERM_TEST_KEY": str(study.endpoint.address)}
        with pytest.raises(RunStopped) as raised:
            iclperm.run(study, tmp_path / "run", send_keys=send_keys)
        iclperm.run(study, tmp_path / "run", send_keys=send_keys).write_report()
        assert any(SENTINEL in str(headers) for headers in server.headers)
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert any(path.parent.name == "api" for path in files)
    assert not any(SENTINEL.encode() in path.read_bytes() for path in files)
    told = str(raised.value) + "".join(capfd.readouterr()) + caplog.text
    assert SENTINEL not in told


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"chat": "none", "endpoint": {"api": "chat"}}, "the endpoint's api is 'chat'"),
        ({"chat": "single", "endpoint": {"api": "completions"}}, "set its api to chat"),
        ({"dtype": "bfloat16", "endpoint": {}}, "'dtype' is for a model on this machine"),
        ({"endpoint": {"draws": 2}}, "draws are 2"),
        ({"normalize": "mean", "endpoint": {"api": "completions"}}, "an API's tokens are not known"),
        ({"normalize": "bytes", "scoring": "first_token", "endpoint": {"api": "completions"}}, "first tokens"),
        ({"endpoint": {"api_key_env": "sk-abc"}}, "never the key itself"),
    ],
)
def test_choices_that_do_not_fit_an_endpoint_are_refused(choices, words):
    endpoint = {"base_url": "http://127.0.0.1:9/v1", "model": "m", **choices["endpoint"]}
    with pytest.raises(ConfigError, match=words):
        iclperm.plan(Study(**{**SIZES, **choices, "endpoint": endpoint}))


def test_the_model_of_an_endpoint_may_be_named_as_any_model():
    study = Study(model="gpt-5-nano", endpoint={"base_url": "https://api.example.com/v1"})
    assert (study.model, study.model_name) == ("demo", "gpt-5-nano")
    assert Study(**study.model_dump()) == study


def test_states_of_a_finished_run_are_ok(weights):
    with scoring_server(*weights) as server:
        run = iclperm.run(Study(endpoint=behind(server), sets=1, permutations=1, shots=1, queries=2))
    assert (run.state == OK).all()


TRYING = """
name: letters
data: {train: train.jsonl, test: test.jsonl}
fields: {text: text, letter: letter}
answer: {field: letter, check: exact, rules: [{name: tries, pattern: "^(a+)+$"}, {name: word, pattern: "answer"}]}
demonstration: "{{ text }} {{ letter }}"
query: "{{ text }}"
max_new_tokens: 5
shots: 2
"""


def test_a_text_whose_reading_is_given_up_is_counted_once_a_prompt_in_every_draw(tmp_path, capfd):
    """Two permutations share the prompt without demonstrations, whose two replies make a rule try without end."""
    rows = [{"text": f"word {number}", "letter": "abc"[number % 3]} for number in range(12)]
    for split, part in (("train", rows[:6]), ("test", rows[6:])):
        (tmp_path / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in part))
    (tmp_path / "task.yaml").write_text(TRYING)
    texts, slow = {row["text"] for row in rows}, []

    def reply(body):
        prompt = prompt_of(body)
        if prompt in slow or (not slow and prompt in texts):
            slow[:] = [prompt]
            return f"text {'a' * 40}!"
        return "ok"

    with faulty_server([reply] * 100) as server:
        study = Study(
            task=str(tmp_path / "task.yaml"), sets=1, permutations=2, shots=[0, 2], queries=3,
            endpoint={"base_url": server.url, "model": server.model, "draws": 2, "temperature": 0.5},
        )  # fmt: skip
        run = iclperm.run(study, tmp_path / "run")
        assert sum(prompt_of(body) == slow[0] for body in server.seen) == 2
    assert run.generation.num_given_up == run.generation.to_dict()["num_given_up"] == 2
    assert (run.to_arrow()["rule"].to_pylist().count("timeout"), len(slow)) == (2, 1)
    for command in ("report", "run"):
        with pytest.raises(SystemExit):
            cli.main([command, str(tmp_path / "run")])
        assert "the reading of 2 texts took too long" in " ".join(capfd.readouterr().out.split())
