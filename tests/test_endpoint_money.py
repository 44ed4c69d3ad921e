"""What is spent is on the books before it is spent: what a kill, a full disk or a strange ledger may not change."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import unicodedata
import zlib
from dataclasses import astuple
from email.utils import formatdate
from pathlib import Path

import numpy as np
import pytest
from faulty_server import MODEL, STALL_S, FaultyServer, faulty_server, prompt_of
from hostile_replies import good, http, whole
from hypothesis import given
from hypothesis import strategies as st

import iclperm
from iclperm import Study
from iclperm.cli import main as cli
from iclperm.endpoint import Endpoint, Ledger, Pace, Spent
from iclperm.endpoint.gate import retry_after
from iclperm.endpoint.ledger import Books, damage, paid
from iclperm.endpoint.replies import RequestResult, as_echoed, as_listed, checked_reply, spent_on
from iclperm.errors import RunError, RunStopped
from iclperm.runs import audit

PACE = Pace(first_s=0.002, most_s=0.01)
SIZES = {"sets": 1, "permutations": 2, "shots": 2, "queries": 6, "scoring": "generate", "max_new_tokens": 3}


def an_endpoint(server: FaultyServer, ledger: Ledger | None = None, **choices) -> Endpoint:
    return Endpoint(server.url, **{"model": MODEL, "ledger": ledger, "pace": PACE, "timeout_s": 30.0, **choices})


def entries(folder: Path) -> list[dict]:
    return [
        json.loads(line)["entry"]
        for path in (folder / "api").glob("*.jsonl")
        for line in path.read_bytes().splitlines()
    ]


def test_a_request_is_on_disk_with_the_most_it_can_cost_before_it_is_sent(tmp_path):
    open_when_sent = []

    def look(body):
        there = entries(tmp_path)
        settled = {entry.get("settles") for entry in there}
        open_when_sent.append([entry["most"] for entry in there if entry.get("intent", None) not in settled])
        return "ok"

    with faulty_server([look] * 5) as server, Ledger(tmp_path) as ledger:
        an_endpoint(server, ledger, concurrency=1).generate(["one prompt"] + ["another"] * 2, max_new_tokens=9)
        assert [len(each) for each in open_when_sent] == [1, 1]
        (most,) = open_when_sent[0]
        assert most[0] == 1
        assert most[1] >= len("one prompt")
        assert most[3] == 9
        written = entries(tmp_path)
        assert [("intent" in entry, "settles" in entry) for entry in written] == [(True, False), (False, True)] * 2
        assert all({"key", "model", "time", "spent", "reply"} <= set(entry) for entry in written)  # of every version
        assert sum((Spent(*entry["spent"]) for entry in written), Spent()) == ledger.spent
        assert paid(tmp_path) == Books(settled=ledger.spent)


KILLED = """
import sys
from iclperm.endpoint import Endpoint, Ledger
url, folder = sys.argv[1:]
endpoint = Endpoint(url, "faulty-1", ledger=Ledger(folder), concurrency=4)
endpoint.generate([f"query {number}" for number in range(40)], max_new_tokens=9)
"""


def test_what_was_on_its_way_when_a_run_was_killed_counts_as_lost_at_most(tmp_path):
    with faulty_server(["ok"] * 10 + ["stall"] * 4) as server:
        process = subprocess.Popen([sys.executable, "-c", KILLED, server.url, str(tmp_path)], cwd=tmp_path)
        while len(server.seen) < 14:
            assert process.poll() is None
        process.kill()
        assert process.wait(timeout=60) == -signal.SIGKILL
        books = paid(tmp_path)
        assert (books.settled.requests, books.lost.requests, books.spent.requests) == (10, 4, 14)
        assert books.lost.completion_tokens == 4 * 9
        assert books.lost.prompt_tokens >= 4 * len("query 1")
        for _ in range(2):
            with Ledger(tmp_path) as ledger:
                assert (len(ledger), ledger.spent) == (10, books.spent)
        num_before = len(server.seen)
        with Ledger(tmp_path) as ledger, pytest.raises(RunStopped, match=r"max_requests \(15 of 14\)"):
            an_endpoint(server, ledger, max_requests=14).generate(["new"])
        assert len(server.seen) == num_before
        with Ledger(tmp_path) as ledger:
            an_endpoint(server, ledger, max_requests=15).generate(["new"])
            assert ledger.spent.requests == 15


@pytest.mark.parametrize("num_others", [1, 3])
def test_what_another_process_has_on_its_way_counts_until_it_is_settled(num_others, tmp_path):
    most = Spent(1, 100, 0, 10)
    with Ledger(tmp_path) as other, Ledger(tmp_path) as ours:
        names = other.intend([(f"key {number}", most) for number in range(num_others)], model="m")
        assert other.spent == Spent()  # who sends reserves
        assert ours.lookup("any") is None  # reads what others have added
        assert ours.spent == sum([most] * num_others, Spent())
        other.append("key 0", model="m", spent=Spent(1, 5, 0, 1), reply=None, settles=names[0])
        assert ours.lookup("any") is None
        assert ours.spent == sum([most] * (num_others - 1), Spent(1, 5, 0, 1))
        assert other.spent == Spent(1, 5, 0, 1)


def test_a_request_whose_reply_finds_the_disk_full_counts(tmp_path):
    class FullLater(Ledger):
        is_full = False

        def append(self, *arguments, **named):
            if self.is_full:
                raise RunStopped("no space left")
            super().append(*arguments, **named)

    with faulty_server() as server, FullLater(tmp_path) as ledger:
        endpoint = an_endpoint(server, ledger)
        endpoint.generate(["first"])
        ledger.is_full = True
        with pytest.raises(RunStopped, match="no space left"):
            endpoint.generate(["second"])
        assert server.paid.total() == 2
        assert endpoint.paid.requests == 2
    assert paid(tmp_path).spent.requests == 2
    assert paid(tmp_path).lost.requests == 1


def test_without_a_ledger_what_was_lost_counts_too():
    with faulty_server(["cut", "close", "garbage", "ok", "ok"]) as server:
        endpoint = an_endpoint(server, max_requests=4)
        endpoint.generate(["?"])
        assert (endpoint.paid.requests, endpoint.lost.requests, endpoint.report.num_lost) == (4, 3, 3)
        with pytest.raises(RunStopped, match="max_requests"):
            endpoint.generate(["another"])
        assert len(server.seen) == 4


def test_requests_that_go_out_together_are_synced_together(tmp_path):
    class Counting(Ledger):
        sizes = ()

        def intend(self, requests, *, model):
            self.sizes = (*self.sizes, len(requests))
            return super().intend(requests, model=model)

    def slow(body):
        return "slow 0.2"

    with faulty_server([slow] * 100) as server, Counting(tmp_path) as ledger:
        an_endpoint(server, ledger, concurrency=16).generate([f"query {number}" for number in range(60)])
    assert sum(ledger.sizes) == 60
    assert max(ledger.sizes) > 1
    assert len(ledger.sizes) < 60


@given(
    st.lists(st.tuples(st.booleans(), st.booleans()), max_size=8).flatmap(
        lambda fates: st.tuples(st.just(fates), st.permutations(range(2 * len(fates))))
    )
)
def test_books_do_not_depend_on_the_order_in_which_files_are_read(drawn):
    fates, order = drawn
    most, cost = [1, 50, 0, 9], [1, 10, 4, 2]
    lines: list[dict | None] = []
    for number, (is_settled, has_reply) in enumerate(fates):
        name = f"{number:016x}"
        lines.append({"spent": [0] * 4, "reply": None, "intent": name, "most": most})
        reply = {} if has_reply else None
        lines.append({"spent": cost, "reply": reply, "settles": name} if is_settled else None)
    books = Books()
    for at in order:
        if (entry := lines[at]) is not None:
            books.note(entry)
    num_settled = sum(is_settled for is_settled, _ in fates)
    num_open = len(fates) - num_settled
    num_empty = sum(is_settled and not has_reply for is_settled, has_reply in fates)

    def times(count, each):
        return Spent(*(count * value for value in each))

    assert books.spent == times(num_settled, cost) + times(num_open, most)
    assert books.lost == times(num_empty, cost) + times(num_open, most)


def test_a_damaged_settlement_is_not_paid_for_twice(tmp_path):
    with Ledger(tmp_path) as ledger:
        (name,) = ledger.intend([("key", Spent(1, 100, 0, 10))], model="m")
        ledger.append("key", model="m", spent=Spent(1, 5, 0, 1), reply={"model": "m", "choices": [{}]}, settles=name)
    (path,) = (tmp_path / "api").iterdir()
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b'"choices"', b'"chOices"'))
    assert paid(tmp_path).spent == Spent(1, 5, 0, 1)
    path.write_bytes(raw[:-10])  # torn
    with Ledger(tmp_path) as ledger:
        assert ledger.spent == Spent(1, 5, 0, 1)
    assert paid(tmp_path).spent == Spent(1, 5, 0, 1)


def line_of(entry) -> bytes:
    raw = (entry if isinstance(entry, str) else json.dumps(entry)).encode()
    return b'{"crc32":"%08x","entry":' % zlib.crc32(raw) + raw + b"}\n"


WHOLE = {
    "key": "k",
    "model": "m",
    "time": "t",
    "spent": [1, 2, 0, 1],
    "reply": {"model": "m", "choices": [{"text": "x"}]},
}


@pytest.mark.parametrize(
    "entry",
    [
        {**WHOLE, "spent": [-1000, -1000, 0, 0]},
        {**WHOLE, "spent": [1, 2, 3]},
        {**WHOLE, "spent": ["1", "2", "3", "4"]},
        {**WHOLE, "spent": [1.5, 0, 0, 0]},
        {**WHOLE, "spent": [True, 0, 0, 0]},
        {**WHOLE, "spent": [10**400, 0, 0, 0]},
        {**WHOLE, "spent": None},
        {**WHOLE, "key": ["k"]},
        {**WHOLE, "model": None},
        {**WHOLE, "reply": "x"},
        {**WHOLE, "reply": {"model": 5}},
        {**WHOLE, "intent": 7, "most": [1, 1, 1, 1]},
        {**WHOLE, "intent": "00", "most": [-1, 0, 0, 0]},
        {**WHOLE, "settles": []},
        {},
        [],
        "null",
        "NaN",
        "[" * 100_000,
        '{"a":' * 100_000,
    ],
)
def test_entries_that_no_version_wrote_are_damaged_and_lower_no_cost(entry, tmp_path):
    (tmp_path / "api").mkdir()
    (tmp_path / "api/1.jsonl").write_bytes(line_of(WHOLE) + line_of(entry))
    with Ledger(tmp_path) as ledger:
        assert ledger.num_damaged == 1
        assert ledger.lookup("k")["choices"] == [{"text": "x"}]
        assert all(value >= least for value, least in zip(astuple(ledger.spent), [1, 2, 0, 1], strict=True))
        assert ledger.spent.requests >= 1
    assert paid(tmp_path).spent == ledger.spent


@pytest.mark.parametrize(
    "reply",
    [
        {},
        {"model": "m"},
        {"model": "m", "choices": []},
        {"model": "m", "choices": [{"message": {"content": 7}}]},
        {"model": "m", "choices": [{"text": "x"}], "iclperm_without": [[]]},
        {"model": "m", "choices": [{"text": "x"}], "iclperm_without": ["model"]},
        {"model": "m", "choices": [{"text": "x", "logprobs": {"tokens": 5}}]},
    ],
)
def test_a_kept_reply_that_is_none_is_damaged_and_asked_for_again(reply, tmp_path):
    (tmp_path / "api").mkdir()
    (tmp_path / "api/1.jsonl").write_bytes(line_of({**WHOLE, "reply": reply}))
    with Ledger(tmp_path) as ledger:
        assert ledger.lookup("k") is None
        assert ledger.num_damaged == 1


def test_a_ledger_of_an_earlier_version_is_read(tmp_path):
    half = {"model": "m", "choices": [{"message": {"content": "caf\ud83d!"}}], "usage": {"prompt_tokens": 2}}
    echoed = {"model": "m", "choices": [{"logprobs": {"tokens": [" x"], "token_logprobs": [-1.5]}}]}
    (tmp_path / "api").mkdir()
    lines = [WHOLE, {**WHOLE, "key": "half", "reply": half}, {**WHOLE, "key": "echoed", "reply": echoed}]
    lines.append({**WHOLE, "key": "lost", "spent": [1, 7, 0, 3], "reply": None})
    (tmp_path / "api/1.jsonl").write_bytes(b"".join(map(line_of, lines)))
    with Ledger(tmp_path) as ledger:
        assert ledger.lookup("half")["choices"][0]["message"]["content"] == "caf?!"
        assert ledger.lookup("echoed") == echoed
        assert ledger.lookup("lost") is None
        assert (ledger.num_damaged, len(ledger), ledger.spent) == (0, 3, Spent(4, 13, 0, 6))
    assert paid(tmp_path).lost == Spent(1, 7, 0, 3)


@pytest.mark.parametrize("part", ["api/1.jsonl", "api", "quarantine/api-1.torn", "quarantine"])
@pytest.mark.parametrize("is_pipe", [False, True])
def test_a_link_out_of_the_folder_is_neither_read_nor_written(part, is_pipe, tmp_path):
    elsewhere, run = tmp_path / "elsewhere", tmp_path / "run"
    elsewhere.mkdir()
    mine = elsewhere / ("api-1.torn" if "torn" in part or part == "quarantine" else "1.jsonl")
    mine.write_text("a diary\nwithout an end")
    (run / part).parent.mkdir(parents=True)
    if is_pipe and "/" in part:
        os.mkfifo(run / part)
    else:
        (run / part).symlink_to(elsewhere if "/" not in part else mine)
    for look in (Ledger, paid, damage) if part.startswith("api") else (Ledger, paid):
        with pytest.raises(RunError, match=r"is a symbolic link, and none is followed|is no regular file") as refused:
            look(run)
        assert "\n" not in str(refused.value)
    assert mine.read_text() == "a diary\nwithout an end"
    assert [*elsewhere.iterdir()] == [mine]


RUN = """
import sys, iclperm
from iclperm import Study
iclperm.run(Study.from_file(sys.argv[1]), sys.argv[2])
"""


def test_a_bill_shows_what_a_kill_may_have_cost(tmp_path, capfd):
    with faulty_server(["ok"] * 5 + ["stall"] * 2) as server:
        endpoint = {"base_url": server.url, "model": MODEL, "concurrency": 2}
        study = Study(endpoint=endpoint | {"prices": {"input": 1.0, "output": 2.0}}, **SIZES)
        (tmp_path / "study.yaml").write_text(study.to_yaml())
        arguments = [str(tmp_path / "study.yaml"), str(tmp_path / "run")]
        process = subprocess.Popen([sys.executable, "-c", RUN, *arguments], cwd=tmp_path)
        while len(server.seen) < 7:
            assert process.poll() is None
        process.kill()
        process.wait(timeout=60)
        lost = paid(tmp_path / "run").lost
        assert lost.requests == 2
        told = rf"7 requests, .*; without a reply 2 of them, with at most {lost.tokens:,} tokens"
        status = audit.status(tmp_path / "run")
        assert (status.spent.requests, status.lost) == (7, lost)
        with pytest.raises(SystemExit):
            cli.main(["status", str(tmp_path / "run")])
        assert re.search(told, " ".join(capfd.readouterr().out.split()))
        run = iclperm.run(study, tmp_path / "run")
    assert run.report.num_requests == 14
    assert (run.report.num_lost_requests, run.report.num_lost_tokens) == (2, lost.tokens)
    assert iclperm.open_run(tmp_path / "run").report.num_requests == 14
    told = told.replace("7 requests", "14 requests")
    for command in ("report", "run"):
        with pytest.raises(SystemExit):
            cli.main([command, str(tmp_path / "run")])
        assert re.search(told, " ".join(capfd.readouterr().out.split())), command


@given(st.one_of(st.text(), st.from_regex(r"\A\w{3}, \d\d \w{3} \d{2,6} \d\d:\d\d:\d\d (GMT|[+-]\d{1,9})\Z"),
                 st.floats().map(str), st.integers().map(str)))  # fmt: skip
def test_retry_after_of_any_form_never_raises_and_is_a_day_at_most(value):
    for name in ("retry-after", "retry-after-ms"):
        seconds = retry_after({name: value}, 1_700_000_000.0)
        assert seconds is None or 0 <= seconds <= 86_400


def test_a_far_date_is_a_day():
    now = 1_700_000_000.0
    assert retry_after({"retry-after": formatdate(now + 10**7, usegmt=True)}, now) == 86_400
    assert retry_after({"retry-after": "Fri, 31 Dec 9999 23:59:59 GMT"}, now) == 86_400
    assert retry_after({"retry-after": "1" + "0" * 300}, now) == 86_400


def echoed(*values):
    """The result of an echoed prompt whose label " a b" has these log-probabilities."""
    logprobs = {"tokens": ["Q", " a", " b", "x"], "token_logprobs": [None, *values, -1.0]}
    reply = checked_reply({"model": "m", "choices": [{"text": "", "logprobs": logprobs}]})
    return RequestResult("ok", reply, "")


@pytest.mark.parametrize(
    "value", [5.0, 0.0011, 1, -1e300, -1e31, float("nan"), float("inf"), -float("inf"), "-1", True]
)
def test_a_log_probability_that_is_none_is_invalid_and_no_number(value):
    scored = as_echoed([echoed(-1.0, value)], [" a b"])
    assert (scored.state, str(scored.logprob)) == ("invalid", "(nan,)")
    top = {" a": value, " b": -2.0}
    reply = checked_reply({"model": "m", "choices": [{"text": "", "logprobs": {"top_logprobs": [top]}}]})
    listed = as_listed(RequestResult("ok", reply, ""), [" a", " b"])
    assert (listed.state, str(listed.logprob)) == ("invalid", "(nan, nan)")  # listed, and so not the least likely
    other = as_listed(RequestResult("ok", reply, ""), [" c", " b"])
    assert other.is_bound == (True, False)
    assert other.logprob[0] < other.logprob[1] == -2.0


def test_a_reply_that_lists_nothing_is_invalid():
    reply = checked_reply({"model": "m", "choices": [{"text": "x"}]})
    assert as_listed(RequestResult("ok", reply, ""), [" a"]).state == "invalid"


@pytest.mark.parametrize(
    "more",
    [
        {"error": {"message": "credit gone", "code": 402}},
        {"choices": [{"text": "Wor", "finish_reason": "error", "error": {"code": 502, "message": "upstream died"}}]},
        {"choices": [{"text": "", "finish_reason": "abort"}]},
        {"choices": [{"text": "Wor", "finish_reason": "insufficient_system_resource"}]},
    ],
)
def test_an_error_in_a_reply_is_no_answer(more):
    with pytest.raises(ValueError, match=r"it is an error: credit gone|its text was broken off: (error|abort|insuff)"):
        checked_reply({"model": "m", "choices": [{"text": "World", "finish_reason": "stop"}], **more})


def test_two_that_share_a_budget_never_send_more_than_it_holds(tmp_path):
    """Both are open before either sends; each sees what the other has on its way before it sends its own."""
    with faulty_server() as server, Ledger(tmp_path) as one, Ledger(tmp_path) as other:
        first, second = (an_endpoint(server, each, max_requests=10) for each in (one, other))
        with pytest.raises(RunStopped, match="max_requests"):
            first.generate([f"prompt {number}" for number in range(12)], max_new_tokens=2)
        num_sent = len(server.seen)
        assert 0 < num_sent <= 10
        with pytest.raises(RunStopped, match="max_requests"):
            second.generate([f"another {number}" for number in range(12)], max_new_tokens=2)
        assert len(server.seen) <= 10
        assert paid(tmp_path).spent.requests == len(server.seen)


def test_a_server_that_wants_to_be_asked_again_at_once_is_not_asked_without_end():
    def busy(_):
        return iter([http(b"{}", status="429 Too Many", headers={"Retry-After": "0"})])

    with faulty_server(iter(lambda: busy, None)) as server:
        with pytest.raises(RunStopped):
            an_endpoint(server, pace=Pace(first_s=0.2, most_s=0.2), deadline_s=1.5, timeout_s=0.2).generate(["?"])
        assert len(server.seen) <= 40


def test_rounding_above_zero_is_zero_and_the_least_are_finite():
    scored = as_echoed([echoed(0.0009, -1e30)], [" a b"])
    assert scored.state == "ok"
    assert scored.logprob == (-1e30,)
    assert np.isfinite(np.float32(scored.logprob)).all()
    assert as_echoed([echoed(0.0009, -0.5)], [" a b"]).logprob == (-0.5,)


def test_a_positive_log_probability_flips_no_prediction(tmp_path):
    def lying(body):
        text = prompt_of(body)
        tokens = [*text, "x"]
        values = [None] + [5.0 if text.endswith("s") else -1.0] * len(text)
        choice = {"text": text, "logprobs": {"tokens": tokens, "token_logprobs": values}, "finish_reason": "stop"}
        return whole(good(choices=[choice], model=MODEL))()

    with faulty_server([lying] * 1000) as server:
        endpoint = an_endpoint(server, api="completions")
        ((scored,),) = endpoint.score_groups([["Q:"]], [" x", " s"])
    assert scored.state == "invalid"
    assert all(np.isnan(value) for value in scored.logprob)


def test_a_probe_without_any_number_does_not_decide_what_a_server_gives(tmp_path):
    def answered(body, values):
        tokens = [*prompt_of(body), "x"]
        logprobs = {"tokens": tokens, "token_logprobs": [None] + values * (len(tokens) - 1)}
        choice = {"text": prompt_of(body), "logprobs": logprobs, "finish_reason": "stop"}
        return whole(good(choices=[choice], model=MODEL))()

    replies = [lambda body: answered(body, [float("nan")]), *[lambda body: answered(body, [-1.0])] * 20]
    with faulty_server(replies) as server:
        endpoint = an_endpoint(server, api="completions")
        ((scored,),) = endpoint.score_groups([["Q:"]], [" x", " s"])
    assert scored.state == "ok"
    assert endpoint.capabilities.prompt_logprobs
    assert len(server.seen) == endpoint.paid.requests == 4


@pytest.mark.parametrize(
    "lie",
    [{"logprobs": None}, {"finish_reason": "content_filter", "logprobs": None}, {"finish_reason": "content_filter"}],
)
def test_a_kept_probe_that_denies_is_asked_again_and_one_that_grants_is_not(tmp_path, lie):
    changes = dict(lie)

    def answered(body):
        tokens = [*prompt_of(body), "x"]
        logprobs = {"tokens": tokens, "token_logprobs": [None] + [-1.0] * (len(tokens) - 1)}
        choice = {"text": prompt_of(body), "logprobs": logprobs, "finish_reason": "stop", **changes}
        return whole(good(choices=[choice], model=MODEL))()

    def gives(server):
        with Ledger(tmp_path) as ledger:
            return an_endpoint(server, ledger, api="completions").capabilities.prompt_logprobs

    with faulty_server([answered] * 20) as server:
        assert not gives(server)
        changes.clear()
        assert gives(server)
        asked = len(server.seen)
        assert gives(server)
    assert len(server.seen) == asked


def test_of_two_replies_to_a_request_the_later_sessions_counts_also_within_a_second(tmp_path):
    for number in range(12):
        with Ledger(tmp_path) as ledger:
            ledger.append("k", model="m", spent=Spent(1), reply={"model": "m", "choices": [{"text": str(number)}]})
        with Ledger(tmp_path) as ledger:
            assert ledger.lookup("k")["choices"][0]["text"] == str(number)


@pytest.mark.parametrize(
    "extra", [{"best_of": 20}, {"tools": [{"type": "function", "function": {"name": "x" * 3000}}]}]
)
def test_what_extra_makes_a_request_cost_is_in_its_bound(extra):
    def dear(body):
        assert body.items() >= extra.items()
        used = {"prompt_tokens": 5 + len(json.dumps(extra)) * ("tools" in extra)}
        used["completion_tokens"] = 8 * extra.get("best_of", 1)
        choice = {"index": 0, "finish_reason": "stop", "text": "x"}
        return whole(good(choices=[choice], model=MODEL, usage=used))()

    most = 4_000
    with faulty_server([dear] * 100) as server:
        endpoint = an_endpoint(server, api="completions", extra=extra, max_tokens=most)
        with pytest.raises(RunStopped, match="max_tokens"):
            endpoint.generate([f"prompt {number}" for number in range(99)], max_new_tokens=8)
        assert server.seen
        assert endpoint.paid.tokens <= most


def test_a_total_alone_is_what_was_paid_for():
    bound = Spent(1, 20, 0, 8)
    reply = {"model": "m", "choices": [{"text": "x"}]}
    assert spent_on({**reply, "usage": {"total_tokens": 500}}, bound) == Spent(1, 20, 0, 480)
    assert spent_on({**reply, "usage": {"total_tokens": 7}}, bound) == bound
    assert spent_on({**reply, "usage": {"total_tokens": 500, "completion_tokens": 2}}, bound).tokens == 500


FILM = "评论。这部电影很好看。情感。积极\n评论。太难看了。情感。"


@pytest.mark.parametrize(
    ("prompt", "cut", "is_ok"),
    [
        (FILM, lambda text: text, True),
        (FILM, lambda text: text[-6:], False),
        (FILM, lambda text: "\ufffd" + text[-6:], False),
        (FILM, lambda text: "别的提示。情感。" + text[-2:], False),
        (FILM, lambda text: text.replace("难", "\ufffd\ufffd"), True),
        ("ﬁlm x²。 ", lambda text: unicodedata.normalize("NFKC", text[:-2]) + text[-2:], True),
        ("Отзыв: плохо. Это", lambda text: "Отзыв: хорошо. Это" + text[-2:], False),
    ],
)
def test_an_echo_of_another_prompt_is_invalid_in_any_script(prompt, cut, is_ok):
    def answered(body):
        asked = prompt_of(body)
        text = asked if asked.startswith("One two") else cut(asked)
        tokens = (
            [*re.findall(r".", text, re.S), "x"] if text != asked or not text.isascii() else [text[:-5], " four", "x"]
        )
        logprobs = {"tokens": tokens, "token_logprobs": [None] + [-1.0] * (len(tokens) - 1)}
        choice = {"text": text + "x", "logprobs": logprobs, "finish_reason": "length"}
        return whole(good(choices=[choice], model=MODEL, usage=None))()

    with faulty_server([answered] * 9) as server:
        ((scored,),) = an_endpoint(server, api="completions").score_groups([[prompt]], ["积极", "消极"])
        assert len(server.seen) == 3
    assert (scored.state == "ok") is is_ok


def test_who_interrupts_twice_is_told_nothing_of_what_was_on_its_way_and_it_counts(tmp_path):
    calm = f"import contextlib\nwith contextlib.suppress(KeyboardInterrupt):\n{textwrap.indent(KILLED, '    ')}"
    with faulty_server(["ok"] * 10 + ["stall"] * 4) as server:
        arguments = [sys.executable, "-c", calm, server.url, str(tmp_path)]
        process = subprocess.Popen(
            arguments, cwd=tmp_path, stderr=subprocess.PIPE, text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # which tests in the background ignore
        )  # fmt: skip
        while len(server.seen) < 14:
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        time.sleep(0.3 * STALL_S)  # for a busy machine to notice the first before the second comes
        assert process.poll() is None  # what is on its way is waited for once
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=0.6 * STALL_S) == (None, "")
    assert process.returncode == 0
    assert (paid(tmp_path).spent.requests, paid(tmp_path).lost.requests) == (14, 4)
