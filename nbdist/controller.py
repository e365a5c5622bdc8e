"""The controller process: ipyparallel's, ending with the process that started it; for several hosts, the exchange too.

``python -m nbdist.controller <arguments of ipcontroller>``
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from nbdist.exchange import Exchange

__all__ = ["main"]

PARENT_POLL_S = 0.25
FAREWELL_S = 20.0


def end_with_parent(run_dir: str, exchange: Exchange | None = None) -> None:
    """End this whole process group when standard input ends or the parent is gone, whichever is seen first.

    The schedulers are children of the controller and in its session: they go with it.
    """
    parent = os.getppid()

    def watch() -> None:
        told_to_stop = False
        while os.getppid() == parent:
            readable, _, _ = select.select([0], [], [], PARENT_POLL_S)
            if readable:
                word = os.read(0, 4096)
                if not word:
                    break
                told_to_stop = True
        if exchange is not None:
            exchange.close()
        if not told_to_stop:  # whoever started us is gone and cannot clean up
            say_farewell(Path(run_dir) / "farewell.json")
            shutil.rmtree(run_dir, ignore_errors=True)
        # its schedulers first, and waited for: in a container nobody may reap what its parent has not
        schedulers = psutil.Process().children()
        for scheduler in schedulers:
            with contextlib.suppress(psutil.NoSuchProcess):
                scheduler.kill()
        psutil.wait_procs(schedulers, timeout=1.0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="nbdist-parent", daemon=True).start()


def say_farewell(commands: Path) -> None:
    """Run what takes back a submitted job: its owner did not live to do it."""
    with contextlib.suppress(OSError, ValueError):
        for command in json.loads(commands.read_text()):
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=FAREWELL_S)


def start_exchange(run_dir: str, host: str) -> Exchange:
    """Start what ranks and agents of several hosts meet in, and write down its address for their owner alone."""
    from nbdist.channel import FILE
    from nbdist.exchange import Exchange

    exchange = Exchange(host)
    exchange.address.write(Path(run_dir) / FILE)
    return exchange


def main() -> None:
    """Run ipcontroller; keep it alive beyond its parent only when NBDIST_KEEP is set."""
    os.umask(0o077)
    run_dir, host = os.environ["NBDIST_RUN_DIR"], os.environ.get("NBDIST_EXCHANGE")
    exchange = start_exchange(run_dir, host) if host else None
    if os.environ.get("NBDIST_KEEP") != "1":
        end_with_parent(run_dir, exchange)
    from ipyparallel.controller.app import IPController

    class Controller(IPController):  # type: ignore[misc]  # ipyparallel is not typed
        """ipyparallel's controller whose hub only minds who lives.

        It would also take in a copy of every message of every cell, for a database that nbdist does not use: a fifth
        of the time of a short cell.
        """

        def init_hub(self) -> None:
            super().init_hub()
            monitored = self.hub.monitor.socket
            monitored.unsubscribe(b"")
            monitored.subscribe(b"heartmonitor")

    sys.argv[0] = "ipcontroller"
    Controller.launch_instance()


if __name__ == "__main__":
    main()
