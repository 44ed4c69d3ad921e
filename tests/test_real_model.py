"""The studies that benchmarks/real_model.py writes for docs/findings.md can be run as they are."""

import importlib
from pathlib import Path

import yaml

import iclperm
from iclperm.demo import model_path

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def test_every_study_that_is_written_opens(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    real_model = importlib.import_module("real_model")
    rows = "".join(f'"{1 + n % 4}","title {n} of its own","what it says"\n' for n in range(7600))
    (tmp_path / "test.csv").write_text(rows)
    (tmp_path / "gsm8k").mkdir()
    for split in ("train", "test"):
        (tmp_path / "gsm8k" / f"{split}.jsonl").write_text('{"question": "1 + 1?", "answer": "#### 2"}\n' * 40)
    real_model.write(model_path(), tmp_path / "test.csv", tmp_path / "gsm8k", tmp_path)
    written = {path.stem: yaml.safe_load(path.read_text()) for path in tmp_path.glob("*.yaml")}
    assert written.keys() == {*real_model.AG_NEWS, *real_model.GSM8K}
    for name, study in written.items():
        opened = iclperm.Study.from_file(tmp_path / f"{name}.yaml")
        assert opened.model_dump(mode="json").items() >= {"kind": study["kind"], "queries": study["queries"]}.items()
