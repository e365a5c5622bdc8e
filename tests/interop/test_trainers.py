"""Accelerate, Hugging Face's Trainer, Lightning, DeepSpeed and megatron-core, unchanged in a cell, with telemetry."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from nbdist.engine.strategies.sync import check_sync
from nbdist.engine.telemetry import meters
from nbdist.engine.telemetry.recorder import recorder
from tests.training.models import apart, loss_fn, net, samples, share, weights

pytestmark = pytest.mark.interop


class Samples(torch.utils.data.Dataset):
    def __init__(self):
        self.inputs, self.targets = samples(32)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.targets[index]


def quietly(function, *arguments):
    """Run a cell as a rank does: other libraries warn of what they like, and their variables are those of torchrun."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29599", TORCHELASTIC_RUN_ID="nbdist", GROUP_RANK="0")
    warnings.simplefilter("ignore")
    logged: list[Any] = []
    put, recorder.put = recorder.put, logged.append  # type: ignore[assignment]
    try:
        return *function(*arguments), sum("loss" in str(item) for item in logged), dist.is_initialized()
    finally:
        recorder.put = put
        warnings.simplefilter("error")


def checked(outcomes, steps):
    for in_sync, taken, logged, group_is_there in outcomes:
        assert in_sync
        assert taken == steps
        assert logged > 0
        assert group_is_there


def with_accelerate():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(Samples(), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps = 0
    for inputs, targets in meters.track(loader):
        loss = loss_fn(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        meters.log(loss=loss)
        steps += 1
    return bool(check_sync(model)), steps


def test_accelerate_trains_in_the_group_that_is_there(ranks):
    pytest.importorskip("accelerate")
    checked(ranks.run(quietly, with_accelerate), 2)


def with_transformers(folder):
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()

        def forward(self, x, labels):
            logits = self.net(x)
            return {"loss": loss_fn(logits, labels), "logits": logits}

    class Named(Samples):
        def __getitem__(self, index):
            x, label = super().__getitem__(index)
            return {"x": x, "labels": label}

    class Log(TrainerCallback):
        def on_log(self, arguments, state, control, logs=None, **_):
            for name, value in logs.items():
                meters.log(**{name: float(value)})

    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        ddp_backend="gloo",
        max_steps=4,
        per_device_train_batch_size=8,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1,
    )
    trainer = Trainer(Model(), arguments, train_dataset=Named(), callbacks=[Log()])
    steps = trainer.train().global_step
    return bool(check_sync(trainer.model)), steps


def test_hugging_face_trainer_trains_in_the_group_that_is_there(ranks, tmp_path):
    pytest.importorskip("transformers")
    checked(ranks.run(quietly, with_transformers, str(tmp_path)), 4)


def with_lightning():
    import lightning
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    # Lightning's own "ddp" starts processes, and refuses to in a notebook. Here they are running already:
    class HereDDP(DDPStrategy):
        def _configure_launcher(self):
            self._launcher = None

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net()

        def training_step(self, batch, index):
            loss = loss_fn(self.net(batch[0]), batch[1])
            meters.log(loss=loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=HereDDP(cluster_environment=TorchElasticEnvironment(), process_group_backend="gloo"),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader(Samples(), batch_size=8))
    return bool(check_sync(module)), trainer.global_step


def test_lightning_trains_in_the_group_that_is_there_by_a_strategy_of_three_lines(ranks):
    pytest.importorskip("lightning")
    checked(ranks.run(quietly, with_lightning), 2)


def with_deepspeed(stages):
    os.environ.update(
        DS_ACCELERATOR="cpu", LOCAL_RANK=os.environ["RANK"], LOCAL_SIZE="2", CROSS_RANK="0", CROSS_SIZE="1"
    )
    import deepspeed

    alone = net()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for seed in range(5):
        inputs, targets = samples(8, seed)
        loss_fn(alone(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    steps, near = 0, True
    for stage in stages:
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, dist_init_required=False, config=config)
        for batch in meters.track([share(samples(8, seed), dist.get_rank(), 2) for seed in range(5)]):
            inputs, targets = batch
            loss = loss_fn(engine(inputs), targets)
            engine.backward(loss)
            engine.step()
            meters.log(loss=loss)
            steps += 1
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=stage == 3):
            near = near and apart(weights(engine.module), weights(alone)) < 2e-6
    return near, steps


def test_deepspeed_shards_in_the_group_that_is_there_and_equals_one_process(ranks):
    pytest.importorskip("deepspeed")
    try:
        checked(ranks.run(quietly, with_deepspeed, (1, 2, 3)), 15)
    finally:
        for left in Path("/dev/shm").glob("deepspeed_allreduce_buffer_*_29599_*"):  # DeepSpeed never removes it
            left.unlink()


def with_megatron():
    from megatron.core import ModelParallelConfig, parallel_state
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    config = ModelParallelConfig(tensor_model_parallel_size=2, use_cpu_initialization=True)
    options: Any = {"config": config, "init_method": nn.init.xavier_normal_, "bias": True}
    up = ColumnParallelLinear(6, 16, gather_output=False, **options)
    down = RowParallelLinear(16, 3, input_is_parallel=True, skip_bias_add=False, **options)
    model = nn.Sequential(up, down)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    alone = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    with torch.no_grad():
        for whole, part, axis in ((alone[0], up, 0), (alone[2], down, 1)):
            whole.weight.copy_(together(part.weight, axis))
            whole.bias.copy_(together(part.bias, 0) if axis == 0 else part.bias)
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    steps = 0
    for inputs, targets in meters.track([samples(8, seed) for seed in range(5)]):
        hidden, _ = up(inputs)
        outputs, _ = down(torch.relu(hidden))
        loss = loss_fn(outputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        meters.log(loss=loss)
        loss_fn(alone(inputs), targets).backward()
        plain.step()
        plain.zero_grad()
        steps += 1
    split = [together(up.weight, 0), together(up.bias, 0), together(down.weight, 1), down.bias]
    parallel_state.destroy_model_parallel()
    return apart(split, weights(alone)) < 2e-6, steps


def together(part: torch.Tensor, axis: int) -> torch.Tensor:
    """Give the whole of a tensor that is split over two ranks."""
    parts = [torch.empty_like(part) for _ in range(2)]
    dist.all_gather(parts, part.detach().contiguous())
    return torch.cat(parts, axis)


def test_layers_of_megatron_core_split_in_the_group_that_is_there_and_equal_one_process(ranks):
    pytest.importorskip("megatron.core")
    checked(ranks.run(quietly, with_megatron), 5)
