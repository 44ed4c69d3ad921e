"""What a doctor found: as data, as text to paste into an issue, and in one paragraph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from iclperm.engine.doctor.checks import WITHOUT_TREE, CheckFinding
from iclperm.engine.doctor.choosing import StageChoice
from iclperm.engine.doctor.kernels import CompiledKernel, PartWay, ways
from iclperm.engine.doctor.machine import DeviceFacts, MachineFacts
from iclperm.engine.doctor.packs import PackSeconds, enough, usual_pack
from iclperm.engine.plain_model import PlainModel
from iclperm.study.sizes import bytes_in_words

FORMAT = 1
"""Of the JSON; a key may be added in the same one."""
PARTS = ("machine", "model", "kernels", "checks", "stages", "packs")
_MUCH_ON_THE_HOST = 0.8
_REPLACED = {"attention", "layers", "head"}
_REMEDIES = {
    "attention": "With --attention torch the kernel is not tried",
    "layers": "With --layers transformers they are not tried",
    "head": "With --layers transformers it is not tried",
    "tree": "With --plain prompts are scored one by one, at the cost of every token",
    "model": "Another --dtype, --device or model may do",
}


@dataclass(frozen=True)
class ModelSummary:
    """The model that was looked at, in numbers; of a folder no name."""

    name: str
    type: str
    device: str
    dtype: str
    parameters: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    window: int
    window_layers: int
    attention_softcap: float
    weight_bytes: int
    pack_tokens: int
    """Most that a pack has where nobody says how many."""
    ways: list[PartWay]

    @classmethod
    def of(cls, model: PlainModel, name: str) -> Self:
        """A model under the name that may be told."""
        facts = model.facts
        return cls(
            name=name,
            type=facts.model_type,
            device=str(model.device),
            dtype=facts.dtype,
            parameters=facts.num_parameters,
            layers=facts.num_layers,
            hidden=facts.hidden_size,
            heads=facts.num_heads,
            kv_heads=facts.num_kv_heads,
            head_size=facts.head_size,
            vocabulary=facts.vocab_size,
            window=facts.window,
            window_layers=facts.num_window_layers,
            attention_softcap=facts.attention_softcap,
            weight_bytes=sum(weight.nbytes for weight in model.model.parameters()),
            pack_tokens=usual_pack(model),
            ways=ways(model),
        )


@dataclass
class Diagnosis:
    """What was found, part by part; empty where a part was not come to.

    ``without`` says by the name of a part why there is nothing of it, ``failed`` what broke it off. ``stopped``: it was
    interrupted.
    """

    machine: MachineFacts | None = None
    model: ModelSummary | None = None
    kernels: list[CompiledKernel] = field(default_factory=list)
    checks: list[CheckFinding] = field(default_factory=list)
    stages: list[StageChoice] = field(default_factory=list)
    packs: list[PackSeconds] = field(default_factory=list)
    without: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    stopped: bool = False

    @property
    def failures(self) -> list[str]:
        """What failed, a line each."""
        return [
            *(f"{name}: {reason}" for name, reason in self.failed.items()),
            *(f"{each.kernel} for {each.arch}: {each.reason}" for each in self.kernels if each.reason),
            *(f"{each.name}: {each.reason}" for each in self.checks if each.passed is False),
        ]

    @property
    def passed(self) -> bool:
        """Whether it was finished, and nothing failed."""
        return not self.stopped and not self.failures

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON holds it; docs/doctor.md says what each key is."""
        found = {name: value for name, value in asdict(self).items() if name != "stopped"}
        verdict = {"passed": self.passed, "stopped": self.stopped, "failures": self.failures, "verdict": self.verdict}
        return {"format": FORMAT, **found, **verdict}

    def report(self) -> str:
        """Markdown: the parts in a fence, the verdict below it."""
        lines = [line for part in PARTS for line in self.part(part)]
        return "\n".join([*HEAD, *lines, *foot(self), ""])

    def part(self, name: str) -> list[str]:
        """The lines of a part, under its name."""
        lines = [*getattr(self, f"_{name}_lines")()]
        lines += [self.without[name]] if name in self.without else []
        lines += [f"FAILED {self.failed[name]}"] if name in self.failed else []
        return [name, *(f"  {line}" for line in lines)] if lines else []

    @property
    def verdict(self) -> str:
        """Whether it works here, and what to change."""
        return " ".join(self._sentences())

    def _machine_lines(self) -> Iterator[str]:
        if self.machine is None:
            return
        for device in self.machine.devices:
            yield from _of_device(device)
        if self.machine.no_gpu:
            yield f"no GPU: {self.machine.no_gpu}"
        for what in (self.machine.system, self.machine.versions, self.machine.flags):
            yield from _wrapped([f"{name} {value}" for name, value in what.items() if value is not None])
        yield from (f"{name}={value}" for name, value in self.machine.environment.items())

    def _model_lines(self) -> Iterator[str]:
        if (model := self.model) is None:
            return
        yield (
            f"{model.name}: {model.type}, {model.parameters:,} parameters, {bytes_in_words(model.weight_bytes)} of "
            f"weights in {model.dtype} on {model.device}"
        )
        window = f", {model.window_layers} of window {model.window:,}" if model.window_layers else ""
        softcap = f", soft-cap {model.attention_softcap:g}" if model.attention_softcap else ""
        yield (
            f"{model.layers} layers{window}, hidden {model.hidden:,}, {model.heads} heads of {model.head_size} to "
            f"{model.kv_heads} of keys and values{softcap}, vocabulary {model.vocabulary:,}"
        )
        yield from _table([(way.part, way.runs, way.reason) for way in model.ways])

    def _kernels_lines(self) -> Iterator[str]:
        if self.kernels:
            header = ("kernel", "arch", "warps", "stages", "registers", "shared", "spilled", "unit", "seconds")
            yield from _table([header, *map(_of_kernel, self.kernels)])

    def _checks_lines(self) -> Iterator[str]:
        yield from _table(
            [
                (
                    {True: "passed", False: "FAILED", None: "told"}[each.passed],
                    each.name,
                    "" if each.error is None else f"{each.error:.2g} of {each.tolerance:.2g}",
                    f"{each.seconds:.2f} s",
                    each.reason,
                )
                for each in self.checks
            ]
        )

    def _stages_lines(self) -> Iterator[str]:
        if self.stages:
            header = ("kernel", "shipped", "chosen", "microseconds by stages", "")
            yield from _table([header, *map(_of_choice, self.stages)])

    def _packs_lines(self) -> Iterator[str]:
        if self.packs:
            has_device = any(each.device is not None for each in self.packs)
            parts = ("of them on the host", "on the device") if has_device else ()
            header = ("packs of", "seconds", *parts, "microseconds a token", "")
            yield from _table([header, *(_of_pack(each, has_device=has_device) for each in self.packs)])

    def _sentences(self) -> Iterator[str]:
        if self.stopped:
            yield "Stopped before it was finished; what is told holds."
        if self.failures:
            yield f"Not all is well: {'; '.join(self.failures)}."
            yield from self._remedies()
        elif not self.stopped and self.model is not None and self.checks:
            ways = ", ".join(f"{way.part} {way.runs}" for way in self.model.ways)
            passed = sum(each.passed is True for each in self.checks)
            where = f"{self.model.dtype} on {self.model.device}"
            yield f"Works: {self.model.type} in {where} passes all {passed} checks ({ways})."
        yield from (
            f"The model runs without {each.name}: {each.reason}. {_REMEDIES['tree']}."
            for each in self.checks
            if each.part == "tree" and each.passed is None and each.name == WITHOUT_TREE
        )
        yield from (
            f"{way.part.capitalize()} could be faster: {way.reason}."
            for way in (self.model.ways if self.model else ())
            if way.reason and way.part != "prompts"
        )
        if self.machine is not None and self.machine.no_gpu and self.machine.versions["driver"]:
            yield f"There is an NVIDIA driver, but no GPU is used: {self.machine.no_gpu}."
        if any(each.spills for each in self.kernels):
            yield "Some kernels spill registers, which costs time and no bits: please send this report."
        yield from self._about_packs()

    def _remedies(self) -> Iterator[str]:
        parts = dict.fromkeys(each.part for each in self.checks if each.passed is False)
        parts |= {"model": None} if "model" in self.failed else {}
        is_its_own = parts.keys() == {"model"} and self.failed.keys() <= {"model"}
        if parts.keys() & _REPLACED and not parts.keys() & {"tree", "model"}:
            yield "Studies run all the same: the library's own takes the place of what failed, and is slower."
        # A model that cannot be loaded says what to do by itself.
        yield from (f"{_REMEDIES[part]}." for part in parts if part not in self.failed)
        if not is_its_own or any(each.reason for each in self.kernels):
            yield "Please send this report."

    def _about_packs(self) -> Iterator[str]:
        best = enough(self.packs)
        size = None if self.model is None else self.model.pack_tokens
        usual = next((each for each in self.packs if each.size == size), None)
        if best is None or best.per_token is None or best.seconds is None:
            return
        if best is not [each for each in self.packs if each.seconds is not None][-1]:
            yield f"Packs of more than {best.tokens:,} tokens gain nothing."
        if usual is not None and usual.per_token is not None and best.is_surely_faster(usual):
            share = 1 - best.per_token / usual.per_token
            yield f"--pack-tokens {best.size} takes {share:.0%} less time a token than the usual {usual.size:,}."
        if best.host is not None and best.host > _MUCH_ON_THE_HOST * best.seconds:
            yield f"The host is busy for {best.host / best.seconds:.0%} of a pack's time: the device may wait for it."


HEAD = ("### iclperm doctor", "", "```text")
"""What a report begins with."""


def foot(found: Diagnosis) -> list[str]:
    """What a report ends with."""
    return ["```", "", found.verdict]


def _of_device(device: DeviceFacts) -> Iterator[str]:
    about = [
        f"{device.name} ({device.device})",
        "" if device.capability is None else f"capability {device.capability}",
        "" if device.multiprocessors is None else f"{device.multiprocessors} multiprocessors",
        "" if device.shared_memory is None else f"{device.shared_memory:,} bytes of shared memory a block",
    ]
    yield ", ".join(filter(None, about))
    memory = f"memory {bytes_in_words(device.total)}, {bytes_in_words(device.free)} free"
    if device.capability is not None:
        memory += (
            f"; allocated {bytes_in_words(device.allocatable)}, in one block {bytes_in_words(device.largest_block)}"
        )
    yield f"  {memory}{f' ({device.reason})' if device.reason else ''}"


def _of_kernel(each: CompiledKernel) -> tuple[str, ...]:
    if each.registers is None:
        return each.kernel, each.arch, str(each.warps), str(each.stages), f"FAILED {each.reason}"
    used = (f"{each.registers}", f"{each.shared:,}", f"{each.spills:,}", each.matrix_unit or "-", f"{each.seconds:.1f}")
    return each.kernel, each.arch, str(each.warps), str(each.stages), *used


def _of_choice(each: StageChoice) -> tuple[str, ...]:
    times = ", ".join(f"{stages}: {1e6 * seconds:.1f}" for stages, seconds in each.seconds.items())
    return each.kernel, str(each.shipped), str(each.chosen), times, each.reason


def _of_pack(each: PackSeconds, *, has_device: bool) -> tuple[str, ...]:
    figures = [each.seconds, *((each.host, each.device) if has_device else ())]
    seconds = ("-" if figure is None else f"{figure:.4f}" for figure in figures)
    per_token = "-" if each.per_token is None else f"{1e6 * each.per_token:.2f}"
    return f"{each.tokens:,}", *seconds, per_token, each.reason


def _wrapped(words: Sequence[str], width: int = 110) -> Iterator[str]:
    """Words with commas between, in lines."""
    line = ""
    for word in words:
        if line and len(line) + len(word) + 2 > width:
            yield f"{line},"
            line = word
        else:
            line = f"{line}, {word}" if line else word
    if line:
        yield line


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows in columns, the last of each row as long as it is."""
    widths = [
        max((len(row[place]) for row in rows if len(row) > place + 1), default=0)
        for place in range(max(map(len, rows), default=0))
    ]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip()
