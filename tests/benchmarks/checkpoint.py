"""How long ``save_checkpoint`` keeps training waiting, against the same save with ``asynchronous=False``.

Two ranks under gloo, a model with AdamW of about 200 MB; the two kinds of saving alternate, into the same folder, and
between two of them the model trains a step. Also the time of the writing thread, and of ``check_sync``.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from tests.benchmarks.table import Table, spread
from tests.training.ranks import Ranks

LAYERS, WIDTH = 16, 1024


def run(repeats: int = 7) -> Table:
    table = Table("checkpoint: how long training waits", ["what", "seconds (median, range)", "bound"])
    with TemporaryDirectory(prefix="bench-") as folder:
        pool = Ranks(Path(folder))
        try:
            sides, size = pool.run(_measure, Path(folder) / "checkpoints", repeats)[0]
        finally:
            pool.stop()
    waits = median(sides["asynchronous"]) / median(sides["synchronous"])
    table.add(f"asynchronous=False, {size / 1e6:.0f} MB", spread(sides["synchronous"], "s"), "—")
    table.add("asynchronous", spread(sides["asynchronous"], "s"), f"{table.verdict(waits, at_most=0.1)} of the above")
    table.add("  until it is written", spread(sides["written"], "s"), "—")
    share = median(sides["check_sync"]) / (100 * median(sides["step"]))
    table.add("a training step", spread(sides["step"], "s"), "—")
    table.add("check_sync", spread(sides["check_sync"], "s"), f"{table.verdict(share, at_most=0.01)} of 100 steps")
    return table


def _measure(folder: Path, repeats: int) -> tuple[dict[str, list[float]], int]:
    from time import perf_counter

    import torch
    import torch.distributed as dist
    from torch import nn

    from nbdist.engine.saving.checkpoint import save_checkpoint
    from nbdist.engine.strategies.parallel import parallelize
    from nbdist.engine.strategies.sync import check_sync

    model = parallelize(nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs = torch.randn(32, WIDTH)
    sides: dict[str, list[float]] = {
        name: [] for name in ("synchronous", "asynchronous", "written", "step", "check_sync")
    }

    def timed(name: str, call: Any) -> Any:
        dist.barrier()
        began = perf_counter()
        value = call()
        sides[name].append(perf_counter() - began)
        return value

    def step() -> None:
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    for number in range(repeats + 1):
        timed("step", step)
        timed("synchronous", lambda: save_checkpoint(folder, keep=2, asynchronous=False, **state))
        timed("step", step)
        began = perf_counter()
        handle = timed("asynchronous", lambda: save_checkpoint(folder, keep=2, **state))
        path = handle.result(120)
        sides["written"].append(perf_counter() - began)
        timed("check_sync", lambda: check_sync(model))
        if number == 0:  # the first of each plans, and touches the memory that it copies to
            for values in sides.values():
                values.clear()
    size = sum(file.stat().st_size for file in path.iterdir())
    dist.barrier()
    return sides, size
