"""What a checkpoint takes from models, optimizers and the rest, and how it is put back.

Everything goes by the names of the model's own parameters, not by wrapper, rank or position: that is what lets a
checkpoint of one strategy be read by another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

from nbdist.engine.saving import plain
from nbdist.engine.saving.shards import local_part
from nbdist.engine.strategies import hooks, parallel
from nbdist.engine.strategies.powersgd import NamedState

__all__ = ["Part", "Restoring", "parts_of", "step_of", "unexpected"]

Put = Callable[[str, torch.Tensor], Any]
Sizes = Mapping[str, torch.Size]


@dataclass(slots=True, kw_only=True)
class Part:
    """One named part of a state: what it is, and the names of the parameters that it may refer to."""

    name: str
    kind: str  # module, optimizer, stateful, plain
    value: Any
    names: dict[int, str] = field(default_factory=dict)  # id of a parameter -> its name

    def capture(self, put: Put) -> Any:
        """Give the state as plain data, tensors handed to ``put``."""
        if self.kind == "module":
            return plain.encode(dict(_module_state(self.value)), self.name, put)
        if self.kind == "optimizer":
            return plain.encode(self._optimizer_state(), self.name, put)
        if self.kind == "stateful":
            return plain.encode(self.value.state_dict(), self.name, put)
        return plain.encode(self.value, self.name, put)

    def _optimizer_state(self) -> dict[str, Any]:
        inner = _local_optimizer(self.value)
        state: dict[str, Any] = {}
        groups = []
        for group, names in zip(self.value.param_groups, self.param_names(), strict=True):
            options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            groups.append({**options, "params": names})
            for parameter, name in zip(group["params"], names, strict=True):
                if parameter in inner.state:
                    state[name] = dict(inner.state[parameter])
        return {"state": state, "groups": groups}

    def param_names(self) -> list[list[str]]:
        """Name the parameters of each group: as in the model, or by number where no model of theirs is given."""
        numbers = iter(range(1_000_000_000))
        return [
            [self.names.get(id(p), f"parameter {number}") for p, number in zip(group["params"], numbers, strict=False)]
            for group in self.value.param_groups
        ]


def parts_of(state: Mapping[str, Any]) -> list[Part]:
    """Take a state apart: a Trainer gives its model and its optimizer too, under these names where they are free."""
    from nbdist.engine.steps.training import Trainer

    values: dict[str, Any] = dict(state)
    trainers = [(name, value) for name, value in state.items() if isinstance(value, Trainer)]
    for name, trainer in trainers:
        for role, value in (("model", trainer.model), ("optimizer", trainer.optimizer)):
            if any(_same(value, given) for given in state.values()):
                continue
            values[role if role not in state and len(trainers) == 1 else f"{name}_{role}"] = value
    for name, value in list(values.items()):
        hook = hooks.hook_of(value) if isinstance(value, DDP) else None
        if hook is not None and hook.named is not None:
            values[f"{name}_comm_hook"] = hook.named
    parts = [Part(name=name, kind=_kind(value), value=value) for name, value in values.items()]
    names: dict[int, str] = {}
    for part in parts:
        if part.kind == "module":
            cleaned = _cleaner(parallel.unwrap(part.value))
            for name, parameter in parallel.unwrap(part.value).named_parameters():
                names.setdefault(id(parameter), f"{part.name}.{cleaned(name)}")
    for part in parts:
        part.names = names
    # in this order they are put back: a schedule writes into the optimizer, which holds the model's parameters
    order = ("module", "optimizer", "stateful", "plain")
    return sorted(parts, key=lambda part: order.index(part.kind))


def step_of(state: Mapping[str, Any]) -> int | None:
    """Give the number of the step that a state belongs to, if it tells."""
    from nbdist.engine.steps.training import Trainer

    step = state.get("step")
    if isinstance(step, int) and step >= 0:
        return int(step)
    for value in state.values():
        if isinstance(value, Trainer):
            return value.global_step
    return None


class Restoring:
    """Puts one part back from what a checkpoint holds of it, in two moves: nothing is changed before all was read.

    Raises
    ------
    ValueError
        When the checkpoint is of something else: the message has the first difference.
    """

    def __init__(self, part: Part, kind: str, tree: Any, sizes: Sizes) -> None:
        if part.kind != kind and "plain" not in (part.kind, kind):
            raise ValueError(f"{part.name} is a {kind} in the checkpoint and a {part.kind} here.")
        if isinstance(part.value, NamedState):
            tree = part.value.own_part(tree)
        self.part = part
        self.tree = tree
        self.sizes = sizes
        self.kind = kind if part.kind == kind else "plain"
        # the tensors to read, each by one that has the wanted shape and sharding
        self.targets: dict[str, torch.Tensor] = {}
        if self.kind == "module":
            self._aim_at_module()
        elif self.kind == "optimizer":
            self._aim_at_optimizer()
        else:
            for name in _references(tree):
                self.targets[name] = torch.empty(sizes[name])

    def apply(self, parts: Mapping[str, torch.Tensor]) -> Any:
        """Put back what was read; give the value where it has no place of its own."""
        if self.kind == "module":
            self._fill_module(parts)
        elif self.kind == "optimizer":
            self._fill_optimizer(parts)
        elif self.kind == "stateful":
            self.part.value.load_state_dict(plain.decode(self.tree, parts.__getitem__))
        else:
            return plain.decode(self.tree, parts.__getitem__)
        return None

    def _aim_at_module(self) -> None:
        name = self.part.name
        for key, value in _module_state(self.part.value):
            if key not in self.tree:
                raise ValueError(f"The checkpoint is of another model: it has no {name}.{key}.")
            if not isinstance(value, torch.Tensor):
                continue
            place = self.tree[key]["of"]
            if self.sizes[place] != value.shape:
                raise ValueError(
                    f"The checkpoint is of another model: {name}.{key} is {tuple(self.sizes[place])} in it, "
                    f"{tuple(value.shape)} here."
                )
            self.targets[place] = value

    def _fill_module(self, parts: Mapping[str, torch.Tensor]) -> None:
        module = parallel.unwrap(self.part.value)
        extra = {}
        with torch.no_grad():
            for key, value in _module_state(self.part.value):
                tree = self.tree[key]
                if isinstance(value, torch.Tensor):
                    local_part(value).copy_(parts[tree["of"]])
                else:
                    extra[key] = plain.decode(tree, parts.__getitem__)
        if extra:
            whole = module.state_dict()
            cleaned = _cleaner(module)
            module.load_state_dict({key: extra.get(cleaned(key), value) for key, value in whole.items()})

    def _aim_at_optimizer(self) -> None:
        name = self.part.name
        saved = self.tree["groups"]
        mine = self.part.param_names()
        if len(saved) != len(mine):
            raise ValueError(
                f"{name} has {len(mine)} parameter groups here and {len(saved)} in the checkpoint. Make it alike."
            )
        for group, names in zip(saved, mine, strict=True):
            lacking = sorted(set(names) - set(group["params"]))
            if lacking:
                known = self.part.names and not lacking[0].startswith("parameter ")
                raise ValueError(
                    f"{name} in the checkpoint does not hold {lacking[0]}"
                    + ("." if known else ": give load_checkpoint() the model too, as save_checkpoint() was.")
                )
        for parameter, saved_name in self._own():
            for place in _references(self.tree["state"].get(saved_name)):
                like = self.sizes[place] == parameter.shape
                self.targets[place] = parameter if like else torch.empty(self.sizes[place])

    def _own(self) -> Iterator[tuple[torch.Tensor, str]]:
        optimizer = self.part.value
        held = getattr(optimizer, "_param_to_rank", None)
        for group, names in zip(optimizer.param_groups, self.part.param_names(), strict=True):
            for parameter, name in zip(group["params"], names, strict=True):
                # with ZeRO's optimizer each rank has the state of its own parameters only
                if held is None or held[parameter] == optimizer.rank:
                    yield parameter, name

    def _fill_optimizer(self, parts: Mapping[str, torch.Tensor]) -> None:
        optimizer = self.part.value
        everyone = [p for group in optimizer.param_groups for p in group["params"]]
        number = {id(p): i for i, p in enumerate(everyone)}
        state = {}
        for parameter, name in self._own():
            saved = self.tree["state"].get(name)
            if saved is None:
                continue

            def get(place: str, parameter: torch.Tensor = parameter) -> torch.Tensor:
                part = parts[place]
                if isinstance(parameter, DTensor) and self.targets[place] is parameter:
                    return _sharded_like(parameter, part)
                return part

            state[number[id(parameter)]] = plain.decode(saved, get)
        groups = []
        begin = 0
        for group, saved in zip(optimizer.param_groups, self.tree["groups"], strict=True):
            options = plain.decode({k: v for k, v in saved.items() if k != "params"}, parts.__getitem__)
            end = begin + len(group["params"])
            groups.append({**options, "params": list(range(begin, end))})
            begin = end
        optimizer.load_state_dict({"state": state, "param_groups": groups})


def unexpected(part: Part, tree: Any) -> list[str]:
    """Name the tensors of a model in a checkpoint that this rank's model does not have."""
    if part.kind != "module" or not isinstance(tree, dict):
        return []
    return sorted(f"{part.name}.{key}" for key in tree.keys() - dict(_module_state(part.value)).keys())


def _kind(value: Any) -> str:
    if isinstance(value, nn.Module):
        return "module"
    if isinstance(value, torch.optim.Optimizer):
        return "optimizer"
    if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
        return "stateful"
    return "plain"


def _same(value: Any, given: Any) -> bool:
    if isinstance(value, nn.Module) and isinstance(given, nn.Module):
        return parallel.unwrap(value) is parallel.unwrap(given)
    return value is given


def _local_optimizer(optimizer: Any) -> Any:
    """Give the optimizer that holds this rank's states: ZeRO's wraps one."""
    return optimizer.optim if hasattr(optimizer, "_param_to_rank") else optimizer


def _module_state(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Give the module's state by its own names, whatever it is wrapped in."""
    inner = parallel.unwrap(module)
    cleaned = _cleaner(inner)
    for name, value in inner.state_dict().items():
        yield cleaned(name), value


def _cleaner(module: nn.Module) -> Callable[[str], str]:
    """Make a function that takes the wrappers of parts (DDP, torch.compile) out of a parameter's name."""
    wrappers = []
    for path, part in module.named_modules():
        if isinstance(part, DDP):
            wrappers.append((f"{path}.module.", f"{path}."))
        elif isinstance(getattr(part, "_orig_mod", None), nn.Module):
            wrappers.append((f"{path}._orig_mod.", f"{path}."))
    # the innermost first: the path of an outer one is part of theirs
    wrappers.sort(key=lambda pair: -len(pair[0]))

    def cleaned(name: str) -> str:
        for prefix, plain_prefix in wrappers:
            if name.startswith(prefix):
                name = plain_prefix + name[len(prefix) :]
        return name

    return cleaned


def _references(tree: Any) -> Iterator[str]:
    """Give the names of the tensors in encoded data."""
    if isinstance(tree, list):
        for part in tree:
            yield from _references(part)
    elif isinstance(tree, dict):
        if tree.get(plain.MARK) in ("tensor", "array"):
            yield tree["of"]
        else:
            for part in tree.values():
                yield from _references(part)


def _sharded_like(parameter: DTensor, part: torch.Tensor) -> torch.Tensor:
    return DTensor.from_local(
        part.to(parameter.device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
