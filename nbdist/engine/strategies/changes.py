"""What was changed in a model after it was wrapped, where the wrapper cannot see it."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

__all__ = ["watch_changes"]


def watch_changes(wrapper: nn.Module, module: nn.Module) -> None:
    """Warn at the forward pass after a parameter was replaced, added, frozen or unfrozen.

    The gradient hooks hang on the tensors of before: the ranks would train apart, and no error would tell.
    """
    seen = _Seen(module)
    wrapper.register_forward_pre_hook(seen.compare, prepend=True)


class _Seen:
    """The module as it was. The comparison runs before each step: a few microseconds, by the ids of things alone."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._note()

    def _note(self) -> None:
        self._registries: list[dict[str, Any]] = []
        for part in self._module.modules():
            self._registries += [part._parameters, part._modules]
        self._names = {id(p): name for name, p in self._module.named_parameters()}
        self._parameters = list(self._module.parameters())
        self._ids = [id(thing) for registry in self._registries for thing in registry.values()]
        self._trained = [p.requires_grad for p in self._parameters]

    def compare(self, wrapper: nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling():
            return  # ids are nothing to trace
        if [id(thing) for registry in self._registries for thing in registry.values()] != self._ids:
            new = [name for name, p in self._module.named_parameters() if id(p) not in self._names]
            self._warn(f"{_listed(new or ['a layer'])} replaced after wrapping", wrapper)
        elif [p.requires_grad for p in self._parameters] != self._trained:
            pairs = zip(self._parameters, self._trained, strict=True)
            changed = [self._names[id(p)] for p, trained in pairs if p.requires_grad is not trained]
            self._warn(f"requires_grad of {_listed(changed)} changed after wrapping", wrapper)

    def _warn(self, what: str, wrapper: nn.Module) -> None:
        self._note()  # once
        warnings.warn(f"{what}; rewrap: model = nbdist.parallelize(model).", stacklevel=4)


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
