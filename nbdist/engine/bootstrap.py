"""What the notebook calls on a rank: join the world, run a cell, push, pull."""

from __future__ import annotations

import os
import socket
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nbdist import wire
from nbdist.engine import control
from nbdist.engine.cells import runner
from nbdist.engine.strategies import parallel
from nbdist.engine.world import guard, process_group, store
from nbdist.records import to_wire

__all__ = ["identify", "join_world", "leave_world", "pull", "push", "run_cell", "switch_guard"]

_injected: dict[str, Any] = {}


def identify() -> dict[str, Any]:
    """Say where this engine runs, before it has a rank."""
    return {
        "host": os.environ.get("NBDIST_HOST") or socket.gethostname(),
        "address": store.own_address(),
        "local_rank": int(os.environ["LOCAL_RANK"]),
        "pid": os.getpid(),
        "gpus": torch.cuda.device_count() if torch.cuda.is_available() else 0,
        "torch": str(torch.__version__),
    }


def join_world(**spec: Any) -> dict[str, Any]:
    """Join one generation of the process group and put its names into the namespace."""
    os.environ.update(spec.pop("environment", {}))
    guard.switch(spec.pop("guarded", False))
    info = process_group.join(**spec)
    parallel.follow_group()
    control.start_meters(info.rank, info.world_size)
    import nbdist

    _inject(
        rank=info.rank,
        world_size=info.world_size,
        local_rank=info.local_rank,
        node_rank=info.node_rank,
        device=torch.device(info.device),
        torch=torch,
        nn=nn,
        F=nn.functional,
        dist=dist,
        nbdist=nbdist,
    )
    return to_wire(info)


def leave_world() -> None:
    """Leave the process group for good, and take its names out of the namespace again."""
    process_group.leave(for_good=True)
    namespace = _namespace()
    for name, value in _injected.items():
        if name in namespace and namespace[name] is value:
            del namespace[name]
    _injected.clear()


def run_cell(source: str, label: int, run_name: str) -> dict[str, Any]:
    """Run a cell on this rank; see ``runner.run``."""
    return runner.run(source, label, run_name)


def switch_guard(on: bool) -> bool:
    """Check collectives before they run, or stop it; give what it was."""
    return guard.switch(on)


def push(parts: list[Any], name: str = "") -> None:
    """Put pickled values into the namespace: a dict of names, or one value under ``name``."""
    value = wire.load(parts)
    _namespace().update({name: value} if name else value)


def pull(name: str) -> list[Any]:
    """Give the value of a name, pickled, or what is wrong with it.

    Returns
    -------
    list
        ``["ok", *parts]``, ``["missing"]`` or ``["unpicklable", why]``; flat, since ipyparallel sends the buffers of a
        list without copying them.
    """
    namespace = _namespace()
    base, _, rest = name.partition(".")
    if base not in namespace:
        return ["missing"]
    value = namespace[base]
    try:
        for attribute in rest.split(".") if rest else ():
            value = getattr(value, attribute)
        return ["ok", *wire.dump(value)]
    except AttributeError:
        return ["missing"]
    except Exception as error:  # pickling runs the value's own code
        return ["unpicklable", f"{type(error).__name__}: {error}"]


def _inject(**names: Any) -> None:
    """Set the rank's own names, but leave one alone that the user has bound to something else since."""
    namespace = _namespace()
    for name, value in names.items():
        if name not in namespace or namespace[name] is _injected.get(name):
            namespace[name] = value
    _injected.update(names)


def _namespace() -> dict[str, Any]:
    namespace: dict[str, Any] = runner._shell().user_ns
    return namespace
