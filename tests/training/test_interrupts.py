"""Stopped and interrupted anywhere, training goes on as if nothing had been."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from nbdist.engine.cells.gate import StepStop, current_gate
from nbdist.engine.loading.data import distributed_loader
from nbdist.engine.steps.training import Trainer
from nbdist.engine.strategies.parallel import parallelize
from nbdist.engine.world import process_group
from tests.training.models import adamw, apart, loss_fn, net, samples, weights
from tests.training.ranks import form_group

STEPS = 250


def make_trainer(pause=0.0):
    def paused(outputs, targets):
        if pause:
            time.sleep(random.random() * pause)
        return loss_fn(outputs, targets)

    dataset = torch.utils.data.TensorDataset(*samples(44))
    model = parallelize(net())
    loader = distributed_loader(dataset, batch_size=2)
    return Trainer(model, adamw(model.parameters()), paused, loader, accumulate=3)


def undisturbed():
    trainer = make_trainer()
    trainer.train(STEPS)
    return weights(trainer.model), trainer.epoch, trainer._windows.position


@pytest.fixture(scope="module")
def expected(ranks):
    return ranks.run(undisturbed)[0]


@pytest.mark.parametrize("seed", range(3))
def test_stop_ends_at_the_same_step_on_all_ranks_and_training_goes_on(ranks, tmp_path, expected, seed):
    def train(seed, folder):
        """The control thread's part in the protocol, with files for the notebook's."""
        rank = dist.get_rank()
        trainer = make_trainer()
        gate = current_gate()

        def control():
            time.sleep(random.Random(f"{seed} {rank}").random() * 0.3)
            (folder / f"{rank}.part").write_text(str(gate.request_stop()["step"]))
            (folder / f"{rank}.part").rename(folder / str(rank))
            while not all((folder / str(other)).exists() for other in range(2)):
                time.sleep(0.001)
            gate.stop_at(max(int((folder / str(other)).read_text()) for other in range(2)))

        thread = threading.Thread(target=control)
        thread.start()
        with pytest.raises(StepStop):
            trainer.train(100_000)
        thread.join()
        stopped = trainer.global_step
        gate.reset()
        trainer.train(max(0, STEPS - stopped))
        return stopped, trainer.global_step, weights(trainer.model)

    (stopped, whole, zero), (others_stopped, _, one) = ranks.run(train, seed, tmp_path)
    assert stopped == others_stopped
    assert apart(zero, one) == 0.0
    if whole == STEPS:
        assert apart(zero, expected[0]) == 0.0


@pytest.mark.parametrize("seed", range(6))
def test_an_interrupt_anywhere_loses_no_step_and_no_batch(ranks, tmp_path, expected, seed):
    def train(folder):
        rank = dist.get_rank()
        trainer = make_trainer(pause=0.0005)
        generation = 0
        while trainer.global_step < STEPS:
            watcher = threading.Thread(target=cut_when_told, args=(folder / f"cut-{generation}",), daemon=True)
            watcher.start()
            (folder / f"ready-{generation}-{rank}").touch()
            try:
                trainer.train(STEPS - trainer.global_step)
            except (KeyboardInterrupt, RuntimeError):
                (folder / f"out-{generation}-{rank}").touch()
                watcher.join()  # a late cut would hit the next group
                while not all((folder / f"out-{generation}-{other}").exists() for other in range(2)):
                    time.sleep(0.002)
                dist.destroy_process_group()
                generation += 1
                form_group(str(folder / f"group-{generation}"), rank, 2)
                trainer._rejoin()  # train() does it too, but the number of steps left is asked for before
        return generation, weights(trainer.model), trainer.epoch, trainer._windows.position

    def disturb():
        chance = random.Random(seed)
        for generation in range(3):
            wait_for(tmp_path / f"ready-{generation}-0", tmp_path / f"ready-{generation}-1")
            time.sleep(0.02 + chance.random() * 0.1)
            for pid in chance.sample(ranks.pids, 2):
                os.kill(pid, signal.SIGINT)
                time.sleep(chance.random() * 0.003)
            time.sleep(0.08)  # the group is quiet by then
            (tmp_path / f"cut-{generation}").touch()
            wait_for(tmp_path / f"out-{generation}-0", tmp_path / f"out-{generation}-1")

    (generations, zero, *place), (_, one, *_) = ranks.run(train, tmp_path, during=disturb)
    assert generations == 3
    assert apart(zero, one) == 0.0
    assert apart(zero, expected[0]) == 0.0
    assert place == list(expected[1:])


def cut_when_told(told: Path) -> None:
    while not told.exists():
        time.sleep(0.002)
    process_group.cut()


def wait_for(*files: Path) -> None:
    deadline = time.monotonic() + 30
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline, f"{[file.name for file in files]} did not come"
        time.sleep(0.002)


def test_an_update_is_not_torn_by_an_interrupt():
    model = net()

    class Interrupting(torch.optim.SGD):
        def step(self, closure=None):
            first, *rest = self.param_groups[0]["params"]
            first.data.add_(1.0)
            signal.raise_signal(signal.SIGINT)
            for parameter in rest:
                parameter.data.add_(1.0)

    trainer = Trainer(model, Interrupting(model.parameters(), lr=0.1), loss_fn, [samples(4)])
    before = weights(model)
    with pytest.raises(KeyboardInterrupt):
        trainer.train(3)
    assert [float((a - b).min()) for a, b in zip(weights(model), before, strict=True)] == pytest.approx([1.0] * 4)
    assert trainer.global_step == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_rank_that_was_cut_off_before_its_update_gets_it_from_the_others(ranks, tmp_path):
    def trainer_of():
        model = parallelize(net())
        optimizer = adamw(model.parameters())
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        loader = distributed_loader(torch.utils.data.TensorDataset(*samples(44)), batch_size=2)
        return Trainer(model, optimizer, loss_fn, loader, scheduler=scheduler)

    def train(store):
        trainer = trainer_of()
        trainer.train(9)
        rank = dist.get_rank()
        if rank == 1:
            update = trainer.optimizer.step

            def interrupted(*_):
                raise KeyboardInterrupt

            trainer.optimizer.step = interrupted
            with pytest.raises(KeyboardInterrupt):
                trainer.train(1)
            trainer.optimizer.step = update
        else:
            trainer.train(1)
        dist.barrier()
        dist.destroy_process_group()
        form_group(store, rank, 2)
        trainer.train(5)
        return weights(trainer.model), trainer.global_step, trainer.epoch, trainer._windows.position, trainer.optimizer

    def undisturbed():
        trainer = trainer_of()
        trainer.train(15)
        return weights(trainer.model), 15, trainer.epoch, trainer._windows.position, trainer.optimizer

    whole, _ = ranks.run(undisturbed)
    for cut in ranks.run(train, str(tmp_path / "second")):
        assert cut[1:4] == whole[1:4]
        assert apart(cut[0], whole[0]) == 0.0
        assert cut[4].param_groups[0]["lr"] == whole[4].param_groups[0]["lr"]
