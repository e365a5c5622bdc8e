"""Steps per second with telemetry on and the panel open, against the same loop in a bare ``torchrun`` script.

Both sides take their time between the end of the first and the end of the last of the measured steps, on rank 0. The
runs of the script and of the notebook alternate; while one trains, the other is not there or idle. The processor time
of rank 0 for a step is given beside: on a machine that does other work too it is the steadier figure.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from tests.benchmarks.private import private
from tests.benchmarks.table import Table, interleave, spread
from tests.kernel import Kernel

ROOT = Path(__file__).parents[2]
RANKS = 2
STEPS = {"digits": 400, "gpt": 100}
WARM = 20

SCRIPT = """
import sys, time
sys.path.insert(0, {root!r})
import torch, torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from tests.benchmarks.workloads import WORKLOADS

dist.init_process_group("gloo")
work = WORKLOADS[{name!r}]()
model = DistributedDataParallel(work.net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
sampler = DistributedSampler(work.dataset, seed=0)
loader = DataLoader(work.dataset, batch_size=work.batch_size, sampler=sampler)

step = epoch = 0
while step < {warm} + {steps}:
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step == {warm} + 1:
            began, cpu = time.perf_counter(), time.process_time()
        if step == {warm} + {steps}:
            if dist.get_rank() == 0:
                taken, cpu = time.perf_counter() - began, time.process_time() - cpu
                print("RESULT", ({steps} - 1) / taken, cpu / ({steps} - 1), flush=True)
            break
    epoch += 1
dist.destroy_process_group()
"""

SETUP = """%%distributed
import sys
sys.path.insert(0, {root!r})
from tests.benchmarks.workloads import WORKLOADS

work = WORKLOADS[{name!r}]()
model = nbdist.parallelize(work.net, "ddp")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = nbdist.distributed_loader(work.dataset, batch_size=work.batch_size)
trainer = nbdist.Trainer(model, optimizer, F.cross_entropy, loader)
"""

TRAIN = "%train {steps}"

OWN_LOOP = """%%distributed
import itertools
epochs = itertools.chain.from_iterable(itertools.repeat(loader))
for inputs, targets in nbdist.track(itertools.islice(epochs, {steps})):
    loss = F.cross_entropy(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    nbdist.log(loss=loss)
"""

RATE = """
frame = cluster.telemetry.to_frame()
frame = frame[(frame.run == frame.run.iloc[-1]) & (frame["rank"] == 0)].sort_values("step").tail({steps})
print("RESULT", (len(frame) - 1) / (frame.time.iloc[-1] - frame.time.iloc[0]), frame.step.max() - frame.step.min() + 1)
"""

CPU = """%%distributed --ranks 0
import time
print("RESULT", time.process_time())
"""


def results(text: str) -> list[float]:
    """Give the numbers that a cell or a script printed after RESULT."""
    return [float(word) for word in text.split("RESULT", 1)[1].split("\n")[0].split()]


class Side:
    """One side of the comparison: called, it gives steps/s; the processor time of a step it keeps."""

    def __init__(self, measure: Callable[[], Sequence[float]]) -> None:
        self._measure = measure
        self.cpu: list[float] = []

    def __call__(self) -> float:
        rate, cpu = self._measure()
        self.cpu.append(cpu)
        return rate


def torchrun(script: Path, env: Mapping[str, str]) -> Sequence[float]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", str(script)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, **env})
    if ran.returncode and "RESULT" not in ran.stdout:  # gloo now and then aborts a script that is done
        raise RuntimeError(ran.stderr[-2000:])
    return results(ran.stdout)


def notebook(kernel: Kernel, cell: str, steps: int) -> Sequence[float]:
    (before,) = results(kernel.check(CPU).text)
    kernel.check(cell.format(steps=steps), timeout=300)
    (after,) = results(kernel.check(CPU).text)
    rate, counted = results(kernel.check(RATE.format(steps=steps)).text)
    assert counted == steps, f"{counted:.0f} of {steps} steps are in the telemetry"
    return rate, (after - before) / steps


def run(repeats: int = 7) -> Table:
    table = Table(
        f"train: steps/s on {RANKS} gloo ranks, panel open (median, range)",
        ["workload", "side", "steps/s", "CPU per step on rank 0", "steps/s against torchrun", "CPU against torchrun"],
    )
    with TemporaryDirectory(prefix="bench-") as folder, Kernel(cwd=folder, env=private(Path(folder))) as kernel:
        home = Path(folder)
        kernel.check(f"%load_ext nbdist\ncluster = %cluster start -n {RANKS} --backend gloo", timeout=120)
        kernel.check("%dashboard")
        for name, steps in STEPS.items():
            script = home / f"{name}_train.py"
            script.write_text(SCRIPT.format(root=str(ROOT), name=name, warm=WARM, steps=steps))
            kernel.check(SETUP.format(root=str(ROOT), name=name), timeout=120)
            notebook(kernel, TRAIN, WARM)
            notebook(kernel, OWN_LOOP, WARM)
            sides = {
                "torchrun": Side(partial(torchrun, script, private(home))),
                "%train": Side(partial(notebook, kernel, TRAIN, steps)),
                "track and log": Side(partial(notebook, kernel, OWN_LOOP, steps)),
            }
            values = interleave(sides, repeats)
            for side, measured in sides.items():
                cpu = median(measured.cpu)
                ratio = median(values[side]) / median(values["torchrun"])
                table.add(
                    name,
                    side,
                    spread(values[side], "steps/s"),
                    f"{1e3 * cpu:.2f} ms",
                    "" if side == "torchrun" else table.verdict(ratio, at_least=0.98),
                    "" if side == "torchrun" else f"{cpu / median(sides['torchrun'].cpu):.3f}",
                )
        kernel.check("%cluster stop", timeout=60)
    counts = f"{STEPS['digits']} and {STEPS['gpt']} steps a run after {WARM}"
    table.notes.append(f"{repeats} runs of each, alternating; {counts}")
    return table
