"""Run one cell on this rank: IPython semantics, a SIGINT policy that loses no reply, errors as data."""

from __future__ import annotations

import builtins
import os
import re
import signal
import sys
import time
import types
from dataclasses import dataclass, field
from typing import Any

from nbdist.engine import gate, loops, meters, process_group
from nbdist.records import RankError, to_wire

__all__ = ["CELL", "Running", "install", "run", "where"]

TRANSPORT = re.compile(r"gloo|Connection (closed|reset)|Broken pipe|NCCL communicator was aborted|Timed out waiting")


@dataclass(slots=True)
class Running:
    """The cell that this rank's main thread is in; the control thread reads and marks it."""

    label: str
    began: float
    began_ns: int
    counters: dict[str, tuple[int, int]]  # of each group, when the cell began
    interrupts: int = 0
    cut: bool = False
    place: tuple[str, str] = ("", "")  # where the main thread was when it was first interrupted: cell line, function
    showing: bool = False
    awaiting: bool = False
    error: RankError | None = None
    early: bool = field(default=False)  # a SIGINT came before the first line of the cell


CELL: Running | None = None
STALE = (
    "This object (a DDP model, or a group) belongs to an earlier generation of the process group, which was formed "
    "anew since. Wrap the model again: model = nbdist.parallelize(model)."
)

LAST_BEGAN_NS = 0


def run(source: str, label: int, run_name: str) -> dict[str, Any]:
    """Run ``source`` as ``In[label]`` in the rank's namespace and tell how it ended.

    Returns
    -------
    dict
        ``error``: a RankError on the wire, or None; ``seconds``; ``progress``: the counters of each group.
    """
    global CELL, LAST_BEGAN_NS
    shell = _shell()
    cell = CELL = Running(
        label=f"In[{label}]", began=time.monotonic(), began_ns=time.time_ns(), counters=process_group.progress()
    )
    LAST_BEGAN_NS = cell.began_ns
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
        CELL = None
        _forget_tracebacks(shell)
        error = cell.error
        meters.end_cell("done" if error is None else "stopped" if error.released is not None else "failed")
        meters.flush()
    return {
        "error": to_wire(error) if error is not None else None,
        "seconds": time.monotonic() - cell.began,
        "progress": process_group.progress(),
    }


def install() -> None:
    """Take over SIGINT, error display, ``input`` and ``breakpoint`` in this engine."""
    shell = _shell()
    signal.signal(signal.SIGINT, _on_sigint)
    # ipykernel swaps the handler around each message: a late SIGINT would then end the request without a reply
    shell.kernel.pre_handler_hook = lambda: None
    shell.kernel.post_handler_hook = lambda: None
    shell.loop_runner = _run_awaiting
    # values that a cell ends with are shown, not kept: Out would hold every tensor that was ever looked at
    shell.displayhook.do_full_cache = False
    shell.displayhook.cache_size = 0
    plain_traceback = shell.showtraceback

    def showtraceback(*args: Any, **kwargs: Any) -> None:
        cell = CELL
        if cell is None:
            plain_traceback(*args, **kwargs)
            return
        cell.showing = True
        error = sys.exc_info()[1]
        if error is not None and _is_collateral(cell, error):
            cell.error = _one_line(cell, error)
            return
        plain_traceback(*args, **kwargs)

    def keep_traceback(etype: type[BaseException], evalue: Any, lines: list[str]) -> None:
        cell = CELL
        if cell is None:
            return
        error = sys.exc_info()[1]
        # closed connections, and yet no collective of this generation was touched: an object of an earlier one
        stale = error is not None and _from_transport(error) and process_group.progress() == cell.counters
        cell.error = RankError(
            rank=_rank(),
            ename=etype.__name__,
            evalue=_text(evalue),
            time=time.time(),
            traceback=tuple(lines),
            location=location(error.__traceback__ if error is not None else None),
            hint=STALE if stale else hint(error) if error is not None else "",
            released="collective" if error is not None and _from_transport(error) and not stale else None,
        )

    shell.showtraceback = showtraceback
    shell._showtraceback = keep_traceback
    _refuse_input(shell)


def where(frame: types.FrameType | None) -> tuple[str, str]:
    """Say where a stack is: (the innermost line of a cell, the function it called that is at work now)."""
    inner = frame.f_code.co_name if frame is not None else ""
    line = ""
    called = inner
    while frame is not None:
        name = cell_name(frame.f_code.co_filename)
        if name:
            line = f"Cell {name}, line {frame.f_lineno}"
            break
        if frame.f_code.co_name != "wrapper":  # torch's logging around each collective
            called = frame.f_code.co_name
        frame = frame.f_back
    if not line:
        return "", inner
    # called from the cell itself, the innermost function is the cell's own line
    return line, called if called not in ("", "<module>") else ""


def location(traceback: types.TracebackType | None) -> str:
    """Give the innermost cell line of a traceback as ``Cell In[7], line 4``."""
    line = ""
    while traceback is not None:
        name = cell_name(traceback.tb_frame.f_code.co_filename)
        if name:
            line = f"Cell {name}, line {traceback.tb_lineno}"
        traceback = traceback.tb_next
    return line


def cell_name(filename: str) -> str:
    """Give ``In[7]`` for the file name that IPython compiled cell 7 under, else nothing."""
    named = _shell().compile.format_code_name(filename)
    return str(named[1]) if named else ""


def hint(error: BaseException) -> str:
    """One line that says what to do, for the errors of torch whose own text does not."""
    text = _text(error)
    if "initialize the default process group twice" in text:
        return "nbdist has formed the process group already: use it as it is, guarded by dist.is_initialized()."
    if "Expected to have finished reduction" in text:
        return (
            'Some parameters took no part in the loss: nbdist.parallelize(model, "ddp", find_unused_parameters=True).'
        )
    return ""


def _on_sigint(signum: int, frame: types.FrameType | None) -> None:
    """Raise KeyboardInterrupt in the user's code and nowhere else: not in IPython's, not while an error is shown."""
    cell = CELL
    if cell is None or cell.showing:
        return
    if cell.awaiting or _in_user_code(frame):
        raise KeyboardInterrupt
    cell.early = True


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
        cell.awaiting = True
    try:
        return loops.run_nested(coroutine)
    finally:
        if cell is not None:
            cell.awaiting = False


def _is_collateral(cell: Running, error: BaseException) -> bool:
    """Tell an error that this rank has because of another one from one of its own."""
    if isinstance(error, KeyboardInterrupt):
        return cell.interrupts > 0 or isinstance(error, gate.StepStop)
    return cell.cut and _from_transport(error)


def _from_transport(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and bool(TRANSPORT.search(_text(error)))


def _one_line(cell: Running, error: BaseException) -> RankError:
    # the traceback of an interrupt shows where the signal was noticed, a moment after the place where the rank was
    line, called = cell.place if cell.place[0] else (location(error.__traceback__), "")
    return RankError(
        rank=_rank(),
        ename=type(error).__name__,
        evalue=_text(error),
        time=time.time(),
        location=line,
        released=called if cell.cut else "",
    )


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception as error:  # a user's __str__ may raise anything
        return f"<unprintable {type(value).__name__}: {type(error).__name__} in its __str__>"


def _forget_tracebacks(shell: Any) -> None:
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            setattr(sys, name, None)
    shell.InteractiveTB.tb = None
    shell.last_execution_result = None
    shell._last_traceback = None


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


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _shell() -> Any:
    from ipykernel.zmqshell import ZMQInteractiveShell

    return ZMQInteractiveShell.instance()
