"""The C++ core: prefix trees, plans and CPU kernels. Arguments are numpy arrays; every call releases the GIL.

A wrong argument raises `iclperm.errors.RequestError` naming it; what cannot be one at all, TypeError. Arrays lie at
multiples of their elements' size in memory; ``num_threads`` is from 1 to 4096. "Element" arrays are float32, or
bfloat16 viewed as uint16, all of one call alike, contiguous on the last axis, with any non-negative strides on the
others. For one instruction set, the bits that a kernel gives a row depend on that row's own inputs alone.
"""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Int64s: TypeAlias = npt.NDArray[np.signedinteger[Any]] | npt.NDArray[np.uint8]
Elements: TypeAlias = npt.NDArray[Any]

__version__: str

def isa() -> str:
    """The instruction set that kernels run on: ``avx512``, ``avx2`` or ``baseline``.

    The best that the processor has, or the one named by the environment variable ``ICLPERM_ISA``; raises if that one
    is unknown or cannot run here.
    """

def available_isas() -> list[str]:
    """The instruction sets that can run here, slowest first."""

def thread_backend() -> str:
    """``gomp`` when kernels run on torch's OpenMP threads, ``std`` when they use threads of their own."""

def tree_attention(
    q: Elements,
    k_new: Elements,
    v_new: Elements,
    k_pool: Elements,
    v_pool: Elements,
    out: Elements,
    visit_row_offsets: Int64s,
    visit_pos: Int64s,
    span_offsets: Int64s,
    span_source: Int64s,
    span_begin: Int64s,
    span_end: Int64s,
    *,
    query_rows: Int64s | None = None,
    scaling: float,
    softcap: float = 0.0,
    window: int = 0,
    sinks: npt.NDArray[np.float32] | None = None,
    num_threads: int = 1,
) -> None:
    """Causal attention of a packed tree: every row sees the keys on its own path.

    q, out: [M, Hq, d]; k_new, v_new: [M, Hkv, d]; k_pool, v_pool: [slots, Hkv, d]; Hq a multiple of Hkv. Visit v owns
    rows [visit_row_offsets[v], visit_row_offsets[v + 1]) at positions visit_pos[v], visit_pos[v] + 1, ...; the keys at
    positions [0, visit_pos[v]) are its spans span_offsets[v] .. span_offsets[v + 1], in order: [span_begin, span_end)
    of the pool's slots (span_source 0) or of the pack's rows (1). Rows without a visit become zero. With ``query_rows``
    [Q], ascending, q and out hold those pack rows alone, [>= Q, Hq, d], at no cost for the others. ``softcap`` and
    ``window`` are off at 0; a row sees the keys less than ``window`` positions before it. ``sinks`` [Hq] are one score
    more a head in the softmax, neither scaled nor capped, and of no value. Sums are in float32.
    Cost: 4 d Hq flops for every visible pair of row and key.
    """

def retain_rows(
    rows: Elements, pool: Elements, begin: Int64s, end: Int64s, slot: Int64s, *, num_threads: int = 1
) -> None:
    """Rows [begin[n], end[n]) of rows [M, H, d] become slots slot[n], slot[n] + 1, ... of pool [S, H, d], for every n.

    Where runs share a slot it holds the last of them.
    """

def activate(kind: str, x: Elements, out: Elements, factor: Elements | None = None, *, num_threads: int = 1) -> None:
    """An activation of x, times ``factor`` if given, on [M, N]; out may be an input. In float32 within 2e-7 |x|.

    ``kind`` is silu, x / (1 + exp(-x)); gelu_tanh, x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))); or gelu_erf,
    x / 2 (1 + erf(x / sqrt(2))): a name of csrc/activations.hpp, anything else is a ValueError.
    """

def rms_norm(
    x: Elements,
    weight: Elements,
    out: Elements,
    sum: Elements | None = None,
    *,
    eps: float,
    offset: float = 0.0,
    num_threads: int = 1,
) -> None:
    """z / sqrt(mean(z^2) + eps) (offset + weight) of each row z = x of [M, N]; out may be x.

    With ``sum`` [M, N], z = sum + x instead, which is left there. In float32 inside, rounded once.
    """

def layer_norm(
    x: Elements,
    weight: Elements,
    out: Elements,
    bias: Elements | None = None,
    sum: Elements | None = None,
    *,
    eps: float,
    num_threads: int = 1,
) -> None:
    """(z - mean(z)) / sqrt(mean((z - mean(z))^2) + eps) weight + bias of each row z = x of [M, N]; as ``rms_norm``."""

def rotate(
    x: Elements,
    cosines: npt.NDArray[np.float32],
    sines: npt.NDArray[np.float32],
    *,
    neighbours: bool = False,
    num_threads: int = 1,
) -> None:
    """Rotary embedding of x [M, H, d] in place, by float32 cosines and sines [M, r], r even, r <= d.

    Columns i and i + r / 2 of a head become x_i cos_i - x_(i + r/2) sin_i and x_(i + r/2) cos_(i + r/2) +
    x_i sin_(i + r/2); columns from r on stay. Where ``neighbours`` are turned columns 2 i and 2 i + 1 do so instead, by
    the same cosines and sines.
    """

def has_fused_products(*, bfloat16: bool = False) -> bool:
    """Whether the instructions in use multiply and add float32 with one rounding, or pairs of bfloat16 at all."""

def thin_product(
    x: Elements,
    weight: Elements,
    out: Elements,
    bias: Elements | None = None,
    *,
    block: int,
    bias_first: bool = False,
    num_threads: int = 1,
) -> None:
    """x [M, H] times ``weight`` [N, H] transposed, plus ``bias`` [N], into ``out`` [M, N], in a given order of sums.

    Over each ``block`` of columns, in their order, a chain of fused products; the blocks' sums are added one after the
    other, to the bias where that comes first. bfloat16 is multiplied by pairs, H and ``block`` are even then, and sums
    are float32 until they are written. A row's bits depend on that row alone. Made for few rows: the matrix is read
    from memory once, where it lies. Cost: 2 M N H flops, N H numbers read.
    """

def has_tile_products() -> bool:
    """Whether the instructions in use multiply bfloat16 in tiles (AMX)."""

def laid_out_size(num_outputs: int, num_columns: int) -> int:
    """Numbers of a matrix [N, H] as `lay_out_tiles` lays it out."""

def tile_product(
    x: Elements,
    weight: Elements,
    out: Elements,
    bias: Elements | None = None,
    *,
    is_laid_out: bool = False,
    num_threads: int = 1,
) -> None:
    """x [M, H] times ``weight`` [N, H] transposed, plus ``bias`` [N], into ``out`` [M, N], all bfloat16, H a multiple
    of 32.

    The weight may be what `lay_out_tiles` made of it, which is sooner done. A row's bits depend on that row alone: a
    float32 to which, over each 32 columns in their order, is added the sum of two chains of fused products, of even
    columns and of odd ones, where numbers below 1.2e-38 are zero; then the bias. ``out`` lies in no other argument's
    memory. Cost: 2 M N H flops.
    """

def lay_out_tiles(weight: Elements, out: Elements, *, num_threads: int = 1) -> None:
    """``weight`` [N, H] as `tile_product` reads it fastest, into ``out`` [laid_out_size(N, H)]; both bfloat16."""

def checksum(matrix: Elements, *, num_threads: int = 1) -> int:
    """64 bits of a matrix [M, N], the same with any number of threads: where one number alone is another, so are these;
    where any are, but for one case in 2^64, if nobody aims at it. Cost: the matrix is read once.
    """

def head_rows(
    logits: Elements, pair_row: Int64s, pair_id: Int64s, *, softcap: float = 0.0, num_threads: int = 1
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32], npt.NDArray[np.bool_], npt.NDArray[np.float32]]:
    """What scoring needs of logits [R, V], soft-capped first unless ``softcap`` is 0; one pass over them.

    Returns log-sum-exp [R], argmax [R] (the lowest index on ties), whether all logits of the row are finite [R], and
    for each pair (pair_row[n], pair_id[n]) the log-probability in nats [N]. A row that is not finite has NaN, -1,
    False and NaN.
    """

class PrefixTree:
    """A radix tree in flat preorder arrays (read-only), with what is asked of it; made by the builders below.

    Node 0 is the root, with an empty edge. Node n owns ``tokens[token_offsets[n]:token_offsets[n + 1]]``, begins at
    position ``depth[n]``, and its subtree is nodes ``[n, subtree_end[n])``. Token ``target_token[x]`` is asked for id
    ``target_id[x]``; the log-likelihood of row r adds up targets ``row_items[row_offsets[r]:row_offsets[r + 1]]``.
    """

    @property
    def tokens(self) -> npt.NDArray[np.int32]: ...
    @property
    def token_offsets(self) -> npt.NDArray[np.int64]: ...
    @property
    def parent(self) -> npt.NDArray[np.int32]: ...
    @property
    def depth(self) -> npt.NDArray[np.int32]: ...
    @property
    def subtree_end(self) -> npt.NDArray[np.int32]: ...
    @property
    def target_token(self) -> npt.NDArray[np.int64]: ...
    @property
    def target_id(self) -> npt.NDArray[np.int32]: ...
    @property
    def row_offsets(self) -> npt.NDArray[np.int64]: ...
    @property
    def row_items(self) -> npt.NDArray[np.int64]: ...
    @property
    def num_nodes(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def max_depth(self) -> int: ...
    def check(self) -> None:
        """Raise RuntimeError if an invariant of the arrays is broken."""

def build_tree(
    tokens: npt.NDArray[np.int32],
    offsets: npt.NDArray[np.int64],
    mark_offsets: npt.NDArray[np.int64],
    marks: npt.NDArray[np.int32],
) -> tuple[PrefixTree, npt.NDArray[np.int32]]:
    """Tree of CSR rows cut at their marked depths, and the node of every mark."""

def build_requests(
    tokens: npt.NDArray[np.int32], offsets: npt.NDArray[np.int64], score_begin: npt.NDArray[np.int64]
) -> PrefixTree:
    """Tree of all but the last token of each CSR row, its tokens from ``score_begin`` on as targets."""

class Plan:
    """Units and packs over a context tree and the query trees beneath its ``ends``; see `iclperm.engine.plan`."""

    def __init__(
        self,
        contexts: PrefixTree,
        ends: list[int],
        blocks: list[PrefixTree],
        *,
        pack_tokens: int,
        kv_tokens: int,
        unit_tokens: int,
    ) -> None: ...
    @property
    def unit_leaf_begin(self) -> npt.NDArray[np.int32]: ...
    @property
    def unit_leaf_end(self) -> npt.NDArray[np.int32]: ...
    @property
    def unit_block(self) -> npt.NDArray[np.int32]: ...
    @property
    def unit_context_begin(self) -> npt.NDArray[np.int32]: ...
    @property
    def unit_context_end(self) -> npt.NDArray[np.int32]: ...
    @property
    def unit_value_begin(self) -> npt.NDArray[np.int64]: ...
    @property
    def unit_num_values(self) -> npt.NDArray[np.int64]: ...
    @property
    def unit_tokens(self) -> npt.NDArray[np.int64]: ...
    @property
    def unit_packs(self) -> npt.NDArray[np.int64]: ...
    @property
    def unit_kv_peak(self) -> npt.NDArray[np.int64]: ...
    @property
    def num_units(self) -> int: ...
    @property
    def query_base(self) -> int: ...
    @property
    def pool_slots(self) -> int: ...
    def held_after(self, unit: int) -> int:
        """The context node whose path is in the pool after a unit of the plan."""

    def predict(self, unit: int, held: int) -> tuple[int, int, int]:
        """Tokens, packs and peak of alive KV tokens of a unit that starts with the path to ``held`` in the pool."""

    def packs(self, unit: int, held: int) -> list[dict[str, Any]]:
        """The arrays of each pack of a unit, keyed as the fields of `iclperm.engine.plan.Pack`."""
