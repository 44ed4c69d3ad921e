"""A Hugging Face causal language model whose twin runs with our attention and head; the model stays as it is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers import PreTrainedModel

from iclperm.engine.architecture import (
    attends_by_triton,
    attends_natively,
    logit_scale,
    logit_softcap,
    refuse_architecture,
    refuse_attention,
)
from iclperm.engine.attention_function import ATTENTION_NAME
from iclperm.engine.condition import Condition
from iclperm.engine.device import fixed_precision, refuse_unknown_isa
from iclperm.engine.forward import KvPool, TreeForward
from iclperm.engine.kernels import head, rowwise
from iclperm.engine.kernels.attention import prepare
from iclperm.engine.kernels.head import LikeliestIds, Reading
from iclperm.engine.kernels.linear import OutputRoom, linear, uses_onednn
from iclperm.engine.kernels.triton_compilation import architecture, decoding_architectures
from iclperm.engine.kernels.triton_launch import may_read_head, say_what_runs_instead
from iclperm.engine.layers import FusedDecoder, is_idle, is_unhooked, may_fuse, put_forward
from iclperm.engine.link import DeviceLink
from iclperm.engine.plain_model import PlainModel
from iclperm.engine.plan import Pack
from iclperm.engine.sampling import Sampling
from iclperm.engine.shapes import padded_rows
from iclperm.engine.tables import Inputs, PackTable, PackTables, ScoredRows, WantedPairs
from iclperm.engine.tree import IntArray
from iclperm.engine.twin import Forward, Twin, borrowed, lock_of, may_have_twins
from iclperm.errors import PLAINLY, ModelError

See = Callable[[int, torch.Tensor], None]


@dataclass(frozen=True)
class _Doubled:
    """The twin of decoder and head, the decoder in our layers if they know it, and what the twin runs in each way:
    in transformers' layers, in ours, or in one of these alone."""

    twin: Twin
    of: Condition  # when it was last looked at
    known: FusedDecoder | None
    is_fused: bool  # whether nobody sits in what is known
    row_wise: Mapping[nn.Module, Forward]
    ways: dict[tuple[bool, int | None], Mapping[nn.Module, Forward]] = field(default_factory=dict)

    def way(self, decoder: FusedDecoder | None, layer: int | None) -> Mapping[nn.Module, Forward]:
        key = decoder is not None, layer
        if key not in self.ways:
            self.ways[key] = {**self.row_wise, **dict(_overrides(decoder, layer))}
        return self.ways[key]


def _overrides(decoder: FusedDecoder | None, layer: int | None) -> Iterable[tuple[nn.Module, Forward]]:
    if decoder is None:
        return ()
    return decoder.overrides if layer is None else decoder.overrides_of(layer)


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
        if self.device.type == "cpu":
            refuse_unknown_isa()
        facts = self.facts
        refuse_attention(attention, self.devices, self.dtype, facts.head_size)
        native, by_triton = (
            runs(self.devices, self.dtype, facts.head_size) for runs in (attends_natively, attends_by_triton)
        )
        best = "native" if native else "triton" if by_triton and self.device.type == "cuda" else "torch"
        self.attention = best if attention == "auto" else attention
        if attention == "auto" or layers == "auto":
            for device in self.devices:
                say_what_runs_instead(device, self.dtype, facts.head_size if attention == "auto" else 0)
        refuse_architecture(model, self.config)
        self.max_positions = facts.max_tokens
        self._doubled: _Doubled | None = None  # of the last call
        self._running: Callable[[nn.Module], Any] = lambda module: module  # while attached, what runs in its place
        self._condition: Condition | None = None  # when it was last asked for
        self._decoder_condition: Condition | None = None
        self._ran: dict[int, Forward] | None = None  # while the twin is attached, hooks that ran in its last pass
        self._numbers = self._numbers_now()
        self._num_layers = facts.num_layers
        self.link = DeviceLink(self.devices)
        self._logit_room = OutputRoom()
        self._is_fused = False  # in our layers, while the model is attached
        # By whose layers run, and whether rows are live: some, all.
        self._wanted = defaultdict[tuple[bool, bool, bool], dict[PackTable, None]](dict)
        least = min(decoding_architectures(self.dtype), default=0)
        self._may_attend_live_rows = self._everywhere(lambda device, _: architecture(device) >= least)
        self._may_fuse = layers == "auto" and self._everywhere(may_fuse)
        self._may_fuse_head = layers == "auto" and self._everywhere(may_read_head)

    def _everywhere(self, runs: Callable[[torch.device, torch.dtype], bool]) -> bool:
        """Whether something runs in the model's dtype on every device that layers lie on."""
        return all(runs(device, self.dtype) for device in self.devices)

    @property
    def layers(self) -> str:  # type: ignore[override]
        """Whose decoder layers run: ``fused`` (ours) or ``transformers``."""
        with lock_of(self.model):  # which has forwards of ours meanwhile, if it has no twin
            return "transformers" if self.fused_decoder() is None else "fused"

    @property
    def is_row_wise(self) -> bool:
        """Whether every one of our row-wise replacements is free to run: no module has a forward of somebody else's."""
        return all("forward" not in vars(module) for module, _ in self._row_wise_overrides())

    def use_torch_attention(self) -> None:
        """From now on attend by torch's operations."""
        self.attention = "torch"

    @property
    def attends_live_rows(self) -> bool:
        """Whether rows that decode are attended by a kernel of their own."""
        return self.attention == "triton" and self._may_attend_live_rows

    def use_tree_attention(self) -> None:
        """From now on attend for rows that decode as for all others."""
        self._may_attend_live_rows = False

    def use_transformers_layers(self) -> None:
        """From now on run transformers' own layers."""
        self._may_fuse = False

    def use_logits(self) -> None:
        """From now on compute logits and read them, as ``read`` does where the fused head does not run."""
        self._may_fuse_head = False

    @contextmanager
    def all_by_the_library(self) -> Iterator[None]:
        """Within: attention is torch's, and layers and head are transformers'."""
        before = self.attention, self._may_fuse, self._may_fuse_head
        self.attention, self._may_fuse, self._may_fuse_head = "torch", False, False
        try:
            yield
        finally:
            self.attention, self._may_fuse, self._may_fuse_head = before

    @property
    def logit_scale(self) -> float:
        """What the head's outputs are multiplied by to be logits."""
        return logit_scale(self.model, self.config)

    @property
    def logit_softcap(self) -> float:
        """What logits are soft-capped by, 0 for nothing."""
        return logit_softcap(self.config)

    @property
    def head_is_onednn(self) -> bool:
        """Whether logits are made by oneDNN's product, called by name: the head is a plain matrix on a CPU."""
        weight = self._head.weight
        return self._may_fuse and self._head_is_plain() and uses_onednn(weight.device, self.dtype, is_head=True)

    def multiply_head(self, rows: torch.Tensor, room: OutputRoom | None = None) -> torch.Tensor:
        """The head on rows [R, H]: [R, V], before scale and soft-cap; in the ``room`` where our kernel runs."""
        if rows.dtype == self.dtype and self.head_is_onednn:
            return linear(self._head, rows, is_head=True, room=room, copied=self.copied)
        product: torch.Tensor = self.running(self._head)(rows)
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
        return self._fused(self._double()) if self._may_fuse else None

    def _fused(self, doubled: _Doubled | None) -> FusedDecoder | None:
        if doubled is None:
            return self._looked_up(self.known_decoder)
        return doubled.known if doubled.is_fused else None

    def _looked_up(self, decoder: FusedDecoder | None) -> FusedDecoder | None:
        """A decoder, with what its modules hold now; None if there is none, or if somebody touched it."""
        return None if decoder is None else decoder.renewed(self.dtype, self.devices)

    @contextmanager
    def attached(self, *, fused: bool = True, layer: int | None = None, see: See | None = None) -> Iterator[object]:
        """Within: attention through the tree, in our layers if ``fused`` and they may run, or in ``layer`` alone.

        Gives the ``condition`` of what runs. ``see`` is given each layer's number and what comes into it, of the scored
        rows [R, H]. The model's twin runs, and the model is as it was throughout. Where it has none, the model itself
        runs, and is as it was after. One thread at a time.
        """
        self._refuse_other_numbers()
        self._refuse_hooks_above()
        runs_itself = self._doubled is None and self._double() is None
        try:
            while True:
                # A model that has no twin: first under its own lock, as engines may call each other.
                with lock_of(self.model) if runs_itself else nullcontext(), self.lock:
                    if (doubled := self._double()) is not None or runs_itself:
                        with self._running_as(doubled, fused, layer, see) as condition:
                            yield condition
                        return
                runs_itself = True
        except BaseException as error:
            if not isinstance(error, Exception):  # an interrupt, which may have come between any two steps
                self._doubled = None
            raise

    @contextmanager
    def _running_as(
        self, doubled: _Doubled | None, fused: bool, layer: int | None, see: See | None
    ) -> Iterator[object]:
        """As ``attached``, under its locks."""
        condition = self._known().token if doubled is None else doubled.of.token
        itself = borrowed(self.model) if doubled is None else nullcontext()
        before = self._is_fused, self._running, self._ran
        self.copied.begin(condition)  # also of the call that this one is within: weights may have been written to since
        try:
            with fixed_precision(), itself, ExitStack() as undo:
                decoder = self._fused(doubled) if fused and self._may_fuse else None
                self._is_fused = decoder is not None
                if doubled is None:
                    self._running, self._ran = lambda module: module, None
                    self._put_in(_overrides(decoder, layer), see, undo)
                else:
                    self._running, self._ran = doubled.twin.__getitem__, doubled.twin.ran
                    undo.callback(self._ran.update, dict(self._ran))  # of the call that this one is within
                    placed = doubled.way(decoder, layer)
                    undo.callback(doubled.twin.place, doubled.twin.place(placed))
                    if see is not None:
                        doubled.twin.place({**placed, **self._seeing(see)})
                with torch.inference_mode():
                    yield condition
        finally:
            self._is_fused, self._running, self._ran = before
            self.copied.end()

    @property
    def condition(self) -> object:
        """Another object where anything of decoder and head is another now that matters to what they compute:
        `Condition`."""
        return self._known().token

    @property
    def decoder_condition(self) -> object:
        """The same of the decoder alone: keys and values do not depend on the head."""
        roots, known = self._roots()[:1], self._decoder_condition
        if known is None or not known.holds(roots):
            self._decoder_condition = known = Condition(roots, known)
        return known.token

    def _known(self) -> Condition:
        roots, known = self._roots(), self._condition
        if known is None or not known.holds(roots):
            self._condition = known = Condition(roots, known)
        return known

    def _roots(self) -> list[nn.Module]:
        return [self.model.get_decoder(), self._head]  # type: ignore[no-untyped-call]

    def runs_as(self, condition: object) -> bool:
        """While attached: whether the model that runs is known to be that of ``condition``. Of one that has no twin,
        and forwards of ours meanwhile, it is not."""
        return self._ran is not None and self.condition is condition

    def ran_as(self, condition: object) -> bool:
        """While attached: whether the pass that has run did as ``condition`` says all along, without a hook that was
        there for a moment alone. A model that has no twin must not be changed meanwhile."""
        known = self._condition
        return self._ran is None or (known is not None and known.knows(self._ran) and self.condition is condition)

    def _numbers_now(self) -> tuple[torch.dtype, torch.device | None]:
        """Type and, where no hook brings weights to another, device of the model's numbers."""
        embedding: Any = self.model.get_input_embeddings()
        weight: torch.Tensor = embedding.weight
        return weight.dtype, None if getattr(self.model, "hf_device_map", None) else weight.device

    def _refuse_other_numbers(self) -> None:
        """Raises ModelError where the model has others than the engine was made for."""
        if (now := self._numbers_now()) != self._numbers:
            was, of = (" on ".join(map(str, filter(None, each))) for each in (self._numbers, now))
            raise ModelError(f"the model is {of} now, and its engine was made for {was}; make another Engine of it")

    def _refuse_hooks_above(self) -> None:
        """Raises ModelError for a hook on what holds the decoder, which never runs."""
        for name, module in self.model.named_modules():
            if module is self._decoder:
                return
            hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
            if not all(map(is_idle, hooks)) and any(part is self._decoder for part in module.modules()):
                raise ModelError(
                    f"somebody's hook is on {name or type(self.model).__name__!r}, which does not run as a whole; "
                    f"put it on the decoder or what is beneath it (model.get_decoder()), or {PLAINLY}"
                )

    def _double(self) -> _Doubled | None:
        """The twin of the model as it is now, with what it runs; None if it has none."""
        now, known = self._known(), self._doubled
        if known is not None and known.of is now:
            return known
        roots, made = self._roots(), None
        if may_have_twins(roots):
            if known is not None and known.twin.is_current(roots):
                decoder, row_wise, ways, twin = known.known, known.row_wise, known.ways, known.twin
            else:
                decoder, twin, ways = self.known_decoder, Twin(roots, ATTENTION_NAME), {}
                row_wise = {module: stand_in(twin[module].forward) for module, stand_in in self._row_wise_overrides()}
            made = _Doubled(twin, now, decoder, self._looked_up(decoder) is not None, row_wise, ways)
        self._doubled = made if self._known() is now else None  # changed as it was made: for this once
        return made

    def _put_in(
        self,
        ours: Iterable[tuple[nn.Module, Forward]],
        see: See | None,
        undo: ExitStack,
    ) -> None:
        """Let the model itself run what the twin would, until ``undo``; a forward of somebody else's stays."""
        configs = (getattr(module, "config", None) for module in self._decoder.modules())
        for config in {id(config): config for config in configs if config is not None}.values():
            undo.callback(setattr, config, "_attn_implementation", config._attn_implementation)
            config._attn_implementation = ATTENTION_NAME
        for module, stand_in in self._row_wise_overrides():
            if "forward" not in vars(module):
                put_forward(module, stand_in(module.forward), undo)
        for module, forward in ours:
            put_forward(module, forward, undo)
        for module, forward in self._seeing(see).items() if see is not None else ():
            put_forward(module, forward, undo)

    def _seeing(self, see: See) -> dict[nn.Module, Forward]:
        """The layers' forwards of now, which first show what they are given."""
        return {
            module: _Seen(number, self.running(module).forward, see)
            for number, module in enumerate(self._layer_modules())
        }

    def _layer_modules(self) -> list[nn.Module]:
        """The decoder's layers, in their order; raises ModelError where they are not to be found."""
        decoder: nn.Module = self.model.get_decoder()  # type: ignore[no-untyped-call]
        lists = (each for each in decoder.modules() if isinstance(each, nn.ModuleList))
        found = next((list(each) for each in lists if len(each) == self._num_layers), [])
        if not found:
            raise ModelError(f"the layers of {self.config.model_type!r} are in no list of {self._num_layers} modules")
        return found

    def running(self, module: nn.Module) -> Any:
        """What runs in place of a module: while the model is attached its double, if it has one."""
        return self._running(module)

    @property
    def _decoder(self) -> Any:
        return self.running(self.model.get_decoder())  # type: ignore[no-untyped-call]

    def forward(self, pack: Pack, pool: KvPool) -> tuple[torch.Tensor, TreeForward]:
        """Final hidden states [R, H] of a pack's scored rows; fills the pool as the pack says."""
        tree = self.start(pack, pool)
        return self.run(tree), tree

    def run(self, tree: TreeForward) -> torch.Tensor:
        """As ``forward``, of a pack that ``start`` or ``stage`` has made ready."""
        ids, positions = tree.tables.of(Inputs(), self.device)
        if self._ran is not None:
            self._ran.clear()
        hidden: torch.Tensor = self._decoder(
            input_ids=ids, position_ids=positions, use_cache=False, tree=tree
        ).last_hidden_state[0]
        if tree.num_layers != self._num_layers:
            raise ModelError(
                f"{self.config.model_type!r} has {self._num_layers} layers but only "
                f"{tree.num_layers} attend; other kinds of layer cannot be served; {PLAINLY}"
            )
        if tree.is_narrowed:
            return hidden[: tree.num_scored]
        (rows,) = tree.tables.of(ScoredRows(is_padded=False), hidden.device)
        return hidden[rows]

    def forward_layer(self, tree: TreeForward) -> torch.Tensor:
        """Hidden states [M, H] of a pack after its next layer, which is attached alone; after the last as ``forward``.

        They are to be ``tree.hidden`` before the one after that.
        """
        ids, positions = tree.tables.of(Inputs(), self.device)
        given = {"input_ids": ids} if tree.hidden is None else {"inputs_embeds": tree.hidden[None]}
        hidden: torch.Tensor = self._decoder(
            **given, position_ids=positions, use_cache=False, tree=tree
        ).last_hidden_state[0]
        tree.forget_rotations()
        return hidden[: tree.num_scored] if tree.is_narrowed else hidden

    @property
    def num_layers(self) -> int:
        return self._num_layers

    def pool(self, num_slots: int) -> KvPool:
        """An empty pool for the keys and values of ``num_slots`` tokens."""
        return KvPool(num_slots, self.limits)

    def start(self, pack: Pack, pool: KvPool) -> TreeForward:
        """A pack before its first layer."""
        return self._started(pack, pool, {})

    def stage(self, pack: Pack, pool: KvPool) -> TreeForward:
        """As ``start``; where the device goes on by itself, all that it will be asked of the pack is on its way there.

        What that is the packs before it have shown. To be called while the model is attached, in the order of the
        packs, each after ``run`` of the one before.
        """
        tree = self._started(pack, pool, self._wanted[self._is_fused, pack.live is not None, pack.is_live])
        if self.link.is_asynchronous:
            tree.tables.make()
        return tree

    def go_on(self, tree: TreeForward, token_ids: torch.Tensor) -> TreeForward:
        """The step after a pack of live rows alone, before its first layer; their tokens [R] are on the device.

        Nothing is made on the host or sent to the device.
        """
        tree.tables.advance(token_ids)
        return self._prepared(tree.tables, tree.pool)

    def _started(self, pack: Pack, pool: KvPool, wanted: dict[PackTable, None]) -> TreeForward:
        pool.start(pack)
        return self._prepared(PackTables(pack, self.link, self.device, pool.token_rows, wanted), pool)

    def _prepared(self, tables: PackTables, pool: KvPool) -> TreeForward:
        attend = prepare(tables.pack, tables.num_rows, self.attention, self.limits.dense_rows, tables, pool.live_slots)
        return TreeForward(tables, pool, attend, self.config, self.copied)

    def read(self, scored: torch.Tensor, tree: TreeForward) -> Callable[[], Reading]:
        """What waits for the log-probabilities of the pack's wanted pairs, which are read of its scored rows [R, H]."""
        pack, scored = tree.pack, self._brought(scored)
        if self.fuses_head and scored.dtype == self.dtype:
            found = head.find_wanted(scored, self._head, self.logit_scale, self.logit_softcap, tree.tables)
            return self.link.download(found, partial(head.reading_of_found, pack.pair_row, pack.pair_id))
        if scored.device.type == "cpu" and scored.dtype in head.NATIVE:
            reading = self.read_logits(scored, pack.pair_row, pack.pair_id)
            return lambda: reading
        rows, ids = tree.tables.of(WantedPairs(), scored.device)
        parts = [
            head.read_torch(self._logits(scored[begin:end]), self.logit_softcap, rows[lo:hi] - begin, ids[lo:hi])
            for begin, end, lo, hi in self._logit_chunks(len(scored), pack.pair_row)
        ]
        read = [torch.cat(arrays) for arrays in zip(*parts, strict=True)]
        return self.link.download(read, partial(head.reading_of_rows, pack.pair_row, pack.pair_id))

    def read_rows(
        self, hidden: torch.Tensor, pair_row: npt.NDArray[np.int32], pair_id: npt.NDArray[np.int32]
    ) -> Reading:
        """What ``pair_id`` [X] at rows ``pair_row``, rising, of ``hidden`` [R, H] is worth; the bits of ``read``."""
        is_fused = self.fuses_head and hidden.dtype == self.dtype
        return (self.read_fused if is_fused else self.read_logits)(hidden, pair_row, pair_id)

    def choose_rows(self, hidden: torch.Tensor) -> LikeliestIds:
        """The likeliest next token of each row of ``hidden`` [R, H], with the bits of ``choose``."""
        if self.fuses_head and hidden.dtype == self.dtype:
            return head.choose_hidden(hidden, self._head, self.logit_scale, self.logit_softcap)
        parts = [
            head.choose_logits(self._logits(hidden[begin:end]), self.logit_softcap)
            for begin, end in self._chunks(hidden.shape[0])
        ]
        return LikeliestIds(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))

    def read_fused(
        self, scored: torch.Tensor, pair_row: npt.NDArray[np.int32], pair_id: npt.NDArray[np.int32]
    ) -> Reading:
        """What ``pair_id`` [X] at rows ``pair_row`` of ``scored`` [R, H] is worth; no logits exist."""
        return head.read_hidden(scored, self._head, self.logit_scale, self.logit_softcap, pair_row, pair_id)

    def read_logits(
        self, scored: torch.Tensor, pair_row: npt.NDArray[np.int32], pair_id: npt.NDArray[np.int32]
    ) -> Reading:
        """As ``read_fused``, rows of ``pair_row`` ascending; logits exist for a chunk of rows at a time."""
        parts = [
            head.read_logits(
                self._logits(scored[begin:end]), self.logit_softcap, pair_row[lo:hi] - np.int32(begin), pair_id[lo:hi]
            )
            for begin, end, lo, hi in self._logit_chunks(len(scored), pair_row)
        ]
        return Reading(*(np.concatenate([getattr(p, name) for p in parts]) for name in Reading.__dataclass_fields__))

    def _logit_chunks(self, num_rows: int, pair_row: npt.NDArray[np.int32]) -> Iterator[tuple[int, int, int, int]]:
        """Half-open ranges of rows whose logits exist at a time, and the ranges of ``pair_row`` that are of them."""
        for begin, end in self._chunks(num_rows):
            lo, hi = np.searchsorted(pair_row, [begin, end]).tolist()
            yield begin, end, lo, hi

    def _chunks(self, num_rows: int) -> Iterator[tuple[int, int]]:
        """Half-open ranges of rows whose logits exist at a time, of about as many each: of few a product is slow."""
        most = self.limits.logit_rows(self.vocab_size, self.device)
        size = min(most, padded_rows(-(-num_rows // max(1, -(-num_rows // most))), self.device))
        yield from ((begin, min(begin + size, num_rows)) for begin in range(0, num_rows, size))

    def log_probabilities(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of each row of ``hidden`` [R, H] the log-probability of every token id, float32 [R, V] in nats."""
        return head.distributions(self._logits(hidden), self.logit_softcap)

    def choose(self, hidden: torch.Tensor, tree: TreeForward) -> tuple[torch.Tensor, Callable[[], LikeliestIds]]:
        """The likeliest next token of each scored row [R, H] of a pack, on the device, and what waits for it.

        It is -1 where not all logits are finite. Logits exist for a chunk of rows at a time, or not at all.
        """
        hidden = self._brought(hidden)
        if self.fuses_head and hidden.dtype == self.dtype:
            chosen = head.find_likeliest(hidden, self._head, self.logit_scale, self.logit_softcap, tree.tables)
            return chosen[0], self.link.download(chosen, head.likeliest_ids)
        if hidden.device.type == "cpu" and hidden.dtype in head.NATIVE:
            choice = self.choose_rows(hidden)
            return torch.from_numpy(choice.token), lambda: choice
        logits = (self._logits(hidden[begin:end]) for begin, end in self._chunks(hidden.shape[0]))
        ids, logprob = map(
            torch.cat, zip(*(head.choose_torch(some, self.logit_softcap) for some in logits), strict=True)
        )
        return ids, self.link.download([ids, logprob], head.likeliest_ids)

    def draw(
        self, hidden: torch.Tensor, sampling: Sampling, rows: IntArray, chances: npt.NDArray[np.float64]
    ) -> LikeliestIds:
        """Next tokens by chance: one for each of ``chances`` [X], after row ``rows[x]`` of ``hidden`` [R, H].

        Its log-probability is the model's own, at temperature 1. Logits exist for a chunk of rows at a time.
        """
        chunk = self.limits.logit_rows(self.vocab_size, self.device)
        order = np.argsort(rows, kind="stable")
        found = LikeliestIds(np.empty(rows.size, np.int32), np.empty(rows.size, np.float32), np.empty(rows.size, bool))
        for begin in range(0, hidden.shape[0], chunk):
            some = order[slice(*np.searchsorted(rows[order], [begin, begin + chunk]))]
            logprobs = self.log_probabilities(hidden[begin : begin + chunk])
            of = rows[some] - begin
            ids = sampling.drawn(logprobs, of, chances[some])
            row = torch.from_numpy(of).to(ids.device)
            found.token[some] = ids.int().cpu().numpy()
            found.logprob[some] = logprobs[row, ids].cpu().numpy()
            found.is_finite[some] = logprobs.isfinite().all(dim=1)[row].cpu().numpy()
        return found

    def _brought(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows where the head lies, if layers lie on several devices; offloaded, it moves them itself."""
        return rows.to(self._head.weight.device) if len(self.devices) > 1 and self._head_is_plain() else rows

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [R, V] of hidden [R, H]; as many rows as may exist at a time are gone with the next call."""
        num_rows = hidden.shape[0]
        padding = hidden.new_zeros(padded_rows(num_rows, hidden.device) - num_rows, hidden.shape[1])
        rows = torch.cat([hidden, padding])
        room = self._logit_room if len(rows) <= self.limits.logit_rows(self.vocab_size, self.device) else None
        logits = self.multiply_head(rows, room)[:num_rows]
        return logits if self.logit_scale == 1.0 else logits * self.logit_scale

    def _row_wise_overrides(self) -> list[tuple[nn.Module, Callable[[Forward], Forward]]]:
        """Modules whose forward is replaced on a CPU, and what makes a row-wise forward of theirs; none elsewhere."""
        overrides: list[tuple[nn.Module, Callable[[Forward], Forward]]] = []
        for module in self.model.modules() if self.device.type == "cpu" else ():
            if hasattr(module, "inv_freq") or type(module).__name__.endswith("RotaryEmbedding"):
                overrides.append((module, partial(rowwise.RotaryTable, limit=self.max_positions)))
            elif (forward := rowwise.activation(module)) is not None and self.dtype in (torch.float32, torch.bfloat16):
                overrides.append((module, partial(_instead, forward)))
        return overrides


class _Seen:
    """A layer's forward that first shows the scored rows of what it is given."""

    def __init__(self, number: int, forward: Callable[..., Any], see: See) -> None:
        self._number, self._forward, self._see = number, forward, see

    def __call__(self, hidden_states: torch.Tensor, *given: Any, tree: TreeForward, **named: Any) -> Any:
        (rows,) = tree.tables.of(ScoredRows(is_padded=False), hidden_states.device)
        self._see(self._number, hidden_states[0, rows])
        return self._forward(hidden_states, *given, tree=tree, **named)


def _instead(forward: Forward, _: Forward) -> Forward:
    return forward
