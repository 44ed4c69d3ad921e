"""lm-evaluation-harness with our engine as its model, beside its own `hf`: the same answers, metrics and texts."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import harness_tasks
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import TOLERANCES
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from iclperm import demo
from iclperm.cli import main as cli
from iclperm.errors import ConfigError, ModelError, RunStopped
from iclperm.integrations import harness_main

pytestmark = pytest.mark.filterwarnings("ignore")  # the harness's own, and those of what it imports

lm_eval = pytest.importorskip("lm_eval")
ROWS = 6
PER_TOKEN = TOLERANCES["loglikelihood per token"]["float32"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("harness")
    harness_tasks.write(path, ROWS)
    return path


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    """All tasks by `hf` and by us, on the bundled model."""
    return evaluated(folder, demo.model_path(), "demo")


def evaluated(folder: Path, model: Path, pretrained: str) -> dict[str, Any]:
    """All tasks by `hf` on a model's folder, and by us on ``pretrained``, its name. With its cache of logits `hf` reads
    the wrong rows where texts of different lengths end alike (0.4.13)."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    import iclperm.integrations.lm_eval  # noqa: F401 - registers the model

    names = [f"local_{name}" for name in harness_tasks.TASKS]
    models = {
        "hf": {"pretrained": str(model), "device": "cpu", "dtype": "float32", "logits_cache": False},
        "iclperm": {"pretrained": pretrained},
    }
    return {
        model: simple_evaluate(
            model=model,
            model_args=arguments,
            tasks=names,
            task_manager=TaskManager(include_path=str(folder), include_defaults=False),
            log_samples=True,
            bootstrap_iters=0,
        )
        for model, arguments in models.items()
    }


@pytest.mark.parametrize("name", harness_tasks.TASKS)
def test_a_task_has_the_answers_and_metrics_of_hf(results: dict[str, Any], name: str) -> None:
    assert_equal(results, name)


def test_every_task_has_them_on_a_model_of_25_million_parameters(folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = Qwen2Config(
        vocab_size=16_384, hidden_size=512, intermediate_size=1_408, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=2_048, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen2ForCausalLM(shape).eval().save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(demo.model_path()).save_pretrained(tmp_path)
    results = evaluated(folder, tmp_path, str(tmp_path))
    for name in harness_tasks.TASKS:
        assert_equal(results, name)


def assert_equal(results: dict[str, Any], name: str) -> None:
    """Prompts, log-likelihoods to 1e-4 nats a token, texts and metrics."""
    theirs, ours = (results[model]["samples"][f"local_{name}"] for model in ("hf", "iclperm"))
    assert len(ours) == len(theirs) == ROWS
    for one, other in zip(theirs, ours, strict=True):
        assert one["arguments"] == other["arguments"]
        for expected, found in zip(one["resps"], other["resps"], strict=True):
            assert len(expected) == len(found)
            for answer, own in zip(expected, found, strict=True):
                if isinstance(answer, str):
                    assert own == answer
                else:
                    logprobs = [np.ravel(np.asarray(each, dtype=np.float64))[0] for each in (answer, own)]
                    assert abs(logprobs[0] - logprobs[1]) < PER_TOKEN * tokens(one)
    metrics = [results[model]["results"][f"local_{name}"] for model in ("hf", "iclperm")]
    for key, value in metrics[0].items():
        if isinstance(value, float) and not np.isnan(value):
            assert metrics[1][key] == pytest.approx(value, rel=1e-3), key


def tokens(sample: dict[str, Any]) -> int:
    """No fewer than the sample's continuations have at most."""
    return max(len(str(argument[-1])) for argument in sample["arguments"])


def test_texts_and_answers_are_not_all_alike(results: dict[str, Any]) -> None:
    texts = {sample["resps"][0][0] for sample in results["iclperm"]["samples"]["local_written"]}
    assert len(texts) > 1
    assert results["iclperm"]["results"]["local_written_twice"]["exact_match,first word"] > 0


def test_the_command_runs_a_task(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main(
            [
                "lm-eval", "run", "--tasks", "local_fixed_shots", "--include_path", str(folder),
                "--model_args", "pretrained=demo", "--output_path", str(tmp_path), "--log_samples",
            ]
        )  # fmt: skip
    assert done.value.code == 0
    assert "iclperm ({'pretrained': 'demo'})" in capsys.readouterr().out
    (found,) = tmp_path.rglob("results_*.json")
    assert json.loads(found.read_text())["config"]["model"] == "iclperm"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "give --model_args pretrained=demo"),
        ({"pretrained": "demo", "load_in_4bit": True}, "takes no 'load_in_4bit'"),
        ({"pretrained": "demo", "dtpye": "float32"}, "takes no 'dtpye'; did you mean dtype"),
        ({"pretrained": "demo", "max_length": "abc"}, "max_length is 'abc'; give a whole number from 1 on"),
        ({"pretrained": "demo", "max_length": -5}, "max_length is -5; give"),
        ({"pretrained": "demo", "seed": "x"}, "seed is 'x'; give a whole number from 0 on"),
        ({"pretrained": "demo", "add_bos_token": "maybe"}, "add_bos_token is 'maybe'; give True or False"),
        ({"pretrained": "demo", "prefix_token_id": 999_999}, "prefix_token_id is 999999; give .* from 0 to 2047 in"),
    ],
)
def test_what_cannot_be_had_is_refused_in_a_line(arguments: dict[str, Any], said: str) -> None:
    from iclperm.integrations.lm_eval import TreeLM

    with pytest.raises(ConfigError, match=said):
        TreeLM(**arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "--model", "iclperm"], "No tasks specified"),
        (["run", "--tasks", "sporty", "--include_path", "."], "Tasks not found: sporty"),
    ],
)
def test_what_the_harness_ends_with_is_one_line_and_a_remedy(arguments: list[str], said: str) -> None:
    told = rf"^lm-evaluation-harness ended with .*{said}.*; look over the task"
    with pytest.raises(ConfigError, match=told) as found:
        harness_main(arguments)
    assert "\n" not in str(found.value)


def test_data_that_cannot_be_read_is_told_with_its_cause(tmp_path: Path) -> None:
    (tmp_path / "test.csv").write_text("text,label\none,World\n", encoding="utf-8")
    (tmp_path / "odd.yaml").write_text(
        f"task: odd\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path / 'test.csv'}}}}}\n"
        'test_split: test\noutput_type: multiple_choice\ndoc_to_text: "{{text}}"\n'
        'doc_to_choice: [World, Sports]\ndoc_to_target: "{{label}}"\n',
        encoding="utf-8",
    )
    arguments = ["--tasks", "odd", "--include_path", str(tmp_path), "--model_args", "pretrained=demo"]
    with pytest.raises(ConfigError, match=r"DatasetGenerationError: .* because of .*JSON parse error: Invalid value"):
        harness_main(arguments)


@pytest.mark.parametrize("place", ["taken", "taken/below", "taken/results.json"])
def test_a_place_that_is_no_folder_is_refused_before_anything_is_computed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    from iclperm.integrations import lm_eval as ours

    (tmp_path / "taken").touch()
    monkeypatch.setattr(ours.HarnessCLI, "execute", lambda *_: pytest.fail("it ran"))
    with pytest.raises(ConfigError, match=r"^--output_path is .*taken.*, and .*taken is a file; name a folder$"):
        harness_main(["--tasks", "any", "--include_path", str(folder), "--output_path", str(tmp_path / place)])


def test_results_that_could_not_be_saved_are_an_error(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from iclperm.integrations import lm_eval as ours

    def fill_the_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ours.evaluation_tracker, "asdict", fill_the_disk)
    arguments = ["--tasks", "local_zero_shot", "--include_path", str(folder), "--limit", "2"]
    with pytest.raises(ModelError, match=r"could not save its results to --output_path \(Could not save results agg"):
        harness_main([*arguments, "--model_args", "pretrained=demo", "--output_path", str(tmp_path)])


@pytest.mark.parametrize(
    ("cached", "said"),
    [
        ([], "nothing is kept; with --use_cache"),
        (["--use_cache", "answers"], "what reached the harness's cache is kept there, and the same"),
    ],
)
def test_what_an_interrupt_keeps_is_told(monkeypatch: pytest.MonkeyPatch, cached: list[str], said: str) -> None:
    from iclperm.integrations import lm_eval as ours

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ours.HarnessCLI, "execute", interrupted)
    with pytest.raises(RunStopped, match=said):
        harness_main(["--tasks", "any", *cached])


@pytest.mark.parametrize("given", ["batch_size=4"])
def test_what_the_harness_gives_itself_is_no_model_argument(folder: Path, given: str) -> None:
    name = given.partition("=")[0]
    arguments = [
        "--tasks",
        "local_zero_shot",
        "--include_path",
        str(folder),
        "--model_args",
        f"pretrained=demo,{given}",
    ]
    with pytest.raises(ConfigError, match=rf"^{name} is in --model_args; give it as --{name}$"):
        harness_main(arguments)


def test_model_arguments_of_python_are_a_text_or_a_dictionary() -> None:
    from iclperm.integrations.lm_eval import TreeLM

    with pytest.raises(ConfigError, match=r"^device is in --model_args; give it as --device$"):
        TreeLM.create_from_arg_string("pretrained=demo,device=cpu", {"device": "cuda:0"})
    beside = {"device": None, "batch_size": 1}
    assert TreeLM.create_from_arg_string("pretrained=demo,device=cpu", beside).pretrained == "demo"


@pytest.mark.parametrize(("given", "device"), [([], "auto"), (["--device", "cuda:0"], "cuda:0")])
def test_the_harness_asks_for_a_gpu_only_where_one_did(
    monkeypatch: pytest.MonkeyPatch, given: list[str], device: str
) -> None:
    from iclperm.integrations import lm_eval as ours

    chosen: list[Any] = []
    monkeypatch.setattr(ours.HarnessCLI, "execute", lambda self, arguments: chosen.append(arguments))
    ours.main(["--tasks", "any", *given])
    assert [each.device for each in chosen] == [device]


def test_a_gpu_that_was_asked_for_and_is_not_there_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from iclperm.integrations.lm_eval import _device

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with caplog.at_level(logging.WARNING, "lm_eval"):
        assert [_device(given) for given in (None, "auto", "cpu", "cuda:0")] == ["auto", "auto", "cpu", "cpu"]
    assert [each.getMessage() for each in caplog.records] == [
        "the device is cuda:0, but torch finds no GPU here; the model runs on the CPU"
    ]


@pytest.fixture(scope="module")
def model() -> Any:
    from iclperm.integrations.lm_eval import TreeLM

    return TreeLM("demo", batch_size="auto", max_batch_size=4)


class Hook:
    def __init__(self) -> None:
        self.kept: list[tuple[str, Any, Any]] = []

    def add_partial(self, verb: str, request: Any, answer: Any) -> None:
        self.kept.append((verb, request, answer))


def test_a_shared_prefix_is_forwarded_once(model: Any) -> None:
    hook, before = Hook(), model.cache_hook
    prefix, requests = [*range(5, 105)], []
    for number in range(20):
        requests.append((("a", str(number)), [*prefix, 200 + number], [300, 301]))
    model.set_cache_hook(hook)
    answers = model._loglikelihood_tokens(requests, disable_tqdm=True)
    model.set_cache_hook(before)
    report = model.engine.report
    assert report.tokens_forwarded == report.tokens_unique == 100 + 20 * 2
    assert sorted((request[1], answer) for _, request, answer in hook.kept) == sorted(
        (str(number), answer) for number, answer in enumerate(answers)
    )


def test_sampled_texts_of_equal_prompts_differ_and_come_again(model: Any) -> None:
    rows = [np.array(ids, np.int32) for ids in ([7, 8, 9], [7, 8, 9], [5, 6], [7, 8, 9])]
    sampling = model._sampling({"do_sample": True, "temperature": 1.5, "top_k": 0})
    model._drawn.clear()
    texts = [each.tolist() for each in model._texts(rows, 8, [], sampling)]
    assert len({tuple(texts[place]) for place in (0, 1, 3)}) == 3
    more = model._texts(rows[:1], 8, [], sampling)[0].tolist()
    assert more not in texts
    model._drawn.clear()
    in_parts = [model._texts(rows[begin : begin + 2], 8, [], sampling) for begin in (0, 2)]
    assert [each.tolist() for part in in_parts for each in part] == texts
    with pytest.raises(ConfigError, match="generation option 'num_beams' is 4"):
        model._sampling({"num_beams": 4})
    assert model._sampling({"do_sample": False, "temperature": 0.0}) == {}


def test_a_penalty_in_the_models_file_is_told(
    model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(model.engine.model.generation_config, "repetition_penalty", 1.05)
    with caplog.at_level(logging.WARNING, "lm_eval"):
        model._warn_of_the_models_own_penalties()
    assert "repetition_penalty = 1.05" in caplog.text


rows = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), max_size=20)


@settings(max_examples=30, deadline=None)
@given(rows=rows, most=st.integers(1, 30))
def test_chunks_hold_every_row_once_and_about_so_many_tokens(rows: list[list[int]], most: int) -> None:
    from iclperm.integrations import lm_eval as ours

    arrays = [np.array(row, np.int32) for row in rows]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ours, "_CHUNK_TOKENS", most)
        chunks = [*ours._chunks(arrays)]
    assert sorted(number for chunk in chunks for number in chunk) == [*range(len(rows))]
    ordered = [rows[number] for chunk in chunks for number in chunk]
    assert ordered == sorted(rows)
    for chunk in chunks:
        nodes = {tuple(rows[number][: end + 1]) for number in chunk for end in range(len(rows[number]))}
        assert len(nodes) < most + 6
        assert len(nodes) >= most or chunk is chunks[-1]


@pytest.mark.parametrize("length", [1, 3])
def test_a_prompt_is_cut_on_its_left_as_hf_cuts(length: int) -> None:
    from iclperm.integrations.lm_eval import _fed

    before, after = _fed([*range(10)], [*range(20, 20 + length)], 6)
    assert [*before, *after] == [*range(10), *range(20, 20 + length)][-7:]
    with pytest.raises(ConfigError, match="a continuation has 7 tokens, and the model reads 6"):
        _fed([1], [2] * 7, 6)
