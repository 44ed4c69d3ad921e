"""Doubles of modules that run in their place, so that nobody sees what they run with.

A module is in use by whoever made it: another thread asks the model something, trains it, has a second engine. What an
engine needs of it that others must not see, forwards of its own, evaluation mode, another attention, its double has.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import is_
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from iclperm.reference.scoring import evaluating

Forward = Callable[..., Any]


class Twin:
    """A double of every module at and beneath ``roots``, in evaluation mode, made of what the modules are now.

    A double has its module's class, attributes and parameters; its hooks are those of the module at any time, and are
    given the module. What refers to another of the modules refers to its double, and configurations are copies, with
    ``attention`` if it is given. To be made again when ``is_current`` is no longer true. No weight is copied. Cost:
    some 20 us a module, and to ask ``is_current`` below 1 us a module.
    """

    def __init__(self, roots: Sequence[nn.Module], attention: str | None = None) -> None:
        self.roots = tuple(roots)
        self._modules = all_modules(roots)
        self._types = list(map(type, self._modules))
        self.ran: dict[int, Forward] = {}  # hooks by number; whoever asks empties it
        self._twins = {module: object.__new__(type(module)) for module in self._modules}
        self._configs: dict[int, PreTrainedConfig] = {}
        self._copied_from: dict[int, dict[Any, Any] | list[Any]] = {}  # containers, by id
        self._attention = attention
        self._placed: Mapping[nn.Module, Forward] = {}
        watched = [part for module in self._modules for part in (vars(module), module._modules, module._buffers)]
        self._live: list[Iterable[Any]] = [part.values() for part in [*watched, *map(vars, configs_of(self._modules))]]
        self._values = list(chain.from_iterable(self._live))
        self._live_names = [module._parameters.keys() for module in self._modules]
        self._names = list(chain.from_iterable(self._live_names))
        for module in self._modules:
            self._follow(module)
        copied = [each.values() if isinstance(each, dict) else each for each in self._copied_from.values()]
        self._live += copied
        self._values += chain.from_iterable(copied)

    def __getitem__(self, module: nn.Module) -> nn.Module:
        """The double of a module; of one that is not among them the module itself."""
        return self._twins.get(module, module)

    def is_current(self, roots: Sequence[nn.Module]) -> bool:
        """Whether the modules are what they were: their tree, classes, attributes, buffers and configurations, and what
        lists and dictionaries hold that have modules in them."""
        if len(roots) != len(self.roots) or not all(map(is_, roots, self.roots)):
            return False
        values = list(chain.from_iterable(self._live))
        return (
            len(values) == len(self._values)
            and all(map(is_, values, self._values))
            and all(map(is_, map(type, self._modules), self._types))
            and list(chain.from_iterable(self._live_names)) == self._names
        )

    def place(self, forwards: Mapping[nn.Module, Forward]) -> Mapping[nn.Module, Forward]:
        """Let the doubles of these modules run these forwards, all others their own; what was placed before."""
        before = self._placed
        if forwards is not before:
            for module in before:
                vars(self[module]).pop("forward", None)
            for module, forward in forwards.items():
                if module in self._twins:
                    vars(self._twins[module])["forward"] = forward
            self._placed = forwards
        return before

    def _follow(self, module: nn.Module) -> None:
        """Give a double its module's attributes as they are."""
        # Copies first, which are made in one step: another thread may be in the module.
        state = {name: self._mapped(value) for name, value in dict(vars(module)).items()}
        state["training"] = False
        state["_modules"] = {name: self._mapped(child) for name, child in dict(module._modules).items()}
        state["_buffers"] = dict(module._buffers)  # which some rotary embeddings replace as they run
        state.pop("_compiled_call_impl", None)  # that runs the module
        state["_forward_hooks"] = _HooksOfModule(module, module._forward_hooks, self.ran)
        state["_forward_pre_hooks"] = _HooksOfModule(
            module, module._forward_pre_hooks, self.ran, weakref.WeakMethod(self._follow)
        )
        vars(self._twins[module]).update(state)

    def _mapped(self, value: Any) -> Any:
        """A value of an attribute with doubles in place of modules, and configurations copied."""
        kind = type(value)
        if isinstance(value, nn.Module):
            return self[value]
        if isinstance(value, PreTrainedConfig):
            return self._copied(value)
        if kind is weakref.ref:
            return weakref.ref(self[owner]) if isinstance(owner := value(), nn.Module) else value
        if kind is MethodType and isinstance(value.__self__, nn.Module):
            return MethodType(value.__func__, self[value.__self__])
        if kind not in (dict, list, tuple):
            return value
        mapped: Any = (
            {key: self._mapped(each) for key, each in value.items()} if kind is dict else kind(map(self._mapped, value))
        )
        given = (mapped.values(), value.values()) if kind is dict else (mapped, value)
        if not any(map(_differs, *given)):
            return value
        if kind is not tuple:
            self._copied_from[id(value)] = value
        return mapped

    def _copied(self, config: PreTrainedConfig) -> PreTrainedConfig:
        if (known := self._configs.get(id(config))) is not None:
            return known
        copied: PreTrainedConfig = object.__new__(type(config))
        self._configs[id(config)] = copied
        vars(copied).update({name: self._mapped(value) for name, value in vars(config).items()})
        if self._attention is not None:
            copied._attn_implementation = self._attention
            # Recording them would put hooks into the module.
            copied.output_hidden_states = copied.output_attentions = False
        return copied


def all_modules(roots: Sequence[nn.Module]) -> list[nn.Module]:
    """Every module at and beneath some, once."""
    return list(dict.fromkeys(chain.from_iterable(root.modules() for root in roots)))


def may_have_twins(roots: Sequence[nn.Module]) -> bool:
    """Whether doubles do what the modules do: none has a forward of somebody else's, which runs the module itself."""
    return not any("forward" in vars(each) or isinstance(each, torch.jit.ScriptModule) for each in all_modules(roots))


_LOCKS: weakref.WeakKeyDictionary[PreTrainedModel, threading.RLock] = weakref.WeakKeyDictionary()
_LOCKS_LOCK = threading.Lock()


def lock_of(model: PreTrainedModel) -> threading.RLock:
    """One lock a model: engines that run a model itself take turns."""
    with _LOCKS_LOCK:
        return _LOCKS.setdefault(model, threading.RLock())


@contextmanager
def borrowed(model: PreTrainedModel) -> Iterator[None]:
    """Within: a model that has no twin is in evaluation mode, and other engines wait for it; others must not use it."""
    with lock_of(model), evaluating(model):
        yield


def configs_of(modules: Sequence[nn.Module]) -> list[PreTrainedConfig]:
    """The configurations of modules, and those that are parts of them."""
    found: dict[int, PreTrainedConfig] = {}
    waiting = [value for module in modules for value in vars(module).values() if isinstance(value, PreTrainedConfig)]
    while waiting:
        config = waiting.pop()
        if id(config) not in found:
            found[id(config)] = config
            waiting += [value for value in vars(config).values() if isinstance(value, PreTrainedConfig)]
    return list(found.values())


def _differs(one: object, other: object) -> bool:
    return one is not other


class _HooksOfModule:
    """A module's hooks as its double runs them: they are given the module, and ``follow`` takes over what they change.
    Those that run are put into ``ran``.

    It is known weakly, so that a twin goes, and weights with it, as soon as nobody holds it.
    """

    def __init__(
        self,
        module: nn.Module,
        hooks: Mapping[int, Forward],
        ran: dict[int, Forward],
        follow: weakref.WeakMethod[Callable[[nn.Module], None]] | None = None,
    ) -> None:
        self._module, self._hooks, self._ran, self._follow = module, hooks, ran, follow

    def __len__(self) -> int:
        return len(self._hooks)

    def __iter__(self) -> Iterator[int]:
        return iter(self._hooks)

    def items(self) -> list[tuple[int, Forward]]:
        """Each hook by its number, in their order."""
        return [(number, self._called(number, hook)) for number, hook in list(self._hooks.items())]

    def _called(self, number: int, hook: Forward) -> Forward:
        def called(_: nn.Module, *given: Any) -> Any:
            self._ran[number] = hook
            result = hook(self._module, *given)
            if self._follow is not None and (follow := self._follow()) is not None:
                follow(self._module)
            return result

        return called
