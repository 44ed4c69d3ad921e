"""What a prompt to take away is worth on single labels, the rare ones above all."""

from collections import Counter

import pytest
from tiny import make_model, make_task

import iclperm
from iclperm import Study
from iclperm.errors import DataError


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of which the two test queries, as they come, leave a label out."""
    folder = tmp_path_factory.mktemp("by_label")
    sizes = {"sets": 2, "permutations": 2, "shots": 3, "queries": 2, "balance": "natural"}
    study = Study(task=str(make_task(folder)), model=str(make_model(folder / "model")), **sizes)
    return iclperm.run(study, folder / "run")


@pytest.mark.parametrize("cell", [(0, 0), (1, 1)])
def test_right_answers_are_counted_label_by_label(run, cell):
    prompt = run.prompt(index_set=cell[0], permutation=cell[1])
    rows = [row for row in run.to_arrow().to_pylist() if (row["set"], row["permutation"]) == cell]
    asked = Counter(row["gold"] for row in rows)
    right = Counter(row["gold"] for row in rows if row["correct"])
    assert prompt.by_label == {label: (right[label], asked[label]) for label in run.labels}
    assert prompt.commonest[1] == max(asked.values()) / len(rows)
    assert asked[prompt.commonest[0]] == max(asked.values())


def test_labels_that_are_not_asked_for_or_hardly_are_named(run):
    prompt = run.prompt(index_set=0, permutation=0)
    said = "\n".join(prompt.said())
    never = [label for label, (_, asked) in prompt.by_label.items() if not asked]
    assert never
    for label in never:
        assert f"no test query asks for {label!r}" in said or f"{label!r}" in said.split("no test query asks for ")[1]
    for label, (right, asked) in prompt.by_label.items():
        if asked:
            assert f"{right} of {asked} {label!r}" in said
            assert repr(label) in said.split("too few to tell how good it is: ")[1].splitlines()[0]
    assert f"cannot be told from always naming {prompt.commonest[0]!r}" in said  # of two answers


def test_a_prompt_that_is_plainly_better_is_not_belittled(run):
    one = run.prompt(index_set=0, permutation=0)
    better = iclperm.stats.intervals.wilson_interval(95, 100, 0.95)
    counts = {label: (31, 33) for label in run.labels}
    found = type(one)(**{**vars(one), "interval": better, "by_label": counts, "commonest": (run.labels[0], 1 / 3)})
    said = "\n".join(found.said())
    assert "always naming" not in said
    assert "too few" not in said
    assert "no test query" not in said
    worse = type(one)(**{**vars(found), "interval": iclperm.stats.intervals.wilson_interval(5, 100, 0.95)})
    assert f"that is worse than always naming {run.labels[0]!r}, which is right in 33.3%" in "\n".join(worse.said())
    many = {f"label {number}": (number, 30) for number in range(14)}
    said = "\n".join(type(one)(**{**vars(found), "by_label": many}).said())
    assert "right the 10 lowest of 14 labels: 0 of 30 'label 0'" in said
    assert "'label 10'" not in said


class TestDataThatChangedSince:
    """The folder keeps the texts of all prompts; an edited file must not cost anybody the prompt."""

    @pytest.fixture
    def edited(self, tmp_path):
        model, task = make_model(tmp_path / "model"), make_task(tmp_path)
        sizes = {"sets": 2, "permutations": 2, "shots": 3, "queries": 6}
        run = iclperm.run(Study(task=str(task), model=str(model), **sizes), tmp_path / "run")
        before = run.prompt(index_set=1, permutation=1)
        assert before.placeholders
        asked = run.prompt(index_set=1, permutation=1, query={"text": "A red car"})
        rows = (tmp_path / "train.jsonl").read_text()
        (tmp_path / "train.jsonl").write_text(rows.replace("number 1", "number 9"))
        return run, before, asked, task

    def test_it_is_the_same_prompt_and_says_so(self, edited):
        run, before, asked, _ = edited
        found = run.prompt(index_set=1, permutation=1)
        assert any("from the texts in the run's folder alone: the data of" in note for note in found.notes)
        assert type(found)(**{**vars(found), "notes": before.notes}) == before
        again = run.prompt(index_set=1, permutation=1, query={"text": "A red car"})
        assert again.text == asked.text
        assert again.text.endswith("Thing: A red car\nColour:")

    def test_not_with_another_wording(self, edited):
        run, _, _, task = edited
        task.write_text(task.read_text().replace("Colour:", "Hue:"))
        with pytest.raises(DataError, match="the wording of task"):
            run.prompt(index_set=1, permutation=1)

    def test_not_without_the_texts(self, edited):
        run, *_ = edited
        (run.folder / "texts.parquet").unlink()
        with pytest.raises(DataError, match=r"the data of .* is not what"):
            run.prompt(index_set=1, permutation=1)

    @pytest.mark.parametrize("shown", ["{{ text | upper }}", "{{ text[:200] }}", "{% if text %}{{ text }}{% endif %}"])
    def test_not_where_a_template_does_more_than_put_texts_in(self, tmp_path, shown):
        query = f"Thing: {shown}\nColour:"
        changes = {"query": query, "demonstration": f"{query} {{{{ label }}}}"}
        task = make_task(tmp_path, **changes)
        study = Study(task=str(task), model=str(make_model(tmp_path / "model")), sets=2, permutations=2, queries=6)
        run = iclperm.run(study, tmp_path / "run")
        (tmp_path / "train.jsonl").unlink()
        text = run.prompt(index_set=0, permutation=0, query=1).text
        assert "is number" in text.lower()  # from the folder
        with pytest.raises(DataError, match=r"train\.jsonl"):
            run.prompt(index_set=0, permutation=0)
