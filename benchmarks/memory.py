"""The peak of memory that ``Engine.footprint`` foretells against the peak that is measured.

    python benchmarks/memory.py [--device cpu] [--model 25m | FOLDER ...] [--json benchmarks/results/memory.json]

Every case is a process of its own that loads a checkpoint of random weights and scores a product in several packs, or
generates texts after one (``new tokens``), the first-use check included. What is foretold comes from the configuration
alone. On a CPU the peak is the largest resident set of the process (Linux: VmHWM, set back after loading, since the
pages of a file that loading read are the system's to reclaim) less the resident set before: that of a process that has
loaded its libraries and scored with a tiny model. Some factors behind the forecast were chosen on the smaller models;
the column ``fitted`` tells which, and only the other rows are a test. On a GPU it is what torch held in tensors at
most. ``--repeats`` counts processes; the case's median is told.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from _machine import options, publish
from token_efficiency import Case
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from iclperm.base.environment import VARIABLES
from iclperm.demo import model_path
from iclperm.engine import Engine, Plan, plan_product
from iclperm.engine.estimate import estimate

SHAPES: dict[str, PretrainedConfig] = {
    "tiny": Qwen2Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True,
    ),
    "10m": Qwen2Config(
        vocab_size=8192, hidden_size=384, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=6,
        num_key_value_heads=2, tie_word_embeddings=True,
    ),
    "25m": Qwen2Config(
        vocab_size=16_384, hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True,
    ),
    "qwen2.5-0.5b": Qwen2Config(
        vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True,
    ),
    "llama-65m": LlamaConfig(
        vocab_size=32_000, hidden_size=640, intermediate_size=1728, num_hidden_layers=6, num_attention_heads=10,
        num_key_value_heads=5,
    ),
    "qwen3-30m": Qwen3Config(
        vocab_size=50_000, hidden_size=384, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=6,
        num_key_value_heads=2, head_dim=128, tie_word_embeddings=True,
    ),
    "gemma-45m": GemmaConfig(
        vocab_size=40_000, hidden_size=768, intermediate_size=3072, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=1, head_dim=192,
    ),
    "mistral-35m": MistralConfig(
        vocab_size=12_000, hidden_size=576, intermediate_size=1600, num_hidden_layers=6, num_attention_heads=9,
        num_key_value_heads=3, sliding_window=None,
    ),
    "opt-28m": OPTConfig(
        vocab_size=16_000, hidden_size=512, ffn_dim=2048, num_hidden_layers=6, num_attention_heads=8,
        word_embed_proj_dim=512,
    ),
    "gemma-2-2b, 3 layers": Gemma2Config(
        vocab_size=256_000, hidden_size=2304, intermediate_size=9216, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=4, head_dim=256,
    ),
}  # fmt: skip
# The measured factors of ``iclperm/engine/footprint.py`` were chosen on these; the others are a test of them.
FITTED = ("bundled", "10m", "25m", "opt-28m")
UNIT_TOKENS = 3000
MANY_UNITS = ("llama", "qwen3", "opt", "gemma-45m", "mistral")
CASES = [
    ("bundled", "float32", 256), ("bundled", "float32", 1024), ("bundled", "bfloat16", 1024),
    ("10m", "float32", 512), ("25m", "float32", 256), ("25m", "float32", 1024), ("25m", "float32", 4096),
    ("25m", "bfloat16", 256), ("25m", "bfloat16", 1024), ("25m", "bfloat16", 4096),
    ("qwen2.5-0.5b", "float32", 512), ("qwen2.5-0.5b", "bfloat16", 1024),
    ("gemma-2-2b, 3 layers", "float32", 512), ("gemma-2-2b, 3 layers", "bfloat16", 1024),
    ("llama-65m", "float32", 512), ("qwen3-30m", "bfloat16", 768), ("opt-28m", "float32", 512),
    ("gemma-45m", "bfloat16", 512), ("mistral-35m", "float32", 1024),
    ("llama-65m", "float32", 4096), ("qwen3-30m", "bfloat16", 4096), ("opt-28m", "float32", 1024),
    ("gemma-45m", "bfloat16", 4096), ("mistral-35m", "float32", 4096),
]  # fmt: skip
FOLDER_CASES = [("float32", 512), ("float32", 4096)]
# No factor was chosen on these.
GENERATED = [
    ("25m", "float32", 1024), ("25m", "bfloat16", 1024), ("mistral-35m", "float32", 1024),
    ("llama-65m", "float32", 512), ("qwen3-30m", "float32", 512),
]  # fmt: skip
NEW_TOKENS = 32


def checkpoint(name: str, dtype: str, folder: Path) -> Path:
    """A model's folder: a given one, the bundled one's own, else one of random weights, written unless it is there."""
    if name == "bundled":
        return model_path()
    if name not in SHAPES:
        return Path(name)
    path = folder / f"{name}-{dtype}"
    if not path.exists():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(SHAPES[name], dtype=getattr(torch, dtype)).save_pretrained(path)
    return path


def product(vocabulary: int, pack_tokens: int) -> Plan:
    """Two orderings of 8 demonstrations, read after 0, 4 and 8, before queries enough for three packs."""
    contexts, queries, labels = Case("", 8, 2, (0, 4, 8), max(8, pack_tokens // 80)).build()
    return _plan(vocabulary, pack_tokens, contexts, queries, labels)


def many_units(vocabulary: int, pack_tokens: int) -> Plan:
    """Four orderings of 8 demonstrations, read after 0, 2, ... 8, before 16 queries, in small units."""
    parts = Case("", 8, 4, (0, 2, 4, 6, 8), 16).build()
    return _plan(vocabulary, pack_tokens, *parts, unit_tokens=UNIT_TOKENS)


def to_generate(vocabulary: int, pack_tokens: int) -> Plan:
    """Four orderings of 8 demonstrations before 80 queries: more texts than go on at once."""
    contexts, queries, _ = Case("", 8, 4, (8,), 80).build()
    return _plan(vocabulary, pack_tokens, contexts, queries, [[0]])


def _plan(vocabulary: int, pack_tokens: int, contexts: Any, queries: Any, labels: Any, **limits: int) -> Plan:
    contexts.rows.tokens[:] %= vocabulary
    queries = [query % vocabulary for query in queries]
    return plan_product(contexts, queries, labels, pack_tokens=pack_tokens, **limits)


def measure(folder: Path, tiny: Path, dtype: str, pack_tokens: int, device: str, new_tokens: int) -> dict[str, Any]:
    """One case, in a process that has done nothing else."""
    in_units = folder.name.startswith(MANY_UNITS) and pack_tokens < UNIT_TOKENS
    workload = to_generate if new_tokens else many_units if in_units else product
    score(Engine.from_pretrained(tiny, dtype=dtype, device=device), pack_tokens=64)
    before = settled_bytes(device)
    engine = Engine.from_pretrained(folder, dtype=dtype, device=device, pack_tokens=pack_tokens)
    reset_peak(device)
    plan = score(engine, pack_tokens, workload, new_tokens)
    measured = peak_bytes(device) - before
    foretold = estimate(folder, [plan], dtype=dtype, device=device, max_new_tokens=new_tokens).memory
    assert foretold
    assert new_tokens or foretold == engine.footprint(plan), "a model in memory is foretold otherwise than its shapes"
    return {
        "attention": engine.attention, "layers": engine.layers, "threads": torch.get_num_threads(),
        "packs": engine.report.num_packs, **{f"{name} MiB": size / 2**20 for name, size in vars(foretold).items()},
        "foretold MiB": foretold.peak / 2**20, "measured MiB": measured / 2**20,
        "measured/foretold": measured / foretold.peak,
    }  # fmt: skip


def score(
    engine: Engine, pack_tokens: int, workload: Callable[[int, int], Plan] = product, new_tokens: int = 0
) -> Plan:
    plan = workload(engine.model.config.vocab_size, pack_tokens)
    for _ in engine.generate_units(plan, max_new_tokens=new_tokens) if new_tokens else engine.execute(plan):
        pass
    return plan


def settled_bytes(device: str) -> int:
    """What is in use when all that can be handed back has been."""
    gc.collect()
    if device != "cpu":
        return int(torch.cuda.memory_allocated())
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return _status("VmRSS")


def reset_peak(device: str) -> None:
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(device: str) -> int:
    return _status("VmHWM") if device == "cpu" else int(torch.cuda.max_memory_allocated())


def _status(key: str) -> int:
    found = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found, f"/proc/self/status has no {key}"
    return int(found[1]) * 1024


def in_process(*case: object) -> dict[str, Any]:
    """``measure`` in a fresh process."""
    words = [sys.executable, __file__, "--case", *map(str, case)]
    variables = {**VARIABLES, **os.environ}  # as the command line has them
    ran = subprocess.run(words, capture_output=True, text=True, check=False, env=variables)
    if ran.returncode:
        raise RuntimeError(f"{case} failed: {ran.stderr[-2000:]}")
    figures: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return figures


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--model", action="append", help="these models alone: bundled, 25m, ..., or a model's folder")
    parser.add_argument("--case", nargs=6, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.case:
        folder, tiny, dtype, pack_tokens, device, new_tokens = given.case
        print(json.dumps(measure(Path(folder), Path(tiny), dtype, int(pack_tokens), device, int(new_tokens))))
        return
    figures = []
    with tempfile.TemporaryDirectory() as place:
        folders = [name for name in given.model or [] if name not in {*SHAPES, "bundled"}]
        of_folders = [(name, dtype, size) for name in folders for dtype, size in FOLDER_CASES]
        for name, dtype, pack_tokens, new_tokens in [
            *((*case, 0) for case in (*CASES, *of_folders)),
            *((*case, NEW_TOKENS) for case in GENERATED),
        ]:
            if given.model and name not in given.model:
                continue
            folder, tiny = (checkpoint(each, dtype, Path(place)) for each in (name, "tiny"))
            case = folder, tiny, dtype, pack_tokens, given.device, new_tokens
            runs = [in_process(*case) for _ in range(given.repeats)]
            ratios = [run["measured/foretold"] for run in runs]
            typical = min(runs, key=lambda run: abs(run["measured/foretold"] - statistics.median(ratios)))
            spread = {"least": min(ratios), "most": max(ratios)}
            about = {
                "model": folder.name if name in folders else name,
                "fitted": str(name in FITTED and not new_tokens),
                "new tokens": new_tokens,
            }
            figures.append({**about, "dtype": dtype, "pack": pack_tokens, **typical, **spread})
    publish("memory", figures, given.json)


if __name__ == "__main__":
    main()
