"""Answers and accuracies that others made: read from files, and described by what their axes allow.

Arrays (.npy, .npz), tables (.csv, .parquet, .jsonl as `iclperm export` writes them, or a plain matrix) and the sample
logs of lm-evaluation-harness. Nothing is unpickled, and what would not fit in memory is refused. Every name is loaded
on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from iclperm.base.lazy import loaded_on_use

if TYPE_CHECKING:
    from iclperm.external.compared_contexts import contexts
    from iclperm.external.description import Description, accuracy_findings, describe
    from iclperm.external.read import load
    from iclperm.external.tensor import Tensor

__all__ = ["Description", "Tensor", "accuracy_findings", "contexts", "describe", "load"]

__getattr__, __dir__ = loaded_on_use(
    __name__,
    {
        "iclperm.external.compared_contexts": ("contexts",),
        "iclperm.external.description": ("Description", "accuracy_findings", "describe"),
        "iclperm.external.read": ("load",),
        "iclperm.external.tensor": ("Tensor",),
    },
)
