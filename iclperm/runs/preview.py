"""One prompt of a study as text and as tokens, and how its right answer is read."""

from __future__ import annotations

from typing import Any

from iclperm.errors import ConfigError
from iclperm.prompts.chat import TextTokenizer, chat_format
from iclperm.prompts.design import draw
from iclperm.prompts.encode import PromptTokens, prompt_tokens
from iclperm.prompts.render import PromptText, prompt_text
from iclperm.runs.setting import model_tokenizer, resolved, study_examples, study_model_folder
from iclperm.study.study import Study
from iclperm.tasks.answers import open_checker
from iclperm.tasks.task import Task


def sample_prompt(
    study: Study, *, index_set: int = 0, permutation: int = 0, shots: int | None = None, query: int = 0
) -> PromptText:
    """The text of one prompt of a study, by default the first one with its largest number of shots.

    Reads the data, and for a chat the model's tokenizer; the model need not be there otherwise. Raises `ConfigError`
    for a number of shots that the study does not run, and for a query that it does not have.
    """
    task = Task.load(study.task, study.data)
    study = resolved(study, task)
    examples = study_examples(study, task)
    design = draw(study, task, examples)
    wanted = design.shots[-1] if shots is None else shots
    if wanted not in design.shots:
        raise ConfigError(f"the study does not run {wanted} shots; it runs {', '.join(map(str, design.shots))}")
    if not 0 <= query < design.num_queries:
        raise ConfigError(
            f"there is no query {query}: the data have {design.num_queries} distinct ones here; give a smaller number"
        )
    chat = None if study.chat == "none" else chat_format(study.chat or "none", task, _tokenizer_named(study))
    return prompt_text(
        design,
        task,
        examples,
        cell=(index_set, permutation, design.shots.index(wanted), query),
        scoring=study.scoring or "loglikelihood",
        chat=chat,
    )


def sample_answer(study: Study, prompt: PromptText) -> str:
    """The right answer to a prompt as generated answers are compared with it; raises `DataError` where it cannot be
    read."""
    task = Task.load(study.task, study.data)
    if task.answer is None:
        return prompt.answer
    with open_checker(task.answer) as checker:
        return checker.canonical_gold(prompt.answer)


def sample_tokens(study: Study, prompt: PromptText) -> PromptTokens:
    """A prompt as the study's model reads it; needs its tokenizer, no weights. For a model behind an API, whose tokens
    are not known, bytes stand for tokens."""
    return prompt_tokens(prompt, _tokenizer_named(study))


def _tokenizer_named(study: Study) -> Any:
    return TextTokenizer() if study.endpoint else model_tokenizer(study_model_folder(study, weights=False))
