"""What researchers read off: tokens, distributions, hidden states, whole texts, texts by chance, rows for hooks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from zoo import VOCAB, ZOO

from iclperm.demo import model_path
from iclperm.engine import Engine, PackRows
from iclperm.engine.sampling import Sampling
from iclperm.errors import ModelError, RequestError
from iclperm.reference import scoring
from iclperm.reference.sampling import keyed_chances, sampled_ids, walk

NAMES = ["llama", "gemma2", "gpt2", "qwen2-moe", "phi3"]
CHANCE: dict[str, Any] = {"temperature": 1.3, "top_p": 0.9, "top_k": 20, "seed": 3}


def ids(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, count).tolist()


CONTEXTS = [ids(1, 5), ids(1, 5) + ids(2, 4), ids(3, 9), ids(4, 14)]


@pytest.fixture(scope="module", params=NAMES)
def engine(request: pytest.FixtureRequest) -> Engine:
    return Engine(ZOO[request.param].build())


@pytest.fixture(scope="module")
def bundled() -> Engine:
    return Engine.from_pretrained(model_path())


def test_single_tokens_are_those_of_the_sum(engine: Engine) -> None:
    requests = [(context, ids(9, 1 + n)) for n, context in enumerate(CONTEXTS)]
    scores = engine.loglikelihood(requests)
    plain = [
        [scoring.next_token_logprobs(engine.model, [*context, *more[:n]])[token] for n, token in enumerate(more)]
        for context, more in requests
    ]
    with engine.session() as session:
        nodes = [session.extend(None, context) for context, _ in requests]
        live = session.loglikelihood([(node, more) for node, (_, more) in zip(nodes, requests, strict=True)])
    for number, expected in enumerate(plain):
        for found in (scores, live):
            tokens = found.tokens(number)
            assert tokens.base is not None, "no copy"
            assert np.abs(tokens - expected).max() < 1e-4
            assert np.float32(tokens.astype(np.float64).sum()) == found.logprob[number]
    assert scores.token_logprob.size == scores.num_tokens.sum()
    if engine.row_invariant:
        assert np.array_equal(scores.token_logprob, live.token_logprob)


def test_distributions_and_hidden_states_are_the_models(engine: Engine) -> None:
    with torch.no_grad():
        plain = [
            engine.model(torch.tensor([context]), output_hidden_states=True, use_cache=False) for context in CONTEXTS
        ]
    with engine.session() as session:
        nodes = [session.extend(None, context) for context in CONTEXTS]
        logprobs = session.next_token_logprobs(nodes)
        hidden = session.hidden_states(nodes)
        known = session.hidden_states(nodes[::-1], [-1, 0])
        assert engine.report.tokens_forwarded == len(nodes), "what was known was forwarded again"
        none = session.hidden_states([])
    assert logprobs.numpy().ctypes.data == logprobs.data_ptr()
    assert torch.from_dlpack(logprobs.numpy()).data_ptr() == logprobs.data_ptr()
    num_layers = len(plain[0].hidden_states)
    assert hidden.shape[:2] == (len(CONTEXTS), num_layers)
    assert none.shape == (0, *hidden.shape[1:])
    for number, out in enumerate(plain):
        assert np.abs(logprobs[number].exp().sum().item() - 1) < 1e-5
        assert (logprobs[number] - out.logits[0, -1].float().log_softmax(-1)).abs().max() < 1e-4
        for layer, states in enumerate(out.hidden_states):
            assert (hidden[number, layer] - states[0, -1]).abs().max() < 1e-4, layer
    if engine.row_invariant:
        assert torch.equal(known.flip(0), hidden[:, [-1, 0]])
    assert not any("forward" in vars(module) for module in engine.model.modules())
    probe = torch.nn.Linear(hidden.shape[-1], 1)
    probe(hidden[:, -1].float()).sum().backward()
    assert probe.weight.grad is not None


def test_hidden_states_of_many_packs_are_those_of_one() -> None:
    engine, small = Engine(ZOO["llama"].build()), Engine(ZOO["llama"].build(), pack_tokens=7)
    with engine.session() as one, small.session() as many:
        expected, found = (
            session.hidden_states([session.extend(None, context) for context in CONTEXTS]) for session in (one, many)
        )
    assert small.report.num_packs > 2
    assert torch.equal(found, expected)


def test_a_hook_that_would_never_run_is_refused() -> None:
    engine = Engine(ZOO["llama"].build())
    handle = engine.model.register_forward_hook(lambda *_: None)
    for call in (lambda: engine.loglikelihood([([3], [4])]), lambda: engine.session()):
        with pytest.raises(ModelError, match="somebody's hook is on 'LlamaForCausalLM', which does not run"):
            call()
    handle.remove()
    assert engine.loglikelihood([([3], [4])]).state.tolist() == [0]
    engine.model.register_forward_hook(lambda *_: None)
    with pytest.raises(ModelError, match="somebody's hook is on 'LlamaForCausalLM'"):
        engine.loglikelihood([([3], [4])])


def test_a_model_that_was_asked_for_hidden_states_keeps_our_layers() -> None:
    """transformers leaves hooks behind that do nothing."""
    engine = Engine(ZOO["llama"].build())
    before = engine.loglikelihood([([3, 4], [5])]).logprob
    engine.model(torch.tensor([[3, 4]]), output_hidden_states=True)
    assert any(module._forward_hooks for module in engine.model.modules())
    assert engine.layers == "fused"
    assert np.array_equal(engine.loglikelihood([([3, 4], [5])]).logprob, before)
    engine.model.get_decoder().layers[1].register_forward_hook(lambda *_: None)
    assert engine.layers == "transformers"


def harness_windows(tokens: list[int], most: int) -> Iterator[tuple[list[int], list[int]]]:
    """As lm-evaluation-harness: windows of ``most`` tokens, one of context, made disjoint."""
    predicted = min(most, len(tokens))
    yield [0], tokens[:predicted]
    while predicted < len(tokens):
        count = min(len(tokens) - predicted, most)
        end = predicted + count
        context = tokens[max(0, end - most - 1) : end - 1]
        yield context[: len(context) - (count - 1)], tokens[end - count : end]
        predicted += count


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 21])
def test_whole_texts_are_cut_as_the_harness_does(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(ZOO["llama"].build())
    monkeypatch.setattr(engine._encoder, "prefix_id", 0)
    monkeypatch.setattr(engine._model, "max_positions", 8)
    text = ids(5, length)
    scores = engine.loglikelihood_rolling([text, [4, 5]])
    windows = [*harness_windows(text, 8), ([0], [4, 5])]
    apart = engine.loglikelihood(windows)
    assert scores.num_tokens.tolist() == [length, 2]
    assert np.array_equal(scores.token_logprob, apart.token_logprob)
    assert scores.logprob[0] == np.float32(apart.token_logprob[:length].astype(np.float64).sum())
    assert engine.loglikelihood_rolling([]).logprob.size == 0
    with pytest.raises(RequestError, match="text 1 has no tokens"):
        engine.loglikelihood_rolling([text, []])


def test_whole_texts_of_a_session(bundled: Engine) -> None:
    with bundled.session() as session:
        nodes = [session.extend(None, text) for text in ("Oil prices rose.", "Oil prices fell on Monday.")]
        scores = session.loglikelihood_rolling(nodes)
        for number, node in enumerate(nodes):
            path = session._tree.ids_of(node.path).tolist()
            assert scores.tokens(number).tolist() == bundled.loglikelihood([(path[:1], path[1:])]).tokens(0).tolist()
        with pytest.raises(RequestError, match=r"Node\(1 tokens, ''\) has no token that is predicted"):
            session.loglikelihood_rolling([session.extend(None, "")])


def test_a_session_generates_what_the_engine_does(engine: Engine) -> None:
    expected = engine.generate(CONTEXTS, 6)
    with engine.session() as session:
        nodes = [session.extend(None, context) for context in CONTEXTS]
        found = session.generate(nodes, 6)
        assert [each.tolist() for each in found.token_ids] == [each.tolist() for each in expected.token_ids]
        assert found.finish == expected.finish
        fed = sum(len(each) for each in found.token_ids) + len(nodes)
        assert engine.report.tokens_forwarded <= session.num_tokens <= sum(map(len, CONTEXTS)) + fed
        assert engine.report.tokens_generated == int(found.num_tokens.sum())
        again = session.generate(nodes[::-1], 6)
        assert engine.report.tokens_forwarded == 0, "what was generated was forwarded again"
        scored = session.loglikelihood([(node, ids) for node, ids in zip(nodes, found.token_ids, strict=True)])
        assert engine.report.tokens_forwarded == 0
        is_whole = [finish != "eos" for finish in found.finish]  # an EOS is in the sum, and no token of the text
        assert np.allclose(scored.logprob[is_whole], found.logprob[is_whole], atol=1e-5)
        if engine.row_invariant:
            assert np.array_equal(found.logprob, expected.logprob)
            assert np.array_equal(again.logprob[::-1], found.logprob)


def test_texts_by_chance_are_the_oracles_in_any_company(engine: Engine) -> None:
    found = engine.generate(CONTEXTS, 6, num_samples=2, **CHANCE)
    for number, context in enumerate(CONTEXTS):
        for draw in range(2):
            got = found.token_ids[2 * number + draw].tolist()
            assert got == sampled_ids(engine.model, context, 6, draw=draw, **CHANCE)[: len(got)]
    if engine.row_invariant:
        alone = engine.generate(CONTEXTS[2:3], 6, num_samples=2, **CHANCE)
        assert np.array_equal(alone.logprob, found.logprob[4:6])
        with engine.session(memory_budget=engine._model.facts.session_token_bytes * 25) as session:
            nodes = [session.extend(None, context) for context in CONTEXTS]
            tight = session.generate(nodes[::-1], 6, num_samples=2, **CHANCE)
            assert session.num_evicted > 0
            order = [6, 7, 4, 5, 2, 3, 0, 1]
            assert np.array_equal(tight.logprob, found.logprob[order])


def test_text_stops_and_reads_as_the_engines(bundled: Engine) -> None:
    prompts = ["Article: Oil prices rose on Monday.\nAnswer:", "Article: The cup final.\nAnswer:"]
    expected = bundled.generate(prompts, 12, stop="\n")
    with bundled.session() as session:
        found = session.generate([session.extend(None, prompt) for prompt in prompts], 12, stop="\n")
    assert (found.text, found.finish) == (expected.text, expected.finish)
    by_chance = bundled.generate(prompts, 12, "\n", temperature=0.7, num_samples=3)
    assert by_chance.text is not None
    assert len(by_chance) == 6
    again = bundled.generate(prompts[1:], 12, "\n", temperature=0.7, num_samples=3)
    assert again.text == by_chance.text[3:]


@given(
    st.lists(st.floats(-6, 6, width=32), min_size=2, max_size=12),
    st.floats(0, 1, exclude_max=True),
    st.sampled_from([0.3, 1.0, 2.0]),
    st.sampled_from([1.0, 0.9, 0.5, 1e-6]),
    st.integers(0, 4),
)
@settings(max_examples=300)
def test_a_draw_is_the_walk_through_the_probabilities(
    logits: list[float], chance: float, temperature: float, top_p: float, top_k: int
) -> None:
    logprobs = torch.tensor([logits]).log_softmax(-1)
    sampling = Sampling(temperature, top_p, top_k)
    (found,) = sampling.drawn(logprobs, np.zeros(1, np.int64), np.array([chance])).tolist()
    near = {
        walk(logprobs[0].tolist(), each, temperature=temperature, top_p=top_p, top_k=top_k)
        for each in (max(0.0, chance - 1e-9), chance, min(1 - 1e-12, chance + 1e-9))
    }
    assert found in near


def test_draws_have_the_probabilities_asked_for() -> None:
    logprobs = torch.tensor([0.5, 0.2, 0.2, 0.1]).log()
    sampling = Sampling(1.0, seed=1)
    chances = sampling.uniforms(np.array([3, 4], np.int32), 0, 20_000)
    assert chances.tolist()[:5] == keyed_chances([3, 4], 5, seed=1, draw=0)
    one_row = np.zeros(20_000, np.int64)
    drawn = sampling.drawn(logprobs[None], one_row, chances)
    shares = np.bincount(drawn.numpy(), minlength=4) / 20_000
    assert np.abs(shares - [0.5, 0.2, 0.2, 0.1]).max() < 0.015
    for other in (Sampling(1.0, seed=2).uniforms(np.array([3, 4], np.int32), 0, 5),
                  sampling.uniforms(np.array([3, 5], np.int32), 0, 5),
                  sampling.uniforms(np.array([3, 4], np.int32), 1, 5)):  # fmt: skip
        assert not np.isin(other, chances[:5]).any()
    narrow = Sampling(1.0, top_p=0.65).drawn(logprobs[None], one_row, chances)
    assert np.bincount(narrow.numpy()).tolist() == pytest.approx([20_000 * 5 / 7, 20_000 * 2 / 7], rel=0.05)


@pytest.mark.parametrize("is_product", [True, False])
def test_hooks_learn_which_rows_are_of_which_request(engine: Engine, is_product: bool) -> None:
    contexts = [*CONTEXTS, CONTEXTS[0]]
    queries, labels = [[3, 4], [3, 5], [7]], [[4], [5, 6], [5, 7]]
    seen: list[tuple[PackRows, torch.Tensor]] = []

    def hook(_: Any, __: Any, named: dict[str, Any]) -> None:
        seen.append((engine.rows, named["input_ids"][0].clone()))

    assert engine.numerics, "the first-use check is over"
    handle = engine.model.get_decoder().register_forward_pre_hook(hook, with_kwargs=True)
    shape = (len(contexts), len(queries), len(labels))
    prompts = [(c + q, label) for c in contexts for q in queries for label in labels]
    try:
        if is_product:
            engine.score(contexts, queries, labels)
        else:
            engine.loglikelihood(prompts)
    finally:
        handle.remove()
    found = set()
    for rows, given_ids in seen:
        assert given_ids[: rows.token_ids.size].tolist() == rows.token_ids.tolist()
        for row, request, token in zip(rows.rows, rows.requests, rows.tokens, strict=True):
            c, q, label = np.unravel_index(request, shape)
            prompt = contexts[c] + queries[q] + labels[label][:token]
            assert rows.positions[row] == len(prompt) - 1
            assert rows.token_ids[row] == prompt[-1]
            found.add((int(request), int(token)))
    assert found == {(n, token) for n, (_, label) in enumerate(prompts) for token in range(len(label))}
    with pytest.raises(RequestError, match="no forward pass of this engine runs here now"):
        _ = engine.rows


def test_nobody_asked_for_what_the_check_and_generation_forward() -> None:
    engine = Engine(ZOO["llama"].build())
    seen: list[PackRows] = []
    engine.model.get_decoder().layers[0].register_forward_pre_hook(lambda *_: seen.append(engine.rows))
    engine.generate([[3, 4, 5]], 3)
    assert len(seen) > 3
    assert not any(rows.requests.size for rows in seen)
    assert seen[-3].token_ids.tolist() == [3, 4, 5]


def test_hooks_of_a_session_learn_it_too(engine: Engine) -> None:
    seen: list[PackRows] = []
    with engine.session() as session:
        nodes = [session.extend(None, context) for context in CONTEXTS]
        handle = engine.model.get_decoder().register_forward_pre_hook(lambda *_: seen.append(engine.rows))
        session.next_token(nodes)
        handle.remove()
    (rows,) = seen
    places = {int(request): int(row) for request, row in zip(rows.requests, rows.rows, strict=True)}
    assert {n: (rows.positions[row] + 1, rows.token_ids[row]) for n, row in places.items()} == {
        n: (len(context), context[-1]) for n, context in enumerate(CONTEXTS)
    }


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"temperature": -1.0}, "temperature is -1.0; give a number from 0 on"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p is 0.0; give a number over 0, up to 1"),
        ({"temperature": 1.0, "top_k": -1}, "top_k is -1; give a whole number from 0"),
        ({"temperature": 1.0, "seed": 1 << 63}, "seed is 9223372036854775808; give a whole number of 64 bits"),
        ({"temperature": 1.0, "num_samples": 0}, "num_samples is 0; give a whole number from 1 on"),
        ({"num_samples": 2}, "are of texts by chance; give a temperature over 0"),
    ],
)
def test_what_cannot_be_sampled_is_said_in_one_line(wrong: dict[str, Any], said: str, bundled: Engine) -> None:
    with pytest.raises(RequestError, match=said) as told:
        bundled.generate(["a"], 2, **wrong)
    assert "\n" not in str(told.value)


def test_what_cannot_be_read_is_said_in_one_line(bundled: Engine) -> None:
    with bundled.session() as session:
        node, root = session.extend(None, "Oil"), session.extend(None, [])
        for call, said in (
            (lambda: session.hidden_states([node], [99]), "layer 99 is not there: the model's are 0 .* to "),
            (lambda: session.next_token_logprobs([root]), "the root has no token to read after"),
            (lambda: session.generate([root]), "a text needs a token before it"),
            (lambda: session.generate([node], 1 << 20), "over the model's context window"),
        ):
            with pytest.raises(RequestError, match=said):
                call()
    with pytest.raises(RequestError, match="texts by chance are drawn from the prefix tree"):
        Engine(bundled.model, bundled.tokenizer, plain=True).generate(["a"], 2, temperature=1.0)
