"""Run one cell on this rank: IPython semantics, a SIGINT policy that loses no reply, errors as data."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import functools
import os
import signal
import sys
import tempfile
import time
import types
import warnings
from dataclasses import dataclass
from typing import Any, NoReturn

import ipykernel.compiler
from torch.distributed.distributed_c10d import is_initialized
from torch.utils.data import _utils as loaders

from nbdist.engine.cells import gate, loops, outputs
from nbdist.engine.cells.explain import explain, from_transport
from nbdist.engine.telemetry import meters
from nbdist.engine.telemetry.recorder import recorder
from nbdist.engine.world import meeting, process_group
from nbdist.records import RankError, to_wire

__all__ = ["CELL", "Running", "install", "run", "where"]


@dataclass(slots=True)
class Running:
    """The cell that this rank's main thread is in; the control thread reads and marks it."""

    label: str
    began: float
    began_ns: int
    counters: process_group.Counters  # of each group, when the cell began
    interrupts: int = 0
    cut: bool = False
    place: tuple[str, str] = ("", "")  # where the main thread was when it was first interrupted: cell line, function
    was_waiting: bool = False  # in a collective, then
    showing: bool = False
    coroutine: Any = None  # a top-level await that it is in
    error: RankError | None = None
    early: bool = False  # a SIGINT came within IPython or within an import: it is still to be delivered


CELL: Running | None = None
LAST_BEGAN_NS = 0
LOADER_PATIENCE_S = loaders.MP_STATUS_CHECK_INTERVAL  # how long torch waits for each worker before it ends it


def run(source: str, label: int, run_name: str) -> dict[str, Any]:
    """Run ``source`` as ``In[label]`` in the rank's namespace and tell how it ended.

    Returns
    -------
    dict
        ``error``: a RankError on the wire, or None; ``seconds``; ``progress``: the counters of each group;
        ``in_group``: whether there still is a process group; ``outputs``: how many messages it has published;
        ``records``: the number of the last payload of records.
    """
    global CELL, LAST_BEGAN_NS
    shell, process = _shell(), os.getpid()
    cell = CELL = Running(
        label=f"In[{label}]", began=time.monotonic(), began_ns=time.time_ns(), counters=process_group.counters()
    )
    LAST_BEGAN_NS = cell.began_ns
    signal.signal(signal.SIGINT, _on_sigint)  # a cell before may have put its own handler there
    outputs.begin(shell.kernel)
    shell.execution_count = label
    meters.begin_cell(run_name)
    try:
        result = shell.run_cell(source, store_history=True)
        failure = result.error_before_exec or result.error_in_exec
        if failure is not None and cell.error is None:
            cell.error = _one_line(cell, failure)
        # the exception holds its frames, and these the tensors of the failed step
        result.error_before_exec = result.error_in_exec = result.result = None
        del failure
    except KeyboardInterrupt as interrupt:
        # between two lines of IPython's own: the cell has ended all the same
        cell.error = cell.error or _one_line(cell, interrupt)
    finally:
        if os.getpid() != process:
            _end_fork(cell.error)
        CELL = None
        _forget_tracebacks(shell)
        error = cell.error
        meters.end_cell("done" if error is None else "stopped" if error.released is not None else "failed")
        meters.flush()
        # after the reply: writing to the store takes a tenth of a short cell
        asyncio.get_running_loop().call_soon(meeting.cell_ended, recorder.cell)
        loaders.MP_STATUS_CHECK_INTERVAL = LOADER_PATIENCE_S
    return {
        "error": to_wire(error) if error is not None else None,
        "seconds": time.monotonic() - cell.began,
        "progress": process_group.progress(),
        "in_group": is_initialized(),
        "outputs": outputs.sent(),
        "records": recorder.number,
    }


def install() -> None:
    """Take over SIGINT, error display, ``input`` and ``breakpoint`` in this engine."""
    shell = _shell()
    signal.signal(signal.SIGINT, _on_sigint)
    # the engine's own handler would make a child of a cell deaf to multiprocessing's terminate()
    os.register_at_fork(after_in_child=functools.partial(signal.signal, signal.SIGTERM, signal.SIG_DFL))
    # ipykernel swaps the handler around each message: a late SIGINT would then end the request without a reply
    shell.kernel.pre_handler_hook = lambda: None
    shell.kernel.post_handler_hook = lambda: None
    shell.loop_runner = _run_awaiting
    # IPython names a cell's code after a folder of this process; equal on all ranks, what mentions it folds
    ipykernel.compiler.get_tmp_directory = lambda: os.path.join(tempfile.gettempdir(), "nbdist-cell")
    # values that a cell ends with are shown, not kept: Out would hold every tensor that was ever looked at
    shell.displayhook.do_full_cache = False
    shell.displayhook.cache_size = 0
    # IPython's advice for a prompt, which a rank does not have
    warnings.filterwarnings("ignore", message="To exit: use", category=UserWarning)
    # IPython 9 would write each traceback down for %notebook: a second formatting, which keeps the frames it has seen
    shell._format_exception_for_storage = lambda *args, **kwargs: {}
    # and all that a cell prints, in memory until the cell ends
    shell._tee = lambda channel: contextlib.nullcontext()
    plain_traceback = shell.showtraceback

    def showtraceback(*args: Any, **kwargs: Any) -> None:
        cell = CELL
        error = sys.exc_info()[1]
        if cell is None or error is None:
            plain_traceback(*args, **kwargs)
            return
        cell.showing = True
        if not isinstance(error, gate.StepStop):
            hurry_loaders()
        explained = None if cell.cut else explain(error, cell.counters)
        if isinstance(error, SystemExit):
            cell.error = _explained(error, "SystemExit", f"{error.code}: the cell ended, the rank did not")
        elif explained is not None:
            cell.error = _explained(error, *explained)
        elif _is_collateral(cell, error):
            cell.error = _one_line(cell, error)
        else:
            _leave_out_our_frames(error)
            plain_traceback(*args, **kwargs)

    def keep_traceback(etype: type[BaseException], evalue: Any, lines: list[str]) -> None:
        cell = CELL
        if cell is None:
            return
        error = sys.exc_info()[1]
        cell.error = RankError(
            rank=_rank(),
            ename=etype.__name__,
            evalue=_text(evalue),
            time=time.time(),
            traceback=tuple(lines),
            location=place(error.__traceback__)[0] if error is not None else "",
        )

    shell.showtraceback = showtraceback
    shell._showtraceback = keep_traceback
    _refuse_input(shell)


def hurry_loaders() -> None:
    """Let the cell end without waiting for the items that workers of a loader are in the middle of."""
    loaders.MP_STATUS_CHECK_INTERVAL = 0.2


def where(frame: types.FrameType | None) -> tuple[str, str]:
    """Say where a stack is: (the innermost line of a cell, what that line called and is in now)."""
    inner = called = _called(frame) if frame is not None else ""
    while frame is not None:
        name = cell_name(frame.f_code.co_filename)
        if name:
            # called from the cell itself, the innermost function is the cell's own
            return f"Cell {name}, line {frame.f_lineno}", called if called != "<module>" else ""
        called = _called(frame) or called
        frame = frame.f_back
    awaited = _awaited()
    return awaited, "" if awaited else inner


def _awaited() -> str:
    """Give the innermost line of a cell that a top-level await has come to: it is on no stack while it waits."""
    coroutine, line = CELL.coroutine if CELL is not None else None, ""
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None)
        name = cell_name(frame.f_code.co_filename) if frame is not None else ""
        if frame is not None and name:
            line = f"Cell {name}, line {frame.f_lineno}"
        coroutine = getattr(coroutine, "cr_await", None)
    return line


def place(traceback: types.TracebackType | None) -> tuple[str, str]:
    """Say where an error comes from, in the same words."""
    line = called = ""
    while traceback is not None:
        frame = traceback.tb_frame
        name = cell_name(frame.f_code.co_filename)
        if name:
            line, called = f"Cell {name}, line {traceback.tb_lineno}", ""
        elif line and not called:
            called = _called(frame)
        traceback = traceback.tb_next
    return line, called


def inside(frame: types.FrameType | None) -> str:
    """Give the function of torch.distributed that a thread is in, if it is: it may be waiting for other ranks there."""
    if frame is None or not str(frame.f_globals.get("__name__", "")).startswith("torch.distributed"):
        return ""
    return frame.f_code.co_name


def _called(frame: types.FrameType) -> str:
    """Name a function as the cell calls it: ``Linear.forward`` where torch's frame is ``_wrapped_call_impl``."""
    name = frame.f_code.co_name
    if name == "wrapper":  # torch's logging around each collective
        return ""
    if name in ("__init__", "_wrapped_call_impl", "_call_impl") and "self" in frame.f_locals:
        owner = type(frame.f_locals["self"]).__name__
        return owner if name == "__init__" else f"{owner}.forward"
    return name


def cell_name(filename: str) -> str:
    """Give ``In[7]`` for the file name that IPython compiled cell 7 under, else nothing."""
    named = _shell().compile.format_code_name(filename)
    return str(named[1]) if named else ""


def _on_sigint(signum: int, frame: types.FrameType | None) -> None:
    """Raise KeyboardInterrupt in the user's code and nowhere else: not in IPython's, not while an error is shown."""
    cell = CELL
    if cell is None or cell.showing:
        return
    # an import that is cut short leaves modules half made, and torch imports its compiler with the first DDP model
    importing = cell.interrupts <= 1 and _is_importing(frame)
    if not importing and (cell.coroutine is not None or _in_user_code(frame)):
        raise KeyboardInterrupt
    cell.early = True


def _is_importing(frame: types.FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _in_user_code(frame: types.FrameType | None) -> bool:
    namespace = _shell().user_ns
    while frame is not None:
        # ipyparallel's own call into the namespace is compiled as <string>
        if frame.f_globals is namespace and frame.f_code.co_filename != "<string>":
            return True
        frame = frame.f_back
    return False


def _run_awaiting(coroutine: Any) -> Any:
    cell = CELL
    if cell is not None:
        cell.coroutine = coroutine
    try:
        return loops.run_nested(coroutine)
    finally:
        if cell is not None:
            cell.coroutine = None


def _is_collateral(cell: Running, error: BaseException) -> bool:
    """Tell an error that this rank has because of another one from one of its own."""
    if isinstance(error, KeyboardInterrupt):
        return cell.interrupts > 0 or isinstance(error, gate.StepStop)
    return from_transport(error)


def _one_line(cell: Running, error: BaseException) -> RankError:
    # the traceback of an interrupt shows where the signal was noticed, a moment after the place where the rank was
    line, called = cell.place if cell.place[0] else place(error.__traceback__)
    waited = cell.was_waiting or from_transport(error)
    return RankError(
        rank=_rank(),
        ename=type(error).__name__,
        evalue=_text(error),
        time=time.time(),
        location=line,
        released=(called or "a collective") if waited else "",
    )


def _explained(error: BaseException, ename: str, evalue: str) -> RankError:
    return RankError(rank=_rank(), ename=ename, evalue=evalue, time=time.time(), location=place(error.__traceback__)[0])


def _leave_out_our_frames(error: BaseException) -> None:
    """End the traceback where the user's code called nbdist, which raised: its text is for the user, its lines not."""
    last: types.TracebackType | None = None  # the innermost frame that is not ours
    traceback = error.__traceback__
    while traceback is not None:
        if not str(traceback.tb_frame.f_globals.get("__name__", "")).startswith("nbdist."):
            last = traceback
        traceback = traceback.tb_next
    if last is not None and not isinstance(error, AssertionError):
        last.tb_next = None


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception as error:  # a user's __str__ may raise anything
        return f"<unprintable {type(value).__name__}: {type(error).__name__} in its __str__>"


def _end_fork(error: RankError | None) -> NoReturn:
    """End a process that the cell forked and that ran the cell to its end: there must be no second engine."""
    if error is not None:
        text = "\n".join(error.traceback) or f"{error.ename}: {error.evalue}"
        os.write(2, f"process {os.getpid()}, forked in a cell of rank {error.rank}:\n{text}\n".encode())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if error is None else 1)


def _forget_tracebacks(shell: Any) -> None:
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            setattr(sys, name, None)
    shell.InteractiveTB.tb = None
    shell.last_execution_result = None
    shell._last_traceback = None
    # what IPython 9 keeps of each cell for %notebook
    for kept in ("exceptions", "outputs"):
        getattr(shell.history_manager, kept, {}).clear()


def _refuse_input(shell: Any) -> None:
    """``input``, ``breakpoint`` and ``pdb.set_trace`` cannot wait for a person here: say so, and what to do instead."""
    import pdb

    def no_input(prompt: object = "") -> str:
        raise RuntimeError(
            f"rank {_rank()} cannot ask for input. Ask in the notebook, then %push the answer to the ranks."
        )

    def no_debugger(*args: Any, **kwargs: Any) -> None:
        frame = sys._getframe(1)
        line, _ = where(frame)
        place = line or f"{os.path.basename(frame.f_code.co_filename)}, line {frame.f_lineno}"
        print(
            f"breakpoint at {place} on rank {_rank()} passed over: a rank has no prompt. "
            "Print the values here, or look at them in the next cell with %%distributed --ranks "
            f"{_rank()}."
        )

    def leave(code: object = None) -> None:
        raise SystemExit(code)

    shell.kernel.raw_input = no_input
    builtins.input = no_input
    sys.breakpointhook = no_debugger
    pdb.set_trace = no_debugger
    # ipykernel's exit would end the engine, and the rank's state with it
    shell.user_ns["exit"] = shell.user_ns["quit"] = leave
    shell.ask_exit = leave


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _shell() -> Any:
    from ipykernel.zmqshell import ZMQInteractiveShell

    return ZMQInteractiveShell.instance()
