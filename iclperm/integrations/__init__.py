"""Other people's tools, with our engine as their model."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from iclperm.errors import ConfigError, IclpermError, RunStopped

if TYPE_CHECKING:
    from iclperm.integrations.rendered import RenderedTask


def harness_main(arguments: Sequence[str]) -> None:
    """lm-evaluation-harness's own command line, with the model `iclperm`.

    Raises `ConfigError` where it is not installed, for what the harness itself ends with and for a place that its
    results cannot be written to, `ModelError` where they could not be, and `RunStopped` for Ctrl-C.
    """
    _need_harness()
    from iclperm.integrations.lm_eval import main

    try:
        main(arguments)
    except KeyboardInterrupt:
        keeps = any(each.partition("=")[0] in ("--use_cache", "-c") for each in arguments)
        raise RunStopped(
            "stopped; what reached the harness's cache is kept there, and the same command continues"
            if keeps
            else "stopped, and nothing is kept; with --use_cache PATH answers are, and the same command continues"
        ) from None
    except IclpermError:
        raise
    except Exception as error:
        if _is_ours(error):
            raise
        raise ConfigError(
            f"lm-evaluation-harness ended with {_causes(error)}; look over the task's file and its data (iclperm "
            "lm-eval ls tasks --include_path FOLDER lists tasks), or --debug shows where"
        ) from error


def _causes(error: BaseException) -> str:
    """What an error says, and what the first of its causes does, in a line."""
    first = error
    while (cause := first.__cause__) is not None:
        first = cause
    said = [" ".join(f"{type(each).__name__}: {each}".split())[:300] for each in dict.fromkeys((error, first))]
    return ", because of ".join(said)


def render_harness_task(name: str, include_path: Path | None, limit: int | None, data: Path | None) -> RenderedTask:
    """As `iclperm.integrations.rendered.rendered`; raises `ConfigError` where the harness is not installed."""
    _need_harness()
    from iclperm.integrations.rendered import rendered

    return rendered(name, include_path, limit, data)


def _need_harness() -> None:
    for module in ("lm_eval", "accelerate"):
        if find_spec(module) is None:
            raise ConfigError(f"{module} is not installed; pip install 'iclperm[lm-eval]'")


def _is_ours(error: BaseException) -> bool:
    """Whether it was raised in this package."""
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return bool(frames) and Path(frames[-1]).is_relative_to(Path(__file__).parents[1])


def serve_model(
    model: str, host: str, port: int, api_key_env: str | None, said: Callable[[str], None], **options: str | None
) -> None:
    """Serves a model, `demo`, a folder, a GGUF file or a hub id, until Ctrl-C; ``options`` are those of
    `iclperm.integrations.serve.serve`. `ConfigError` for a key that is not there, and where the packages are not."""
    for module in ("starlette", "uvicorn"):
        if find_spec(module) is None:
            raise ConfigError(f"{module} is not installed; pip install 'iclperm[serve]'")
    if api_key_env is not None and not os.environ.get(api_key_env):
        raise ConfigError(f"the environment variable {api_key_env} is empty or not there; set it to the key")
    from iclperm.integrations.serve import serve

    serve(model, host, port, None if api_key_env is None else os.environ[api_key_env], said, **options)
