"""What a language model is, in numbers that need no weights: its sizes, its context, memory and work a token.

The one source of them: plans, sizes of units, forecasts, identities and the table of models read it. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iclperm.engine.plan import Plan

WEIGHT_FILES = "*.safetensors"
TOKENIZER_FILES = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
)
"""Patterns of the files in a model's folder that decide how text becomes tokens."""
TOKENIZER_SOURCES = ("*.model", "*.spm", "*.tiktoken", "tekken.json")
"""Patterns of what a tokenizer may be made of besides, where there is no tokenizer.json."""
TOKENIZER_FILE = "tokenizer.json"
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
"""Of an adapter as PEFT saves it: its settings and its weights."""
MAKES_A_TOKENIZER = (TOKENIZER_FILE, "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")
"""Files one of which is needed: a folder with none of them has no tokenizer."""


@dataclass(frozen=True)
class PassCosts:
    """What forward passes take on a kind of device beside what its measured rate of matrix products says.

    ``layer_seconds`` are what a layer costs a pack however few its tokens; where the device ``goes_on`` by itself they
    are its host's, who tells it of one pack while it computes another. Half of the rate is reached at a hidden size of
    ``half_rate_hidden``.
    """

    layer_seconds: float
    half_rate_hidden: int
    goes_on: bool
    is_measured: bool

    @classmethod
    def on(cls, device: str) -> PassCosts:
        """Those of a device by its name, as ``cpu`` or ``cuda:1``."""
        return _PASS_COSTS["cpu" if device == "cpu" else "gpu"]

    def reached_share(self, hidden_size: int) -> float:
        """The share of the rate of products that passes of whole packs reach: it grows with the hidden size, as the
        work between the products shrinks beside them."""
        return min(_MOST_UTILISATION, hidden_size / (hidden_size + self.half_rate_hidden))

    def seconds(self, computing: float, layer_passes: int, first_passes: int) -> float:
        """Of so many passes through a layer in which the device computes so long; ``first_passes`` of them are of a
        unit's first pack, beside which nothing computes."""
        telling = self.layer_seconds * layer_passes
        if not self.goes_on:
            return computing + telling
        first = self.layer_seconds * first_passes
        return first + max(computing, telling - first)


_MOST_UTILISATION = 0.85
_PASS_COSTS = {
    # Measured in float32. A layer: 0.7-1.2 ms in packs of 44 tokens. The share: 0.4-0.6 at 128
    # (benchmarks/estimate.py), 0.70-0.85 at 512 (benchmarks/results/token_efficiency.json).
    "cpu": PassCosts(layer_seconds=0.0008, half_rate_hidden=100, goes_on=False, is_measured=True),
    # From one model on one GPU, of hidden size 896 in bfloat16 on an H200 (benchmarks/results/doctor-h200.md). A layer:
    # some 15 launches from Python, half of them Triton's, and the tables of a pack: 0.8-1.0 ms. The share: packs of
    # 32,758 tokens reach 470 TFLOP/s, where large products alone reach some 790.
    "gpu": PassCosts(layer_seconds=0.0009, half_rate_hidden=600, goes_on=True, is_measured=False),
}
"""By kind of device."""


@dataclass(frozen=True)
class ModelFacts:
    """A causal language model in numbers, counted on the model built without weights.

    What a configuration leaves to its architecture's defaults is filled in. ``dtype`` is the one it is, or would be,
    loaded in, a number of which takes ``number_bytes``. ``inner_size`` is the width of a row inside the MLP, of a
    mixture of experts the widths of all those that a token goes to. ``max_positions`` is the configuration's context
    window, ``max_tokens`` the longest prompt that the tree serves: rotary angles that depend on the length of the
    prompt end it earlier; both are 2^31 - 1 where nothing bounds them. ``num_window_layers`` layers attend within
    ``window`` positions (0 and 0: none does). Soft-caps, ``num_experts`` are 0 where there are none. In
    ``num_sink_layers`` layers a head has a learned score in the softmax that is no key's. ``bos_ids`` are what
    config.json names as the beginning of a text, empty where it leaves them to the architecture, and of a model that
    came without files.

    ``num_parameters`` counts tied ones once. A token is multiplied with ``body_parameters`` of them (of experts, those
    that it goes to), a scored row with ``head_parameters`` more. In our own layers the ``token_only_parameters`` of the
    first meet each token id once, and the ``scored_only_parameters`` of the last meet scored rows alone; both are 0
    where our layers do not know the architecture.
    """

    model_type: str
    dtype: str
    number_bytes: int
    num_layers: int
    hidden_size: int
    inner_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    max_positions: int
    max_tokens: int
    window: int
    num_window_layers: int
    attention_softcap: float
    num_sink_layers: int
    logit_softcap: float
    num_experts: int
    is_tied: bool
    rope: Mapping[str, Any]
    num_parameters: int
    body_parameters: float
    head_parameters: int
    scored_only_parameters: int
    token_only_parameters: int
    bos_ids: tuple[int, ...] = ()

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of the keys and values of one token, over all layers; sliding windows are not taken off."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_size * self.number_bytes

    @property
    def sink_choices(self) -> tuple[bool, ...]:
        """Whether layers attend with sinks: none, all, or both kinds."""
        return tuple(sorted({self.num_sink_layers > 0, self.num_sink_layers >= self.num_layers}))

    @property
    def session_token_bytes(self) -> int:
        """Bytes that a session keeps of one token: keys and values, and what comes out of the last layer."""
        return self.kv_token_bytes + self.hidden_size * self.number_bytes

    @property
    def decoder_parameters(self) -> int:
        """About the parameters of a decoder of these sizes. Units of work follow from it: folders keep it as it is."""
        return 12 * self.num_layers * self.hidden_size**2 + self.vocab_size * self.hidden_size

    def flops(
        self,
        num_tokens: int,
        num_scored: int,
        attention_pairs: int,
        skipped_tokens: int = 0,
        skipped_pairs: int = 0,
        looked_up_tokens: int = 0,
    ) -> float:
        """Floating-point operations of the matrix products and the attention of so many tokens and scored rows.

        ``attention_pairs`` are pairs of a query with a key it sees, of one head and layer. Of the tokens and pairs,
        those skipped were spared what the last layer does for scored rows alone, and those looked up the products of
        the first layer that depend on the token id alone.
        """
        pairs = attention_pairs * self.num_layers - skipped_pairs
        products = self.body_parameters * num_tokens + self.head_parameters * num_scored
        products -= self.scored_only_parameters * skipped_tokens
        products -= self.token_only_parameters * looked_up_tokens
        return float(2 * products + 4 * pairs * self.num_heads * self.head_size)


def plan_flops(facts: ModelFacts, plan: Plan, *, is_fused: bool) -> float:
    """Floating-point operations of a run of all units of a plan; ``is_fused``: in layers of our own."""
    if not is_fused:
        return facts.flops(plan.tokens, plan.scored_rows, plan.attention_pairs)
    skipped = (plan.tokens - plan.scored_rows, plan.attention_pairs - plan.scored_pairs)
    return facts.flops(plan.tokens, plan.scored_rows, plan.attention_pairs, *skipped, plan.tokens - plan.num_ids)


def unit_flops(facts: ModelFacts, plan: Plan) -> NDArray[np.float64]:
    """About the floating-point operations of each unit of a product's plan, [U], each as if the one before it had just
    run; in layers of our own. They add up to `plan_flops`, but for where on their path context tokens lie."""
    tokens = plan.core.unit_tokens
    rows, pairs, row_pairs = plan.unit_pairs()
    looked_up = tokens * (1 - plan.num_ids / max(1, plan.tokens))
    counts = np.stack([tokens, rows, pairs, tokens - rows, pairs - row_pairs, looked_up])
    each = [facts.flops(*(int(place == term) for place in range(6))) for term in range(6)]  # flops() adds products up
    return np.array(each) @ counts
