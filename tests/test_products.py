"""Which matrix products the decoder layers run, on processors that this machine is not."""

import pytest
import torch
from torch import nn
from zoo import ZOO

from iclperm import _core
from iclperm.engine import Engine
from iclperm.engine import model as engine_model
from iclperm.engine.kernels import linear as products

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_right_whatever_this_processor_takes(dtype):
    torch.manual_seed(0)
    module = nn.Linear(48, 24).to(dtype).requires_grad_(False)
    x = torch.randn(9, 48).to(dtype)
    found = products.linear(module, x)
    assert found.dtype == dtype
    exact = x.double() @ module.weight.double().T + module.bias.double()
    torch.testing.assert_close(found.double(), exact, atol=2e-2 if dtype == torch.bfloat16 else 1e-5, rtol=1e-2)
    torch.testing.assert_close(products.linear(module, x, slice(4, 9)).double(), exact[:, 4:9], atol=2e-2, rtol=1e-2)
    torch.testing.assert_close(products.linear(module, x, is_head=True).double(), exact, atol=2e-2, rtol=1e-2)


def test_the_choice_goes_by_what_the_processor_has(monkeypatch, request):
    request.addfinalizer(products._is_onednn.cache_clear)
    for isas, bfloat16, chosen in (
        (("baseline", "avx2"), False, (False, False)),
        (("baseline", "avx2", "avx512"), True, (True, True)),
        (("baseline", "avx2", "avx512"), False, (True, False)),
    ):
        monkeypatch.setattr(_core, "available_isas", lambda isas=isas: isas)
        monkeypatch.setattr(products, "_has_bfloat16", lambda has=bfloat16: has)
        products._is_onednn.cache_clear()
        if products.platform.machine() in products._X86 and torch.backends.mkldnn.is_available():
            assert tuple(products.uses_onednn(CPU, dtype) for dtype in (torch.float32, torch.bfloat16)) == chosen
            assert products.uses_onednn(CPU, torch.float32, is_head=True)
            assert products.uses_onednn(CPU, torch.bfloat16, is_head=True) == bfloat16
    assert not products.uses_onednn(CPU, torch.float16)
    assert not products.uses_onednn(torch.device("meta"), torch.float32)


def test_the_head_is_multiplied_by_the_product_that_numerics_names(monkeypatch):
    called = []
    monkeypatch.setattr(
        engine_model, "linear", lambda *given, **keys: called.append(1) or products.linear(*given, **keys)
    )
    model = ZOO["llama"].build()
    engine = Engine(model)
    wanted = "onednn" if products.uses_onednn(CPU, torch.float32, is_head=True) else "torch"
    assert engine.numerics["head"] == wanted
    first = engine.loglikelihood([([1, 2, 3], [4])])
    assert bool(called) == (wanted == "onednn")
    with torch.no_grad(), model.get_output_embeddings().register_forward_hook(lambda *_: None):
        assert engine.numerics["head"] == "torch"
        called.clear()
        again = engine.loglikelihood([([1, 2, 3], [4])])
    assert not called
    assert abs(float(first.logprob[0]) - float(again.logprob[0])) < 1e-5
