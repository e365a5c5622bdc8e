"""Each strategy and precision against plain torch in one process: weights after 5 steps on the same global batches."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tests.benchmarks.table import Table
from tests.training.ranks import Ranks
from tests.training.strategies import OPTIMIZERS, alone, farthest, global_batches, trained

TWO = (
    *("ddp", "zero1", "fsdp", "fsdp zero2", "tp", "tp sequence", "tp loss"),
    *("pp gpipe", "pp 1f1b", "pp interleaved", "pp zbv"),
)
FOUR = ("hsdp", "fsdp tp", "ddp tp", "pp ddp", "pp fsdp", "pp tp")
# the difference of two runs in half precision is that of their roundings
TOLERANCE = {"bf16": 5e-4, "fp16": 1e-4}


def run(repeats: int = 1) -> Table:
    table = Table(
        "strategies: largest difference of any weight from one process, after 5 steps on the same global batches",
        ["strategy", "ranks", "optimizer", "precision", "weights differ by", "gradient norms differ by"],
    )
    batches = global_batches()
    with TemporaryDirectory(prefix="bench-") as folder:
        for size, names in ((2, TWO), (4, FOUR)):
            home = Path(folder) / str(size)  # a meeting's file must not be met again by the other pool
            home.mkdir()
            pool = Ranks(home, size)
            try:
                for name in names:
                    for optimizer, precision in (("sgd", "fp32"), ("adamw", "fp32"), ("sgd", "bf16"), ("sgd", "fp16")):
                        _add_row(table, pool, name, optimizer, precision, batches, repeats)
            finally:
                pool.stop()
    table.notes.append(
        "a transformer of 4 blocks; SGD with momentum 0.9, clipped at a norm of 0.2; "
        "the reference in half precision is autocast in one process"
    )
    return table


def _add_row(
    table: Table, pool: Ranks, name: str, optimizer: str, precision: str, batches: list[Any], repeats: int
) -> None:
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    weights, norms = alone(batches, optimizer, clip=0.2, autocast=half)
    tolerance = TOLERANCE.get(precision, OPTIMIZERS[optimizer][1])
    differences, norm_differences = [], []
    for _ in range(repeats):
        results = pool.run(lambda: trained(name, batches, optimizer, clip_grad_norm=0.2, precision=precision))
        differences.append(farthest(results, weights))
        pairs = [zip(result["norms"], norms, strict=True) for result in results]
        norm_differences.append(max(abs(a - b) for pair in pairs for a, b in pair))
    worst = table.verdict(median(differences), at_most=tolerance)
    table.add(name, str(pool.size), optimizer, precision, worst, f"{median(norm_differences):.1e}")
