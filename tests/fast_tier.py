"""The fast tier: the tests of ``pytest -m fast``, a minute on two cores, that run a function of every module.

Property tests try few examples there. A run of all tests fails where no test of the tier ran a function of a module.
"""

from __future__ import annotations

import ast
import inspect
import sys
import threading
from collections.abc import Generator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import settings

import iclperm

PACKAGE = Path(iclperm.__file__).parent
EXAMPLES = 10  # of a property test that has no number of its own

FAST: dict[str, tuple[str, ...]] = {
    # places at URLs, and what runs of any size are read by
    "test_remote": ("test_a_url_is_shown", "test_names_that", "test_much", "test_nothing_is_sent"),
    "test_scale": ("test_the_likeliest", "test_beginnings"),
    # trees, plans and kernels: integers and arrays against their oracles
    "test_core_errors": ("",),
    "test_stages": ("test_what", "test_other_bits", "test_a_file", "test_without", "test_a_choice_holds"),
    "test_kernelcheck": ("test_the_shapes", "test_the_kernels_of_a_cpu", "test_another_way"),
    "test_kernels": ("",),
    "test_plan": ("",),
    "test_products": ("",),
    "test_rowwise": ("test_activation_is", "test_many", "test_norm_bits", "test_rotation", "test_agrees", "test_ties"),
    "test_thin_products": ("test_the_oracle", "test_without_fused", "test_a_matrix", "test_what_our_kernel"),
    "test_tree": ("",),
    "test_triton_decode": ("test_takes_any_strides", "test_the_newest_keys", "test_what_rows_share"),
    "test_held_paths": ("",),
    "test_seams": ("test_where_no_seam",),
    "test_session": ("test_equal_extensions", "test_a_growing_tree", "test_a_call_within_a_call"),
    "test_session_changes": ("test_switches", "test_a_hook_that_comes"),
    "test_shared_text": ("test_the_common_length", "test_what_is_put_before"),
    "test_device": ("test_precision", "test_every_shape"),
    "test_dtypes": ("test_",),
    "test_tree_attention": ("test_shapes", "test_takes", "test_rows", "test_one_row", "test_what_a_row", "test_nan"),
    "test_triton_attention": ("test_large_scores", "test_rows_of_no_visit", "test_takes_any_strides"),
    "test_triton_head": (
        "test_agrees_with_float64[1-1-8-264-9.0-float32",
        "test_a_likely_id",
        "test_no_rows",
        "test_what_does_not_fit",
        "test_pairs_outside",
    ),
    "test_triton_rowwise": (
        "test_gate_is_accurate[silu-float32",
        "test_gate_at_the_ends",
        "test_norm_of_heads",
        "test_rotation_by",
        "test_what_does_not",
    ),
    # the engine: a few architectures, every path and refusal once
    "test_device_map": ("test_offloaded_models_say_the_same",),
    "test_engine": (
        "test_every_architecture_is_exact[llama-",
        "test_every_architecture_is_exact[gemma3-",
        "test_every_architecture_is_exact[gpt2-",
        "test_the_product_agrees_with_plain_scoring[limits0-gemma3",
        "test_units_run",
        "test_the_self_check",
        "test_plain_serves",
        "test_bad_",
    ),
    "test_estimate": ("",),
    "test_facts": ("test_facts_without_weights_are_those_of_the_model[gemma3", "test_wrong_configurations"),
    "test_generate": (
        "test_every_architecture_says_what_plain_decoding_says[llama-",
        "test_units_run",
        "test_bad_requests",
        "test_slots",
    ),
    "test_layers": ("test_known_architectures_run_in_our_layers_and_are_exact[qwen3-",),
    "test_streams": ("test_verbs_are_awaited", "test_a_stream_that_is_closed"),
    "test_twin": ("test_what_refers", "test_a_compiled", "test_two_engines"),
    "test_gguf": ("test_a_file_has", "test_damaged"),
    "test_loading": ("",),
    "test_readouts": ("test_texts_by_chance_are_the_oracles_in_any_company[llama", "test_a_session_generates_what"),
    "test_long_paths": (
        "test_a_path_over_the_budget_is_served[gemma3-",
        "test_the_cheaper",
        "test_stores",
        "test_ranges",
        "test_groups",
    ),
    "test_memory": ("test_packs_are", "test_budgets", "test_what_is_no_budget", "test_a_budget"),
    "test_paper_models": ("test_costs", "test_the_document"),
    # tasks, answers and prompts
    "test_answers": ("test_numbers", "test_letters", "test_mathematics_is_read"),
    "test_graded_runs": ("test_f1_is", "test_keys", "test_words", "test_draws", "test_grades_go", "test_a_prompt_and"),
    "test_builtin_tasks": ("test_all_tasks", "test_a_task_reads", "test_a_prompt_is"),
    "test_chat": ("test_the_turns", "test_one_message", "test_a_template_that_fails", "test_ids_of"),
    "test_blocks": ("test_agrees", "test_blocks_without", "test_a_whole_pool", "test_effects_have", "test_bad_blocks"),
    "test_designs": ("",),
    "test_ordering_designs": (
        "test_orders_are",
        "test_a_latin",
        "test_antithetic",
        "test_coupled",
        "test_all_orders",
        "test_the_draws",
        "test_a_design",
        "test_order_variances",
        "test_blocks_of",
        "test_one_block",
        "test_of_all",
        "test_a_summary",
        "test_an_unknown",
    ),
    "test_grids": (
        "TestCells",
        "TestCosts::test_cells_are_planned",
        "TestRuns::test_a_failed_cell",
        "TestCommands::test_a_grid_is_planned",
    ),
    "test_killable": ("test_json", "test_one_process", "test_failures"),
    "test_harness_joined": (
        "test_pipelines",
        "test_samples",
        "test_what",
        "test_nothing",
        "test_a_row",
        "test_a_task_of",
    ),
    "test_harness_rendered": ("test_what_cannot_be_rendered_is_told_in_a_line[changes4",),
    "test_lm_eval_model": ("test_chunks", "test_a_prompt_is_cut"),
    "test_prompts": ("test_a_", "test_parts", "test_labels", "test_the_tokens"),
    "test_lengths": ("",),
    "test_notebook": ("test_a_table_becomes_a_task_with_its_rows[rows", "test_what_progress"),
    "test_proposal": ("test_columns",),
    "test_published": ("test_ag_news", "test_x_class"),
    "test_task_data": ("",),
    "test_tasks": ("",),
    # statistics against their oracles, and what others' files say
    "test_bearing": ("",),
    "test_classes": ("",),
    "test_comparing": ("TestFindings",),
    "test_comparison": (
        "TestCompare::test_what",
        "TestCompare::test_every_k",
        "TestMcNemar",
        "TestSlope::test_textbook",
        "TestPool::test_textbook",
    ),
    "test_contextual": ("TestTheStatistic", "TestTheEffect::test_is", "test_a_report"),
    "test_convergence": (
        "TestMeanError::test_agrees",
        "TestNeeded::test_all",
        "TestParts",
        "TestQueries",
        "TestStudy::test_tables",
    ),
    "test_curve": ("",),
    "test_demonstrations": ("TestAgainst", "TestSplitHalf"),
    "test_features": ("",),
    "test_files_as_written": ("",),
    "test_incomplete": (
        "TestAccuracy::test_agrees",
        "TestAccuracy::test_lies",
        "TestAccuracy::test_a_",
        "TestComponents::test_what",
        "TestMissing",
    ),
    "test_latent": (
        "TestOracles::test_covariances_of_pairs_agree",
        "TestCells",
        "TestPower",
        "TestRefusals",
        "TestFindings",
    ),
    "test_paired": (
        "TestHolm::test_agrees_with_its",
        "TestMcNemar",
        "TestPairedInterval::test_text",
        "TestGrades",
        "TestIntra",
    ),
    "test_papers": ("",),
    "test_search": ("TestCriteria", "TestFindings"),
    "test_selection": ("TestChoose", "TestWords", "TestFeatures"),
    "test_settling": ("TestRanks", "TestParts::test_scores"),
    "test_stats": (
        "TestAccuracy",
        "TestSensitivity",
        "TestCurve",
        "TestVariance",
        "TestStandard",
        "TestCal",
        "test_bad",
    ),
    "test_stats_files": ("",),
    "test_synthetic": ("",),
    "test_tensor": ("TestTensorSums::test_refuses", "TestBlocks::test_refuses", "TestThreads"),
    "test_transfer": ("",),
    "test_verdicts": (
        "TestOneLook::test_weighted",
        "TestUntilDecided::test_it_decides",
        "TestUntilDecided::test_looks",
        "TestARun::test_it_ends",
        "test_plateaus",
    ),
    # what strangers give
    "test_given_folders": (
        "test_what_is_read_through",
        "test_links_of",
        "test_slow_patterns",
        "test_a_plan_that_is_nested",
    ),
    "test_adapter": ("test_a_folder_that_is_none", "test_it_is_for_one"),
    "test_given_parquet": ("test_what_is_no_bomb", "test_the_bomb", "test_more_rows"),
    "test_model_folders": (
        "test_a_file_is_no",
        "test_quantized",
        "test_an_adapter",
        "test_a_model_that_is_not_causal",
    ),
    # runs: each kind at tiny size, killed, grown, damaged, read and reported
    "test_arrays": ("",),
    "test_files": ("test_what", "test_files", "test_unfinished", "test_a_"),
    "test_generated_runs": (
        "test_texts_and_verdicts",
        "test_strict_and_flexible",
        "test_codes",
        "test_shares",
        "test_what_does_not_go",
    ),
    "test_kept_choices": ("test_a_choice_is_kept",),
    "test_in_python": (
        "test_help",
        "test_xarray",
        "test_a_run_is",
        "test_a_notebook",
        "test_a_figure_is_a_function_of_a_run[heat",
    ),
    "test_kinds": ("test_a_kind_runs_reports_and_is_read_back[curve", "test_choices", "test_what_cannot_work"),
    "test_page": ("test_texts_are_left_out", "test_every_text"),
    "test_page_bundle": ("test_what_was_kept", "test_a_home", "test_no_library", "test_a_broken"),
    "test_prompt": ("test_other_data", "test_a_study_that_chose"),
    "test_report": ("TestSummary", "TestJson", "TestTables"),
    "test_results": ("",),
    "test_run_folder": (
        "test_a_growing_run",
        "test_a_run_grows_to_what_a_larger_one_is[{'permutations'",
        "test_every_damage_is_told_and_mended_and_the_damaged_bytes_are_kept[items",
        "test_claims",
        "test_runs_of_every_released",
    ),
    "test_runner": (
        "test_every_cell_agrees_with_the_plain_model[byte",
        "test_a_stopped_run",
        "test_a_damaged_file",
        "test_another_study",
        "test_a_plan_tells",
    ),
    "test_side_by_side": (
        "TestText",
        "TestTables::test_answers",
        "TestFigures::test_there",
        "TestFigureFiles::test_tables",
        "TestPage::test_answers",
    ),
    "test_study": ("",),
    "test_ray_workers": ("test_actors", "test_a_link", "test_without"),
    "test_workers": ("",),
    "test_balance": ("",),
    "test_kuberay": ("",),
    # endpoints, command line, bench
    # asking less, and demonstrations of each query's own
    "test_racing": ("test_the_capital", "test_leads", "test_the_first_step", "test_ties"),
    "test_sizing": ("test_expected", "test_where_there", "test_precisions", "test_what_is_no"),
    "test_growing": ("test_it_ends_at", "test_a_plan_is_of", "test_components"),
    "test_recommend": (
        "test_what_it_says",
        "test_the_ladder",
        "test_the_shortest",
        "test_random_prompts",
        "test_from_a",
    ),
    "test_cells": ("test_dealt", "test_a_curve_of_whole", "test_a_curve_study", "test_choices", "test_the_mean_is"),
    "test_retrieved": ("test_files", "test_parts_are_cut", "test_choices"),
    "test_pmi": ("test_what_does_not", "test_a_model", "test_of_equals", "test_rows_are"),
    "test_row_choices": ("test_choices_and", "test_a_row", "test_several", "test_a_task_has"),
    # other people's tools
    "test_server": ("test_offsets", "test_requests", "test_a_refusal", "test_a_command_that_cannot"),
    "test_harness_logs": ("test_a_text_that_says",),
    "test_bench_studies": ("test_a_share", "test_what_cannot", "test_a_case", "test_the_sentence", "test_the_yard"),
    "test_bench": (
        "test_a_case",
        "test_whoever",
        "test_what_cannot",
        "test_the_table",
        "test_a_worker",
        "test_a_workload_on",
    ),
    "test_cli": (
        "test_every_key",
        "test_an_error",
        "test_a_usage_error",
        "test_without_a_command",
        "test_the_tokens",
        "test_tasks_are_listed",
    ),
    "test_doctor": ("TestCommand::test_the_bundled", "TestCommand::test_a_wrong_call", "TestKernels::test_why"),
    "test_doctor_parts": ("",),
    "test_endpoint": ("test_replies",),
    "test_endpoint_choices": ("",),
    "test_endpoint_keys": (
        "test_an_address",
        "test_a_flag",
        "test_a_key_too_short",
        "test_what_holds_no_key",
        "test_the_callers_own",
    ),
    "test_endpoint_money": ("test_entries", "test_a_kept_reply", "test_a_log_probability"),
    "test_endpoint_studies": ("test_a_refusal", "test_a_process_counts"),
    "test_ledger": ("test_what_is", "test_every_line", "test_a_", "test_damage", "test_nothing"),
}
"""By file, what the names of its tests begin with; "" is all of them but those of ``SLOW``."""

SLOW: dict[str, tuple[str, ...]] = {
    "test_comparing": ("TestFindings::test_many_studies",),
    "test_convergence": ("TestParts::test_the_whole", "TestParts::test_without"),
    "test_core_errors": ("test_a_wrong_argument_is_refused_in_these_words[prefix_tree.cpp: row 0 has 2147483648",),
    "test_curve": (
        "TestPlateau::test_the_average",
        "TestStudy::test_figures",
        "TestStudy::test_one_query",
        "TestStudy::test_one_set",
    ),
    "test_demonstrations": ("TestAgainstTheOracles::test_with_any",),
    "test_estimate": ("test_the_work_foretold", "test_the_rate"),
    "test_features": ("TestRankCorrelation::test_agrees", "TestRankCorrelation::test_columns"),
    "test_killable": ("test_failures_are_named",),
    "test_latent": ("TestCells::test_components", "TestPower::test_r_is"),
    "test_loading": ("test_bad_model_folders", "test_text_is_encoded"),
    "test_papers": ("test_two_demonstrations",),
    "test_report": ("TestSummary::test_small_designs", "TestTables::test_a_narrow"),
    "test_results": ("test_a_mean_over_tokens", "test_normalised_labels", "test_every_split"),
    "test_search": ("TestFindings::test_tables",),
    "test_selection": ("TestWords::test_tables",),
    "test_task_data": ("test_a_dataset_folder", "test_a_damaged_table"),
    "test_tasks": ("test_importing_tasks", "test_a_wrong_task_file", "test_a_malformed_row"),
    "test_transfer": ("TestFindings::test_sentences",),
    "test_workers": ("TestProcesses", "TestPool::test_a_worker_that_differs"),
}
"""By file, what the names of those begin with that are left out, since they take long."""

UNTOUCHED = {
    "bench/peers/": "runs in the peers' environments, each with an interpreter of its own",
    "cli/__init__.py": "loads the commands when the first test of them is collected",
    "cli/options.py": "decorates the commands when they are loaded",
    "engine/kernels/triton_resources.py": "compiles, in processes that do not interpret kernels",
}
"""What modules' paths begin with of which no test of the tier runs a function, and why."""


def has_code(node: ast.AST) -> bool:
    """Is it a function that does anything, unlike those of a protocol?"""
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not all(
        isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) for line in node.body
    )


def modules() -> set[str]:
    """Every module that has a function, as a path within the package, but those of ``UNTOUCHED``."""
    paths = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}
    return {
        name
        for name, path in paths.items()
        if not name.startswith(tuple(UNTOUCHED))
        and any(map(has_code, ast.walk(ast.parse(path.read_text(encoding="utf-8")))))
    }


class FastTier:
    """The plugin: marks the tests of the tier and, in a run of all tests, notes the files whose functions they run."""

    def __init__(self, config: pytest.Config) -> None:
        option = config.option
        self.has_all_tests = (
            config.workerinput["has_all_tests"]  # a worker is given paths, whatever the user gave
            if hasattr(config, "workerinput")
            else config.args_source is config.ArgsSource.TESTPATHS and not option.keyword and not option.markexpr
        )
        self.watches = ((self.has_all_tests and not option.long) or option.every_module) and not option.collectonly
        self.ran: set[str] = set()
        self.missing: set[str] = set()
        if option.markexpr == "fast":
            settings.register_profile("fast", settings(), max_examples=EXAMPLES)
            settings.load_profile("fast")

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["has_all_tests"] = self.has_all_tests

    def pytest_ignore_collect(self, collection_path: Path, config: pytest.Config) -> bool | None:
        """Files that have no test of the tier need not be imported."""
        is_other = collection_path.name.startswith("test_") and collection_path.stem not in FAST
        return True if config.option.markexpr == "fast" and is_other else None

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            name = item.nodeid.partition("::")[2]
            if name.startswith(FAST.get(item.path.stem, ())) and not name.startswith(SLOW.get(item.path.stem, ())):
                item.add_marker("fast")
        # Those of the tier come first in each file, so that what a file's tests share is made under watch.
        places = {path: place for place, path in enumerate(dict.fromkeys(item.path for item in items))}
        items.sort(key=lambda item: (places[item.path], item.get_closest_marker("fast") is None))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        if not self.watches or item.get_closest_marker("fast") is None:
            return (yield)
        threading.setprofile(self.note)
        sys.setprofile(self.note)
        try:
            return (yield)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def note(self, frame: FrameType, event: str, _: object) -> None:
        # Neither the body of a module or class nor a comprehension, which run at import.
        if event == "call" and frame.f_code.co_flags & inspect.CO_OPTIMIZED and frame.f_code.co_name[0] != "<":
            self.ran.add(frame.f_code.co_filename)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.ran |= set(getattr(node, "workeroutput", {}).get("ran", ()))

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["ran"] = [name for name in self.ran if name.startswith(str(PACKAGE))]
        elif self.watches and exitstatus == pytest.ExitCode.OK:
            self.missing = {path for path in modules() if str(PACKAGE / path) not in self.ran}
            if self.missing:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.missing:
            words = "FAILED: no test of the fast tier (tests/fast_tier.py) runs a function of"
            terminalreporter.write_line(f"{words} {', '.join(sorted(self.missing))}", red=True)
