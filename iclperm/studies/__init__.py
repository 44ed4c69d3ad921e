"""The kinds of study, one file each: its statistics and its section of the report.

`findings_of` makes a kind's findings of a finished run. Any run has the design of the kinds in `OF_ONE_RUN`, so each of
them can be asked of it, as far as its numbers of shots, sets and splits allow.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from iclperm.errors import ConfigError

if TYPE_CHECKING:
    from iclperm.results import Run
    from iclperm.studies.findings import Findings

OF_ONE_RUN = ("sensitivity", "search", "curve", "convergence", "features", "calibration", "generation")


def findings_of(run: Run, kind: str) -> Findings:
    """What ``kind`` makes of a run; raises `ConfigError` for another name, `DataError` where the run lacks what it
    needs."""
    if kind not in OF_ONE_RUN:
        raise ConfigError(f"there is no report of the kind {kind!r}; choose one of {', '.join(OF_ONE_RUN)}")
    found: Findings = import_module(f"iclperm.studies.{kind}").findings(run)
    return found
