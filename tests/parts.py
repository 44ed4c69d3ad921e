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
    "test_decode_steps": 3,
    "test_kernel_failures": 4,
    "test_kernelcheck": 6,
    "test_staging": 3,
    "test_stages": 2,
    "test_triton_attention": 5,
    "test_triton_decode": 6,
    "test_triton_head": 5,
    "test_triton_layers": 4,
    "test_triton_rowwise": 2,
    # whole studies, and processes that are killed
    "test_adaptive": 6,
    "test_agreement": 3,
    "test_dense_memory": 4,
    "test_endpoint_keys": 3,
    "test_extending": 2,
    "test_generated_runs": 3,
    "test_graded_runs": 4,
    "test_kinds": 3,
    "test_lm_eval_model": 2,
    "test_page": 3,
    "test_pmi": 3,
    "test_recommend": 4,
    "test_run_folder": 3,
    "test_terminal": 3,
    "test_texts": 3,
    "test_workers": 4,
}
"""By file, one parameter set of how many runs."""

WHOLE_ONLY = {
    "test_adapter": ("test_workers_merge",),
    "test_adaptive": ("test_through_an_api", "test_workers_and_memory"),
    "test_bench": (  # two dtypes through five processes; test_bench_studies has three of them
        "test_real_peers",
        "test_a_peer_that_answers_wrong",
        "test_a_peer_that_dies",
        "test_a_peer_without",
        "test_finished_rows",
        "test_a_packed_tree_through_flex",
    ),
    "test_bench_studies": ("test_a_run_s_folder_is_measured", "test_the_oracle_sees", "test_texts_are_judged"),
    "test_cli": ("test_two_reports_at_once", "test_what_the_demo_proposes"),
    "test_comparison": ("TestPool::test_shrunken_estimates_agree",),
    "test_decode_steps": (
        "test_units_in_another_order",
        "test_a_text_that_grows_over",
        "test_rows_that_end",
        "test_a_row_without_a_number",
    ),
    "test_docs": (  # test_ray_workers, test_recommend, test_lm_eval_model and test_growing have their commands
        "test_a_page_can_be_followed[docs/scaling.md]",
        "test_a_page_can_be_followed[docs/how/best-prompt.md]",
        "test_a_page_can_be_followed[docs/lm-eval.md]",
        "test_a_page_can_be_followed[docs/how/how-many.md]",
    ),
    "test_doctor": (
        "TestCommand::test_kernels_are_compiled_for",
        "TestCommand::test_instructions_that_are_none",
        "TestUnderTheInterpreter::test_choices_that_are_kept",
    ),
    "test_endpoint_keys": ("test_a_study_of_several_runs_needs",),
    "test_endpoint_studies": ("test_a_text_whose_reading_is_given_up",),
    "test_faults": ("test_the_machine_sees",),
    "test_grids": (
        "TestCommands::test_run_status_report",
        "TestRuns::test_workers_give_the_same",
        "TestRuns::test_finished_cells_of_other_data",
        "TestRuns::test_a_grid_may_grow",
        "TestRuns::test_another_normalisation",
        "TestRuns::test_a_damaged_cell",
        "TestRuns::test_a_model_is_loaded_once",
    ),
    "test_harness_rendered": ("test_what_is_no_task",),
    "test_kernel_failures": (
        "test_a_kernel_that_fails_only_in_whole",
        "test_a_run_ends_with_one_line",
        "test_the_first_use_launches",
    ),
    "test_kinds": ("test_another_statistic", "test_one_run_answers_for_several"),
    "test_numerics": ("test_a_probe_is_the_same", "test_fewer_instructions_of_onednn"),
    "test_pmi": ("test_a_run_grows_and_workers",),
    "test_plan_ways": ("test_packs_that_layers_do_not_take",),
    "test_ray_workers": (
        "TestTwoNodes::test_a_killed_driver",
        "TestTwoNodes::test_a_killed_node",
        "TestTwoNodes::test_a_killed_worker",
        "test_a_grid_that_is_killed",
    ),
    "test_recommend": ("test_what_it_says", "test_it_grows_in_test_queries"),
    "test_run_folder": ("test_two_processes_share", "test_a_run_killed_again_and_again"),  # test_faults kills more
    "test_stages": ("test_a_kept_choice_that_is_not_launched",),
    "test_staging": ("test_a_call_that_is_left_early",),
    "test_triton_attention": ("test_agrees_with_the_kernel_of_the_cpu", "test_cuts_and_company"),
    "test_triton_decode": ("test_steps_that_go_on", "test_300_rows", "test_company_changes"),
    "test_triton_layers": ("test_a_head_that_differs",),
    "test_workers": (
        "TestProcesses::test_prompts_outside",
        "TestProcesses::test_runs_that_follow",
        "TestProcesses::test_a_killed_driver",
    ),
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
