"""A kernel that fails: on first use it is given up, later it is one line that names it and the way around it.

Without a CUDA device kernels run in Triton's interpreter.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import torch
import triton_interpreter
from test_engine import random_ids
from tiny import byte_level_tokenizer, make_model, make_task
from triton.runtime.errors import OutOfResources
from zoo import ZOO

import iclperm
from iclperm.cli import main as cli
from iclperm.engine import Engine, decodecases, engine, headcases, kernelcases, kernelcheck, selfcheck
from iclperm.engine.kernels import (
    launching,
    rowwise,
    triton_attention,
    triton_decode,
    triton_head,
    triton_layer_norm,
    triton_rowwise,
)
from iclperm.engine.model import TreeModel
from iclperm.errors import IclpermError, KernelError, ModelError
from iclperm.runs.limits import WorkLimits

triton_interpreter.repair()

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of numbers beyond float32
KERNELS = {
    "_tree_attention_kernel": triton_attention,
    "_attend_items_kernel": triton_decode,
    "_merge_chunks_kernel": triton_decode,
    "_read_tiles_kernel": triton_head,
    "_merge_kernel": triton_head,
    "_gate_kernel": triton_rowwise,
    "_rms_norm_kernel": triton_rowwise,
    "_layer_norm_kernel": triton_layer_norm,
    "_rotate_kernel": triton_rowwise,
}
NEVER_SPECIALISED = {"num_rows", "num_heads", "num_chunks", "window"}


class Launches:
    """Every launch of every kernel, by what is compiled for it; the launch number ``fails_at`` of one kernel fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.variants: set[tuple[object, ...]] = set()
        self.counts = dict.fromkeys(KERNELS, 0)
        self.fails_at: tuple[str, int] | None = None
        for name, module in KERNELS.items():
            monkeypatch.setattr(module, name, Launcher(self, name, getattr(module, name)))
        monkeypatch.setattr(rowwise, "runs_triton", lambda x: True)
        # The interpreter is slow, and what is compiled depends on no length.
        monkeypatch.setattr(kernelcases, "_LONGEST", {"cpu": 40})
        monkeypatch.setattr(headcases, "_HEAD_ROWS", 8)
        monkeypatch.setattr(kernelcases, "_MANY_ROWS", (20, 10))
        monkeypatch.setattr(kernelcases, "_MOST_ROWS", 1)
        monkeypatch.setattr(decodecases, "_LONGEST", {"cpu": 100})
        monkeypatch.setattr(decodecases, "_SHARING", {"cpu": 9})

    def forget(self) -> set[tuple[object, ...]]:
        """What was launched so far; counting begins anew."""
        found, self.variants = self.variants, set()
        self.counts = dict.fromkeys(KERNELS, 0)
        return found


class Launcher:
    """In place of a kernel."""

    def __init__(self, launches: Launches, name: str, kernel: Any) -> None:
        self._launches, self._name, self._kernel = launches, name, kernel
        self.arg_names = kernel.arg_names

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: Any, *given: Any, **options: Any) -> None:
        named = dict(zip(self.arg_names, given, strict=False)) | options
        self._launches.variants.add((self._name, *((key, _kind(key, value)) for key, value in sorted(named.items()))))
        self._launches.counts[self._name] += 1
        if self._launches.fails_at == (self._name, self._launches.counts[self._name]):
            raise OutOfResources(300_000, 101_376, "shared memory")
        self._kernel[grid](*given, **options)


def _kind(name: str, value: Any) -> object:
    """What of an argument Triton compiles anew for."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.data_ptr() % 16 == 0
    if name in NEVER_SPECIALISED:
        return None
    if isinstance(value, int) and not name.isupper() and name not in ("num_warps", "num_stages"):
        return value % 16 == 0, value == 1
    return type(value).__name__ if isinstance(value, float) else value


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    return Launches(monkeypatch)


def requests() -> list[tuple[list[int], list[int]]]:
    """Longer than the zoo's windows and shorter, branching, of several continuations."""
    rng = np.random.default_rng(3)
    stem = random_ids(rng, 30)
    long = [(stem[:depth] + random_ids(rng, 3), random_ids(rng, 2)) for depth in (1, 17, 30, 30)]
    return [*long, (stem[:2], random_ids(rng, 1)), (stem[:1], random_ids(rng, 1))]


@pytest.mark.parametrize(
    "name", ["qwen3", "phi3-window", "cohere2-window", "starcoder2-window", "phi", "gpt-neox", "gpt-oss"]
)
def test_the_first_use_launches_all_that_a_study_does(name: str, launches: Launches) -> None:
    engine = Engine(ZOO[name].build(), attention="triton", pack_tokens=24)
    engine.numerics  # noqa: B018  runs the check
    checked = launches.forget()
    engine.loglikelihood(requests())
    engine.loglikelihood(requests()[-1:])
    engine.score([[1, 2, 3], [4]], [[5, 6], [7]], [[8], [9, 10]])
    engine.generate([[1, 2, 3] * 4, [1, 2, 3], [5]], max_new_tokens=3)
    studied = launches.forget()
    assert studied <= checked, studied - checked
    names = {str(variant[0]) for variant in studied}
    norm = "_rms_norm_kernel" if name in ("qwen3", "phi3-window") else "_layer_norm_kernel"
    rows = set() if engine.layers == "transformers" else {"_gate_kernel", norm, "_rotate_kernel"}
    attention = {"_tree_attention_kernel", "_attend_items_kernel", "_merge_chunks_kernel"}
    assert names == attention | {"_read_tiles_kernel", "_merge_kernel"} | rows


@pytest.mark.parametrize(
    ("kernel", "name", "key", "value"),
    [
        ("_tree_attention_kernel", "tree attention", "attention", "torch"),
        ("_read_tiles_kernel", "head", "layers", "transformers"),
        ("_merge_kernel", "head", "layers", "transformers"),
        ("_gate_kernel", "gated activation", "layers", "transformers"),
        ("_rms_norm_kernel", "RMS norm", "layers", "transformers"),
        ("_rotate_kernel", "rotation", "layers", "transformers"),
    ],
)
def test_a_kernel_that_fails_later_is_one_line(
    kernel: str, name: str, key: str, value: str, launches: Launches
) -> None:
    scorer = Engine(ZOO["llama"].build(), attention="triton", self_check=False)
    expected = scorer.loglikelihood(requests())
    launches.fails_at = kernel, 2 * launches.counts[kernel]
    with pytest.raises(KernelError) as raised:
        scorer.loglikelihood(requests())
    said, _, remedy = str(raised.value).partition("; ")
    assert said.startswith(f"iclperm's {name} kernel failed on cpu (OutOfResources: out of resource: shared memory, ")
    assert remedy == f"start anew with {key}={value!r} (iclperm run --{key} {value})"
    assert "\n" not in said
    assert scorer.loglikelihood(requests()).logprob.tolist() == expected.logprob.tolist()


@pytest.mark.parametrize(
    ("kernel", "given_up"),
    [
        ("_tree_attention_kernel", "tree attention kernel"),
        ("_attend_items_kernel", "decode attention kernel"),
        ("_merge_chunks_kernel", "decode attention kernel"),
        ("_merge_kernel", "head kernel"),
        ("_gate_kernel", "gated activation kernel"),
        ("_rms_norm_kernel", "RMS norm kernel"),
        ("_rotate_kernel", "rotation kernel"),
    ],
)
def test_a_kernel_that_fails_alone_is_given_up_by_name(kernel: str, given_up: str, launches: Launches) -> None:
    model = ZOO["llama"].build()
    launches.fails_at = kernel, 1
    scorer = Engine(model, attention="triton")
    with pytest.warns(UserWarning, match=f"^iclperm's {given_up} cannot be used for 'llama' on cpu: OutOfResources: "):
        scores = scorer.loglikelihood(requests())
    assert scorer.numerics["given_up"] == [given_up]
    assert (scorer.attention == "torch") == (given_up == "tree attention kernel")
    assert (scorer.layers == "transformers") == (given_up.split()[0] in ("gated", "RMS", "rotation"))
    assert isinstance(scorer._model, TreeModel)
    assert scorer._model.fuses_head == (given_up != "head kernel")
    assert scorer._model.attends_live_rows == (given_up.split()[0] not in ("tree", "decode"))
    expected = Engine(model, attention="torch", layers="transformers").loglikelihood(requests())
    np.testing.assert_allclose(scores.logprob, expected.logprob, atol=1e-4)


def test_a_kernel_that_fails_only_in_whole_prompts_is_given_up_too(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selfcheck, "kernel_checks", lambda *_: iter(()))
    monkeypatch.setattr(selfcheck, "layers_agree", lambda model: True)
    launches.fails_at = "_merge_kernel", 2
    scorer = Engine(ZOO["llama"].build(), attention="triton")
    with pytest.warns(UserWarning, match="^iclperm's head kernel cannot be used for 'llama' on cpu: OutOfResources: "):
        scorer.loglikelihood(requests())
    assert scorer.numerics["given_up"] == ["head kernel"]


def test_what_a_gpu_says_later_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(*_: Any) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might ")

    scorer = Engine(ZOO["llama"].build(), self_check=False)
    monkeypatch.setattr(engine, "execute", raising)
    said = "^cpu failed .AcceleratorError: CUDA error: an illegal memory access was encountered.; start anew, and .* "
    with pytest.raises(KernelError, match=said + "--attention torch --layers transformers.$"):
        scorer.loglikelihood(requests())
    plain = Engine(ZOO["llama"].build(), plain=True, self_check=False)
    monkeypatch.setattr(engine, "execute_plain", raising)
    with pytest.raises(KernelError, match=r"\(iclperm run --device cpu\)$"):
        plain.loglikelihood(requests())


def test_a_device_that_a_kernel_took_along_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(*_: Any) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(kernelcases, "prepare", raising)
    monkeypatch.setattr(kernelcheck, "is_lost", lambda device: True)
    said = (
        r"^iclperm's tree attention kernel failed on cpu \(AcceleratorError: .*\); start anew with attention='torch' "
    )
    with pytest.raises(KernelError, match=said):
        Engine(ZOO["llama"].build()).loglikelihood(requests())
    assert not launching.is_lost(torch.device("cpu"))


def test_a_run_ends_with_one_line_and_goes_on(
    launches: Launches, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rowwise, "runs_triton", lambda x: False)  # attention alone is slow enough in the interpreter
    model = make_model(tmp_path / "model", byte_level_tokenizer())
    make_task(tmp_path)
    command = ["run", "--model", str(model), "--task", str(tmp_path / "colours.yaml"), "--sets", "2", "--quiet",
               "--permutations", "2", "--shots", "2", "--queries", "3", "--attention", "triton",
               "--out", str(tmp_path / "run")]  # fmt: skip

    def run() -> tuple[object, str]:
        with pytest.raises(SystemExit) as left:
            cli.main(command, limits=WorkLimits(unit_tokens=(60, 60)))
        return left.value.code, capsys.readouterr().err

    results = 0
    execute = Engine.execute

    def counted(self: Engine, *given: Any, **options: Any) -> Any:
        nonlocal results
        for result in execute(self, *given, **options):
            yield result
            results += 1
            if launches.fails_at is None and results == 1:
                launches.fails_at = "_tree_attention_kernel", launches.counts["_tree_attention_kernel"] + 1

    monkeypatch.setattr(Engine, "execute", counted)
    code, said = run()
    assert (code, results) == (1, 1)
    assert said.strip().splitlines()[-1].endswith("start anew with attention='torch' (iclperm run --attention torch)")
    assert "Traceback" not in said
    assert run()[0] == 0
    assert results > 2


def test_a_run_without_a_kernel_goes_on_without_it(
    launches: Launches, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the kernel could be used by now: what it takes is said."""
    monkeypatch.setattr(rowwise, "runs_triton", lambda x: False)  # attention alone is slow enough in the interpreter
    model = make_model(tmp_path / "model", byte_level_tokenizer())
    make_task(tmp_path)
    command = ["run", "--model", str(model), "--task", str(tmp_path / "colours.yaml"), "--sets", "2", "--quiet",
               "--permutations", "2", "--shots", "2", "--queries", "3", "--out", str(tmp_path / "run")]  # fmt: skip

    def run(attention: str) -> tuple[object, str]:
        with pytest.raises(SystemExit) as left:
            cli.main([*command, "--attention", attention], limits=WorkLimits(unit_tokens=(60, 60)))
        return left.value.code, capsys.readouterr().err

    execute = Engine.execute

    def stopped(self: Engine, *given: Any, **options: Any) -> Any:
        results = execute(self, *given, **options)
        yield next(results)
        yield next(results)
        raise KeyboardInterrupt

    launches.fails_at = "_tree_attention_kernel", 1
    monkeypatch.setattr(Engine, "execute", stopped)
    with pytest.warns(UserWarning, match="tree attention kernel cannot be used"):
        ended = run("triton")
    assert ended[0] == 3
    monkeypatch.setattr(Engine, "execute", execute)
    launches.fails_at = None
    code, said = run("triton")
    assert code == 1
    assert "was computed with attention torch, here it is triton" in said
    assert "add --attention torch, accept that with --mixed, or give another folder" in said
    assert run("torch")[0] == 0


def options_of(command: str) -> set[str]:
    found = cli.cli.get_command(click.Context(cli.cli), command)
    assert found is not None
    return {name for parameter in found.params for name in parameter.opts}


def test_what_the_engine_advises_are_options_of_the_command_that_it_names() -> None:
    """Whatever command meets an error of the engine, its advice names ``iclperm run``; a study has the same keys."""
    advised: set[str] = set()
    folder = Path(iclperm.__file__).parent
    for path in [*(folder / "engine").rglob("*.py"), folder / "errors.py"]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and "--" in node.value:
                for commands in re.findall(r"iclperm (\w+)((?: --[\w-]+(?: \w+)?)+)", node.value):
                    for option in re.findall(r"--[\w-]+", commands[1]):
                        assert option in options_of(commands[0]), (path.name, option)
                        if commands[0] == "run":
                            advised.add(option)
                left = re.sub(r"iclperm \w+(?: --[\w-]+(?: \w+)?)+", "", node.value)
                if path.parent.name == "doctor":  # what it prints is of its own command, or begins a run
                    assert set(re.findall(r"--[a-z][\w-]*", left)) <= options_of("run") | options_of("doctor") | {
                        "--version"
                    }
                    continue
                assert path.name == "errors.py" or not re.search(r"(?<![\w-])--[a-z]", left), (path.name, left)
    assert advised == {"--plain", "--attention", "--layers", "--device", "--dtype"}
    for option in advised:
        assert option in options_of("plan")
        assert option.removeprefix("--") in iclperm.Study.model_fields


def test_plain_is_advised_where_it_serves() -> None:
    model = ZOO["gpt-neox"].build()
    model._supports_attention_backend = False
    with pytest.raises(ModelError, match=r"; run it with plain=True \(iclperm run --plain\)$") as refused:
        Engine(model)
    assert isinstance(refused.value, IclpermError)
    assert Engine(model, plain=True).loglikelihood(requests()[-1:]).state.tolist() == [0]
