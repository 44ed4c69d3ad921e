"""Answers and accuracies as an array whose axes have names, read from NumPy's files."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from iclperm.errors import DataError, RequestError, is_out_of_memory, printable
from iclperm.stats.sensitivity import FloatArray
from iclperm.stats.tensor import HEADER_ERRORS, mapped, refuse_false_header
from iclperm.study.states import NO_ANSWER

MOST_BYTES = 4 << 30
"""The largest file that is read, and the largest array that is made of one."""
AXES = {"S": "set", "P": "permutation", "K": "shots", "Q": "query", "C": "context"}
"""What each letter of `Tensor.axes` stands for."""
MISSING = NO_ANSWER
"""State of an answer that is not there."""
MISSING_WORDS = "answers are missing"
"""What is said behind how many there are."""
GRADED = "answers are graded, between 0 and 1: McNemar's and Cochran's tests and Wilson's intervals are left out"

Array = npt.NDArray[Any]

_BESIDE = ("state", "weights", "shots", "classes")
_ALSO = {"weights": "weight"}


class ByLabel(NamedTuple):
    """Answers of C contexts as labels."""

    labels: tuple[str, ...]
    """[L]"""
    gold: npt.NDArray[np.int64]
    """[Q] index of the right label."""
    answered: npt.NDArray[np.int64]
    """[C, Q] index of the answered label; -1 names none, or is no answer."""


@dataclass(frozen=True)
class Tensor:
    """An array whose axes have names."""

    values: Array
    """uint8 0 or 1 where the axes end in Q, float64 in 0..1 where these answers are graded; else float64 accuracies."""
    axes: str
    """SP or SPK (accuracies), SPQ or SPKQ (answers), CQ (answers of C contexts); each letter is an axis."""
    state: npt.NDArray[np.uint8] | None = None
    """Of answers, with the shape of `values`: 0 = there; None where all are."""
    weights: npt.NDArray[Any] | None = None
    """[Q] how often each query counts, int64 where all are whole, else float64; None where each counts once."""
    shots: tuple[int, ...] = ()
    """[K] numbers of demonstrations; empty where not known."""
    names: tuple[str, ...] = ()
    """[C] names of the contexts."""
    title: str = ""
    notes: tuple[str, ...] = ()
    """What a reader of the numbers should know of how the file was read."""
    classes: tuple[str, ...] = ()
    """[Q] the class of each query, as text; empty where not known."""
    queries: tuple[Any, ...] = ()
    """[Q] what the file calls the queries; empty where it does not."""
    sets: tuple[Any, ...] = ()
    """[S] likewise."""
    permutations: tuple[Any, ...] = ()
    """[P] likewise."""
    by_label: ByLabel | None = None
    """Of contexts; None where it is not known which labels were answered."""

    @property
    def is_graded(self) -> bool:
        """Whether answers have values between 0 and 1, such as F1 or partial credit."""
        return self.axes.endswith("Q") and self.values.dtype.kind == "f"


def refuse_bytes(size: int, name: str, most_bytes: int) -> None:
    """Raises DataError, naming what is too large, where it takes more than `most_bytes`."""
    if size > most_bytes:
        raise DataError(
            f"{name} takes {size / 2**30:.1f} GB, the most is {most_bytes / 2**30:.0f} GB; "
            "iclperm.stats.tensor.tensor_sums reads .npy files of any size"
        )


def title_of(path: Path) -> str:
    """The name of a file, safe to print."""
    return printable(path.name)


def read_npy(path: Path, axes: str | None) -> Tensor:
    """The array of a .npy file, whose size was checked; raises what `of_array` does, and DataError for other files."""
    return of_array(np.array(mapped(path)), axes, title_of(path))


def read_npz(path: Path, axes: str | None, most_bytes: int) -> Tensor:
    """The only array of a .npz file, or the one named correct, with state, weights and shots that lie beside it.

    Raises what `of_array` does; DataError for other files, for arrays that do not fit each other, and where everything
    unpacked takes more than `most_bytes`.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            refuse_bytes(sum(entry.file_size for entry in archive.infolist()), f"{path}, unpacked,", most_bytes)
            for entry in archive.infolist():
                _refuse_false_header(archive, entry)
        with np.load(path, allow_pickle=False) as arrays:
            names = list(arrays.files)
            name = "correct" if "correct" in names else names[0] if len(names) == 1 else None
            if name is None:
                raise DataError(
                    f"{path} holds {', '.join(names) or 'nothing'}; it needs one array, or one named correct"
                )
            values = arrays[name]
            kept = {key: other for key in _BESIDE for other in (key, _ALSO.get(key)) if other in names}
            if twice := next((key for key in kept if key in names and _ALSO.get(key) in names), None):
                raise DataError(f"{path} holds both {twice} and {_ALSO[twice]}; keep one")
            beside = {key: arrays[other] for key, other in kept.items()}
    except (*HEADER_ERRORS, zipfile.BadZipFile) as error:
        if is_out_of_memory(error):
            raise
        raise DataError(f"{path} is not a .npz file that can be read: {one_line(error)}; save it anew") from None
    are_answers = name == "correct"
    left = [other for other in names if other != name and other not in kept.values()]
    tensor = of_array(values, axes, title_of(path), are_answers=are_answers)
    tensor = _with_beside(tensor, beside, values.shape, _letters_of(values, axes, title_of(path), are_answers), path)
    return replace(tensor, notes=(*tensor.notes, *([f"arrays not used: {printable(', '.join(left))}"] if left else [])))


def _refuse_false_header(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> None:
    """As `refuse_false_header`, of an array in an archive; says nothing of other entries."""
    with archive.open(entry) as file:
        is_array = file.read(len(np.lib.format.MAGIC_PREFIX)) == np.lib.format.MAGIC_PREFIX
        file.seek(0)
        if is_array:
            refuse_false_header(file, entry.file_size)


def _with_beside(
    tensor: Tensor, beside: Mapping[str, Array], shape: tuple[int, ...], letters: str, path: Path
) -> Tensor:
    """The tensor with state, weights, shots and classes that lay in the same archive."""
    if "state" in beside and tensor.axes[-1] == "Q":
        if beside["state"].shape != shape:
            raise DataError(
                f"{path} holds state {list(beside['state'].shape)} beside answers {list(shape)}; make them alike"
            )
        given = _is_not_ok(beside["state"], path)
        state = in_order(given, letters)[0].reshape(tensor.values.shape).view(np.uint8)
        tensor = replace(tensor, state=state if tensor.state is None else tensor.state | state)
    if "weights" in beside and tensor.axes[-1] == "Q":
        weights = beside["weights"]
        if weights.shape != tensor.values.shape[-1:] or weights.dtype.kind not in "biuf":
            raise DataError(f"{path} holds weights {weights.dtype} {list(weights.shape)}; give one number a query")
        if not (np.isfinite(weights) & (weights >= 0)).all():
            raise DataError(f"{path} holds weights below 0 or not finite; give numbers of at least 0")
        tensor = replace(tensor, weights=plain_weights(weights))
    if "classes" in beside and tensor.axes[-1] == "Q":
        classes = beside["classes"]
        if classes.shape != tensor.values.shape[-1:]:
            raise DataError(f"{path} holds classes {list(classes.shape)}; give one a query")
        tensor = replace(tensor, classes=tuple(printable(str(name)) for name in classes.tolist()))
    if "shots" in beside and "K" in tensor.axes:
        shots = tuple(int(k) for k in np.ravel(beside["shots"]))
        if len(shots) != tensor.values.shape[2] or list(shots) != sorted(set(shots)):
            raise DataError(f"{path} holds shots {list(shots)}; give {tensor.values.shape[2]} ascending numbers")
        tensor = replace(tensor, shots=shots)
    return tensor


def _is_not_ok(state: Array, path: Path) -> npt.NDArray[np.bool_]:
    """Where states are not 0, or as words not ok; raises DataError for other kinds, which 0 does not tell."""
    if state.dtype.kind == "U":
        words = np.char.lower(np.char.strip(state))
        return np.asarray((words != "ok") & (words != "0"))
    if state.dtype.kind not in "iuf":
        raise DataError(f"{path} holds state of the kind {state.dtype}; write 0 (or ok) where there is an answer")
    return np.asarray(state != 0)


def of_array(values: Array, axes: str | None, title: str, *, are_answers: bool = False) -> Tensor:
    """A plain array as a tensor; `axes` has a letter for each of its axes, by default they follow from the shape.

    `are_answers` says that it was named so: values between 0 and 1 are then graded answers. Raises DataError unless it
    holds answers along Q, or accuracies, in 0..1; RequestError for `axes` that do not fit, and where neither shape nor
    values tell them.
    """
    if values.dtype.kind not in "biuf" or not values.size:
        raise DataError(f"{title} must hold numbers, got {values.dtype} {list(values.shape)}; save those alone")
    letters = _letters_of(values, axes, title, are_answers)
    arranged, named = in_order(values, letters)
    if "Q" not in letters:
        notes: tuple[str, ...] = ()
        if axes is None:
            notes = ("rows are taken for sets and columns for permutations; --axes PS reads it the other way round",)
        return Tensor(as_shares(arranged, title), named, title=title, notes=notes)
    answers, state, notes = as_answers(arranged, title)
    names: tuple[str, ...] = ()
    if named == "CQ":
        names = (title,) if len(answers) == 1 else tuple(f"context {i}" for i in range(len(answers)))
    return Tensor(answers, named, state, names=names, title=title, notes=notes)


def _letters_of(values: Array, axes: str | None, title: str, are_answers: bool) -> str:
    """A letter for each axis: those given, else from shape and values; raises RequestError where they leave it open."""
    if axes is not None:
        return _axes_of(values.shape, axes)
    if not 1 <= values.ndim <= 4:
        raise RequestError(f"an array with {values.ndim} axes needs a letter for each; give one of axes such as SPKQ")
    between = values[(values > 0) & (values < 1)] if values.dtype.kind == "f" else values[:0]
    if values.ndim == 2:
        return _two_axes(values, title, are_answers, bool(between.size))
    if between.size and values.ndim != 4 and not are_answers:
        graded, shares = ("SPQ", "SPK") if values.ndim == 3 else ("Q", "SP of a matrix")
        raise RequestError(
            f"{title} must hold answers 0 and 1 along Q, found {between[0]:g}; say --axes {graded} for graded answers; "
            f"for accuracies name the axes {'SP or SPK' if values.ndim == 3 else shares}"
        )
    return {1: "Q", 3: "SPQ", 4: "SPKQ"}[values.ndim]


def _two_axes(values: Array, title: str, are_answers: bool, is_graded: bool) -> str:
    """Of a matrix: accuracies SP, or the answers of one context; what else it may be is left to the caller to say."""
    is_known = (values == 0) | (values == 1)
    holds_answers = bool((is_known | np.isnan(values)).all() and is_known.any())
    if not (are_answers or holds_answers):
        return "SP"
    if 1 in values.shape and max(values.shape) > 1 and not is_graded:
        return "CQ" if values.shape[0] == 1 else "QC"
    rows, columns = values.shape
    raise RequestError(
        f"{title} is {rows:,} x {columns:,} of answers, which does not say what rows and columns are: write --axes QC "
        "where a row is a query and a column a context, CQ where a row is a context, PQ where it is a permutation of "
        "one set; SP for accuracies"
    )


def _axes_of(shape: tuple[int, ...], axes: str) -> str:
    """The letters given for the axes; raises RequestError where they do not fit."""
    letters = axes.upper()
    if set(letters) - set(AXES) or len(set(letters)) != len(letters):
        raise RequestError(f"axes must be distinct letters of S, P, K, Q and C, got {axes!r}")
    if len(letters) != len(shape):
        raise RequestError(
            f"axes {axes!r} names {len(letters)} axes, the array has {len(shape)}: "
            f"{list(shape)}; name each once, as in SPKQ"
        )
    if "C" in letters and set(letters) != {"C", "Q"}:
        raise RequestError(f"contexts C go with queries Q alone, got {axes!r}; number sets S and permutations P")
    if "Q" not in letters and not {"S", "P"} <= set(letters):
        raise RequestError(f"accuracies need the axes S and P, got {axes!r}")
    return letters


def in_order(values: Array, letters: str) -> tuple[Array, str]:
    """`values` with its axes in the order S P K Q, or C Q, and the letters of these axes.

    Where no set or no permutation is named there is one.
    """
    if letters == "Q":
        return values[None], "CQ"
    wanted = "CQ" if "C" in letters else "".join(axis for axis in "SPKQ" if axis in letters or axis in "SP")
    for axis in wanted:
        if axis not in letters:
            values, letters = values[None], axis + letters
    return np.ascontiguousarray(values.transpose([letters.index(axis) for axis in wanted])), wanted


def as_shares(values: Array, title: str) -> FloatArray:
    """Accuracies as float64; raises DataError for one outside 0..1, or none."""
    shares = values.astype(np.float64)
    wrong = shares[~((shares >= 0) & (shares <= 1))]
    if wrong.size:
        raise DataError(
            f"{title} must hold accuracies in 0..1, found {wrong[0]:g}; percentages are to be divided by 100, and "
            "every cell needs a value"
        )
    return shares


def as_answers(values: Array, title: str) -> tuple[Array, npt.NDArray[np.uint8] | None, tuple[str, ...]]:
    """Answers as uint8 0 or 1, or float64 where some are graded, between 0 and 1; with their state and what to note.

    The state is None unless some are NaN, which is no answer. Raises DataError for a number outside 0..1.
    """
    if values.dtype.kind != "f":
        if values.dtype != np.bool_ and (values.min() < 0 or values.max() > 1):
            wrong = values.min() if values.min() < 0 else values.max()
            raise DataError(f"{title} must hold answers 0 and 1, found {wrong}; write no others")
        return values.astype(np.uint8, copy=False), None, ()
    other = values[(values < 0) | (values > 1)]
    if other.size:
        raise DataError(
            f"{title} must hold answers 0 and 1, or grades between, along Q, found {other[0]:g}; divide points by "
            "their maximum; for accuracies name the axes SP or SPK"
        )
    is_graded = bool(((values > 0) & (values < 1)).any())  # no NaN is
    missing = np.isnan(values)
    state = missing.astype(np.uint8) * MISSING if missing.any() else None
    notes = missing_note(missing)
    if is_graded:
        return np.where(missing, 0, values).astype(np.float64, copy=False), state, (*notes, GRADED)
    return (values == 1).view(np.uint8), state, notes


def plain_weights(weights: Array) -> Array | None:
    """Weights [Q] as int64 where all are whole, else float64; None where each query counts once."""
    if (weights == 1).all():
        return None
    is_whole = weights.dtype.kind != "f" or bool((weights == np.floor(weights)).all() and (weights < 1 << 31).all())
    return weights.astype(np.int64 if is_whole else np.float64)


def missing_note(missing: npt.NDArray[np.bool_]) -> tuple[str, ...]:
    """A line on how many answers are missing; nothing where none is."""
    num = int(np.count_nonzero(missing))
    if not num:
        return ()
    return (f"{num:,} of {missing.size:,} {MISSING_WORDS}",)


def one_line(error: Exception) -> str:
    """The first line of what an exception says, safe to print."""
    return printable(str(error).split("\n")[0])[:200]
