"""Tasks: where their rows are, how they are worded, and how an answer is read.

Names are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from iclperm.base.lazy import loaded_on_use

if TYPE_CHECKING:
    from iclperm.tasks.published import Split
    from iclperm.tasks.sources import Dataset
    from iclperm.tasks.task import BUILTIN, Examples, Task, builtin_tasks, template_text

__all__ = ["BUILTIN", "Dataset", "Examples", "Split", "Task", "builtin_tasks", "template_text"]

__getattr__, __dir__ = loaded_on_use(
    __name__,
    {
        "iclperm.tasks.published": ("Split",),
        "iclperm.tasks.sources": ("Dataset",),
        "iclperm.tasks.task": ("BUILTIN", "Examples", "Task", "builtin_tasks", "template_text"),
    },
)
