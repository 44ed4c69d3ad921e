"""What a model folder may be: no adapter, no numbers without scales, no model that sees ahead, nobody's code."""

from __future__ import annotations

import http.server
import json
import os
import pickle
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
import yaml
from safetensors.torch import load_file, save_file
from tiny import make_model, make_task

from iclperm.cli import options
from iclperm.cli.main import main
from iclperm.engine import Engine
from iclperm.engine.load import load, load_config, load_shapes
from iclperm.errors import ConfigError, ModelError
from iclperm.study.study import Study

REQUESTS = [([5, 6, 7, 8], [9]), ([5, 6, 7], [8, 9]), ([1, 2], [3])]
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def refused(folder: Path | str, message: str) -> None:
    """One line, before any weight is read."""
    with pytest.raises(ModelError, match=message) as error:
        load(folder)
    assert "\n" not in str(error.value)


def edit_weights(folder: Path, **changes: torch.Tensor) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, **changes}, folder / "model.safetensors", metadata={"format": "pt"})


def built(folder: Path, model: Any) -> Path:
    torch.manual_seed(0)
    model.save_pretrained(folder)
    return folder


def test_an_adapter_beside_full_weights_is_refused(tmp_path: Path) -> None:
    make_model(tmp_path)
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "nobody/nothing", "r": 2, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    message = r"holds an adapter \(adapter_config.json\), which is not applied by itself; .* this one as the adapter"
    refused(tmp_path, message)
    with pytest.raises(ModelError, match=message):
        load_shapes(tmp_path)


@pytest.mark.parametrize(("dtype", "kind"), [(torch.int8, "I8"), (torch.uint8, "U8"), (torch.float8_e4m3fn, "F8_E4M3")])
def test_quantized_weights_without_scales_are_refused(tmp_path: Path, dtype: torch.dtype, kind: str) -> None:
    key = "model.layers.1.mlp.up_proj.weight"
    weight = load_file(make_model(tmp_path) / "model.safetensors")[key]
    edit_weights(tmp_path, **{key: (weight * 100).to(dtype)})
    refused(tmp_path, f"are quantized: {key} is {kind}, and config.json has no quantization_config")


def test_a_quantization_that_is_only_half_there_is_refused(tmp_path: Path) -> None:
    folder, key = make_model(tmp_path), "model.layers.1.mlp.up_proj.weight"
    weight = load_file(folder / "model.safetensors")[key]
    edit_weights(folder, **{key: weight.to(torch.float8_e4m3fn)})
    edit_json(folder / "config.json", quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    refused(folder, f"are quantized: {key} is F8_E4M3, and no key holds its scale")
    for method in ("evil", None, ["fp8"]):
        edit_json(folder / "config.json", quantization_config={"quant_method": method, "bits": 8})
        refused(folder, "is quantized in a way that transformers does not know|cannot read the configuration")


def test_a_vocabulary_beyond_all_weights_takes_no_memory(tmp_path: Path) -> None:
    make_model(tmp_path)
    edit_json(tmp_path / "config.json", vocab_size=10**12)
    refused(tmp_path, r"has vocab_size 1000000000000, but no weight has more than \d+ rows")


def test_integers_that_are_no_weights_are_none_of_our_business(tmp_path: Path) -> None:
    make_model(tmp_path)
    edit_weights(tmp_path, **{"model.position_ids": torch.arange(9), "model.flags": torch.ones(3, dtype=torch.bool)})
    assert np.isfinite(Engine.from_pretrained(tmp_path).loglikelihood(REQUESTS).logprob).all()


NOT_CAUSAL = [
    ("bert", {}, "'bert' attends in both directions"),
    ("roberta", {}, "'roberta' attends in both directions"),
    ("xlnet", {}, "'xlnet' attends in both directions"),
    ("bart", {}, r"'bart' has an encoder \(is_encoder_decoder\)"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "'gemma3_text' attends in both directions"),
    ("llama", {"architectures": ["LlamaForMaskedLM"]}, "its architecture is 'LlamaForMaskedLM'"),
    ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "its architecture is 'LlamaForSequenceClassif"),
]


@pytest.mark.parametrize(("kind", "settings", "message"), NOT_CAUSAL, ids=[case[2] for case in NOT_CAUSAL])
def test_a_model_that_is_not_causal_is_refused_by_name(
    tmp_path: Path, kind: str, settings: dict[str, Any], message: str
) -> None:
    tf.AutoConfig.for_model(kind, **settings).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=f"is no causal language model: {message}"):
        load_config(tmp_path)


def test_every_other_architecture_is_still_taken(tmp_path: Path) -> None:
    for kind in ("gpt_neox", "gpt2", "llama", "opt", "qwen2", "gemma2", "mamba", "cohere", "phi3", "bloom"):
        tf.AutoConfig.for_model(kind).save_pretrained(tmp_path)
        assert load_config(tmp_path).model_type == kind


def bert(*, is_decoder: bool) -> Any:
    torch.manual_seed(0)
    model = tf.BertLMHeadModel(tf.BertConfig(**SMALL, is_decoder=is_decoder)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(torch.randn(parameter.shape) * 2 / parameter.shape[-1] ** 0.5)
    return model


def test_a_model_in_memory_that_sees_ahead_is_refused_on_its_first_use() -> None:
    for call in (
        lambda engine: engine.loglikelihood(REQUESTS),
        lambda engine: engine.generate([[5, 6]], 2),
        lambda engine: engine.numerics,
    ):
        with pytest.raises(ModelError, match=r"BertLMHeadModel \('bert'\) is no causal language model: what it pred"):
            call(Engine(bert(is_decoder=False), plain=True))


def test_the_same_model_as_a_decoder_is_served(tmp_path: Path) -> None:
    engine = Engine.from_pretrained(built(tmp_path, bert(is_decoder=True)), plain=True)
    assert np.isfinite(engine.loglikelihood(REQUESTS).logprob).all()
    assert (engine.attention, engine.row_invariant) == ("plain", None)


def test_norms_of_queries_and_keys_by_head_are_served() -> None:
    torch.manual_seed(0)
    model = tf.CohereForCausalLM(tf.CohereConfig(**SMALL, num_key_value_heads=2, use_qk_norm=True)).eval()
    engine, plain = Engine(model), Engine(model, plain=True)
    assert engine.attention == "native"
    np.testing.assert_allclose(
        engine.loglikelihood(REQUESTS).logprob, plain.loglikelihood(REQUESTS).logprob, atol=1e-4, rtol=0
    )
    assert engine.row_invariant is not None  # the check came to its end


class Fickle(tf.LlamaForCausalLM):
    """Runs whole prompts, and stumbles over anything else."""


@pytest.mark.parametrize("plain", [False, True])
def test_whatever_the_first_use_raises_is_a_refusal_by_name(plain: bool) -> None:
    model = Fickle(tf.LlamaConfig(**SMALL)).eval()

    def stumble(*_: object) -> None:
        raise KeyError("secret handshake")

    model.model.layers[1].mlp.register_forward_pre_hook(stumble)
    engine = Engine(model, plain=plain)
    way = "prompt by prompt" if plain else "through the prefix tree"
    remedy = "it cannot be served" if plain else r"run it with plain=True \(iclperm run --plain\)"
    with pytest.raises(
        ModelError, match=rf"^Fickle cannot be run {way} \(KeyError: 'secret handshake'\); {remedy}$"
    ) as e:
        engine.loglikelihood(REQUESTS)
    assert isinstance(e.value.__cause__, KeyError)


def own_code(folder: Path, marker: Path, **changes: Any) -> None:
    """A folder with code that leaves a trace if it is ever run."""
    (folder / "modeling_own.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    auto_map = {"AutoModelForCausalLM": "modeling_own.Own", "AutoConfig": "modeling_own.OwnConfig"}
    edit_json(folder / "config.json", auto_map=auto_map, **changes)


def test_code_beside_a_known_architecture_is_left_alone(tmp_path: Path) -> None:
    folder, marker = make_model(tmp_path / "model"), tmp_path / "ran"
    expected = Engine.from_pretrained(folder).loglikelihood(REQUESTS).logprob
    own_code(folder, marker)
    with pytest.warns(UserWarning, match=r"brings its own code \(auto_map .*\), which is not run: LlamaForCausalLM"):
        engine = Engine.from_pretrained(folder)
    assert type(engine.model) is tf.LlamaForCausalLM
    np.testing.assert_array_equal(engine.loglikelihood(REQUESTS).logprob, expected)
    assert not marker.exists()
    for changes in ({"architectures": ["OwnForCausalLM"]}, {"model_type": "own9"}):
        own_code(folder, marker, **changes)
        refused(folder, r"brings its own code \(auto_map in config.json\), which is not run; use a checkpoint")
    assert not marker.exists()


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (open, (str(self.marker), "w"))


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("pytorch_model.bin", "is a file of pickled weights, which can run code; give a folder of safetensors"),
        ("x.pt", "is a file of pickled weights"),
        ("model.safetensors", "is a file; give the folder that holds it and its config.json: '.*model'"),
        ("model.gguf", "is no GGUF file: it does not begin with GGUF; fetch it again"),
        ("config.json", "is a file; give the folder that holds it"),
    ],
)
def test_a_file_is_no_model(tmp_path: Path, file: str, message: str) -> None:
    folder = make_model(tmp_path / "model")
    if not (folder / file).exists():
        (folder / file).write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    refused(folder / file, message)
    with pytest.raises(ModelError, match=message):
        Engine.from_pretrained(str(folder / file))
    assert not (tmp_path / "ran").exists()


def test_a_name_that_no_file_can_have_is_no_model() -> None:
    refused("a" * 5000, r"^there is no model folder 'a{90,99}: file name too long; give 'demo', a folder or a hub id$")


def test_in_memory_too_bidirectional_attention_is_no_matter_of_the_tree() -> None:
    model = tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**SMALL, head_dim=8, use_bidirectional_attention=True))
    with pytest.raises(ModelError, match="has bidirectional attention; give a decoder-only model"):
        Engine(model)


PATHS = ("/no/model", "./model", "../model", "~/model", "no/such/model", ".", "models/x/")
HUB = "nobody/nothing"
# Without PyTorch, which takes longer to import than all of this to happen.
ASK = """
import sys
from iclperm.engine.folder import model_folder
from iclperm.errors import ModelError
for name in sys.argv[1:]:
    try:
        model_folder(name)
    except ModelError as error:
        print(error)
"""


class Hub(http.server.BaseHTTPRequestHandler):
    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.connection.close()  # as a network that is not there

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[tuple[str, list[str]]]:
    """A hub that hangs up, and what it was asked."""
    asked: list[str] = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("OneHub", (Hub,), {"asked": asked}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()


def test_a_path_is_never_asked_for_and_a_hub_id_once(tmp_path: Path, hub: tuple[str, list[str]]) -> None:
    address, asked = hub
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "cache"), "NO_PROXY": "*"}

    def said(*names: str) -> list[str]:
        command = [sys.executable, "-c", ASK, *names]
        run = subprocess.run(
            command, cwd=tmp_path / "empty", env=environment, capture_output=True, text=True, timeout=200
        )
        assert run.returncode == 0, run.stderr
        return run.stdout.splitlines()

    (tmp_path / "empty").mkdir()
    lines = said(*(name for name in PATHS if name != "."))
    assert [line.split("; ")[0] for line in lines] == [
        f"there is no model folder {name!r}" for name in PATHS if name != "."
    ]
    assert asked == []
    (line,) = said(HUB)
    assert line.startswith(f"the model {HUB!r} is neither a folder nor to be had from the hub: ")
    assert len([path for path in asked if HUB in path]) == 1


def test_an_engine_looks_for_its_folder_as_often_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def hang_up(name: str, **_: object) -> str:
        asked.append(name)
        raise ConnectionError("hung up")

    monkeypatch.setattr("huggingface_hub.snapshot_download", hang_up)
    for name in PATHS:
        with pytest.raises(ModelError, match=r"there is no model folder|has no config\.json"):
            Engine.from_pretrained(name)
    assert asked == []
    with pytest.raises(ModelError, match=f"^the model '{HUB}' is neither a folder nor to be had from the hub: hung up"):
        Engine.from_pretrained(HUB)
    assert asked == [HUB]


def test_the_option_that_refusals_advise_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An architecture that the tree refuses is run with the option that the refusal names."""
    folder, task = make_model(tmp_path / "model"), make_task(tmp_path)
    tokenizer = tf.AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    config = tf.BloomConfig(
        vocab_size=len(tokenizer), hidden_size=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=1
    )
    tf.BloomForCausalLM(config).save_pretrained(folder)
    run = ["--model", str(folder), "--task", str(task), "--sets", "2", "--permutations", "2", "--queries", "6"]

    def call(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main([*arguments])
        return int(ended.value.code or 0), capsys.readouterr().err

    out = str(tmp_path / "run")
    code, said = call("run", *run, "--out", str(tmp_path / "refused"))
    assert (code, "run it with plain=True (iclperm run --plain)" in said) == (1, True)
    assert call("plan", *run, "--plain") == (0, "")
    assert call("run", *run, "--out", out, "--plain")[0] == 0
    (record,) = (tmp_path / "run" / "environment").glob("*.json")
    assert json.loads(record.read_text())["numerics"]["attention"] == "plain"
    assert yaml.safe_load((tmp_path / "run" / "study.yaml").read_text())["plain"] is True
    assert call("run", out)[0] == 0  # the folder knows
    code, said = call("plan", *run, "--plain", "--memory-budget", "1GiB")
    assert (code, "there are none with 'plain'" in said) == (2, True)
    assert "plain" in options.SWITCHES <= set(options.STUDY_KEYS)


def test_a_study_without_the_option_is_written_as_before() -> None:
    assert "plain" not in Study().to_yaml()
    assert Study(plain=True).to_yaml().splitlines()[-2:] == ["plain: true", "out: null"]
    with pytest.raises(ConfigError, match="'plain' is for a model on this machine"):
        Study(plain=True, endpoint={"base_url": "http://localhost:1/v1", "model": "x"})


# Folders that somebody made to hurt.


def shards(folder: Path, **files: str) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def test_an_index_names_files_beside_it_alone(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    (folder / "model.safetensors").rename(tmp_path / "x.safetensors")
    for name in ("../x.safetensors", str(tmp_path / "x.safetensors"), "../../etc/passwd", "weights.bin"):
        shards(folder, **{"lm_head.weight": name})
        refused(folder, r"names '.*'; only .safetensors files beside it are read")
    shards(folder, **{"lm_head.weight": "gone.safetensors"})
    refused(folder, "names 'gone.safetensors', which is not there; use a complete checkpoint")
    for content in ("[]", '{"weight_map": []}', '{"weight_map": {"a": 3}}'):
        (folder / "model.safetensors.index.json").write_text(content)
        refused(folder, "is no index of weights|is no configuration")
    (tmp_path / "x.safetensors").rename(folder / "part.safetensors")
    keys = load_file(folder / "part.safetensors")
    shards(folder, **dict.fromkeys(keys, "part.safetensors"))
    assert np.isfinite(Engine.from_pretrained(folder).loglikelihood(REQUESTS).logprob).all()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1, 2]", "is no configuration: a JSON object is needed"),
        ("[" * 100_000, "is not valid JSON"),
        ('{"a": ' * 100_000, "is not valid JSON"),
        (" " * (65 << 20), "has 68157440 bytes; 67108864 are the most that are read"),
        ('{"model_type": ["llama"]}', "cannot read the configuration|no causal"),
        ('{"model_type": "llama", "architectures": 3}', "architectures is 3; a list of names is needed"),
        ('{"model_type": "llama", "hidden_size": 1' + "0" * 5000 + "}", "JSON|cannot read"),
        ('{"model_type": "llama", "attn_implementation": "evil/kernel"}', "asks for code from elsewhere"),
        ('{"model_type": "llama", "text_config": "x"}', "text_config is 'x'; a JSON object is needed"),
        ('{"auto_map": 3}', "brings its own code"),
        ('{"model_type": "llama", "num_hidden_layers": 1000000000}', "1000 layers are the most that are built"),
        ('{"model_type": "llama", "transformers_weights": "x.safetensors"}', "names other weights"),
        ('{"model_type": "llama", "num_hidden_layers": null}', "cannot read the configuration|makes no model"),
        ('{"model_type": "hrm_text", "num_layers_per_stack": 1099511627776}', "num_layers_per_stack is 1099511627776"),
        ('{"model_type": "longcat_flash", "num_layers": 1099511627776}', "num_layers is 1099511627776; 1000 layers"),
        ('{"model_type": "xlstm", "num_blocks": 1099511627776}', "num_blocks is 1099511627776; 1000 layers"),
        ('{"model_type": "llama", "num_labels": 1000000000}', "num_labels is 1000000000; 30000 are the most"),
        ('{"model_type": "llama", "text_config": {"num_labels": 1000000000}}', "num_labels is 1000000000"),
        ('{"model_type": "gemma3", "vision_config": {"num_hidden_layers": 1000000000}}', "num_hidden_layers is 100"),
        (json.dumps({"model_type": "llama", "id2label": dict.fromkeys(range(30_001), "x")}), "id2label is {'0': 'x'"),
    ],
    ids=range(20),
)
def test_a_strange_configuration_gets_one_line(tmp_path: Path, content: str, message: str) -> None:
    (make_model(tmp_path) / "config.json").write_text(content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        refused(tmp_path, message)


def test_what_is_no_regular_file_is_not_waited_for(tmp_path: Path) -> None:
    folder = make_model(tmp_path)
    (folder / "tokenizer.json").unlink()
    os.mkfifo(folder / "tokenizer.json")
    refused(folder, "is neither a file nor a folder; take it out of the model folder")


def test_links_as_the_hubs_cache_has_them_are_followed(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    for path in folder.iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(Path("..") / "blobs" / path.name)
    (tmp_path / "snapshot" / "gone.json").symlink_to("nowhere")
    assert np.isfinite(Engine.from_pretrained(tmp_path / "snapshot").loglikelihood(REQUESTS).logprob).all()


def test_weights_that_are_not_numbers_are_refused_and_plain_scoring_states_each_answer(tmp_path: Path) -> None:
    folder, key = make_model(tmp_path), "model.layers.0.mlp.up_proj.weight"
    edit_weights(folder, **{key: torch.full_like(load_file(folder / "model.safetensors")[key], torch.nan)})
    with pytest.raises(ModelError, match=r"^LlamaForCausalLM in float32 gives no number, only NaN or infinity"):
        Engine.from_pretrained(folder).loglikelihood(REQUESTS)
    out = Engine.from_pretrained(folder, plain=True).loglikelihood(REQUESTS)
    assert out.state.all()
    assert np.isnan(out.logprob).all()
