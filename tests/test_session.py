"""Sessions: every token forwarded once, and the bits of `Engine.score` in any order, company, eviction and budget."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_shared_text import Small, tokenizer
from transformers import AutoTokenizer
from zoo import VOCAB, ZOO

from iclperm.demo import model_path
from iclperm.engine import Engine, Node, Session
from iclperm.engine.growing_tree import GrowingTree
from iclperm.engine.model import TreeModel
from iclperm.engine.token_rows import TokenRows
from iclperm.errors import RequestError
from iclperm.reference import scoring

LABELS = [[3], [4, 5], [4, 6, 7]]


def ids(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, count).tolist()


CONTEXTS = [ids(1, 30), ids(1, 30)[:17] + ids(2, 9), ids(3, 12), ids(1, 30) + ids(4, 6)]
QUERIES = [ids(5, 6), ids(5, 6)[:3] + ids(6, 4), ids(7, 1)]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(ZOO["llama"].build())


@pytest.fixture(scope="module")
def bundled() -> Engine:
    return Engine.from_pretrained(model_path())


def slots(engine: Engine, count: int) -> int:
    return count * engine._model.facts.session_token_bytes


@pytest.mark.parametrize("name", ["llama", "qwen2-window", "gemma2", "gemma3", "gpt2", "phi3"])
def test_a_session_answers_as_the_engine_does(name: str) -> None:
    engine = Engine(ZOO[name].build())
    expected = engine.score(CONTEXTS, QUERIES, LABELS)
    distinct = engine.report.tokens_unique
    assert engine.row_invariant
    with engine.session() as session:
        nodes = [session.extend(None, context) for context in CONTEXTS]
        assert session.num_resident == 0, "a node forwards nothing"
        assert np.array_equal(session.score(nodes, QUERIES, LABELS), expected)
        assert engine.report.tokens_forwarded == distinct == session.num_tokens == session.num_resident
        again = session.score(nodes[::-1], QUERIES[::-1], LABELS)
        assert np.array_equal(again, expected[::-1, ::-1])
        assert engine.report.tokens_forwarded == 0, "what was known was forwarded again"


@given(
    order=st.permutations([(c, q) for c in range(len(CONTEXTS)) for q in range(len(QUERIES))]),
    room=st.sampled_from([48, 60, 90, 1000]),
    pack=st.sampled_from([8, 24, 4096]),
    cuts=st.lists(st.integers(1, 29), max_size=3),
)
@settings(max_examples=25)
def test_in_any_order_budget_and_pack_the_bits_are_the_same(
    engine: Engine, order: list[tuple[int, int]], room: int, pack: int, cuts: list[int]
) -> None:
    expected = engine.score(CONTEXTS, QUERIES, LABELS)
    with engine.session(memory_budget=slots(engine, room)) as session:
        session._pack_tokens = pack
        for c, q in order:
            node = None
            for begin, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(CONTEXTS[c])], strict=True):
                node = session.extend(node, CONTEXTS[c][begin:end])
            assert isinstance(node, Node)
            assert np.array_equal(session.score([node], [QUERIES[q]], LABELS)[0, 0], expected[c, q])
            assert session.num_resident <= room
        assert (session.num_evicted > 0) == (room < session.num_tokens)


def test_loops_forward_each_distinct_token_once(engine: Engine) -> None:
    """A bandit over orderings, a context grown piece by piece, one context and many queries, all one at a time."""
    rng = np.random.default_rng(0)
    pieces = [ids(100 + n, 12) for n in range(6)]
    queries = [ids(5, 3) + ids(200 + n, 8) for n in range(40)]
    for loop in ("bandit", "grown", "queries"):
        forwarded = 0
        with engine.session() as session:
            grown: Node | None = None
            for step in range(40):
                if loop == "bandit":
                    node = None
                    for piece in np.random.default_rng(int(rng.integers(8))).permutation(6):
                        node = session.extend(node, pieces[piece])
                elif loop == "grown":
                    node = grown = session.extend(grown, ids(300 + step, 4))
                else:
                    node = session.extend(None, [token for piece in pieces for token in piece])
                assert node is not None
                session.score([node], [queries[step]], [[3], [4], [5]])
                forwarded += engine.report.tokens_forwarded
            assert forwarded == session.num_tokens, loop


def test_equal_extensions_are_one_node(engine: Engine) -> None:
    with engine.session() as session:
        whole = session.extend(None, CONTEXTS[0])
        parts = session.extend(session.extend(None, CONTEXTS[0][:7]), CONTEXTS[0][7:])
        assert whole == parts
        assert hash(whole) == hash(parts)
        assert len(whole) == len(CONTEXTS[0])
        assert session.num_tokens == len(CONTEXTS[0])
        assert session.extend(whole, []) == whole


def test_what_is_released_makes_room_and_is_computed_again(engine: Engine) -> None:
    with engine.session() as session:
        node, other = session.extend(None, CONTEXTS[0]), session.extend(None, CONTEXTS[1])
        first = session.score([node, other], QUERIES[:1], LABELS)
        session.generate([node], 3)
        session.release(node)
        ends = len(QUERIES[0]) + max(map(len, LABELS)) - 1
        assert len(CONTEXTS[1]) < session.num_resident <= len(CONTEXTS[1]) + ends + 2, (
            "the other stands on the same beginning"
        )
        session.release(other)
        assert session.num_resident == 0
        assert np.array_equal(session.score([node, other], QUERIES[:1], LABELS), first)
        session.release(session.extend(None, CONTEXTS[0][:17]))
        assert session.num_resident == 0, "both go on from there"
        assert np.array_equal(session.score([node, other], QUERIES[:1], LABELS), first)
        session.forget()
        assert session.num_resident == 0
        assert np.array_equal(session.score([node, other], QUERIES[:1], LABELS), first)


def test_keys_of_a_model_that_was_changed_are_computed_again() -> None:
    engine = Engine(ZOO["llama"].build())
    layer = engine.model.get_decoder().layers[1]

    def fresh() -> Any:
        with engine.session() as other:
            return other.score([other.extend(None, CONTEXTS[0])], QUERIES, LABELS)

    with engine.session() as session:
        node = session.extend(None, CONTEXTS[0])
        clean = session.score([node], QUERIES, LABELS)
        handle = layer.register_forward_hook(lambda _, __, out: out * 1.5)
        assert np.array_equal(session.score([node], QUERIES, LABELS), fresh())
        assert not np.allclose(fresh(), clean)
        handle.remove()
        assert np.array_equal(session.score([node], QUERIES, LABELS), clean)
        assert session.num_resident == engine.report.tokens_forwarded
        with torch.no_grad():
            layer.mlp.down_proj.weight.mul_(1.5)
        assert np.array_equal(session.score([node], QUERIES, LABELS), fresh())
        layer.mlp.down_proj.weight = torch.nn.Parameter(layer.mlp.down_proj.weight.detach() / 1.5)
        assert np.array_equal(session.score([node], QUERIES, LABELS), fresh())
        layer.mlp.down_proj.weight.data.mul_(1.5)  # which torch does not notice
        session.forget()
        assert np.array_equal(session.score([node], QUERIES, LABELS), fresh())
        # The first layer's queries, keys and values are kept by token id.
        first = engine.model.get_decoder().layers[0]
        embedding = engine.model.get_input_embeddings()
        for weight in (first.self_attn.v_proj.weight, first.input_layernorm.weight, embedding.weight):
            before = session.score([node], QUERIES, LABELS)
            with torch.no_grad():
                weight.mul_(1.5)
            assert np.array_equal(session.score([node], QUERIES, LABELS), fresh())
            assert not np.allclose(before, fresh())
        first.self_attn.v_proj.weight.data.mul_(2)
        session.forget()
        assert np.array_equal(session.score([node], QUERIES, LABELS), fresh())


def test_a_pass_that_fails_within_the_first_layer_leaves_no_rows_that_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(ZOO["llama"].build())
    expected = engine.score(CONTEXTS[:1], QUERIES[:1], LABELS)
    fill = TokenRows.fill
    with engine.session() as session:
        node = session.extend(None, CONTEXTS[0])
        for error in (RuntimeError, KeyboardInterrupt):

            def failing(*_: Any, error: type[BaseException] = error) -> None:
                raise error

            monkeypatch.setattr(TokenRows, "fill", failing)
            with pytest.raises(error):
                session.score([node], QUERIES[:1], LABELS)
            monkeypatch.setattr(TokenRows, "fill", fill)
            assert np.array_equal(session.score([node], QUERIES[:1], LABELS), expected)
            session.forget()


def test_weights_that_change_between_blocks_are_honoured_from_then_on() -> None:
    engine, changed = (Engine(ZOO["llama"].build(), unit_tokens=40, pack_tokens=32) for _ in range(2))
    after = changed.model.get_decoder().layers[0].self_attn.v_proj.weight
    before = {tuple(block.contexts): block.logprob for block in changed.stream(CONTEXTS, QUERIES, LABELS)}
    with torch.no_grad():
        after.mul_(1.5)
    then = {tuple(block.contexts): block.logprob for block in changed.stream(CONTEXTS, QUERIES, LABELS)}
    assert len(before) > 1
    blocks = engine.stream(CONTEXTS, QUERIES, LABELS)
    first = next(blocks)
    assert np.array_equal(first.logprob, before[tuple(first.contexts)])
    with torch.no_grad():
        engine.model.get_decoder().layers[0].self_attn.v_proj.weight.mul_(1.5)
    for block in blocks:
        assert np.array_equal(block.logprob, then[tuple(block.contexts)])


def test_a_node_is_of_one_session(engine: Engine) -> None:
    with engine.session() as session, engine.session() as other:
        node, foreign = session.extend(None, [5, 6, 7]), other.extend(None, [5, 6, 7])
        assert node != foreign
        for call in (
            lambda: session.extend(foreign, [3]),
            lambda: session.score([node, foreign], QUERIES, LABELS),
            lambda: session.loglikelihood([(foreign, [3])]),
            lambda: session.loglikelihood_rolling([foreign]),
            lambda: session.next_token([foreign]),
            lambda: session.next_token_logprobs([foreign]),
            lambda: session.hidden_states([foreign]),
            lambda: session.generate([foreign], 2),
            lambda: session.release(foreign),
        ):
            with pytest.raises(RequestError, match=r"^Node\(3 tokens\) is of another session; extend it in this one$"):
                call()


def test_any_iterable_is_a_list_and_one_text_is_none(bundled: Engine) -> None:
    labels = [" World", " Sports"]
    with bundled.session() as session:
        node = session.extend(None, TEXTS[0])
        for call in (
            lambda wrap: bundled.loglikelihood(wrap([("A:", " b")])).logprob,
            lambda wrap: bundled.loglikelihood_rolling(wrap(["A: b"])).logprob,
            lambda wrap: bundled.score(wrap(["A: b"]), wrap(["C:"]), wrap(labels)),
            lambda wrap: bundled.generate(wrap(["A: b"]), 2).logprob,
            lambda wrap: session.score(wrap([node]), wrap(["C:"]), wrap(labels)),
            lambda wrap: session.loglikelihood(wrap([(node, " b")])).logprob,
            lambda wrap: session.loglikelihood_rolling(wrap([node])).logprob,
            lambda wrap: session.next_token(wrap([node])).logprob,
            lambda wrap: session.next_token_logprobs(wrap([node])).numpy(),
            lambda wrap: session.hidden_states(wrap([node]), wrap([0])).numpy(),
            lambda wrap: session.generate(wrap([node]), 2).logprob,
        ):
            expected = call(list)
            assert expected.size
            assert np.array_equal(call(iter), expected)
        for wrong, said in (
            (lambda: bundled.loglikelihood_rolling("text"), "a list of texts is needed, not the text 'text'"),
            (lambda: bundled.score("ab", ["c"], labels), "a list of contexts is needed, not the text 'ab'"),
            (lambda: bundled.score(["ab"], "c", labels), "a list of queries is needed, not the text 'c'"),
            (lambda: bundled.score(["ab"], ["c"], "d"), "a list of continuations is needed, not the text 'd'"),
            (lambda: bundled.loglikelihood(["A:", "B:"]), "request 0 is the text 'A:'; give .context, continuation."),
            (lambda: session.next_token(node), r"a list of nodes is needed, not Node\("),
            (lambda: session.next_token([None]), "a node is needed, not None; make one with session.extend"),
            (lambda: session.score(["Hello"], ["c"], labels), "a node is needed, not the text 'Hello'"),
            (lambda: session.score([node], ["c"], {"a": 1}), "a list of continuations is needed, not {'a': 1}"),
            (
                lambda: session.loglikelihood([(node, "x", "y")]),
                r"request 0 is \(Node\(.*; give \(node, cont",
            ),
            (lambda: session.extend(node, None), "a list of token ids is needed, not None"),
        ):
            with pytest.raises(RequestError, match=said):
                wrong()
        assert session.score([node], ["c"], []).shape == (1, 1, 0)


def test_what_a_session_took_is_counted(engine: Engine) -> None:
    with engine.session() as session:
        node = session.extend(None, CONTEXTS[0])
        session.next_token([node])
        session.generate([node], 4)
        assert session.totals.tokens_forwarded == session.num_resident
        assert session.totals.tokens_generated > 0
        assert session.totals.seconds["total"] > 0


def test_a_model_without_numbers_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(ZOO["llama"].build(), self_check=False)
    with engine.session() as session:
        nodes = [session.extend(None, context) for context in CONTEXTS[:2]]
        monkeypatch.setattr(
            TreeModel, "log_probabilities", lambda self, hidden: torch.tensor([[float("nan")] * VOCAB] * len(hidden))
        )
        found = session.next_token(nodes, top=2)
    assert found.state.tolist() == [1, 1]
    assert (found.ids == -1).all()
    assert np.isnan(found.logprob).all()


def test_a_failed_pass_leaves_no_keys_that_are_none(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = engine.score(CONTEXTS[:1], QUERIES[:1], LABELS)
    run = TreeModel.run
    with engine.session() as session:
        node = session.extend(None, CONTEXTS[0])
        for error in (KeyboardInterrupt, RuntimeError):

            def failing(*_: Any, error: type[BaseException] = error) -> torch.Tensor:
                raise error

            monkeypatch.setattr(TreeModel, "run", failing)
            with pytest.raises(error):
                session.score([node], QUERIES[:1], LABELS)
            assert session.num_resident == 0
        monkeypatch.setattr(TreeModel, "run", run)
        assert np.array_equal(session.score([node], QUERIES[:1], LABELS), expected)


def test_the_next_tokens_are_those_of_the_model(engine: Engine) -> None:
    with engine.session() as session:
        nodes = [session.extend(None, context) for context in CONTEXTS]
        found = session.next_token(nodes, top=5)
        for node, context in enumerate(CONTEXTS):
            expected = scoring.next_token_logprobs(engine.model, context)
            best = np.argsort(-expected)[:5]
            assert found.ids[node].tolist() == best.tolist()
            assert np.abs(found.logprob[node] - expected[best]).max() < 1e-4
        assert session.next_token(nodes[:1], top=VOCAB).ids.shape == (1, VOCAB)


TEXTS = ["Article: Oil prices rose on Monday, traders said.\nAnswer: Business\n\n", "Article: Rain.\nAnswer: World\n\n"]


def test_text_has_the_ids_of_the_whole(bundled: Engine) -> None:
    """Also where a seam merges: the child then hangs beside its parent."""
    with bundled.session() as session:
        node, text = None, ""
        for piece in [*TEXTS * 4, "Article: Shar", "es fell", ".\nAns", "wer:", " ", "World", "\n", "\n"]:
            node, text = session.extend(node, piece), text + piece
            assert session.ids_of(node).tolist() == bundled.tokenizer(text)["input_ids"]
        assert session.num_whole_texts == 0
        assert session._shared is not None
        before = session._shared.num_characters  # the first texts were read whole besides
        for _ in range(20):
            node = session.extend(node, TEXTS[1])
        assert session._shared.num_characters - before < 20 * 300


def test_text_is_scored_as_the_engine_does(bundled: Engine) -> None:
    queries, labels = (
        ["Article: Rain again.\nAnswer:", "Article: The cup.\nAnswer:"],
        [" World", " Sports", " Business now"],
    )
    with bundled.session() as session:
        first = session.extend(None, TEXTS[0])
        nodes = [first, session.extend(first, TEXTS[1])]
        expected = bundled.score([node.text for node in nodes], queries, labels)
        assert np.array_equal(session.score(nodes, queries, labels), expected)
        for n, node in enumerate(nodes):
            for q, query in enumerate(queries):
                assert np.array_equal(session.score([node], [query], labels)[0, 0], expected[n, q])


def test_where_a_tokenizer_bounds_no_seam_texts_are_read_whole_and_counted() -> None:
    engine = Engine(ZOO["llama"].build(), Small(tokenizer("one piece")), self_check=False)
    with engine.session() as session:
        node = session.extend(None, "".join(TEXTS * 5))
        assert session.num_whole_texts == 0
        session.extend(node, TEXTS[0])
        assert session.num_whole_texts == 1


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda s, n: s.extend(n, "text"), "a node of token ids is extended by token ids"),
        (lambda s, n: s.score([s.extend(n, [3])], ["text"], [" x"]), "text is scored after nodes of text"),
        (lambda s, n: s.extend(None, [VOCAB]), f"token id {VOCAB} is out of range"),
        (lambda s, n: s.extend(None, [3] * 10_000), "over the model's context window"),
        (lambda s, n: s.score([n], [[3]], [[]]), "a continuation has no tokens of its own"),
        (lambda s, n: s.score([n], ["text"], [[3]]), "query 'text' is text beside token ids"),
        (
            lambda s, n: s.score([n], [[3], None], [[3]]),
            r"query 1 is None; give text or a list of token ids, '' for none",
        ),
        (lambda s, n: s.score([n], [float("nan")], [[3]]), "query 0 is nan; give text or a list of token ids"),
        (
            lambda s, n: s.loglikelihood([(n, [3]), (n, [])]),
            "the continuation of request 1 is empty; give at least one",
        ),
        (lambda s, n: s.loglikelihood([(n, None)]), "of request 0 continuation 0 is None; give text or a list"),
        (lambda s, n: s.loglikelihood([(n, "text")]), "text is scored after nodes of text"),
        (lambda s, n: s.next_token([n], top=0.5), "top is 0.5; give 1 to"),
        (lambda s, n: s.hidden_states([n], layers=["a"]), "layer a is not there: the model's are 0"),
        (lambda s, n: s.generate([n], stop=5), "stop is 5; give a text, or a list of texts"),
        (lambda s, n: s.next_token([n], progress=3), "progress is 3; give a function"),
        (lambda s, n: s.extend(None, b"text"), "decode bytes to text"),
        (lambda s, n: s.loglikelihood([(s.extend(None, []), [3])]), "a continuation needs a token before it"),
        (lambda s, n: s.loglikelihood([(s.extend(None, [3] * 60), [3])]), "has no room in the session's memory"),
        (lambda s, n: (s.close(), s.next_token([n])), "the session, or its engine, is closed"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(engine: Engine, wrong: Any, said: str) -> None:
    with engine.session(memory_budget=slots(engine, 50)) as session, pytest.raises(RequestError, match=said) as told:
        wrong(session, session.extend(None, CONTEXTS[2]))
    assert "\n" not in str(told.value)


def test_sessions_are_for_the_tree() -> None:
    with pytest.raises(RequestError, match="a session needs the prefix tree"):
        Engine(ZOO["llama"].build(), plain=True).session()
    assert isinstance(Engine(ZOO["llama"].build()).session(), Session)


def test_what_a_pack_computed_stays_when_progress_ends_the_call_after_it(engine: Engine) -> None:
    expected = engine.score(CONTEXTS[:1], QUERIES[:1], LABELS)

    def stop(*_: int) -> None:
        raise KeyError("stop")

    for pack, resident in ((4096, None), (8, 8)):
        with engine.session() as session:
            session._pack_tokens = pack
            node = session.extend(None, CONTEXTS[0])
            with pytest.raises(KeyError):
                session.score([node], QUERIES[:1], LABELS, progress=stop)
            assert session.num_resident == engine.report.tokens_forwarded > 0
            assert resident in (None, session.num_resident)
            assert np.array_equal(session.score([node], QUERIES[:1], LABELS), expected)
            assert session.totals.tokens_forwarded == session.num_resident, "nothing was forwarded twice"


def test_what_a_held_node_needs_stays_when_another_is_released(engine: Engine) -> None:
    with engine.session() as session:
        base = session.extend(None, CONTEXTS[0])
        session.next_token([base])
        candidate = session.extend(base, [9, 9, 9])
        session.score([candidate], QUERIES[:1], LABELS)
        session.release(candidate)
        assert session.num_resident == len(base)
        session.next_token([base])
        assert engine.report.tokens_forwarded == 0
        # Two that begin alike, and the beginning is no node; what is not held any more needs nothing.
        other = session.extend(None, [*CONTEXTS[0][:20], 7, 7])
        session.release(base)
        assert session.num_resident == 20
        session.next_token([other])
        assert engine.report.tokens_forwarded == 2
        del other
        session.release(session.extend(base, [9]))
        assert session.num_resident == 22, "which was released, and asked for again"
        session.release(base)
        assert session.num_resident == 22, "what was asked goes on beneath the other beginning"
        session.release(session.extend(None, CONTEXTS[0][:20]))
        assert session.num_resident == 0


@pytest.mark.parametrize("name", ["score", "next_token", "extend", "release", "forget"])
def test_a_call_within_a_call_is_refused(engine: Engine, name: str) -> None:
    with engine.session(memory_budget=slots(engine, 60)) as session:
        node, other = session.extend(None, CONTEXTS[0]), session.extend(None, CONTEXTS[2])
        calls = {
            "score": lambda: session.score([other], QUERIES, LABELS),
            "next_token": lambda: session.next_token([other]),
            "extend": lambda: session.extend(other, [3]),
            "release": lambda: session.release(other),
            "forget": session.forget,
        }
        told: list[str] = []

        def within(*_: int) -> None:
            with pytest.raises(RequestError) as refused:
                calls[name]()
            told.append(str(refused.value))

        found = session.score([node], QUERIES, LABELS, progress=within)
        assert np.array_equal(found, engine.score(CONTEXTS[:1], QUERIES, LABELS))
        assert told[0].startswith("another call of this session runs now")
        assert "a lock, or open a session for each" in told[0]
        assert "\n" not in told[0]
        calls[name]()


def test_threads_on_one_session_are_refused_or_right(engine: Engine) -> None:
    contexts = [ids(seed, 30) for seed in range(30)]
    expected = engine.score(contexts, QUERIES[:1], LABELS)
    with engine.session(memory_budget=slots(engine, 100)) as session:
        inside, may_end = threading.Event(), threading.Event()

        def wait(*_: int) -> None:
            inside.set()
            assert may_end.wait(60)

        with ThreadPoolExecutor(1) as pool:
            held = pool.submit(session.score, [session.extend(None, contexts[0])], QUERIES[:1], LABELS, progress=wait)
            assert inside.wait(60)
            for verb in (lambda: session.extend(None, [3]), lambda: session.score([], QUERIES, LABELS)):
                with pytest.raises(RequestError, match="another call of this session runs now"):
                    verb()
            may_end.set()
            assert np.array_equal(held.result(60), expected[:1])

        def ask(number: int) -> Any:
            try:
                return session.score([session.extend(None, contexts[number])], QUERIES[:1], LABELS)
            except RequestError as refused:
                return str(refused)

        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(ask, range(len(contexts))))
        for answer, right in zip(found, expected, strict=True):
            if isinstance(answer, str):
                assert answer.startswith("another call")
            else:
                assert np.array_equal(answer[0], right)
        again = np.concatenate([ask(number) for number in range(len(contexts))])
        assert np.array_equal(again, expected)


def test_an_interrupt_leaves_a_session_free(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with engine.session() as session:
        node = session.extend(None, CONTEXTS[0])
        monkeypatch.setattr(TreeModel, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.next_token([node])
        monkeypatch.undo()
        session.next_token([node])


def test_a_session_that_is_closed_within_a_call_says_so(engine: Engine) -> None:
    session = engine.session()
    node = session.extend(None, CONTEXTS[0])
    with pytest.raises(RequestError, match="the session, or its engine, is closed; open another"):
        session.score([node], QUERIES, LABELS, progress=lambda *_: session.close())


def test_text_and_ids_are_not_mixed_up(bundled: Engine) -> None:
    with bundled.session() as session:
        text, tokens = session.extend(None, TEXTS[0]), session.extend(None, [5, 6, 7])
        for node, query in ((text, " q"), (tokens, [8])):
            for wrong in ([" World", [5, 6]], [[5, 6], " World"], [" World", b"x"]):
                with pytest.raises(RequestError, match=r"^continuations mix text and token ids; give all as one"):
                    session.score([node], [query], wrong)
            for nothing in (5, None):
                with pytest.raises(RequestError, match=f"^continuation 1 is {nothing}; give text or a list"):
                    session.score([node], [query], [" World", nothing])
            for wrong in (5, None, b"x", {3, 1}):
                with pytest.raises(RequestError) as told:
                    session.loglikelihood([(node, wrong)])
                assert "\n" not in str(told.value)
        for wrong in ([5], [None], [b"x"], [[[5, 6]], 3], [5, " World"]):
            with pytest.raises(RequestError):
                session.score([tokens], [[8]], wrong)
            with pytest.raises(RequestError):
                bundled.score([[5, 6, 7]], [[8]], wrong)
        for unordered in ({3, 1}, frozenset([3])):
            with pytest.raises(RequestError, match=r"a list of token ids is needed, and .* has no order; give a list"):
                session.extend(None, unordered)


def test_a_budget_that_is_over_all_memory_is_refused(engine: Engine) -> None:
    with pytest.raises(RequestError, match=r"^memory_budget is '500TiB', and cpu has .* GiB; give less, or a share$"):
        engine.session(memory_budget="500TiB")


@given(st.lists(st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=9), st.booleans()), max_size=30))
@settings(max_examples=60)
def test_a_growing_tree_keeps_whole_beginnings(steps: list[tuple[list[int], bool]]) -> None:
    """Whatever is held, evicted and released: slots are used once, and a token's ancestors are in the pool with it."""
    tree, known = GrowingTree(10), set[tuple[int, ...]]()
    for tokens, is_released in steps:
        path = tree.insert(np.empty(0, np.int64), np.array(tokens, np.int32))
        known.update(tuple(tokens[:n]) for n in range(1, len(tokens) + 1))
        assert len(tree) == len(known)
        assert tree.ids_of(path).tolist() == tokens
        missing = path[tree.slots_of(path) < 0]
        assert tree.hold(missing, [path])
        assert (tree.slots_of(path) >= 0).all()
        if is_released:
            tree.release(path)
        every = np.arange(1, len(tree) + 1)
        held = every[tree.slots_of(every) >= 0]
        assert len(set(tree.slots_of(held).tolist())) == held.size == tree.num_resident <= 10
        parents = tree._parent[held]
        assert ((parents == 0) | (tree.slots_of(parents) >= 0)).all()
    whole = tree.insert(np.empty(0, np.int64), np.arange(11, dtype=np.int32))
    assert not tree.hold(whole, [whole])


def test_the_bundled_tokenizer_cuts_texts() -> None:
    from iclperm.engine.shared_text import cuts_texts

    assert cuts_texts(AutoTokenizer.from_pretrained(model_path()))
    assert not cuts_texts(object())
