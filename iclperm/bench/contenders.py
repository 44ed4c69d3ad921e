"""The contenders: who they are, how they are run, and a process for each that answers in JSON lines."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from iclperm.base import environment as process
from iclperm.bench import cards
from iclperm.bench.cases import even_sample, first_paths
from iclperm.bench.environments import PeerError, environment, last_line
from iclperm.bench.peers.protocol import Answers, BenchWorkload

PEERS = Path(__file__).parent / "peers"
_PASS_SECONDS = 3600.0
_STOP_SECONDS = 20.0
# What the command line sets for iclperm itself is not for the others.
_NOT_INHERITED = (*process.VARIABLES, "PYTHONHOME")


@dataclass(frozen=True)
class Contender:
    """A scorer in a process of its own.

    ``script`` is a file of the folder ``peers``, ``environment`` the peer that an environment is made for, or None for
    iclperm's own. ``sampling`` says what may stand for a whole case where that takes long: "prompts", scaled by their
    tokens, or "paths", scaled by their distinct tokens, ``share`` of them. ``tolerance`` is the largest difference from
    the oracle in float32, in nats a label's token. ``writes``: it generates texts, too.
    """

    name: str
    what: str
    script: Path
    environment: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    sampling: str | None = None
    share: float = 1.0
    tolerance: float = 1e-4
    needs_cuda: bool = False
    writes: bool = False

    def python(self, device: str) -> str:
        return sys.executable if self.environment is None else str(environment(self.environment, device).python)

    def obstacle(self, device: str) -> str | None:
        """Why it cannot run here, with the remedy; None if it can."""
        if self.needs_cuda and not cards.is_cuda(device):
            return "it needs a CUDA device; run it with --device cuda where there is one"
        if absent := cards.absence(device):
            return absent
        if self.environment is None or (wanted := environment(self.environment, device)).is_ready:
            return None
        if wanted.obstacle:
            return f"its environment is not there, and cannot be made: {wanted.obstacle}"
        on = "--device cuda " if wanted.is_cuda else ""
        return f"its environment is not there; iclperm bench {on}--prepare {self.environment} makes it"


OURS = Contender("iclperm", "this package", PEERS / "ours.py", variables=process.VARIABLES, writes=True)
ORACLE = Contender("oracle", "transformers, one unpadded prompt at a time", PEERS / "oracle.py")
PEER_CONTENDERS = {
    contender.name: contender
    for contender in (
        Contender(
            "plain",
            "transformers, length-sorted padded batches",
            PEERS / "plain.py",
            sampling="prompts",
            writes=True,
        ),
        Contender(
            "prefix_reuse",
            "transformers, each context's cache expanded over its queries by hand",
            PEERS / "prefix_reuse.py",
            sampling="paths",
            share=0.5,
        ),
        Contender(
            "lm_eval",
            "lm-evaluation-harness, hf backend",
            PEERS / "lm_eval_hf.py",
            environment="lm_eval",
            sampling="prompts",
        ),
        Contender(
            "vllm",
            "vLLM, prefix caching, one generated token with chosen log-probabilities",
            PEERS / "vllm_prefix.py",
            environment="vllm",
            tolerance=1e-3,
            writes=True,
        ),
        Contender(
            "llama_cpp",
            "llama.cpp, sequences copied from the shared prefix",
            PEERS / "llama_sequences.py",
            environment="llama_cpp",
            sampling="paths",
            share=0.5,
            tolerance=5e-3,  # its GELU is a table of half precision
            writes=True,
        ),
        Contender(
            "flex",
            "transformers, packed tree through FlexAttention",
            PEERS / "flex_packed.py",
            needs_cuda=True,
        ),
    )
}


class ContenderProcess:
    """The process of a contender, alive between requests and idle while others work.

    Use as a context manager; what it prints goes to ``log``. On a GPU it sees that card alone, as its first. Raises
    PeerError with its last words where it fails.
    """

    def __init__(self, contender: Contender, log: Path, threads: int, device: str = "cpu") -> None:
        self._name, self._log, self._device = contender.name, log, cards.within(device)
        kept = {key: value for key, value in os.environ.items() if key not in _NOT_INHERITED}
        if contender.environment is not None:
            kept.pop("PYTHONPATH", None)
        with log.open("w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                [contender.python(device), str(contender.script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                encoding="utf-8",
                env={**kept, "OMP_NUM_THREADS": str(threads), **cards.visible(device), **contender.variables},
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the process: it leaves when its input ends, and is killed if it does not."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                continue  # it has gone before
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def load(self, model: Path, dtype: str, threads: int) -> dict[str, Any]:
        return self._ask("load", model=str(model), dtype=dtype, threads=threads, device=self._device)

    def warm(self, work: Path) -> dict[str, Any]:
        return self._ask("warm", work=str(work))

    def linear(self) -> dict[str, Any]:
        """Of iclperm's process, seconds a token of the body's linear layers alone: by ``torch``, whose ``library`` is
        named, and ``seconds`` by the ``fastest`` product that is known there."""
        return self._ask("linear")

    def judge(self, work: Path, texts: Path) -> float:
        """Of the oracle's process: the most by which a token of the texts [N, new] fell short of the likeliest, in
        nats."""
        return float(self._ask("judge", work=str(work), texts=str(texts))["worst"])

    def score(self, work: Path, out: Path) -> tuple[dict[str, Any], Answers]:
        """What it says of the pass, and its log-likelihoods [N, L], or the ids of its texts [N, new]."""
        answer = self._ask("score", work=str(work), out=str(out))
        return answer, np.load(out, allow_pickle=False)

    def _ask(self, do: str, **request: Any) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps({"do": do, **request}) + "\n")
            stdin.flush()
        except BrokenPipeError:
            raise self._gone() from None
        if not select.select([stdout], [], [], _PASS_SECONDS)[0]:
            raise PeerError(f"{self._name} did not answer for {_PASS_SECONDS:.0f} s; try a smaller --scale")
        line = stdout.readline()
        if not line:
            raise self._gone()
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(f"{self._name} failed: {answer['error']}")
        return answer

    def _gone(self) -> PeerError:
        code = self._process.wait()
        return PeerError(f"{self._name} stopped with exit code {code}: {last_line(self._log)}; its log is {self._log}")


def sampled(contender: Contender, work: BenchWorkload, prompts: int, whole: bool) -> BenchWorkload:
    """The part of a workload that a contender scores."""
    if whole or contender.sampling is None:
        return work
    if contender.sampling == "prompts":
        return even_sample(work, prompts)
    return first_paths(work, max(1, round(len(work.paths) * contender.share)))
