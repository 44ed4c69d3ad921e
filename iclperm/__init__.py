"""iclperm: what the choice, the number and the order of in-context demonstrations do to a language model.

Every name is loaded on first use, so that ``import iclperm`` and ``iclperm --help`` stay instant.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from iclperm import plot, progress, stats
    from iclperm.api import (
        compare,
        open_grid,
        open_run,
        plan,
        plan_grid,
        plan_sizes,
        recommend,
        run,
        run_grid,
        status,
        verify,
        write_comparison,
        write_page,
    )
    from iclperm.base.environment import settle
    from iclperm.endpoint import Endpoint
    from iclperm.engine import Engine
    from iclperm.engine.doctor import doctor
    from iclperm.errors import IclpermError
    from iclperm.grids.grid import Grid
    from iclperm.report.parts import Findings, Plot, Table
    from iclperm.runs.preview import sample_prompt
    from iclperm.studies.report import Run
    from iclperm.studies.stages import Stage
    from iclperm.study.choices import Choices
    from iclperm.study.kinds import Kind
    from iclperm.study.study import Study
    from iclperm.tasks.tables import new_task
    from iclperm.tasks.task import Task

    __version__: str

__all__ = [
    "Choices",
    "Endpoint",
    "Engine",
    "Findings",
    "Grid",
    "IclpermError",
    "Kind",
    "Plot",
    "Run",
    "Stage",
    "Study",
    "Table",
    "Task",
    "__version__",
    "compare",
    "doctor",
    "new_task",
    "open_grid",
    "open_run",
    "plan",
    "plan_grid",
    "plan_sizes",
    "plot",
    "progress",
    "recommend",
    "run",
    "run_grid",
    "sample_prompt",
    "settle",
    "stats",
    "status",
    "verify",
    "write_comparison",
    "write_page",
]

_MODULES = ("plot", "progress", "stats")
_HOME = {
    "Choices": "iclperm.study.choices",
    "Endpoint": "iclperm.endpoint",
    "Engine": "iclperm.engine",
    "Findings": "iclperm.report.parts",
    "Grid": "iclperm.grids.grid",
    "IclpermError": "iclperm.errors",
    "Kind": "iclperm.study.kinds",
    "Plot": "iclperm.report.parts",
    "Run": "iclperm.studies.report",
    "Stage": "iclperm.studies.stages",
    "Study": "iclperm.study.study",
    "Table": "iclperm.report.parts",
    "Task": "iclperm.tasks.task",
    "compare": "iclperm.api",
    "doctor": "iclperm.engine.doctor",
    "new_task": "iclperm.tasks.tables",
    "open_grid": "iclperm.api",
    "open_run": "iclperm.api",
    "plan": "iclperm.api",
    "plan_sizes": "iclperm.api",
    "plan_grid": "iclperm.api",
    "recommend": "iclperm.api",
    "run": "iclperm.api",
    "run_grid": "iclperm.api",
    "sample_prompt": "iclperm.runs.preview",
    "settle": "iclperm.base.environment",
    "status": "iclperm.api",
    "verify": "iclperm.api",
    "write_comparison": "iclperm.api",
    "write_page": "iclperm.api",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("iclperm")
    if name in _MODULES:
        return import_module(f"iclperm.{name}")
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'iclperm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
