"""The engine: trees, plans and the forward passes over them. torch stays in here."""

from iclperm.engine.engine import Engine, Scores, UnitResult
from iclperm.engine.executor import Report
from iclperm.engine.plan import ContextPaths, Plan, plan_product, plan_requests

__all__ = ["ContextPaths", "Engine", "Plan", "Report", "Scores", "UnitResult", "plan_product", "plan_requests"]
