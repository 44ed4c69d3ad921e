"""Task files of lm-evaluation-harness: read with all that they include, and rendered as the harness renders them.

`HarnessTask` is the task, `RenderedRow` what it makes of a row; `files` reads, `pipelines` judge generated text.
"""

from iclperm.tasks.harness.files import Function, is_harness, read_harness
from iclperm.tasks.harness.pipelines import ExactMatch, PipelineChoices
from iclperm.tasks.harness.rows import HarnessSplits, HarnessTask, RenderedRow

__all__ = [
    "ExactMatch",
    "Function",
    "HarnessSplits",
    "HarnessTask",
    "PipelineChoices",
    "RenderedRow",
    "is_harness",
    "read_harness",
]
