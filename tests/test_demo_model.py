"""The shipped demo model learns in context and depends on order; the shipped headlines come from their generator."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import iclperm
from iclperm.demo import data_path, model_path
from iclperm.engine.tokenizer import load_tokenizer
from iclperm.studies.choosing import choose

SPLITS = ("train", "dev", "test")
LABELS = ("World", "Sports", "Business", "Technology")
SCRIPTS = Path(__file__).resolve().parents[1] / "benchmarks" / "demo_model"


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"demo_model_{name}", SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


evaluate = load_script("evaluate")


def read(split: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (data_path() / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def scorer():
    model = AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32)
    return evaluate.LabelScorer(model, AutoTokenizer.from_pretrained(model_path()))


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(model_path())


def test_generator_reproduces_the_shipped_files_byte_for_byte(tmp_path):
    load_script("generate_mini_news").write_splits(tmp_path)
    for split in SPLITS:
        assert (tmp_path / f"{split}.jsonl").read_bytes() == (data_path() / f"{split}.jsonl").read_bytes()


def test_splits_are_disjoint_balanced_and_large_enough():
    splits = {split: read(split) for split in SPLITS}
    texts = [" ".join(item["text"].lower().split()) for items in splits.values() for item in items]
    assert len(set(texts)) == len(texts) >= 4000
    for items in splits.values():
        counts = Counter(item["label"] for item in items)
        assert set(counts) == set(LABELS)
        assert len(set(counts.values())) == 1
    assert len(splits["dev"]) >= 1000
    assert len(splits["test"]) >= 1000


def test_some_headlines_are_ambiguous():
    """The same template stands under both its topics: what follows 'tariffs on' or 'stadium in' cannot tell them."""
    items = read("train")
    for phrase, topics in (("raises tariffs on", {"World", "Business"}), (" stadium in ", {"Sports", "Business"})):
        assert {item["label"] for item in items if phrase in item["text"]} == topics


def test_model_folder_is_small_and_complete():
    names = {path.name for path in model_path().iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert (model_path() / "model.safetensors").stat().st_size <= 4_000_000


@pytest.mark.parametrize("load", [AutoTokenizer.from_pretrained, load_tokenizer])
def test_every_id_lies_inside_the_embedding(scorer, load):
    """The special ones too, whoever makes the tokenizer: a class that wants one not named would add it at the end."""
    tokenizer, config = load(model_path()), scorer.model.config
    special = {name: getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad", "unk")}
    assert special == {"bos": 0, "eos": 1, "pad": 2, "unk": 2}
    assert {name: special[name] for name in ("bos", "eos", "pad")} == {
        name: getattr(config, f"{name}_token_id") for name in ("bos", "eos", "pad")
    }
    assert set(tokenizer.all_special_ids) == set(special.values())
    num_rows = scorer.model.get_input_embeddings().num_embeddings
    assert max(tokenizer.get_vocab().values()) < len(tokenizer) <= num_rows == config.vocab_size


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_of_transformers_is_each_prompt_alone(scorer, side):
    tokenizer, train, test = AutoTokenizer.from_pretrained(model_path()), read("train"), read("test")
    tokenizer.padding_side = side
    prompts = [evaluate.render_context(train[:count]) + evaluate.render_query(test[count]) for count in (0, 1, 3, 6)]
    batch = tokenizer(prompts, padding=True, return_tensors="pt")
    assert (batch["input_ids"] == tokenizer.pad_token_id).equal(batch["attention_mask"] == 0)
    assert (batch["attention_mask"] == 0).any()
    places = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = scorer.model(**batch, position_ids=places).logits
        for row, prompt in zip(range(len(prompts)), prompts, strict=True):
            alone = scorer.model(input_ids=torch.tensor([tokenizer.encode(prompt)])).logits[0, -1]
            last = logits[row, int(batch["attention_mask"][row].nonzero().max())]
            np.testing.assert_allclose(last.numpy(), alone.numpy(), atol=1e-4)


def test_generated_answers_of_a_padded_batch_are_a_label_and_end(scorer):
    """By the blank line or the end of the text, and at once."""
    tokenizer, train, test = AutoTokenizer.from_pretrained(model_path()), read("train"), read("test")
    tokenizer.padding_side = "left"
    prompts = [evaluate.render_context(train[:count]) + evaluate.render_query(test[count]) for count in range(1, 13)]
    batch = tokenizer(prompts, padding=True, return_tensors="pt")
    with torch.no_grad():
        written = scorer.model.generate(**batch, max_new_tokens=2, do_sample=False)[:, batch["input_ids"].shape[1] :]
    (separator,) = tokenizer.encode("\n\n", add_special_tokens=False)
    assert {tokenizer.decode(ids[:1]) for ids in written} <= {f" {label}" for label in LABELS}
    assert set(written[:, 1].tolist()) <= {separator, tokenizer.eos_token_id}


def test_a_study_reads_every_generated_answer_and_none_is_cut_off():
    sizes = {"sets": 2, "permutations": 3, "queries": 12, "shots": [0, 1, 4], "seed": 2, "device": "cpu"}
    run = iclperm.run(iclperm.Study(task="mini_news", scoring="generate", max_new_tokens=8, **sizes))
    table = run.to_arrow().to_pydict()
    assert set(table["state"]) == {"ok"}
    assert set(table["finish"]) == {"stop"}
    assert set(table["prediction"]) == set(LABELS)
    assert [(at.shots, at.unparsed, at.missing, at.cut_off) for at in run.generation.by_shots] == [
        (0, 0, 0, 0), (1, 0, 0, 0), (4, 0, 0, 0)
    ]  # fmt: skip
    assert all(at.num_tokens <= 2 for at in run.generation.by_shots)
    assert not run.generation.warnings


def test_demonstrations_of_a_study_differ_in_worth():
    """No score that they are chosen by ties them all, in any set; nor does every choice of them do alike."""
    sizes = {"sets": 3, "permutations": 8, "queries": 40, "dev_queries": 40, "shots": 6, "seed": 2, "device": "cpu"}
    run = iclperm.run(iclperm.Study(kind="curve", task="mini_news", **sizes))
    chosen = choose(run, 3)
    assert {"marginal", "shapley"} <= set(chosen.scores)
    for name, score in chosen.scores.items():
        values = score.values.round(6)
        assert all(len(set(row[~np.isnan(row)])) > 1 for row in values), name
    alone = chosen.scores["single"].values.round(6)
    assert all(len(set(row[~np.isnan(row)])) >= 4 for row in alone)  # not merely which label is shown
    positions = {name: tuple(map(tuple, places)) for name, places in chosen.positions.items()}
    assert positions["top"] != positions["bottom"]


@pytest.mark.parametrize("label", LABELS)
def test_label_is_one_token(tokenizer, label):
    assert len(tokenizer.encode(f" {label}", add_special_tokens=False)) == 1


def test_prompt_begins_with_exactly_one_bos(tokenizer):
    ids = tokenizer.encode(evaluate.render_context(read("train")[:2]) + evaluate.render_query(read("test")[0]))
    assert ids.count(tokenizer.bos_token_id) == 1
    assert ids[0] == tokenizer.bos_token_id


def test_parts_of_a_prompt_have_the_same_ids_in_any_company(tokenizer):
    """Joint tokenisation equals the concatenation of the parts', so that query ids do not depend on the context."""
    train, test = read("train"), read("test")
    rng = np.random.default_rng(0)
    for query in test[:200]:
        demonstrations = [train[row] for row in rng.choice(len(train), size=3, replace=False)]
        parts = [piece for item in demonstrations for piece in (evaluate.render_context([item])[:-2], "\n\n")]
        parts.append(evaluate.render_query(query))
        alone = [token for part in parts for token in tokenizer.encode(part, add_special_tokens=False)]
        assert tokenizer.encode("".join(parts), add_special_tokens=False) == alone


def test_scorer_agrees_with_one_plain_prompt_at_a_time(scorer):
    demonstrations, queries = read("train")[:8], read("test")[:6]
    logits = scorer.label_logits(demonstrations, queries, batch_size=4)
    for query, row in zip(queries, logits, strict=True):
        prompt = evaluate.render_context(demonstrations) + evaluate.render_query(query)
        ids = torch.tensor([scorer.tokenizer.encode(prompt)])
        with torch.no_grad():
            plain = scorer.model(input_ids=ids).logits[0, -1, scorer.label_ids]
        np.testing.assert_allclose(row, plain.numpy(), atol=1e-4)


def test_accuracy_rises_with_demonstrations_and_stays_below_the_ceiling(scorer):
    queries = evaluate.balanced_queries(read("test"), 200)
    accuracy = evaluate.accuracy_by_shots(scorer, read("train"), queries, num_orderings=10, num_shots=(0, 8))
    assert accuracy[8].mean() >= accuracy[0].mean() + 0.15
    assert accuracy[8].mean() < 0.95


def test_order_matters_beyond_item_noise(scorer):
    queries = evaluate.balanced_queries(read("test"), 80)
    correct = evaluate.crossed_correctness(scorer, read("train"), queries, num_sets=6, num_permutations=12)
    bound = evaluate.order_variance_bound(evaluate.mean_squares(correct))
    assert evaluate.signed_root(bound) > 0.01


def test_order_effect_vanishes_where_answers_do_not_depend_on_order():
    """The estimator finds nothing in independent answers, although accuracy varies over permutations there too."""
    rng = np.random.default_rng(0)
    difficulty = rng.uniform(0.5, 1.0, size=400)
    correct = rng.random((10, 10, 400)) < difficulty
    assert correct.mean(axis=2).std(axis=1, ddof=1).mean() > 0.01
    assert evaluate.order_variance_bound(evaluate.mean_squares(correct)) < 0.01**2


def test_mean_squares_recover_the_variance_of_the_accuracy_matrix():
    """Identity: the mean row variance of A[S, P] is [MS_P + (S - 1) MS_SP] / S, with mean squares of A."""
    correct = np.random.default_rng(1).random((5, 7, 30)) < 0.7
    squares = evaluate.mean_squares(correct)
    expected = (squares.value["P"] + 4 * squares.value["SP"]) / 5 / 30
    assert correct.mean(axis=2).var(axis=1, ddof=1).mean() == pytest.approx(expected)
