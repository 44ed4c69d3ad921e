"""A key goes to a host that the user named and to no other, and comes back from none."""

import base64
import html
import json
import logging
import os
import pty
import subprocess
import sys
import time
import traceback
from urllib.parse import quote

import pytest
import yaml
from faulty_server import MODEL, faulty_server
from hostile_replies import good, http, said
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import iclperm
from iclperm import Study
from iclperm.cli import main as cli
from iclperm.endpoint import Endpoint, Ledger, Pace
from iclperm.endpoint.keys import KeyHosts
from iclperm.endpoint.secret import KeyCutter
from iclperm.errors import ConfigError, KeyNotNamed, RunStopped
from iclperm.study.endpoint import EndpointChoices

SECRET = "s3cret/with+signs=and-0123456789"
VARIABLE = "AWS_SECRET_ACCESS_KEY"
SIZES = {"sets": 1, "permutations": 2, "shots": 2, "queries": 3, "scoring": "generate", "max_new_tokens": 3}
PACE = Pace(first_s=0.002, most_s=0.01)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A user with a key and nothing named."""
    monkeypatch.setenv(VARIABLE, SECRET)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


def asking(server, **choices):
    """A study as a stranger may send it: its address wants a key of the user's."""
    return Study(endpoint={"base_url": server.url, "model": MODEL, "api_key_env": VARIABLE} | choices, **SIZES)


def place(server):
    return f"127.0.0.1:{server.server_address[1]}"


def configure(home, text, mode=0o600):
    folder = home / "config/iclperm"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "keys.yaml").write_text(text)
    (folder / "keys.yaml").chmod(mode)
    return folder / "keys.yaml"


def has_key(server):
    return [SECRET in headers.get("authorization", "") for headers in server.headers]


def call(*arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main(list(map(str, arguments)))
    return ended.value.code


def test_a_study_sends_no_key_anywhere_by_itself(home, capfd):
    with faulty_server() as server:
        study = asking(server)
        (home / "study.yaml").write_text(study.to_yaml())
        with pytest.raises(KeyNotNamed) as refused:
            iclperm.run(study, home / "run")
        assert call("run", home / "study.yaml", "--out", home / "other") == 2
        assert server.seen == []
    flag = f"--send-key {VARIABLE}={place(server)}"
    told = capfd.readouterr().err
    for words in (str(refused.value), told):
        assert all(part in words for part in (flag, VARIABLE, place(server)))
        assert words.strip().count("\n") == 0
    assert not (home / "run").exists()
    assert not (home / "other").exists()
    assert not (home / "state").exists()


@pytest.mark.parametrize(
    "named",
    [
        {VARIABLE: "127.0.0.1"},
        {VARIABLE: "127.0.0.1:1"},
        {VARIABLE: "localhost:{port}"},
        {"OPENAI_API_KEY": "127.0.0.1:{port}"},
        {VARIABLE: []},
    ],
)
def test_another_host_port_or_variable_is_not_what_was_named(named, home):
    with faulty_server() as server:
        given = {key: host and host.format(port=server.server_address[1]) for key, host in named.items()}
        with pytest.raises(KeyNotNamed):
            iclperm.run(asking(server), home / "run", send_keys=given)
        assert server.seen == []


@pytest.mark.parametrize("how", ["flag", "two flags", "words", "python", "list", "memory", "file", "file of several"])
def test_a_host_that_the_user_named_gets_the_key(how, home):
    with faulty_server() as server:
        study = asking(server)
        (home / "study.yaml").write_text(study.to_yaml())
        there, run = place(server), home / "run"
        if "flag" in how:
            flags = ["--send-key", f"{VARIABLE}={there}"]
            more = ["--send-key", f"{VARIABLE}=api.example.com"] if how == "two flags" else []
            assert call("run", home / "study.yaml", "--out", run, *more, *flags) == 0
        elif how == "words":
            (home / "study.yaml").write_text(
                Study(endpoint={"base_url": "http://x/v1", "model": "x"}, **SIZES).to_yaml()
            )
            words = f"base_url={server.url},model={MODEL},api_key_env={VARIABLE}"
            assert call("run", home / "study.yaml", "--out", run, "--endpoint", words) == 0
        elif how == "python":
            iclperm.run(study, run, send_keys={VARIABLE: there})
        elif how == "list":
            iclperm.run(study, run, send_keys={VARIABLE: ["api.example.com", there], "ANOTHER_KEY": "x.example"})
        elif how == "memory":
            iclperm.run(study, send_keys={VARIABLE: there})
        else:
            hosts = [there] if how == "file" else ["api.example.com", there]
            configure(home, yaml.safe_dump({VARIABLE: hosts if len(hosts) > 1 else there}))
            iclperm.run(study, run)
        assert has_key(server) == [True] * server.paid.total()
        assert server.paid.total() == 6
    assert SECRET not in "".join(path.read_text("latin-1") for path in home.rglob("*") if path.is_file())
    # What is in the file already, or has no folder, needs no record.
    assert (home / "state").exists() == ("file" not in how and how != "memory")


@pytest.mark.parametrize(
    "flag", [SECRET, f"{VARIABLE}", f"{VARIABLE}=", f"={SECRET}", f"{VARIABLE}=a b", f"{VARIABLE}=http://x", "a=b",
             f"{VARIABLE}=x:0", f"{VARIABLE}=x:99999", f"{VARIABLE}=user@x", f"{VARIABLE}=x/y", f"{VARIABLE}=ü.example"]
)  # fmt: skip
def test_a_flag_of_another_form_is_refused_and_not_repeated(flag, home, capfd):
    with faulty_server() as server:
        (home / "study.yaml").write_text(asking(server).to_yaml())
        assert call("run", home / "study.yaml", "--out", home / "run", "--send-key", flag) == 2
        assert server.seen == []
    told = capfd.readouterr().err
    assert SECRET not in told
    assert told.strip().count("\n") == 0


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        ("{variable}: {there}", 0o620, "others may write"),
        ("{variable}: {there}", 0o602, "others may write"),
        ("{variable}: 5", 0o600, "keys.yaml must name"),
        ("{variable}: [{there}, 5]", 0o600, "keys.yaml must name"),
        ("{variable}: {{host: {there}}}", 0o600, "keys.yaml must name"),
        ("sk-key: {there}", 0o600, "keys.yaml must name"),
        ("- {variable}", 0o600, "keys.yaml: must be a mapping"),
        ("{variable}: [", 0o600, "keys.yaml: is not valid YAML"),
    ],
)
def test_a_file_that_others_may_write_or_that_says_nothing_clear_is_refused(text, mode, said, home):
    with faulty_server() as server:
        configure(home, text.format(variable=VARIABLE, there=place(server)), mode)
        with pytest.raises(ConfigError, match=said) as refused:
            iclperm.run(asking(server), home / "run")
        assert "\n" not in str(refused.value)
        assert server.seen == []


def test_a_link_in_a_folder_that_others_may_write_is_as_bad(home):
    with faulty_server() as server:
        file = configure(home, f"{VARIABLE}: {place(server)}")
        (home / "mine").mkdir(mode=0o700)
        file.symlink_to(file.rename(home / "mine/keys.yaml"))
        file.parent.chmod(0o777)
        with pytest.raises(ConfigError, match=f"others may write {file.parent}, which says where keys go"):
            iclperm.run(asking(server), home / "run")
        assert server.seen == []


def test_a_folder_that_others_may_write_is_as_bad_and_a_relative_one_counts_for_nothing(home, monkeypatch):
    with faulty_server() as server:
        file = configure(home, f"{VARIABLE}: {place(server)}")
        file.parent.chmod(0o777)
        with pytest.raises(ConfigError, match="others may write"):
            iclperm.run(asking(server))
        file.parent.chmod(0o700)
        monkeypatch.chdir(home)
        monkeypatch.setenv("HOME", str(home / "nowhere"))
        monkeypatch.setenv("XDG_CONFIG_HOME", "config")
        with pytest.raises(KeyNotNamed):
            iclperm.run(asking(server))
        assert server.seen == []


ASKED = """
import sys
from iclperm.cli.main import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize("answer", ["y", "n", ""])
def test_who_sits_at_a_terminal_is_asked_once(answer, home):
    with faulty_server() as server:
        (home / "study.yaml").write_text(asking(server).to_yaml())
        ours, theirs = pty.openpty()
        command = [sys.executable, "-c", ASKED, "run", str(home / "study.yaml"), "--out", str(home / "run")]
        process = subprocess.Popen(command, stdin=theirs, stderr=theirs, stdout=subprocess.DEVNULL, cwd=home)
        os.close(theirs)
        told = b""
        while b"[y/N]" not in told:
            told += os.read(ours, 1000)
        assert server.seen == []
        os.write(ours, f"{answer}\n".encode())
        while True:
            try:
                told += os.read(ours, 1000)
            except OSError:  # it has ended
                break
        code = process.wait(timeout=60)
        os.close(ours)
        assert told.count(b"[y/N]") == 1
        assert f"Send the key in {VARIABLE} to {place(server)}?".encode() in told
        assert (code, server.paid.total()) == ((0, 6) if answer == "y" else (2, 0))
        assert f"--send-key {VARIABLE}={place(server)}".encode() in told or answer == "y"


@pytest.fixture
def stopped(home):
    """A run that was named a host and stopped in the middle; its server, its study and its folder."""
    with faulty_server(["ok"] * 2 + ["401"] + ["ok"] * 100) as server:
        study = asking(server, concurrency=1)
        with pytest.raises(RunStopped, match="401"):
            iclperm.run(study, home / "run", send_keys={VARIABLE: place(server)})
        yield server, study, home / "run"


def test_what_was_named_is_recorded_outside_the_folder_and_holds_for_that_run_alone(stopped, home):
    server, study, run = stopped
    (record,) = (home / "state/iclperm/keys").iterdir()
    plan = json.loads((run / "plan.json").read_text())
    assert record.stem == plan["digest"]
    host, port = server.server_address[:2]
    assert json.loads(record.read_text()) == [{"variable": VARIABLE, "host": host, "port": port}]
    assert record.parent.stat().st_mode & 0o777 == 0o700
    assert not [path for path in run.rglob("*") if VARIABLE in path.name]
    num_before = len(server.seen)
    with pytest.raises(KeyNotNamed):  # another run
        iclperm.run(study.model_copy(update={"seed": 7}), home / "another")
    assert len(server.seen) == num_before
    os.chmod(record.parent.parent, 0o777)  # as with a umask that is too wide: the record is the user's all the same
    assert record.stat().st_mode & 0o777 == 0o600
    assert call("run", run) == 0  # the very same goes on
    assert all(has_key(server))
    record.unlink()
    assert call("run", run) == 0  # what is finished sends nothing, and asks for nothing


def test_a_folder_that_was_changed_is_asked_about_again(stopped, home, capfd):
    server, _, run = stopped
    num_before = len(server.seen)
    with faulty_server() as other:
        text = (run / "study.yaml").read_text()
        (run / "study.yaml").write_text(text.replace(server.url, other.url))
        assert call("run", run) == 2
        assert f"{VARIABLE}={place(other)}" in capfd.readouterr().err
        os.environ["OTHER_SECRET_KEY"] = SECRET
        try:
            (run / "study.yaml").write_text(text.replace(VARIABLE, "OTHER_SECRET_KEY"))
            assert call("run", run) == 2
        finally:
            del os.environ["OTHER_SECRET_KEY"]
        (run / "study.yaml").write_text(text)
        (home / "state/iclperm/keys" / f"{json.loads((run / 'plan.json').read_text())['digest']}.json").unlink()
        assert call("run", run) == 2
        assert f"--send-key {VARIABLE}={place(server)}" in capfd.readouterr().err
        assert other.seen == []
    assert len(server.seen) == num_before


@pytest.mark.parametrize("record", ["[", "[1]", "{}", '[{"variable": 1}]', "[" * 100_000, '[{"port": "x"}]', "\xff"])
def test_a_damaged_record_names_nothing(record, stopped, home):
    server, study, run = stopped
    (there,) = (home / "state/iclperm/keys").iterdir()
    there.write_text(record, "latin-1")
    with pytest.raises(KeyNotNamed):
        iclperm.run(study, run)
    there.write_text(json.dumps([{"variable": VARIABLE, "host": "127.0.0.1", "port": server.server_address[1]}]))
    there.chmod(0o666)
    with pytest.raises(ConfigError, match="others may write"):
        iclperm.run(study, run)


def test_a_plan_of_another_study_lends_its_id_to_nothing(stopped, home):
    server, study, run = stopped
    num_before = len(server.seen)
    other = home / "other"
    other.mkdir()
    for name in ("FORMAT", "plan.json"):
        (other / name).write_bytes((run / name).read_bytes())
    with pytest.raises(KeyNotNamed):
        iclperm.run(study.model_copy(update={"max_new_tokens": 50}), other)
    plan = json.loads((run / "plan.json").read_text())
    (other / "plan.json").write_text(json.dumps({**plan, "task": "mine"}))  # its digest is not its own any more
    with pytest.raises(KeyNotNamed):
        iclperm.run(study, other)
    assert len(server.seen) == num_before


def test_a_study_of_several_runs_needs_one_word_for_all_and_goes_on_without(home):
    choices = {
        "kind": "selection",
        "permutations": 6,
        "shots": 4,
        "select": 2,
        "dev_queries": 4,
        "queries": 4,
        "sets": 1,
    }
    with faulty_server(["ok"] * 30 + ["401"] + ["ok"] * 10_000) as server:
        endpoint = {"base_url": server.url, "model": MODEL, "api_key_env": VARIABLE, "concurrency": 1}
        study = Study(**{**SIZES, **choices}, endpoint=endpoint)
        with pytest.raises(KeyNotNamed):
            iclperm.run(study, home / "study")
        assert server.seen == []
        with pytest.raises(RunStopped, match="401"):
            iclperm.run(study, home / "study", send_keys={VARIABLE: place(server)})
        iclperm.run(study, home / "study")
        with faulty_server() as other:
            moved = study.model_copy(update={"endpoint": EndpointChoices(**{**endpoint, "base_url": other.url})})
            with pytest.raises(KeyNotNamed):
                iclperm.run(moved.model_copy(update={"permutations": 12}), home / "study", extend=True)
            assert other.seen == []
        assert all(has_key(server))


def test_the_callers_own_code_names_its_host_and_a_studys_choices_do_not():
    with faulty_server() as server:
        Endpoint(server.url, MODEL, VARIABLE).generate(["?"])
        assert has_key(server) == [True]
        choices = EndpointChoices(base_url=server.url, model=MODEL, api_key_env=VARIABLE)
        with pytest.raises(KeyNotNamed):
            Endpoint.of(choices)
        Endpoint.of(choices, None, KeyHosts({VARIABLE: place(server)})).generate(["?"])
        assert has_key(server) == [True, True]


@pytest.mark.parametrize("variable", [None, VARIABLE])
def test_headers_for_other_servers_go_nowhere(variable, monkeypatch):
    """The client's library adds those of a variable to every request, also in the place of the key."""
    theirs = "gateway-secret-0123456789"
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", f"Authorization: Bearer {theirs}\nX-Gateway-Key: {theirs}")
    with faulty_server() as server:
        Endpoint(server.url, MODEL, variable).generate(["?"])
    (headers,) = server.headers
    assert theirs not in str(headers)
    assert headers["authorization"] == f"Bearer {SECRET if variable else 'none'}"


def test_a_key_spread_over_the_tokens_of_a_reply_is_not_kept(tmp_path):
    pieces = [{"token": piece, "logprob": -1.0} for piece in (SECRET[:9], SECRET[9:])]
    choice = {"message": {"role": "assistant", "content": SECRET}, "logprobs": {"content": pieces}}
    answer = http(json.dumps(good(choices=[choice])).encode())
    with faulty_server([lambda _: iter([answer])]) as server, Ledger(tmp_path) as ledger:
        (reply,) = Endpoint(server.url, MODEL, VARIABLE, ledger=ledger).generate(["?"])
    assert reply.text == "[key]"
    assert not any(SECRET[:9] in path.read_text() for path in tmp_path.rglob("*.jsonl"))


def test_a_key_of_digits_alone_is_not_sent(monkeypatch):
    monkeypatch.setenv(VARIABLE, "123456789012")
    with faulty_server() as server, pytest.raises(ConfigError, match="digits alone"):
        Endpoint(server.url, MODEL, VARIABLE)
    assert server.seen == []


def test_a_server_that_sends_on_to_another_host_gives_it_neither_key_nor_request():
    with faulty_server() as other, faulty_server() as server:
        for status in ("301 Moved", "302 Found", "303 See", "307 Temporary", "308 Permanent"):
            answer = http(b"", status, {"Location": f"{other.url}/chat/completions"})
            server.faults = iter([lambda body, answer=answer: iter([answer])])
            with pytest.raises(RunStopped, match="sends on to"):
                Endpoint(server.url, MODEL, VARIABLE).generate(["?"])
        assert len(server.seen) == 5
        assert other.seen == []


@pytest.mark.parametrize(
    "url",
    ["http://good.example\\@evil.example/v1", "http://good.example\t.evil/v1", "http://\uff45vil.example/v1",
     "http://[::1/v1", "http:///v1", "http://x:0/v1", "http://x:99999/v1", "http://x:443/v1", "http://ex ample/v1",
     "http://x/v1\n", "https://x\r\n/v1", "ftp://x/v1", "//x/v1"],
)  # fmt: skip
def test_an_address_that_can_be_read_in_two_ways_is_refused(url):
    with pytest.raises(ConfigError):
        EndpointChoices(base_url=url, model="m")


@pytest.mark.parametrize(
    ("url", "shown"),
    [("https://API.Example.com/v1", "api.example.com"), ("http://x/v1", "x:80"), ("https://x:443", "x"),
     ("http://[::1]:8000/v1", "[::1]:8000"), ("HTTPS://x:8443/a/b", "x:8443")],
)  # fmt: skip
def test_an_address_is_told_as_it_is_named(url, shown):
    choices = EndpointChoices(base_url=url, model="m", api_key_env=VARIABLE)
    assert str(choices.address) == shown
    KeyHosts({VARIABLE: shown}).refuse_unnamed(choices)


def test_a_key_too_short_to_be_cut_out_is_not_sent(monkeypatch):
    monkeypatch.setenv(VARIABLE, "seven77")
    with pytest.raises(ConfigError, match="fewer than 8 characters") as refused:
        Endpoint("http://127.0.0.1:1/v1", MODEL, VARIABLE)
    assert "seven77" not in str(refused.value)
    monkeypatch.setenv(VARIABLE, "eight888")
    assert Endpoint("http://127.0.0.1:1/v1", MODEL, VARIABLE).choices.api_key_env == VARIABLE


def in_json(text):
    return "".join(f"\\u{ord(sign):04x}" for sign in text)


FORMS = {
    "as it is": str,
    "in a header": lambda key: f"Bearer {key}",
    "base64": lambda key: base64.b64encode(key.encode()).decode(),
    "base64 of a header": lambda key: base64.b64encode(f"Authorization: Bearer {key}\r\n".encode()).decode(),
    "base64 for URLs": lambda key: base64.urlsafe_b64encode(f"x{key}yz".encode()).decode().rstrip("="),
    "base64 in a URL": lambda key: quote(base64.b64encode(key.encode()).decode(), safe=""),
    "in a URL": lambda key: quote(key, safe=""),
    "every sign in a URL": lambda key: "".join(f"%{ord(sign):02x}" for sign in key),
    "twice in a URL": lambda key: quote(quote(key, safe=""), safe=""),
    "hexadecimal": lambda key: key.encode().hex(),
    "HEXADECIMAL": lambda key: key.encode().hex().upper(),
    "HTML": lambda key: html.escape(key),
    "every sign in HTML": lambda key: "".join(f"&#{ord(sign)};" for sign in key),
    "every sign in hexadecimal HTML": lambda key: "".join(f"&#x{ord(sign):X};" for sign in key),
    "JSON within": lambda key: json.dumps({"sent": key}).replace("/", "\\/"),
    "JSON within JSON": lambda key: json.dumps(json.dumps({"sent": key})),
    "every sign in JSON": in_json,
    "every sign in Python": lambda key: "".join(f"\\x{ord(sign):02x}" for sign in key),
    "every sign in mail": lambda key: "".join(f"={ord(sign):02X}" for sign in key),
}
BODIES = {
    "plain JSON": lambda content: json.dumps(content),
    "JSON with its slashes escaped": lambda content: json.dumps(content).replace("/", "\\/"),
    "JSON of nothing but escapes": lambda content: json.dumps(content, ensure_ascii=True),
}
PLACES = {
    "content": lambda echo: (200, said(content=echo)),
    "parts": lambda echo: (200, said(content=[{"type": "text", "text": echo[:9]}, {"type": "text", "text": echo[9:]}])),
    "refusal": lambda echo: (200, said(content=None, refusal=echo)),
    "id": lambda echo: (200, good(id=echo)),
    "fingerprint": lambda echo: (200, good(system_fingerprint=echo)),
    "model": lambda echo: (200, good(model=echo)),
    "finish": lambda echo: (200, good(choices=[{"message": {"content": ""}, "finish_reason": echo}])),
    "a field of its own": lambda echo: (200, good(choices=[{"message": {"content": "", "x": [{echo: echo}]}}])),
    "tokens": lambda echo: (
        200, good(choices=[{**good()["choices"][0], "logprobs": {"content": [{"token": echo, "logprob": -1.0}]}}])
    ),
    "no reply": lambda echo: (200, {"choices": echo}),
    "no choice": lambda echo: (200, echo),
    "error": lambda echo: (401, {"error": {"message": f"bad key {echo}", "code": echo, "param": echo}}),
    "long error": lambda echo: (400, {"error": {"message": "x" * 180 + echo}}),
    "error of another kind": lambda echo: (404, {"detail": [{echo: echo}]}),
    "error that is text": lambda echo: (500, echo),
}  # fmt: skip
KEYS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=6, max_size=60).map("9x".__add__)


@given(key=KEYS, form=st.sampled_from(sorted(FORMS)), before=st.text(max_size=5), after=st.text(max_size=5))
@settings(max_examples=150)
def test_a_key_is_cut_in_every_form(key, form, before, after):
    echo = FORMS[form](key)
    left = KeyCutter(key).cut(before + echo + after)
    assert "[key]" in left
    assert key not in left.replace("[key]", "\0")
    if form != "as it is":
        assert echo not in left


@given(text=st.text(), key=KEYS)
@settings(max_examples=300)
def test_what_holds_no_key_stays(text, key):
    assert KeyCutter(None).cut(text + key) == text + key
    if not any(sign in text for sign in "%\\&=") and key not in text:
        assert KeyCutter(key).cut(text) == text or key.encode().hex() in text.lower()


@pytest.mark.parametrize("text", ["\\", "%25", "%", "&amp;", "&#0", "=", "\\u0", "a", "9x\\", "9", "x%"])
@pytest.mark.parametrize("key", ["9xsecret-key", "9\\\\x\\secret", "\\" * 20])
def test_a_long_text_of_escapes_takes_no_square_of_its_length(text, key):
    started = time.monotonic()
    KeyCutter(key).cut(text * (1_000_000 // len(text)))
    assert time.monotonic() - started < 20


@pytest.fixture(scope="module")
def echoing():
    with faulty_server() as server:
        yield server


@given(key=KEYS, form=st.sampled_from(sorted(FORMS)), where=st.sampled_from(sorted(PLACES)),
       body=st.sampled_from(sorted(BODIES)))  # fmt: skip
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_key_that_comes_back_reaches_no_file_and_no_words(
    key, form, where, body, echoing, tmp_path_factory, monkeypatch, capfd, caplog
):
    echo = FORMS[form](key)
    status, content = PLACES[where](echo)
    headers = {"X-Echo": echo, "Retry-After": echo, "Location": f"http://x/{echo}", "Set-Cookie": f"k={echo}"}
    headers = {name: value.replace("\r", "").replace("\n", "") for name, value in headers.items()}
    answer = http(BODIES[body](content).encode(), f"{status} {echo}", headers)
    folder = tmp_path_factory.mktemp("echo")
    monkeypatch.setenv(VARIABLE, key)
    caplog.set_level(logging.INFO)
    said = []
    echoing.faults = iter([lambda _: iter([answer])])
    with Ledger(folder) as ledger:
        endpoint = Endpoint(echoing.url, MODEL, VARIABLE, ledger=ledger, pace=PACE, timeout_s=1.0, deadline_s=1.0)
        try:
            said.append(repr(endpoint.generate(["?"])))
        except RunStopped as stopped:
            said += traceback.format_exception(stopped)
        said.append(repr(endpoint.served_as))
    assert echoing.headers[-1]["authorization"] == f"Bearer {key}"
    said += [*capfd.readouterr()]
    said += [path.read_text() for path in folder.rglob("*") if path.is_file()]
    for text in said:
        assert key not in text
        assert json.dumps(key)[1:-1] not in text
        assert form == "as it is" or echo not in text
        assert form == "as it is" or json.dumps(echo)[1:-1] not in text
