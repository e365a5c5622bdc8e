"""Steps per second with telemetry on and the panel open, against the same loop in a bare ``torchrun`` script.

Both sides take their time between the end of the first and the end of the last of the measured steps, on rank 0. The
runs of the script and of the notebook alternate; while one trains, the other is not there or idle.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
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
            began = time.perf_counter()
        if step == {warm} + {steps}:
            if dist.get_rank() == 0:
                print("RESULT", ({steps} - 1) / (time.perf_counter() - began), flush=True)
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

OWN_LOOP = """%%distributed
import itertools
for inputs, targets in itertools.islice(nbdist.track(loader), {steps}):
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


def torchrun(script: Path, env: Mapping[str, str]) -> float:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", str(script)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, **env})
    if ran.returncode:
        raise RuntimeError(ran.stderr[-2000:])
    return float(ran.stdout.split("RESULT", 1)[1].split()[0])


def run(repeats: int = 7) -> Table:
    table = Table(
        f"train: steps/s on {RANKS} gloo ranks, panel open (median, range)",
        ["workload", "torchrun", "%train", "ratio"],
    )
    with TemporaryDirectory(prefix="bench-") as home, Kernel(cwd=home, env=private(Path(home))) as kernel:
        kernel.check(f"%load_ext nbdist\ncluster = %cluster start -n {RANKS} --backend gloo", timeout=120)
        kernel.check("%dashboard")

        def notebook(steps: int) -> float:
            kernel.check(f"%train {steps}", timeout=300)
            rate, counted = kernel.check(RATE.format(steps=steps)).text.split("RESULT", 1)[1].split()[:2]
            assert int(counted) == steps, f"{counted} of {steps} steps are in the telemetry"
            return float(rate)

        for name, steps in STEPS.items():
            script = Path(home) / f"{name}_train.py"
            script.write_text(SCRIPT.format(root=str(ROOT), name=name, warm=WARM, steps=steps))
            kernel.check(SETUP.format(root=str(ROOT), name=name), timeout=120)
            notebook(WARM)
            values = interleave(
                {"torchrun": lambda s=script: torchrun(s, private(Path(home))), "nbdist": lambda n=steps: notebook(n)},  # type: ignore[misc]
                repeats,
            )
            table.add(
                name,
                spread(values["torchrun"], "steps/s"),
                spread(values["nbdist"], "steps/s"),
                table.verdict(median(values["nbdist"]) / median(values["torchrun"]), at_least=0.98),
            )
        kernel.check("%cluster stop", timeout=60)
    table.notes.append(
        f"{repeats} runs of each, alternating; {STEPS['digits']} and {STEPS['gpt']} steps a run after {WARM}"
    )
    return table
