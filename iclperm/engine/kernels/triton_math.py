"""Functions that several Triton kernels call."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def hyperbolic_tangent(x: tl.tensor) -> tl.tensor:
    """tanh to about 1e-7, relative too: a polynomial near zero (Cephes), where the quotient would cancel."""
    square = x * x
    series = (((-5.70498872745e-3 * square + 2.06390887954e-2) * square - 5.37397155531e-2) * square
              + 1.33314422036e-1) * square - 3.33332819422e-1  # fmt: skip
    magnitude = tl.abs(x)
    far = 1.0 - 2.0 / (tl.exp2(magnitude * 2.8853900817779268) + 1.0)
    return tl.where(magnitude < 0.625, series * square * x + x, tl.where(x < 0, -far, far))
