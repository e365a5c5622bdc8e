"""Drive a real IPython kernel the way a notebook's front end does, and ask what it left behind.

Every message is kept with its time of arrival. A kernel and all processes that it starts carry a random tag in their
environment, so that "what is left of this kernel" is a question to the operating system: no name pattern decides.
"""

from __future__ import annotations

import contextlib
import html
import json
import os
import queue
import re
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import psutil
import zmq
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager

from tests.leaks import alive, describe, tagged

KERNEL_TAG = "NBDIST_TEST_KERNEL"
SHOWN = ("stream", "display_data", "execute_result", "update_display_data", "error")

Message = dict[str, Any]
Action = tuple[float, Callable[[], object]]


class Cell:
    """One executed cell: every message with its time of arrival, the reply, the status."""

    def __init__(self, code: str) -> None:
        self.code = code
        self.messages: list[tuple[float, Message]] = []
        self.began = time.monotonic()
        self.ended: float | None = None
        self.status = "running"  # then "ok", "error", "aborted" or "kernel died"
        self.reply: Message = {}
        self.message_id = ""
        self.idle = False

    def __repr__(self) -> str:
        lines = self.text.splitlines()
        if len(lines) > 60:
            lines[30:-30] = [f"... {len(lines) - 60} lines ..."]
        first = self.code.strip().splitlines()[0][:60]
        return "\n".join([f"<Cell {self.status} after {self.seconds:.2f} s: {first!r}>", *lines])

    @property
    def seconds(self) -> float:
        return (self.ended or time.monotonic()) - self.began

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def outputs(self) -> list[Message]:
        """What the notebook would save: streams joined, updates of displays and clear_output applied."""
        outputs: list[Message] = []
        by_id: dict[str, list[Message]] = {}
        clear_first = False
        for _, message in self.messages:
            kind, content = message["msg_type"], message["content"]
            if kind == "clear_output":
                if content.get("wait"):
                    clear_first = True
                else:
                    outputs.clear()
                continue
            if kind not in SHOWN:
                continue
            if clear_first:
                outputs.clear()
                clear_first = False
            if kind == "stream":
                last = outputs[-1] if outputs else {}
                if last.get("output_type") == "stream" and last["name"] == content["name"]:
                    last["text"] += content["text"]
                else:
                    outputs.append({"output_type": "stream", "name": content["name"], "text": content["text"]})
            elif kind == "error":
                outputs.append({"output_type": "error", **{k: content[k] for k in ("ename", "evalue", "traceback")}})
            else:
                display_id = content.get("transient", {}).get("display_id")
                if kind == "update_display_data":
                    for output in by_id.get(display_id, ()):
                        output.update(data=content["data"], metadata=content.get("metadata", {}))
                    continue
                output = {"output_type": kind, "data": content["data"], "metadata": content.get("metadata", {})}
                outputs.append(output)
                if display_id is not None:
                    by_id.setdefault(display_id, []).append(output)
        return outputs

    @property
    def text(self) -> str:
        """What a reader sees at the end, without colours: streams, the last state of each display, errors."""
        return plain("".join(map(_text_of, self.outputs)))

    @property
    def stream_text(self) -> str:
        """All stdout and stderr in order of arrival, as sent (carriage returns and colours kept)."""
        return "".join(m["content"]["text"] for _, m in self.messages if m["msg_type"] == "stream")

    @property
    def error(self) -> tuple[str, str] | None:
        """Name and text of the error the cell ended with."""
        if self.status == "error" and self.reply.get("ename"):
            return self.reply["ename"], plain(self.reply["evalue"])
        return None

    @property
    def mime_types(self) -> set[str]:
        return {mime for output in self.outputs for mime in output.get("data", {})}

    @property
    def wire_bytes(self) -> int:
        """Bytes of content sent to the page."""
        return sum(len(json.dumps(m["content"], default=str)) for _, m in self.messages)

    def seconds_until(self, pattern: str) -> float | None:
        """Seconds after the start at which text that matches had arrived; None if it never did."""
        seen = ""
        for at, message in self.messages:
            if message["msg_type"] in SHOWN:
                seen += _text_of({"output_type": message["msg_type"], **message["content"]})
                if re.search(pattern, plain(seen)):
                    return at - self.began
        return None


class Kernel:
    """A kernel of this interpreter, as a context manager: nothing of it is alive at the end.

    >>> with Kernel() as kernel:
    ...     cell = kernel.run("print(1)")
    >>> cell.text
    '1\\n'
    """

    def __init__(
        self,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        within: Sequence[str] = (),  # a command that executes the kernel's: in a network namespace, as another user
    ) -> None:
        self.tag = secrets.token_hex(8)
        self._env = {**os.environ, **(env or {}), KERNEL_TAG: self.tag}
        self._cwd = None if cwd is None else os.fspath(cwd)
        self._sockets = tempfile.mkdtemp(prefix="nbdist-k") if within else None
        # a socket of the file system is reached from every network namespace
        self._manager = KernelManager(transport="ipc", ip=f"{self._sockets}/k") if within else KernelManager()
        # A spec of our own, so that a python3 kernel that somebody installed is not started in place of this one.
        self._manager._kernel_spec = KernelSpec(
            argv=[*within, sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
            display_name="nbdist tests",
            language="python",
            interrupt_mode="signal",
        )
        self._manager.start_kernel(env=self._env, cwd=self._cwd)
        try:
            self._connect()
        except BaseException:
            self.stop()
            raise

    def _connect(self) -> None:
        self.client = self._manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def __enter__(self) -> Kernel:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    # -- cells -------------------------------------------------------------------------------------------------------

    def run(
        self,
        code: str,
        *,
        timeout: float = 60,
        actions: Iterable[Action] = (),
        until: Callable[[Cell], object] | None = None,
        answer: str | None = None,
    ) -> Cell:
        """Run one cell and wait for its end; raise TimeoutError if that does not come.

        Parameters
        ----------
        actions
            ``(seconds, callable)``: what to do while the cell runs, and when.
        until
            Return when ``until(cell)`` is true; the cell goes on, and :meth:`wait` goes on waiting for it.
        answer
            The reply to any ``input()`` of the cell; without one ``input()`` is refused as in a front end that has no
            prompt.
        """
        cell = self.send(code, allow_stdin=answer is not None)
        return self.wait(cell, timeout=timeout, actions=actions, until=until, answer=answer)

    def check(self, code: str, *, timeout: float = 60) -> Cell:
        """Run one cell that has to succeed."""
        cell = self.run(code, timeout=timeout)
        assert cell.ok, cell
        return cell

    def send(self, code: str, *, allow_stdin: bool = False) -> Cell:
        """Send a cell and return at once."""
        cell = Cell(code)
        cell.message_id = self.client.execute(code, allow_stdin=allow_stdin)
        return cell

    def wait(
        self,
        cell: Cell,
        *,
        timeout: float = 60,
        actions: Iterable[Action] = (),
        until: Callable[[Cell], object] | None = None,
        answer: str | None = None,
    ) -> Cell:
        """Wait for a cell that was sent; parameters as of :meth:`run`, times from now."""
        start = time.monotonic()
        pending = sorted(actions, key=lambda action: action[0])
        while cell.ended is None:
            elapsed = time.monotonic() - start
            while pending and elapsed >= pending[0][0]:
                pending.pop(0)[1]()
            if until is not None and until(cell):
                return cell
            if elapsed > timeout:
                raise TimeoutError(f"The cell did not end in {timeout:g} s.\n{cell!r}")
            if answer is not None:
                with contextlib.suppress(queue.Empty):
                    self.client.get_stdin_msg(timeout=0)
                    self.client.input(answer)
            self._receive([cell], 0.02)
        return cell

    def run_all(self, codes: Sequence[str], *, timeout: float = 60, actions: Iterable[Action] = ()) -> list[Cell]:
        """Send all cells at once as Run All does; a cell after a failed one comes back "aborted"."""
        cells = [self.send(code) for code in codes]
        start = time.monotonic()
        pending = sorted(actions, key=lambda action: action[0])
        while any(cell.ended is None for cell in cells):
            elapsed = time.monotonic() - start
            while pending and elapsed >= pending[0][0]:
                pending.pop(0)[1]()
            if elapsed > timeout:
                raise TimeoutError(f"Not all cells ended in {timeout:g} s.\n{cells!r}")
            self._receive(cells, 0.02)
        return cells

    def _receive(self, cells: Sequence[Cell], seconds: float) -> None:
        """Wait a moment for messages of either channel and give them to their cells."""
        by_id = {cell.message_id: cell for cell in cells}
        poller = zmq.Poller()
        for channel in (self.client.iopub_channel, self.client.shell_channel):
            poller.register(channel.socket, zmq.POLLIN)
        poller.poll(int(1000 * seconds))
        with contextlib.suppress(queue.Empty):
            while True:
                message = self.client.get_iopub_msg(timeout=0)
                cell = by_id.get(message["parent_header"].get("msg_id"))
                if cell is not None:
                    cell.messages.append((time.monotonic(), message))
                    cell.idle |= message["msg_type"] == "status" and message["content"]["execution_state"] == "idle"
        with contextlib.suppress(queue.Empty):
            while True:
                reply = self.client.get_shell_msg(timeout=0)
                cell = by_id.get(reply["parent_header"].get("msg_id"))
                if cell is not None:
                    cell.reply = reply["content"]
        for cell in cells:
            # The reply may overtake the last outputs: they come on another socket. A cell ended when both are there.
            if cell.ended is None and cell.reply and (cell.idle or cell.reply["status"] == "aborted"):
                cell.status, cell.ended = cell.reply["status"], time.monotonic()
        if not self.is_alive():
            for cell in cells:
                if cell.ended is None:
                    cell.status, cell.ended = "kernel died", time.monotonic()

    def late_messages(self, seconds: float = 0.5) -> list[Message]:
        """What comes although no cell is awaited (output of threads, updates of displays)."""
        messages, deadline = [], time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                messages.append(self.client.get_iopub_msg(timeout=left))
        return messages

    # -- other requests ----------------------------------------------------------------------------------------------

    def complete(self, code: str, *, timeout: float = 10) -> list[str]:
        """The completions offered at the end of ``code``."""
        return list(self._ask(self.client.complete(code, len(code)), timeout)["matches"])

    def inspect(self, code: str, *, timeout: float = 10) -> str:
        """The text that Shift-Tab shows at the end of ``code`` ("" where there is none)."""
        return plain(self._ask(self.client.inspect(code, len(code)), timeout)["data"].get("text/plain", ""))

    def _ask(self, message_id: str, timeout: float) -> Message:
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                reply = self.client.get_shell_msg(timeout=left)
                if reply["parent_header"].get("msg_id") == message_id:
                    return dict(reply["content"])
        raise TimeoutError(f"No reply in {timeout:g} s.")

    # -- the process -------------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        pid = getattr(self._manager.provisioner, "pid", None)
        assert pid is not None, "the kernel was shut down"
        return int(pid)

    def is_alive(self) -> bool:
        process = getattr(self._manager.provisioner, "process", None)
        return process is not None and process.poll() is None

    def interrupt(self) -> None:
        """What the stop button does."""
        self._manager.interrupt_kernel()

    def kill(self) -> None:
        """SIGKILL the kernel and nothing else, as the out-of-memory killer does."""
        os.kill(self.pid, signal.SIGKILL)

    def restart(self, *, now: bool = False) -> None:
        """What Restart Kernel does (``now``: without asking the kernel first)."""
        self.client.stop_channels()
        self._manager.restart_kernel(now=now, env=self._env, cwd=self._cwd)
        self._connect()

    def processes(self) -> list[psutil.Process]:
        """The living processes that this kernel started, directly or not."""
        own = self.pid if self.is_alive() else None
        return [process for process in tagged(KERNEL_TAG, self.tag) if process.pid != own]

    def seconds_until_gone(self, timeout: float = 15) -> float:
        """Wait until nothing that the kernel started is alive; fail with the names of what is."""
        start = time.monotonic()
        while left := self.processes():
            assert time.monotonic() - start < timeout, f"after {timeout:g} s:\n" + "\n".join(map(describe, left))
            time.sleep(0.05)
        return time.monotonic() - start

    def stop(self) -> None:
        """Shut the kernel down as a closed notebook does; then end by pid what is left."""
        with contextlib.suppress(AttributeError):
            self.client.stop_channels()
        self._manager.shutdown_kernel(now=False)
        self._manager.cleanup_resources()
        if self._sockets is not None:
            shutil.rmtree(self._sockets, ignore_errors=True)
        deadline = time.monotonic() + 5
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.05)
        left = self.processes()
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=5)
        assert not any(map(alive, left)), left


def plain(text: str) -> str:
    """Text without colours, hyperlinks, and what a carriage return overwrote."""
    text = re.sub(r"\x1b\]8;[^\x1b\x07]*(\x1b\\|\x07)", "", text)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    return "\n".join(
        next((part for part in reversed(line.split("\r")) if part), "")
        for line in text.replace("\r\n", "\n").split("\n")
    )


def _text_of(output: Message) -> str:
    if output["output_type"] == "stream":
        return str(output["text"])
    if output["output_type"] == "error":
        return "\n".join(output["traceback"]) + "\n"
    text: str = output["data"].get("text/plain", "")
    if "text/html" in output["data"] and (not text or text.startswith("<")):
        # "<IPython.core.display.HTML object>" is not what the reader sees.
        text = re.sub(r"<(style|script)\b.*?</\1>", "", output["data"]["text/html"], flags=re.DOTALL)
        text = html.unescape(re.sub(r"<[^>]+>", " ", re.sub(r"<br\s*/?>|</(p|div|tr|li|h\d|pre)>", "\n", text)))
    return text + "\n"
