"""Seconds inside the model's calls in lm-evaluation-harness: its `hf`, ours, and `vllm` where its interpreter is named.

    OMP_NUM_THREADS=2 python benchmarks/harness.py [--model FOLDER] [--vllm PYTHON] [--json FILE]

One task of headlines and four topics (a request is a prompt with one of them), at 0, 5 and 20 demonstrations, the same
for all questions or drawn anew for each; through `simple_evaluate`, in processes of their own, one after another, each
contender's rounds in turn. `hf` has the fastest of the batch sizes 1, 4 and 16. Without --model a Qwen2 shape of 25 M
parameters with random weights and the bundled tokenizer. Bars: at least 5 times `hf` where demonstrations are fixed, at
least .95 where nothing is shared; log-likelihoods within 1e-4 a token of `hf`'s.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CASES = (("none", 0), ("fixed", 5), ("fixed", 20), ("drawn anew", 5), ("drawn anew", 20))
BARS = {"none": 0.95, "fixed": 5.0, "drawn anew": 0.95}
BATCHES = (1, 4, 16)
ROWS = 240


def task(folder: Path, kind: str, shots: int) -> str:
    """Writes a task into a folder; its name."""
    name = f"news_{kind.replace(' ', '_')}_{shots}"
    sampler = {"fewshot_config": {"sampler": "first_n"}} if kind == "fixed" else {}
    text = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {split: str(folder / f"{split}.jsonl") for split in ("train", "test")},
            "cache_dir": str(folder / "cache"),
        },
        "training_split": "train",
        "test_split": "test",
        "fewshot_split": "train",
        "output_type": "multiple_choice",
        "doc_to_text": "Headline: {{text}}\nTopic:",
        "doc_to_choice": json.loads((folder / "words.json").read_text()),
        "doc_to_target": "{{place}}",
        "num_fewshot": shots,
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        **sampler,
    }
    (folder / f"{name}.yaml").write_text(json.dumps(text))  # which is YAML
    return name


def prepare(folder: Path, model: Path | None) -> str:
    """Rows and, where none is given, the model; its folder."""
    import torch
    from token_efficiency import model as qwen2_25m
    from transformers import AutoTokenizer

    from iclperm import demo

    for split in ("train", "test"):
        rows = [json.loads(line) for line in (demo.data_path() / f"{split}.jsonl").read_text().splitlines()]
        words = sorted({row["label"] for row in rows})
        lines = [json.dumps({"text": row["text"], "place": words.index(row["label"])}) for row in rows[:ROWS]]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "words.json").write_text(json.dumps(words))
    if model is not None:
        return str(model)
    torch.manual_seed(0)
    qwen2_25m().save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(demo.model_path()).save_pretrained(folder / "model")
    return str(folder / "model")


def worker(contender: str, batch: int, model: str, folder: Path, names: list[str]) -> None:
    """Evaluates tasks, and prints what was found as one line of JSON."""
    from lm_eval import simple_evaluate
    from lm_eval.api.registry import get_model
    from lm_eval.tasks import TaskManager

    arguments: dict[str, Any] = {"pretrained": model, "dtype": "float32"}
    if contender == "iclperm":
        import iclperm.integrations.lm_eval  # noqa: F401 - registers the model
    elif contender == "hf":
        arguments["device"] = "cpu"
    else:
        arguments |= {"enable_prefix_caching": True, "gpu_memory_utilization": 0.3, "max_model_len": 2048}
    cls = get_model(contender)
    # The cache of logits of 0.4.13 reads wrong rows where texts of different lengths end alike; here none do.
    lm = cls.create_from_arg_obj(arguments, {"batch_size": batch if contender == "hf" else "auto"})
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    for name in names:
        spent, answer = [0.0], lm.loglikelihood

        def timed(*given: Any, answer: Any = answer, spent: list[float] = spent, **options: Any) -> Any:
            began = time.perf_counter()
            found = answer(*given, **options)
            spent[0] += time.perf_counter() - began
            return found

        lm.loglikelihood = timed
        results = simple_evaluate(lm, tasks=[name], task_manager=manager, bootstrap_iters=0, log_samples=True)
        lm.loglikelihood = answer
        logprobs = [float(each[0][0]) for sample in results["samples"][name] for each in sample["resps"]]
        print("FOUND " + json.dumps({"task": name, "seconds": spent[0], "logprobs": logprobs}), flush=True)


def ask(python: str, *given: str) -> dict[str, Any]:
    """A worker's rows by task; what it says goes to a file of its own."""
    with tempfile.TemporaryFile("w+") as said:
        done = subprocess.run(
            [python, __file__, "--worker", *given], stdout=subprocess.PIPE, stderr=said, text=True,
            env={**os.environ, "HF_DATASETS_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "2"},
        )  # fmt: skip
        said.seek(0)
        if done.returncode:
            raise RuntimeError(f"{given[0]} failed: {said.read()[-2000:]}")
    rows = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    return {row["task"]: row for row in rows}


def main() -> None:
    from _machine import options, publish

    parser = options(__doc__ or "")
    parser.add_argument("--model", type=Path, help="a folder of a model, with its tokenizer")
    parser.add_argument("--vllm", metavar="PYTHON", help="an interpreter that has vllm and lm_eval")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    figures = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model = prepare(folder, asked.model)
        names = [task(folder, *case) for case in CASES]
        contenders = [("iclperm", 0, sys.executable), *(("hf", batch, sys.executable) for batch in BATCHES)]
        contenders += [("vllm", 0, asked.vllm)] if asked.vllm else []
        found: dict[tuple[str, int], list[dict[str, Any]]] = {}
        for _ in range(asked.rounds):
            for name, batch, python in contenders:
                rows = ask(python, name, str(batch), model, place, *names)
                found.setdefault((name, batch), []).append(rows)
        for (kind, shots), task_name in zip(CASES, names, strict=True):
            seconds = {key: min(rows[task_name]["seconds"] for rows in each) for key, each in found.items()}
            logprobs = {key: each[0][task_name]["logprobs"] for key, each in found.items()}
            batch = min(BATCHES, key=lambda size: seconds["hf", size])
            ours, theirs = logprobs["iclperm", 0], logprobs["hf", batch]
            row = {
                "model": "25 M Qwen2 shape" if asked.model is None else asked.model.name,
                "demonstrations": kind,
                "shots": shots,
                "requests": len(ours),
                "hf, s": round(seconds["hf", batch], 2),
                "batch": batch,
                "iclperm, s": round(seconds["iclperm", 0], 2),
                "times": round(seconds["hf", batch] / seconds["iclperm", 0], 2),
                "bar": BARS[kind],
                "largest difference, nats": max(abs(one - other) for one, other in zip(ours, theirs, strict=True)),
            }
            if asked.vllm:
                row["vllm, s"] = round(seconds["vllm", 0], 2)
            figures.append(row)
            print(row, flush=True)
    publish("harness", figures, asked.json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], int(sys.argv[3]), sys.argv[4], Path(sys.argv[5]), sys.argv[6:])
    else:
        main()
