"""The endpoint against servers with real weights: `transformers serve`, and one that gives log-probabilities."""

import json
import shutil
import socket
import time
import urllib.request

import numpy as np
import pytest
from scoring_server import MODEL, greedy, scoring_server
from tolerances import TOLERANCES
from transformers import AutoModelForCausalLM, AutoTokenizer

from iclperm import Engine
from iclperm.demo import data_path, model_path
from iclperm.endpoint import Endpoint, Prompt
from iclperm.endpoint.ledger import Ledger
from iclperm.errors import ConfigError

TOLERANCE = TOLERANCES["loglikelihood per token"]["float32"]
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
LABELS = [" World", " Sports", " Business", " Technology"]


@pytest.fixture(scope="module")
def weights():
    """Model and tokenizer of the demo, as plain transformers has them."""
    return AutoModelForCausalLM.from_pretrained(model_path()).eval(), AutoTokenizer.from_pretrained(model_path())


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    rows = [json.loads(line) for line in (data_path() / "train.jsonl").read_text().splitlines()[:12]]
    demonstrations = "".join(f"Article: {row['text']}\nAnswer: {row['label']}\n\n" for row in rows[:4])
    return [f"{demonstrations}Article: {row['text']}\nAnswer:" for row in rows[4:9]]


@pytest.fixture(scope="module")
def engine(weights) -> Engine:
    return Engine(*weights)


def text_after(weights, prompt: str, max_new_tokens: int) -> str:
    model, tokenizer = weights
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    return tokenizer.decode(greedy(model, ids, max_new_tokens)[0, ids.shape[1] :], skip_special_tokens=True)


def test_log_likelihoods_are_the_engines(weights, engine, prompts, tmp_path):
    requests = [(prompt, label) for prompt in prompts for label in LABELS]
    requests += [(prompts[0], " Technology stocks fell"), (prompts[0], " café ☃"), ("", "Article: of nothing")]
    expected = engine.loglikelihood(requests)
    with scoring_server(*weights) as server, Ledger(tmp_path) as ledger:
        endpoint = Endpoint(server.url, MODEL, api="completions", ledger=ledger)
        assert endpoint.capabilities.prompt_logprobs
        found = endpoint.loglikelihood(requests)
        assert all(body["echo"] for body in server.seen)
        before = len(server.seen)
        assert endpoint.loglikelihood(requests).logprob.tolist() == found.logprob.tolist()
        assert len(server.seen) == before
    assert set(found.state) == {"ok"}
    assert found.num_tokens.tolist() == expected.num_tokens.tolist()
    assert np.abs(found.logprob - expected.logprob).max() <= TOLERANCE * expected.num_tokens.max()
    text = b"".join(path.read_bytes() for path in (tmp_path / "api").iterdir())
    assert len(text) < 3000 * before  # of an echoed prompt its end is kept
    assert prompts[0][:40].encode() not in text


def test_labels_of_a_product_are_the_engines(weights, engine, prompts):
    expected = engine.score([""], prompts, LABELS)[0]
    with scoring_server(*weights) as server:
        endpoint = Endpoint(server.url, MODEL, api="completions")
        (found,) = endpoint.score_groups([prompts], LABELS)
        (first,) = endpoint.score_groups([prompts], [" Technology stocks", " World"], first_token_only=True)
    assert {scored.state for scored in found} == {"ok"}
    assert np.abs(np.array([scored.logprob for scored in found]) - expected).max() <= TOLERANCE
    assert [scored.num_tokens for scored in first] == [(1, 1)] * len(prompts)
    assert np.abs(np.array([scored.logprob for scored in first]) - expected[:, [3, 0]]).max() <= TOLERANCE


def test_labels_that_merge_with_their_context_are_scored_from_where_the_tokens_part(weights, engine, prompts):
    context = prompts[0]
    expected = engine.loglikelihood([(context, " World"), (context, " Wx")])
    with scoring_server(*weights) as server:
        found = Endpoint(server.url, MODEL, api="completions").loglikelihood(
            [(f"{context} W", "orld"), (f"{context} W", "x")]
        )
    assert found.num_tokens.tolist() == expected.num_tokens.tolist() == [1, 2]
    assert np.abs(found.logprob - expected.logprob).max() <= 2 * TOLERANCE


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_first_tokens_are_read_off_the_list_where_prompts_have_no_log_probabilities(api, weights, engine, prompts):
    labels = LABELS
    asked: list[Prompt] = list(prompts)
    if api == "chat":
        asked = [[{"role": "user", "content": prompt}] for prompt in prompts]
        labels = ["Article", "Sports", ":", "of"]  # a chat's replies begin without a space
    expected = engine.score([""], prompts, labels)[0]
    with scoring_server(*weights, echoes=False) as server:
        endpoint = Endpoint(server.url, MODEL, api=api, tokenizer=str(model_path()))
        assert endpoint.capabilities == (False, 20)
        (found,) = endpoint.score_groups([asked], labels)
        before = len(server.seen)
        (more,) = endpoint.score_groups([asked], [*labels, " unheard-of"])
        assert len(server.seen) == before  # one request a prompt, whatever the labels
        with pytest.raises(ConfigError, match="' World' and ' World record' begin with the same token"):
            next(endpoint.score_groups([asked], [" World", " World record"]))
    num_listed = 0
    for scored, further, row in zip(found, more, expected, strict=True):
        assert scored.state == further.state in ("ok", "unparsed")
        if scored.state == "ok":
            assert further.is_bound[-1]
            num_listed += scored.is_bound.count(False)
            for value, is_bound, right in zip(scored.logprob, scored.is_bound, row.tolist(), strict=True):
                assert value >= right if is_bound else value == pytest.approx(right, abs=TOLERANCE)
    assert num_listed >= 5


def test_first_tokens_need_a_tokenizer(weights, prompts):
    with scoring_server(*weights, echoes=False) as server:
        endpoint = Endpoint(server.url, MODEL, api="completions")
        with pytest.raises(ConfigError, match="name its tokenizer"):
            next(endpoint.score_groups([prompts], LABELS))
        assert len(server.seen) <= 3  # what it took to find out


def test_a_server_without_log_probabilities_is_told_so(weights, prompts):
    for api in ("chat", "completions"):
        with scoring_server(*weights, echoes=False, lists=False) as server:
            endpoint = Endpoint(server.url, MODEL, api=api)
            assert endpoint.capabilities == (False, 0)
            with pytest.raises(ConfigError, match="gives no log-likelihoods: use scoring: generate"):
                endpoint.loglikelihood([(prompts[0], " World")])


@pytest.fixture(scope="module")
def transformers_serve(tmp_path_factory):
    """URL and model of a `transformers serve` with the demo's weights and a chat template that adds the BOS token."""
    from transformers.cli.serve import Serve

    folder = tmp_path_factory.mktemp("serve") / "demo"
    shutil.copytree(model_path(), folder)
    template = f"{{{{ bos_token }}}}{CHAT.format('{{ messages[0].content }}')}{{# Jinja cuts a last line break #}}"
    (folder / "chat_template.jinja").write_text(template)
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


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_transformers_serve_says_what_greedy_transformers_says(api, transformers_serve, weights, prompts, tmp_path):
    url, model = transformers_serve
    rendered = [CHAT.format(prompt) if api == "chat" else prompt for prompt in prompts]
    expected = [text_after(weights, text, 8) for text in rendered]
    if api == "chat":
        expected = [text.strip() for text in expected]  # as this server does with what a Qwen says
    with Ledger(tmp_path) as ledger:
        endpoint = Endpoint(url, model, api=api, ledger=ledger)
        replies = endpoint.generate(prompts, max_new_tokens=8)
        assert [reply.text for reply in replies] == expected
        assert {reply.state for reply in replies} == {"ok"}
        lengths = [len(weights[1](text).input_ids) for text in rendered]  # with exactly one BOS
        assert [reply.prompt_tokens for reply in replies] == lengths
        assert endpoint.served_as == f"{model}@main"
        stop = expected[0][-3:]
        cut = endpoint.generate(prompts[:1], max_new_tokens=8, stop=[stop])[0]
        assert (cut.text, cut.finish) == (expected[0][: expected[0].index(stop)], "stop")


def test_transformers_serve_gives_no_log_probabilities_and_is_told_so(transformers_serve):
    url, model = transformers_serve
    with pytest.raises(ConfigError, match="gives no log-likelihoods: use scoring: generate"):
        Endpoint(url, model, api="completions").loglikelihood([("Answer:", " World")])
