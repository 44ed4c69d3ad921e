"""Sampling one token at a time, by the book: the oracle of texts by chance."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedModel

from iclperm.reference.scoring import next_token_logprobs


def sampled_ids(
    model: PreTrainedModel,
    prompt: Sequence[int],
    num_tokens: int,
    *,
    temperature: float,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    draw: int = 0,
) -> list[int]:
    """The first ids of text number ``draw`` after ``prompt``, whatever they are; the whole is forwarded for each."""
    ids: list[int] = []
    for chance in keyed_chances(prompt, num_tokens, seed=seed, draw=draw):
        logprobs = next_token_logprobs(model, [*prompt, *ids])
        ids.append(walk(logprobs.tolist(), chance, temperature=temperature, top_p=top_p, top_k=top_k))
    return ids


def keyed_chances(prompt: Sequence[int], count: int, *, seed: int, draw: int) -> list[float]:
    """Numbers in [0, 1) that seed, draw and prompt decide."""
    key = b"".join(number.to_bytes(8, "little", signed=True) for number in (seed, draw))
    content = b"".join(token.to_bytes(4, "little", signed=True) for token in prompt)
    digest = hashlib.blake2b(content, digest_size=16, key=key).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
    return [float(generator.random()) for _ in range(count)]


def walk(logprobs: Sequence[float], chance: float, *, temperature: float, top_p: float = 1.0, top_k: int = 0) -> int:
    """The id at which the probabilities, one after the other, first add up to more than ``chance`` of all.

    In the order of ids, or from the likeliest on where only some of them are left in.
    """
    order = list(range(len(logprobs)))
    if top_k or top_p < 1:
        order.sort(key=lambda token: -logprobs[token])
    if top_k:
        order = order[:top_k]
    weights = [float(np.exp(logprobs[token] / temperature)) for token in order]
    if top_p < 1:
        total, sum_before, kept = sum(weights), 0.0, 0
        while kept < len(weights) and sum_before / total < top_p:
            sum_before += weights[kept]
            kept += 1
        order, weights = order[:kept], weights[:kept]
    sum_so_far, wanted = 0.0, chance * sum(weights)
    for token, weight in zip(order, weights, strict=True):
        sum_so_far += weight
        if sum_so_far > wanted:
            return token
    return order[-1]
