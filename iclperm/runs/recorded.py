"""What the plans in a run folder say, as far as they can be read: before it is known whether its run is the study's."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from iclperm.base.files import Folder
from iclperm.errors import DamagedItem
from iclperm.runs.folder import of_growth, plan_files, read_plan
from iclperm.runs.limits import DEFAULT, WorkLimits


def _recorded(path: str | Path, identity: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The plans in a folder that can be read, in their order, by the names of their files.

    Empty where there is no run, or that of another ``identity`` (`ResolvedStudy.identity`).
    """
    plans: dict[str, dict[str, Any]] = {}
    files = Folder(path)
    for file in plan_files(files):
        with suppress(DamagedItem):
            plans[file.name] = read_plan(files, file)
    first = plans.get("plan.json", identity)
    return plans if all(first.get(key) == value for key, value in identity.items()) else {}


def recorded_extents(path: str | Path, identity: Mapping[str, Any]) -> list[dict[str, int]]:
    """The extents that the run of an ``identity`` in a folder has had, as far as its plans can be read."""
    plans = list(_recorded(path, identity).values())
    return list(plans[-1]["extents"]) if plans else []


def recorded_decisions(path: str | Path, identity: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What the waves of the run of an ``identity`` in a folder ask, as far as its plans can be read in their order."""
    plans, decisions = _recorded(path, identity), list[dict[str, Any]]()
    while "decision" in (plan := plans.get(of_growth("plan.json", len(decisions)), {})):
        decisions.append(plan["decision"])
    return decisions


def recorded_limits(path: str | Path) -> WorkLimits | None:
    """How the run in a folder is cut, as far as its plans can be read; None where there is none."""
    cuts = [plan["work"].get("unit_tokens") for plan in _recorded(path, {}).values()]
    if not cuts:
        return None
    return DEFAULT if cuts[0] is None else replace(DEFAULT, unit_tokens=(cuts[0], cuts[0]), is_told=True)
