"""Designs: balanced, distinct, and pure functions of seed and indices."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import make_rows, make_task, write_rows

from iclperm import Study, Task
from iclperm.errors import ConfigError, DataError
from iclperm.prompts.design import (
    draw,
    draw_natural_queries,
    draw_permutations,
    draw_queries,
    draw_set,
    draw_sets,
    keyed_permutation,
    keyed_sample,
)


@pytest.fixture
def colours(tmp_path):
    task = Task.load(make_task(tmp_path))
    return task, task.examples("train"), task.examples("test")


def draw_all(study, task, train, test):
    return draw(study, task, {"train": train, "test": test})


@given(seed=st.integers(0, 2**63 - 1), size=st.integers(0, 5), data=st.data())
@settings(max_examples=60, deadline=None)
def test_permutations_are_distinct_and_stay_when_there_are_more(seed, size, data):
    total = math.factorial(size)
    few = data.draw(st.integers(1, total))
    all_orders = draw_permutations(seed, total, size)
    assert len({tuple(row) for row in all_orders}) == total
    assert all(sorted(row) == list(range(size)) for row in all_orders)
    np.testing.assert_array_equal(draw_permutations(seed, few, size), all_orders[:few])


def test_permutations_are_uniform():
    counts = np.zeros((4, 4))
    for seed in range(2_000):
        counts[np.arange(4), draw_permutations(seed, 1, 4)[0]] += 1
    # Each of 16 cells is binomial(2000, 1/4): sd 19; 6 sd never happens by chance.
    assert abs(counts - 500).max() < 6 * 19.4


def test_more_permutations_than_orders_are_refused():
    with pytest.raises(ConfigError, match="permutations is 7, but 3 demonstrations have only 6 orders"):
        draw_permutations(0, 7, 3)
    with pytest.raises(ConfigError, match="permutations is 2, but 0 demonstrations have only 1 orders"):
        draw_permutations(0, 2, 0)


def test_where_every_k_has_its_own_the_remedy_is_to_leave_small_k_out():
    with pytest.raises(ConfigError, match=r"only 1 orders; leave k below 4 out of 'shots', such as 0,4,8,20$"):
        draw_permutations(0, 20, 1, " of 1")
    with pytest.raises(ConfigError, match="leave k below 2 out of 'shots', such as 0,2,4,10"):
        draw_permutations(0, 2, 1, " of 1")
    assert len(draw_permutations(0, 20, 4, " of 4")) == 20


@pytest.mark.parametrize("size", [0, 1, 2, 3, 5, 7, 9])
def test_sets_are_balanced_and_in_default_order(colours, size):
    task, train, _ = colours
    for index in range(5):
        rows = draw_set(3, index, size, task, train)
        counts = np.bincount(train.labels[rows], minlength=3)
        assert counts.sum() == size
        assert counts.max() - counts.min() <= 1
        assert len(set(rows.tolist())) == size
        shown = [(task.words[train.labels[row]], train.fields[row]["text"]) for row in rows]
        assert shown == sorted(shown)


def test_a_remainder_goes_to_every_class_in_turn(colours):
    task, train, _ = colours
    favoured = {int(train.labels[draw_set(0, index, 1, task, train)[0]]) for index in range(30)}
    assert favoured == {0, 1, 2}


def test_a_design_grows_without_changing(colours):
    task, train, test = colours
    small = draw_all(Study(sets=2, permutations=3, shots=6, queries=7, seed=5), task, train, test)
    large = draw_all(Study(sets=4, permutations=9, shots=6, queries=20, seed=5), task, train, test)
    np.testing.assert_array_equal(large.orderings[0].sets[:2], small.orderings[0].sets)
    np.testing.assert_array_equal(large.orderings[0].permutations[:3], small.orderings[0].permutations)
    np.testing.assert_array_equal(large.queries[0].rows[:7], small.queries[0].rows)
    other = draw_all(Study(sets=2, permutations=3, shots=6, queries=7, seed=6), task, train, test)
    assert not np.array_equal(other.orderings[0].sets, small.orderings[0].sets)
    assert not np.array_equal(other.orderings[0].permutations, small.orderings[0].permutations)
    assert not np.array_equal(other.queries[0].rows, small.queries[0].rows)


def test_nothing_depends_on_the_order_of_calls(colours):
    task, train, _ = colours
    backwards = [draw_set(1, index, 6, task, train) for index in reversed(range(4))]
    forwards = [draw_set(1, index, 6, task, train) for index in range(4)]
    np.testing.assert_array_equal(np.stack(backwards[::-1]), np.stack(forwards))


def test_the_draws_are_pinned():
    """The same seed must mean the same study in every version: these values may never change."""
    assert keyed_permutation(8, 0, "permutation", 0).tolist() == [4, 7, 3, 6, 2, 0, 1, 5]
    assert draw_permutations(1, 2, 4).tolist() == [[0, 1, 2, 3], [0, 1, 3, 2]]
    assert keyed_sample(1_000, 4, 0, "checked prompts").tolist() == [370, 449, 470, 582]
    task = Task.load("mini_news")
    assert draw_set(0, 0, 8, task, task.examples("train")).tolist() == [1878, 2019, 74, 95, 1855, 245, 8, 441]
    assert draw_set(3, 1, 7, task, task.examples("train")).tolist() == [1364, 2905, 2588, 1324, 1671, 2165, 2293]
    assert draw_queries(0, 4, task, task.examples("test"), set()).rows.tolist() == [624, 641, 521, 68]


def test_orderings_share_the_permutations(colours):
    task, train, test = colours
    design = draw_all(Study(sets=3, permutations=4, shots=[0, 6], queries=6), task, train, test)
    (group,) = design.orderings
    assert group.rows.shape == (3, 4, 6)
    for index_set, permutation in np.ndindex(3, 4):
        expected = group.sets[index_set][group.permutations[permutation]]
        np.testing.assert_array_equal(group.rows[index_set, permutation], expected)
        np.testing.assert_array_equal(design.demonstrations(index_set, permutation, 1), expected)
        assert design.demonstrations(index_set, permutation, 0).size == 0


def test_queries_are_balanced_distinct_and_never_demonstrations(tmp_path):
    path = make_task(tmp_path)
    repeated = [{"text": row["text"].upper() + " ", "label": row["label"]} for row in make_rows(1, 12)]
    write_rows(tmp_path / "test.jsonl", repeated + make_rows(2, 30))
    task = Task.load(path)
    train, test = task.examples("train"), task.examples("test")
    asked = draw_queries(0, 20, task, test, set(train.hashes))
    assert asked.num_excluded == 12
    assert asked.rows.min() >= 12
    assert len(set(asked.rows.tolist())) == 20
    assert asked.weights.tolist() == [1] * 20
    assert sorted(np.bincount(test.labels[asked.rows]).tolist()) == [6, 7, 7]


@pytest.mark.parametrize(("size", "total"), [(3, 8), (4, 12), (6, 1)])
def test_sets_differ_until_there_are_no_more(tmp_path, size, total):
    path = make_task(tmp_path)
    write_rows(tmp_path / "train.jsonl", make_rows(1, 6))  # two of each of three classes
    task = Task.load(path)
    train = task.examples("train")
    for seed in range(5):
        sets = draw_sets(seed, total, size, task, train)
        assert sets.shape == (total, size)
        assert len({frozenset(rows) for rows in sets.tolist()}) == total
        np.testing.assert_array_equal(draw_sets(seed, 1, size, task, train), sets[:1])
        np.testing.assert_array_equal(sets[0], draw_set(seed, 0, size, task, train))
    message = rf"only {total} different balanced sets of {size} demonstrations \(class 'Red' has 2 train examples\)"
    with pytest.raises(DataError, match=message):
        draw_sets(0, total + 1, size, task, train)
    with pytest.raises(ConfigError, match="sets is 2, but no demonstrations make only one set"):
        draw_sets(0, 2, 0, task, train)


def test_a_remainder_never_goes_to_a_class_that_has_no_more(tmp_path):
    path = make_task(tmp_path)
    rows = make_rows(1, 12)
    write_rows(tmp_path / "train.jsonl", [*(row for row in rows if row["label"] != "Blue"), rows[2]])
    task = Task.load(path)
    train = task.examples("train")
    for seed in range(20):
        counts = [np.bincount(train.labels[rows], minlength=3) for rows in draw_sets(seed, 6, 4, task, train)]
        assert {tuple(of_set.tolist()) for of_set in counts} <= {(2, 1, 1), (1, 2, 1)}
    with pytest.raises(DataError, match="class 'Blue' has 1 train examples, but k = 6 needs 2 of it"):
        draw_sets(0, 1, 6, task, train)


@pytest.fixture
def generated(tmp_path):
    answer = {"field": "label", "check": "exact"}
    fields = {"text": "text", "colour": "label"}
    wording = {"demonstration": "{{ colour }} is what {{ text }} is", "query": "{{ text }}", "max_new_tokens": 4}
    task = Task.load(make_task(tmp_path, labels=None, fields=fields, answer=answer, shots=8, **wording))
    return task, task.examples("train"), task.examples("test")


def test_sets_of_a_generated_task_are_drawn_from_all_and_ordered_by_text(generated):
    task, train, test = generated
    design = draw_all(Study(sets=40, permutations=3, queries=20), task, train, test)
    sets = design.orderings[0].sets
    assert sets.shape == (40, 8)
    for rows in sets:
        shown = [task.render_demonstration(train.fields[row], 0) for row in rows]
        assert shown == sorted(shown)
        assert len(set(rows.tolist())) == 8
    # Answers are no classes: no set has to hold them in equal numbers.
    assert len({tuple(sorted(train.answers[row] for row in rows)) for rows in sets}) > 10
    assert len(np.unique(sets)) == 60
    assert len(set(design.queries[0].rows.tolist())) == 20
    more = draw_all(Study(sets=50, permutations=3, queries=30), task, train, test)
    np.testing.assert_array_equal(more.orderings[0].sets[:40], sets)
    np.testing.assert_array_equal(more.queries[0].rows[:20], design.queries[0].rows)


def test_a_generated_task_with_too_few_examples_is_named(generated):
    task, train, test = generated
    with pytest.raises(DataError, match=r"task 'colours' has 60 train examples, but k = 61 needs 61; lower the shots"):
        draw_sets(0, 1, 61, task, train)
    with pytest.raises(DataError, match=r"only 60 different sets of 59 demonstrations \(there are 60 train examples\)"):
        draw_sets(0, 61, 59, task, train)
    why = r"\(all 30 repeat rows of another split, in the columns that are used\)"
    with pytest.raises(DataError, match=rf"task 'colours' has no usable test examples {why}, but 3 queries need 3;"):
        draw_queries(0, 3, task, test, set(test.hashes))


def test_a_query_never_reads_like_a_demonstration(tmp_path):
    shown = "Thing: {{ text.split('.')[0] }}\nColour:"
    path = make_task(tmp_path, query=shown, demonstration=shown + " {{ label }}")
    for split in ("train", "test"):
        texts = [f"Mine {split} {n}. x" for n in range(3)] + [f"Item {n}. Only in {split}." for n in range(27)]
        rows = [{**row, "text": text} for row, text in zip(make_rows(1, 30), texts, strict=True)]
        write_rows(tmp_path / f"{split}.jsonl", rows)
    task = Task.load(path)
    train, test = task.examples("train"), task.examples("test")
    asked = draw_queries(0, 3, task, test, set(train.hashes))
    assert asked.num_excluded == 27
    read = {task.render_query(test.fields[query]) for query in asked.rows}
    assert read == {f"Thing: Mine test {n}\nColour:" for n in range(3)}


def test_a_class_without_queries_has_a_remedy_that_works(tmp_path):
    path = make_task(tmp_path)
    write_rows(tmp_path / "test.jsonl", [row for row in make_rows(2, 30) if row["label"] != "Blue"])
    task = Task.load(path)
    with pytest.raises(DataError, match=r"class 'Blue' has no usable test .* 3 queries need 1 of it; add examples"):
        draw_queries(0, 3, task, task.examples("test"), set())


def test_a_class_with_too_few_examples_is_named(tmp_path):
    path = make_task(tmp_path)
    write_rows(tmp_path / "train.jsonl", [row for row in make_rows(1, 60) if row["label"] != "Blue"])
    task = Task.load(path)
    message = "task 'colours': class 'Blue' has 0 train examples, but k = 6 needs 2 of it"
    with pytest.raises(DataError, match=message):
        draw_set(0, 0, 6, task, task.examples("train"))


def test_a_short_class_is_oversampled_as_weights(tmp_path):
    path = make_task(tmp_path)
    write_rows(
        tmp_path / "test.jsonl", [row for number, row in enumerate(make_rows(2, 30)) if number < 9 or number % 3]
    )
    task = Task.load(path)
    test = task.examples("test")
    asked = draw_queries(0, 30, task, test, set())
    labels = test.labels[asked.rows]
    assert [asked.weights[labels == label].tolist() for label in range(3)] == [[4, 3, 3], [1] * 10, [1] * 10]
    assert len(set(asked.rows.tolist())) == len(asked.rows) == 23
    # What is asked first stays first, whatever comes later, and so does how much of it there is.
    for count in range(31):
        few = draw_queries(0, count, task, test, set())
        np.testing.assert_array_equal(few.rows, asked.rows[: asked.num_distinct(count)])
        np.testing.assert_array_equal(few.draws, asked.draws[:count])
        assert few.weights.sum() == count


def test_natural_queries_come_as_they_are_each_once(tmp_path):
    path = make_task(tmp_path)
    write_rows(
        tmp_path / "test.jsonl", [row for number, row in enumerate(make_rows(2, 600)) if number % 3 or number < 60]
    )
    task = Task.load(path)
    test = task.examples("test")
    share = float(np.mean(test.labels == 0))
    asked = draw_natural_queries(0, 300, task, test, set())
    assert asked.weights.tolist() == [1] * 300 == [1] * len(set(asked.rows.tolist()))
    # 300 of 420 rows: the hypergeometric standard deviation of a share is 0.0064; 5 of them hardly happen.
    assert share < 0.06
    assert abs(float(np.mean(test.labels[asked.rows] == 0)) - share) < 5 * 0.0065
    for count in (1, 7, 299):
        np.testing.assert_array_equal(draw_natural_queries(0, count, task, test, set()).rows, asked.rows[:count])
    assert draw_natural_queries(1, 300, task, test, set()).rows.tolist() != asked.rows.tolist()
    known = set(test.hashes[:20])
    fewer = draw_natural_queries(0, 400, task, test, known)
    assert fewer.num_excluded == 20
    assert fewer.rows.min() >= 20
    with pytest.raises(
        DataError, match=r"has 400 usable test examples, but 'queries' is 401 .* lower 'queries' to 400"
    ):
        draw_natural_queries(0, 401, task, test, known)


def test_a_natural_study_draws_both_splits_so(tmp_path):
    path = make_task(tmp_path, data={"train": "train.jsonl", "test": "test.jsonl", "dev": 0.3})
    task = Task.load(path)
    examples = {split: task.examples(split) for split in ("train", "test", "dev")}
    study = Study(sets=2, permutations=3, shots=3, queries=25, dev_queries=15, balance="natural")
    design = draw(study, task, examples)
    assert [queries.weights.tolist() for queries in design.queries] == [[1] * 25, [1] * 15]
    with pytest.raises(DataError, match="'dev_queries' is 99"):
        draw(study.model_copy(update={"dev_queries": 99}), task, examples)


def test_dev_queries_repeat_neither_demonstrations_nor_test_queries(tmp_path):
    rows = make_rows(2, 60)
    path = make_task(tmp_path, data={"train": "train.jsonl", "test": "test.jsonl", "dev": "dev.jsonl"})
    write_rows(tmp_path / "dev.jsonl", [*make_rows(1, 6), *rows])  # 6 demonstrations, 30 test rows, 30 others
    task = Task.load(path)
    examples = {split: task.examples(split) for split in ("train", "test", "dev")}
    design = draw(Study(sets=2, permutations=3, shots=3, queries=9, dev_queries=12, seed=5), task, examples)
    test, dev = design.queries
    assert (test.split, dev.split, len(test.rows), len(dev.rows), design.num_queries) == ("test", "dev", 9, 12, 21)
    assert dev.num_excluded == 36
    assert dev.rows.min() >= 36
    assert design.query_offsets.tolist() == [0, 9, 21]
    alone = draw(Study(sets=2, permutations=3, shots=3, queries=9, seed=5), task, examples)
    np.testing.assert_array_equal(alone.queries[0].rows, test.rows)


@given(size=st.integers(1, 10**12), count=st.integers(0, 50), seed=st.integers(0, 100))
def test_a_sample_is_distinct_ascending_and_below_its_bound(size, count, seed):
    sample = keyed_sample(size, count, seed, "test")
    assert len(sample) <= min(size, count)
    assert (np.diff(sample) > 0).all()
    assert not len(sample) or 0 <= sample[0] <= sample[-1] < size
