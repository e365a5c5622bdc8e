"""Uneven loaders, epochs, own loops, agreement, learning rates: the arithmetic around the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import nbdist
from nbdist.engine.steps.training import Trainer
from tests.training.models import apart, loss_fn, net, samples, sgd, trained_alone, weights
from tests.training.test_training import global_batches, joined, mine, trainer_on


class Stream:
    """A loader that does not tell its length."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


def test_uneven_loaders_are_refused_with_their_lengths(ranks):
    def train():
        model = nbdist.parallelize(net())
        trainer = Trainer(model, sgd(model.parameters()), loss_fn, [samples(4)] * (3 + dist.get_rank()))
        with pytest.raises(ValueError) as error:
            trainer.train(1)
        return str(error.value)

    zero, one = ranks.run(train)
    assert zero == one
    assert zero.startswith("The loaders are uneven: 4 batches on rank 1, 3 on rank 0. ")


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(("rule", "accumulate"), [("drop", 1), ("join", 1), ("join", 2)])
def test_uneven_passes_use_the_samples_that_there_are(ranks, strategy, rule, accumulate, known):
    shares = [[samples(4, seed) for seed in (0, 1, 2)], [samples(4, seed) for seed in (10, 11, 12, 13, 14)]]

    def train():
        model = nbdist.parallelize(net(), strategy)
        loader: Any = shares[dist.get_rank()]
        if not known:
            loader = Stream(loader)
        trainer = Trainer(model, sgd(model.parameters()), loss_fn, loader, uneven=rule, accumulate=accumulate)
        records: list[dict] = []
        run: Any = trainer._named_run()
        run.record = lambda step, *_: records.append(dict(step))
        steps = {("drop", 1): 3, ("join", 1): 5, ("join", 2): 3}[rule, accumulate]
        if known:
            trainer.train(epochs=1)
        else:
            trainer.train(steps)
        whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
        return [p.detach().clone() for p in whole], trainer.global_step, [r.get("samples") for r in records]

    zero, one = ranks.run(train)
    length = 3 if rule == "drop" else 5
    steps: list[list[list]] = []  # step -> rank -> batches
    for first in range(0, length, accumulate):
        windows = [own[:length][first : first + accumulate] for own in shares]
        steps.append([window for window in windows if window])
    model = net()
    optimizer = sgd(model.parameters())
    for windows in steps:
        for window in windows:
            inputs, targets = (torch.cat(parts) for parts in zip(*window, strict=True))
            (loss_fn(model(inputs), targets) / len(windows)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert zero[1] == one[1] == len(steps)
    assert apart(zero[0], one[0]) == 0.0
    assert apart(zero[0], weights(model)) < 2e-6
    assert sum(n or 0 for n in zero[2]) == 4 * min(3, length)


def test_epochs_are_counted_in_steps_with_a_short_last_window(ranks):
    def train():
        trainer = trainer_on(global_batches([8] * 5), accumulate=2)
        trainer.train(epochs=2.0)
        places = [(trainer.global_step, trainer.epoch)]
        trainer.train(epochs=0.5)
        return [*places, (trainer.global_step, trainer.epoch)]

    assert ranks.run(train) == [[(6, 2), (8, 2)]] * 2


def test_train_takes_steps_or_epochs():
    trainer = Trainer(model := net(), sgd(model.parameters()), loss_fn, Stream([samples(4)]))
    with pytest.raises(ValueError, match="one of the two"):
        trainer.train()
    with pytest.raises(ValueError, match="one of the two"):
        trainer.train(1, epochs=1)
    with pytest.raises(ValueError, match="does not tell its length"):
        trainer.train(epochs=1)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_an_own_loop_accumulates_and_clips_by_the_small_pieces(ranks, strategy):
    batches = global_batches([8, 8, 4, 8, 6])

    def train():
        model: Any = nbdist.parallelize(net(), strategy)
        optimizer = sgd(model.parameters())
        norms = []
        for window in nbdist.accumulate(model, mine(batches), 3):
            for inputs, targets in window:
                window.scaled(loss_fn(model(inputs), targets)).backward()
            norms.append(nbdist.clip_grad_norm(model, 0.2))
            optimizer.step()
            optimizer.zero_grad()
        whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
        return [p.detach().clone() for p in whole], norms

    (zero, norms), (one, others) = ranks.run(train)
    assert apart(zero, one) == 0.0
    assert norms == others and all(type(norm) is float for norm in norms)
    assert apart(zero, trained_alone(joined(batches, (3, 2)), clip=0.2)) < 2e-6


def test_ranks_decide_alike(ranks):
    def decide():
        rank = dist.get_rank()
        flags = (rank == 1, True, torch.tensor(False))
        return [nbdist.any_rank(flag) for flag in flags], [nbdist.all_ranks(flag) for flag in flags]

    assert ranks.run(decide) == [([True, True, False], [False, True, False])] * 2
    assert nbdist.any_rank(True) and not nbdist.all_ranks(False)


def test_the_learning_rate_is_scaled_when_asked(ranks):
    def scaled():
        return [nbdist.scale_lr(0.1, rule, base_batch_size=256, batch_size=512) for rule in ("linear", "sqrt", "none")]

    for rates in ranks.run(scaled):
        assert rates == pytest.approx([0.4, 0.2, 0.1])
    with pytest.raises(ValueError, match="Unknown rule 'cubic'"):
        nbdist.scale_lr(0.1, "cubic", base_batch_size=1, batch_size=1)


def test_warm_up_rises_evenly_to_the_whole_rate():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = nbdist.warmup(optimizer, 4, then=lambda k: 0.5**k)
    rates = []
    for _ in range(7):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 0.5, 0.25]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tp"])
def test_an_infinite_gradient_on_one_rank_is_skipped_by_all(ranks, strategy):
    from tests.training.strategies import built
    from tests.training.strategies import global_batches as tokens
    from tests.training.strategies import loss_fn as token_loss
    from tests.training.strategies import mine as my_tokens

    def train():
        model = built(strategy)
        bad = [dist.get_rank() == 1]

        def loss(outputs, targets):
            value = token_loss(outputs, targets)
            return value * float("inf") if bad[0] else value

        trainer = Trainer(model, sgd(model.parameters()), loss, my_tokens(tokens()), precision="fp16")
        before = [p.detach().clone() for p in model.parameters()]
        trainer.train(1)
        pieces = zip(model.parameters(), before, strict=True)
        same = all(torch.equal(getattr(a, "_local_tensor", a), getattr(b, "_local_tensor", b)) for a, b in pieces)
        bad[0] = False
        scale = trainer.scaler.get_scale()
        trainer.train(2)
        return same, scale, trainer.scaler.get_scale()

    for same, scale, after in ranks.run(train):
        assert same
        assert scale == after == 32768.0
