"""What `iclperm doctor` finds, prints and keeps: on a CPU, in Triton's interpreter, and where something is broken."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton_interpreter
from rich.console import Console
from safetensors.torch import load_file, save_file
from tiny import byte_level_tokenizer, make_model
from zoo import ZOO

import iclperm
from iclperm.cli import doctor as cli_doctor
from iclperm.cli import main as cli
from iclperm.engine import doctor as clinic
from iclperm.engine import kernelcases
from iclperm.engine.doctor import checks, choosing, kernels, machine, packs
from iclperm.engine.doctor.diagnosis import PARTS, Diagnosis
from iclperm.engine.doctor.packs import PackSeconds
from iclperm.engine.kernels import rowwise, stages, triton_attention, triton_decode, triton_head, triton_rowwise
from iclperm.engine.kernels import triton_layer_norm as layer_norm
from iclperm.engine.kernels.launching import TREE_ATTENTION, failure
from iclperm.engine.kernels.rule import AttentionRule, LayerStates
from iclperm.engine.kernels.triton_compilation import Compilation
from iclperm.engine.model import TreeModel
from iclperm.engine.plan import plan_requests
from iclperm.engine.selfcheck import check_agreement
from iclperm.engine.tree import Rows

triton_interpreter.repair()

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[1]
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("private") / "secret-model", byte_level_tokenizer())


@pytest.fixture(autouse=True)
def few_packs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Small packs, and a cache folder of the test's own."""
    monkeypatch.setattr(packs, "SIZES", (256, 512))
    monkeypatch.setattr(packs, "_FIRST_ON_A_CPU", 64)
    monkeypatch.setattr(choosing, "DEFAULT_PACK_TOKENS", 96)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs the command in this process; gives exit code, what was printed, and what was complained."""

    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as done:
            cli.main(["doctor", *map(str, arguments)])
        printed = capsys.readouterr()
        assert isinstance(done.value.code, int)
        return done.value.code, printed.out, printed.err

    return run


@pytest.fixture
def in_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """All kernels are Triton's, in its interpreter, and the check has few and short paths."""

    class InTriton(TreeModel):
        def __init__(self, loaded: Any) -> None:
            super().__init__(loaded, attention="triton")

    monkeypatch.setattr(rowwise, "runs_triton", lambda x: True)
    monkeypatch.setattr(clinic, "TreeModel", InTriton)
    monkeypatch.setattr(kernelcases, "_LONGEST", {"cpu": 70})
    monkeypatch.setattr(kernelcases, "_PATHS", (1, 33))
    monkeypatch.setattr(kernelcases, "_MANY_ROWS", (9, 5))
    monkeypatch.setattr(kernelcases, "_MOST_ROWS", 1)


class Broken:
    """In place of the attention that a check prepares."""

    def __init__(self, error: Exception | None) -> None:
        self._error = error

    def __call__(self, states: LayerStates, rule: AttentionRule) -> torch.Tensor:
        if self._error is not None:
            raise self._error
        return torch.zeros_like(states.q)


class TestCommand:
    def test_the_bundled_model_on_a_cpu(self, call: Call, tmp_path: Path) -> None:
        code, printed, told = call("--device", "cpu", "--out", tmp_path / "report.md")
        assert (code, told) == (0, f"{tmp_path / 'report.md'}\n")
        assert (tmp_path / "report.md").read_text() == printed
        head, fence, verdict = printed.partition("\n```\n\n")
        assert head.startswith("### iclperm doctor\n\n```text\nmachine\n")
        assert fence
        assert re.fullmatch(
            r"Works: qwen2 in float32 on cpu passes all 8 checks \(attention native, .*\)\..*\n", verdict
        )
        titles = [line for line in head.splitlines()[3:] if not line.startswith(" ")]
        assert titles == list(PARTS)
        assert re.search(r"passed  tree attention kernel +[\d.e-]+ of [\d.e-]+  [\d.]+ s", head)
        assert re.search(r"^  isa \w+ of |, isa \w+ of ", head, re.MULTILINE)

    def test_json_is_what_the_docs_say(self, call: Call, model: Path, tmp_path: Path) -> None:
        code, printed, told = call(model, "--device", "cpu", "--json", "--out", tmp_path / "report.json")
        assert code == 0
        assert (tmp_path / "report.json").read_text() == printed
        found = json.loads(printed)
        assert (found["format"], found["passed"], found["stopped"], found["failures"]) == (1, True, False, [])
        page = (ROOT / "docs/doctor.md").read_text(encoding="utf-8")
        documented = set(re.findall(r"`(\w+)`", page[page.index("## JSON") :]))
        named = {"versions", "system", "flags", "environment", "without", "failed"}  # by what they are of
        assert set(keys(found, but=named)) <= documented
        assert "checks" not in told

    def test_nothing_private_is_told(
        self, call: Call, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnop")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6")
        monkeypatch.setenv("LD_PRELOAD", "")
        monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
        _, printed, _ = call(model, "--device", "cpu")
        assert "CUDA_VISIBLE_DEVICES=GPU-***" in printed
        assert "XDG_CACHE_HOME=(set)" in printed
        for private in ("hf_", "sk-very", "secret-model", str(tmp_path), str(model), "8932f937"):
            assert private not in printed

    @pytest.mark.parametrize(
        ("error", "said"),
        [
            (RuntimeError("PTXAS error in /home/someone/x.ptx\x1b[0m\nand more"), "PTXAS error in .../x.ptx\\x1b[0m"),
            (None, "its numbers are not those of the reference"),
        ],
    )
    def test_a_broken_kernel_is_one_line_and_the_rest_goes_on(
        self, error: Exception | None, said: str, call: Call, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(kernelcases, "prepare", lambda *_: Broken(error))
        code, printed, told = call(model, "--device", "cpu")
        assert (code, told) == (1, "")
        (line,) = [line for line in printed.splitlines() if "FAILED" in line]
        assert "FAILED  tree attention kernel" in line
        assert said in line
        assert "someone" not in printed
        assert "passed  whole model against plain scoring" in printed
        assert "the library's own takes the place of what failed, and is slower." in printed
        assert "Not all is well: tree attention kernel: " in printed
        assert "With --attention torch the kernel is not tried." in printed
        assert "packs of" in printed

    def test_a_kernel_that_fails_in_the_whole_model_alone_is_named_and_the_rest_goes_on(
        self, call: Call, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[str] = []

        def failing(served: TreeModel) -> bool:
            seen.append(served.attention)
            if served.attention == "native":
                error = RuntimeError("out of resource: shared memory\nand more")
                raise failure(TREE_ATTENTION, CPU, error) from error
            return check_agreement(served)

        monkeypatch.setattr(checks, "check_agreement", failing)
        code, printed, _ = call(model, "--device", "cpu")
        assert (code, seen) == (1, ["native", "torch"])
        (line,) = [line for line in printed.splitlines() if "FAILED" in line]
        assert "tree attention kernel in the whole model" in line
        assert line.endswith("RuntimeError: out of resource: shared memory")
        assert "passed  whole model against plain scoring" in printed

    def test_a_part_that_breaks_is_told_and_the_next_goes_on(
        self, call: Call, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def failing(_: TreeModel) -> Iterator[PackSeconds]:
            raise ZeroDivisionError("by\nnothing")

        monkeypatch.setattr(packs, "timed_packs", failing)
        monkeypatch.setattr(machine, "look", lambda: failing(None))  # type: ignore[arg-type]
        code, printed, _ = call(model, "--device", "cpu")
        assert code == 1
        assert "packs\n  FAILED ZeroDivisionError: by\n" in printed
        assert "machine\n  FAILED ZeroDivisionError: by\n" in printed
        assert "passed  tree attention kernel" in printed

    def test_a_model_that_is_not_there(self, call: Call, tmp_path: Path) -> None:
        code, printed, told = call(tmp_path / "absent")
        assert (code, told) == (1, "")
        assert "model\n  FAILED ModelError: there is no model folder '.../FOLDER'" in printed
        assert "machine\n" in printed

    def test_what_the_tree_does_not_serve(self, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = make_model(tmp_path / "model", byte_level_tokenizer())
        monkeypatch.setattr("iclperm.engine.architecture._SERVED_LAYERS", set())
        config = json.loads((folder / "config.json").read_text()) | {"layer_types": ["full_attention"] * 2}
        (folder / "config.json").write_text(json.dumps(config))
        code, printed, _ = call(folder, "--device", "cpu")
        assert code == 0, "it is known, and no fault"
        assert re.search(r"told    the prefix tree .*layers of type 'full_attention'", printed)
        assert "Works: llama in float32 on cpu passes all 1 checks (prompts plain)." in printed
        assert "The model runs without the prefix tree: ModelError: " in printed
        assert "With --plain prompts are scored one by one" in printed
        assert "passed  a causal model" in printed
        assert "send this report" not in printed

    def test_weights_that_are_no_numbers_are_the_model_s(self, call: Call, tmp_path: Path) -> None:
        folder = make_model(tmp_path / "model", byte_level_tokenizer())
        weights = load_file(folder / "model.safetensors")
        broken = {name: torch.full_like(weight, torch.nan) for name, weight in weights.items()}
        save_file(broken, folder / "model.safetensors", metadata={"format": "pt"})
        code, printed, _ = call(folder, "--device", "cpu")
        verdict = printed.rpartition("```")[2]
        assert code == 1
        assert re.search(r"FAILED  whole model against plain scoring .*gives no number, only NaN or infinity", printed)
        assert "Another --dtype, --device or model may do." in verdict
        assert "--plain" not in verdict, "it would give NaN as well"
        assert "send this report" not in verdict

    def test_layers_over_several_cards(self, call: Call, model: Path) -> None:
        pytest.importorskip("accelerate")
        code, printed, _ = call(model, "--device", "balanced")
        assert code == 0
        assert "Works: llama in float32 on cpu passes all" in printed

    def test_the_name_of_a_folder_is_cut_where_it_cannot_be_read(self, call: Call, tmp_path: Path) -> None:
        folder = tmp_path / "my-unpublished-model"
        folder.mkdir()
        for where in (folder, tmp_path / "my-unpublished-model-2"):
            code, printed, _ = call(where, "--device", "cpu")
            assert code == 1
            assert "FOLDER" in printed
            assert "unpublished" not in printed
        assert call("org/hub-model", "--device", "cpu")[1].count("org/hub-model") >= 1, "who may download it knows it"

    @pytest.mark.parametrize("start", ["", "./", "../here/"])
    def test_a_relative_path_is_cut_whole(
        self, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: str
    ) -> None:
        (tmp_path / "here").mkdir()
        monkeypatch.chdir(tmp_path / "here")
        for name, content in (("none", None), ("empty", "{}"), ("no-json", "{")):
            folder = Path("clients-of-ours") / "acme-and-sons" / name
            if content is not None:
                folder.mkdir(parents=True)
                (folder / "config.json").write_text(content)
            for more in ((), ("--json",)):
                code, printed, _ = call(f"{start}{folder}", "--device", "cpu", *more)
                assert code == 1
                assert "FOLDER" in printed
                assert "clients" not in printed
                assert "acme" not in printed

    def test_the_name_of_a_folder_is_cut_of_a_link_and_of_a_file_in_it(self, call: Call, tmp_path: Path) -> None:
        folder = tmp_path / "my-unpublished-model"
        folder.mkdir()
        (folder / "config.json").write_text("{")
        link = tmp_path / "my-unpublished-link"
        link.symlink_to(folder)
        for where in (link, folder / "config.json", link / "config.json"):
            code, printed, _ = call(where, "--device", "cpu")
            assert code == 1
            assert "unpublished" not in printed

    def test_where_the_whole_model_fails_no_study_is_said_to_run(
        self, call: Call, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def failing(_: TreeModel) -> bool:
            raise MemoryError

        monkeypatch.setattr(kernelcases, "prepare", lambda *_: Broken(None))
        monkeypatch.setattr(checks, "check_agreement", failing)
        code, printed, _ = call(model, "--device", "cpu")
        assert code == 1
        assert "FAILED  whole model against plain scoring" in printed
        assert "Studies run all the same" not in printed

    def test_a_pipe_is_never_replaced(self, call: Call, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        code, printed, told = call("--out", tmp_path / "pipe")
        assert (code, printed) == (2, "")
        assert told.endswith("/pipe is no file but a device, a pipe or a socket; name a file\n")
        assert (tmp_path / "pipe").is_fifo()

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--device", "toaster"], "device 'toaster' is unknown; give auto, cpu, cuda or cuda:0, mps, or balanced"),
            (["--device", "meta"], "device 'meta' is unknown"),
            (["--out", "."], ". cannot be written: it is a folder; name another file with --out"),
            (["--out", "/nosuch/x.md"], "/nosuch/x.md cannot be written: no such file or directory; name another"),
            (["--dtype", "int4"], "invalid value for '--dtype'"),
            (["--arch", "80,x"], "--arch is '80,x'"),
            (["--arch", ""], "--arch is ''"),
            ([""], "the model is ''; give demo"),
            (["--arch", "80,,90"], "--arch is '80,,90'"),
            (["--arch", "8"], "architecture 8 is none of a GPU"),
            (["--arch", "80,85"], "architecture 85 is none of a GPU; give compute capabilities times ten: 70, 75, 80"),
            (["--sometimes"], "no such option '--sometimes'"),
        ],
    )
    def test_a_wrong_call_is_one_line_and_a_code(self, call: Call, arguments: list[str], said: str) -> None:
        code, printed, told = call(*arguments)
        assert (code, printed) == (2, "")
        assert told.startswith(f"error: {said}")
        assert told.count("\n") == 1

    def test_an_interrupt_ends_with_what_is_known(
        self, call: Call, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupted(*_: object) -> bool:
            raise KeyboardInterrupt

        monkeypatch.setattr("iclperm.engine.doctor.checks.layers_agree", interrupted)
        code, printed, told = call(model, "--device", "cpu", "--out", tmp_path / "report.md")
        assert code == 3
        assert told.endswith("stopped; what is known so far is told\n")
        assert "passed  tree attention kernel" in printed
        assert "whole model" not in printed
        assert printed.endswith("```\n\nStopped before it was finished; what is told holds.\n")
        assert (tmp_path / "report.md").read_text() == printed

    def test_a_report_that_cannot_be_written(self, call: Call, tmp_path: Path, model: Path) -> None:
        (tmp_path / "file").write_text("x")
        code, printed, told = call(model, "--device", "cpu", "--out", tmp_path / "file/report.md")
        assert (code, printed) == (2, ""), "nothing is looked at before"
        assert re.fullmatch(r"error: .*/file/report.md cannot be written: not a directory; name .*\n", told)

    def test_a_disk_that_fills_meanwhile(
        self, call: Call, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(cli_doctor, "write_whole", full)
        code, printed, told = call(model, "--device", "cpu", "--out", tmp_path / "report.md")
        assert code == 3
        assert "Works: " in printed
        assert told.endswith("report.md: no space left on device; the report is what is printed\n")
        assert [*tmp_path.glob("report*")] == []

    def test_instructions_that_are_none_are_the_variable_s(self, tmp_path: Path) -> None:
        """In a process of its own, as the core reads them once."""
        environment = {**os.environ, "ICLPERM_ISA": "foo", "PYTHONPATH": os.pathsep.join(sys.path[1:])}
        small = ["--sets", "1", "--permutations", "1", "--queries", "4"]
        for command in (["doctor"], ["run", *small, "--out", str(tmp_path / "run")]):
            line = [sys.executable, "-P", "-m", "iclperm", *command]
            done = subprocess.run(line, capture_output=True, text=True, env=environment, check=False)
            assert done.returncode == 2
            assert done.stderr.splitlines()[-1].startswith("error: ICLPERM_ISA=foo is none of baseline, avx2")
            assert "prefix tree" not in done.stderr

    def test_kernels_are_compiled_for_a_gpu_that_is_not_here(self, model: Path, tmp_path: Path) -> None:
        """In a process of its own, since the tests' interprets kernels."""
        environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
        environment |= {"TRITON_CACHE_DIR": str(tmp_path / "triton"), "PYTHONPATH": os.pathsep.join(sys.path[1:])}
        command = [
            sys.executable,
            "-P",
            "-m",
            "iclperm",
            "doctor",
            str(model),
            "--device",
            "cpu",
            "--arch",
            "80",
            "--json",
        ]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)["kernels"]
        assert {each["arch"] for each in found} == {"sm_80"}
        assert {each["kernel"].split()[0] for each in found} == {
            "tree_attention",
            "head",
            "silu",
            "rms_norm",
            "rotate",
            "decode",
        }
        assert all(each["registers"] > 0 and each["spills"] == 0 and each["seconds"] > 0 for each in found)

    def test_without_a_compiler_that_is_said(self, call: Call, model: Path) -> None:
        code, printed, _ = call(model, "--device", "cpu", "--arch", "80")
        assert code == 0
        assert "kernels\n  TRITON_INTERPRET is set, so kernels are interpreted and nothing is compiled\n" in printed


def keys(value: Any, but: set[str]) -> Iterator[str]:
    """All keys in a value; of those in ``but`` not what they hold."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            if key not in but:
                yield from keys(inner, but)
    elif isinstance(value, list):
        for inner in value:
            yield from keys(inner, but)


class TestProgress:
    def test_on_a_terminal_parts_are_printed_past_a_bar(
        self, call: Call, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            cli_doctor, "Console", lambda stderr: Console(file=sys.stderr, force_terminal=True, width=80)
        )
        code, printed, told = call(model, "--device", "cpu")
        assert code == 0
        assert "\x1b" not in printed
        assert [line for line in printed.splitlines() if line in PARTS] == [*PARTS]
        assert "\x1b" in told

    def test_elsewhere_lines_are_told_from_time_to_time(
        self, call: Call, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(cli_doctor, "_SECONDS", 0.0)
        code, printed, told = call(model, "--device", "cpu")
        assert code == 0
        assert "checked tree attention kernel" in told.splitlines()
        assert "checked" not in printed
        code, printed, told = call(model, "--device", "cpu", "--json")
        assert (code, told) == (0, "")


class TestKernels:
    @pytest.mark.parametrize(
        "name",
        ["llama", "qwen2-window", "qwen3", "gemma2", "gemma3", "olmo2", "phi3", "glm4", "cohere2-window",
         "starcoder2-window", "phi"],
    )  # fmt: skip
    def test_what_is_compiled_is_what_is_launched(
        self, name: str, in_triton: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        served = TreeModel(ZOO[name].build(), attention="triton")
        compiled = {variant_of(case) for case, _ in kernels.variants(kernels.shapes_of(served), [80])}
        launched = recorded(monkeypatch)
        ids = torch.randint(0, served.vocab_size, (40,), generator=torch.Generator().manual_seed(0)).tolist()
        for length in (3, 40):  # within a window, and beyond it
            plan = plan_requests(Rows.of([ids[:length]]), np.array([length - 1]), pack_tokens=64)
            (pack,) = plan.packs(0)
            with served.attached():
                hidden, tree = served.forward(pack, served.pool(plan.core.pool_slots))
                served.read(hidden, tree)()
        assert served.layers == "fused"
        of_texts = {variant for variant in compiled if variant[0] in ("_attend_items_kernel", "_merge_chunks_kernel")}
        assert launched == compiled - of_texts

    @pytest.mark.parametrize("name", ["llama", "gemma2"])
    def test_what_is_compiled_is_what_is_launched_for_texts(
        self, name: str, in_triton: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = iclperm.Engine(ZOO[name].build(), attention="triton", self_check=False)
        compiled = {variant_of(case) for case, _ in kernels.variants(kernels.shapes_of(engine._model), [80])}
        launched = recorded(monkeypatch)
        engine.generate([[1, 2, 3], [4, 5]], max_new_tokens=3)
        assert {name for name, *_ in launched} >= {"_attend_items_kernel", "_merge_chunks_kernel"}
        assert launched <= compiled

    def test_a_model_without_layers_of_ours_has_attention_and_head_alone(self) -> None:
        cases = [case for case, _ in kernels.variants(kernels.shapes_of(TreeModel(ZOO["gpt-neox"].build())), [80, 90])]
        attention = ["tree_attention 1 x 8 fp32", "decode 1 x 8 fp32", "decode merge 8 fp32"]
        assert [case.name for case in cases] == 2 * [*attention, "head 96 x 32 fp32", "head merge 2"]

    def test_what_is_too_old_for_a_dtype_is_left_out_and_told(self) -> None:
        shapes = kernels.shapes_of(TreeModel(ZOO["llama"].build().bfloat16()))
        assert {arch for _, arch in kernels.variants(shapes, [75, 80])} == {80}
        assert kernels.why_left_out(torch.bfloat16, [75, 80]) == (
            "bfloat16 takes a compute capability of 8.0: nothing is compiled for sm_75"
        )
        assert kernels.why_left_out(torch.float16, [75, 80]) == ""

    def test_a_kernel_that_does_not_compile_is_one_line(self) -> None:
        case, arch = next(kernels.variants(kernels.shapes_of(TreeModel(ZOO["llama"].build())), [80]))
        found = Diagnosis(kernels=[kernels.compiled(case, arch)])  # one that is interpreted cannot be compiled
        assert found.failures[0].startswith("tree_attention 2 x 8 fp32 for sm_80: ")
        assert not found.passed
        (line,) = [line for line in found.part("kernels") if "FAILED" in line]
        assert "sm_80" in line

    @pytest.mark.parametrize(
        ("change", "part", "reason"),
        [
            ({"dtype": torch.float16}, "attention", "our C++ kernel takes float32 and bfloat16, not float16"),
            ({"dtype": torch.float16}, "layers", "Triton"),
            ({"name": "gpt-neox"}, "layers", "ours do not know gpt_neox"),
            ({"hooked": True}, "layers", "parts of it are offloaded, or somebody hooked into it"),
        ],
    )
    def test_why_something_faster_does_not_run(
        self, change: dict[str, Any], part: str, reason: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        loaded = ZOO[change.get("name", "llama")].build().to(change.get("dtype", torch.float32))
        if change.get("hooked"):
            loaded.model.layers[0].register_forward_hook(lambda *_: None)
        (way,) = [way for way in kernels.ways(TreeModel(loaded)) if way.part == part]
        assert reason in way.reason


def recorded(monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    """What is launched from now on, as `variant_of`."""
    launched: set[Any] = set()

    class Recording:
        def __init__(self, kernel: Any) -> None:
            self._kernel = kernel

        def __getitem__(self, grid: Any) -> Any:
            run = self._kernel[grid]

            def launch(*given: Any, **named: Any) -> Any:
                constants = frozenset((key, value) for key, value in named.items() if key.isupper())
                dtype = next(each.dtype for each in given if isinstance(each, torch.Tensor))
                options = (named["num_warps"], named["enable_fp_fusion"])
                launched.add((self._kernel.fn.__name__, str(dtype), constants, options))
                return run(*given, **named)

            return launch

    for module in (triton_attention, triton_decode, triton_head, layer_norm, triton_rowwise):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Recording(getattr(module, name)))
    return launched


def variant_of(case: Compilation) -> Any:
    types = {"*fp32": "torch.float32", "*bf16": "torch.bfloat16", "*fp16": "torch.float16"}
    dtype = types[next(kind for kind in case.signature.values() if kind in types)]
    options = (case.num_warps, case.options["enable_fp_fusion"])
    return case.kernel.fn.__name__, dtype, frozenset(case.constexprs.items()), options


class TestUnderTheInterpreter:
    @pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of rows that are not finite, which a GPU has not
    def test_a_whole_diagnosis(self, in_triton: None, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(packs, "SIZES", (96,))
        launched = recorded(monkeypatch)
        steps: list[str] = []
        parts: list[str] = []

        class Watching:
            def step(self, words: str) -> None:
                steps.append(words)

            def part(self, found: Diagnosis, name: str) -> None:
                parts.append(name)

        found = iclperm.doctor(model, device="cpu", onlooker=Watching())
        assert found.passed, found.failures
        assert found.model is not None
        assert {way.part: way.runs for way in found.model.ways}["attention"] == "triton"
        assert parts == [*PARTS]
        assert "checked tree attention kernel" in steps
        assert "timed packs of 96 tokens" in steps
        names = {"_tree_attention_kernel", "_read_tiles_kernel", "_rms_norm_kernel", "_rotate_kernel", "_gate_kernel"}
        assert names <= {name for name, *_ in launched}
        assert [each.seconds is not None for each in found.packs] == [True, True]
        assert found.without["stages"] == "nothing is left open but on a GPU by itself"

    @pytest.mark.filterwarnings("ignore::RuntimeWarning")
    def test_choices_that_are_kept_are_not_what_is_checked(
        self, in_triton: None, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One that the device does not launch would cost the kernel, and then nothing would choose anew."""
        monkeypatch.setattr(packs, "SIZES", ())
        asked: list[str] = []

        def kept(device: torch.device) -> dict[str, int]:
            asked.append(str(device))
            return {}

        def launched(variant: str, shipped: int, _: object, launch: Any) -> None:
            stages.launched(variant, shipped, torch.device("cuda", 0), launch)

        monkeypatch.setattr(stages, "_kept", kept)
        monkeypatch.setattr(clinic.packs, "timed_packs", lambda _: ())
        for module in (triton_attention, triton_head):
            monkeypatch.setattr(module, "launched", launched)
        found = iclperm.doctor(model, device="cpu")
        assert found.passed, found.failures
        assert not asked
