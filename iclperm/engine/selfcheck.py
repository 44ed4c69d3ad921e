"""What an engine checks on its first use: the tree agrees with plain scoring, and rows do not disturb each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from iclperm.engine import agreement
from iclperm.engine.agreement import DrawnPrompts
from iclperm.engine.forward import TreeForward
from iclperm.engine.kernelcheck import kernel_checks
from iclperm.engine.kernels import rowwise
from iclperm.engine.kernels.launching import DECODE_ATTENTION, PARTS
from iclperm.engine.kernels.linear import linear
from iclperm.engine.layers import FusedDecoder, FusedLayer, put_forward
from iclperm.engine.model import TreeModel
from iclperm.engine.plain_model import PlainModel
from iclperm.engine.plan import DEFAULT_PACK_TOKENS
from iclperm.engine.shapes import pack_sizes, padded_rows
from iclperm.errors import (
    PLAINLY,
    IclpermError,
    KernelError,
    ModelError,
    OutOfMemory,
    RequestError,
    SelfCheckError,
    is_of_a_device,
    is_out_of_memory,
    said_by,
)
from iclperm.reference import scoring
from iclperm.reference.precision import in_float32

CAUSAL_TOLERANCE = 1e-2
"""Largest difference in nats, in float32, that what follows a token may make to what comes after it."""
_PROBED_ROWS = (1, 9, 33, 341, 512, 1024, 2048)  # against a whole pack
_HEAD = "head"
# Largest difference between our layers and transformers', as a share of the largest number that comes out of a layer.
LAYER_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@dataclass(frozen=True)
class FirstUse:
    """What the check found; ``row_invariant`` is None prompt by prompt, where it cannot matter.

    ``given_up`` names what of ours the library's own takes the place of, ``said`` has a line for each.
    """

    row_invariant: bool | None
    given_up: tuple[str, ...] = ()
    said: tuple[str, ...] = ()


def first_use(model: PlainModel, pack_tokens: int) -> FirstUse:
    """Checks the model before it answers, kernel by kernel and as a whole; changes it where the library's own must do.

    Raises what a GPU says of itself, `KernelError` for a kernel after which it says nothing more, `ModelError` for a
    model that cannot be run exactly and `OutOfMemory` where memory has no room for the check.
    """
    try:
        if isinstance(model, TreeModel):
            return _ladder(model, pack_tokens)
        refuse_unless_causal(model)
        return FirstUse(None)
    except Exception as error:
        if is_of_a_device(error) and not is_out_of_memory(error):
            raise
        if isinstance(error, OutOfMemory) or is_out_of_memory(error):  # whatever size of packs it names
            raise OutOfMemory(
                "memory has no room for the first-use check beside the model; use a smaller model or dtype, or "
                "a machine with more memory"
            ) from error
        # The check makes no request of the user's: what the core refuses there is the model's doing.
        if isinstance(error, IclpermError) and not isinstance(error, RequestError):
            raise
        raise refusal(model, error) from error


def _ladder(model: TreeModel, pack_tokens: int) -> FirstUse:
    """Each kernel alone, so that what fails is known and only it is given up; then layers, and all together."""
    fallen = Fallbacks(model)
    for check in kernel_checks(model, pack_tokens):
        if not check.is_right:
            fallen.give_up(check.part, f"{check.name} kernel", check.reason)
    if reason := _why_layers_differ(model):
        fallen.give_up("layers", "decoder layers", reason)
    while True:
        try:
            is_invariant = check_agreement(model) and rows_are_invariant(model, pack_tokens)
            return FirstUse(is_invariant, tuple(fallen.reasons), tuple(fallen.lines()))
        except KernelError as failure:  # in a shape that it was not launched in alone
            part = PARTS.get(failure.kernel, "")
            if not part or part in fallen.parts:
                raise
            fallen.give_up(part, f"{failure.kernel} kernel", said_by(failure))


class Fallbacks:
    """What of ours a model runs without, by name with the reason, and the parts that are the library's now."""

    def __init__(self, model: TreeModel) -> None:
        self._model = model
        self.reasons: dict[str, str] = {}
        self.parts: set[str] = set()

    def give_up(self, part: str, name: str, reason: str) -> None:
        """From now on the library's own runs in place of a part; in place of decoding's, the attention of all rows."""
        {
            "attention": self._model.use_torch_attention,
            "decoding": self._model.use_tree_attention,
            "layers": self._model.use_transformers_layers,
            "head": self._model.use_logits,
        }[part]()
        self.parts.add(part)
        self.reasons[name] = reason

    def lines(self) -> Iterator[str]:
        """What is said of each."""
        model = self._model
        for name, reason in self.reasons.items():
            other = "that of prompts" if name.startswith(DECODE_ATTENTION) else "the library's own"
            yield (
                f"iclperm's {name} cannot be used for {model.config.model_type!r} on {model.device_name}: {reason}; "
                f"{other} takes its place and may be slower"
            )


def _why_layers_differ(model: TreeModel) -> str:
    try:
        return "" if layers_agree(model) else "their numbers are not those of transformers'"
    except Exception as error:  # a compiler's, a driver's: whatever it is, there is another way
        if is_out_of_memory(error):
            raise
        return said_by(error)


def layers_agree(model: TreeModel) -> bool:
    """Whether our layers do what transformers' do, each on the hidden states that a few prompts bring to it.

    True where ours do not run. Cost: 6 short prompts, twice.
    """
    decoder = model.fused_decoder()
    if decoder is None:
        return True
    plan = DrawnPrompts.of(model).plan()
    (pack,) = plan.packs(0)
    ours = model.start(pack, model.pool(plan.core.pool_slots))
    with model.attached(fused=False), _compared(model, decoder, ours) as verdicts:
        model.forward(pack, model.pool(plan.core.pool_slots))
    return all(verdicts)


@contextmanager
def _compared(model: TreeModel, decoder: FusedDecoder, ours: TreeForward) -> Iterator[list[bool]]:
    """Within: each layer also runs as ours, on the same hidden states; whether the two agree is in the list."""
    verdicts: list[bool] = []

    def comparing(layer: FusedLayer, forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def both(hidden: torch.Tensor, **arguments: Any) -> torch.Tensor:
            theirs = forward(hidden, **arguments)
            out = layer(hidden, **{**arguments, "tree": ours})
            # Windows and scales by name: half precision may hide what they do to a prompt as short as this.
            verdicts.append(ours.rule == arguments["tree"].rule and _close(out[0], theirs[0], ours))
            return theirs

        return both

    with ExitStack() as undo:
        for layer in decoder.layers:
            runs = model.running(layer.module)
            put_forward(runs, comparing(layer, runs.forward), undo)
        yield verdicts


def _close(ours: torch.Tensor, theirs: torch.Tensor, tree: TreeForward) -> bool:
    """Whether rows [M or R', H] of ours equal theirs [M, H] but for rounding; padding is left out."""
    if tree.is_narrowed:
        ours, theirs = ours[: tree.num_scored], theirs[torch.from_numpy(tree.pack.scored_rows.astype(np.int64))]
    else:
        ours, theirs = ours[: len(tree.pack)], theirs[: len(tree.pack)]
    scale = float(theirs.abs().nan_to_num(0.0, 0.0).max())
    return torch.allclose(
        ours.float(), theirs.float(), rtol=0.0, atol=LAYER_TOLERANCE[ours.dtype] * scale, equal_nan=True
    )


def check_agreement(model: TreeModel) -> bool:
    """As `agreement.check_agreement`; raises ModelError for a model that is not causal if the two disagree."""
    try:
        return agreement.check_agreement(model)
    except SelfCheckError:
        refuse_unless_causal(model)
        raise


def refusal(model: PlainModel, error: Exception) -> ModelError:
    """What to raise for something unforeseen in the first-use check: a model that is not understood is not served."""
    way, remedy = (
        ("through the prefix tree", PLAINLY)
        if isinstance(model, TreeModel)
        else ("prompt by prompt", "it cannot be served")
    )
    return ModelError(f"{type(model.model).__name__} cannot be run {way} ({said_by(error)}); {remedy}")


@torch.inference_mode()
def refuse_unless_causal(model: PlainModel) -> None:
    """Raises ModelError where what is predicted after a token depends on the tokens that follow it.

    Cost: a short prompt, twice, in float32 whatever the weights are.
    """
    rng = np.random.default_rng(1)
    length = max(1, min(8, model.max_positions // 2))
    ids = torch.from_numpy(rng.integers(0, model.vocab_size, (1, 2 * length))).to(scoring.inputs_device(model.model))
    with model.plainly() as plain, in_float32():
        short, whole = (plain(input_ids=part, use_cache=False).logits for part in (ids[:, :length], ids))
    alone, followed = short[0, :length].float(), whole[0, :length].float()
    both = alone.isfinite() & followed.isfinite()
    difference = (alone.log_softmax(-1) - followed.log_softmax(-1)).abs()[both]
    if difference.numel() and float(difference.max()) > CAUSAL_TOLERANCE:
        raise ModelError(
            f"{type(model.model).__name__} ({model.config.model_type!r}) is no causal language model: what it predicts "
            "after a token depends on those that follow it; give a decoder-only model"
        )


@torch.inference_mode()
def rows_are_invariant(model: TreeModel, pack_tokens: int = DEFAULT_PACK_TOKENS) -> bool:
    """Whether every layer gives a row the same bits in any company, at any offset: a probe of each shape of product.

    On a GPU that can be so where layers, attention and head are ours, and every number of rows that products are run
    with is probed. False means that results may differ in their last bits with the requests beside them. It is so of
    mixture-of-experts layers, whose products have as many rows as tokens routed, and of torch's attention, which sums
    over a pack's keys in an order that their number decides (seen in float16, where every short probe had agreed).
    """
    if model.device.type == "cpu":
        is_ours = model.attention == "native" and model.is_row_wise
    else:
        is_ours = model.attention == "triton" and model.layers == "fused" and model.fuses_head
    if not is_ours or model.facts.num_experts or len(model.devices) > 1:
        return False
    if any(rowwise.may_depend_on_company(module) for module in model.model.modules()):
        return False
    generator = torch.Generator(model.device).manual_seed(0)
    products = _products(model)
    with model.attached(fused=False):  # modules as they run, in evaluation mode
        return all(_is_invariant(product, shape, model, pack_tokens, generator) for shape, product in products.items())


def _products(model: TreeModel) -> dict[tuple[int, int, str], Callable[[torch.Tensor], torch.Tensor]]:
    """A matrix product of each shape in use, by [outputs, inputs] and how it is computed, or that it is the head."""
    products: dict[tuple[int, int, str], Callable[[torch.Tensor], torch.Tensor]] = {}
    decoder = model.fused_decoder()
    ours = [] if decoder is None else [product for layer in decoder.layers for product in layer.products]
    for known, outputs in ours:
        rows, inner = known.weight[outputs].shape
        products.setdefault((rows, inner, "ours"), partial(linear, known, outputs=outputs))
    ids = {id(known) for known, _ in ours}
    head = model.model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if model.head_is_onednn:
        products[*head.weight.shape, _HEAD] = model.multiply_head
        ids.add(id(head))
    for module in model.model.modules():
        if id(module) not in ids and (shape := _shape_of_product(module)) is not None:
            how = _HEAD if module is head else type(module).__name__
            products.setdefault((*shape, how), partial(_run, model, module))
    return products


def _run(model: TreeModel, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    product: torch.Tensor = model.running(module)(x)
    return product


def _shape_of_product(module: Any) -> tuple[int, int] | None:
    """[outputs, inputs] of a module that multiplies rows by a matrix; None of any other.

    One of another class than torch's own may say its sizes as torch's does: an adapter's wrapper, whose ``weight`` is
    that of the layer within. Else its weight is [inputs, outputs] as Conv1D's; if that is not its own, the layer within
    is looked at alone.
    """
    weight = getattr(module, "weight", None)
    # A norm may have a weight of two axes as well: Cohere's, of queries and keys by head.
    is_product = not isinstance(module, nn.Embedding) and "Norm" not in type(module).__name__
    if not is_product or not isinstance(weight, torch.Tensor) or weight.ndim != 2:
        return None
    if isinstance(module, nn.Linear):
        return weight.shape[0], weight.shape[1]
    sizes = getattr(module, "out_features", None), getattr(module, "in_features", None)
    if isinstance(sizes[0], int) and isinstance(sizes[1], int) and set(sizes) == set(weight.shape):
        return sizes[0], sizes[1]
    return (weight.shape[1], weight.shape[0]) if module._parameters.get("weight") is weight else None


def _is_invariant(
    product: Callable[[torch.Tensor], torch.Tensor],
    shape: tuple[int, int, str],
    model: TreeModel,
    pack_tokens: int,
    generator: torch.Generator,
) -> bool:
    most = padded_rows(pack_tokens, model.device)
    if shape[2] == _HEAD:
        most = min(most, model.limits.probed_rows(model.vocab_size, model.device))
    x = torch.randn(most, shape[1], generator=generator, device=model.device).to(model.dtype)
    whole, sizes = product(x), _probed_sizes(most, model.device)
    if not sizes:  # it is only ever run with so many rows: then places within must not matter
        return torch.equal(product(x.roll(1, 0)), whole.roll(1, 0))
    return all(
        torch.equal(product(x[begin : begin + rows]), whole[begin : begin + rows])
        for rows in sizes
        for begin in (0, most - rows)
    )


def _probed_sizes(most: int, device: torch.device) -> list[int]:
    """Numbers of rows below ``most`` that a product is tried with: on a GPU all that it is ever run with."""
    wanted = _PROBED_ROWS if device.type == "cpu" else pack_sizes(most, device)
    return sorted({padded for each in wanted for padded in [padded_rows(each, device)] if padded < most})
