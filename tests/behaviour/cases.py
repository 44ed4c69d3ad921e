"""The studies that are run: one of every kind, and every way that a run can come about."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from faulty_server import faulty_server
from scoring_server import scoring_server
from transformers import AutoModelForCausalLM, AutoTokenizer

import iclperm
from behaviour.kept import IN_FULL
from behaviour.place import Place
from iclperm import demo

NEWS = {"task": "mini_news", "sets": 3, "permutations": 4, "queries": 12, "seed": 2}
TINY = {"model": "tiny/model", "task": "tiny/colours.yaml", "sets": 3, "permutations": 3, "queries": 6}
LETTERS = {"sets": 2, "permutations": 3, "queries": 6, "shots": [0, 1, 3], "task": "solved/letters.yaml"}
SMALL = {"sets": 2, "permutations": 2, "shots": [0, 2], "queries": 4}
ASKED = {"api": "completions", "concurrency": 1}

# Weights and tokenizer of these are files of the package, so that other machines can repeat them.
STUDIES: dict[str, dict[str, Any]] = {
    "sensitivity": {**NEWS, "shots": [0, 1, 4]},
    "search": {"kind": "search", **NEWS, "permutations": 8, "queries": 8, "shots": 4, "dev_queries": 16},
    "transfer": {
        "kind": "transfer", "sets": 2, "permutations": 6, "queries": 8, "seed": 2, "shots": 4, "dev_queries": 12,
        "tasks": ["mini_news", "topics.yaml"],
    },
    "curve": {"kind": "curve", **NEWS, "shots": 4},
    "selection": {"kind": "selection", **NEWS, "queries": 8, "shots": 4, "select": 2, "dev_queries": 8},
    "convergence": {"kind": "convergence", **NEWS, "permutations": 5, "queries": 10, "shots": 3},
    "per_k": {**NEWS, "permutations": 2, "shots": [2, 3], "resample": "per_k", "normalize": "bytes"},
    "calibrated": {**NEWS, "shots": [0, 4], "calibration": "contextual", "dev_queries": 8},
    "generated": {**NEWS, "sets": 2, "shots": [0, 4], "scoring": "generate", "max_new_tokens": 3},
    "letters": {**LETTERS, "unparsed": "wrong"},
    "data_folder": {**NEWS, "sets": 2, "task": "topics.yaml", "data": "news", "shots": [3]},
    "given": {"kind": "curve", "task": "mini_news", "permutations": 3, "queries": 8,
              "demonstrations": [[5, 3, 8], [1, 2, 900]]},
    "chat_multiturn": {**SMALL, "model": "chatty", "chat": "multiturn", "scoring": "generate", "max_new_tokens": 2},
    "lm_eval": {"task": "lm_eval/boolq_like.yaml", "sets": 2, "permutations": 2, "shots": [0, 2], "queries": 2},
}  # fmt: skip

# What takes too long to be kept, or is of weights and tokenizers that are made for the occasion, which other versions
# of libraries may make otherwise.
LOCAL_STUDIES: dict[str, dict[str, Any]] = {
    "first_token": {**NEWS, "shots": [4], "scoring": "first_token"},
    "chat_single": {**SMALL, "model": "chatty", "chat": "single"},
    "tiny": {**TINY, "shots": [0, 1, 3]},
    "greedy": {**TINY, "model": "greedy/model", "task": "greedy/colours.yaml", "shots": [0, 2], "permutations": 2},
    "overlong": {**TINY, "model": "narrow/model", "task": "narrow/colours.yaml", "shots": [0, 3],
                 "on_overlong": "drop"},
    "tiny_transfer": {"kind": "transfer", "tasks": ["tiny/shared.yaml"], "sets": 2,
                      "models": ["tiny/model", "demo"], "permutations": 4, "queries": 6, "shots": 3, "dev_queries": 6},
    "tiny_generated": {**TINY, "shots": [0, 3], "scoring": "generate", "max_new_tokens": 4, "think": "strip"},
    "bfloat16": {**TINY, "shots": [3], "dtype": "bfloat16"},
}  # fmt: skip

# Other reports of the same answers, by the case that has what they need.
REPORTS: dict[str, list[tuple[str, ...]]] = {
    "sensitivity": [("--normalize", "mean"), ("--kind", "features"), ("--kind", "convergence"), ("--kind", "search")],
    "search": [("--criterion", "global_entropy"), ("--kind", "sensitivity")],
    "curve": [("--kind", "curve"), ("--kind", "sensitivity")],
    "calibrated": [("--kind", "calibration")],
    "generated": [("--kind", "generation")],
    "letters": [("--unparsed", "drop")],
    "transfer": [("--criterion", "majority_agreement"), ("--kind", "curve")],
}


def whole(place: Place, name: str, study: str, *, brief: bool = False) -> dict[str, Any]:
    """A study file from its plan to its exported answers; a plan takes a second, as it measures the machine."""
    said: dict[str, Any] = {}
    if not brief or name in PLANNED:
        said["plan"] = place.call("plan", study)
        said["plan as JSON"] = place.call("plan", study, "--json")
    said["run"] = place.call("run", study, "--out", f"runs/{name}")
    if said["run"]["code"] != 0:
        raise AssertionError(f"{study}: {said['run']['err']}")
    return {**said, **finished(place, name, brief=brief)}


def finished(place: Place, name: str, *, brief: bool = False) -> dict[str, Any]:
    """All that a folder with a finished run says; ``brief``: once, as figures take half a second each time."""
    folder = f"runs/{name}"
    said = looked_at(place, name, brief=brief and name not in IN_FULL)
    for flags in [] if brief else REPORTS.get(name, []):
        said["report " + " ".join(flags)] = place.call("report", folder, *flags)
    if not brief:
        said["report as JSON"] = place.call("report", folder, "--json")
        said["status as JSON"] = place.call("status", folder, "--json")
        said["verify as JSON"] = place.call("verify", folder, "--json")
        said["run again"] = place.call("run", folder)
    said["answers"] = answers(folder)
    said["files"] = place.files(folder)
    return said


def looked_at(place: Place, name: str, *, brief: bool = False) -> dict[str, Any]:
    """What a folder says, finished or not; ``brief``: without the report, as figures take half a second."""
    commands = ("status", "verify", *([] if brief else ["report"]))
    return {command: place.call(command, f"runs/{name}") for command in commands}


def answers(folder: str) -> dict[str, Any]:
    """The exported table by run, column by column; of a study of several runs each by itself."""
    whole = iclperm.open_run(folder)
    runs = {"": whole} if hasattr(whole, "correct") else whole.runs
    return {run: found.to_arrow().to_pydict() for run, found in runs.items()}


def exported(place: Place, brief: bool) -> dict[str, Any]:
    """The answers of one run in every form that a file can have."""
    said = {}
    for ending in ("csv", "jsonl", "parquet"):
        said[ending] = place.call("export", "runs/sensitivity", "--out", f"all.{ending}")
        path = place.folder / f"all.{ending}"
        said[f"{ending} content"] = (
            path.read_text().splitlines()[: 2 if brief else None] if ending != "parquet" else path.is_file()
        )
    said["of several"] = place.call("export", "runs/selection", "--out", "all.csv")
    return said


def extended(place: Place, brief: bool) -> dict[str, Any]:
    """A run that grows, twice; its digest is that of one that was so large from the start."""
    study = place.study("extended", {**NEWS, "sets": 2, "shots": [0, 3]})
    said: dict[str, Any] = {"first": place.call("run", study, "--out", "runs/extended")}
    said["refused"] = place.call("run", "runs/extended", "--sets", 3)
    said["grown"] = place.call("run", "runs/extended", "--sets", 3, "--queries", 16, "--extend")
    said["grown again"] = place.call("run", "runs/extended", "--dev-queries", 4, "--extend")
    larger = place.study("larger", {**NEWS, "shots": [0, 3], "queries": 16, "dev_queries": 4})
    said["at once"] = place.call("run", larger, "--out", "runs/larger")
    return {**said, **finished(place, "extended", brief=brief), "digest at once": place.call("verify", "runs/larger")}


def interrupted(place: Place, brief: bool) -> dict[str, Any]:
    """A growth that is interrupted after its first part, looked at, and continued."""
    choices = {**NEWS, "sets": 2, "shots": [0, 3], "device": "cpu"}
    iclperm.run(iclperm.Study(**choices), "runs/interrupted")
    told = []

    def stop(done: int, total: int) -> None:
        told.append((done, total))
        if done > 1:
            raise KeyboardInterrupt

    try:
        iclperm.run(
            iclperm.Study(**{**choices, "sets": 3, "queries": 16}), "runs/interrupted", extend=True, progress=stop
        )
    except KeyboardInterrupt:
        told.append("interrupted")
    said = {"told": told, **looked_at(place, "interrupted")}
    said["continued"] = place.call("run", "runs/interrupted", "--sets", 3, "--queries", 16, "--extend")
    return {**said, "whole": finished(place, "interrupted", brief=brief)}


def killed(place: Place, brief: bool) -> dict[str, Any]:
    """The same with SIGKILL, in a process of its own."""
    study = place.study("killed", {**TINY, "sets": 2, "shots": [0, 3]})
    said: dict[str, Any] = {"first": place.call("run", study, "--out", "runs/killed")}
    script = f"""
import os, signal, sys, torch
torch.set_num_threads(1)
import iclperm
study = iclperm.Study.from_file({study!r})
def kill(done, total):
    if done > 1:
        os.kill(os.getpid(), signal.SIGKILL)
iclperm.run(study.model_copy(update={{"sets": 3, "queries": 9}}), "runs/killed", extend=True, progress=kill)
"""
    flags = ["-S"] if sys.flags.no_site else []
    done = subprocess.run([sys.executable, *flags, "-P", "-c", script], env=os.environ, capture_output=True)
    said["code"] = (done.returncode, done.returncode == -signal.SIGKILL)
    said |= looked_at(place, "killed")
    said["continued"] = place.call("run", "runs/killed", "--sets", 3, "--queries", 9, "--extend")
    return {**said, "whole": finished(place, "killed")}


def damaged(place: Place, brief: bool) -> dict[str, Any]:
    """A run of which one file is damaged: told, then computed anew."""
    study = place.study("damaged", {**TINY, "shots": [0, 2], "permutations": 2})
    place.call("run", study, "--out", "runs/damaged")
    (item,) = (place.folder / "runs/damaged/items").iterdir()
    item.write_bytes(item.read_bytes()[:-9] + b"123456789")
    said = looked_at(place, "damaged")
    return {**said, "mended": place.call("run", "runs/damaged"), "whole": finished(place, "damaged")}


def in_one(place: Place, brief: bool) -> dict[str, Any]:
    """A study without a folder, from Python."""
    run = iclperm.run(iclperm.Study(**SMALL, device="cpu"))
    assert run.folder is None
    said = {"digest": run.digest, "correct": run.correct.tolist(), "report": run.report_content()}
    return said if not brief else {**said, "report": sorted(said["report"])}


def endpoint_scored(place: Place, brief: bool) -> dict[str, Any]:
    """Log-likelihoods of a model behind an API that echoes prompts."""
    weights = (
        AutoModelForCausalLM.from_pretrained(demo.model_path()).eval(),
        AutoTokenizer.from_pretrained(demo.model_path()),
    )
    small = {**SMALL, "queries": 2}
    with scoring_server(*weights) as server:
        endpoint = {"base_url": server.url, "model": server.model, **ASKED, "prices": {"input": 1, "output": 2}}
        study = place.study("endpoint_scored", {**small, "endpoint": endpoint})
        said = whole(place, "endpoint_scored", study, brief=brief)
        if brief:
            return said
        written = {"scoring": "generate", "max_new_tokens": 2, "endpoint": endpoint}
        said["written"] = whole(place, "endpoint_written", place.study("endpoint_written", {**small, **written}))
    with scoring_server(*weights, echoes=False) as server:
        endpoint = {"base_url": server.url, "model": server.model, **ASKED, "tokenizer": "chatty"}
        study = place.study("endpoint_listed", {**small, "endpoint": endpoint, "scoring": "first_token"})
        return {**said, "listed": whole(place, "endpoint_listed", study)}


def endpoint_generated(place: Place, brief: bool) -> dict[str, Any]:
    """Answers of an API that refuses after five replies; the same command continues."""
    with faulty_server(["ok"] * 5 + ["401"] + ["ok"] * 3 + ["refusal"]) as server:
        endpoint = {"base_url": server.url, "model": server.model, **ASKED, "api": "chat", "max_requests": 40}
        choices = {**SMALL, "endpoint": endpoint, "scoring": "generate", "max_new_tokens": 3}
        study = place.study("endpoint_generated", choices)
        said = {
            "plan": place.call("plan", study),
            "stopped": place.call("run", study, "--out", "runs/endpoint_generated"),
        }
        said |= looked_at(place, "endpoint_generated")
        said["continued"] = place.call("run", study, "--out", "runs/endpoint_generated")
        asked = [{key: body[key] for key in sorted(body)} for body in server.seen[: 2 if brief else None]]
        return {**said, "whole": finished(place, "endpoint_generated", brief=brief), "asked": asked}


SPECIAL: dict[str, Callable[[Place, bool], dict[str, Any]]] = {
    "exported": exported,
    "extended": extended,
    "interrupted": interrupted,
    "in memory": in_one,
    "endpoint_scored": endpoint_scored,
    "endpoint_generated": endpoint_generated,
}
LOCAL_SPECIAL: dict[str, Callable[[Place, bool], dict[str, Any]]] = {"killed": killed, "damaged": damaged}
PLANNED = ("sensitivity", "generated")
"""Those of the kept portion of which the plan is recorded, too."""


def record(place: Place, *, portable: bool) -> dict[str, Any]:
    """All of them by name; ``portable``: those that other machines can repeat."""
    said: dict[str, Any] = {}
    for name, choices in {**STUDIES, **({} if portable else LOCAL_STUDIES)}.items():
        study = place.study(name, choices)
        said[name] = whole(place, name, study, brief=portable)
    for name, run in {**SPECIAL, **({} if portable else LOCAL_SPECIAL)}.items():
        said[name] = run(place, portable)
    return said
