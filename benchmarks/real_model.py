"""A language model on published data: the studies of docs/findings.md, and this engine beside others on their prompts.

    python benchmarks/real_model.py write --model GEMMA --ag-news test.csv --gsm8k FOLDER --work WORK
    iclperm run WORK/sensitivity.yaml --out WORK/sensitivity  # so over_k, curve, selection, gsm8k; then iclperm report
    python benchmarks/real_model.py exact --work WORK           # of a small curve, held against float64
    python benchmarks/real_model.py search --work WORK          # a whole search, from its stored answers: no model
    python benchmarks/real_model.py bench --work WORK           # alone on the machine
    iclperm bench WORK/generation.yaml --peer vllm,llama_cpp --scale 1 --repeats 1    # alone, too: an hour

``write`` makes a task of AG News' titles (as `populations.py` does: the published ``test.csv``, split by a fixed
shuffle), and a study file of each kind, two on GSM8K's published files. ``exact`` runs a small part of the curve (2
sets, 4 orders, 32 queries; minutes) and holds some of its prompts against unmodified transformers, one prompt at a
time, in float32 and in float64. ``search`` reports on the stored answers of `populations.py` to a search that took a
faster machine hours. ``bench`` gives a share of the curve's prompts to plain transformers, prefix caches reused by
hand, vLLM and llama.cpp (those that are prepared: ``iclperm bench --prepare vllm,llama_cpp``), every answer held
against unmodified transformers first.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
import yaml
from populations import ag_news_task
from populations import load as load_population

import iclperm
from iclperm.engine.load import load
from iclperm.reference.scoring import score_one
from iclperm.report.figures import save
from iclperm.studies.search import Answers, search_findings

AG_NEWS = {
    "sensitivity": {"kind": "sensitivity", "sets": 10, "permutations": 10, "shots": 8, "queries": 256},
    "curve": {"kind": "curve", "sets": 5, "permutations": 8, "shots": [0, 1, 2, 4, 8, 16], "queries": 256},
    "selection": {"kind": "selection", "sets": 3, "permutations": 8, "shots": 8, "queries": 64, "dev_queries": 64},
    "over_k": {
        "kind": "sensitivity",
        "sets": 10,
        "permutations": 10,
        "shots": [4, 8, 16],
        "resample": "per_k",
        "queries": 128,
    },
    "zero": {"kind": "sensitivity", "sets": 1, "permutations": 1, "shots": 0, "queries": 300},
    "search": {"kind": "search", "sets": 5, "permutations": 64, "shots": 8, "queries": 300, "dev_queries": 600},
}
SEARCH = "gemma_5x64x600"
GSM8K = {
    "gsm8k": {"kind": "sensitivity", "sets": 2, "permutations": 4, "shots": 4, "queries": 24, "max_new_tokens": 128},
    "generation": {
        "kind": "sensitivity",
        "sets": 1,
        "permutations": 4,
        "shots": 8,
        "queries": 64,
        "max_new_tokens": 128,
    },
}
PEERS = "plain,prefix_reuse,vllm,llama_cpp"


def write(model: Path, ag_news: Path, gsm8k: Path, work: Path) -> None:
    """Tasks and studies of both data sets."""
    task = ag_news_task(ag_news.resolve(), work.resolve() / "ag_news")
    common = {"model": str(model.resolve()), "dtype": "float32"}
    for name, sizes in AG_NEWS.items():
        _write(work / f"{name}.yaml", {**common, "task": str(task), **sizes})
    for name, sizes in GSM8K.items():
        _write(work / f"{name}.yaml", {**common, "task": "gsm8k", "data": str(gsm8k.resolve()), **sizes})


def _write(path: Path, study: dict[str, object]) -> None:
    path.write_text(yaml.safe_dump(study, sort_keys=False), encoding="utf-8")
    print(path)


def exact(work: Path, number: int) -> None:
    """The largest and the mean square differences of three ways to the same log-likelihoods, in nats a token."""
    asked = yaml.safe_load((work / "curve.yaml").read_text(encoding="utf-8"))
    run = iclperm.run(iclperm.Study(**{**asked, "sets": 2, "permutations": 4, "queries": 32}), out=work / "exact")
    model, tokenizer = load(run.study.model, device="cpu", dtype="float32")
    labels = [tokenizer(f" {label}", add_special_tokens=False)["input_ids"] for label in run.labels]
    rng = np.random.default_rng(0)
    cells = [tuple(int(rng.integers(size)) for size in run.correct.shape) for _ in range(number)]
    prompts = [
        run.prompt(index_set=s, permutation=p, shots=run.shots[k], query=q).token_ids or () for s, p, k, q in cells
    ]
    found = {"iclperm": np.array([run.label_logprob[cell] for cell in cells])}
    for dtype in ("float32", "float64"):
        model = model.to(getattr(torch, dtype))
        found[dtype] = np.array([[score_one(model, ids, label).logprob for label in labels] for ids in prompts])
    lengths = np.array([len(label) for label in labels])
    for one, other in (("float32", "float64"), ("iclperm", "float64"), ("iclperm", "float32")):
        moved = np.abs(found[one] - found[other]) / lengths
        print(f"{one} from {other}: {moved.max():.2g} at most, {np.sqrt((moved**2).mean()):.2g} root mean square")
    print(f"{number} prompts of {min(map(len, prompts))} to {max(map(len, prompts))} tokens, {len(labels)} labels")


def search(work: Path) -> None:
    """What is said of a whole search, and its figure, from right and wrong answers alone."""
    stored = load_population(SEARCH)
    found = search_findings(
        Answers(stored.test, gold=stored.gold_test),
        Answers(stored.dev, gold=stored.gold_dev),
        shots=8,
        title="AG News' titles, Gemma 3 270M, k = 8",
    )
    print(" ".join(found.conclusion()))
    for table in found.tables(full=True):
        print(f"\n{table.title}\n{' | '.join(table.header)}")
        print("\n".join(" | ".join(row) for row in table.rows))
    for name, plot in found.plots().items():
        print(*save(plot, work / name))


def main() -> None:
    parser = argparse.ArgumentParser(description="A language model on published data.")
    parser.add_argument("do", choices=("write", "exact", "search", "bench"))
    parser.add_argument("--model", type=Path, help="a model's folder or GGUF file")
    parser.add_argument("--ag-news", type=Path, help="the published test.csv")
    parser.add_argument("--gsm8k", type=Path, help="the folder of the published train.jsonl and test.jsonl")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--peer", default=PEERS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=64, help="that are held against float64")
    asked = parser.parse_args()
    if asked.do == "write":
        if missing := [name for name in ("model", "ag_news", "gsm8k") if getattr(asked, name) is None]:
            parser.error(f"give --{missing[0].replace('_', '-')}")
        write(asked.model, asked.ag_news, asked.gsm8k, asked.work)
        return
    if asked.do == "search":
        search(asked.work)
        return
    if asked.do == "exact":
        exact(asked.work, asked.prompts)
        return
    command = [sys.executable, "-m", "iclperm", "bench", str(asked.work / "curve.yaml"), "--peer", asked.peer]
    command += ["--repeats", str(asked.repeats), "--out", str(asked.work / "bench.jsonl")]
    raise SystemExit(subprocess.run(command, check=False).returncode)


if __name__ == "__main__":
    main()
