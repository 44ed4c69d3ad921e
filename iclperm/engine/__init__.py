"""The engine: trees, plans and the forward passes over them. torch stays in here, and out of the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from iclperm.engine.plan import ContextPaths, Plan, plan_product, plan_requests

if TYPE_CHECKING:
    from iclperm.engine.engine import Engine, Scores, UnitResult
    from iclperm.engine.executor import Report

__all__ = ["ContextPaths", "Engine", "Plan", "Report", "Scores", "UnitResult", "plan_product", "plan_requests"]

_NEEDS_TORCH = {"Engine": "engine", "Scores": "engine", "UnitResult": "engine", "Report": "executor"}


def __getattr__(name: str) -> Any:
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_NEEDS_TORCH[name]}"), name)
