"""Matrix products whose order of sums is given, to the last bit of float32."""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


def fused(a: Floats, b: Floats, c: Floats) -> Floats:
    """a b + c of float32, rounded once.

    In float64 the product is exact and the sum is rounded to odd: of a sum between two numbers, the one whose last bit
    is 1. Rounding that to float32 is rounding the exact sum, as float64 has more than two bits more (Boldo and
    Melquiond, 2008).
    """
    product, addend = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)  # exact (Knuth, TAOCP 2, 4.2.2, theorem B)
    bits = total.view(np.int64)
    to_odd = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
    away = np.where((error > 0) == (total > 0), 1, -1)
    return np.where(to_odd, bits + away, bits).view(np.float64).astype(np.float32)


def chained(x: Floats, weight: Floats, bias: Floats | None, *, block: int, bias_first: bool) -> Floats:
    """x [M, H] times weight [N, H] transposed, plus bias [N]: float32 [M, N].

    Over each ``block`` of columns a chain of ``fused``; the blocks' sums are added one after the other, and the bias
    before the first or after the last.
    """
    num_rows, num_columns = x.shape
    shape = num_rows, weight.shape[0]
    total = np.broadcast_to(bias, shape).copy() if bias is not None and bias_first else None
    for begin in range(0, num_columns, block):
        chain = np.zeros(shape, np.float32)
        for k in range(begin, min(begin + block, num_columns)):
            chain = fused(np.broadcast_to(x[:, k : k + 1], shape), np.broadcast_to(weight[:, k], shape), chain)
        total = chain if total is None else total + chain
    assert total is not None
    return total if bias is None or bias_first else total + bias


def chained_pairs(x: Floats, weight: Floats, bias: Floats | None, *, block: int, bias_first: bool) -> Floats:
    """`chained` of bfloat16 numbers, an even number of columns, as x86's instruction for pairs of them adds up.

    Of a pair, the second product is added first; each is rounded for itself. Float32, not yet rounded to bfloat16.
    Without the numbers below 1.2e-38, which the instruction takes for zero.
    """
    swapped = np.arange(x.shape[1]) ^ 1
    return chained(x[:, swapped], weight[:, swapped], bias, block=block, bias_first=bias_first)


def in_tiles(x: Floats, weight: Floats, bias: Floats | None) -> Floats:
    """x [M, H] times weight [N, H] transposed, plus bias [N], of bfloat16 numbers as x86's tiles add up (AMX).

    Over each 32 columns the even ones and the odd ones are a chain of ``fused`` each, from zero; what the two come to
    is added to the sum of the columns before. Numbers below 2^-126 are zero. Float32, not yet rounded.
    """
    shape = x.shape[0], weight.shape[0]
    x, weight = _flushed(x), _flushed(weight)
    total = np.zeros(shape, np.float32)
    for begin in range(0, x.shape[1], 32):
        even, odd = np.zeros((2, *shape), np.float32)
        for k in range(begin, min(begin + 32, x.shape[1]), 2):
            pair = ((np.broadcast_to(x[:, j : j + 1], shape), np.broadcast_to(weight[:, j], shape)) for j in (k, k + 1))
            even, odd = (_flushed(fused(*each, chain)) for each, chain in zip(pair, (even, odd), strict=True))
        total = _flushed(total + _flushed(even + odd))
    return total if bias is None else total + bias


def _flushed(numbers: Floats) -> Floats:
    return np.where(np.abs(numbers) < np.float32(2.0**-126), np.copysign(np.float32(0), numbers), numbers)
