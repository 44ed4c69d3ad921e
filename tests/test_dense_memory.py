"""Where torch's operations attend, what is live at the fullest is what was foretold.

It runs on a CUDA device, by torch's own count, else on a CPU, where storages are counted as they come and go.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import triton_interpreter
from devices import DEVICE
from live_bytes import LiveBytes, peak_bytes
from zoo import VOCAB, ZOO

from iclperm.engine import Engine, plan_product
from iclperm.engine.footprint import Sizes
from iclperm.engine.forward import PassLimits

triton_interpreter.repair()

pytestmark = pytest.mark.gpu
MOST_TIMES = 2
"""What is foretold may be so many times what is live: in layers that need less than the one that needs most."""
HEAD_DIM = 128  # much to each key beside the scores
LONG_PATH, LARGE_PACK, IN_BLOCKS = (200, 8, 2, 32, 1024), (30, 8, 20, 256, 1024), (120, 24, 4, 128, 24)


@pytest.mark.parametrize(
    ("name", "layers", "dtype"),
    [
        ("llama", "fused", torch.bfloat16),
        ("gemma2", "fused", torch.float32),
        ("qwen2-window", "transformers", torch.float16),
        ("gemma2", "transformers", torch.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [LONG_PATH, LARGE_PACK, IN_BLOCKS], ids=["long path", "large pack", "in blocks"])
def test_dense_attention_takes_what_is_foretold(
    name: str, layers: str, dtype: torch.dtype, shape: tuple[int, int, int, int, int]
) -> None:
    context, query, num_queries, pack_tokens, dense_rows = shape
    sizes = ZOO[name].settings | {"max_position_embeddings": 1024, "head_dim": HEAD_DIM}
    model = replace(ZOO[name], settings=sizes).build().to(DEVICE, dtype)
    engine = Engine(model, attention="torch", layers="auto" if layers == "fused" else layers, self_check=False)
    engine._model.limits = PassLimits(token_rows_bytes=1 << 16, dense_rows=dense_rows)
    ids = np.random.default_rng(0).integers(3, VOCAB, (num_queries, context + query)).tolist()
    plan = plan_product([ids[0][:context]], [row[context:] for row in ids], [[5], [6, 7]], pack_tokens=pack_tokens)
    weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    live = peak_bytes(lambda: list(engine.execute(plan)), kept=weights)
    assert (engine.attention, engine.layers) == ("torch", layers)
    assert engine.report.num_packs > 1 or shape == LARGE_PACK
    # As of a device of its own: what a host's heap and libraries take is none of its tensors.
    foretold = replace(Sizes.of(engine._model, DEVICE, checks=False), heap=1.0, matrix=0).footprint(plan)
    token_rows = engine._model.limits.token_rows_bytes if layers == "fused" else 0
    total = foretold.kv + foretold.activations + foretold.logits + token_rows
    assert live <= total <= MOST_TIMES * live, foretold


def test_storages_are_counted_while_they_live() -> None:
    """Inside what torch makes of several operations, too."""
    x = torch.ones(1000, 10)
    with torch.inference_mode(), LiveBytes() as live:
        y = x + 1
        assert live.now == 2 * x.nbytes
        view = y[:5]
        del y
        assert live.now == 2 * x.nbytes
        del view
        assert live.now == x.nbytes
        torch.einsum("ab,cb->ac", x.double(), x.double())
    assert live.peak == x.nbytes + 2 * 2 * x.nbytes + 8 * 1000 * 1000
