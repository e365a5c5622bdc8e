"""Named tensors to and from a folder, by torch.distributed.checkpoint: every rank its part, whole or sharded.

torch's planners and its file format, but no collective while files are written: ranks plan together in the caller's
thread, once for each set of tensors, and a background thread can then write whatever the group is busy with. Reading
executes nothing: ``.metadata`` is a pickle, and is read with a list of the few classes that belong there.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from nbdist.engine.strategies import sending

__all__ = [
    "METADATA",
    "Plan",
    "layout",
    "local_part",
    "plan_together",
    "read",
    "signature",
    "write",
]

METADATA = ".metadata"
COPIERS = 4
LARGE = 1 << 24  # bytes

# what torch's plan of a rank is made of
PLANNED = (
    SavePlan,
    WriteItem,
    WriteItemType,
    TensorWriteData,
    ChunkStorageMetadata,
    TensorProperties,
    MetadataIndex,
    _MEM_FORMAT_ENCODING,
    torch.serialization._get_layout,
)

CHECKPOINT = "torch.distributed.checkpoint"
ALLOWED: Mapping[str, frozenset[str]] = {
    f"{CHECKPOINT}.metadata": frozenset(
        {
            "_MEM_FORMAT_ENCODING",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
        }
    ),
    f"{CHECKPOINT}.filesystem": frozenset({"_StorageInfo", "_StoragePrefix"}),
    "pathlib": frozenset({"PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath"}),
    "pathlib._local": frozenset({"PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath"}),
    "torch": frozenset({"Size"}),
    "torch.serialization": frozenset({"_get_layout"}),
}

_plans: dict[str, Plan] = {}
_stage: dict[str, torch.Tensor] = {}


class Plan:
    """What this rank writes of a set of tensors and, on rank 0, what the whole is made of."""

    def __init__(self, local: Any, metadata: Metadata | None) -> None:
        self.local = local
        self.metadata = metadata
        self.names = frozenset(item.index.fqn for item in local.items)


def signature(tensors: Mapping[str, torch.Tensor], rank: int) -> str:
    """Hash what a plan depends on: names, shapes, types and this rank's shares."""
    digest = hashlib.sha256(str(rank).encode())
    for name, tensor in tensors.items():
        shares = f"{tensor.placements} {tensor.device_mesh.mesh.tolist()}" if isinstance(tensor, DTensor) else ""
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {shares}\n".encode())
    return digest.hexdigest()[:16]


def plan_together(key: str, tensors: Mapping[str, torch.Tensor], rank: int, world_size: int, fresh: bool) -> Plan:
    """Let the ranks settle who writes what. A collective where ``fresh``; else the plan of before.

    Of tensors that several ranks hold whole, the lowest of them writes its own: buffers are rank 0's.
    """
    if not fresh:
        return _plans[key]
    planner = _Writing(tensors)
    planner.set_up_planner(dict(tensors), None, rank == 0)
    plans = [planner.create_local_plan()]
    if world_size > 1:
        plans = sending.all_gather(plans[0], kinds=PLANNED)
    # each rank makes the whole plan of the same parts: a scatter of the results would be a second collective
    plans, metadata = planner.create_global_plan(plans)
    plans = FileSystemWriter("").prepare_global_plan(plans)
    if len(_plans) >= 8:
        _plans.clear()
    plan = _plans[key] = Plan(plans[rank], metadata if rank == 0 else None)
    return plan


def stage(tensors: Mapping[str, torch.Tensor], plan: Plan) -> dict[str, torch.Tensor]:
    """Copy this rank's part of the plan to the CPU. The memory is kept for the next time: its pages are warm then."""
    parts = {name: local_part(tensors[name]) for name in plan.names}
    staged = {}
    for name, part in parts.items():
        buffer = _stage.get(name)
        if buffer is None or buffer.shape != part.shape or buffer.dtype != part.dtype:
            buffer = torch.empty(part.shape, dtype=part.dtype, pin_memory=part.device.type == "cuda")
        staged[name] = buffer
    _stage.clear()
    _stage.update(staged)
    on_cpu = [name for name, part in parts.items() if part.device.type == "cpu"]
    for name in parts.keys() - set(on_cpu):
        staged[name].copy_(parts[name], non_blocking=True)
    # one thread does not fill the memory's bandwidth
    threads = min(COPIERS, os.cpu_count() or 1)
    if threads > 1 and sum(parts[name].nbytes for name in on_cpu) > LARGE:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda name: staged[name].copy_(parts[name]), on_cpu))
    else:
        for name in on_cpu:
            staged[name].copy_(parts[name])
    if len(on_cpu) < len(parts):
        torch.cuda.current_stream().synchronize()
    return staged


def write(folder: Path, parts: Mapping[str, torch.Tensor], plan: Plan, rank: int) -> list[Any]:
    """Write this rank's file and give where in it each tensor is, as plain data for ``finish``."""
    writer = _writer(folder, rank)
    planner = _Writing(parts)
    planner.plan = plan.local
    if not plan.local.items:
        return []
    done = writer.write_data(plan.local, planner)
    done.wait()
    return [
        [r.index.fqn, _sizes(r.index.offset), r.index.index, at.relative_path, at.offset, at.length]
        for r in done.value()
        for at in (r.storage_data,)
    ]


def finish(folder: Path, plan: Plan, results: list[list[Any]]) -> None:
    """Write what the whole is made of; rank 0, after all ranks have written."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    assert plan.metadata is not None
    everything = [
        [
            WriteResult(MetadataIndex(name, offset, index), length, _StorageInfo(path, start, length))
            for name, offset, index, path, start, length in one
        ]
        for one in results
    ]
    _writer(folder, 0).finish(plan.metadata, everything)


def layout(folder: Path) -> Metadata:
    """Read what tensors a folder holds.

    Raises
    ------
    ValueError
        When the file is not one that torch.distributed.checkpoint has written.
    """
    with open(folder / METADATA, "rb") as file:
        try:
            metadata = _Metadata(file).load()
        except ValueError:
            raise
        except Exception as error:  # a pickle that is cut off or overwritten raises anything
            raise ValueError(f"{folder / METADATA} cannot be read: {type(error).__name__}: {error}") from None
    if not isinstance(metadata, Metadata):
        raise ValueError(f"{folder / METADATA} is no checkpoint of torch.distributed.checkpoint.")
    return metadata


def read(folder: Path, metadata: Metadata, targets: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Read tensors into fresh CPU memory, of each sharded target only this rank's share. No collective.

    Parameters
    ----------
    targets : dict of str to Tensor
        Says the shape and sharding that are wanted; not written to.
    """
    parts = {}
    for name, target in targets.items():
        entry = metadata.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata)
        parts[name] = torch.empty(local_part(target).shape, dtype=entry.properties.dtype)
    planner = _Reading(parts)
    planner.set_up_planner(dict(targets), metadata, False)
    reader = FileSystemReader(folder)
    reader.set_up_storage_reader(metadata, False)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    reader.read_data(planner.finish_plan(plan), planner).wait()
    return parts


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Give the part of a tensor that this rank holds."""
    held: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return held.detach()


class _Writing(DefaultSavePlanner):
    """Plans by the tensors as they are sharded, writes from their parts."""

    def __init__(self, parts: Mapping[str, torch.Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True)
        self.parts = parts

    def lookup_object(self, index: MetadataIndex) -> Any:
        return local_part(self.parts[index.fqn])


class _Reading(DefaultLoadPlanner):
    """Reads into the parts; what is not a tensor is not ours, and is not unpickled."""

    def __init__(self, parts: Mapping[str, torch.Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.parts = parts

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self.parts[index.fqn]

    def load_bytes(self, read_item: Any, value: Any) -> None:
        raise ValueError(f"{read_item.dest_index.fqn} is not a tensor but pickled code, which is not executed.")


class _Metadata(pickle.Unpickler):
    """Knows the classes that belong into ``.metadata``, and no other."""

    def find_class(self, module: str, name: str) -> Any:
        if name in ALLOWED.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise ValueError(f"The checkpoint's {METADATA} names {module}.{name}, which does not belong there; not loaded.")


def _writer(folder: Path, rank: int) -> FileSystemWriter:
    writer = FileSystemWriter(folder, sync_files=True)
    writer.set_up_storage_writer(rank == 0)
    return writer


def _sizes(offset: Any) -> list[int] | None:
    return None if offset is None else list(offset)


def dumps(value: Any) -> bytes:
    """Write JSON as it goes into a checkpoint."""
    return json.dumps(value, separators=(",", ":")).encode()
