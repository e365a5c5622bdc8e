"""Checkpoints: whole or not there, refused in one line where they do not fit, of any strategy for any other."""

from __future__ import annotations

import json
import os
import pickle
import random
import resource
import signal
import subprocess
import sys
import time
import warnings
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from nbdist.engine.saving import checkpoint, shards
from nbdist.engine.saving.checkpoint import load_checkpoint, save_checkpoint
from nbdist.engine.steps.training import Trainer
from nbdist.engine.strategies.parallel import parallelize, unwrap
from nbdist.engine.telemetry import recorder as recorders
from nbdist.engine.world import meeting
from nbdist.errors import WorldError
from tests.training import strategies
from tests.training.models import adamw, apart, loss_fn, net, samples, sgd, share, weights
from tests.training.ranks import Ranks

BATCHES = [samples(12, seed) for seed in range(6)]


@pytest.fixture(autouse=True)
def no_save_under_way():
    yield
    if checkpoint._last is not None:
        checkpoint._last.future.exception(30)


def train(model, optimizer, batches):
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for batch in batches:
        inputs, targets = share(batch, rank, world)
        loss_fn(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(model):
    """The weights by name, gathered where they are sharded."""
    state = unwrap(model).state_dict()
    return {n: t.full_tensor().clone() if hasattr(t, "full_tensor") else t.detach().clone() for n, t in state.items()}


def wrapped(strategy, start=0):
    model = net(start)
    model.register_buffer("steps", torch.zeros(3))
    return model if strategy == "plain" else parallelize(model, strategy)


def optimizer_of(strategy, model):
    if strategy == "zero1":
        from nbdist.engine.strategies.zero import zero1

        return zero1(torch.optim.AdamW, model.parameters(), lr=0.01)
    return adamw(model.parameters())


def saved_by(strategy, folder):
    model = wrapped(strategy)
    optimizer = optimizer_of(strategy, model)
    train(model, optimizer, BATCHES[:3])
    path = save_checkpoint(folder, model=model, optimizer=optimizer, step=3).result(30)
    train(model, optimizer, BATCHES[3:])
    return whole(model), path


def loaded_by(strategy, folder):
    warnings.simplefilter("ignore", UserWarning)
    try:
        model = wrapped(strategy, start=7)
        optimizer = optimizer_of(strategy, model)
        extra = load_checkpoint(folder, model=model, optimizer=optimizer)
        train(model, optimizer, BATCHES[3:])
        return whole(model), extra
    finally:
        warnings.simplefilter("error")


@pytest.fixture(scope="module")
def three_ranks(tmp_path_factory):
    pool = Ranks(tmp_path_factory.mktemp("three"), size=3)
    yield pool
    pool.stop()


@pytest.mark.parametrize("saver", ["ddp", "fsdp", "zero1"])
def test_a_checkpoint_is_read_by_every_other_strategy_and_number_of_ranks(ranks, three_ranks, tmp_path, saver):
    (expected, _), _ = ranks.run(saved_by, saver, tmp_path)
    for pool, loader in ((ranks, "ddp"), (ranks, "fsdp"), (ranks, "zero1"), (three_ranks, "fsdp"), (None, "plain")):
        got, extra = loaded_by(loader, tmp_path) if pool is None else pool.run(loaded_by, loader, tmp_path)[0]
        assert extra == {"step": 3}
        assert got.keys() == expected.keys()
        # AdamW divides by the root of gradients that are near zero: another order of summing shows there
        difference = max(float((got[n] - expected[n]).abs().max()) for n in got)
        assert difference < (1e-7 if (pool, loader) == (ranks, saver) else 2e-4), (loader, difference)


@pytest.mark.parametrize("saver", ["hsdp", "fsdp tp", "ddp tp"])
def test_hybrids_of_four_ranks_go_on_as_two_ranks_of_another_strategy(ranks, four_ranks, tmp_path, saver):
    batches = strategies.global_batches()

    def part(strategy, load):
        warnings.simplefilter("ignore", UserWarning)
        try:
            model = strategies.built(strategy)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            if load:
                load_checkpoint(tmp_path, model=model, optimizer=optimizer)
            share_of = strategies.mine(batches[3:] if load else batches[:3])
            Trainer(model, optimizer, strategies.loss_fn, share_of).train(len(share_of))
            if not load:
                save_checkpoint(tmp_path, model=model, optimizer=optimizer).result(30)
            return strategies.whole_state(unwrap(model), strategy)
        finally:
            warnings.simplefilter("error")

    four_ranks.run(part, saver, False)
    expected, _ = strategies.alone(batches)
    for strategy in ("ddp", "fsdp", "tp"):
        for got in ranks.run(part, strategy, True):
            assert max(float((got[name] - expected[name]).abs().max()) for name in expected) < 1e-5


def pipelined(pp, folder, load):
    from nbdist.engine.strategies.dims import ParallelDims
    from nbdist.engine.strategies.pipeline import pipeline

    warnings.simplefilter("ignore")  # of torch's own schedules
    try:
        torch.manual_seed(int(load))
        stages = [nn.Sequential(nn.Linear(6, 16), nn.ReLU()), nn.Linear(16, 3)]
        model: Any
        if pp:
            model = pipeline(stages, n_microbatches=2, dims=ParallelDims(dp_shard=1, pp=2))
        else:
            model = parallelize(nn.Sequential(*stages))
        optimizer = adamw(model.parameters())
        if load:
            load_checkpoint(folder, model=model, optimizer=optimizer)
        for batch in BATCHES[2 * load : 2 * load + 2]:
            if pp:
                model.forward_backward(*batch, loss_fn)
            else:
                loss_fn(model(batch[0]), batch[1]).backward()
            optimizer.step()
            optimizer.zero_grad()
        if not load:
            save_checkpoint(folder, model=model, optimizer=optimizer).result(30)
        return whole(model)
    finally:
        warnings.simplefilter("error")


def test_stages_of_a_pipeline_become_one_model_and_the_other_way_round(ranks, tmp_path):
    for pp in (True, False):
        folder = tmp_path / str(pp)
        ranks.run(pipelined, pp, folder, False)
        zero, one = ranks.run(pipelined, True, folder, True)
        joined, _ = ranks.run(pipelined, False, folder, True)
        assert {**zero, **one}.keys() == joined.keys()
        assert len(zero) == len(one) == 2
        assert max(float((joined[n] - t).abs().max()) for n, t in {**zero, **one}.items()) < 2e-4


def test_no_wrapper_is_in_the_names_and_torch_alone_can_read_them(ranks, tmp_path):
    (expected, path), _ = ranks.run(saved_and_kept, tmp_path)
    names = set(shards.layout(path).state_dict_metadata)
    assert {"model.0.weight", "model.0.bias", "model.2.weight", "model.2.bias"} <= names
    assert not [name for name in names if "module." in name or "_orig_mod" in name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(path, tmp_path / "all.pt")
    everything = torch.load(tmp_path / "all.pt")
    model = net(9)
    model.load_state_dict({n.removeprefix("model."): t for n, t in everything.items() if n.startswith("model.")})
    assert apart(weights(model), expected) == 0.0


def saved_and_kept(folder):
    warnings.simplefilter("ignore")  # of torch.compile's own imports
    try:
        inner: Any = net()
        inner[0] = torch.compile(inner[0])
        model = parallelize(inner)
        return weights(model), save_checkpoint(folder, model=model).result(30)
    finally:
        warnings.simplefilter("error")


def test_plain_data_comes_back_as_it_was(tmp_path):
    data: dict[str, Any] = {
        "best": 0.97,
        "name": "run 1",
        "shape": (3, 4),
        "ids": {1, 2},
        "lookup": {1: "a", "b": [None, True, float("inf")]},
        "array": numpy.arange(6).reshape(2, 3),
        "tensor": torch.arange(3, dtype=torch.bfloat16),
        "dtype": torch.float16,
        "raw": b"\x00\xff",
        "empty": torch.zeros(0, 4),
    }
    save_checkpoint(tmp_path, **data).result()
    loaded = load_checkpoint(tmp_path)
    for name in ("best", "name", "shape", "ids", "lookup", "dtype", "raw"):
        assert loaded[name] == data[name]
        assert type(loaded[name]) is type(data[name])
    assert (loaded["array"] == data["array"]).all()
    assert torch.equal(loaded["tensor"], data["tensor"])
    assert loaded["empty"].shape == (0, 4)


class OfACell:
    lr = 0.1


def test_a_value_of_a_notebook_class_is_refused_by_its_name_on_all_ranks(ranks, tmp_path):
    def save(folder):
        with pytest.raises((TypeError, ValueError), match=r"cfg is a .*OfACell.* plain data") as caught:
            save_checkpoint(folder, model=net(), cfg=OfACell() if dist.get_rank() == 1 else 1)
        return type(caught.value), os.listdir(folder)

    assert ranks.run(save, tmp_path) == [(ValueError, []), (TypeError, [])]


def test_a_call_by_one_rank_only_ends_in_one_sentence_and_the_next_call_works(ranks, tmp_path):
    def save(folder):
        rank = dist.get_rank()
        seconds, message = 0.0, ""
        if rank == 0:
            began = time.monotonic()
            with pytest.raises(WorldError) as caught:
                save_checkpoint(folder, model=net())
            seconds, message = time.monotonic() - began, str(caught.value)
        else:
            meeting.cell_ended(recorders.recorder.cell)
        dist.barrier()
        path = save_checkpoint(folder, model=net(), step=1).result(30)
        return seconds, message, path.name

    (seconds, message, name), (_, _, others_name) = ranks.run(save, tmp_path)
    assert seconds < 3
    assert message == (
        "save_checkpoint() is called on all ranks: rank 0 came, rank 1 did not; rank 1 has ended the cell. "
        "Take it out of `if rank == 0:`."
    )
    assert name == others_name == "step-1"


def test_a_call_by_another_rank_than_0_ends_too(ranks, tmp_path, monkeypatch):
    def save(folder):
        meeting.PATIENCE = 1.0
        if dist.get_rank() == 1:
            with pytest.raises(WorldError, match="rank 1 came, rank 0 did not"):
                meeting.meet("save_checkpoint()", {}, lambda brought: {}, patience=0.5)
        dist.barrier()
        return meeting.meet("save_checkpoint()", {"rank": dist.get_rank()}, lambda brought: {"all": brought}).agreed

    agreed = {"all": [{"rank": 0}, {"rank": 1}]}
    assert ranks.run(save, tmp_path) == [agreed, agreed]


def test_buffers_are_those_of_rank_0(ranks, tmp_path):
    def save(folder):
        model = parallelize(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)))
        optimizer = sgd(model.parameters())
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(3):
            model(torch.randn(8, 4, generator=generator) + dist.get_rank()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        mine = unwrap(model)[0].running_mean.clone()
        save_checkpoint(folder, model=model).result(30)
        load_checkpoint(folder, model=model)
        outputs = unwrap(model).eval()(torch.ones(2, 4))
        return mine, unwrap(model)[0].running_mean.clone(), outputs.detach()

    (zero, loaded, outputs), (one, others_loaded, others_outputs) = ranks.run(save, tmp_path)
    assert not torch.equal(zero, one)
    assert torch.equal(loaded, zero)
    assert torch.equal(others_loaded, zero)
    assert torch.equal(outputs, others_outputs)


def test_what_is_trained_after_the_call_is_not_in_the_checkpoint(ranks, tmp_path):
    def save(folder):
        model = parallelize(net())
        handle = save_checkpoint(folder, model=model)
        before = weights(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        handle.result(30)
        load_checkpoint(folder, model=model)
        return apart(weights(model), before)

    assert ranks.run(save, tmp_path) == [0.0, 0.0]


def test_the_last_k_are_kept_and_a_step_can_be_written_again(tmp_path):
    for step in (5, 6, 7, 7, 2):
        save_checkpoint(tmp_path, keep=2, step=step, value=step)
    assert load_checkpoint(tmp_path)["value"] == 2
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-2", "step-7"]
    assert (tmp_path / "latest").read_text() == "step-2\n"


def test_all_ranks_may_save_at_once_to_a_folder_that_is_not_there(ranks, tmp_path):
    def save(folder):
        for _ in range(5):
            path = save_checkpoint(folder, model=net(), step=7, asynchronous=False).result()
            assert path.is_dir()
            assert load_checkpoint(folder)["step"] == 7
        return True

    assert ranks.run(save, tmp_path / "new" / "ck.pt") == [True, True]


def test_a_part_that_is_not_in_the_checkpoint_is_told(tmp_path):
    model = net()
    optimizer = sgd(model.parameters())
    save_checkpoint(tmp_path, model=model, optimizer=optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.warns(UserWarning, match="No scheduler in the checkpoint step-0"):
        load_checkpoint(tmp_path, model=model, optimizer=optimizer, scheduler=scheduler)


def test_every_scheduler_and_a_scaler_come_back(tmp_path):
    def make() -> dict[str, Any]:
        steps = torch.optim.lr_scheduler
        model = net()
        one, two, three = (sgd(model.parameters()) for _ in range(3))
        return {
            "model": model,
            "one": one,
            "two": two,
            "three": three,
            "many": steps.SequentialLR(one, [steps.LinearLR(one), steps.StepLR(one, 2)], [2]),
            "milestones": steps.MultiStepLR(two, [1, 3]),
            "once": steps.OneCycleLR(three, 0.1, total_steps=9),
            "scaler": torch.amp.GradScaler("cpu", init_scale=8.0),
        }

    def go_on(state):
        rates = []
        for name in ("many", "milestones", "once"):
            for _ in range(3):
                state[name].optimizer.step()
                state[name].step()
                rates.append(state[name].get_last_lr())
        return rates

    saved, loaded = make(), make()
    go_on(saved)
    saved["scaler"].scale(torch.ones(1))
    saved["scaler"].update(2.0)
    save_checkpoint(tmp_path, **saved)
    load_checkpoint(tmp_path, **loaded)
    assert loaded["scaler"].get_scale() == 2.0
    assert go_on(loaded) == go_on(saved)


# Bad checkpoints: refused in one line, with nothing changed


@pytest.fixture
def two_checkpoints(tmp_path):
    model = net(1)
    optimizer = adamw(model.parameters())
    train(model, optimizer, BATCHES[:1])
    for step in (1, 2):
        save_checkpoint(tmp_path, model=model, optimizer=optimizer, step=step).result()
    return tmp_path


def refused(folder, error, message, **state):
    model = state.setdefault("model", net(4))
    before = weights(model)
    with pytest.raises(error, match=message):
        load_checkpoint(folder, **state)
    assert apart(weights(model), before) == 0.0


def test_a_checkpoint_of_another_model_is_refused_by_the_first_difference(two_checkpoints):
    wider = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 3))
    refused(
        two_checkpoints, ValueError, r"another model: model.0.weight is \(16, 6\) in it, \(20, 6\) here", model=wider
    )
    longer = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3), nn.Linear(3, 3))
    refused(two_checkpoints, ValueError, "another model: it has no model.3.weight", model=longer)
    shorter = nn.Sequential(nn.Linear(6, 16))
    refused(two_checkpoints, ValueError, "it has model.2.bias and 1 more, which the model here has not", model=shorter)


def test_an_optimizer_that_is_not_alike_is_refused(two_checkpoints):
    model = net()
    halves = [{"params": [p]} for p in model.parameters()]
    refused(two_checkpoints, ValueError, "4 parameter groups here and 1 in", model=model, optimizer=adamw(halves))
    with pytest.raises(ValueError, match=r"give load_checkpoint\(\) the model too"):
        load_checkpoint(two_checkpoints, optimizer=adamw(net().parameters()))


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "rank-0.json", "meta.json"])
@pytest.mark.parametrize("how", ["missing", "torn"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(two_checkpoints, name, how):
    file = two_checkpoints / "step-2" / name
    if how == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-9])
    model = net(4)
    with pytest.warns(UserWarning, match=rf"step-2 is not whole: {name}"):
        assert load_checkpoint(two_checkpoints, model=model)["step"] == 1
    if name != "meta.json":
        refused(two_checkpoints / "step-2", ValueError, f"step-2 is not whole: {name}")
    (two_checkpoints / "step-1" / ".metadata").unlink()
    refused(two_checkpoints, FileNotFoundError, "No complete checkpoint in .*step-1 is not whole")


def test_overwritten_bytes_change_nothing(two_checkpoints):
    file = two_checkpoints / "step-2" / "__0_0.distcp"
    file.write_bytes(os.urandom(file.stat().st_size))
    refused(two_checkpoints, ValueError, "step-2 cannot be read")


def test_a_checkpoint_of_a_newer_version_is_refused(two_checkpoints):
    meta = two_checkpoints / "step-2" / "meta.json"
    meta.write_text(json.dumps({**json.loads(meta.read_text()), "format": 9, "nbdist": "7.1"}))
    refused(two_checkpoints, ValueError, r"written by nbdist 7.1 in format 9, this version reads format 1")


class Evil:
    def __reduce__(self):
        return os.system, ("touch /tmp/executed",)


def test_pickled_code_in_the_files_is_not_executed(two_checkpoints, tmp_path):
    folder = two_checkpoints / "step-2"
    meta = json.loads((folder / "meta.json").read_text())
    (folder / ".metadata").write_bytes(pickle.dumps(Evil()))
    meta["files"][".metadata"] = (folder / ".metadata").stat().st_size
    (folder / "meta.json").write_text(json.dumps(meta))
    refused(two_checkpoints, ValueError, r"names posix.system, which does not belong there")


def test_an_empty_folder_is_named(tmp_path):
    refused(tmp_path / "nothing", FileNotFoundError, "No complete checkpoint in .*nothing")


def test_a_full_disk_is_told_on_all_ranks_and_the_checkpoint_before_loads(ranks, tmp_path):
    def save(folder):
        model = parallelize(nn.Linear(300, 300))
        save_checkpoint(folder, model=model, step=1).result(30)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if dist.get_rank() == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))  # a write beyond it fails as on a full disk
        try:
            handle = save_checkpoint(folder, model=model, step=2)
            with pytest.raises(OSError) as caught:
                handle.result(30)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        return str(caught.value), load_checkpoint(folder, model=model)["step"], sorted(os.listdir(folder))

    for message, step, names in ranks.run(save, tmp_path):
        assert message.startswith("step-2 was not written (rank 0: ")
        assert message.endswith("The checkpoint before it is still whole.")
        assert step == 1
        assert names == ["latest", "step-1"]


SAVER = """
import os, sys, torch
from nbdist.engine.saving.checkpoint import save_checkpoint

for last in sys.stdin:
    pid = os.fork()
    if pid == 0:
        value = int(last)
        while True:
            value += 1
            save_checkpoint(sys.argv[1], keep=2, step=value % 3, asynchronous=value % 2 == 0,
                            value=value, tensors=[torch.full((300_000,), float(value)) for _ in range(4)])
            print(value, flush=True)
    print("began", pid, flush=True)
    os.waitpid(pid, 0)
    print("ended", flush=True)
"""


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    folder = tmp_path / "saved"
    chance = random.Random(0)
    command = [sys.executable, "-c", SAVER, folder]
    last = 0
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as saver:
        for _ in range(20):
            print(last, file=saver.stdin, flush=True)
            values = []
            pid = None
            while pid is None or not values:
                words = saver.stdout.readline().split()
                if words[0] == "began":
                    pid = int(words[1])
                else:
                    values.append(int(words[0]))
            # a save takes some 15 ms: somewhere in the next few of them
            time.sleep(chance.random() * 0.1)
            os.kill(pid, signal.SIGKILL)
            for line in iter(saver.stdout.readline, "ended\n"):
                values.append(int(line))
            loaded = load_checkpoint(folder)
            last = loaded["value"]
            # the one before may have been asynchronous, and the one under way may have been finished
            assert values[-1] - 1 <= last <= values[-1] + 1
            assert all(bool((tensor == last).all()) and tensor.shape == (300_000,) for tensor in loaded["tensors"])
    assert len(os.listdir(folder)) <= 6


def test_the_death_of_a_rank_while_saving_is_told_to_the_others(tmp_path):
    def save(folder):
        rank = dist.get_rank()
        model = parallelize(net())
        save_checkpoint(folder / "saved", model=model, step=1).result(30)
        if rank == 0:
            shards.write = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        handle = save_checkpoint(folder / "saved", model=model, step=2)
        with pytest.raises(WorldError) as caught:
            handle.result(30)
        (folder / "told").write_text(str(caught.value))

    pool = Ranks(tmp_path)
    try:
        with pytest.raises((EOFError, ConnectionResetError)):
            pool.run(save, tmp_path)
        deadline = time.monotonic() + 30
        while not (tmp_path / "told").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
    finally:
        pool.stop()
    assert (tmp_path / "told").read_text() == "rank 0 ended during save_checkpoint()."
    assert load_checkpoint(tmp_path / "saved")["step"] == 1
