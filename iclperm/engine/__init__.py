"""The engine: trees, plans and the forward passes over them. torch stays in here, and out of the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from iclperm.base.lazy import loaded_on_use
from iclperm.engine.plan import ContextPaths, Plan, plan_product, plan_requests

if TYPE_CHECKING:
    from iclperm.engine.aio import AsyncEngine
    from iclperm.engine.engine import Engine
    from iclperm.engine.executor import Report
    from iclperm.engine.pack_rows import PackRows
    from iclperm.engine.scores import ScoreBlock, Scores, UnitResult
    from iclperm.engine.session import NextTokens, Node, Session
    from iclperm.engine.texts import GeneratedUnit, Generations

__all__ = [
    "AsyncEngine", "ContextPaths", "Engine", "GeneratedUnit", "Generations", "NextTokens", "Node", "PackRows", "Plan",
    "Report", "ScoreBlock", "Scores", "Session", "UnitResult", "plan_product", "plan_requests",
]  # fmt: skip

__getattr__, __dir__ = loaded_on_use(
    __name__,
    {
        "iclperm.engine.aio": ("AsyncEngine",),
        "iclperm.engine.engine": ("Engine",),
        "iclperm.engine.executor": ("Report",),
        "iclperm.engine.pack_rows": ("PackRows",),
        "iclperm.engine.scores": ("ScoreBlock", "Scores", "UnitResult"),
        "iclperm.engine.session": ("NextTokens", "Node", "Session"),
        "iclperm.engine.texts": ("GeneratedUnit", "Generations"),
    },
)
