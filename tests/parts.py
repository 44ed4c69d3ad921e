"""The parts of all tests: ``pytest`` has the short ones, ``pytest --long`` the rest of a fixed part, ``--whole`` all.

A file by name has all of its tests. Of the parameter sets of heavy suites every n-th is in the fixed part, at least
one, and always those of the fast tier; tests of many seconds of which others say nearly as much are not in it.
``.ci/run`` runs the short and the long ones. ``python tests/parts.py DURATIONS`` shows what a run's tests took by file
(of ``pytest --durations=0``), to keep the tables true.
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
    "test_lm_eval_model": ("test_every_task_has_them_on_a_model",),
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
"""By file, what the names of tests begin with that neither the short nor the long ones have."""


LONG: dict[str, tuple[str, ...]] = {
    "test_adaptive": (
        "test_a_damaged_part_is_named_and_made_again_and_a_lost_decision_too",
        "test_interrupted_anywhere_it_makes_the_same_decisions",
        "test_seams_and_generated_answers",
    ),
    "test_answers": ("test_mathematics_that_does_not_end_is_unparsed_once",),
    "test_bad_input": (
        "test_a_full_disk",
        "test_a_template_without_end",
    ),
    "test_behaviour": ("",),
    "test_bench": ("",),
    "test_bench_studies": ("",),
    "test_cells": (
        "test_a_curve_study_of_blocks_tells_the_average_alone",
        "test_a_folder_continues_opens_and_is_verified",
    ),
    "test_cli": (
        "test_a_report_compares_labels_in_another_way",
        "test_a_run_grows_on_demand",
        "test_every_answer_is_exported",
        "test_output_survives_a_terminal_that_lacks_its_signs",
    ),
    "test_comparing": ("",),
    "test_contextual": ("test_a_run_is_what_plain_prompts_give",),
    "test_decode_steps": ("",),
    "test_docs": (
        "test_the_site_is_built_without_a_warning",
        "test_a_page_can_be_followed[README.md]",
        "test_a_page_can_be_followed[docs/embedding.md]",
        "test_a_page_can_be_followed[docs/how/in-a-notebook.md]",
        "test_a_page_can_be_followed[docs/how/least-sensitive.md]",
        "test_a_page_can_be_followed[docs/how/order-or-choice.md]",
        "test_a_page_can_be_followed[docs/python.md]",
        "test_a_page_can_be_followed[docs/retrieved.md]",
    ),
    "test_doctor": ("",),
    "test_endpoint": ("test_a_killed_run_continues_and_pays_for_nothing_twice",),
    "test_endpoint_keys": ("",),
    "test_endpoint_money": (
        "test_a_bill_shows_what_a_kill_may_have_cost",
        "test_who_interrupts_twice_is_told_nothing_of_what_was_on_its_way_and_it_counts",
    ),
    "test_endpoint_studies": (
        "test_first_tokens_of_a_study_agree",
        "test_first_tokens_that_an_api_lists_are_the_engines_and_bounds_are_no_values",
    ),
    "test_extending": ("",),
    "test_facts": ("test_a_study_is_planned_on_a_configuration_of_few_keys",),
    "test_faults": ("",),
    "test_files": ("test_two_processes_that_write_one_file_lose_nothing",),
    "test_fuzz_core": ("",),
    "test_generated_runs": (
        "test_every_built_in_task_runs_from_files_as_they_are_published",
        "test_reports_of_every_kind_are_made_of_generated_answers",
    ),
    "test_given_folders": (
        "test_a_full_standard_output_is_one_line_and_no_loss",
        "test_a_pipe_in_the_place_of_a_file_is_refused_at_once",
        "test_who_reads_one_line_gets_it_and_the_command_ends_well",
    ),
    "test_given_parquet": ("test_parquet_that_unpacks_to_gigabytes_is_refused_before_it_is_decoded",),
    "test_graded_runs": ("test_every_kind_speaks_of_the_mean_grade",),
    "test_grids": ("",),
    "test_growing": (
        "test_a_lost_decision_is_made_again_and_memory_decides_the_same",
        "test_a_mean_at_some_k_and_a_difference_of_two",
        "test_a_plan_sizes_a_study_from_a_pilot_and_from_components",
        "test_interrupted_anywhere_it_makes_the_same_decisions",
        "test_it_is_opened_checked_and_reported_as_any_run",
        "test_what_cannot_be_sized_is_refused",
    ),
    "test_harness_logs": ("",),
    "test_harness_metrics": ("",),
    "test_host_memory": ("",),
    "test_hostile_replies": ("",),
    "test_in_python": ("test_xarray_has_the_canonical_tables_answers_by_name",),
    "test_kept_choices": (
        "test_damage_is_told_and_mended_by_the_next_run",
        "test_one_that_is_gone_is_made_again",
    ),
    "test_kernel_failures": ("",),
    "test_kernelcheck": ("",),
    "test_kinds": (
        "test_a_folder_that_says_what_is_now_left_to_the_task_is_continued",
        "test_a_growth_that_is_refused_or_killed_hides_nothing",
        "test_a_killed_study_of_several_runs_continues",
        "test_a_plan_says_what_it_costs",
        "test_a_selection_is_read_under_another_normalisation",
        "test_the_command_line_shows_it",
    ),
    "test_lm_eval_model": ("",),
    "test_memory": ("test_the_peak_foretold_is_the_peak_measured",),
    "test_notebook": ("test_torch_is_loaded_late_and_whole_whatever_is_interrupted",),
    "test_numerics": ("",),
    "test_ordering_designs": ("test_a_run_of_all_orders_says_so_and_does_not_grow",),
    "test_page": (
        "test_a_kind_of_study_has_a_page",
        "test_axe_finds_nothing",
        "test_dark_is_dark_and_paper_is_white",
        "test_pointing_picking_and_the_keyboard_work_in_a_browser",
        "test_texts_are_left_out_on_request",
        "test_wrong_answers_can_be_looked_at_alone",
    ),
    "test_page_points": ("",),
    "test_page_recommended": ("test_it_opens_there_and_says_of_the_best_cell_what_it_is",),
    "test_paper_models": ("test_costs_follow_from_contexts_queries_and_lengths",),
    "test_plan_ways": ("test_a_slower_way_has_its_memory_and_no_time",),
    "test_prompt": ("",),
    "test_proposal": ("",),
    "test_ray_workers": ("",),
    "test_recommend": ("",),
    "test_retrieved": (
        "test_a_folder_continues_grows_and_is_verified",
        "test_an_endpoint_is_asked_the_same",
        "test_generated_chat_and_other_ways",
        "test_what_is_forwarded_is_distinct_and_answered_as_by_transformers",
    ),
    "test_row_choices": (
        "test_a_search_chooses_by_criteria_that_choices_have",
        "test_every_answer_is_that_of_plain_transformers",
    ),
    "test_run_folder": (
        "test_a_growing_run_still_has_the_results_before",
        "test_a_run_grows_again_and_again_and_through_interruptions",
        "test_a_strangers_record_is_damage_and_nothing_else",
        "test_what_a_kill_left_unwritten_is_no_damage",
        "test_what_is_wrong_with_format_and_plan_is_told_and_mended_by_the_same_command",
    ),
    "test_runner": (
        "test_a_plan_counts_the_cells_outside_the_product",
        "test_memory_that_runs_out_stops_the_run_with_the_size_to_use",
    ),
    "test_server": ("test_a_study_through_the_server_is_that_of_the_model",),
    "test_shared_text": ("test_ids_are_those_of_each_whole_text",),
    "test_side_by_side": (
        "TestCommands::test_compare_writes_what_it_is_asked_for",
        "TestFigures::test_no_words_run_into_each_other_or_out",
        "test_the_page_works_in_a_browser",
    ),
    "test_sinks": ("",),
    "test_stages": ("test_every_candidate_is_launched_and_gives_the_same_bits",),
    "test_staging": ("",),
    "test_status": ("test_status_opens_no_answers",),
    "test_stratified": ("TestRuns::test_classes_count_where_the_study_gave_each_its_queries",),
    "test_study_pages": ("test_the_python_of_the_pages_makes_findings",),
    "test_tensor": ("test_memory_stays_within_a_twentieth_of_the_tensor",),
    "test_terminal": ("test_everything_fits_the_width_and_nothing_is_cut_or_padded",),
    "test_texts": ("test_texts_of_a_restricted_task_are_kept_nowhere_unless_asked_for",),
    "test_triton_attention": ("",),
    "test_triton_decode": ("test_takes_any_strides_on_rows_and_heads",),
    "test_triton_head": ("test_agrees_with_float64",),
    "test_triton_layers": (
        "test_bfloat16_is_no_worse_than_plain_bfloat16",
        "test_the_first_use_check_passes",
    ),
    "test_triton_resources": ("",),
    "test_workers": ("TestProcesses::test_killed_workers_change_nothing",),
}
"""By file, what the names of the tests of many seconds begin with: ``pytest --long`` has these, ``pytest`` has not."""


class Parts:
    """Leaves out the other parts in a run of all tests."""

    def __init__(self, has_all_tests: bool, whole: bool, long: bool) -> None:
        self._cuts = has_all_tests and not whole
        self._long = long

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
            is_fast = item.get_closest_marker("fast") is not None
            is_long = name.startswith(LONG.get(item.path.stem, ())) and not is_fast
            is_kept = (is_fast or is_one_of_some) and is_long == self._long
            seen[test] += 1
            (kept if is_kept else left_out).append(item)
        names = [(item.path.stem, item.nodeid.partition("::")[2]) for item in items]
        tables = (*WHOLE_ONLY.items(), *LONG.items())
        for file, begins in ((file, begins) for file, many in tables for begins in many):
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
