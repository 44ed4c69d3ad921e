"""The engine: trees, plans and the forward passes over them. torch stays in here, and out of the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from iclperm.base.lazy import loaded_on_use
from iclperm.engine.plan import ContextPaths, Plan, plan_product, plan_requests

if TYPE_CHECKING:
    from iclperm.engine.engine import Engine, Scores, UnitResult
    from iclperm.engine.executor import Report
    from iclperm.engine.texts import GeneratedUnit, Generations

__all__ = [
    "ContextPaths", "Engine", "GeneratedUnit", "Generations", "Plan", "Report", "Scores", "UnitResult", "plan_product",
    "plan_requests",
]  # fmt: skip

__getattr__, __dir__ = loaded_on_use(
    __name__,
    {
        "iclperm.engine.engine": ("Engine", "Scores", "UnitResult"),
        "iclperm.engine.executor": ("Report",),
        "iclperm.engine.texts": ("GeneratedUnit", "Generations"),
    },
)
