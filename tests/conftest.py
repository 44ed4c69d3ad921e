"""What all tests share: versions in the header, and property tests that no slow machine can fail."""

from __future__ import annotations

import importlib.metadata

from hypothesis import settings

from iclperm import _core

settings.register_profile("iclperm", deadline=None)
settings.load_profile("iclperm")


def pytest_report_header() -> str:
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "numpy", "hypothesis")}
    return f"iclperm core: {_core.isa()} of {_core.available_isas()}; {versions}"
