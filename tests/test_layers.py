"""Our decoder layers against transformers' and against plain scoring; what they skip is needed nowhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from test_engine import COMPANIONS, SMALL_PACKS, assert_agrees, branching_requests, product_parts, random_ids
from torch import nn
from transformers import PreTrainedModel
from zoo import ZOO

from iclperm import _core
from iclperm.engine import Engine, plan_product, plan_requests, selfcheck
from iclperm.engine.families import Family
from iclperm.engine.forward import KvPool, PassLimits, TreeForward
from iclperm.engine.kernels.linear import MatrixProduct
from iclperm.engine.layers import FusedLayer, _LayerParts, known_decoder
from iclperm.engine.model import TreeModel
from iclperm.engine.plan import Pack
from iclperm.engine.shapes import padded_rows
from iclperm.engine.token_rows import TokenRows
from iclperm.engine.tree import Rows
from iclperm.errors import ModelError
from iclperm.reference import scoring

KNOWN = ["llama", "llama3-rope-tied", "qwen2", "qwen2-window", "qwen3", "gemma", "gemma2", "gemma3", "mistral-window",
         "phi3", "phi3-window", "olmo2", "olmo3-window", "granite", "smollm3-window", "glm", "glm4", "cohere",
         "cohere2-window", "starcoder2-window", "phi"]  # fmt: skip
PARALLEL = ["cohere", "cohere2-window", "phi"]
OTHERS = [name for name in ZOO if name not in KNOWN]


def count_norms(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Calls of the kernels that only our layers use."""
    calls: list[int] = []

    def counted(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        calls.append(1)
        original(*args, **kwargs)

    for name in ("rms_norm", "layer_norm"):
        monkeypatch.setattr(_core, name, partial(counted, getattr(_core, name)))
    return calls


@pytest.mark.parametrize("attention", ["native", "torch"])
@pytest.mark.parametrize("name", KNOWN)
def test_known_architectures_run_in_our_layers_and_are_exact(
    name: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, requests, calls = ZOO[name].build(), branching_requests(), count_norms(monkeypatch)
    engine = Engine(model, attention=attention, **SMALL_PACKS)
    assert_agrees(engine.loglikelihood(requests), model, requests)
    assert engine.layers == engine.numerics["layers"] == "fused"
    report = engine.report
    norms = 1 if name in PARALLEL else 2
    assert len(calls) >= report.num_packs * norms * model.config.num_hidden_layers, "another path ran"
    assert report.skipped_tokens == report.tokens_forwarded - report.scored_rows > 0
    rows = Rows.of([context + continuation for context, continuation in requests])
    plan = plan_requests(rows, np.array([len(context) for context, _ in requests]))
    assert report.skipped_pairs == plan.attention_pairs - plan.scored_pairs > 0


@pytest.mark.parametrize("name", KNOWN)
def test_transformers_layers_are_exact_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, requests, calls = ZOO[name].build(), branching_requests(), count_norms(monkeypatch)
    engine = Engine(model, layers="transformers", **SMALL_PACKS)
    assert_agrees(engine.loglikelihood(requests), model, requests)
    assert engine.layers == engine.numerics["layers"] == "transformers"
    assert not calls
    assert engine.report.skipped_tokens == engine.report.skipped_pairs == 0


@pytest.mark.parametrize("name", OTHERS)
def test_other_architectures_keep_transformers_layers(name: str) -> None:
    assert Engine(ZOO[name].build()).layers == "transformers"


@pytest.mark.parametrize("name", [name for name in COMPANIONS if name in KNOWN])
def test_transformers_layers_give_the_same_bits_in_any_company(name: str) -> None:
    model, requests = ZOO[name].build(), branching_requests()
    together = Engine(model, layers="transformers")
    expected = together.loglikelihood(requests).logprob
    assert together.row_invariant
    apart = Engine(model, layers="transformers", **SMALL_PACKS).loglikelihood(requests).logprob
    np.testing.assert_array_equal(apart, expected)


def test_the_names_of_layers_are_checked() -> None:
    with pytest.raises(ModelError, match="layers 'fast' are unknown; choose auto or transformers"):
        Engine(ZOO["llama"].build(), layers="fast")
    assert Engine(ZOO["llama"].build(), plain=True).layers == "plain"


def test_bfloat16_is_no_worse_than_plain_bfloat16() -> None:
    """Against float32 with the same weights; summed over models, since one alone is mostly chance."""
    rng = np.random.default_rng(5)
    requests = [(random_ids(rng, int(length)), random_ids(rng, 2)) for length in rng.integers(4, 30, 40)]
    ours = plain = 0.0
    for name in ("llama", "qwen3", "gemma", "gemma2", "gemma3", "olmo2", "phi3", "mistral-window", "granite",
                 "smollm3-window", "glm4", "cohere2-window", "starcoder2-window", "phi"):  # fmt: skip
        model = ZOO[name].build().bfloat16()
        engine = Engine(model, **SMALL_PACKS)
        fast = engine.loglikelihood(requests).logprob
        assert engine.layers == "fused"
        slow = np.array([p.logprob for p in scoring.loglikelihood(model, requests)])
        exact = np.array([p.logprob for p in scoring.loglikelihood(model.float(), requests)])
        ours += float(np.abs(fast - exact).mean())
        plain += float(np.abs(slow - exact).mean())
    assert ours <= plain


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "olmo2", "olmo3-window", "phi3", "granite", "smollm3-window",
                                  "glm4", "cohere2-window", "starcoder2-window", "phi"])  # fmt: skip
def test_bfloat16_gives_the_same_bits_in_any_company(name: str) -> None:
    model, requests = ZOO[name].build().bfloat16(), branching_requests()
    together = Engine(model)
    expected = together.loglikelihood(requests).logprob
    assert together.layers == "fused"
    assert together.row_invariant
    np.testing.assert_array_equal(Engine(model, **SMALL_PACKS).loglikelihood(requests).logprob, expected)


def one_pack(model: TreeModel) -> tuple[Pack, KvPool]:
    rng = np.random.default_rng(0)
    rows = Rows.of([random_ids(rng, 30), random_ids(rng, 12), random_ids(rng, 21)])
    plan = plan_requests(rows, np.array([20, 3, 15]), pack_tokens=256)
    (pack,) = plan.packs(0)
    return pack, model.pool(plan.core.pool_slots)


@pytest.mark.parametrize("name", KNOWN)
def test_a_scored_row_s_bits_do_not_depend_on_which_others_are_scored(name: str) -> None:
    model = TreeModel(ZOO[name].build())
    pack, pool = one_pack(model)
    with model.attached():
        whole, tree = model.forward(pack, pool)
        assert tree.is_narrowed
        for chosen in ([0], [3, 4], range(0, pack.scored_rows.size, 2), []):
            part = replace(pack, scored_rows=pack.scored_rows[list(chosen)])
            hidden, _ = model.forward(part, pool)
            assert torch.equal(hidden, whole[list(chosen)])


@pytest.mark.parametrize("name", ["llama", "gemma3", "olmo2", "phi3", "granite", "glm4", "cohere", "phi"])
def test_the_last_layer_multiplies_scored_rows_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = TreeModel(ZOO[name].build())
    pack, pool = one_pack(model)
    seen: dict[tuple[int, int | None, int | None], int] = {}
    of = MatrixProduct.of

    def counted(module: nn.Linear, outputs: slice = slice(None), **how: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        product = of(module, outputs, **how)

        def multiplied(x: torch.Tensor) -> torch.Tensor:
            seen[id(module), outputs.start, outputs.stop] = x.shape[0]
            return product(x)

        for told in ("weight", "bias", "is_tiled"):
            setattr(multiplied, told, getattr(product, told))
        multiplied.packed_key = None  # type: ignore[attr-defined]
        return multiplied

    monkeypatch.setattr(MatrixProduct, "of", counted)
    known = known_decoder(model.model.get_decoder())
    assert known is not None
    last = known.layers[-1]
    attention = last.module.self_attn
    output = attention.dense if name == "phi" else attention.o_proj
    q_size = output.in_features
    queries = (attention.qkv_proj, None, q_size) if name == "phi3" else (attention.q_proj, None, None)
    narrow = {(id(module), None, None) for module in last.scored_only} | {(id(queries[0]), *queries[1:])}
    assert len(narrow) == (4 if name in ("phi3", "glm4", "phi") else 5)
    of_last = {id(module) for module in last.module.modules()}
    for scored in (pack.scored_rows, pack.scored_rows[:0]):
        with model.attached():
            model.forward(replace(pack, scored_rows=scored), pool)
        rows = padded_rows(scored.size, model.device) if scored.size else 0
        assert rows < padded_rows(len(pack), model.device)
        assert {seen[key] for key in narrow} == {rows}
        others = {seen[key] for key in seen if key[0] in of_last and key not in narrow}
        assert others == {padded_rows(len(pack), model.device)}, "keys and values need all rows"
    assert known.scored_only_parameters == q_size * output.out_features + sum(
        module.weight.numel() for module in last.scored_only
    )


@pytest.mark.parametrize("name", KNOWN)
def test_the_first_layer_computes_a_token_once_and_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, requests = ZOO[name].build(), branching_requests()
    engine = Engine(model, **SMALL_PACKS)
    engine.loglikelihood(requests)
    seen: list[int] = []
    once, heads = FusedLayer._first_heads, _LayerParts.heads
    in_first = False

    def first(*given: Any) -> tuple[torch.Tensor, ...]:
        nonlocal in_first
        in_first = True
        found = once(*given)
        in_first = False
        return found

    def counted(self: _LayerParts, hidden: torch.Tensor, index: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        if in_first:
            seen.append(hidden.shape[0])
        return heads(self, hidden, index)

    monkeypatch.setattr(FusedLayer, "_first_heads", first)
    monkeypatch.setattr(_LayerParts, "heads", counted)
    shared = engine.loglikelihood(requests).logprob
    report = engine.report
    rows = Rows.of([context + continuation for context, continuation in requests])
    plan = plan_requests(rows, np.array([len(context) for context, _ in requests]))
    assert report.looked_up_tokens == report.tokens_forwarded - plan.num_ids > 0
    assert plan.num_ids <= sum(seen) < report.tokens_forwarded + report.padding_rows
    monkeypatch.setattr(FusedLayer, "_first_heads", lambda _, parts, hidden, tree, index: heads(parts, hidden, index))
    assert np.array_equal(engine.loglikelihood(requests).logprob, shared)
    assert engine.report.looked_up_tokens == 0 < engine.report.flops - report.flops
    monkeypatch.setattr(FusedLayer, "_first_heads", once)
    engine._model.limits = PassLimits(token_rows_bytes=1)  # every pack starts the table anew
    assert np.array_equal(engine.loglikelihood(requests).logprob, shared)
    assert engine.report.looked_up_tokens < report.looked_up_tokens


def test_rows_by_token_are_computed_once_until_the_table_is_full() -> None:
    asked: list[list[int]] = []

    def of(rows: TokenRows, ids: list[int]) -> int:
        given = np.array(ids)
        places, new = rows.assign(given)
        if new.size:
            asked.append(given[new].tolist())
            rows.fill(torch.from_numpy(given[new])[:, None].float().repeat(1, 4))
        assert rows.table[torch.from_numpy(places), 0].tolist() == ids
        return int(new.size)

    rows = TokenRows(max_bytes=4 * 16)
    assert [of(rows, ids) for ids in ([7, 3, 7], [3, 3], [9, 7, 1], [5, 3], [9, 8, 7, 6, 5, 4, 3], [3, 9])] == [
        2, 0, 2, 2, 7, 0,
    ]  # fmt: skip
    assert asked == [[3, 7], [1, 9], [3, 5], [3, 4, 5, 6, 7, 8, 9]]


@pytest.mark.parametrize("part", ["embed_tokens", ""])
def test_somebody_s_hook_before_the_first_layer_is_obeyed(part: str) -> None:
    model = ZOO["llama"].build()
    engine = Engine(model, self_check=False)
    handle = model.model.get_submodule(part).register_forward_pre_hook(lambda module, arguments: None)
    assert engine.layers == "transformers"
    handle.remove()
    assert engine.layers == "fused"


@pytest.mark.parametrize("name", KNOWN)
def test_hidden_states_beside_the_scored_ones_may_be_nan_but_for_keys_and_values(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows after every scored row of their path reach nobody: NaN in them, before the last layer, changes no bit."""
    model = TreeModel(ZOO[name].build())
    pack, pool = one_pack(model)
    pack = replace(pack, scored_rows=pack.scored_rows[:1])
    later = np.flatnonzero(pack.positions > pack.positions[pack.scored_rows[0]])
    assert later.size
    with model.attached():
        clean, _ = model.forward(pack, pool)
    original = FusedLayer.__call__

    def poisoned(self: FusedLayer, hidden_states: torch.Tensor, **arguments: Any) -> torch.Tensor:
        if self._is_last:
            hidden_states[0, later] = torch.nan
        return original(self, hidden_states, **arguments)

    monkeypatch.setattr(FusedLayer, "__call__", poisoned)
    with model.attached():
        dirty, _ = model.forward(pack, pool)
    assert torch.equal(dirty, clean)


def test_units_resumed_give_the_same_bits() -> None:
    contexts, queries, labels = product_parts()
    plan = plan_product(contexts, queries, labels, pack_tokens=24, unit_tokens=30, repeated_share=1.0)
    engine = Engine(ZOO["gemma3"].build(), **SMALL_PACKS)
    unbroken = {result.unit: result.logprob for result in engine.execute(plan)}
    assert engine.report.skipped_tokens == plan.tokens - plan.scored_rows
    assert engine.report.skipped_pairs == plan.attention_pairs - plan.scored_pairs
    for unit in reversed(range(plan.num_units)):
        (alone,) = engine.execute(plan, [unit])
        np.testing.assert_array_equal(alone.logprob, unbroken[unit])


@pytest.mark.parametrize("name", KNOWN)
def test_a_model_is_bit_for_bit_as_before(name: str) -> None:
    model = ZOO[name].build()
    prompt = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]])
    before = model(prompt).logits.clone()
    attributes = [sorted(vars(module)) for module in model.modules()]
    engine = Engine(model)
    engine.loglikelihood(branching_requests())
    assert engine.layers == "fused"
    assert torch.equal(model(prompt).logits, before)
    assert [sorted(vars(module)) for module in model.modules()] == attributes


def hook(model: PreTrainedModel) -> None:
    model.model.layers[1].mlp.register_forward_hook(lambda module, inputs, output: 0.5 * output)


def pre_hook(model: PreTrainedModel) -> None:
    model.model.layers[2].register_forward_pre_hook(lambda module, inputs: (0.5 * inputs[0],))


def forward_of_their_own(model: PreTrainedModel) -> None:
    model.model.norm.forward = lambda hidden: 0.5 * hidden


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def replaced_part(model: PreTrainedModel) -> None:
    model.model.layers[0].self_attn.o_proj.__class__ = Doubled


def added_part(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp.adapter = nn.Linear(2, 2)


CHANGES = [hook, pre_hook, forward_of_their_own, replaced_part, added_part]


@pytest.mark.parametrize("change", CHANGES)
def test_what_somebody_changed_in_a_model_is_respected(change: Callable[[PreTrainedModel], None]) -> None:
    model, requests = ZOO["qwen2"].build(), branching_requests()
    engine = Engine(model, **SMALL_PACKS)
    unchanged = engine.loglikelihood(requests).logprob
    assert engine.layers == "fused"
    change(model)  # after the engine was made
    out = engine.loglikelihood(requests)
    assert engine.layers == "transformers"
    for fast, plain in zip(out.logprob, scoring.loglikelihood(model, requests), strict=True):
        assert abs(fast - plain.logprob) <= 1e-4 * plain.num_tokens
    assert (np.abs(out.logprob - unchanged).max() > 1e-2) == (change is not added_part)


def test_a_hook_on_every_module_is_respected() -> None:
    engine, seen = Engine(ZOO["llama"].build(), self_check=False), []
    handle = nn.modules.module.register_module_forward_hook(lambda module, inputs, output: seen.append(module))
    try:
        assert engine.layers == "transformers"
        engine.loglikelihood([([1, 2], [3])])
    finally:
        handle.remove()
    assert any(isinstance(module, nn.SiLU) or "Activation" in type(module).__name__ for module in seen)
    assert engine.layers == "fused"


def test_numbers_of_another_type_keep_transformers_layers() -> None:
    model = ZOO["gemma2"].build().bfloat16()
    engine = Engine(model, self_check=False)
    assert engine.layers == "fused"
    model.model.layers[1].post_attention_layernorm.float()
    assert engine.layers == "transformers"
    assert np.isfinite(engine.loglikelihood([([1, 2], [3])]).logprob).all()


def test_an_activation_without_a_kernel_keeps_transformers_layers() -> None:
    entry = ZOO["llama"]
    model = replace(entry, settings={**entry.settings, "hidden_act": "relu"}).build()
    assert Engine(model).layers == "transformers"


def test_layers_that_differ_on_first_use_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    model, requests = ZOO["gemma2"].build(), branching_requests()
    agreed = Engine(model)
    agreed.loglikelihood(requests[:1])
    assert agreed.layers == "fused"
    rule = FusedLayer._rule
    monkeypatch.setattr(FusedLayer, "_rule", lambda self, tree: replace(rule(self, tree), softcap=0.0))
    engine = Engine(model)
    with pytest.warns(UserWarning, match="decoder layers cannot be used for 'gemma2'"):
        assert_agrees(engine.loglikelihood(requests), model, requests)
    assert engine.layers == engine.numerics["layers"] == "transformers"
    assert engine.numerics["given_up"] == ["decoder layers"]
    assert engine.report.skipped_tokens == 0


def _broken_parts(parts: _LayerParts) -> dict[str, dict[str, Any]]:
    """Every piece that a layer has, each gone wrong by itself."""
    norms = ("before_attention", "after_attention", "before_mlp", "after_mlp", "q_norm", "k_norm")
    there = [name for name in norms if getattr(parts, name) is not None]
    weights = {name: getattr(parts, name).weight for name in there}
    broken: dict[str, dict[str, Any]] = {
        f"{name} with another weight": {name: replace(getattr(parts, name), weight=weights[name].roll(1))}
        for name in there
    }
    for name in "qkvo":
        product = getattr(parts, name)
        broken[f"{name} of other inputs"] = {name: replace(product, weight=product.weight.roll(1, dims=1))}
        if product.bias is not None:
            broken[f"{name} without its bias"] = {name: replace(product, bias=None)}
    for place, product in enumerate((*parts.into, parts.down)):
        changed = [*parts.into, parts.down]
        changed[place] = replace(product, weight=product.weight.roll(1, dims=1))
        broken[f"matrix {place} of the MLP of other inputs"] = {"into": changed[:-1], "down": changed[-1]}
        if product.bias is not None:
            changed = [*parts.into, parts.down]
            changed[place] = replace(product, bias=None)
            broken[f"matrix {place} of the MLP without its bias"] = {"into": changed[:-1], "down": changed[-1]}
    if len(parts.into) == 2:
        broken["gates for factors"] = {"into": parts.into[::-1]}
    broken["another activation"] = {"activate": lambda inner, factor: inner if factor is None else inner * factor}
    broken["turned or not"] = {"turns": not parts.turns}
    broken["another multiplier"] = {"multiplier": parts.multiplier * 1.01}
    broken["another scaling"] = {"rule": replace(parts.rule, scaling=parts.rule.scaling * 1.01)}
    broken["another window"] = {"rule": replace(parts.rule, window=(parts.rule.window or 600) + 1)}
    broken["another soft-cap"] = {"rule": replace(parts.rule, softcap=parts.rule.softcap + 30.0)}
    return broken


@pytest.mark.parametrize("name", KNOWN)
def test_a_piece_of_a_layer_that_goes_wrong_is_seen_on_first_use(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, bind = ZOO[name].build(), FusedLayer._bind
    bound: list[_LayerParts] = []

    def binding(change: str | None, layer: FusedLayer, tree: TreeForward) -> _LayerParts:
        parts = bind(layer, tree)
        bound.append(parts)
        return parts if change is None or not layer._is_last else replace(parts, **_broken_parts(parts)[change])

    def agrees(change: str | None) -> bool:
        monkeypatch.setattr(FusedLayer, "_bind", lambda layer, tree: binding(change, layer, tree))
        return selfcheck.layers_agree(TreeModel(model))

    assert agrees(None)
    assert len(bound) == model.config.num_hidden_layers
    for change in _broken_parts(bound[-1]):
        assert not agrees(change), change


@pytest.mark.parametrize(
    ("name", "change"),
    [(name, "turns_neighbours") for name in KNOWN]
    + [(name, "is_parallel") for name in PARALLEL]
    + [(name, "has_tables_of_neighbours") for name in ("glm", "glm4", "cohere", "cohere2-window")],
)
def test_a_family_that_is_told_wrong_is_seen_on_first_use(
    name: str, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ZOO[name].build()
    first = FusedLayer.__init__

    def told_wrong(layer: FusedLayer, module: Any, family: Family, **given: bool) -> None:
        first(layer, module, replace(family, **{change: not getattr(family, change)}), **given)

    monkeypatch.setattr(FusedLayer, "__init__", told_wrong)
    assert not selfcheck.layers_agree(TreeModel(model))


def test_each_layer_is_compared_within_the_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bool] = []
    close = selfcheck._close

    def counted(ours: torch.Tensor, theirs: torch.Tensor, tree: Any) -> bool:
        compared.append(tree.is_narrowed)
        perturbed = theirs * (1 + 10 * selfcheck.LAYER_TOLERANCE[ours.dtype])
        assert not close(ours, perturbed, tree)
        return close(ours, theirs, tree)

    monkeypatch.setattr(selfcheck, "_close", counted)
    Engine(ZOO["gemma3"].build()).loglikelihood([([1], [2])])
    assert compared == [False, False, True]
