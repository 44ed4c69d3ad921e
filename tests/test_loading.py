"""Model folders and text requests: what loads, and what is refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import byte_level_tokenizer, dummy_prefix_tokenizer, greedy_tokenizer, make_model
from tolerances import TOLERANCES

from iclperm.demo import model_path
from iclperm.engine import Engine
from iclperm.engine import engine as engine_module
from iclperm.engine.folder import model_folder
from iclperm.engine.footprint import Sizes
from iclperm.errors import ConfigError, IclpermError, ModelError, RequestError
from iclperm.reference import scoring

PER_TOKEN = TOLERANCES["loglikelihood per token"]["float32"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine.from_pretrained(folder)


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def pickled_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def remote_code(folder: Path) -> None:
    edit_config(folder, auto_map={"AutoModelForCausalLM": "modeling.Evil"}, architectures=["EvilForCausalLM"])


def unknown_architecture(folder: Path) -> None:
    edit_config(folder, model_type="perceptron9", architectures=["Perceptron9"])


def no_language_model(folder: Path) -> None:
    edit_config(folder, model_type="vit", architectures=["ViTModel"])


def truncated_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:200])


def more_layers(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=3, layer_types=None)


def fewer_layers(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=1, layer_types=None)


def another_vocabulary(folder: Path) -> None:
    edit_config(folder, vocab_size=99)


def wrong_type(folder: Path) -> None:
    edit_config(folder, hidden_size="wide")


def no_heads(folder: Path) -> None:
    edit_config(folder, num_attention_heads=0)


def null_config(folder: Path) -> None:
    (folder / "config.json").write_text("null")


def empty_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")


def only_an_adapter(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")


BROKEN = [
    (no_config, "has no config.json; give a folder saved by save_pretrained"),
    (broken_config, "is not valid JSON.*; download or save it again"),
    (no_weights, "has no weights; it needs model.safetensors"),
    (pickled_weights, r"has only pickled weights \(pytorch_model.bin\), which can run code; convert them"),
    (remote_code, r"brings its own code \(auto_map in config.json\), which is not run"),
    (unknown_architecture, "perceptron9"),
    (no_language_model, "is a 'vit' model, which is no causal language model"),
    (truncated_weights, "cannot load the weights"),
    (more_layers, "do not fit its configuration: missing keys"),
    (fewer_layers, "do not fit its configuration: layers that the configuration lacks"),
    (another_vocabulary, "do not fit its configuration: keys of another shape"),
    (wrong_type, "cannot read the configuration"),
    (no_heads, "cannot load|cannot read"),
    (null_config, "is no configuration: a JSON object is needed"),
    (empty_tokenizer, "cannot load the tokenizer"),
    (
        only_an_adapter,
        r"holds an adapter \(adapter_model.safetensors\), which is not applied by itself; .* this one as the adapter",
    ),
]


def test_the_bundled_model_has_a_name_whatever_lies_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    assert model_folder("demo") == model_path()
    found = Engine.from_pretrained("demo").loglikelihood([("Article: Rovers win the cup\nAnswer:", " Sports")])
    again = Engine.from_pretrained(model_path()).loglikelihood([("Article: Rovers win the cup\nAnswer:", " Sports")])
    assert found.logprob.tolist() == again.logprob.tolist()
    with pytest.raises(ConfigError, match="revision is 'v2', but the model 'demo' is a folder"):
        model_folder("demo", "v2")


@pytest.mark.parametrize(("damage", "message"), BROKEN, ids=[damage.__name__ for damage, _ in BROKEN])
def test_bad_model_folders_get_one_line(tmp_path: Path, damage: Any, message: str) -> None:
    damage(make_model(tmp_path))
    with pytest.raises(ModelError, match=message) as error:
        Engine.from_pretrained(tmp_path)
    assert "\n" not in str(error.value)
    assert isinstance(error.value, IclpermError)


def test_a_name_that_is_neither_folder_nor_hub_id_gets_one_line() -> None:
    with pytest.raises(ModelError, match="'no/such/model/anywhere'") as error:
        Engine.from_pretrained("no/such/model/anywhere")
    assert "\n" not in str(error.value)


def test_dtype_is_float32_on_a_cpu_whatever_the_checkpoint(tmp_path: Path) -> None:
    edit_config(make_model(tmp_path), dtype="bfloat16")
    assert Engine.from_pretrained(tmp_path, device="cpu").numerics["dtype"] == "float32"
    assert Engine.from_pretrained(tmp_path, device="cpu", dtype="bfloat16").numerics["dtype"] == "bfloat16"
    assert Engine.from_pretrained(tmp_path, dtype=torch.bfloat16).numerics["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "quantum"}, "device 'quantum' is unknown; give auto, cpu, cuda or cuda:0"),
        ({"dtype": "float31"}, "dtype 'float31' is unknown; give auto, float32, bfloat16 or float16"),
        ({"dtype": "int8"}, "dtype 'int8' is unknown"),
    ],
)
def test_unknown_devices_and_dtypes_get_one_line(folder: Path, options: dict[str, str], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Engine.from_pretrained(folder, **options)


def test_a_device_that_is_not_there_gets_one_line(folder: Path) -> None:
    with pytest.raises(
        ModelError, match=r"cannot put .* on cuda.*; (install PyTorch's build .*, or )?choose another device$"
    ) as error:
        Engine.from_pretrained(folder, device="cuda")
    assert "\n" not in str(error.value)


def test_a_model_without_tokenizer_takes_token_ids(tmp_path: Path) -> None:
    make_model(tmp_path)
    for file in tmp_path.glob("*token*"):
        file.unlink()
    engine = Engine.from_pretrained(tmp_path)
    assert engine.tokenizer is None
    assert np.isfinite(engine.loglikelihood([([5, 6], [7])]).logprob[0])


def test_a_memory_budget_is_refused_before_the_weights_are_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [([3] * 40 + [a], [b]) for a in range(10) for b in range(4)]
    expected = Engine.from_pretrained(folder).loglikelihood(requests).logprob
    engine = Engine.from_pretrained(folder, memory_budget="50%")
    np.testing.assert_array_equal(engine.loglikelihood(requests).logprob, expected)
    monkeypatch.setattr(engine_module, "load", lambda *_, **__: pytest.fail("the weights were loaded"))
    with pytest.raises(RequestError, match=r"memory_budget is 2000 bytes .* but the weights alone take \d+"):
        Engine.from_pretrained(folder, memory_budget=2000)
    with pytest.raises(RequestError, match=r"memory_budget is 'much'; give bytes, .* or a share of what is free"):
        Engine.from_pretrained(folder, memory_budget="much")
    with pytest.raises(RequestError, match="memory_budget bounds the packs of a tree, and plain=True has none"):
        Engine.from_pretrained(folder, memory_budget="50%", plain=True)
    seen: list[dict[str, str]] = []
    sizes_of = Sizes.of

    def recorded(*given: Any, **named: Any) -> Sizes:
        seen.append(named)
        return sizes_of(*given, **named)

    monkeypatch.setattr(engine_module.Sizes, "of", recorded)
    ways = {"attention": "torch", "layers": "transformers"}
    with pytest.raises(RequestError, match="but the weights alone take"):
        Engine.from_pretrained(folder, memory_budget=2000, **ways)
    assert seen == [ways], "the way that is asked for is what is refused"


TEXTS = [
    ("Thing: The apple\nColour:", " Red"),
    ("Thing: The apple\nColour: ", "Red"),
    ("", "Thing"),
    ("Thing: The moss in town\n\n", "Thing: The"),
    ("Thing:", " The apple by the road"),
]


def harness_encoding(tokenizer: Any, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """lm-evaluation-harness's ``_encode_pair``, with BOS as the tokenizer adds it."""
    spaces = len(context) - len(context.rstrip())
    if spaces:
        continuation, context = context[-spaces:] + continuation, context[:-spaces]
    whole, alone = tokenizer(context + continuation)["input_ids"], tokenizer(context)["input_ids"]
    return alone, whole[len(alone) :]


@pytest.mark.parametrize("tokenizer", [byte_level_tokenizer, dummy_prefix_tokenizer, greedy_tokenizer])
def test_text_is_encoded_as_lm_evaluation_harness_does(tmp_path: Path, tokenizer: Any) -> None:
    engine = Engine.from_pretrained(make_model(tmp_path, tokenizer()))
    pairs = [harness_encoding(engine.tokenizer, *texts) for texts in TEXTS]
    served = [(texts, pair) for texts, pair in zip(TEXTS, pairs, strict=True) if pair[1]]
    assert len(served) >= 2
    out = engine.loglikelihood([texts for texts, _ in served])
    np.testing.assert_array_equal(out.logprob, engine.loglikelihood([pair for _, pair in served]).logprob)
    assert out.num_tokens.tolist() == [len(continuation) for _, (_, continuation) in served]


def test_an_empty_context_begins_with_bos_once(engine: Engine) -> None:
    tokenizer = engine.tokenizer
    ids = tokenizer("Thing", add_special_tokens=False)["input_ids"]
    out = engine.loglikelihood([("", "Thing"), ([tokenizer.bos_token_id], ids)])
    assert out.logprob[0] == out.logprob[1]
    assert out.num_tokens[0] == len(ids)


def test_an_empty_continuation_gets_one_line(engine: Engine) -> None:
    with pytest.raises(RequestError, match=r"the continuation of request 1 \(''\) has no tokens of its own"):
        engine.loglikelihood([("Thing", " Red"), ("Thing", "")])


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda e: e.score(["Thing"], [None], [" Red"]), "query 0 is None; give text or a list of token ids"),
        (lambda e: e.score(["Thing"], ["a"], [" Red", None]), "continuation 1 is None; give text or a list"),
        (lambda e: e.score(["Thing"], ["a"], [[" Red", None]]), "of query 0, continuation 1 is None; give text or"),
        (lambda e: e.score(["Thing", float("nan")], [" a"], [" Red"]), "context 1 is nan; give text or a list"),
        (lambda e: e.score(["Thi\ud800"], [" a"], [" Red"]), "holds half a character at 3 .* repair the text"),
        (lambda e: e.loglikelihood([("Thing", " R\udc00")]), "holds half a character at .* repair the text"),
        (lambda e: e.session().extend(None, "\ud800"), "holds half a character at 0 .* repair the text"),
    ],
)
def test_what_is_no_text_is_named(engine: Engine, ask: Callable[[Engine], object], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        ask(engine)


def test_a_product_of_text_agrees_with_plain_scoring(engine: Engine) -> None:
    contexts = ["", "Thing: The sky far away\nColour: Blue\n\n", "Thing: The rose\nColour: Red\n\n"]
    queries, labels = ["Thing: The moss\nColour:", "Thing: The lake in town\nColour:"], [" Red", " Green", " Blue"]
    scores = engine.score(contexts, queries, labels)
    assert engine.report.tokens_forwarded == engine.report.tokens_unique
    tokenizer, model = engine.tokenizer, engine.model
    for c, context in enumerate(contexts):
        for q, query in enumerate(queries):
            for label, continuation in enumerate(labels):
                prompt, wanted = harness_encoding(tokenizer, context + query, continuation)
                plain = scoring.score_one(model, prompt, wanted)
                assert abs(scores[c, q, label] - plain.logprob) <= PER_TOKEN * plain.num_tokens
    by_query = engine.score(contexts, queries, [labels, labels])
    np.testing.assert_array_equal(by_query, scores)


def test_a_cue_that_merges_with_a_label_is_cut_alike_on_both_paths(tmp_path: Path) -> None:
    engine = Engine.from_pretrained(make_model(tmp_path, greedy_tokenizer()))
    base, queries, labels = "Thing: The sky\nColour: Blue\n\n", ["Thing: The moss\nColour:"], [" Red", " Blue"]
    alone = engine.score([base], queries, labels)
    found = engine._encoder.product([base, base + "Th"], ["ing: The moss\nColour:"], [labels])
    assert not found.holds.all()
    np.testing.assert_allclose(engine.score([base, base + "Th"], ["ing: The moss\nColour:"], labels)[1], alone[0])


def test_text_whose_parts_merge_is_served_by_the_general_path(tmp_path: Path) -> None:
    engine = Engine.from_pretrained(make_model(tmp_path, greedy_tokenizer()))
    contexts, queries, labels = (
        ["Thing: The sky\nColour: Blue\n\nTh", "Colour: R"],
        ["ing: The moss\nCol"],
        ["our: Red"],
    )
    assert not engine._encoder.product(contexts, queries, [labels]).holds.all()
    scores = engine.score(contexts, queries, labels)
    texts = [context + queries[0] for context in contexts]
    prompts = engine._encoder.prompts_before(texts, [labels] * 2)
    expected = engine.loglikelihood([(prompt, continuations[0]) for prompt, continuations in prompts])
    np.testing.assert_array_equal(scores.ravel(), expected.logprob)


def test_text_and_token_ids_do_not_mix(engine: Engine) -> None:
    with pytest.raises(RequestError, match="contexts, queries and continuations mix text and token ids"):
        engine.score(["a"], [[1]], [[2]])
