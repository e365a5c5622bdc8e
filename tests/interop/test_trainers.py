"""Accelerate, Hugging Face's Trainer and Lightning, each unchanged in a cell, with telemetry by ``nbdist.log``."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from nbdist.engine.strategies.sync import check_sync
from nbdist.engine.telemetry import meters
from nbdist.engine.telemetry.recorder import recorder
from tests.training.models import loss_fn, net, samples

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
