"""How a run is cut: by the device that begins it, which its folder says, so that any other continues it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config

import iclperm
from iclperm import Study
from iclperm.demo import model_path
from iclperm.engine import load
from iclperm.errors import IclpermError, RunError, RunInterrupted
from iclperm.runs import execute, setting
from iclperm.runs.layout import lay_out
from iclperm.runs.limits import DEFAULT, OF_A_GPU, WorkLimits
from iclperm.runs.recorded import recorded_limits
from iclperm.runs.setting import ResolvedStudy

SIZES: dict[str, Any] = {"sets": 2, "permutations": 3, "shots": 3, "queries": 6}
FEW = replace(OF_A_GPU, unit_tokens=(300, 300))  # so that this small run has several units
GENERATED = {"scoring": "generate", "max_new_tokens": 3}


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As if this machine's device were a GPU; undo what it returns for a machine that has none."""
    monkeypatch.setattr(load, "is_gpu", lambda device: device == "auto")
    monkeypatch.setattr(setting, "OF_A_GPU", FEW)
    return monkeypatch


def of_work(folder: Path, number: int = 0) -> dict[str, Any]:
    name = f"plan-{number:03d}.json" if number else "plan.json"
    work: dict[str, Any] = json.loads((folder / name).read_text())["work"]
    return work


def interrupted(study: Study, folder: Path, **given: Any) -> None:
    calls = iter(range(1000))

    def progress(done: int, total: int) -> None:
        if next(calls) == 2:
            raise KeyboardInterrupt

    with pytest.raises(RunInterrupted):
        iclperm.run(study, folder, progress=progress, **given)


@pytest.mark.parametrize(
    ("parameters", "processor", "gpu"),
    [
        (3e6, 65_536, 131_072),
        (0.5e9, 4_096, 131_072),
        (1.5e9, 4_096, 66_666),
        (7e9, 4_096, 16_384),
        (70e9, 4_096, 16_384),
    ],
)
def test_units_are_seconds_of_the_device(parameters: float, processor: int, gpu: int) -> None:
    assert DEFAULT.tokens_of_unit(int(parameters)) == processor
    assert OF_A_GPU.tokens_of_unit(int(parameters)) == gpu


def test_a_study_has_packs_as_large_as_a_gpu_wants_them(tmp_path, monkeypatch) -> None:
    """Of the shape of Qwen2.5 0.5B, which a study's packs on a processor have 4,096 tokens of."""
    folder = shutil.copytree(model_path(), tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    shape = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
    Qwen2Config(**shape, num_key_value_heads=2, vocab_size=151_936, bos_token_id=None).save_pretrained(folder)
    study = Study(model=str(folder), sets=1, permutations=16, shots=16, queries=100)
    largest = []
    for is_gpu in (False, True):
        monkeypatch.setattr(load, "is_gpu", lambda device, is_gpu=is_gpu: is_gpu)
        work = lay_out(ResolvedStudy.of(study, weights=False))
        (product,) = work.products
        plan = product.plan.repacked(16_384)
        largest.append(max(len(pack) for unit in range(plan.num_units) for pack in plan.packs(unit)))
    assert largest[0] < 6_000
    assert largest[1] == 16_384


@pytest.mark.parametrize("choices", [{}, GENERATED], ids=["scored", "generated"])
def test_what_a_gpu_began_a_processor_continues(choices, on_a_gpu, tmp_path) -> None:
    study = Study(**SIZES, **choices)
    interrupted(study, tmp_path / "gpu")
    assert of_work(tmp_path / "gpu")["unit_tokens"] == 300
    on_a_gpu.undo()
    found = iclperm.run(study, tmp_path / "gpu")
    assert found.report.num_parts_resumed > 0
    here = iclperm.run(study, tmp_path / "here")
    assert "unit_tokens" not in of_work(tmp_path / "here")
    assert of_work(tmp_path / "gpu")["parts"] > of_work(tmp_path / "here")["parts"]
    assert found.digest == here.digest
    # So is what it grows by, and the page of another session that only reads.
    grown = iclperm.run(Study(**{**SIZES, "queries": 9}, **choices), tmp_path / "gpu", extend=True)
    assert of_work(tmp_path / "gpu", 1)["unit_tokens"] == 300
    assert iclperm.open_run(tmp_path / "gpu").digest == grown.digest
    assert iclperm.verify(tmp_path / "gpu").damage == []


def test_what_a_processor_began_a_gpu_continues(tmp_path, on_a_gpu) -> None:
    on_a_gpu.setattr(load, "is_gpu", lambda device: False)
    study = Study(**SIZES)
    limits = WorkLimits(unit_tokens=(300, 300))
    interrupted(study, tmp_path / "run", limits=limits)
    assert "unit_tokens" not in of_work(tmp_path / "run")  # as the folders of before
    with pytest.raises(RunError, match="holds another run"):  # they have to be given again
        iclperm.run(study, tmp_path / "run")
    assert iclperm.run(study, tmp_path / "run", limits=limits).report.num_parts_resumed > 0
    iclperm.run(study, tmp_path / "whole", limits=DEFAULT)
    on_a_gpu.setattr(load, "is_gpu", lambda device: True)
    assert recorded_limits(tmp_path / "whole") == DEFAULT
    grown = iclperm.run(Study(**{**SIZES, "queries": 9}), tmp_path / "whole", extend=True)
    assert grown.report.num_parts_resumed == 1
    assert "unit_tokens" not in of_work(tmp_path / "whole", 1)


def test_a_plan_that_is_damaged_is_mended_by_what_a_later_one_says(tmp_path, on_a_gpu) -> None:
    folder = tmp_path / "run"
    iclperm.run(Study(**SIZES), folder)
    larger = Study(**{**SIZES, "queries": 9})
    grown = iclperm.run(larger, folder, extend=True)
    on_a_gpu.undo()
    before = (folder / "plan.json").read_bytes()
    (folder / "plan.json").write_bytes(before[: len(before) // 2])
    assert recorded_limits(folder) == replace(DEFAULT, unit_tokens=(300, 300), is_told=True)
    assert iclperm.run(larger, folder).digest == grown.digest
    assert (folder / "plan.json").read_bytes() == before


@pytest.mark.parametrize("begun_on_a_gpu", [True, False])
@pytest.mark.parametrize("is_gone", [True, False])
def test_a_plan_that_nothing_is_left_of_is_mended_on_the_other_device(
    begun_on_a_gpu, is_gone, on_a_gpu, tmp_path
) -> None:
    on_a_gpu.setattr(load, "is_gpu", lambda device: begun_on_a_gpu)
    folder, study = tmp_path / "run", Study(**SIZES)
    found = iclperm.run(study, folder)
    before = (folder / "plan.json").read_bytes()
    if is_gone:
        (folder / "plan.json").unlink()
    else:
        (folder / "plan.json").write_bytes(before[: len(before) // 2])
    on_a_gpu.setattr(load, "is_gpu", lambda device: not begun_on_a_gpu)
    assert iclperm.run(study, folder).digest == found.digest
    assert (folder / "plan.json").read_bytes() == before
    # A stranger's folder stays one.
    (folder / "plan.json").write_bytes(before[: len(before) // 2])
    with pytest.raises(RunError, match="the results beside it are not this study's") as refused:
        iclperm.run(Study(**SIZES, seed=5), folder)
    assert type(refused.value) is RunError


def test_two_that_begin_at_once_on_different_devices_agree(on_a_gpu, tmp_path) -> None:
    """The slower one finds a plan that was not there when it looked."""
    study, folder = Study(**SIZES), tmp_path / "run"
    looked = iter([True])

    def recorded(path: Path) -> WorkLimits | None:
        if next(looked, False):
            assert recorded_limits(path) is None
            on_a_gpu.setattr(load, "is_gpu", lambda device: False)
            iclperm.run(study, folder)
            on_a_gpu.setattr(load, "is_gpu", lambda device: True)
            return None
        return recorded_limits(path)

    on_a_gpu.setattr(execute, "recorded_limits", recorded)
    found = iclperm.run(study, folder)
    assert found.report.num_parts == found.report.num_parts_resumed == 1
    assert "unit_tokens" not in of_work(folder)


def test_a_plan_tells_the_parts_of_the_folder_that_is_there(on_a_gpu, tmp_path) -> None:
    study = Study(**SIZES, out=str(tmp_path / "run"))
    found = iclperm.run(study)
    on_a_gpu.undo()
    assert iclperm.plan(study).num_parts == found.report.num_parts > 1
    assert iclperm.plan(Study(**SIZES)).num_parts == 1


@pytest.mark.parametrize("tokens", [0, -4, "many", 2.5])
def test_a_plan_of_no_such_size_is_damaged(tokens, tmp_path, on_a_gpu) -> None:
    from iclperm.base.sealed import sealed

    folder = tmp_path / "run"
    iclperm.run(Study(**SIZES), folder)
    plan = json.loads((folder / "plan.json").read_text())
    plan["work"]["unit_tokens"] = tokens
    plan.pop("digest")
    (folder / "plan.json").write_text(json.dumps(sealed(plan)))
    assert any("plan.json is damaged" in line for line in iclperm.verify(folder).damage)


def test_a_gpu_that_is_not_here_cuts_nothing(monkeypatch, tmp_path) -> None:
    """Else a run that could not begin would have been cut for it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not load.is_gpu("cuda")
    assert not load.is_gpu("auto")
    with pytest.raises(IclpermError):
        iclperm.run(Study(**SIZES, device="cuda"), tmp_path / "run")
    found = iclperm.run(Study(**SIZES, device="cpu"), tmp_path / "run")
    assert "unit_tokens" not in of_work(tmp_path / "run")
    assert found.report.num_parts == 1
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert load.is_gpu("cuda:1")
    assert load.is_gpu("balanced")
    assert load.is_gpu("auto")
    assert not load.is_gpu("cpu")


def test_an_api_has_no_device(on_a_gpu) -> None:
    study = Study(model="a/b", endpoint={"base_url": "http://localhost:1/v1", "tokenizer": "any"}, scoring="generate")
    assert setting.limits_here(study) == DEFAULT
    assert setting.limits_here(Study()) == FEW
    assert setting.limits_here(Study(device="cpu")) == DEFAULT
