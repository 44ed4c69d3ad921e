"""`iclperm doctor`: what a machine that nobody here has seen does with a model, found out, judged and told."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from iclperm.engine.device import fixed_precision, refuse_unknown_isa
from iclperm.engine.doctor import checks, choosing, kernels, machine, packs
from iclperm.engine.doctor.checks import WITHOUT_TREE, CheckFinding
from iclperm.engine.doctor.diagnosis import Diagnosis, ModelSummary
from iclperm.engine.doctor.privacy import first_line, naming_no_folder, without_names
from iclperm.engine.folder import model_folder
from iclperm.engine.kernels.stages import trying
from iclperm.engine.load import BALANCED, load, load_shapes
from iclperm.engine.model import TreeModel
from iclperm.engine.plain_model import PlainModel
from iclperm.errors import ConfigError, ModelError

__all__ = ["Diagnosis", "Onlooker", "doctor"]

_DTYPES = ("auto", "float32", "bfloat16", "float16")
# Those that GPUs have: of another number the compiler ends the whole process.
_ARCHITECTURES = (70, 75, 80, 86, 87, 89, 90, 100, 103, 110, 120, 121)
_DEVICE = re.compile(rf"auto|{BALANCED}|(cpu|cuda|mps|xpu)(:\d+)?")
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
Say = Callable[[str], None]


class Onlooker(Protocol):
    """Who is told how far a doctor is."""

    def step(self, words: str) -> None:
        """What is done now, which may take long."""
        ...

    def part(self, found: Diagnosis, name: str) -> None:
        """A part of the diagnosis is complete."""
        ...


class _Nobody:
    """Is told nothing."""

    def step(self, words: str) -> None:
        """See `Onlooker`."""

    def part(self, found: Diagnosis, name: str) -> None:
        """See `Onlooker`."""


def doctor(
    model: str | Path = "demo",
    *,
    device: str = "auto",
    dtype: str = "auto",
    revision: str | None = None,
    architectures: Sequence[int] = (),
    onlooker: Onlooker | None = None,
) -> Diagnosis:
    """Looks at this machine, and at what it does with a model: the bundled one, or that of a folder or a hub id.

    In turn: devices, versions and flags; what runs each part of the model, and why not something faster; each variant
    of its kernels compiled for the GPU, and for ``architectures`` (compute capabilities times ten: 80, 90), which need
    not be here; the first-use check, kernel by kernel; on a GPU choices of equal bits by time, which are kept in the
    user's cache folder for studies on the same device; packs of several sizes, timed. What fails is told in one line
    each, and the rest goes on. Ctrl-C ends it with what is known (``stopped``). Nothing that is told names a person, a
    folder or a key.

    Raises `ConfigError` for no model, and for a device, dtype or architecture that cannot be. Cost: some seconds on a
    CPU for the bundled model; on a GPU a minute or some, mostly compilation, and for a moment all of its free memory.
    """
    if not str(model).strip():
        raise ConfigError("the model is ''; give demo, a folder, a GGUF file or a hub id")
    _refuse(device, dtype, architectures)
    found = Diagnosis()
    examination = _Examination(found, str(model), device, dtype, revision, architectures)
    watched = onlooker or _Nobody()
    is_public = str(model) == "demo" or (_HUB_ID.fullmatch(str(model)) and not Path(model).is_dir())
    with naming_no_folder("" if is_public else str(model)):
        for name, fill in examination.parts().items():
            try:
                fill(watched.step)
            except KeyboardInterrupt:
                found.stopped = True
            except Exception as error:  # whatever it is, it is told, and the next part goes on
                found.failed[name] = first_line(error)
            watched.part(found, name)
            if found.stopped:
                break
    return found


def _refuse(device: str, dtype: str, architectures: Sequence[int]) -> None:
    if not _DEVICE.fullmatch(device):
        raise ConfigError(f"device {device!r} is unknown; give auto, cpu, cuda or cuda:0, mps, or balanced")
    refuse_unknown_isa()
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype {dtype!r} is unknown; give one of {', '.join(_DTYPES)}")
    for arch in architectures:
        if arch not in _ARCHITECTURES:
            known = ", ".join(map(str, _ARCHITECTURES))
            raise ConfigError(f"architecture {arch} is none of a GPU; give compute capabilities times ten: {known}")


class _Examination:
    """Fills a diagnosis, part by part."""

    def __init__(
        self, found: Diagnosis, name: str, device: str, dtype: str, revision: str | None, architectures: Sequence[int]
    ) -> None:
        self._found = found
        self._name, self._device, self._dtype, self._revision = name, device, dtype, revision
        self._architectures = [*architectures]
        self._folder: Path | None = None
        self._model: PlainModel | None = None

    def parts(self) -> dict[str, Callable[[Say], None]]:
        """What fills each part, in turn."""
        return {
            "machine": self._look_at_the_machine,
            "model": self._load,
            "kernels": self._compile,
            "checks": self._check,
            "stages": self._choose,
            "packs": self._time,
        }

    def _look_at_the_machine(self, say: Say) -> None:
        say("looking at the machine")
        self._found.machine = machine.look()

    def _load(self, say: Say) -> None:
        say("loading the model")
        is_bundled, place = self._name == "demo", Path(self._name)
        self._folder = model_folder(self._name, self._revision)
        loaded, _ = load(self._folder, device=self._device, dtype=self._dtype)
        try:
            self._model = TreeModel(loaded)
        except ModelError as error:
            self._model = PlainModel(loaded)
            # Known, and no fault: such a model is run without it.
            self._found.checks.append(CheckFinding(WITHOUT_TREE, "tree", None, 0.0, reason=first_line(error)))
        kind = "a folder" if place.is_dir() else "a GGUF file" if place.is_file() else self._name
        name = "demo, the bundled model" if is_bundled else kind
        self._found.model = ModelSummary.of(self._model, without_names(name))

    def _compile(self, say: Say) -> None:
        architectures = self._architectures
        if self._model is not None and (own := kernels.architecture(self._model.device)):
            architectures = list(dict.fromkeys([own, *architectures]))
        if not architectures:
            self._found.without["kernels"] = (
                "nothing to compile for without a GPU; iclperm doctor --arch 80,90 compiles for some"
            )
            return
        if self._folder is None:
            return
        shapes, _ = load_shapes(self._folder, device="cuda", dtype=self._dtype)
        wanted = kernels.shapes_of(PlainModel(shapes))
        if reason := kernels.why_not_compiled(wanted.dtype):
            self._found.without["kernels"] = reason
            return
        if reason := kernels.why_left_out(wanted.dtype, architectures):
            self._found.without["kernels"] = reason
        for case, arch in kernels.variants(wanted, architectures):
            say(f"compiling {case.name} for sm_{arch}")
            self._found.kernels.append(kernels.compiled(case, arch))

    def _check(self, say: Say) -> None:
        if self._model is None:
            return
        say("checking kernels and layers")
        assert self._found.model is not None
        # With stages as shipped: a choice that was kept and does not run is to be replaced, not to cost the kernel.
        with fixed_precision(), trying(None):
            for finding in checks.checked(self._model, self._found.model.pack_tokens):
                self._found.checks.append(finding)
                say(f"checked {finding.name}")

    def _choose(self, say: Say) -> None:
        if not isinstance(self._model, TreeModel):
            return
        device = self._model.device
        if device.type != "cuda" or len(self._model.devices) > 1:
            self._found.without["stages"] = "nothing is left open but on a GPU by itself"
            return
        say("trying stages of kernels")
        with fixed_precision():
            for choice in choosing.chosen_stages(self._model, partial(kernels.launch_seconds, device=device)):
                self._found.stages.append(choice)
                say(f"tried {choice.kernel}")
        if self._found.stages and (reason := choosing.kept(self._found.stages, device)):
            self._found.without["stages"] = reason

    def _time(self, say: Say) -> None:
        if not isinstance(self._model, TreeModel):
            return
        say("timing packs")
        for timed in packs.timed_packs(self._model):
            self._found.packs.append(timed)
            say(f"timed packs of {timed.size:,} tokens")
