"""Greedy generation against plain decoding, one prompt at a time and without a cache.

More than 600 lines because the models and the slow decoding of the module are shared by all of its tests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine import random_ids
from tiny import byte_level_tokenizer, dummy_prefix_tokenizer
from tokenizers import Tokenizer, decoders, models
from tolerances import TOLERANCES
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from zoo import VOCAB, WINDOW, ZOO

from iclperm.engine import ContextPaths, Engine, memory, plan_product
from iclperm.engine import decode as decode_module
from iclperm.engine.decode import GenerationLimits, RowLimit, generation_bounds
from iclperm.engine.estimate import estimate
from iclperm.engine.footprint import Sizes
from iclperm.engine.forward import TreeForward
from iclperm.engine.model import TreeModel
from iclperm.engine.plan import Pack
from iclperm.engine.rows import Branches, Slots
from iclperm.engine.texts import Ending, Generations, eos_ids
from iclperm.engine.tree import Rows, build_tree
from iclperm.errors import OutOfMemory, PlanError, RequestError
from iclperm.reference.generation import Step, generate_one, greedy_one
from iclperm.reference.trie import fed_prefixes

PER_TOKEN = TOLERANCES["loglikelihood per token"]["float32"]
SMALL_PACKS: dict[str, Any] = {"pack_tokens": 24, "self_check": False}
EOS = 2


@pytest.fixture
def llama() -> PreTrainedModel:
    return served("llama")


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@contextmanager
def ended_by(model: PreTrainedModel, ids: list[int]) -> Iterator[None]:
    before = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = ids
    try:
        yield
    finally:
        model.generation_config.eos_token_id = before


def branching_prompts(seed: int = 0) -> list[list[int]]:
    """Shared stems past the window, prompts that are prefixes of others, duplicates."""
    rng = np.random.default_rng(seed)
    stem = random_ids(rng, 40)
    assert len(stem) > 3 * WINDOW
    return [stem[:n] for n in (1, 5, 5, 20, 40)] + [stem[:n] + random_ids(rng, k) for n in (5, 20) for k in (1, 6)]


@cache
def served(name: str) -> PreTrainedModel:
    return ZOO[name].build()


@cache
def plain_text(name: str, prompt: tuple[int, ...], num_new: int, eos: int = EOS) -> list[Step]:
    return greedy_one(served(name), prompt, num_new, {eos})


def plain_texts(name: str, prompts: Sequence[Sequence[int]], num_new: int, eos: int = EOS) -> list[list[Step]]:
    return [plain_text(name, tuple(prompt), num_new, eos) for prompt in prompts]


def ids_of(steps: Sequence[Step], eos: int | None = EOS) -> list[int]:
    return [step.token for step in steps if step.token != eos]


def count_ties(out: Generations, plain: Sequence[Sequence[Step]], eos: int | None = EOS) -> int:
    """How many texts part from the oracle's where its two best tokens lie within the tolerance; the others must be
    equal, and their log-probabilities close."""
    ties = 0
    for ids, logprob, steps in zip(out.token_ids, out.logprob, plain, strict=True):
        expected = ids_of(steps, eos)
        if ids.tolist() == expected:
            assert abs(logprob - sum(step.logprob for step in steps)) <= PER_TOKEN * len(steps)
            continue
        first = next(n for n, step in enumerate(steps) if n >= len(ids) or ids[n] != step.token)
        assert steps[first].margin <= PER_TOKEN, f"{ids.tolist()} where plain decoding gives {expected}"
        ties += 1
    return ties


@pytest.mark.parametrize(
    ("name", "attention"),
    [(name, "native") for name in ZOO] + [(name, "torch") for name in ("llama", "qwen2-window", "gemma2", "gpt2")],
)
def test_every_architecture_says_what_plain_decoding_says(name: str, attention: str) -> None:
    model, prompts, num_new = served(name), branching_prompts(), WINDOW
    engine = Engine(model, attention=attention, **SMALL_PACKS)
    out = engine.generate(prompts, max_new_tokens=num_new)
    eos = model.generation_config.eos_token_id
    plain = plain_texts(name, prompts, num_new, eos)
    assert count_ties(out, plain, eos) == 0, "a seed with ties tells nothing; take another"
    assert out.finish == ["eos" if steps[-1].token == eos else "length" for steps in plain]
    assert out.num_tokens.tolist() == [len(steps) for steps in plain]
    assert out.text is None
    assert not out.state.any()
    report = engine.report
    assert engine.attention == attention
    assert report.num_packs > num_new, "keys never crossed a pack border"
    fed = [(prompt, ids_of(steps, None)) for prompt, steps in zip(prompts, plain, strict=True)]
    assert report.tokens_forwarded == report.tokens_unique
    assert report.tokens_forwarded >= len(fed_prefixes(fed))
    assert report.tokens_generated == sum({tuple(p): len(s) for p, s in zip(prompts, plain, strict=True)}.values())
    assert len({tuple(ids.tolist()) for ids in out.token_ids}) > 2, "the model says the same to every prompt"


def test_a_tie_is_counted_and_any_other_difference_is_not(llama: PreTrainedModel) -> None:
    out = Engine(llama, **SMALL_PACKS).generate([[1, 5, 9]], max_new_tokens=3)
    steps = greedy_one(llama, [1, 5, 9], 3)
    other = [steps[0], Step((steps[1].token + 1) % VOCAB, steps[1].logprob, PER_TOKEN / 2, True), steps[2]]
    assert count_ties(out, [other]) == 1
    with pytest.raises(AssertionError, match="where plain decoding gives"):
        count_ties(out, [[other[0], other[1]._replace(margin=2 * PER_TOKEN), other[2]]])


@settings(max_examples=12)
@given(st.data())
@pytest.mark.parametrize("name", ["gemma3", "llama"])
def test_random_trees_and_budgets_change_nothing(name: str, data: st.DataObject) -> None:
    model = served(name)
    prompts = data.draw(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3 * WINDOW), min_size=1, max_size=9))
    num_new = data.draw(st.integers(1, 4))
    engine = Engine(model, pack_tokens=data.draw(st.integers(8, 64)), self_check=False)
    own = num_new - 1
    least = max(map(len, prompts)) + own
    limits = GenerationLimits(
        data.draw(st.integers(1, 8)), engine.pack_tokens, data.draw(st.integers(least, 4 * least))
    )
    engine._generation_limits = lambda *_: limits
    out = engine.generate(prompts, max_new_tokens=num_new)
    assert count_ties(out, plain_texts(name, prompts, num_new)) == 0
    assert engine.report.kv_peak_tokens <= (limits.kv_tokens or 0)
    assert engine.report.tokens_forwarded == engine.report.tokens_unique


@pytest.mark.parametrize("name", ["llama", "qwen2-window", "gemma2", "gemma3", "gpt2", "olmo2"])
def test_a_text_in_any_company_and_order_has_the_same_bits(name: str) -> None:
    check_company(name, branching_prompts(), 9)


@pytest.mark.usefixtures("two_threads")
def test_a_text_in_any_company_has_the_same_bits_in_two_threads() -> None:
    check_company("gemma3", branching_prompts()[3:7], 2)


def check_company(name: str, prompts: list[list[int]], num_new: int) -> None:
    model = served(name)
    engine = Engine(model, self_check=False)
    expected = engine.generate(prompts, max_new_tokens=num_new)
    orders = np.random.default_rng(1).permutation(len(prompts))
    shuffled = Engine(model, **SMALL_PACKS).generate([prompts[n] for n in orders], max_new_tokens=num_new)
    for place, number in enumerate(orders.tolist()):
        assert shuffled.token_ids[place].tolist() == expected.token_ids[number].tolist()
        assert shuffled.logprob[place] == expected.logprob[number]
    for number in (0, len(prompts) // 2, len(prompts) - 1):
        alone = engine.generate([prompts[number]], max_new_tokens=num_new)
        assert alone.token_ids[0].tolist() == expected.token_ids[number].tolist()
        assert alone.logprob[0] == expected.logprob[number]


def test_a_finished_row_is_replaced_at_once(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    run = TreeModel.run
    monkeypatch.setattr(TreeModel, "run", lambda self, tree: sizes.append(tree.num_scored) or run(self, tree))
    engine = Engine(llama, self_check=False)
    engine._generation_limits = lambda *_: GenerationLimits(4, 64)
    rng = np.random.default_rng(5)
    prompts = [random_ids(rng, 6) for _ in range(12)]
    eos = {greedy_one(llama, prompt, place)[-1].token for place, prompt in enumerate(prompts[:4], start=1)}
    with ended_by(llama, sorted(eos)):
        out = engine.generate(prompts, max_new_tokens=8)
    assert len(set(out.num_tokens.tolist())) > 1, "all rows ended together"
    assert sizes[:-8] == [4] * (len(sizes) - 8), "a place stood empty while prompts waited"


def test_prompts_come_first_and_rows_go_on_together(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    packs = list[Pack]()
    run = TreeModel.run
    monkeypatch.setattr(TreeModel, "run", lambda self, tree: packs.append(tree.pack) or run(self, tree))
    engine, rng = Engine(llama, self_check=False), np.random.default_rng(6)
    engine._generation_limits = lambda *_: GenerationLimits(20, 32)
    monkeypatch.setattr(llama.config, "eos_token_id", None)
    context = random_ids(rng, 40)
    with ended_by(llama, []):
        out = engine.generate([context + random_ids(rng, 7) for _ in range(20)], max_new_tokens=5)
    assert len({tuple(ids) for ids in out.token_ids}) > 1
    steps = [pack for pack in packs if len(pack) == pack.scored_rows.size == 20]
    assert [len(pack) for pack in packs[:5]] == [32] * 5, "a pack of prompts is not full"
    steps = [pack for pack in packs if len(pack) == pack.scored_rows.size == 20]
    assert len(steps) >= 3, "rows went on one after the other"
    spans = steps[-1].span_end - steps[-1].span_begin
    for begin, end in pairwise(steps[-1].span_offsets.tolist()):  # shared pieces, and what is the row's, side by side
        assert end - begin <= 3
        assert 40 + 7 + 1 <= spans[begin:end].sum() <= 40 + 7 + 3
        assert spans[end - 1] > 3


def test_keys_stay_where_they_are_and_their_slots_are_used_again(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    packs, places = list[Pack](), set[int]()
    run = TreeModel.run

    def watched(self: TreeModel, tree: TreeForward) -> Any:
        out = run(self, tree)
        packs.append(tree.pack)
        places.add(tree.pool._layers[0][0].data_ptr())
        return out

    monkeypatch.setattr(TreeModel, "run", watched)
    rng = np.random.default_rng(2)
    context, num_new = random_ids(rng, 30), 40
    engine = Engine(llama, self_check=False)
    engine._generation_limits = lambda *_: GenerationLimits(3, 64)
    with ended_by(llama, []):
        engine.generate([context + random_ids(rng, 5) for _ in range(12)], max_new_tokens=num_new)
    assert len(places) == 1, "the pool moved"
    steps = [pack for pack in packs if len(pack) == pack.scored_rows.size]
    assert len(steps) > num_new
    for pack in steps:
        assert (pack.retain_end - pack.retain_begin).tolist() == [1] * len(pack), "a step copies more than its own keys"
        assert np.diff(pack.span_offsets).max() <= 3 + num_new / 8, "a row's keys lie scattered"
    most = max(int(pack.span_end[pack.span_source == 0].max(initial=0)) for pack in packs)
    assert most <= 30 + 3 * (5 + num_new), "slots of rows that ended were not used again"
    assert engine.report.kv_peak_tokens <= 30 + 3 * (5 + num_new)


def product() -> tuple[list[list[int]], list[list[int]]]:
    rng = np.random.default_rng(0)
    stem = random_ids(rng, 30)
    contexts = [[], stem[:1], stem[:10], stem, stem[:10], stem[:10] + random_ids(rng, 9)]
    query = [5, *random_ids(rng, 6)]
    return contexts, [query, query[:3], [5, *random_ids(rng, 8)], query, [5]]


def generated(engine: Engine, plan: Any, units: Any = None, num_new: int = 5) -> dict[tuple[int, int], tuple[Any, ...]]:
    """Ids and log-probability by context and query."""
    found = {}
    for result in engine.generate_units(plan, units, max_new_tokens=num_new):
        cells = [(c, q) for c in result.contexts.tolist() for q in result.queries.tolist()]
        assert len(cells) == len(result.outputs)
        for cell, ids, logprob in zip(cells, result.outputs.token_ids, result.outputs.logprob.tolist(), strict=True):
            found[cell] = (tuple(ids.tolist()), logprob)
    return found


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("limits", [{}, {"pack_tokens": 16, "unit_tokens": 20, "repeated_share": 1.0}])
def test_units_of_a_product_agree_with_single_requests(name: str, limits: dict[str, Any]) -> None:
    model, (contexts, queries) = served(name), product()
    plan = plan_product(contexts, queries, [[0]], **limits)
    assert not limits or plan.num_units > 3
    engine = Engine(model, **SMALL_PACKS)
    found = generated(engine, plan)
    report, bounds = (
        engine.report,
        generation_bounds(plan, 5, GenerationLimits.on(torch.device("cpu"), engine.pack_tokens)),
    )
    assert engine.generation_bounds(plan, 5) == bounds
    assert report.tokens_forwarded <= bounds.tokens
    assert report.kv_peak_tokens <= bounds.kv_peak_tokens
    if not limits:
        assert report.tokens_generated <= 5 * plan.num_contexts * 4, "equal queries were generated twice"
        assert report.tokens_forwarded == report.tokens_unique
    cells = [(int(plan.context_index[c]), q) for c in range(len(contexts)) for q in range(len(queries))]
    assert set(cells) == set(found)
    single = engine.generate([c + q for c in contexts for q in queries], max_new_tokens=5)
    for cell, ids, logprob in zip(cells, single.token_ids, single.logprob.tolist(), strict=True):
        assert found[cell] == (tuple(ids.tolist()), logprob)
    plain = generated(Engine(model, plain=True), plan)
    assert {cell: ids for cell, (ids, _) in plain.items()} == {cell: ids for cell, (ids, _) in found.items()}


def test_units_run_in_any_order_and_only_as_asked_for(llama: PreTrainedModel) -> None:
    plan = plan_product(*product(), [[0]], pack_tokens=16, unit_tokens=20, repeated_share=1.0)
    engine = Engine(llama, **SMALL_PACKS)
    expected = generated(engine, plan)
    unbroken = engine.report.tokens_forwarded
    mixed = sorted(range(plan.num_units), key=lambda unit: (unit % 2, unit))
    assert generated(engine, plan, mixed) == expected
    assert engine.report.tokens_forwarded > unbroken, "no path was computed anew"
    asked: list[int] = []
    lazily = (asked.append(unit) or unit for unit in range(plan.num_units))
    units = engine.generate_units(plan, lazily, max_new_tokens=5)
    first = next(units)
    assert asked == [0]
    assert llama.config._attn_implementation != "iclperm_tree"
    units.close()
    assert engine.report.tokens_forwarded > 0
    assert engine.report.tokens_generated > 0
    assert engine.report.tokens_naive >= engine.report.tokens_unique > 0
    assert first.unit == 0


def test_context_paths_with_marks_share_their_path(llama: PreTrainedModel) -> None:
    rng = np.random.default_rng(3)
    rows = [random_ids(rng, 20), random_ids(rng, 20)]
    paths = ContextPaths(Rows.of(rows), Rows.of([[4, 9, 20], [4, 9, 15]]))
    plan = plan_product(paths, [[7, 8], [9]], [[0]], unit_tokens=1)
    engine = Engine(llama, **SMALL_PACKS)
    found = generated(engine, plan)
    for place, (row, mark) in enumerate((r, m) for r, marks in enumerate([[4, 9, 20], [4, 9, 15]]) for m in marks):
        for number, query in enumerate([[7, 8], [9]]):
            steps = greedy_one(llama, rows[row][:mark] + query, 5, {EOS})
            assert found[int(plan.context_index[place]), number][0] == tuple(ids_of(steps))


def test_a_plan_that_scores_labels_generates_nothing(llama: PreTrainedModel) -> None:
    engine = Engine(llama, **SMALL_PACKS)
    for labels in ([[0], [1]], [[0, 1]]):
        with pytest.raises(RequestError, match=r"plan_product\(contexts, queries, \[\[0\]\]\)"):
            list(engine.generate_units(plan_product([[1]], [[2]], labels), max_new_tokens=2))


@pytest.mark.parametrize("name", ["gemma2", "gpt2"])
def test_a_plain_engine_says_the_same(name: str) -> None:
    model, prompts = served(name), branching_prompts()[:8]
    before = model.generation_config
    model.generation_config = odd = GenerationConfig(
        do_sample=True, temperature=9.0, repetition_penalty=5.0, eos_token_id=EOS
    )
    try:
        out = Engine(model, plain=True).generate(prompts, max_new_tokens=8)
        assert model.generation_config is odd
        fast = Engine(model, **SMALL_PACKS).generate(prompts, max_new_tokens=8)
    finally:
        model.generation_config = before
    assert count_ties(out, plain_texts(name, prompts, 8)) == 0
    assert [ids.tolist() for ids in fast.token_ids] == [ids.tolist() for ids in out.token_ids]
    assert fast.finish == out.finish
    assert fast.num_tokens.tolist() == out.num_tokens.tolist()


def test_plain_serves_what_the_tree_cannot() -> None:
    torch.manual_seed(0)
    settings = {"vocab_size": VOCAB, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, "eos_token_id": EOS}
    model = MambaForCausalLM(MambaConfig(**settings)).eval()
    out = Engine(model, plain=True).generate([[1, 2, 3], [4]], max_new_tokens=4)
    assert count_ties(out, [greedy_one(model, prompt, 4, {EOS}) for prompt in ([1, 2, 3], [4])]) == 0


def test_every_id_of_an_eos_set_ends_a_text(llama: PreTrainedModel) -> None:
    engine = Engine(llama, **SMALL_PACKS)
    free = greedy_one(llama, [1, 5, 9], 12)
    for place in (3, 7):
        eos = [VOCAB - 1, free[place].token]
        first = next(n for n, step in enumerate(free) if step.token in eos)
        with ended_by(llama, eos):
            out = engine.generate([[1, 5, 9]], max_new_tokens=12)
        assert out.finish == ["eos"]
        assert out.token_ids[0].tolist() == [step.token for step in free[:first]]
        assert out.num_tokens[0] == first + 1
        assert out.logprob[0] == pytest.approx(sum(step.logprob for step in free[: first + 1]), abs=1e-3)


def test_where_the_eos_is_looked_up(llama: PreTrainedModel) -> None:
    class Names:
        eos_token_id = 7

    assert eos_ids(llama, llama.config, Names()) == {EOS}
    before = llama.generation_config
    try:
        llama.generation_config = GenerationConfig()
        assert eos_ids(llama, LlamaConfig(eos_token_id=[3, 4]), Names()) == {3, 4}
        assert eos_ids(llama, LlamaConfig(eos_token_id=None), Names()) == {7}
        assert eos_ids(llama, LlamaConfig(eos_token_id=None), None) == frozenset()
    finally:
        llama.generation_config = before


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """SentencePiece's other kind: what is no piece is bytes, and a dummy space goes first."""
    bytewise = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["<unk>", "<s>", "</s>", *bytewise, "\u2581", "a", "b", "\u2581a", "ab", "\n"]
    backend = Tokenizer(
        models.BPE({piece: n for n, piece in enumerate(pieces)}, [("\u2581", "a"), ("a", "b")], byte_fallback=True)
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


TOKENIZERS = {
    "byte-level": byte_level_tokenizer(),
    "dummy prefix": dummy_prefix_tokenizer(),
    "byte fallback": byte_fallback_tokenizer(),
}


def first_stop(tokenizer: Any, ids: list[int], stop: Sequence[str]) -> int | None:
    """The obvious search: after how many tokens the text first holds a stop string."""
    for end in range(1, len(ids) + 1):
        if any(text in tokenizer.decode(ids[:end], skip_special_tokens=True) for text in stop):
            return end
    return None


def test_a_stop_string_after_a_run_of_bytes_is_found() -> None:
    tokenizer = TOKENIZERS["byte fallback"]
    ids = tokenizer("aaaa\u00e9\u4f60\U0001f600 ")["input_ids"]  # the window begins within a character
    ending, said = Ending(len(ids) + 1, " ", (), tokenizer), list[int]()
    assert [ending.after(said, token) for token in ids[1:]] == [None] * (len(ids) - 2) + ["stop"]


@settings(max_examples=60)
@given(st.data())
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_stop_strings_are_found_where_they_are_complete(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    signs = st.text("ab \n\u00e9\u4f60\U0001f600", max_size=12).map(lambda text: tokenizer(text)["input_ids"])
    single = st.integers(0, len(tokenizer) - 1).map(lambda token: [token])
    ids = [token for part in data.draw(st.lists(signs | single, min_size=1, max_size=12)) for token in part][:60]
    text = tokenizer.decode(ids, skip_special_tokens=True)
    begin = data.draw(st.integers(0, len(text)))
    chosen = text[begin : begin + data.draw(st.integers(1, 6))] or "b\n"
    stop = [chosen, *data.draw(st.lists(st.text("ab\n\u4f60", min_size=1, max_size=3), max_size=2))]
    ending, said = Ending(len(ids) + 1, stop, (), tokenizer), list[int]()
    found = next((place for place, token in enumerate(ids, start=1) if ending.after(said, token) == "stop"), None)
    assert found == first_stop(tokenizer, ids, stop)
    cut = ending.text(said)
    assert cut is not None
    assert not any(text in cut for text in stop)
    assert tokenizer.decode(said, skip_special_tokens=True).startswith(cut)


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("plain", [False, True])
def test_the_text_ends_before_the_stop_string(kind: str, plain: bool) -> None:
    tokenizer = TOKENIZERS[kind]
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=256, bos_token_id=None, eos_token_id=None,
    )).eval()  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(40)
    engine = Engine(model, tokenizer, plain=plain, self_check=False)
    prompts = ["a b", "", "ab ab\n"]
    with ended_by(model, []):
        free = engine.generate(prompts, max_new_tokens=24)
    assert free.text is not None
    encoded = [tokenizer(prompt)["input_ids"] or [tokenizer.bos_token_id] for prompt in prompts]
    for prompt, ids, text in zip(encoded, free.token_ids, free.text, strict=True):
        assert ids.tolist() == ids_of(greedy_one(model, prompt, 24, {tokenizer.eos_token_id}), tokenizer.eos_token_id)
        assert text == tokenizer.decode(ids.tolist(), skip_special_tokens=True)
    stop = [text[len(text) // 2 :][:3] for text in free.text if text]
    assert stop
    out = engine.generate(prompts, max_new_tokens=24, stop=stop)
    assert out.text is not None
    for ids, text, whole, finish in zip(out.token_ids, out.text, free.token_ids, out.finish, strict=True):
        end = first_stop(tokenizer, whole.tolist(), stop)
        assert ids.tolist() == whole[:end].tolist()
        assert (finish == "stop") == (end is not None)
        assert not any(string in text for string in stop)
    assert "stop" in out.finish


def test_logits_that_are_not_finite_end_a_text(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, calls = TreeModel._logits, list[int]()

    def broken(self: TreeModel, hidden: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        out = logits(self, hidden).clone()
        if len(calls) == 3:
            out[0, 5] = torch.nan
        return out

    monkeypatch.setattr(TreeModel, "_logits", broken)
    out = Engine(llama, self_check=False).generate([[1, 5], [1, 6]], max_new_tokens=5)
    assert out.finish == ["invalid", "length"]
    assert out.state.tolist() == [1, 0]
    assert np.isnan(out.logprob).tolist() == [True, False]
    assert [ids.size for ids in out.token_ids] == [2, 5]


@pytest.mark.parametrize(("arguments", "message"), [
    ({"contexts": [[1, VOCAB]]}, r"request 0 holds token id 96, out of range"),
    ({"contexts": [[1], [3] * 250], "max_new_tokens": 8}, r"request 1 has 250 tokens, which with 8 new ones are over"),
    ({"contexts": [[1]], "max_new_tokens": 0}, r"max_new_tokens is 0; give a whole number from 1 on"),
    ({"contexts": [[1]], "stop": ["x"]}, r"no tokenizer, so it cannot find the stop string 'x'"),
    ({"contexts": [[1]], "stop": [""]}, r"a stop string is empty"),
    ({"contexts": ["text"]}, r"no tokenizer, so requests must be token ids"),
])  # fmt: skip
def test_bad_requests_are_refused(llama: PreTrainedModel, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Engine(llama, self_check=False).generate(**arguments)


def test_nothing_asked_is_nothing_said(llama: PreTrainedModel) -> None:
    assert len(Engine(llama, self_check=False).generate([])) == 0
    assert len(Engine(llama, plain=True).generate([])) == 0


def test_an_empty_context_is_the_prefix_token(llama: PreTrainedModel) -> None:
    out = Engine(llama, **SMALL_PACKS).generate([[], [1]], max_new_tokens=4)
    assert out.token_ids[0].tolist() == out.token_ids[1].tolist()


class OutOfRoom:
    """A device that runs out of memory in packs over a size."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
        self.sizes: list[int] = []
        run = TreeModel.run

        def limited(model: TreeModel, tree: TreeForward) -> Any:
            self.sizes.append(len(tree.pack))
            if len(tree.pack) > most:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return run(model, tree)

        monkeypatch.setattr(TreeModel, "run", limited)


def test_where_memory_runs_out_rows_are_halved_and_nothing_changes(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_product(*product(), [[0]], pack_tokens=64, unit_tokens=60, repeated_share=1.0)
    engine = Engine(llama, pack_tokens=64)
    expected = generated(engine, plan)
    room = OutOfRoom(monkeypatch, 20)
    assert generated(engine, plan) == expected
    assert engine.report.num_splits == 2
    assert max(room.sizes) == 64
    room.sizes.clear()
    assert generated(engine, plan) == expected
    assert max(room.sizes) <= 16, "the smaller size was forgotten"
    assert engine.report.num_splits == 0


def test_out_of_memory_is_an_error_where_packs_matter_or_can_get_no_smaller(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(llama, pack_tokens=64)
    engine.generate([[1]], max_new_tokens=1)
    OutOfRoom(monkeypatch, 0)
    with pytest.raises(OutOfMemory, match=r"even with one live row and packs of 8 tokens"):
        engine.generate([[1, 2]], max_new_tokens=1)
    engine = Engine(llama, self_check=False)
    with pytest.raises(OutOfMemory, match=r"512 live rows in packs of 1024 .* start anew with pack_tokens=256"):
        engine.generate([[1, 2]], max_new_tokens=1)


def test_a_bound_that_is_not_kept_is_an_error(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_product([[1, 2]], [[3]], [[0]])
    monkeypatch.setattr(decode_module.Decoder, "release", lambda self, segment: None)
    with pytest.raises(PlanError, match=r"unit 0 forwarded and went on holding \(tokens\) \(4, 3\)"):
        list(Engine(llama, self_check=False).generate_units(plan, max_new_tokens=2))


def test_a_memory_budget_bounds_the_keys_and_values(llama: PreTrainedModel) -> None:
    contexts, queries = product()
    plan = plan_product(contexts, queries, [[0]])
    free = Engine(llama)
    expected = generated(free, plan)
    weights = sum(parameter.nbytes for parameter in llama.parameters())
    per_token = free._model.facts.kv_token_bytes
    sizes = Sizes.of(free._model, free._model.device)  # with the first-use check, which an engine of its own makes
    base = sizes.generation(1024, 512, 0, plan.tokens).peak
    engine = Engine(llama, memory_budget=base + 50 * per_token)
    assert engine.generation_bounds(plan, 5).kv_peak_tokens <= 50
    assert generated(engine, plan) == expected
    assert engine.report.kv_peak_tokens <= 50 < free.report.kv_peak_tokens
    smallest = Engine(llama, memory_budget=base)
    assert smallest.generation_bounds(plan, 5).kv_peak_tokens > 0, "packs were not made smaller"
    assert generated(smallest, plan) == expected
    least = sizes.generation(8, 1, 0, plan.tokens).peak
    with pytest.raises(RequestError, match=r"for the keys and values of a text of 44 tokens"):
        list(Engine(llama, memory_budget=least + 20 * per_token).generate_units(plan, max_new_tokens=5))
    assert weights < least


def test_on_a_gpu_the_pool_fits_the_device(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(llama, self_check=False)
    plan = plan_product(*product(), [[0]])
    free = engine.generation_bounds(plan, 9).kv_peak_tokens
    size = engine._sizes.generation(1024, 512, free // 2, plan.tokens).peak
    monkeypatch.setattr(memory, "device_bytes", lambda devices: round(size / 0.85) + 1)
    assert engine.generation_bounds(plan, 9).kv_peak_tokens == free // 2


def test_a_limit_that_holds_no_text_is_refused() -> None:
    plan = plan_product([[1, 2, 3]] * 2, [[4, 5], [6]], [[0]])
    assert generation_bounds(plan, 4, GenerationLimits(1, 8, 8)).kv_peak_tokens == 8
    with pytest.raises(RequestError, match=r"keys and values of 7 tokens cannot hold the longest prompt of 5 tokens"):
        generation_bounds(plan, 4, GenerationLimits(1, 8, 7))


def test_generation_is_estimated_before_any_weight_is_loaded(tmp_path: Path) -> None:
    model = ZOO["qwen2"].build()
    model.save_pretrained(tmp_path)
    plan = plan_product(*product(), [[0]])
    engine = Engine(model, self_check=False)
    scoring, generating = estimate(tmp_path, [plan]), estimate(tmp_path, [plan], max_new_tokens=9)
    with ended_by(model, []):
        generated(engine, plan, num_new=9)
    assert generating.flops == pytest.approx(engine.report.flops, rel=0.1)
    assert generating.flops > 2 * scoring.flops
    assert generating.memory is not None
    assert generating.memory.kv == engine.generation_bounds(plan, 9).kv_peak_tokens * model_bytes(engine)
    assert generating.seconds > scoring.seconds


def model_bytes(engine: Engine) -> int:
    """Of the keys and values of a token."""
    return engine._model.facts.kv_token_bytes


def test_a_wrapped_model_is_as_before(llama: PreTrainedModel) -> None:
    prompt = torch.tensor([[1, 2, 3, 4, 5]])
    before = llama(prompt).logits.clone()
    attributes = [sorted(vars(module)) for module in llama.modules()]
    Engine(llama, self_check=False).generate(branching_prompts(), max_new_tokens=3)
    assert torch.equal(llama(prompt).logits, before)
    assert [sorted(vars(module)) for module in llama.modules()] == attributes


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.randoms())
def test_slots_are_taken_from_below_and_never_twice(counts: list[int], random: Any) -> None:
    slots, held = Slots(sum(counts)), list[Any]()
    for count in counts:
        taken = slots.take(count)
        assert sum(end - begin for begin, end in taken) == count
        held.append(taken)
        used = [slot for ranges in held for begin, end in ranges for slot in range(begin, end)]
        assert len(set(used)) == len(used) == slots.num_used
        if random.random() < 0.5:
            slots.give(held.pop(random.randrange(len(held))))
    for ranges in held:
        slots.give(ranges)
    assert slots.num_used == 0
    assert slots.take(0) == []
    held = [slots.take(count) for count in counts]
    slots.give(held[0])
    slots.give(held[-1] if len(held) > 1 else [])
    if len(held) > 2:  # a place where all have room side by side, if only beyond one where some have
        most = max(counts[0], counts[-1])
        assert len(slots.take(most)) == 1
        slots = Slots(sum(counts))
    assert slots.take(sum(counts)) == [(0, sum(counts))]


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=10))
def test_branches_are_the_prompts(prompts: list[list[int]]) -> None:
    tree, nodes = build_tree(Rows.of(prompts))
    ends, which = np.unique(np.asarray(tree.token_offsets)[nodes + 1] - 1, return_inverse=True)
    paths = list(Branches(tree, ends).beneath(None))
    for prompt, place in zip(prompts, which.tolist(), strict=True):
        assert np.concatenate([segment.tokens for segment in paths[place]]).tolist() == prompt
        begins = [segment.begin for segment in paths[place]]
        assert begins == np.cumsum([0, *(segment.tokens.size for segment in paths[place][:-1])]).tolist()
    segments = {id(segment): segment for path in paths for segment in path}.values()
    assert sum(segment.tokens.size for segment in segments) == tree.num_tokens
    for segment in segments:
        assert segment.num_waiting == sum(segment in path for path in paths)


def test_the_two_plain_ways_agree(llama: PreTrainedModel) -> None:
    for prompt in branching_prompts()[:6]:
        slow, fast = plain_text("llama", tuple(prompt), 6), generate_one(llama, prompt, 6, {EOS})
        assert [step.token for step in slow] == [step.token for step in fast]
        np.testing.assert_allclose([s.logprob for s in slow], [s.logprob for s in fast], atol=1e-4)


def test_limits_remember_what_memory_held() -> None:
    limit = RowLimit()
    limit.may_shrink = True
    tried = GenerationLimits(128, 1024, 5000)
    assert limit.fit(tried) == tried
    assert limit.shrink(tried) == GenerationLimits(64, 512, 5000)
    assert limit.fit(GenerationLimits(128, 1024)) == GenerationLimits(64, 512)
    assert limit.fit(GenerationLimits(8, 1024)) == GenerationLimits(8, 1024)
