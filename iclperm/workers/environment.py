"""What a worker's process sees of the environment: how to run Python, PyTorch and the model's files; no keys."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

_KEPT = (
    # Python, its libraries, and where files are
    "PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_", "TZ", "TMPDIR", "LD_", "DYLD_", "VIRTUAL_ENV", "PYTHON", "XDG_",
    # threads, heap and code of the processor
    "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMBA_", "ONEDNN_", "LRU_CACHE_CAPACITY", "MALLOC_", "GLIBC_",
    "ATEN_", "ICLPERM_",
    # devices
    "CUDA_", "NVIDIA_", "HIP_", "ROCR_", "TORCH", "PYTORCH_", "TRITON_",
    # models that are in the hub's cache; HF_TOKEN is a key
    "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE",
)  # fmt: skip
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")


def worker_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """This process' environment as far as a worker may see it, with ``variables`` set.

    What is not known to be needed is left out, and of the rest whatever is called like a key.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_KEPT) and not any(word in name.upper() for word in _SECRET)
    }
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return {**kept, "PYTHONPATH": paths, **variables}
