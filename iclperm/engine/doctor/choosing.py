"""Choices of equal bits by time: how many stages ahead a kernel loads, tried on this device.

A candidate is kept only where it gave, bit for bit, what the shipped one gives, on every input that is tried. Anything
that could change a bit is a rule in the kernels' tables, never a measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product

import torch

from iclperm.engine.decodecases import decode_case
from iclperm.engine.doctor.packs import product_of
from iclperm.engine.doctor.privacy import first_line
from iclperm.engine.forward import TreeForward
from iclperm.engine.kernelcases import attention_case, on_device, with_sinks
from iclperm.engine.kernels.head import find_wanted
from iclperm.engine.kernels.rule import AttentionRule, LayerStates
from iclperm.engine.kernels.stages import keep, trying
from iclperm.engine.model import TreeModel
from iclperm.engine.plan import DEFAULT_PACK_TOKENS
from iclperm.errors import IclpermError

CANDIDATES = (1, 2, 3, 4, 5)
_GAIN = 0.03  # a candidate must be so much faster: less may be chance
_SHORT_WINDOW = 200  # positions, where the model's own is longer than what is tried
Launched = Callable[[], Sequence[torch.Tensor]]
"""Launches a kernel on some input and returns all that it gives."""


@dataclass(frozen=True)
class StageChoice:
    """Of a variant of a kernel: the stages shipped and chosen, and the seconds of a launch by stages that were tried.

    ``reason`` names candidates that did not run or gave other bits.
    """

    kernel: str
    shipped: int
    chosen: int
    seconds: Mapping[int, float] = field(default_factory=dict)
    reason: str = ""


def chosen_stages(model: TreeModel, seconds_of: Callable[[Launched], float]) -> Iterator[StageChoice]:
    """Of every variant of a model's kernels that leaves its stages open, by ``seconds_of`` a launch on a whole pack.

    The candidates' outputs are compared on that pack and on the inputs of the first-use check. Cost: some compilations
    of each variant.
    """
    for inputs in _inputs(model):
        choice = choose(inputs, seconds_of)
        if choice is not None:
            yield choice


def kept(choices: Sequence[StageChoice], device: torch.device) -> str:
    """Keeps the choices for studies on the same device; why they could not be kept, or nothing."""
    try:
        keep(device, {each.kernel: each.chosen for each in choices if each.seconds})
    except (OSError, RuntimeError, IclpermError) as error:
        return f"not kept: {first_line(error)}"
    return ""


def choose(inputs: Sequence[Launched], seconds_of: Callable[[Launched], float]) -> StageChoice | None:
    """The fastest candidate of the shipped one's bits on all inputs, by the time of the last; the shipped one where
    nothing is faster or it fails itself. None for a kernel that leaves no stages open."""
    with trying(None) as asked:
        try:
            expected, reason = [output.clone() for launch in inputs for output in launch()], ""
        except Exception as error:
            expected, reason = [], first_line(error)
    if not asked:
        return None
    ((kernel, shipped),) = asked.items()
    if reason:
        return StageChoice(kernel, shipped, shipped, {}, reason)
    seconds: dict[int, float] = {}
    said: list[str] = []
    for stages in (shipped, *(each for each in CANDIDATES if each != shipped)):
        try:
            with trying(stages):
                outputs = (output for launch in inputs for output in launch())
                if all(_same_bits(*pair) for pair in zip(outputs, expected, strict=True)):
                    seconds[stages] = seconds_of(inputs[-1])
                else:
                    said.append(f"{stages} gives other bits")
        except Exception as error:  # more shared memory than there is, mostly
            said.append(f"{stages}: {first_line(error)}")
    fastest = min(seconds, key=lambda stages: seconds[stages], default=shipped)
    is_faster = shipped in seconds and seconds[fastest] < seconds[shipped] * (1 - _GAIN)
    return StageChoice(
        kernel, shipped, fastest if is_faster else shipped, dict(sorted(seconds.items())), "; ".join(said)
    )


def _same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether two tensors are the same number for number, NaN and the sign of zero included."""
    return ours.shape == theirs.shape and torch.equal(_bits(ours), _bits(theirs))


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


@torch.inference_mode()
def _inputs(model: TreeModel) -> Iterator[list[Launched]]:
    """For each variant the inputs to try it on, the last of them a pack as studies have it, or live rows of a check."""
    facts = model.facts
    plan = product_of(model, DEFAULT_PACK_TOKENS, 1)
    pack = max(plan.packs(0), key=len)
    tree = model.start(pack, model.pool(plan.core.pool_slots))
    generator = torch.Generator(model.device).manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=model.device).to(model.dtype)

    windows = {0} | ({min(_SHORT_WINDOW, facts.window)} if facts.num_window_layers else set())
    rules = [AttentionRule(facts.head_size**-0.5, facts.attention_softcap, window) for window in sorted(windows)]
    if model.attention == "triton":
        states = _states(tree, plan.core.pool_slots, model, drawn)
        for has_sinks, rule in product(facts.sink_choices, rules):
            tried, own = attention_case(model), states
            if has_sinks:
                sinks = with_sinks(states).sinks
                tried, own = tried.with_sinks(), replace(states, sinks=on_device(sinks, model.device))
            check = partial(tried.attended, rule, model.attention, model.device)
            yield [check, lambda own=own, rule=rule: (tree.attend(own, rule),)]  # type: ignore[misc]
    if model.attends_live_rows:
        case = decode_case(model)
        for rule in rules:
            yield [partial(case.attended, rule, model.device), case.launched(rule, model.device)]
    if model.fuses_head:
        head = model.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        hidden = drawn(tree.num_scored, head.weight.shape[1])
        yield [lambda: find_wanted(hidden, head, model.logit_scale, facts.logit_softcap, tree.tables)]


def _states(tree: TreeForward, num_slots: int, model: TreeModel, drawn: Callable[..., torch.Tensor]) -> LayerStates:
    """What a layer attends with, in the model's sizes and of random numbers."""
    facts, num_rows = model.facts, tree.tables.num_rows
    q = drawn(num_rows, facts.num_heads, facts.head_size)
    k, v = (drawn(num_rows, facts.num_kv_heads, facts.head_size) for _ in range(2))
    k_pool, v_pool = (drawn(max(1, num_slots), facts.num_kv_heads, facts.head_size) for _ in range(2))
    return LayerStates(q, k, v, k_pool, v_pool)
