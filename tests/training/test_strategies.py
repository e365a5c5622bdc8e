"""Each strategy's numbers against plain torch in one process on the same global batches."""

from __future__ import annotations

import os
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

import nbdist
from nbdist.engine.steps.training import Trainer
from nbdist.engine.strategies import parallel
from nbdist.engine.strategies.dims import data_rank
from nbdist.engine.strategies.norms import local
from nbdist.errors import WorldError
from tests.training.ranks import Ranks, form_group
from tests.training.strategies import (
    OPTIMIZERS,
    alone,
    built,
    farthest,
    global_batches,
    gpt,
    loss_fn,
    mine,
    trained,
    whole_state,
)

BATCHES = global_batches()
TWO = [
    "ddp",
    "ddp bucket view",
    "ddp static graph",
    "zero1",
    "fsdp",
    "fsdp zero2",
    "tp",
    "tp loss",
    "tp sequence",
    "pp 1f1b",
    "pp gpipe",
    "pp interleaved",
    "pp zbv",
    "pp looped",
    "pp zero bubble",
    "pp dual",
]


@pytest.fixture(scope="module")
def reference():
    kept = {}

    def get(optimizer="sgd", clip=None):
        key = optimizer, clip
        if key not in kept:
            kept[key] = alone(BATCHES, optimizer, clip=clip)
        return kept[key]

    return get


@pytest.mark.parametrize("strategy", TWO)
def test_five_steps_equal_those_of_one_process(ranks, reference, strategy):
    for optimizer, (_, tolerance) in OPTIMIZERS.items():
        weights, _ = reference(optimizer)
        assert farthest(ranks.run(trained, strategy, BATCHES, optimizer), weights) < tolerance


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tp", "tp loss", "pp 1f1b", "pp zbv"])
def test_clipping_and_the_gradient_norm_equal_those_of_one_process(ranks, reference, strategy):
    weights, norms = reference(clip=0.2)
    results = ranks.run(lambda: trained(strategy, BATCHES, clip_grad_norm=0.2))
    assert farthest(results, weights) < 2e-6
    for result in results:
        assert all(type(norm) is float for norm in result["norms"])
        assert result["norms"] == pytest.approx(norms, abs=1e-5)


@pytest.mark.parametrize("strategy", ["hsdp", "fsdp tp", "ddp tp", "pp ddp", "pp fsdp", "pp tp"])
def test_hybrids_on_four_ranks_equal_one_process(four_ranks, reference, strategy):
    weights, norms = reference(clip=0.2)

    def train():
        return trained(strategy, BATCHES, clip_grad_norm=0.2)

    results = four_ranks.run(train)
    assert farthest(results, weights) < 5e-6
    counted = [sum(result["samples"][i] or 0 for result in results) for i in range(len(BATCHES))]
    assert counted == [8] * len(BATCHES)
    for result in results:
        assert result["norms"] == pytest.approx(norms, abs=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not os.environ.get("NBDIST_TEST_SLOW"), reason="eight ranks: NBDIST_TEST_SLOW=1 to run it")
def test_three_axes_at_once_on_eight_ranks_equal_one_process(tmp_path):
    batches = global_batches([8] * 5)
    weights, norms = alone(joined(batches, 2), clip=0.2)

    def train():
        return trained("pp fsdp tp", batches, steps=3, accumulate=2, clip_grad_norm=0.2)

    pool = Ranks(tmp_path, size=8, timeout=240)
    try:
        results = pool.run(train)
    finally:
        pool.stop()
    assert farthest(results, weights) < 5e-6
    for result in results:
        assert result["norms"] == pytest.approx(norms, abs=1e-5)


def joined(batches, window):
    groups = [batches[i : i + window] for i in range(0, len(batches), window)]
    return [tuple(torch.cat(parts) for parts in zip(*group, strict=True)) for group in groups]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tp", "pp 1f1b"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_accumulated_steps_with_a_short_last_window_equal_the_big_batch(ranks, strategy, precision):
    batches = global_batches([8] * 5)
    weights, norms = alone(joined(batches, 2), clip=0.3)

    def train():
        return trained(strategy, batches, steps=3, accumulate=2, clip_grad_norm=0.3, precision=precision)

    results = ranks.run(train)
    assert farthest(results, weights) < {"fp32": 3e-6, "bf16": 2e-2, "fp16": 2e-3}[precision]
    for result in results:
        assert result["norms"] == pytest.approx(norms, rel={"fp32": 1e-5, "bf16": 3e-2, "fp16": 5e-3}[precision])


@pytest.mark.parametrize("strategy", ["pp ddp", "pp fsdp", "ddp tp", "hsdp"])
def test_hybrids_accumulate(four_ranks, strategy):
    batches = global_batches([8] * 5)
    weights, _ = alone(joined(batches, 2))

    def train():
        return trained(strategy, batches, steps=3, accumulate=2)

    assert farthest(four_ranks.run(train), weights) < 5e-6


@pytest.mark.parametrize("strategy", ["fsdp", "tp", "tp loss", "pp 1f1b", "pp zbv"])
@pytest.mark.parametrize("count", [1, 5, 9])
def test_evaluation_of_a_model_in_pieces_counts_each_sample_once(ranks, strategy, count):
    ((inputs, targets),) = global_batches([count])

    def score():
        model = built(strategy)
        dataset = torch.utils.data.TensorDataset(inputs, targets)
        loader = nbdist.distributed_loader(dataset, batch_size=2, evaluation=True)
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, loader)
        result = trainer.evaluate(
            loader, accuracy=lambda outputs, targets: (outputs.argmax(-1) == targets).float().mean(1)
        )
        if strategy == "fsdp":
            assert all(hasattr(p, "to_local") for p in model.parameters()), "in pieces again"
        return result

    zero, one = ranks.run(score)
    assert zero == one
    outputs = gpt()(inputs)
    assert zero["samples"] == count
    assert zero["loss"] == pytest.approx(loss_fn(outputs, targets).item(), abs=1e-5)
    assert zero["accuracy"] == pytest.approx((outputs.argmax(-1) == targets).float().mean().item(), abs=1e-6)


def test_sharding_leaves_each_rank_its_share_of_weights_and_state(ranks):
    def shares(strategy):
        model = built(strategy)
        optimizer = (
            nbdist.zero1(torch.optim.AdamW, model.parameters(), lr=1e-3)
            if strategy == "zero1"
            else torch.optim.AdamW(model.parameters(), lr=1e-3)
        )
        trainer = Trainer(model, optimizer, loss_fn, mine(BATCHES))
        trainer.train(1)
        state = (optimizer.optim if strategy == "zero1" else optimizer).state
        held = sum(local(value["exp_avg"]).numel() for value in state.values())
        return sum(local(p).numel() for p in model.parameters()), held

    whole = sum(p.numel() for p in gpt().parameters())
    for weights, state in ranks.run(shares, "fsdp"):
        assert (weights / whole, state / whole) == (pytest.approx(0.5, abs=0.01), pytest.approx(0.5, abs=0.01))
    for weights, state in ranks.run(shares, "zero1"):
        assert (weights / whole, state / whole) == (1.0, pytest.approx(0.5, abs=0.05))


def test_a_window_of_a_sharded_model_is_reduced_once(ranks):
    def count():
        model = built("fsdp")
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, mine(BATCHES), accumulate=4)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
            trainer.train(1)
        names = [event.name for event in profiled.events() if event.name.startswith("c10d::")]
        return sum("reduce_scatter" in name for name in names)

    # once for each group of weights that is gathered by itself: four blocks, embedding and head
    assert ranks.run(count) == [6, 6]


def test_a_sharded_model_is_refused_after_its_group_was_left(ranks, tmp_path):
    def leave(strategy, store):
        model = built(strategy)
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, mine(BATCHES))
        trainer.train(1)
        rank = dist.get_rank()
        dist.barrier()
        dist.destroy_process_group()
        form_group(store, rank, 2)
        parallel.follow_group()
        messages = []
        inputs, targets = BATCHES[0]
        for use in (
            lambda: trainer.train(1),
            lambda: trainer.step((inputs, targets)),
            lambda: trainer.evaluate([]),
            lambda: model(inputs),
        ):
            with pytest.raises(WorldError) as error:
                use()
            messages.append(str(error.value))
        assert data_rank() == (rank, 2)
        assert trained("fsdp", BATCHES[:1])["norms"] == [None]
        return messages

    for strategy in ("fsdp", "tp", "pp 1f1b"):
        for messages in ranks.run(leave, strategy, str(tmp_path / strategy)):
            assert len(set(messages)) == 1
            assert "load_checkpoint" in messages[0] and "\n" not in messages[0]


def test_ranks_of_one_layer_share_batches_and_random_numbers(ranks, four_ranks):
    def look(strategy):
        nbdist.seed(3)
        built(strategy)
        loader = nbdist.distributed_loader(torch.utils.data.TensorDataset(torch.arange(8)), batch_size=4)
        drawn = torch.rand(1).item()
        nbdist.seed(3)
        return data_rank(), drawn, torch.rand(1).item(), next(iter(loader))[0].tolist()

    zero, one = ranks.run(look, "tp")
    assert zero == one and zero[0] == (0, 1)
    looks = four_ranks.run(look, "fsdp tp")
    assert [where for where, *_ in looks] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert looks[0] == looks[1] and looks[2] == looks[3]
    assert looks[0][1:] != looks[2][1:] and looks[0][2] != looks[2][2]
    assert sorted(looks[0][3] + looks[2][3]) == list(range(8))


DIMS = [
    (8, dict(dp_replicate=2, tp=3), "dp_replicate (2) × tp (3) ≠ world size 8"),
    (8, dict(dp_replicate=2, dp_shard=1, tp=2), "dp_replicate (2) × tp (2) ≠ world size 8."),
    (4, dict(dp_shard=8), "dp_shard (8) ≠ world size 4."),
    (8, dict(dp_replicate=0), "dp_replicate is a number of ranks, at least 1, or -1 for the rest, got 0."),
    (8, dict(dp_replicate=-1), "Only one axis can be -1"),
]


@pytest.mark.parametrize(("world", "sizes", "message"), DIMS)
def test_dims_that_do_not_fill_the_world_are_shown_as_an_equation(world, sizes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        nbdist.ParallelDims(**sizes).resolve(world)


def test_the_rest_of_the_world_goes_to_the_open_axis():
    assert nbdist.ParallelDims(tp=2).resolve(8) == nbdist.ParallelDims(dp_shard=4, tp=2)
    assert nbdist.ParallelDims(dp_replicate=-1, dp_shard=2).resolve(8) == nbdist.ParallelDims(
        dp_replicate=4, dp_shard=2
    )


def refusal(make):
    with pytest.raises((ValueError, TypeError)) as error:
        make()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_does_not_fit_is_refused_by_name_on_all_ranks(ranks):
    def refusals():
        from torch.distributed.tensor.parallel import ColwiseParallel

        split = nbdist.ParallelDims(dp_shard=1, tp=2)
        early = gpt()
        optimizer = torch.optim.SGD(early.parameters(), lr=0.1)
        with pytest.warns(UserWarning, match="An SGD of this model was made before sharding"):
            sharded = nbdist.parallelize(early, "fsdp")
        replicated = nbdist.parallelize(gpt(), "zero1")
        return [
            refusal(
                lambda: nbdist.parallelize(nn.Sequential(nn.Linear(4, 5)), split, tp_plan={"0": ColwiseParallel()})
            ),
            refusal(lambda: nbdist.parallelize(gpt(), split, tp_plan={"*.query": ColwiseParallel()})),
            refusal(lambda: nbdist.parallelize(gpt(), split)),
            refusal(lambda: nbdist.parallelize(gpt(), nbdist.ParallelDims(tp=3))),
            refusal(lambda: nbdist.parallelize(gpt(), "fsdp", bucket_cap_mb=1)),
            refusal(lambda: nbdist.parallelize(gpt(), "fsdp", comm_hook="bf16")),
            refusal(lambda: nbdist.parallelize(gpt(), "fsdp", offload_policy=object())),
            refusal(lambda: nbdist.parallelize(gpt(), nbdist.ParallelDims(dp_shard=1, pp=2))),
            refusal(lambda: nbdist.parallelize(sharded, "fsdp")),
            refusal(lambda: Trainer(sharded, optimizer, loss_fn, [])),
            refusal(lambda: Trainer(replicated, torch.optim.SGD(replicated.parameters(), lr=1.0), loss_fn, [])),
        ]

    zero, one = ranks.run(refusals)
    assert zero == one
    fragments = [
        "'0': out_features (5) does not divide by tp (2)",
        "tp_plan names '*.query'",
        "splits the layers that tp_plan names",
        "tp (3) ≠ world size 2",
        "Strategy \"fsdp\" has no option 'bucket_cap_mb'",
        'comm_hook is for "ddp" and "zero1"',
        "offload_policy moves shards",
        "pp (2) takes the model in stages",
        "sharded already",
        "of the model are in the optimizer: it was made before sharding",
        "nbdist.zero1(torch.optim.SGD, model.parameters()",
    ]
    for message, fragment in zip(zero, fragments, strict=True):
        assert fragment in message


def test_a_model_without_weights_is_sharded_first_and_filled_then(ranks, reference):
    def train():
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        with torch.device("meta"):
            model = gpt()
        with pytest.warns(UserWarning, match="The weights are empty: load them by"):
            nbdist.parallelize(model, "fsdp")
        set_model_state_dict(model, gpt().state_dict(), options=StateDictOptions(full_state_dict=True))
        optimizer = OPTIMIZERS["sgd"][0](model.parameters())
        Trainer(model, optimizer, loss_fn, mine(BATCHES)).train(5)
        return {"weights": whole_state(model, "fsdp")}

    weights, _ = reference()
    assert farthest(ranks.run(train), weights) < 2e-6
