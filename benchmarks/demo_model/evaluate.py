"""Measure the demo model on the untouched test split with plain transformers.

Run ``python benchmarks/demo_model/evaluate.py``. It prints accuracy by number of shots, and for k = 8 the accuracy of
every set under every permutation, the variance components of the crossed design, and the order effect net of item
noise with its lower 95 % bound. Demonstrations come from the train split; the queries are the first test items in
file order.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from scipy import stats
from transformers import AutoTokenizer, Cache, PreTrainedTokenizerBase, Qwen2ForCausalLM

DEMO_FOLDER = Path(__file__).resolve().parents[2] / "iclperm" / "demo"
LABELS = ("Business", "Sports", "Technology", "World")
NUM_SHOTS = (0, 1, 2, 4, 8, 12)

Item = Mapping[str, str]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]


def read_split(split: str, folder: Path) -> list[dict[str, str]]:
    """Read one split of mini_news: records with ``text`` and ``label``."""
    with (folder / f"{split}.jsonl").open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def render_context(demonstrations: Sequence[Item]) -> str:
    """Labelled demonstrations, a blank line after each; empty for none."""
    return "".join(f"Article: {item['text']}\nAnswer: {item['label']}\n\n" for item in demonstrations)


def render_query(query: Item) -> str:
    """The query block; the label follows as a continuation that begins with a space."""
    return f"Article: {query['text']}\nAnswer:"


class LabelScorer:
    """Predicts a label by the highest logit among the label tokens after the prompt."""

    def __init__(self, model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, labels: Sequence[str] = LABELS):
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.label_ids = [self._only_token(f" {label}") for label in labels]
        self.labels = tuple(labels)

    def _only_token(self, text: str) -> int:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        if len(ids) != 1:
            raise ValueError(f"label {text!r} is {len(ids)} tokens, not one")
        return ids[0]

    @torch.no_grad()
    def label_logits(
        self, demonstrations: Sequence[Item], queries: Sequence[Item], batch_size: int = 128
    ) -> FloatArray:
        """Logits of the labels after one context and each query, shape [Q, L].

        The context runs once; batches of queries, padded on the right, continue from copies of its keys and values.
        """
        context_ids = torch.tensor([self.tokenizer.encode(render_context(demonstrations))])
        context = self.model.model(input_ids=context_ids, use_cache=True).past_key_values
        query_ids = [self.tokenizer.encode(render_query(query), add_special_tokens=False) for query in queries]
        batches = [query_ids[start : start + batch_size] for start in range(0, len(query_ids), batch_size)]
        return np.concatenate([self._continue(context, batch) for batch in batches])

    def _continue(self, context: Cache, batch: list[list[int]]) -> FloatArray:
        cache = copy.deepcopy(context)
        cache.batch_repeat_interleave(len(batch))
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in batch], batch_first=True)
        hidden = self.model.model(input_ids=ids, past_key_values=cache, use_cache=True).last_hidden_state
        last = hidden[torch.arange(len(batch)), torch.tensor([len(row) - 1 for row in batch])]
        logits: FloatArray = self.model.lm_head(last)[:, self.label_ids].double().numpy()
        return logits

    def correct(self, contexts: Sequence[Sequence[Item]], queries: Sequence[Item]) -> BoolArray:
        """Whether the prediction is the label of the query, for every context and query, shape [C, Q]."""
        predicted = np.array([self.label_logits(context, queries).argmax(axis=1) for context in contexts])
        truth = np.array([self.labels.index(query["label"]) for query in queries])
        hits: BoolArray = predicted == truth
        return hits


def draw_set(items: Sequence[Item], per_class: int, rng: np.random.Generator) -> list[Item]:
    """Draw a balanced demonstration set in default order: by label, then by text."""
    drawn: list[Item] = []
    for label in LABELS:
        members = [item for item in items if item["label"] == label]
        drawn += [members[row] for row in rng.choice(len(members), size=per_class, replace=False)]
    return sorted(drawn, key=lambda item: (item["label"], item["text"]))


def draw_permutations(num_permutations: int, size: int, rng: np.random.Generator) -> list[tuple[int, ...]]:
    """Draw distinct permutations of ``size`` places."""
    drawn: dict[tuple[int, ...], None] = {}
    while len(drawn) < num_permutations:
        drawn[tuple(int(place) for place in rng.permutation(size))] = None
    return list(drawn)


def balanced_queries(items: Sequence[Item], num_queries: int) -> list[Item]:
    """The first items of each label in file order, equally many of each."""
    by_label = [[item for item in items if item["label"] == label] for label in LABELS]
    return [item for members in by_label for item in members[: num_queries // len(LABELS)]]


def accuracy_by_shots(
    scorer: LabelScorer,
    pool: Sequence[Item],
    queries: Sequence[Item],
    num_orderings: int,
    num_shots: Sequence[int] = NUM_SHOTS,
    seed: int = 0,
) -> dict[int, FloatArray]:
    """Accuracy by k of the first k demonstrations of random orderings of balanced sets of 12, each [orderings]."""
    rng = np.random.default_rng(seed)
    sets = [draw_set(pool, 3, rng) for _ in range(num_orderings)]
    orderings = [[drawn[place] for place in rng.permutation(len(drawn))] for drawn in sets]
    contexts = {k: [ordering[:k] for ordering in orderings] if k else [[]] for k in num_shots}
    return {k: scorer.correct(contexts[k], queries).mean(axis=1) for k in num_shots}


def crossed_correctness(
    scorer: LabelScorer,
    pool: Sequence[Item],
    queries: Sequence[Item],
    num_sets: int = 10,
    num_permutations: int = 10,
    seed: int = 0,
) -> BoolArray:
    """Correctness [S, P, Q] at k = 8: two demonstrations a class, the same index permutations applied to each set."""
    rng = np.random.default_rng(seed)
    sets = [draw_set(pool, 2, rng) for _ in range(num_sets)]
    permutations = draw_permutations(num_permutations, 2 * len(LABELS), rng)
    contexts = [[drawn[place] for place in permutation] for drawn in sets for permutation in permutations]
    return scorer.correct(contexts, queries).reshape(num_sets, num_permutations, len(queries))


@dataclass(frozen=True)
class MeanSquares:
    """Mean squares and degrees of freedom of a crossed design of sets, permutations and items, one answer a cell."""

    shape: tuple[int, int, int]
    value: dict[str, float]
    freedom: dict[str, int]


def mean_squares(correct: BoolArray) -> MeanSquares:
    """The seven mean squares of ``correct`` [S, P, Q], by effect: S, P, I, SP, SI, PI, SPI."""
    axes = {"S": 0, "P": 1, "I": 2}
    data = correct.astype(np.float64)
    effects: dict[str, FloatArray] = {"": data.mean(keepdims=True)}
    value, freedom = {}, {}
    for name in ("S", "P", "I", "SP", "SI", "PI", "SPI"):
        means = data.mean(axis=tuple(axis for letter, axis in axes.items() if letter not in name), keepdims=True)
        effects[name] = means - sum(effect for other, effect in effects.items() if set(other) < set(name))
        freedom[name] = int(np.prod([data.shape[axes[letter]] - 1 for letter in name]))
        cells_per_level = data.size / effects[name].size
        value[name] = float(cells_per_level * (effects[name] ** 2).sum() / freedom[name])
    return MeanSquares((data.shape[0], data.shape[1], data.shape[2]), value, freedom)


def variance_components(squares: MeanSquares) -> dict[str, float]:
    """Unclipped variance components of the crossed random-effects model."""
    num_sets, num_permutations, num_queries = squares.shape
    ms = squares.value
    return {
        "S": (ms["S"] - ms["SP"] - ms["SI"] + ms["SPI"]) / (num_permutations * num_queries),
        "P": (ms["P"] - ms["SP"] - ms["PI"] + ms["SPI"]) / (num_sets * num_queries),
        "I": (ms["I"] - ms["SI"] - ms["PI"] + ms["SPI"]) / (num_sets * num_permutations),
        "SP": (ms["SP"] - ms["SPI"]) / num_queries,
        "SI": (ms["SI"] - ms["SPI"]) / num_permutations,
        "PI": (ms["PI"] - ms["SPI"]) / num_sets,
        "SPI": ms["SPI"],
    }


def order_variance_bound(squares: MeanSquares, num_draws: int = 20_000, seed: int = 0) -> float:
    """Lower bound (2.5 % quantile, generalised) of the order variance net of item noise, sigma2_P + sigma2_SP.

    Each mean square of the linear combination is redrawn as SS / chi2(df).
    """
    rng = np.random.default_rng(seed)
    drawn = {
        name: squares.value[name] * squares.freedom[name] / rng.chisquare(squares.freedom[name], size=num_draws)
        for name in ("P", "SP", "PI", "SPI")
    }
    num_sets, _, num_queries = squares.shape
    main_effect = (drawn["P"] - drawn["SP"] - drawn["PI"] + drawn["SPI"]) / (num_sets * num_queries)
    return float(np.quantile(main_effect + (drawn["SP"] - drawn["SPI"]) / num_queries, 0.025))


def order_variance(correct: BoolArray) -> float:
    """The point estimate sigma2_P + sigma2_SP."""
    components = variance_components(mean_squares(correct))
    return components["P"] + components["SP"]


def jackknife_order_bound(correct: BoolArray) -> float:
    """Lower bound of the order variance by jackknives of its logarithm over sets and permutations, t quantile.

    The two jackknife variances are added; the degrees of freedom are those of the shorter axis.
    """
    variance = 0.0
    for axis in (0, 1):
        count = correct.shape[axis]
        left_out = [order_variance(np.delete(correct, level, axis=axis)) for level in range(count)]
        logarithms = np.log(np.maximum(left_out, np.finfo(np.float64).tiny))
        variance += (count - 1) / count * float(((logarithms - logarithms.mean()) ** 2).sum())
    margin = float(stats.t.ppf(0.975, min(correct.shape[:2]) - 1)) * float(np.sqrt(variance))
    return order_variance(correct) * float(np.exp(-margin))


def item_bootstrap_order_bound(correct: BoolArray, num_draws: int = 200, seed: int = 0) -> float:
    """Lower bound of the order variance of these sets and permutations: 2.5 % quantile of a bootstrap over items."""
    rng = np.random.default_rng(seed)
    num_queries = correct.shape[2]
    drawn = [order_variance(correct[:, :, rng.integers(num_queries, size=num_queries)]) for _ in range(num_draws)]
    return float(np.quantile(drawn, 0.025))


def signed_root(variance: float) -> float:
    """Square root that keeps the sign, so that a negative estimate stays visible."""
    return float(np.sign(variance) * np.sqrt(abs(variance)))


def report_design(name: str, correct: BoolArray) -> None:
    """Print the accuracy matrix, the components and the order effect with its bounds."""
    squares = mean_squares(correct)
    components = variance_components(squares)
    accuracy = correct.mean(axis=2)
    print(f"\n{name}: S, P, Q = {correct.shape}, mean accuracy {accuracy.mean():.3f}; rows are sets")
    print("\n".join("  ".join(f"{cell:.3f}" for cell in row) for row in accuracy))
    print("variance components:", {effect: f"{value:.3g}" for effect, value in components.items()})
    order, selection = components["P"] + components["SP"], components["S"] + components["SP"]
    print(f"raw order sensitivity {accuracy.std(axis=1, ddof=1).mean():.4f}", end=", ")
    print(f"raw selection sensitivity {accuracy.std(axis=0, ddof=1).mean():.4f}")
    print(f"order effect net of item noise {signed_root(order):.4f}", end=", ")
    print(f"selection effect net of item noise {signed_root(selection):.4f}")
    bounds = {
        "generalised": order_variance_bound(squares),
        "jackknife": jackknife_order_bound(correct),
        "bootstrap over items": item_bootstrap_order_bound(correct),
    }
    shown = ", ".join(f"{signed_root(bound):.4f} ({method})" for method, bound in bounds.items())
    print(f"lower 95 % bound of the order effect: {shown}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO_FOLDER / "model")
    parser.add_argument("--data", type=Path, default=DEMO_FOLDER / "data" / "mini_news")
    parser.add_argument("--split", default="test", choices=("dev", "test"))
    parser.add_argument("--queries", type=int, default=400)
    parser.add_argument("--orderings", type=int, default=20, help="random orderings behind each point of the curve")
    parser.add_argument("--sets", type=int, default=10)
    parser.add_argument("--permutations", type=int, default=10)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    scorer = LabelScorer(
        Qwen2ForCausalLM.from_pretrained(arguments.model, dtype=torch.float32),
        AutoTokenizer.from_pretrained(arguments.model),
    )
    pool = read_split("train", arguments.data)
    queries = balanced_queries(read_split(arguments.split, arguments.data), arguments.queries)
    for k, accuracy in accuracy_by_shots(scorer, pool, queries, arguments.orderings, seed=arguments.seed).items():
        spread = f", standard deviation over orderings {accuracy.std(ddof=1):.3f}" if len(accuracy) > 1 else ""
        print(f"k = {k:2d}: accuracy {accuracy.mean():.3f}{spread}", flush=True)
    correct = crossed_correctness(scorer, pool, queries, arguments.sets, arguments.permutations, seed=arguments.seed)
    report_design("k = 8", correct)


if __name__ == "__main__":
    main()
