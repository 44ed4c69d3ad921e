"""The endpoint against a server that fails as it is told to: nothing is lost, paid for twice or scored wrong."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from email.utils import formatdate
from pathlib import Path

import pytest
from faulty_server import MODEL, FaultyServer, answer_to, faulty_server, prompt_of

from iclperm.endpoint import Endpoint, Ledger, Pace, Spent
from iclperm.endpoint.gate import Window, retry_after
from iclperm.endpoint.replies import is_version_of
from iclperm.errors import ConfigError, ModelError, RequestError, RunStopped

PACE = Pace(first_s=0.002, most_s=0.01)


@pytest.fixture
def ledger(tmp_path):
    with Ledger(tmp_path / "run") as ledger:
        yield ledger


def an_endpoint(server: FaultyServer, ledger: Ledger | None = None, **choices) -> Endpoint:
    choices = {"model": MODEL, "timeout_s": 5.0, "deadline_s": 20.0, **choices}
    return Endpoint(server.url, ledger=ledger, pace=PACE, **choices)


def prompts(count: int, context: str = "context") -> list[str]:
    return [f"{context} query {number}" for number in range(count)]


def test_replies_come_in_order_with_what_they_cost(ledger):
    with faulty_server() as server:
        endpoint = an_endpoint(server, ledger, prices={"input": 10.0, "cached_input": 1.0, "output": 100.0})
        groups = [prompts(5, "one"), prompts(3, "another")]
        replies = list(endpoint.generate_groups(groups, max_new_tokens=7))
    assert [[reply.text for reply in group] for group in replies] == [
        [answer_to(prompt) for prompt in group] for group in groups
    ]
    reply = replies[0][0]
    assert (reply.state, reply.finish, reply.draw, reply.prompt_tokens) == ("ok", "stop", 0, len(groups[0][0]))
    assert all(body["max_tokens"] == 7 and body["temperature"] == 0.0 for body in server.seen)
    tokens = sum(len(prompt) for group in groups for prompt in group)
    assert endpoint.report.spent == Spent(8, tokens, 8, 16)
    assert endpoint.report.cost == pytest.approx(((tokens - 8) * 10 + 8 * 1 + 16 * 100) / 1e6)
    assert endpoint.totals.spent == endpoint.report.spent == ledger.spent
    assert endpoint.served_as == MODEL


@pytest.mark.parametrize(
    ("fault", "lost"),
    [
        ("429", 0),
        ("429 after=0.05", 0),
        ("500", 0),
        ("503", 0),
        ("408", 0),
        ("stall", 1),
        ("cut", 1),
        ("break", 1),
        ("close", 1),
        ("garbage", 1),
        ("nothing", 1),
    ],
)
def test_what_passes_is_asked_again_and_nothing_is_lost(fault, lost, ledger):
    with faulty_server(["ok", fault, "ok", fault]) as server:
        endpoint = an_endpoint(server, ledger, timeout_s=0.5 if fault == "stall" else 5.0)
        replies = endpoint.generate(prompts(4))
    assert [reply.text for reply in replies] == [answer_to(prompt) for prompt in prompts(4)]
    assert set(server.paid.values()) == {1}
    assert len(server.seen) == 6
    assert (endpoint.report.num_retries, endpoint.report.num_lost) == (2, 2 * lost)
    assert len(ledger) == 4
    assert ledger.spent.requests == 4 + 2 * lost  # what may have been charged counts


def test_a_storm_of_faults_loses_and_doubles_nothing(tmp_path):
    storm = ["500", "429", "close", "cut", "garbage", "429 after=0.01", "503", "nothing", "break", "500"]
    groups = [prompts(6, f"context {number}") for number in range(6)]
    with faulty_server(storm * 3) as server:
        with Ledger(tmp_path) as ledger:
            replies = list(an_endpoint(server, ledger).generate_groups(groups))
        with Ledger(tmp_path) as ledger:
            again = an_endpoint(server, ledger)
            assert list(again.generate_groups(groups)) == replies
    assert [[reply.text for reply in group] for group in replies] == [[answer_to(each) for each in g] for g in groups]
    assert set(server.paid.values()) == {1}
    assert server.paid.total() == 36
    assert len(server.seen) == 36 + 30
    assert (again.report.num_reused, again.report.spent) == (36, Spent())


def test_a_rerun_pays_for_nothing_twice_also_for_duplicates_and_without_a_ledger(ledger):
    groups = [["first", *["same"] * 5], ["second", "same"], ["same"], ["same", "second"]]
    texts = [[answer_to(prompt) for prompt in group] for group in groups]
    with faulty_server(["slow 0.02"] * 100) as server:
        for endpoint in (an_endpoint(server, ledger), an_endpoint(server, None)):
            server.paid.clear()
            for _ in range(2):
                assert [[reply.text for reply in group] for group in endpoint.generate_groups(groups)] == texts
            assert server.paid == {"first": 1, "second": 1, "same": 1}
            assert (endpoint.report.num_reused, endpoint.report.spent) == (11, Spent())


def test_what_is_asked_differently_is_paid_for_anew(ledger):
    with faulty_server() as server:
        an_endpoint(server, ledger).generate(["same"])
        an_endpoint(server, ledger).generate(["same"], max_new_tokens=3)
        an_endpoint(server, ledger).generate(["same"], stop=["\n"])
        an_endpoint(server, ledger, temperature=0.5).generate(["same"])
        an_endpoint(server, ledger, extra={"seed": 1}).generate(["same"])
        an_endpoint(server, ledger, api="completions").generate(["same"])
        assert server.paid["same"] == 6
        replies = an_endpoint(server, ledger, draws=3).generate(["same"])
    assert server.paid["same"] == 8  # the first draw is there
    assert [reply.draw for reply in replies] == [0, 1, 2]


def test_messages_go_out_as_they_are(ledger):
    chat = [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2+2"},
    ]
    with faulty_server() as server:
        assert an_endpoint(server, ledger).generate([chat, "3+3"])[0].text == answer_to("2+2")
        assert server.seen[0]["messages"] == chat
        assert server.seen[1]["messages"] == [{"role": "user", "content": "3+3"}]
        with pytest.raises(RequestError, match="messages were given to an endpoint with api: completions"):
            an_endpoint(server, ledger, api="completions").generate([chat])
        assert an_endpoint(server, ledger, api="completions").generate(["4+4"])[0].text == answer_to("4+4")
        assert server.seen[2]["prompt"] == "4+4"


def test_an_unanswered_request_is_missing_not_wrong_and_is_asked_again(ledger):
    def poison(body):
        return "500" if prompt_of(body).endswith("2") else "ok"

    with faulty_server([poison] * 1000) as server:
        endpoint = an_endpoint(server, ledger, deadline_s=5.3)
        replies = endpoint.generate(prompts(4))
        assert [reply.state for reply in replies] == ["ok", "ok", "api_missing", "ok"]
        assert (replies[2].text, replies[2].problem) == ("", "HTTP 500: refused with 500")
        assert endpoint.report.num_missing == 1
        assert len(ledger) == 3
        server.faults = iter(())
        assert endpoint.generate(prompts(4))[2].text == answer_to(prompts(4)[2])
    assert set(server.paid.values()) == {1}


def test_a_server_that_answers_nothing_stops_the_run_resumably(ledger):
    with faulty_server(["ok"] + ["500"] * 10_000) as server:
        endpoint = an_endpoint(server, ledger, deadline_s=5.2, concurrency=4)
        with pytest.raises(RunStopped, match=r"left [5-9] requests in a row without an answer \(HTTP 500.*same"):
            list(endpoint.generate_groups([prompts(2, f"c{number}") for number in range(50)]))
        assert len({prompt_of(body) for body in server.seen}) < 20
    dead = server.url
    with pytest.raises(RunStopped, match="cannot be reached"):
        list(
            Endpoint(dead, MODEL, pace=PACE, timeout_s=1.0, deadline_s=1.1).generate_groups(
                [prompts(1, str(n)) for n in range(9)]
            )
        )


@pytest.mark.parametrize(
    ("fault", "state", "problem"),
    [
        ("refusal", "refused", "I cannot help with that."),
        ("filter", "refused", "the content filter"),
        ('400 {"message": "filtered", "code": "content_filter"}', "refused", "filtered"),
        ('400 {"message": "too long", "code": "context_length_exceeded"}', "overlong", "too long"),
    ],
)
def test_a_refusal_is_a_state_and_no_answer(fault, state, problem, ledger):
    is_paid = fault in ("refusal", "filter")
    with faulty_server([fault]) as server:
        endpoint = an_endpoint(server, ledger)
        refused, answered = endpoint.generate(prompts(2))
        assert (refused.state, refused.text, refused.problem) == (state, "", problem)
        assert (answered.state, len(server.seen)) == ("ok", 2)  # not asked again
        assert endpoint.report.num_refused == (state == "refused")
        assert len(ledger) == 1 + is_paid
        assert endpoint.generate(prompts(2))[0].state == (state if is_paid else "ok")  # kept is what was paid for
    assert set(server.paid.values()) == {1}


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("401", r"refuses access \(HTTP 401: refused with 401\); set 'api_key_env'"),
        ("403", "refuses access"),
        ("404", "is not there"),
        ("400", r"refuses the request \(HTTP 400"),
        ('429 {"message": "You exceeded your quota", "code": "insufficient_quota"}', "wants to be paid"),
        ("429 after=3600", r"takes no more now .* in 3600 s"),
        ("model other-2", f"answers as 'other-2', not '{MODEL}'"),
        ("model faulty-11", f"answers as 'faulty-11', not '{MODEL}'"),
    ],
)
def test_what_concerns_all_requests_stops_at_the_first(fault, said, ledger):
    with faulty_server([fault] * 100) as server:
        with pytest.raises(RunStopped, match=said) as stopped:
            list(an_endpoint(server, ledger).generate_groups([prompts(3, str(number)) for number in range(9)]))
        assert len(server.seen) == 1
        assert "\n" not in str(stopped.value)
        assert len(ledger) == 0
        assert ledger.spent.requests == server.paid.total()  # a wrong model's reply is paid for and unused
        server.faults = iter(())
        assert an_endpoint(server, ledger).generate(["later"])[0].state == "ok"


def test_what_is_in_flight_reaches_the_disk_when_the_run_stops(ledger):
    with faulty_server(["ok"] * 8 + ["slow 0.15"] * 3 + ["401"] + ["ok"] * 100) as server:
        with pytest.raises(RunStopped, match="401"):
            an_endpoint(server, ledger, concurrency=8).generate(prompts(40))
        assert len(ledger) == server.paid.total() >= 11
        server.faults = iter(())
        assert len(an_endpoint(server, ledger).generate(prompts(40))) == 40
    assert set(server.paid.values()) == {1}


def test_a_generator_that_is_left_early_keeps_what_was_paid(ledger):
    with faulty_server() as server:
        endpoint = an_endpoint(server, ledger)
        replies = endpoint.generate_groups([prompts(3, str(number)) for number in range(50)])
        next(replies)
        with pytest.raises(RequestError, match="one call at a time"):
            endpoint.generate(["meanwhile"])
        replies.close()
        assert len(ledger) == server.paid.total() < 150
        assert endpoint.generate(["afterwards"])[0].state == "ok"


def test_models_are_what_was_asked_for():
    assert is_version_of("gpt-5-nano", "gpt-5-nano")
    assert is_version_of("gpt-5-nano-2025-08-07", "gpt-5-nano")
    assert is_version_of("gpt-4-0613", "gpt-4")
    assert is_version_of("claude-3-5-sonnet-20241022", "claude-3-5-sonnet-latest")
    assert is_version_of("/models/demo@main", "/models/demo")
    for other in ("gpt-5-mini", "gpt-5-nano-mini", "gpt-51234", "gpt-5-nano-2025-08-07x", "gpt", ""):
        assert not is_version_of(other, "gpt-5-nano"), other


def test_a_model_that_changes_its_version_stops_the_run(tmp_path):
    with faulty_server(["model faulty-1-2025-01-01", "model faulty-1-2025-06-01"]) as server:
        with Ledger(tmp_path) as ledger:
            an_endpoint(server, ledger).generate(["before"])
        with (
            Ledger(tmp_path) as ledger,
            pytest.raises(RunStopped, match=r"'faulty-1-2025-06-01' now, .* kept .* of 'faulty-1-2025-01"),
        ):
            an_endpoint(server, ledger).generate(["after"])
        assert an_endpoint(server, None, model="alias", served_as=MODEL).generate(["named"])[0].state == "ok"


def test_what_a_model_does_not_take_is_learnt_by_one_request(ledger):
    def gpt5(body):
        if "max_tokens" in body:
            return (
                '400 {"message": "Unsupported parameter: \'max_tokens\' is not supported with this model. Use '
                '\'max_completion_tokens\' instead.", "param": "max_tokens", "code": "unsupported_parameter"}'
            )
        if "temperature" in body:
            return (
                '400 {"message": "Unsupported value: \'temperature\' does not support 0 with this model. Only the '
                'default (1) value is supported.", "param": "temperature", "code": "unsupported_value"}'
            )
        return '400 {"message": "Unsupported parameter: \'stop\' is not supported"}' if "stop" in body else "ok"

    with faulty_server([gpt5] * 1000) as server:
        endpoint = an_endpoint(server, ledger, reasoning_tokens=100, draws=2, extra={"reasoning_effort": "minimal"})
        assert endpoint.takes_temperature
        replies = endpoint.generate(prompts(20), max_new_tokens=5, stop=[" "])
        assert not endpoint.takes_temperature
        assert len(server.seen) == 40 + 3
        last = server.seen[-1]
        assert (last["max_completion_tokens"], last["reasoning_effort"]) == (105, "minimal")
        assert not {"max_tokens", "temperature", "stop"} & set(last)
        assert {(reply.text, reply.finish) for reply in replies} == {("answer", "stop")}  # cut here instead
        fresh = an_endpoint(server, ledger, reasoning_tokens=100, draws=2, extra={"reasoning_effort": "minimal"})
        assert fresh.generate(prompts(20), max_new_tokens=5, stop=[" "]) == replies
        assert len(server.seen) == 40 + 3  # the key is of what was asked, not of how it was put
        assert not fresh.takes_temperature  # its replies say so
        fresh.generate(["new"], max_new_tokens=5, stop=[" "])
        assert "temperature" not in server.seen[-1]


def test_the_first_of_a_group_goes_alone_and_warms_the_cache(ledger):
    groups = [prompts(4, f"c{number}") for number in range(6)]
    with faulty_server(["slow 0.01"] * 100) as server:
        list(an_endpoint(server, ledger).generate_groups(groups))
    order = [prompt_of(body) for body in server.seen]
    for group in groups:
        assert order.index(group[0]) == min(order.index(prompt) for prompt in group)
    assert 2 <= server.most_at_once <= 8


def test_concurrency_adapts():
    window = Window(most=8)
    for _ in range(20):
        window.grow()
    assert window.size == 8
    tickets = [window.ticket() for _ in range(8)]
    for ticket in tickets:
        window.shrink(ticket)  # one burst is one no
    assert window.size == 4
    window.shrink(window.ticket())
    assert window.size == 2
    window.grow()
    assert window.size == 2.5
    for _ in range(10):
        window.shrink(window.ticket())
    assert window.size == 1


def test_no_more_is_out_at_once_than_the_server_takes(ledger):
    limit, lock, out = 3, threading.Lock(), [0, 0]

    def busy(body):
        with lock:
            is_full = server.now > limit
            out[0] += is_full
        time.sleep(0.03)  # long beside what the disk takes
        return "429" if is_full else "ok"

    with faulty_server([busy] * 10_000) as server:
        replies = an_endpoint(server, ledger, concurrency=32).generate(prompts(150))
    assert {reply.state for reply in replies} == {"ok"}
    assert set(server.paid.values()) == {1}
    assert 0 < out[0] < 75  # learnt, not hammered
    assert server.most_at_once <= 2 * limit + 2


def test_retry_after_is_read_in_all_its_forms():
    now = 1_700_000_000.0
    assert retry_after({"retry-after": "3"}, now) == 3
    assert retry_after({"retry-after": "0.5"}, now) == 0.5
    assert retry_after({"retry-after-ms": "250", "retry-after": "9"}, now) == 0.25
    assert retry_after({"retry-after": formatdate(now + 7, usegmt=True)}, now) == 7
    assert retry_after({"retry-after": formatdate(now - 7, usegmt=True)}, now) == 0
    for nothing in ({}, {"retry-after": "soon"}, {"retry-after": "nan"}, {"retry-after": "inf"}):
        assert retry_after(nothing, now) is None


@pytest.mark.parametrize(("fault", "least"), [("429 after=0.4", 0.4), ("429 date=2", 0.9), ("503 after=0.4", 0.4)])
def test_retry_after_is_honoured_by_all_requests(fault, least, ledger):
    refused_at: list[float] = []
    too_early: list[str] = []

    def refuse(body):
        refused_at.append(time.monotonic())
        return fault

    def note(body):
        if time.monotonic() < refused_at[0] + least:
            too_early.append(prompt_of(body))
        return "ok"

    with faulty_server([refuse, *[note] * 100]) as server:
        replies = an_endpoint(server, ledger, concurrency=4).generate(prompts(8))
    assert {reply.state for reply in replies} == {"ok"}
    assert server.paid.total() == 8
    assert not too_early


def test_jitter_is_full_and_bounded():
    ceilings = [Pace(first_s=1.0, most_s=10.0, random=lambda: 1.0).wait(attempt) for attempt in range(1, 7)]
    assert ceilings == [1, 2, 4, 8, 10, 10]
    assert Pace(random=lambda: 0.0).wait(3) == 0
    assert Pace().wait(10_000) <= 30


@pytest.mark.parametrize(
    ("budget", "num_paid"),
    [
        ({"max_requests": 5}, range(5, 6)),
        ({"max_tokens": 340}, range(15, 21)),  # of 17 or 18 tokens, bounded by 33 or 34
        ({"max_cost": 0.0005, "prices": {"input": 1.0, "output": 10.0}}, range(12, 15)),
    ],
)
def test_a_budget_stops_the_run_before_it_is_exceeded_and_is_the_runs(budget, num_paid, tmp_path):
    with faulty_server() as server:
        for _ in range(2):  # a second session has no budget of its own
            with Ledger(tmp_path) as ledger:
                endpoint = an_endpoint(server, ledger, **budget)
                with pytest.raises(RunStopped, match=f"could exceed {next(iter(budget))}.*raise it"):
                    endpoint.generate(prompts(30), max_new_tokens=2)
                assert endpoint.choices.overspent(ledger.spent) is None
                assert ledger.spent.requests == server.paid.total() == len(server.seen)
                assert len(server.seen) in num_paid
        with Ledger(tmp_path) as ledger:
            assert len(an_endpoint(server, ledger).generate(prompts(30), max_new_tokens=2)) == 30
    assert set(server.paid.values()) == {1}


def test_what_may_have_been_charged_counts_against_the_budget(ledger):
    with faulty_server(["cut"] * 100) as server:
        with pytest.raises(RunStopped, match=r"could exceed max_requests \(4 of 3\)"):
            an_endpoint(server, ledger, max_requests=3).generate(prompts(9))
        assert len(server.seen) == 3
    assert ledger.spent.requests == 3


def test_a_reply_without_usage_is_booked_at_its_bound(ledger):
    with faulty_server(["no-usage"]) as server:
        an_endpoint(server, ledger).generate(["1234567890"], max_new_tokens=9)
    assert ledger.spent.completion_tokens == 9
    assert ledger.spent.prompt_tokens >= 10


def test_half_a_character_does_not_reach_files(ledger):
    with faulty_server([r"text caf\u00e9 \ud83d!"]) as server:
        reply = an_endpoint(server, ledger).generate(["?"])[0]
    assert reply.text == "café ?!"


KILLED = """
import sys
from iclperm.endpoint import Endpoint, Ledger
url, folder, concurrency = sys.argv[1:]
endpoint = Endpoint(url, "faulty-1", ledger=Ledger(folder), concurrency=int(concurrency))
groups = [[f"{context} query {number}" for number in range(4)] for context in range(20)]
for group in endpoint.generate_groups(groups):
    for reply in group:
        print(reply.text, flush=True)
"""


@pytest.mark.parametrize(("concurrency", "kill_at"), [(1, 13), (6, 30)])
def test_a_killed_run_continues_and_pays_for_nothing_twice(concurrency, kill_at, tmp_path):
    groups = [[f"{context} query {number}" for number in range(4)] for context in range(20)]
    with faulty_server() as server:
        command = [sys.executable, "-c", KILLED, server.url, str(tmp_path), str(concurrency)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path)
        server.after_reply = lambda count: process.kill() if count == kill_at else None
        used, _ = process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL
        server.after_reply = lambda count: None
        before = server.paid.copy()
        with Ledger(tmp_path) as ledger:
            kept = len(ledger)
            replies = list(an_endpoint(server, ledger, concurrency=concurrency).generate_groups(groups))
            assert [[reply.text for reply in group] for group in replies] == [[answer_to(p) for p in g] for g in groups]
            assert len(ledger) == 80
        assert used.splitlines() == [reply.text for group in replies for reply in group][: len(used.splitlines())]
        assert kept >= len(used.splitlines())  # on disk before it is used
        assert before.total() - kept <= concurrency  # out when the client was killed: sent, and not yet on disk
        assert (server.paid - before).total() == 80 - kept  # none of what was kept is asked again


def test_an_interrupt_keeps_what_was_paid(ledger):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where pytest runs in the background
    try:
        stop_after_ten(ledger)
    finally:
        signal.signal(signal.SIGINT, before)


def stop_after_ten(ledger):
    with faulty_server(["slow 0.02"] * 1000) as server:
        server.after_reply = lambda count: os.kill(os.getpid(), signal.SIGINT) if count == 10 else None
        with pytest.raises(KeyboardInterrupt):
            list(an_endpoint(server, ledger).generate_groups([prompts(4, str(number)) for number in range(20)]))
        assert len(ledger) == server.paid.total() < 80


SENTINEL = "sk-sentinel-0123456789abcdef0123456789abcdef"


def test_the_key_reaches_no_file_log_or_message(tmp_path, monkeypatch, caplog, capfd):
    monkeypatch.setenv("SENTINEL_API_KEY", SENTINEL)
    caplog.set_level(logging.DEBUG)
    said = []
    with faulty_server(["echo-key", "stall", "cut", "500"]) as server, Ledger(tmp_path / "run") as ledger:
        endpoint = an_endpoint(server, ledger, api_key_env="SENTINEL_API_KEY", timeout_s=0.5)
        assert [reply.text for reply in endpoint.generate(["first"])] == ["you sent Bearer [key]"]
        assert endpoint.generate(["second"])[0].state == "ok"
        for status in (400, 401, 404):
            server.faults = iter([f'{status} {{"message": "no such key: Bearer {SENTINEL}"}}'])
            with pytest.raises(RunStopped, match=r"Bearer \[key\]") as stopped:
                endpoint.generate(prompts(3, f"after {status}"))
            said += traceback.format_exception(stopped.value)
        server.faults = iter([f"model {SENTINEL}"])
        with pytest.raises(RunStopped, match=r"answers as '\[key\]'") as stopped:
            endpoint.generate(["another model"])
        said += traceback.format_exception(stopped.value)
        said += [repr(endpoint), repr(endpoint.choices), endpoint.choices.to_yaml(), repr(vars(endpoint.choices))]
    assert all(headers["authorization"] == f"Bearer {SENTINEL}" for headers in server.headers)  # it was really sent
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    for path in files:
        assert SENTINEL.encode() not in path.read_bytes(), path
    assert caplog.text
    said += [caplog.text, *capfd.readouterr()]
    assert not [text for text in said if SENTINEL in text]


def test_another_key_in_the_environment_is_not_sent(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", SENTINEL)
    with faulty_server() as server:
        an_endpoint(server).generate(["?"])
    assert SENTINEL not in str(server.headers)


def test_an_organization_and_a_project_in_the_environment_are_not_sent(monkeypatch):
    monkeypatch.setenv("OPENAI_ORG_ID", "org-of-somebody")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "project-of-somebody")
    with faulty_server() as server:
        an_endpoint(server).generate(["?"])
    (headers,) = server.headers
    assert "authorization" in headers
    assert "of-somebody" not in str(headers)
    assert not [name for name in headers if name.startswith("openai-")]


def test_a_missing_key_or_package_or_tokenizer_is_named(monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(ConfigError, match="environment variable NO_SUCH_KEY is not set"):
        Endpoint("http://localhost:1/v1", "m", "NO_SUCH_KEY")
    monkeypatch.setenv("NO_SUCH_KEY", "two words")
    with pytest.raises(ConfigError, match="blanks or control") as refused:
        Endpoint("http://localhost:1/v1", "m", "NO_SUCH_KEY")
    assert "two words" not in str(refused.value)
    with pytest.raises(ModelError, match="tokenizer"):
        Endpoint("http://localhost:1/v1", "m", tokenizer=str(Path(__file__).parent)).generate(["?"])
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(ConfigError, match=r"needs the package openai: pip install 'iclperm\[api\]'"):
        Endpoint("http://localhost:1/v1", "m").generate(["?"])


def test_an_empty_or_senseless_request_is_refused():
    with faulty_server() as server:
        endpoint = an_endpoint(server)
        assert endpoint.generate([]) == []
        assert list(endpoint.generate_groups([])) == []
        for wrong in ({"max_new_tokens": 0}, {"stop": [""]}):
            with pytest.raises(RequestError, match="give 1 or more"):
                endpoint.generate(["?"], **wrong)
    assert not server.seen
