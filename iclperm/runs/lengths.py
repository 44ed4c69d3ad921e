"""How long the prompts of a task are for a model, before there is a study."""

from __future__ import annotations

from typing import NamedTuple

from iclperm.base.tokenizer_file import told_where_it_gives_up
from iclperm.runs.setting import model_tokenizer, study_model_folder
from iclperm.study.study import Study
from iclperm.tasks.task import Task


class PromptLengths(NamedTuple):
    """Tokens of a task's parts for one model."""

    window: int
    """Of the model; the longest prompt that it serves."""
    longest: int
    """Tokens of the longest demonstration or query."""
    median: int
    whole: int
    """Tokens of a prompt of the task's own number of the longest demonstrations, and the longest query."""
    num_too_long: int
    """Rows that do not fit beside demonstrations of the median length."""


def prompt_lengths(task: Task, model: str) -> PromptLengths:
    """The lengths of all rows of train and test; needs the model's tokenizer and configuration, no weights."""
    from iclperm.engine.plain_model import read_facts  # PyTorch

    study = Study(model=model)
    folder = study_model_folder(study, weights=False)
    tokenizer = model_tokenizer(folder)
    examples = [task.examples("train"), task.examples("test")]
    texts = [
        text + task.separator for found in examples for text in task.render_demonstrations(found.fields, found.answers)
    ]
    with told_where_it_gives_up():
        lengths = sorted(map(len, tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]))
        opening = len(tokenizer(task.opening(), add_special_tokens=False, verbose=False)["input_ids"]) + 1
    median, window = lengths[len(lengths) // 2], read_facts(folder, device="cpu", dtype="float32").max_tokens
    whole = opening + sum(lengths[-task.shots :] if task.shots else []) + lengths[-1]
    room = window - opening - task.shots * median
    return PromptLengths(window, lengths[-1], median, whole, sum(length > room for length in lengths))
