"""What a rank answers while its main thread is blocked: requests on ipykernel's control thread."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from nbdist.engine import limits
from nbdist.engine.cells import completion, gate, outputs, runner, wrapping
from nbdist.engine.telemetry import meters
from nbdist.engine.telemetry.recorder import recorder
from nbdist.engine.world import process_group
from nbdist.records import to_wire

__all__ = ["install"]

_MAIN = threading.main_thread()
_publish: Callable[[dict[str, Any]], None] | None = None


def install(kernel: Any) -> None:
    """Answer ``nbdist_request`` messages of the control channel, and make the main thread ready for cells."""

    def handle(stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        content = dict(parent["content"])
        op = content.pop("op")
        try:
            reply = {"status": "ok", **OPERATIONS[op](**content)}
        except Exception as error:  # whatever went wrong, the asker waits for an answer
            reply = {"status": "error", "ename": type(error).__name__, "evalue": str(error)}
        kernel.session.send(stream, "nbdist_reply", reply, parent=parent, ident=ident)

    kernel.control_handlers["nbdist_request"] = handle
    outputs.install(kernel)
    runner.install()
    limits.raise_fd_limit()
    wrapping.compare_models()
    _install_pager(kernel.shell)

    global _publish

    def publish(payload: dict[str, Any]) -> None:
        # not as the message's content: the session refuses what is not in JSON's standard, and a loss may be NaN
        kernel.session.send(
            kernel.iopub_socket, "nbdist_records", {}, ident=b"nbdist", buffers=[json.dumps(payload).encode()]
        )

    _publish = publish


def start_meters(rank: int, world_size: int) -> None:
    """Begin to send records to the notebook, or go on under a new rank."""
    if _publish is not None:
        meters.start(_publish, rank=rank, world_size=world_size)


def status() -> dict[str, Any]:
    """What the main thread does now. Cheap: asked several times a second while a cell runs."""
    cell = runner.CELL
    reply: dict[str, Any] = {"pid": os.getpid(), "rank": int(os.environ.get("RANK", -1)), "running": cell is not None}
    if cell is not None:
        line, called = runner.where(_main_frame())
        reply |= {"label": cell.label, "seconds": time.monotonic() - cell.began, "line": line, "called": called}
    reply["progress"] = process_group.progress()
    reply["memory"] = _memory()
    return reply


def who() -> dict[str, Any]:
    """The rank's own description, and the cell that it runs, for a notebook that finds this cluster running."""
    cell = runner.CELL
    return {"info": to_wire(process_group.rank_info()), "label": cell.label if cell is not None else ""}


def recent() -> dict[str, Any]:
    """The last records of this rank, which nobody may have heard."""
    # as text, for the same reason as when they were published
    return {"payloads": json.dumps(list(recorder.sent))}


def progress() -> dict[str, Any]:
    """The least that is needed to see whether this rank moves."""
    cell = runner.CELL
    if cell is not None and cell.early and _MAIN.ident is not None:
        cell.early = False
        signal.pthread_kill(_MAIN.ident, signal.SIGINT)
    frame = _main_frame()
    return {
        "running": cell is not None,
        "progress": process_group.progress(),
        "inside": runner.inside(frame),
        "pulse": (id(frame), frame.f_lasti) if frame is not None else None,
    }


def collectives() -> dict[str, Any]:
    """The last collective of each group, and where the main thread is."""
    frame = _main_frame()
    line, called = runner.where(frame)
    return {
        "running": runner.CELL is not None,
        "line": line,
        "called": called,
        "inside": runner.inside(frame),
        "groups": process_group.collectives(runner.LAST_BEGAN_NS),
    }


def interrupt(times: int) -> dict[str, Any]:
    """Deliver one SIGINT to the main thread if a cell runs, unless that many were delivered already."""
    cell = runner.CELL
    if cell is None or _MAIN.ident is None:
        return {"running": False}
    if cell.interrupts >= times:
        return {"running": True}
    if not cell.interrupts:
        cell.place = runner.where(_main_frame())
        cell.was_waiting = any(enqueued != completed for enqueued, completed in process_group.progress().values())
    cell.interrupts += 1
    runner.hurry_loaders()
    signal.pthread_kill(_MAIN.ident, signal.SIGINT)
    return {"running": True}


def cut(generation: int) -> dict[str, Any]:
    """Release the main thread from a collective by shutting down the sockets of its groups."""
    if generation != process_group.current_generation():
        return {"closed": 0}  # asked of a rank that was frozen, which has come back since
    cell = runner.CELL
    if cell is not None:
        cell.cut = True
    return {"closed": process_group.cut()}


def abandon(generation: int) -> dict[str, Any]:
    """Come out of the forming of a group that another rank cannot join."""
    process_group.abandon(generation)
    return {}


def stop_request() -> dict[str, Any]:
    """Ask the training loop of this rank to hold at its next step boundary; tell how many steps it has begun."""
    active = gate.current_gate()
    return {"active": False} if active is None else active.request_stop()


def stop_at(step: int) -> dict[str, Any]:
    """Let the training loop go on up to ``step`` and end there."""
    active = gate.current_gate()
    if active is not None:
        active.stop_at(step)
    return {"active": active is not None}


def complete(code: str, cursor: int) -> dict[str, Any]:
    """Names of this rank that continue the code at the cursor."""
    return completion.complete(runner._shell().user_ns, code, cursor)


def describe(code: str, cursor: int) -> dict[str, Any]:
    """What the name under the cursor is on this rank."""
    return completion.describe(runner._shell().user_ns, code, cursor)


def stack() -> dict[str, Any]:
    """The main thread's Python stack, outermost first."""
    import traceback

    frame = _main_frame()
    return {"stack": traceback.format_stack(frame) if frame is not None else []}


OPERATIONS: dict[str, Callable[..., dict[str, Any]]] = {
    "status": status,
    "who": who,
    "progress": progress,
    "collectives": collectives,
    "interrupt": interrupt,
    "recent": recent,
    "cut": cut,
    "abandon": abandon,
    "stop_request": stop_request,
    "stop_at": stop_at,
    "complete": complete,
    "describe": describe,
    "stack": stack,
}


def _main_frame() -> Any:
    return sys._current_frames().get(_MAIN.ident or 0)


def _memory() -> int:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return int(torch.cuda.memory_allocated())
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _install_pager(shell: Any) -> None:
    """Show what ``name?`` finds in the output of the cell: a rank has no pager."""
    from IPython.core.hooks import CommandChainDispatcher  # noqa: F401
    from IPython.core.page import as_hook, display_page

    shell.set_hook("show_in_pager", as_hook(display_page), 90)
