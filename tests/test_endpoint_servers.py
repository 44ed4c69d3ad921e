"""What servers say in their own ways is taken for what it means, and never for more: names of models, addresses,
variables of the environment, echoes, and what a run folder of somebody else claims."""

import base64
import json
import logging
import traceback
import zlib

import pytest
from faulty_server import MODEL, FaultyServer, faulty_server, prompt_of, running
from hostile_replies import good, http, whole

import iclperm
from iclperm import Study
from iclperm.endpoint import Endpoint, Ledger, Pace, Spent
from iclperm.endpoint.keys import KeyHosts
from iclperm.endpoint.ledger import paid
from iclperm.endpoint.replies import (
    RequestResult,
    as_echoed,
    as_listed,
    checked_reply,
    compact,
    is_version_of,
    refuse_numberless,
)
from iclperm.endpoint.secret import KeyCutter
from iclperm.errors import ConfigError, RunStopped
from iclperm.study.endpoint import EndpointChoices

PACE = Pace(first_s=0.002, most_s=0.01)
SECRET = "s3cret/with+signs=and-0123456789"
VARIABLE = "MY_API_KEY"


@pytest.fixture(autouse=True)
def _key(monkeypatch):
    monkeypatch.setenv(VARIABLE, SECRET)


def an_endpoint(server: FaultyServer, ledger: Ledger | None = None, **choices) -> Endpoint:
    choices = {"model": MODEL, "timeout_s": 30.0, "deadline_s": 60.0, **choices}
    return Endpoint(choices.pop("base_url", server.url), ledger=ledger, pace=PACE, **choices)


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("llama3.2", "llama3.2:latest"),
        ("llama3.2:latest", "llama3.2"),
        ("google/gemma-3-27b-it:free", "google/gemma-3-27b-it"),
        ("google/gemma-3-27b-it:free", "google/gemma-3-27b-it:free"),
        ("openai/gpt-4o:nitro", "openai/gpt-4o-2024-08-06"),
        ("gemini-2.0-flash", "models/gemini-2.0-flash"),
        ("models/gemini-2.0-flash", "gemini-2.0-flash"),
        ("gemini-2.0-flash", "gemini-2.0-flash-001"),
        ("gpt-4o", "gpt-4o-2024-08-06"),
    ],
)
def test_a_name_that_says_the_same_is_the_same_model(asked, name):
    with faulty_server([f"model {name}"]) as server:
        endpoint = an_endpoint(server, model=asked)
        assert endpoint.generate(["?"])[0].state == "ok"
        assert endpoint.served_as == name


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("llama3.2", "llama3.2:1b"),
        ("llama3.2:latest", "llama3.2:1b"),
        ("llama3.2:1b", "llama3.2:latest"),
        ("google/gemma-3-27b-it", "google/gemma-3-27b-it:free"),
        ("google/gemma-3-27b-it:free", "google/gemma-3-12b-it"),
        ("google/gemma-3-27b-it:free", "gemma-3-27b-it"),
        ("gemini-2.0-flash", "models/gemini-2.0-flash-lite"),
        ("gemini-2.0-flash", "tunedModels/gemini-2.0-flash"),
        ("qwen3:thinking", "qwen3"),
        (":latest", ""),
        ("models/", ""),
        (":free", "-2024"),
        ("demo", "Demo"),
        ("m-70", "m-001"),
    ],
)
def test_a_name_that_may_be_another_models_is_refused(asked, name):
    assert not is_version_of(name, asked)


def test_another_of_the_names_in_the_middle_of_a_run_is_seen(tmp_path):
    with faulty_server(["model m", "model m:latest"]) as server, Ledger(tmp_path) as ledger:
        endpoint = an_endpoint(server, ledger, model="m")
        endpoint.generate(["first"])
        with pytest.raises(RunStopped, match="'m:latest' now"):
            endpoint.generate(["second"])
        assert (endpoint.served_as, len(ledger), ledger.spent.requests) == ("m", 1, 2)


@pytest.mark.parametrize(
    ("tokens", "usage", "state", "value"),
    [  # the prompt is "Q a", its label " a", which the first of several as likely tokens repeats
        (["Q", " a", " a"], {"prompt_tokens": 2, "completion_tokens": 0}, "ok", -1.0),  # one was made all the same
        (["Q", " a", " a"], {"prompt_tokens": 2, "completion_tokens": 1}, "ok", -1.0),
        (["Q", " a", " a"], {}, "ok", -1.0),
        (["Q", " a"], {"prompt_tokens": 2, "completion_tokens": 0}, "ok", -1.0),  # llama-cpp-python, at an end of text
        (["Q", " a"], {"prompt_tokens": 2, "completion_tokens": 1}, "ok", -1.0),  # an end of text that is not listed
        (["<s>", "Q", " a", " a"], {"prompt_tokens": 3, "completion_tokens": 0}, "ok", -1.0),
        (["Q", " a", ""], {"prompt_tokens": 2, "completion_tokens": 1}, "ok", -1.0),
        (["q", " a", " a"], {"prompt_tokens": 2, "completion_tokens": 0}, "invalid", None),  # as a lower-casing one
        (["q", " a", " a"], {"prompt_tokens": 2, "completion_tokens": 1}, "ok", -1.0),
        (["Q", " ab"], {"prompt_tokens": 2, "completion_tokens": 0}, "invalid", None),
    ],
)
def test_a_generated_token_is_never_scored_for_the_label(tokens, usage, state, value):
    values = [None if at == 0 else -1.0 if token == " a" and " a" not in tokens[:at] else -7.0
              for at, token in enumerate(tokens)]  # fmt: skip
    choice = {"text": "".join(tokens), "logprobs": {"tokens": tokens, "token_logprobs": values}}
    reply = checked_reply({"model": "m", "choices": [choice], "usage": usage})
    kept = compact(reply, " a", frozenset(), "Q a")
    for each in (kept, checked_reply(json.loads(json.dumps(kept)))):
        scored = as_echoed([RequestResult("ok", each, "")], [" a"])
        assert scored.state == state
        assert value is None or scored.logprob == (value,)


def test_a_repetitive_prompt_is_scored_at_its_own_last_token():
    prompt = "a" + " a" * 40

    def echo(body):
        tokens = ["a"] + [" a"] * 41
        values = [None] + [-1.0] * 39 + [-2.0, -9.0]
        logprobs = {"tokens": tokens, "token_logprobs": values}
        text = prompt_of(body) + " a"
        usage = {"prompt_tokens": 41, "completion_tokens": 0}
        if prompt_of(body) != prompt:  # the probe
            text, logprobs = "One two three four x", {"tokens": ["One two three", " four", "x"],
                                                      "token_logprobs": [None, -1.0, -1.0]}  # fmt: skip
        choice = {"text": text, "logprobs": logprobs, "finish_reason": "length"}
        return whole(good(choices=[choice], model=MODEL, usage=usage))()

    with faulty_server([echo] * 9) as server:
        found = an_endpoint(server, api="completions").loglikelihood([(prompt[:-2], " a")])
    assert found.state == ["ok"]
    assert found.logprob.tolist() == [-2.0]


AZURE = "/openai/deployments/mine?api-version=2024-10-21"


def test_azures_older_api_is_asked_as_it_wants():
    paths = []

    class Azure(FaultyServer):
        def content(self, body):
            return {**super().content(body), "prompt_filter_results": [{"prompt_index": 0}]}

    with running(Azure()) as server:
        server.RequestHandlerClass = type(
            "Noting", (server.RequestHandlerClass,), {"parse_request": lambda self: _noted(self, paths)}
        )
        base = server.url.removesuffix("/v1")
        endpoint = an_endpoint(server, base_url=base + AZURE, api_key_env=VARIABLE)
        assert endpoint.generate(["?"])[0].state == "ok"
        an_endpoint(server, base_url=base + "/openai/v1/?api-version=preview").generate(["?"])
        (headers, other) = server.headers
    assert paths == [
        "/openai/deployments/mine/chat/completions?api-version=2024-10-21",
        "/openai/v1/chat/completions?api-version=preview",
    ]
    assert (headers["api-key"], "authorization" in headers) == (SECRET, False)
    assert not {"api-key", "authorization"} & set(other)


def _noted(handler, paths):
    found = type(handler).__mro__[1].parse_request(handler)
    paths.append(handler.path)
    return found


def test_azures_address_names_its_host_and_nothing_else_is_taken_as_a_query():
    url = "https://me.openai.azure.com/openai/v1/?api-version=2025-04-01-preview"
    choices = EndpointChoices(base_url=url, model="m", api_key_env=VARIABLE)
    assert choices.base_url == "https://me.openai.azure.com/openai/v1?api-version=2025-04-01-preview"
    assert str(choices.address) == "me.openai.azure.com"
    KeyHosts({VARIABLE: "me.openai.azure.com"}).refuse_unnamed(choices)
    version = "api-version=2024-10-21"
    for query in ("?api-version=sk-0123456789", "?key=2024-10-21", f"?{version}&key=x", f"?key=x&{version}",
                  f"#{version}", f"?{version}\n", "?"):  # fmt: skip
        with pytest.raises(ConfigError, match="may hold a secret"):
            EndpointChoices(base_url="https://me.openai.azure.com/openai/v1" + query, model="m")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("ALL_PROXY", "socks5://u:pass-word@127.0.0.1:1", "ALL_PROXY names a SOCKS proxy.*pip install socksio"),
        ("all_proxy", "foo://u:pass-word@127.0.0.1:1", "all_proxy names no proxy .*give http://HOST:PORT"),
        ("HTTP_PROXY", "http://[::1", "HTTP_PROXY names no proxy"),
        ("HTTPS_PROXY", "http://h:99999", "HTTPS_PROXY names no proxy"),
        ("SSL_CERT_FILE", "/nowhere/ca.pem", "SSL_CERT_FILE is '/nowhere/ca.pem'.*No such file.*correct or unset"),
        ("SSL_CERT_FILE", "/", "SSL_CERT_FILE is '/'.*directory"),
        ("SSL_CERT_FILE", "/proc/self/status", "SSL_CERT_FILE is '/proc/self/status', not a file of certificates"),
    ],
)
def test_a_variable_that_cannot_be_followed_is_named(name, value, said, monkeypatch):
    monkeypatch.setenv(name, value)
    with faulty_server() as server:
        with pytest.raises(ConfigError, match=said) as refused:
            an_endpoint(server, api_key_env=VARIABLE).generate(["?"])
        assert server.seen == []
    shown = "".join(traceback.format_exception(refused.value))
    assert "pass-word" not in shown
    assert "\n" not in str(refused.value)


def test_a_proxy_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with pytest.raises(RunStopped, match="at the proxy that HTTP_PROXY names") as stopped:
        Endpoint("http://somewhere.example/v1", "m", pace=PACE, timeout_s=1.0, deadline_s=1.0).generate(["?"])
    assert "HTTPS_PROXY" not in str(stopped.value)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://[1.2.3]/v1", r"'http://\[1.2.3\]/v1': \[1.2.3\] is no name and no address"),
        ("http://[:::]/v1", "no name and no address"),
        ("http://256.1.1.1/v1", "256.1.1.1 is no name and no address"),
        ("http://a..b/v1", "a..b is no name"),
        (f"http://{'a' * 64}/v1", "is no name"),
        ("http://", "'http://': give a URL such as"),
        ("http://host:99999", "there is no port 99999; give one from 1 to 65535"),
    ],
)
def test_an_address_of_no_host_is_named(url, said):
    with pytest.raises(ConfigError, match=said) as refused:
        EndpointChoices(base_url=url, model="m")
    assert "\n" not in str(refused.value)


def exceptions(error):
    """An exception and all that it holds, shown or not."""
    while error is not None:
        yield error
        yield from exceptions(error.__cause__)
        error = error.__context__


ECHOES = {
    "reason": lambda: http(b"{}", f"401 you sent {SECRET}"),
    "reason of a good one": lambda: http(json.dumps(good()).encode(), f"200 {SECRET}"),
    "headers": lambda: http(json.dumps(good()).encode(), headers={"X-Sent": SECRET, "X-Request-Id": SECRET}),
    "an error": lambda: http(json.dumps({"error": {"message": SECRET, "code": SECRET}}).encode(), "401 No"),
    "no JSON": lambda: http(f"<html>{SECRET}</html>".encode()),
    "no UTF-8": lambda: http(f"\xff{SECRET}".encode("latin-1")),
    "no reply": lambda: http(json.dumps({"choices": [{"message": {"content": [SECRET]}}], SECRET: 1}).encode()),
    "no HTTP": lambda: f"{SECRET}\r\n\r\n".encode(),
    "no header": lambda: f"HTTP/1.1 200 OK\r\n{SECRET}\r\n\r\n".encode(),
    "no chunk": lambda: b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + SECRET.encode() + b"\r\n",
    "no coding": lambda: http(b"", headers={"Content-Encoding": SECRET}),
    "sent on": lambda: http(b"", "302 Found", {"Location": f"http://x/{SECRET}"}),
    "another model": lambda: http(json.dumps(good(model=SECRET)).encode()),
}


@pytest.mark.parametrize("name", ECHOES)
def test_a_key_is_in_no_log_and_in_no_exception(name, caplog, capfd, tmp_path):
    caplog.set_level(logging.DEBUG)
    found, said = [], []
    with faulty_server([lambda _: iter([ECHOES[name]()])] * 9) as server, Ledger(tmp_path) as ledger:
        endpoint = an_endpoint(server, ledger, api_key_env=VARIABLE, timeout_s=20.0, deadline_s=20.0)
        try:
            found = endpoint.generate(["?"])
        except RunStopped as stopped:
            said += traceback.format_exception(stopped)
            for error in exceptions(stopped):
                said += [repr(error), str(error.args), str(vars(error))]
        assert server.headers[0]["authorization"] == f"Bearer {SECRET}"
    assert len(caplog.records) > 5  # the libraries did log
    said += [record.getMessage() + str(record.exc_info) + str(vars(record)) for record in caplog.records]
    said += [repr(found), caplog.text, *capfd.readouterr()]
    said += [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    for text in said:
        assert SECRET not in text
        assert json.dumps(SECRET)[1:-1] not in text
    for logger in logging.root.manager.loggerDict.values():  # as they were before
        assert not [each for each in getattr(logger, "filters", ()) if "iclperm" in type(each).__module__]


def test_a_record_whose_values_do_not_fit_stops_nothing(caplog):
    import openai  # whose loggers are there only then

    logger = logging.getLogger(openai._base_client.__name__)
    caplog.set_level(logging.DEBUG)

    def meanwhile(body):
        logger.debug("%d of %s", SECRET)
        logger.debug("sent %s", SECRET, exc_info=ValueError(SECRET))
        return "ok"

    with faulty_server([meanwhile]) as server:
        assert an_endpoint(server, api_key_env=VARIABLE).generate(["?"])[0].state == "ok"
    assert "%d of %s" in caplog.text
    assert "sent [key] (ValueError)" in caplog.text
    assert SECRET not in caplog.text


def test_a_key_spread_over_tokens_alone_is_not_kept(tmp_path):
    pieces = [{"token": piece, "logprob": -1.0, "bytes": [*piece.encode()]} for piece in (SECRET[:9], SECRET[9:])]
    choice = {"message": {"role": "assistant", "content": "hello"}, "logprobs": {"content": pieces}}
    honest = [{"token": "hello", "logprob": -1.0, "bytes": [*SECRET.encode()], "top_logprobs": []}]
    answers = [good(choices=[choice]), good(choices=[{**choice, "logprobs": {"content": honest}}])]
    faults = [lambda _, each=each: iter([http(json.dumps(each).encode())]) for each in answers]
    with faulty_server(faults) as server, Ledger(tmp_path) as ledger:
        endpoint = an_endpoint(server, ledger, api_key_env=VARIABLE)
        first, second = endpoint.generate(["?", "!"])
    assert (first.text, first.logprob) == ("hello", None)
    assert (second.text, second.logprob) == ("hello", -1.0)
    (kept,) = [path.read_text() for path in tmp_path.rglob("*.jsonl")]
    assert SECRET[:9] not in kept
    assert str(list(SECRET.encode()))[1:20] not in kept.replace(",", ", ")


def planted(folder, key="x", **reply):
    """A ledger as somebody else may have put it into a folder."""
    entry = {"key": key, "model": MODEL, "time": "t", "spent": [1, 2, 0, 1], "reply": reply}
    raw = json.dumps(entry).encode()
    (folder / "api").mkdir(parents=True, exist_ok=True)
    with (folder / "api/0.jsonl").open("ab") as file:
        file.write(b'{"crc32":"%08x","entry":' % zlib.crc32(raw) + raw + b"}\n")


def test_what_a_planted_ledger_claims_was_not_said_by_this_server(tmp_path):
    planted(tmp_path, model="evil-9", choices=[{"message": {"content": "x"}}])
    with faulty_server() as server, Ledger(tmp_path) as ledger:
        endpoint = an_endpoint(server, ledger)
        assert endpoint.served_as is None
        assert endpoint.generate(["?"])[0].state == "ok"  # no name of the model's: no reply of its
        assert endpoint.served_as == MODEL


def test_a_planted_version_is_named_as_kept_and_not_as_said(tmp_path):
    planted(tmp_path, model=f"{MODEL}-2024-01-01", choices=[{"message": {"content": "x"}}])
    with faulty_server() as server, Ledger(tmp_path) as ledger:
        endpoint = an_endpoint(server, ledger)
        with pytest.raises(RunStopped, match=f"answers as '{MODEL}' now, and replies that are kept in this run are of "
                                             f"'{MODEL}-2024-01-01'"):  # fmt: skip
            endpoint.generate(["?"])
        assert endpoint.served_as is None


def test_a_kept_reply_of_another_model_is_paid_for_anew_and_a_mixture_stops(tmp_path):
    with faulty_server() as server, Ledger(tmp_path / "mine") as ledger:
        endpoint = an_endpoint(server, ledger)
        endpoint.generate(["one", "two"])
        keys = [json.loads(line)["entry"]["key"] for path in (tmp_path / "mine/api").iterdir()
                for line in path.read_text().splitlines() if '"settles"' in line]  # fmt: skip
    said = [{"message": {"content": "planted"}}]
    for key in keys:
        planted(tmp_path / "other", key, model="evil-9", choices=said)
    with faulty_server() as server, Ledger(tmp_path / "other") as ledger:
        replies = an_endpoint(server, ledger).generate(["one", "two"])
        assert [reply.text for reply in replies] == [server.content({"prompt": p})["choices"][0]["text"] for p in
                                                     ("one", "two")]  # fmt: skip
        assert server.paid.total() == 2
    for key, version in zip(keys, ("2024-01-01", "2024-02-02"), strict=True):
        planted(tmp_path / "mixed", key, model=f"{MODEL}-{version}", choices=said)
    with faulty_server() as server, Ledger(tmp_path / "mixed") as ledger:
        with pytest.raises(RunStopped, match=r"kept in this run are of 'faulty-1-2024-0.*' and of 'faulty-1-2024-0"):
            an_endpoint(server, ledger).generate(["one", "two"])
        assert server.seen == []


def test_folders_of_one_budget_that_are_begun_later_count(tmp_path):
    folders = [tmp_path / name for name in ("a", "b", "c")]

    def others(own):
        return [folder for folder in folders if folder != own and (folder / "api").is_dir()]

    with faulty_server() as server:
        ledgers = [Ledger(folder, lambda folder=folder: others(folder)) for folder in folders]  # none has begun
        endpoints = [an_endpoint(server, ledger, max_requests=7) for ledger in ledgers]
        for number in range(2):
            for endpoint in endpoints:
                endpoint.generate([f"{number} of {id(endpoint)}"])
        endpoints[0].generate(["seventh"])
        for number, endpoint in enumerate(endpoints):
            with pytest.raises(RunStopped, match=r"max_requests \(8 of 7\)"):
                endpoint.generate([f"beyond {number}"])
        assert len(server.seen) == 7
        assert sum((paid(folder).spent for folder in folders), Spent()).requests == 7
        for ledger in ledgers:
            ledger.close()


def test_runs_of_one_study_see_each_others_bills_as_they_grow(tmp_path):
    """Two processes work on two runs of a study: what one pays for meanwhile counts for the other."""
    (tmp_path / "FORMAT").write_text("iclperm-runs 1\n")
    study = Study(
        endpoint={"base_url": "http://x/v1", "model": MODEL, "max_requests": 9},
        sets=1, permutations=2, shots=2, queries=6, scoring="generate", max_new_tokens=3,
    )  # fmt: skip
    with faulty_server() as server, Ledger(tmp_path / "other") as other:

        def meanwhile(body):
            other.append(f"key {len(server.seen)}", model=MODEL, spent=Spent(1, 1, 0, 1), reply=None)
            return "ok"

        server.faults = iter([meanwhile] * 100)
        endpoint = study.endpoint.model_copy(update={"base_url": server.url})
        with pytest.raises(RunStopped, match="max_requests"):
            iclperm.run(study.model_copy(update={"endpoint": endpoint}), tmp_path / "mine")
        assert len(server.seen) + paid(tmp_path / "other").spent.requests <= 9 + 1  # the last was on its way by then
        assert len(server.seen) == 5


NESTED = {
    "base64 in lines": lambda key: _in_lines(key, "\n"),
    "base64 in lines of mail": lambda key: _in_lines(key, "\r\n"),
    "base64 in lines in JSON": lambda key: json.dumps(_in_lines(key, "\r\n")),
    "hexadecimal with colons": lambda key: key.encode().hex(":"),
    "hexadecimal with blanks": lambda key: key.encode().hex(" ").upper(),
    "hexadecimal with hyphens": lambda key: key.encode().hex("-"),
    "hexadecimal of a program": lambda key: ", ".join(hex(byte) for byte in key.encode()),
    "JSON in a URL": lambda key: "".join(f"%5Cu{ord(sign):04x}" for sign in key),
    "JSON in a URL in a URL": lambda key: "".join(f"%255Cu{ord(sign):04x}" for sign in key),
    "a URL in HTML": lambda key: "".join(f"&#37;{ord(sign):02x}" for sign in key),
    "HTML in a URL": lambda key: "".join(f"%26%23{ord(sign)}%3B" for sign in key),
    "JSON in JSON in JSON": lambda key: json.dumps(json.dumps(json.dumps({"sent": key}))),
    "JSON of escapes in JSON": lambda key: json.dumps(json.dumps("".join(f"\\u{ord(sign):04x}" for sign in key))),
    "mail in broken lines": lambda key: "=\r\n".join(f"={ord(sign):02X}" for sign in key),
}


def _in_lines(key, end):
    return base64.encodebytes(f"{'x' * 50}{key}{'y' * 60}".encode()).decode().replace("\n", end)


@pytest.mark.parametrize("form", NESTED)
@pytest.mark.parametrize("key", [SECRET, "sk-" + "aB3_" * 40, "9x=41\\%41&amp;abcd", "eight888"])
def test_a_key_in_lines_between_signs_or_twice_escaped_is_cut(form, key):
    echo = NESTED[form](key)
    left = KeyCutter(key).cut(f"you sent {echo}!")
    assert "[key]" in left
    assert echo not in left


@pytest.mark.parametrize("text", ["%5Cu0041 is A, &amp;#65; too", "12:34:56:78:9a:bc:de:f0 is an address", "x" * 7,
                                  "0x12, 0x34", "\\frac{1}{2} = 50\\%", "a\nb c=\n d"])  # fmt: skip
def test_escapes_of_something_else_stay(text):
    assert KeyCutter(SECRET).cut(text) == text


@pytest.mark.parametrize(
    ("usage", "spent"),
    [
        ({"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}, (5, 2)),
        ({"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 210}, (5, 205)),  # reasoning, as Gemini counts
        ({"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 3}, (5, 2)),
        ({"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": "x"}, (5, 2)),
        ({"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}, (None, 7)),
        ({"prompt_tokens": 0, "completion_tokens": 2, "total_tokens": 2}, (None, 2)),
        ({"total_tokens": 999}, (None, 999 - 5 - 16)),  # more than the bound: what it is over the prompt's
    ],
)
def test_what_was_paid_for_is_not_what_nobody_counted(usage, spent, tmp_path):
    with faulty_server([lambda _: whole(good(usage=usage))()]) as server, Ledger(tmp_path) as ledger:
        an_endpoint(server, ledger).generate(["what?"], max_new_tokens=7)
        prompt, completion = spent
        assert ledger.spent.completion_tokens == completion
        assert ledger.spent.prompt_tokens >= len("what?") if prompt is None else ledger.spent.prompt_tokens == prompt
        assert paid(tmp_path).spent == ledger.spent


def echo_of(text, tokens, values, **usage):
    logprobs = {"tokens": tokens, "token_logprobs": values}
    return good(choices=[{"text": text, "logprobs": logprobs, "finish_reason": "length"}], model=MODEL, usage=usage)


def test_the_echo_of_another_prompt_is_no_score():
    """It ends in the same label: by its tokens alone it could not be told from the right one."""

    def mixed_up(body):
        asked = prompt_of(body)
        if asked.startswith("One two"):
            return whole(echo_of(asked, ["One two three", " four"], [None, -1.0]))()
        if asked.startswith("cut"):  # from its left, as a server does whose window is too short
            return whole(echo_of("short. a", ["short.", " a"], [None, -2.0]))()
        other = asked.replace("mine", "yours")
        return whole(echo_of(other, [other[:-2], " a"], [None, -3.0]))()

    with faulty_server([mixed_up] * 9) as server:
        endpoint = an_endpoint(server, api="completions")
        found = endpoint.loglikelihood([("mine is", " a"), ("yours is", " a"), ("cut me short.", " a")])
    assert found.state == ["invalid", "ok", "invalid"]
    assert found.logprob[1] == -3.0


def test_an_echo_may_differ_in_signs_and_case():
    def lossy(body):
        text = prompt_of(body).lower().replace("\n", " ").replace("ü", "\ufffd")
        return whole(echo_of(text, ["<s>", text[:-5], text[-5:], "!"], [None, -1.0, -2.0, -9.0],
                             prompt_tokens=3, completion_tokens=1))()  # fmt: skip

    with faulty_server([lossy] * 9) as server:
        found = an_endpoint(server, api="completions").loglikelihood([("Grün\nor", " four")])
    assert (found.state, found.logprob.tolist()) == (["ok"], [-2.0])


REFUSALS = {
    "overlong of Gemini": ("400", [{"error": {"message": "The input token count (2000) exceeds the maximum number of "
                                                         "tokens allowed (1000).", "code": 400}}], "overlong"),
    "overlong of Anthropic": ("400", {"error": {"message": "prompt is too long: 2 tokens > 1 maximum"}}, "overlong"),
    "overlong of TGI": ("422", {"error": {"message": "Input validation error: `inputs` tokens + `max_new_tokens` must "
                                                     "be <= 4097. Given: 5000"}}, "overlong"),
    "flagged by OpenRouter": ("403", {"error": {"message": 'Your input was flagged for "violence".'}}, "refused"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_in_a_providers_own_words_is_of_one_prompt(name):
    status, said, state = REFUSALS[name]
    with faulty_server([lambda _: whole(said, status=f"{status} No")()]) as server:
        first, second = an_endpoint(server).generate(["?", "!"])
    assert (first.state, second.state) == (state, "ok")
    assert not first.problem.startswith("[")


def test_no_credit_is_no_credit_in_any_words():
    said = {"error": {"message": "This request requires more credits, or fewer max_tokens.", "code": 402}}
    answer = whole(said, status="402 Payment Required")
    with faulty_server([lambda _: answer()]) as server, pytest.raises(RunStopped, match="wants to be paid"):
        an_endpoint(server).generate(["?"])


def test_log_probabilities_in_words_are_none():
    top = [{"token": "a", "logprob": "-1.0"}, {"token": "b", "logprob": "-2.0"}]
    choice = {**good()["choices"][0], "logprobs": {"content": [{"token": "a", "logprob": "-1.0", "top_logprobs": top}]}}
    said = "gives no log-likelihoods: use scoring: generate"
    answer = whole(good(choices=[choice]))
    with faulty_server([lambda _: answer()] * 9) as server, pytest.raises(ConfigError, match=said):
        an_endpoint(server).loglikelihood([("Q:", " a")])


@pytest.mark.parametrize("order", [(-3.0, -1.0), (-1.0, -3.0)])
def test_a_token_that_is_listed_twice_counts_as_its_likeliest_in_any_order(order):
    top = [{"token": "a", "logprob": value} for value in order] + [{"token": "b", "logprob": -2.0}]
    content = [{"token": "b", "logprob": -2.0, "top_logprobs": top}]
    reply = checked_reply({"model": "m", "choices": [{"message": {"content": "b"}, "logprobs": {"content": content}}]})
    scored = as_listed(RequestResult("ok", reply, ""), ["a", "b"])
    assert scored.logprob == (-1.0, -2.0)


@pytest.mark.parametrize(
    ("logprobs", "decides"),
    [
        (None, True),
        ({"tokens": ["a", "b"], "token_logprobs": [None, -1.0]}, True),
        ({"content": []}, True),
        ({"tokens": ["a", "b"], "token_logprobs": [None, None]}, False),
        ({"tokens": ["a", "b"], "token_logprobs": []}, False),
        ({"tokens": None, "token_logprobs": [-1.0, -2.0]}, False),
        ([1, 2], False),
    ],
)
def test_a_probe_whose_numbers_do_not_fit_its_tokens_decides_nothing(logprobs, decides):
    reply = {"choices": [{"logprobs": logprobs}]}
    if decides:
        refuse_numberless(reply)
    else:
        with pytest.raises(ValueError, match="log-probabilit"):
            refuse_numberless(reply)
