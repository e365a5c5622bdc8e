"""The notebook's line to node agents on other hosts, through the cluster's exchange."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq

from nbdist.channel import LINE, ExchangeAddress, connect
from nbdist.skew import Skew

__all__ = ["ExchangeLine"]

POLL_S = 0.1
PING_S = 1.0


class ExchangeLine:
    """Sends commands to nodes and calls ``on_event``, from a thread of its own, with each report of a node.

    ``skew`` tells how far the clock of the exchange's host is ahead: it may be another one than the notebook's.
    """

    def __init__(self, address: ExchangeAddress, on_event: Callable[[dict[str, Any]], None]) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._sender = connect(self._context, address)
        self._receiver = connect(self._context, address)
        self.skew = Skew()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._on_event = on_event
        self._receiver.send_multipart([LINE, b'{"op": "listen"}'])
        self._thread = threading.Thread(target=self._listen, name="nbdist-line", daemon=True)
        self._thread.start()

    def tell(self, **command: Any) -> None:
        """Send one command to the node that ``node`` names."""
        with self._lock:
            if not self._closed.is_set():
                self._sender.send_multipart([LINE, json.dumps(command).encode()])

    def close(self) -> None:
        """Hang up; the nodes go on."""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(2)
        self._sender.close(linger=200)
        self._receiver.close()
        self._context.term()

    def _listen(self) -> None:
        pinged = 0.0
        while not self._closed.is_set():
            if time.monotonic() - pinged > PING_S:
                pinged = time.monotonic()
                self._receiver.send_multipart([LINE, json.dumps({"op": "ping", "sent": time.time()}).encode()])
            if self._receiver.poll(int(POLL_S * 1000)):
                _, text = self._receiver.recv_multipart()
                event = json.loads(text)
                if "event" in event:
                    self._on_event(event)
                elif event["op"] == "pong":
                    self.skew.add(event["sent"], event["time"], time.time())
