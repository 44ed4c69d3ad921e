"""Plain greedy decoding, one prompt at a time: the oracle without a cache, and transformers' own loop."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList

from iclperm.reference.scoring import inputs_device, next_token_logprobs, soft_capped


class Step(NamedTuple):
    """A generated token, its log-probability in nats, and how far the second-best token is behind it."""

    token: int
    logprob: float
    margin: float
    is_finite: bool


def greedy_one(
    model: PreTrainedModel,
    prompt: Sequence[int],
    max_new_tokens: int,
    eos_ids: Collection[int] = (),
    stops: Callable[[list[int]], bool] = lambda ids: False,
) -> list[Step]:
    """The likeliest tokens after ``prompt``, one by one; of equally likely ones the lowest id.

    The last is an EOS, or the one after which ``stops`` is true of all so far, or has logits that are not finite, or is
    number ``max_new_tokens``. Cost: the whole text is forwarded anew for every token.
    """
    steps: list[Step] = []
    while len(steps) < max_new_tokens:
        logprobs = torch.from_numpy(next_token_logprobs(model, [*prompt, *(step.token for step in steps)]))
        steps.append(_step(logprobs))
        if not steps[-1].is_finite or steps[-1].token in eos_ids or stops([step.token for step in steps]):
            break
    return steps


@torch.no_grad()
def generate_one(
    model: PreTrainedModel,
    prompt: Sequence[int],
    max_new_tokens: int,
    eos_ids: Collection[int] = (),
    stops: Callable[[list[int]], bool] = lambda ids: False,
) -> list[Step]:
    """As ``greedy_one``, by transformers' own ``generate`` with its cache.

    Sampling and penalties that the model's generation configuration asks for are switched off.
    """

    def is_over(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.tensor([stops(ids[0, len(prompt) :].tolist())], device=ids.device)

    settings = _settings(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=sorted(eos_ids) or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    fed = torch.tensor([list(prompt)], device=inputs_device(model))
    generate: Any = model.generate
    with _without_settings(model), soft_capped(model):
        out = generate(
            fed,
            attention_mask=torch.ones_like(fed),
            generation_config=settings,
            stopping_criteria=StoppingCriteriaList([is_over]),
        )
    steps = [_step(torch.log_softmax(logits[0].double(), dim=-1)) for logits in out.logits]
    broken = [number for number, step in enumerate(steps) if not step.is_finite]
    return steps[: broken[0] + 1] if broken else steps


def _settings(**given: Any) -> GenerationConfig:
    make: Any = GenerationConfig
    settings: GenerationConfig = make(**given)
    return settings


def _step(logprobs: torch.Tensor) -> Step:
    best = logprobs.topk(2)
    is_finite = bool(torch.isfinite(logprobs).all())
    token = int(logprobs.argmax()) if is_finite else 0
    return Step(token, float(logprobs[token]), float(best.values[0] - best.values[1]), is_finite)


@contextmanager
def _without_settings(model: PreTrainedModel) -> Iterator[None]:
    """Within: a generation configuration that says nothing."""
    before = model.generation_config
    model.generation_config = _settings()
    try:
        yield
    finally:
        model.generation_config = before
