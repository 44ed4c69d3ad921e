"""A model that others change while a session lives: what was computed of it as it was is never read again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from test_session import CONTEXTS, LABELS, QUERIES, ids
from test_twin import LowRank
from torch import nn
from torch.nn.utils import prune
from zoo import VOCAB, ZOO

from iclperm.engine import Engine
from iclperm.errors import ModelError
from iclperm.reference import scoring

Change = Callable[[Any], Any]


def first(model: Any) -> Any:
    return model.get_decoder().layers[0]


def step(model: Any) -> None:
    """One of a fused optimizer, which torch does not count among the writes of a weight."""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW(model.parameters(), lr=0.1, fused=True).step()


CHANGES: dict[str, tuple[str, Change]] = {
    "a scale of attention": ("llama", lambda m: setattr(first(m).self_attn, "scaling", 0.05)),
    "a norm's epsilon": ("llama", lambda m: setattr(first(m).input_layernorm, "variance_epsilon", 5.0)),
    "a rotary scale": ("llama", lambda m: setattr(m.model.rotary_emb, "attention_scaling", 3.0)),
    "an activation": ("llama", lambda m: setattr(first(m).mlp, "act_fn", nn.ReLU())),
    "a buffer": ("llama", lambda m: setattr(m.model.rotary_emb, "inv_freq", m.model.rotary_emb.inv_freq * 0.5)),
    "a buffer in place": ("llama", lambda m: m.model.rotary_emb.inv_freq.mul_(0.5)),
    "a buffer's data": ("llama", lambda m: m.model.rotary_emb.inv_freq.data.mul_(0.5)),
    "a scale of embeddings": ("gemma3", lambda m: m.model.embed_tokens.embed_scale.mul_(2.0)),
    "a soft-cap": ("gemma2", lambda m: setattr(first(m).self_attn, "attn_logit_softcapping", 1.0)),
    "the logits' soft-cap": ("gemma2", lambda m: setattr(m.config, "final_logit_softcapping", 1.0)),
    "a scale of the logits": ("cohere", lambda m: setattr(m, "logit_scale", 3.0)),
    "a window": ("mistral-window", lambda m: setattr(m.config, "sliding_window", 3)),
    "weights by a fused optimizer": ("llama", step),
    "a weight's data": ("llama", lambda m: first(m).mlp.up_proj.weight.data.mul_(2.0)),
    "a weight with other data": ("llama", lambda m: setattr(first(m).mlp.up_proj.weight, "data", torch.ones(56, 32))),
    "the head": ("llama", lambda m: setattr(m, "lm_head", nn.Linear(32, VOCAB))),
    "the output embeddings": ("llama", lambda m: m.set_output_embeddings(nn.Linear(32, VOCAB))),
    "the vocabulary": ("llama", lambda m: m.resize_token_embeddings(VOCAB + 9, mean_resizing=False)),
    "the embeddings": ("llama", lambda m: m.set_input_embeddings(nn.Embedding(VOCAB, 32))),
    "the decoder": ("llama", lambda m: setattr(m, "model", ZOO["qwen2"].build().model)),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("layers", ["auto", "transformers"])
def test_every_change_is_noticed(name: str, layers: str) -> None:
    kind, change = CHANGES[name]
    engine = Engine(ZOO[kind].build(), layers=layers)
    with engine.session() as session:
        node = session.extend(None, CONTEXTS[0])
        before = session.score([node], QUERIES, LABELS)
        with torch.no_grad():
            change(engine.model)
        other = Engine(engine.model, layers=layers, self_check=False)
        expected, after = other.score(CONTEXTS[:1], QUERIES, LABELS), session.score([node], QUERIES, LABELS)
        assert np.array_equal(after, expected)
        assert not np.allclose(after, before)
        assert np.array_equal(engine.score(CONTEXTS[:1], QUERIES, LABELS), expected)
        with other.session() as another:
            hidden = another.hidden_states([another.extend(None, CONTEXTS[0])])
        assert torch.equal(session.hidden_states([node]), hidden)
        assert abs(plainly(engine.model) - float(after[0, 0, 0])) < 1e-3
        session.score([node], QUERIES, LABELS)
        assert engine.report.tokens_forwarded == 0, "what is as it was is kept"


def plainly(model: Any) -> float:
    logprobs = scoring.next_token_logprobs(model, CONTEXTS[0] + QUERIES[0])
    return float(logprobs[LABELS[0][0]])


def test_switches_of_an_adapter_are_noticed() -> None:
    """What peft's are: attributes, and dictionaries and lists that stay the same objects."""
    model: Any = ZOO["llama"].build()
    adapter = LowRank(first(model).mlp.up_proj)
    adapter.strength, adapter.merged = {"default": 1.0}, []  # type: ignore[assignment]
    adapter.register_forward_hook(lambda module, _, out: out * module.strength["default"] + 0.1 * len(module.merged))
    first(model).mlp.up_proj = adapter
    engine = Engine(model)
    assert engine.layers == "transformers"
    with engine.session() as session:
        node, seen = session.extend(None, CONTEXTS[0]), []
        for change in (
            lambda: None,
            lambda: setattr(adapter, "disable_adapters", True),
            lambda: setattr(adapter, "disable_adapters", False),
            lambda: adapter.strength.update(default=0.5),
            lambda: adapter.merged.append("default"),
        ):
            change()
            found = session.score([node], QUERIES, LABELS)
            assert np.array_equal(found, Engine(model, self_check=False).score(CONTEXTS[:1], QUERIES, LABELS))
            seen.append(found.tobytes())
        assert seen[0] == seen[2]
        assert len(set(seen)) == 4


class Containers(nn.Module):
    """An adapter that keeps what it computes with in plain lists and dictionaries, modules among them."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base, self.more = base, nn.Linear(base.in_features, base.out_features)
        self.parts: list[Any] = [self.more, 0.5]
        self.named: Any = {"scale": 0.3, "more": {"and": ({"more": self.more, "scale": 1.0},)}}
        self.vectors = {"steer": [torch.ones(base.out_features)]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ((deep,), (vector,)) = self.named["more"]["and"], self.vectors["steer"]
        more: torch.Tensor = self.parts[0](x) * self.parts[1] + deep["more"](x) * deep["scale"] * self.named["scale"]
        steered: torch.Tensor = self.base(x) + more + vector
        return steered


def test_what_lists_and_dictionaries_beside_modules_hold_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = ZOO["llama"].build()
    first(model).mlp.up_proj = adapter = Containers(first(model).mlp.up_proj)
    kind, forward = type(first(model).mlp), type(first(model).mlp).forward
    engine = Engine(model)
    with engine.session() as session:
        node = session.extend(None, CONTEXTS[0])
        before = session.score([node], QUERIES, LABELS)
        for change in (
            lambda: adapter.parts.__setitem__(1, 2.0),
            lambda: adapter.parts.__setitem__(0, nn.Linear(32, 56)),
            lambda: adapter.named.update(scale=2.0),
            lambda: adapter.named["more"]["and"][0].update(scale=3.0),
            lambda: adapter.vectors["steer"][0].mul_(-2.0),
            lambda: adapter.vectors["steer"].__setitem__(0, torch.zeros(56)),
            lambda: monkeypatch.setattr(kind, "forward", lambda self, x: 2 * forward(self, x)),
        ):
            change()
            after = session.score([node], QUERIES, LABELS)
            assert np.array_equal(engine.score(CONTEXTS[:1], QUERIES, LABELS), after)
            assert abs(plainly(model) - float(after[0, 0, 0])) < 1e-3
            assert not np.allclose(after, before)
            before = after


def test_a_class_that_is_patched_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(ZOO["llama"].build())
    clean, forward = engine.score(CONTEXTS[:1], QUERIES, LABELS), type(first(engine.model).mlp).forward
    with monkeypatch.context() as patch:
        patch.setattr(type(first(engine.model).mlp), "forward", lambda self, x: 2 * forward(self, x))
        patched = engine.score(CONTEXTS[:1], QUERIES, LABELS)
        assert engine.layers == "transformers"
        assert abs(plainly(engine.model) - float(patched[0, 0, 0])) < 1e-3
    assert np.array_equal(engine.score(CONTEXTS[:1], QUERIES, LABELS), clean)
    assert engine.layers == "fused"
    assert not np.allclose(patched, clean)


def test_a_hook_of_all_modules_is_noticed() -> None:
    engine = Engine(ZOO["llama"].build())
    with engine.session() as session:
        node = session.extend(None, CONTEXTS[0])
        clean = session.score([node], QUERIES, LABELS)
        handle = nn.modules.module.register_module_forward_hook(
            lambda module, _, out: out * 2 if type(module).__name__ == "LlamaMLP" else None
        )
        try:
            found = session.score([node], QUERIES, LABELS)
            assert np.array_equal(found, Engine(engine.model).score(CONTEXTS[:1], QUERIES, LABELS))
        finally:
            handle.remove()
        assert not np.allclose(found, clean)
        assert np.array_equal(session.score([node], QUERIES, LABELS), clean)


def test_what_does_not_matter_gives_nothing_up() -> None:
    model: Any = ZOO["llama"].build()
    engine = Engine(model)
    prune.random_unstructured(first(model).mlp.up_proj, "weight", amount=0.5)  # whose hook sets an attribute each time
    with engine.session() as session:
        node = session.extend(None, CONTEXTS[0])
        session.score([node], QUERIES, LABELS)
        for change in (
            model.train,
            model.eval,
            lambda: setattr(first(model).self_attn, "scaling", float(str(first(model).self_attn.scaling))),
            lambda: model(torch.tensor([[1, 2, 3]]), output_hidden_states=True),
        ):
            change()
            session.score([node], QUERIES, LABELS)
            assert engine.report.tokens_forwarded == 0
        with torch.no_grad():
            first(model).mlp.up_proj.weight_orig.mul_(2.0)
        session.score([node], QUERIES, LABELS)
        assert engine.report.tokens_forwarded > 0


def test_a_model_in_other_numbers_is_refused_in_one_line() -> None:
    engine = Engine(ZOO["llama"].build())
    with engine.session() as session:
        node = session.extend(None, CONTEXTS[0])
        expected = session.score([node], QUERIES, LABELS)
        engine.model.to(torch.bfloat16)
        for call in (
            lambda: session.score([node], QUERIES, LABELS),
            lambda: engine.score(CONTEXTS, QUERIES, LABELS),
            lambda: engine.generate(CONTEXTS, 2),
        ):
            with pytest.raises(ModelError, match=r"^the model is torch.bfloat16 on cpu now, .*; make another Engine"):
                call()
        engine.model.to(torch.float32)
        assert session.score([node], QUERIES, LABELS).shape == expected.shape


@pytest.mark.parametrize("has_twin", [True, False])
def test_a_hook_that_was_there_for_some_packs_leaves_nothing(has_twin: bool) -> None:
    model = ZOO["llama"].build()
    if not has_twin:
        norm: Any = model.model.norm
        norm.forward = partial(type(norm).forward, norm)
    clean, engine = Engine(model).score(CONTEXTS[:1], QUERIES, LABELS), Engine(model, pack_tokens=8)
    handles: list[Any] = []
    told = iter(range(1000))

    def progress(*_: int) -> None:
        match next(told):
            case 1:
                handles.append(first(model).register_forward_hook(lambda module, _, out: out * 3))
            case 3:
                handles.pop().remove()

    with engine.session() as session:
        node = session.extend(None, CONTEXTS[0])
        during = session.score([node], QUERIES, LABELS, progress=progress)
        assert not handles
        assert np.array_equal(during, clean), "the path was computed again when the hook was gone"
        assert np.array_equal(session.score([node], QUERIES, LABELS), clean)


def test_a_hook_that_comes_and_goes_within_a_pass_leaves_nothing() -> None:
    model = ZOO["llama"].build()
    engine = Engine(model, layers="transformers")
    clean, layers, left = engine.score(CONTEXTS[:1], QUERIES, LABELS), model.model.layers, [1]

    def for_a_moment(*_: Any) -> None:
        """Whoever this is, it is gone when the pass ends; the hook that stays does nothing itself."""
        if left:
            left.pop()
            handle = layers[1].register_forward_hook(lambda module, _, out: (handle.remove(), out * 3)[1])

    layers[0].register_forward_hook(for_a_moment)
    with engine.session() as session:
        node = session.extend(None, CONTEXTS[0])
        assert np.array_equal(session.score([node], QUERIES, LABELS), clean)
        assert not left
        assert engine.report.num_packs == 2, "the pack runs again"
        assert session.num_resident == engine.report.tokens_forwarded // 2
        session.score([node], QUERIES, LABELS)
        assert engine.report.tokens_forwarded == 0


def test_a_model_that_never_stays_the_same_is_answered_and_nothing_is_kept() -> None:
    model = ZOO["llama"].build()
    engine = Engine(model, pack_tokens=8)
    attention, scaling = first(model).self_attn, first(model).self_attn.scaling
    with engine.session() as session:
        node = session.extend(None, CONTEXTS[0])
        found = session.score(
            [node], QUERIES, LABELS, progress=lambda *_: setattr(attention, "scaling", attention.scaling * 1.01)
        )
        assert np.isfinite(found).all()
        attention.scaling = scaling
        clean = engine.score(CONTEXTS[:1], QUERIES, LABELS)
        assert np.array_equal(session.score([node], QUERIES, LABELS), clean)


def test_whoever_patches_the_model_in_another_thread_leaves_nothing() -> None:
    model = ZOO["llama"].build()
    engine, clean = Engine(model, pack_tokens=16), Engine(model, pack_tokens=16)
    contexts = [ids(seed, 40) for seed in range(12)]
    expected, is_over = clean.score(contexts, QUERIES[:1], LABELS), threading.Event()

    def patch() -> None:
        while not is_over.is_set():
            handle = first(model).register_forward_hook(lambda module, _, out: out * 3)
            with torch.no_grad():
                model(torch.tensor([contexts[0][:20]]))
            handle.remove()
            time.sleep(0.002)

    other = threading.Thread(target=patch)
    with engine.session() as session:
        nodes = [session.extend(None, context) for context in contexts]
        other.start()
        try:
            for node in nodes:
                session.score([node], QUERIES[:1], LABELS)
        finally:
            is_over.set()
            other.join()
        assert np.array_equal(session.score(nodes, QUERIES[:1], LABELS), expected)


def test_another_default_device_changes_nothing() -> None:
    for layers in ("auto", "transformers"):
        model = ZOO["llama"].build()
        expected = Engine(model, layers=layers).score(CONTEXTS, QUERIES, LABELS)
        texts = Engine(model, layers=layers).generate(CONTEXTS, 4).token_ids
        with torch.device("meta"):  # the first use, which checks every kernel, too
            engine = Engine(model, layers=layers)
            assert np.array_equal(engine.score(CONTEXTS, QUERIES, LABELS), expected)
            assert [*map(list, engine.generate(CONTEXTS, 4).token_ids)] == [*map(list, texts)]
            with engine.session() as session:
                nodes = [session.extend(None, context) for context in CONTEXTS]
                assert np.array_equal(session.score(nodes, QUERIES, LABELS), expected)
