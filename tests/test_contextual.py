"""Contextual calibration: content-free queries under every context, and predictions freed of what they show."""

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tiny import byte_level_tokenizer, dummy_prefix_tokenizer, make_model, make_rows, make_task, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

import iclperm
from iclperm import Study
from iclperm.errors import ConfigError, DataError, RequestError, TokenizationError
from iclperm.prompts.design import CONTENT_FREE, CONTENT_FREE_INPUTS
from iclperm.prompts.encode import refuse_special_inputs
from iclperm.reference import contextual as reference
from iclperm.reference import curves
from iclperm.reference.scoring import score_one
from iclperm.runs import audit, layout, preview, scorers, setting
from iclperm.runs.limits import WorkLimits
from iclperm.stats.calibration import calibrated_scores, calibration_effect, content_free_prior
from iclperm.stats.convergence import mean_error
from iclperm.studies import calibration
from iclperm.study import states

LABELS = {"Red": "Red", "Green": "Green and lush", "Blue": "Blue"}
SHAPE = (2, 2, 2, 6, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("contextual")


@pytest.fixture(scope="module")
def study(folder):
    torch.set_num_threads(1)
    model = make_model(folder / "model", byte_level_tokenizer())
    data = {"train": "train.jsonl", "test": "test.jsonl", "dev": 0.3}
    task = make_task(folder, labels=LABELS, data=data)
    choices = {"sets": 2, "permutations": 2, "shots": [0, 3], "queries": 6, "dev_queries": 2}
    return Study(model=str(model), task=str(task), calibration="contextual", **choices)


@pytest.fixture(autouse=True, scope="module")
def engines():
    """One engine a model folder: its check on first use is tested elsewhere."""
    load, loaded = iclperm.Engine.from_pretrained, {}

    def from_pretrained(name, **choices):
        key = (str(name), *choices.values())
        if key not in loaded:
            loaded[key] = load(name, **choices)
        return loaded[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(iclperm.Engine, "from_pretrained", from_pretrained)
        yield


run_in_parts = partial(iclperm.run, limits=WorkLimits(unit_tokens=(60, 60)))
"""A context's content-free answers and its others are in different files."""


@pytest.fixture(scope="module")
def run(study, folder, engines):
    run = run_in_parts(study, folder / "run")
    assert run.report.num_parts > 3
    return run


def plain_scores(study, prompts):
    """Log-likelihoods [N, L] of plain prompts by the plain model."""
    model = AutoModelForCausalLM.from_pretrained(study.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(study.model)
    rows = []
    for prompt in prompts:
        ids = tokenizer(prompt)["input_ids"]
        wholes = [tokenizer(f"{prompt} {word}")["input_ids"] for word in LABELS.values()]
        assert all(whole[: len(ids)] == ids for whole in wholes)
        rows.append([score_one(model, ids, whole[len(ids) :]).logprob for whole in wholes])
    return rows


@pytest.mark.parametrize("normalize", ["sum", "mean"])
def test_a_run_is_what_plain_prompts_give(run, study, folder, normalize):
    run = iclperm.open_run(folder / "run", normalize=normalize)
    items, scale = run.splits["test"], run.splits["test"].scale.tolist()
    assert len(set(scale)) == (1 if normalize == "sum" else 2)
    changed = 0
    for cell in np.ndindex(SHAPE[:3]):
        index_set, permutation, place = cell
        where = {"index_set": index_set, "permutation": permutation, "shots": run.shots[place]}
        samples = [preview.sample_prompt(study, **where, query=query) for query in range(6)]
        context = samples[0].context
        blank = [f"{context}Thing: {text}\nColour:" for text in CONTENT_FREE_INPUTS]
        content_free = plain_scores(study, blank)
        np.testing.assert_allclose(run.content_free.label_logprob[cell], content_free, atol=1e-4, rtol=0)
        scores = plain_scores(study, [context + sample.query for sample in samples])
        np.testing.assert_allclose(items.label_logprob[cell], scores, atol=1e-4, rtol=0)
        shares = [reference.calibrated_shares(row, content_free, scale) for row in scores]
        place_of = items.context_of[cell]
        assert items.context_prediction[place_of].tolist() == list(map(reference.prediction, shares))
        changed += items.context_prediction[place_of].tolist() != items.uncalibrated_prediction[place_of].tolist()
        given_scores = list(items.scores_by_cell())[np.ravel_multi_index(cell, SHAPE[:3])]
        np.testing.assert_allclose(given_scores, np.log(shares), atol=1e-4)
        raw = [int(np.argmax(np.array(row) / scale)) for row in scores]
        assert items.uncalibrated.context_prediction[place_of].tolist() == raw
    assert changed


def test_calibrated_predictions_and_scores_agree(run):
    for items in run.splits.values():
        scores = np.array(list(items.scores_by_cell())).reshape(items.label_logprob.shape)
        np.testing.assert_array_equal(scores.argmax(axis=-1) == items.gold, items.correct)
        raw = np.array(list(items.uncalibrated.scores_by_cell())).reshape(items.label_logprob.shape)
        np.testing.assert_allclose(raw, items.label_logprob / items.scale, rtol=1e-6)
        np.testing.assert_array_equal(raw.argmax(axis=-1) == items.gold, items.uncalibrated.correct)
        last = list(items.scores_by_cell(slice(-1, None)))
        np.testing.assert_array_equal(last, scores[:, :, -1].reshape(-1, *scores.shape[3:]))


def test_content_free_queries_are_kept_apart(run, study):
    assert list(run.splits) == ["test", "dev"]
    assert run.correct.shape == SHAPE[:4]
    assert run.content_free.gold.tolist() == [-1, -1, -1]
    assert run.content_free.weights.tolist() == [0, 0, 0]
    assert not run.content_free.correct.any()
    plain = run_in_parts(study.model_copy(update={"calibration": "none"}))
    assert plain.content_free is None
    assert plain.calibration is None
    assert plain.uncalibrated is plain
    np.testing.assert_allclose(plain.label_logprob, run.label_logprob, atol=1e-5)
    np.testing.assert_array_equal(plain.correct, run.uncalibrated.correct)
    assert run.report.num_oversampled == plain.report.num_oversampled == 0
    assert run.digest != plain.digest
    assert (run.correct != run.uncalibrated.correct).any()
    assert run.uncalibrated.report_content()["calibration"] == "none"


def test_what_stands_in_the_files_hides_nothing(run, folder):
    queries = pq.read_table(folder / "run/queries.parquet").to_pylist()
    assert [row["split"] for row in queries] == ["test"] * 6 + ["dev"] * 2 + [CONTENT_FREE] * 3
    for number, row in enumerate(queries[-3:]):
        assert (row["query"], row["example"], row["gold"], row["label"], row["weight"]) == (
            number,
            number,
            None,
            None,
            0,
        )
    assert len({row["content_hash"] for row in queries[-3:]}) == 3
    items = pq.ParquetDataset(folder / "run/items").read().to_pylist()
    free = [row for row in items if row["split"] == CONTENT_FREE]
    assert len(free) == 3 * len(np.unique(run.splits["test"].context_of))
    assert all(row["gold"] is None and row["label_logprob"] is not None for row in free)
    assert all(row["gold"] is not None for row in items if row["split"] != CONTENT_FREE)
    table = run.to_pandas()
    assert len(table) == 8 * (6 + 2 + 3)
    free = table[table["split"] == CONTENT_FREE]
    assert free["gold"].isna().all()
    assert free["correct"].isna().all()
    assert not free["logprob_Red"].isna().any()
    assert set(free["prediction"]) <= set(LABELS.values())
    test = table[table["split"] == "test"]
    assert test["correct"].mean() == run.correct.mean()
    found = run.export(folder / "all.jsonl").read_text().splitlines()
    assert len(found) == len(table)


def test_a_folder_is_read_back_and_checked(run, study, folder):
    opened = iclperm.open_run(folder / "run")
    for name, items in opened.splits.items():
        np.testing.assert_array_equal(items.correct, run.splits[name].correct)
        np.testing.assert_array_equal(items.uncalibrated.correct, run.splits[name].uncalibrated.correct)
    assert opened.study.calibration == "contextual"
    found = audit.verify(folder / "run")
    assert not found.damage
    assert found.digest == run.digest == opened.digest == run_in_parts(study).digest
    assert audit.status(folder / "run").is_finished
    again = run_in_parts(study, folder / "run")
    assert again.report.num_parts_resumed == again.report.num_parts
    np.testing.assert_array_equal(again.correct, run.correct)
    with pytest.raises(iclperm.errors.RunError, match=r"study\.calibration is \"contextual\" there and \"none\" here"):
        run_in_parts(study.model_copy(update={"calibration": "none"}), folder / "run")


@pytest.mark.parametrize("sizes", [{"sets": 3}, {"queries": 9, "dev_queries": 4}])
def test_a_run_grows_and_content_free_queries_do_not(run, study, folder, tmp_path, sizes):
    def interrupt(done, total):
        if done == total - 1:
            raise KeyboardInterrupt

    large = study.model_copy(update=sizes)
    small = study.model_copy(update={"dev_queries": 0})
    run_in_parts(small, tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        run_in_parts(large, tmp_path / "run", extend=True, progress=interrupt)
    grown = run_in_parts(large, tmp_path / "run", extend=True)
    whole = run_in_parts(large)
    assert grown.digest == whole.digest == audit.verify(tmp_path / "run").digest
    np.testing.assert_array_equal(grown.correct, whole.correct)
    assert grown.content_free.gold.shape == (3,)
    items = pq.ParquetDataset(tmp_path / "run/items").read()
    num_free = sum(split == CONTENT_FREE for split in items["split"].to_pylist())
    assert num_free == 3 * len(np.unique(grown.splits["test"].context_of))


def test_two_processes_may_share_a_folder(run, study, tmp_path):
    digests = []

    def other(done, _total):
        if done == 1 and not digests:
            digests.append(run_in_parts(study, tmp_path / "run").digest)

    shared = run_in_parts(study, tmp_path / "run", progress=other)
    assert digests == [shared.digest] == [run.digest]
    for name, items in run.splits.items():
        np.testing.assert_array_equal(shared.splits[name].correct, items.correct)


def test_the_plan_counts_three_queries_a_context(study, run):
    planned = iclperm.plan(study)
    without = iclperm.plan(study.model_copy(update={"calibration": "none"}))
    assert (planned.num_content_free, without.num_content_free) == (3, 0)
    assert planned.num_queries == without.num_queries == planned.num_asked == 8
    assert planned.num_prompts - without.num_prompts == 3 * planned.num_contexts
    assert planned.tokens_unique == run.report.tokens_unique == run.report.tokens_forwarded > without.tokens_unique
    assert planned.disk_bytes > without.disk_bytes


def test_a_report_says_so_and_compares(run, folder):
    found = run.calibration
    test = run.splits["test"]
    for place, gain in enumerate(found.effect.gain):
        assert found.effect.accuracy[place] == pytest.approx(test.uncalibrated.correct[:, :, place].mean())
        assert found.effect.calibrated_accuracy[place] == pytest.approx(test.correct[:, :, place].mean())
        assert gain.estimate == pytest.approx(found.effect.calibrated_accuracy[place] - found.effect.accuracy[place])
    (sentence,) = found.conclusion()
    assert "calibrated on content-free inputs (Zhao et al. 2021): at k = 3 accuracy is" in sentence
    assert f"{100 * found.effect.calibrated_accuracy[-1]:.1f} % with it" in sentence
    (table,) = found.tables(full=True)
    assert [row[0] for row in table.rows] == ["0", "3"]
    assert table.rows[-1:] == found.tables(full=False)[0].rows
    run.write_report()
    content = json.loads((folder / "run/report.json").read_text())
    assert content["calibration"] == "contextual"
    assert content["calibrated"]["shots"] == [0, 3]
    assert content["calibrated"]["calibrated_accuracy"] == found.effect.calibrated_accuracy.tolist()
    with pytest.raises(DataError, match="no content-free answers; run its study with calibration: contextual"):
        calibration.findings(run.uncalibrated)


def test_a_context_without_a_content_free_answer_has_no_answers(run, folder, study, monkeypatch):
    ids, victim = run.splits["test"].context_of, int(run.splits["test"].context_of[1, 0, 1])
    item_rows = scorers.item_rows

    def failing(laid_out, part, contexts, queries, logprob, state):
        begin = laid_out.begins[CONTENT_FREE]
        name = laid_out.prompts.context_ids[laid_out.prompts.context_of[1, 0, 1]]
        hit = (laid_out.prompts.context_ids[contexts] == name) & (queries == begin + 1)
        return item_rows(
            laid_out, part, contexts, queries, logprob, np.where(hit, states.INVALID, state).astype(np.uint8)
        )

    monkeypatch.setattr(scorers, "item_rows", failing)
    broken = run_in_parts(study, folder / "broken")
    for found in (broken, iclperm.open_run(folder / "broken")):
        for name, items in found.splits.items():
            gone = ids == victim
            assert (items.state[gone] == states.INVALID).all()
            assert not items.state[~gone].any()
            assert not items.correct[gone].any()
            assert (items.context_prediction[victim] == -1).all()
            assert (items.uncalibrated.context_prediction[victim] == -1).all()
            np.testing.assert_array_equal(items.correct[~gone], run.splits[name].correct[~gone])
            np.testing.assert_array_equal(items.label_logprob, run.splits[name].label_logprob)  # as the model gave them
            scores = np.array(list(items.scores_by_cell())).reshape(items.label_logprob.shape)
            assert np.isnan(scores[gone]).all()
            assert not np.isnan(scores[~gone]).any()
        assert found.content_free.state.sum() == gone.sum()
    assert audit.verify(folder / "broken").digest == broken.digest != run.digest
    table = broken.to_pandas()
    missing = table[table["state"] == "invalid"]
    assert missing["prediction"].isna().all()
    assert missing["correct"].isna().all()
    with pytest.raises(DataError, match="set 1 under permutation 0 has no answer to any query"):
        broken.summary()
    assert "unknown" in broken.calibration.conclusion()[0]
    assert broken.calibration.tables(full=True)[0].rows[0][1:] == ("-",) * 7


def test_queries_without_a_token_are_scored_apart(folder, study, tmp_path):
    """The empty input under a template that shows nothing else."""
    write_rows(tmp_path / "train.jsonl", make_rows(1, 60))
    task = make_task(tmp_path, labels=LABELS, query="{{ text }}", demonstration="{{ text }} {{ label }}")
    bare = study.model_copy(update={"task": str(task), "dev_queries": 0})
    run = run_in_parts(bare)
    assert run.report.num_general_cells >= len(np.unique(run.splits["test"].context_of))
    assert run.report.tokens_forwarded == iclperm.plan(bare).tokens_unique
    context = preview.sample_prompt(bare).context
    expected = plain_scores(bare, [context + text for text in CONTENT_FREE_INPUTS])
    np.testing.assert_allclose(run.content_free.label_logprob[0, 0, -1], expected, atol=1e-4, rtol=0)


def test_other_tokenizers_and_fields_will_do(tmp_path, study):
    rows = [{**row, "text": [row["text"], "so", 3]} for row in make_rows(1, 60)]
    tests = [{**row, "text": [row["text"], "so", 4]} for row in make_rows(2, 30)]
    task = make_task(
        tmp_path,
        query="{% for part in text %}{{ part }};{% endfor %} Colour:",
        demonstration="{{ text[0] }}: {{ label }}",
    )
    write_rows(tmp_path / "train.jsonl", rows)
    write_rows(tmp_path / "test.jsonl", tests)
    model = make_model(tmp_path / "model", dummy_prefix_tokenizer())
    listed = study.model_copy(update={"task": str(task), "model": str(model), "dev_queries": 0})
    prompts = [preview.sample_prompt(listed, query=6 + number).query for number in range(3)]
    assert prompts == ["N/A;N/A;N/A; Colour:", ";;; Colour:", "[MASK];[MASK];[MASK]; Colour:"]
    run = run_in_parts(listed)
    assert not run.state.any()
    assert run.report.num_general_cells > 0


def test_what_cannot_be_calibrated_is_refused(tmp_path, study):
    here = study.model_copy(update={"task": str(tmp_path / "colours.yaml"), "dev_queries": 0})
    make_task(tmp_path, query="Last {{ text.split()[0][0] }}:")
    with pytest.raises(
        ConfigError, match=r"with '' in every field the template 'query' cannot be rendered: .*; set cal"
    ):
        iclperm.plan(here)
    make_task(tmp_path)
    write_rows(tmp_path / "test.jsonl", [{**row, "text": f"a {place}"} for place, row in enumerate(make_rows(2, 9))])
    fed = layout.lay_out(setting.ResolvedStudy.of(here)).prompts.fed_tokens()
    assert fed[-3:].max() > fed[:-3].max()
    narrow = make_model(tmp_path / "narrow", window=int(fed[:-3].max()))
    for on_overlong in ("drop", "error"):
        with pytest.raises(DataError, match=r"its content-free queries make prompts longer than the context window of"):
            iclperm.plan(here.model_copy(update={"model": str(narrow), "on_overlong": on_overlong}))
    assert iclperm.plan(here.model_copy(update={"model": str(narrow), "calibration": "none"})).num_overlong == 0
    with pytest.raises(ConfigError, match="calibration"):
        Study(calibration="contextul")

    def encoder(texts):
        if "[MASK]" in texts:
            raise TokenizationError("special")

    with pytest.raises(TokenizationError, match=r"its content-free input '\[MASK\]' is a special token"):
        refuse_special_inputs(encoder)


logprobs = st.integers(2, 4).flatmap(
    lambda num: st.tuples(
        hnp.arrays(np.float64, st.tuples(st.integers(1, 4), st.just(num)), elements=st.floats(-12, 0, width=32)),
        hnp.arrays(np.float64, st.tuples(st.integers(1, 3), st.just(num)), elements=st.floats(-12, 0, width=32)),
        hnp.arrays(np.float64, num, elements=st.sampled_from([1.0, 2.0, 5.0])),
    )
)


class TestTheStatistic:
    @given(logprobs)
    @settings(max_examples=60)
    def test_agrees_with_plain_loops(self, arrays):
        scores, free, scale = arrays
        found = calibrated_scores(scores / scale, content_free_prior(free, scale))
        expected = [reference.calibrated_shares(row, free.tolist(), scale.tolist()) for row in scores.tolist()]
        np.testing.assert_allclose(np.exp(found), expected, rtol=1e-9, atol=1e-300)

    @given(logprobs)
    @settings(max_examples=30)
    def test_is_a_distribution_that_ignores_constants_and_the_order_of_inputs(self, arrays):
        scores, free, _ = arrays
        prior = content_free_prior(free)
        np.testing.assert_allclose(np.exp(prior).sum(), 1)
        found = calibrated_scores(scores, prior)
        np.testing.assert_allclose(np.exp(found).sum(axis=-1), 1)
        np.testing.assert_allclose(calibrated_scores(scores - 3, content_free_prior(free[::-1] + 2)), found, atol=1e-9)

    def test_content_free_answers_that_prefer_nothing_change_nothing(self):
        scores = np.log([[0.7, 0.2, 0.1], [0.2, 0.3, 0.5]])
        np.testing.assert_allclose(calibrated_scores(scores, content_free_prior(np.full((3, 3), -4.0))), scores)

    def test_a_known_bias_is_taken_out(self):
        rng = np.random.default_rng([0, 1])
        truth = rng.integers(3, size=(4, 5, 200))
        signal = np.eye(3)[truth] * 2 + rng.normal(size=(4, 5, 200, 3)) * 0.1
        bias = rng.normal(size=(4, 5, 1, 3)) * 4
        biased = signal + bias
        freed = calibrated_scores(biased, content_free_prior(np.repeat(bias, 3, axis=-2))[..., None, :])
        assert (biased.argmax(axis=-1) == truth).mean() < 0.7
        np.testing.assert_array_equal(freed.argmax(axis=-1), truth)

    def test_what_is_missing_stays_missing(self):
        free = np.array([[[-1.0, -2.0], [np.nan, np.nan]], [[-1.0, -2.0], [-2.0, -1.0]]])
        prior = content_free_prior(free)
        assert np.isnan(prior).all(axis=-1).tolist() == [True, False]
        assert np.isnan(calibrated_scores(np.zeros((2, 2)), prior)).all(axis=-1).tolist() == [True, False]
        with pytest.raises(RequestError, match="scale must be 2 positive numbers"):
            content_free_prior(free, [1.0])


class TestTheEffect:
    @staticmethod
    def answers(seed, shape=(4, 3, 2, 30), shares=(0.5, 0.7)):
        rng = np.random.default_rng([seed, 2])
        return [(rng.random(shape) < share).astype(np.uint8) for share in shares]

    def test_is_the_difference_of_two_accuracies_over_the_same_queries(self):
        raw, freed = self.answers(0)
        for items in (raw, freed):
            items[:, :, 0] = items[:1, :1, 0]  # k = 0 is one context
        state = np.zeros(raw.shape, np.uint8)
        state[..., 4] = states.INVALID
        weights = np.arange(30) % 3 + 1
        found = calibration_effect(raw, freed, state, shots=(0, 4), weights=weights)
        kept = np.arange(30) != 4
        for place in range(2):
            cells = [np.average(a[:, :, place][..., kept], axis=-1, weights=weights[kept]) for a in (raw, freed)]
            assert found.accuracy[place] == pytest.approx(cells[0].mean())
            assert found.gain[place].estimate == pytest.approx(cells[1].mean() - cells[0].mean())
            assert found.calibrated_order[place] == pytest.approx(cells[1].std(axis=1, ddof=1).mean())
            assert found.calibrated_selection[place] == pytest.approx(cells[1].std(axis=0, ddof=1).mean())
            assert found.order[place] == pytest.approx(cells[0].std(axis=1, ddof=1).mean())
        assert found.num_queries == 29
        assert found.dropped == pytest.approx(weights[4] / weights.sum())
        order = np.random.default_rng(3).permutation(30)
        turned = calibration_effect(
            raw[..., order], freed[..., order], state[..., order], shots=(0, 4), weights=weights[order]
        )
        np.testing.assert_allclose(turned.gain, found.gain)

    def test_a_query_of_any_weight_is_one_draw(self):
        raw, freed = self.answers(1, (3, 2, 1, 20))
        twice = calibration_effect(raw, freed, shots=(4,), weights=np.full(20, 2)).gain
        np.testing.assert_allclose(twice, calibration_effect(raw, freed, shots=(4,)).gain)

    def test_over_queries_alone_it_is_the_textbook_interval(self):
        raw, freed = self.answers(2, (1, 1, 1, 40))
        (gain,) = calibration_effect(raw, freed, shots=(0,)).gain
        difference = freed[0, 0, 0].astype(float) - raw[0, 0, 0]
        half = 2.0227 * difference.std(ddof=1) / np.sqrt(40)  # t of 39 degrees
        assert gain.high - gain.estimate == pytest.approx(half, rel=1e-4)

    def test_its_interval_holds_the_true_gain_about_as_often_as_it_says(self):
        rng = np.random.default_rng([4, 4])
        held = 0
        for _ in range(200):
            by_set, by_query = rng.normal(size=(8, 1, 1, 1)) * 0.05, rng.normal(size=60) * 0.1
            raw = rng.random((8, 3, 1, 60)) < 0.5
            freed = rng.random((8, 3, 1, 60)) < np.clip(0.6 + by_set + by_query, 0, 1)
            (gain,) = calibration_effect(raw, freed, shots=(2,)).gain
            held += gain.low <= 0.1 <= gain.high
        assert 0.9 < held / 200 <= 1

    def test_its_interval_is_for_other_permutations_too(self):
        """Both runs have effects of permutations that the sets share; over sets and queries alone .68 hold 0."""
        rng = np.random.default_rng([4, 5])
        held = 0
        for _ in range(150):
            chance = 0.6 + 0.06 * rng.normal(size=(2, 1, 10, 1, 1)) + 0.03 * rng.normal(size=(2, 10, 10, 1, 1))
            raw, freed = (rng.random((2, 10, 10, 1, 200)) < chance).astype(np.uint8)
            (gain,) = calibration_effect(raw, freed, shots=(2,)).gain
            expected = mean_error(freed[:, :, 0].astype(float) - raw[:, :, 0]).interval()
            assert gain == pytest.approx(expected)
            held += gain.low <= 0 <= gain.high
        assert 0.9 < held / 150 <= 1

    def test_nothing_changed_is_no_gain_but_not_beyond_doubt(self):
        raw, _ = self.answers(5)
        found = calibration_effect(raw, raw, shots=(1, 2))
        half = 4.302653 * curves.unseen_error(30)  # t of 2 degrees
        assert [gain.estimate for gain in found.gain] == [0, 0]
        for gain in found.gain:
            assert (-gain.low, gain.high) == pytest.approx((half, half), rel=1e-6)

    def test_small_designs_say_what_they_cannot(self):
        raw, freed = self.answers(6, (1, 1, 1, 1))
        found = calibration_effect(raw, freed, shots=(3,))
        assert np.isnan([found.order[0], found.selection[0], found.gain[0].low, found.gain[0].high]).all()
        none = calibration_effect(raw, freed, np.ones(raw.shape, int), shots=(3,))
        assert np.isnan(none.gain[0].estimate)
        assert np.isnan([none.accuracy[0], none.calibrated_order[0]]).all()
        with pytest.raises(RequestError, match=r"one shape \[S, P, K, Q\] with K = 2"):
            calibration_effect(raw, freed, shots=(1, 2))


def test_two_sets_of_items_with_and_without_are_equal_where_there_is_no_prior(run):
    items = run.splits["test"]
    plain = replace(items, prior=None, uncalibrated_prediction=None)
    assert plain.uncalibrated is plain
