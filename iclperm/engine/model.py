"""A Hugging Face causal language model with our attention and head attached, for the time of a call."""

from __future__ import annotations

import importlib.util
import json
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from iclperm.engine.forward import KvPool, Retention, TreeForward, padded_rows
from iclperm.engine.kernels import rowwise
from iclperm.engine.kernels.attention import AttentionRule, prepare
from iclperm.engine.kernels.head import Choice, Reading, choose_hidden, choose_logits, read_hidden, read_logits
from iclperm.engine.kernels.linear import linear, uses_onednn
from iclperm.engine.kernels.triton_launch import MAX_HEAD_DIM, may_launch
from iclperm.engine.layers import FusedDecoder, is_unhooked, is_untouched, known_decoder, may_fuse
from iclperm.engine.plan import Pack
from iclperm.errors import ConfigError, ModelError
from iclperm.reference.scoring import evaluating

# Free of "sdpa", "flash" and "flex_attention", which transformers looks for inside implementation names.
ATTENTION_NAME = "iclperm_tree"

_SERVED_LAYERS = {"full_attention", "sliding_attention"}
# Rotary types whose scale depends on the length of the prompt beyond their original window.
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}
# What an attention layer may pass on without changing what it computes.
_HARMLESS_ARGUMENTS = {
    "dropout", "scaling", "sliding_window", "softcap", "is_causal", "position_ids", "use_cache", "output_attentions",
    "output_hidden_states", "output_router_logits", "past_key_values", "cache_position", "position_embeddings",
    "return_dict", "tree",
}  # fmt: skip
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_LAYER_KEY = re.compile(r"\.(layers|h|blocks)\.\d+\.")
# Of checkpoints of text and images: how the text part's keys are called in them, and what is left out.
_TEXT_KEYS = {
    "gemma3": {r"^language_model\.lm_head": "lm_head", r"^(model\.language_model|language_model\.model)": "model"}
}
_IMAGE_KEY = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.")
BALANCED = "balanced"
"""Not a device but a way to place layers on all accelerators there are, and what finds no room there in the host."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")
LOGIT_CHUNK_BYTES = 64 << 20
_RATE_SECONDS, _RATE_ROWS = 0.5, 1024


def load(
    name: str | Path, *, device: str = "auto", dtype: str | torch.dtype = "auto", revision: str | None = None
) -> tuple[PreTrainedModel, Any]:
    """Model and tokenizer from a folder or a hub id: safetensors only, no remote code.

    ``dtype="auto"``: the checkpoint's on a GPU, float32 on a CPU, so that results do not depend on the machine.
    ``device="balanced"`` spreads the layers over all GPUs, and over the host what they cannot hold. Of a checkpoint of
    text and images the text part is loaded. Raises ModelError in one line for a folder without weights, pickled
    weights, remote code, an unknown architecture or weights that do not fill the model, ConfigError for ``balanced``
    without accelerate.
    """
    place, wanted = _device(device), _dtype(dtype)
    if device == BALANCED:
        _refuse_without_accelerate()
    config = load_config(name, revision)
    _refuse_folder_without_weights(Path(name))
    if wanted == "auto" and place.type == "cpu":
        wanted = torch.float32
    text_keys = _TEXT_KEYS.get(config.model_type)
    try:
        with _quiet():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                name,
                config=_text_part(config),
                revision=revision,
                trust_remote_code=False,
                use_safetensors=True,
                dtype=wanted,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are reported below, by name
                **({} if text_keys is None else {"key_mapping": text_keys}),
                **({"device_map": BALANCED} if device == BALANCED else {}),
            )
    except Exception as error:
        raise ModelError(f"cannot load the weights of {str(name)!r}: {_first_line(error)}") from error
    model, info = loaded
    problems = {
        "missing keys": info["missing_keys"],
        "keys of another shape": info["mismatched_keys"],
        "layers that the configuration lacks": [
            key
            for key in map(str, info["unexpected_keys"])
            if _LAYER_KEY.search(key) and not (text_keys and _IMAGE_KEY.match(key))
        ],
    }
    for problem, keys in problems.items():
        if first := sorted(map(str, keys))[:3]:
            raise ModelError(
                f"the weights of {str(name)!r} do not fit its configuration: {problem}, {first}; "
                "use a complete checkpoint"
            )
    try:
        served: PreTrainedModel = (model if device == BALANCED else model.to(place)).eval()
    except Exception as error:
        raise ModelError(f"cannot put {str(name)!r} on {place}: {_first_line(error)}") from error
    return served, load_tokenizer(name, revision)


def load_config(name: str | Path, revision: str | None = None) -> Any:
    """The configuration of a causal language model in a folder or of a hub id; no weights are needed.

    Raises ModelError in one line for a folder without one, remote code, or an architecture that is none.
    """
    _refuse_folder(Path(name))
    try:
        with _quiet():
            config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
    except Exception as error:
        raise ModelError(f"cannot read the configuration of {str(name)!r}: {_first_line(error)}") from error
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ModelError(
            f"{str(name)!r} is a {config.model_type!r} model, which is no causal language model that "
            "transformers knows; give a decoder-only model"
        )
    if config.model_type == "gemma" and config.hidden_act == "gelu":
        # What the first releases wrote for the tanh approximation; transformers 5.17 takes it at its word.
        config.hidden_act = "gelu_pytorch_tanh"
    return config


def load_shapes(
    name: str | Path, *, device: str = "auto", dtype: str | torch.dtype = "auto", revision: str | None = None
) -> tuple[PreTrainedModel, torch.device]:
    """The model that ``load`` would give, on the meta device (every shape, no numbers), and the device meant for it.

    A configuration that names no dtype counts as float32. Raises ModelError as ``load_config`` does.
    """
    place, wanted = _device(device), _dtype(dtype)
    config = load_config(name, revision)
    if not isinstance(wanted, torch.dtype):
        wanted = _dtype(resolved_dtype(config.to_dict(), device=device, dtype="auto"))
    auto: Any = AutoModelForCausalLM
    try:
        with torch.device("meta"):
            model: PreTrainedModel = auto.from_config(_text_part(config), dtype=wanted, trust_remote_code=False)
    except Exception as error:
        raise ModelError(f"the configuration of {str(name)!r} makes no model: {_first_line(error)}") from error
    return model, place


def has_device(name: str) -> bool:
    """Whether this machine has a device."""
    place = _device(name)
    return place.type == "cpu" or bool(getattr(torch, place.type).is_available())


def resolved_dtype(config: Mapping[str, Any], *, device: str, dtype: str) -> str:
    """What ``load`` makes of a dtype, from a model's config.json alone."""
    if dtype != "auto":
        return dtype
    on_cpu = _device(device).type == "cpu"
    return "float32" if on_cpu else str(config.get("dtype") or config.get("torch_dtype") or "float32")


@contextmanager
def _quiet() -> Iterator[None]:
    """Within: no load report and no progress bar of transformers'; what matters in them is raised as an error."""
    log: Any = transformers_logging
    verbosity, has_bar = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if has_bar:
            log.enable_progress_bar()


def _device(name: str) -> torch.device:
    """A device by its name; for ``balanced`` the one that prompts go to first."""
    try:
        return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name in ("auto", BALANCED) else name)
    except RuntimeError as error:
        raise ModelError(f"device {name!r} is unknown; give auto, cpu, cuda or cuda:0, or balanced") from error


def _refuse_without_accelerate() -> None:
    if importlib.util.find_spec("accelerate") is None:
        raise ConfigError(
            f"device {BALANCED!r} needs accelerate, which is not installed: pip install 'iclperm[accelerate]'"
        )


def _text_part(config: Any) -> Any:
    """The configuration of a checkpoint's text part; itself where there is no other part, or none that is left out."""
    return config.get_text_config(decoder=True) if config.model_type in _TEXT_KEYS else config


def _placement(model: PreTrainedModel) -> tuple[torch.device, ...]:
    """The devices on which a model computes, that of its inputs first; several if accelerate spread it over them."""
    places = list(dict.fromkeys((getattr(model, "hf_device_map", None) or {}).values()))
    accelerators = [torch.device("cuda", place) if isinstance(place, int) else torch.device(place)
                    for place in places if place not in ("cpu", "disk")]  # fmt: skip
    if accelerators:
        return tuple(accelerators)
    # What is offloaded lies on the meta device between calls.
    return (torch.device("cpu") if model.device.type == "meta" and places else model.device,)


def _dtype(name: str | torch.dtype) -> str | torch.dtype:
    wanted = name if name == "auto" or isinstance(name, torch.dtype) else getattr(torch, name, None)
    if wanted != "auto" and wanted not in _DTYPES:
        raise ModelError(f"dtype {name!r} is unknown; give auto, float32, bfloat16 or float16")
    return wanted


def load_tokenizer(name: str | Path, revision: str | None = None) -> Any:
    """The tokenizer beside a model, without its weights; None for a folder that has no tokenizer files.

    Raises ModelError for files that do not make a tokenizer.
    """
    if Path(name).is_dir() and not any((Path(name) / file).exists() for file in _TOKENIZER_FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]  # its first line may end in a colon
        raise ModelError(f"cannot load the tokenizer of {str(name)!r}: {reason}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def _refuse_folder(folder: Path) -> None:
    """What a local folder must not be, before transformers tries to read it."""
    if not folder.is_dir():
        return
    config = folder / "config.json"
    if not config.is_file():
        raise ModelError(f"model folder '{folder}' has no config.json; give a folder saved by save_pretrained")
    try:
        settings = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"'{config}' is not valid JSON: {_first_line(error)}") from error
    if not isinstance(settings, dict):
        raise ModelError(f"'{config}' is no configuration: a JSON object is needed")
    if "auto_map" in settings:
        raise ModelError(
            f"model folder '{folder}' brings its own code (auto_map in config.json), which is not run; "
            "use a checkpoint of an architecture that transformers has built in"
        )


def _refuse_folder_without_weights(folder: Path) -> None:
    if not folder.is_dir() or any(not file.name.startswith("adapter_") for file in folder.glob("*.safetensors")):
        return
    pickled = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for p in folder.glob(pattern))
    if pickled:
        raise ModelError(
            f"model folder '{folder}' has only pickled weights ({pickled[0]}), which can run code; "
            "convert them with save_pretrained(..., safe_serialization=True)"
        )
    raise ModelError(f"model folder '{folder}' has no weights; it needs model.safetensors")


def _tree_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls: query [1, Hq, M, d], key and value [1, Hkv, M, d]."""
    forward: TreeForward | None = arguments.get("tree")
    if forward is None:
        raise ModelError(
            f"{type(module).__name__} is not handed the arguments of its model, so the tree does not reach it; "
            "run it with plain=True (--plain)"
        )
    unknown = sorted(a for a, given in arguments.items() if given is not None and a not in _HARMLESS_ARGUMENTS)
    if unknown:
        raise ModelError(
            f"{type(module).__name__} passes {unknown[0]!r} to its attention, which the tree cannot serve; "
            "run it with plain=True (--plain)"
        )
    forward.refuse_mask(module, attention_mask)
    scaling = arguments.get("scaling")
    rule = AttentionRule(
        scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        softcap=float(arguments.get("softcap") or 0.0),
        window=forward.window(module, arguments),
    )
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    return forward.attention(q, k, v, rule)[None], None


AttentionInterface.register(ATTENTION_NAME, _tree_attention)


class PlainModel:
    """A causal language model as it is: what prompt-by-prompt scoring needs to know of it."""

    attention = layers = "plain"

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.config = model.config.get_text_config(decoder=True)
        self.devices = _placement(model)
        self.device = self.devices[0]
        self.dtype = model.dtype
        self.max_positions = int(getattr(self.config, "max_position_embeddings", None) or np.iinfo(np.int32).max)
        embedding: Any = model.get_input_embeddings
        self._embedding = embedding()
        self._head = _output_embeddings(model)
        self.vocab_size = int(self._embedding.weight.shape[0])

    @property
    def device_name(self) -> str:
        """The kind of device, and which one if it is an accelerator; of several, each kind once."""
        names = [torch.cuda.get_device_name(each) if each.type == "cuda" else str(each) for each in self.devices]
        return " and ".join(sorted(set(names)))

    def release_cached_memory(self) -> None:
        """Hand back what the allocator keeps for later, so that it can be cut anew."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def uses_onednn(self) -> bool:
        """Whether layers of ours run oneDNN's matrix products."""
        return uses_onednn(self.device, self.dtype)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the keys and values of one token, over all layers."""
        heads = getattr(self.config, "num_key_value_heads", None) or self._num_heads
        return int(2 * self.config.num_hidden_layers * heads * self._head_dim * self.dtype.itemsize)

    @property
    def _head_dim(self) -> int:
        given = getattr(self.config, "head_dim", None)
        return int(given or self.config.hidden_size // max(1, self._num_heads))

    @property
    def _num_heads(self) -> int:
        return int(getattr(self.config, "num_attention_heads", None) or 0)

    def flops(
        self,
        num_tokens: int,
        num_scored: int,
        attention_pairs: int,
        skipped_tokens: int = 0,
        skipped_pairs: int = 0,
        looked_up_tokens: int = 0,
    ) -> float:
        """Floating-point operations of the matrix products and the attention of a call.

        Of ``num_tokens`` and of ``attention_pairs``, those skipped were spared what the last layer does for scored rows
        alone, and those looked up the products of the first that depend on the token id alone.
        """
        pairs = attention_pairs * self.config.num_hidden_layers - skipped_pairs
        attention = 4 * pairs * self._num_heads * self._head_dim
        products = self._body_parameters() * num_tokens + self._head.weight.numel() * num_scored
        if (skipped_tokens or looked_up_tokens) and (known := self.known_decoder) is not None:
            products -= known.scored_only_parameters * skipped_tokens
            products -= known.token_only_parameters * looked_up_tokens
        return float(2 * products + attention)

    @property
    def known_decoder(self) -> FusedDecoder | None:
        """The decoder in layers of our own; None if they do not know it. Read anew, since parts may be replaced."""
        return known_decoder(self.model.get_decoder())  # type: ignore[no-untyped-call]

    def _body_parameters(self) -> float:
        """Parameters that one token is multiplied with: no embeddings, not the head, of experts those it goes to."""
        tables = [module.weight for module in self.model.modules() if isinstance(module, nn.Embedding)]
        outside = {id(weight) for weight in (*tables, self._head.weight)}
        experts = getattr(self.config, "num_experts", None) or getattr(self.config, "num_local_experts", None)
        used = (getattr(self.config, "num_experts_per_tok", None) or experts) / experts if experts else 1.0
        # A layer's experts are stacked in parameters of three dimensions.
        return sum(
            p.numel() * (used if p.ndim == 3 else 1.0)
            for p in self.model.parameters()
            if p.ndim >= 2 and id(p) not in outside
        )

    def gemm_rate(self, num_rows: int) -> float:
        """Measured FLOP/s of ``num_rows`` (1024 at most) x hidden x 4 hidden products in the model's dtype."""
        return gemm_rate(num_rows, int(self.config.hidden_size), self.dtype, self.device)


@torch.inference_mode()
def gemm_rate(num_rows: int, hidden: int, dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of ``num_rows`` (1024 at most) x hidden x 4 hidden products: the best of some bursts in half a second."""
    num_rows = min(num_rows, _RATE_ROWS)
    x = torch.randn(num_rows, hidden, device=device).to(dtype)
    weight = torch.randn(hidden, 4 * hidden, device=device).to(dtype)
    best, repeats, deadline = 0.0, 1, time.perf_counter() + _RATE_SECONDS
    while (started := time.perf_counter()) < deadline:
        for _ in range(repeats):
            y = x @ weight
        float(y[0, 0])  # waits for a device
        burst = time.perf_counter() - started
        best = max(best, 8.0 * num_rows * hidden * hidden * repeats / burst)
        if burst < _RATE_SECONDS / 10:
            repeats *= 2
    return best


_LOCKS: weakref.WeakKeyDictionary[PreTrainedModel, threading.RLock] = weakref.WeakKeyDictionary()
_LOCKS_LOCK = threading.Lock()


def _lock_of(model: PreTrainedModel) -> threading.RLock:
    """One lock a model: engines in several threads that share it take turns."""
    with _LOCKS_LOCK:
        return _LOCKS.setdefault(model, threading.RLock())


class TreeModel(PlainModel):
    """A causal language model that forwards packs of a tree.

    Raises ModelError naming the feature if the architecture cannot be served exactly.
    """

    def __init__(self, model: PreTrainedModel, attention: str = "auto", layers: str = "auto") -> None:
        super().__init__(model)
        if layers not in ("auto", "transformers"):
            raise ModelError(f"layers {layers!r} are unknown; choose auto or transformers")
        if attention not in ("auto", "native", "triton", "torch"):
            raise ModelError(f"attention {attention!r} is unknown; choose auto, native, triton or torch")
        native = self.device.type == "cpu" and self.dtype in (torch.float32, torch.bfloat16)
        if attention == "native" and not native:
            raise ModelError(
                f"native attention runs float32 and bfloat16 on a CPU, not {self.dtype} on {self.device}; "
                "choose attention='torch'"
            )
        by_triton = self._head_dim <= MAX_HEAD_DIM and may_launch(self.device, self.dtype)
        if attention == "triton" and not by_triton:
            raise ModelError(
                f"triton attention runs float32, bfloat16 and float16 with heads of up to {MAX_HEAD_DIM} dimensions on "
                f"CUDA devices where triton is installed, not {self.dtype} with {self._head_dim} on {self.device}; "
                "choose attention='torch'"
            )
        best = "native" if native else "triton" if by_triton and self.device.type == "cuda" else "torch"
        self.attention = best if attention == "auto" else attention
        _refuse_architecture(model, self.config)
        self.max_positions = min(self.max_positions, _length_independent_positions(self.config))
        self._decoder: Any = model.get_decoder()  # type: ignore[no-untyped-call]
        configs = (getattr(module, "config", None) for module in self._decoder.modules())
        self._configs = list({id(config): config for config in configs if config is not None}.values())
        self._softcap = float(getattr(self.config, "final_logit_softcapping", None) or 0.0)
        self._logit_scale = _logit_scale(self.config)
        self._overrides = self._row_wise_overrides() if self.device.type == "cpu" else []
        self._may_fuse = layers == "auto" and may_fuse(self.device, self.dtype)
        self._may_fuse_head = layers == "auto" and may_launch(self.device, self.dtype)

    @property
    def layers(self) -> str:  # type: ignore[override]
        """Whose decoder layers run: ``fused`` (ours) or ``transformers``."""
        with _lock_of(self.model):
            return "transformers" if self.fused_decoder() is None else "fused"

    @property
    def is_row_wise(self) -> bool:
        """Whether our row-wise forwards stand in wherever they should: nobody's forward or hook is in their place."""
        return all("forward" not in vars(module) for module, _ in self._overrides)

    def use_transformers_layers(self) -> None:
        """From now on run transformers' own layers."""
        self._may_fuse = False

    def use_logits(self) -> None:
        """From now on compute logits and read them, as ``read`` does where the fused head does not run."""
        self._may_fuse_head = False

    @property
    def head_is_onednn(self) -> bool:
        """Whether logits are made by oneDNN's product, called by name: the head is a plain matrix on a CPU."""
        weight = self._head.weight
        return self._may_fuse and self._head_is_plain() and uses_onednn(weight.device, self.dtype, is_head=True)

    def multiply_head(self, rows: torch.Tensor) -> torch.Tensor:
        """The head on rows [R, H]: [R, V], before scale and soft-cap."""
        is_ours = rows.dtype == self.dtype and self.head_is_onednn
        product: torch.Tensor = linear(self._head, rows, is_head=True) if is_ours else self._head(rows)
        return product

    @property
    def fuses_head(self) -> bool:
        """Whether scored rows are read without their logits ever being stored: the head is a plain matrix of ours."""
        return self._may_fuse_head and self._head_is_plain() and rowwise.runs_triton(self._head.weight)

    def _head_is_plain(self) -> bool:
        """Whether the head is a matrix that nobody hooked into, in the model's dtype."""
        head = self._head
        return type(head) is nn.Linear and is_unhooked(head) and head.weight.dtype == self.dtype

    def fused_decoder(self) -> FusedDecoder | None:
        """The decoder in our layers where they may run; None if it is not known, or if somebody hooked into it."""
        known = self.known_decoder if self._may_fuse else None
        return known if known is not None and is_untouched(self._decoder, self.dtype, self.device) else None

    @contextmanager
    def attached(self, *, fused: bool = True) -> Iterator[None]:
        """Within: attention through the tree, in our layers if ``fused`` and they may run.

        After: the model as it was, bit for bit. One thread at a time.
        """
        with _lock_of(self.model), evaluating(self.model), ExitStack() as undo:
            for config in self._configs:
                undo.callback(setattr, config, "_attn_implementation", config._attn_implementation)
                config._attn_implementation = ATTENTION_NAME
            decoder = self.fused_decoder() if fused else None
            for module, forward in [*self._overrides, *(() if decoder is None else decoder.overrides)]:
                if "forward" not in vars(module):  # a hook of somebody else's stays
                    undo.callback(delattr, module, "forward")
                    module.forward = forward
            with torch.inference_mode():
                yield

    def forward(self, pack: Pack, pool: KvPool) -> tuple[torch.Tensor, TreeForward]:
        """Final hidden states [R, H] of a pack's scored rows; fills the pool as the pack says."""
        tree = self.start(pack, pool)
        hidden = self._decoder(
            input_ids=self._padded(pack.token_ids, tree.num_rows),
            position_ids=self._padded(pack.positions, tree.num_rows),
            use_cache=False,
            tree=tree,
        ).last_hidden_state[0]
        if tree.num_layers != self.config.num_hidden_layers:
            raise ModelError(
                f"{self.config.model_type!r} has {self.config.num_hidden_layers} layers but only "
                f"{tree.num_layers} attend; other kinds of layer cannot be served, use plain=True (--plain)"
            )
        if tree.is_narrowed:
            return hidden[: tree.num_scored], tree
        return hidden[torch.from_numpy(pack.scored_rows.astype(np.int64)).to(hidden.device)], tree

    def start(self, pack: Pack, pool: KvPool) -> TreeForward:
        """A pack before its first layer."""
        num_rows = padded_rows(len(pack))
        attend = prepare(pack, num_rows, self.attention)
        return TreeForward(pack, num_rows, pool, attend, Retention(pack), self.device, self.config)

    def read(self, scored: torch.Tensor, pack: Pack) -> Reading:
        """Log-probabilities of the pack's wanted pairs from its scored rows' hidden states [R, H]."""
        read = self.read_fused if self.fuses_head and scored.dtype == self.dtype else self.read_logits
        return read(scored, pack.pair_row, pack.pair_id)

    def read_fused(
        self, scored: torch.Tensor, pair_row: npt.NDArray[np.int32], pair_id: npt.NDArray[np.int32]
    ) -> Reading:
        """What ``pair_id`` [X] at rows ``pair_row`` of ``scored`` [R, H] is worth; no logits exist."""
        return read_hidden(scored, self._head, self._logit_scale, self._softcap, pair_row, pair_id)

    def read_logits(
        self, scored: torch.Tensor, pair_row: npt.NDArray[np.int32], pair_id: npt.NDArray[np.int32]
    ) -> Reading:
        """As ``read_fused``, rows of ``pair_row`` ascending; logits exist for a chunk of rows at a time."""
        chunk = padded_rows(LOGIT_CHUNK_BYTES // (self.vocab_size * 4))
        parts: list[Reading] = []
        for begin in range(0, len(scored), chunk):
            part = scored[begin : begin + chunk]
            lo, hi = np.searchsorted(pair_row, [begin, begin + part.shape[0]])
            parts.append(
                read_logits(self._logits(part), self._softcap, pair_row[lo:hi] - np.int32(begin), pair_id[lo:hi])
            )
        return Reading(*(np.concatenate([getattr(p, name) for p in parts]) for name in Reading.__dataclass_fields__))

    def choose(self, hidden: torch.Tensor) -> Choice:
        """The likeliest next token of each row of ``hidden`` [R, H]; logits exist for a chunk of rows at a time."""
        if self.fuses_head and hidden.dtype == self.dtype:
            return choose_hidden(hidden, self._head, self._logit_scale, self._softcap)
        chunk = padded_rows(LOGIT_CHUNK_BYTES // (self.vocab_size * 4))
        starts = range(0, hidden.shape[0], chunk)
        parts = [choose_logits(self._logits(hidden[begin : begin + chunk]), self._softcap) for begin in starts]
        return Choice(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [R, V] of hidden [R, H]."""
        num_rows = hidden.shape[0]
        padding = hidden.new_zeros(padded_rows(num_rows) - num_rows, hidden.shape[1])
        logits = self.multiply_head(torch.cat([hidden, padding]))[:num_rows]
        return logits if self._logit_scale == 1.0 else logits * self._logit_scale

    def _padded(self, values: np.ndarray, num_rows: int) -> torch.Tensor:
        padded = np.zeros((1, num_rows), np.int64)
        padded[0, : values.size] = values
        return torch.from_numpy(padded).to(self.device)

    def _row_wise_overrides(self) -> list[tuple[nn.Module, Callable[..., Any]]]:
        overrides: list[tuple[nn.Module, Callable[..., Any]]] = []
        for module in self.model.modules():
            if hasattr(module, "inv_freq") or type(module).__name__.endswith("RotaryEmbedding"):
                overrides.append((module, rowwise.RotaryTable(module.forward, self.max_positions)))
            elif (forward := rowwise.activation(module)) is not None and self.dtype in (torch.float32, torch.bfloat16):
                overrides.append((module, forward))
        return overrides


def _refuse_architecture(model: PreTrainedModel, config: Any) -> None:
    name = f"{type(model).__name__} ({config.model_type!r})"

    def refuse(feature: str) -> None:
        raise ModelError(
            f"{name} has {feature}, which the prefix tree cannot serve exactly; run it with plain=True (--plain)"
        )

    if getattr(config, "is_encoder_decoder", False):
        refuse("an encoder")
    if not getattr(model, "_supports_attention_backend", False):
        refuse("attention that transformers' AttentionInterface does not reach")
    other = sorted(set(getattr(config, "layer_types", None) or ()) - _SERVED_LAYERS)
    if other:
        refuse(f"layers of type {other[0]!r}")
    if getattr(config, "use_bidirectional_attention", None):
        refuse("bidirectional attention")


def _output_embeddings(model: PreTrainedModel) -> Any:
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if head is None:
        raise ModelError(f"{type(model).__name__} has no output embeddings; load it as a causal language model")
    return head


def _rope_settings(config: Any) -> list[dict[str, Any]]:
    settings = getattr(config, "rope_parameters", None) or {}
    nested = [part for part in settings.values() if isinstance(part, dict)]
    return nested or [settings]


def _length_independent_positions(config: Any) -> int:
    """Longest prompt whose rotary angles do not depend on its length."""
    limit = int(np.iinfo(np.int32).max)
    for rope in _rope_settings(config):
        if rope.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
            original = rope.get("original_max_position_embeddings")
            original = original or getattr(config, "original_max_position_embeddings", None)
            limit = min(limit, int(original or config.max_position_embeddings))
    return limit


def _logit_scale(config: Any) -> float:
    """Constant factor between the head's output and the logits (Cohere multiplies, Granite divides)."""
    if (scale := getattr(config, "logit_scale", None)) is not None:
        return float(scale)
    if (scaling := getattr(config, "logits_scaling", None)) is not None:
        return 1.0 / float(scaling)
    return 1.0
