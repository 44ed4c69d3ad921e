"""The models of the two papers: what sets them apart, what they weigh, and what each study costs on them.

``configs/`` holds the config.json of every open one with where its values are from; weights, keys and values are
counted on it by the code that plans a run.
"""

from __future__ import annotations

from iclperm.models.costs import STUDIES, WORKLOADS, Cost, PaperStudy, Workload
from iclperm.models.papers import PaperModel, paper_models
from iclperm.models.tables import DEFAULT_RATE, ModelRow, markdown, table

__all__ = [
    "DEFAULT_RATE", "STUDIES", "WORKLOADS", "Cost", "ModelRow", "PaperModel", "PaperStudy", "Workload", "markdown",
    "paper_models", "table",
]  # fmt: skip
