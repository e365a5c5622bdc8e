"""Seeds, shares and workers."""

from __future__ import annotations

import gc
import itertools
import os
import random
import types
import warnings
import weakref
from datetime import timedelta

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from nbdist.engine.loading import data
from nbdist.engine.loading.data import distributed_loader
from nbdist.engine.telemetry import meters
from tests.training.models import samples


class Numbers(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.tensor(index)


class Drawn(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.tensor([torch.rand(1).item(), numpy.random.rand(), random.random()], dtype=torch.float64)


class Stream(IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(torch.arange(self.count))


def flat(loader):
    return [value for batch in loader for value in batch.flatten().tolist()]


def as_rank(monkeypatch, rank, world):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(world))


def test_each_epoch_has_the_order_of_torchs_sampler_without_set_epoch(monkeypatch):
    passes = []
    for rank in range(2):
        as_rank(monkeypatch, rank, 2)
        loader = distributed_loader(Numbers(8), batch_size=1, shuffle=True, seed=0)
        passes.append([flat(loader), flat(loader)])
    (first, second), (others_first, others_second) = passes
    assert (first, others_first) == ([4, 7, 2, 1], [0, 3, 5, 6])
    assert (second, others_second) == ([5, 2, 7, 1], [4, 6, 3, 0])


def test_looking_at_one_batch_on_one_rank_does_not_shift_its_epoch():
    loader = distributed_loader(Numbers(8), batch_size=1)
    next(iter(loader))
    assert loader.epoch == 0
    first = flat(loader)
    assert loader.epoch == 0
    assert flat(loader) != first
    assert loader.epoch == 1


def test_a_skipped_pass_goes_on_with_the_same_samples():
    loader = distributed_loader(Numbers(9), batch_size=2)
    whole = flat(loader)
    loader.set_epoch(0)
    loader.skip(2)
    assert flat(loader) == whole[4:]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("count", range(1, 10))
def test_evaluation_gives_each_sample_to_exactly_one_rank(monkeypatch, world, count):
    seen = []
    for rank in range(world):
        as_rank(monkeypatch, rank, world)
        seen += flat(distributed_loader(Numbers(count), batch_size=2, evaluation=True))
    assert sorted(seen) == list(range(count))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iterable_data_set_is_dealt_out_without_duplicates(monkeypatch, workers):
    seen, batches = [], []
    for rank in range(2):
        as_rank(monkeypatch, rank, 2)
        mine = list(distributed_loader(Stream(12), batch_size=1, num_workers=workers))
        batches.append(len(mine))
        seen += [value for batch in mine for value in batch.tolist()]
    assert sorted(seen) == list(range(12))
    assert batches == [6, 6]


class Dealt(Stream):
    """Deals its items out to workers by itself, as torch's documentation shows."""

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        return itertools.islice(super().__iter__(), info.id if info else 0, None, info.num_workers if info else 1)


def test_an_iterable_data_set_that_deals_out_to_workers_itself_loses_nothing(monkeypatch):
    seen = []
    for rank in range(2):
        as_rank(monkeypatch, rank, 2)
        for batch in distributed_loader(Dealt(12), batch_size=1, num_workers=2):
            seen += batch.tolist()
    assert sorted(seen) == list(range(12))


def test_an_iterable_data_set_in_a_plain_loader_is_told_with_how_often_each_sample_comes(monkeypatch):
    as_rank(monkeypatch, 0, 2)
    loader = torch.utils.data.DataLoader(Stream(4), num_workers=2)
    with pytest.warns(UserWarning, match=r"2 ranks × 2 workers read each one 4 times\. Use nbdist\.distributed_loader"):
        list(meters.track(loader))
    list(meters.track(loader))


@pytest.mark.parametrize("count", range(7, 14))
@pytest.mark.parametrize("batch_size", [1, 2])
def test_ranks_get_equally_many_batches_of_any_iterable_data_set(monkeypatch, count, batch_size):
    batches, seen = [], set()
    for rank in range(3):
        as_rank(monkeypatch, rank, 3)
        mine = list(distributed_loader(Stream(count), batch_size=batch_size))
        batches.append(len(mine))
        seen |= {value for batch in mine for value in batch.tolist()}
    assert len(set(batches)) == 1
    assert seen == set(range(count))


def test_random_numbers_differ_over_ranks_workers_and_epochs_and_come_again(monkeypatch):
    def drawn(same=False):
        epochs = []
        for rank in range(2):
            as_rank(monkeypatch, rank, 2)
            data.seed(3, same=same)
            loader = distributed_loader(Drawn(), batch_size=1, num_workers=2)
            epochs.append([flat(loader), flat(loader)])
        return epochs

    first = drawn()
    values = [value for rank in first for epoch in rank for value in epoch]
    assert len(set(values)) == len(values)
    assert drawn() == first
    zero, one = drawn(same=True)
    assert zero == one
    data.seed(0)


def test_seeds_differ_over_ranks_unless_asked(monkeypatch):
    values = []
    for rank in range(2):
        as_rank(monkeypatch, rank, 2)
        for same in (False, True):
            data.seed(7, same=same)
            values.append((torch.rand(1).item(), numpy.random.rand(), random.random()))
    own_zero, same_zero, own_one, same_one = values
    assert own_zero == same_zero == same_one
    assert not set(own_one) & set(own_zero)
    data.seed(0)


@pytest.mark.parametrize("method", [None, "spawn", "forkserver"])
def test_workers_know_a_class_that_exists_in_a_cell_only(ranks, method):
    assert ranks.run(batches_of_a_class_of_a_cell, method) == [[0, 20], [10, 30]]


CELL = """
class OfCell(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.tensor(index * SCALE)


def collate(items):
    return torch.stack(items)
"""


def batches_of_a_class_of_a_cell(method):
    cell = types.ModuleType("__main__")
    cell.__dict__.update(torch=torch, Dataset=Dataset, SCALE=10)
    exec(CELL, cell.__dict__)
    loader = distributed_loader(
        cell.OfCell(), 2, shuffle=False, num_workers=1, multiprocessing_context=method, collate_fn=cell.collate
    )
    return flat(loader)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(dataset=Numbers(3)), "3 samples for 4 ranks"),
        (dict(dataset=Numbers(9), batch_size=3, drop_last=True), "leaves no batch"),
        (dict(dataset=Numbers(9), batch_size=0), "batch_size is the number of samples per rank"),
        (dict(dataset=Numbers(9), sampler=None), "makes the sampler itself"),
        (dict(dataset=Stream(9), shuffle=True), "shuffle=True needs a map-style"),
    ],
)
def test_what_cannot_be_dealt_out_is_refused_in_one_line(monkeypatch, arguments, message):
    as_rank(monkeypatch, 0, 4)
    with pytest.raises(ValueError, match=message):
        distributed_loader(**arguments)


def test_a_loader_follows_a_world_of_another_size(monkeypatch):
    as_rank(monkeypatch, 0, 2)
    loader = distributed_loader(Numbers(9), batch_size=1, shuffle=False)
    assert flat(loader) == [0, 2, 4, 6, 8]
    as_rank(monkeypatch, 2, 3)
    assert flat(loader) == [2, 5, 8]


def test_a_forgotten_set_epoch_is_told_at_the_second_pass():
    numbers = Numbers(8)
    sampler: DistributedSampler = DistributedSampler(numbers, 2, 0)
    loader = DataLoader(numbers, sampler=sampler)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(meters.track(loader))
    with pytest.warns(UserWarning, match="repeats the order of epoch 0"):
        list(meters.track(loader))
    sampler.set_epoch(1)
    list(meters.track(loader))
    meters.end_cell("done")


def test_worker_processes_are_gone_after_a_pass():
    loader = distributed_loader(Numbers(8), batch_size=1, num_workers=2)
    list(loader)
    with open(f"/proc/self/task/{os.getpid()}/children") as children:
        assert not [pid for pid in children.read().split() if "pt_data" in _name(pid)]


def _name(pid):
    with open(f"/proc/{pid}/comm") as comm:
        return comm.read()


def test_the_batch_is_a_share_of_the_samples():
    inputs, targets = samples(8)
    loader = distributed_loader(torch.utils.data.TensorDataset(inputs, targets), batch_size=4)
    assert [len(x) for x, _ in loader] == [4, 4]


class Collecting(Numbers):
    def __getitem__(self, index):
        return torch.tensor(gc.collect() * 0 + index)


def test_a_worker_does_not_take_apart_a_group_that_its_rank_has_left(ranks):
    def read():
        gc.collect()
        gc.disable()
        try:
            store = dist.HashStore()  # type: ignore[attr-defined]
            left: list = [dist.ProcessGroupGloo(store, 0, 1, timedelta(seconds=10))]
            left.append(left)
            alive = weakref.ref(left[0])
            del left
            loader = distributed_loader(Collecting(4), batch_size=1, num_workers=2, shuffle=False)
            return [batch.item() for batch in loader], alive() is not None
        finally:
            gc.enable()

    assert ranks.run(read) == [([0, 2], True), ([1, 3], True)]
