"""Completions and the log-probabilities of their tokens, for requests that come one by one and are answered together.

All requests that wait are one batch of a session: what they have in common, and what earlier ones left, is forwarded
once. No HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from iclperm.engine import Engine
from iclperm.engine.encoding import Encoder
from iclperm.engine.session import NextTokens, Node, Session
from iclperm.engine.tree import Ids, TokenArray
from iclperm.errors import IclpermError, RequestError
from iclperm.study.sizes import Budget

_MOST_TOKENS = 1 << 23  # distinct tokens of a session, after which another is begun: some 30 bytes each


@dataclass(frozen=True)
class CompletionRequest:
    """What one request asks of the engine.

    ``texts`` are what prompts read as. ``top`` alternatives of each token come with its log-probability, of the
    prompt's tokens too with ``is_echo``; None where no log-probability is wanted.
    """

    prompts: list[TokenArray]
    texts: list[str]
    max_tokens: int
    stop: tuple[str, ...] = ()
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    n: int = 1
    is_echo: bool = False
    top: int | None = None


@dataclass(frozen=True)
class TokenNumbers:
    """Tokens of a completion as they read, [T]; log-probabilities in nats, NaN of a first token, which nothing
    predicts; and the likeliest tokens in the place of each, none of such a first one."""

    tokens: list[str]
    logprobs: npt.NDArray[np.float32]
    top: list[list[tuple[str, float]]]

    def __add__(self, other: TokenNumbers | None) -> TokenNumbers:
        """These, and others after them."""
        if other is None:
            return self
        logprobs = np.concatenate([self.logprobs, other.logprobs])
        return TokenNumbers(self.tokens + other.tokens, logprobs, self.top + other.top)


@dataclass(frozen=True)
class Completion:
    """One text; ``finish`` is as in `iclperm.engine.texts.Generations`, and ``length`` where nothing was generated."""

    text: str
    finish: str
    num_tokens: int
    numbers: TokenNumbers | None


@dataclass(frozen=True)
class _Drawn:
    """A text before it is put into words: its prompt and what was generated."""

    prompt: TokenArray
    new: TokenArray
    text: str
    finish: str
    num_tokens: int


class Completer:
    """Answers batches of requests from one session of an engine, of ``memory_budget``; one batch at a time.

    Raises `RequestError` where the engine has no tokenizer, or can have no session.
    """

    def __init__(self, engine: Engine, memory_budget: Budget | None = None) -> None:
        if engine.tokenizer is None:
            raise RequestError("a server answers in text, and the model has no tokenizer; save it beside the model")
        self._engine, self._tokenizer = engine, engine.tokenizer
        self._encoder = Encoder(engine.tokenizer, engine.model.config)
        self._vocab_size: int = engine.model.config.get_text_config().vocab_size
        self._memory_budget = memory_budget
        self._session = engine.session(memory_budget)

    @property
    def session(self) -> Session:
        """The session of now; another is begun when one has seen very many tokens."""
        return self._session

    @property
    def max_tokens(self) -> int:
        """Tokens that a prompt and what follows it may have."""
        return self._engine.max_tokens

    @property
    def has_chat(self) -> bool:
        """Whether the tokenizer says how a conversation is written."""
        return bool(getattr(self._tokenizer, "chat_template", None))

    def encoded(self, prompts: Sequence[str | Ids]) -> list[TokenArray]:
        """Token ids of prompts, BOS included where text gets one; raises `RequestError` for ids that there are not."""
        rows = self._encoder.prompts(prompts)
        if rows.tokens.size and int(rows.tokens.max()) >= self._vocab_size:
            raise RequestError(
                f"token id {int(rows.tokens.max())} is out of range; the model has {self._vocab_size} token ids"
            )
        return [rows[number] for number in range(len(rows))]

    def conversation(self, messages: Sequence[dict[str, str]]) -> TokenArray:
        """Token ids of a conversation, up to where the model speaks; raises `RequestError` as the template does."""
        try:
            text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template may raise anything
            raise RequestError(f"the model's chat template takes no such messages: {error}") from None
        return np.asarray(self._tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)

    def read(self, ids: Ids) -> str:
        """The text of token ids."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def answers(self, batch: Sequence[CompletionRequest]) -> list[list[Completion] | IclpermError]:
        """The completions of each request, ``n`` of each of its prompts; where a request cannot be answered, why."""
        try:
            return [*self._answered(batch)]
        except IclpermError as error:
            return [error] if len(batch) == 1 else [self.answers([asked])[0] for asked in batch]

    def _answered(self, batch: Sequence[CompletionRequest]) -> list[list[Completion]]:
        if self._session.num_tokens > _MOST_TOKENS:
            self._session.close()
            self._session = self._engine.session(self._memory_budget)
        # What is read after a prompt's tokens comes first: a text passes them over, and they would be forwarded again.
        echoes = iter(self._numbers([(ids, 0, asked.top) for asked in batch if asked.is_echo for ids in asked.prompts]))
        drawn = self._drawn(batch)
        after = [
            (np.concatenate([text.prompt, text.new]), text.prompt.size, asked.top)
            for asked, texts in zip(batch, drawn, strict=True)
            for text in texts
        ]
        numbers = iter(self._numbers(after))
        found: list[list[Completion]] = []
        for asked, texts in zip(batch, drawn, strict=True):
            before = [next(echoes) if asked.is_echo else None for _ in asked.prompts]
            found.append([_completion(asked, place, text, before, next(numbers)) for place, text in enumerate(texts)])
        return found

    def _drawn(self, batch: Sequence[CompletionRequest]) -> list[list[_Drawn]]:
        """The texts of each request; requests that ask alike are one call of the session."""
        found: list[list[_Drawn]] = [[] for _ in batch]
        alike: dict[tuple[Any, ...], list[int]] = {}
        for place, asked in enumerate(batch):
            chance = (asked.temperature, asked.top_p, asked.seed) if asked.temperature else ()
            alike.setdefault((asked.max_tokens, asked.stop, asked.n, chance), []).append(place)
        for places in alike.values():
            first, n = batch[places[0]], batch[places[0]].n
            prompts = [prompt for place in places for prompt in batch[place].prompts]
            if first.max_tokens == 0:
                texts = [_Drawn(prompt, prompt[:0], "", "length", 0) for prompt in prompts for _ in range(n)]
            else:
                made = self._session.generate(
                    [self._session.extend(None, prompt) for prompt in prompts],
                    first.max_tokens,
                    first.stop,
                    temperature=first.temperature,
                    top_p=first.top_p,
                    seed=first.seed,
                    num_samples=n,
                )
                if made.state.any():
                    raise RequestError("the model's logits are not finite; nothing can be told of its texts")
                assert made.text is not None
                texts = [
                    _Drawn(prompts[number // n], *each)
                    for number, each in enumerate(
                        zip(made.token_ids, made.text, made.finish, made.num_tokens.tolist(), strict=True)
                    )
                ]
            left = iter(texts)
            for place in places:
                found[place] = [next(left) for _ in range(n * len(batch[place].prompts))]
        return found

    def _numbers(self, rows: Sequence[tuple[TokenArray, int, int | None]]) -> list[TokenNumbers | None]:
        """Of each (ids, begin, top) the log-probabilities from token ``begin`` on, in two calls of the session for all;
        None where ``top`` is."""
        nodes: dict[Node, int] = {}
        scored: list[tuple[Node, TokenArray]] = []
        places: list[list[int]] = []
        for ids, begin, top in rows:
            first = max(begin, 1)  # of which something is known
            places.append([])
            if top is None or first >= ids.size:
                continue
            node = self._session.extend(None, ids[:first])
            scored.append((node, ids[first:]))
            for place in range(first, ids.size if top else first):
                places[-1].append(nodes.setdefault(node, len(nodes)))
                node = self._session.extend(node, ids[place : place + 1]) if place + 1 < ids.size else node
        most = max((top or 0 for *_, top in rows), default=0)
        likeliest = self._session.next_token([*nodes], most) if nodes else None
        scores, number = self._session.loglikelihood(scored), 0
        found: list[TokenNumbers | None] = []
        for (ids, begin, top), of_row in zip(rows, places, strict=True):
            if top is None:
                found.append(None)
                continue
            logprobs, first = np.full(ids.size - begin, np.nan, np.float32), max(begin, 1)
            if first < ids.size:
                logprobs[first - begin :], number = scores.tokens(number), number + 1
            tokens = [str(self._tokenizer.decode([token])) for token in ids[begin:].tolist()]
            listed = [self._likeliest(likeliest, place, top) for place in of_row]
            found.append(TokenNumbers(tokens, logprobs, [[]] * (len(tokens) - len(listed)) + listed))
        return found

    def _likeliest(self, found: NextTokens | None, place: int, most: int) -> list[tuple[str, float]]:
        assert found is not None
        ids, logprobs = found.ids[place, :most].tolist(), found.logprob[place, :most].tolist()
        return [(str(self._tokenizer.decode([token])), value) for token, value in zip(ids, logprobs, strict=True)]


def _completion(
    asked: CompletionRequest,
    place: int,
    text: _Drawn,
    echoes: Sequence[TokenNumbers | None],
    numbers: TokenNumbers | None,
) -> Completion:
    before, echo = asked.texts[place // asked.n] if asked.is_echo else "", echoes[place // asked.n]
    return Completion(before + text.text, text.finish, text.num_tokens, numbers if echo is None else echo + numbers)


class Waiting:
    """Requests of one event loop: those that come while a batch runs, in a thread, are the next batch."""

    def __init__(self, answers: Callable[[Sequence[CompletionRequest]], list[list[Completion] | IclpermError]]) -> None:
        self._answers = answers
        self._waiting: list[tuple[CompletionRequest, asyncio.Future[list[Completion] | IclpermError]]] = []
        self._work: asyncio.Task[None] | None = None

    async def answer(self, asked: CompletionRequest) -> list[Completion]:
        """The completions of a request; raises why there are none."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((asked, future))
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._answer_all())
        found: list[Completion] | IclpermError = await future
        if isinstance(found, IclpermError):
            raise found
        return found

    async def _answer_all(self) -> None:
        while batch := [(asked, future) for asked, future in self._waiting if not future.done()]:
            self._waiting = []
            try:
                found = await asyncio.to_thread(self._answers, [asked for asked, _ in batch])
            except Exception as error:
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, future), each in zip(batch, found, strict=True):
                if not future.done():  # its client has gone
                    future.set_result(each)
