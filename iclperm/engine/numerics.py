"""What the last bits of a result depend on besides model and prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

from iclperm import _core
from iclperm.engine.device import fixed_precision, gpu_versions
from iclperm.engine.kernels import head
from iclperm.engine.kernels.linear import MatrixProduct, multiplied_by
from iclperm.engine.kernels.triton_launch import installed_version
from iclperm.engine.model import TreeModel
from iclperm.engine.plain_model import PlainModel

# A probe's product: rows of one number and of many, as libraries have other loops for them; sums long enough that
# their order shows in the last bits.
_ROWS, _INNER, _OUTPUTS = (1, 32), 640, 96
_HEADS = 4
_IDS = 1 << 16


def numerics_of(model: PlainModel, pack_tokens: int | None, memory_budget: int | None) -> dict[str, Any]:
    """By name, JSON-safe: of the model's ways, its device and the libraries; sizes of packs as they are given."""
    on_cpu, is_fused = model.device.type == "cpu", model.layers == "fused"
    return {
        "attention": model.attention,
        "layers": model.layers,
        "products": products_of(model),
        "head": head_of(model),
        "isa": _core.isa() if on_cpu and (model.attention == "native" or is_fused) else None,
        "triton": None if on_cpu and model.attention != "triton" else installed_version(),
        "device": model.device_name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads() if on_cpu else None,
        **({} if on_cpu else gpu_versions(model.device)),
        "pack_tokens": pack_tokens,
        "memory_budget": memory_budget,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "probe": probe(model),
        **({"stored_as": stored} if (stored := getattr(model.model, "stored_as", None)) else {}),
        **({"decoding": "tree"} if model.attention == "triton" and not _attends_live_rows(model) else {}),
    }


def products_of(model: PlainModel) -> str:
    """What multiplies in the layers: ``amx``, ``onednn``, ``torch``, or two of them where matrices differ."""
    decoder = model.fused_decoder() if isinstance(model, TreeModel) and model.layers == "fused" else None
    if decoder is None:
        return "torch"
    return multiplied_by(model.device, model.dtype, (each for layer in decoder.layers for each in layer.products))


def head_of(model: PlainModel) -> str:
    """What reads the rows that are scored: ``triton``, ``amx``, ``onednn`` or ``torch``."""
    if not isinstance(model, TreeModel):
        return "torch"
    if model.fuses_head:
        return "triton"
    if not model.head_is_onednn:
        return "torch"
    head: nn.Linear = model.model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return multiplied_by(model.device, model.dtype, [(head, slice(None))], is_head=True)


def _attends_live_rows(model: PlainModel) -> bool:
    return isinstance(model, TreeModel) and model.attends_live_rows


def probe(model: PlainModel) -> str:
    """Of what the libraries that a model runs in make of some fixed numbers, wherever its weights lie: a digest of the
    bits, 16 hexadecimal digits.

    It tells apart what no version names: the instructions that oneDNN, MKL and torch take, which the processor decides
    and variables of theirs (ONEDNN_MAX_CPU_ISA, MKL_CBWR, ATEN_CPU_CAPABILITY, ...), and what a product is computed in.
    Made once for each way of running a model. Cost: some milliseconds.
    """
    is_fused, has_onednn_head = model.layers == "fused", isinstance(model, TreeModel) and model.head_is_onednn
    attends_by_torch = model.attention in ("torch", "plain")
    reads_natively = isinstance(model, TreeModel) and model.device.type == "cpu" and model.dtype in head.NATIVE
    way = is_fused, has_onednn_head, attends_by_torch, reads_natively, torch.get_num_threads()
    if way not in model.probes:
        lying = dict.fromkeys(weight.device for weight in model.model.parameters() if weight.device.type != "meta")
        digest = hashlib.sha256()
        with fixed_precision(), torch.inference_mode():
            for place in lying or model.devices:
                for result in _results(model.dtype, place, *way[:4]):
                    digest.update(result.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())
        model.probes[way] = digest.hexdigest()[:16]
    return model.probes[way]


def _results(
    dtype: torch.dtype,
    place: torch.device,
    is_fused: bool,
    has_onednn_head: bool,
    attends_by_torch: bool,
    reads_natively: bool,
) -> Iterator[torch.Tensor]:
    """What products, attention, functions of one number and the core's sum over a vocabulary make of fixed numbers, in
    the ways that are asked for."""
    generator = np.random.default_rng(0)  # whole numbers of numpy's are the same everywhere

    def drawn(*shape: int) -> torch.Tensor:
        numbers = generator.integers(-(1 << 20), 1 << 20, shape).astype(np.float32) / (1 << 20)
        return torch.from_numpy(numbers).to(place, dtype)

    product = nn.Linear(_INNER, _OUTPUTS, bias=False, device="meta")
    product.weight = nn.Parameter(drawn(_OUTPUTS, _INNER), requires_grad=False)
    products: list[Callable[[torch.Tensor], torch.Tensor]] = [
        MatrixProduct.of(product).by_library if is_fused else product
    ]
    if has_onednn_head:
        products.append(MatrixProduct.of(product, is_head=True).by_library)
    for rows in _ROWS:
        x = drawn(rows, _INNER)
        yield from (each(x) for each in products)
    q, k, v = drawn(3, _HEADS, _ROWS[-1], _INNER // _HEADS)
    if attends_by_torch:
        yield (q @ k.mT).float().softmax(-1).to(dtype) @ v
    wide = x.float()
    yield from (wide.exp(), wide.cos(), wide.sin(), wide.tanh(), nn.functional.silu(x), wide.log_softmax(-1))
    if reads_natively:
        yield torch.from_numpy(head.choose_logits(16 * drawn(1, _IDS), 0.0).logprob)
    yield wide.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()
