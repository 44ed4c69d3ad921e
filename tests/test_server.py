"""`iclperm serve`: the answers of the engine in process, over OpenAI's API, also to our own client."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

import uvicorn
from tolerances import TOLERANCES

import iclperm
from iclperm import Engine, demo
from iclperm.cli import main as cli
from iclperm.endpoint import Endpoint
from iclperm.errors import ConfigError, RequestError
from iclperm.integrations import completions
from iclperm.integrations.completions import Completer, CompletionRequest, Waiting
from iclperm.integrations.serve import application, letters
from iclperm.study.study import Study

TOLERANCE = TOLERANCES["loglikelihood per token"]["float32"]
CONTEXT = "Article: Oil prices rose on Monday.\nAnswer: Business\n\nArticle: Shares fell.\nAnswer:"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if messages[0].role == 'bad' %}{{ raise_exception('no') }}{% endif %}Answer:"
)
LABELS = [" World", " Sports", " Business", " Technology"]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.from_pretrained(demo.model_path()) as engine:
        engine.tokenizer.chat_template = TEMPLATE
        yield engine


@pytest.fixture(scope="module")
def url(engine: Engine) -> Iterator[str]:
    yield from serving(engine)


def serving(engine: Engine, key: str | None = None) -> Iterator[str]:
    server = uvicorn.Server(uvicorn.Config(application(engine, "demo", key), log_level="warning", lifespan="off"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        server.should_exit = True
        thread.join()


def post(url: str, path: str = "completions", headers: dict[str, str] | None = None, **body: Any) -> dict[str, Any]:
    """The reply, or the error with its status."""
    about = {"content-type": "application/json", **(headers or {})}
    raw = json.dumps({"model": "demo", "temperature": 0, **body}).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{url}/{path}", raw, about), timeout=60) as reply:
            return json.load(reply)
    except urllib.error.HTTPError as error:
        with error:
            return {**json.load(error)["error"], "status": error.code}


def test_our_client_gets_the_numbers_of_the_engine(url: str, engine: Engine) -> None:
    requests = [(CONTEXT, label) for label in LABELS] + [(CONTEXT, " café ☃"), ("", "Article: of nothing")]
    expected = engine.loglikelihood(requests)
    endpoint = Endpoint(url, "demo", api="completions")
    assert endpoint.capabilities.prompt_logprobs
    found = endpoint.loglikelihood(requests)
    assert set(found.state) == {"ok"}
    assert found.num_tokens.tolist() == expected.num_tokens.tolist()
    assert np.abs(found.logprob - expected.logprob).max() <= TOLERANCE * expected.num_tokens.max()
    texts = engine.generate([CONTEXT, "Answer:"], 4, ["Sp"])
    replies = endpoint.generate([CONTEXT, "Answer:"], 4, ["Sp"])
    assert [reply.text for reply in replies] == texts.text
    assert [reply.completion_tokens for reply in replies] == texts.num_tokens.tolist()


@pytest.mark.parametrize("choices", [{"scoring": "loglikelihood"}, {"scoring": "generate", "max_new_tokens": 2}])
def test_a_study_through_the_server_is_that_of_the_model(url: str, choices: dict[str, Any]) -> None:
    sizes: dict[str, Any] = {"sets": 2, "permutations": 2, "shots": [0, 2], "queries": 3, **choices}
    ours = iclperm.run(Study(**sizes))
    theirs = iclperm.run(Study(endpoint={"base_url": url, "model": "demo", "api": "completions"}, **sizes))
    assert np.array_equal(ours.state, theirs.state)
    assert np.array_equal(ours.correct, theirs.correct)
    if choices["scoring"] == "loglikelihood":
        assert np.abs(ours.label_logprob - theirs.label_logprob).max() < 1e-4


def test_log_probabilities_are_those_of_the_plain_model(url: str, engine: Engine) -> None:
    ids = engine.tokenizer(CONTEXT)["input_ids"]
    with torch.no_grad():
        logprobs = engine.model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    for prompt in (CONTEXT, ids, [ids]):
        reply = post(url, prompt=prompt, max_tokens=0, echo=True, logprobs=2)
        (choice,) = reply["choices"]
        given = choice["logprobs"]
        assert (choice["text"], choice["finish_reason"]) == (CONTEXT, "length")
        assert "".join(given["tokens"]) == engine.tokenizer.decode(ids)
        assert given["token_logprobs"][0] is given["top_logprobs"][0] is None
        expected = logprobs[range(len(ids) - 1), ids[1:]]
        assert given["token_logprobs"][1:] == pytest.approx(expected.tolist(), abs=TOLERANCE)
        best = logprobs[:-1].topk(2).values
        for listed, values in zip(given["top_logprobs"][1:], best.tolist(), strict=True):
            assert [*listed.values()] == pytest.approx(values, abs=TOLERANCE)
        starts = np.cumsum([0, *map(len, given["tokens"][1:])])[:-1]
        assert given["text_offset"] == [0, *starts.tolist()]  # BOS is not in the text
        for token, at in zip(given["tokens"][1:], given["text_offset"][1:], strict=True):
            assert choice["text"][at:].startswith(token)
        assert reply["usage"] == {"prompt_tokens": len(ids), "completion_tokens": 0, "total_tokens": len(ids)}


PART = ["\ufffd"]  # how a token reads that is a part of a letter


@pytest.mark.parametrize(
    ("tokens", "text", "starts"),
    [
        (["<s>", "A", " b"], "A b", [0, 0, 1]),
        (["A", "</s>", " b"], "A b", [0, 1, 1]),
        (
            ["Caf", "\ufffd", "\ufffd", " ", "\ufffd", "\ufffd", "\ufffd", "x"],
            "Caf\xe9 \u2603x",
            [0, 3, 3, 4, 5, 5, 5, 6],
        ),
        (PART * 2, "\xe9", [0, 0]),
        (["a", "b"], "a", [0, 1]),  # a stop cut the rest
        ([], "", []),
    ],
)
def test_offsets_are_letters_of_the_text(tokens: list[str], text: str, starts: list[int]) -> None:
    assert letters(tokens, text) == starts


def test_several_prompts_and_texts_come_in_order(url: str, engine: Engine) -> None:
    asked: dict[str, Any] = {"prompt": [CONTEXT, "Answer:"], "max_tokens": 3, "n": 3, "temperature": 1.5, "logprobs": 0}
    first, again, other = (post(url, **asked, seed=seed)["choices"] for seed in (1, 1, 2))
    expected = engine.generate([CONTEXT, "Answer:"], 3, temperature=1.5, seed=1, num_samples=3)
    assert [choice["text"] for choice in first] == expected.text
    assert [choice["index"] for choice in first] == [*range(6)]
    assert first == again != other
    for choice, logprob in zip(first, post_logprobs(engine, expected, [CONTEXT, "Answer:"]), strict=True):
        assert sum(choice["logprobs"]["token_logprobs"]) == pytest.approx(logprob, abs=3 * TOLERANCE)
        assert choice["logprobs"]["text_offset"][0] == len(CONTEXT if choice["index"] < 3 else "Answer:")
    chances = {post(url, prompt="Answer:", max_tokens=8, temperature=1)["choices"][0]["text"] for _ in range(4)}
    assert len(chances) > 1


def post_logprobs(engine: Engine, texts: Any, prompts: list[str]) -> list[float]:
    """Sums over the tokens of each text, by the engine."""
    rows = [engine.tokenizer(prompt)["input_ids"] for prompt in prompts for _ in range(3)]
    return [float(value) for value in engine.loglikelihood([*zip(rows, texts.token_ids, strict=True)]).logprob]


def test_a_chat_is_the_completion_of_its_template(url: str) -> None:
    messages = [{"role": "user", "content": "Shares fell."}]
    chat = post(url, "chat/completions", messages=messages, max_tokens=3, logprobs=True, top_logprobs=2)
    plain = post(url, prompt="user: Shares fell.\nAnswer:", max_tokens=3, logprobs=2)
    assert chat["choices"][0]["message"] == {"role": "assistant", "content": plain["choices"][0]["text"]}
    content, numbers = chat["choices"][0]["logprobs"]["content"], plain["choices"][0]["logprobs"]
    assert [each["token"] for each in content] == numbers["tokens"]
    assert all(len(each["top_logprobs"]) == 2 for each in content)


def test_a_stream_has_the_texts_of_the_whole(url: str) -> None:
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    asked: dict[str, Any] = {"model": "demo", "temperature": 0.5, "seed": 3, "n": 3, "max_tokens": 4}
    asked["stream_options"] = {"include_usage": True}
    *texts, usage = client.completions.create(prompt=CONTEXT, stream=True, logprobs=1, **asked)
    whole = client.completions.create(prompt=CONTEXT, logprobs=1, **{**asked, "stream_options": None})
    assert [each.choices[0] for each in texts] == whole.choices
    assert (usage.choices, usage.usage) == ([], whole.usage)
    messages: Any = [{"role": "user", "content": "Shares fell."}]
    *chats, _ = client.chat.completions.create(messages=messages, stream=True, **asked)
    assert {each.object for each in chats} == {"chat.completion.chunk"}
    expected = client.chat.completions.create(messages=messages, **{**asked, "stream_options": None})
    assert [each.choices[0].delta.content for each in chats] == [each.message.content for each in expected.choices]


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({}, 400, "prompt"),
        ({"prompt": 3}, 400, "prompt"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": [4, 99999]}, 400, "prompt"),
        ({"prompt": "A " * 3000}, 400, "prompt"),
        ({"prompt": "A", "n": 0}, 400, "n"),
        ({"prompt": "A", "n": "2"}, 400, "n"),
        ({"prompt": "A", "max_tokens": -1}, 400, "max_tokens"),
        ({"prompt": "A", "temperature": 3}, 400, "temperature"),
        ({"prompt": "A", "top_p": 0}, 400, "top_p"),
        ({"prompt": "A", "stop": ""}, 400, "stop"),
        ({"prompt": "A", "stream": 1}, 400, "stream"),
        ({"prompt": "A", "presence_penalty": 1}, 400, "presence_penalty"),
        ({"prompt": "A", "guided": "x"}, 400, "guided"),
        ({"prompt": "A", "logprobs": 99}, 400, "logprobs"),
        ({"prompt": "A", "model": "other"}, 404, "model"),
        ({"path": "chat/completions", "messages": [{"role": "bad", "content": ""}]}, 400, "messages"),
        ({"path": "nowhere"}, 404, None),
        ({"prompt": "A", "headers": {"content-type": "text/plain"}}, 415, None),
    ],
)
def test_a_refusal_names_the_field(url: str, body: dict[str, Any], status: int, field: str | None) -> None:
    error = post(url, **body)
    assert (error["status"], error["param"], error["type"]) == (status, field, "invalid_request_error")
    assert error["message"]
    assert "\n" not in error["message"]


def test_what_changes_nothing_is_taken(url: str) -> None:
    asked = {"stream": False, "presence_penalty": 0, "logit_bias": None, "best_of": 1, "user": "me", "suffix": None}
    assert post(url, prompt="Answer:", max_tokens=1, **asked)["choices"][0]["finish_reason"] == "length"


def test_a_key_is_asked_for(engine: Engine) -> None:
    for place in serving(engine, key="sesame"):
        assert post(place, prompt="A", max_tokens=1)["status"] == 401
        assert post(place, prompt="A", max_tokens=1, headers={"Authorization": "Bearer sesamé"})["status"] == 401
        assert post(place, prompt="A", max_tokens=1, headers={"Authorization": "Bearer sesame"})["model"] == "demo"


def test_requests_that_come_meanwhile_are_one_batch() -> None:
    sizes: list[int] = []
    may_go = threading.Event()

    def answers(batch: Any) -> list[Any]:
        sizes.append(len(batch))
        may_go.wait(10)
        return [RequestError("no") if asked.n == 3 else [asked.n] for asked in batch]

    async def main() -> list[Any]:
        waiting = Waiting(answers)
        asked = [CompletionRequest([np.ones(1, np.int32)], [""], 1, n=number) for number in range(6)]
        first = asyncio.create_task(waiting.answer(asked[0]))
        await asyncio.sleep(0.05)
        others = [asyncio.create_task(waiting.answer(each)) for each in asked[1:]]
        await asyncio.sleep(0)
        others[-1].cancel()  # its client has gone
        await asyncio.sleep(0)
        may_go.set()
        return await asyncio.gather(first, *others, return_exceptions=True)

    found = asyncio.run(main())
    assert sizes == [1, 4]
    assert [each for each in found if isinstance(each, list)] == [[0], [1], [2], [4]]
    assert [type(each) for each in found if not isinstance(each, list)] == [RequestError, asyncio.CancelledError]


def test_what_requests_share_is_forwarded_once_and_stays(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    completer = Completer(engine)
    prompts = completer.encoded([CONTEXT + label for label in LABELS])
    batch = [CompletionRequest([prompt], [""], 1, is_echo=True, top=1) for prompt in prompts]
    completer.answers(batch)
    distinct = len(prompts[0]) - 1 + len(LABELS)
    assert completer.session.totals.tokens_forwarded == distinct
    completer.answers(batch)
    assert completer.session.totals.tokens_forwarded == distinct
    too_long = CompletionRequest([np.tile(prompts[0], 200)], [""], 1)
    refused, fine = completer.answers([too_long, batch[0]])
    assert isinstance(refused, RequestError)
    assert isinstance(fine, list)
    before = completer.session
    monkeypatch.setattr(completions, "_MOST_TOKENS", 10)
    completer.answers(batch[:1])
    assert completer.session is not before


def test_many_clients_get_what_one_gets(url: str) -> None:
    prompts = [f"{CONTEXT}{label}" for label in LABELS] * 3
    with ThreadPoolExecutor(12) as clients:
        found = [*clients.map(lambda prompt: post(url, prompt=prompt, max_tokens=2, logprobs=1)["choices"], prompts)]
    assert found[:4] == found[4:8] == found[8:]


def test_the_command_serves_until_it_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def run(server: Any, sockets: list[socket.socket]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(uvicorn.Server, "run", run)
    with pytest.raises(SystemExit) as done:
        cli.main(["serve", "--port", "0"])
    printed = capsys.readouterr()
    assert (done.value.code, printed.err) == (0, "")
    assert printed.out.startswith("http://127.0.0.1:")
    assert printed.out.endswith("/v1 serves demo; Ctrl-C ends it\n")


def test_keys_and_values_that_stay_have_a_budget(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    session = Engine.session
    monkeypatch.setattr(Engine, "session", lambda self, *budget: given.append(*budget) or session(self, *budget))
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: None)
    with pytest.raises(SystemExit) as done:
        cli.main(["serve", "--port", "0", "--memory-budget", "64MiB"])
    assert (done.value.code, given) == (0, ["64MiB"])
    completer = Completer(engine, "64MiB")
    monkeypatch.setattr(completions, "_MOST_TOKENS", -1)
    completer.answers([CompletionRequest(completer.encoded([CONTEXT]), [""], 1)])
    assert given[1:] == ["64MiB"] * 2, "the next session has it too"


def test_a_budget_that_is_none_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main(["serve", "--port", "0", "--memory-budget", "lots"])
    said = capsys.readouterr().err
    assert done.value.code != 0
    assert "'lots'" in said
    assert said.strip().count("\n") == 0


def test_a_command_that_cannot_serve_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    from iclperm.integrations import serve_model

    monkeypatch.delenv("NO_KEY", raising=False)
    with pytest.raises(ConfigError, match="variable NO_KEY is empty or not there; set it to the key"):
        serve_model("demo", "127.0.0.1", 0, "NO_KEY", print)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} cannot be served: .*; give another --port"):
            serve_model("demo", "127.0.0.1", port, None, print)
