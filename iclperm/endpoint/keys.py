"""Which key may go to which host: what the user named, and never what a study or a run folder says.

A user names a host by a flag, in Python, at the prompt, or in a file of their own:

$XDG_CONFIG_HOME/iclperm/keys.yaml       variable: host, or a list of hosts; for every run
$XDG_STATE_HOME/iclperm/keys/<id>.json   what was named for one run: written here, beside no run folder

A record of the second kind lets the very same run go on: the same id, which is the digest of its plan, the same
variable, host and port. With another host in its study.yaml a run is asked about again, and so is another run.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from iclperm.base.files import write_whole
from iclperm.errors import ConfigError, KeyNotNamed
from iclperm.study.choices import read_yaml
from iclperm.study.endpoint import HTTPS_PORT, Address, EndpointChoices

SendKeys = Mapping[str, str | Sequence[str]]
"""Hosts by the variables whose keys may go there: "api.example.com", or with a port "localhost:8000"."""

_ADDRESS = re.compile(r"([\w.-]+|\[[0-9a-f:.]+\])(?::(\d{1,5}))?", re.I | re.A)
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*")
_RUN = re.compile(r"[0-9a-f]{64}")
_Pair = tuple[str, Address]


class KeyHosts:
    """The hosts that keys may go to. ``named`` are the user's words; ``study`` is the id of a study of several runs.

    Raises `ConfigError` for what is no variable or no host.
    """

    def __init__(self, named: SendKeys | None = None, study: str | None = None) -> None:
        self._named = frozenset(_pairs(named or {}, "send_keys"))
        self._study = study
        self._found: set[_Pair] = set()  # elsewhere, for this run

    def refuse_unnamed(self, choices: EndpointChoices, run: str | None = None) -> None:
        """Raises `KeyNotNamed` where an endpoint wants a key at a host that nobody named: for this call, for every run,
        or earlier for the ``run`` of this id. What is found holds as long as this object."""
        if (pair := _wanted(choices)) is None or pair in self._named | self._found:
            return
        if pair not in _configured() and not any(pair in _recorded(each) for each in self._ids(run)):
            raise KeyNotNamed(pair[0], str(pair[1]))
        self._found.add(pair)

    def record(self, choices: EndpointChoices, run: str) -> None:
        """Keeps what was named for this call, so that the ``run`` of this id goes on without it."""
        if (pair := _wanted(choices)) not in self._named or pair is None:
            return
        for each in self._ids(run):
            if pair not in (there := _recorded(each)):
                kept = [{"variable": name, **address._asdict()} for name, address in sorted({*there, pair})]
                path = _record_path(each)
                with suppress(OSError):  # a home that cannot be written: the next session asks again
                    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                    write_whole(path, json.dumps(kept, indent=1).encode())
                    path.chmod(0o600)

    def _ids(self, run: str | None) -> list[str]:
        return [each for each in (run, self._study) if each is not None]


def named_by_flags(texts: Iterable[str]) -> dict[str, list[str]]:
    """What flags such as ``OPENAI_API_KEY=api.openai.com`` name; raises `ConfigError` for one of another form."""
    named: dict[str, list[str]] = {}
    for text in texts:
        variable, equals, host = text.partition("=")
        if not equals or not _VARIABLE.fullmatch(variable):
            raise ConfigError(
                "--send-key is not VARIABLE=HOST or VARIABLE=HOST:PORT; give the name of an environment variable and "
                "the host that its key may go to, such as OPENAI_API_KEY=api.openai.com"
            )
        named.setdefault(variable, []).append(host)
    return named


def _wanted(choices: EndpointChoices) -> _Pair | None:
    return None if choices.api_key_env is None else (choices.api_key_env, choices.address)


def _pairs(named: Mapping[str, Any], whose: str) -> list[_Pair]:
    """Variables with their hosts; raises `ConfigError` in the name of ``whose``, without the value: it may be a key."""
    found: list[_Pair] = []
    for variable, hosts in named.items():
        for host in [hosts] if isinstance(hosts, str) else hosts if isinstance(hosts, list | tuple) else [None]:
            parts = _ADDRESS.fullmatch(host) if isinstance(host, str) else None
            port = int(parts[2] or HTTPS_PORT) if parts else 0
            if parts is None or not 0 < port < 65_536 or not _VARIABLE.fullmatch(variable):
                raise ConfigError(
                    f"{whose} must name an environment variable and the host that its key may go to, such as "
                    "OPENAI_API_KEY and api.openai.com, or localhost:8000 (without a port: 443)"
                )
            found.append((variable, Address(parts[1].lower(), port)))
    return found


def _configured() -> list[_Pair]:
    """What the user's own file names; raises `ConfigError` where it is damaged, or others may write it."""
    path = _home("XDG_CONFIG_HOME", ".config") / "keys.yaml"
    if not path.exists():
        return []
    _refuse_others_files(path)
    try:
        named = read_yaml(path)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return _pairs(named, str(path))


def _recorded(run: str) -> list[_Pair]:
    """What was named for one run; nothing where the record is damaged."""
    path = _record_path(run)
    if not path.exists():
        return []
    _refuse_others_files(path)
    try:
        entries = json.loads(path.read_bytes())
        return [(str(each["variable"]), Address(str(each["host"]), int(each["port"]))) for each in entries]
    except (ValueError, TypeError, KeyError, RecursionError):
        return []


def _record_path(run: str) -> Path:
    assert _RUN.fullmatch(run)  # a digest: no path leads out of the folder
    return _home("XDG_STATE_HOME", ".local/state") / "keys" / f"{run}.json"


def _refuse_others_files(path: Path) -> None:
    """Raises `ConfigError` where somebody else could have written a file, or put it there."""
    whole = path.resolve()
    for each in (whole, whole.parent, path.parent):  # who may write into the last may put a link there
        about = each.stat()
        if about.st_uid not in (os.getuid(), 0) or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ConfigError(f"others may write {each}, which says where keys go; make it yours alone: chmod go-w")


def _home(variable: str, otherwise: str) -> Path:
    """A folder of the user's; as the XDG specification has it, a relative path counts for nothing."""
    given = os.environ.get(variable, "")
    return (Path(given) if given.startswith("/") else Path.home() / otherwise) / "iclperm"
