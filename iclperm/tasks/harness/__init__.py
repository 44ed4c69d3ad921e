"""Task files of lm-evaluation-harness: read with all that they include, and rendered as the harness renders them.

`HarnessTask` is the task, `RenderedRow` what it makes of a row, `HarnessRows` both as a task of ours has them; `files`
reads.
"""

from iclperm.tasks.filters import ExactMatch, FiltersChoices
from iclperm.tasks.harness.files import Function, is_harness, read_harness
from iclperm.tasks.harness.joined import HALF, HarnessRows
from iclperm.tasks.harness.rows import HarnessSplits, HarnessTask, RenderedRow

__all__ = [
    "HALF",
    "ExactMatch",
    "FiltersChoices",
    "Function",
    "HarnessRows",
    "HarnessSplits",
    "HarnessTask",
    "RenderedRow",
    "is_harness",
    "read_harness",
]
