"""Other people's tools, with our engine as their model."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from iclperm.errors import ConfigError


def harness_main(arguments: Sequence[str]) -> None:
    """lm-evaluation-harness's own command line, with the model `iclperm`; `ConfigError` where it is not installed."""
    for module in ("lm_eval", "accelerate"):
        if find_spec(module) is None:
            raise ConfigError(f"{module} is not installed; pip install 'iclperm[lm-eval]'")
    from iclperm.integrations.lm_eval import main

    main(arguments)
