"""Generated tokens a second: the tree beside padded batches, continuous batching and vLLM with prefix caching.

    python benchmarks/generation.py [--models qwen2-25m] [--queries 8 --permutations 2 --new-tokens 16] [--json FILE]
    python benchmarks/generation.py --dtype bfloat16 [...]
    python benchmarks/generation.py --study WORK/generation.yaml --scale 0.5 [--gguf gemma.gguf] [...]

K = 8 demonstrations in P orderings before Q queries, greedy, no EOS, random weights of the shapes of Qwen2 with 25 M
and .5 B parameters; or a share of a study that generates, with its model. Contenders run in turns, in this process but
for vLLM, which has its own (made by ``iclperm bench --prepare vllm``) and is left out where that is not there. All must
say the same first: where two texts part, both next tokens must lie within 1e-3 nats (bfloat16: .1) in plain
transformers, else seconds are told but no ratio. Medians of ``--repeats`` passes after that ``first`` one, in which our
engine checks itself (nobody's loading is in it); if transformers takes more than two minutes for the first pass, that
is its figure. One more pass of ours, ``recorded``, tells what its matrix products and its attention take, what the
fastest products known here would take at those numbers of rows (`_products.py`), and, as ``bound``, what a pass would
whose attention ran at their rate and that did nothing else; ``keys from memory`` as `time_by_kernel.py`. vLLM's process
stands still while others run.
Transformers' continuous batching multiplies the queries of all rows with the keys of all, so it is asked for the first
64 texts, and its time scaled.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

Texts = list[list[int]]
TIES = {"float32": 1e-3, "bfloat16": 0.1}
"""In nats."""
BATCH = 64
LONG = 120.0
SLOW = (
    "padded batches",
    "continuous batching",
    "llama.cpp, the file",
)  # the others compile or check in their first pass
SAMPLED = {"continuous batching": 64}
PEER = "--vllm-peer"


def ours(model: Any, work: Any, num_new: int) -> tuple[Callable[[], Texts], Any]:
    from iclperm.engine import ContextPaths, Engine, plan_product
    from iclperm.engine.tree import Rows

    engine = Engine(model)
    paths = ContextPaths(Rows.of(work.paths), Rows.of(work.marks))

    def run() -> Texts:
        plan = plan_product(paths, work.queries, [[0]])
        place = {tuple(cell): number for number, cell in enumerate(work.cells.tolist())}
        given: dict[int, list[int]] = {}  # a context may be a prefix of several paths
        for number, distinct in enumerate(plan.context_index.tolist()):
            given.setdefault(distinct, []).append(number)
        texts: Texts = [[] for _ in place]
        for result in engine.generate_units(plan, max_new_tokens=num_new):
            cells = [(given[c], q) for c in result.contexts.tolist() for q in result.queries.tolist()]
            for (numbers, query), ids in zip(cells, result.outputs.token_ids, strict=True):
                for number in numbers:
                    if (number, query) in place:
                        texts[place[number, query]] = ids.tolist()
        return texts

    return run, engine


def padded(model: Any, prompts: Texts, num_new: int) -> Texts:
    """transformers' generate on batches of like lengths, padded on the left."""
    import torch

    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
    texts: Texts = [[] for _ in prompts]
    for begin in range(0, len(order), BATCH):
        chosen = order[begin : begin + BATCH]
        longest = max(len(prompts[number]) for number in chosen)
        ids = torch.zeros(len(chosen), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, number in enumerate(chosen):
            ids[row, longest - len(prompts[number]) :] = torch.tensor(prompts[number])
            mask[row, longest - len(prompts[number]) :] = 1
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=num_new, pad_token_id=0)
        for row, number in enumerate(chosen):
            texts[number] = out[row, longest:].tolist()
    return texts


def continuous(model: Any, prompts: Texts, num_new: int) -> Texts:
    """transformers' continuous batching, with its own paged attention and block sharing."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    settings = GenerationConfig(do_sample=False, max_new_tokens=num_new, eos_token_id=-1, pad_token_id=0)
    tokens = sum(map(len, prompts)) + len(prompts) * num_new
    config = ContinuousBatchingConfig(num_blocks=max(64, tokens // 256 + len(prompts)), max_batch_tokens=2048)
    before = model.config._attn_implementation
    try:
        results = model.generate_batch(prompts, generation_config=settings, continuous_batching_config=config)
    finally:
        model.set_attn_implementation(before)
    if len(results) != len(prompts):
        raise RuntimeError(f"{len(results)} of {len(prompts)} prompts were answered")
    return [result.generated_tokens for result in results.values()]


class Vllm:
    """vLLM in a process of its own, asked in lines of JSON; it stands still meanwhile, for its threads look about even
    when nothing is asked of them: 6 % of a core."""

    def __init__(self, folder: Path, dtype: str, stack: ExitStack) -> None:
        from iclperm.bench.environments import ENVIRONMENTS

        command = [str(ENVIRONMENTS["vllm"].python), __file__, PEER, str(folder), dtype]
        self._process = stack.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=peer_environment())
        )
        assert self._process.stdin
        assert self._process.stdout
        stack.callback(self._process.stdin.close)
        self._process.stdout.readline()  # it has loaded and compiled: nobody else is at work meanwhile
        stack.callback(self._process.send_signal, signal.SIGCONT)
        self._process.send_signal(signal.SIGSTOP)

    def __call__(self, prompts: Texts, num_new: int) -> Texts:
        assert self._process.stdin
        assert self._process.stdout
        self._process.send_signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps([prompts, num_new]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        self._process.send_signal(signal.SIGSTOP)
        if not answer:
            raise RuntimeError("vLLM ended; what it said is above")
        texts: Texts = json.loads(answer)
        return texts


class LlamaFile:
    """llama.cpp on a GGUF file as it is, in a process of its own; in the settings that are fastest with it."""

    def __init__(self, file: Path, work: Any, stack: ExitStack) -> None:
        import torch

        from iclperm.bench.cases import warm_up
        from iclperm.bench.contenders import PEER_CONTENDERS, ContenderProcess

        scratch, threads = Path(stack.enter_context(TemporaryDirectory())), torch.get_num_threads()
        self._process = stack.enter_context(ContenderProcess(PEER_CONTENDERS["llama_cpp"], scratch / "log", threads))
        self._process.load(file, "bfloat16", threads)  # which lets it take keys of half precision
        self._work, self._out = work.save(scratch / "work.npz"), scratch / "texts.npy"
        self.settings = self._process.warm(warm_up(work).save(scratch / "warm.npz")).get("settings", {})

    def __call__(self) -> Texts:
        texts: Texts = self._process.score(self._work, self._out)[1].tolist()
        return texts


def peer_environment() -> dict[str, str]:
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    from iclperm.base.environment import VARIABLES

    ours = ("PYTHONPATH", "PYTHONHOME", *VARIABLES)
    kept = {key: value for key, value in os.environ.items() if key not in ours}
    return kept | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip


def serve_vllm(folder: str, dtype: str) -> None:
    """Answer each line of prompts with their texts, until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams

    engine = LLM(
        folder, dtype=dtype, skip_tokenizer_init=True, enable_prefix_caching=True, block_size=32,
        max_num_batched_tokens=4096, max_num_seqs=512, seed=0,  # as many texts go on at a time here
    )  # fmt: skip
    answers.write("ready\n")
    answers.flush()
    for line in sys.stdin:
        prompts, num_new = json.loads(line)
        engine.reset_prefix_cache()
        sampling = SamplingParams(max_tokens=num_new, temperature=0.0, ignore_eos=True, detokenize=False)
        outputs = engine.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        answers.write(json.dumps([list(output.outputs[0].token_ids) for output in outputs]) + "\n")
        answers.flush()


def disagreement(model: Any, prompts: Texts, ours: Texts, theirs: Texts) -> tuple[int, float]:
    """Texts that differ, and the largest difference in nats of the two tokens where they part."""
    from iclperm.reference.scoring import next_token_logprobs

    count, worst = 0, 0.0
    for prompt, a, b in zip(prompts, ours, theirs, strict=True):
        if a == b:
            continue
        count += 1
        if len(a) != len(b):
            return count, float("inf")
        parting = next(place for place, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
        logprobs = next_token_logprobs(model, [*prompt, *a[:parting]])
        worst = max(worst, float(logprobs.max() - min(logprobs[a[parting]], logprobs[b[parting]])))
    return count, worst


def asked_for(name: str, arguments: Any) -> tuple[Path, Any, int]:
    """The model's folder, the prompts, and how many tokens are generated after each."""
    from iclperm.bench.cases import Case
    from iclperm.bench.models import MODELS, facts
    from iclperm.bench.studies import StudyCase
    from iclperm.study.study import Study

    if arguments.study is not None:
        study = StudyCase.of(Study.from_file(arguments.study), name).scaled(arguments.scale)
        return study.model, study.build(0), study.new_tokens
    folder = MODELS[name].folder()
    case = Case("generation", "", 8, arguments.permutations, (8,), arguments.queries)
    return folder, case.build(facts(folder)["vocab_size"]), arguments.new_tokens


def measure(name: str, arguments: Any) -> list[dict[str, Any]]:
    from _products import Products
    from time_by_kernel import Spent, clocked, memory_rate
    from transformers import AutoModelForCausalLM

    from iclperm.bench.environments import ENVIRONMENTS
    from iclperm.engine.dtypes import dtype_of

    folder, work, num_new = asked_for(name, arguments)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype_of(arguments.dtype)).eval()
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    prompts = work.prompts()
    run, engine = ours(model, work, num_new)
    contenders: dict[str, Callable[[], Texts]] = {
        "iclperm": run,
        "padded batches": lambda: padded(model, prompts, num_new),
        "continuous batching": lambda: continuous(model, prompts[: SAMPLED["continuous batching"]], num_new),
    }
    with ExitStack() as stack:
        if ENVIRONMENTS["vllm"].is_ready and "vllm" not in arguments.without:
            vllm = Vllm(folder, arguments.dtype, stack)
            contenders["vllm"] = lambda: vllm(prompts, num_new)
        elif "vllm" not in arguments.without:
            print("vllm is left out: iclperm bench --prepare vllm makes its environment", file=sys.stderr)
        if arguments.gguf is not None:
            contenders["llama.cpp, the file"] = LlamaFile(arguments.gguf, work, stack)
        contenders = {key: run for key, run in contenders.items() if key not in arguments.without}
        asked = {key: min(SAMPLED.get(key, len(prompts)), len(prompts)) for key in contenders}
        shares = {key: number / len(prompts) for key, number in asked.items()}
        first = {key: timed(key, run, shares[key]) for key, run in contenders.items()}
        expected = first["iclperm"][0]
        agreed = {
            key: disagreement(model, prompts[: asked[key]], expected[: asked[key]], texts)
            for key, (texts, _) in first.items()
        }
        seconds = {key: [taken] for key, (_, taken) in first.items()}
        repeated = [key for key, (time_taken,) in seconds.items() if key not in SLOW or time_taken <= LONG]
        for number in range(arguments.repeats):
            for key in repeated:
                taken = timed(key, contenders[key], shares[key])[1]
                seconds[key] = [taken] if number == 0 else [*seconds[key], taken]
        products, spent = Products(), defaultdict[str, Spent](Spent)
        with clocked(spent, products):
            started = time.perf_counter()
            run()
            recorded = time.perf_counter() - started
    about = {"model": name, "dtype": arguments.dtype, "prompts": len(prompts), "new tokens": num_new}
    num_tokens = len(prompts) * num_new
    rows = [
        about
        | figure(key, shares[key], num_tokens, seconds, agreed[key], engine, TIES[arguments.dtype])
        | {"first": first[key][1]}
        for key in contenders
    ]
    fastest = sum(taken for taken, _ in products.fastest().values())
    rows[0] |= {"recorded": recorded, "products": sum(products.seconds.values()), "fastest products": fastest}
    rows[0]["of the fastest products"] = statistics.median(seconds["iclperm"]) / fastest
    attention, operations = spent["tree_attention"], sum(map(products.operations, products.calls))
    rows[0] |= {"attention": attention.seconds, "bound": fastest * (1 + attention.operations / operations)}
    rows[0] |= {"keys GB": attention.pool_bytes / 1e9, "keys from memory": attention.pool_bytes / memory_rate()}
    return rows


def timed(key: str, run: Callable[[], Texts], share: float) -> tuple[Texts, float]:
    """The texts, and the seconds that all would take where only a share is asked for."""
    started = time.perf_counter()
    texts = run()
    taken = (time.perf_counter() - started) / share
    print(f"{key}: {taken:.1f} s", file=sys.stderr, flush=True)
    return texts, taken


def figure(
    key: str, share: float, num_tokens: int, seconds: dict[str, list[float]], agreed: Any, engine: Any, ties: float
) -> dict[str, Any]:
    row: dict[str, Any] = {"contender": key, "share": share, "texts that part": agreed[0], "by nats": agreed[1]}
    median = statistics.median(seconds[key])
    row |= {"seconds": median, "least": min(seconds[key]), "most": max(seconds[key]), "passes": len(seconds[key])}
    row["new tokens/s"] = num_tokens / median
    if agreed[1] <= ties:
        row["iclperm is faster"] = median / statistics.median(seconds["iclperm"])
    if key == "iclperm":
        row |= {"forwarded": engine.report.tokens_forwarded, "naive": engine.report.tokens_naive}
        row["utilisation"] = engine.report.utilisation
    return row


def main(words: Sequence[str]) -> None:
    if words[:1] == [PEER]:
        serve_vllm(*words[1:])
        return
    from iclperm.base.environment import settle

    settle()  # as the command line does
    from _machine import options, publish

    parser = options(__doc__)
    parser.set_defaults(repeats=3)
    parser.add_argument("--models", nargs="+", default=["qwen2-25m", "qwen2.5-0.5b"])
    parser.add_argument("--dtype", choices=list(TIES), default="float32")
    parser.add_argument("--study", type=Path, help="a study's file, which is taken with its model instead")
    parser.add_argument("--scale", type=float, default=1.0, help="the share of a study's orderings and queries")
    parser.add_argument("--gguf", type=Path, help="the file that the model was made of, for llama.cpp as it is")
    parser.add_argument("--queries", type=int, default=64)
    parser.add_argument("--permutations", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--without", nargs="*", default=[], help="contenders to leave out, by name")
    arguments = parser.parse_args(words)
    names = arguments.models if arguments.study is None else [arguments.study.stem]
    figures = [row for name in names for row in measure(name, arguments)]
    publish("generation", figures, arguments.json)


if __name__ == "__main__":
    main(sys.argv[1:])
