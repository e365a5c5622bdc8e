"""What was changed in a model after it was wrapped, where the wrapper cannot see it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

__all__ = ["watch_changes", "watch_shards"]


def watch_changes(wrapper: nn.Module, module: nn.Module) -> None:
    """Warn at the forward pass after a parameter was replaced, added, frozen or unfrozen.

    The gradient hooks hang on the tensors of before: the ranks would train apart, and no error would tell.
    """
    seen = _Seen(module)
    wrapper.register_forward_pre_hook(seen.compare, prepend=True)


def watch_shards(model: nn.Module, shards: Sequence[Any]) -> None:
    """Warn at the forward pass after a layer was added to a sharded model, or a parameter was replaced.

    What was added is not sharded, so nobody averages its gradients. A replaced parameter is lost: FSDP puts its own
    back. Freezing needs no word, since FSDP looks at ``requires_grad`` in each pass.

    Parameters
    ----------
    shards : sequence of FSDPParam
        What ``fully_shard`` made of the parameters.
    """
    seen = _SeenShards(model, shards)
    model.register_forward_pre_hook(seen.compare, prepend=True)


class _SeenShards:
    """The layers of a sharded model, and its parameters, which FSDP swaps in each pass."""

    def __init__(self, model: nn.Module, shards: Sequence[Any]) -> None:
        self._model = model
        part_names = {id(part): name for name, part in model.named_modules()}
        self._shards = {}
        for shard in shards:
            where = part_names[id(shard._module_info.module)]
            self._shards[f"{where}.{shard._module_info.param_name}".lstrip(".")] = shard
        self._note()

    def _note(self) -> None:
        parts = list(self._model.modules())
        self._parts = {id(part) for part in parts}
        self._registries = [(part._modules, part._parameters) for part in parts]
        self._layout = self._laid_out()
        self._names = {name for name, _ in self._model.named_parameters()}

    def _laid_out(self) -> list[Any]:
        return [(*map(id, layers.values()), len(parameters)) for layers, parameters in self._registries]

    def compare(self, model: nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self._laid_out() != self._layout:
            new = [name for name, part in self._model.named_modules() if id(part) not in self._parts]
            new = new or sorted({name for name, _ in self._model.named_parameters()} - self._names)
            self._warn(f"{_listed(new or ['a layer'])} changed after sharding: its gradients are not averaged")
        lost = [name for name, shard in self._shards.items() if not _is_own(shard)]
        if lost:
            for name in lost:
                del self._shards[name]  # told once
            self._warn(f"{_listed(lost)} replaced after sharding: FSDP puts its own back")

    def _warn(self, what: str) -> None:
        self._note()
        warnings.warn(f"{what}. Parallelize a newly made model, and make its optimizer anew.", stacklevel=4)


def _is_own(shard: Any) -> bool:
    """Tell whether a module holds what FSDP has put there, in one of the forms that it swaps."""
    held = shard._module_info.module._parameters.get(shard._module_info.param_name)
    if held is shard.sharded_param:
        return True
    if not hasattr(shard, "_unsharded_param"):  # before the first pass it takes what to_empty() and loading leave there
        return hasattr(held, "_local_tensor")
    return held is shard._unsharded_param or held is getattr(shard, "_sharded_post_forward_param", None)


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
