"""Pipelines: what is refused before anything is sent, names of the state, and batches of other shapes."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist

import nbdist
from nbdist.engine.steps.training import Trainer
from tests.training.models import apart, samples, weights
from tests.training.strategies import alone, farthest, global_batches, gpt, loss_fn, stages, trained, whole_state


def refused(make):
    with pytest.raises(ValueError) as error:
        make()
    value = torch.ones(1)
    dist.all_reduce(value)  # nobody is left waiting
    assert value.item() == 2.0
    return str(error.value)


COUNTS = [
    (2, dict(n_microbatches=1), "n_microbatches (1) < 2 stages: use n_microbatches >= 2"),
    (3, dict(), '"1F1B" holds one stage per rank: 3 stages ≠ pp (2)'),
    (3, dict(schedule="ZBV"), '"ZBVZeroBubble" holds two stages per rank: 3 stages ≠ 2 × pp (2)'),
    (2, dict(schedule="Interleaved1F1B"), "two or more stages per rank: 2 stages"),
    (2, dict(schedule="2F2B"), "Unknown schedule '2F2B'. Known: 1F1B"),
    (2, dict(dims=nbdist.ParallelDims(pp=3)), "pp (3) ≠ world size 2"),
]


@pytest.mark.parametrize(("count", "options", "message"), COUNTS)
def test_stages_that_no_schedule_can_run_are_refused(ranks, count, options, message):
    zero, one = ranks.run(lambda: refused(lambda: nbdist.pipeline(stages(count), **options)))
    assert zero == one
    assert message in zero


def test_a_rank_without_anything_to_train_is_refused_on_all(ranks):
    def build():
        front, back = stages(2)
        return nbdist.pipeline([front, torch.nn.Flatten(0, 1)]), back

    zero, one = ranks.run(lambda: refused(build))
    assert zero == one == "Stage 1 has no parameter that requires a gradient. Join it with a neighbouring stage."


def test_a_batch_that_does_not_divide_is_refused_with_what_would(ranks):
    def feed():
        model = nbdist.pipeline(stages(2), n_microbatches=3)
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, global_batches([8]))
        message = refused(lambda: trainer.train(1))
        again = nbdist.pipeline(stages(2), n_microbatches=4)
        trainer = Trainer(again, torch.optim.SGD(again.parameters(), lr=0.1), loss_fn, global_batches([8]))
        trainer.train(1)
        return message, trainer.step(global_batches([8])[0]).item()

    (message, zero), (other, one) = ranks.run(feed)
    assert message == other
    assert "A batch of 8 is not divisible by 3 micro-batches: use n_microbatches 2, 4, 8" in message
    assert zero == one


def test_batches_of_several_shapes_run_through_one_pipeline(ranks):
    batches = global_batches([8, 4, 8, 12, 4])
    weights, _ = alone(batches)
    assert farthest(ranks.run(trained, "pp 1f1b", batches), weights) < 2e-6


def test_compiled_stages_train_alike(ranks):
    batches = [samples(8, seed) for seed in (1, 2)]

    def train(compile):
        torch.manual_seed(0)
        model = nbdist.pipeline([torch.nn.Linear(6, 4), torch.nn.Linear(4, 3)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch.compile's own imports
            Trainer(model, optimizer, torch.nn.functional.cross_entropy, batches, compile=compile).train(2)
        return weights(model), any(part._compiled_call_impl is not None for part in model.modules())

    # not by inductor: where nothing is cached its C++ takes longer than these ranks wait for each other
    for compiled, plain in zip(ranks.run(train, "aot_eager"), ranks.run(train, False), strict=True):
        assert apart(compiled[0], plain[0]) < 1e-6
        assert (compiled[1], plain[1]) == (True, False)


def test_each_rank_keeps_its_stages_under_the_names_of_the_whole(ranks):
    def keep():
        model = nbdist.pipeline(stages(2, seed=dist.get_rank()), "GPipe")
        return repr(model), whole_state(model, "pp")

    (zero, front), (one, back) = ranks.run(keep)
    assert zero == "<Pipeline GPipe, 2 stages, 2 micro-batches, here: 0>"
    assert one.endswith("here: 1>")
    expected = gpt(0).state_dict()  # rank 0's weights, on all
    assert sorted(front | back) == sorted(expected)
    assert all(torch.equal(value, expected[name]) for name, value in (front | back).items())


def test_outputs_are_on_the_last_rank_and_an_own_loop_trains(ranks):
    def loop():
        model = nbdist.pipeline(stages(2), n_microbatches=4)
        (inputs, targets), *_ = global_batches()
        with torch.no_grad():
            outputs = model(inputs)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for inputs, targets in global_batches():
            model.forward_backward(inputs, targets, loss_fn)
            nbdist.clip_grad_norm(model, 0.2)
            optimizer.step()
            optimizer.zero_grad()
        return {"weights": whole_state(model, "pp"), "outputs": outputs}

    zero, one = ranks.run(loop)
    assert zero["outputs"] is None
    torch.testing.assert_close(one["outputs"], gpt()(global_batches()[0][0]), atol=1e-6, rtol=0)
    assert farthest([zero, one], alone(global_batches(), clip=0.2)[0]) < 2e-6


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_stages_that_give_halves_train_as_one_process_does(ranks, precision, dtype):
    def parts():
        torch.manual_seed(0)
        return [torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU()), torch.nn.Linear(16, 3)]

    def train():
        model = nbdist.pipeline(parts(), n_microbatches=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = [samples(8, seed) for seed in range(4)]
        trainer = Trainer(model, optimizer, torch.nn.functional.cross_entropy, batches, precision=precision)
        trainer.train(4)
        return weights(model)

    alone = torch.nn.Sequential(*parts())
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for seed in range(4):
        inputs, targets = samples(8, seed)
        with torch.autocast("cpu", dtype):
            loss = torch.nn.functional.cross_entropy(alone(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for got, stage in zip(ranks.run(train), alone, strict=True):
        assert apart(got, weights(stage)) < 2e-3


def test_running_statistics_and_random_numbers_are_those_of_the_micro_batches_alone(ranks):
    def parts():
        torch.manual_seed(0)
        first = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5))
        return [first, torch.nn.Linear(4, 3)]

    sizes = (8, 8, 4)

    def train():
        model = nbdist.pipeline(parts(), n_microbatches=2)
        torch.manual_seed(5)
        for seed, size in enumerate(sizes):
            model.forward_backward(*samples(size, seed), torch.nn.functional.cross_entropy)
        return [buffer.clone() for buffer in model.buffers()], torch.get_rng_state()

    first = parts()[0]
    torch.manual_seed(5)
    for seed, size in enumerate(sizes):
        for part in samples(size, seed)[0].chunk(2):
            first(part)
    (buffers, state), _ = ranks.run(train)
    assert apart(buffers, list(first.buffers())) < 1e-6
    assert torch.equal(state, torch.get_rng_state())
