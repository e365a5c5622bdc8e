"""The controller process: ipyparallel's, ending with the process that started it.

``python -m nbdist.controller <arguments of ipcontroller>``
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import threading

__all__ = ["main"]

PARENT_POLL_S = 0.25


def end_with_parent(run_dir: str) -> None:
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
        if not told_to_stop:  # whoever started us is gone and cannot clean up
            shutil.rmtree(run_dir, ignore_errors=True)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="nbdist-parent", daemon=True).start()


def main() -> None:
    """Run ipcontroller; keep it alive beyond its parent only when NBDIST_KEEP is set."""
    os.umask(0o077)
    if os.environ.get("NBDIST_KEEP") != "1":
        end_with_parent(os.environ["NBDIST_RUN_DIR"])
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
