"""Other people's tools, with our engine as their model."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec

from iclperm.errors import ConfigError


def harness_main(arguments: Sequence[str]) -> None:
    """lm-evaluation-harness's own command line, with the model `iclperm`; `ConfigError` where it is not installed."""
    for module in ("lm_eval", "accelerate"):
        if find_spec(module) is None:
            raise ConfigError(f"{module} is not installed; pip install 'iclperm[lm-eval]'")
    from iclperm.integrations.lm_eval import main

    main(arguments)


def serve_model(
    model: str, host: str, port: int, api_key_env: str | None, said: Callable[[str], None], **options: str | None
) -> None:
    """Serves a model, `demo`, a folder or a hub id, until Ctrl-C (`iclperm.integrations.serve`); ``options`` are those
    of `Engine.from_pretrained`. `ConfigError` for a key that is not there, and where the packages are not."""
    for module in ("starlette", "uvicorn"):
        if find_spec(module) is None:
            raise ConfigError(f"{module} is not installed; pip install 'iclperm[serve]'")
    if api_key_env is not None and not os.environ.get(api_key_env):
        raise ConfigError(f"the environment variable {api_key_env} is empty or not there; set it to the key")
    from iclperm.integrations.serve import serve

    serve(model, host, port, None if api_key_env is None else os.environ[api_key_env], said, **options)
