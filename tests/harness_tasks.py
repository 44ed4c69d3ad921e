"""Tasks of lm-evaluation-harness of many kinds, on rows of the bundled headlines: files that it reads from a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from iclperm import demo

LABELS = ["World", "Sports", "Business", "Technology"]
CLASSIFY = {
    "output_type": "multiple_choice",
    "doc_to_text": "Headline: {{text}}\nTopic:",
    "doc_to_choice": LABELS,
    "doc_to_target": "{{place}}",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}
WRITE = {
    "output_type": "generate_until",
    "doc_to_text": "Headline: {{text}}\nTopic:",
    "doc_to_target": " {{label}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 6, "do_sample": False},
    "metric_list": [{"metric": "exact_match", "ignore_case": True}],
}
TASKS: dict[str, dict[str, Any]] = {
    "zero_shot": CLASSIFY,
    "fixed_shots": {**CLASSIFY, "num_fewshot": 5, "fewshot_config": {"sampler": "first_n"}, "fewshot_split": "train"},
    "random_shots": {**CLASSIFY, "num_fewshot": 3, "fewshot_split": "train"},
    "described": {
        **CLASSIFY,
        "description": "Name the topic of each headline.\n\n",
        "num_fewshot": 2,
        "fewshot_split": "train",
        "fewshot_delimiter": "\n###\n",
        "target_delimiter": "",
        "doc_to_choice": [f" {label}" for label in LABELS],
    },
    "mutual_information": {**CLASSIFY, "metric_list": [{"metric": "acc"}, {"metric": "acc_mutual_info"}]},
    "own_choices": {**CLASSIFY, "doc_to_choice": "{{choices}}", "doc_to_target": "{{right}}"},
    # As Winogrande: each choice is a context of its own, and the end is one.
    "contexts_to_choose": {
        **CLASSIFY,
        "doc_to_text": "{{right}}",
        "doc_to_target": " {{text}}",
        "doc_to_choice": "{{openings}}",
        "metric_list": [{"metric": "acc"}],
    },
    # As LAMBADA: is the last word the likeliest?
    "last_word": {
        "output_type": "loglikelihood",
        "doc_to_text": "{{text.rsplit(' ', 1)[0]}}",
        "doc_to_target": "{{' ' + text.rsplit(' ', 1)[1]}}",
        "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
    },
    "nothing_before": {
        "output_type": "loglikelihood",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "perplexity"}],
    },
    # As WikiText, longer than the bundled model's window.
    "whole_texts": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{page}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "written": {**WRITE, "num_fewshot": 4, "fewshot_config": {"sampler": "first_n"}, "fewshot_split": "train"},
    "written_twice": {
        **WRITE,
        "doc_to_target": "{{label}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 1},
        "repeats": 2,
        "filter_list": [
            {
                "name": "first word",
                "filter": [{"function": "regex", "regex_pattern": r"(\w+)"}, {"function": "take_first"}],
            }
        ],
    },
    "written_with_stops": {**WRITE, "generation_kwargs": {"until": ["s", " o", "\n\n"], "max_gen_toks": 12}},
    "far_too_long": {**CLASSIFY, "doc_to_text": "{{page}}\nHeadline: {{text}}\nTopic:"},
    "many_tongues": {**CLASSIFY, "doc_to_text": "Überschrift «{{text}}» 新闻 🙂\nTopic:"},
}


def write(folder: Path, rows: int = 12) -> list[str]:
    """Writes the tasks and their rows into a folder; their names."""
    for split in ("train", "test"):
        lines = (demo.data_path() / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        found = [json.loads(line) for line in lines[: 4 * rows]]
        words = sorted({row["label"] for row in found})
        page = " ".join(row["text"] for row in found)
        for number, row in enumerate(found):
            row["place"] = words.index(row["label"])
            row["right"] = number % 3
            row["choices"] = [row["text"].split()[0], "none of these", row["label"]]
            row["openings"] = ["Today:", f"{row['label']}:", "It was said that"]
            row["page"] = page[number : number + 1200 + 300 * (number % 5)]
        content = "".join(json.dumps(row) + "\n" for row in found[: rows if split == "test" else None])
        (folder / f"{split}.jsonl").write_text(content, encoding="utf-8")
    files = {split: str(folder / f"{split}.jsonl") for split in ("train", "test")}
    for name, task in TASKS.items():
        choices = {
            "task": f"local_{name}",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": files, "cache_dir": str(folder / "cache")},
            "training_split": "train",
            "test_split": "test",
            **task,
        }
        if choices.get("doc_to_choice") == LABELS:
            choices["doc_to_choice"] = words
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(choices, sort_keys=False, allow_unicode=True))
    return [f"local_{name}" for name in TASKS]
