"""The prompt to take away: the very tokens that were scored, or one line that says why not."""

import ast
import io
import json
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
import yaml
from click.testing import CliRunner
from tiny import byte_level_tokenizer, make_model, make_rows, make_task, write_rows

import iclperm
from iclperm import Study
from iclperm.cli import main as cli
from iclperm.errors import ConfigError, DataError, ModelError, RunError
from iclperm.prompts.contexts import context_id
from iclperm.runs.folder import RunFolder
from iclperm.runs.layout import lay_out
from iclperm.runs.setting import ResolvedStudy
from iclperm.tasks.task import Task

SIZES = {"sets": 2, "permutations": 3, "shots": [0, 3], "queries": 6, "seed": 3}
TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
GENERATED = {
    "labels": None,
    "fields": {"text": "text", "colour": "label"},
    "answer": {"field": "label", "check": "exact"},
    "demonstration": "Thing: {{ text }}\nColour: {{ colour }}",
    "max_new_tokens": 2,
}
STUDIES = {
    "labels": ({}, {}),
    "every k its own": ({"resample": "per_k"}, {}),
    "a single message": ({"chat": "single"}, {}),
    "turns": ({"chat": "multiturn"}, {"instruction": "Name the colour."}),
    "generated": ({}, GENERATED),
    "generated turns": ({"chat": "multiturn"}, GENERATED),
    "calibrated": ({"calibration": "contextual"}, {}),
    "first tokens": ({"scoring": "first_token"}, {"labels": ["Red", "Green", "Blue"]}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return make_model(tmp_path_factory.mktemp("model"), tokenizer)


@pytest.fixture
def call():
    def run(*arguments):
        done = CliRunner().invoke(cli.cli, [str(argument) for argument in arguments], standalone_mode=False)
        if done.exception is not None:
            raise done.exception
        return done.stdout, done.stderr

    return run


def run_of(folder, model, choices=None, changes=None, **sizes):
    task = make_task(folder, **(changes or {}))
    study = Study(**{"task": str(task), "model": str(model), **SIZES, **sizes, **(choices or {})})
    return iclperm.run(study, folder / "run")


@pytest.mark.parametrize("case", STUDIES)
def test_its_tokens_are_those_that_were_scored(case, tmp_path, model):
    run = run_of(tmp_path, model, *STUDIES[case])
    prompts = lay_out(ResolvedStudy.of(run.study)).prompts
    table = RunFolder.open(run.folder).table("demonstrations").to_pylist()
    seen = set()
    for s, p, k, q in ((0, 0, 1, 0), (1, 2, 1, 5), (0, 1, 0, 3), (1, 0, 1, 2)):
        shots = run.shots[k]
        prompt = run.prompt(index_set=s, permutation=p, shots=shots, query=q)
        context = prompts.context_of[s, p, k]
        general = {(cell.context, cell.query): cell.prompt for cell in prompts.general}
        joined = np.concatenate([prompts.contexts[context], prompts.queries[q]])
        assert prompt.token_ids == tuple(general.get((context, q), joined).tolist())
        assert prompt.context_ids == tuple(prompts.contexts[context].tolist())
        recorded = {
            name
            for row in table
            if (row["set"], row["permutation"]) == (s, p)
            for count, name in zip(row["shots"], row["contexts"], strict=True)
            if count == shots
        }
        assert recorded == {context_id(np.array(prompt.context_ids, dtype=np.int32))}
        assert len(prompt.demonstrations) == shots
        assert all(text in prompt.text for text in prompt.demonstrations) or run.study.chat == "multiturn"
        (run.folder / "texts.parquet").rename(tmp_path / "aside")
        assert run.prompt(index_set=s, permutation=p, shots=shots, query=q) == prompt  # of data and tokenizer
        (tmp_path / "aside").rename(run.folder / "texts.parquet")
        assert prompt.accuracy == pytest.approx(np.average(run.correct[s, p, k], weights=run.weights))
        seen.add(prompt.text)
    assert len(seen) == 4


@pytest.mark.parametrize("case", STUDIES)
def test_a_query_that_is_filled_in_makes_the_prompt_of_that_query(case, tmp_path, model):
    run = run_of(tmp_path, model, *STUDIES[case])
    task = Task.load(run.study.task)
    test = task.examples("test")
    empty = run.prompt(index_set=1, permutation=2)
    assert empty.placeholders == {"text": "<<text>>"}
    assert empty.token_ids is None
    assert not [note for note in empty.notes if "changes what it is given" in note]
    for number, row in list(enumerate(run.splits["test"].examples))[::3]:
        whole = run.prompt(index_set=1, permutation=2, query=number)
        assert empty.text.count("<<text>>") == 1
        assert empty.text.replace("<<text>>", test.fields[row]["text"]) == whole.text
        filled = json.loads(json.dumps(empty.messages).replace("<<text>>", test.fields[row]["text"]))
        assert filled == list(whole.messages)
        given = {name: value for name, value in test.fields[row].items() if name == "text"}
        assert run.prompt(index_set=1, permutation=2, query=given).text == whole.text


def test_a_marker_occurs_nowhere_else(tmp_path, model):
    make_task(tmp_path)
    rows = [{**row, "text": row["text"] + " <<text>>"} for row in make_rows(1, 60)]
    write_rows(tmp_path / "train.jsonl", rows)
    study = Study(task=str(tmp_path / "colours.yaml"), model=str(model), **SIZES)
    run = iclperm.run(study, tmp_path / "run")
    prompt = run.prompt(index_set=0, permutation=0)
    assert prompt.placeholders == {"text": "<<text-2>>"}
    assert prompt.text.count("<<text-2>>") == 1


def test_a_template_that_changes_its_text_is_told(tmp_path, model):
    changes = {
        "query": "Thing: {{ text.split(' ')[1] }}\nColour:",
        "demonstration": "Thing: {{ text.split(' ')[1] }}\nColour: {{ label }}",
    }
    make_task(tmp_path, **changes)
    for split, count in ((1, 60), (2, 30)):
        rows = [{**row, "text": f"{split} {split}{n} thing"} for n, row in enumerate(make_rows(split, count))]
        write_rows(tmp_path / f"{'train' if split == 1 else 'test'}.jsonl", rows)
    study = Study(task=str(tmp_path / "colours.yaml"), model=str(model), **SIZES)
    run = iclperm.run(study, tmp_path / "run")
    with pytest.raises(ConfigError, match="give the number of a test query"):
        run.prompt(index_set=0, permutation=0)
    cut = {key: text.replace(".split(' ')[1]", "[:4]") for key, text in changes.items()}
    task = yaml.safe_load((tmp_path / "colours.yaml").read_text()) | cut
    (tmp_path / "colours.yaml").write_text(yaml.safe_dump(task))
    run = iclperm.run(study, tmp_path / "cut")
    prompt = run.prompt(index_set=0, permutation=0)
    assert [note for note in prompt.notes if "the task's template changes what it is given" in note]


def test_other_data_or_words_are_one_line_not_another_prompt(tmp_path, model):
    run = run_of(tmp_path, model)
    (run.folder / "texts.parquet").unlink()  # a run of an earlier version
    task, train = tmp_path / "colours.yaml", tmp_path / "train.jsonl"
    before, rows = task.read_text(), train.read_text()
    task.write_text(before.replace("Colour:", "Hue:"))
    with pytest.raises(DataError, match=r"the wording of task .* is not what .*run was run with"):
        run.prompt(index_set=0, permutation=0)
    task.write_text(before)
    for changed in (rows.replace("number 10", "number 99", 1), rows.replace('"Red"', '"Green"', 1)):  # a text, a label
        train.write_text(changed)
        with pytest.raises(DataError, match=r"the data of .* is not what .*run was run with"):
            run.prompt(index_set=0, permutation=0)
    train.write_text(rows)
    (tmp_path / "test.jsonl").write_text((tmp_path / "test.jsonl").read_text().replace("The ", "A "))
    assert run.prompt(index_set=0, permutation=0).text
    with pytest.raises(DataError, match=r"the data of .* is not what .*run was run with"):
        run.prompt(index_set=0, permutation=0, query=0)


def test_another_tokenizer_is_one_line_and_none_is_told(tmp_path):
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = TEMPLATE
    model = make_model(tmp_path / "model", tokenizer)
    run = run_of(tmp_path, model, {"chat": "single"})
    plain = iclperm.run(run.study.model_copy(update={"chat": "none", "out": None}), tmp_path / "plain")
    for changed in (TEMPLATE.replace("{% for", "Hi {% for"), TEMPLATE.replace("[assistant]", "[bot]")):
        tokenizer.chat_template = changed
        tokenizer.save_pretrained(model)
        with pytest.raises(RunError, match=r"not those that .* was scored with"):
            run.prompt(index_set=0, permutation=0)
    kept = plain.prompt(index_set=0, permutation=0, query=0)
    for path in model.iterdir():
        path.unlink()
    model.rmdir()
    assert plain.prompt(index_set=0, permutation=0, query=0) == kept  # from the folder alone
    assert kept.token_ids
    (plain.folder / "texts.parquet").unlink()
    prompt = plain.prompt(index_set=0, permutation=0, query=0)
    assert prompt.text
    assert prompt.context_ids is prompt.token_ids is None
    assert any("tokens were not compared" in note for note in prompt.notes)
    with pytest.raises(ModelError):
        run.prompt(index_set=0, permutation=0)


def test_the_only_prompt_of_a_run_needs_no_name(tmp_path, model):
    run = run_of(tmp_path, model, sets=1, permutations=1, shots=[3])
    assert run.prompt().text == run.prompt(index_set=0, permutation=0).text
    with pytest.raises(ConfigError, match="recommends none of its 1 prompts"):
        run.prompt(shots=2)


def test_a_study_that_chose_nothing_must_be_asked(tmp_path, model):
    run = run_of(tmp_path, model)
    with pytest.raises(ConfigError, match=r"recommends none of its 12 prompts; name one with --set.*--best"):
        run.prompt()
    best = run.prompt(best=True)
    assert best.accuracy == pytest.approx((run.correct @ run.weights / run.weights.sum()).max())
    assert not best.is_held_out
    assert any("winner's curse" in note and "expect less" in note for note in best.notes)
    assert any("which this prompt was chosen by" in line for line in best.said())
    of_none = run.prompt(best=True, shots=0)
    assert of_none.shots == 0
    for choices, words in (
        ({"index_set": 0}, "which permutation"),
        ({"permutation": 0}, "which set"),
        ({"index_set": 0, "permutation": 0, "best": True}, "ask for the best"),
        ({"index_set": 2, "permutation": 0}, "no set 2: the run has sets 0 to 1"),
        ({"index_set": 0, "permutation": 3}, "no permutation 3"),
        ({"index_set": 0, "permutation": 0, "shots": 2}, "no prompts of 2 shots; it has 0, 3"),
        ({"index_set": 0, "permutation": 0, "query": 6}, "no query 6"),
        ({"index_set": 0, "permutation": 0, "query": {"words": ""}}, "no field 'words'"),
    ):
        with pytest.raises(ConfigError, match=words):
            run.prompt(**choices)


@pytest.fixture(scope="module")
def studies(tmp_path_factory):
    """A search, a selection and a transfer on the bundled model, by kind, with their folders."""
    place = tmp_path_factory.mktemp("studies")
    sizes = {"sets": 2, "permutations": 4, "queries": 12, "dev_queries": 12}
    folder = Task.load("mini_news")._folder
    task = yaml.safe_load((folder / "mini_news.yaml").read_text())
    task["data"] = {split: str((folder / path).resolve()) for split, path in task["data"].items()}
    task |= {"name": "topics", "demonstration": "Text: {{ text }}\nTopic: {{ label }}"}
    task["query"] = "Text: {{ text }}\nTopic:"
    (place / "topics.yaml").write_text(yaml.safe_dump(task))
    made = {
        "search": Study(kind="search", shots=4, **sizes),
        "selection": Study(kind="selection", shots=4, select=2, **sizes),
        "transfer": Study(kind="transfer", tasks=["mini_news", str(place / "topics.yaml")], shots=4, **sizes),
    }
    return {kind: iclperm.run(study, place / kind) for kind, study in made.items()}


def test_a_search_gives_the_ordering_that_it_chose(studies):
    run = studies["search"]
    choice = run.findings().choices[-1]
    prompt = run.prompt()
    assert (prompt.set, prompt.permutation, prompt.shots) == (choice.set, choice.permutation, 4)
    assert prompt.accuracy == pytest.approx(choice.accuracy)
    assert prompt.interval.low <= prompt.accuracy <= prompt.interval.high
    assert prompt.is_held_out
    dev = run.splits["dev"]
    on_dev = dev.correct[:, :, -1] @ dev.weights / dev.weights.sum()
    assert on_dev[prompt.set, prompt.permutation] == on_dev.max()
    assert run.prompt(best=True).text == prompt.text  # by the same queries
    assert any("winner's curse" in note for note in run.prompt(best=True).notes)


def test_a_selection_gives_the_demonstrations_that_it_chose_and_prints_them(studies, call):
    runs = studies["selection"]
    prompt, choice = runs.prompt(), runs.choice
    num_sets = 2
    place = choice.strategies.index("top") * num_sets
    assert place <= prompt.set < place + num_sets
    shown = runs.runs["chosen"].demonstrations
    texts = [shown.texts[row] for row in choice.rows[prompt.set].tolist()]
    assert sorted(re.search("Article: (.*)", text)[1] for text in prompt.demonstrations) == sorted(texts)
    source = runs.runs["source"].splits["dev"]
    by_set = (source.correct[:, :, -1] @ source.weights).mean(axis=1)
    assert prompt.set - place == by_set.argmax()
    assert any("no order was chosen" in note for note in prompt.notes)
    printed, _ = call("report", runs.folder)
    assert "The demonstrations chosen by 'top'" in printed
    words = "".join(printed.split())
    assert all("".join(text.split()) in words for text in texts)
    content = json.loads((runs.folder / "report.json").read_text())
    assert len(content["chosen"]) == choice.rows.size
    assert content["recommended"]["set"] == prompt.set
    assert runs.prompt("source", best=True).shots in runs.runs["source"].shots


def test_of_a_transfer_each_task_has_its_own(studies):
    runs = studies["transfer"]
    with pytest.raises(ConfigError, match=r"several runs \(mini_news, topics\); name one with --run"):
        runs.prompt()
    with pytest.raises(ConfigError, match="no run 'sports' in this study; it has mini_news, topics"):
        runs.prompt("sports")
    for name, word in (("mini_news", "Article: "), ("topics", "Text: ")):
        run = runs.runs[name]
        prompt = runs.prompt(name, query=1)
        assert prompt.text.startswith(word)
        assert prompt.text.count(word) == 5
        prompts = lay_out(ResolvedStudy.of(run.study)).prompts
        context = prompts.contexts[prompts.context_of[prompt.set, prompt.permutation, -1]]
        assert prompt.token_ids == tuple(np.concatenate([context, prompts.queries[1]]).tolist())


def test_the_command_prints_the_prompt_alone(studies, call, tmp_path, model):
    run = studies["search"]
    prompt = run.prompt()
    printed, told = call("prompt", run.folder)
    assert printed == prompt.text == str(prompt)
    assert "had no say in the choice" in told
    assert "replace <<text>>" in told
    assert "' World'" in told
    literal, _ = call("prompt", run.folder, "--format", "python")
    assert ast.literal_eval(literal) == prompt.text
    call("prompt", run.folder, "--query", 2, "--out", tmp_path / "prompt.txt")
    assert (tmp_path / "prompt.txt").read_bytes().decode() == run.prompt(query=2).text
    with pytest.raises(ConfigError, match="no chats; give the format text or python"):
        call("prompt", run.folder, "--format", "chat")
    with pytest.raises(ConfigError, match="leave out --run"):
        call("prompt", run.folder, "--run", "x")
    with pytest.raises(ConfigError, match="among what the run"):
        call("prompt", run.folder, "--out", run.folder / "plan.json")
    chat = run_of(tmp_path, model, {"chat": "multiturn"})
    printed, _ = call("prompt", chat.folder, "--set", 1, "--permutation", 0, "--query", 0)
    messages = json.loads(printed)
    assert [message["role"] for message in messages] == ["user", "assistant"] * 3 + ["user"]
    assert messages == list(chat.prompt(index_set=1, permutation=0, query=0).messages)
    literal, _ = call("prompt", chat.folder, "--set", 1, "--permutation", 0, "--query", 0, "--format", "python")
    assert ast.literal_eval(literal) == messages


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_prompt_steers_no_terminal(tmp_path, model, call, monkeypatch):
    task = make_task(tmp_path)
    hostile = "\x1b[31mred\x1b]0;title\x07\u202e\x9b2J"
    for name in ("train.jsonl", "test.jsonl"):
        rows = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        write_rows(tmp_path / name, [{**row, "text": f"{row['text']} {hostile}"} for row in rows])
    folder = iclperm.run(Study(task=str(task), model=str(model), **SIZES), tmp_path / "run").folder
    cell = ("--set", "0", "--permutation", "0", "--query", "0")
    printed, _ = call("prompt", folder, *cell)
    assert hostile in printed  # to the letter, where it is no terminal
    screen, told = Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", told)
    cli.cli(["prompt", str(folder), *cell], standalone_mode=False)
    said = screen.getvalue()
    assert not {"\x1b", "\x07", "\u202e", "\x9b"} & {*said}
    assert r"\x1b[31mred" in said
    assert "gets the prompt to the letter" in told.getvalue()


def test_a_chat_that_an_api_renders_has_no_text(studies):
    prompt = studies["search"].prompt()
    rendered = replace(prompt, text="", messages=({"role": "user", "content": "a"},))
    with pytest.raises(ConfigError, match="give the format chat"):
        rendered.formatted("text")
    assert json.loads(rendered.formatted()) == [{"role": "user", "content": "a"}]


def test_a_run_in_memory_has_its_prompts_too(tmp_path, model):
    task = make_task(tmp_path)
    run = iclperm.run(Study(task=str(task), model=str(model), **SIZES))
    kept = iclperm.run(run.study, tmp_path / "run")
    assert run.prompt(index_set=0, permutation=1) == kept.prompt(index_set=0, permutation=1)
