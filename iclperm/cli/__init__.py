"""The command line. What commands do (``commands`` and others) is loaded on first use: ``--help`` stays instant."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from iclperm.cli import commands, doctor, plans, recommending

__all__ = ["commands", "doctor", "plans", "recommending"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return import_module(f"iclperm.cli.{name}")
    raise AttributeError(f"module 'iclperm.cli' has no attribute {name!r}")
