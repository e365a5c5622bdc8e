"""ipyparallel's client, with what nbdist needs of it: output that outlives its request, and control requests.

One request, one reply and one stream of records for each rank is measured to hold for 64 engines and for the records of
256 ranks (``python -m tests.benchmarks scale``): time grows about as the number of ranks does. For a thousand the
notebook would do what its hosts can do for it, and the places for that are these:

- a cell goes once to each host: ``submit_all`` sends to the first rank of a host, which hands the source on to its
  neighbours (a tree of two levels; ipyparallel's broadcast scheduler with a depth of log2(hosts) is the same by hand);
- equal replies are folded there, so that a cell's replies are as many as hosts, and more only where ranks differ;
- records of a host go through its link, which sums up per step what the panel draws (mean, low, high, the slowest rank)
  and writes the single records to a file beside it, fetched when ``to_frame`` asks for them;
- the group is formed in a tree too: the store's keys of 1,024 ranks are read through one relay a host.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import ipyparallel as ipp
from traitlets.log import get_logger

from nbdist.wire import RemoteCall

__all__ = ["RankClient", "quiet_session"]


@contextlib.contextmanager
def quiet_session() -> Iterator[None]:
    """Keep jupyter_client from warning that messages are not signed: CURVE authenticates and encrypts all of them."""

    def keep(record: logging.LogRecord) -> bool:
        return "signing is disabled" not in record.getMessage()

    log: Any = get_logger()
    log.addFilter(keep)
    try:
        yield
    finally:
        log.removeFilter(keep)


class RankClient(ipp.Client):  # type: ignore[misc]  # ipyparallel is not typed
    """A client whose iopub messages go to ``route`` (from its IO thread), whoever asked for them.

    ipyparallel's own handler keeps the whole text of a request in memory, joining it anew with every message, and
    drops what comes after the request has ended.
    """

    route: Callable[[dict[str, Any]], None] | None = None

    def activate(self, targets: Any = "all", suffix: str = "") -> Any:
        """Leave the notebook's ``%px`` magics alone: a user may have a cluster of his own."""
        return None

    def submit(
        self, engine: int, target: str, *args: Any, hook: Callable[[Any], None] | None = None, **kwargs: Any
    ) -> Any:
        """Call a function of the engine, named as ``module:function``; give the future of its result.

        ``hook`` gets the future before the message is sent, so that no output can come before it is known.
        """
        self.history.clear()
        return self.send_apply_request(
            self._mux_stream,
            RemoteCall(target),
            args,
            kwargs,
            ident=self._engines[engine].encode(),
            message_future_hook=hook,
        )

    def submit_all(
        self,
        engines: Iterable[int],
        target: str,
        *args: Any,
        hook: Callable[[int, Any], None],
        on_error: Callable[[int, Exception], None],
    ) -> None:
        """Call the same function on several engines, from the IO thread: it would else wake once for each message.

        ``hook`` and ``on_error`` are called there with the engine and its future, or what kept it from being sent. The
        function's result says how much output it has; ipyparallel's own word that it is complete is not sent.
        """

        def began(engine: int, future: Any) -> None:
            future.add_done_callback(lambda done: self._output_is_complete(done.msg_id))
            hook(engine, future)

        def send() -> None:
            for engine in engines:
                try:
                    self.submit(engine, target, *args, hook=functools.partial(began, engine))
                except Exception as error:  # whoever waits for this engine's reply has to be told
                    on_error(engine, error)

        self._io_loop.add_callback(send)

    def ask(self, engines: Iterable[int], op: str, timeout: float = 1.0, **content: Any) -> dict[int, Any]:
        """Ask engines something on the control channel; None stands for one that did not answer within ``timeout``."""
        futures = {
            engine: self._send(
                self._control_stream,
                "nbdist_request",
                content={"op": op, **content},
                ident=self._engines[engine].encode(),
            )
            for engine in engines
            if engine in self._engines
        }
        deadline = time.monotonic() + timeout
        replies: dict[int, Any] = {}
        for engine, future in futures.items():
            future.wait(max(0.0, deadline - time.monotonic()))
            reply = future.result()["content"] if future.done() else None
            replies[engine] = reply if reply is not None and reply.get("status") == "ok" else None
            if not future.done():
                self._futures.pop(future.msg_id, None)
        return replies

    def _extract_metadata(self, message: dict[str, Any]) -> dict[str, Any]:
        """Keep of a reply's metadata what the client itself needs; reading its dates takes longer than all the rest."""
        return {
            "engine_uuid": message["metadata"].get("engine"),
            "engine_id": self._engines.get(message["metadata"].get("engine")),
            "status": message["content"]["status"],
            "is_coalescing": False,
        }

    def _dispatch_iopub(self, parts: list[Any]) -> None:
        _, frames = self.session.feed_identities(parts, copy=False)
        message = self.session.deserialize(frames, content=True, copy=False)
        if self.route is not None:
            self.route(message)
        if message["msg_type"] == "status" and message["content"].get("execution_state") == "idle":
            self._output_is_complete((message["parent_header"] or {}).get("msg_id"))

    def _output_is_complete(self, msg_id: Any) -> None:
        """Let ipyparallel free what it keeps of a request: it does when both reply and output are there."""
        output = self._output_futures.get(msg_id)
        if output is not None and not output.done():
            output.set_result(None)
