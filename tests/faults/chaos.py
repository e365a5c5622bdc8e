"""Random faults between training steps: ``python -m tests.faults.chaos --faults 200 [--seed 7] [--ranks 4]``.

After each fault the next cell's all_reduce must be right within ten seconds, the variables of living ranks unchanged,
the number of processes as before, and no reply lost. The seed is printed: the same one repeats the same faults.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import secrets
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import ClassVar

import psutil

from nbdist import Cluster, DistributedError
from nbdist.errors import NbdistError
from tests.faults.faults import run, stop

SETUP = """
import os, sys, time
from torch.nn.parallel import DistributedDataParallel as DDP
kept = {rank: 100 + rank}
torch.manual_seed(0)
samples = [(torch.randn(4), torch.tensor(i % 2)) for i in range(64)]
loader = nbdist.distributed_loader(samples, batch_size=8)
model = nbdist.parallelize(nn.Linear(4, 2), "ddp")
trainer = nbdist.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), F.cross_entropy, loader)
"""


class Chaos:
    """Does faults to one cluster, mends it, and checks that nothing was lost."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster = cluster
        self.random = random.Random(seed)
        self.kept: dict[int, int] = {}  # rank -> what it has to remember
        self.done: Counter[str] = Counter()
        self.slowest = 0.0
        cluster.run(SETUP, output="none")
        self.kept = {rank: 100 + rank for rank in range(cluster.world_size)}
        self.processes = self.count()

    def count(self) -> int:
        """The processes of this cluster: engines, nannies, agent, controller."""
        return sum(p.status() != psutil.STATUS_ZOMBIE for p in psutil.Process().children(recursive=True))

    def one(self) -> str:
        """Do one fault and check the cluster; give the fault's name."""
        name = self.random.choice(sorted(self.faults))
        self.faults[name](self)
        self.check(name)
        self.done[name] += 1
        return name

    def rank(self) -> int:
        return self.random.randrange(self.cluster.world_size)

    def soon(self) -> float:
        return self.random.uniform(0.02, 0.4)

    def check(self, name: str) -> None:
        cluster = self.cluster
        lost = [rank for rank, engine in enumerate(cluster.world.engines) if engine in cluster.deaths]
        if lost:
            cluster.repair("trainer" if len(lost) < cluster.world_size else None)
            self.kept = {rank: value for rank, value in self.kept.items() if rank not in lost}
        began = time.monotonic()
        cluster.run(
            "x_ = torch.ones(1); dist.all_reduce(x_); assert x_.item() == world_size, x_", output="none", timeout=15
        )
        took = time.monotonic() - began
        self.slowest = max(self.slowest, took)
        assert took < 10, f"after {name} the next cell took {took:.1f} s"
        if len(lost) == cluster.world_size:
            cluster.run(SETUP, output="none")
            self.kept = {rank: 100 + rank for rank in range(cluster.world_size)}
        elif lost:
            cluster.run(
                "import os, sys, time\nfrom torch.nn.parallel import DistributedDataParallel as DDP", output="none"
            )
            for rank in lost:
                cluster.run("kept = {rank: 100 + rank}", [rank], output="none")
                self.kept[rank] = 100 + rank
        assert cluster.pull("kept") == [{rank: self.kept[rank]} for rank in range(cluster.world_size)], name
        cluster.run("trainer.train(3); assert bool(nbdist.check_sync(trainer.model))", output="none", timeout=60)
        deadline = time.monotonic() + 5  # a killed engine's nanny takes a moment to end
        while self.count() > self.processes and time.monotonic() < deadline:
            time.sleep(0.05)
        assert self.count() <= self.processes, f"after {name}: {self.count()} processes, {self.processes} before"
        assert cluster.cell is None

    def fails(self, source: str, **options: object) -> None:
        outcome = run(self.cluster, source, timeout=60, **options)  # type: ignore[arg-type]
        assert isinstance(outcome.error, NbdistError | KeyboardInterrupt), outcome

    def stops(self, source: str, *, twice: bool = False) -> None:
        after = self.soon() + 0.2
        actions = [(after, stop)] + ([(after + 0.3, stop)] if twice else [])
        outcome = run(self.cluster, source, actions=actions, timeout=60)
        assert isinstance(outcome.error, KeyboardInterrupt | DistributedError), outcome

    # -- the faults --------------------------------------------------------------------------------------------------

    def error_alone(self) -> None:
        self.fails(f"if rank == {self.rank()}: raise ValueError('chaos')\ntime.sleep(30)")

    def error_while_others_wait(self) -> None:
        self.fails(f"if rank == {self.rank()}: raise ValueError('chaos')\ndist.all_reduce(torch.ones(1000))")

    def error_in_ddp(self) -> None:
        self.fails(
            f"ddp = DDP(nn.Linear(4, 1))\nfor i in range(9):\n    if rank == {self.rank()} and i == 3: 1 / 0\n"
            "    ddp(torch.ones(2, 4)).sum().backward()"
        )

    def stop_in_python(self) -> None:
        self.stops("while True: pass")

    def stop_in_sleep(self) -> None:
        self.stops("time.sleep(60)")

    def stop_in_all_reduce(self) -> None:
        self.stops("while True: dist.all_reduce(torch.ones(1000))")

    def stop_in_ddp(self) -> None:
        self.stops("ddp = DDP(nn.Linear(4, 1))\nwhile True: ddp(torch.ones(2, 4)).sum().backward()")

    def stop_in_training(self) -> None:
        self.stops("trainer.train(10**6)")

    def stop_in_loader(self) -> None:
        self.stops("for batch in torch.utils.data.DataLoader(range(10**6), num_workers=1): dist.all_reduce(batch)")

    def stop_twice(self) -> None:
        self.stops(f"if rank == {self.rank()}: time.sleep(60)\nelse: dist.all_reduce(torch.ones(1))", twice=True)

    def uneven_steps(self) -> None:
        self.fails(f"for i in range(3 if rank == {self.rank()} else 2): dist.all_reduce(torch.ones(1))")

    def subset_barrier(self) -> None:
        self.fails("dist.barrier()", ranks=[self.rank()])

    def other_collective(self) -> None:
        self.fails(f"t = torch.ones(4)\ndist.all_reduce(t) if rank == {self.rank()} else dist.broadcast(t, 0)")

    def mismatch_under_guard(self) -> None:
        self.cluster.debug(True)
        self.fails(f"dist.all_reduce(torch.ones(4 if rank == {self.rank()} else 8))")
        self.cluster.debug(False)

    def killed_idle(self) -> None:
        os.kill(self.cluster.pids[self.rank()], signal.SIGKILL)
        deadline = time.monotonic() + 5
        while not self.cluster.deaths and time.monotonic() < deadline:
            time.sleep(0.02)
        assert self.cluster.deaths

    def killed_in_collective(self) -> None:
        rank = self.rank()
        pid = self.cluster.pids[rank]
        outcome = run(
            self.cluster,
            "while True: dist.all_reduce(torch.ones(1000))",
            actions=[(self.soon(), lambda: os.kill(pid, signal.SIGKILL))],
            timeout=60,
        )
        assert isinstance(outcome.error, DistributedError), outcome
        assert outcome.error.rank == rank, outcome

    def aborted(self) -> None:
        self.fails(f"if rank == {self.rank()}: os.abort()\ndist.barrier()")

    def exited(self) -> None:
        self.fails(f"if rank == {self.rank()}: os._exit(3)\ndist.barrier()")

    def frozen_for_a_while(self) -> None:
        pid = self.cluster.pids[self.rank()]
        thaw = self.soon() + 0.8

        def freeze() -> None:
            os.kill(pid, signal.SIGSTOP)

        def resume() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

        outcome = run(
            self.cluster,
            "for i in range(20): dist.all_reduce(torch.ones(10)); time.sleep(0.02)",
            actions=[(0.1, freeze), (thaw, resume)],
            timeout=60,
        )
        resume()
        assert outcome.error is None, outcome

    faults: ClassVar[dict[str, Callable[[Chaos], None]]] = {
        f.__name__: f
        for f in (
            error_alone,
            error_while_others_wait,
            error_in_ddp,
            stop_in_python,
            stop_in_sleep,
            stop_in_all_reduce,
            stop_in_ddp,
            stop_in_training,
            stop_in_loader,
            stop_twice,
            uneven_steps,
            subset_barrier,
            other_collective,
            mismatch_under_guard,
            killed_idle,
            killed_in_collective,
            aborted,
            exited,
            frozen_for_a_while,
        )
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    parser.add_argument("--ranks", type=int, default=3)
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    began = time.monotonic()
    with Cluster(options.ranks, backend="gloo").start() as cluster:
        chaos = Chaos(cluster, options.seed)
        for i in range(options.faults):
            name = chaos.one()
            print(f"{i + 1:4} {name}", flush=True)
        print(
            f"{options.faults} faults on {options.ranks} ranks, seed {options.seed}: none lost; slowest next cell "
            f"{chaos.slowest:.2f} s; generation {cluster.world.generation}; {time.monotonic() - began:.0f} s\n"
            + ", ".join(f"{name} {count}" for name, count in sorted(chaos.done.items()))
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
