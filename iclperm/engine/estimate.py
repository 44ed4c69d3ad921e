"""How long plans will take, and what a model weighs, before any weight is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from iclperm import _core
from iclperm.engine import long_paths
from iclperm.engine.architecture import refuse_attention
from iclperm.engine.decode import GenerationLimits, generation_bounds
from iclperm.engine.facts import ModelFacts, PassCosts, plan_flops
from iclperm.engine.footprint import Footprint, Sizes
from iclperm.engine.load import has_device, load_shapes
from iclperm.engine.long_paths import Rates
from iclperm.engine.memory import device_bytes, resolve_budget, room_to_generate
from iclperm.engine.plain_model import PlainModel, gemm_rate
from iclperm.engine.plan import DEFAULT_PACK_TOKENS, LongPath, Plan
from iclperm.engine.tokenizer import has_tokenizer
from iclperm.engine.ways import runs_our_layers
from iclperm.study.sizes import Budget


@dataclass(frozen=True)
class Estimate:
    """What plans would cost a model on this machine, unbroken and after loading.

    ``flops`` are those of the matrix products and the attention, ``flops_per_second`` is the machine's measured rate of
    matrix products, and ``utilisation`` the share of it that is expected: ``seconds`` is their quotient. Both are None
    where a slower way of running was chosen, of which no share is known.
    ``memory`` is the largest footprint of the plans, in packs of at most ``pack_tokens``; ``memory_budget`` is what was
    given, in bytes, and ``long_path`` says how the keys and values of a path over it are served (None: they fit).
    ``weight_bytes`` counts tied weights once, ``kv_token_bytes`` is what one token's keys and values
    take. ``bfloat16_speedup`` is how much faster bfloat16's matrix products were measured to be; None unless the model
    runs in float32 on a processor that multiplies bfloat16.
    """

    seconds: float | None
    flops: float
    flops_per_second: float
    utilisation: float | None
    device: str
    dtype: str
    weight_bytes: int
    kv_token_bytes: int
    memory: Footprint | None
    pack_tokens: int
    memory_budget: int | None
    long_path: LongPath | None
    bfloat16_speedup: float | None

    @property
    def is_measured(self) -> bool:
        """Whether what ``seconds`` rest on beside the rate was measured on such devices, or on one with one model."""
        return PassCosts.on(self.device).is_measured


def estimate(
    name: str | Path,
    plans: Iterable[Plan],
    *,
    device: str = "auto",
    dtype: str | torch.dtype = "auto",
    revision: str | None = None,
    memory_budget: Budget | None = None,
    pack_tokens: int | None = None,
    max_new_tokens: int = 0,
    attention: str = "auto",
    layers: str = "auto",
) -> Estimate:
    """Estimate the time of an unbroken run of all units of ``plans`` by the model in a folder or of a hub id.

    Reads the configuration alone; device and dtype are resolved as on loading, except that a configuration without a
    dtype counts as float32. On the CPU where it was measured the time is within a factor of 1.5
    (``benchmarks/estimate.py``); elsewhere, and beside other work, take it for an order of magnitude. On a GPU
    what it rests on beside the rate comes from one model on one GPU (``is_measured``). Sliding windows
    are not taken off. ``attention`` and ``layers`` are an engine's: where they are slower ones than it would choose by
    itself, memory is foretold and no time. Packs have ``pack_tokens`` tokens at most, by default the plans' own, on a
    GPU those of an engine there. With ``max_new_tokens`` generation (`Engine.generate_units`) is estimated, every text
    that long: an upper bound. Cost: half a second of matrix products. Raises ModelError as loading does, RequestError
    if a plan does not fit into ``memory_budget`` (as the engine's).
    """
    shapes, place = load_shapes(name, device=device, dtype=dtype, revision=revision)
    model = PlainModel(shapes)
    refuse_attention(attention, [place], model.dtype, model.facts.head_size)
    has_text = has_tokenizer(name, revision)
    of = partial(Sizes.of, model, place, has_tokenizer=has_text, has_budget=memory_budget is not None)
    sizes = of(attention=attention, layers=layers)
    is_usual = sizes == of()
    budget = None if memory_budget is None else resolve_budget(memory_budget, place)
    plans = [_packed(sizes, plan, pack_tokens) for plan in plans]
    if max_new_tokens:
        works = [_generation(sizes, plan, max_new_tokens, budget) for plan in plans]
        footprints = [work.memory for work in works]
    else:
        plans, works = [_fitted(sizes, model, plan, budget, layers) for plan in plans], []
        footprints = [sizes.footprint(plan) for plan in plans]
    facts = model.facts
    largest = max((plan.pack_tokens for plan in plans), default=DEFAULT_PACK_TOKENS)
    rate = gemm_rate(largest, facts.hidden_size, model.dtype, place)
    is_fused = runs_our_layers(model, place, layers)
    flops = sum(plan_flops(facts, plan, is_fused=is_fused) for plan in plans)
    flops += sum(facts.flops(work.tokens, work.tokens, work.pairs) for work in works)
    costs = PassCosts.on(place.type)
    reached = costs.reached_share(facts.hidden_size)
    num_packs = sum(plan.num_packs for plan in plans) + sum(work.steps for work in works)
    first_packs = 0 if works else sum(plan.core.num_units for plan in plans)
    computing, layers_of = flops / (rate * reached), facts.num_layers
    seconds = costs.seconds(computing, layers_of * num_packs, layers_of * min(first_packs, num_packs))
    longest = max((plan.long_path for plan in plans if plan.long_path), key=lambda way: way.seconds, default=None)
    seconds += sum(plan.long_path.seconds for plan in plans if plan.long_path)
    return Estimate(
        seconds=seconds if is_usual else None,
        flops=flops,
        flops_per_second=rate,
        utilisation=None if not is_usual else flops / (rate * seconds) if seconds else reached,
        device=str(place),
        dtype=facts.dtype,
        weight_bytes=sizes.weights,
        kv_token_bytes=facts.kv_token_bytes,
        memory=max(footprints, key=lambda footprint: footprint.peak, default=None),
        pack_tokens=largest,
        memory_budget=budget,
        long_path=longest,
        bfloat16_speedup=_bfloat16_rate(model, largest, place) / rate if _could_be_bfloat16(model, place) else None,
    )


def reached_rate(facts: ModelFacts) -> float:
    """About the FLOP/s that a model reaches in float32 on this machine's processor, by its measured rate
    of matrix products; what small packs cost beside them is not in it. Takes half a second."""
    place = torch.device("cpu")
    share = PassCosts.on(place.type).reached_share(facts.hidden_size)
    return gemm_rate(DEFAULT_PACK_TOKENS, facts.hidden_size, torch.float32, place) * share


def refuse_small_budget(
    name: str | Path,
    plans: Iterable[Plan],
    memory_budget: Budget,
    *,
    device: str = "auto",
    dtype: str | torch.dtype = "auto",
    max_new_tokens: int = 0,
    attention: str = "auto",
    layers: str = "auto",
) -> None:
    """Raise RequestError where a plan does not fit into ``memory_budget`` however small its packs; no weights are read.

    With ``max_new_tokens`` the plans are generated, else scored. A device that this machine lacks holds everything.
    """
    if not has_device(device):
        return
    shapes, place = load_shapes(name, device=device, dtype=dtype)
    model = PlainModel(shapes)
    has_text = has_tokenizer(name)
    sizes = Sizes.of(model, place, has_tokenizer=has_text, attention=attention, layers=layers, has_budget=True)
    for plan in plans:
        budget = resolve_budget(memory_budget, sizes.device)
        if max_new_tokens:
            limits = GenerationLimits.on(sizes.device, plan.pack_tokens)
            sizes.generation_limits(limits, budget, plan.max_tokens + max_new_tokens, plan.tokens)
        else:
            _fitted(sizes, model, plan, budget, layers, is_measured=False)


def refuse_ways(name: str | Path, attention: str, *, device: str = "auto", dtype: str | torch.dtype = "auto") -> None:
    """Raise ModelError where a model can never attend in a way on a device, as loading it would; reads no weights.

    A device that this machine lacks runs what some device of its kind does.
    """
    shapes, place = load_shapes(name, device=device, dtype=dtype)
    if has_device(device) or attention == "native":
        refuse_attention(attention, [place], shapes.dtype, PlainModel(shapes).facts.head_size)


def halved_peaks(
    name: str | Path,
    plans: Sequence[Plan],
    *,
    device: str = "auto",
    dtype: str | torch.dtype = "auto",
    attention: str = "auto",
    layers: str = "auto",
) -> tuple[int, int]:
    """Bytes that a run of all ``plans`` is predicted to take at its peak, and in packs of half the size."""
    shapes, place = load_shapes(name, device=device, dtype=dtype)
    tokenizer = has_tokenizer(name)
    sizes = Sizes.of(PlainModel(shapes), place, has_tokenizer=tokenizer, attention=attention, layers=layers)
    whole = [sizes.peak(plan, plan.pack_tokens) for plan in plans]  # the first-use check's rows are those of no plan
    halved = [sizes.peak(plan, sizes.largest_pack(plan) // 2) for plan in plans]
    return max(whole, default=0), max(halved, default=0)


def _packed(sizes: Sizes, plan: Plan, pack_tokens: int | None) -> Plan:
    """The plan in packs of the size given, else in those of an engine on the device."""
    if pack_tokens is None:
        here = [sizes.device] if has_device(str(sizes.device)) else []
        pack_tokens = plan.pack_tokens if sizes.is_host else sizes.usual_pack(device_bytes(here))
    return plan if pack_tokens == plan.pack_tokens else plan.repacked(pack_tokens)


def _fitted(
    sizes: Sizes, model: PlainModel, plan: Plan, budget: int | None, layers: str, *, is_measured: bool = True
) -> Plan:
    """As the engine's ``fitted``, of a model without weights."""
    place, facts = sizes.device, model.facts

    def rates(plan: Plan) -> Rates:
        if not is_measured or place.type != "cpu":
            return Rates.assumed(place)
        return Rates.measured(facts, gemm_rate(plan.pack_tokens, facts.hidden_size, model.dtype, place), place, plan)

    may_recompute = (
        runs_our_layers(model, place, layers) and place.type == "cpu"
    )  # elsewhere rows are not taken to be invariant
    return long_paths.fitted(sizes, facts, plan, budget, may_recompute=may_recompute, rates=rates)


class _GenerationWork(NamedTuple):
    """What the texts of a plan take beside its prompts, each as long as it may be; ``memory`` is of both."""

    tokens: int
    pairs: int
    steps: int
    memory: Footprint


def _generation(sizes: Sizes, plan: Plan, max_new_tokens: int, budget: int | None) -> _GenerationWork:
    limits = GenerationLimits.on(sizes.device, plan.pack_tokens)
    if room := room_to_generate(budget, [sizes.device] if has_device(str(sizes.device)) else []):
        limits = sizes.generation_limits(limits, room, plan.max_tokens + max_new_tokens, plan.tokens)
    bounds, own = generation_bounds(plan, max_new_tokens, limits), max_new_tokens - 1
    tokens = bounds.tokens - plan.tokens
    num_texts = plan.num_contexts * int((plan.query_lengths > 0).sum())
    per_unit = [plan.unit_contexts(unit).size * plan.unit_queries(unit).size for unit in range(plan.num_units)]
    return _GenerationWork(
        tokens=tokens,
        pairs=own * plan.tokens_naive + num_texts * own * (own + 1) // 2,
        steps=own * sum(-(-texts // limits.rows) for texts in per_unit),
        memory=sizes.generation(
            limits.pack_tokens, limits.rows, bounds.kv_peak_tokens, plan.tokens, plan.max_tokens + max_new_tokens
        ),
    )


def _could_be_bfloat16(model: PlainModel, place: torch.device) -> bool:
    return place.type == "cpu" and model.dtype == torch.float32 and "avx512_bf16" in _core.available_isas()


def _bfloat16_rate(model: PlainModel, pack_tokens: int, place: torch.device) -> float:
    return gemm_rate(pack_tokens, model.facts.hidden_size, torch.bfloat16, place)
