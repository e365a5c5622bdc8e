"""What another user of the same host tries against every port and file of a cluster; prints one JSON object a try.

Run by a test as that user, with the interpreter and the pyzmq that it is given::

    python stranger.py '{"ports": ["127.0.0.1:4711"], "files": ["/tmp/nbdist-x"], "pids": [42]}'
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import zmq

LISTEN_S = 1.5


def main(targets: dict[str, Any]) -> None:
    for port in targets["ports"]:
        for tried, action in (
            ("subscribes", subscribe),
            ("asks to register, to run code, to read the store", ask),
            ("connects with a key of his own", ask_with_key),
            ("reads what comes by itself, sends noise", noise),
        ):
            tell(port, tried, attempt(action, port))
    for path in targets["files"]:
        tell(path, "lists or reads it", attempt(read, path))
    for pid in targets["pids"]:
        tell(f"/proc/{pid}/environ", "reads it", attempt(read, f"/proc/{pid}/environ"))
        tell(f"process {pid}", "sends it a signal", attempt(send_signal, str(pid)))


def attempt(action: Callable[[str], str], target: str) -> str:
    try:
        return action(target)
    except OSError as error:
        return f"refused: {error.strerror}"


def tell(target: str, tried: str, got: str) -> None:
    print(json.dumps({"target": target, "tried": tried, "got": got}), flush=True)


def subscribe(port: str) -> str:
    client: Any = zmq.Context.instance().socket(zmq.SUB)
    client.linger = 0
    client.connect(f"tcp://{port}")
    client.subscribe(b"")
    return listen(client)


def ask(port: str, key: bool = False) -> str:
    client: Any = zmq.Context.instance().socket(zmq.DEALER)
    client.linger = 0
    if key:
        client.curve_publickey, client.curve_secretkey = zmq.curve_keypair()
        client.curve_serverkey = zmq.curve_keypair()[0]
    client.connect(f"tcp://{port}")
    header = json.dumps(
        {"msg_type": "connection_request", "msg_id": "1", "session": "s", "username": "u", "version": "5.3"}
    )
    client.send_multipart(
        [b"<IDS|MSG>", b"", header.encode(), b"{}", b"{}", b"{\"code\": \"open('/tmp/pwned', 'w')\"}"]
    )
    client.send_multipart([b"line", b'{"op": "listen"}'])
    client.send_multipart([b"store", b"1", b"count", b"0"])
    return listen(client)


def ask_with_key(port: str) -> str:
    return ask(port, key=True)


def listen(client: Any) -> str:
    got, deadline = [], time.monotonic() + LISTEN_S
    while time.monotonic() < deadline:
        if client.poll(100):
            got.append(b"".join(client.recv_multipart()))
    client.close()
    return f"{len(got)} messages: {got[0][:60]!r}" if got else "nothing"


def noise(port: str) -> str:
    host, _, number = port.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(number)), timeout=2) as client:
        client.sendall(b"\x00" * 64)
        client.settimeout(1)
        try:
            text = client.recv(4096)
        except TimeoutError:
            return "nothing"
    # every ZeroMQ socket says which protocol it speaks before it asks for a key
    if text[:1] == b"\xff":
        return "ZeroMQ's greeting"
    return f"{len(text)} bytes" if text else "closed"


def send_signal(pid: str) -> str:
    os.kill(int(pid), 0)
    return "sent"


def read(path: str) -> str:
    if os.path.isdir(path):
        return f"{len(os.listdir(path))} names"
    with open(path, "rb") as file:
        return f"{len(file.read())} bytes"


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
