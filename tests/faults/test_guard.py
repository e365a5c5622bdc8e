"""``%cluster debug on``: a mismatch is an error on every rank, before anything runs and without costing a process."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from nbdist import Cluster
from tests.faults.faults import end, errors, fails, group_is_whole, nothing_was_lost, ready, run


@pytest.fixture
def guarded(ranks: Cluster) -> Iterator[Cluster]:
    ranks.debug(True)
    yield ranks
    ranks.debug(False)


@pytest.mark.parametrize(
    ("zero", "one", "told"),
    [
        ("dist.all_reduce(torch.ones(4))", "dist.all_reduce(torch.ones(8))", "rank 1: all_reduce [8] float32"),
        ("dist.all_reduce(torch.ones(4))", "dist.all_reduce(torch.ones(4).double())", "rank 1: all_reduce [4] float64"),
        ("dist.all_reduce(torch.ones(4))", "dist.broadcast(torch.ones(4), 0)", "rank 1: broadcast [4] float32"),
        ("dist.all_reduce(torch.ones(4))", "dist.barrier()", "rank 1: barrier"),
        (
            "dist.all_reduce(torch.ones(4), op=dist.ReduceOp.MAX)",
            "dist.all_reduce(torch.ones(4))",
            "rank 0: all_reduce [4] float32",
        ),
        ("dist.broadcast(torch.ones(4), 0)", "dist.broadcast(torch.ones(4), 1)", "root 1"),
    ],
    ids=["shape", "dtype", "op", "barrier", "reduction", "root"],
)
def test_a_mismatch_is_an_error_on_every_rank(guarded: Cluster, zero: str, one: str, told: str) -> None:
    generation = guarded.world.generation
    outcome = fails(guarded, f"if rank == 0:\n    {zero}\nelse:\n    {one}", within=3)
    assert {error.ename for error in errors(outcome)} == {"CollectiveMismatch"}
    assert outcome.lines[0] == "ranks 0-1 failed"
    assert told in outcome.text
    assert re.search(r"rank 0: all_reduce .* at Cell In\[\d+\], line 2|rank 0: broadcast .* line 2", outcome.text)
    assert re.search(r"rank 1: .* at Cell In\[\d+\], line 4", outcome.text)
    assert guarded.world.generation == generation  # nothing ran, so nothing is broken
    nothing_was_lost(guarded)


def test_another_order_is_told_at_the_first_difference(guarded: Cluster) -> None:
    outcome = fails(
        guarded,
        "t = torch.ones(4)\nif rank:\n    dist.all_reduce(t)\n    dist.broadcast(t, 0)\nelse:\n"
        "    dist.broadcast(t, 0)\n    dist.all_reduce(t)",
        within=3,
    )
    assert "rank 0: broadcast [4] float32" in outcome.text
    assert "rank 1: all_reduce [4] float32" in outcome.text
    nothing_was_lost(guarded)


@pytest.mark.parametrize(
    "source",
    [
        "out = torch.empty(2); dist.scatter(out, [torch.ones(2)] * 2 if rank == 0 else None, src=0)",
        "dist.gather(torch.ones(2), [torch.empty(2)] * 2 if rank == 0 else None, dst=0)",
        "out = torch.empty(4 if rank == 0 else 2)\n"
        "dist.all_to_all_single(out, torch.ones(3), [2, 2] if rank == 0 else [1, 1], [2, 1])",
        "dist.all_gather_object([None, None], 'x' * (1 + rank))",
        "dist.broadcast_object_list([rank], src=0)",
        "dist.all_reduce(torch.ones(2), async_op=True).wait()",
        "g = dist.new_group([0, 1]); dist.all_reduce(torch.ones(2), group=g); dist.barrier(group=g)",
        "ddp = DDP(nn.Linear(4, 1))\nfor i in range(3): ddp(torch.ones(2, 4)).sum().backward()",
    ],
    ids=["scatter", "gather", "all_to_all", "objects", "object_list", "async_op", "new_group", "ddp"],
)
def test_what_is_right_is_let_through(guarded: Cluster, source: str) -> None:
    assert run(guarded, source).error is None
    nothing_was_lost(guarded)


def test_an_error_elsewhere_is_that_error(guarded: Cluster) -> None:
    outcome = fails(guarded, "if rank == 1: raise ValueError('x')\ndist.all_reduce(torch.ones(1))")
    assert outcome.lines[0] == "rank 1 failed"
    assert "ValueError: x" in outcome.text
    nothing_was_lost(guarded)


def test_the_guard_stays_over_generations_and_for_a_rank_that_is_new(guarded: Cluster) -> None:
    guarded.world.form()
    fails(guarded, "dist.all_reduce(torch.ones(4 + rank))", within=3)
    run(guarded, "time.sleep(60)", actions=[(0.2, end(guarded, 1))])
    ready(guarded)
    outcome = fails(guarded, "dist.all_reduce(torch.ones(4 + rank))", within=3)
    assert {error.ename for error in errors(outcome)} == {"CollectiveMismatch"}
    group_is_whole(guarded)


def test_a_function_that_a_cell_has_replaced_is_left_alone(guarded: Cluster) -> None:
    guarded.run("mine = lambda *args, **kwargs: 'mine'; theirs = dist.all_reduce; dist.all_reduce = mine")
    guarded.debug(False)
    guarded.debug(True)
    assert guarded.evaluate("dist.all_reduce(1)") == ["mine", "mine"]
    guarded.run("dist.all_reduce = theirs")


def test_without_the_guard_a_mismatch_costs_a_rank_and_says_why(ranks: Cluster) -> None:
    before = ranks.pids
    outcome = run(ranks, "dist.all_reduce(torch.ones(4 if rank == 0 else 8))")
    assert outcome.seconds < 5
    assert re.search(r"was killed by signal 6 \(SIGABRT\): often different shapes or dtypes", outcome.text)
    assert "collective mismatch" in outcome.text  # from the tail of its standard error
    assert "%cluster repair" in outcome.text
    assert "replaced by an empty one" in ranks.repair()
    living = [rank for rank in before if ranks.pids[rank] == before[rank]]
    assert len(living) == 1
    assert ranks.pull("kept", living[0]) == 100 + living[0]
    group_is_whole(ranks)


def test_torchs_own_debug_level_is_lowered_and_the_notebook_says_so(
    no_cluster: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    with Cluster(2, backend="gloo") as cluster:
        told = [line for line in capfd.readouterr().err.splitlines() if "TORCH_DISTRIBUTED_DEBUG" in line]
        assert len(told) == 1
        assert "lowered to INFO" in told[0]
        assert "%cluster debug on" in told[0]
        ready(cluster)
        cluster.run("ddp = DDP(nn.Linear(4, 1)); ddp(torch.ones(2, 4)).sum().backward()")
        assert cluster.evaluate("os.environ['TORCH_DISTRIBUTED_DEBUG']") == ["INFO", "INFO"]
        nothing_was_lost(cluster)
