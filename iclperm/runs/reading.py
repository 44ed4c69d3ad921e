"""The right answers of a study's queries, and what reads generated ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from iclperm.prompts.chat import chat_format
from iclperm.runs.setting import ResolvedStudy, model_tokenizer
from iclperm.tasks.answers import Checker, open_checker, word_checker


@contextmanager
def open_reader(setting: ResolvedStudy) -> Iterator[Checker | None]:
    """What reads and judges the generated answers of a study; None where none are generated."""
    thinking: dict[str, Any] = {
        "strip_think": setting.study.think == "strip",
        "think_is_open": _opens_thinking(setting),
    }
    if not setting.is_generated:
        yield None
    elif setting.task.answer is None:
        yield word_checker(setting.task.words, **thinking)
    else:
        with open_checker(setting.task.answer, **thinking) as checker:
            yield checker


def _opens_thinking(setting: ResolvedStudy) -> bool:
    """Whether the chat template itself begins a block of reasoning, so that generated text only holds its end."""
    study = setting.study
    if study.think == "keep" or study.chat == "none" or setting.model is None:
        return False
    chat = chat_format(study.chat or "none", setting.task, model_tokenizer(setting.model))
    return chat is not None and chat.generation.rstrip().endswith("<think>")


def right_answers(setting: ResolvedStudy) -> list[str]:
    """The right label or answer of each query in its normal form, [Q]; raises `DataError` where one cannot be read."""
    published = published_answers(setting)
    if setting.task.answer is None:
        return published
    with open_reader(setting) as checker:
        assert checker is not None
        return list(map(checker.canonical_gold, published))


def published_answers(setting: ResolvedStudy) -> list[str]:
    """The right label or answer of each query as the data has it, [Q]."""
    return [setting.examples[one.split].answers[row] for one in setting.design.queries for row in one.rows]
