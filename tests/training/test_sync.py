"""Which tensors differ on which ranks, and by how much."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from nbdist.engine.strategies.parallel import parallelize, unwrap
from nbdist.engine.strategies.sync import check_sync
from tests.training.models import loss_fn, net, samples, sgd


def test_a_healthy_model_is_in_sync(ranks):
    def check(strategy):
        model = parallelize(net(), strategy)
        report = check_sync(model)
        return bool(report), report.max_difference, repr(report)

    for strategy in ("ddp", "fsdp"):
        assert ranks.run(check, strategy) == [(True, 0.0, "<SyncReport in sync, 4 tensors>")] * 2


def test_a_replaced_parameter_is_named_with_ranks_size_and_first_step(ranks):
    def check():
        layer = nn.Linear(6, 3)
        model = DDP(layer, find_unused_parameters=True)  # or DDP itself refuses the second step
        layer.weight = nn.Parameter(layer.weight + 0)
        optimizer = sgd(layer.parameters())
        rank = dist.get_rank()
        reports = [check_sync(model, step=0)]
        for step in (1, 2, 3):
            inputs, targets = samples(8, 10 * rank + step)
            loss_fn(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            reports.append(check_sync(model, step=step))
        table = [torch.empty_like(layer.weight) for _ in range(2)]
        dist.all_gather(table, layer.weight.detach())
        return reports, float((table[0] - table[1]).abs().max())

    for reports, apart in ranks.run(check):
        assert [bool(report) for report in reports] == [True, False, False, False]
        (difference,) = reports[-1].parameters
        assert (difference.name, difference.ranks, difference.reference) == ("weight", (1,), 0)
        assert difference.max_difference == pytest.approx(apart, rel=1e-6)
        assert difference.first_step == 1
        assert repr(reports[-1]).startswith("<SyncReport parameter weight on rank 1 differs from rank 0 by up to ")


def test_buffers_are_told_apart_from_parameters(ranks):
    def check():
        model = parallelize(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)))
        generator = torch.Generator().manual_seed(dist.get_rank())
        model(torch.randn(8, 4, generator=generator) + dist.get_rank()).sum().backward()
        after = check_sync(model)
        with torch.no_grad():
            model.train()(torch.zeros(8, 4))  # buffers of rank 0 go to all when it begins, and are changed alike
        return bool(after), [d.name for d in after.parameters], [d.name for d in after.buffers], check_sync(model)

    for in_sync, parameters, buffers, later in ranks.run(check):
        assert in_sync
        assert parameters == []
        assert buffers == ["0.running_mean", "0.running_var"]
        assert later.buffers == ()


def test_shares_of_a_sharded_tensor_may_differ_and_its_copies_may_not(ranks):
    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model: Any = nn.Module()
        torch.manual_seed(0)
        model.split = nn.Parameter(distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)]))
        model.copied = nn.Parameter(distribute_tensor(torch.randn(4, 4), mesh, [Replicate()]))
        model.plain = nn.Parameter(torch.randn(4))
        before = check_sync(model)
        with torch.no_grad():
            if dist.get_rank() == 1:
                model.copied.to_local()[0, 0] += 0.5
                model.plain[2] -= 0.25
                model.split.to_local().mul_(2)
        after = check_sync(model)
        return bool(before), {d.name: d.max_difference for d in after.parameters}

    assert ranks.run(check) == [(True, {"copied": 0.5, "plain": 0.25})] * 2


def test_one_changed_bit_and_two_swapped_tensors_are_seen(ranks):
    def check():
        model = parallelize(net())
        first = unwrap(model)[0]
        found = []
        with torch.no_grad():
            if dist.get_rank() == 1:
                first.bias.view(torch.int32)[3] ^= 1
            found.append([d.name for d in check_sync(model).parameters])
            if dist.get_rank() == 1:
                first.bias.view(torch.int32)[3] ^= 1
            pair = nn.ParameterList([torch.ones(3), torch.zeros(3)][:: 1 if dist.get_rank() == 0 else -1])
            found.append([d.name for d in check_sync(pair).parameters])
        return found

    assert ranks.run(check) == [[["0.bias"], ["0", "1"]]] * 2


def test_a_check_every_100_steps_costs_less_than_a_hundredth(ranks):
    def check():
        model = parallelize(nn.Sequential(*[nn.Linear(128, 128) for _ in range(6)]))
        optimizer = sgd(model.parameters())
        inputs = torch.randn(64, 128)

        def step():
            model(inputs).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        def seconds(call, times):
            taken = []
            for _ in range(times):
                began = time.perf_counter()
                call()
                taken.append(time.perf_counter() - began)
            return sorted(taken)[times // 2]

        seconds(step, 5)
        check_sync(model)
        return seconds(lambda: check_sync(model), 15) / (100 * seconds(step, 30))

    assert max(ranks.run(check)) < 0.01
