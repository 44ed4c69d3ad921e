"""The HTTP client of an endpoint: requests go to the named host alone, replies are read no further than they may be
long, and what its libraries log is without the key."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from iclperm.endpoint.decode import Inflated
from iclperm.errors import ConfigError, RunStopped
from iclperm.study.endpoint import HTTPS_PORT, Address, EndpointChoices

if TYPE_CHECKING:
    from openai import AsyncOpenAI

LEAST_BODY = 1 << 20
"""Bytes that are read of any reply."""
MOST_BYTES: ContextVar[int] = ContextVar("most_bytes", default=LEAST_BODY)
"""Bytes that are read of the reply to the request that a task sends."""
LOCATION = "sent-on-to"
"""Where a reply names another place; the client would look at it under its own name."""
_HEADER = re.compile(
    r"host|accept(-encoding)?|connection|user-agent|content-(type|length)|transfer-encoding|x-stainless-[\w-]+", re.I
)
"""What goes with a request, beside the key; the last are of the client itself."""
_KEPT = {"retry-after": "retry-after", "retry-after-ms": "retry-after-ms", "location": LOCATION}
_LOGGERS = re.compile(r"(openai|httpx2?|httpcore2?)(\..*)?", re.A)
_PROXY = re.compile(r"(all|https?)_proxy", re.I | re.A)
_PROXY_ADDRESS = re.compile(
    r"((https?|socks5h?)://)?([^@/?#]*@)?([\w.-]+|\[[0-9a-f:.]+\])(:(?P<port>\d{1,5}))?/?", re.I | re.A
)


def client_of(choices: EndpointChoices, key: str | None, where: str) -> AsyncOpenAI:
    """A client that sends ``key`` to the host of ``choices`` alone and follows no redirect.

    Raises `ConfigError` where the package is missing, and for variables that say which proxy or which certificates to
    use but cannot be followed.
    """
    try:
        import openai
    except ImportError as error:
        raise ConfigError(f"an endpoint needs the package {error.name}: pip install 'iclperm[api]'") from None
    problem = _refused_proxy()
    if not problem:
        try:
            http = openai.DefaultAsyncHttpxClient(follow_redirects=False)
        except Exception as error:  # of the library, which raises its own kinds for addresses of proxies
            if not isinstance(error, OSError) and not proxies():
                raise
            problem = _refused_environment(error)
    if problem:
        raise ConfigError(problem)

    async def send(request: Any) -> None:
        _refuse_elsewhere(request.url, choices, where)
        # Variables of the client's library, such as OPENAI_CUSTOM_HEADERS, are words for another server.
        for name in [name for name in request.headers if not _HEADER.fullmatch(name)]:
            del request.headers[name]
        if choices.api_version is None:
            request.headers["Authorization"] = f"Bearer {key or 'none'}"
        elif key is not None:
            request.headers["api-key"] = key

    async def receive(response: Any) -> None:
        http.cookies.clear()
        await _receive(response)

    http.event_hooks = {"request": [send], "response": [receive]}
    # What nobody named for this server would else come from OPENAI_* variables.
    headers: Any = {name: openai.Omit() for name in ("OpenAI-Organization", "OpenAI-Project")}
    headers["Accept-Encoding"] = "gzip"  # what `Inflated` reads
    return openai.AsyncOpenAI(
        base_url=choices.root_url,
        api_key="none",  # the key goes with what is sent, and nowhere before
        default_query={} if choices.api_version is None else {"api-version": choices.api_version},
        default_headers=headers,
        max_retries=0,
        timeout=openai.Timeout(choices.timeout_s, connect=min(10.0, choices.timeout_s)),
        http_client=http,
    )


@contextmanager
def logged_without(cut: Callable[[str], str]) -> Iterator[None]:
    """What the client's libraries log meanwhile is as ``cut`` leaves it: they log what servers say, in full."""
    censor = _Censor(cut)
    found = [each for name, each in logging.root.manager.loggerDict.items() if _LOGGERS.fullmatch(name)]
    loggers = [each for each in found if isinstance(each, logging.Logger)]
    for logger in loggers:
        logger.addFilter(censor)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(censor)


class _Censor(logging.Filter):
    def __init__(self, cut: Callable[[str], str]) -> None:
        super().__init__()
        self._cut = cut

    def filter(self, record: logging.LogRecord) -> bool:
        """Lets every record pass, without the key; of an exception its kind."""
        try:
            said = record.getMessage()
        except (TypeError, ValueError):  # of values that do not fit their place; the handlers would tell, with them
            said = str(record.msg)
        record.msg, record.args = self._cut(said), None
        if record.exc_info and record.exc_info[0] is not None:
            record.msg += f" ({record.exc_info[0].__name__})"
            record.exc_info = record.exc_text = None
        return True


def _refuse_elsewhere(url: Any, choices: EndpointChoices, where: str) -> None:
    """Raises where a request, and with it the key, would go to another host than the one that was named for it."""
    port = url.port or (HTTPS_PORT if url.scheme == "https" else 80)
    host = url.raw_host.decode().lower()  # as it is asked, letters of other scripts encoded
    if Address(f"[{host}]" if ":" in host else host, port) != choices.address:
        raise RunStopped(f"{where} would be asked at another host, {host}; correct 'base_url'")


async def _receive(response: Any) -> None:
    """Reads a reply while it arrives, and no further than it may be long; of its headers stays what is looked at."""
    headers, stream = response.headers, response.stream
    try:
        body = Inflated(headers.get("content-encoding", ""), MOST_BYTES.get())
        async for piece in stream:
            body.add(piece)
        content = body.whole()
    finally:
        await stream.aclose()
    kept = {name: headers[there].encode("ascii", "replace") for there, name in _KEPT.items() if there in headers}
    response.headers = type(headers)({name.encode(): value for name, value in kept.items()})
    response.stream = type(response)(200, content=content).stream
    response.extensions["reason_phrase"] = b""


def proxies(url: str = "") -> list[str]:
    """The variables that name a proxy, of those that are for this URL if one is given."""
    other = {"http": "https", "https": "http"}.get(url.partition(":")[0].lower())
    named = [name for name, value in os.environ.items() if _PROXY.fullmatch(name) and value]
    return [name for name in named if name.lower() != f"{other}_proxy"]


def _refused_proxy() -> str:
    """One line about variables that name no proxy, without their values: these may hold a password."""
    found = {name: _PROXY_ADDRESS.fullmatch(os.environ[name]) for name in proxies()}
    wrong = [name for name, parts in found.items() if parts is None or int(parts["port"] or 1) not in range(1, 65_536)]
    if not wrong:
        return ""
    return f"{_variables(wrong)} no proxy that can be used; give http://HOST:PORT, or unset it"


def _refused_environment(error: Exception) -> str:
    """One line about the variable that the client could not follow."""
    if isinstance(error, ImportError):
        socks = [name for name in proxies() if os.environ[name].lower().startswith("socks")]
        return f"{_variables(socks)} a SOCKS proxy, which needs a package: pip install socksio, or unset it"
    if not isinstance(error, OSError):
        return f"{_variables(proxies())} no proxy that can be used; give http://HOST:PORT, or unset it"
    log = os.environ.get("SSLKEYLOGFILE")
    name = "SSLKEYLOGFILE" if log and error.filename == log else "SSL_CERT_FILE"
    what = "a file that can be written" if name == "SSLKEYLOGFILE" else "a file of certificates that can be read"
    reason = error.strerror or "it holds none"
    return (
        f"the environment variable {name} is {os.environ.get(name, '')!r}, not {what} ({reason}); correct or unset it"
    )


def _variables(names: list[str]) -> str:
    return f"the environment variable {' or '.join(names)} names"
