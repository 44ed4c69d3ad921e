"""A model in use by others while an engine runs: threads, hooks, adapters, a second engine; none sees what runs."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from test_engine import SMALL_PACKS, assert_agrees, branching_requests, product_parts, random_ids
from torch import nn
from torch.nn.utils import prune
from transformers import PreTrainedModel
from zoo import ZOO

from iclperm.engine import Engine, selfcheck
from iclperm.engine.model import TreeModel
from iclperm.engine.twin import Twin, may_have_twins
from iclperm.reference import scoring

SECONDS = 60.0
"""A thread that does not come in this time will not come."""
PROMPT = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]])


class Meeting:
    """A forward hook in which the thread that made the meeting stays until ``end``, at its first call."""

    def __init__(self, module: nn.Module) -> None:
        self._thread: int | None = None
        self.inside, self._over = threading.Event(), threading.Event()
        module.register_forward_hook(self._hook)

    def _hook(self, *_: Any) -> None:
        if threading.get_ident() == self._thread and not self.inside.is_set():
            self.inside.set()
            assert self._over.wait(SECONDS), "the others were kept waiting"

    def held(self, call: Callable[[], Any]) -> Any:
        """Run a call of which the thread stays in the hook."""
        self._thread = threading.get_ident()
        return call()

    def during(self, call: Callable[[], Any], meanwhile: Callable[[], Any]) -> tuple[Any, Any]:
        """What both give, the second from beginning to end while the first is in the hook."""
        with ThreadPoolExecutor(1) as pool:
            held: Future[Any] = pool.submit(self.held, call)
            try:
                assert self.inside.wait(SECONDS), "the hook was not reached"
                found = meanwhile()
                assert not held.done()
            finally:
                self._over.set()
            return held.result(SECONDS), found


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("place", ["model.layers.1.mlp", "lm_head"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen2-moe-window"])
def test_the_model_answers_others_while_an_engine_runs_it(name: str, place: str, plain: bool) -> None:
    model, requests = ZOO[name].build().train(), branching_requests()[:4]
    meeting = Meeting(model.get_submodule(place))
    engine = Engine(model, self_check=False, plain=plain)
    expected, answer = engine.loglikelihood(requests).logprob, model(PROMPT).logits
    if not plain:
        assert engine.layers == ("fused" if place == "lm_head" and "moe" not in name else "transformers")

    def meanwhile() -> torch.Tensor:
        assert all(module.training for module in model.modules())
        assert model.config._attn_implementation != "iclperm_tree"
        assert not any("forward" in vars(module) for module in model.modules())
        logits: torch.Tensor = model(PROMPT).logits
        assert logits.requires_grad
        return logits

    out, logits = meeting.during(lambda: engine.loglikelihood(requests), meanwhile)
    assert torch.equal(logits, answer)
    np.testing.assert_array_equal(out.logprob, expected)


@pytest.mark.parametrize("kinds", [(False, False), (False, True), (True, False)])
def test_two_engines_run_one_model_at_once(kinds: tuple[bool, bool]) -> None:
    model, requests = ZOO["gemma2"].build(), branching_requests()[:6]
    meeting = Meeting(model.model.layers[1].mlp)
    one, other = (Engine(model, self_check=False, plain=plain) for plain in kinds)
    expected = [engine.loglikelihood(requests).logprob for engine in (one, other)]
    out = meeting.during(lambda: one.loglikelihood(requests), lambda: other.loglikelihood(requests))
    for scores, before in zip(out, expected, strict=True):
        np.testing.assert_array_equal(scores.logprob, before)


def test_threads_of_one_engine_take_turns_and_are_counted() -> None:
    engine, requests = Engine(ZOO["qwen3"].build(), pack_tokens=24), branching_requests()
    expected = Engine(ZOO["qwen3"].build()).loglikelihood(requests).logprob
    contexts, queries, labels = product_parts()
    product = Engine(ZOO["qwen3"].build()).score(contexts, queries, labels)
    with ThreadPoolExecutor(4) as pool:
        scored = [pool.submit(engine.score, contexts, queries, labels) for _ in range(4)]
        asked = [pool.submit(engine.loglikelihood, requests) for _ in range(4)]
        for each in asked:
            np.testing.assert_array_equal(each.result(SECONDS).logprob, expected)
        for each in scored:
            np.testing.assert_array_equal(each.result(SECONDS), product)
    whole = engine.totals.tokens_forwarded
    engine.loglikelihood(requests)
    once = engine.report.tokens_forwarded
    engine.score(contexts, queries, labels)
    assert whole == 4 * (once + engine.report.tokens_forwarded)


def test_the_twin_is_kept_and_made_anew_when_the_model_changes() -> None:
    model, requests = ZOO["qwen2"].build(), branching_requests()
    engine = Engine(model, **SMALL_PACKS)

    def twin() -> Any:
        engine.loglikelihood(requests[:1])
        return engine._model._doubled.twin  # type: ignore[attr-defined]

    first = twin()
    assert twin() is first
    model.model.layers[0].self_attn.scaling *= 0.5  # an attribute
    second = twin()
    assert second is not first
    assert_agrees(engine.loglikelihood(requests), model, requests)
    model.model.layers[1].mlp = ZOO["qwen2"].build().model.layers[2].mlp  # a module
    assert twin() is not second
    assert_agrees(engine.loglikelihood(requests), model, requests)
    third = twin()
    with torch.no_grad():  # weights are shared, in place or not
        model.model.layers[2].mlp.up_proj.weight.mul_(0.5)
        model.model.layers[2].mlp.down_proj.weight = nn.Parameter(0.5 * model.model.layers[2].mlp.down_proj.weight)
    assert twin() is third
    assert_agrees(engine.loglikelihood(requests), model, requests)
    model.config.rms_norm_eps = 1e-5  # a setting
    assert twin() is not third


def test_a_forward_of_somebody_else_s_needs_the_model_itself_and_others_wait() -> None:
    model, requests = ZOO["llama"].build(), branching_requests()
    engine = Engine(model, **SMALL_PACKS)
    engine.loglikelihood(requests)
    norm = model.model.norm
    norm.forward = lambda hidden: 0.5 * type(norm).forward(norm, hidden)
    assert not may_have_twins([model])
    assert_agrees(engine.loglikelihood(requests), model, requests)
    assert engine._model._doubled is None  # type: ignore[attr-defined]
    with ThreadPoolExecutor(3) as pool:
        outs = list(pool.map(lambda _: Engine(model, self_check=False).loglikelihood(requests).logprob, range(6)))
    for out in outs:
        np.testing.assert_array_equal(out, outs[0])
    del norm.forward
    assert_agrees(engine.loglikelihood(requests), model, requests)
    assert engine._model._doubled is not None  # type: ignore[attr-defined]


def test_hooks_are_given_the_module_in_their_order_and_may_be_put_in_by_hooks() -> None:
    model = ZOO["llama"].build().train()
    layer, seen = model.model.layers[1], []
    engine = Engine(model, **SMALL_PACKS)

    def late(module: nn.Module, inputs: Any, output: Any) -> None:
        seen.append("late")

    def first(module: nn.Module, inputs: Any, given: dict[str, Any]) -> None:
        assert module is layer
        assert module.training, "the module is as it was"
        assert "tree" in given
        seen.append("first")

    def second(module: nn.Module, inputs: Any, given: dict[str, Any], output: Any) -> Any:
        assert module is layer
        if "late" not in seen and seen.count("second") == 0:
            module.mlp.register_forward_hook(late)
        seen.append("second")
        return output

    layer.register_forward_pre_hook(first, with_kwargs=True)
    layer.register_forward_hook(second, with_kwargs=True)
    engine.loglikelihood([([1, 2], [3])])
    assert seen == ["first", "second"]
    engine.loglikelihood([([1, 2], [3])])
    assert seen == ["first", "second", "first", "late", "second"]
    assert "_modules" in vars(layer)
    assert type(layer._forward_hooks).__name__ in ("OrderedDict", "dict")


def test_what_a_hook_changes_in_its_module_is_computed_with() -> None:
    """Pruning and the older weight norm set the weight before each forward."""
    model, requests = ZOO["qwen2"].build(), branching_requests()
    engine = Engine(model, **SMALL_PACKS)
    before = engine.loglikelihood(requests).logprob
    linear = model.model.layers[1].mlp.up_proj
    prune.random_unstructured(linear, "weight", amount=0.5)
    assert_agrees(engine.loglikelihood(requests), model, requests)
    with torch.no_grad():
        linear.weight_orig.mul_(-1.0)  # seen by the hook alone
    out = engine.loglikelihood(requests)
    assert_agrees(out, model, requests)
    assert np.abs(out.logprob - before).max() > 1e-2


class LowRank(nn.Module):
    """An adapter as peft makes them: around a layer, switched by an attribute, with a dropout of its own."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base_layer.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, base_layer.out_features, bias=False)})
        self.lora_dropout = nn.ModuleDict({"default": nn.Dropout(0.5)})
        self.disable_adapters = False

    @property
    def weight(self) -> torch.Tensor:
        return self.base_layer.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base_layer(x)
        if not self.disable_adapters:
            result = result + self.lora_B["default"](self.lora_A["default"](self.lora_dropout["default"](x)))
        return result


def test_adapters_and_their_switches_are_seen() -> None:
    model, requests = ZOO["llama"].build().train(), branching_requests()
    engine = Engine(model, **SMALL_PACKS)
    without = engine.loglikelihood(requests).logprob
    attention, adapted = model.model.layers[1].self_attn, LowRank(model.model.layers[1].self_attn.q_proj)
    attention.q_proj = adapted
    model.lm_head = LowRank(model.lm_head)
    assert_agrees(engine.loglikelihood(requests), model, requests)
    model.lm_head.disable_adapters = True
    assert_agrees(engine.loglikelihood(requests), model, requests)
    assert engine.layers == "transformers"
    adapted.disable_adapters = True
    np.testing.assert_allclose(engine.loglikelihood(requests).logprob, without, atol=1e-4)
    again = Engine(model, **SMALL_PACKS)
    model.lm_head.disable_adapters = adapted.disable_adapters = False
    assert_agrees(again.loglikelihood(requests), model, requests)
    assert all(module.training for module in model.modules()), "dropout was switched off in the model"


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_an_adapter_around_a_layer_that_is_not_square_is_served(name: str) -> None:
    model: Any = ZOO[name].build()
    requests = branching_requests()
    if name == "gpt2":  # whose layers have weights of [inputs, outputs]
        layer: Any = model.transformer.h[0].mlp
        layer.c_fc.in_features, layer.c_fc.out_features = layer.c_fc.weight.shape
        layer.c_fc = adapter = LowRank(layer.c_fc)
    else:
        layer = model.model.layers[0].self_attn
        layer.k_proj = adapter = LowRank(layer.k_proj)
        adapter.in_features, adapter.out_features = 32, 16  # type: ignore[assignment]  # as peft's say
        model.model.layers[1].mlp.down_proj = LowRank(model.model.layers[1].mlp.down_proj)
    assert len(set(adapter.weight.shape)) == 2
    engine = Engine(model)
    assert_agrees(engine.loglikelihood(requests), model, requests)
    assert engine.layers == "transformers"
    served = TreeModel(model)
    products = selfcheck._products(served)  # each of which the first use tries by itself
    with served.attached():
        for (outputs, inputs, _), product in products.items():
            assert product(torch.ones(3, inputs)).shape == (3, outputs)
    assert {(16, 32, "LowRank"), (2, 32, "Linear")} <= set(products) or name == "gpt2"


class Related(nn.Module):
    """A module that knows its parent and its siblings, in every way that one may."""

    def __init__(self, parent: nn.Module, sibling: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "parent", parent)
        self.weak, self.method = weakref.ref(parent), sibling.forward
        self.siblings, self.named = [sibling], {"sibling": (sibling, 3)}
        self.shared = [1, 2]


def test_what_refers_to_a_module_refers_to_its_double() -> None:
    root = nn.Module()
    root.linear = nn.Linear(2, 2)
    root.again, root.tied = root.linear, nn.Linear(2, 2)
    root.tied.weight = root.linear.weight
    root.related = Related(root, root.linear)
    outside = nn.Linear(2, 2)
    root.related.outside = [outside]
    twin = Twin([root])
    double: Any = twin[root]
    assert double is not root
    assert type(double) is type(root)
    assert double.linear is double.again is twin[root.linear] is not root.linear
    assert double.linear.weight is double.tied.weight is root.linear.weight
    related = double.related
    assert related.parent is related.weak() is double
    assert related.method.__self__ is related.siblings[0] is related.named["sibling"][0] is double.linear
    assert related.shared is root.related.shared
    assert related.outside[0] is twin[outside] is outside
    assert not double.training
    assert root.training
    assert twin.is_current([root])
    for change in (
        lambda: setattr(root.related, "new", 1),
        lambda: setattr(root, "tied", nn.Linear(2, 2)),
        lambda: setattr(root.linear, "__class__", nn.Identity),
        lambda: root.register_buffer("table", torch.zeros(1)),
        lambda: setattr(root, "table", torch.ones(1)),
        lambda: root.tied.register_parameter("more", None),
        lambda: setattr(root.related, "forward", abs),
    ):
        twin = Twin([root])
        change()
        assert not twin.is_current([root])
    assert not Twin([root]).is_current([root, outside])
    assert not may_have_twins([root])


def test_a_compiled_module_s_double_runs_as_it_is() -> None:
    linear = nn.Linear(2, 2)
    linear.compile(backend="eager")
    double = Twin([linear])[linear]
    assert double._compiled_call_impl is None
    assert linear._compiled_call_impl is not None
    x = torch.ones(1, 2)
    assert torch.equal(double(x), nn.functional.linear(x, linear.weight, linear.bias))


def test_recording_of_hidden_states_puts_no_hooks_into_the_model() -> None:
    model, requests = ZOO["llama"].build(), branching_requests()
    expected = Engine(model, **SMALL_PACKS).loglikelihood(requests).logprob
    model.config.output_hidden_states = True
    engine = Engine(model, **SMALL_PACKS)
    np.testing.assert_array_equal(engine.loglikelihood(requests).logprob, expected)
    assert engine.layers == "fused"
    assert not any(module._forward_hooks for module in model.modules())
    assert len(model(PROMPT).hidden_states) == 4


def test_rotary_tables_that_change_as_they_run_change_in_the_double_alone() -> None:
    entry = ZOO["llama"]
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    settings = {**entry.settings, "rope_parameters": rope, "max_position_embeddings": 32}
    model = type(entry)(entry.model, entry.config, settings).build()
    requests = [(random_ids(np.random.default_rng(0), 20), [3])]
    engine = Engine(model, self_check=False)
    model(torch.arange(50)[None])  # beyond the window, so that the table is that of a longer text
    rotary = model.model.rotary_emb
    table = rotary.inv_freq
    out = engine.loglikelihood(requests)
    assert rotary.inv_freq is table, "the model's own table was set back"
    assert abs(out.logprob[0] - scoring.loglikelihood(model, requests)[0].logprob) <= 1e-4


def test_calls_within_calls_run_as_they_would_alone() -> None:
    """Other ways of running within one that is under way: a layer alone, all, transformers' own."""
    model, requests = TreeModel(ZOO["gemma3"].build()), branching_requests()
    fused, plainly = (Engine(model.model, layers=layers, **SMALL_PACKS) for layers in ("auto", "transformers"))
    expected = [engine.loglikelihood(requests).logprob for engine in (fused, plainly)]
    inner = fused._model
    assert isinstance(inner, TreeModel)
    with inner.attached(layer=1):
        np.testing.assert_array_equal(fused.loglikelihood(requests).logprob, expected[0])
        with inner.attached(fused=False):
            np.testing.assert_array_equal(fused.loglikelihood(requests).logprob, expected[0])
        np.testing.assert_array_equal(plainly.loglikelihood(requests).logprob, expected[1])
    np.testing.assert_array_equal(fused.loglikelihood(requests).logprob, expected[0])


def test_after_an_interrupt_the_model_and_the_engine_are_as_before() -> None:
    model: PreTrainedModel = ZOO["llama"].build()
    engine, requests = Engine(model, **SMALL_PACKS), branching_requests()
    expected, answer = engine.loglikelihood(requests).logprob, model(PROMPT).logits

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model.model.layers[1].register_forward_hook(interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.loglikelihood(requests)
    handle.remove()
    assert torch.equal(model(PROMPT).logits, answer)
    np.testing.assert_array_equal(engine.loglikelihood(requests).logprob, expected)
