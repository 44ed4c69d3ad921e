"""What all tests share: versions in the header, and property tests that no slow machine can fail."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Generator
from contextlib import nullcontext

# Threads that spin at barriers make tests several times slower where every core has a worker. Before torch.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import pytest
import torch
from fast_tier import FastTier
from hypothesis import settings
from isas import ISA_FLAGS
from parts import Parts

from iclperm import _core

os.environ.pop("COLUMNS", None)  # set for xdist's workers: what is printed has the width that it has in a pipe
settings.register_profile("iclperm", deadline=None)
settings.load_profile("iclperm")
torch.set_num_threads(1)  # models this small only lose by more; what threads change has tests of its own


def pytest_configure(config: pytest.Config) -> None:
    """Only ``-m gpu`` shows the tests a GPU: all others, and the interpreter's, are the same on every machine."""
    if config.option.markexpr != "gpu" and torch.cuda.device_count():  # which does not yet read the variable
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if not torch.cuda.is_available():  # read when a kernel's module is imported: kernels then take CPU tensors
        os.environ.setdefault("TRITON_INTERPRET", "1")
    tier = FastTier(config)
    config.pluginmanager.register(tier, "fast tier")
    config.pluginmanager.register(Parts(tier.has_all_tests, config.option.whole, config.option.long), "parts")


def pytest_report_header() -> str:
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "numpy", "hypothesis")}
    return f"iclperm core: {_core.isa()} of {_core.available_isas()}; {versions}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    import devices

    simulates = item.get_closest_marker("gpu") is not None and not devices.HAS_GPU
    with devices.as_on_a_gpu() if simulates else nullcontext():
        return (yield)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test that a GPU alone can run says what for: ``gpu(needs="...")``; of some processors, ``needs_isa(name)``."""
    marker = item.get_closest_marker("gpu")
    if marker is not None and marker.kwargs and not torch.cuda.is_available():
        pytest.skip(f"needs a CUDA device for {marker.kwargs['needs']}")
    marker = item.get_closest_marker("needs_isa")
    if marker is not None:
        (name,) = marker.args
        assert name in ISA_FLAGS, f"{name} is no instruction set"
        if name not in _core.available_isas():
            pytest.skip(f"{_LACKS} {name}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take longest first, so that no worker is left with one of them at the end."""
    if torch.cuda.is_available():  # kernels are compiled for every shape
        for item in items:
            item.add_marker(pytest.mark.timeout(1800))
    items.sort(key=lambda item: _LONGEST.index(item.path.stem) if item.path.stem in _LONGEST else len(_LONGEST))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fail-on-skip", action="store_true", help="a skip fails the run, but of gpu and needs_isa")
    parser.addoption("--whole", action="store_true", help="all parameter sets of heavy suites, see tests/parts.py")
    parser.addoption("--long", action="store_true", help="the tests of many seconds alone, see tests/parts.py")
    parser.addoption("--every-module", action="store_true", help="the fast tier must run a function of every module")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    lacks_isa = "needs_isa" in report.keywords and _LACKS in str(report.longrepr)
    if report.skipped and "gpu" not in report.keywords and not lacks_isa:
        _skipped.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--fail-on-skip") and _skipped:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if terminalreporter.config.getoption("--fail-on-skip") and _skipped:
        terminalreporter.write_line(f"FAILED: skipped, but must run: {', '.join(_skipped)}", red=True)


_skipped: list[str] = []
_LACKS = "this processor, or this build, has not"
_LONGEST = (
    "test_bench",
    "test_kinds",
    "test_triton_attention",
    "test_generated_runs",
    "test_cli",
    "test_grids",
    "test_ray_workers",
    "test_workers",
)
