"""Run a cell on ranks: send it, stream what comes back, stop it, and end it well or as one error."""

from __future__ import annotations

import itertools
import queue
import re
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nbdist.errors import ClusterError, CollectiveMismatch, CollectiveTimeout, DistributedError, NbdistError, WorldError
from nbdist.output import Output
from nbdist.page import Page
from nbdist.ranks import named
from nbdist.records import HangReport, RankError, from_wire
from nbdist.release import Release, stop_button
from nbdist.report import describe_end, one_line
from nbdist.syntax import check_syntax
from nbdist.watch import Watch

if TYPE_CHECKING:
    from nbdist.cluster import Cluster

__all__ = ["Cell", "adopt", "run", "train"]

TICK_S = 0.05
TICK_HOLDING_S = 0.01  # while lines wait for those of other ranks
WATCH_AFTER_S = 1.0
SHOW_FIRST_S = 1.0  # after which an error is told although the cell has not ended
REMEMBERED = 512  # requests whose late output is still shown under their cell
TIMED_OUT = re.compile(r"Timed out waiting|timeout caused pair closure|Watchdog caught collective operation timeout")
OUTPUT_GRACE_S = 2.0  # between a rank's reply and the last of its output, which takes another way

_outside_ipython = itertools.count(1)


class Stopped(KeyboardInterrupt):
    """Stop was pressed; the traceback of the notebook's own waiting says nothing to anybody."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("; ".join(lines))
        self.lines = tuple(lines)

    def _render_traceback_(self) -> list[str]:
        return ["\x1b[31mKeyboardInterrupt\x1b[0m", *self.lines]


Stopped.__name__ = "KeyboardInterrupt"  # what front ends show and tools compare


class Cell:
    """A cell that runs, or ran, on ranks.

    ``wait`` blocks until it has ended on all of them and raises what a foreground cell would have raised.
    """

    def __init__(
        self, cluster: Cluster, source: str, ranks: Sequence[int], *, label: int, output: str, timeout: float | None
    ) -> None:
        self.cluster = cluster
        self.source = source
        self.ranks = tuple(ranks)
        self.label = label
        self.timeout = timeout
        self.engines = {cluster.world.engines[rank]: rank for rank in ranks}
        self.began = time.monotonic()
        self.replies: dict[int, dict[str, Any]] = {}  # rank -> what run_cell gave
        self.errors: dict[int, RankError] = {}
        self.stopped_at: int | None = None
        self.interrupted = False
        self.is_adopted = False
        self.error: BaseException | None = None
        self.finished = threading.Event()
        self.page = Page()
        self.output = Output(self.page, self.ranks, output, cluster.log_dir("cells") / f"In-{label}")
        self._events: queue.SimpleQueue[tuple[str, int, Any]] = queue.SimpleQueue()
        self._heard: Counter[int] = Counter()  # rank -> messages that it has published
        self._replied_at: dict[int, float] = {}
        self.release: Release | None = None
        self._watch: Watch | None = None
        self._given_up: HangReport | None = None
        self._pressed = threading.Event()
        self._shown_first = False

    def __repr__(self) -> str:
        state = "ended" if self.finished.is_set() else "running"
        return f"<Cell In[{self.label}] on {named(self.ranks)} · {state}>"

    @property
    def remaining(self) -> dict[int, int]:
        """Engine to rank of those that still run the cell."""
        return {engine: rank for engine, rank in self.engines.items() if rank not in self.replies}

    # -- called from other threads -----------------------------------------------------------------------------------

    def receive(self, rank: int, message: dict[str, Any]) -> None:
        """Take one iopub message of a rank; what its threads print after the cell has ended goes below it too."""
        if not self.finished.is_set():
            self._events.put(("message", rank, message))
        elif message["msg_type"] == "stream":
            lines = message["content"]["text"].splitlines()
            self.page.write("".join(f"[{rank}] {line}\n" for line in lines), message["content"]["name"])

    def receive_from(self, message: dict[str, Any]) -> None:
        """Take an iopub message of an adopted cell: only the engine's own name says which rank it is from."""
        client = self.cluster.client
        sender = (message.get("metadata") or {}).get("engine")
        for engine, rank in self.engines.items():
            if client._engines.get(engine) == sender:
                self.receive(rank, message)

    def wake(self) -> None:
        """Look at the world again: an engine or the controller has ended."""
        self._events.put(("wake", -1, None))

    def request_stop(self) -> None:
        """Ask for the same as the kernel's interrupt does; returns at once."""
        self._pressed.set()
        self._events.put(("stop", -1, None))

    def notice(self, report: HangReport) -> None:
        """Tell about ranks that wait; they may still be right to."""
        self._events.put(("notice", -1, report))

    def give_up(self, report: HangReport) -> None:
        """End the cell, since the ranks wait for what cannot come."""
        self._events.put(("give up", -1, report))

    # -- the life of a cell ------------------------------------------------------------------------------------------

    def send(self) -> None:
        """Send the cell to its ranks."""
        requests = self.cluster._requests

        def expect(engine: int, future: Any) -> None:
            rank = self.engines[engine]
            requests[future.msg_id] = (self, rank)
            for old in list(itertools.islice(requests, max(0, len(requests) - REMEMBERED))):
                del requests[old]
            future.add_done_callback(lambda done: self._events.put(("reply", rank, done.result())))

        self.cluster.client.submit_all(
            list(self.engines),
            "nbdist.engine.bootstrap:run_cell",
            self.source,
            self.label,
            f"cell {self.label}",
            hook=expect,
            on_error=lambda engine, error: self._events.put(("reply", self.engines[engine], error)),
        )

    def pump(self) -> None:
        """Show output and mind failures until the cell has ended on every rank; raise what went wrong."""
        try:
            while not self._complete():
                self._step()
            self.output.flush(time.monotonic(), final=True)
            self._conclude()
        except BaseException as error:
            self.error = error
            raise
        finally:
            self.page.closed = True
            self.cluster.cell = None
            self.finished.set()

    def wait(self, timeout: float | None = None) -> Cell:
        """Wait for a detached cell; raise what went wrong on its ranks."""
        if not self.finished.wait(timeout):
            raise TimeoutError(f"Cell In[{self.label}] still runs after {timeout:g} s.")
        if self.error is not None:
            raise self.error
        return self

    def _step(self) -> None:
        self._take(TICK_HOLDING_S if self.output.holds_lines else TICK_S)
        now = time.monotonic()
        self.output.flush(now)
        if self._watch is None and now - self.began > WATCH_AFTER_S:
            self._watch = Watch(self)  # not at once: a thread costs a short cell a fifth of its time
            self._watch.start()
        self._show_first(now)
        if self.timeout is not None and now - self.began > self.timeout and self.release is None:
            self._bring_out(f"timeout of {self.timeout:g} s", gentle=False)

    def _show_first(self, now: float) -> None:
        """Say what went wrong while ranks are still to be brought out: some take their time."""
        if self._shown_first or not self.errors:
            return
        rank = min(self.errors, key=lambda rank: (self.errors[rank].released is not None, self._replied_at[rank]))
        if now - self._replied_at[rank] > SHOW_FIRST_S:
            self._shown_first = True
            waiting = named(self.remaining.values())
            self.page.write(f"rank {rank}: {one_line(self.errors[rank])}; bringing {waiting} back\n", "stderr")

    def _take(self, wait: float) -> None:
        """Handle what has come; wait for the first of it."""
        try:
            event = self._events.get(timeout=wait)
        except queue.Empty:
            self._look_at_dead()
            return
        while True:
            kind, rank, payload = event
            if kind == "message":
                self._heard[rank] += 1
                self.output.receive(rank, payload, time.monotonic())
                self._settle(rank)
            elif kind == "reply":
                self._on_reply(rank, payload)
            elif kind == "stop":
                self._on_stop()
            elif kind == "notice":
                self.page.write("".join(f"nbdist: {line}\n" for line in payload.lines), "stderr")
            elif kind == "give up":
                self._given_up = payload
                self._bring_out("the ranks wait in vain", gentle=False, hopeless=True)
            else:
                self._look_at_dead()
            try:
                event = self._events.get_nowait()
            except queue.Empty:
                return

    def _complete(self) -> bool:
        if self.remaining:
            return False
        if self.release is not None and self.release.active:
            return False
        now = time.monotonic()
        return all(now - self._replied_at[rank] > OUTPUT_GRACE_S for rank in self.ranks if not self._heard_all(rank))

    def _heard_all(self, rank: int) -> bool:
        """Whether all that the rank has published is here; of an adopted cell nobody knows how much that is."""
        reply = self.replies.get(rank, {})
        if "outputs" not in reply or self._heard[rank] < reply["outputs"]:
            return False
        engine = self.cluster.client._engines.get(self.cluster.world.engines[rank])
        return bool(self.cluster._heard.get(engine, 0) >= reply.get("records", 0))

    def _settle(self, rank: int) -> None:
        if self._heard_all(rank):
            self.output.rank_done(rank)

    def _on_reply(self, rank: int, result: Any) -> None:
        if rank in self.replies:
            return
        self._replied_at[rank] = time.monotonic()
        if isinstance(result, dict):
            self.replies[rank] = result
            if result["error"] is not None:
                self.errors[rank] = from_wire(RankError, {**result["error"], "rank": rank})
        else:
            self.replies[rank] = {"error": None, "progress": {}, "outputs": 0}
            self.errors[rank] = self._lost(rank, result)
        self._settle(rank)
        error = self.errors.get(rank)
        # a rank that nobody has released yet, and yet its collective has failed: its peer died, or did not come in time
        if error is not None and (error.released is None or self.release is None):
            self._bring_out(f"rank {rank} failed", gentle=False)

    def _lost(self, rank: int, result: object) -> RankError:
        """Describe a rank whose reply will never come."""
        engine = self.cluster.world.engines[rank]
        death = self._death(engine)
        host = self.cluster.world.ranks[rank].host
        if death is None:
            text, stderr = f"{type(result).__name__}: {result} (host {host})", ""
        else:
            text, stderr = f"rank {rank} {describe_end(death, host)}", death.get("stderr", "")
        self.cluster.world.broken = True
        return RankError(
            rank=rank,
            ename="RankDied",
            evalue=text,
            time=0.0,  # whatever the others say came of this
            traceback=tuple([f"\x1b[31mRankDied\x1b[0m: {text}", *(f"  stderr: {x}" for x in _last_lines(stderr, 8))]),
            hint="%cluster repair puts an empty rank in its place; the others keep their state.",
        )

    def _death(self, engine: int) -> dict[str, Any] | None:
        """Give what the agent reported of an engine; the nanny's word may be a moment ahead of it."""
        deadline = time.monotonic() + 1.0
        with self.cluster._changed:
            while engine not in self.cluster.deaths and time.monotonic() < deadline:
                self.cluster._changed.wait(deadline - time.monotonic())
            return self.cluster.deaths.get(engine)

    def _look_at_dead(self) -> None:
        lost = self.cluster.defunct
        if lost:
            raise ClusterError(lost)
        if self.is_adopted:
            self._look_at_adopted()

    def _look_at_adopted(self) -> None:
        """Ask who still runs: the replies of an adopted cell go to the notebook that sent it."""
        for engine, reply in self.cluster.client.ask(self.remaining, "progress", timeout=0.5).items():
            rank = self.engines[engine]
            if engine in self.cluster.deaths:
                self.replies[rank] = {"error": None, "progress": {}, "outputs": 0}
                self.errors[rank] = self._lost(rank, None)
            elif reply is not None and not reply["running"]:
                self.replies[rank] = {"error": None, "progress": reply["progress"]}
            else:
                continue
            self._replied_at[rank] = time.monotonic()
            self.output.rank_done(rank)

    def _on_stop(self) -> None:
        """A first Stop is gentle; a second one insists, and a third one ends the ranks that do not come."""
        self.interrupted = True
        if self.release is None:
            self._bring_out("stopped", gentle=True)
        else:
            self.release.insist()

    def _bring_out(self, reason: str, *, gentle: bool, hopeless: bool = False) -> None:
        if self.release is None:
            self.release = Release(self, reason, gentle=gentle, hopeless=hopeless)
            self.release.start()

    def _conclude(self) -> None:
        """Form the group anew where it was broken, and raise what the cell ended with."""
        cluster = self.cluster
        cluster.cell = None  # all ranks are at the prompt
        release = self.release
        failed = any(error.released for error in self.errors.values())
        broken = (release is not None and release.cut) or failed or self._out_of_step()
        dead = _dead(cluster)
        if broken:
            cluster.world.broken = True
        if cluster.world.broken and not dead:
            self._form_anew()
            dead = _dead(cluster)  # a lost connection may be known before the death that it came of
        if failed and all(error.released is not None for error in self.errors.values()):
            self.errors.update({rank: self._lost(rank, None) for rank in dead})  # which did not run this cell
        killed = release.killed if release is not None else set()
        if dead and (cluster.repair_mode == "auto" or killed):
            self.page.write(cluster.repair() + "\n", "stderr")
        real = [e for e in self.errors.values() if e.released is None and e.rank not in killed]
        if self._given_up is not None and not real:
            kind = CollectiveMismatch if self._given_up.kind == "mismatch" else CollectiveTimeout
            raise kind("\n".join(self._given_up.lines))
        if release is not None and release.reason.startswith("timeout") and not real:
            report = self._watch.report if self._watch is not None else None
            why = "\n".join(report.lines) if report is not None else release.places()
            raise CollectiveTimeout(f"The cell ran into its {release.reason}: {why}. The ranks are back at the prompt.")
        if self.interrupted and not real:
            raise Stopped(self._stops())
        if not real and any(TIMED_OUT.search(error.evalue) for error in self.errors.values()):
            report = self._watch.report if self._watch is not None else None
            lines = report.lines if report is not None else self._stops()
            came = [rank for rank, error in self.errors.items() if TIMED_OUT.search(error.evalue)]
            missing = [rank for rank in self.ranks if rank not in came] or self.ranks
            raise CollectiveTimeout(
                "\n".join([f"{named(missing)} did not come in {cluster.collective_timeout:g} s.", *lines])
            )
        if self.errors:
            raise DistributedError(list(self.errors.values()))

    def _form_anew(self) -> None:
        """Form the group; where that fails, what the cell ended with is still what it ends with."""
        self._pressed.clear()
        try:
            self.cluster.world.form(stopped=self._pressed.is_set)
        except WorldError as error:
            self.interrupted |= self._pressed.is_set()
            if self.cluster.world.died is not None:
                self._death(self.cluster.world.died)  # which tells of itself
                return
            self.page.write(f"nbdist: the group is not formed anew: {error} The next cell tries again.\n", "stderr")

    def _stops(self) -> list[str]:
        if self.stopped_at is not None:
            return [f"stopped after step {self.stopped_at} on {named(self.ranks)}"]
        places: dict[str, list[int]] = {}
        killed = self.release.killed if self.release is not None else set()
        for rank, error in sorted(self.errors.items()):
            text = "did not come back: ended, and replaced" if rank in killed else one_line(error)
            places.setdefault(text, []).append(rank)
        done = [rank for rank in self.ranks if rank not in self.errors]
        if done:
            places.setdefault("had finished the cell", []).extend(done)
        return [f"{named(ranks)}: {text}" for text, ranks in places.items()]

    def _out_of_step(self) -> bool:
        """Whether some rank has called more collectives of a group than another: they do not match any more.

        Only what was enqueued counts: what is complete is written down by another thread, a moment later.
        """
        if not all(reply.get("in_group", True) for reply in self.replies.values()):
            return True  # the cell ended with dist.destroy_process_group(), as scripts do
        counters = [reply["progress"] for reply in self.replies.values() if reply.get("progress")]
        groups = {name for progress in counters for name in progress}
        return any(len({progress[name][0] for progress in counters if name in progress}) > 1 for name in groups)


def run(
    cluster: Cluster,
    source: str,
    ranks: Sequence[int],
    *,
    timeout: float | None = None,
    output: str = "fold",
    detach: bool = False,
) -> Cell:
    """Run ``source`` on ranks; see ``Cluster.run``."""
    world = cluster.world
    if output not in ("fold", "all", "none"):
        raise ValueError(f"output {output!r}: choose fold, all or none.")
    if cluster.cell is not None:
        raise ClusterError(
            f"In[{cluster.cell.label}] still runs on the ranks. Wait for it, or %cluster interrupt it first."
        )
    label = current_label()
    check_syntax(source, f"In[{label}]")
    dead = _dead(cluster)
    if dead and cluster.repair_mode == "auto":
        Page().write(cluster.repair() + "\n", "stderr")
    elif dead:
        ends = dict.fromkeys(describe_end(cluster.deaths[world.engines[rank]]) for rank in dead)
        raise ClusterError(
            f"{named(dead)} dead: {'; '.join(ends)}. Replace with %cluster repair; the others keep their state."
        )
    if world.broken:
        world.form()
    cell = Cell(cluster, source, ranks, label=label, output=output, timeout=timeout)
    with stop_button(cell.request_stop):
        cluster.cell = cell
        try:
            cell.send()
        except BaseException:
            cluster.cell = None
            raise
        if detach:
            threading.Thread(target=_pump_detached, args=(cell,), name=f"nbdist-cell-{label}", daemon=True).start()
        else:
            cell.pump()
    return cell


def train(
    cluster: Cluster,
    steps: int | None,
    *,
    epochs: float | None = None,
    name: str = "trainer",
    checkpoint_every: int | None = None,
    checkpoint_dir: str | None = None,
    detach: bool = False,
) -> Cell:
    """Run ``trainer.train(steps)`` on every rank."""
    if (steps is None) == (epochs is None):
        raise ValueError("Give a number of steps, or epochs: %train 500, or %train --epochs 2.")
    if steps is not None and steps < 1:
        raise ValueError(f"%train {steps}: at least one step.")
    if epochs is not None and not epochs > 0:
        raise ValueError(f"%train --epochs {epochs:g}: more than none.")
    if (checkpoint_every is None) != (checkpoint_dir is None):
        raise ValueError("Checkpoints need both: --checkpoint-every K and --checkpoint-dir DIR.")
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(f"{name!r} is not the name of a Trainer.")
    arguments = [str(steps) if steps is not None else f"epochs={epochs}"]
    if checkpoint_every is not None:
        arguments.append(f"checkpoint_every={checkpoint_every}, checkpoint_dir={checkpoint_dir!r}")
    return run(cluster, f"{name}.train({', '.join(arguments)});", tuple(range(cluster.world_size)), detach=detach)


def adopt(cluster: Cluster, busy: Mapping[int, str]) -> Cell:
    """Take over a cell that ranks of a kept cluster are running: show its output, and let Stop end it."""
    label = int(next(iter(busy.values())).removeprefix("In[").removesuffix("]"))
    cell = Cell(cluster, "", tuple(busy), label=label, output="fold", timeout=None)
    cell.is_adopted = True
    cluster.cell = cell
    threading.Thread(target=_pump_detached, args=(cell,), name=f"nbdist-cell-{label}", daemon=True).start()
    return cell


def current_label() -> int:
    """Give the number of the notebook cell that runs now: ranks call the cell by the same one."""
    from IPython.core.getipython import get_ipython

    shell = get_ipython()
    # not execution_count: IPython 9 raises it before a cell runs, IPython 8 after
    return int(shell.displayhook.prompt_count) if shell is not None else next(_outside_ipython)


def _dead(cluster: Cluster) -> list[int]:
    return [rank for rank, engine in enumerate(cluster.world.engines) if engine in cluster.deaths]


def _pump_detached(cell: Cell) -> None:
    try:
        cell.pump()
    except KeyboardInterrupt:
        return
    except NbdistError as error:
        cell.page.write("\n".join(error._render_traceback_()) + "\n", "stderr")


def _last_lines(text: str, most: int) -> list[str]:
    return [line for line in text.splitlines() if line.strip()][-most:]
