"""A small transformer, spread over the ranks by each strategy, and what one process makes of the same batches."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import nbdist
from nbdist.engine.steps.training import Trainer
from nbdist.engine.strategies.dims import data_rank

VOCABULARY, WIDTH, CONTEXT, LAYERS = 16, 16, 8, 4
Batch = tuple[torch.Tensor, torch.Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        q, k, v = (part(h).unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        y: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return y


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.token(tokens) + self.place(torch.arange(tokens.shape[1]))
        return x


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: torch.Tensor) -> Any:
        return self.out(self.norm(x))


def layers(seed: int = 0) -> list[nn.Module]:
    torch.manual_seed(seed)
    return [Embed(), *(Block() for _ in range(LAYERS)), Head()]


def gpt(seed: int = 0) -> nn.Module:
    return nn.Sequential(*layers(seed))


def stages(count: int, seed: int = 0) -> list[nn.Module]:
    """Cut the same layers into stages; ``renamed`` gives their parameters the names of ``gpt``."""
    parts = layers(seed)
    bounds = [round(i * len(parts) / count) for i in range(count + 1)]
    return [nn.Sequential(*parts[a:b]) for a, b in itertools.pairwise(bounds)]


def renamed(state: dict[str, torch.Tensor], count: int) -> dict[str, torch.Tensor]:
    bounds = [round(i * (LAYERS + 2) / count) for i in range(count + 1)]
    names = {}
    for name, value in state.items():
        stage, layer, rest = name.split(".", 2)
        names[f"{bounds[int(stage)] + int(layer)}.{rest}"] = value
    return names


def loss_fn(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def global_batches(sizes: Sequence[int] = (8,) * 5, seed: int = 1) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randint(0, VOCABULARY, (size, CONTEXT), generator=generator),
            torch.randint(0, VOCABULARY, (size, CONTEXT), generator=generator),
        )
        for size in sizes
    ]


def mine(batches: Sequence[Batch]) -> list[Batch]:
    """Give this rank's share of global batches: that of its data-parallel rank."""
    rank, size = data_rank()
    return [(inputs[rank::size], targets[rank::size]) for inputs, targets in batches]


OPTIMIZERS: dict[str, tuple[Callable[..., Any], float]] = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 2e-6),
    "adamw": (lambda p: torch.optim.AdamW(p, lr=1e-3), 2e-4),
}


def alone(
    batches: Sequence[Batch], optimizer: str = "sgd", *, clip: float | None = None, autocast: Any = None
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Train in one process with plain torch; give the weights and the gradient norms."""
    model = gpt()
    update = OPTIMIZERS[optimizer][0](model.parameters())
    norms = []
    for inputs, targets in batches:
        with torch.autocast("cpu", autocast) if autocast else contextlib.nullcontext():
            loss = loss_fn(model(inputs), targets)
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))))
        update.step()
        update.zero_grad()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}, norms


def tp_plan(loss_parallel: bool = False) -> dict[str, Any]:
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    plan: dict[str, Any] = {f"*.{name}": ColwiseParallel() for name in ("q", "k", "v", "up")}
    plan |= {f"*.{name}": RowwiseParallel() for name in ("o", "down")}
    if loss_parallel:
        plan["*.out"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    return plan


def sequence_plan() -> dict[str, Any]:
    """Norms and residual stream sharded along the sequence, layers split between."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
    )

    plan: dict[str, Any] = {
        "0": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1)),
        "*.norm1": SequenceParallel(),
        "*.norm2": SequenceParallel(),
        f"{LAYERS + 1}.norm": SequenceParallel(),
        f"{LAYERS + 1}.out": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    plan |= {f"*.{name}": ColwiseParallel(input_layouts=Shard(1)) for name in ("q", "k", "v", "up")}
    plan |= {f"*.{name}": RowwiseParallel(output_layouts=Shard(1)) for name in ("o", "down")}
    del PrepareModuleInput
    return plan


def built(strategy: str) -> Any:
    """Spread the model as the name says."""
    dims = nbdist.ParallelDims
    made: dict[str, Callable[[], Any]] = {
        "ddp": lambda: nbdist.parallelize(gpt(), "ddp"),
        "ddp bf16 hook": lambda: nbdist.parallelize(gpt(), "ddp", comm_hook="bf16"),
        "ddp bucket view": lambda: nbdist.parallelize(gpt(), "ddp", gradient_as_bucket_view=True),
        "ddp static graph": lambda: nbdist.parallelize(gpt(), "ddp", static_graph=True),
        "zero1": lambda: nbdist.parallelize(gpt(), "zero1"),
        "fsdp": lambda: nbdist.parallelize(gpt(dist.get_rank()), "fsdp"),
        "fsdp zero2": lambda: nbdist.parallelize(gpt(), "fsdp", reshard_after_forward=False),
        "tp": lambda: nbdist.parallelize(gpt(dist.get_rank()), dims(dp_shard=1, tp=2), tp_plan=tp_plan()),
        "tp loss": lambda: nbdist.parallelize(gpt(), dims(dp_shard=1, tp=2), tp_plan=tp_plan(True)),
        "tp sequence": lambda: nbdist.parallelize(gpt(), dims(dp_shard=1, tp=2), tp_plan=sequence_plan()),
        "pp 1f1b": lambda: nbdist.pipeline(stages(2), "1F1B", 4),
        "pp gpipe": lambda: nbdist.pipeline(stages(2), "GPipe", 2),
        "pp interleaved": lambda: nbdist.pipeline(stages(4), "Interleaved1F1B", 4),
        "pp zbv": lambda: nbdist.pipeline(stages(4), "ZBV", 4),
        "pp looped": lambda: nbdist.pipeline(stages(4), "LoopedBFS", 4),
        "pp zero bubble": lambda: nbdist.pipeline(stages(4), "InterleavedZeroBubble", 4),
        "pp dual": lambda: nbdist.pipeline(stages(4), "DualPipeV", 4),
        "hsdp": lambda: nbdist.parallelize(gpt(), dims(dp_replicate=2, dp_shard=2)),
        "fsdp tp": lambda: nbdist.parallelize(gpt(), dims(dp_shard=2, tp=2), tp_plan=tp_plan()),
        "ddp tp": lambda: nbdist.parallelize(gpt(), dims(dp_replicate=2, dp_shard=1, tp=2), tp_plan=tp_plan()),
        "pp ddp": lambda: nbdist.pipeline(stages(2), n_microbatches=2, dims=dims(dp_replicate=2, dp_shard=1, pp=2)),
        "pp fsdp": lambda: nbdist.pipeline(stages(2), n_microbatches=2, dims=dims(pp=2)),
        "pp tp": lambda: nbdist.pipeline(
            stages(2), n_microbatches=2, dims=dims(dp_shard=1, tp=2, pp=2), tp_plan=tp_plan()
        ),
        "pp fsdp tp": lambda: nbdist.pipeline(
            stages(2), n_microbatches=2, dims=dims(dp_shard=2, tp=2, pp=2), tp_plan=tp_plan()
        ),
    }
    return made[strategy]()


STAGES = {name: 4 for name in ("pp interleaved", "pp zbv", "pp looped", "pp zero bubble", "pp dual")}


def trained(
    strategy: str, batches: Sequence[Batch], optimizer: str = "sgd", steps: int | None = None, **options: Any
) -> dict[str, Any]:
    """Train on this rank; give the whole model's weights as far as this rank has them, and the records of the steps."""
    model = built(strategy)
    make = OPTIMIZERS[optimizer][0]
    if strategy == "zero1":
        kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[optimizer]
        chosen = {"sgd": {"lr": 0.1, "momentum": 0.9}, "adamw": {"lr": 1e-3}}[optimizer]
        update = nbdist.zero1(kind, model.parameters(), **chosen)
    else:
        update = make(model.parameters())
    trainer = Trainer(model, update, loss_fn, mine(batches), **options)
    records: list[dict[str, Any]] = []
    run: Any = trainer._named_run()
    run.record = lambda step, *_: records.append(dict(step))
    trainer.train(len(batches) if steps is None else steps)
    return {
        "weights": whole_state(trainer._module, strategy),
        "norms": [record.get("grad_norm") for record in records],
        "losses": [record.get("loss") for record in records],
        "samples": [record.get("samples") for record in records],
        "trainer": trainer if options.get("keep") else None,
    }


def whole_state(module: nn.Module, strategy: str) -> dict[str, torch.Tensor]:
    state = {name: full(value) for name, value in module.state_dict().items()}
    return renamed(state, STAGES.get(strategy, 2)) if strategy.startswith("pp") else state


def full(value: Any) -> torch.Tensor:
    whole: torch.Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return whole.detach().clone()


def farthest(results: Sequence[dict[str, Any]], expected: dict[str, torch.Tensor]) -> float:
    """Give the largest difference of any weight on any rank; all weights must be on some rank."""
    seen: set[str] = set()
    worst = 0.0
    for result in results:
        for name, value in result["weights"].items():
            seen.add(name)
            worst = max(worst, float((value - expected[name]).abs().max()))
    assert seen == expected.keys(), seen ^ expected.keys()
    return worst
