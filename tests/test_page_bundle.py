"""The script of the interactive figures: made in a process of its own, kept under its digest, or why there is none."""

import resource
import sys

import pytest

from iclperm.report import bundle as bundles
from iclperm.report.bundle import NoBundle, bundle, problem

pytest.importorskip("vl_convert")
pytest.importorskip("altair")


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    """A user whose cache is empty, and a process that has made nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    bundle.cache_clear()
    problem.cache_clear()
    yield
    bundle.cache_clear()
    problem.cache_clear()


def kept(tmp_path):
    (path,) = (tmp_path / "cache").rglob("*.js")
    return path


def test_it_is_made_once_and_then_read_and_no_module_of_the_folder_where_one_works_is_run(tmp_path, monkeypatch):
    (tmp_path / "vl_convert.py").write_text("raise SystemExit('run')")
    monkeypatch.chdir(tmp_path)
    made = bundle()
    assert "embed" in made
    assert len(made) > 500_000
    assert kept(tmp_path).is_file()
    monkeypatch.setattr(sys, "executable", "/nothing/here")  # it cannot be made any more
    bundle.cache_clear()
    assert bundle() == made
    assert problem() is None


def test_what_was_kept_and_changed_since_is_made_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(bundles, "_made", lambda schema: f"draws by {schema}" * 9)
    made = bundle()
    path = kept(tmp_path)
    raw = path.read_bytes()
    path.write_bytes(raw[:-20] + b"alert('other code');")
    bundle.cache_clear()
    assert bundle() == made
    assert path.read_bytes() == raw


@pytest.mark.parametrize("home", ["file", "none"])
def test_a_home_that_cannot_be_written_keeps_nothing(tmp_path, monkeypatch, home):
    if home == "file":
        (tmp_path / "cache").write_text("no folder")
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(bundles, "cache_folder", _homeless)
    monkeypatch.setattr(bundles, "_made", lambda schema: "script")
    assert bundle() == "script"


def _homeless():
    raise RuntimeError("Could not determine home directory.")


def test_a_limit_of_address_space_ends_the_other_process_and_is_said(monkeypatch):
    most, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (64 << 30, hard))
    try:
        with pytest.raises(NoBundle, match=r"died of signal 5: .* ulimit -v unlimited"):
            bundle()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def test_a_broken_library_is_named_by_its_last_words(monkeypatch):
    monkeypatch.setattr(bundles, "_MAKE", "raise ImportError('no such symbol \\x1b[31m')")
    assert problem() == (
        "vl-convert, which makes them, failed: ImportError: no such symbol \\x1b[31m; "
        "pip install --force-reinstall 'iclperm[page]'"
    )


def test_no_library_names_the_extra(monkeypatch):
    monkeypatch.setattr(bundles, "find_spec", lambda name: None)
    assert problem() == "pip install 'iclperm[page]' lets you point at them"
