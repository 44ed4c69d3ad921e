"""What modules are at a moment, to be asked later whether anything of them is another now."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from iclperm.engine.layers import is_idle
from iclperm.engine.twin import all_modules, configs_of

_SAMPLES = 8  # numbers of a tensor
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_DEPTH = 4  # containers in containers
_PARTS = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
# Of what any module has beside its parts and these hooks, nothing matters to a forward pass in evaluation mode.
_OF_ANY_MODULE = frozenset(vars(nn.Module())) | {"_output_capturing_hooks_installed"}
_GLOBAL_HOOKS = (nn.modules.module._global_forward_pre_hooks, nn.modules.module._global_forward_hooks)
_Container: TypeAlias = dict[Any, Any] | list[Any] | set[Any]
_version, _forward = attrgetter("_version"), attrgetter("forward")


class Condition:
    """What every module at and beneath ``roots`` is now, and the hooks that run with any module.

    ``holds`` as long as modules, their classes and what these run, hooks and attributes, what lists, dictionaries and
    sets among these hold, configurations, weights and buffers are the same objects, and no tensor among all these was
    written. ``token`` is that of ``before`` where the two differ in nothing that matters: in a mode, by an equal number
    or text, in an attribute of equal numbers (which some hooks set anew each time), by hooks of transformers' that
    collect nothing. Writes that torch does not count, through ``.data`` or by a fused optimizer, show in 8 numbers of
    each tensor that lies on a CPU, so those that change a tensor as a whole do. Cost: below 2 us a module to ask, some
    20 us to make.
    """

    def __init__(self, roots: Sequence[nn.Module], before: Condition | None = None) -> None:
        self._roots = list(roots)
        self._modules = all_modules(roots)
        self._kinds = list(map(type, self._modules))
        self._classes = list(dict.fromkeys(self._kinds))
        self._attributes = list(map(vars, self._modules))
        self._own = list(map(_own_values, self._attributes))
        self._containers: list[_Container] = [*_GLOBAL_HOOKS]
        for one in [*self._modules, *configs_of(self._modules)]:
            self._containers += _watched(one)
        self._live: list[Iterable[Any]] = []  # of those that hold anything
        for each in filter(None, self._containers):
            self._live += [each.keys(), each.values()] if isinstance(each, dict) else [each]
        self._sizes, self._values = self._now()
        registered = [
            each for module in self._modules for each in (*module._parameters.values(), *module._buffers.values())
        ]
        self._registered = _WrittenTo([each for each in registered if each is not None])
        self._loose = [
            each for module in self._modules for value in _own_attributes(module).values() for each in _tensors(value)
        ]
        self._set = _WrittenTo(self._loose)
        self._hooks = {number for module in self._modules for name in _HOOKS for number in vars(module)[name]}
        self._said = list(self._described())
        self.token: object = before.token if before is not None and self._is_of(before) else object()

    def holds(self, roots: Sequence[nn.Module]) -> bool:
        """Whether this was made of ``roots``, and everything is as it was."""
        if (
            list(map(id, roots)) != list(map(id, self._roots))
            or self._registered.is_changed()
            or self._set.is_changed()
        ):
            return False
        try:
            sizes, values = self._now()
        except KeyError:  # an attribute is gone
            return False
        return (
            sizes == self._sizes
            and len(values) == len(self._values)
            and all(map(is_, values, self._values))
            and list(map(type, self._modules)) == self._kinds
        )

    def _now(self) -> tuple[list[int], list[Any]]:
        """How much everything holds, and all that it does."""
        sizes = [*map(len, self._containers), *map(len, self._attributes)]
        own = chain.from_iterable(
            [get(attributes) for get, attributes in zip(self._own, self._attributes, strict=True)]
        )
        return sizes, [*own, *chain.from_iterable(self._live), *map(_forward, self._classes)]

    def knows(self, ran: Mapping[int, object]) -> bool:
        """Whether hooks that ran, by their number, were all there when this was made."""
        return all(number in self._hooks or is_idle(hook) for number, hook in ran.items())

    def _is_of(self, before: Condition) -> bool:
        return (
            list(map(id, self._roots)) == list(map(id, before._roots))
            and self._kinds == before._kinds
            and self._registered.numbers == before._registered.numbers
            and len(self._said) == len(before._said)
            and all(map(_is_same, self._said, before._said))
            and (not before._set.is_changed())
            and len(self._loose) == len(before._loose)
            and all(map(_is_equal, self._loose, before._loose))
        )

    def _described(self) -> Iterator[Any]:
        """All that matters, but for tensors that are attributes."""
        for hooks in _GLOBAL_HOOKS:
            yield from list(hooks.values())
        yield from map(_forward, self._classes)
        for module in self._modules:
            yield module
            for name in _PARTS:
                for item in list(vars(module)[name].items()):
                    yield from item
            for name in _HOOKS:
                yield name
                for item in list(vars(module)[name].items()):  # with its number, which no other hook has had
                    yield from () if is_idle(item[1]) else item
            yield from _values_of(_own_attributes(module))
        for config in configs_of(self._modules):
            yield from _values_of(dict(vars(config)))


class _WrittenTo:
    """How often tensors were written, where they lie, and some numbers of each."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        there = [each for each in tensors if not each.is_meta]  # offloaded ones are others after each forward pass
        self._counted = [each for each in there if not each.is_inference()]
        self._stored = [each for each in there if each.layout == torch.strided]
        with torch._C.DisableTorchFunction():  # as they are, also where half precision is computed in float32
            self._samples = [sample for each in self._stored if (sample := _sample(each.detach())) is not None]
            self.numbers = self._now()

    def is_changed(self) -> bool:
        with torch._C.DisableTorchFunction():
            return self._now() != self.numbers

    def _now(self) -> tuple[int, list[int], list[bytes]]:
        return (
            sum(map(_version, self._counted)),
            list(map(torch.Tensor.data_ptr, self._stored)),
            list(map(np.ndarray.tobytes, self._samples)),
        )


def _own_values(attributes: dict[str, Any]) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    """What gets those of a module's attributes that matter, two at least."""
    return itemgetter(*_PARTS, *_HOOKS, *(name for name in attributes if name not in _OF_ANY_MODULE))


def _own_attributes(module: nn.Module) -> dict[str, Any]:
    """Those that matter, parts and hooks aside."""
    return {name: value for name, value in list(vars(module).items()) if name not in _OF_ANY_MODULE}


def _tensors(value: Any, depth: int = _DEPTH) -> Iterator[torch.Tensor]:
    """A tensor, or those in containers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, dict | list | tuple):
        for each in list(value.values() if isinstance(value, dict) else value):
            yield from _tensors(each, depth - 1)


def _watched(one: Any) -> Iterator[_Container]:
    """Containers that a module or configuration holds, and those that these hold."""
    attributes = vars(one)
    if isinstance(one, nn.Module):
        yield from (attributes[name] for name in (*_PARTS, *_HOOKS))
        attributes = _own_attributes(one)
    else:
        yield attributes
    for value in list(attributes.values()):
        yield from _containers(value, _DEPTH)


def _containers(value: Any, depth: int) -> Iterator[_Container]:
    if depth and isinstance(value, dict | list | set):
        yield value
    if depth and isinstance(value, dict | list | set | tuple):
        for each in list(value.values() if isinstance(value, dict) else value):
            yield from _containers(each, depth - 1)


def _values_of(value: Any, depth: int = _DEPTH + 1) -> Iterator[Any]:
    """What is in a container, and in containers in it, as deep as they are watched; but for tensors."""
    if depth and isinstance(value, dict | list | tuple):
        yield len(value)
        for item in list(value.items()) if isinstance(value, dict) else list(enumerate(value)):
            yield item[0]
            yield from _values_of(item[1], depth - 1)
    elif isinstance(value, set):
        yield frozenset(value)
    else:
        yield torch.Tensor if isinstance(value, torch.Tensor) else value


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):  # of offloaded ones nothing else is there
        return one.is_meta and other.is_meta and (one.shape, one.dtype) == (other.shape, other.dtype)
    return type(one) is type(other) and isinstance(one, (*_PLAIN, frozenset)) and bool(one == other)


def _is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    alike = (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
    return alike and bool(torch.equal(one, other))


def _sample(tensor: torch.Tensor) -> np.ndarray | None:
    """A few numbers of a tensor that lies on a CPU in one piece, as an array in its memory; None of any other."""
    if tensor.device.type != "cpu" or type(tensor) is not torch.Tensor or tensor.itemsize not in _INTEGERS:
        return None
    tensor = tensor if tensor.is_contiguous() else tensor.t() if tensor.ndim == 2 else tensor
    if not tensor.is_contiguous() or not tensor.numel():
        return None
    flat = tensor.view(-1).view(_INTEGERS[tensor.itemsize])
    step = max(1, flat.numel() // _SAMPLES)
    sample: np.ndarray = flat[step // 2 :: step].numpy()
    return sample
