"""The choices that define an endpoint: where it is, how it is asked, what may be spent; never a key."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, JsonValue, field_validator

from iclperm.errors import ConfigError
from iclperm.study.choices import Choices

Positive = Annotated[int, Field(ge=1)]
Money = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]

_VARIABLE = re.compile(r"(?=.{1,15}$|.*_)[A-Z][A-Z0-9_]{0,63}")  # without an underscore, 16 may be a key
_KEY = re.compile(
    r"\b(sk|pk|rk|xai|nvapi|csk)-[\w-]{20,}|\b(hf|gsk|r8)_[A-Za-z0-9]{20,}|\bAIza[\w-]{30,}|\bBearer\s+\S{16,}"
)
# Nothing that two programs could read as two hosts: no user, no backslash, no blank, no letter beyond ASCII.
_URL = re.compile(r"(https?)://([\w.-]+|\[[0-9a-f:.]+\])(?::(\d{1,5}))?(/[\w.~%!$&'()*+,;=:/-]*)?", re.I | re.A)
_API_VERSION = re.compile(r"\?api-version=(20\d\d-\d\d-\d\d(?:-preview)?|preview|latest|v\d)\Z", re.A)
HTTPS_PORT = 443
LEAST_KEY = 8
"""Characters of the shortest key: a shorter one could not be told from words when it is cut out of replies."""
_OURS = ("model", "messages", "prompt", "max_tokens", "max_completion_tokens", "temperature", "stop", "stream", "n")


@dataclass(frozen=True)
class Spent:
    """What was paid for; ``cached_tokens`` are among ``prompt_tokens``."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def __add__(self, other: Spent) -> Spent:
        return Spent(  # written out: it is asked for each request, of all that are on their way
            self.requests + other.requests,
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.completion_tokens + other.completion_tokens,
        )

    def __neg__(self) -> Spent:
        return Spent(-self.requests, -self.prompt_tokens, -self.cached_tokens, -self.completion_tokens)

    def __sub__(self, other: Spent) -> Spent:
        return self + -other

    @property
    def tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


class Address(NamedTuple):
    """Where a key may go: a host and its port."""

    host: str
    port: int

    def __str__(self) -> str:
        return self.host if self.port == HTTPS_PORT else f"{self.host}:{self.port}"


class Prices(Choices):
    """Money for a million tokens, in the currency of ``max_cost``; ``cached_input`` is ``input`` unless given."""

    input: Money
    output: Money
    cached_input: Money | None = None

    def cost(self, spent: Spent) -> float:
        """What tokens cost."""
        cached = self.input if self.cached_input is None else self.cached_input
        fresh = spent.prompt_tokens - spent.cached_tokens
        return (fresh * self.input + spent.cached_tokens * cached + spent.completion_tokens * self.output) / 1e6


class EndpointChoices(Choices):
    """The choices that define an endpoint; a key is never among them, only the name of the variable that holds it.

    ``api`` is what the server offers: ``chat`` or ``completions``. ``served_as`` is the name that replies bear where it
    is neither ``model`` nor its dated version. ``temperature`` is left out where it is None, and where the model turns
    out to take none. ``draws`` are replies to each prompt. ``reasoning_tokens`` come on top of the new tokens that are
    asked for, for a model that thinks first. ``extra`` goes into each request as it is, such as ``reasoning_effort``.
    ``tokenizer`` (folder or hub id) counts tokens, which are bounded by bytes without one, and finds the first token
    of each label for a server that lists no more. ``timeout_s`` is for one attempt, ``deadline_s`` for a request: no
    attempt is repeated that could not end by then. ``max_requests``, ``max_tokens`` and ``max_cost`` (with ``prices``)
    are for the whole run, all its sessions, and all runs of a study of several. Raises `ConfigError`, without the value
    where it may be a key.
    """

    base_url: Name
    model: Name
    api_key_env: str | None = None
    api: Literal["chat", "completions"] = "chat"
    served_as: Name | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = 0.0
    draws: Annotated[int, Field(ge=1, le=1000)] = 1
    reasoning_tokens: Annotated[int, Field(ge=0)] = 0
    extra: dict[str, JsonValue] = Field(default_factory=dict)
    tokenizer: Name | None = None
    concurrency: Annotated[int, Field(ge=1, le=256)] = 8
    timeout_s: Seconds = 60.0
    deadline_s: Seconds = 300.0
    prices: Prices | None = None
    max_requests: Positive | None = None
    max_tokens: Positive | None = None
    max_cost: Money | None = None

    def __init__(self, /, **choices: Any) -> None:
        _refuse_keys(choices)
        super().__init__(**choices)
        if self.max_cost is not None and self.prices is None:
            raise ConfigError("an endpoint's key 'max_cost' needs 'prices'; give input and output per million tokens")
        if self.timeout_s > self.deadline_s:
            raise ConfigError(
                f"an endpoint's key 'timeout_s' is {self.timeout_s:g}, over its deadline_s of {self.deadline_s:g}; "
                "give less"
            )
        for key in _OURS:
            if key in self.extra:
                raise ConfigError(f"an endpoint's key 'extra' holds {key!r}, which has a place of its own; take it out")

    @field_validator("base_url")
    @classmethod
    def _plain_url(cls, url: str) -> str:
        version = _API_VERSION.search(url)
        root = url[: version.start()] if version else url
        parts = _URL.fullmatch(root)
        if parts is None:
            raise ValueError("give a URL such as https://api.openai.com/v1")
        if not 0 < int(parts[3] or HTTPS_PORT) < 65_536:
            raise ValueError(f"there is no port {parts[3]}; give one from 1 to 65535, or leave it out")
        if parts[1].lower() == "http" and parts[3] and int(parts[3]) == HTTPS_PORT:
            raise ValueError("port 443 is that of https; give https://, or another port")
        if not _is_host(parts[2]):
            raise ValueError(f"{parts[2]} is no name and no address; give a host such as api.openai.com or [::1]")
        return root.rstrip("/") + (version[0] if version else "")

    @property
    def api_version(self) -> str | None:
        """The version of Azure's API that the address names: then the key goes as Azure wants it, as ``api-key``."""
        version = _API_VERSION.search(self.base_url)
        return version[1] if version else None

    @property
    def root_url(self) -> str:
        """The address without the version."""
        return _API_VERSION.sub("", self.base_url)

    @property
    def address(self) -> Address:
        """The host that requests go to, and with them the key."""
        parts = _URL.fullmatch(self.root_url)
        assert parts is not None
        return Address(parts[2].lower(), int(parts[3] or (HTTPS_PORT if parts[1].lower() == "https" else 80)))

    @property
    def identity(self) -> dict[str, Any]:
        """What answers depend on; the place of the server is not in it, so that a run may move with it."""
        names = ("model", "api", "served_as", "temperature", "draws", "reasoning_tokens", "extra")
        return {name: getattr(self, name) for name in names}

    @property
    def scored_identity(self) -> dict[str, Any]:
        """What log-likelihoods of labels depend on: also the tokenizer, which finds the first tokens of the labels for
        a server that lists only these."""
        return {**self.identity, "tokenizer": self.tokenizer}

    def overspent(self, spent: Spent) -> str | None:
        """One line about the budget that ``spent`` would exceed; None where it exceeds none."""
        for key, most, value in (
            ("max_requests", self.max_requests, spent.requests),
            ("max_tokens", self.max_tokens, spent.tokens),
            ("max_cost", self.max_cost, 0.0 if self.prices is None else self.prices.cost(spent)),
        ):
            if most is not None and value > most:
                return (
                    f"the next request could exceed {key} ({value:g} of {most:g}); raise it, then run the same command "
                    "to continue"
                )
        return None


def _is_host(host: str) -> bool:
    """Whether a name can be looked up, or numbers are an address of four or, in brackets, of version 6."""
    try:
        if host.startswith("["):
            return bool(IPv6Address(host[1:-1]))
        if re.fullmatch(r"\d+(\.\d+){3}", host):
            return bool(IPv4Address(host))
    except ValueError:
        return False
    return len(host) <= 253 and all(0 < len(label) <= 63 for label in host.removesuffix(".").split("."))


def read_key(variable: str | None) -> str | None:
    """The key in an environment variable; raises `ConfigError` where there is none, and never shows it."""
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(f"the environment variable {variable} is not set; put the endpoint's key in it")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"the environment variable {variable} holds no key: it has blanks or control characters")
    if key.isdigit():
        raise ConfigError(
            f"the environment variable {variable} holds a key of digits alone, which could not be told from numbers in "
            "replies; give the server another, or leave 'api_key_env' out if it wants none"
        )
    if len(key) < LEAST_KEY:
        raise ConfigError(
            f"the environment variable {variable} holds a key of fewer than {LEAST_KEY} characters, which could not be "
            "cut out of replies; give the server a longer one, or leave 'api_key_env' out if it wants none"
        )
    return key


def _refuse_keys(choices: Mapping[str, Any]) -> None:
    """Raises `ConfigError` where a key stands instead of its variable's name, and does not repeat it."""
    variable = choices.get("api_key_env")
    if variable is not None and (not isinstance(variable, str) or not _VARIABLE.fullmatch(variable)):
        raise ConfigError(
            "an endpoint's key 'api_key_env' is not the name of an environment variable; give a name such as "
            "OPENAI_API_KEY, never the key itself"
        )
    for name, value in choices.items():
        if _KEY.search(json.dumps(value, default=str)):
            raise ConfigError(
                f"an endpoint's key {name!r} seems to hold a secret; put that in a variable named by 'api_key_env'"
            )
    url = choices.get("base_url")
    if isinstance(url, str) and any(sign in _API_VERSION.sub("", url) for sign in "@?#"):
        raise ConfigError(
            "an endpoint's key 'base_url' may hold a secret; give it without user, query (but Azure's "
            "?api-version=YYYY-MM-DD) and fragment"
        )
