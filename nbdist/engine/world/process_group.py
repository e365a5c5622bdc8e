"""One generation of the process group: join it, see how far its collectives are, cut it.

gloo cannot be aborted. A rank that waits in a collective whose peer will never come is released by shutting down the
TCP sockets of its groups from another thread (``cut``). That is safe only while no rank of the group is sending: a
send that meets a closed socket is queued by gloo's pair and its waiter is never woken. Callers therefore wait until
``progress`` has not moved for a while on any rank.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pickle
import platform
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import (  # type: ignore[attr-defined]
    DebugLevel,
    PrefixStore,
    _dump_fr_trace,
    get_debug_level,
    set_debug_level,
)

# by name, once: a cell may put something else in the place of `dist.all_reduce`
from torch.distributed.distributed_c10d import (
    all_reduce,
    destroy_process_group,
    get_backend,
    get_process_group_ranks,
    init_process_group,
    is_initialized,
)

from nbdist.engine import network
from nbdist.engine.world.store import ExchangeStore, give_up, is_of_exchange, open_store
from nbdist.errors import WorldError
from nbdist.records import RankInfo

__all__ = [
    "Counters",
    "abandon",
    "collectives",
    "counters",
    "current_generation",
    "cut",
    "device",
    "join",
    "leave",
    "left_group",
    "progress",
    "rank_info",
]

log = logging.getLogger(__name__)

FLIGHT_RECORDER_ENTRIES = "2000"
KNOCK_S = 1.0  # to connect to a listener of this process
# the Flight Recorder's names of dtypes -> torch's
DTYPES = {
    "byte": "uint8",
    "char": "int8",
    "short": "int16",
    "int": "int32",
    "long": "int64",
    "half": "float16",
    "float": "float32",
    "double": "float64",
}

Counters = Mapping[int, tuple[int, int]]  # torch's number of a group -> (last collective enqueued, last completed)

_generation = 0
_abandoned = 0  # generations up to this one are not formed any more
_info: RankInfo | None = None
_names: dict[int, str] = {}  # torch's number of a group in this process -> its name, which all ranks share
_made = 0  # groups that this process has made in all generations
_left: dict[int, int] = {}  # torch's number of a group that was left -> its generation
_sockets: dict[int, str] = {}  # descriptor -> inode, of every group of this generation
_sockets_lock = threading.Lock()
_before: dict[int, str] | None = None  # sockets from before the group that is being made, if one is
_stores: list[Any] = []  # torch keeps only the C++ half of a store


def join(
    *,
    rank: int,
    world_size: int,
    local_rank: int,
    local_world_size: int,
    node_rank: int,
    generation: int,
    backend: str,
    store: str,
    timeout: float,
    forming: float,
    peers: Sequence[str],
    version: str,
) -> RankInfo:
    """Leave the group of the last generation, form this one with all other ranks, and verify it by an all_reduce.

    Parameters
    ----------
    store : str
        Path of the file that the ranks of this host meet in (``torch.distributed.FileStore``); empty: the exchange.
    timeout : float
        Seconds after which a collective gives up.
    forming : float
        Seconds to wait for the other ranks to come.
    peers : sequence of str
        Addresses of the other hosts; none when all ranks are on this one: gloo then listens on 127.0.0.1 only.

    Raises
    ------
    WorldError
        When the all_reduce does not give the sum that it must, or another rank could not join.
    """
    global _generation, _info
    leave()
    _generation = generation
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(local_rank),
        LOCAL_WORLD_SIZE=str(local_world_size),
        GROUP_RANK=str(node_rank),
        ROLE_RANK=str(rank),
        ROLE_WORLD_SIZE=str(world_size),
    )
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", FLIGHT_RECORDER_ENTRIES)
    # 2: a failed NCCL collective aborts its communicator; torch's default ends the process and with it its state
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    if backend == "gloo" and get_debug_level() == DebugLevel.DETAIL:
        # with DETAIL, building DDP on gloo ends the process (torch 2.13); the notebook says so when it starts
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = "INFO"
        set_debug_level(DebugLevel.INFO)
    network.choose_interface(peers, backend)
    where = device(local_rank, backend)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    _watch_new_groups()
    meeting = open_store(store, world_size, timedelta(seconds=timeout))
    prefixed = PrefixStore(f"gen{generation}", meeting)
    _stores[:] = [meeting, prefixed]
    if generation <= _abandoned:  # after the store was opened: what is abandoned later ends the waits for it
        raise WorldError(f"generation {generation} is not formed any more: another rank could not join")
    prefixed.set(f"came/{rank}", "")
    prefixed.wait([f"came/{other}" for other in range(world_size)], timedelta(seconds=forming))
    init_process_group(
        backend,
        store=prefixed,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
    )
    known = set(counters())
    probe = torch.full((1,), rank + 1.0, device=where)
    all_reduce(probe)
    expected = world_size * (world_size + 1) / 2
    if probe.item() != expected:
        raise WorldError(f"all_reduce over {world_size} ranks gave {probe.item()} instead of {expected}")
    _number_default_group(set(counters()) - known)
    if isinstance(meeting, ExchangeStore) and rank == 0:
        meeting.drop(f"gen{generation - 1}/")
    _info = RankInfo(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=node_rank,
        host=os.environ.get("NBDIST_HOST") or socket.gethostname(),
        pid=os.getpid(),
        device=str(where),
        backend=backend,
        generation=generation,
        python=platform.python_version(),
        torch=str(torch.__version__),
        nbdist=version,
        threads=torch.get_num_threads(),
    )
    return _info


def current_generation() -> int:
    """Give the generation that this rank is in, or is joining."""
    return _generation


def rank_info() -> RankInfo:
    """Give this rank's place, host, device and versions.

    Raises
    ------
    WorldError
        Where no world was formed: in the notebook, or in a script that nbdist did not start.
    """
    if _info is None:
        raise WorldError("No world here. Call rank_info() on a rank, in a %%distributed cell.")
    return _info


def device(local_rank: int, backend: str = "") -> torch.device:
    """Give the device of a rank: its GPU when there is one for it, else the CPU."""
    if backend != "gloo" or not backend:
        # a scheduler may have bound one GPU to each rank, which then is number 0 to all of them
        if torch.cuda.is_available() and (local_rank < torch.cuda.device_count() or torch.cuda.device_count() == 1):
            return torch.device("cuda", local_rank % torch.cuda.device_count())
    elif torch.cuda.is_available():
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    return torch.device("cpu")


def leave(*, for_good: bool = False) -> None:
    """Leave the current group, if there is one. Whoever still holds it (a DDP object) gets an error at once.

    Parameters
    ----------
    for_good : bool
        This process is no rank any more, and not about to join the next generation.
    """
    global _info
    if for_good:
        _info = None
    if not is_initialized():
        c10d._world.group_count = 0  # a failed start has counted up torch's names of groups, which all ranks share
        return
    cut()
    _left.update(dict.fromkeys(_names, _generation))
    _names.clear()
    try:
        destroy_process_group()
    except RuntimeError as error:
        log.warning("destroying the process group of generation %d: %s", _generation, error)


def abandon(generation: int) -> None:
    """Come out of the forming of a generation that another rank cannot join, or do not begin it. From any thread."""
    global _abandoned
    _abandoned = max(_abandoned, generation)
    if generation == _generation:
        cut()


def cut() -> int:
    """Shut down the sockets of all groups of this generation; give how many there were. Callable from any thread.

    A group that is being made is given up, too: ``new_group`` waits in the store for ranks that do not call it.
    """
    give_up()
    if is_initialized() and get_backend() == "nccl":
        c10d._abort_process_group()
        return 1
    with _sockets_lock:
        known = dict(_sockets) | (_added_to(_before) if _before is not None else {})
        _sockets.clear()
    closed = 0
    for descriptor, inode in known.items():
        # the descriptor may have been closed and taken by somebody else's file since
        if _inode(descriptor) != inode:
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                _knock(connection)
            elif not is_of_exchange(connection):
                connection.shutdown(socket.SHUT_RDWR)
                closed += 1
    return closed


def _knock(listener: socket.socket) -> None:
    """Connect to gloo's own listener in the place of every peer, and hang up.

    A peer that has told its address and died before it connected leaves gloo waiting, deaf to everything else, for five
    times the group's timeout. A peer introduces itself by the number of the pair: 8 bytes, counted from 0.
    """
    for pair in range(int(os.environ["WORLD_SIZE"])):
        with socket.create_connection(listener.getsockname()[:2], KNOCK_S) as connection:
            connection.sendall(struct.pack("=q", pair))


def progress() -> dict[str, tuple[int, int]]:
    """Give each group's counters: (last collective enqueued, last completed), from torch's Flight Recorder.

    Groups go by their name: torch's own number of a group counts what one process has made, and differs between a rank
    that was replaced and its peers.
    """
    if not is_initialized():
        return {}
    return {_names[number]: moved for number, moved in counters().items() if number in _names}


def counters() -> Counters:
    """Give the counters of all groups that this process ever made, by torch's number of each."""
    status = pickle.loads(c10d_dump(includeCollectives=False)).get("pg_status", {})
    return {
        int(number): (int(s["last_enqueued_collective"]), int(s["last_completed_collective"]))
        for number, s in status.items()
    }


def left_group(before: Counters) -> int | None:
    """Give the generation of a group that was left and has been called since ``before`` all the same."""
    return next((_left[n] for n, moved in counters().items() if n in _left and moved != before.get(n)), None)


def collectives(since_ns: int) -> dict[str, dict[str, Any]]:
    """Describe the last collective of each group.

    Parameters
    ----------
    since_ns : int
        Unix time in nanoseconds from which ``count`` counts the collectives of the same kind.

    Returns
    -------
    dict
        Group name to ``op``, ``shape``, ``dtype``, ``seq`` (number in its group), ``count`` and ``ranks``.
    """
    if not is_initialized():
        return {}
    entries = pickle.loads(c10d_dump(includeCollectives=True, includeStackTraces=False)).get("entries", [])
    members: dict[str, list[int]] = {
        name: get_process_group_ranks(group) for group, name in c10d._world.pg_names.items()
    }
    last: dict[str, dict[str, Any]] = {}
    counts: dict[tuple[str, str], int] = {}
    for entry in entries:
        if entry["pg_id"] not in _names:
            continue
        name = _names[entry["pg_id"]]
        op = entry["profiling_name"].rpartition(":")[2]
        if entry["time_created_ns"] >= since_ns:
            counts[name, op] = counts.get((name, op), 0) + 1
        last[name] = {
            "op": op,
            "shape": entry["input_sizes"],
            "dtype": [DTYPES.get(name, name) for name in (str(dtype).lower() for dtype in entry["input_dtypes"])],
            "seq": entry["collective_seq_id"],
            "ranks": members.get(name, []),
        }
    for name, entry in last.items():
        entry["count"] = counts.get((name, entry["op"]), 0)
    return last


def _number_default_group(new: set[int]) -> None:
    """Correct our count of groups by the number that torch gave the default group, seen in its first collective."""
    global _made
    if len(new) == 1:
        number = new.pop()
        _names.clear()
        _names[number] = c10d._get_default_group().group_name
        _made = number + 1


def c10d_dump(**options: bool) -> bytes:
    """Read torch's Flight Recorder (the same memory serves NCCL and gloo)."""
    dump: Callable[..., bytes] = _dump_fr_trace
    return dump(**options)


@functools.cache
def _watch_new_groups() -> None:
    """Remember the sockets of every group that is made from now on, whoever makes it (new_group, DeviceMesh, FSDP)."""
    make = c10d._new_process_group_helper

    @functools.wraps(make)
    def make_and_remember(*args: Any, **kwargs: Any) -> Any:
        global _made
        with _remember_sockets():
            made = make(*args, **kwargs)
        group = made[0] if isinstance(made, tuple) else made
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            _names[_made] = c10d._world.pg_names[group]
            _made += 1
        return made

    c10d._new_process_group_helper = make_and_remember


@contextlib.contextmanager
def _remember_sockets() -> Iterator[None]:
    global _before
    _before = before = _open_sockets()
    try:
        yield
    finally:
        with _sockets_lock:
            _before = None
            _sockets.update(_added_to(before))


def _added_to(before: dict[int, str]) -> dict[int, str]:
    return {descriptor: inode for descriptor, inode in _open_sockets().items() if before.get(descriptor) != inode}


def _open_sockets() -> dict[int, str]:
    """Give the internet sockets of this process: descriptor -> inode. Empty where there is no /proc."""
    found = {}
    try:
        descriptors = os.listdir("/proc/self/fd")
    except FileNotFoundError:
        return {}
    for name in descriptors:
        inode = _inode(int(name))
        if inode.startswith("socket:"):
            found[int(name)] = inode
    return found


def _inode(descriptor: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""
