"""Loops not known beforehand: tokens forwarded against distinct ones, and what a query on a kept context takes.

    OMP_NUM_THREADS=1 python benchmarks/session.py [--model FOLDER ...] [--json benchmarks/results/session.json]

Three loops through a session: a bandit over orderings with one query a pull, a context grown piece by piece with a
query after each, one context with its queries one at a time; on a Qwen2 shape of 25 M parameters with random weights
and on the models given. Token ids are random. Distinct are the nodes of the tree that a loop has asked about. Then a
query on contexts of three lengths: the median time beside the linear layers and the head at as many rows, run alone in
turns with it, and beside a prefix cache kept by hand in transformers. Bars: forwarded at most 1.02 of
distinct, and a query of 32 tokens or more at most 1.2 of its products; attention is no product and grows with the
context, so its operations beside theirs are told: of the shape of 25 M on the longest context they are more than the
bar leaves.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _machine import options, publish
from token_efficiency import model as qwen2_25m
from transformers import AutoModelForCausalLM, PreTrainedModel

from iclperm.engine import Engine, Node
from iclperm.engine.kernels.linear import MatrixProduct
from iclperm.engine.shapes import padded_rows

PIECES, PIECE, QUERY, LABELS = 16, 48, 40, 4
CONTEXTS = (48, 256, 768)
STEPS = 40


def loops(engine: Engine, vocab: int) -> list[dict[str, Any]]:
    """Forwarded against distinct tokens of each loop, and seconds."""
    rng = np.random.default_rng(0)
    pieces = [rng.integers(3, vocab, PIECE).tolist() for _ in range(PIECES)]
    queries = [rng.integers(3, vocab, QUERY).tolist() for _ in range(STEPS)]
    labels = [[int(label)] for label in rng.choice(vocab, LABELS, replace=False)]
    orders = [rng.permutation(PIECES) for _ in range(8)]
    found = []
    for name in ("bandit over orderings", "context grown", "one context, many queries"):
        forwarded, started = 0, time.perf_counter()
        with engine.session() as session:
            grown: Node | None = None
            for step in range(STEPS):
                if name.startswith("context"):
                    node = grown = session.extend(grown, pieces[step % PIECES][: 12 + step % 3])
                else:
                    node = None
                    for piece in orders[rng.integers(8)] if name.startswith("bandit") else range(PIECES):
                        node = session.extend(node, pieces[piece])
                assert node is not None
                session.score([node], [queries[step]], labels)
                forwarded += engine.report.tokens_forwarded
            distinct = session.num_tokens
        found.append(
            {"loop": name, "forwarded": forwarded, "distinct": distinct, "forwarded / distinct": forwarded / distinct,
             "seconds": time.perf_counter() - started}
        )  # fmt: skip
    return found


def products(engine: Engine) -> Callable[[], object]:
    """Every linear layer of the body at a query's rows, the head at one, padded as the engine does, by the library."""
    served = engine._model
    decoder = served.fused_decoder()
    assert decoder is not None
    rows = padded_rows(QUERY, served.device)
    matrices = [MatrixProduct.of(*pair) for layer in decoder.layers for pair in layer.products]
    head = MatrixProduct.of(served.model.get_output_embeddings(), is_head=True)
    inputs = {
        each.weight.shape[1]: torch.randn(rows, each.weight.shape[1]).to(served.dtype) for each in (*matrices, head)
    }
    last = inputs[head.weight.shape[1]][: padded_rows(1, served.device)]

    @torch.inference_mode()
    def run() -> None:
        for each in matrices:
            each.by_library(inputs[each.weight.shape[1]])
        head.by_library(last)

    return run


def one_query(engine: Engine, plain: PreTrainedModel, vocab: int, length: int) -> dict[str, Any]:
    """Milliseconds of a query on a kept context: through a session, its products alone, and a cache kept by hand."""
    rng = np.random.default_rng(1)
    context = rng.integers(3, vocab, length).tolist()
    labels = [[int(label)] for label in rng.choice(vocab, LABELS, replace=False)]
    alone, seconds = products(engine), {"session": list[float](), "products": list[float](), "by hand": list[float]()}
    with torch.inference_mode():
        cache = plain(torch.tensor([context]), use_cache=True).past_key_values

    @torch.inference_mode()
    def by_hand(query: list[int]) -> torch.Tensor:
        logits = plain(torch.tensor([query]), past_key_values=copy.deepcopy(cache), logits_to_keep=1).logits
        return logits[0, -1].float().log_softmax(-1)[[label[0] for label in labels]]

    with engine.session() as session:
        node = session.extend(None, context)
        for step in range(STEPS):
            query = rng.integers(3, vocab, QUERY).tolist()
            ways: dict[str, Callable[[], Any]] = {
                "session": lambda query=query: session.score([node], [query], labels),
                "products": alone,
                "by hand": lambda query=query: by_hand(query),
            }
            answers = {}
            for name, way in ways.items():
                started = time.perf_counter()
                answers[name] = way()
                if step > 2:
                    seconds[name].append(time.perf_counter() - started)
            assert np.abs(answers["session"][0, 0] - answers["by hand"].numpy()).max() < 1e-3
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    facts, rows = engine._model.facts, padded_rows(QUERY, engine._model.device)
    multiplied = facts.flops(rows, padded_rows(1, engine._model.device), 0)
    attention = engine.report.flops - facts.flops(
        engine.report.tokens_forwarded,
        engine.report.scored_rows,
        0,
        engine.report.skipped_tokens,
        0,
        engine.report.looked_up_tokens,
    )
    return {
        "loop": f"a query of {QUERY} tokens on {length}",
        **{f"{name}, ms": 1e3 * median for name, median in medians.items()},
        "session / products": medians["session"] / medians["products"],
        "attention / products, operations": attention / multiplied,
        "by hand / session": medians["by hand"] / medians["session"],
    }


def main() -> None:
    """Measures and prints."""
    parser = options(__doc__ or "")
    parser.add_argument("--model", type=Path, nargs="*", default=[], help="folders of models to measure as well")
    given = parser.parse_args()
    figures = []
    for folder in (None, *given.model):
        plain = qwen2_25m() if folder is None else AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        plain.eval()
        engine, vocab = Engine(plain), int(plain.config.vocab_size)
        name = "25 M Qwen2 shape" if folder is None else folder.name
        figures += [{"model": name, **row} for row in loops(engine, vocab)]
        figures += [{"model": name, **one_query(engine, plain, vocab, length)} for length in CONTEXTS]
    publish(f"sessions, float32, {torch.get_num_threads()} threads", figures, given.json)


if __name__ == "__main__":
    main()
