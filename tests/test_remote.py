"""Reports and exports at URLs: S3 by a server on loopback, and what a URL must not do."""

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from types import SimpleNamespace

import fsspec
import numpy as np
import pytest
from tiny import byte_level_tokenizer, make_model, make_task

import iclperm
from iclperm import Study
from iclperm.base import remote
from iclperm.cli.main import main
from iclperm.errors import ConfigError, RunError, RunStopped
from iclperm.external import load

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    place = tmp_path_factory.mktemp("run")
    model = str(make_model(place / "model", byte_level_tokenizer()))
    study = Study(model=model, task=str(make_task(place)), sets=2, permutations=2, shots=[0, 3], queries=4)
    return iclperm.run(study, place / "run")


@pytest.fixture(scope="module")
def bucket():
    """A bucket of moto's server, with keys in the environment as fsspec looks for them."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "an-id")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        system = fsspec.filesystem("s3", skip_instance_cache=True)
        system.mkdir("bucket")
        yield SimpleNamespace(url="s3://bucket", names=lambda: sorted(system.find("bucket", refresh=True)), at=system)
    server.stop()


def command(*arguments, code=0):
    """What a command prints, by stdout and all of it."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as errors:
        try:
            main(list(map(str, arguments)))
            ended = 0
        except SystemExit as end:
            ended = end.code or 0
    assert ended == code, errors.getvalue()
    return SimpleNamespace(stdout=out.getvalue(), output=out.getvalue() + errors.getvalue())


def test_an_export_goes_to_a_bucket_and_is_read_there(run, bucket, tmp_path):
    url = f"{bucket.url}/answers/all.parquet"
    done = command("export", run.folder, "--out", url)
    assert done.stdout == f"{url}\n"
    assert "bucket/answers/all.parquet" in bucket.names()
    here = run.export(tmp_path / "all.parquet")
    assert bucket.at.cat_file("bucket/answers/all.parquet") == here.read_bytes()
    there, local = load(url), load(here)
    assert there.axes == local.axes
    np.testing.assert_array_equal(there.values, local.values)
    told = json.loads(command("stats", url, "--out", f"{bucket.url}/stats", "--json").stdout)
    assert told["missing"]["answers"] == 0
    assert "bucket/stats/report.json" in bucket.names()


def test_a_report_goes_to_a_bucket_of_a_run_that_lies_in_one(run, bucket):
    bucket.at.put(str(run.folder), "bucket/runs/one", recursive=True)
    done = command("report", f"{bucket.url}/runs/one", "--out", f"{bucket.url}/reports/one", "--json")
    told = json.loads(done.stdout)
    assert told["digest"] == run.digest
    assert all(file.startswith("s3://bucket/reports/one/") for file in told["files"])
    assert {f"bucket/{file.removeprefix('s3://bucket/')}" for file in told["files"]} <= set(bucket.names())
    content = json.loads(bucket.at.cat_file("bucket/reports/one/report.json"))
    assert content["sensitivity"] == json.loads(json.dumps(run.report_content()))["sensitivity"]
    opened = iclperm.open_run(f"{bucket.url}/runs/one")
    assert opened.digest == run.digest
    assert opened.folder != run.folder


def test_what_a_bucket_refuses_is_one_line_without_its_keys(run, bucket, monkeypatch):
    with pytest.raises(RunError, match=r"^s3://bucket/nothing is not there; correct the URL$"):
        iclperm.open_run(f"{bucket.url}/nothing")
    with pytest.raises(RunStopped, match=r"^s3://no-such-bucket-here/a\.csv cannot be written: ") as refused:
        run.export("s3://no-such-bucket-here/a.csv")
    assert "a-secret" not in str(refused.value)
    stopped = command("export", run.folder, "--out", "s3://no-such-bucket-here/a.csv", code=3)
    assert "Traceback" not in stopped.output


def test_a_run_is_not_written_to_a_url(run):
    with pytest.raises(ConfigError, match=r"^s3://bucket/run is a URL; mount it, and name the folder there"):
        iclperm.run(run.study, "s3://bucket/run")
    command("run", "--out", "s3://bucket/run", code=2)


def test_a_report_of_a_url_needs_a_place(run):
    done = command("report", "memory://nothing/run", code=2)
    assert "memory://nothing/run is a URL; say where its report goes with --out" in done.output


@pytest.mark.parametrize(
    "url",
    ["file:///tmp/x.csv", "local:///tmp/x.csv", "simplecache::file:///tmp/x.csv", "simplecache::s3://b/x.csv"],
)
def test_a_url_is_no_way_around_what_paths_may_not_do(run, url):
    for use in (run.export, iclperm.open_run, load):
        with pytest.raises(ConfigError, match="is no URL that is read or written; give a path"):
            use(url)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://bucket/a.csv", "s3://bucket/a.csv"),
        ("ftp://user:pass@host:21/a.csv", "ftp://***@host:21/a.csv"),
        ("https://host/a.csv?token=abc#d", "https://host/a.csv?***"),
        ("s3://bucket/\x1b[31m", "s3://bucket/\\x1b[31m"),
    ],
)
def test_a_url_is_shown_without_secrets(url, words):
    assert remote.is_url(url)
    assert remote.shown(url) == words


def test_words_of_a_file_system_are_shown_without_secrets():
    there = remote.Remote("ftp://user:pass@host/a.csv")
    with pytest.raises(RunError) as refused, there._named("read"):
        raise OSError("login user:pass at ftp://user:pass@host/a.csv was refused")
    assert "pass" not in str(refused.value)
    assert str(refused.value).startswith("ftp://***@host/a.csv cannot be read: login ***")
    signed = remote.Remote("https://host/a.csv?name=x&token=abc%2Bde#c")
    with pytest.raises(RunError) as refused, signed._named("read"):
        raise OSError("no access with abc+de, of name=x&token=abc%2Bde")
    assert "no access with ***, of ***; see" in str(refused.value)


@pytest.mark.parametrize("name", ["/folder", "/folder/../../x", "/other/x", "/folder/a\\b"])
def test_names_that_lead_out_of_a_folder_are_refused(name):
    with pytest.raises((RunError, ValueError)):
        remote._below("/folder", name)
    assert remote._below("/folder", "/folder/items/a.parquet") == "items/a.parquet"


def test_much_is_not_fetched():
    fsspec.filesystem("memory").pipe("/much/a.npy", b"x" * 100)
    with pytest.raises(RunError, match="has 1 files and 100 bytes; 20,000 files and 99 bytes can be fetched"):
        load("memory://much/a.npy", most_bytes=99)


def test_nothing_is_sent_where_writing_fails():
    memory = fsspec.filesystem("memory")
    there = remote.Remote("memory://cut/report")

    def write(content):
        with there.written(is_folder=True) as folder:
            folder.mkdir()
            (folder / "report.json").write_text(content["found"])

    with pytest.raises(KeyError):
        write({})
    assert not memory.exists("/cut")
    write({"found": "{}"})
    assert memory.cat_file("/cut/report/report.json") == b"{}"
