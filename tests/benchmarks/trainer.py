"""What the Trainer adds to a step: ``trainer.step`` and ``trainer.train`` against a plain loop over the same batches.

One rank of a gloo group. Blocks of steps alternate between the sides, and every few blocks all sides get new models:
where its tensors lie in memory makes one model some microseconds faster than its copy. What recording costs is
measured apart, as the cost of ``nbdist.track`` and ``nbdist.log`` in the plain loop: any loop that is to be seen on
the panel pays it. Times are those of the processor in the training thread.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from tests.benchmarks.table import Table
from tests.training.ranks import Ranks

STEPS = {"bare": 200, "linear": 100, "gpt": 2}  # in a block
BLOCKS = 6  # of each side before all get new models
LIMIT = 10.0  # µs that the Trainer may add to any step
SHARE = 0.01  # of a step of the GPT


def run(repeats: int = 48) -> Table:
    table = Table(
        "trainer: one step (median of blocks), and what it adds",
        ["workload", "plain loop", "track and log", "trainer.step", "trainer.train", "step adds", "train adds"],
    )
    with TemporaryDirectory(prefix="bench-") as folder:
        pool = Ranks(Path(folder), size=1)
        try:
            for name in STEPS:
                (sides,) = pool.run(_measure, name, repeats)
                plain = sides["plain"]
                # differences within a round: the machine's slow minutes fall on both
                above = {
                    side: median(b - a for a, b in zip(plain, values, strict=True)) for side, values in sides.items()
                }
                bound = SHARE * median(plain) if name == "gpt" else LIMIT
                table.add(
                    name,
                    f"{median(plain):.0f} µs",
                    f"+ {above['recorded']:.1f} µs",
                    *(f"+ {above[side]:.1f} µs" for side in ("step", "train")),
                    *(
                        table.verdict(round(above[side] - above["recorded"], 1), " µs", at_most=round(bound, 1))
                        for side in ("step", "train")
                    ),
                )
        finally:
            pool.stop()
    table.notes.append(f"{repeats} blocks of each, alternating; what is added is beyond what track and log add")
    table.notes.append("bare: one number and no DDP; linear: 4 × 2 under DDP; gpt: 0.8 million parameters under DDP")
    return table


def _measure(name: str, repeats: int) -> dict[str, list[float]]:
    import copy
    import itertools
    from collections.abc import Callable
    from time import thread_time

    import torch
    from torch.nn import functional as F

    import nbdist
    from nbdist.engine.steps.training import Trainer
    from nbdist.engine.telemetry.recorder import recorder

    class Bare(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(()))

        def forward(self, inputs: Any) -> torch.Tensor:
            return self.weight

    batches: list[Any] = [(torch.randn(4, 4), torch.tensor([0, 1, 0, 1]))] * 20
    net: torch.nn.Module = Bare() if name == "bare" else torch.nn.Linear(4, 2)
    loss_fn: Callable[[Any, Any], torch.Tensor] = F.cross_entropy
    if name == "bare":
        loss_fn = lambda outputs, targets: outputs * 2  # noqa: E731
    if name == "gpt":
        from tests.benchmarks.workloads import gpt

        work = gpt()
        net = work.net
        loader = torch.utils.data.DataLoader(work.dataset, batch_size=work.batch_size)
        batches = [tuple(batch) for batch in itertools.islice(loader, 20)]

    def fresh() -> tuple[Any, Any]:
        model = copy.deepcopy(net) if name == "bare" else nbdist.parallelize(copy.deepcopy(net), "ddp")
        return model, torch.optim.SGD(model.parameters(), lr=1e-3)

    steps = STEPS[name]
    endless = itertools.cycle(batches)

    def drawn() -> Any:
        return itertools.islice(endless, steps)

    def plain(model: Any, optimizer: Any) -> None:
        for inputs, targets in drawn():
            loss = loss_fn(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    def recorded(model: Any, optimizer: Any) -> None:
        for inputs, targets in nbdist.track(drawn()):
            loss = loss_fn(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            nbdist.log(loss=loss)

    def stepped(trainer: Trainer) -> None:
        for batch in drawn():
            trainer.step(batch)

    published = recorder.publish
    recorder.start(lambda payload: None, 0, 1)
    values: dict[str, list[float]] = {side: [] for side in ("plain", "recorded", "step", "train")}
    try:
        for number in range(repeats):
            if number % BLOCKS == 0:
                one, other = (Trainer(*fresh(), loss_fn, batches) for _ in range(2))
                alone, seen = fresh(), fresh()
                sides: dict[str, Callable[[], None]] = {
                    "plain": lambda pair=alone: plain(*pair),  # type: ignore[misc]
                    "recorded": lambda pair=seen: recorded(*pair),  # type: ignore[misc]
                    "step": lambda trainer=one: stepped(trainer),  # type: ignore[misc]
                    "train": lambda trainer=other: trainer.train(steps),  # type: ignore[misc]
                }
                for warm in sides.values():
                    warm()
            for side in list(sides)[:: 1 if number % 2 else -1]:
                began = thread_time()
                sides[side]()
                values[side].append((thread_time() - began) / steps * 1e6)
    finally:
        recorder.publish = published
    return values
