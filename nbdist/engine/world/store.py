"""The stores that ranks meet in: a file on one host, the cluster's encrypted exchange on several.

No rank hosts the exchange's and no stranger reaches it, so it outlives every rank and serves all generations of the
group, each under a prefix of its own.

A wait for a key ends early in both: by a signal of the main thread, and by ``give_up`` from any other. In torch's own
``FileStore`` a rank waits in C++ for a peer that has died until the group's timeout, half an hour.
"""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import zmq
from torch._C._distributed_c10d import FileStore, Store

from nbdist.channel import STORE, ExchangeAddress, connect, local_address

__all__ = ["ExchangeStore", "LocalStore", "give_up", "is_of_exchange", "meet_at", "open_store", "own_address"]

ANSWER_S = 30.0  # for what the exchange answers at once
SLICE_S = 0.2  # how long a wait keeps signals of the main thread from being handled
LOOKS_S = (0.0002, 0.01)  # between two looks at a file: at first, and later

Value = bytes | str

_address: ExchangeAddress | None = None
_exchange: ExchangeStore | None = None
_given_up = threading.Event()


def meet_at(address: ExchangeAddress) -> None:
    """Remember where the ranks of this cluster meet."""
    global _address
    _address = address


def own_address() -> str:
    """Give this host's address on the route to the other hosts of the cluster."""
    return local_address(_address.host) if _address is not None else "127.0.0.1"


def open_store(path: str, world_size: int, timeout: timedelta) -> Store:
    """Give the store to meet in: a file of this host, or the exchange where ``path`` is empty."""
    global _exchange
    _given_up.clear()
    if path:
        return LocalStore(path, world_size, timeout)
    assert _address is not None
    if _exchange is None:
        _exchange = ExchangeStore(_address, timeout)
    _exchange.set_timeout(timeout)
    return _exchange


def give_up() -> None:
    """End every wait for a key in this process, until a store is opened again: whoever was to set it will not."""
    _given_up.set()


def is_of_exchange(connection: socket.socket) -> bool:
    """Whether a socket of this process is a store's own, and not one of the process group."""
    try:
        return _address is not None and connection.getpeername()[:2] == (_address.host, _address.port)
    except OSError:
        return False


class LocalStore(Store):
    """torch's ``FileStore``, but for its waits. torch keeps only the C++ half of it: hold on to it."""

    def __init__(self, path: str, world_size: int, timeout: timedelta) -> None:
        super().__init__()
        self._file: Any = FileStore(path, world_size)  # typed for text alone; takes bytes
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        """How long ``get`` and ``wait`` wait for a key."""
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def clone(self) -> LocalStore:
        """Give this store: a file is opened anew for each call."""
        return self

    def set(self, key: str, value: Value) -> None:
        self._file.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        value: bytes = self._file.get(key)
        return value

    def add(self, key: str, amount: int) -> int:
        return int(self._file.add(key, amount))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._file.check(list(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        seconds = (self._timeout if timeout is None else timeout).total_seconds()
        deadline = time.monotonic() + seconds
        pause = LOOKS_S[0]
        while not self.check(keys):
            _refuse_given_up(f"wait for {', '.join(keys)}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"Timed out waiting {seconds:g} s for {', '.join(keys)}")
            time.sleep(pause)
            pause = min(2 * pause, LOOKS_S[1])

    def compare_set(self, key: str, expected: Value, desired: Value) -> bytes:
        value: bytes = self._file.compare_set(key, expected, desired)
        return value

    def has_extended_api(self) -> bool:
        return False

    def delete_key(self, key: str) -> bool:
        return bool(self._file.delete_key(key))

    def num_keys(self) -> int:
        return int(self._file.num_keys())


def _refuse_given_up(what: str) -> None:
    if _given_up.is_set():
        raise RuntimeError(f"{what}: given up, since another rank does not come")


class ExchangeStore(Store):
    """A key-value store on the exchange.

    torch keeps only the C++ half of a store: whoever hands one to torch must hold on to it. A wait in one thread does
    not hold up another: each call in flight has a connection of its own.

    Examples
    --------
    >>> store = ExchangeStore(address, timeout=timedelta(seconds=30))
    >>> dist.init_process_group("gloo", store=dist.PrefixStore("gen1", store), rank=0, world_size=2)
    """

    def __init__(self, address: ExchangeAddress, timeout: timedelta = timedelta(minutes=5)) -> None:
        super().__init__()
        self._address = address
        self._timeout = timeout
        self._lock = threading.Lock()
        self._context: zmq.Context[Any] = zmq.Context()
        self._idle: list[zmq.Socket[Any]] = []
        self._numbers = itertools.count(1)
        self._clones: list[ExchangeStore] = []

    @property
    def timeout(self) -> timedelta:
        """How long ``get`` and ``wait`` wait for a key."""
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def clone(self) -> ExchangeStore:
        """Give another store on the same keys; it is kept here, since torch does not keep it."""
        copy = ExchangeStore(self._address, self._timeout)
        self._clones.append(copy)
        return copy

    def set(self, key: str, value: Value) -> None:
        self._ask("set", key, value)

    def get(self, key: str) -> bytes:
        return self._ask("get", key, wait=self._timeout)[0]

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key, str(amount))[0])

    def append(self, key: str, value: Value) -> None:
        self._ask("append", key, value)

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask("check", *keys)[0])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._ask("wait", *keys, wait=self._timeout if timeout is None else timeout)

    def compare_set(self, key: str, expected: Value, desired: Value) -> bytes:
        return self._ask("compare_set", key, expected, desired)[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return True

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", key)[0])

    def num_keys(self) -> int:
        return int(self._ask("count")[0])

    def drop(self, prefix: str) -> None:
        """Remove all keys that begin with ``prefix``: those of a generation that every rank has left."""
        self._ask("drop", prefix)

    def close(self) -> None:
        """Close the connections; whoever still waits gets an error."""
        for clone in self._clones:
            clone.close()
        with self._lock:
            for client in self._idle:
                client.close()
            self._idle.clear()

    def _ask(self, operation: str, *arguments: Value, wait: timedelta | None = None) -> list[bytes]:
        seconds = ANSWER_S if wait is None else max(0.0, wait.total_seconds())
        with self._connection() as client:
            number = str(next(self._numbers)).encode()
            words = [word.encode() if isinstance(word, str) else bytes(word) for word in arguments]
            client.send_multipart([STORE, number, operation.encode(), str(int(seconds * 1000)).encode(), *words])
            deadline = time.monotonic() + seconds
            while True:
                left = deadline - time.monotonic()
                if client.poll(int(1000 * max(0.0, min(SLICE_S, left)))):
                    _, answered, *values = client.recv_multipart()
                    if answered == number:  # not the late answer to a question that was given up
                        return values
                    continue
                if wait is not None:
                    _refuse_given_up(f"{operation} {words[0].decode()}")
                if left <= 0:
                    what = f"{operation} {words[0].decode() if words else ''}"  # a value may be long, and binary
                    where = f"{self._address.host}:{self._address.port}"
                    raise RuntimeError(f"store at {where}: {what} timed out after {seconds:g} s")

    @contextmanager
    def _connection(self) -> Iterator[zmq.Socket[Any]]:
        with self._lock:
            client = self._idle.pop() if self._idle else None
        client = client or connect(self._context, self._address)
        try:
            yield client
        except BaseException:
            client.close()
            raise
        with self._lock:
            self._idle.append(client)
