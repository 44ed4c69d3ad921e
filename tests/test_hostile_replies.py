"""What a hostile server sends is counted, costs no more than the budget, and neither hangs nor grows the process."""

import resource
import time

import pytest
from faulty_server import FaultyServer, faulty_server
from hostile_replies import ENDLESS, LOST, PASSING, STOPS, TABLES, TAKEN

from iclperm.endpoint import Endpoint, Ledger, Pace, Spent
from iclperm.errors import RunStopped

PACE = Pace(first_s=0.002, most_s=0.01)
TIMEOUT_S = 1.0
AMPLE_S = 15.0  # longer than a busy machine takes: what is late there would count as lost
MOST_GROWTH = 200 << 20
PROMPT = "what?"


def an_endpoint(server: FaultyServer, ledger: Ledger, **choices) -> Endpoint:
    return Endpoint(server.url, server.model, ledger=ledger, pace=PACE, **{"timeout_s": AMPLE_S, **choices})


def patience(name: str) -> float:
    return TIMEOUT_S if name in ENDLESS else AMPLE_S


@pytest.fixture(autouse=True)
def neither_hangs_nor_grows():
    """Every case: no longer than two attempts take, no more memory than a few replies."""
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST_GROWTH >> 10
    assert time.monotonic() - started < 20 * TIMEOUT_S


@pytest.fixture
def ledger(tmp_path):
    with Ledger(tmp_path / "run") as ledger:
        yield ledger


def test_there_are_enough_of_them():
    assert len(set(TABLES)) == len(TABLES) >= 60


@pytest.mark.parametrize("name", LOST)
def test_what_is_no_answer_counts_at_its_bound_and_the_budget_holds(name, ledger):
    with faulty_server([lambda body: LOST[name]()] * 50) as server:
        endpoint = an_endpoint(server, ledger, max_requests=2, timeout_s=patience(name), deadline_s=60.0)
        with pytest.raises(RunStopped, match=r"could exceed max_requests \(3 of 2\)") as stopped:
            endpoint.generate([PROMPT], max_new_tokens=7)
        assert "\n" not in str(stopped.value)
        assert len(server.seen) == 2
    assert (endpoint.report.num_lost, ledger.spent) == (2, endpoint.paid)
    assert (ledger.spent.requests, ledger.spent.completion_tokens) == (2, 14)
    assert ledger.spent.prompt_tokens >= 2 * len(PROMPT)


@pytest.mark.parametrize("name", LOST)
def test_what_is_no_answer_is_missing_and_not_wrong(name, ledger):
    with faulty_server([lambda body: LOST[name]()] * 50) as server:
        (reply,) = an_endpoint(server, ledger, timeout_s=patience(name), deadline_s=patience(name)).generate([PROMPT])
        assert (reply.state, reply.text, len(ledger)) == ("api_missing", "", 0)
        assert reply.problem
        assert reply.problem.isprintable()
        assert len(reply.problem) < 300
        assert len(server.seen) == ledger.spent.requests == 1


@pytest.mark.parametrize("name", PASSING)
def test_an_error_however_put_is_missing_and_costs_nothing(name, ledger):
    with faulty_server([lambda body: PASSING[name]()] * 1000) as server:
        endpoint = an_endpoint(server, ledger, deadline_s=AMPLE_S + 0.2)  # asked again as long as that
        try:
            (reply,) = endpoint.generate([PROMPT])
            said = reply.problem
            assert reply.state == "api_missing"
        except RunStopped as stopped:
            assert name.startswith("503")
            said = str(stopped)
        assert "HTTP " in said
        assert said.isprintable()
        assert len(said) < 500
        assert (len(ledger), ledger.spent, endpoint.paid) == (0, Spent(), Spent())
        assert server.seen


@pytest.mark.parametrize("name", STOPS)
def test_what_concerns_all_stops_the_run_in_one_line(name, ledger):
    pieces, words = STOPS[name]
    with faulty_server([lambda body: pieces()] * 50) as server:
        with pytest.raises(RunStopped, match=words) as stopped:
            an_endpoint(server, ledger).generate([PROMPT] * 3)
        assert str(stopped.value).isprintable()
        assert len(str(stopped.value)) < 500
        assert len(server.seen) == 1
    assert len(ledger) == 0
    assert ledger.spent.requests == (words.startswith("sends"))  # who sends on may have taken it


@pytest.mark.parametrize("name", TAKEN)
def test_what_is_odd_is_taken_for_what_it_says_and_counted(name, ledger):
    pieces, text, (prompt, completion) = TAKEN[name]
    with faulty_server([lambda body: pieces()] * 50) as server:
        endpoint = an_endpoint(server, ledger, max_requests=1)
        (reply,) = endpoint.generate([PROMPT], max_new_tokens=7)
        assert (reply.state, reply.text) == ("ok", text)
        assert len(server.seen) == ledger.spent.requests == 1
        assert ledger.spent.completion_tokens == (7 if completion is None else completion)
        assert ledger.spent.prompt_tokens >= len(PROMPT) if prompt is None else ledger.spent.prompt_tokens == prompt
        assert endpoint.generate([PROMPT], max_new_tokens=7) == [reply]  # as it is read back
