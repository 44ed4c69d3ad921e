"""The fixed part of heavy suites that a run of all tests has; ``pytest --whole`` has all, as a file by name has.

Of each test's parameter sets every n-th runs, at least one, and always those of the fast tier. Tests of many seconds of
which others say nearly as much are left out: ``python tests/parts.py DURATIONS`` shows what a run's tests took by file
(of ``pytest --durations=0``), to keep both tables true.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

import pytest

PARTS = {
    # Triton's kernels in its interpreter
    "test_decode_steps": 2,
    "test_kernel_failures": 4,
    "test_kernelcheck": 6,
    "test_staging": 2,
    "test_stages": 2,
    "test_triton_attention": 3,
    "test_triton_decode": 3,
    "test_triton_head": 3,
    "test_triton_layers": 2,
    "test_triton_rowwise": 2,
    # whole studies, and processes that are killed
    "test_adaptive": 3,
    "test_endpoint_keys": 3,
    "test_extending": 2,
    "test_kinds": 2,
    "test_lm_eval_model": 2,
    "test_page": 2,
    "test_recommend": 2,
    "test_run_folder": 2,
    "test_texts": 2,
    "test_workers": 2,
}
"""By file, one parameter set of how many runs."""

WHOLE_ONLY = {
    "test_adaptive": ("test_through_an_api",),
    "test_bench": (  # two dtypes through five processes; test_bench_studies has three of them
        "test_real_peers",
        "test_a_peer_that_answers_wrong",
        "test_a_peer_that_dies",
        "test_a_peer_without",
        "test_finished_rows",
        "test_a_packed_tree_through_flex",
    ),
    "test_bench_studies": ("test_the_oracle_sees",),
    "test_comparison": ("TestPool::test_shrunken_estimates_agree",),
    "test_decode_steps": ("test_units_in_another_order", "test_a_text_that_grows_over"),
    "test_docs": ("test_a_page_can_be_followed[docs/scaling.md]",),  # test_ray_workers has its commands
    "test_doctor": (
        "TestCommand::test_kernels_are_compiled_for",
        "TestUnderTheInterpreter::test_choices_that_are_kept",
    ),
    "test_grids": ("TestCommands::test_run_status_report", "TestRuns::test_workers_give_the_same"),
    "test_kernel_failures": ("test_a_kernel_that_fails_only_in_whole", "test_a_run_ends_with_one_line"),
    "test_ray_workers": (
        "TestTwoNodes::test_a_killed_driver",
        "TestTwoNodes::test_a_killed_node",
        "test_a_grid_that_is_killed",
    ),
    "test_run_folder": ("test_two_processes_share",),
    "test_staging": ("test_a_call_that_is_left_early",),
    "test_triton_decode": ("test_steps_that_go_on",),
    "test_triton_layers": ("test_a_head_that_differs",),
    "test_workers": ("TestProcesses::test_prompts_outside", "TestProcesses::test_runs_that_follow"),
}
"""By file, what the names of tests begin with that a run of all tests leaves out."""


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
            test, name = item.nodeid.partition("[")[0], item.nodeid.partition("::")[2]
            is_whole_only = name.startswith(WHOLE_ONLY.get(item.path.stem, ()))
            is_one_of_some = seen[test] % PARTS.get(item.path.stem, 1) == 0 and not is_whole_only
            is_kept = item.get_closest_marker("fast") is not None or is_one_of_some
            seen[test] += 1
            (kept if is_kept else left_out).append(item)
        names = [(item.path.stem, item.nodeid.partition("::")[2]) for item in items]
        for file, begins in ((file, begins) for file, many in WHOLE_ONLY.items() for begins in many):
            if not any(stem == file and name.startswith(begins) for stem, name in names):
                raise pytest.UsageError(f"tests/parts.py: {file} has no test that begins with {begins!r}")
        items[:] = kept
        config.hook.pytest_deselected(items=left_out)


def main() -> None:
    """Prints the seconds of each file's tests, and of its slowest."""
    found = re.findall(r"^([\d.]+)s \w+ +\S*?(test_\w+)\.py::(\S+)", Path(sys.argv[1]).read_text("utf-8"), re.MULTILINE)
    files: dict[str, Counter[str]] = {}
    for seconds, file, name in found:
        files.setdefault(file, Counter())[name.partition("[")[0]] += float(seconds)
    for file, tests in sorted(files.items(), key=lambda each: -each[1].total()):
        slowest = ", ".join(f"{name} {seconds:.0f}" for name, seconds in tests.most_common(6))
        print(f"{tests.total():6.0f} {file}: {slowest}")


if __name__ == "__main__":
    main()
