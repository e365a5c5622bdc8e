"""Do something bad to a cluster, and see that nothing was lost."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nbdist import Cluster
from nbdist.errors import DistributedError
from nbdist.records import RankError
from tests.kernel import plain

PROMPTLY = 5.0  # seconds on an idle machine of 2 cores
Action = tuple[float, Callable[[], object]]


@dataclass(frozen=True)
class Outcome:
    """How a cell ended: what it raised, as a reader sees it, and after how many seconds."""

    error: BaseException | None
    seconds: float

    @property
    def name(self) -> str:
        return type(self.error).__name__

    @property
    def text(self) -> str:
        render = getattr(self.error, "_render_traceback_", None)
        return plain("\n".join(render())) if render is not None else repr(self.error)

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()


def errors(outcome: Outcome) -> Sequence[RankError]:
    """What each rank ended with, the root cause first."""
    assert isinstance(outcome.error, DistributedError), outcome
    return outcome.error.errors


def run(cluster: Cluster, source: str, *, actions: Sequence[Action] = (), **options: Any) -> Outcome:
    """Run a cell, do things ``(seconds, callable)`` to it meanwhile, and tell how it ended."""
    timers = [threading.Timer(after, action) for after, action in actions]
    error: BaseException | None = None
    began = time.monotonic()
    try:
        for timer in timers:
            timer.start()
        cluster.run(source, **options)
    except (Exception, KeyboardInterrupt) as raised:
        error = raised
    seconds = time.monotonic() - began
    for timer in timers:
        timer.cancel()
        timer.join()
    return Outcome(error, seconds)


def fails(cluster: Cluster, source: str, *, within: float = PROMPTLY, **options: Any) -> Outcome:
    """Run a cell that has to fail soon, without costing a process."""
    before = cluster.pids
    outcome = run(cluster, source, **options)
    assert outcome.error is not None, f"no error after {outcome.seconds:.1f} s"
    assert outcome.seconds < within, f"{outcome.seconds:.1f} s\n{outcome.text}"
    assert cluster.pids == before
    return outcome


def stop() -> None:
    """Press Stop: SIGINT, as the notebook's button does."""
    os.kill(os.getpid(), signal.SIGINT)


def stopped(cluster: Cluster, source: str, *, after: float = 1.0, within: float = PROMPTLY, **options: Any) -> Outcome:
    """Run a cell, press Stop, and see that it ends as KeyboardInterrupt without costing a process."""
    outcome = fails(cluster, source, within=after + within, actions=[(after, stop)], **options)
    assert isinstance(outcome.error, KeyboardInterrupt), outcome.text
    return outcome


def group_is_whole(cluster: Cluster, within: float = 10.0) -> None:
    """An all_reduce comes back right on every rank, soon."""
    began = time.monotonic()
    cluster.run(
        "x_ = torch.ones(1); dist.all_reduce(x_); assert x_.item() == world_size, x_", output="none", timeout=within + 5
    )
    assert time.monotonic() - began < within


def ready(cluster: Cluster, size: int = 2) -> None:
    """Replace what died, and give every rank what the cells of these tests use."""
    if any(engine in cluster.deaths for engine in cluster.world.engines):
        cluster.repair()
    if cluster.world_size != size:
        cluster.resize(size)  # a test that failed half-way must not fail the next ones
    cluster.run(
        "import os, sys, time\nfrom torch.nn.parallel import DistributedDataParallel as DDP\nkept = 100 + rank",
        output="none",
    )


def nothing_was_lost(cluster: Cluster) -> None:
    """The group is whole, and variables of before are still there."""
    group_is_whole(cluster)
    assert cluster.pull("kept") == [100 + rank for rank in range(cluster.world_size)]


def end(cluster: Cluster, rank: int, sig: int = signal.SIGKILL) -> Callable[[], None]:
    """Something that sends a signal to the process of a rank."""
    pid = cluster.pids[rank]
    return lambda: os.kill(pid, sig)


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
