"""Which kernels and layers run a model, why not the others, and what every variant of its kernels is compiled into."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from iclperm.engine.doctor.privacy import first_line
from iclperm.engine.kernels import rowwise
from iclperm.engine.kernels.rowwise import CentredNorm, RmsNorm
from iclperm.engine.kernels.triton_compilation import (
    MAX_HEAD_DIM,
    TYPE_NAMES,
    Compilation,
    KernelShapes,
    least_architecture,
)
from iclperm.engine.kernels.triton_compilation import architecture as capability
from iclperm.engine.kernels.triton_launch import head_obstacle, is_interpreted, obstacle
from iclperm.engine.layers import may_fuse
from iclperm.engine.model import TreeModel
from iclperm.engine.numerics import head_of, products_of
from iclperm.engine.plain_model import PlainModel


@dataclass(frozen=True)
class PartWay:
    """How a part of the model runs, and why not the way that would be faster; no reason where it is the fastest."""

    part: str
    runs: str
    reason: str = ""


@dataclass(frozen=True)
class CompiledKernel:
    """A variant of a kernel for an architecture: registers and spilled bytes of a thread, shared memory of a block in
    bytes, seconds of compilation. All None, with the reason, where it does not compile."""

    kernel: str
    arch: str
    warps: int
    stages: int
    registers: int | None = None
    shared: int | None = None
    spills: int | None = None
    matrix_unit: str | None = None
    seconds: float | None = None
    reason: str = ""


def ways(model: PlainModel) -> list[PartWay]:
    """What runs each part of a model as it stands."""
    if not isinstance(model, TreeModel):
        return [PartWay("prompts", "plain", "the prefix tree does not serve it")]
    is_cpu = model.device.type == "cpu"
    return [
        PartWay("attention", model.attention, _why_not_attention(model)),
        PartWay("layers", model.layers, _why_not_layers(model)),
        PartWay("products", products_of(model)),
        PartWay("head", head_of(model), "" if is_cpu or model.fuses_head else _why_not_head(model)),
    ]


def _why_not_attention(model: TreeModel) -> str:
    if model.attention != "torch":
        return ""
    if model.device.type == "cpu":
        return f"our C++ kernel takes float32 and bfloat16, not {model.facts.dtype}"
    if model.facts.head_size > MAX_HEAD_DIM:
        return f"heads of {model.facts.head_size} dimensions are more than the kernel's {MAX_HEAD_DIM}"
    return obstacle(model.device, model.dtype)


def _why_not_layers(model: TreeModel) -> str:
    if model.layers == "fused":
        return ""
    if not may_fuse(model.device, model.dtype):
        return obstacle(model.device, model.dtype) or f"our layers take no {model.facts.dtype} on a CPU"
    if model.known_decoder is None:
        return f"ours do not know {model.facts.model_type}"
    return "parts of it are offloaded, or somebody hooked into it"


def _why_not_head(model: TreeModel) -> str:
    reason = head_obstacle(model.device, model.dtype)
    return reason or "it is no plain matrix of the model's dtype, or somebody hooked into it"


def shapes_of(model: PlainModel) -> KernelShapes:
    """What the variants of a model's kernels follow from, as if all of ours ran it; it may lie on the meta device."""
    facts, head = model.facts, model.model.get_output_embeddings()  # type: ignore[no-untyped-call]
    is_plain = type(head) is nn.Linear
    num_ids, width = map(int, head.weight.shape) if is_plain else (0, 0)
    shapes = KernelShapes(
        dtype=model.dtype,
        head_dim=facts.head_size,
        group=facts.num_heads // max(1, facts.num_kv_heads),
        has_window=facts.num_window_layers > 0,
        has_softcap=facts.attention_softcap > 0,
        num_ids=num_ids,
        width=width,
        has_bias=is_plain and head.bias is not None,
        has_logit_softcap=facts.logit_softcap > 0,
        sinks=facts.sink_choices,
    )
    decoder = model.known_decoder
    if decoder is None:
        return shapes
    kind = rowwise.kind_of(decoder.activation)
    assert kind is not None  # or the layers were not known
    family, norms = decoder.family, list(decoder.norms)
    adds = {False, bool(family.norms.before_mlp)}
    tables = model.model.get_decoder().named_buffers()  # type: ignore[no-untyped-call]
    halves = {table.numel() for name, table in tables if name.endswith("inv_freq")}
    return replace(
        shapes,
        gates=frozenset({(kind, facts.inner_size, family.mlp.is_gated)}),
        norms=frozenset(
            (norm.weight.numel(), of_sum)
            for norm in norms
            if isinstance(norm, RmsNorm)
            for of_sum in (adds if norm.weight.numel() == facts.hidden_size else {False})
        ),
        layer_norms=frozenset(
            (norm.weight.numel(), of_sum, norm.bias is not None)
            for norm in norms
            if isinstance(norm, CentredNorm)
            for of_sum in adds
        ),
        rotations=frozenset(
            (heads, half, family.turns_neighbours) for heads in (facts.num_heads, facts.num_kv_heads) for half in halves
        ),
    )


def why_not_compiled(dtype: torch.dtype) -> str:
    """Why Triton compiles nothing of a dtype in this process; empty where it does."""
    if dtype not in TYPE_NAMES:
        return f"Triton's kernels take no {str(dtype).removeprefix('torch.')}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return "TRITON_INTERPRET is set, so kernels are interpreted and nothing is compiled" if is_interpreted() else ""


def why_left_out(dtype: torch.dtype, architectures: Sequence[int]) -> str:
    """Which of these are too old for a dtype; empty where none is."""
    least = least_architecture(dtype)
    older = ", ".join(f"sm_{arch}" for arch in architectures if arch < least)
    name = str(dtype).removeprefix("torch.")
    return f"{name} takes a compute capability of {least / 10}: nothing is compiled for {older}" if older else ""


def architecture(device: torch.device) -> int:
    """A device's compute capability times ten; 0 for what kernels are not compiled for."""
    return capability(device) if device.type == "cuda" and torch.version.hip is None else 0


def variants(shapes: KernelShapes, architectures: Sequence[int]) -> Iterator[tuple[Compilation, int]]:
    """Every variant of a model's kernels for each of some compute capabilities times ten."""
    from iclperm.engine.kernels import triton_attention, triton_decode, triton_head, triton_layer_norm, triton_rowwise

    for arch in architectures:
        if arch < least_architecture(shapes.dtype):
            continue
        for case in (
            *triton_attention.model_cases(shapes, arch),
            *(case for case in triton_decode.model_cases(shapes) if arch >= min(case.architectures)),
            *triton_head.model_cases(shapes, arch),
            *triton_rowwise.model_cases(shapes),
            *triton_layer_norm.model_cases(shapes),
        ):
            yield case, arch


def compiled(case: Compilation, arch: int) -> CompiledKernel:
    """A variant compiled, for a device that need not be here. Cost: a second or some."""
    from iclperm.engine.kernels.triton_resources import resources

    about = (case.name, f"sm_{arch}", case.num_warps, case.num_stages)
    try:
        used = resources(case, arch)
    except Exception as error:  # a compiler's or an assembler's, as many as there are versions
        return CompiledKernel(*about, reason=first_line(error))
    return CompiledKernel(*about, used.registers, used.shared, used.spills, used.matrix_unit, round(used.seconds, 2))


def launch_seconds(launch: Callable[[], object], device: torch.device) -> float:
    """The median of the seconds that a GPU needs for what is launched."""
    from iclperm.engine.kernels import triton_resources

    return triton_resources.launch_seconds(launch, device)
