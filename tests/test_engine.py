"""The engine against plain transformers, one prompt at a time.

More than 600 lines because the architectures and the plain scores of the module are made once for all of its tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tolerances import TOLERANCES
from transformers import LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM, PreTrainedModel
from zoo import VOCAB, WINDOW, ZOO

from iclperm import _core
from iclperm.engine import ContextPaths, Engine, Scores, plan_product
from iclperm.engine import model as model_module
from iclperm.engine.forward import PassLimits
from iclperm.engine.kernels import attention as attention_module
from iclperm.engine.kernels.linear import MatrixProduct
from iclperm.engine.shapes import padded_rows
from iclperm.engine.tree import Rows
from iclperm.errors import ModelError, PlanError, RequestError, SelfCheckError
from iclperm.reference import scoring
from iclperm.reference.trie import fed_prefixes

Request = tuple[list[int], list[int]]
PER_TOKEN = TOLERANCES["loglikelihood per token"]["float32"]
SMALL_PACKS: dict[str, Any] = {"pack_tokens": 24, "self_check": False}


def random_ids(rng: np.random.Generator, n: int) -> list[int]:
    return [int(i) for i in rng.integers(0, VOCAB, n)]


def branching_requests(seed: int = 0) -> list[Request]:
    """Shared stems past the window, rows that are prefixes of others, duplicates, labels with a common first token."""
    rng = np.random.default_rng(seed)
    stem = random_ids(rng, 40)
    assert len(stem) > 3 * WINDOW
    requests: list[Request] = [(stem[:n], random_ids(rng, k)) for n in (1, 5, 5, 20, 40) for k in (1, 2, 3)]
    requests += [(stem[:20], stem[20:22]), (stem[:20], stem[20:22]), (stem[:10], stem[10:30])]
    requests += [(stem[:12] + random_ids(rng, n), label) for n in (1, 9) for label in ([3], [4, 5], [4, 6], [4, 5, 7])]
    return requests


def assert_agrees(out: Scores, model: PreTrainedModel, requests: list[Request]) -> None:
    plain = scoring.loglikelihood(model, requests)
    assert out.num_tokens.tolist() == [p.num_tokens for p in plain]
    for fast, p in zip(out.logprob, plain, strict=True):
        assert abs(fast - p.logprob) <= PER_TOKEN * p.num_tokens
    assert out.is_greedy.tolist() == [p.is_greedy for p in plain]
    assert not out.state.any()
    assert np.std([p.logprob / p.num_tokens for p in plain]) > 0.5, "the model tells no prompts apart"


def assert_close(out: Scores, model: PreTrainedModel, requests: list[Request]) -> None:
    for fast, plain in zip(out.logprob, scoring.loglikelihood(model, requests), strict=True):
        assert abs(fast - plain.logprob) <= PER_TOKEN * plain.num_tokens


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return ZOO["llama"].build()


@pytest.mark.parametrize("attention", ["native", "torch"])
@pytest.mark.parametrize("name", ZOO)
def test_every_architecture_is_exact(name: str, attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, requests = ZOO[name].build(), branching_requests()
    calls = count_calls(monkeypatch, attention)
    engine = Engine(model, attention=attention, **SMALL_PACKS)
    assert_agrees(engine.loglikelihood(requests), model, requests)
    assert engine.attention == attention
    assert len(calls) == engine.report.num_packs * model.config.num_hidden_layers, "another path ran"
    assert engine.report.num_packs > 3, "keys never crossed a pack border"
    assert engine.report.tokens_forwarded == engine.report.tokens_unique == len(fed_prefixes(requests))


def count_calls(monkeypatch: pytest.MonkeyPatch, attention: str) -> list[int]:
    calls: list[int] = []
    holder, name = {
        "native": (_core, "tree_attention"),
        "torch": (attention_module.TorchAttention, "__call__"),
    }[attention]
    original = getattr(holder, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(holder, name, counted)
    return calls


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
@pytest.mark.parametrize("name", ["qwen2-window", "gemma2"])
def test_random_request_sets_are_exact(name: str, data: st.DataObject) -> None:
    model = ZOO[name].build()
    token = st.integers(0, 3)
    pair = st.tuples(st.lists(token, min_size=1, max_size=3 * WINDOW), st.lists(token, min_size=1, max_size=4))
    requests = data.draw(st.lists(pair, min_size=1, max_size=12))
    engine = Engine(model, pack_tokens=data.draw(st.integers(8, 64)), unit_tokens=data.draw(st.integers(1, 99)),
                    self_check=False)  # fmt: skip
    out = engine.loglikelihood(requests)
    for fast, plain in zip(out.logprob, scoring.loglikelihood(model, requests), strict=True):
        assert abs(fast - plain.logprob) <= PER_TOKEN * plain.num_tokens
    assert engine.report.tokens_forwarded == len(fed_prefixes(requests))


def test_prompts_of_every_length_round_the_tiles_are_exact() -> None:
    model = ZOO["gemma3"].build()
    rng = np.random.default_rng(3)
    requests: list[Request] = [(random_ids(rng, n), random_ids(rng, 1)) for n in range(1, 140)]
    assert_agrees(Engine(model, self_check=False).loglikelihood(requests), model, requests)


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_bfloat16_is_no_worse_than_plain_bfloat16(dtype: torch.dtype) -> None:
    requests = branching_requests()
    exact = np.array([p.logprob for p in scoring.loglikelihood(ZOO["llama"].build(), requests)])
    model = ZOO["llama"].build().to(dtype)
    plain = np.array([p.logprob for p in scoring.loglikelihood(model, requests)])
    for attention in ("native", "torch"):
        fast = Engine(model, attention=attention, **SMALL_PACKS).loglikelihood(requests).logprob
        assert np.abs(fast - exact).mean() <= 1.25 * np.abs(plain - exact).mean()


def product_parts(seed: int = 0) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    rng = np.random.default_rng(seed)
    stem = random_ids(rng, 30)
    contexts = [[], stem[:1], stem[:10], stem, stem[:10], stem[:10] + random_ids(rng, 9)]
    queries = [[5, *random_ids(rng, n)] for n in (0, 3, 8, 8)]
    return contexts, queries, [[7], [8, 9], [8, 10], [11]]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("limits", [{}, {"pack_tokens": 16, "unit_tokens": 20, "memory_budget": 1 << 28}])
def test_the_product_agrees_with_plain_scoring(name: str, limits: dict[str, Any]) -> None:
    model, (contexts, queries, labels) = ZOO[name].build(), product_parts()
    engine = Engine(model, self_check=False, **limits)
    scores = engine.score(contexts, queries, labels)
    assert scores.shape == (6, 4, 4)
    assert scores.dtype == np.float32
    for c, context in enumerate(contexts):
        for q, query in enumerate(queries):
            for label, continuation in enumerate(labels):
                plain = scoring.score_one(model, context + query, continuation).logprob
                assert abs(scores[c, q, label] - plain) <= PER_TOKEN * len(continuation)
    report = engine.report
    if not limits:
        assert report.tokens_forwarded == report.tokens_unique
    assert report.kv_peak_tokens > 0


def test_product_and_general_path_give_the_same_bits(llama: PreTrainedModel) -> None:
    contexts, queries, labels = product_parts()
    contexts = [context for context in contexts if context]
    engine = Engine(llama, **SMALL_PACKS)
    product = engine.score(contexts, queries, labels)
    pairs = [(c + q, label) for c in contexts for q in queries for label in labels]
    np.testing.assert_array_equal(product.ravel(), engine.loglikelihood(pairs).logprob)
    marks = Rows.of([[len(context)] for context in contexts])
    np.testing.assert_array_equal(product, engine.score(ContextPaths(Rows.of(contexts), marks), queries, labels))
    np.testing.assert_array_equal(product, engine.score(contexts, queries, [labels] * len(queries)))


def test_queries_may_be_empty_where_contexts_are_not(llama: PreTrainedModel) -> None:
    engine = Engine(llama, **SMALL_PACKS)
    scores = engine.score([[1, 2], [3]], [[], [4]], [[5], [6]])
    expected = engine.loglikelihood([(c + q, label) for c in ([1, 2], [3]) for q in ([], [4]) for label in ([5], [6])])
    np.testing.assert_array_equal(scores.ravel(), expected.logprob)


COMPANIONS = ["llama", "qwen2-window", "qwen3", "gemma", "gemma2", "gemma3", "mistral-window", "gpt2", "gpt-neox",
              "phi3", "olmo2", "opt", "olmo3-window", "granite", "smollm3-window", "glm", "glm4", "cohere",
              "cohere2-window", "starcoder2-window", "phi", "granite-swa"]  # fmt: skip


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", COMPANIONS)
@pytest.mark.usefixtures("two_threads")
def test_the_same_request_in_any_company_gives_the_same_bits(name: str) -> None:
    model, requests = ZOO[name].build(), branching_requests()
    together = Engine(model, pack_tokens=1024)
    expected = together.loglikelihood(requests).logprob
    assert together.row_invariant
    for limits in ({"pack_tokens": 24}, {"pack_tokens": 8, "unit_tokens": 1}, {"pack_tokens": 100, "unit_tokens": 50}):
        engine = Engine(model, self_check=False, **limits)
        np.testing.assert_array_equal(engine.loglikelihood(requests).logprob, expected)
    for number, request in enumerate(requests):
        assert together.loglikelihood([request]).logprob[0] == expected[number]


def test_units_run_in_any_order_give_the_same_bits(llama: PreTrainedModel) -> None:
    contexts, queries, labels = product_parts()
    plan = plan_product(contexts, queries, labels, pack_tokens=24, unit_tokens=30, repeated_share=1.0)
    assert plan.num_units > 3
    engine = Engine(llama, **SMALL_PACKS)
    unbroken = {result.unit: result.logprob for result in engine.execute(plan)}
    assert engine.report.tokens_forwarded == plan.tokens
    for unit in reversed(range(plan.num_units)):
        (alone,) = engine.execute(plan, [unit])
        np.testing.assert_array_equal(alone.logprob, unbroken[unit])


@pytest.mark.usefixtures("two_threads")
def test_thread_count_changes_no_bit(llama: PreTrainedModel) -> None:
    results = []
    for num in (2, 1):
        torch.set_num_threads(num)
        results.append(Engine(llama, **SMALL_PACKS).loglikelihood(branching_requests()).logprob)
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("name", ["gemma2", "gpt2", "gpt-neox"])
def test_a_wrapped_model_is_bit_for_bit_as_before(name: str) -> None:
    model = ZOO[name].build().train()
    model.eval()
    next(iter(model.modules())).training = True  # a flag that is neither all on nor all off
    prompt = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]])
    flags = [module.training for module in model.modules()]
    attributes = [sorted(vars(module)) for module in model.modules()]
    implementation = model.config._attn_implementation
    before = model(prompt).logits.clone()
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    Engine(model).loglikelihood(branching_requests())
    assert torch.equal(model(prompt).logits, before)
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == flags
    assert [sorted(vars(module)) for module in model.modules()] == attributes
    assert model.config._attn_implementation == implementation


def test_a_model_is_restored_when_a_call_fails(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("kernel")

    implementation = llama.config._attn_implementation
    monkeypatch.setattr(attention_module.NativeAttention, "__call__", fails)
    with pytest.raises(RuntimeError, match="kernel"):
        Engine(llama, self_check=False).loglikelihood([([1], [2])])
    assert llama.config._attn_implementation == implementation
    assert "forward" not in vars(llama.model.rotary_emb)


def test_between_units_the_model_is_free(llama: PreTrainedModel) -> None:
    contexts, queries, labels = product_parts()
    engine = Engine(llama, **SMALL_PACKS)
    plan = plan_product(contexts, queries, labels, unit_tokens=30)
    for _ in engine.execute(plan):
        assert llama.config._attn_implementation != "iclperm_tree"
        assert not torch.is_inference_mode_enabled()


def test_the_self_check_runs_once_and_refuses_a_model_that_disagrees(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(llama)
    engine.loglikelihood([([1], [2])])
    assert engine.report.seconds["self_check"] > 0
    engine.loglikelihood([([1], [2])])
    assert "self_check" not in engine.report.seconds
    wrong = Engine(llama)
    monkeypatch.setattr(model_module.TreeModel, "logit_softcap", 0.5)
    for _ in range(2):
        with pytest.raises(SelfCheckError, match=r"'llama': the tree gives .* where plain scoring gives"):
            wrong.loglikelihood([([1], [2])])


def test_a_prediction_that_is_not_met_is_an_error(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_product([[1, 2]], [[3]], [[4]])
    packs = list(plan.packs(0))
    monkeypatch.setattr(type(plan), "packs", lambda self, unit, held=0: iter(packs + packs))
    with pytest.raises(PlanError, match=r"unit 0 forwarded .* where the plan says"):
        list(Engine(llama, **SMALL_PACKS).execute(plan))


def test_reports_and_totals_add_up(llama: PreTrainedModel) -> None:
    engine = Engine(llama, self_check=False)
    for _ in range(2):
        engine.loglikelihood([([1, 2, 3], [4]), ([1, 2, 3], [5, 6])])
    report = engine.report
    assert (report.tokens_naive, report.tokens_unique, report.tokens_forwarded) == (4, 4, 4)
    assert (report.kv_peak_tokens, report.num_packs, report.scored_rows) == (4, 1, 2)
    assert report.padding_rows == padded_rows(4, torch.device("cpu")) - 4
    assert engine.totals.tokens_forwarded == 8
    assert engine.totals.kv_peak_tokens == 4
    assert engine.totals.flops == 2 * report.flops > 0
    assert set(report.seconds) == {"plan", "forward", "head", "total"}
    assert 0 < report.utilisation < 10


def test_calls_may_nest(llama: PreTrainedModel) -> None:
    contexts, queries, labels = product_parts()
    engine = Engine(llama, **SMALL_PACKS)
    plan = plan_product(contexts, queries, labels, unit_tokens=30)
    expected = [result.logprob for result in engine.execute(plan)]
    nested = []
    for result in engine.execute(plan):
        nested.append(result.logprob)
        engine.loglikelihood([([1, 2], [3])])
    assert engine.totals.tokens_forwarded == 2 * plan.tokens + 2 * plan.num_units
    for one, other in zip(expected, nested, strict=True):
        np.testing.assert_array_equal(one, other)


def test_no_requests_are_no_work(llama: PreTrainedModel) -> None:
    out = Engine(llama).loglikelihood([])
    assert out.logprob.shape == out.state.shape == (0,)


def test_an_empty_context_becomes_the_prefix_token(llama: PreTrainedModel) -> None:
    engine = Engine(llama, self_check=False)
    out = engine.loglikelihood([([], [5, 6]), ([1], [5, 6])])
    assert llama.config.bos_token_id == 1
    assert out.logprob[0] == out.logprob[1]


def test_windows_longer_than_the_self_check_are_exact() -> None:
    entry = ZOO["qwen2-moe-window"]
    settings = {**entry.settings, "sliding_window": 700, "max_position_embeddings": 2048}
    model = replace(entry, settings=settings).build()
    requests: list[Request] = [(random_ids(np.random.default_rng(0), n), [3, 4]) for n in (690, 900, 1200)]
    assert_close(Engine(model).loglikelihood(requests), model, requests)


@pytest.mark.parametrize("layers", ["auto", "transformers"])
def test_a_window_that_a_layer_and_its_type_contradict_is_refused(layers: Literal["auto", "transformers"]) -> None:
    """Longer than the self-check, so that only the contradiction itself can be seen."""
    entry = ZOO["smollm3-window"]
    settings = {**entry.settings, "sliding_window": 700, "max_position_embeddings": 2048}
    settings["layer_types"] = ["sliding_attention"] * settings["num_hidden_layers"]
    requests: list[Request] = [(random_ids(np.random.default_rng(0), n), [3, 4]) for n in (690, 900)]
    model = replace(entry, settings={**settings, "use_sliding_window": False}, kinds=frozenset()).build()
    with pytest.raises(ModelError, match=r"SmolLM3Attention attends to all tokens in a layer .* 'sliding_attention'"):
        Engine(model, layers=layers).loglikelihood(requests)
    assert_close(Engine(model, plain=True).loglikelihood(requests), model, requests)
    model = replace(entry, settings={**settings, "use_sliding_window": True}, kinds=frozenset()).build()
    assert_close(Engine(model, layers=layers).loglikelihood(requests), model, requests)


def test_ragged_products_are_named_or_served(llama: PreTrainedModel) -> None:
    engine = Engine(llama, self_check=False)
    with pytest.raises(RequestError, match="query 1 has 4 continuations, query 0 has 2"):
        engine.score([[1, 2]], [[], [4]], [[[5], [6]], [[5], [6], [7], [8]]])
    with pytest.raises(RequestError, match="continuations are given for 1 queries, but there are 2"):
        engine.score([[1, 2]], [[], [4]], [[[5], [6]]])
    with pytest.raises(RequestError, match=r"request 0 has 3 parts; give \(context, continuation\)"):
        engine.loglikelihood([([1], [2], [3])])  # type: ignore[list-item]
    uneven = engine.score([[1, 2]], [[], [4]], [[[5], [6, 7]], [[5], [6]]])
    assert np.isfinite(uneven).all()
    assert engine.score([], [[4]], [[5], [6]]).shape == (0, 1, 2)
    assert engine.score([[1]], [], [[5], [6]]).shape == (1, 0, 0)


def test_only_the_units_run_are_reported(llama: PreTrainedModel) -> None:
    contexts, queries, labels = product_parts()
    engine = Engine(llama, **SMALL_PACKS)
    plan = plan_product(contexts, queries, labels, unit_tokens=30, repeated_share=1.0)
    for unit in range(plan.num_units):
        list(engine.execute(plan, [unit]))
    assert engine.totals.tokens_naive == plan.tokens_naive
    assert engine.totals.tokens_unique == plan.tokens <= engine.totals.tokens_forwarded


def test_lazy_units_are_asked_for_one_result_at_a_time(llama: PreTrainedModel) -> None:
    contexts, queries, labels = product_parts()
    plan = plan_product(contexts, queries, labels, unit_tokens=30, repeated_share=1.0)
    taken: list[int] = []
    asked: list[int] = []

    def next_unit() -> Iterator[int]:
        for unit in (2, 0, 1):
            assert len(taken) == len(asked), "asked for before the previous result was taken"
            asked.append(unit)
            yield unit

    engine = Engine(llama, **SMALL_PACKS)
    for result in engine.execute(plan, next_unit()):
        taken.append(result.unit)
        assert asked == taken
    assert taken == [2, 0, 1]
    expected = {result.unit: result.logprob for result in engine.execute(plan)}
    for result in engine.execute(plan, next_unit_after_seeing(expected)):
        np.testing.assert_array_equal(result.logprob, expected[result.unit])


def next_unit_after_seeing(expected: dict[int, Any]) -> Iterator[int]:
    yield from reversed(expected)


def test_units_abandoned_are_not_reported(llama: PreTrainedModel) -> None:
    contexts, queries, labels = product_parts()
    engine = Engine(llama, **SMALL_PACKS)
    plan = plan_product(contexts, queries, labels, unit_tokens=30, repeated_share=1.0)
    results = engine.execute(plan, iter(range(plan.num_units)))
    next(results), next(results)
    results.close()  # type: ignore[attr-defined]
    assert (engine.report.tokens_naive, engine.report.tokens_unique) == plan.share([0, 1])
    assert engine.report.tokens_unique == engine.report.tokens_forwarded == plan.core.unit_tokens[:2].sum()
    list(engine.execute(plan, iter(range(plan.num_units))))
    assert (engine.report.tokens_naive, engine.report.tokens_unique) == (plan.tokens_naive, plan.tokens_unique)
    with pytest.raises(RequestError, match=f"unit {plan.num_units} is not among the plan's {plan.num_units} units"):
        list(engine.execute(plan, [plan.num_units]))
    assert (engine.report.tokens_naive, engine.report.tokens_unique) == (0, 0)


def test_numerics_name_the_size_of_packs_only_where_it_matters(llama: PreTrainedModel) -> None:
    engine = Engine(llama, pack_tokens=512, memory_budget=1 << 30)
    assert engine.numerics["pack_tokens"] is engine.numerics["memory_budget"] is None
    assert engine.row_invariant, "the first-use check did not run"
    assert engine.totals.seconds["self_check"] > 0
    assert engine.numerics == Engine(llama, pack_tokens=24).numerics == engine.numerics
    unchecked = Engine(llama, pack_tokens=512, self_check=False)
    assert unchecked.numerics["pack_tokens"] == 512
    mixed = Engine(ZOO["qwen2-moe"].build(), pack_tokens=512, memory_budget=1 << 30)
    assert mixed.numerics["pack_tokens"] == 512
    assert mixed.numerics["memory_budget"] == 1 << 30
    assert Engine(llama, plain=True, pack_tokens=512).numerics["pack_tokens"] is None


def test_no_matrix_product_runs_under_eight_rows(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []

    multiply = MatrixProduct.__call__

    def counted(self: MatrixProduct, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        rows.append(x.shape[0])
        return multiply(self, x, *rest)

    def counted_by_torch(x: torch.Tensor, *args: Any) -> torch.Tensor:
        rows.append(x.numel() // x.shape[-1])
        return by_torch(x, *args)

    by_torch = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", counted_by_torch)
    monkeypatch.setattr(MatrixProduct, "__call__", counted)
    Engine(llama, self_check=False).loglikelihood([([1], [2])])
    assert len(rows) > 7 * len(llama.model.layers), "a product was not seen"
    assert min(rows) >= 8


@pytest.mark.parametrize("name", ["llama", "qwen2-window", "gemma2"])
def test_dense_attention_takes_its_rows_in_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    attended = attention_module._attended

    def counted(q: torch.Tensor, *rest: Any) -> torch.Tensor:
        sizes.append(q.shape[0])
        return attended(q, *rest)

    monkeypatch.setattr(attention_module, "_attended", counted)
    model, requests = ZOO[name].build(), branching_requests()
    engine = Engine(model, attention="torch")
    engine._model.limits = PassLimits(dense_rows=12)
    assert_close(engine.loglikelihood(requests), model, requests)
    assert max(sizes) == 12
    assert any(size < 12 for size in sizes)


def test_a_forward_of_somebody_else_s_stays() -> None:
    model = ZOO["llama"].build()
    patched = model.model.layers[0].mlp.act_fn
    patched.forward = torch.relu
    requests = branching_requests()
    assert_close(Engine(model).loglikelihood(requests), model, requests)
    assert patched.forward is torch.relu


def test_threads_may_share_a_model() -> None:
    model, requests = ZOO["qwen3"].build(), branching_requests()
    expected = Engine(model).loglikelihood(requests).logprob
    with ThreadPoolExecutor(3) as pool:
        for out in pool.map(lambda _: Engine(model, self_check=False).loglikelihood(requests), range(6)):
            np.testing.assert_array_equal(out.logprob, expected)
    assert model.config._attn_implementation != "iclperm_tree"


def test_plain_serves_architectures_without_attention() -> None:
    torch.manual_seed(0)
    config = MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, state_size=4)
    model = MambaForCausalLM(config).eval()
    requests: list[Request] = [([1, 2, 3], [4]), ([1, 2], [5, 6])]
    with pytest.raises(ModelError, match="MambaForCausalLM"):
        Engine(model).loglikelihood(requests)
    assert_close(Engine(model, plain=True).loglikelihood(requests), model, requests)


@pytest.mark.parametrize("plain", [True, False])
def test_a_model_in_training_mode_is_scored_in_evaluation_mode(plain: bool) -> None:
    model = ZOO["gpt2"].build().train()
    requests: list[Request] = [([1, 2, 3], [4]), ([1, 2], [5, 6])]
    assert_close(Engine(model, plain=plain).loglikelihood(requests), model, requests)
    assert all(module.training for module in model.modules())


def test_layers_that_may_depend_on_their_company_are_found_out() -> None:
    half = Engine(ZOO["qwen3"].build().half())
    assert half.attention == "torch"
    for engine in (Engine(tiny_llama(hidden_act="mish")), Engine(ZOO["qwen2-moe"].build()), half):
        engine.loglikelihood([([1], [2])])
        assert engine.row_invariant is False


def poisoned(model: PreTrainedModel, token: int) -> PreTrainedModel:
    with torch.no_grad():
        model.get_input_embeddings().weight[token] = torch.nan
    return model


@pytest.mark.parametrize("attention", ["native", "torch"])
def test_logits_that_are_not_finite_are_invalid_and_never_an_argmax(attention: str) -> None:
    model = poisoned(ZOO["llama"].build(), token=9)
    engine = Engine(model, attention=attention, self_check=False)
    out = engine.loglikelihood([([1, 2], [3]), ([1, 9], [0]), ([1, 2, 9], [0]), ([1, 2], [9, 4])])
    assert out.state.tolist() == [0, 1, 1, 1]
    assert np.isnan(out.logprob).tolist() == [False, True, True, True]
    assert not out.is_greedy[1:].any()
    clean = Engine(ZOO["llama"].build(), attention=attention, self_check=False).loglikelihood([([1, 2], [3])])
    assert out.logprob[0] == clean.logprob[0], "a neighbour's NaN leaks"
    (result,) = engine.execute(plan_product([[1], [9]], [[2], [3]], [[4], [5]]))
    assert result.state.tolist() == [[0, 0], [1, 1]]


def test_plain_serves_what_the_tree_refuses(llama: PreTrainedModel) -> None:
    engine = Engine(llama, plain=True)
    requests = branching_requests()[:8]
    assert_agrees(engine.loglikelihood(requests), llama, requests)
    contexts, queries, labels = product_parts()
    tree = Engine(llama, self_check=False).score(contexts, queries, labels)
    np.testing.assert_allclose(engine.score(contexts, queries, labels), tree, atol=2 * PER_TOKEN)
    assert engine.report.tokens_forwarded > 3 * engine.report.tokens_unique
    assert engine.attention == "plain"


REFUSED = [
    ([([1, VOCAB], [2])], f"request 0 holds token id {VOCAB}, out of range: the model has {VOCAB} token ids"),
    ([([1], [2]), ([1], [2, VOCAB + 4])], f"request 1 holds token id {VOCAB + 4}"),
    ([([1], [-2])], "request 0 continuation 0 holds the token id -2"),
    ([([1], [2]), ([1], [])], r"the continuation of request 1 \('\[\]'\) has no tokens of its own"),
    ([([1] * 256, [2, 3])], "request 0 feeds 257 tokens, over the model's context window of 256"),
    ([([1], "a")], "request 0 mixes text and token ids"),
    ([("a", "b")], "the engine has no tokenizer"),
]


@pytest.mark.parametrize(("requests", "message"), REFUSED)
def test_bad_requests_get_one_line(llama: PreTrainedModel, requests: list[Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as error:
        Engine(llama, self_check=False).loglikelihood(requests)
    assert "\n" not in str(error.value)


def test_a_prompt_that_fills_the_window_is_served(llama: PreTrainedModel) -> None:
    requests: list[Request] = [([1] * 256, [2])]
    out = Engine(llama, self_check=False).loglikelihood(requests)
    assert abs(out.logprob[0] - scoring.loglikelihood(llama, requests)[0].logprob) <= PER_TOKEN


def test_bad_products_get_one_line(llama: PreTrainedModel) -> None:
    engine = Engine(llama, self_check=False)
    with pytest.raises(RequestError, match=f"token id {VOCAB + 1} is out of range"):
        engine.score([[1]], [[2]], [[VOCAB + 1]])
    with pytest.raises(
        RequestError, match="the longest prompt feeds 257 tokens, over the model's context window of 256"
    ):
        engine.score([[1] * 250], [[2] * 7], [[3]])


def tiny_llama(**settings: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                         num_attention_heads=4, max_position_embeddings=64, **settings)  # fmt: skip
    return LlamaForCausalLM(config).eval()


def test_rotary_types_that_depend_on_length_are_exact_in_their_window_and_refused_beyond() -> None:
    factors = [1.0, 2.0, 3.0, 4.0]
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": factors, "long_factor": [5.0] * 4,
            "original_max_position_embeddings": 24, "factor": 64 / 24}  # fmt: skip
    model = tiny_llama(rope_parameters=rope)
    engine = Engine(model)
    assert engine.max_tokens == 24
    requests: list[Request] = [(list(range(20)), [1, 2]), (list(range(10)), [3]), (list(range(24)), [3])]
    plain = scoring.loglikelihood(model, requests)
    out = engine.loglikelihood(requests)
    assert all(abs(a - b.logprob) <= 2 * PER_TOKEN for a, b in zip(out.logprob, plain, strict=True))
    with pytest.raises(RequestError, match="over the model's context window of 24"):
        engine.loglikelihood([(list(range(25)), [3])])


@pytest.fixture
def unusual() -> PreTrainedModel:
    return tiny_llama()


def test_architectures_that_cannot_be_exact_are_refused_by_name(unusual: PreTrainedModel) -> None:
    unusual.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(ModelError, match=r"LlamaForCausalLM \('llama'\) has layers of type 'linear_attention'"):
        Engine(unusual)
    unusual.config.layer_types = None
    unusual._supports_attention_backend = False
    with pytest.raises(ModelError, match="has attention that transformers' AttentionInterface does not reach"):
        Engine(unusual)


def test_unknown_attention_arguments_are_refused_by_name(unusual: PreTrainedModel) -> None:
    layer = unusual.model.layers[0].self_attn
    plain = layer.forward
    layer.forward = lambda *args, **kwargs: plain(*args, key_scale=torch.zeros(4), **kwargs)
    with pytest.raises(ModelError, match="LlamaAttention passes 'key_scale' to its attention"):
        Engine(unusual).loglikelihood([([1], [2])])


def test_layers_without_attention_are_refused(unusual: PreTrainedModel) -> None:
    unusual.model.layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(ModelError, match="'llama' has 2 layers but only 1 attend"):
        Engine(unusual).loglikelihood([([1], [2])])


def test_attention_paths_are_chosen_by_name(llama: PreTrainedModel) -> None:
    with pytest.raises(ModelError, match="attention 'flash' is unknown; choose auto, native, triton or torch"):
        Engine(llama, attention="flash")
    half = ZOO["llama"].build().half()
    with pytest.raises(ModelError, match=r"native attention runs float32 and bfloat16 on a CPU, not torch.float16"):
        Engine(half, attention="native")
    assert Engine(half).attention == "torch"
