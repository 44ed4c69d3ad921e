"""What cannot be run, refused before anything is computed: prompts, tokenizers and memory that do not fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iclperm.engine.plan import Plan
from iclperm.errors import ConfigError, DataError, RequestError, TokenizationError
from iclperm.prompts.tokenise import Prompts
from iclperm.runs.setting import ResolvedStudy
from iclperm.runs.work import Work
from iclperm.study.study import Study


def uneven_labels(label_tokens: Sequence[int], normalize: str) -> list[str]:
    """A warning where labels of unequal lengths [L], in tokens, are compared by their sums; else none."""
    if normalize != "sum" or len(set(label_tokens)) < 2:
        return []
    return [
        f"the labels have {min(label_tokens)} to {max(label_tokens)} tokens, and sums of log-likelihoods favour short "
        "ones; compare with --normalize mean"
    ]


def refuse_small_budget(setting: ResolvedStudy, plans: Callable[[], Sequence[Plan]]) -> None:
    """Raises `ConfigError` where no pack is small enough for the study's memory budget; loads no weights. ``plans`` are
    made where there is a budget."""
    study = setting.study
    if study.memory_budget is None or setting.model is None:
        return
    from iclperm.engine import estimate

    max_new_tokens = setting.max_new_tokens if setting.is_generated else 0
    chosen: dict[str, Any] = {**_ways(study), "max_new_tokens": max_new_tokens}
    try:
        estimate.refuse_small_budget(setting.model, plans(), study.memory_budget, **chosen)
    except RequestError as error:
        raise ConfigError(str(error)) from None


def refuse_ways(setting: ResolvedStudy) -> None:
    """Raises `ModelError` where the study's model can never attend as it asks for on its device; loads no weights."""
    study = setting.study
    if study.attention in ("auto", "torch") or setting.model is None:
        return
    from iclperm.engine import estimate

    estimate.refuse_ways(setting.model, study.attention, device=study.device, dtype=study.dtype)


def _ways(study: Study) -> dict[str, Any]:
    """How a study's model is run, as `iclperm.engine.estimate` takes it."""
    return {key: getattr(study, key) for key in ("device", "dtype", "attention", "layers")}


def halved_peaks(work: Work, plans: Sequence[Plan]) -> tuple[int, int]:
    """Bytes of memory that a run of these plans is expected to take at its peak, and those in packs half the size."""
    from iclperm.engine import estimate

    study, model = work.setting.study, work.setting.model
    assert model is not None
    return estimate.halved_peaks(model, plans, **_ways(study))


def fitting_queries(setting: ResolvedStudy, prompts: Prompts) -> NDArray[np.int64]:
    """The numbers, int64, of the queries whose longest prompt fits the context window; a prompt is never cut.

    Raises `DataError` where none fits, where a content-free query does not, and for any other unless the study drops
    them.
    """
    window = None if setting.facts is None else setting.facts.max_tokens
    fed = prompts.fed_tokens(*[setting.max_new_tokens] if setting.is_generated else [])
    fits = fed <= (window or fed.max())
    content_free = setting.content_free
    if not fits[: content_free.start].any():
        raise DataError(
            f"each of the {content_free.start} queries makes some prompt that is longer than the context window of "
            f"{window} tokens (the longest feeds {int(fed.max())}); lower {_what_is_long(setting)}"
        )
    if not fits[content_free].all():
        raise DataError(
            f"calibration is 'contextual', but its content-free queries make prompts longer than the context window of "
            f"{window} tokens ({int(fed[content_free].max())}); lower 'shots' or set calibration to none"
        )
    if not fits.all() and setting.study.on_overlong == "error":
        raise DataError(
            f"{int(np.sum(~fits))} of {len(fits)} queries make prompts longer than the context window of {window} "
            f"tokens (query {int(np.argmax(fed))}: {int(fed.max())}); lower {_what_is_long(setting)} or set "
            "on_overlong: drop"
        )
    return np.flatnonzero(fits)


def _what_is_long(setting: ResolvedStudy) -> str:
    return "'shots' or 'max_new_tokens'" if setting.is_generated else "'shots'"


def refuse_foreign_tokenizer(tokenizer: Any, setting: ResolvedStudy, prompts: Prompts) -> None:
    """Raises `TokenizationError` where token ids show that the tokenizer was made for another model: ids beyond the
    model's, another BOS than the model's or two of it, or mostly unknown tokens."""
    whose = f"is this the own tokenizer of '{setting.model}'?"
    contexts = [row[: lengths[-1]] for row, lengths in zip(prompts.rows, prompts.marks, strict=True)]
    choices = [ids for own in prompts.choices or () for ids in own]
    parts = [*contexts, *prompts.queries, *prompts.continuations, *choices]
    highest, facts = max(int(ids.max(initial=0)) for ids in parts), setting.facts
    if facts is not None and highest >= facts.vocab_size:
        raise TokenizationError(
            f"token id {highest} is out of range: the model has {facts.vocab_size} token ids; {whose}"
        )
    own, given = () if facts is None else facts.bos_ids, tokenizer.bos_token_id
    opening = prompts.start.tolist()
    if own and given in opening and given not in own:
        raise TokenizationError(
            f"the tokenizer begins with BOS id {given}, but config.json says {min(own)}; {whose} If it is, correct "
            "bos_token_id in config.json"
        )
    if opening.count(given) > 1:
        raise TokenizationError(f"the tokenizer puts BOS (id {given}) in front of a prompt twice; repair its settings")
    unknown = tokenizer.unk_token_id
    if unknown is not None and (share := float(np.mean(np.concatenate(prompts.queries) == unknown))) > 0.5:
        raise TokenizationError(f"{share:.0%} of the queries' tokens are unknown to the tokenizer; {whose}")


def refuse_normalized_lists(study: Study) -> None:
    """Raises `ConfigError` where an API listed first tokens alone, and the lengths of labels would divide them."""
    if study.normalize != "sum":
        raise ConfigError(
            f"normalize is {study.normalize!r}, but the API lists first tokens only, which are compared as they are; "
            "set it to sum"
        )
