"""Files of lm-evaluation-harness: rendered byte for byte as it does, and refused where code would have to run."""

import json
import re
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from iclperm.errors import ConfigError, DataError
from iclperm.tasks.harness import ExactMatch, HarnessTask, read_harness
from iclperm.tasks.harness.files import GroupMember, files_of, members

FAMILIES = [
    "aclue/aclue_ancient_chinese_culture",
    "acpbench/boolq_cot_2shot/act_reach",
    "afrimgsm/direct/prompt_1/afrimgsm_amh",
    "alghafa/copa_ar/copa_ar",
    "anli/anli_r1",
    "arc/arc_challenge",
    "asdiv/asdiv-cot-llama",
    "babi/babi",
    "bangla/bangla_boolqa",
    "bbh/cot_fewshot/boolean_expressions",
    "bear/bear",
    "belebele/belebele_acm_Arab",
    "bertaqa/bertaqa_en",
    "blimp/adjunct_island",
    "commonsense_qa/default",
    "evalita_llm/_evalita-mp_at_task_p1",
    "fld/fld_default",
    "french_bench/french_bench_arc_challenge",
    "global_piqa/nonparallel_cloze/acm_arab",
    "glue/cola/default",
    "gsm8k/gsm8k",
    "gsm8k/gsm8k-cot-llama",
    "headqa/headqa_en",
    "indicxnli/indicxnli_gu",
    "inverse_scaling/inverse_scaling_hindsight_neglect",
    "japanese_leaderboard/ja_leaderboard_jaqket_v2",
    "kbl/bar_exam/civil/kbl_bar_exam_em_civil_2012",
    "lambada/lambada_openai",
    "leaderboard/bbh_mc/boolean_expressions",
    "mela/mela_ar",
    "mgsm/direct/mgsm_direct_bn",
    "mmlu/continuation/mmlu_abstract_algebra",
    "model_written_evals/advanced_ai_risk/fewshot-coordinate-itself",
    "nq_open/nq_open",
    "openbookqa/openbookqa",
    "pile/pile_arxiv",
    "piqa/piqa",
    "polemo2/polemo2_in",
    "qa4mre/qa4mre_2011",
    "sciq/sciq",
    "siqa/siqa",
    "storycloze/storycloze_2016",
    "super_glue/boolq/seq2seq",
    "translation/iwslt2017_ar-en",
    "triviaqa/default",
    "truthfulqa/truthfulqa_mc1",
    "turkishmmlu/config/Biology",
    "unscramble/anagrams1",
    "winogender/winogender",
    "xnli/xnli_ar",
]
SPEC = find_spec("lm_eval")
THEIRS = Path(str(SPEC and SPEC.origin)).parent / "tasks"
KEYS = {
    "dataset_path": "x",
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "Q: {{q}}",
    "doc_to_target": "label",
    "doc_to_choice": ["no", "yes"],
}


def task(**changes):
    return HarnessTask.from_keys({**KEYS, **changes}, "x")


@pytest.mark.skipif(SPEC is None, reason="lm_eval is not installed")
@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_continuations_golds_and_stops_are_the_harness_own(name):
    from harness_oracle import differences

    assert list(differences(THEIRS / f"{name}.yaml")) == []


def test_the_page_of_families_is_what_was_counted(monkeypatch):
    root = Path(__file__).parents[1]
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    spec = spec_from_file_location("counted_harness_tasks", root / "benchmarks" / "harness_tasks.py")
    counting = module_from_spec(spec)
    spec.loader.exec_module(counting)
    rows = json.loads((root / "benchmarks/results/harness_tasks.json").read_text("utf-8"))["figures"]
    page = (root / "docs/harness-tasks.md").read_text("utf-8")
    begin, end = "<!-- harness tasks: begin -->\n", "<!-- harness tasks: end -->"
    assert page.partition(begin)[2].partition(end)[0] == counting.markdown(rows), "run benchmarks/harness_tasks.py"
    total, load, plain, of_these = (
        sum(row[key] for row in rows) for key in ("tasks", "load", "without a function", "of these load")
    )
    assert f"Of {total:,} tasks {plain:,} are without" in page
    told = re.findall(r"([\d,]+) of (?:these load|those with one)", page)
    assert [int(count.replace(",", "")) for count in told] == [of_these, load - of_these]


@pytest.mark.skipif(SPEC is None, reason="lm_eval is not installed")
def test_the_oracle_notices_a_difference(tmp_path, monkeypatch):
    import harness_oracle

    monkeypatch.setattr("iclperm.tasks.harness.rows._joined", lambda prefix, answer: f"{prefix}  {answer}")
    path = tmp_path / "x.yaml"
    path.write_text("task: x\ntest_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{q}}'\n"
                    "doc_to_target: label\ndoc_to_choice: [A, B]\ngen_prefix: The answer is\n")  # fmt: skip
    assert any("2 shots" in said for said in harness_oracle.differences(path))


def test_later_files_win_and_a_circle_is_named(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "base.yaml").write_text("dataset_path: x\ndescription: base\nnum_fewshot: 1\ntask_list: [y]\n")
    (tmp_path / "sub" / "more").write_text("include: ../base.yaml\nnum_fewshot: 2\n")
    path = tmp_path / "task.yaml"
    path.write_text("include: [sub/more]\ntask: t\ndescription: own\n")
    assert read_harness(path) == {"dataset_path": "x", "description": "own", "num_fewshot": 2, "task": "t"}
    (tmp_path / "base.yaml").write_text("include: task.yaml\n")
    with pytest.raises(ConfigError, match="back to itself"):
        read_harness(path)
    path.write_text("include: none.yaml\n")
    with pytest.raises(ConfigError, match=r"includes none\.yaml: cannot be read"):
        read_harness(path)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("process_docs: !function utils.f", "'process_docs' is !function utils.f, and no function is run here"),
        (
            "fewshot_config: {samples: !function utils.f}",
            "have the harness render its rows, which runs them: iclperm tasks from-harness NAME",
        ),
        ("metric_list: [{metric: !function utils.f}]", "the key 'metric_list' is !function utils.f"),
        ("doc_to_image: x", "models of texts alone"),
        ("doc_to_text: '{{ q.__class__() }}'", None),
    ],
)
def test_no_function_is_run(line, said, tmp_path):
    (tmp_path / "utils.py").write_text("raise SystemExit('was run')")
    path = tmp_path / "x.yaml"
    path.write_text(f"task: x\ntest_split: t\ndoc_to_text: '{{{{q}}}}'\ndoc_to_target: a\n{line}\n".replace(
        "doc_to_text: '{{q}}'\n", "" if line.startswith("doc_to_text") else "doc_to_text: '{{q}}'\n"))  # fmt: skip
    if said is None:
        with pytest.raises(DataError, match="doc_to_text"):
            HarnessTask.from_yaml(path).render({"q": "x", "a": "y"})
        return
    with pytest.raises(ConfigError) as caught:
        HarnessTask.from_yaml(path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_metric_that_is_a_function_is_left_out_and_named(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("task: x\ndoc_to_text: '{{q}}'\ndoc_to_target: a\nmetric_list:\n- {metric: exact_match}\n"
                    "- {metric: f1, aggregation: !function utils.weighted}\n")  # fmt: skip
    read = HarnessTask.from_yaml(path)
    assert ([metric.metric for metric in read.metrics], read.left_out) == (["exact_match"], ("f1",))


def test_pipelines_are_metrics_of_their_own():
    filters = [
        {"name": "strict", "filter": [{"function": "regex"}, {"function": "take_first"}]},
        {"name": "flexible", "filter": [{"function": "regex", "group_select": -1, "regex_pattern": "(-?[0-9]+)"},
                                        {"function": "take_first"}]},
    ]  # fmt: skip
    read = task(output_type="generate_until", doc_to_choice=None, doc_to_target="a", filter_list=filters)
    found = {each.name: each.read(["The answer is 5."]) for each in read.pipelines}
    assert found == {"strict": "[invalid]", "flexible": "5"}
    assert [ExactMatch().is_right(answer, ["5"]) for answer in found.values()] == [False, True]


@pytest.mark.parametrize(
    ("changes", "doc", "said"),
    [
        ({}, {"q": "x"}, "names the column 'label', and the row has 'q'"),
        ({"doc_to_choice": "{{q}}"}, {"q": "x", "label": 0}, "no list of texts"),
        ({"doc_to_target": "{{away}}"}, {"q": "x"}, "'away' is undefined"),
        ({}, {"q": "x", "label": 1.5}, "give the position of a choice"),
    ],
)
def test_a_row_that_cannot_be_is_named(changes, doc, said):
    with pytest.raises(DataError, match=said) as caught:
        task(**changes).render_all([doc], ["file:7"])
    assert str(caught.value).startswith("file:7: ")


def test_letters_and_positions_and_texts_are_golds():
    read = task(doc_to_choice=["A", "B"])
    assert [read.render({"q": "x", "label": label}).golds for label in ("B", 1, "C", 2, [0, 1])] == [
        (1,), (1,), (), (), (0, 1),
    ]  # fmt: skip
    assert read.prompts({"q": "2", "label": 0}, [{"q": "1", "label": "B"}]) == ("Q: 1 B\n\nQ: 2",)


def test_a_group_names_its_tasks_and_their_files(tmp_path):
    for name in ("one", "two"):
        (tmp_path / f"{name}.yaml").write_text(f"task: t_{name}\ntag:\n  - both\n")
    content = {"group": "g", "num_fewshot": 3, "task": ["t_one", {"group": "h", "task": [{"task": "t_two", "a": 1}]}]}
    assert members(content) == [GroupMember("t_one", {"num_fewshot": 3}), GroupMember("t_two", {"a": 1})]
    assert [path.name for path in files_of("t_two", tmp_path)] == ["two.yaml"]
    assert [path.name for path in files_of("both", tmp_path)] == ["one.yaml", "two.yaml"]
