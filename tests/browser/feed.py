"""A cluster without ranks for tests of the panel: it trains nothing, and its records go the way of real ones."""

from __future__ import annotations

import math
import threading
import time

from nbdist.telemetry import Telemetry


class FeedCluster:
    """What a panel needs of a cluster, fed by a thread at `rate` steps/s."""

    def __init__(self, world_size=2, rate=50.0):
        self.world_size = world_size
        self.rate = rate
        self.telemetry = Telemetry(world_size)
        self.stopped = threading.Event()
        self._running = False
        self._runs = 0
        self._thread = None

    def chips(self):
        state = "running" if self._running else "idle"
        return [(rank, state, "cell 3, line 1" if self._running else "") for rank in range(self.world_size)]

    def is_running(self):
        return self._running

    def request_stop(self):
        self.stopped.set()

    def train(self, steps, *, first=0.0):
        """Feed a run and wait for it, as a cell in the foreground does; returns the steps that were done."""
        self.start(steps, first=first)
        self._thread.join()
        return self.telemetry.current.step

    def start(self, steps, *, first=0.0):
        """Feed a run from a thread, as a detached cell does."""
        self.stopped.clear()
        self._running = True
        self._runs += 1
        self._thread = threading.Thread(target=self._feed, args=(f"train {self._runs}", steps, first), daemon=True)
        self._thread.start()

    def _feed(self, run, steps, first):
        self._event("begin", run, 0, total=steps, note="2 ranks x 32 samples = 64 a step")
        time.sleep(first)
        step = 0
        while step < steps and not self.stopped.is_set():
            step += 1
            now = time.time()
            for rank in range(self.world_size):
                loss = 2.3 * math.exp(-step / 150) + 0.1 * rank + 0.02 * math.sin(step)
                record = {"run": run, "step": step, "rank": rank, "time": now, "loss": loss, "samples": 32, "epoch": 0}
                record["values"] = {"accuracy": 1 - math.exp(-step / 100)}
                self.telemetry.receive({"kind": "steps", "rank": rank, "dropped": 0, "records": [record]})
            time.sleep(1 / self.rate)
        self._running = False
        self._event("end", run, step, reason="stopped" if self.stopped.is_set() else "done")

    def _event(self, kind, run, step, **more):
        for rank in range(self.world_size):
            event = {"kind": kind, "run": run, "rank": rank, "world_size": self.world_size, "time": time.time()}
            self.telemetry.receive({"kind": "event", "event": {**event, "step": step, **more}})
