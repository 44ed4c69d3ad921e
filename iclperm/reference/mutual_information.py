"""Pointwise mutual information of a prompt and what follows it, by plain loops over plain forward passes."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from iclperm.reference.scoring import loglikelihood

Ids = Sequence[int]


def information(model: PreTrainedModel, prompt: Ids, nothing: Ids, choices: Sequence[Ids]) -> list[float]:
    """log p(choice | prompt) - log p(choice | nothing) of each choice, in nats; all are token ids."""
    after = loglikelihood(model, [(prompt, choice) for choice in choices])
    alone = loglikelihood(model, [(nothing, choice) for choice in choices])
    return [one.logprob - other.logprob for one, other in zip(after, alone, strict=True)]


def most_informed(values: Sequence[float]) -> int:
    """The choice with the largest, the lowest of equals."""
    return max(range(len(values)), key=lambda choice: (values[choice], -choice))
