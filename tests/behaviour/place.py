"""A folder to work in, with tasks, models and studies, and the command line to call in it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import yaml
from tiny import byte_level_tokenizer, greedy_tokenizer, make_model, make_task

import iclperm
from behaviour.plain import files_of, plain_json, plain_lines
from iclperm import demo

LM_EVAL = Path(__file__).resolve().parents[1] / "fixtures" / "lm_eval"
CHAT = (
    "{{ bos_token }}{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Place:
    """A working directory. What is called in it goes by relative paths, so that its own is seldom printed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        package = str(Path(iclperm.__file__).resolve().parent)
        self.names = {str(folder.resolve()): "PLACE", str(folder): "PLACE", package: "PACKAGE"}
        self._second = 0
        (entry,) = entry_points(group="console_scripts", name="iclperm")
        self._main: Callable[[list[str]], None] = entry.load()

    def raw(self, *arguments: Any) -> tuple[Any, str, str]:
        """Exit code, stdout and stderr of one command, as they are."""
        out, err, code = io.StringIO(), io.StringIO(), None
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                self._main([str(argument) for argument in arguments])
            except SystemExit as exit_:
                code = exit_.code
        return code, out.getvalue(), err.getvalue()

    def call(self, *arguments: Any) -> dict[str, Any]:
        """One command: its exit code, and what it printed, line by line; JSON where ``--json`` is among its flags."""
        if arguments[:1] == ("run",):  # sessions are named, and so ordered, by the second in which they begin
            while int(time.time()) == self._second:
                time.sleep(0.01)
            self._second = int(time.time())
        code, out, err = self.raw(*arguments)
        is_json = "--json" in arguments and out.strip()
        printed = plain_json(json.loads(out), self.names) if is_json else plain_lines(out, self.names)
        return {"code": code, "out": printed, "err": plain_lines(err, self.names)}

    def study(self, name: str, choices: dict[str, Any]) -> str:
        """Writes a study file and tells its name; on a machine with a GPU it is the processor that computes."""
        if "endpoint" not in choices:
            choices = {**choices, "device": "cpu"}
        (self.folder / f"{name}.study.yaml").write_text(yaml.safe_dump(choices, sort_keys=False))
        return f"{name}.study.yaml"

    def files(self, name: str) -> dict[str, Any]:
        """What is in a folder below."""
        return files_of(self.folder / name, self.names)


@contextlib.contextmanager
def place() -> Iterator[Place]:
    """A place with everything that the cases name; it is the working directory until the end."""
    folder = Path(tempfile.mkdtemp(prefix="behaviour-", dir="/tmp"))
    before = Path.cwd()
    try:
        _furnish(folder)
        os.chdir(folder)
        yield Place(folder)
    finally:
        os.chdir(before)
        shutil.rmtree(folder)


def _furnish(folder: Path) -> None:
    for name in ("tiny", "greedy", "narrow", "solved", "news"):
        (folder / name).mkdir()
    make_task(folder / "tiny", instruction="Name the colour.")
    make_model(folder / "tiny/model", byte_level_tokenizer())
    shared = yaml.safe_load((folder / "tiny/colours.yaml").read_text())
    shared["data"] = {"train": "train.jsonl", "test": 0.3, "dev": 0.2}
    (folder / "tiny/shared.yaml").write_text(yaml.safe_dump(shared, sort_keys=False))
    make_task(folder / "greedy", query="Thing: {{ text }}", continuation="{{ label }}")
    make_model(folder / "greedy/model", greedy_tokenizer())
    make_task(folder / "narrow")
    make_model(folder / "narrow/model", byte_level_tokenizer(), window=62)
    _write_news(folder)
    _write_letters(folder / "solved")
    shutil.copytree(demo.model_path(), folder / "chatty")
    (folder / "chatty/chat_template.jinja").write_text(CHAT)
    shutil.copytree(LM_EVAL, folder / "lm_eval")


def _write_news(folder: Path) -> None:
    """The bundled headlines under another wording, and as a folder of CSV files."""
    rows = {
        split: [json.loads(line) for line in (demo.data_path() / f"{split}.jsonl").read_text().splitlines()]
        for split in ("train", "dev", "test")
    }
    for split, number in (("train", 200), ("dev", 80), ("test", 80)):
        lines = "".join(f'"{row["text"]}",{row["label"]}\n' for row in rows[split][:number])
        (folder / f"news/{split}.csv").write_text(f"text,label\n{lines}")
    task = {
        "name": "topics",
        "data": {split: f"news/{split}.csv" for split in ("train", "dev", "test")},
        "fields": {"text": "text"},
        "labels": ["World", "Sports", "Business", "Technology"],
        "demonstration": "Article: {{ text }}\nTopic: {{ label }}",
        "query": "Article: {{ text }}\nTopic:",
        "shots": 4,
    }
    (folder / "topics.yaml").write_text(yaml.safe_dump(task, sort_keys=False))


def _write_letters(folder: Path) -> None:
    """A task whose answers are written and read by rules; most of what a model says on it cannot be read."""
    lines = {
        split: [{"text": f"{split} row {n}", "letter": "abcd"[n % 4]} for n in range(count)]
        for split, count in (("train", 24), ("test", 10))
    }
    for split, rows in lines.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rules = [{"name": "a letter", "pattern": "^ B[a-z]*?([aeh])"}, {"name": "a digit", "pattern": "[0-9]"}]
    task = {
        "name": "letters",
        "data": {"train": "train.jsonl", "test": "test.jsonl"},
        "fields": {"text": "text", "letter": "letter"},
        "answer": {"field": "letter", "check": "exact", "rules": rules},
        "demonstration": "Text: {{ text }}\nAnswer: {{ letter }}",
        "query": "Text: {{ text }}\nAnswer:",
        "stop": ["q"],
        "max_new_tokens": 5,
        "shots": 3,
    }
    (folder / "letters.yaml").write_text(yaml.safe_dump(task, sort_keys=False))
