"""What a plan takes of memory, predicted from the shapes of a model, and the largest packs that a budget holds.

The model may lie on the meta device. Counted is what scoring adds to a process that has its libraries loaded: on a
CPU what the process grows by, on a GPU what the device holds in tensors.
"""

from __future__ import annotations

import os
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from torch import nn

from iclperm.engine.decode import GenerationLimits
from iclperm.engine.facts import ModelFacts
from iclperm.engine.forward import PassLimits
from iclperm.engine.kernels.chunks import CHUNK
from iclperm.engine.kernels.linear import MatrixProduct, few_rows, may_be_laid_out, uses_onednn
from iclperm.engine.layers import rows_at_once
from iclperm.engine.memory import all_bytes
from iclperm.engine.model import TreeModel
from iclperm.engine.plain_model import PlainModel
from iclperm.engine.plan import DEFAULT_PACK_TOKENS, LongPath, Plan
from iclperm.engine.shapes import pack_sizes, padded_rows, whole_rows
from iclperm.engine.ways import Ways
from iclperm.errors import RequestError
from iclperm.reference.precision import MOST_NUMBERS
from iclperm.reference.scoring import may_keep_last
from iclperm.study.sizes import bytes_in_words

_FLOAT32 = 4
_GPU_PACKS = (32_768, 16_384, 8_192)
_USED_SHARE = 0.85  # of a GPU's memory; the rest is its driver's, and what allocations lose
_HOST = torch.device("cpu")
# glibc's heap takes more than is alive in it, as it reuses the gaps between a layer's tensors badly (measured
# 1.0-1.8, more in transformers' layers, where it varies from process to process); single tensors from a size on have
# pages of their own, which go back when they are freed.
_HEAP_FACTOR, _HEAP_FACTOR_IN_TRANSFORMERS_LAYERS = 1.45, 1.7
_OWN_PAGES, _LARGEST_IN_HEAP = "MALLOC_MMAP_THRESHOLD_", 32 << 20
# What oneDNN keeps of each product it has seen (rows x inputs x outputs): generated code, measured with torch 2.13.
_PRODUCT_BYTES = 570_000
# Both of its caches, torch's and its own, keep a product that either keeps.
_CACHES, _MOST_PRODUCTS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"), 1024
# Numbers of rows that the first-use check brings, as measured; in float32 plain scoring is MKL's, which keeps no code
# but buffers.
_CHECKED_ROW_COUNTS = {torch.float32: 6, torch.bfloat16: 13}
_MKL_BYTES = 6_500_000
# Shapes of products whose rows the first layer (new token ids) and the last (scored rows) count for themselves.
_FIRST_PRODUCTS, _LAST_PRODUCTS = 2, 4
_WALKED_UNITS = 16
# transformers' layers gain nothing from larger packs on a CPU, and what the heap loses to tensors of that size varies
# from process to process (0.82-1.24 of the prediction for packs of 4096).
_MOST_IN_TRANSFORMERS_LAYERS = 1024
_LONGEST_WINDOW = 600
_COPIED_SHARE = 8
_CHECKED_TOKENS = {"cpu": 72, "elsewhere": 3 * 64 + 21}
# A pack's tokens, positions, visits and spans: 8-10 bytes a token measured, twice while they are handed over.
_PACK_BYTES_PER_TOKEN = 24
_NODE_BYTES = 40
_SLOT_BYTES = 4  # of a position in the table of live rows' slots
# A tokenizer's maps of tokens, ids and merges, by token id: 380-440 measured with tokenizers 0.23, two merges an id.
_TOKENIZER_BYTES_PER_ID = 440


@dataclass(frozen=True)
class Footprint:
    """Bytes at the peak of a run, by part.

    ``weights`` counts tied weights once; ``kv`` is the pool of the open path, of one layer where a long path is
    offloaded or recomputed, and ``hidden_states`` are what a recomputed path's packs hold between layers;
    ``token_rows`` are queries, keys and values that the first layer keeps by token id; ``activations`` are those of
    the largest pack in the layer that needs most; ``logits`` are those of the rows read at once, as far as they do not
    fit where activations were, and of few rows all. On a CPU, ``copied_weights`` are second copies of matrices, laid
    out for its products, and ``working`` is what the host needs beside: the plan, the tokenizer, and what the libraries
    keep for later; both are 0 on a GPU.
    """

    weights: int
    kv: int
    token_rows: int
    activations: int
    logits: int
    working: int
    hidden_states: int = 0
    copied_weights: int = 0

    @property
    def peak(self) -> int:
        """All of it."""
        return sum(vars(self).values())

    def __str__(self) -> str:
        parts = {
            "weights": self.weights,
            "weights laid out": self.copied_weights,
            "keys and values": self.kv,
            "hidden states": self.hidden_states,
            "rows by token": self.token_rows,
            "activations": self.activations,
            "logits": self.logits,
            "working memory": self.working,
        }
        words = " + ".join(f"{name} {bytes_in_words(size)}" for name, size in parts.items() if size)
        return f"{words} = {bytes_in_words(self.peak)}"


@dataclass(frozen=True)
class _DenseAttention:
    """Bytes that torch's operations take for attention beside a layer's own."""

    mask: int  # for a row of a pack and a key: whether it is seen, once more where rows are chosen
    joined: int  # for a key: it and its value side by side with others, while these become what is multiplied
    key: int  # for a key: it and its value in float32, and where they lie
    scores: int  # for a row of those attended at once and a key: scores, weights, and whether it is seen
    row: int  # for a row of those attended at once: its query and what comes out, in float32 too

    @classmethod
    def of(cls, facts: ModelFacts) -> _DenseAttention:
        itemsize, (heads, kv) = facts.number_bytes, _head_columns(facts)
        # One of the two is looked through for what is not finite, or both are in float32 and one of them as it was.
        copies = max(3 * itemsize + 3, itemsize + 2 * _FLOAT32)
        return cls(
            mask=2,
            joined=kv // 2 * copies + 32,
            key=kv * _FLOAT32 + 32,
            scores=2 * _FLOAT32 * facts.num_heads + 2,
            row=heads * (2 * _FLOAT32 + itemsize),
        )

    def taken(self, rows: int, at_once: int, keys: int) -> int:
        """Of a pack of so many rows and keys, some of the rows at a time."""
        attended = self.key * keys + at_once * (self.scores * keys + self.row)
        return rows * self.mask * keys + max(self.joined * keys, attended)


@dataclass(frozen=True)
class Sizes:
    """The sizes that a model's memory follows from: bytes for one token, unless a comment says otherwise."""

    device: torch.device
    limits: PassLimits
    most_pack: int | None  # tokens of a pack at most; None: no limit
    weights: int  # of all parameters
    copied: int  # of the matrices that a second copy is made of
    kv: int  # keys and values over all layers
    kv_layer: int  # of one layer
    hidden: int  # hidden states between layers
    first: int  # what the first layer keeps of a token id
    heap: float  # what the heap takes of what is alive in it
    layer: int  # what the layer that needs most needs
    inner: int  # what an MLP's matrix gives, where our layers make it
    num_inner: int  # of these at once: gates, their factors, and their product where it has no place
    most_inner: int | None  # rows of a pack that have these at once; None: all
    dense: _DenseAttention | None  # where torch's operations attend
    logits: int
    num_checked_logits: int  # rows of logits that the first-use check holds at once, whatever a pack has
    num_probed_logits: int  # and at most, where packs are large
    probed: int  # what that check's largest product holds
    live_chunk: int  # states of a live row's heads for a chunk of its path; 0 where they are none
    widened: int  # weights of half precision that are float32 at once in that check
    most_logits: int  # rows of logits that are read at once
    has_onednn_head: bool
    matrix: int  # of the largest matrix of a layer
    num_products: int  # shapes of matrices that oneDNN generates code for
    num_checked_rows: int  # different numbers of rows that the first-use check multiplies
    num_first: int  # of those shapes, the ones whose rows are the token ids new to a run, not all rows of a pack
    num_last: int  # of those shapes, the ones whose rows are the scored rows
    buffers: int  # what MKL keeps in all
    tokenizer: int  # what that beside the model keeps in all

    @classmethod
    def of(
        cls,
        model: PlainModel,
        place: torch.device,
        *,
        checks: bool = True,
        has_tokenizer: bool = False,
        attention: str = "auto",
        layers: str = "auto",
        has_budget: bool = False,
    ) -> Sizes:
        """The sizes of a model that is, or will be, served on ``place``, with a tokenizer or none.

        ``checks``: its first-use check runs. ``attention`` and ``layers`` are those asked for, of a model without
        weights. Second copies of weights are made where they take an eighth of the memory at most and no budget binds.
        """
        facts, paths, body = model.facts, Ways.of(model, place, attention, layers), list(_matrices(model))
        copied = 0 if has_budget else _copied_bytes(model, place, paths)
        shapes = {(weight.shape, has_bias) for weight, has_bias in body}
        return cls(
            device=place,
            limits=model.limits,
            most_pack=most_pack(place, is_fused=paths.is_fused),
            weights=sum(weight.nbytes for weight in model.model.parameters()),
            copied=copied,
            kv=facts.kv_token_bytes,
            kv_layer=facts.kv_token_bytes // max(1, facts.num_layers),
            hidden=facts.hidden_size * facts.number_bytes,
            first=sum(_head_columns(facts)) * model.dtype.itemsize if paths.is_fused else 0,
            heap=_HEAP_FACTOR if paths.is_fused else _HEAP_FACTOR_IN_TRANSFORMERS_LAYERS,
            layer=_layer_bytes(model, facts, paths),
            inner=facts.inner_size * model.dtype.itemsize if paths.is_fused else 0,
            num_inner=paths.num_inner,
            most_inner=_most_inner(model, facts) if place.type == "cpu" and paths.is_fused else None,
            dense=_DenseAttention.of(facts) if paths.attention == "torch" else None,
            logits=_logit_bytes(facts, paths),
            num_checked_logits=_checked_logits(model, place) if checks else 0,
            num_probed_logits=2 * model.limits.probed_rows(facts.vocab_size, place) if checks else 0,
            probed=_probed_bytes(model) if checks and paths.attention == "native" else 0,
            live_chunk=_live_chunk_bytes(model),
            widened=_widened_bytes(model) if checks else 0,
            most_logits=model.limits.logit_rows(facts.vocab_size, place),
            has_onednn_head=paths.has_onednn_head,
            matrix=max(weight.nbytes if weight.ndim == 2 else weight[0].nbytes for weight, _ in body),
            num_products=len(shapes) + bool(copied) if paths.has_onednn else 0,  # queries, keys and values as one
            num_checked_rows=_CHECKED_ROW_COUNTS.get(model.dtype, 0) if checks else 0,
            num_first=_FIRST_PRODUCTS * (paths.has_onednn and paths.is_fused),
            num_last=_LAST_PRODUCTS * (paths.has_onednn and paths.is_fused) + paths.has_onednn_head,
            buffers=_MKL_BYTES if place.type == "cpu" and model.dtype == torch.float32 else 0,
            tokenizer=_TOKENIZER_BYTES_PER_ID * facts.vocab_size if has_tokenizer else 0,
        )

    @property
    def is_host(self) -> bool:
        """Whether the model shares the memory of the process."""
        return self.device.type == "cpu"

    def footprint(self, plan: Plan, pack_tokens: int | None = None) -> Footprint:
        """What all units of a plan take, in packs of at most ``pack_tokens`` (the plan's own by default).

        A resumed run takes no more. Cost: O(nodes of the plan's trees + tokens of its first 16 units).
        """
        plan = self.fitted(plan, None)
        return self.footprints(plan)(pack_tokens or plan.pack_tokens, plan.long_path)

    def footprints(self, plan: Plan) -> Callable[[int, LongPath | None], Footprint]:
        """As ``footprint`` of a plan in the layers' packs, by the size of packs and how it runs a long path."""
        token_rows, working = self._token_rows(plan), self._working(plan)

        @cache
        def counts(pack_tokens: int) -> _RowCounts:
            return _RowCounts.of(plan if pack_tokens == plan.pack_tokens else plan.repacked(pack_tokens))

        def footprint(pack_tokens: int, way: LongPath | None) -> Footprint:
            pack_tokens = self._at_most(pack_tokens)
            row_counts = counts(pack_tokens) if self.is_host else _RowCounts(0, 0, 0, 0)
            return self._footprint(plan, pack_tokens, way, token_rows, working, row_counts)

        return footprint

    def largest_pack(self, plan: Plan, pack_tokens: int | None = None) -> int:
        """Tokens of the largest pack, where packs have at most ``pack_tokens`` (the plan's own by default)."""
        return min(self._at_most(pack_tokens or plan.pack_tokens), _unit_tokens(plan))

    def warn_of_smaller_packs(self, pack_tokens: int) -> None:
        """One line where these layers do not take packs of ``pack_tokens``, as somebody asked for."""
        if self._at_most(pack_tokens) < pack_tokens:
            words = f"pack_tokens is {pack_tokens:,}, but transformers' layers take {self.most_pack:,} at most on a CPU"
            warnings.warn(f"{words}: packs have {self.most_pack:,}", stacklevel=3)

    def _at_most(self, pack_tokens: int) -> int:
        return min(pack_tokens, self.most_pack or pack_tokens)

    def pack_sizes(self, plan: Plan) -> list[int]:
        """The sizes of packs that a plan may run in, ascending."""
        return pack_sizes(self._at_most(plan.pack_tokens), self.device)

    def _footprint(
        self, plan: Plan, pack_tokens: int, way: LongPath | None, token_rows: int, working: int, row_counts: _RowCounts
    ) -> Footprint:
        tokens = self.largest_pack(plan, pack_tokens)
        rows, scored = padded_rows(tokens, self.device), _scored_rows(plan, tokens)
        activations = self._activations(rows, plan.core.pool_slots + rows)
        read = min(scored, self.most_logits) * self.logits
        probed = padded_rows(pack_tokens, self.device) * self.probed
        checked = max(self._checked_logits(pack_tokens) * self.logits, probed, self.widened)
        has_own_pages = self.is_host and read >= _own_pages()
        return Footprint(
            weights=self.weights,
            copied_weights=self.copied,
            kv=plan.core.pool_slots * (self.kv if way is None else self.kv_layer),
            hidden_states=0 if way is None else way.rows * self.hidden,
            token_rows=token_rows,
            activations=activations,
            logits=max(read if has_own_pages else read - activations, checked - activations, self._kept_logits(), 0),
            working=working + (_PRODUCT_BYTES * self._products_seen(row_counts, pack_tokens) if self.is_host else 0),
        )

    def _kept_logits(self) -> int:
        """Logits of few rows have memory of their own, which stays."""
        return min(self.most_logits, few_rows()) * self.logits if self.is_host and self.has_onednn_head else 0

    def _activations(self, rows: int, keys: int) -> int:
        """What a pack takes in the layer that needs most, with what the heap loses."""
        with_inner = rows if self.most_inner is None else min(rows, self.most_inner)
        whole = rows * self.layer + with_inner * self.num_inner * self.inner
        if self.dense is not None:
            whole += self.dense.taken(rows, min(rows, self.limits.dense_rows), keys)
        if not self.is_host:
            return whole
        outside = min(2, self.num_inner) * with_inner * self.inner if with_inner * self.inner >= _own_pages() else 0
        return int((whole - outside) * self.heap) + outside + self.matrix

    def _checked_logits(self, pack_tokens: int) -> int:
        """Rows of logits that the first-use check holds: it tries the head with a pack's rows at most."""
        return max(self.num_checked_logits, min(self.num_probed_logits, 2 * padded_rows(pack_tokens, self.device)))

    def peak(self, plan: Plan, pack_tokens: int) -> int:
        """Bytes at the peak in packs of at most ``pack_tokens``."""
        return self.footprint(plan, pack_tokens).peak

    def usual_pack(self, device_bytes: int) -> int:
        """Tokens of a pack where nobody says how many: 4,096 on a host.

        On a GPU with ``device_bytes`` of memory (0: not known) as many of 8,192 to 32,768 as take a quarter at most of
        what weights leave of it; a rule, which what else is on the GPU does not change. Where torch's operations
        attend, larger packs would only make their masks larger.
        """
        if self.is_host or self.dense is not None:
            return DEFAULT_PACK_TOKENS
        left = _USED_SHARE * device_bytes - self.weights
        return next((size for size in _GPU_PACKS if 4 * size * self._a_row <= left), DEFAULT_PACK_TOKENS)

    def most_pack_tokens(self, budget: int) -> int:
        """Tokens whose activations are within ``budget`` bytes beside the weights; whatever the plan, no more are.

        Raises RequestError if the weights alone are over the budget.
        """
        if self.weights > budget:
            raise RequestError(
                f"memory_budget is {budget} bytes ({bytes_in_words(budget)}), but the weights alone take "
                f"{self.weights} ({bytes_in_words(self.weights)}); raise it, or use a smaller model or dtype"
            )
        return whole_rows((budget - self.weights) // self._a_row, self.device)

    @property
    def _a_row(self) -> int:
        """What every row of a pack takes, however many there are."""
        return self.layer + (self.num_inner * self.inner if self.most_inner is None else 0)

    def fitted(self, plan: Plan, budget: int | None) -> Plan:
        """The plan in the largest packs, up to its own, that the layers take and whose footprint is within ``budget``
        bytes; itself if it is.

        Raises RequestError if even the smallest packs are over it.
        """
        most = self._at_most(plan.pack_tokens)
        plan = plan if most == plan.pack_tokens else plan.repacked(most)
        if budget is None:
            return plan
        footprints, sizes = self.footprints(plan), self.pack_sizes(plan)
        fitting = largest_within(budget, sizes, lambda size: footprints(size, None).peak)
        if fitting is None:
            raise too_small(budget, sizes[0], footprints(sizes[0], None))
        return plan if fitting == plan.pack_tokens else plan.repacked(fitting)

    def generation(
        self, pack_tokens: int, num_rows: int, kv_tokens: int, prompt_tokens: int, longest: int = 0
    ) -> Footprint:
        """What generation takes at most with so many live rows, slots, and distinct tokens of prompts; the longest text
        has ``longest`` tokens."""
        rows = padded_rows(pack_tokens, self.device)
        activations = self._activations(rows, kv_tokens + rows)
        working = 0
        if self.is_host:
            scored = padded_rows(num_rows, self.device)
            seen = (self.num_products + self.num_first) * (rows // 8) + self.num_last * (scored // 8)
            seen += self.num_products * self.num_checked_rows
            kept = max(int(os.environ.get(name, _MOST_PRODUCTS)) for name in _CACHES)
            working = (_PACK_BYTES_PER_TOKEN + _NODE_BYTES) * prompt_tokens + self.buffers + self.tokenizer
            working += _PRODUCT_BYTES * min(seen, kept)
        elif self.live_chunk:
            working = num_rows * (-(-longest // CHUNK) * self.live_chunk + longest * _SLOT_BYTES)
        return Footprint(
            weights=self.weights,
            copied_weights=self.copied,
            kv=kv_tokens * self.kv,
            token_rows=self.limits.token_rows_bytes if self.first else 0,
            activations=activations,
            logits=max(min(num_rows, self.most_logits), self._checked_logits(pack_tokens)) * self.logits,
            working=working,
        )

    def generation_limits(
        self, limits: GenerationLimits, budget: int, longest: int, prompt_tokens: int
    ) -> GenerationLimits:
        """The slots that ``budget`` bytes hold, with fewer rows and smaller packs where they would not hold one text.

        The longest has ``longest`` tokens. Raises RequestError if the smallest packs leave no room for it.
        """
        while True:
            least = self.generation(limits.pack_tokens, limits.rows, 0, prompt_tokens, longest)
            a_slot = self.generation(limits.pack_tokens, limits.rows, 1, prompt_tokens, longest).peak - least.peak
            kv_tokens = (budget - least.peak) // a_slot
            if kv_tokens >= longest:
                return replace(limits, kv_tokens=kv_tokens)
            if limits.pack_tokens <= limits.least_pack:
                raise RequestError(
                    f"the memory budget is {budget} bytes, but even in packs of {limits.pack_tokens} tokens "
                    f"{least.peak + longest * a_slot} are needed to generate, {longest * a_slot} of them for the keys "
                    f"and values of a text of {longest} tokens ({least} without); raise it, or use fewer shots or new "
                    "tokens, a smaller model or dtype"
                )
            limits = limits.halved()

    def _token_rows(self, plan: Plan) -> int:
        if not (self.first and self.is_host):
            return self.limits.token_rows_bytes if self.first else 0
        # On a host only what is written takes memory.
        return min(self.limits.token_rows_bytes, plan.num_ids * self.first)

    def _working(self, plan: Plan) -> int:
        """Trees, a unit's packs, MKL's buffers, and the tokenizer."""
        if not self.is_host:
            return 0
        trees = sum(4 * tree.num_tokens + _NODE_BYTES * tree.num_nodes for tree in (plan.contexts, *plan.blocks))
        return trees + _PACK_BYTES_PER_TOKEN * _unit_tokens(plan) + self.buffers + self.tokenizer

    def _products_seen(self, counts: _RowCounts, pack_tokens: int) -> int:
        """How many products oneDNN meets: those of packs, of new token ids, of scored rows, and of the check."""
        whole = counts.whole + min(counts.units_left, pack_tokens // 8)
        seen = self.num_products * (self.num_checked_rows + whole)
        seen += self.num_first * counts.new + self.num_last * counts.scored
        return min(seen, max(int(os.environ.get(name, _MOST_PRODUCTS)) for name in _CACHES))


def largest_within(budget: int, sizes: list[int], peak: Callable[[int], int]) -> int | None:
    """The largest of ascending sizes of packs whose peak is within ``budget`` bytes; None if none is."""
    fitting = bisect_right(sizes, budget, key=peak)
    return sizes[fitting - 1] if fitting else None


def too_small(budget: int, pack_tokens: int, least: Footprint) -> RequestError:
    """What is said where the smallest packs, of ``pack_tokens``, are over the budget."""
    return RequestError(
        f"memory_budget is {budget} bytes ({bytes_in_words(budget)}), but even in packs of {pack_tokens} tokens "
        f"{least.peak} are needed ({least}); raise it, or use fewer shots, a smaller model or dtype"
    )


def most_pack(place: torch.device, *, is_fused: bool) -> int | None:
    """Most tokens of a pack that a model is run in on ``place``; None where there is no limit."""
    return None if is_fused or place.type != "cpu" else _MOST_IN_TRANSFORMERS_LAYERS


def checked_tokens(facts: ModelFacts, place: torch.device) -> int:
    """Tokens of the longest context that the first-use check scores: it outgrows a short sliding window, and a tile of
    keys; several of the largest tiles where that costs next to nothing."""
    length = _CHECKED_TOKENS.get(place.type, max(_CHECKED_TOKENS.values()))
    if 0 < facts.window <= _LONGEST_WINDOW:
        length = max(length, facts.window + 24)
    return max(4, min(length, facts.max_tokens - 4))


def _most_inner(model: PlainModel, facts: ModelFacts) -> int:
    return rows_at_once(facts.inner_size * model.dtype.itemsize)[1]


def _copied_bytes(model: PlainModel, place: torch.device, paths: Ways) -> int:
    """What second copies take of all matrices that `PackedWeights` would lay out; 0 where that is too much."""
    if place.type != "cpu":
        return 0
    matrices = [weight for weight, _ in _matrices(model)] if paths.is_fused and uses_onednn(place, model.dtype) else []
    if paths.has_onednn_head:
        head = model.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        has_many_rows = model.limits.logit_rows(model.facts.vocab_size, place) > few_rows()
        is_ours = type(head) is nn.Linear  # of any other torch's own product runs
        if is_ours and (has_many_rows or not MatrixProduct.of(head, is_head=True).has_order):
            matrices.append(head.weight)
    found = sum(weight.nbytes for weight in matrices if may_be_laid_out(weight))
    return found if found <= all_bytes(place) // _COPIED_SHARE else 0


def _own_pages() -> int:
    """Size from which a tensor on the host lies outside the heap."""
    return int(os.environ.get(_OWN_PAGES, _LARGEST_IN_HEAP))


def _probed_bytes(model: PlainModel) -> int:
    """What the first-use check's largest product holds of a row: in, out, and out of half the rows again."""
    shapes = [weight.shape[-2:] for weight, _ in _matrices(model)]
    return max(into + out + out // 2 for out, into in shapes) * model.dtype.itemsize


def _live_chunk_bytes(model: PlainModel) -> int:
    """Weighted sums, top and total of each head in float32 (`iclperm.engine.kernels.triton_decode`)."""
    if not (isinstance(model, TreeModel) and model.attends_live_rows):
        return 0
    return _FLOAT32 * model.facts.num_heads * (model.facts.head_size + 2)


def _widened_bytes(model: PlainModel) -> int:
    """What the first-use check makes float32 at once of weights of half precision: a matrix, or a piece of it."""
    if model.dtype.itemsize >= _FLOAT32:
        return 0
    head: torch.Tensor = model.model.get_output_embeddings().weight  # type: ignore[no-untyped-call]
    matrices = [head, *(weight if weight.ndim == 2 else weight[0] for weight, _ in _matrices(model))]
    return _FLOAT32 * min(max(matrix.numel() for matrix in matrices), MOST_NUMBERS)


def _matrices(model: PlainModel) -> Iterator[tuple[torch.Tensor, bool]]:
    """The matrices that a layer's rows are multiplied with, and whether each has a bias; experts are stacked."""
    head: object = model.model.get_output_embeddings()  # type: ignore[no-untyped-call]
    for module in model.model.modules():
        if module is not head and not isinstance(module, nn.Embedding):
            has_bias = getattr(module, "bias", None) is not None
            yield from ((weight, has_bias) for weight in module.parameters(recurse=False) if weight.ndim >= 2)


def _head_columns(facts: ModelFacts) -> tuple[int, int]:
    """Columns of queries, and of keys and values together."""
    return facts.num_heads * facts.head_size, 2 * facts.num_kv_heads * facts.head_size


def _layer_bytes(model: PlainModel, facts: ModelFacts, paths: Ways) -> int:
    """What is alive for one token in the layer that needs most; in ours, beside what an MLP's matrix gives.

    There it is embeddings, hidden states, normed hidden states, the sum and what comes out; queries and what they
    attended; keys and values; rotary tables.
    """
    itemsize, hidden, inner = facts.number_bytes, facts.hidden_size, facts.inner_size
    heads, kv = _head_columns(facts)
    tables = 2 * facts.head_size * (itemsize + _FLOAT32)
    if paths.is_fused:
        return (5 * hidden + 2 * heads + kv) * itemsize + tables
    # Norms and rotations of transformers' make copies, those of norms in float32.
    in_mlp = (4 * hidden + 3 * inner) * itemsize
    in_attention = (3 * hidden + 4 * heads + 2 * kv) * itemsize
    in_norm = 3 * hidden * (itemsize + _FLOAT32)
    return max(in_mlp, in_attention, in_norm) + tables


def _logit_bytes(facts: ModelFacts, paths: Ways) -> int:
    """One row's logits; where torch reads them, also in float32, twice more for a soft-cap."""
    itemsize = facts.number_bytes
    if paths.fuses_head:
        return 0
    if paths.attention == "native":
        return facts.vocab_size * itemsize
    has_softcap = facts.logit_softcap > 0
    return facts.vocab_size * (itemsize + _FLOAT32 * ((itemsize < _FLOAT32) + 2 * has_softcap))


def _checked_logits(model: PlainModel, place: torch.device) -> int:
    """Rows of logits that the first-use check holds: of two products of the probe, or of a prompt's every token where
    the model cannot be asked for the last alone."""
    of_prompt = 0 if may_keep_last(model.model) else checked_tokens(model.facts, place)
    return max(2 * padded_rows(64, place), of_prompt * (3 if model.facts.logit_softcap else 1))


@dataclass(frozen=True)
class _RowCounts:
    """How many different numbers of rows occur: of whole packs, of token ids new to a run, and of scored rows.

    Counted in the first units; each of the ``units_left`` may end in a pack of yet another size.
    """

    whole: int
    new: int
    scored: int
    units_left: int

    @classmethod
    def of(cls, plan: Plan) -> _RowCounts:
        whole, new, scored = set(), set(), set()
        is_known = np.zeros(plan.max_id + 1, bool)
        held, num_walked = 0, min(plan.num_units, _WALKED_UNITS)
        for unit in range(num_walked):
            for pack in plan.packs(unit, held):
                ids = np.unique(pack.token_ids)
                whole.add(padded_rows(len(pack), _HOST))
                if num_new := int(np.count_nonzero(~is_known[ids])):
                    new.add(padded_rows(num_new, _HOST))
                if pack.scored_rows.size:
                    scored.add(padded_rows(pack.scored_rows.size, _HOST))
                is_known[ids] = True
            held = plan.core.held_after(unit)
        return cls(len(whole), len(new), len(scored), plan.num_units - num_walked)


def _unit_tokens(plan: Plan) -> int:
    """Most tokens that a unit forwards, with its path where that may have to be forwarded again."""
    path = plan.core.pool_slots if plan.num_units > 1 else 0
    return int(plan.core.unit_tokens.max(initial=0)) + path


def _scored_rows(plan: Plan, tokens: int) -> int:
    """About the most rows of a pack of so many tokens that logits are read of: somewhat more than the average."""
    share = plan.scored_rows / max(1, plan.tokens)
    return min(tokens, plan.scored_rows, 8 + int(1.25 * share * tokens))
