"""Compressed gradients, and models that were changed after wrapping."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import nbdist
from nbdist.engine.steps.training import Trainer
from tests.training.models import apart, loss_fn, net, samples, share, weights
from tests.training.ranks import Ranks
from tests.training.strategies import alone, farthest, global_batches, trained


def wide():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 3))


def wide_batches(count):
    generator = torch.Generator().manual_seed(dist.get_rank())
    batch = torch.randn(4, 256, generator=generator), torch.randint(0, 3, (4,), generator=generator)
    return [batch] * count


@pytest.mark.parametrize(("name", "most"), [("fp16", 0.5), ("bf16", 0.5), ("powersgd", 0.1)])
def test_a_hook_sends_fewer_bytes_and_training_goes_on_alike(ranks, name, most):
    def train():
        model = nbdist.parallelize(wide(), "ddp", comm_hook=name)
        trainer = Trainer(
            model, torch.optim.SGD(model.parameters(), lr=0.05), nn.functional.cross_entropy, wide_batches(10)
        )
        records: list[dict] = []
        run: Any = trainer._named_run()
        run.record = lambda step, *_: records.append(dict(step))
        trainer.train(10)
        return [r["comm_bytes"] for r in records], [r["loss"] for r in records], weights(model)

    def plain():
        model = nbdist.parallelize(wide(), "ddp")
        trainer = Trainer(
            model, torch.optim.SGD(model.parameters(), lr=0.05), nn.functional.cross_entropy, wide_batches(10)
        )
        trainer.train(10)
        return weights(model)

    whole = 4 * sum(p.numel() for p in wide().parameters())
    (sent, losses, zero), (_, _, one) = ranks.run(train)
    assert sent[-1] <= most * whole
    assert apart(zero, one) == 0.0
    if name == "powersgd":
        assert sent[0] == whole
        assert losses[-1] < 0.7 * losses[0]
    else:
        assert apart(zero, ranks.run(plain)[0]) < 2e-2


def test_low_rank_gradients_of_many_buckets_leave_the_ranks_equal(ranks):
    def train():
        torch.manual_seed(0)
        hook = nbdist.comm_hook("powersgd", start_powerSGD_iter=2)
        many = nn.Sequential(*[nn.Linear(300, 300) for _ in range(8)])
        model = nbdist.parallelize(many, "ddp", comm_hook=hook, bucket_cap_mb=0.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        for step in range(40):
            torch.manual_seed(2 * step + dist.get_rank())
            model(torch.randn(8, 300)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return bool(nbdist.check_sync(model))

    assert ranks.run(train) == [True, True]


def test_bf16_gradients_stay_near_those_of_one_process(ranks):
    expected, _ = alone(global_batches())
    assert farthest(ranks.run(trained, "ddp bf16 hook", global_batches()), expected) < 5e-3


def test_another_hook_rewraps_and_says_so(ranks):
    def again():
        model = nbdist.parallelize(net(), "ddp", comm_hook="fp16")
        with pytest.warns(UserWarning, match="had the comm_hook 'fp16': rewrapped with 'bf16'"):
            model = nbdist.parallelize(model, "ddp", comm_hook=nbdist.comm_hook("bf16"))
        inputs, targets = share(samples(8), dist.get_rank(), 2)
        loss_fn(model(inputs), targets).backward()
        return [p.grad for p in model.parameters()]

    zero, one = ranks.run(again)
    assert apart(zero, one) == 0.0


def test_unknown_hooks_and_options_are_refused_by_name():
    with pytest.raises(ValueError, match=r"Unknown comm_hook 'zip'\. Known: 'fp16', 'bf16', 'powersgd'"):
        nbdist.comm_hook("zip")
    with pytest.raises(ValueError, match="'fp16' takes no options, got 'rank'"):
        nbdist.comm_hook("fp16", rank=1)


def test_two_forward_passes_and_one_backward_pass_of_a_model_with_running_statistics(ranks):
    def train():
        model = nbdist.parallelize(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)), "ddp")
        real, fake = (share(samples(8, seed), dist.get_rank(), 2)[0] for seed in (1, 2))
        (model(real) + model(fake)).sum().backward()
        return [p.grad for p in model.parameters()]

    zero, one = ranks.run(train)
    assert apart(zero, one) == 0.0


def test_a_layer_that_is_unfrozen_is_told_drifts_and_is_one_again_when_wrapped_anew(ranks):
    def train():
        model: Any = net()
        model[0].weight.requires_grad_(False)
        model = nbdist.parallelize(model, "ddp")
        model.module[0].weight.requires_grad_(True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def steps(model):
            for seed in range(3):
                inputs, targets = share(samples(8, seed), dist.get_rank(), 2)
                loss_fn(model(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()

        with pytest.warns(UserWarning, match=r"requires_grad of 0\.weight changed after wrapping"):
            steps(model)
        drifted = nbdist.check_sync(model)
        again = nbdist.parallelize(model, "ddp")
        steps(again)
        return [difference.name for difference in drifted.parameters], bool(nbdist.check_sync(again))

    assert ranks.run(train) == [(["0.weight"], True)] * 2


def test_a_static_graph_is_refused_where_reductions_are_held_back(ranks):
    def train(accumulate):
        model = nbdist.parallelize(net(), "ddp", static_graph=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = Trainer(model, optimizer, loss_fn, [samples(8, seed) for seed in range(4)], accumulate=accumulate)
        try:
            trainer.train(2)
        except ValueError as error:
            return str(error)
        return ""

    assert ranks.run(train, 1) == ["", ""]
    said = "static_graph=True does not go with accumulation: leave it out, or take accumulate=1."
    assert ranks.run(train, 2) == [said, said]


CHANGES = {
    "replaced": (lambda model: setattr(model[0], "weight", nn.Parameter(model[0].weight + 0)), "0.weight replaced"),
    "layer": (lambda model: model.add_module("2", nn.Linear(16, 3)), "2.weight and 1 more replaced after wrapping"),
    "frozen": (lambda model: model[0].weight.requires_grad_(False), "requires_grad of 0.weight changed"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_after_wrapping_is_told_at_the_next_step_once(ranks, what):
    def change():
        model: Any = nbdist.parallelize(net(), "ddp")
        inputs, targets = share(samples(8), dist.get_rank(), 2)
        loss_fn(model(inputs), targets).backward()
        CHANGES[what][0](model.module)
        with pytest.warns(UserWarning, match="rewrap: model = nbdist.parallelize") as caught:
            outputs = model(inputs)
        with torch.no_grad():
            model(inputs)
        del outputs
        return [str(warning.message) for warning in caught]

    for messages in ranks.run(change):
        (message,) = messages
        assert CHANGES[what][1] in message


SHARD_CHANGES = {
    "replaced": (
        lambda model: setattr(model[0], "weight", nn.Parameter(torch.zeros(16, 6))),
        "0.weight replaced after",
    ),
    "layer": (lambda model: model.add_module("2", nn.Linear(16, 3)), "2 changed after sharding: its gradients are not"),
}


@pytest.mark.parametrize("when", ["before the first step", "after a step"])
@pytest.mark.parametrize("what", SHARD_CHANGES)
def test_a_change_after_sharding_is_told_at_the_next_step_once(ranks, what, when):
    def change():
        model: Any = nbdist.parallelize(net(), "fsdp")
        inputs, targets = share(samples(8), dist.get_rank(), 2)
        if when == "after a step":
            loss_fn(model(inputs), targets).backward()
        SHARD_CHANGES[what][0](model)
        with (
            pytest.warns(UserWarning, match="Parallelize a newly made model") as caught,
            contextlib.suppress(Exception),
        ):
            model(inputs)
            model(inputs)
        return [str(warning.message) for warning in caught]

    for messages in ranks.run(change):
        (message,) = messages
        assert SHARD_CHANGES[what][1] in message


def test_a_layer_that_is_unfrozen_after_sharding_trains_as_in_one_process(ranks):
    def train(parallel):
        model: Any = net()
        model[0].weight.requires_grad_(False)
        if parallel:
            model = nbdist.parallelize(model, "fsdp")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(6):
            if step == 3:
                model[0].weight.requires_grad_(True)
            batch = samples(8, seed=step)
            inputs, targets = share(batch, dist.get_rank(), 2) if parallel else batch
            loss_fn(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.full_tensor() if isinstance(p, DTensor) else p for p in weights(model)]

    expected = train(False)
    for got in ranks.run(train, True):
        assert apart(got, expected) < 2e-6


@pytest.mark.parametrize("name", ["powersgd", "bf16"])
def test_a_compressed_run_that_was_saved_and_loaded_equals_one_that_was_not(ranks, tmp_path, name):
    def train(steps, load):
        hook = nbdist.comm_hook(name)
        model = nbdist.parallelize(wide(), "ddp", comm_hook=hook, bucket_cap_mb=0.1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        trainer = Trainer(model, optimizer, nn.functional.cross_entropy, wide_batches(20))
        if load:
            nbdist.load_checkpoint(tmp_path, trainer=trainer)
        trainer.train(steps - trainer.global_step)
        if not load:
            nbdist.save_checkpoint(tmp_path, trainer=trainer).result()
        if steps == 10:
            trainer.train(5)
        return weights(model)

    expected = ranks.run(train, 10, False)
    again = ranks.run(train, 15, True)
    for got, whole in zip(again, expected, strict=True):
        assert apart(got, whole) < 1e-6


def test_low_rank_errors_of_another_number_of_ranks_begin_anew_and_say_so(ranks, tmp_path):
    def train(load):
        model = nbdist.parallelize(wide(), "ddp", comm_hook="powersgd")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        trainer = Trainer(model, optimizer, nn.functional.cross_entropy, wide_batches(40))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if load:
                nbdist.load_checkpoint(tmp_path, trainer=trainer)
            trainer.train(20)
        if not load:
            nbdist.save_checkpoint(tmp_path, trainer=trainer).result()
        return [str(warning.message) for warning in caught if "PowerSGD" in str(warning.message)]

    assert ranks.run(train, False) == [[], []]
    alone = Ranks(tmp_path, size=1)
    try:
        ((message,),) = alone.run(train, True)
    finally:
        alone.stop()
    assert message.startswith("PowerSGD's errors are those of 2 ranks, and this is a world of 1: they begin at zero")
