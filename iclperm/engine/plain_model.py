"""A Hugging Face causal language model as it is, and what it is in numbers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from iclperm.engine.device import fixed_precision
from iclperm.engine.facts import ModelFacts
from iclperm.engine.forward import PassLimits
from iclperm.engine.kernels.linear import uses_onednn
from iclperm.engine.kernels.packed_weights import PackedWeights
from iclperm.engine.layers import FusedDecoder, known_decoder
from iclperm.engine.load import bos_ids, load_shapes
from iclperm.engine.twin import Twin, borrowed, may_have_twins
from iclperm.errors import ModelError

# Rotary types whose scale depends on the length of the prompt beyond their original window.
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}
_UNBOUNDED = int(np.iinfo(np.int32).max)
_RATE_SECONDS, _RATE_ROWS = 0.5, 1024


class PlainModel:
    """A causal language model as it is: what prompt-by-prompt scoring needs to know of it.

    ``lock`` is held while it runs: one thread of an engine at a time.
    """

    attention = layers = "plain"

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.lock = threading.RLock()
        self._twin: Twin | None = None
        self.probes: dict[tuple[Any, ...], str] = {}  # of `iclperm.engine.numerics.probe`, by the way of running
        self.limits = PassLimits()
        self.copied = PackedWeights()
        self.config = model.config.get_text_config(decoder=True)
        self.devices = _placement(model)
        self.device = self.devices[0]
        self.dtype = model.dtype
        _output_embeddings(model)  # which refuses a model that has none
        self.max_positions = self.facts.max_positions

    @property
    def _head(self) -> Any:
        """What logits come out of. Read anew, since it may be replaced."""
        return _output_embeddings(self.model)

    @property
    def vocab_size(self) -> int:
        """Token ids that the model knows now."""
        embedding: Any = self.model.get_input_embeddings()
        return int(embedding.weight.shape[0])

    @property
    def device_name(self) -> str:
        """The kind of device, and which one if it is an accelerator; of several, each kind once."""
        names = [torch.cuda.get_device_name(each) if each.type == "cuda" else str(each) for each in self.devices]
        return " and ".join(sorted(set(names)))

    @contextmanager
    def plainly(self) -> Iterator[PreTrainedModel]:
        """Within: what runs as the model does, in evaluation mode: its twin, or the model itself where it has none."""
        if not may_have_twins([self.model]):
            with borrowed(self.model), self.lock:
                yield self.model
            return
        with self.lock:
            if self._twin is None or not self._twin.is_current([self.model]):
                self._twin = Twin([self.model])
            twin: Any = self._twin[self.model]
            yield twin

    def release_cached_memory(self) -> None:
        """Hand back what the allocator keeps for later, so that it can be cut anew."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def uses_onednn(self) -> bool:
        """Whether layers of ours run oneDNN's matrix products."""
        return uses_onednn(self.device, self.dtype)

    @cached_property
    def facts(self) -> ModelFacts:
        """What the model is, in numbers, counted once. Cost: a walk over its modules, some milliseconds."""
        config, known = self.config, self.known_decoder
        num_heads = _number(config, "num_attention_heads")
        window, kinds = _number(config, "sliding_window"), list(getattr(config, "layer_types", None) or ())
        num_layers = int(config.num_hidden_layers)
        num_window_layers = kinds.count("sliding_attention") if kinds else num_layers if window else 0
        max_positions = _number(config, "max_position_embeddings")
        max_positions = max_positions if max_positions > 0 else _UNBOUNDED
        embedding: Any = self.model.get_input_embeddings()
        vocab_size, width = map(int, embedding.weight.shape)
        hidden_size = _number(config, "hidden_size") or width
        return ModelFacts(
            model_type=str(config.model_type),
            dtype=str(self.dtype).removeprefix("torch."),
            number_bytes=self.dtype.itemsize,
            num_layers=num_layers,
            hidden_size=hidden_size,
            inner_size=_inner_size(config, hidden_size),
            num_heads=num_heads,
            num_kv_heads=_number(config, "num_key_value_heads") or num_heads,
            head_size=_number(config, "head_dim") or hidden_size // max(1, num_heads),
            vocab_size=vocab_size,
            max_positions=max_positions,
            max_tokens=min(max_positions, _length_independent_positions(config)),
            window=window if num_window_layers else 0,
            num_window_layers=num_window_layers,
            attention_softcap=float(getattr(config, "attn_logit_softcapping", None) or 0.0),
            num_sink_layers=sum(name.endswith(".sinks") for name, _ in self.model.named_parameters()),
            logit_softcap=float(getattr(config, "final_logit_softcapping", None) or 0.0),
            num_experts=_number(config, "num_experts", "num_local_experts"),
            is_tied=bool(getattr(config, "tie_word_embeddings", False)),
            rope=getattr(config, "rope_parameters", None) or {},
            num_parameters=sum(weight.numel() for weight in self.model.parameters()),
            body_parameters=self._body_parameters(),
            head_parameters=int(self._head.weight.numel()),
            scored_only_parameters=0 if known is None else known.scored_only_parameters,
            token_only_parameters=0 if known is None else known.token_only_parameters,
        )

    @property
    def known_decoder(self) -> FusedDecoder | None:
        """The decoder in layers of our own; None if they do not know it. Read anew, since parts may be replaced."""
        return known_decoder(self.model.get_decoder())  # type: ignore[no-untyped-call]

    def _body_parameters(self) -> float:
        """Parameters that one token is multiplied with: no embeddings, not the head, of experts those it goes to."""
        tables = [module.weight for module in self.model.modules() if isinstance(module, nn.Embedding)]
        outside = {id(weight) for weight in (*tables, self._head.weight)}
        experts = _number(self.config, "num_experts", "num_local_experts")
        used = (_number(self.config, "num_experts_per_tok") or experts) / experts if experts else 1.0
        # A layer's experts are stacked in parameters of three dimensions.
        return sum(
            p.numel() * (used if p.ndim == 3 else 1.0)
            for p in self.model.parameters()
            if p.ndim >= 2 and id(p) not in outside
        )

    def gemm_rate(self, num_rows: int) -> float:
        """Measured FLOP/s of ``num_rows`` (1024 at most) x hidden x 4 hidden products in the model's dtype."""
        return gemm_rate(num_rows, self.facts.hidden_size, self.dtype, self.device)


def read_facts(folder: Path, *, device: str = "auto", dtype: str = "auto") -> ModelFacts:
    """What the model in a folder is, in numbers: reads config.json alone.

    Raises ModelError in one line as ``load_shapes`` does.
    """
    shapes, _ = load_shapes(folder, device=device, dtype=dtype)
    try:
        return replace(PlainModel(shapes).facts, bos_ids=bos_ids(folder))
    except ModelError as error:
        raise ModelError(f"cannot read the configuration of {str(folder)!r}: {error}") from None


@torch.inference_mode()
def gemm_rate(num_rows: int, hidden: int, dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of ``num_rows`` (1024 at most) x hidden x 4 hidden products: the best of some bursts in half a second.

    In the precision of a call, whatever torch is set to: TF32 would foretell a GPU several times as fast.
    """
    num_rows = min(num_rows, _RATE_ROWS)
    x = torch.randn(num_rows, hidden, device=device).to(dtype)
    weight = torch.randn(hidden, 4 * hidden, device=device).to(dtype)
    best, repeats, deadline = 0.0, 1, time.perf_counter() + _RATE_SECONDS
    with fixed_precision():
        while (started := time.perf_counter()) < deadline or not best:  # one at least, though the machine stalls
            for _ in range(repeats):
                y = x @ weight
            float(y[0, 0])  # waits for a device
            burst = time.perf_counter() - started
            best = max(best, 8.0 * num_rows * hidden * hidden * repeats / burst)
            if burst < _RATE_SECONDS / 10:
                repeats *= 2
    return best


def _placement(model: PreTrainedModel) -> tuple[torch.device, ...]:
    """The devices on which a model computes, that of its inputs first; several if accelerate spread it over them."""
    places = list(dict.fromkeys((getattr(model, "hf_device_map", None) or {}).values()))
    accelerators = [torch.device("cuda", place) if isinstance(place, int) else torch.device(place)
                    for place in places if place not in ("cpu", "disk")]  # fmt: skip
    if accelerators:
        return tuple(accelerators)
    # What is offloaded lies on the meta device between calls.
    return (torch.device("cpu") if model.device.type == "meta" and places else model.device,)


def _output_embeddings(model: PreTrainedModel) -> Any:
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if head is None:
        raise ModelError(f"{type(model).__name__} has no output embeddings; load it as a causal language model")
    return head


def _number(config: Any, *names: str) -> int:
    """The first of the named numbers that a configuration has, the largest of a list of them; 0 if it has none."""
    given = next((given for name in names if (given := getattr(config, name, None))), 0)
    try:
        return int(max(given)) if isinstance(given, list | tuple) else int(given)
    except (TypeError, ValueError):
        raise ModelError(f"{' or '.join(names)} is {given!r}; give a whole number") from None


def _inner_size(config: Any, hidden_size: int) -> int:
    """Entries of a row inside the MLP; with experts, of all those that a token goes to."""
    dense = max(_number(config, name) for name in ("intermediate_size", "ffn_dim", "n_inner"))
    dense = dense or 4 * hidden_size
    expert = _number(config, "moe_intermediate_size")
    return max(dense, _number(config, "num_experts_per_tok") * (expert or dense))


def _rope_settings(config: Any) -> list[dict[str, Any]]:
    settings = getattr(config, "rope_parameters", None) or {}
    nested = [part for part in settings.values() if isinstance(part, dict)]
    return nested or [settings]


def _length_independent_positions(config: Any) -> int:
    """Longest prompt whose rotary angles do not depend on its length."""
    limit = _UNBOUNDED
    for rope in _rope_settings(config):
        if rope.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
            original = rope.get("original_max_position_embeddings")
            original = original or getattr(config, "original_max_position_embeddings", None)
            limit = min(limit, int(original or config.max_position_embeddings))
    return limit
