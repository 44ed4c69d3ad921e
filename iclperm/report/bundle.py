"""The script that draws the interactive figures: Vega, Vega-Lite and their embedding, put together by vl-convert.

That takes seconds and, for its JavaScript engine, a terabyte of address space, without which the engine ends its whole
process. So it is done in a process of its own, and what it made is kept in the user's cache folder under its digest.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec

from iclperm.base.environment import cache_folder
from iclperm.base.files import read_given, write_whole
from iclperm.errors import IclpermError, printable

_MAKE = "import sys, vl_convert; sys.stdout.buffer.write(vl_convert.javascript_bundle(vl_version=sys.argv[1]).encode())"
_LIMIT_S = 120.0
_MOST_BYTES = 1 << 25


class NoBundle(Exception):
    """Why there is no script, in one line with the remedy."""


@cache
def problem() -> str | None:
    """Why figures cannot be interactive here, in one line with the remedy; None where they can."""
    try:
        bundle()
    except NoBundle as error:
        return str(error)
    return None


@cache
def bundle() -> str:
    """The script; raises `NoBundle`. Seconds at its first use, milliseconds afterwards."""
    if not all(find_spec(name) is not None for name in ("altair", "vl_convert")):
        raise NoBundle("pip install 'iclperm[page]' lets you point at them")
    import altair

    schema = ".".join(altair.SCHEMA_VERSION.split(".")[:2])
    place = f"page/vega-lite-{schema}-{version('vl-convert-python')}.js"
    found = _kept(place)
    if found is None:
        found = _made(schema)
        _keep(place, found)
    if "</script" in found or "<!--" in found or "\r" in found:
        raise AssertionError("the bundle of vl-convert would end its own script element; update vl-convert-python")
    return found


def _made(schema: str) -> str:
    try:
        made = subprocess.run(
            [sys.executable, "-P", "-c", _MAKE, schema], capture_output=True, timeout=_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoBundle(f"vl-convert, which makes them, could not be run: {error}; run the report again") from None
    if made.returncode < 0:
        raise NoBundle(
            f"vl-convert, which makes them, died of signal {-made.returncode}: its JavaScript engine needs more "
            "address space than a limit allows; allow it by: ulimit -v unlimited"
        )
    if made.returncode:
        last = (made.stderr.decode("utf-8", "replace").strip().splitlines() or ["it said nothing"])[-1][:200]
        raise NoBundle(
            f"vl-convert, which makes them, failed: {printable(last)}; pip install --force-reinstall 'iclperm[page]'"
        )
    return made.stdout.decode()


def _kept(name: str) -> str | None:
    """The script as it was kept; None where there is none, or not all of it."""
    try:
        raw = read_given(cache_folder() / name, _MOST_BYTES)
    except (OSError, RuntimeError):  # nothing was kept yet; no home
        return None
    digest, _, script = raw.partition(b"\n")
    return script.decode() if digest == hashlib.sha256(script).hexdigest().encode() else None


def _keep(name: str, script: str) -> None:
    raw = script.encode()
    try:
        place = cache_folder() / name
        place.parent.mkdir(parents=True, exist_ok=True)
        write_whole(place, hashlib.sha256(raw).hexdigest().encode() + b"\n" + raw, durable=False)
    except (OSError, RuntimeError, IclpermError):  # no home, or one that cannot be written: it is made again next time
        return
