"""A server's replies: read strictly, kept small, and turned into text or log-probabilities."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Annotated, Any, Literal, NamedTuple, Self

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from iclperm.endpoint.decode import decoded
from iclperm.endpoint.secret import CUT
from iclperm.errors import printable
from iclperm.study.endpoint import Spent

State = Literal["ok", "refused", "overlong", "invalid", "unparsed", "api_missing"]

_CONTEXT_KEPT = 8  # tokens before a label that are kept of an echoed prompt
_KEPT = ("id", "model", "created", "choices", "usage", "system_fingerprint")
_WITHOUT = "iclperm_without"  # no server's name
_PIECES = ("\ufffd", "bytes:")  # of a character, as tokens are shown
_BROKEN_OFF = ("error", "abort", "insufficient_system_resource")  # as OpenRouter, vLLM and DeepSeek say it
_ERROR_READ = 10_000  # characters of an error that are looked at
_ROUNDING = 1e-3  # nats above 0 that are a server's rounding
_LEAST_NATS = -1e30  # sums of as many as there can be are finite in float32
_MOST_COUNT = 10**12  # tokens that a reply can have cost
_VERSION = re.compile(r"@[\w.-]+|[-_.:](20\d{2}-?\d{2}-?\d{2}|\d{4}|\d{2}-\d{2,4}|00[1-9])")
_ROUTES = (":free", ":nitro", ":floor")  # of OpenRouter: who serves a model, not which
_GENERATED = "iclperm_generated"  # tokens at the end of a kept echo that are none of the prompt's; no server's name


class Reply(NamedTuple):
    """One draw of one prompt; the text is empty and tokens are 0 unless ``state`` is ok."""

    text: str  # up to the first stop string
    finish: str  # stop, length, or as the server says
    prompt_tokens: int
    cached_tokens: int  # of those, found in the provider's cache
    completion_tokens: int  # reasoning included
    logprob: float | None  # of all generated tokens, nats; None where the server gives none
    state: State  # ok, refused, overlong, api_missing
    draw: int
    problem: str = ""  # why it is not ok, in one line


class Scored(NamedTuple):
    """The labels of one prompt, [L] each; log-probabilities are NaN unless ``state`` is ok."""

    logprob: tuple[float, ...]  # nats
    num_tokens: tuple[int, ...]
    is_bound: tuple[bool, ...]  # not listed by the server: at most this
    state: State  # ok, invalid, unparsed, refused, overlong, api_missing
    problem: str = ""


class RequestResult(NamedTuple):
    """What became of a request: a reply, or the problem in one line."""

    state: State
    reply: dict[str, Any] | None  # as it is in the ledger
    problem: str


def one_line(text: str) -> str:
    """Somebody else's text as one short line."""
    short = printable(" ".join(text.split()))
    return short if len(short) <= 200 else f"{short[:197]}..."


def is_version_of(name: str, asked: str) -> bool:
    """Whether a reply's model is the one asked for, or its dated or numbered version or revision.

    Names are the same with Gemini's ``models/`` before them or Ollama's ``:latest`` behind, which stand for nothing
    else; a name that was asked with one of OpenRouter's routes may come without it.
    """
    name, asked = (each.removeprefix("models/").removesuffix(":latest") for each in (name, asked))
    if route := next((each for each in _ROUTES if asked.endswith(each)), ""):
        name, asked = name.removesuffix(route), asked.removesuffix(route)
    base = asked.removesuffix("-latest")
    is_later = name.startswith(base) and _VERSION.fullmatch(name[len(base) :]) is not None
    return bool(base) and (name == asked or is_later)


class Refusal(NamedTuple):
    """What an HTTP error says; each text is empty where it says nothing."""

    message: str
    param: str
    described: str  # its code, type and message in one


def read_reply(raw: bytes, cut: Callable[[str], str] = str) -> dict[str, Any]:
    """A reply from its JSON, each text as ``cut`` leaves it; raises ValueError where it is not a complete one."""
    found = checked_reply(decoded(raw, cut), cut)
    if all(found["choices"][0].get(name) is None for name in ("message", "text")):
        raise ValueError("there is no text in its choice")
    return found


def checked_reply(reply: Any, cut: Callable[[str], str] = str) -> dict[str, Any]:
    """A reply of a server or of a ledger as `_Answered` has it; raises ValueError where it is not a complete one, or
    tells of an error."""
    if error := _mapping(reply).get("error"):
        raise ValueError(f"it is an error: {one_line(cut(str(_mapping(error).get('message') or error)))}")
    try:
        found = _Answered.model_validate(reply).model_dump(by_alias=True, exclude_unset=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc'][:6])) or 'all of it'}: {first['msg']}") from None
    choice = found["choices"][0]
    if choice.get("error") or choice.get("finish_reason") in _BROKEN_OFF:
        raise ValueError(f"its text was broken off: {choice.get('finish_reason')}")
    message = choice.get("message")
    if message is not None and message.get("content"):
        message["content"] = cut(message["content"])  # of several parts, in which it may have come
    spelt = _spelt(_mapping(choice.get("logprobs")))
    if CUT in str(_mapping(message).get("content") or choice.get("text")) or cut(spelt) != spelt:
        choice.pop("logprobs", None)  # of tokens, over which the key is spread
    return found


def refuse_numberless(reply: Mapping[str, Any]) -> None:
    """Raises ValueError for log-probabilities that do not fit their tokens, or that none of them has: such a reply does
    not tell whether a server gives any, and if it were kept it would decide that for good."""
    given = reply["choices"][0].get("logprobs")
    logprobs = _mapping(given)
    tokens, values = (_list(logprobs.get(name)) for name in ("tokens", "token_logprobs"))
    if len(tokens) != len(values) or (given is not None and not isinstance(given, Mapping)):
        raise ValueError(f"its {len(tokens)} tokens have {len(values)} log-probabilities")
    if len(values) > 1 and all(value is None for value in values):  # of an echo the first alone has none
        raise ValueError(f"none of its {len(values)} tokens has a log-probability")


def read_refusal(raw: bytes, otherwise: str, cut: Callable[[str], str]) -> Refusal:
    """What an HTTP error says, as far as that is known JSON; else its bytes as text, or ``otherwise``."""
    try:
        body = decoded(raw, cut)
    except ValueError:
        text = cut(raw[:_ERROR_READ].decode("utf-8", "replace")).strip()
        return Refusal(one_line(text or otherwise), "", text)
    body = body[0] if isinstance(body, list) and len(body) == 1 else body  # as Gemini sends it
    within = _mapping(_mapping(body).get("error")) or _mapping(body)
    said = [within.get(name) for name in ("message", "detail", "error")]
    message = next((each for each in said if isinstance(each, str) and each), str(within or body or otherwise))
    code, kind, param = (str(within.get(name) or "") for name in ("code", "type", "param"))
    return Refusal(one_line(message), param, f"{code} {kind} {message}"[:_ERROR_READ])


def spent_on(reply: Mapping[str, Any], bound: Spent) -> Spent:
    """Tokens paid for; counts that the reply lacks are taken at their ``bound``.

    No prompt has 0 tokens, and no text: then nobody counted. What a total holds beyond both was paid for as well: the
    reasoning that some providers leave out of the tokens of a reply.
    """
    usage, choice = _mapping(reply.get("usage")), _mapping(reply["choices"][0])
    cached = _mapping(usage.get("prompt_tokens_details")).get("cached_tokens")
    prompt, completion = usage.get("prompt_tokens") or None, usage.get("completion_tokens")
    if completion == 0 and (choice.get("text") or _mapping(choice.get("message")).get("content")):
        completion = None

    def known(value: int | None, otherwise: int) -> int:
        return otherwise if value is None else value

    prompt = known(prompt, bound.prompt_tokens)
    beyond = known(usage.get("total_tokens"), 0) - prompt
    cached = known(cached, known(usage.get("prompt_cache_hit_tokens"), 0))
    return Spent(1, prompt, min(prompt, cached), max(known(completion, bound.completion_tokens), beyond))


def compact(
    reply: Mapping[str, Any], echoed: str | None, dropped: Set[str] = frozenset(), prompt: str = ""
) -> dict[str, Any]:
    """What is kept of a reply.

    ``dropped`` are names of parameters that were wanted and not sent; they are kept with it. Of a ``prompt`` that was
    echoed for its last part, ``echoed``, only the tokens at the end are kept, with how many of them are not its own;
    none where it is another prompt that came back, or not all of it.
    """
    kept = {name: reply[name] for name in _KEPT if name in reply}
    if dropped:
        kept[_WITHOUT] = sorted(dropped)
    if echoed is not None:
        choice = {name: value for name, value in reply["choices"][0].items() if name != "text"}
        logprobs = _mapping(choice.get("logprobs"))
        if not _is_echo(str(reply["choices"][0].get("text")), _list(logprobs.get("tokens")), prompt):
            logprobs = {}
        most = len(echoed.encode()) + _CONTEXT_KEPT + 1  # a token holds a byte at least
        choice["logprobs"] = {name: _list(logprobs.get(name))[-most:] for name in ("tokens", "token_logprobs")}
        if (
            generated := _num_generated(_list(logprobs.get("tokens")), _mapping(reply.get("usage")), prompt)
        ) is not None:
            choice["logprobs"][_GENERATED] = generated
        kept["choices"] = [choice]
    return kept


def _spelt(logprobs: Mapping[str, Any]) -> str:
    """What all tokens of a reply say together."""
    tokens = [each.get("token") for each in _list(logprobs.get("content"))] or _list(logprobs.get("tokens"))
    return "".join(token or "" for token in tokens)


def _is_echo(text: str, tokens: list[Any], prompt: str) -> bool:
    """Whether text or tokens of a reply hold a prompt, as far as its letters and digits tell: the rest is where servers
    differ. Where pieces of characters are shown, those of ASCII have to be there, and as many of all as in the prompt.
    """
    asked = _letters(prompt)
    plain = "".join(filter(str.isascii, asked))
    for view in (text, "".join(map(str, tokens))):
        shown = _letters(view)
        if asked in shown:
            return True
        if (pieces := sum(map(view.count, _PIECES))) and len(shown) + pieces >= len(asked):
            return plain in "".join(filter(str.isascii, shown))
    return False


def _letters(text: str) -> str:
    """Letters and digits of any script, as tokenizers may compose them, in small ones."""
    return "".join(filter(str.isalnum, unicodedata.normalize("NFKC", text).casefold()))


def _num_generated(tokens: list[Any], usage: Mapping[str, Any], prompt: str) -> int | None:
    """How many of an echo's tokens follow its prompt; None where neither its text nor its usage tells.

    One token is asked for and counts as paid for, but a server need not list it: not an end of the text, for one, which
    others list and count nowhere. So the text of the prompt tells; where it does not come back as it was sent, since
    characters are split over tokens, the counts do, as far as all tokens are listed.
    """
    if not prompt or not all(isinstance(token, str) for token in tokens):
        return None
    end = "".join(tokens).find(prompt) + len(prompt)  # what is before it begins the text, and is no second prompt
    at = 0
    for number, token in enumerate(tokens if end >= len(prompt) else [], start=1):
        at += len(token)
        if at >= end:
            return len(tokens) - number if at == end else None
    prompted, generated = usage.get("prompt_tokens"), usage.get("completion_tokens")
    if prompted is None or generated is None or len(tokens) != prompted + generated:
        return None
    return int(generated)


def without(reply: Mapping[str, Any]) -> list[str]:
    """The parameters that a kept reply's request had to leave out, because the server does not take them."""
    return _list(reply.get(_WITHOUT))


def refusal(reply: Mapping[str, Any]) -> str:
    """Why the model would not answer; empty where it did."""
    choice = reply["choices"][0]
    if choice.get("finish_reason") == "content_filter":
        return "the content filter"
    said = _mapping(choice.get("message")).get("refusal")
    return one_line(str(said)) if said else ""


def as_reply(result: RequestResult, draw: int, stop: Sequence[str]) -> Reply:
    """The text of a generation, cut at the first stop string: some servers leave it in, some accept only a few."""
    if result.reply is None or result.state != "ok":
        return Reply("", "", 0, 0, 0, None, result.state, draw, result.problem)
    choice = result.reply["choices"][0]
    message = choice.get("message")
    whole = (choice.get("text") if message is None else _mapping(message).get("content")) or ""
    text = whole[: min((at for each in stop if (at := whole.find(each)) >= 0), default=len(whole))]
    finish = str(choice.get("finish_reason") or "") if text == whole else "stop"
    spent = spent_on(result.reply, Spent())
    tokens = (spent.prompt_tokens, spent.cached_tokens, spent.completion_tokens)
    return Reply(text, finish, *tokens, _sum(choice), "ok", draw)


def as_echoed(results: Sequence[RequestResult], labels: Sequence[str], first_token_only: bool = False) -> Scored:
    """The labels of one prompt, scored from echoed prompts that each end in one label.

    Where a label's first token begins within the context, all labels of the prompt are scored from there on.
    """
    tails: list[_Tail] = []
    for result, label in zip(results, labels, strict=True):
        if result.state != "ok" or result.reply is None:
            return _unscored(len(labels), result.state, result.problem)
        tail = _Tail.of(result.reply, label)
        if tail is None:
            return _unscored(len(labels), "invalid", f"no tokens of {label!r} at the end of the echoed prompt")
        tails.append(tail)
    lead, before = 0, -1
    while lead != before:
        before = lead
        lead = max(tail.covered(len(label) + lead) - len(label) for tail, label in zip(tails, labels, strict=True))
    logprob: list[float] = []
    num_tokens: list[int] = []
    for tail, label in zip(tails, labels, strict=True):
        values = tail.logprobs(len(label) + lead)[: 1 if first_token_only else None]
        if not values or any(value is None for value in values):
            return _unscored(len(labels), "invalid", f"the server gives no log-probability of {label!r}")
        logprob.append(math.fsum(values))
        num_tokens.append(len(values))
    return Scored(tuple(logprob), tuple(num_tokens), (False,) * len(labels), "ok")


def top_logprobs(reply: Mapping[str, Any]) -> dict[str, float | None]:
    """Alternatives of the first generated token, nats; None of one without a number, empty where there are none."""
    logprobs = _mapping(reply["choices"][0].get("logprobs"))
    if content := _list(logprobs.get("content")):
        alternatives = [_mapping(each) for each in _list(_mapping(content[0]).get("top_logprobs"))]
        listed = [(each.get("token"), each.get("logprob")) for each in alternatives]
    else:
        first = _list(logprobs.get("top_logprobs"))[:1]
        listed = [pair for each in first for pair in _mapping(each).items()]
    found: dict[str, float | None] = {}
    for token, value in listed:  # a text that several tokens have counts once, as the likeliest; unknown as one of them
        before = found.get(str(token), value)
        found[str(token)] = None if before is None or value is None else max(before, value)
    return found


def as_listed(result: RequestResult, starts: Sequence[str]) -> Scored:
    """The labels of one prompt, scored by their first tokens, ``starts``, among the alternatives that the server lists
    for the first generated token."""
    if result.state != "ok" or result.reply is None:
        return _unscored(len(starts), result.state, result.problem)
    given = top_logprobs(result.reply)
    listed = {token: value for token, value in given.items() if value is not None}
    if not listed or any(start in given and start not in listed for start in starts):
        return _unscored(len(starts), "invalid", "the server gives no log-probability of a first token that it lists")
    if not any(start in listed for start in starts):
        return _unscored(len(starts), "unparsed", "no label is among the likeliest first tokens")
    below = float(np.nextafter(np.float32(min(listed.values())), np.float32(-np.inf)))
    is_bound = tuple(start not in listed for start in starts)
    return Scored(tuple(listed.get(start, below) for start in starts), (1,) * len(starts), is_bound, "ok")


def _nats(value: Any) -> float | None:
    """A log-probability; None for what is none. What lies at most 1e-3 above 0 is rounding, and taken for 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not _LEAST_NATS <= value <= _ROUNDING:
        return None
    return min(float(value), 0.0)


def _count(value: Any) -> int | None:
    """A count of tokens, which some servers give as 12.0; None for what is none."""
    if type(value) not in (int, float) or not 0 <= value <= _MOST_COUNT or value != int(value):
        return None
    return int(value)


def _joined(content: Any) -> Any:
    """The text of a message, which may come in parts; parts of another type, such as reasoning, are no answer."""
    if not isinstance(content, list):
        return content
    texts: list[Any] = [
        part if isinstance(part, str) else _mapping(part).get("text")
        for part in content
        if isinstance(part, str) or _mapping(part).get("type", "text") in ("text", "output_text")
    ]
    return "".join(texts) if all(isinstance(text, str) for text in texts) else content


def _if(*kinds: type) -> BeforeValidator:
    """What is of another kind counts as if it were not there."""
    return BeforeValidator(lambda value: value if type(value) in kinds else None)


_Nats = Annotated[float | None, BeforeValidator(_nats)]
_Words = Annotated[str | None, _if(str)]
_Count = Annotated[int | None, BeforeValidator(_count)]


class _Loose(BaseModel):
    """A part of a reply of which more may come than is looked at."""

    model_config = ConfigDict(extra="allow")


class _Cached(_Loose):
    cached_tokens: _Count = None


class _Used(_Loose):
    prompt_tokens: _Count = None
    completion_tokens: _Count = None
    total_tokens: _Count = None
    prompt_cache_hit_tokens: _Count = None
    prompt_tokens_details: Annotated[_Cached | None, _if(dict)] = None


class _Said(_Loose):
    content: Annotated[str | None, BeforeValidator(_joined)] = None
    refusal: _Words = None


class _Likely(BaseModel):  # without the bytes of a token, which are its text again
    token: str
    logprob: _Nats = None


class _LikelyFirst(_Likely):
    top_logprobs: list[_Likely] | None = None


class _Logprobs(_Loose):
    generated: _Count = Field(default=None, alias="iclperm_generated")  # `_GENERATED`: type checkers want it spelt
    tokens: list[str | None] | None = None
    token_logprobs: list[_Nats] | None = None
    top_logprobs: list[dict[str, _Nats] | None] | None = None
    content: list[_LikelyFirst] | None = None

    @model_validator(mode="after")
    def _belong_together(self) -> Self:
        if self.tokens and self.token_logprobs and len(self.tokens) != len(self.token_logprobs):
            raise ValueError(f"{len(self.tokens)} tokens have {len(self.token_logprobs)} log-probabilities")
        return self


class _Choice(_Loose):
    finish_reason: _Words = None
    text: str | None = None
    message: _Said | None = None
    logprobs: Annotated[_Logprobs | None, _if(dict)] = None
    index: Annotated[int | None, _if(int)] = None

    @model_validator(mode="after")
    def _is_ours(self) -> Self:
        if self.index:
            raise ValueError(f"it is the answer to prompt {self.index}, and 0 was the only one")
        return self


class _Answered(BaseModel):
    """What is kept and believed of a reply. What is of no use where it is wrong counts as absent; text, tokens and the
    name of the model are what they must be, or there is no reply."""

    id: _Words = None
    model: Annotated[str, Field(max_length=500)]
    created: _Count = None
    system_fingerprint: _Words = None
    choices: Annotated[list[_Choice], Field(min_length=1, max_length=1)]
    usage: Annotated[_Used | None, _if(dict)] = None
    without: list[Literal["temperature", "stop"]] = Field(default_factory=list, alias="iclperm_without")  # `_WITHOUT`


class _Tail(NamedTuple):
    """The last tokens of an echoed prompt, without what was generated after it."""

    lengths: list[int]  # in characters
    values: list[Any]

    @classmethod
    def of(cls, reply: Mapping[str, Any], label: str) -> _Tail | None:
        """The tail of a reply; None where the server echoes no prompt, or one that does not end with the label."""
        logprobs = _mapping(reply["choices"][0].get("logprobs"))
        tokens, values = _list(logprobs.get("tokens")), _list(logprobs.get("token_logprobs"))
        if len(tokens) != len(values) or not all(isinstance(token, str) for token in tokens):
            return None
        known = logprobs.get(_GENERATED)
        paid = _mapping(reply.get("usage")).get("completion_tokens")
        counts = list(dict.fromkeys((paid or 1, 1, 0))) if known is None else [known]
        ends = [len(tokens) - count for count in counts if count <= len(tokens)]
        fitting = [end for end in ends if "".join(tokens[:end]).endswith(label)]
        if fitting and (known is not None or paid or len(fitting) == 1):
            return cls([len(token) for token in tokens[: fitting[0]]], values[: fitting[0]])
        return None if fitting else cls._of_pieces(tokens, values, ends[:1], label)

    @classmethod
    def _of_pieces(cls, tokens: list[str], values: list[Any], ends: Sequence[int], label: str) -> _Tail | None:
        """The tail where one character takes several tokens, each of which shows no readable text."""
        for end in ends:
            for begin in range(max(0, end - len(label.encode())), end):  # a token holds a byte at least
                pattern = "".join(map(_pattern, tokens[begin:end]))
                if re.fullmatch(pattern, label):
                    lengths = [len(token) for token in tokens[:begin]] + [len(label)] + [0] * (end - begin - 1)
                    return cls(lengths, values[:end])
        return None

    def covered(self, characters: int) -> int:
        """How many characters the fewest last tokens hold that hold ``characters`` at least."""
        return sum(self.lengths[len(self.lengths) - self._count(characters) :])

    def logprobs(self, characters: int) -> list[Any]:
        """Log-probabilities of the fewest last tokens that hold ``characters`` at least."""
        return self.values[len(self.values) - self._count(characters) :]

    def _count(self, characters: int) -> int:
        count = 0
        while characters > 0 and count < len(self.lengths):
            count += 1
            characters -= self.lengths[-count]
        return count


def _pattern(token: str) -> str:
    """A pattern of what a token may stand for: a piece of a character matches that character, or nothing at all where
    another piece has matched it."""
    piece = r"[^\x00-\x7f]?"
    return piece if token.startswith("bytes:") else re.escape(token).replace("\ufffd", piece)


def _unscored(num_labels: int, state: State, problem: str) -> Scored:
    return Scored((math.nan,) * num_labels, (0,) * num_labels, (False,) * num_labels, state, problem)


def _sum(choice: Mapping[str, Any]) -> float | None:
    """Log-probability of all tokens of a reply, where each has one."""
    logprobs = _mapping(choice.get("logprobs"))
    content: list[Any] = [_mapping(each).get("logprob") for each in _list(logprobs.get("content"))]
    values = content or _list(logprobs.get("token_logprobs"))
    return math.fsum(values) if values and all(value is not None for value in values) else None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
