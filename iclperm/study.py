"""What to run: the validated choices of one study, in and out of YAML."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator

from iclperm.config import Choices

Count = Annotated[int, Field(ge=1, le=1_000_000)]
Shots = Annotated[int, Field(ge=0, le=100_000)]
_DEVICE = re.compile(r"auto|(cpu|cuda|mps|xpu)(:\d+)?")


class Study(Choices):
    """The choices that define a study: ``sets`` x ``permutations`` x ``shots`` x ``queries`` on one model and task.

    ``model`` is ``demo``, a local folder or a hub id (with ``revision``); ``task`` is the name of a built-in task or
    the path of a task file. ``shots`` is one k, a list of k (all on the same orderings, as prefixes), or None for the
    task's own. ``memory_budget`` is in bytes. Raises `ConfigError` naming the key, the value and the remedy.
    """

    kind: Literal["sensitivity"] = "sensitivity"
    model: Annotated[str, Field(min_length=1)] = "demo"
    revision: str | None = None
    task: Annotated[str, Field(min_length=1)] = "mini_news"
    sets: Count = 10
    permutations: Count = 10
    shots: Shots | Annotated[list[Shots], Field(min_length=1)] | None = None
    queries: Count = 500
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Annotated[str, Field(min_length=1)] = "auto"
    memory_budget: Annotated[int, Field(ge=1)] | None = None
    on_overlong: Literal["error", "drop"] = "error"

    @field_validator("device")
    @classmethod
    def _known_device(cls, device: str) -> str:
        if not _DEVICE.fullmatch(device):
            raise ValueError("give auto, cpu, cuda, cuda:1, mps or xpu")
        return device

    @field_validator("shots")
    @classmethod
    def _distinct(cls, shots: int | list[int] | None) -> int | list[int] | None:
        if isinstance(shots, list) and len(set(shots)) < len(shots):
            raise ValueError("every number of shots may be listed once")
        return shots

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Reads a study file; a task file named in it is looked up beside it first."""
        study = super().from_file(path)
        beside = Path(path).parent / study.task
        return study.model_copy(update={"task": str(beside)}) if beside.is_file() else study

    def shot_list(self, task_shots: int) -> tuple[int, ...]:
        """The numbers of shots to run, ascending; ``task_shots`` where the study names none."""
        shots = task_shots if self.shots is None else self.shots
        return tuple(sorted(shots)) if isinstance(shots, list) else (shots,)
