"""Stored answers of whole searches, on which cheaper designs are replayed without a model.

    python benchmarks/populations.py bundled
    python benchmarks/populations.py gemma_4x32x240 --model GEMMA --ag-news test.csv --dtype bfloat16
    python benchmarks/populations.py gemma_5x64x600 --model GEMMA --ag-news test.csv --dtype bfloat16

Runs every ordering on every dev and test query through iclperm (a run folder under ``--work`` that continues after an
interruption) and writes ``benchmarks/populations/NAME.npz``: right answers of both splits, a bit each, with the lengths
in tokens of contexts and queries, which say what a design costs. AG News is the published ``test.csv`` (7,600 rows:
class, title, description), of which a fixed shuffle gives train, dev and test.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from _machine import machine

FOLDER = Path(__file__).parent / "populations"
SIZES = {
    "bundled": {"sets": 10, "permutations": 128, "dev_queries": 1000, "queries": 1000},
    "gemma_4x32x240": {"sets": 4, "permutations": 32, "dev_queries": 240, "queries": 240},
    "gemma_5x64x600": {"sets": 5, "permutations": 64, "dev_queries": 600, "queries": 300},
}
LABELS = ["World", "Sports", "Business", "Technology"]


class Population(NamedTuple):
    """The answers of one search: what is right of every ordering to every query, and what asking costs."""

    name: str
    dev: npt.NDArray[np.uint8]
    """[S, P, Q_dev] 0 or 1."""
    test: npt.NDArray[np.uint8]
    """[S, P, Q_test]."""
    gold_dev: npt.NDArray[np.int64]
    gold_test: npt.NDArray[np.int64]
    context_tokens: npt.NDArray[np.int64]
    """[S, P] tokens of each ordering's demonstrations; no two orderings share more than a few of them."""
    dev_tokens: npt.NDArray[np.int64]
    """[Q_dev] tokens of each query."""
    test_tokens: npt.NDArray[np.int64]
    about: dict[str, Any]


def load(name: str | Path) -> Population:
    """A stored population, by name or path."""
    path = Path(name) if str(name).endswith(".npz") else FOLDER / f"{name}.npz"
    with np.load(path, allow_pickle=False) as stored:
        arrays = {key: stored[key] for key in stored.files}
    for split in ("dev", "test"):
        shape = tuple(arrays.pop(f"{split}_shape").tolist())
        arrays[split] = np.unpackbits(arrays[split], count=int(np.prod(shape))).reshape(shape)
    return Population(path.stem, about=json.loads(str(arrays.pop("about"))), **arrays)


def ag_news_task(source: Path, folder: Path) -> Path:
    """A task file on the titles of AG News, train, dev and test by a fixed shuffle of the published test split."""
    folder.mkdir(parents=True, exist_ok=True)
    with source.open(newline="", encoding="utf-8") as file:
        rows = [(title.strip(), int(label) - 1) for label, title, _ in csv.reader(file)]
    order = np.random.default_rng(0).permutation(len(rows))
    begin = 0
    for split, count in (("train", 2000), ("dev", 2600), ("test", 3000)):
        with (folder / f"{split}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(("text", "label"))
            writer.writerows(rows[row] for row in order[begin : begin + count])
        begin += count
    labels = ", ".join(f"{number}: {word}" for number, word in enumerate(LABELS))
    (folder / "ag_news_titles.yaml").write_text(
        "name: ag_news_titles\ndescription: titles of AG News, four topics\nsource: the published test split\n"
        "licence: research and other non-commercial use\n"
        "data: {train: train.csv, dev: dev.csv, test: test.csv}\n"
        f"fields: {{text: text}}\nlabel_field: label\nlabels: {{{labels}}}\n"
        'demonstration: "Article: {{ text }}\\nAnswer: {{ label }}"\nquery: "Article: {{ text }}\\nAnswer:"\n'
        'continuation: " {{ label }}"\nseparator: "\\n\\n"\nshots: 8\n',
        encoding="utf-8",
    )
    return folder / "ag_news_titles.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(description="Stores the answers of a whole search.")
    parser.add_argument("name", choices=SIZES)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--ag-news", type=Path, help="the published test.csv; without it the bundled task")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--work", type=Path, default=Path("runs/populations"))
    asked = parser.parse_args()
    import iclperm
    from iclperm.runs.layout import lay_out
    from iclperm.runs.setting import ResolvedStudy

    task = "mini_news" if asked.ag_news is None else str(ag_news_task(asked.ag_news, asked.work / "ag_news"))
    study = iclperm.Study(kind="search", model=asked.model, task=task, shots=8, dtype=asked.dtype, **SIZES[asked.name])
    run = iclperm.run(study, asked.work / asked.name, progress=True, mixed=True)
    work = lay_out(ResolvedStudy.of(run.study))
    lengths = np.array([len(ids) for ids in work.prompts.queries])
    context_lengths = np.array([len(ids) for ids in work.prompts.contexts])
    begins = work.begins
    splits = {name: run.splits[name] for name in ("dev", "test")}
    about = {**machine(), "task": Path(task).stem, "model": Path(asked.model).name, "dtype": asked.dtype, "k": 8}
    FOLDER.mkdir(exist_ok=True)
    arrays: dict[str, npt.NDArray[Any]] = {"context_tokens": context_lengths[work.prompts.context_of[:, :, -1]]}
    for name, items in splits.items():
        correct = items.correct[:, :, -1]
        assert not items.state.any()
        assert (items.weights == 1).all()
        arrays[name] = np.packbits(correct)
        arrays[f"{name}_shape"] = np.array(correct.shape)
        arrays[f"gold_{name}"] = items.gold
        arrays[f"{name}_tokens"] = lengths[begins[name] : begins[name] + correct.shape[2]]
    np.savez_compressed(FOLDER / f"{asked.name}.npz", about=json.dumps(about), **arrays)
    stored = load(asked.name)
    for name in splits:
        accuracy = getattr(stored, name).mean(axis=2)
        print(
            f"{name}: {accuracy.shape}, mean {accuracy.mean():.4f}, best {accuracy.max():.4f}, "
            f"sd over orderings within sets {accuracy.std(axis=1, ddof=1).mean():.4f}"
        )


if __name__ == "__main__":
    main()
