"""Queries with demonstrations of their own (`demonstrations: per query`): asked, forwarded, told and refused."""

import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scoring_server import scoring_server
from tolerances import TOLERANCES

import iclperm
from iclperm import Study
from iclperm.cli.arguments import value_of
from iclperm.demo import model_path
from iclperm.errors import ConfigError, DataError, IclpermError, RunError, RunInterrupted
from iclperm.prompts.cells import OwnCells
from iclperm.prompts.neighbours import read_neighbours
from iclperm.prompts.seams import PromptParts
from iclperm.reference.scoring import score_one
from iclperm.reference.trie import fed_prefixes
from iclperm.runs.layout import lay_out
from iclperm.runs.limits import WorkLimits
from iclperm.runs.run_texts import run_prompts
from iclperm.runs.setting import ResolvedStudy, model_tokenizer

SMALL_PARTS = WorkLimits(unit_tokens=(600, 600))
SIZES = {"shots": [0, 2, 4], "permutations": 3, "queries": 12}


CHAT = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def task():
    return iclperm.Task.load("mini_news")


@pytest.fixture(scope="module")
def neighbours(task):
    """Of two retrievers, [2, test rows, 6]; out of a few rows of train, so that queries have prefixes in common."""
    rng, size = np.random.default_rng(0), len(task.examples("test"))
    return np.stack([[rng.permutation(8)[:6] for _ in range(size)] for _ in range(2)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory, neighbours):
    folder = tmp_path_factory.mktemp("neighbours")
    np.save(folder / "one.npy", neighbours[0])
    np.save(folder / "two.npy", neighbours)
    return folder


@pytest.fixture(scope="module")
def run(folder):
    """Of several parts, in a folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        return iclperm.run(study_of(folder), folder / "run", limits=SMALL_PARTS)


def study_of(folder, name="one.npy", **changes):
    return Study(demonstrations="per query", neighbours=str(folder / name), **{**SIZES, **changes})


def prompts_by_the_oracle(study, task, neighbours, orders):
    """{(set, permutation, k, query): (text, token ids)}: whole texts put together of rows, and tokenised as wholes."""
    train, test = task.examples("train"), task.examples("test")
    tokenizer = model_tokenizer(model_path())
    asked = ResolvedStudy.of(study).design.queries[0].rows.tolist()
    texts = {}
    for s, of_retriever in enumerate(neighbours):
        for p, order in enumerate(orders):
            for k in study.shots:
                for q, row in enumerate(asked):
                    shown = [of_retriever[row][rank] for rank in order if rank < k]
                    fields, labels = [train.fields[one] for one in shown], [int(train.labels[one]) for one in shown]
                    said = task.render_demonstrations(fields, labels)
                    before = task.opening() + "".join(one + task.separator for one in said)
                    texts[s, p, k, q] = before + task.render_query(test.fields[row])
    return {cell: (text, tokenizer(text)["input_ids"]) for cell, text in texts.items()}


def labels_of(task):
    return model_tokenizer(model_path())(task.continuations(), add_special_tokens=False)["input_ids"]


def fed(prompts, task):
    """Distinct tokens of some prompts with all labels, by a dictionary of prefixes."""
    labels = labels_of(task)
    return len(fed_prefixes((ids, label) for ids in prompts for label in labels))


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    shots=st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True).map(sorted),
    order=st.sampled_from(["similar_last", "similar_first", "permuted"]),
    num_sets=st.integers(1, 2),
    num_rows=st.integers(6, 40),
)
def test_prompts_and_tokens_are_those_of_the_oracle(task, tmp_path_factory, seed, shots, order, num_sets, num_rows):
    rng, size = np.random.default_rng(seed), len(task.examples("test"))
    neighbours = np.stack([[rng.permutation(num_rows)[:5] for _ in range(size)] for _ in range(num_sets)])
    path = tmp_path_factory.mktemp("drawn")
    np.save(path / "n.npy", neighbours)
    permutations = 1 if order != "permuted" or max(shots) < 2 else 2
    study = study_of(path, "n.npy", shots=shots, sets=num_sets, order=order, permutations=permutations, queries=4)
    work = lay_out(ResolvedStudy.of(study))
    setting, own = work.setting, work.prompts.own
    assert isinstance(own, OwnCells)
    orders = {"similar_last": [range(4, -1, -1)], "similar_first": [range(5)]}.get(order)
    orders = orders or [setting.design.orderings[-1].permutations[p].tolist() for p in range(permutations)]
    expected = prompts_by_the_oracle(study, task, neighbours, orders)
    number_of = work.prompts.context_of
    for (s, p, k, q), (_, ids) in expected.items():
        context = number_of[s, p, shots.index(k)]
        (place,) = np.flatnonzero((own.pairs == (context, q)).all(axis=1))
        assert own[int(place)].prompt.tolist() == ids
        assert own.lengths[place] == len(ids)
    assert len(own) == len(np.unique(number_of)) * 4
    (part,) = work.parts
    assert len(part.cells) == len(own)
    assert work.tokens.unique == fed([ids for _, ids in expected.values()], task)
    assert work.prompts.num_contexts == len({text[: text.rindex("Article:")] for text, _ in expected.values()})


def test_what_is_forwarded_is_distinct_and_answered_as_by_transformers(run, task, folder, neighbours):
    orders = lay_out(ResolvedStudy.of(run.study)).setting.design.orderings[-1].permutations.tolist()
    expected = prompts_by_the_oracle(run.study, task, neighbours[:1], orders)
    whole = iclperm.run(study_of(folder))
    assert whole.report.num_parts == 1
    assert whole.report.tokens_forwarded == whole.report.tokens_unique == fed([i for _, i in expected.values()], task)
    parts = lay_out(ResolvedStudy.of(run.study, limits=SMALL_PARTS)).parts
    by_part = [fed([cell.prompt.tolist() for cell in part.cells], task) for part in parts]
    assert len(parts) > 3
    assert run.report.tokens_forwarded == run.report.tokens_unique == sum(by_part)
    assert whole.report.tokens_unique < sum(by_part) < 1.05 * whole.report.tokens_unique
    np.testing.assert_array_equal(run.correct, whole.correct)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path()).eval()
    labels = labels_of(task)
    scored = list(run.splits["test"].logprob_by_cell())
    for s, p, k, q in [(0, 0, 0, 3), (0, 1, 2, 5), (0, 2, 4, 0), (0, 0, 4, 11)]:
        found = scored[p * len(run.shots) + run.shots.index(k)][q]
        plain = [score_one(model, expected[s, p, k, q][1], label).logprob for label in labels]
        bounds = TOLERANCES["loglikelihood per token"]["float32"] * np.array([len(label) for label in labels])
        assert (np.abs(found - plain) <= bounds).all()


def test_parts_are_cut_where_no_demonstration_is_shared(task, tmp_path):
    rng, sizes = np.random.default_rng(1), [len(task.examples(split)) for split in ("test", "train")]
    np.save(tmp_path / "n.npy", np.stack([rng.permutation(sizes[1])[:4] for _ in range(sizes[0])]))
    work = lay_out(ResolvedStudy.of(study_of(tmp_path, "n.npy", queries=60), limits=SMALL_PARTS))
    cells, ends = work.growths[0].general, work.growths[0].cuts
    assert ends[-1] == len(cells) == sum(len(part.cells) for part in work.parts)
    first = [cells.contexts.members(*pair)[:1].tolist() for pair in cells.pairs.tolist()]
    assert len(ends) > 5
    assert not any(first[end] and first[end - 1] == first[end] for end in ends[:-1])
    assert len(cells.cuts(1, 10)) <= 11


def test_a_folder_continues_grows_and_is_verified(run, folder, tmp_path):
    study = study_of(folder)

    def progress(done, total):
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(RunInterrupted):
        iclperm.run(study, tmp_path / "run", progress=progress, limits=SMALL_PARTS)
    again = iclperm.run(study, tmp_path / "run", limits=SMALL_PARTS)
    assert again.report.num_parts_resumed == 1
    assert again.digest == run.digest == iclperm.open_run(tmp_path / "run").digest
    assert iclperm.verify(tmp_path / "run").damage == []
    for change in ({"queries": 20}, {"permutations": 5}):
        study = study.model_copy(update=change)
        grown = iclperm.run(study, tmp_path / "run", extend=True, limits=SMALL_PARTS)
    assert grown.digest == iclperm.run(study).digest
    assert (iclperm.verify(tmp_path / "run").damage, iclperm.status(tmp_path / "run").is_finished) == ([], True)
    np.save(tmp_path / "other.npy", np.load(folder / "one.npy")[:, ::-1])
    with pytest.raises(RunError, match=r"neighbours|another"):
        iclperm.run(study.model_copy(update={"neighbours": str(tmp_path / "other.npy")}), tmp_path / "run")
    with pytest.raises(RunError, match=r'study.order is "permuted" there and "similar_last" here'):
        iclperm.run(study_of(folder, order="similar_last", permutations=1), tmp_path / "run")


def test_prompts_are_told_by_query(run, task, neighbours, folder, tmp_path):
    orders = ResolvedStudy.of(run.study).design.orderings[-1].permutations.tolist()
    expected = prompts_by_the_oracle(run.study, task, neighbours[:1], orders)
    in_memory = iclperm.run(study_of(folder))
    for each in (run, in_memory):
        kept, _ = run_prompts(each)
        assert kept.own is not None
        for cell, (text, ids) in expected.items():
            s, p, k, q = cell
            assert kept.text(s, p, k, ("test", q)) == text
            assert kept.tokens(s, p, k, ("test", q)).ids.tolist() == ids
        told = each.prompt(index_set=0, permutation=1, shots=2, query=5)
        assert (told.text, list(told.token_ids)) == expected[0, 1, 2, 5]
        assert len(told.demonstrations) == 2
        with pytest.raises(ConfigError, match="demonstrations of its own; give the number of a test query"):
            each.prompt(index_set=0, permutation=1, shots=2)
    shown = iclperm.sample_prompt(run.study, permutation=2, shots=4, query=3)
    assert shown.text == expected[0, 2, 4, 3][0]
    with run.export(tmp_path / "answers.csv").open() as file:
        assert len(file.readlines()) == 1 + run.correct.size


def test_reports_say_what_order_and_selection_are(run, folder):
    found = run.findings()
    assert np.isnan(found.summary.spreads["rms"].selection)
    assert np.isfinite(found.summary.spreads["rms"].order)
    assert any("with one retriever sensitivity to selection is not defined" in note for note in run.warnings)
    assert found.over_shots.resampled
    curve = run.findings("curve")
    assert not any("'sets'" in note for note in curve.warnings)
    assert "another order also shows other demonstrations" not in str([table.caption for table in curve.tables(True)])
    for kind in ("search", "convergence", "transfer"):
        with pytest.raises(DataError, match="has demonstrations of its own, and a report of the kind"):
            run.findings(kind)
    with pytest.raises(DataError, match="has demonstrations of its own"):
        run.findings("features")
    two = iclperm.run(study_of(folder, "two.npy", sets=2))
    assert any("sets are retrievers" in note for note in two.warnings)
    np.testing.assert_array_equal(two.correct[:1], run.correct)
    assert np.isfinite(two.findings().summary.spreads["rms"].selection)
    one = iclperm.run(study_of(folder, order="similar_last", permutations=1))
    assert one.findings().conclusion()
    plan = iclperm.plan(one.study)
    assert (plan.tokens_unique, plan.num_prompts) == (one.report.tokens_unique, 36)


def test_labels_that_join_otherwise_are_asked_by_themselves(run, folder, monkeypatch):
    """Where parts do not join, prompts are tokenised as wholes: here some are taken for such."""

    def some(self, shown, queries):
        return (shown[:, 0] % 2 == 0) & (queries < 5)

    monkeypatch.setattr(PromptParts, "pairs_outside", some)
    other = iclperm.run(study_of(folder))
    assert other.report.num_general_cells == 8
    assert other.report.tokens_forwarded == other.report.tokens_unique
    np.testing.assert_array_equal(other.correct, run.correct)
    told = other.prompt(index_set=0, permutation=1, shots=2, query=3)
    assert told.text == run.prompt(index_set=0, permutation=1, shots=2, query=3).text


def test_generated_chat_and_other_ways(run, folder, tmp_path):
    generated = iclperm.run(study_of(folder, scoring="generate", max_new_tokens=3))
    assert generated.correct.shape == (1, 3, 3, 12)
    plain = iclperm.run(study_of(folder, plain=True))
    np.testing.assert_array_equal(plain.correct, run.correct)
    assert plain.report.tokens_forwarded == iclperm.plan(plain.study).plain_tokens
    tight = iclperm.run(study_of(folder, memory_budget="60MiB"))
    np.testing.assert_array_equal(tight.correct, run.correct)
    with pytest.raises(ConfigError, match=r"memory_budget is 4194304 bytes .* but even in packs of 8 tokens"):
        iclperm.plan(study_of(folder, memory_budget="4MiB"))
    shutil.copytree(model_path(), tmp_path / "chat")
    (tmp_path / "chat" / "chat_template.jinja").write_text(CHAT)
    for chat in ("single", "multiturn"):
        asked = iclperm.run(study_of(folder, model=str(tmp_path / "chat"), chat=chat, queries=4))
        told = asked.prompt(index_set=0, permutation=1, shots=4, query=2)
        assert len(told.demonstrations) == 4
        assert len(told.messages) == (1 if chat == "single" else 9)
        assert asked.report.tokens_forwarded == asked.report.tokens_unique


def test_an_endpoint_is_asked_the_same(run, folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path()).eval()
    with scoring_server(model, model_tokenizer(model_path())) as server:
        endpoint = {"base_url": server.url, "model": server.model, "api": "completions"}
        study = study_of(folder, endpoint=endpoint)
        assert iclperm.plan(study).bill is not None
        found = iclperm.run(study)
    np.testing.assert_array_equal(found.correct, run.correct)


@pytest.mark.parametrize("ending", [".npy", ".csv", ".jsonl", ".parquet"])
def test_files(ending, neighbours, tmp_path):
    path, one, two = tmp_path / f"n{ending}", neighbours[0, :7], neighbours[:, :7]
    for array in (one, two):
        if ending == ".csv" and array is two:
            continue
        lists = (one if array is one else np.moveaxis(two, 0, 1)).tolist()
        if ending == ".npy":
            np.save(path, array)
        elif ending == ".csv":
            np.savetxt(path, array, fmt="%d", delimiter=",")
        elif ending == ".jsonl":
            path.write_text("\n".join(map(json.dumps, lists)))
        else:
            pq.write_table(pa.table({"neighbours": lists}), path)
        np.testing.assert_array_equal(read_neighbours(path), array.reshape(-1, *one.shape))


def with_value(array, value):
    changed = array.copy()
    changed[4, 1] = value
    return changed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows[:-1], "has neighbours for 999 queries, but task 'mini_news' has 1,000 test rows"),
        (lambda rows: rows[:, :3], "has 3 neighbours a query, but the largest of 'shots' is 4; lower 'shots'"),
        (lambda rows: rows.astype(float), "holds float64 of shape"),
        (lambda rows: rows[0], "holds int64 of shape"),
        (lambda rows: with_value(rows, 10**6), "query 4: 1000000 is no row of train, which are 0 to"),
        (lambda rows: with_value(rows, -1), "query 4: -1 is no row of train"),
        (lambda rows: with_value(rows, rows[4, 0]), r"query 4: \d+ comes twice for this query"),
        (lambda rows: np.stack([rows, rows]), "holds neighbours of 2 retrievers, but 'sets' is 1; set it to 2"),
        (lambda rows: rows.astype(object), "holds no neighbours"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_in_a_line(change, message, neighbours, tmp_path):
    np.save(tmp_path / "n.npy", change(neighbours[0]))
    with pytest.raises(IclpermError, match=message) as raised:
        iclperm.plan(study_of(tmp_path, "n.npy"))
    assert "\n" not in str(raised.value)
    (tmp_path / "n.txt").write_text("")
    for name in ("n.txt", "none.npy"):
        with pytest.raises(IclpermError):
            read_neighbours(tmp_path / name)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"neighbours": None}, "name the file of each query's own: 'neighbours'"),
        (
            {"kind": "search", "dev_queries": 10},
            "search compares sets that all queries share; set 'kind'",
        ),
        ({"kind": "recommend"}, "a recommend compares sets"),
        ({"order": "similar_last"}, "'permutations' is 3, but the order similar_last is one; set it to 1"),
        ({"calibration": "contextual"}, "'calibration' is 'contextual', but its content-free queries"),
        ({"dev_queries": 5}, "'dev_queries' is 5, but neighbours are those of test queries"),
        ({"resample": "per_k"}, "'resample' is 'per_k'"),
        ({"design": "latin"}, "'design' is 'latin'"),
        ({"precision": "order_effect +- 0.01"}, "'precision' is"),
        ({"cells": "blocks", "queries_per_ordering": 5}, "'cells' is 'blocks'"),
        ({"demonstrations": None}, "'neighbours' is 'n.npy', which is for demonstrations of each query's own"),
    ],
)
def test_choices_that_do_not_go_together(choices, message):
    with pytest.raises(ConfigError, match=message):
        Study(**{"demonstrations": "per query", "neighbours": "n.npy", **SIZES, **choices})


def test_a_study_file_and_flags(folder, tmp_path):
    (tmp_path / "n.npy").write_bytes((folder / "one.npy").read_bytes())
    (tmp_path / "study.yaml").write_text("demonstrations: per query\nneighbours: n.npy\npermutations: 1\nshots: [2]\n")
    study = Study.from_file(tmp_path / "study.yaml")
    assert (study.neighbours, study.sets) == (str(tmp_path / "n.npy"), 1)
    assert ResolvedStudy.of(study).study.order == "similar_last"
    assert value_of("demonstrations", "per query") == "per query"
