"""Plain scoring: one unpadded prompt at a time through an unmodified transformers model."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel


@dataclass(frozen=True)
class PlainScore:
    """``logprob`` in nats, summed over the ``num_tokens`` of the continuation; ``is_greedy``: each was the argmax."""

    logprob: float
    num_tokens: int
    is_greedy: bool
    is_finite: bool


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Within: every module in evaluation mode. After: each in the mode it was in."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def soft_capped(model: PreTrainedModel) -> Iterator[None]:
    """Within: attention that applies the model's soft-cap; transformers 5.17 drops it under sdpa without a word."""
    before = model.config._attn_implementation
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def inputs_device(model: PreTrainedModel) -> torch.device:
    """Where prompts go; weights that accelerate offloads lie on the meta device, and it moves prompts by itself."""
    return torch.device("cpu") if model.device.type == "meta" else model.device


def may_keep_last(model: PreTrainedModel) -> bool:
    """Whether the model can be asked for the logits of a prompt's last tokens alone."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters


@torch.no_grad()
def score_one(model: PreTrainedModel, context: Sequence[int], continuation: Sequence[int]) -> PlainScore:
    """Log-likelihood of ``continuation`` after ``context`` (token ids, both non-empty): one forward pass of all.

    Logits of the continuation's tokens alone are held, of models that can be asked for them: of a long context over
    many token ids all of them would take more than the weights.
    """
    fed = [*context, *continuation][:-1]
    with soft_capped(model):
        ids = torch.tensor([fed], device=inputs_device(model))
        last = {"logits_to_keep": len(continuation)} if may_keep_last(model) else {}
        logits = model(input_ids=ids, use_cache=False, **last).logits[0]
    wanted = torch.tensor(list(continuation), device=logits.device)
    scored = logits[-len(continuation) :].double()
    logprobs = torch.log_softmax(scored, dim=-1).gather(1, wanted[:, None])[:, 0]
    return PlainScore(
        logprob=float(logprobs.sum()),
        num_tokens=len(continuation),
        is_greedy=bool((scored.argmax(dim=-1) == wanted).all()),
        is_finite=bool(torch.isfinite(scored).all()),
    )


@torch.no_grad()
def next_token_logprobs(model: PreTrainedModel, prompt: Sequence[int]) -> npt.NDArray[np.float64]:
    """Log-probabilities in nats of every token id after ``prompt`` [V], from one forward pass of the prompt."""
    with soft_capped(model):
        ids = torch.tensor([list(prompt)], device=inputs_device(model))
        logits = model(input_ids=ids, use_cache=False).logits[0, -1]
    return torch.log_softmax(logits.double(), dim=-1).cpu().numpy()


@torch.no_grad()
def last_logprobs(
    model: PreTrainedModel, prompt: Sequence[int], num_last: int, ids: Sequence[int]
) -> npt.NDArray[np.float64]:
    """Log-probabilities in nats of some token ids after each of the last tokens of ``prompt`` [num_last, ids].

    NaN after a token whose logits are not all finite. Cost as of ``score_one``.
    """
    with soft_capped(model):
        fed = torch.tensor([list(prompt)], device=inputs_device(model))
        last = {"logits_to_keep": num_last} if may_keep_last(model) else {}
        logits = model(input_ids=fed, use_cache=False, **last).logits[0, -num_last:].double()
    logprobs = torch.log_softmax(logits, dim=-1)[:, torch.tensor(list(ids), device=logits.device)]
    is_finite = torch.isfinite(logits).all(dim=-1, keepdim=True)
    return logprobs.masked_fill(~is_finite, torch.nan).cpu().numpy()


def loglikelihood(model: PreTrainedModel, requests: Iterable[tuple[Sequence[int], Sequence[int]]]) -> list[PlainScore]:
    """Score (context, continuation) pairs of token ids one by one; cost: every token of every request."""
    with evaluating(model):
        return [score_one(model, context, continuation) for context, continuation in requests]
