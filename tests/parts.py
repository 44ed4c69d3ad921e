"""The fixed part of heavy suites that a run of all tests has; ``pytest --whole`` has all, as a file by name has.

Of each test's parameter sets every n-th runs, at least one, and always those of the fast tier.
"""

from __future__ import annotations

from collections import Counter

import pytest

PARTS = {
    "test_decode_steps": 2,
    "test_kernel_failures": 2,
    "test_kernelcheck": 3,
    "test_staging": 2,
    "test_stages": 2,
    "test_triton_attention": 2,
    "test_triton_decode": 2,
    "test_triton_head": 2,
    "test_triton_rowwise": 2,
}
"""By file of Triton's kernels in its interpreter, one parameter set of how many runs."""


class Parts:
    """Leaves out the rest in a run of all tests."""

    def __init__(self, has_all_tests: bool, whole: bool) -> None:
        self._cuts = has_all_tests and not whole

    @pytest.hookimpl(trylast=True)  # when the tests of the fast tier are marked
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if not self._cuts:
            return
        seen: Counter[str] = Counter()
        kept, left_out = [], []
        for item in items:
            test = item.nodeid.partition("[")[0]
            is_kept = item.get_closest_marker("fast") is not None or seen[test] % PARTS.get(item.path.stem, 1) == 0
            seen[test] += 1
            (kept if is_kept else left_out).append(item)
        items[:] = kept
        config.hook.pytest_deselected(items=left_out)
