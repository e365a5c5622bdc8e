"""parallelize: wrapping, refusing, and following the process group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from nbdist.engine.strategies import parallel
from nbdist.engine.strategies.parallel import parallelize
from nbdist.errors import WorldError
from tests.training.models import apart, loss_fn, net, samples, share, trained_alone, weights
from tests.training.ranks import form_group


def test_the_model_of_rank_0_is_given_to_all(ranks):
    def wrapped():
        model = parallelize(net(seed=dist.get_rank()), "ddp", bucket_cap_mb=1, find_unused_parameters=True)
        assert isinstance(model, DDP) and model.find_unused_parameters
        return weights(model)

    zero, one = ranks.run(wrapped)
    assert apart(zero, one) == 0.0
    assert apart(zero, weights(net(0))) == 0.0


MODELS = {
    "shape": (lambda rank: nn.Linear(4, 1 + rank), "weight is (1, 4) float32 on rank 0, parameter weight is (2, 4)"),
    "count": (
        lambda rank: nn.Sequential(*[nn.Linear(2, 2) for _ in range(1 + rank)]),
        "nothing there on rank 0, parameter 1.weight is (2, 2) float32 on rank 1",
    ),
    "name": (lambda rank: nn.ModuleDict({"ab"[rank]: nn.Linear(2, 2)}), "parameter a.weight"),
    "frozen": (lambda rank: nn.Linear(4, 1).requires_grad_(rank == 0), "float32 frozen on rank 1"),
    "dtype": (lambda rank: nn.Linear(4, 1).to([torch.float32, torch.float64][rank]), "float64 on rank 1"),
    "buffer": (lambda rank: nn.BatchNorm1d(4, track_running_stats=rank == 0), "buffer running_mean is (4,)"),
}


@pytest.mark.parametrize("what", MODELS)
def test_models_that_differ_are_refused_on_all_ranks_by_name(ranks, what):
    def build():
        with pytest.raises(ValueError) as error:
            parallelize(MODELS[what][0](dist.get_rank()))
        assert "\n" not in str(error.value)
        value = torch.ones(1)
        dist.all_reduce(value)
        return str(error.value), value.item()

    (message, after), (others_message, _) = ranks.run(build)
    assert MODELS[what][1] in message
    assert message == others_message
    assert after == 2.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(strategy="dpp"), "Unknown strategy 'dpp'. Known: 'ddp'"),
        (dict(bucket_cap=1), "has no option 'bucket_cap'"),
        (dict(tp_plan={}), "tp_plan is for tensor parallelism"),
        (dict(mixed_precision=1), "precision="),
    ],
)
def test_what_a_strategy_does_not_know_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        parallelize(net(), **arguments)


def test_without_a_process_group_the_message_says_what_to_call():
    with pytest.raises(WorldError, match="%cluster start"):
        parallelize(net())


def test_a_comm_hook_is_registered(ranks):
    def hooked():
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        calls = []

        def hook(state, bucket):
            calls.append(bucket.index())
            return fp16_compress_hook(state, bucket)

        model = parallelize(net(), comm_hook=(None, hook))
        model(torch.ones(2, 6)).sum().backward()
        return calls

    assert ranks.run(hooked) == [[0]] * 2


def step_on(model, optimizer, seed):
    inputs, targets = share(samples(8, seed), dist.get_rank(), 2)
    loss_fn(model(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("way", ["in place", "anew"])
def test_a_model_goes_on_in_a_new_group_after_it_was_cut_off_in_backward(ranks, tmp_path, way):
    def cut_off(way, store):
        rank = dist.get_rank()
        model: Any = parallelize(net(), bucket_cap_mb=0.0001)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step_on(model, optimizer, 1)
        step_on(model, optimizer, 2)

        def fail(grad):
            raise KeyError("mid-backward")

        # the last layer's gradient is ready and its bucket under way when the first layer's fails
        handle = model.module[0].weight.register_hook(fail)
        with pytest.raises(KeyError):
            step_on(model, optimizer, 9)
        handle.remove()
        dist.destroy_process_group()
        form_group(store, rank, 2)
        assert parallel.is_stale(model)
        if way == "in place":
            parallel.follow_group()
        else:
            old = model  # as the user's variable holds it
            model = parallelize(old)
            assert model is not old
        assert not parallel.is_stale(model)
        optimizer.zero_grad()
        step_on(model, optimizer, 3)
        step_on(model, optimizer, 4)
        return weights(model)

    zero, one = ranks.run(cut_off, way, str(tmp_path / "second"))
    assert apart(zero, one) == 0.0
    assert apart(zero, trained_alone([samples(8, seed) for seed in (1, 2, 3, 4)])) < 2e-6
