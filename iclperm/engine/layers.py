"""Decoder layers of our own, for architectures whose layers are known piece by piece.

They compute what transformers' layers do with fewer passes over memory: our row-wise kernels between the matrix
products (`iclperm.engine.kernels.linear`). Of the last layer, keys and values are computed for every row, the rest
for the rows alone that logits are read of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from iclperm.engine.families import Family, family_of, parts_of
from iclperm.engine.forward import TreeForward
from iclperm.engine.kernels import rowwise
from iclperm.engine.kernels.linear import JoinedProducts, MatrixProduct
from iclperm.engine.kernels.rowwise import CentredNorm, RmsNorm, RowNorm
from iclperm.engine.kernels.rule import AttentionRule
from iclperm.engine.kernels.triton_launch import may_launch
from iclperm.engine.shapes import padded_rows
from iclperm.engine.twin import all_modules

_CPU_DTYPES = (torch.float32, torch.bfloat16)
_INNER_BYTES, _FEWEST_AT_ONCE = 8 << 20, 512  # of fewer rows large matrices would come from memory too often
_MET: dict[type[nn.Module], Callable[..., Any]] = {}  # what classes of modules ran when they were first met


@dataclass(frozen=True)
class FusedDecoder:
    """A decoder's layers and final norm as we run them; ``overrides`` are the modules with their new forwards.

    ``modules`` are all that there are beneath the decoder, and itself.
    """

    layers: list[FusedLayer]
    norm: nn.Module
    family: Family
    modules: list[nn.Module]

    @property
    def overrides(self) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
        for layer in self.layers:
            yield layer.module, layer
        yield self.norm, self._normed

    def overrides_of(self, number: int) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
        """As ``overrides``, where layer ``number`` runs alone on ``tree.hidden``, the first on what it is given.

        The norm runs after the last.
        """
        for place, layer in enumerate(self.layers):
            alone = layer if number == 0 else layer.on_hidden
            yield layer.module, alone if place == number else _unchanged
        is_last = number == len(self.layers) - 1
        yield self.norm, self._normed if is_last else _unchanged

    def _normed(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The final norm, by its weights of now and where they lie."""
        norm = _norm(self.norm, self.family)
        return norm(hidden_states.to(norm.weight.device))

    def renewed(self, dtype: torch.dtype, devices: Sequence[torch.device]) -> FusedDecoder | None:
        """Itself with what its modules hold now; None where it ``is_untouched`` no more."""
        if not self.is_untouched(dtype, devices):
            return None
        for layer in self.layers:
            layer.forget()
        return self

    def is_untouched(self, dtype: torch.dtype, devices: Sequence[torch.device]) -> bool:
        """Whether nobody's hook or forward sits in the decoder or its classes, but for accelerate's where a model is
        spread, and all its numbers are ``dtype`` on ``devices``, each layer's on one."""
        return (
            all(map(is_unhooked, self.modules))
            and all(_MET[type(module)] is type(module).forward for module in self.modules)
            and all(
                parameter.dtype == dtype and parameter.device in devices
                for module in self.modules
                for parameter in module._parameters.values()
                if parameter is not None
            )
            and (len(devices) == 1 or all(layer.is_in_one_place for layer in self.layers))
        )

    @property
    def norms(self) -> Iterator[RowNorm]:
        """Every norm there is, those of the first layer standing for all layers'."""
        yield from self.layers[0].norms
        yield _norm(self.norm, self.family)

    @property
    def activation(self) -> nn.Module:
        """What gates go through."""
        return self.layers[0].activation

    @property
    def scored_only_parameters(self) -> int:
        """Entries of the last layer's matrices that meet scored rows alone."""
        return sum(linear.weight.numel() for linear in self.layers[-1].scored_only) + self.layers[-1].num_query_weights

    @property
    def token_only_parameters(self) -> int:
        """Entries of the first layer's matrices that meet each token id once."""
        first = self.layers[0]
        return first.num_query_weights + first.num_key_value_weights


def may_fuse(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether our kernels run on a device in a dtype."""
    return dtype in _CPU_DTYPES if device.type == "cpu" else may_launch(device, dtype)


def known_decoder(decoder: nn.Module) -> FusedDecoder | None:
    """The decoder as our layers run it; None unless every part is the very class that we know, and nothing more."""
    family = family_of(decoder)
    if family is None:
        return None
    _, modules, norm, *_ = parts = parts_of(decoder, family)
    assert isinstance(modules, nn.ModuleList)
    layers = [
        FusedLayer(module, family, is_first=module is modules[0], is_last=module is modules[-1]) for module in modules
    ]
    found = [decoder, *all_modules(parts)]
    for module in found:
        _MET.setdefault(type(module), type(module).forward)
    return FusedDecoder(layers, norm, family, found)


def is_unhooked(module: nn.Module) -> bool:
    """Whether nobody's hook or forward sits in a module itself, or in all modules there are; one of accelerate's that
    brings what it is given to where its weights lie is none."""
    return not (
        nn.modules.module._has_any_global_hook()  # type: ignore[no-untyped-call]
        or not all(map(is_idle, module._forward_hooks.values()))
        or module._forward_pre_hooks
        or module._compiled_call_impl is not None
        or ("forward" in vars(module) and not _only_brings(module))
    )


def is_idle(hook: object) -> bool:
    """Whether a hook is one of those that transformers leaves on a model that was once asked for hidden states or
    attentions: they collect nothing but in such a call."""
    return getattr(hook, "__module__", "") == "transformers.utils.output_capturing"


def _only_brings(module: Any) -> bool:
    """Whether a module's forward is accelerate's, which moves inputs to a device and leaves weights where they are."""
    hook: Any = getattr(module, "_hf_hook", None)
    name = type(hook).__module__, type(hook).__qualname__
    if name != ("accelerate.hooks", "AlignDevicesHook") or hook.offload:
        return False
    own = type(module).forward.__get__(module)
    return bool(getattr(module.forward, "__wrapped__", None) == module._old_forward == own)


def put_forward(module: nn.Module, forward: Callable[..., Any], undo: ExitStack) -> None:
    """Until ``undo`` is closed a module's forward is this one."""
    if "forward" in vars(module):
        undo.callback(setattr, module, "forward", module.forward)
    else:
        undo.callback(delattr, module, "forward")
    module.forward = forward


def _unchanged(hidden_states: torch.Tensor, **_: object) -> torch.Tensor:
    return hidden_states


def _norm(module: Any, family: Family) -> RowNorm:
    weight, eps = module.weight.detach(), float(module.eps if hasattr(module, "eps") else module.variance_epsilon)
    if not family.is_centred:
        return RmsNorm(weight, eps, family.norm_offset)
    bias = getattr(module, "bias", None)
    return CentredNorm(weight, eps, None if bias is None else bias.detach())


def _together(x: torch.Tensor, width: int) -> Iterator[slice]:
    """Rows of x [M, H] that go through an MLP of a width together: on a CPU no more than give what its caches hold, as
    many each time but the last, so that few products have a shape of their own."""
    num_rows, begin = x.shape[0], 0
    if x.device.type == "cpu":
        step, most = rows_at_once(width * x.element_size())
        while num_rows - begin > most:
            yield slice(begin, begin + step)
            begin += step
    yield slice(begin, num_rows)


def rows_at_once(inner_bytes: int) -> tuple[int, int]:
    """Of a pack on a CPU, that go through an MLP together if it makes so many bytes of a row; and of its last rows."""
    step = _FEWEST_AT_ONCE
    least = -(-2 * padded_rows(1, torch.device("cpu")) // step) * step  # half of it are enough for all threads
    usual = max(least, _INNER_BYTES // inner_bytes // step * step)
    return usual, usual + usual // 2


@dataclass(frozen=True)
class _LayerParts:
    """What a layer multiplies, norms and attends with, as its module had it when it was first called."""

    device: torch.device
    q: MatrixProduct
    k: MatrixProduct
    v: MatrixProduct
    qkv: JoinedProducts
    o: MatrixProduct
    into: list[MatrixProduct]  # of gates and of their factors, or of both; where nothing is gated, of one
    down: MatrixProduct
    activate: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
    is_packed: bool  # gates and factors come out of one matrix
    before_attention: RowNorm | None
    after_attention: RowNorm | None
    before_mlp: RowNorm | None
    after_mlp: RowNorm | None
    q_norm: RowNorm | None
    k_norm: RowNorm | None
    norms_heads: bool  # each by itself
    turns: bool  # queries and keys, by their positions
    multiplier: float  # of what attention and MLP add
    head_dim: int
    rule: AttentionRule

    def heads(self, hidden: torch.Tensor, index: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """q [M or R', Hq, d], k and v [M, Hkv, d] of hidden [M, H], before rotation."""
        x = hidden if self.before_attention is None else self.before_attention(hidden)
        q, k, v = self.qkv(x) if index is None else (self.q(x[index]), self.k(x), self.v(x))
        return self.by_head(q, self.q_norm), self.by_head(k, self.k_norm), self.by_head(v)

    def by_head(self, x: torch.Tensor, norm: RowNorm | None = None) -> torch.Tensor:
        """x [M, heads * d] as [M, heads, d], normed as the family norms queries and keys."""
        heads = x.view(x.shape[0], x.shape[1] // self.head_dim, self.head_dim)
        if norm is not None:
            for some in [x] if not self.norms_heads else [heads] if x.is_contiguous() else heads.unbind(1):
                norm.in_place(some)
        return heads

    def added(self, x: torch.Tensor, norm: RowNorm | None) -> torch.Tensor:
        """What attention or MLP gave, x [M, H], as it is added to the hidden states; in its own memory."""
        if norm is not None:
            norm.in_place(x)
        return x if self.multiplier == 1.0 else x.mul_(self.multiplier)

    def add_mlp(self, total: torch.Tensor, x: torch.Tensor) -> None:
        """Adds what the MLP gives of x [M, H] to ``total`` [M, H], rows after rows."""
        for rows in _together(x, self.down.weight.shape[1]):
            total[rows].add_(self.added(self._mlp(x[rows]), self.after_mlp))

    def _mlp(self, x: torch.Tensor) -> torch.Tensor:
        inner, *factors = self.into[0](x).chunk(2, dim=1) if self.is_packed else (into(x) for into in self.into)
        return self.down(self.activate(inner, factors[0] if factors else None))


class FusedLayer:
    """A decoder layer's forward: hidden states [1, M, H] to [1, M, H], of the last layer [1, R', H].

    R' are the pack's R scored rows and their padding. Called by the decoder in place of the module's own.
    """

    def __init__(self, module: Any, family: Family, *, is_first: bool, is_last: bool) -> None:
        self.module = module
        self._family = family
        self._is_first, self._is_last = is_first, is_last
        self._attention, self._mlp = module.self_attn, module.mlp
        self._parts: _LayerParts | None = None

    @property
    def products(self) -> Iterator[tuple[nn.Linear, slice]]:
        """Every matrix that rows are multiplied with, and which of its outputs at a time."""
        whole = slice(None)
        if self._family.packs_qkv:
            yield from ((self._attention.qkv_proj, outputs) for outputs in self._packed_outputs)
        else:
            yield from ((getattr(self._attention, name), whole) for name in ("q_proj", "k_proj", "v_proj"))
        yield from ((module, whole) for module in self.scored_only)

    @property
    def norms(self) -> Iterator[RowNorm]:
        """The norms of hidden states, queries and keys."""
        on_heads = ["q_norm", "k_norm"] if self._family.qk_norm else []
        for module in (
            *(getattr(self.module, name) for name in self._family.norm_names),
            *(getattr(self._attention, name) for name in on_heads),
        ):
            yield _norm(module, self._family)

    @property
    def activation(self) -> nn.Module:
        """What gates go through."""
        module: nn.Module = getattr(self._mlp, self._family.mlp.activation)
        return module

    @property
    def scored_only(self) -> list[nn.Linear]:
        """The matrices that, beside that of the queries, meet scored rows alone if this is the last layer."""
        linears = [child for child in self._mlp.children() if isinstance(child, nn.Linear)]
        return [self._output, *linears]

    @property
    def _output(self) -> nn.Linear:
        """The matrix that what was attended goes through."""
        module: nn.Linear = getattr(self._attention, self._family.output)
        return module

    @property
    def num_query_weights(self) -> int:
        """Entries of the matrix that gives queries."""
        return self._sizes[0] * self._hidden_size

    @property
    def num_key_value_weights(self) -> int:
        """Entries of the matrices that give keys and values."""
        return 2 * self._sizes[1] * self._hidden_size

    @property
    def _device(self) -> torch.device:
        """Where the layer's weights lie."""
        device: torch.device = self._output.weight.device
        return device

    @property
    def is_in_one_place(self) -> bool:
        """Whether all its weights lie on one device."""
        return {weight.device for weight in self.module.parameters()} == {self._device}

    @property
    def _hidden_size(self) -> int:
        return int(self._output.out_features)

    def __call__(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        tree: TreeForward,
        attention_mask: torch.Tensor | None = None,
        **_: object,
    ) -> torch.Tensor:
        tree.refuse_mask(self._attention, attention_mask)
        if self._parts is None:
            self._parts = self._bind(tree)
        parts = self._parts
        hidden = hidden_states[0].to(parts.device)  # from one device to the next, where layers lie on several
        rows, index = tree.narrowed(parts.device) if self._is_last else (None, None)
        q, k, v = self._first_heads(parts, hidden, tree, index) if self._is_first else parts.heads(hidden, index)
        if parts.turns:
            cosines, sines = tree.rotations(
                position_embeddings, parts.device, of_neighbours=self._family.has_tables_of_neighbours
            )
            rotate = partial(rowwise.rotate, neighbours=self._family.turns_neighbours)
            k = rotate(k, cosines, sines)
            q = rotate(q, cosines, sines) if index is None else rotate(q, cosines[index], sines[index])
        attended = tree.attention(q, k, v, parts.rule, rows)
        residual = hidden if index is None else hidden[index]
        # The residual is added into what comes out of a product, which is ours, never into what came in.
        total = parts.added(parts.o(attended.flatten(1)), parts.after_attention)
        if self._family.is_parallel:
            total.add_(residual)
            normed = residual if parts.before_attention is None else parts.before_attention(residual)
        else:
            norm = parts.before_mlp
            normed = total.add_(residual) if norm is None else norm.of_sum(residual, total)
        parts.add_mlp(total, normed)
        return total[None]

    def on_hidden(self, hidden_states: torch.Tensor, *, tree: TreeForward, **given: Any) -> torch.Tensor:
        """The layer on ``tree.hidden`` [M, H], whatever the layers before it would have given."""
        assert tree.hidden is not None
        return self(tree.hidden[None], tree=tree, **given)

    def forget(self) -> None:
        """The module may be another now: what it holds is looked up again."""
        self._parts = None

    def _bind(self, tree: TreeForward) -> _LayerParts:
        attention, mlp, family = self._attention, self._mlp, self._family
        product = partial(MatrixProduct.of, copied=tree.copied)
        if family.packs_qkv:
            of_q, of_k, of_v = (product(attention.qkv_proj, outputs) for outputs in self._packed_outputs)
        else:
            of_q, of_k, of_v = map(product, (attention.q_proj, attention.k_proj, attention.v_proj))
        activate = rowwise.gate(self.activation)
        assert activate is not None
        names = vars(family.norms)
        return _LayerParts(
            device=self._device,
            q=of_q,
            k=of_k,
            v=of_v,
            # In the last layer queries meet other rows than keys and values.
            qkv=JoinedProducts((of_q, of_k, of_v), None if self._is_last else tree.copied),
            o=product(self._output),
            into=[product(getattr(mlp, name)) for name in family.mlp.into],
            down=product(getattr(mlp, family.mlp.down)),
            activate=activate,
            is_packed=family.mlp.is_packed,
            q_norm=_norm(attention.q_norm, family) if family.qk_norm else None,
            k_norm=_norm(attention.k_norm, family) if family.qk_norm else None,
            norms_heads=family.qk_norm == "head",
            turns=not family.turns_if or bool(getattr(attention, family.turns_if)),
            multiplier=float(self.module.residual_multiplier) if family.has_multiplier else 1.0,
            head_dim=attention.head_dim,
            rule=self._rule(tree),
            **{place: _norm(getattr(self.module, name), family) if name else None for place, name in names.items()},
        )

    def _first_heads(
        self, parts: _LayerParts, hidden: torch.Tensor, tree: TreeForward, index: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        """As `_LayerParts.heads` in the first layer, whose hidden states depend on the token alone: once a token id."""

        def rows(some: torch.Tensor) -> torch.Tensor:
            return torch.cat([part.flatten(1) for part in parts.heads(hidden[some], None)], dim=1)

        table, places = tree.by_token(rows, hidden.device)
        q_size, kv_size = self._sizes
        q, k, v = torch.split(table, [q_size, kv_size, kv_size], dim=1)
        q = q[places if index is None else places[index]]
        return parts.by_head(q), parts.by_head(k[places]), parts.by_head(v[places])

    @property
    def _sizes(self) -> tuple[int, int]:
        """Columns of q, and of k or v."""
        attention = self._attention
        return self._output.in_features, attention.config.num_key_value_heads * attention.head_dim

    @property
    def _packed_outputs(self) -> tuple[slice, slice, slice]:
        """Outputs of the one matrix that are q, k and v."""
        q_size, kv_size = self._sizes
        return slice(q_size), slice(q_size, q_size + kv_size), slice(q_size + kv_size, None)

    def _rule(self, tree: TreeForward) -> AttentionRule:
        attention = self._attention
        owner = {"layer": attention, "config": attention.config}.get(self._family.window)
        softcap = attention.attn_logit_softcapping if self._family.has_softcap else None
        return AttentionRule(
            scaling=float(attention.scaling),
            softcap=float(softcap or 0.0),
            window=tree.window(attention, {} if owner is None else {"sliding_window": owner.sliding_window}),
        )
