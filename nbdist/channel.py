"""Where hosts of a cluster meet: the address and the keys of the exchange, and sockets to it.

Every connection is encrypted and authenticated in both directions (CURVE): the exchange admits one key pair, which lies
in a file that only its owner can read and reaches other hosts over ssh or inside a batch script, never in an
environment or on a command line.
"""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import zmq

__all__ = ["FILE", "LINE", "STORE", "ExchangeAddress", "connect", "local_address", "reachable"]

FILE = "security/nbdist-exchange.json"
STORE, LINE = b"store", b"line"  # the first frame of a message: which of the two services it is for


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeAddress:
    """Address and keys of an exchange; the repr shows no key."""

    host: str
    port: int
    server_key: str
    public_key: str = field(repr=False)
    secret_key: str = field(repr=False)

    @property
    def url(self) -> str:
        return f"tcp://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> ExchangeAddress:
        """Read the address from the file that the exchange wrote."""
        return cls(**json.loads(Path(path).read_text()))

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the address for its owner alone; whoever sees the file sees all of it."""
        target = Path(path)
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = target.with_name(f".{target.name}.{os.getpid()}")
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(self.as_dict(), file)
        fresh.replace(target)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def connect(context: zmq.Context[Any], address: ExchangeAddress) -> zmq.Socket[Any]:
    """Give a socket to the exchange; it connects in the background, and again after an interruption."""
    client: zmq.Socket[Any] = context.socket(zmq.DEALER)
    client.linger = 0
    client.sndhwm = client.rcvhwm = 0  # a line may wait, but none may be dropped
    client.ipv6 = ":" in address.host
    client.curve_serverkey = address.server_key.encode()
    client.curve_publickey = address.public_key.encode()
    client.curve_secretkey = address.secret_key.encode()
    client.connect(address.url)
    return client


def reachable(host: str, port: int, timeout: float) -> str:
    """Try to connect until it works or ``timeout`` is over; give what the last attempt ended with, or nothing."""
    deadline = time.monotonic() + timeout
    while True:
        left = deadline - time.monotonic()
        try:
            with socket.create_connection((host, port), timeout=max(0.1, min(3.0, left))):
                return ""
        except OSError as error:
            why = "timed out" if isinstance(error, TimeoutError) else (error.strerror or str(error))
        if deadline - time.monotonic() <= 0.2:
            return why
        time.sleep(0.2)


def local_address(peer: str, port: int = 9) -> str:
    """Give the address of this host on the route to ``peer``, a name or an address.

    Raises
    ------
    OSError
        When the name cannot be resolved, or there is no route.
    """
    family, kind, protocol, _, target = socket.getaddrinfo(peer, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # UDP: nothing is sent
        return str(probe.getsockname()[0])
