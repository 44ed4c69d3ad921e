"""Decoding on a GPU: the same texts in any company, and steps of the same rows made on the device from one to the next.

Tests marked ``gpu`` run on a CUDA device, else in Triton's interpreter (`devices`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations
from typing import Any, cast

import numpy as np
import pytest
import torch
import triton_interpreter
from devices import DEVICE
from test_engine import random_ids
from test_generate import EOS, branching_prompts, count_ties, ended_by, generated, plain_texts, product
from test_staging import RecordedLink, read_late, watch
from tolerances import TOLERANCES
from transformers import PreTrainedModel
from zoo import VOCAB, ZOO

from iclperm.engine import Engine, plan_product
from iclperm.engine.decode import Decoder, GenerationLimits
from iclperm.engine.kernels import live, triton_head
from iclperm.engine.kernels.chunks import CHUNK
from iclperm.engine.kernels.triton_attention import TritonAttention
from iclperm.engine.kernels.triton_decode import DecodeAttention
from iclperm.engine.model import TreeModel
from iclperm.engine.plan import Pack
from iclperm.engine.texts import Generations
from iclperm.reference.generation import greedy_one

triton_interpreter.repair()

NEVER = [VOCAB]  # ends no text


@pytest.fixture
def packs(monkeypatch: pytest.MonkeyPatch) -> list[Pack]:
    """The packs that ran, in order; each layer's live rows are attended by their own kernel, and no others are."""
    ran: list[Pack] = []
    attended = {DecodeAttention: list[int](), TritonAttention: list[int]()}
    run = TreeModel.run

    def watched(self: TreeModel, tree: Any) -> torch.Tensor:
        for layers in attended.values():
            layers.clear()
        hidden = run(self, tree)
        pack, num_layers = tree.pack, self.num_layers
        assert len(attended[DecodeAttention]) == (0 if pack.live is None else num_layers)
        assert len(attended[TritonAttention]) == (0 if pack.is_live else num_layers)
        ran.append(pack)
        return hidden

    def counted(kind: Any) -> Any:
        original = kind.__call__

        def attending(self: Any, *args: Any) -> torch.Tensor:
            attended[kind].append(1)
            return original(self, *args)  # type: ignore[no-any-return]

        return attending

    for kind in attended:
        monkeypatch.setattr(kind, "__call__", counted(kind))
    monkeypatch.setattr(TreeModel, "run", watched)
    return ran


def kinds_of(packs: list[Pack]) -> set[str]:
    return {"prompts" if pack.live is None else "steps" if pack.is_live else "both" for pack in packs}


def on_triton(model: PreTrainedModel, **options: Any) -> Engine:
    model.to(DEVICE)  # type: ignore[arg-type]
    engine = Engine(model, attention="triton", self_check=False, **options)
    assert engine.attention == "triton"
    return engine


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen2-window", "gemma3", "gpt2"])
def test_an_engine_on_triton_says_what_plain_decoding_says(name: str, packs: list[Pack]) -> None:
    prompts = branching_prompts()
    out = on_triton(ZOO[name].build(), pack_tokens=32).generate(prompts, max_new_tokens=3)
    assert kinds_of(packs) == {"prompts", "both", "steps"}
    assert count_ties(out, plain_texts(name, prompts, 3, EOS)) == 0


@pytest.mark.gpu
def test_a_text_that_grows_over_a_chunk_says_what_plain_decoding_says(packs: list[Pack]) -> None:
    entry = ZOO["llama"]
    entry = replace(entry, settings=entry.settings | {"max_position_embeddings": 2 * CHUNK})
    model, rng = entry.build(), np.random.default_rng(0)
    context = random_ids(rng, CHUNK - 7)
    prompts = [context + random_ids(rng, size) for size in (2, 5)]
    with ended_by(model, NEVER):
        out = on_triton(model).generate(prompts, max_new_tokens=8)
    positions = np.concatenate([pack.positions for pack in packs if pack.is_live])
    assert positions.min() < CHUNK < positions.max()
    assert count_ties(out, [greedy_one(model, prompt, 8) for prompt in prompts], None) == 0


def ends_of_many_lengths(model: PreTrainedModel, prompts: list[list[int]], num_new: int) -> list[int]:
    """The two tokens at which these texts would end most unlike."""
    texts = [[step.token for step in greedy_one(model, prompt, num_new)] for prompt in prompts]

    def variety(pair: Iterable[int]) -> int:
        lengths = {next((n for n, token in enumerate(text) if token in pair), num_new) for text in texts}
        return len(lengths - {0})

    return list(max(combinations(sorted({token for text in texts for token in text}), 2), key=variety))


def assert_same(found: Generations, expected: Generations, places: list[int] | None = None) -> None:
    for number, place in enumerate(range(len(expected)) if places is None else places):
        assert found.token_ids[number].tolist() == expected.token_ids[place].tolist()
        assert found.logprob[number] == expected.logprob[place]
        assert found.finish[number] == expected.finish[place]


@pytest.mark.gpu
def test_a_text_in_any_company_has_the_same_bits(packs: list[Pack]) -> None:
    """Alone, among others in small packs and large, and behind others whose place it takes."""
    model, prompts = ZOO["gemma2"].build(), branching_prompts()[1:8]
    with ended_by(model, ends_of_many_lengths(model, prompts, 4)):
        expected = on_triton(model).generate(prompts, max_new_tokens=4)
        assert len(set(expected.num_tokens.tolist())) > 1, "rows end together"
        orders = np.random.default_rng(1).permutation(len(prompts)).tolist()
        small = on_triton(model, pack_tokens=20)
        packs.clear()
        assert_same(small.generate([prompts[n] for n in orders], max_new_tokens=4), expected, orders)
        assert kinds_of(packs) == {"prompts", "both", "steps"}
        few = on_triton(model)
        limit_rows(few, 3)
        packs.clear()
        assert_same(few.generate(prompts, max_new_tokens=4), expected)
        assert max(len(pack.live) for pack in packs if pack.live is not None) == 3
        assert "both" in kinds_of(packs), "no row took the place of one that had ended"
        for number in (0, len(prompts) - 1):
            assert_same(small.generate([prompts[number]], max_new_tokens=4), expected, [number])


@pytest.mark.gpu
def test_units_in_another_order_say_the_same() -> None:
    contexts, queries = product()
    plan = plan_product(contexts[1:4], queries[:3], [[0]], pack_tokens=64, unit_tokens=20, repeated_share=1.0)
    engine = on_triton(ZOO["llama"].build(), pack_tokens=64)
    expected = generated(engine, plan, num_new=3)
    assert plan.num_units > 2
    assert generated(engine, plan, list(range(plan.num_units))[::-1], num_new=3) == expected
    assert generated(engine, plan, [plan.num_units - 1], num_new=3).items() <= expected.items()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the host made: lists of work items, packs, and steps that followed from the one before."""
    events: list[str] = []

    def noted(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def noting(*args: Any, **options: Any) -> Any:
            events.append(name)
            return original(*args, **options)

        monkeypatch.setattr(owner, name, noting)

    noted(live, "list_items")
    noted(TreeModel, "stage")
    noted(TreeModel, "go_on")
    return events


def recorded(engine: Engine) -> RecordedLink:
    """From now on the engine's device goes on by itself."""
    link = engine._model.link = RecordedLink()
    return link


def limit_rows(engine: Engine, most: int) -> None:
    """From now on at most so many rows are live."""
    engine._generation_limits = lambda *_: GenerationLimits(most, 64)  # type: ignore[method-assign]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_steps_of_the_same_rows_are_made_on_the_device(
    name: str, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is made or sent, the host waits for nothing but tokens, and those it reads one step late."""
    model, prompts, num_new = ZOO[name].build(), branching_prompts()[2:5], 7
    waits = watch(monkeypatch, "stage", "go_on", "run", "choose")
    engine = on_triton(model)
    with ended_by(model, NEVER):
        with monkeypatch.context() as patch:
            patch.setattr(Decoder, "_goes_on", lambda self, step: False)
            expected = engine.generate(prompts, max_new_tokens=num_new)
        assert made.count("list_items") == num_new - 1, "a step was not made anew"
        assert "go_on" not in made
        link = recorded(engine)
        waits.clear()
        for call in range(2):  # the first shows what packs ask for
            made.clear()
            link.log.clear()
            assert_same(engine.generate(prompts, max_new_tokens=num_new), expected)
            assert made.count("stage") == 2, "prompts, then the first step"
            assert made.count("go_on") == num_new - 2
            assert made.count("list_items") == 1
            assert call == 0 or link.log.count("upload") == 2
    assert not waits
    steps = link.log[link.log.index("read") + 1 :]
    assert steps.count("read") == steps.count("launch") == num_new - 1
    assert read_late(steps)
    assert engine.report.discarded_tokens == 0
    assert engine.report.seconds["host"] > 0


def test_rows_that_end_while_the_next_step_runs_are_counted(made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model, rng = ZOO["llama"].build(), np.random.default_rng(5)
    prompts = [random_ids(rng, 6) for _ in range(6)]
    watch(monkeypatch)
    engine = on_triton(model)
    limit_rows(engine, 4)
    with ended_by(model, ends_of_many_lengths(model, prompts, 8)):
        expected = engine.generate(prompts, max_new_tokens=8)
        assert engine.report.discarded_tokens == 0
        fed = engine.report.tokens_forwarded
        recorded(engine)
        assert_same(engine.generate(prompts, max_new_tokens=8), expected)
    report = engine.report
    assert len(set(expected.num_tokens.tolist())) > 1, "all rows ended together"
    assert 0 < report.discarded_tokens < fed / 4
    assert report.tokens_forwarded == fed + report.discarded_tokens
    assert "go_on" in made


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:All-NaN slice:RuntimeWarning")
def test_a_row_without_a_number_ends_while_the_next_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its token, which is none, is fed all the same."""
    model, prompts = ZOO["llama"].build(), branching_prompts()[3:6]
    first, embedding = greedy_one(model, prompts[0], 3), cast(Any, model.get_input_embeddings())
    with torch.no_grad():  # whoever reads this token has no finite logits
        embedding.weight[first[1].token] = torch.nan
    watch(monkeypatch)
    engine = on_triton(model)
    expected = engine.generate(prompts, max_new_tokens=6)
    recorded(engine)
    found = engine.generate(prompts, max_new_tokens=6)
    assert expected.finish[0] == "invalid"
    assert "invalid" in found.finish
    assert [ids.tolist() for ids in found.token_ids] == [ids.tolist() for ids in expected.token_ids]
    assert found.finish == expected.finish
    assert engine.report.discarded_tokens > 0


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:All-NaN slice:RuntimeWarning")
@pytest.mark.parametrize("softcap", [0.0, 8.0])
def test_the_fused_head_chooses_what_the_logits_say(softcap: float) -> None:
    rng = np.random.default_rng(0)
    hidden, weight = (torch.from_numpy(rng.normal(size=(n, 48)).astype(np.float32)) for n in (9, 333))
    hidden[4, 3] = torch.nan
    weight[200] = weight[7] = 3 * hidden[0]  # a tie: the first wins
    token, logprob, is_finite = triton_head.choose_rows(hidden.to(DEVICE), weight.to(DEVICE), None, softcap=softcap)
    logits = hidden.double() @ weight.double().T
    capped = softcap * torch.tanh(logits / softcap) if softcap else logits
    assert is_finite.tolist() == [row != 4 for row in range(9)]
    assert token[0] == 7
    for row in np.flatnonzero(is_finite).tolist():
        expected = torch.log_softmax(capped[row], dim=-1)
        assert token[row] == int(expected.argmax()) or row == 0
        assert abs(logprob[row] - float(expected.max())) <= TOLERANCES["head"]["float32"]


@pytest.mark.gpu
def test_nothing_is_chosen_of_no_rows() -> None:
    nothing = torch.empty(0, 16, device=DEVICE)
    assert [part.size for part in triton_head.choose_rows(nothing, torch.ones(5, 16, device=DEVICE), None)] == [0, 0, 0]
