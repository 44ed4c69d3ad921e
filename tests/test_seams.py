"""Queries and continuations after texts that end alike are tokenised once; ids are those of each whole text."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_shared_text import Small, tokenizer
from zoo import ZOO

from iclperm.demo import model_path
from iclperm.engine import Engine, Node, Session, seams

DEMONSTRATIONS = [f"Article: {word} prices rose again.\nAnswer: {label}\n\n" for word in ("Oil", "Tin", "Tea", "Rye")
                  for label in ("World", "Sports", "Business")]  # fmt: skip
QUERIES = ["Article: The cup final.\nAnswer:", "Article: A phone.\nAnswer:"]
LABELS = [" World", " Sports", " Business now"]
pieces = st.text(st.sampled_from("ab \n.:é"), max_size=6)


@pytest.fixture(scope="module")
def bundled() -> Engine:
    return Engine.from_pretrained(model_path())


def expected(engine: Engine, text: str, labels: list[str]) -> list[list[int]]:
    """The ids that are fed and scored, for each label."""
    return [engine.tokenizer(text + label)["input_ids"] for label in labels]


def asked(session: Session, node: Node, query: str, labels: list[str]) -> list[list[int]]:
    requests, tree = session._requests(node, query, labels), session._tree
    return [[*tree.ids_of(one.path[: one.places[0] + 1]).tolist(), *one.ids.tolist()] for one in requests]


def test_what_was_asked_after_one_ending_is_known_after_all_that_end_so(bundled: Engine) -> None:
    with bundled.session() as session:
        nodes = [session.extend(None, DEMONSTRATIONS[n] + DEMONSTRATIONS[n - 3]) for n in range(12)]
        scores = session.score(nodes, QUERIES, LABELS)
        assert np.array_equal(scores, bundled.score([node.text for node in nodes], QUERIES, LABELS))
        assert session._seams._num_used == 9 * len(QUERIES)  # three endings, each once unknown
        shared = session._shared
        assert shared is not None
        for _ in range(8):  # the first uses are tokenised all the same
            session.score(nodes, QUERIES, LABELS)
        before = shared.num_characters
        assert np.array_equal(session.score(nodes[:2], QUERIES, LABELS), scores[:2])
        assert shared.num_characters == before
        assert bundled.report.tokens_forwarded == 0


@given(st.lists(pieces, min_size=1, max_size=5), pieces, pieces)
@settings(deadline=None, max_examples=40)
def test_ids_are_those_of_the_whole_text_however_it_ends(bundled: Engine, texts: list[str], query: str, tail: str):
    labels = [" World", "b", tail + "a"]
    with bundled.session() as session:
        session._seams._num_used = 1000  # none is made again from the whole text
        for text in [*texts, *texts]:
            node = session.extend(None, "Some words before: " + text)
            assert asked(session, node, query, labels) == expected(bundled, node.text + query, labels)


def test_an_ending_that_tells_too_little_is_found_out(bundled: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seams, "tail", lambda text: "")
    with bundled.session() as session:
        for text in ("Answer:\n", "Answer: ", "Answer: Wor"):
            node = session.extend(None, text)
            assert asked(session, node, "World", [" Sports"]) == expected(bundled, text + "World", [" Sports"])
        assert not session._seams._is_known
        assert all(text in ("Answer: ", "Answer: Wor") for text, *_ in session._seams._joined)


def test_where_no_seam_is_bounded_only_the_same_text_is_known() -> None:
    engine = Engine(ZOO["llama"].build(), Small(tokenizer("one piece")), self_check=False)
    with engine.session() as session:
        one, other = (session.extend(None, text * 20) for text in DEMONSTRATIONS[:2])
        session.score([one], QUERIES, LABELS)
        first = session.num_whole_texts
        assert first > 0
        session.score([one], QUERIES, LABELS)
        assert session.num_whole_texts == first
        session.score([other], QUERIES, LABELS)
        assert session.num_whole_texts > first
