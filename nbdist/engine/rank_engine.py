"""The engine process of one rank: ipyparallel's engine with our streams, nanny and control handlers."""

from __future__ import annotations

import functools
import logging
import os
import sys
from pathlib import Path
from typing import Any

import ipyparallel.engine.app as app
from traitlets import Type

from nbdist.channel import ExchangeAddress
from nbdist.engine.agent import start_paired_nanny
from nbdist.engine.streams import follow_descriptors
from nbdist.engine.world import store

__all__ = ["RankEngine", "run_engine"]


class RankEngine(app.IPEngine):  # type: ignore[misc]  # ipyparallel is not typed
    """An ipyparallel engine that answers nbdist's control requests while its main thread is blocked."""

    out_stream_factory = Type("nbdist.engine.streams.RankStream", config=True)

    def redirect_output(self, iopub_socket: Any) -> None:
        """Install the rank's side of nbdist at the last step of ipyparallel's registration."""
        super().redirect_output(iopub_socket)
        self.log.setLevel(logging.ERROR)  # traitlets filters at the handler only: each request would make five records
        from nbdist.engine import control

        follow_descriptors(
            Path(os.environ["NBDIST_LOG_DIR"]), int(os.environ["LOCAL_RANK"]), {"out": sys.stdout, "err": sys.stderr}
        )
        control.install(self.kernel)


def run_engine(spec: dict[str, Any], engine_id: int, channel: int) -> None:
    """Register with the controller and serve until told to stop."""
    app.start_nanny = functools.partial(start_paired_nanny, channel)
    if "exchange" in spec:
        store.meet_at(ExchangeAddress(**spec["exchange"]))
    argv = [
        f"--IPEngine.url_file={spec['url_file']}",
        f"--profile-dir={spec['profile_dir']}",
        f"--IPEngine.id={engine_id}",
        "--IPEngine.wait_for_url_file=120",
        "--IPEngine.timeout=60",
        # a controller that is only slow (a stopped or swapped host) must not cost the ranks' state
        f"--IPEngine.max_heartbeat_misses={spec.get('heartbeat_misses', 40)}",
        "--log-level=ERROR",
        *spec.get("engine_args", ()),
    ]
    sys.argv = ["ipengine"]
    RankEngine.launch_instance(argv=argv)
