"""5 + 5 steps are 10 steps, bit for bit: in new processes, in the middle of an epoch, with everything random on."""

from __future__ import annotations

import os
import pickle
import random
import signal
import threading
import time

import cloudpickle
import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn

from nbdist.engine.cells.gate import StepStop, current_gate
from nbdist.engine.loading.data import distributed_loader, seed
from nbdist.engine.loading.randomness import random_states, set_random_states
from nbdist.engine.saving.checkpoint import load_checkpoint, save_checkpoint
from nbdist.engine.steps.training import Trainer
from nbdist.engine.strategies.norms import local
from nbdist.engine.strategies.parallel import parallelize
from nbdist.engine.strategies.pipeline import pipeline
from nbdist.engine.strategies.sync import check_sync
from tests.training.models import adamw, apart, loss_fn, net, samples, sgd, weights
from tests.training.ranks import Ranks, form_group


class Augmented(torch.utils.data.Dataset):
    """Draws from all three generators for each item."""

    def __init__(self, count):
        self.inputs, self.targets = samples(count)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        noise = torch.randn(6) * random.random() + numpy.random.rand()
        return self.inputs[index] + 0.1 * noise, self.targets[index]


def dropping_net(start):
    torch.manual_seed(start)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.4), nn.Linear(16, 3))


def make(workers=0, precision="fp32", accumulate=1, start=3, strategy="ddp"):
    seed(start)
    if strategy == "pp":
        whole = dropping_net(start)
        model: nn.Module = pipeline([whole[:3], whole[3:]], n_microbatches=2)
    else:
        model = parallelize(dropping_net(start), strategy)
    seed(start)
    optimizer = adamw(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    loader = distributed_loader(Augmented(28), batch_size=2, num_workers=workers, seed=11)
    return Trainer(model, optimizer, loss_fn, loader, scheduler=scheduler, precision=precision, accumulate=accumulate)


def end_of(trainer):
    state = trainer.optimizer.state_dict()["state"]
    return (
        [local(weight) for weight in weights(trainer.model)],
        [local(state[i]["exp_avg_sq"]) for i in state],
        (trainer.global_step, trainer.epoch, trainer._windows.position, trainer.scheduler.get_last_lr()),
        trainer.scaler and trainer.scaler.get_scale(),
        (torch.rand(1).item(), numpy.random.rand(), random.random()),
    )


def equal(left, right):
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(equal, left, right))
    return left == right


def straight(folder, options, at, steps):
    trainer = make(**options)
    trainer.train(at)
    save_checkpoint(folder, trainer=trainer)
    trainer.train(steps - at)
    return end_of(trainer)


def resumed(folder, options, steps):
    trainer = make(**options, start=8)
    load_checkpoint(folder, trainer=trainer)
    trainer.train(steps - trainer.global_step)
    return end_of(trainer)


@pytest.fixture(scope="module")
def fresh_ranks(tmp_path_factory):
    pool = Ranks(tmp_path_factory.mktemp("fresh"))
    yield pool
    pool.stop()


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(workers=2),
        dict(workers=2, precision="fp16", accumulate=2),
        dict(precision="bf16", accumulate=3),
        dict(precision="fp16", strategy="fsdp"),
        dict(precision="bf16", strategy="pp"),
    ],
    ids=["plain", "workers", "workers fp16", "bf16 accumulated", "fsdp fp16", "pp bf16"],
)
def test_a_run_that_was_saved_and_loaded_in_new_processes_equals_one_that_was_not(
    ranks, fresh_ranks, tmp_path, options
):
    # 7 batches an epoch: step 5 and step 10 are in the middle of one, and without accumulation one ends between
    expected = ranks.run(straight, tmp_path / "saved", options, 5, 10)
    assert equal(fresh_ranks.run(resumed, tmp_path / "saved", options, 10), expected)


def test_resuming_without_the_random_states_would_differ(ranks, tmp_path):
    def resumed_otherwise(folder, steps):
        trainer = make(start=8)
        load_checkpoint(folder, trainer=trainer)
        torch.manual_seed(1)
        trainer.train(steps - trainer.global_step)
        return end_of(trainer)

    expected = ranks.run(straight, tmp_path / "saved", {}, 5, 10)
    assert not equal(ranks.run(resumed_otherwise, tmp_path / "saved", 10), expected)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("at", [3, 7, 9])
def test_a_loop_of_ones_own_goes_on_where_it_was(ranks, tmp_path, workers, at):
    def train(folder, workers, at, load):
        seed(5)
        model = parallelize(dropping_net(5))
        optimizer = sgd(model.parameters())
        loader = distributed_loader(Augmented(28), batch_size=2, num_workers=workers)
        step = 0
        if load:
            seed(9)
            step = load_checkpoint(folder, model=model, optimizer=optimizer, loader=loader)["step"]
        for _epoch in range(loader.epoch, 2):
            for inputs, targets in loader:
                loss_fn(model(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                if step == at and not load:
                    save_checkpoint(folder, model=model, optimizer=optimizer, loader=loader, step=step)
        return weights(model), step

    expected = ranks.run(train, tmp_path / "saved", workers, at, False)
    again = ranks.run(train, tmp_path / "saved", workers, at, True)
    assert [step for _, step in again] == [14, 14]
    assert equal(again, expected)


def test_a_trainer_goes_on_in_the_order_of_the_run_that_was_saved(ranks, tmp_path):
    def go(folder):
        def made(number):
            seed(number)
            model = parallelize(net(number), "ddp")
            loader = distributed_loader(torch.utils.data.TensorDataset(*samples(40)), 4)
            return Trainer(model, adamw(model.parameters()), loss_fn, loader)

        first, second = made(1), made(2)
        first.train(2)
        save_checkpoint(folder, trainer=first).result(30)
        first.train(3)
        load_checkpoint(folder, trainer=second)
        second.train(3)
        return weights(first.model), weights(second.model)

    for straight, resumed in ranks.run(go, tmp_path):
        assert apart(straight, resumed) == 0.0


def test_train_saves_every_k_steps_and_keeps_the_last_three(ranks, tmp_path):
    def train(folder):
        trainer = make()
        trainer.train(9, checkpoint_every=2, checkpoint_dir=str(folder))
        again = make(start=8)
        load_checkpoint(folder, trainer=again)
        return sorted(os.listdir(folder)), again.global_step

    for names, step in ranks.run(train, tmp_path / "saved"):
        assert names == ["latest", "step-4", "step-6", "step-8"]
        assert step == 8


def test_stop_saves_at_the_step_where_it_ends(ranks, tmp_path):
    def train(folder, notes):
        rank = dist.get_rank()
        trainer = make()
        gate = current_gate()

        def control():
            time.sleep(0.2)
            (notes / f"{rank}.part").write_text(str(gate.request_stop()["step"]))
            (notes / f"{rank}.part").rename(notes / str(rank))
            while not all((notes / str(other)).exists() for other in range(2)):
                time.sleep(0.001)
            gate.stop_at(max(int((notes / str(other)).read_text()) for other in range(2)))

        thread = threading.Thread(target=control)
        thread.start()
        with pytest.raises(StepStop):
            trainer.train(1_000_000, checkpoint_every=1_000_000, checkpoint_dir=str(folder))
        thread.join()
        gate.reset()
        again = make(start=8)
        load_checkpoint(folder, trainer=again)
        return trainer.global_step, again.global_step, equal(weights(trainer.model), weights(again.model))

    (tmp_path / "notes").mkdir()
    (step, loaded, same), (others_step, *_) = ranks.run(train, tmp_path / "saved", tmp_path / "notes")
    assert step == loaded == others_step > 0
    assert same


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(checkpoint_every=5), "go together"),
        (dict(checkpoint_every=0, checkpoint_dir="x"), "at least 1"),
    ],
)
def test_half_an_order_to_save_is_refused(options, message):
    model = dropping_net(0)
    with pytest.raises(ValueError, match=message):
        Trainer(model, sgd(model.parameters()), loss_fn, [samples(4)]).train(1, **options)


def test_an_interrupt_while_saving_leaves_the_checkpoint_before(ranks, tmp_path):
    def train(folder):
        trainer = make()
        trainer.train(2, checkpoint_every=2, checkpoint_dir=str(folder))
        handle = save_checkpoint(folder, trainer=trainer, ballast=torch.zeros(4_000_000))
        if dist.get_rank() == 0:
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        handle.result(30)
        return load_checkpoint(folder, trainer=trainer)["ballast"].shape

    assert ranks.run(train, tmp_path / "saved") == [(4_000_000,)] * 2


def test_a_trainer_copied_to_a_new_rank_trains_on_with_the_others(ranks, tmp_path):
    """What ``%cluster repair --copy trainer`` does, with the files in the place of the notebook."""

    def undisturbed():
        trainer = make()
        trainer.train(10)
        return weights(trainer.model)

    def train(folder):
        rank = dist.get_rank()
        trainer = make()
        trainer.train(4)
        dist.barrier()
        dist.destroy_process_group()
        form_group(str(folder / "second"), rank, 2)
        dist.barrier()
        if rank == 0:
            (folder / "part").write_bytes(cloudpickle.dumps(trainer))
            (folder / "part").rename(folder / "copy")
        else:
            states = random_states()
            del trainer
            while not (folder / "copy").exists():
                time.sleep(0.01)
            trainer = pickle.loads((folder / "copy").read_bytes())
            assert "_packed" in trainer.__dict__
            trainer = pickle.loads(cloudpickle.dumps(trainer))  # as the notebook hands it on
            trainer.global_step  # noqa: B018  # the first use
            set_random_states(states)  # those of the rank that died, which nobody has: to compare with the other run
        trainer.train(6)
        return weights(trainer.model), bool(check_sync(trainer.model)), trainer.global_step

    expected = ranks.run(undisturbed)
    for got, whole in zip(ranks.run(train, tmp_path), expected, strict=True):
        assert got[1:] == (True, 10)
        assert equal(got[0], whole)
