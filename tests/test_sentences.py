"""The first sentence of a text: whole, and no more of it, whatever abbreviations stand in it."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iclperm.tasks.sentences import first_sentence

CASES = [  # what is one sentence, and what follows it
    ("The U.S. Open begins in New York.", "It ends on Sunday."),
    ("He moved to the U.S.", "The family stayed."),
    ("Acme Inc. said on Monday that it had no plans.", "Its shares fell."),
    ("Shares of Acme Corp.", "It was the first fall."),
    ("Mr. and Mrs. Smith met Dr. J. R. Jones, Sen. Lee and Gen. Fox.", "They talked."),
    ("It is John F. Kennedy Jr. Airport that was meant.", "No other."),
    ("They met at 5 p.m. Monday in St. Louis, Mo.", "In the morning nobody came."),
    ("ROYAL OAK, Mich. - Like any patient she waits.", "She hopes."),
    ("Prices rose 2.5 percent, to $1.20 a share.", "Analysts had expected 3."),
    ("Prices rose by 2.5.", "Analysts had expected 3."),
    ("On Sept. 11, 2001, two planes came.", "Everybody saw it."),
    ("He fell ill.", "Officials said nothing."),
    ("They mine ore.", "Workers live nearby."),
    ("It is No. 7 of ten.", "Number 8 follows."),
    ("She said no.", "He said yes."),
    ("Was it he?", "Nobody knows."),
    ('"Why?" she asked him.', "He was silent."),
    ('"Go away!"', "He went."),
    ('He called it "a great day."', "Others disagreed."),
    ("(It was late.)", "They slept."),
    ("It was . . . late . . . and dark.", "They slept."),
    ("Well ... it was late.", "They slept."),
    ("See www.example.com.", "Others did."),
    ("1. The first of all comes here.", "2. The second."),
    ("apple inc. and mr. smith met in the u.s. senate today.", "the talks went on."),
    ("I think that it was I.", "Others think so, too."),
    ("They voted for George W. Bush.", "Others did not."),
    ("The post-Sept. 11 world, on p. 12 of it, was J. P. Fox's.", "Nobody asked."),
    ("The firm, E. I. du Pont de Nemours & Co., was sold.", "Nobody said to whom."),
]


@pytest.mark.parametrize(("first", "rest"), CASES)
def test_a_sentence_is_whole_and_alone(first: str, rest: str) -> None:
    assert first_sentence(f" {first} {rest}\n") == first
    assert first_sentence(first) == first
    assert first_sentence(f"{first}\n{rest}") == first


def test_a_blank_line_ends_a_sentence() -> None:
    assert first_sentence("A headline\n \nThe text. And more.") == "A headline"
    assert [first_sentence(text) for text in ("", " \n", "no end", "...")] == ["", "", "no end", "..."]


@given(st.text() | st.text("aA1.?!'\" \n()Mr"))
def test_it_is_the_beginning_of_any_text(text: str) -> None:
    found = first_sentence(text)
    assert text.strip().startswith(found)
    assert bool(found) == bool(text.strip())


@pytest.mark.parametrize("text", ["." * 200_000 + "x", "U.S. " * 40_000, "'" * 100_000 + ". x", "\n" + " " * 200_000])
def test_it_takes_a_time_that_grows_with_the_text(text: str) -> None:
    begin = time.process_time()
    assert len(first_sentence(text)) <= len(text)
    assert time.process_time() - begin < 5  # a fortieth of it here; with the square of the length, hours
