"""What the other commands print: tasks, models, statistics of answers from elsewhere, and the engine's own numbers."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import iclperm
from behaviour.place import Place
from iclperm import demo


def record(place: Place, *, portable: bool) -> dict[str, Any]:
    """By command line; needs the finished runs ``sensitivity`` and ``generated`` in the place."""
    commands = [
        ("tasks",),
        ("tasks", "show", "mini_news", "--shots", "2"),
        ("tasks", "show", "topics.yaml", "--data", "news", "--shots", "1", "--query", "3"),
        ("tasks", "show", "solved/letters.yaml"),
        ("tasks", "show", "mini_news", "--model", "chatty", "--chat", "multiturn", "--shots", "1"),
        ("tasks", "show", "lm_eval/boolq_like.yaml", "--shots", "1"),
        ("tasks", "new", "reviews"),
        ("tasks", "new", "sums", "--generated", "--out", "sums-of-mine.yaml"),
        ("models",),
        ("--version",),
        *(
            []
            if portable
            else [
                ("bench", "--list"),
                ("models", "--rate", "100", "--json"),
                ("tasks", "show", "tiny/colours.yaml", "--model", "tiny/model"),
            ]
        ),
    ]
    said = {" ".join(command): place.call(*command) for command in commands}
    for name in () if portable else ("reviews.yaml", "sums-of-mine.yaml"):
        said[name] = (place.folder / name).read_text().splitlines()
    return {**said, **_statistics(place, portable), "engine": _engine()}


def _statistics(place: Place, portable: bool) -> dict[str, Any]:
    generator = np.random.default_rng(0)
    answers = (generator.random((3, 4, 2, 9)) < 0.3 + 0.4 * generator.random(9)).astype(np.uint8)
    np.save(place.folder / "answers.npy", answers)
    np.savez(place.folder / "answers.npz", correct=answers, shots=np.array([2, 4]))
    names = ("set", "permutation", "shots", "query")
    columns = {name: index.ravel() for name, index in zip(names, np.indices(answers.shape), strict=True)}
    pq.write_table(pa.table({**columns, "correct": answers.ravel().astype(bool)}), place.folder / "answers.parquet")
    logs = []
    for number in range(3):
        path = place.folder / f"samples_news_2026-01-0{number + 1}T00-00-00.jsonl"
        rows = [
            {"doc_id": i, "doc_hash": f"h{i}", "filter": "none", "acc": float(answer), "doc": {"a": 1}}
            for i, answer in enumerate(answers[number, 0, 0])
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        logs.append(path.name)
    place.raw("export", "runs/sensitivity", "--out", "exported.csv")
    commands = [
        ("answers.npy",),
        tuple(logs),
    ]
    if not portable:
        commands += [
            ("answers.npy", "--json"),
            ("answers.npy", "--axes", "SPKQ", "--out", "figures"),
            ("answers.npz",),
            ("answers.parquet",),
            ("exported.csv",),
            ("exported.csv", "--json"),
        ]
    return {f"stats {' '.join(command)}": place.call("stats", *command) for command in commands}


def _engine() -> dict[str, Any]:
    """The engine alone, as the README has it."""
    engine = iclperm.Engine.from_pretrained(demo.model_path(), device="cpu")
    storm, final = "Article: Storm hits the coast of Japan\nAnswer:", "Article: Rovers win the cup final\nAnswer:"
    out = engine.loglikelihood([(storm, " World"), (storm, " Sports"), (final, " Sports")])
    contexts = ["", f"{storm} World\n\n", f"{final} Sports\n\n{storm} World\n\n"]
    scores = engine.score(contexts, [storm, final], [" World", " Sports", " Business", " Technology"])
    counts = ("tokens_naive", "tokens_unique", "tokens_forwarded", "kv_peak_tokens")
    said = {name: getattr(out, name).tolist() for name in ("logprob", "num_tokens", "is_greedy", "state")}
    said |= {"score": scores.tolist(), "report": {name: getattr(engine.report, name) for name in counts}}
    written = engine.generate([contexts[1] + final, contexts[2] + final], max_new_tokens=3)
    return {**said, "text": list(written.text), "totals": {name: getattr(engine.totals, name) for name in counts}}
