"""llama.cpp: each context path decoded once as a sequence, copied for every query, logits at the last tokens only.

Texts of a group of queries are written side by side, each in its own sequence.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import llama_cpp as llama
import numpy as np
import numpy.typing as npt
from protocol import Answers, BenchWorkload, Ids, Logprobs, fastest, serve, versions

# Tokens of a micro batch, and queries decoded together: more of them see more of each other's masked keys.
ARCHITECTURES = {
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "llama": gguf.MODEL_ARCH.LLAMA,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
}
"""By model_type, those that `written` knows how to write."""
SIZES = ((512, 8), (512, 16), (1024, 16), (1024, 32))
TOGETHER = (8, 16, 32, 64)  # texts that are written side by side; all see each other's masked keys
TRIED_TOKENS = 8  # that each of them is tried with
BATCH_TOKENS = 4096
CONTEXT_TOKENS = 16_384
MAX_SEQUENCES = 256


def _has_amx() -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.is_file() and "amx_tile" in cpuinfo.read_text(encoding="utf-8")


def _logprobs(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Log-probabilities of rows of logits [rows, V]."""
    top = logits.max(axis=1, keepdims=True)
    return np.asarray(logits - top - np.log(np.exp(logits - top).sum(axis=1, keepdims=True)))


def _likeliest(logits: npt.NDArray[np.float32]) -> Ids:
    """The likeliest token of each row [rows, 1]; of equal ones the first."""
    return logits.argmax(axis=1)[:, None].astype(np.int32)


class LlamaSequences:
    def load(self, model: str, dtype: str, threads: int, device: str) -> dict[str, Any]:
        llama.llama_backend_init()
        parameters = llama.llama_model_default_params()
        parameters.n_gpu_layers = 0 if device == "cpu" else 999
        parameters.use_extra_bufts = not _has_amx()  # with those for AMX, quantised weights end the process
        file = written(Path(model), dtype)
        self.model = llama.llama_model_load_from_file(str(file).encode(), parameters)
        if not self.model:
            raise RuntimeError(f"{file} cannot be loaded")
        self.vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))
        self.threads = threads
        self.opened: tuple[int, bool] | None = None
        self.context: Any = None
        self.memory: Any = None
        # Its flash attention is 7e-4 nats off in float32, so that is left to lower precision, if it is faster there.
        self.is_exact = dtype == "float32"
        self.batch = llama.llama_batch_init(BATCH_TOKENS, 0, 1)
        return {
            "versions": versions("llama-cpp-python"),
            "settings": {"keys and values": "float32" if self.is_exact else "float16"},
        }

    def warm(self, work: BenchWorkload) -> dict[str, Any]:
        flashes = [False] if self.is_exact else [False, True]
        if work.new_tokens:
            sizes = [(SIZES[0][0], together) for together in TOGETHER if self._fits(work, together)]
            few = _repeated(work, max(together for _, together in sizes))
            choices = [(*each, flash) for flash in flashes for each in sizes]
            self.chosen = fastest(choices, lambda choice: self._write(few, *choice))
        else:
            choices = [(*sizes, flash) for flash in flashes for sizes in SIZES]
            self.chosen = fastest(choices, lambda choice: self._score(work, *choice))
        micro_batch, group_size, flash = self.chosen
        self._open(micro_batch, flash)
        return {"settings": {"micro batch": micro_batch, "queries together": group_size, "flash attention": flash}}

    def score(self, work: BenchWorkload) -> tuple[Answers, dict[str, Any]]:
        return self._write(work, *self.chosen) if work.new_tokens else self._score(work, *self.chosen)

    @staticmethod
    def _fits(work: BenchWorkload, together: int) -> bool:
        """Whether so many texts find room beside their context; the fewest are tried whatever they take."""
        longest = max(query.size for query in work.queries) + work.new_tokens
        context = max(int(marks[-1]) for marks in work.marks)
        return together == TOGETHER[0] or context + together * longest <= CONTEXT_TOKENS

    def _open(self, micro_batch: int, flash: bool) -> None:
        if self.opened == (micro_batch, flash):
            return
        if self.context is not None:
            llama.llama_free(self.context)
        parameters = llama.llama_context_default_params()
        parameters.n_ctx, parameters.n_batch, parameters.n_ubatch = CONTEXT_TOKENS, BATCH_TOKENS, micro_batch
        parameters.n_seq_max, parameters.kv_unified = MAX_SEQUENCES, True
        parameters.n_threads = parameters.n_threads_batch = self.threads
        parameters.type_k = parameters.type_v = llama.GGML_TYPE_F32 if self.is_exact else llama.GGML_TYPE_F16
        parameters.flash_attn_type = (
            llama.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        parameters.no_perf = True
        self.context, self.opened = llama.llama_init_from_model(self.model, parameters), (micro_batch, flash)
        if not self.context:
            raise RuntimeError("no context can be made")
        self.memory = llama.llama_get_memory(self.context)

    def _write(self, work: BenchWorkload, micro_batch: int, together: int, flash: bool) -> tuple[Ids, dict[str, Any]]:
        """The likeliest next tokens [N, new] of every cell."""
        self._open(micro_batch, flash)
        groups = [range(q, min(q + together, len(work.queries))) for q in range(0, len(work.queries), together)]
        texts: list[Ids] = []
        self.tokens = 0
        for context in self._contexts(work):
            texts.append(np.concatenate([self._texts(work, group, context.size) for group in groups]))
        return np.stack(texts)[work.cells[:, 0], work.cells[:, 1]], {"tokens": self.tokens}

    def _contexts(self, work: BenchWorkload) -> Iterator[Ids]:
        """Every context in turn, decoded as sequence 0: each path goes on from its last mark."""
        for path, marks in zip(work.paths, work.marks, strict=True):
            llama.llama_memory_clear(self.memory, False)
            held = 0
            for mark in marks.tolist():
                self._decode([(path[held:mark], held, 0)], scored=False)
                held = mark
                yield path[:mark]

    def _texts(self, work: BenchWorkload, group: range, held: int) -> Ids:
        """The texts [queries of the group, new] after the context in sequence 0."""
        queries = [work.queries[query] for query in group]
        for sequence in range(1, len(queries) + 1):
            llama.llama_memory_seq_cp(self.memory, 0, sequence, -1, -1)
        feed = [(query, held, 1 + row) for row, query in enumerate(queries)]
        texts = np.empty((len(queries), work.new_tokens), np.int32)
        for step in range(work.new_tokens):
            texts[:, step] = self._decode(feed, scored=True, read=_likeliest)[:, 0]
            feed = [(texts[row, step : step + 1], held + query.size + step, 1 + row)
                    for row, query in enumerate(queries)]  # fmt: skip
        for sequence in range(1, len(queries) + 1):
            llama.llama_memory_seq_rm(self.memory, sequence, -1, -1)
        return texts

    def _score(
        self, work: BenchWorkload, micro_batch: int, group_size: int, flash: bool
    ) -> tuple[Logprobs, dict[str, Any]]:
        self._open(micro_batch, flash)
        longer = [number for number, label in enumerate(work.labels) if label.size > 1]
        group_size = min(group_size, (MAX_SEQUENCES - 1) // (1 + len(longer)))
        groups = [range(q, min(q + group_size, len(work.queries))) for q in range(0, len(work.queries), group_size)]
        scores: list[Logprobs] = []
        seen: dict[bytes, Logprobs] = {}
        self.tokens = 0
        for context in self._contexts(work):
            key = context.tobytes()
            if key not in seen:
                seen[key] = np.concatenate([self._group(work, group, context.size, longer) for group in groups])
            scores.append(seen[key])
        return np.stack(scores)[work.cells[:, 0], work.cells[:, 1]], {"tokens": self.tokens}

    def _group(self, work: BenchWorkload, group: range, held: int, longer: list[int]) -> Logprobs:
        """Log-likelihoods [queries of the group, labels] after the context in sequence 0."""
        queries = [work.queries[query] for query in group]
        for sequence in range(1, len(queries) + 1):
            llama.llama_memory_seq_cp(self.memory, 0, sequence, -1, -1)
        last = self._decode([(query, held, 1 + row) for row, query in enumerate(queries)], scored=True)
        scores = np.stack([last[:, int(label[0])] for label in work.labels], axis=1)
        rows: list[tuple[int, int]] = []
        follow: list[tuple[npt.NDArray[np.int32], int, int]] = []
        for row, query in enumerate(queries):
            for number in longer:
                sequence = 1 + len(queries) + len(rows)
                llama.llama_memory_seq_cp(self.memory, 1 + row, sequence, -1, -1)
                rows.append((row, number))
                follow.append((work.labels[number][:-1], held + query.size, sequence))
        if follow:
            after = iter(self._decode(follow, scored=True, everywhere=True))
            for row, number in rows:
                scores[row, number] += sum(next(after)[int(wanted)] for wanted in work.labels[number][1:])
        for sequence in range(1, len(queries) + len(rows) + 1):
            llama.llama_memory_seq_rm(self.memory, sequence, -1, -1)
        return scores

    def _decode(
        self,
        parts: Sequence[tuple[npt.NDArray[np.int32], int, int]],
        scored: bool,
        everywhere: bool = False,
        read: Callable[[npt.NDArray[np.float32]], npt.NDArray[Any]] = _logprobs,
    ) -> npt.NDArray[Any]:
        """Decode (tokens, first position, sequence); what ``read`` makes of the logits [scored, V] of last or of all
        tokens."""
        found = [self._decode_batch(batch, scored, everywhere, read) for batch in _batches(parts)]
        return np.concatenate(found) if found else np.empty((0, self.vocab_size), np.float32)

    def _decode_batch(self, parts: Any, scored: bool, everywhere: bool, read: Any) -> npt.NDArray[Any]:
        batch, count = self.batch, 0
        wanted = []
        for tokens, position, sequence in parts:
            for place, token in enumerate(tokens.tolist()):
                is_wanted = scored and (everywhere or place + 1 == len(tokens))
                batch.token[count], batch.pos[count], batch.n_seq_id[count] = token, position + place, 1
                batch.seq_id[count][0], batch.logits[count] = sequence, is_wanted
                wanted += [count] if is_wanted else []
                count += 1
        batch.n_tokens = count
        self.tokens += count
        if llama.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode failed on {count} tokens")
        if not wanted:
            return np.empty((0, self.vocab_size), np.float32)
        first = llama.llama_get_logits(self.context)  # rows of the wanted tokens alone, in their order
        logits = np.ctypeslib.as_array(ctypes.cast(first, ctypes.POINTER(ctypes.c_float)),
                                       (len(wanted), self.vocab_size))  # fmt: skip
        return np.asarray(read(logits))


def _repeated(work: BenchWorkload, count: int) -> BenchWorkload:
    """At least so many queries after the first context, again and again the same, and a few new tokens."""
    queries = (work.queries * count)[:count]
    cells = np.stack([np.zeros(count, np.int64), np.arange(count)], axis=1)
    new_tokens = min(work.new_tokens, TRIED_TOKENS)
    return replace(
        work, paths=work.paths[:1], marks=(work.marks[0][-1:],), queries=queries, cells=cells, new_tokens=new_tokens
    )


def _batches(parts: Sequence[tuple[npt.NDArray[np.int32], int, int]]) -> Iterator[list[Any]]:
    """Parts cut and gathered so that none is longer than a batch."""
    batch: list[Any] = []
    room = BATCH_TOKENS
    for tokens, position, sequence in parts:
        begin = 0
        while begin < len(tokens):
            piece = tokens[begin : begin + room]
            batch.append((piece, position + begin, sequence))
            begin, room = begin + len(piece), room - len(piece)
            if room == 0:
                yield batch
                batch, room = [], BATCH_TOKENS
    if batch:
        yield batch


def written(folder: Path, dtype: str) -> Path:
    """The GGUF file of a folder of safetensors, written if it is not there; a file is taken as it is."""
    if folder.is_file():
        return folder
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    target = _writable(folder) / f"model-{dtype}.gguf"
    if target.is_file():
        return target
    if (kind := config["model_type"]) not in ARCHITECTURES:
        raise RuntimeError(f"no GGUF is written of the architecture {kind!r}, only of {', '.join(ARCHITECTURES)}")
    unfinished = target.with_suffix(".part")
    writer = gguf.GGUFWriter(unfinished, gguf.MODEL_ARCH_NAMES[ARCHITECTURES[kind]])
    _write_facts(writer, config)
    _write_tensors(writer, folder, config, dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(target)
    return target


def _writable(folder: Path) -> Path:
    """Where a model's GGUF goes: the cache folder keeps those of models that lie elsewhere."""
    import hashlib
    import os

    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "iclperm" / "bench" / "models"
    if folder.parent == base:
        return folder
    weights = sorted(folder.glob("*.safetensors"))
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in weights)).hexdigest()[:8]
    place = base / f"gguf-{digest}"
    place.mkdir(parents=True, exist_ok=True)
    return place


def _write_facts(writer: Any, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters", config)
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    if config["model_type"] == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config["model_type"].startswith("gemma"):
        writer.add_sliding_window(config["sliding_window"])


def _write_tensors(writer: Any, folder: Path, config: dict[str, Any], dtype: str) -> None:
    names = gguf.get_tensor_name_map(ARCHITECTURES[config["model_type"]], config["num_hidden_layers"])
    is_tied = config.get("tie_word_embeddings", True)
    for name, values in _tensors(folder):
        if is_tied and name == "lm_head.weight":
            continue
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if target is None:
            raise RuntimeError(f"llama.cpp has no tensor for {name}")
        if config["model_type"].startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1  # llama.cpp multiplies by the weight alone
        if dtype == "bfloat16" and values.ndim == 2:
            values = gguf.quants.quantize(values, gguf.GGMLQuantizationType.BF16)
            writer.add_tensor(target, values, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(target, np.ascontiguousarray(values, np.float32))


def _tensors(folder: Path) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """Every tensor of a folder of safetensors in float32 or bfloat16, as float32."""
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as content:
            size = int.from_bytes(content.read(8), "little")
            header = json.loads(content.read(size))
        data = np.memmap(file, np.uint8, "r", offset=8 + size)
        for name, about in header.items():
            if name == "__metadata__":
                continue
            if about["dtype"] not in ("F32", "BF16"):
                raise RuntimeError(f"{name} is {about['dtype']}, neither F32 nor BF16")
            begin, end = about["data_offsets"]
            raw = data[begin:end]
            if about["dtype"] == "BF16":
                raw = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.uint8)
            yield name, raw.view(np.float32).reshape(about["shape"])


if __name__ == "__main__":
    serve(LlamaSequences())
