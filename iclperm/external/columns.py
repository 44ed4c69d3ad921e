"""What the cells of a table say: numbers, answers and names, as pandas, polars, Excel and people spell them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from iclperm.errors import DataError, printable
from iclperm.stats.sensitivity import FloatArray

T = TypeVar("T")

_NOTHING = frozenset(
    ("", "#n/a", "#na", "-", "--", "-nan", ".", "<na>", "?", "n/a", "na", "nan", "nat", "nil", "none", "null")
)
_TRUE, _FALSE = frozenset(("true", "t", "yes", "y")), frozenset(("false", "f", "no", "n"))
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?")
_IS_PADDED = re.compile(r"[+-]?0\d")  # a name of digits, as 007, and not 1 beside 1.0
_DECIMAL_COMMA = re.compile(r"[+-]?\d*,\d+(e[+-]?\d+)?")
_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(,\d{3})+")


def is_nothing(value: Any) -> bool:
    """Whether a cell is empty or says so: NaN, NA, None, -, … in any case."""
    if isinstance(value, str):
        return value.strip().lower() in _NOTHING
    return value is None or (isinstance(value, float) and math.isnan(value))


def first_repeated(names: Iterable[T]) -> T | None:
    """The first of the names that was there before; None where all are different. Its cost is linear."""
    seen: set[T] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def number_of(value: Any) -> float:
    """A cell as a number, NaN where it `is_nothing`; true and yes are 1, false and no 0, 77.4% is .774, and 0,5 is .5.

    Raises ValueError for anything else; also for 1,000, which is one or a thousand.
    """
    if is_nothing(value):
        return math.nan
    if isinstance(value, bool | int | float | Decimal | np.bool_ | np.number):
        return float(value)
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no number")
    word = value.strip().lower()
    if word in _TRUE or word in _FALSE:
        return float(word in _TRUE)
    scale, word = (100, word[:-1].rstrip()) if word.endswith("%") else (1, word)
    if _DECIMAL_COMMA.fullmatch(word) and not _THOUSANDS.fullmatch(word):
        word = word.replace(",", ".")
    if not _NUMBER.fullmatch(word):
        raise ValueError(f"{value!r} is no number")
    return float(word) / scale


def is_value(value: Any) -> bool:
    """Whether a cell says an answer, a number or nothing, and no word."""
    try:
        number_of(value)
    except ValueError:
        return False
    return True


def distinct_values(column: Any, name: str, path: Path) -> tuple[list[Any], npt.NDArray[np.int64]]:
    """The distinct values of an Arrow column of any plain kind, and each row's place among them, -1 for a null."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)  # as pandas' categories and polars' are written
    if pa.types.is_nested(column.type):
        raise DataError(f"{path} holds lists or structures in {name}; give one value a row")
    if pa.types.is_string_view(column.type) or pa.types.is_large_string(column.type):
        column = column.cast(pa.string())
    encoded = column.combine_chunks().dictionary_encode()
    codes = pc.fill_null(encoded.indices, -1).to_numpy(zero_copy_only=False).astype(np.int64)
    return encoded.dictionary.to_pylist(), codes


def numbers(column: Any, name: str, path: Path) -> FloatArray:
    """An Arrow column as float64 [rows], NaN where it says nothing; raises DataError for what is no number."""
    import pyarrow as pa

    kind = column.type
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        found = np.asarray(column.cast(pa.float64()).to_numpy(), dtype=np.float64)
        return found
    values, codes = distinct_values(column, name, path)
    table = np.array([*map(_numbered(values, name, path), values), math.nan])  # the last is that of a null, -1
    return np.asarray(table[codes])


def _numbered(values: Sequence[Any], name: str, path: Path) -> Callable[[Any], float]:
    """`number_of` that names what is none; raises DataError where points and commas, or shares and %, are mixed."""
    words = [value.strip().rstrip("% ") for value in values if isinstance(value, str)]
    comma = next((word for word in words if _DECIMAL_COMMA.fullmatch(word.lower())), None)
    point = next((word for word in words if "." in word and _NUMBER.fullmatch(word.lower())), None)
    if comma is not None and point is not None:
        raise DataError(f"{path} writes both {comma} and {point} in {name}; use one decimal sign")

    percent = next((value for value in values if isinstance(value, str) and value.rstrip().endswith("%")), None)
    share = next((value for value in values if not (is_nothing(value) or str(value).rstrip().endswith("%"))), None)
    if percent is not None and share is not None:
        raise DataError(
            f"{path} writes both {printable(percent)} and {printable(str(share))} in {name}; use one of them"
        )

    def numbered(value: Any) -> float:
        try:
            return number_of(value)
        except ValueError:
            raise DataError(
                f"{path} holds {printable(repr(value))[:60]} in {name}; use numbers, 0 and 1, or true and false"
            ) from None

    return numbered


def levels(column: Any, name: str, path: Path) -> tuple[list[Any], npt.NDArray[np.int64]]:
    """The distinct names in a column in ascending order, and each row's place among them, int64 [rows].

    Names that are all numbers are sorted as such, whole ones as integers. Raises DataError where a row has none, or
    where names are of several kinds.
    """
    given, codes = distinct_values(column, name, path)
    values = _named(given)
    absent = np.array([*(value is None for value in values), True])
    num_absent = int(np.count_nonzero(absent[codes]))
    if num_absent:
        raise DataError(f"{path} has {num_absent:,} rows without a value of {name!r}; fill them in")
    try:
        ordered = sorted(set(values))
    except TypeError:
        raise DataError(f"{path} mixes kinds of values in the column {name!r}; use one") from None
    rank = {value: place for place, value in enumerate(ordered)}
    return ordered, np.array([*(rank[value] for value in values), 0], np.int64)[codes]


def _named(values: Sequence[Any]) -> list[Any]:
    """Names without spaces around them, as numbers where all are; None for what is not there.

    NA, None and the like are names among names, and nothing among numbers.
    """
    found = [value.strip() if isinstance(value, str) else value for value in values]
    there = [value for value in found if not is_nothing(value)]
    if not any(isinstance(value, str) for value in there):
        return [None if is_nothing(value) else _whole(value) for value in found]
    if all(isinstance(value, str) and _NUMBER.fullmatch(value.lower()) for value in there):
        as_numbers = {value: _whole(int(value) if value.lstrip("+-").isdecimal() else float(value)) for value in there}
        different = set(there) if any(map(_IS_PADDED.match, there)) else set(map(Decimal, there))
        if len(set(as_numbers.values())) == len(different):  # 1 is 1.0, but 7 is not 007
            return [as_numbers.get(value) for value in found]
    return [
        None if value in (None, "") or (isinstance(value, float) and math.isnan(value)) else value for value in found
    ]


def _whole(value: Any) -> Any:
    """4.0 as 4: pandas turns integers to floats where some row lacks one."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def is_not_ok(column: Any, path: Path) -> tuple[npt.NDArray[np.bool_], int]:
    """Where a column of states is neither ok nor 0, bool [rows], and how many rows say nothing, which are ok.

    Raises DataError for a column of true and false, which may mean either.
    """
    values, codes = distinct_values(column, "state", path)
    if any(isinstance(value, bool) or str(value).strip().lower() in _TRUE | _FALSE for value in values):
        raise DataError(f"{path} holds true and false in the column state; write ok (or 0) where there is an answer")
    nothing = np.array([*map(is_nothing, values), True])
    wrong = np.array([*(not (is_nothing(value) or _is_ok(value)) for value in values), False])
    return wrong[codes], int(np.count_nonzero(nothing[codes]))


def is_word(column: Any, word: str, path: Path) -> npt.NDArray[np.bool_]:
    """Where a column of states is `word`, bool [rows]."""
    values, codes = distinct_values(column, "state", path)
    return np.array([*(isinstance(value, str) and value.strip().lower() == word for value in values), False])[codes]


def _is_ok(value: Any) -> bool:
    if isinstance(value, str) and value.strip().lower() == "ok":
        return True
    try:
        return number_of(value) == 0
    except ValueError:
        return False
