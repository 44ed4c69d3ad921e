"""The engine: trees, plans and the forward passes over them. torch stays in here, and out of the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from iclperm.engine.plan import ContextPaths, Plan, plan_product, plan_requests

if TYPE_CHECKING:
    from iclperm.engine.engine import Engine, Scores, UnitResult
    from iclperm.engine.executor import Report
    from iclperm.engine.texts import GeneratedUnit, Generations

__all__ = [
    "ContextPaths", "Engine", "GeneratedUnit", "Generations", "Plan", "Report", "Scores", "UnitResult", "plan_product",
    "plan_requests",
]  # fmt: skip

_HOME = {
    "Engine": "engine", "Scores": "engine", "UnitResult": "engine", "Report": "executor", "GeneratedUnit": "texts",
    "Generations": "texts",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
