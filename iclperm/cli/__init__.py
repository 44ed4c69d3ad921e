"""The command line. ``commands``, what the commands do, is loaded on first use, so that ``--help`` stays instant."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from iclperm.cli import commands

__all__ = ["commands"]


def __getattr__(name: str) -> Any:
    if name == "commands":
        return import_module("iclperm.cli.commands")
    raise AttributeError(f"module 'iclperm.cli' has no attribute {name!r}")
