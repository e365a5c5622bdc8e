"""What the hosts of a cluster meet in, beside ipyparallel: one port of the controller's process, encrypted.

Two services share it. A key-value store, in which the ranks find each other (torch's own ``TCPStore`` listens on every
interface and asks nobody for a password). And lines to the node agents: a notebook sends commands to a node and hears
what every node reports; a node that has not been heard of for a while is reported as lost.

Messages are multipart: the service, then for the store ``request, operation, milliseconds, arguments…``, for lines one
JSON object.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.utils import z85

from nbdist.channel import LINE, STORE, ExchangeAddress

__all__ = ["Exchange", "KeyValues", "Switchboard"]

POLL_S = 0.25
LOST_AFTER_S = 10.0

Reply = Callable[..., None]


class KeyValues:
    """A store of bytes whose readers can wait for a key."""

    def __init__(self) -> None:
        self.data: dict[bytes, bytes] = {}
        self._waiting: dict[bytes, list[_Waiter]] = {}

    def handle(self, operation: bytes, wait: float, arguments: list[bytes], reply: Reply) -> None:
        """Carry out one operation; ``reply`` is called with its result, now or when the keys are there."""
        getattr(self, f"_{operation.decode()}")(wait, reply, *arguments)

    def expire(self, now: float) -> None:
        """Forget those who waited for too long: they have given up by themselves."""
        for waiters in list(self._waiting.values()):
            waiters[:] = [waiter for waiter in waiters if waiter.deadline > now]
        self._waiting = {key: waiters for key, waiters in self._waiting.items() if waiters}

    def _set(self, wait: float, reply: Reply, key: bytes, value: bytes) -> None:
        self._put(key, value)
        reply()

    def _get(self, wait: float, reply: Reply, key: bytes) -> None:
        self._when_there([key], wait, lambda: reply(self.data[key]))

    def _wait(self, wait: float, reply: Reply, *keys: bytes) -> None:
        self._when_there(keys, wait, reply)

    def _check(self, wait: float, reply: Reply, *keys: bytes) -> None:
        reply(b"1" if all(key in self.data for key in keys) else b"")

    def _add(self, wait: float, reply: Reply, key: bytes, amount: bytes) -> None:
        total = int(self.data.get(key, b"0")) + int(amount)
        self._put(key, str(total).encode())
        reply(str(total).encode())

    def _append(self, wait: float, reply: Reply, key: bytes, value: bytes) -> None:
        self._put(key, self.data.get(key, b"") + value)
        reply()

    def _compare_set(self, wait: float, reply: Reply, key: bytes, expected: bytes, desired: bytes) -> None:
        # as torch's stores do: a key that is not there counts as equal to an empty expectation only
        if self.data.get(key, b"" if not expected else None) == expected:
            self._put(key, desired)
        reply(self.data.get(key, expected))

    def _delete(self, wait: float, reply: Reply, key: bytes) -> None:
        reply(b"1" if self.data.pop(key, None) is not None else b"")

    def _count(self, wait: float, reply: Reply) -> None:
        reply(str(len(self.data)).encode())

    def _drop(self, wait: float, reply: Reply, prefix: bytes) -> None:
        for key in [key for key in self.data if key.startswith(prefix)]:
            del self.data[key]
        reply()

    def _put(self, key: bytes, value: bytes) -> None:
        self.data[key] = value
        for waiter in self._waiting.pop(key, ()):
            waiter.missing.discard(key)
            if not waiter.missing:
                waiter.ready()

    def _when_there(self, keys: Iterable[bytes], wait: float, ready: Callable[[], None]) -> None:
        missing = {key for key in keys if key not in self.data}
        if not missing:
            ready()
            return
        waiter = _Waiter(missing, time.monotonic() + wait, ready)
        for key in missing:
            self._waiting.setdefault(key, []).append(waiter)


@dataclass(slots=True)
class _Waiter:
    missing: set[bytes]
    deadline: float
    ready: Callable[[], None]


@dataclass(slots=True)
class _Node:
    identity: bytes
    hello: dict[str, Any]
    heard: float
    engines: dict[int, dict[str, Any]] = field(default_factory=dict)  # pid -> the event that told of it


class Switchboard:
    """Passes lines between notebooks and nodes, and notices nodes that have gone silent."""

    def __init__(self, send: Callable[[bytes, dict[str, Any]], None], lost_after: float = LOST_AFTER_S) -> None:
        self._send = send
        self.lost_after = lost_after
        self.nodes: dict[int, _Node] = {}
        self._listeners: set[bytes] = set()

    def handle(self, sender: bytes, line: dict[str, Any]) -> None:
        """Take one line of a node or of a notebook."""
        if "event" in line:
            self._on_event(sender, line)
        elif line["op"] == "listen":
            self._listeners.add(sender)
            for node in self.nodes.values():
                for event in (node.hello, *node.engines.values()):
                    self._send(sender, event)
        elif line["op"] == "hang up":
            self._listeners.discard(sender)
        elif line["op"] == "ping":
            pinging = self._of(sender)
            if pinging is not None:
                pinging.heard = time.monotonic()
            if pinging is None and line.get("greeted"):
                # it was given up for lost meanwhile, and what it ran has been replaced
                self._send(sender, {"op": "bye"})
            else:
                self._send(sender, {"op": "pong", "sent": line.get("sent", 0.0), "time": time.time()})
        else:
            meant = self.nodes.get(line.get("node", 0))
            if meant is not None:
                self._send(meant.identity, line)

    def expire(self, now: float) -> None:
        """Report the nodes that have not been heard of for ``lost_after`` seconds."""
        for number, node in list(self.nodes.items()):
            if now - node.heard > self.lost_after:
                del self.nodes[number]
                self.publish({"event": "lost", "node": number, "host": node.hello["host"], "seconds": self.lost_after})

    def forgive(self, seconds: float) -> None:
        """Do not count a time in which this process itself did not run."""
        for node in self.nodes.values():
            node.heard += seconds

    def say_goodbye(self) -> None:
        """Tell every node to end: the cluster has ended."""
        for node in self.nodes.values():
            self._send(node.identity, {"op": "bye"})

    def publish(self, event: dict[str, Any]) -> None:
        for listener in self._listeners:
            self._send(listener, event)

    def _on_event(self, sender: bytes, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "hello":
            known = self.nodes.get(event["node"])
            if known is not None and known.identity != sender:
                self._send(known.identity, {"op": "bye"})
            self.nodes[event["node"]] = _Node(sender, event, time.monotonic())
        node = self._of(sender)
        if node is None:
            return
        node.heard = time.monotonic()
        if kind == "clock":
            node.hello |= {"ahead": event["ahead"]}  # for a notebook that comes later
        elif kind == "forked":
            node.engines[event["pid"]] = event
        elif kind == "exited":
            node.engines.pop(event["pid"], None)
        elif kind == "ended":
            del self.nodes[event["node"]]
        self.publish(event)

    def _of(self, sender: bytes) -> _Node | None:
        return next((node for node in self.nodes.values() if node.identity == sender), None)


class Exchange:
    """The server, in a thread of its own; ``address`` is what clients need to reach it."""

    def __init__(self, host: str, *, lost_after: float = LOST_AFTER_S) -> None:
        server_public, server_secret = zmq.curve_keypair()
        public, secret = zmq.curve_keypair()
        self._context: zmq.Context[Any] = zmq.Context()
        # whoever shows another key than ours is refused before a message of his is read
        self._gate = self._context.socket(zmq.REP)
        self._gate.bind("inproc://zeromq.zap.01")
        self._admitted = public
        self._router = self._context.socket(zmq.ROUTER)
        self._router.linger = 500
        self._router.sndhwm = self._router.rcvhwm = 0
        self._router.ipv6 = ":" in host
        self._router.curve_server = True
        self._router.curve_secretkey = server_secret
        self._router.zap_domain = b"nbdist"
        port = self._router.bind_to_random_port(f"tcp://{f'[{host}]' if ':' in host else host}")
        self.address = ExchangeAddress(
            host=host,
            port=port,
            server_key=server_public.decode(),
            public_key=public.decode(),
            secret_key=secret.decode(),
        )
        self.keys = KeyValues()
        self.switchboard = Switchboard(self._send_line, lost_after)
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._serve, name="nbdist-exchange", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Tell every node to end, and stop serving."""
        os.write(self._wake_write, b"x")
        self._thread.join(2)

    def _serve(self) -> None:
        poller = zmq.Poller()
        for source in (self._gate, self._router, self._wake_read):
            poller.register(source, zmq.POLLIN)
        last = time.monotonic()
        while True:
            ready = dict(poller.poll(int(POLL_S * 1000)))
            now = time.monotonic()
            if now - last > 4 * POLL_S:
                self.switchboard.forgive(now - last)
            last = now
            if self._gate in ready:
                self._admit()
            if self._wake_read in ready:
                break
            if self._router in ready:
                self._receive()
            self.keys.expire(now)
            self.switchboard.expire(now)
        self.switchboard.say_goodbye()
        self._router.close()
        self._gate.close()
        self._context.term()

    def _admit(self) -> None:
        version, request, _domain, _peer, _identity, mechanism, *credentials = self._gate.recv_multipart()
        known = mechanism == b"CURVE" and z85.encode(credentials[0]) == self._admitted
        verdict = (b"200", b"OK") if known else (b"400", b"unknown key")
        self._gate.send_multipart([version, request, *verdict, b"", b""])

    def _receive(self) -> None:
        while True:
            try:
                sender, service, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if service == LINE:
                self.switchboard.handle(sender, json.loads(frames[0]))
            elif service == STORE:
                request, operation, wait, *arguments = frames
                self.keys.handle(operation, int(wait) / 1000, arguments, self._replier(sender, request))

    def _replier(self, sender: bytes, request: bytes) -> Reply:
        def reply(*values: bytes) -> None:
            self._router.send_multipart([sender, STORE, request, *values])

        return reply

    def _send_line(self, receiver: bytes, line: dict[str, Any]) -> None:
        self._router.send_multipart([receiver, LINE, json.dumps(line).encode()])
