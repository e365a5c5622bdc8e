"""How the ranks of the world are laid out: along which axes they replicate, shard, split layers or hold stages."""

from __future__ import annotations

import os
import sys
import weakref
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from nbdist.engine.world import process_group
from nbdist.errors import WorldError

__all__ = [
    "Layout",
    "ParallelDims",
    "data_rank",
    "device",
    "forget_layouts",
    "lay_out",
    "layout_of",
    "mesh",
    "remember",
]

AXES = ("pp", "dp_replicate", "dp_shard", "tp")  # outermost first: neighbours talk most within the last


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelDims:
    """Sizes of the axes that the world is divided into; their product is the number of ranks.

    Parameters
    ----------
    dp_replicate : int
        Copies of the model, as in DDP.
    dp_shard : int
        Ranks that share one copy of weights, gradients and optimizer state, as in FSDP. With ``dp_replicate`` above
        one: HSDP.
    tp : int
        Ranks that split single layers, by a ``tp_plan``.
    pp : int
        Ranks that hold consecutive stages of the model, see ``nbdist.pipeline``.

    One of them may be -1: what is left of the world.

    Examples
    --------
    >>> dims = nbdist.ParallelDims(dp_replicate=2, dp_shard=-1)
    >>> model = nbdist.parallelize(Net(), dims)
    """

    dp_replicate: int = 1
    dp_shard: int = -1
    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for name, size in self.sizes().items():
            if not isinstance(size, int) or isinstance(size, bool) or size == 0 or size < -1:
                raise ValueError(f"{name} is a number of ranks, at least 1, or -1 for the rest, got {size!r}.")
        if sum(size == -1 for size in self.sizes().values()) > 1:
            rest = [name for name, size in self.sizes().items() if size == -1]
            raise ValueError(f"Only one axis can be -1, the rest of the world; got {' and '.join(rest)}.")

    def sizes(self) -> dict[str, int]:
        """Give axis -> size, as it was asked for."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @property
    def data_size(self) -> int:
        """Number of ranks that see different data, of dims that were resolved."""
        return self.dp_replicate * self.dp_shard

    def resolve(self, world_size: int) -> ParallelDims:
        """Give the dims with -1 replaced by its number.

        Raises
        ------
        ValueError
            Where the sizes do not multiply to the world: the message shows the equation.
        """
        sizes = self.sizes()
        known = prod(size for size in sizes.values() if size != -1)
        rest = [name for name, size in sizes.items() if size == -1]
        if rest and world_size % known == 0:
            return replace(self, **{rest[0]: world_size // known})
        if known == world_size and not rest:
            return self
        shown = [f"{name} ({size})" for name, size in sizes.items() if size not in (1, -1)] or ["1"]
        why = f", and does not divide it: nothing is left for {rest[0]}" if rest else ""
        raise ValueError(f"{' × '.join(shown)} ≠ world size {world_size}{why}.")


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """How one model was spread over the ranks."""

    strategy: str
    dims: ParallelDims
    mesh: DeviceMesh
    group: Any  # the default group that it was made in

    @property
    def stays_put(self) -> bool:
        """True when the model cannot follow the world into a new process group."""
        return self.strategy not in ("ddp", "zero1")

    @property
    def is_stale(self) -> bool:
        """True when the process group that it was made in has been left."""
        return not dist.is_initialized() or self.group is not dist.group.WORLD

    def group_of(self, axis: str) -> Any:
        """Give the process group of this rank along ``axis``; None where the axis has one rank."""
        names = self.mesh.mesh_dim_names or ()
        return self.mesh.get_group(axis) if axis in names and self.mesh[axis].size() > 1 else None

    def place(self, axis: str) -> int:
        """Give this rank's place along ``axis``."""
        names = self.mesh.mesh_dim_names or ()
        return self.mesh.get_local_rank(axis) if axis in names else 0

    @property
    def counts_samples(self) -> bool:
        """True on the one rank of those that share a batch that speaks for it."""
        return self.place("tp") == 0 and self.place("pp") == self.dims.pp - 1


_layouts: weakref.WeakKeyDictionary[nn.Module, Layout] = weakref.WeakKeyDictionary()
_current: Layout | None = None
_meshes: dict[tuple[ParallelDims, tuple[str, ...]], DeviceMesh] = {}


def lay_out(strategy: str, dims: ParallelDims) -> Layout:
    """Make the mesh of these dims, or take the one that is there. A collective."""
    global _current
    if not dist.is_initialized():
        raise WorldError("No process group. Start one with %cluster start, or torch.distributed.init_process_group().")
    if _current is not None and _current.is_stale:
        forget_layouts()
    dims = dims.resolve(dist.get_world_size())
    sizes = dims.sizes()
    replicated = strategy in ("ddp", "zero1")
    whole = ("dp_replicate",) if replicated else ("dp_shard",)
    names = tuple(axis for axis in AXES if sizes[axis] > 1) or whole
    key = (dims, names)
    if key not in _meshes:
        _meshes[key] = init_device_mesh(device().type, tuple(sizes[n] for n in names), mesh_dim_names=names)
    _current = Layout(strategy=strategy, dims=dims, mesh=_meshes[key], group=dist.group.WORLD)
    return _current


def mesh() -> DeviceMesh:
    """Give the torch DeviceMesh of the world, with the axes that the last ``parallelize`` or ``pipeline`` laid out.

    Before any, one axis ``dp_replicate`` with all ranks; making it is a collective.

    Examples
    --------
    >>> nbdist.mesh()["tp"].get_local_rank()
    1
    """
    if _current is None or _current.is_stale:
        return lay_out("ddp", ParallelDims(dp_replicate=-1, dp_shard=1)).mesh
    return _current.mesh


def remember(model: nn.Module, layout: Layout) -> None:
    """Note how this model is spread."""
    _layouts[model] = layout


def layout_of(model: nn.Module) -> Layout | None:
    """Give how ``parallelize`` or ``pipeline`` spread this model; None for a model that they did not make."""
    inner: Any = model
    while isinstance(inner, nn.Module):
        if inner in _layouts:
            return _layouts[inner]
        inner = getattr(inner, "_orig_mod", None)  # torch.compile's wrapper
    return None


def forget_layouts() -> None:
    """Let the meshes of a group that was left go."""
    global _current
    _current = None
    _meshes.clear()


def device() -> torch.device:
    """Give this rank's device: its GPU when there is one for it, else the CPU."""
    backend = dist.get_backend() if dist.is_initialized() else ""
    return process_group.device(int(os.environ.get("LOCAL_RANK", "0")), backend)


def data_rank() -> tuple[int, int]:
    """Give (rank, size) among the ranks that see different data.

    Ranks that split one layer (tp), or hold the stages of one model (pp), see the same batches.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    layout = _current
    if layout is None or layout.is_stale:
        return dist.get_rank(), dist.get_world_size()
    place = layout.place("dp_replicate") * layout.dims.dp_shard + layout.place("dp_shard")
    return place, layout.dims.data_size


def is_fsdp(model: nn.Module) -> bool:
    """Tell whether ``fully_shard`` (or ``replicate``) was applied to the module itself."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # dear to import, and nobody has if there is no such module
    return fsdp is not None and isinstance(model, fsdp.FSDPModule)
