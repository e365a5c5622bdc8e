"""Workers that die or are interrupted, options that pass through, limits of the machine."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from nbdist.engine import limits
from nbdist.engine.loading import workers
from nbdist.engine.loading.data import distributed_loader
from tests.training.test_data import Numbers, Stream, flat


class Killing(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor(index)


class Slow(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        time.sleep(1)
        return torch.tensor(index)


class Iterated(IterableDataset):
    def __iter__(self):
        for number in range(8):
            yield torch.tensor([number, torch.rand(1).item()])


def children():
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return file.read().split()


def test_a_worker_that_was_killed_is_named_with_its_rank(ranks):
    def load():
        before, began = children(), time.monotonic()
        with pytest.raises(RuntimeError) as caught:
            flat(distributed_loader(Killing(), batch_size=1, shuffle=False, num_workers=1, evaluation=True))
        return str(caught.value), time.monotonic() - began, set(children()) - set(before)

    def load_on_rank_1():
        import torch.distributed as dist

        return load() if dist.get_rank() == 1 else None

    _, (message, seconds, left) = ranks.run(load_on_rank_1)
    assert message.startswith("rank 1: DataLoader worker pid ")
    assert message.endswith(" killed by signal 9 (out of memory?)")
    assert seconds < 10
    assert left == set()


@pytest.mark.parametrize("persistent", [False, True])
def test_an_interrupt_while_loading_is_prompt_and_leaves_no_worker(persistent):
    before = children()
    loader = distributed_loader(Slow(), batch_size=4, num_workers=2, persistent_workers=persistent)
    for _ in range(3):
        began = time.monotonic()
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            list(loader)
        timer.join()
        assert time.monotonic() - began < 2
        assert children() == before


def test_a_loop_that_is_left_leaves_no_worker():
    before = children()
    loader = distributed_loader(Numbers(50), batch_size=1, num_workers=2)
    for _ in loader:
        break
    assert children() == before


def test_prefetch_and_pin_memory_reach_the_loader():
    loader = distributed_loader(Numbers(4), num_workers=1, prefetch_factor=5, pin_memory=False, timeout=9)
    assert (loader.prefetch_factor, loader.pin_memory, loader.timeout) == (5, False, 9)
    assert distributed_loader(Numbers(4)).pin_memory is False


def test_workers_of_an_iterable_set_read_over_what_was_trained():
    def batches(skip):
        loader = distributed_loader(Iterated(), batch_size=2, num_workers=1, seed=4)
        loader.skip(skip)
        return [batch.tolist() for batch in loader]

    assert batches(2) == batches(0)[2:]


def test_an_iterable_set_in_this_process_is_read_over_without_drawing():
    loader = distributed_loader(Stream(8), batch_size=2)
    torch.manual_seed(3)
    expected = torch.rand(2).tolist()
    torch.manual_seed(3)
    loader.skip(2)
    assert flat(loader) == [4, 5, 6, 7]
    assert torch.rand(2).tolist() == expected


def test_the_position_of_a_loader_is_told_at_any_moment():
    loader = distributed_loader(Numbers(6), batch_size=2, seed=5)
    states = [loader.state_dict()]
    for _ in loader:
        states.append(loader.state_dict())
    states.append(loader.state_dict())
    assert [(s["epoch"], s["batches"]) for s in states] == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)]
    again = distributed_loader(Numbers(6), batch_size=2, seed=6)
    again.load_state_dict(states[2])
    assert again.state_dict() == states[2]
    assert len(flat(again)) == 2
    assert again.state_dict()["epoch"] == 1


def test_a_loader_travels_with_its_position():
    import pickle

    import cloudpickle

    loader = distributed_loader(Numbers(6), batch_size=2, num_workers=1)
    flat(loader)
    assert flat(pickle.loads(cloudpickle.dumps(loader))) == flat(loader)


# What the machine allows


LIMITED = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 4096))
from nbdist.engine.limits import raise_fd_limit
print(raise_fd_limit(), resource.getrlimit(resource.RLIMIT_NOFILE))
import torch
from nbdist.engine.loading.data import distributed_loader
dataset = torch.utils.data.TensorDataset(torch.zeros(800, 4))
kept = list(distributed_loader(dataset, batch_size=2, num_workers=2))
print("all", len(kept))
"""


def test_the_limit_of_open_files_is_raised_so_that_batches_can_be_kept():
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 4096:
        pytest.skip("the hard limit is lower")
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", LIMITED], capture_output=True, text=True, timeout=100)
    assert ran.stdout == "(128, 4096) (4096, 4096)\nall 400\n", ran.stdout + ran.stderr[-2000:]


def test_the_limit_of_open_files_is_named_where_it_is_reached():
    error = RuntimeError("received 0 items of ancdata")
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert str(workers.explained(error, None, 2)).startswith(f"rank 2: no file descriptors left (limit {limit}). Keep")


def test_too_little_shared_memory_is_told_with_its_remedies(monkeypatch):
    monkeypatch.setattr(limits, "shared_memory", lambda: limits.SharedMemory(62_000_000, 60_000_000))
    monkeypatch.setattr(workers, "_warned", False)
    assert limits.shared_memory_advice(50_000_000) == ""
    assert "--shm-size" in limits.shared_memory_advice()
    loader: Any = distributed_loader(torch.utils.data.TensorDataset(torch.zeros(8, 10**6)), batch_size=4, num_workers=2)
    with pytest.warns(UserWarning, match=r"/dev/shm has 60 MB of 62 MB free, workers may need 64 MB"):
        list(loader)
    list(loader)  # once


def test_a_worker_that_died_of_a_bus_error_is_told_about_shared_memory(monkeypatch):
    monkeypatch.setattr(limits, "shared_memory", lambda: limits.SharedMemory(64_000_000, 0))
    error = RuntimeError("DataLoader worker (pid 12) is killed by signal: Bus error. It is possible that ...")
    assert "rank 3: DataLoader worker pid 12 killed by signal 7. /dev/shm has 0 MB" in str(
        workers.explained(error, None, 3)
    )
