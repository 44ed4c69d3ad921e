"""lm-evaluation-harness with our engine as its model `iclperm`: the prompts of its `hf`, through the prefix tree.

Everything about text is the harness's own `HFLM`: tokens, chat templates, truncation, what stands before an empty
context. What is forwarded, and how often, is the engine's. Importing this registers the model; `main` is the harness's
command line.
"""

from __future__ import annotations

import difflib
import inspect
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, Self

import numpy as np
import torch
from lm_eval._cli import HarnessCLI
from lm_eval.api.instance import Instance
from lm_eval.api.registry import register_model
from lm_eval.loggers import evaluation_tracker
from lm_eval.models import huggingface
from lm_eval.utils import setup_logging, simple_parse_args_string
from tqdm import tqdm

from iclperm.base.outputs import output
from iclperm.engine import Engine
from iclperm.engine.encoding import Encoder
from iclperm.engine.tree import TokenArray
from iclperm.errors import ConfigError, ModelError

_LOG = logging.getLogger("lm_eval")
_CHUNK_TOKENS = 1 << 19  # tokens of a call to the engine: what an interrupt loses of a cached run
_CHUNK_TEXTS = 512  # windows or texts of a call
_RUN_ELSEWHERE = {  # arguments of `hf` that the engine has no use for
    "batch_size": "packs are as large as the engine wants them",
    "max_batch_size": "",
    "logits_cache": "",
    "use_fast_tokenizer": "",
    "truncation": "",
}
_OF_OURS = ("memory_budget", "pack_tokens", "attention", "layers", "plain")
_SAMPLED = {"temperature", "top_p", "top_k", "do_sample"}
_PLAIN_GENERATION = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "num_beams": 1, "suppress_tokens": None}


@register_model("iclperm")
class TreeLM(huggingface.HFLM):  # type: ignore[misc]
    """The harness's model whose requests go through the prefix tree, shared prefixes once.

    Args, as the harness gives them in ``--model_args``: ``pretrained`` is `demo`, a folder, a GGUF file or a hub id;
    ``revision``, ``dtype`` (`auto`: float32 on a CPU) and ``device`` are as everywhere in iclperm; ``peft`` is an
    adapter's folder, which is merged; ``memory_budget``, ``pack_tokens``, ``attention``, ``layers`` and ``plain`` are
    `Engine`'s; ``max_length``, ``add_bos_token``, ``prefix_token_id``, ``think_end_token``, ``enable_thinking`` and
    ``chat_template_args`` are `hf`'s; ``seed`` draws sampled texts. Batch sizes are taken and have no effect. Raises
    `ConfigError` for other arguments, and what loading a model raises.
    """

    def __init__(
        self,
        pretrained: str = "",
        *,
        revision: str | None = None,
        peft: str | None = None,
        dtype: str = "auto",
        device: str | None = None,
        max_length: int | None = None,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        think_end_token: str | int | None = None,
        enable_thinking: bool | None = None,
        chat_template_args: dict[str, Any] | None = None,
        seed: int = 0,
        **others: Any,
    ) -> None:
        options = {name: others.pop(name) for name in _OF_OURS if name in others}
        if unknown := sorted(set(others) - set(_RUN_ELSEWHERE)):
            close = difflib.get_close_matches(unknown[0], [*_OF_OURS, *inspect.signature(TreeLM).parameters], n=1)
            remedy = f"did you mean {close[0]}?" if close else "leave it out of --model_args, or run it with --model hf"
            raise ConfigError(f"iclperm as the harness's model takes no {unknown[0]!r}; {remedy}")
        if not pretrained:
            raise ConfigError("no model is named; give --model_args pretrained=demo, a folder or a hub id")
        _check("max_length", max_length, 1)
        _check("seed", seed, 0)
        if add_bos_token not in (None, True, False):
            raise ConfigError(f"add_bos_token is {add_bos_token!r}; give True or False in --model_args")
        if str(pretrained).lower().endswith(".gguf"):
            _LOG.info("reading %s, which takes a minute or two where the vocabulary is large", pretrained)
        self.engine = Engine.from_pretrained(
            pretrained,
            revision=revision,
            adapter=peft,
            dtype=dtype,
            device=_device(device),
            **options,
        )
        if self.engine.tokenizer is None:
            raise ModelError(f"{pretrained!r} has no tokenizer, and the harness gives texts; save it beside the model")
        embeddings: Any = self.engine.model.get_input_embeddings()
        _check("prefix_token_id", prefix_token_id, 0, int(embeddings.num_embeddings) - 1)
        with _without_advice():
            super().__init__(
                self.engine.model,
                tokenizer=self.engine.tokenizer,
                backend="causal",
                max_length=max_length,
                add_bos_token=add_bos_token,
                prefix_token_id=prefix_token_id,
                think_end_token=think_end_token,
                enable_thinking=enable_thinking,
                chat_template_args=chat_template_args,
                batch_size=_CHUNK_TEXTS,
            )
        # What it calls the model in its results.
        self.pretrained, self.revision = pretrained, revision or ""
        self._encoder = Encoder(self.engine.tokenizer, self.engine.model.config)
        self._seed, self._drawn = seed, Counter[bytes]()
        self._warn_of_the_models_own_penalties()

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> Self:
        """As `create_from_arg_obj`, of ``a=1,b=2``."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> Self:
        """Of ``--model_args`` and what the harness gives beside them; raises `ConfigError` for what both name."""
        beside = {name: value for name, value in (additional_config or {}).items() if value is not None}
        if both := sorted(beside.keys() & arg_dict):
            raise ConfigError(f"{both[0]} is in --model_args; give it as --{both[0]}")
        return cls(**arg_dict, **beside)

    @property
    def max_length(self) -> int:
        """Tokens that are fed at most."""
        return min(int(super().max_length), self.engine.max_tokens)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Tokens as `hf` makes them; what texts share is tokenised once."""
        if self.enable_thinking:
            return list(super().loglikelihood(requests, disable_tqdm=disable_tqdm))  # which refuses it
        texts = [(str(context), str(continuation)) for context, continuation in (each.args for each in requests)]
        start = self.tokenizer.decode(self.prefix_token_id)
        # Of these the harness decides what stands before them.
        alone = [
            not context.strip() or self.add_bos_token is not None or context.startswith(start) for context, _ in texts
        ]
        joint = iter(self._encoder.pairs([text for text, is_alone in zip(texts, alone, strict=True) if not is_alone]))
        encoded = [
            (text, *(self._encoded(*text) if is_alone else next(joint)))
            for text, is_alone in zip(texts, alone, strict=True)
        ]
        return self._loglikelihood_tokens(encoded, disable_tqdm=disable_tqdm)

    def _encoded(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """One request, word for word as `TemplateLM.loglikelihood` does."""
        if context:
            before, after = self._encode_pair(context, continuation)
            return (before or [self.prefix_token_id]), after
        ids = self.tok_encode(continuation, add_special_tokens=False)
        return ([self.prefix_token_id], ids) if self.prefix_token_id != ids[0] else (ids[:1], ids[1:])

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, Sequence[int], Sequence[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        fed = [_fed(before, after, self.max_length) for _, before, after in requests]
        for numbers in _chunks([np.concatenate(pair) for pair in fed]):
            with _bar("loglikelihood", disable_tqdm or override_bs is not None) as progress:
                scores = self.engine.loglikelihood([fed[number] for number in numbers], progress=progress)
            for number, logprob, is_greedy in zip(numbers, scores.logprob, scores.is_greedy, strict=True):
                answers[number] = float(logprob), bool(is_greedy)
                if requests[number][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[number][0], answers[number])
        return answers

    def tok_batch_encode(self, strings: Sequence[str], *args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Each text by itself, as `hf` does in batches of one: whether it begins with BOS is not its neighbour's."""
        rows = [super(TreeLM, self).tok_batch_encode([text], *args, **options)[0][0] for text in strings]
        ids, mask = (torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64) for _ in range(2))
        for number, row in enumerate(rows):
            ids[number, ids.shape[1] - len(row) :] = row
            mask[number, ids.shape[1] - len(row) :] = 1
        return ids, mask

    def _model_generate(
        self,
        context: torch.Tensor,
        max_length: int,
        stop: list[str],
        attention_mask: torch.Tensor | None = None,
        **choices: Any,
    ) -> torch.Tensor:
        """Texts after contexts [B, T], padded on their left, as [B, T + most new tokens], padded on their right."""
        assert attention_mask is not None
        rows = [ids[mask.bool()].numpy().astype(np.int32) for ids, mask in zip(context, attention_mask, strict=True)]
        most = max_length - context.shape[1]
        ids = self._texts(rows, most, [word for word in stop if word], self._sampling(choices))
        out = torch.full((len(rows), context.shape[1] + max(map(len, ids), default=0)), self.tokenizer.pad_token_id)
        out[:, : context.shape[1]] = context
        for row, each in zip(out, ids, strict=True):
            row[context.shape[1] : context.shape[1] + len(each)] = torch.from_numpy(each)
        return out

    def _texts(
        self, rows: Sequence[TokenArray], most: int, stop: list[str], sampling: Mapping[str, Any]
    ) -> list[TokenArray]:
        """Token ids of a text after each row. Of equal rows each has a text of its own where chance decides."""
        with _bar("generate_until", False) as progress:
            if not sampling:
                return self.engine.generate(rows, most, stop, progress=progress).token_ids
        texts: list[TokenArray] = [np.empty(0, np.int32)] * len(rows)
        places: dict[bytes, list[int]] = {}
        for place, row in enumerate(rows):
            places.setdefault(row.tobytes(), []).append(place)
        by_count: dict[int, list[bytes]] = {}
        for key, of in places.items():
            by_count.setdefault(self._drawn[key] + len(of), []).append(key)
        for count, keys in by_count.items():
            found = self.engine.generate(
                [rows[places[key][0]] for key in keys], most, stop, num_samples=count, seed=self._seed, **sampling
            ).token_ids
            for number, key in enumerate(keys):
                new = found[count * number : count * (number + 1)][self._drawn[key] :]
                for place, ids in zip(places[key], new, strict=True):
                    texts[place] = ids
                self._drawn[key] = count
        return texts

    def _sampling(self, choices: dict[str, Any]) -> dict[str, Any]:
        """What the engine is told of how a token is chosen; nothing where it is the likeliest."""
        if unknown := sorted(set(choices) - _SAMPLED):
            _refuse(f"generation option {unknown[0]!r}", choices[unknown[0]], "the task's generation_kwargs")
        temperature = float(choices.get("temperature") or 0.0)
        if not choices.get("do_sample") or not temperature:
            return {}
        settings = getattr(self.engine.model, "generation_config", None)
        top_p, top_k = (
            choices[name] if name in choices else getattr(settings, name, None) for name in ("top_p", "top_k")
        )
        return {"temperature": temperature, "top_p": float(top_p or 1.0), "top_k": int(top_k or 0)}

    def _warn_of_the_models_own_penalties(self) -> None:
        settings = getattr(self.engine.model, "generation_config", None)
        for name, plain in _PLAIN_GENERATION.items():
            if (value := getattr(settings, name, plain)) not in (plain, None):
                _LOG.warning(
                    "the model's generation_config has %s = %s, which --model hf applies to generated texts and "
                    "iclperm does not",
                    name,
                    value,
                )


def main(arguments: Sequence[str]) -> None:
    """The harness's own command line on ``arguments``, with the model `iclperm` unless they name another."""
    given = [each for each in arguments if each != "--debug"]  # which is ours
    is_run = not given or given[0] not in ("ls", "validate", "-h", "--help")
    named = any(each.partition("=")[0] in ("--model", "-M", "--config", "-C") for each in given)
    if is_run and not named and not {"-h", "--help"} & set(given) and given:
        given += ["--model", "iclperm"]
    before = sys.argv
    sys.argv = ["iclperm lm-eval", *given]
    try:
        setup_logging()
        harness = HarnessCLI()
        chosen = harness.parse_args()
        if getattr(chosen, "model", None) == "iclperm" and not (chosen.device or chosen.config):
            chosen.device = "auto"  # the harness's own is cuda:0, which would look as if one had asked for it
        if place := getattr(chosen, "output_path", None):
            _check_place(Path(place))
        with _results_written():
            harness.execute(chosen)
    finally:
        sys.argv = before


def _check_place(given: Path) -> None:
    """Refuses, before anything is computed, what the harness could not write its results to."""
    place = output(given.parent if given.suffix == ".json" else given, is_folder=True)
    there = next(each for each in (place, *place.absolute().parents) if each.exists())
    if not there.is_dir():
        raise ConfigError(f"--output_path is {str(given)!r}, and {there} is a file; name a folder")
    if not os.access(there, os.W_OK):
        raise ConfigError(f"--output_path is {str(given)!r}, and {there} cannot be written to; name another folder")


@contextmanager
def _results_written() -> Iterator[None]:
    """Raises ModelError at the end where the harness could not save its results, which it only warns of."""
    failed: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        if (said := record.getMessage()).startswith("Could not save"):
            failed.append(said)
        return True

    evaluation_tracker.eval_logger.addFilter(keep)
    try:
        yield
    finally:
        evaluation_tracker.eval_logger.removeFilter(keep)
    if failed:
        raise ModelError(f"the harness could not save its results to --output_path ({failed[0]}); name another folder")


def _device(given: str | None) -> str:
    """As `hf`, does without a GPU where there is none, and says so."""
    if given is not None and given.startswith("cuda") and not torch.cuda.is_available():
        _LOG.warning("the device is %s, but torch finds no GPU here; the model runs on the CPU", given)
        return "cpu"
    return given or "auto"


def _check(name: str, value: object, least: int, most: int | None = None) -> None:
    """Refuses what is no whole number within bounds; none is given where it is None."""
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < least or (most is not None and value > most):
        upto = "on" if most is None else f"to {most}"
        raise ConfigError(f"{name} is {value!r}; give a whole number from {least} {upto} in --model_args")


def _refuse(what: str, value: object, where: str) -> NoReturn:
    raise ConfigError(f"{what} is {value!r}, which the prefix tree has no way for; leave it out of {where}, or run hf")


def _fed(before: Sequence[int], after: Sequence[int], most: int) -> tuple[TokenArray, TokenArray]:
    """A context and its continuation, without what is too far on the left, as `hf` cuts: ``most`` tokens are fed."""
    context, continuation = np.asarray(before, np.int32), np.asarray(after, np.int32)
    if continuation.size > most:
        raise ConfigError(
            f"a continuation has {continuation.size} tokens, and the model reads {most}; leave that task out"
        )
    if (over := context.size + continuation.size - most - 1) > 0:
        _LOG.warning("a prompt of %d tokens is too long for %d; its first %d are cut", context.size, most, over)
    return context[max(over, 0) :], continuation


def _chunks(rows: Sequence[TokenArray]) -> Iterator[list[int]]:
    """Numbers of rows, those that begin alike together, in chunks of about `_CHUNK_TOKENS` distinct tokens."""
    order = sorted(range(len(rows)), key=lambda number: rows[number].astype(">i4").tobytes())
    chunk: list[int] = []
    size, last = 0, np.empty(0, np.int32)
    for number in order:
        row = rows[number]
        most = min(row.size, last.size)
        differs = np.flatnonzero(row[:most] != last[:most])
        size += row.size - (int(differs[0]) if differs.size else most)
        chunk.append(number)
        last = row
        if size >= _CHUNK_TOKENS:
            yield chunk
            chunk, size, last = [], 0, np.empty(0, np.int32)
    if chunk:
        yield chunk


@contextmanager
def _bar(what: str, is_off: bool) -> Iterator[Any]:
    """Within: a progress of the engine's that is shown as the harness shows its own, in tokens."""
    with tqdm(desc=f"Running {what} requests", unit=" tokens", disable=is_off, leave=False) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield progress


@contextmanager
def _without_advice() -> Iterator[None]:
    """Within: no warning that arguments are ignored because a model is given; ours are not."""
    log, level = huggingface.eval_logger, huggingface.eval_logger.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
