"""iclperm: what the choice, the number and the order of in-context demonstrations do to a language model.

Every name is loaded on first use, so that ``import iclperm`` and ``iclperm --help`` stay instant.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from iclperm import stats
    from iclperm.endpoint import Endpoint
    from iclperm.engine import Engine
    from iclperm.errors import IclpermError
    from iclperm.runner import open_run, plan, run
    from iclperm.study import Study
    from iclperm.tasks import Task

    __version__: str

__all__ = ["Endpoint", "Engine", "IclpermError", "Study", "Task", "__version__", "open_run", "plan", "run", "stats"]

_HOME = {
    "Endpoint": "iclperm.endpoint",
    "Engine": "iclperm.engine",
    "IclpermError": "iclperm.errors",
    "Study": "iclperm.study",
    "Task": "iclperm.tasks",
    "open_run": "iclperm.runner",
    "plan": "iclperm.runner",
    "run": "iclperm.runner",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("iclperm")
    if name == "stats":
        return import_module("iclperm.stats")
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'iclperm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
