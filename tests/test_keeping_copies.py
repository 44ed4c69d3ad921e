"""Second copies of weights: when one is made, taken up again, and given back; of products that are none."""

import weakref
from collections.abc import Iterator
from itertools import accumulate, repeat
from typing import NoReturn

import pytest
import torch

from iclperm.engine.kernels.packed_weights import CHECKED_ROWS, PACKED_ROWS, Key, PackedWeights


class Drawn:
    """A matrix of one number, and all copies of it that are still there."""

    def __init__(self, name: str = "weight") -> None:
        self.packed_key: Key | None = (name,)
        self.keeps_bits_packed = True
        self.number = 1.0
        self.num_read = 0
        self.copies = weakref.WeakSet[torch.Tensor]()
        self.there_before: list[int] = []

    def numbers(self) -> Key:
        self.num_read += 1
        return (self.number,)

    def packed(self) -> torch.Tensor:
        self.there_before.append(len(self.copies))
        copy = torch.tensor([self.number])
        self.copies.add(copy)
        return copy


@pytest.fixture
def copied() -> PackedWeights:
    found = PackedWeights()
    found.is_on = True
    found.begin("a condition")
    return found


def rows_until_a_copy(copied: PackedWeights, product: Drawn, step: int = 64) -> int:
    """That met the product in this unit of work when it had a copy first."""
    of_unit: Iterator[int] = accumulate(repeat(step, 2 * PACKED_ROWS // step))
    return next(rows for rows in of_unit if copied.of(product, step) is not None)


def test_none_is_made_unless_it_is_asked_for() -> None:
    assert not PackedWeights().is_on


def test_rows_are_those_of_the_docs() -> None:
    assert (CHECKED_ROWS, PACKED_ROWS) == (256, 2048)  # docs/engine.md


def test_one_is_made_of_many_rows_and_stays_for_the_unit(copied: PackedWeights) -> None:
    product = Drawn()
    assert rows_until_a_copy(copied, product) == PACKED_ROWS
    copy = copied.of(product, 1)
    assert copy is not None
    assert copied.of(product, 1) is copy
    assert len(product.there_before) == product.num_read == 1


def test_each_matrix_counts_its_own_rows(copied: PackedWeights) -> None:
    one, other = Drawn("one"), Drawn("other")
    assert copied.of(one, PACKED_ROWS - 1) is None
    assert copied.of(other, PACKED_ROWS - 1) is None
    assert (copy := copied.of(one, 1)) is not None
    assert (others := copied.of(other, 1)) is not None
    assert others is not copy


@pytest.mark.parametrize("between", ["end", "begin"])
def test_the_next_unit_takes_it_up_sooner_once_its_numbers_are_read(copied: PackedWeights, between: str) -> None:
    product = Drawn()
    rows_until_a_copy(copied, product)
    copy = copied.of(product, 1)
    copied.end() if between == "end" else copied.begin("a condition")
    assert product.num_read == 1
    assert rows_until_a_copy(copied, product) == CHECKED_ROWS
    assert copied.of(product, 1) is copy
    assert (product.num_read, len(product.there_before)) == (2, 1)


def test_of_other_numbers_it_is_given_back_before_one_is_made_anew(copied: PackedWeights) -> None:
    product = Drawn()
    rows_until_a_copy(copied, product)
    copied.end()
    product.number = 2.0
    assert rows_until_a_copy(copied, product) == PACKED_ROWS, "as if there were none"
    assert product.there_before == [0, 0], "both would be there at once"
    copy = copied.of(product, 1)
    assert copy is not None
    assert copy.item() == product.number


def test_of_other_numbers_it_alone_is_given_back(copied: PackedWeights) -> None:
    one, other = Drawn("one"), Drawn("other")
    for product in (one, other):
        rows_until_a_copy(copied, product)
    copied.end()
    one.number = 2.0
    assert rows_until_a_copy(copied, one) == PACKED_ROWS
    assert rows_until_a_copy(copied, other) == CHECKED_ROWS


def test_another_condition_gives_all_back(copied: PackedWeights) -> None:
    products = [Drawn("one"), Drawn("other")]
    for product in products:
        rows_until_a_copy(copied, product)
    copied.begin("another condition")
    assert not any(product.copies for product in products)
    assert rows_until_a_copy(copied, products[0]) == PACKED_ROWS


@pytest.mark.parametrize("is_in_use", [True, False])
def test_given_up_there_are_none_and_none_is_made(copied: PackedWeights, is_in_use: bool) -> None:
    product = Drawn()
    assert not copied.give_up(), "none took any memory"
    copied.is_on = True
    rows_until_a_copy(copied, product)
    if not is_in_use:
        copied.end()
    assert copied.give_up()
    assert not product.copies
    assert copied.of(product, 2 * PACKED_ROWS) is None
    assert not copied.give_up()
    assert len(product.there_before) == 1


@pytest.mark.parametrize("why", ["off", "no key", "other bits"])
def test_none_is_made_of_what_has_to_do_without(copied: PackedWeights, why: str) -> None:
    product = Drawn()
    copied.is_on = why != "off"
    product.packed_key = None if why == "no key" else product.packed_key
    product.keeps_bits_packed = why != "other bits"
    assert copied.of(product, 2 * PACKED_ROWS) is None
    assert copied.of(product, 2 * PACKED_ROWS) is None
    assert not product.there_before
    assert not copied.give_up()


NO_MEMORY = [
    MemoryError(),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"),
]


@pytest.mark.parametrize("error", NO_MEMORY, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("where", ["packed", "numbers", "keeps_bits_packed"])
def test_without_memory_for_one_there_is_none_in_the_unit(
    copied: PackedWeights, monkeypatch: pytest.MonkeyPatch, error: Exception, where: str
) -> None:
    product, asked = Drawn(), []

    def no_memory(*_: object) -> NoReturn:
        asked.append(True)
        raise error

    with monkeypatch.context() as patch:
        if where == "keeps_bits_packed":
            patch.delattr(product, where)
            patch.setattr(Drawn, where, property(no_memory), raising=False)
        else:
            patch.setattr(product, where, no_memory)
        assert copied.of(product, PACKED_ROWS) is None
        assert copied.of(product, PACKED_ROWS) is None
    assert len(asked) == 1
    copied.end()
    assert rows_until_a_copy(copied, product) == PACKED_ROWS


def test_any_other_failure_is_raised(copied: PackedWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    product = Drawn()

    def fails() -> torch.Tensor:
        raise RuntimeError("could not create a primitive")

    monkeypatch.setattr(product, "packed", fails)
    with pytest.raises(RuntimeError, match="could not create a primitive"):
        copied.of(product, PACKED_ROWS)
