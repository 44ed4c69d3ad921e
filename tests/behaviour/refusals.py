"""Wrong inputs: what is said of each, and the exit code."""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np

from behaviour.place import Place

NEWS = ("--task", "mini_news", "--sets", "2", "--permutations", "2", "--queries", "4")
FLAGS: dict[str, tuple[str, ...]] = {
    "no command": (),
    "an unknown command": ("rnu",),
    "an unknown flag": ("run", "--permutatoins", "3"),
    "no folder": ("run",),
    "a word for a number": ("plan", "--sets", "many"),
    "too many orders": ("plan", *NEWS[:4], "--permutations", "7", "--shots", "3"),
    "no such task": ("plan", "--task", "mini_newz"),
    "no such kind": ("plan", "--kind", "sensitvity"),
    "a report as a kind": ("plan", "--kind", "features"),
    "no such model": ("plan", "--model", "./nothing"),
    "no such device": ("plan", "--device", "tpu"),
    "no such budget": ("plan", "--memory-budget", "4 barrels"),
    "no such calibration": ("plan", "--calibration", "some"),
    "shots twice": ("plan", "--shots", "1,1"),
    "negative shots": ("plan", "--shots", "-1"),
    "uneven demonstrations": ("plan", "--demonstrations", "1,2;3"),
    "demonstrations that are no rows": ("plan", "--demonstrations", "a,b"),
    "a key of another kind": ("plan", "--select", "3"),
    "a search without dev queries": ("plan", "--kind", "search", "--dev-queries", "0"),
    "a selection of too many": ("plan", "--kind", "selection", "--shots", "3", "--select", "9"),
    "transfer of uneven shots": ("plan", "--kind", "transfer", "--tasks", "mini_news,gsm8k"),
    "a data folder that is not there": ("plan", "--data", "nowhere"),
    "an endpoint without a model": ("plan", "--endpoint", "http://localhost:1/v1"),
    "an endpoint with a dtype": ("plan", "--endpoint", "http://localhost:1/v1", "--model", "m", "--dtype", "float32"),
    "an endpoint of words": ("plan", "--endpoint", "base_url=http://localhost:1/v1,max", "--model", "m"),
    "an unknown key of an endpoint": ("plan", "--endpoint", "base_url=http://localhost:1/v1,maxcost=1", "--model", "m"),
    "a server that is not there": ("run", *NEWS, "--endpoint", "base_url=http://127.0.0.1:9/v1,deadline_s=1",
                                   "--model", "m", "--scoring", "generate", "--out", "unreachable"),
    "a chat without a template": ("plan", *NEWS, "--chat", "single"),
    "a study that is not there": ("plan", "nothing.yaml"),
    "a folder that is no run": ("run", "tiny"),
    "status of no run": ("status", "tiny"),
    "verify of nothing": ("verify", "nothing"),
    "report of no run": ("report", "tiny"),
    "report of no kind": ("report", "runs/sensitivity", "--kind", "transfers"),
    "report that lacks dev queries": ("report", "runs/sensitivity", "--kind", "search"),
    "report that lacks calibration": ("report", "runs/sensitivity", "--kind", "calibration"),
    "report with no such criterion": ("report", "runs/sensitivity", "--criterion", "luck"),
    "export to another ending": ("export", "runs/sensitivity", "--out", "all.txt"),
    "export of no run": ("export", "tiny", "--out", "all.csv"),
    "another study into a folder": ("run", "sensitivity.study.yaml", "--seed", "3", "--out", "runs/sensitivity"),
    "a smaller study into a folder": ("run", "sensitivity.study.yaml", "--sets", "2", "--out", "runs/sensitivity"),
    "a larger study into a folder": ("run", "sensitivity.study.yaml", "--sets", "4", "--out", "runs/sensitivity"),
    "a study into a folder of other files": ("run", *NEWS, "--out", "tiny"),
    "a compound study into a run": ("run", "selection.study.yaml", "--out", "runs/sensitivity"),
    "no such shown task": ("tasks", "show", "agnews"),
    "no such query": ("tasks", "show", "mini_news", "--query", "100000"),
    "a task file that is there": ("tasks", "new", "topics"),
    "a task of a bad name": ("tasks", "new", "../x"),
    "statistics of no file": ("stats", "nothing.npy"),
    "statistics of another ending": ("stats", "all.txt"),
    "statistics of wrong axes": ("stats", "answers.npy", "--axes", "SP"),
    "models at no rate": ("models", "--rate", "0"),
    "no such case": ("bench", "--case", "nothing"),
}  # fmt: skip
NOT_KEPT = ("a server that is not there", "transfer of uneven shots")
"""What takes seconds, and what is said otherwise where there is a network."""
STUDY_FILES = {
    "a key that is none": "permutatoins: 3\n",
    "no mapping": "- 1\n- 2\n",
    "no YAML": "sets: [1\n",
    "a key twice": "sets: 2\nsets: 3\n",
    "a boolean": "task: no\n",
    "an empty file": "",
}
TASK_FILES = {
    "a label twice": {"labels": ["Red", "Green", "Red "]},
    "one label": {"labels": ["Red"]},
    "a template that runs code": {"query": "{{ ''.__class__ }}"},
    "a template of no field": {"query": "{{ nothing }}"},
    "a column that is not there": {"fields": {"text": "body"}},
    "a file that is not there": {"data": {"train": "no.jsonl", "test": "test.jsonl"}},
    "an unknown key of a task": {"labelz": []},
}


def record(place: Place, *, portable: bool) -> dict[str, Any]:
    """What is said of every one of them; needs the finished run ``sensitivity`` in the place."""
    np.save(place.folder / "answers.npy", np.zeros((2, 2, 2, 2), np.uint8))
    (place.folder / "all.txt").write_text("1\n")
    flags = {name: arguments for name, arguments in FLAGS.items() if not (portable and name in NOT_KEPT)}
    said = {name: place.call(*arguments) for name, arguments in flags.items()}
    for name, content in STUDY_FILES.items():
        (place.folder / "wrong.yaml").write_text(content)
        said[f"study file: {name}"] = place.call("plan", "wrong.yaml")
    from tiny import make_task

    for name, changes in TASK_FILES.items():
        (place.folder / "wrong").mkdir()
        make_task(place.folder / "wrong", **changes)
        said[f"task file: {name}"] = place.call("plan", "--task", "wrong/colours.yaml", "--sets", "1", "--queries", "3")
        shutil.rmtree(place.folder / "wrong")
    return said
