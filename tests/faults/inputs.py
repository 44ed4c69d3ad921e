"""Files that others made: studies, tasks, templates, tokenizers, weights and tables, bad on purpose or by chance."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import yaml

from faults import nasty
from faults.child import run
from faults.judge import FaultClass, Verdict, judged, keys_in
from faults.world import DEV, SIZES, World, command_line, run_alone

LIMIT_S = 30.0
_BY_CHANCE = 80
_CHAT = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
_STUDY = {**SIZES, **DEV, "task": "colours.yaml", "shots": [0, 3], "kind": "sensitivity", "seed": 1, "normalize": "sum"}


class Bad(NamedTuple):
    target: str
    how: str


def steps(world: World) -> Sequence[Bad]:
    """Every known-bad content of every kind of file, and some that are made of whole ones by chance."""
    known = {
        "study": list(nasty.YAML), "task": list(nasty.YAML), "template": list(nasty.TEMPLATES),
        "chat template": list(nasty.TEMPLATES), "data": list(nasty.TABLES), "weights": list(nasty.weights()),
        "stats": [*nasty.TABLES, *nasty.arrays(world.home)], "pickled weights": ["a pickle"], "remote code": ["code"],
    }  # fmt: skip
    by_chance = [f"by chance {number}" for number in range(_BY_CHANCE)]
    targets = dict.fromkeys([*known, "tokenizer", "config", "tokenizer config"])
    return [
        Bad(target, how)
        for target in targets
        for how in (*known.get(target, ()), *(by_chance if target not in ("pickled weights", "remote code") else ()))
    ]


def check(world: World, step: Bad, random: Random) -> Verdict:
    """One file of a study's inputs, or of `iclperm stats`, is bad; the study is run."""
    verdict, place = Verdict(), world.place()
    for path in world.inputs.iterdir():
        if path.suffix in (".jsonl", ".yaml"):
            shutil.copy(path, place)
    shutil.copytree(world.inputs / "model", place / "model")
    (place / "study.yaml").write_text(yaml.safe_dump(_STUDY))
    owned = world.home / "owned"
    if step.target == "stats":
        path = _stats_file(step, place, owned, random)
        work = partial(command_line, ["stats", str(path), *random.choice([[], ["--json"], ["--axes", "SPQ"]])])
    else:
        TARGETS[step.target](place, step.how, random, owned)
        folder = place / "run"
        work = partial(run_alone, place / "study.yaml", folder)
    done = run(partial(_in, place, work), place / "run", world.scratch, limit_s=LIMIT_S)
    done.outside = [path for path in done.outside if path != str(place / "run")]
    verdict.add(step.target, judged(done))
    verdict.ended = "it was taken" if done.code == 0 else f"refused with exit code {done.code}"
    if owned.exists():
        owned.unlink()
        verdict.findings.append("code of a stranger was run")
    verdict.findings += keys_in(place)
    return verdict


def _in(place: Path, work: Callable[[], int]) -> int:
    os.chdir(place)
    return work()


def _study(place: Path, how: str, random: Random, _owned: Path) -> None:
    content = nasty.YAML.get(how) or _by_chance(_STUDY, random)
    (place / "study.yaml").write_bytes(content)


def _task(place: Path, how: str, random: Random, _owned: Path) -> None:
    path = place / "colours.yaml"
    path.write_bytes(nasty.YAML.get(how) or _by_chance(yaml.safe_load(path.read_text()), random))


def _by_chance(content: object, random: Random) -> bytes:
    if random.random() < 0.3:
        return nasty.scrambled(nasty.as_yaml(content), random)
    return nasty.as_yaml(nasty.mutated(content, random))


def _template(place: Path, how: str, random: Random, _owned: Path) -> None:
    path = place / "colours.yaml"
    content = yaml.safe_load(path.read_text())
    key = random.choice(["demonstration", "query", "continuation"])
    template = nasty.TEMPLATES.get(how)
    if template is None:
        template = nasty.scrambled(content.get(key, " {{ label }}").encode() * 2, random).decode(errors="replace")
    path.write_text(yaml.safe_dump({**content, key: template}))


def _chat(place: Path, how: str, random: Random, _owned: Path) -> None:
    (place / "study.yaml").write_text(yaml.safe_dump({**_STUDY, "chat": random.choice(["single", "multiturn"])}))
    template = nasty.TEMPLATES.get(how)
    if template is None:
        template = nasty.scrambled(_CHAT.encode(), random).decode(errors="replace")
    (place / "model/chat_template.jinja").write_text(template.replace("text", "messages"))


def _data(place: Path, how: str, random: Random, _owned: Path) -> None:
    suffix, raw = nasty.TABLES.get(how) or _table(place, random)
    (place / f"bad.{suffix}").write_bytes(raw)
    content = yaml.safe_load((place / "colours.yaml").read_text())
    content["data"]["train"] = f"bad.{suffix}"
    (place / "colours.yaml").write_text(yaml.safe_dump(content))


def _table(place: Path, random: Random) -> tuple[str, bytes]:
    import pyarrow as pa
    import pyarrow.csv as pa_csv
    import pyarrow.parquet as pq

    rows = [json.loads(line) for line in (place / "train.jsonl").read_text().splitlines()]
    suffix, path = random.choice(["jsonl", "csv", "parquet"]), place / "whole"
    if suffix == "jsonl":
        if random.random() < 0.5:
            return suffix, b"".join(nasty.as_json(row) + b"\n" for row in nasty.mutated(rows, random))
        return suffix, nasty.scrambled((place / "train.jsonl").read_bytes(), random)
    table = pa.Table.from_pylist(rows)
    pa_csv.write_csv(table, path) if suffix == "csv" else pq.write_table(table, path)
    return suffix, nasty.scrambled(path.read_bytes(), random)


def _weights(place: Path, how: str, random: Random, _owned: Path) -> None:
    path = place / "model/model.safetensors"
    raw = path.read_bytes()
    if (known := nasty.weights().get(how)) is None:
        head = 8 + int.from_bytes(raw[:8], "little")
        known = nasty.scrambled(raw[:head], random) + raw[head:]
    path.write_bytes(known)


def _json_of(name: str) -> Callable[[Path, str, Random, Path], None]:
    def damage(place: Path, how: str, random: Random, _owned: Path) -> None:
        path = place / "model" / name
        raw = path.read_bytes()
        chance = random.random() < 0.3
        whole = json.loads(raw)
        path.write_bytes(nasty.scrambled(raw, random) if chance else nasty.as_json(nasty.mutated(whole, random)))

    return damage


def _pickled(place: Path, how: str, random: Random, owned: Path) -> None:
    import torch

    (place / "model/model.safetensors").unlink()
    torch.save({"model.embed_tokens.weight": nasty.Owned(owned)}, place / "model/pytorch_model.bin")


def _remote_code(place: Path, how: str, random: Random, owned: Path) -> None:
    path = place / "model/config.json"
    names = {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.Model"}
    path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": names, "model_type": "theirs"}))
    (place / "model/theirs.py").write_text(f"open({str(owned)!r}, 'w')\n")


TARGETS: dict[str, Callable[[Path, str, Random, Path], None]] = {
    "study": _study,
    "task": _task,
    "template": _template,
    "chat template": _chat,
    "data": _data,
    "weights": _weights,
    "pickled weights": _pickled,
    "remote code": _remote_code,
    "tokenizer": _json_of("tokenizer.json"),
    "config": _json_of("config.json"),
    "tokenizer config": _json_of("tokenizer_config.json"),
}


def _stats_file(step: Bad, place: Path, owned: Path, random: Random) -> Path:
    known = {**nasty.TABLES, **nasty.arrays(owned)}
    if step.how in known:
        suffix, raw = known[step.how]
        path = place / f"bad.{suffix}"
        path.write_bytes(raw)
        return path
    return _scrambled_answers(place, random)


def _scrambled_answers(place: Path, random: Random) -> Path:
    import pyarrow as pa
    import pyarrow.csv as pa_csv
    import pyarrow.parquet as pq

    correct = (np.random.default_rng(random.randrange(1 << 30)).random((3, 4, 2, 9)) < 0.6).astype(np.uint8)
    suffix = random.choice(["npy", "npz", "csv", "parquet", "jsonl"])
    path = place / f"bad.{suffix}"
    index = [axis.ravel() for axis in np.indices(correct.shape)]
    table = pa.table(dict(zip(("set", "permutation", "shots", "query"), index, strict=True)) | {
        "split": ["test"] * correct.size, "correct": correct.ravel().astype(bool)})  # fmt: skip
    if suffix == "npy":
        np.save(path, correct)
    elif suffix == "npz":
        np.savez(path, correct=correct, shots=np.array([0, 4]))
    elif suffix == "csv":
        pa_csv.write_csv(table, path)
    elif suffix == "parquet":
        pq.write_table(table, path)
    else:
        path = place / "samples_a.jsonl"
        rows = [
            {"doc_id": n, "doc_hash": f"h{n}", "filter": "none", "acc": float(n % 2), "doc": {"a": 1}} for n in range(9)
        ]
        path.write_bytes(b"".join(nasty.as_json(row) + b"\n" for row in nasty.mutated(rows, random)))
    if random.random() < 0.9:
        path.write_bytes(nasty.scrambled(path.read_bytes(), random))
    return path


FIXED = (
    *(Bad("study", how) for how in ("a bomb", "python", "deep maps", "a merge of itself")),
    *(Bad("template", how) for how in ("globals", "a silent loop", "a text of texts", "a file", "a power")),
    *(Bad("data", how) for how in ("deep JSON", "a parquet with a huge footer", "escapes")),
    *(Bad("weights", how) for how in ("a huge header", "another size", "nothing")),
    *(Bad("stats", how) for how in ("an array of objects", "a huge shape", "an npz of one bomb", "deep JSON")),
    Bad("pickled weights", "a pickle"),
    Bad("remote code", "code"),
)
INPUTS = FaultClass(
    "inputs", "studies, tasks, templates, models and tables, bad on purpose or by chance", steps, check, FIXED
)
