"""Ranks that wait for one that does not come: the cell says who, where and in what, and ends where that is hopeless."""

from __future__ import annotations

import re
import signal
import threading
import time

import pytest

from nbdist import Cluster, CollectiveMismatch, CollectiveTimeout
from tests.faults.faults import end, fails, group_is_whole, nothing_was_lost, ready, run


def test_uneven_numbers_of_steps_are_told_and_end_the_cell(ranks: Cluster) -> None:
    ranks.run("ddp = DDP(nn.Linear(4, 1))")
    outcome = fails(
        ranks,
        "for i in range(3 if rank == 0 else 2): ddp(torch.ones(2, 4)).sum().backward()\nprint('end', rank)",
    )
    assert isinstance(outcome.error, CollectiveTimeout)
    assert "rank 1 finished, rank 0 waits in all_reduce [5] float32: uneven number of steps (3 vs 2)" in outcome.text
    assert re.search(r"rank 0 waits at Cell In\[\d+\], line 1, in backward", outcome.text)
    nothing_was_lost(ranks)


def test_a_rank_that_stops_early_is_told(ranks: Cluster) -> None:
    ranks.run("ddp = DDP(nn.Linear(4, 1))")
    outcome = fails(
        ranks,
        "for i in range(6):\n    local_val = 0.4 if rank == 1 and i == 3 else 1.0\n    if local_val < 0.5: break\n"
        "    ddp(torch.ones(2, 4)).sum().backward()",
    )
    assert isinstance(outcome.error, CollectiveTimeout)
    assert "rank 1 finished" in outcome.text
    assert "(4 vs 3)" in outcome.text
    nothing_was_lost(ranks)


def test_validation_through_the_wrapper_on_one_rank_says_to_use_the_module(ranks: Cluster) -> None:
    ranks.run("ddp = DDP(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))); ddp(torch.randn(4, 4)).sum().backward()")
    outcome = fails(ranks, "ddp(torch.randn(4, 4))", ranks=[0])
    assert isinstance(outcome.error, CollectiveTimeout)
    assert re.search(r"rank 0 called broadcast .* on a group of 2 ranks, and rank 1 is .* not in it", outcome.text)
    assert "in DistributedDataParallel.forward" in outcome.text
    assert "use ddp.module" in outcome.text
    nothing_was_lost(ranks)
    ranks.run("ddp.module(torch.randn(4, 4));", ranks=[0])


def test_a_cell_of_one_rank_that_calls_the_world_is_told(ranks: Cluster) -> None:
    outcome = fails(ranks, "dist.barrier()", ranks=[0])
    assert isinstance(outcome.error, CollectiveTimeout)
    assert "rank 0 called barrier on a group of 2 ranks, and rank 1 is past the cell or not in it" in outcome.text
    assert "a group of its own" in outcome.text
    nothing_was_lost(ranks)
    ranks.run("alone = [dist.new_group([0]), dist.new_group([1])]")
    ranks.run("x = torch.ones(1); dist.all_reduce(x, group=alone[0]); assert x.item() == 1.0", ranks=[0])
    generation = ranks.world.generation
    nothing_was_lost(ranks)
    assert ranks.world.generation == generation


def test_a_collective_state_dict_on_one_rank_is_told(ranks: Cluster) -> None:
    ranks.run(
        "from torch.distributed.fsdp import fully_shard\n"
        "from torch.distributed.checkpoint.state_dict import get_model_state_dict, StateDictOptions\n"
        "model = fully_shard(nn.Sequential(nn.Linear(4, 4))); options = StateDictOptions(full_state_dict=True)\n"
        "get_model_state_dict(model, options=options);"
    )
    outcome = fails(ranks, "if rank == 0: get_model_state_dict(model, options=options)")
    assert isinstance(outcome.error, CollectiveTimeout)
    assert re.search(r"rank 0 called all_gather .* and rank 1 is past the cell", outcome.text)
    assert re.search(r"rank 0 waits at Cell In\[\d+\], line 1, in get_model_state_dict", outcome.text)
    nothing_was_lost(ranks)


def test_a_receive_that_nobody_will_send_to_is_told(ranks: Cluster) -> None:
    outcome = fails(ranks, "if rank == 0: dist.recv(torch.ones(1), 1)", within=7)
    assert isinstance(outcome.error, CollectiveTimeout)
    assert re.search(r"rank 0 waits in recv at Cell In\[\d+\], line 1, and rank 1 is past the cell", outcome.text)
    nothing_was_lost(ranks)


def test_different_collectives_are_told_by_name(ranks: Cluster) -> None:
    outcome = fails(ranks, "t = torch.ones(4)\nif rank == 0:\n    dist.all_reduce(t)\nelse:\n    dist.broadcast(t, 0)")
    assert isinstance(outcome.error, CollectiveMismatch)
    assert re.search(
        r"rank 0: all_reduce \[4\] float32 at Cell In\[\d+\], line 3; "
        r"rank 1: broadcast \[4\] float32 at Cell In\[\d+\], line 5",
        outcome.text,
    )
    nothing_was_lost(ranks)


def test_a_rank_that_is_only_late_is_told_and_the_cell_goes_on(
    ranks: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    outcome = run(ranks, "def load(): time.sleep(9)\nif rank == 0:\n    load()\ndist.barrier()\nok = True")
    assert outcome.error is None
    told = capfd.readouterr().err
    assert re.search(r"rank 0 has not come to barrier \(collective \d+ of its group\)", told)
    assert re.search(r"rank 1 waits at Cell In\[\d+\], line 4, in barrier", told)
    assert re.search(r"rank 0 is at Cell In\[\d+\], line 1", told)
    assert ranks.pull("ok") == [True, True]
    nothing_was_lost(ranks)


def test_a_frozen_rank_is_waited_for_and_not_taken_for_finished(
    ranks: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    thaw = threading.Timer(12, end(ranks, 1, signal.SIGCONT))
    thaw.start()
    try:
        outcome = run(
            ranks,
            "for i in range(3): time.sleep(0.4); dist.barrier()\nok = True",
            actions=[(0.7, end(ranks, 1, signal.SIGSTOP))],
        )
    finally:
        thaw.join()
    assert outcome.error is None
    told = capfd.readouterr().err
    assert "rank 1 has not come to barrier" in told
    assert "rank 1 does not answer: frozen, or in a native call" in told
    assert ranks.pull("ok") == [True, True]
    nothing_was_lost(ranks)


def test_slow_work_on_all_ranks_is_no_hang(ranks: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    outcome = run(ranks, "for i in range(4): time.sleep(2); dist.barrier()")
    assert outcome.error is None
    assert capfd.readouterr().err == ""


def test_a_cells_timeout_carries_the_report(ranks: Cluster) -> None:
    outcome = fails(ranks, "if rank == 0: time.sleep(60)\ndist.all_reduce(torch.ones(3))", timeout=4, within=9)
    assert isinstance(outcome.error, CollectiveTimeout)
    assert "timeout of 4 s" in outcome.text
    assert "rank 0 has not come to all_reduce [3] float32" in outcome.text
    nothing_was_lost(ranks)


def test_the_groups_own_timeout_names_who_was_missing_and_rank0_first_waits_outside_of_it(
    no_cluster: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with Cluster(2, backend="gloo", collective_timeout=5) as cluster:
        ready(cluster)
        outcome = fails(cluster, "def tokenize(): time.sleep(60)\nif rank == 0: tokenize()\ndist.barrier()", within=9)
        assert outcome.seconds > 4.5
        assert isinstance(outcome.error, CollectiveTimeout)
        assert "rank 0 did not come in 5 s" in outcome.text
        assert "rank 0 has not come to barrier" in outcome.text
        assert re.search(r"rank 0 is at Cell In\[\d+\], line 1", outcome.text)
        nothing_was_lost(cluster)

        capsys.readouterr()
        cluster.run(
            "import time\nwith nbdist.rank0_first():\n    if rank == 0: time.sleep(7)\n    print('mine', rank)\n"
            "dist.barrier()"
        )
        printed = capsys.readouterr()
        assert "[1] waits for rank 0 in rank0_first() (5 s)" in printed.err
        assert printed.out.index("[0] mine 0") < printed.out.index("[1] mine 1")
        failed = fails(cluster, "with nbdist.rank0_first():\n    if rank == 0: raise OSError('no room')", within=5)
        assert "OSError: no room" in failed.text
        nothing_was_lost(cluster)


def test_a_detached_cell_that_hangs_is_told_and_ended(ranks: Cluster) -> None:
    cell = ranks.run("if rank == 0: dist.barrier()", detach=True)
    with pytest.raises(CollectiveTimeout):
        cell.wait(10)
    group_is_whole(ranks)


def test_a_report_takes_nothing_from_a_healthy_cell(ranks: Cluster) -> None:
    began = time.monotonic()
    ranks.run("for i in range(2000): dist.all_reduce(torch.ones(1))")
    assert time.monotonic() - began < 20
