"""Decode steps on a GPU: the same texts, and a shared prefix read once for a whole block of rows.

Without a CUDA device the kernels run in Triton's interpreter, on CPU tensors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton_interpreter
from test_generate import EOS, branching_prompts, count_ties, plain_texts
from tolerances import TOLERANCES
from zoo import ZOO

from iclperm.engine import Engine
from iclperm.engine.kernels import triton_head
from iclperm.engine.kernels.tiles import list_tiles
from iclperm.engine.kernels.triton_attention import TritonAttention, _launch
from iclperm.engine.plan import Pack
from iclperm.engine.rows import LiveRow, PackBuilder, Segment

triton_interpreter.repair()

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CONTEXT, QUERY = 300, 40


def decode_pack(num_rows: int) -> Pack:
    """One step of rows with queries of their own beneath one context."""
    context = Segment(np.zeros(CONTEXT, np.int32), 0, None, num_rows, [(0, CONTEXT)], CONTEXT)
    builder, slot = PackBuilder(num_rows, 0), CONTEXT
    for number in range(num_rows):
        query = Segment(np.zeros(QUERY, np.int32), CONTEXT, context, 1, [(slot, slot + QUERY)], QUERY)
        row = LiveRow(number, query.path, [5])
        for segment in row.path:
            for begin, end in segment.slots:
                row.remember(begin, end)
        row.own([(slot + QUERY, slot + QUERY + 16)])
        builder.go_on(row)
        slot += QUERY + 16
    return builder.pack()


@pytest.mark.parametrize(("head_dim", "group"), [(64, 7), (128, 4), (256, 1)])
@pytest.mark.parametrize("arch", [80, 90])
def test_rows_beneath_one_context_read_its_tiles_once_a_block(head_dim: int, group: int, arch: int) -> None:
    num_rows, launch = 64, _launch(head_dim, torch.bfloat16, arch)
    rows_a_block = launch.lines // group
    pack = decode_pack(num_rows)
    lists = list_tiles(pack, num_rows, None, block_rows=rows_a_block, tile_keys=launch.keys)
    num_blocks, whole = -(-num_rows // rows_a_block), CONTEXT // launch.keys
    assert len(lists.blocks) == num_blocks, "rows of one context do not share their blocks"
    full = lists.blocks[:, 4] - lists.blocks[:, 3]
    assert full.tolist() == [whole] * num_blocks, "a block reads the context more than once, or under a mask"
    keys = lists.keys[lists.entries[lists.blocks[0, 3] : lists.blocks[0, 4], 0]]
    assert (~keys).ravel().tolist() == list(range(whole * launch.keys))


@pytest.mark.parametrize("name", ["llama", "qwen2-window", "gemma2"])
def test_an_engine_on_triton_says_what_plain_decoding_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = ZOO[name].build().to(DEVICE), branching_prompts()[1:6:2]
    shapes: list[int] = []
    original = TritonAttention.__call__

    def counted(self: TritonAttention, *args: Any) -> Any:
        shapes.append(len(self._pack))
        return original(self, *args)

    monkeypatch.setattr(TritonAttention, "__call__", counted)
    engine = Engine(model, attention="triton", pack_tokens=32, self_check=False)
    out = engine.generate(prompts, max_new_tokens=4)
    assert engine.attention == "triton"
    assert len(shapes) == engine.report.num_packs * model.config.num_hidden_layers
    assert min(shapes) <= len(prompts), "no step was of decoded rows alone"
    assert count_ties(out, plain_texts(name, prompts, 4, EOS)) == 0


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:All-NaN slice:RuntimeWarning")
@pytest.mark.parametrize("softcap", [0.0, 8.0])
def test_the_fused_head_chooses_what_the_logits_say(softcap: float) -> None:
    rng = np.random.default_rng(0)
    hidden, weight = (torch.from_numpy(rng.normal(size=(n, 48)).astype(np.float32)) for n in (9, 333))
    hidden[4, 3] = torch.nan
    weight[200] = weight[7] = 3 * hidden[0]  # a tie: the first wins
    token, logprob, is_finite = triton_head.choose_rows(hidden.to(DEVICE), weight.to(DEVICE), None, softcap=softcap)
    logits = hidden.double() @ weight.double().T
    capped = softcap * torch.tanh(logits / softcap) if softcap else logits
    assert is_finite.tolist() == [row != 4 for row in range(9)]
    assert token[0] == 7
    for row in np.flatnonzero(is_finite).tolist():
        expected = torch.log_softmax(capped[row], dim=-1)
        assert token[row] == int(expected.argmax()) or row == 0
        assert abs(logprob[row] - float(expected.max())) <= TOLERANCES["head"]["float32"]


def test_nothing_is_chosen_of_no_rows() -> None:
    nothing = torch.empty(0, 16, device=DEVICE)
    assert [part.size for part in triton_head.choose_rows(nothing, torch.ones(5, 16, device=DEVICE), None)] == [0, 0, 0]
