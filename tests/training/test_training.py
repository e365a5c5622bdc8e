"""The Trainer's numbers against plain torch in one process on the same global batches."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from nbdist.engine.loading.data import distributed_loader
from nbdist.engine.steps.scaler import PiecewiseScaler
from nbdist.engine.steps.training import Trainer
from nbdist.engine.strategies.parallel import parallelize
from tests.training.models import adamw, apart, loss_fn, net, samples, sgd, share, trained_alone, weights

OPTIMIZERS = {"sgd": (sgd, 2e-6), "adamw": (adamw, 2e-4)}


def global_batches(sizes):
    return [samples(size, seed) for seed, size in enumerate(sizes)]


def mine(batches):
    return [share(batch, dist.get_rank(), dist.get_world_size()) for batch in batches]


def joined(batches, windows):
    """Join micro-batches to the batches of an optimizer step."""
    parts = iter(batches)
    whole = []
    for window in windows:
        inputs, targets = zip(*[next(parts) for _ in range(window)], strict=True)
        whole.append((torch.cat(inputs), torch.cat(targets)))
    return whole


def trainer_on(batches, optimizer_of=sgd, **options):
    model = parallelize(net())
    return Trainer(model, optimizer_of(model.parameters()), loss_fn, mine(batches), **options)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_equal_those_of_one_process_on_the_whole_batch(ranks, name):
    optimizer_of, tolerance = OPTIMIZERS[name]
    batches = global_batches([8] * 5)

    def train():
        trainer = trainer_on(batches, optimizer_of)
        trainer.train(5)
        return weights(trainer.model), trainer.global_step, trainer.epoch

    (zero, *place), (one, *_) = ranks.run(train)
    assert apart(zero, one) == 0.0
    assert apart(zero, trained_alone(batches, optimizer_of)) < tolerance
    assert place == [5, 1]


def test_several_calls_go_on_across_epochs(ranks):
    batches = global_batches([8] * 4)

    def train():
        trainer = trainer_on(batches)
        places = []
        for steps in (3, 3, 4):
            trainer.train(steps)
            places.append((trainer.global_step, trainer.epoch))
        return weights(trainer.model), places

    zero, _ = ranks.run(train)
    assert zero[1] == [(3, 0), (6, 1), (10, 2)]
    assert apart(zero[0], trained_alone((batches * 3)[:10])) < 2e-6


@pytest.mark.parametrize("fed", ["by train", "by step"])
def test_accumulation_equals_the_big_batch_with_a_short_last_window(ranks, fed):
    batches = global_batches([4] * 10)

    def train(fed):
        model: Any = parallelize(net())
        reductions = []

        def counting(state, bucket):
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

            reductions.append(bucket.index())
            return allreduce_hook(state, bucket)

        model.register_comm_hook(None, counting)
        optimizer = sgd(model.parameters())
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        trainer = Trainer(model, optimizer, loss_fn, mine(batches), accumulate=4, scheduler=scheduler)
        if fed == "by train":
            trainer.train(3)
        else:
            for number, batch in enumerate(trainer.loader, 1):
                trainer.step(batch, last=number == 10)
        return weights(model), trainer.global_step, scheduler.last_epoch, len(reductions)

    zero, _ = ranks.run(train, fed)
    assert zero[1:] == (3, 3, 3)
    assert apart(zero[0], trained_alone(joined(batches, (4, 4, 2)))) < 1e-6


def test_accumulation_weighs_batches_by_their_samples(ranks):
    batches = global_batches([8, 8, 2, 8, 6])

    def train():
        trainer = trainer_on(batches, accumulate=3)
        trainer.train(2)
        return weights(trainer.model)

    zero, one = ranks.run(train)
    assert apart(zero, one) == 0.0
    assert apart(zero, trained_alone(joined(batches, (3, 2)))) < 1e-6


def recorded(trainer):
    records: list[dict] = []
    run: Any = trainer._named_run()
    run.record = lambda step, *_: records.append(dict(step))
    return records


class Factor(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, inputs):
        return inputs * self.weight


def test_clipping_acts_on_the_true_gradient(ranks):
    def train():
        factor = Factor()  # no operation that autocast would run in fp16, where 3 * 65536 is infinite
        model = parallelize(factor)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        before = factor.weight.item()
        batch = (torch.full((1, 1), 3.0), torch.zeros(1))
        trainer = Trainer(model, optimizer, lambda out, _: out.sum(), [batch], precision="fp16", clip_grad_norm=1.0)
        records = recorded(trainer)
        trainer.train(1)
        return before - factor.weight.item(), records[0]["grad_norm"], records[0]["loss_scale"]

    for applied, norm, scale in ranks.run(train):
        assert applied == pytest.approx(1.0, abs=1e-5)
        assert norm == pytest.approx(3.0, abs=1e-3)
        assert scale == 65536.0


def test_clipping_equals_that_of_one_process(ranks):
    batches = global_batches([8] * 4)

    def train():
        trainer = trainer_on(batches, clip_grad_norm=0.1)
        trainer.train(4)
        return weights(trainer.model)

    zero, _ = ranks.run(train)
    assert apart(zero, trained_alone(batches, clip=0.1)) < 2e-6


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_with_accumulation_and_clipping_stays_near_fp32(ranks, precision):
    batches = global_batches([8] * 8)

    def train():
        trainer = trainer_on(batches, precision=precision, accumulate=4, clip_grad_norm=1.0)
        trainer.train(2)
        return weights(trainer.model), trainer.global_step

    (zero, steps), (one, _) = ranks.run(train)
    assert steps == 2
    assert apart(zero, one) == 0.0
    assert apart(zero, trained_alone(joined(batches, (4, 4)), clip=1.0)) < 1e-2


def test_all_ranks_skip_a_step_whose_gradient_is_infinite_on_one(ranks):
    def train():
        model = parallelize(net())
        outside = nn.Parameter(torch.ones(1))  # DDP does not own it: its gradient is each rank's own
        optimizer = torch.optim.SGD([*model.parameters(), outside], lr=0.1)
        bad = [dist.get_rank() == 1]

        def with_outside(outputs, targets):
            factor = float("inf") if bad[0] else 1.0
            return loss_fn(outputs, targets) + (outside * factor).sum() * 0.001

        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        trainer = Trainer(
            model, optimizer, with_outside, mine(global_batches([8] * 3)), precision="fp16", scheduler=scheduler
        )
        trainer.scaler = PiecewiseScaler("cpu", init_scale=8.0)
        records = recorded(trainer)
        before = weights(model)
        trainer.train(1)
        skipped = weights(model)
        scale = trainer.scaler.get_scale()
        epochs = [scheduler.last_epoch]
        bad[0] = False
        trainer.train(5)
        epochs.append(scheduler.last_epoch)
        return apart(before, skipped), scale, epochs, weights(model), outside.item(), records[0].get("skipped")

    zero, one = ranks.run(train)
    for moved, scale, epochs, *_, skipped in (zero, one):
        assert (moved, scale, epochs, skipped) == (0.0, 4.0, [0, 5], 1.0)
    assert apart(zero[3], one[3]) == 0.0
    assert zero[4] == one[4]


def test_training_through_the_loader_uses_each_sample_once_an_epoch(ranks):
    def train():
        dataset = torch.utils.data.TensorDataset(*samples(24))
        seen = []

        def watched(outputs, targets):
            seen.append(len(targets))
            return loss_fn(outputs, targets)

        model = parallelize(net())
        loader = distributed_loader(dataset, batch_size=4)
        trainer = Trainer(model, sgd(model.parameters()), watched, loader)
        trainer.train(6)
        return sum(seen), trainer.epoch, repr(trainer)

    for count, epoch, shown in ranks.run(train):
        assert (count, epoch) == (24, 2)
        assert shown == "<Trainer step 6, epoch 2, fp32, 4 per rank × 2 ranks × 1 accumulated = 8 samples>"


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("count", [1, 5, 9])
def test_evaluation_counts_each_sample_once(ranks, count, padded):
    def score(count, padded):
        inputs, targets = samples(max(count, 2))
        dataset = torch.utils.data.TensorDataset(inputs[:count], targets[:count])
        if padded:
            loader = torch.utils.data.DataLoader(
                dataset, batch_size=2, sampler=torch.utils.data.DistributedSampler(dataset, shuffle=True)
            )
        else:
            loader = distributed_loader(dataset, batch_size=2, evaluation=True)
        model: Any = parallelize(nn.Sequential(net(), nn.Dropout(0.5)))
        model.module[0][0].eval()
        trainer = Trainer(model, sgd(model.parameters()), loss_fn, loader)
        result = trainer.evaluate(loader, accuracy=lambda outputs, targets: outputs.argmax(1) == targets)
        assert model.training and model.module.training and not model.module[0][0].training
        return result

    zero, one = ranks.run(score, count, padded)
    assert zero == one
    model = net()
    inputs, targets = samples(max(count, 2))
    with torch.no_grad():
        outputs = model(inputs[:count])
    assert zero["samples"] == count
    assert zero["loss"] == pytest.approx(loss_fn(outputs, targets[:count]).item(), abs=1e-6)
    assert zero["accuracy"] == pytest.approx((outputs.argmax(1) == targets[:count]).double().mean().item())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(precision="fp8"), "Unknown precision 'fp8'"),
        (dict(accumulate=0), "at least 1, got 0"),
        (dict(clip_grad_norm=0), "a norm above 0"),
    ],
)
def test_bad_options_are_refused(options, message):
    model = net()
    with pytest.raises(ValueError, match=message):
        Trainer(model, sgd(model.parameters()), loss_fn, [], **options)


def test_an_optimizer_of_other_parameters_is_refused():
    with pytest.raises(ValueError, match="0 of 4 parameters of the model are in the optimizer"):
        Trainer(net(), sgd(net().parameters()), loss_fn, [])


def test_an_empty_loader_and_a_loss_per_sample_are_refused():
    model = net()
    with pytest.raises(ValueError, match="The loader gives no batch"):
        Trainer(model, sgd(model.parameters()), loss_fn, []).train(1)
    trainer = Trainer(model, sgd(model.parameters()), lambda out, _: out.sum(1), [samples(4)])
    with pytest.raises(ValueError, match=r"got shape \(4,\)"):
        trainer.train(1)


def test_a_model_that_is_not_parallelized_is_told(ranks):
    def make():
        model = net()
        with pytest.warns(UserWarning, match="each rank trains its own"):
            Trainer(model, sgd(model.parameters()), loss_fn, [])

    ranks.run(make)


def test_trainers_have_the_same_number_on_a_rank_that_was_replaced(ranks):
    def names():
        from nbdist.engine.steps import rejoin

        rejoin._trainers = 4 if dist.get_rank() == 0 else 0
        trainers = [trainer_on(global_batches([4])) for _ in range(2)]
        for trainer in trainers:
            trainer.train(1)
        return [trainer._run.name for trainer in trainers]

    assert ranks.run(names) == [["train 5", "train 6"]] * 2


@pytest.mark.parametrize(("strategy", "accumulate"), [("ddp", 1), ("ddp", 2), ("fsdp", 1)])
def test_a_compiled_model_trains_alike(ranks, strategy, accumulate):
    batches = global_batches([8] * 4)

    def train():
        model = parallelize(net(), strategy)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch.compile's own imports
            trainer = Trainer(
                model, sgd(model.parameters()), loss_fn, mine(batches), accumulate=accumulate, compile="aot_eager"
            )
            trainer.train(4 // accumulate)
        return [p.full_tensor() if isinstance(p, DTensor) else p for p in weights(model)]

    expected = trained_alone(joined(batches, [accumulate] * (4 // accumulate)))
    for got in ranks.run(train):
        assert apart(got, expected) < 2e-6
