"""A rank dies: it is named, the others come out with their state, and its place can be filled."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from nbdist import Cluster, ClusterError
from tests.faults.faults import end, frozen, group_is_whole, nothing_was_lost, ready, run, stop

NAMED = 2.0  # seconds until a death is named
REPAIRED = 10.0  # and until its place is filled; 3 on an idle machine, which tests/benchmarks sees to


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("if rank == 1: os.kill(os.getpid(), 9)\ntime.sleep(60)", r"was killed by signal 9 \(SIGKILL\): often out of"),
        ("if rank == 1: os.kill(os.getpid(), 9)\ndist.barrier()", r"was killed by signal 9 \(SIGKILL\)"),
        ("if rank == 1: os.abort()\ndist.barrier()", r"was killed by signal 6 \(SIGABRT\)"),
        ("if rank == 1: os._exit(3)\ndist.barrier()", r"exited with code 3"),
        ("import ctypes\nif rank == 1: ctypes.string_at(0)\ndist.barrier()", r"was killed by signal 11 \(SIGSEGV\)"),
        ("if rank == 1: dist.barrier(); os.kill(os.getpid(), 9)\nwhile True: dist.barrier()", r".*\(SIGKILL\)"),
    ],
    ids=["sleep", "barrier", "abort", "exit", "segfault", "loop"],
)
def test_a_death_is_named_and_the_others_come_out(ranks: Cluster, source: str, told: str) -> None:
    before = ranks.pids
    outcome = run(ranks, source)
    assert outcome.seconds < NAMED + 1
    assert outcome.name == "DistributedError"
    assert outcome.lines[0] == "rank 1 failed"
    host = ranks.world.ranks[1].host
    assert re.search(rf"rank 1 \(pid {before[1]}, host {re.escape(host)}\) {told}", outcome.text)
    assert "%cluster repair puts an empty rank in its place" in outcome.text
    assert re.search(r"rank 0: (interrupted|released from barrier) at Cell In\[\d+\], line \d", outcome.lines[-1])
    assert ranks.status()[1].state.startswith("dead")
    assert ranks.status()[0].state == "idle"
    with pytest.raises(ClusterError, match=r"rank 1 dead: \(pid \d+\) .*\. Replace with %cluster repair"):
        ranks.run("1")
    began = time.monotonic()
    assert ranks.repair() == "rank 1 replaced by an empty one; rank 0 kept its state."
    assert time.monotonic() - began < REPAIRED
    assert ranks.pids[0] == before[0]
    assert ranks.pids[1] != before[1]
    assert ranks.evaluate("(rank, world_size, globals().get('kept'))") == [(0, 2, 100), (1, 2, None)]
    group_is_whole(ranks)


def test_what_a_dying_rank_wrote_is_shown(ranks: Cluster) -> None:
    outcome = run(ranks, "if rank == 1: os.write(2, b'native library: fatal 42\\n'); os._exit(3)\ndist.barrier()")
    assert "native library: fatal 42" in outcome.text


@pytest.mark.parametrize("victim", [0, 2])
def test_of_four_ranks_three_keep_their_state(four_ranks: Cluster, victim: int) -> None:
    before = four_ranks.pids
    outcome = run(
        four_ranks, "while True: dist.all_reduce(torch.ones(100_000))", actions=[(0.5, end(four_ranks, victim))]
    )
    assert outcome.seconds < 0.5 + NAMED + 1
    assert outcome.lines[0] == f"rank {victim} failed"
    four_ranks.repair()
    living = [rank for rank in range(4) if rank != victim]
    assert four_ranks.pull("kept", living) == [100 + rank for rank in living]
    assert {rank: four_ranks.pids[rank] for rank in living} == {rank: before[rank] for rank in living}
    group_is_whole(four_ranks)


def test_two_deaths_at_once_are_repaired_at_once(four_ranks: Cluster) -> None:
    kills = [(0.3, end(four_ranks, 1)), (0.3, end(four_ranks, 3))]
    outcome = run(four_ranks, "dist.barrier(); time.sleep(60)", actions=kills)
    assert "rank 1 (pid" in outcome.text
    assert "rank 3" in outcome.text
    assert four_ranks.repair() == "ranks 1, 3 replaced by empty ones; ranks 0, 2 kept their state."
    assert four_ranks.pull("kept", [0, 2]) == [100, 102]
    group_is_whole(four_ranks)


def test_a_death_while_nothing_runs_is_told_at_once_where_the_cluster_was_started(
    ranks: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    pid = ranks.pids[1]
    end(ranks, 1)()
    told, deadline = "", time.monotonic() + NAMED
    while not told and time.monotonic() < deadline:
        time.sleep(0.05)
        told = capfd.readouterr().err
    assert told.startswith(f"rank 1 (pid {pid}) was killed by signal 9 (SIGKILL)")
    assert "%cluster repair" in told
    ranks.repair()
    group_is_whole(ranks)


def test_a_death_of_a_rank_that_does_not_run_the_cell_leaves_the_cell_alone(ranks: Cluster) -> None:
    outcome = run(ranks, "time.sleep(1); done = 7", ranks=[0], actions=[(0.2, end(ranks, 1))])
    assert outcome.error is None
    assert ranks.pull("done", 0) == 7
    ranks.repair()
    group_is_whole(ranks)


def test_a_death_of_a_rank_that_does_not_run_the_cell_is_named_when_the_cell_needs_it(ranks: Cluster) -> None:
    outcome = run(ranks, "dist.barrier()", ranks=[0], actions=[(0.3, end(ranks, 1))])
    assert outcome.seconds < NAMED + 1
    assert outcome.lines[0] == "rank 1 failed"
    assert "(SIGKILL)" in outcome.text
    assert re.search(r"rank 0: released from barrier", outcome.lines[-1])
    ranks.repair()
    group_is_whole(ranks)


def test_the_trainer_of_a_living_rank_can_be_copied_to_the_new_one(ranks: Cluster) -> None:
    ranks.run(
        "data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))\n"
        "loader = nbdist.distributed_loader(data, batch_size=4)\n"
        "model = nbdist.parallelize(nn.Linear(4, 1))\n"
        "trainer = nbdist.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), F.mse_loss, loader)"
    )
    ranks.train(5)
    run(ranks, "time.sleep(60)", actions=[(0.2, end(ranks, 1))])
    assert "trainer copied from rank 0" in ranks.repair(copy="trainer")
    assert ranks.evaluate("trainer.global_step") == [5, 5]
    ranks.train(3)
    assert ranks.evaluate("trainer.global_step") == [8, 8]
    weights = ranks.evaluate("trainer.model.module.weight.tolist()")
    assert weights[0] == weights[1]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_after_a_death_training_goes_on_from_the_last_checkpoint(ranks: Cluster, tmp_path: Path, strategy: str) -> None:
    setup = (
        f"nbdist.seed(0)\nmodel = nbdist.parallelize(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)), {strategy!r})\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)\n"
        "data = torch.utils.data.TensorDataset(torch.arange(256.0).reshape(64, 4) / 256, torch.ones(64, 1))\n"
        "loader = nbdist.distributed_loader(data, batch_size=4)\n"
        "trainer = nbdist.Trainer(model, optimizer, F.mse_loss, loader)\n"
        "def whole(): return [p.full_tensor() if hasattr(p, 'full_tensor') else p.data for p in model.parameters()]"
    )
    ranks.run(setup)
    ranks.train(12)
    ranks.run("end = torch.cat([p.flatten() for p in whole()])")
    (undisturbed, _) = ranks.pull("end")
    ranks.run(setup)
    ranks.train(10, checkpoint_every=4, checkpoint_dir=str(tmp_path))
    assert run(ranks, "import os\nif rank == 1: os._exit(3)\ndist.barrier()").name == "DistributedError"
    ranks.repair()
    ranks.run(setup)
    ranks.run(f"nbdist.load_checkpoint({str(tmp_path)!r}, trainer=trainer)\nreached = trainer.global_step")
    assert ranks.pull("reached") == [8, 8]
    ranks.train(4)
    ranks.run("end = torch.cat([p.flatten() for p in whole()])")
    assert all(bool((end == undisturbed).all()) for end in ranks.pull("end"))


def test_nothing_to_repair_is_said(ranks: Cluster) -> None:
    before = ranks.pids
    assert ranks.repair() == "Nothing to repair: every rank lives and the group is whole."
    assert ranks.pids == before
    nothing_was_lost(ranks)


def test_repair_and_resize_wait_for_no_running_cell(ranks: Cluster) -> None:
    cell = ranks.run("time.sleep(60)", detach=True)
    for call in (ranks.repair, lambda: ranks.resize(3)):
        with pytest.raises(ClusterError, match=r"still runs on the ranks\. First %cluster interrupt"):
            call()
    with pytest.raises(KeyboardInterrupt):
        ranks.interrupt()
    assert cell.finished.is_set()


@pytest.mark.parametrize(("n", "told"), [(0, "at least 1 rank"), (-1, "at least 1 rank"), (10_000, "at most")])
def test_a_size_that_cannot_be_is_refused(ranks: Cluster, n: int, told: str) -> None:
    before = ranks.pids
    with pytest.raises(ValueError, match=told):
        ranks.resize(n)
    assert ranks.pids == before


def test_ranks_that_stay_keep_their_state_when_the_world_grows_and_shrinks(ranks: Cluster) -> None:
    before = ranks.pids
    assert ranks.resize(3) == "The world grew from 2 to 3 ranks; rank 2 is empty."
    assert ranks.evaluate("(world_size, globals().get('kept'))") == [(3, 100), (3, 101), (3, None)]
    group_is_whole(ranks)
    assert ranks.resize(1) == "The world shrank from 3 to 1 ranks; rank 0 kept its state."
    group_is_whole(ranks)
    ranks.resize(2)
    assert ranks.pids[0] == before[0]
    assert ranks.pull("kept", 0) == 100


def test_a_frozen_rank_is_not_dead(ranks: Cluster) -> None:
    before = ranks.pids
    with frozen(before[1]):
        time.sleep(3)
        began = time.monotonic()
        status = ranks.status()
        assert time.monotonic() - began < 1
        assert "no answer" in status[1].state
        assert status[0].state == "idle"
    assert ranks.pids == before
    nothing_was_lost(ranks)


def test_a_rank_in_a_native_call_that_keeps_the_interpreter_is_not_dead(ranks: Cluster) -> None:
    # called so, C's sleep lets no other thread of the process run
    before = ranks.pids
    cell = ranks.run("import ctypes\nif rank == 1: ctypes.PyDLL(None).sleep(4)\ndist.barrier()", detach=True)
    time.sleep(1)
    began = time.monotonic()
    status = ranks.status()
    assert time.monotonic() - began < 1
    assert "running" in status[0].state
    with pytest.raises(KeyboardInterrupt):
        ranks.interrupt()
    assert cell.finished.is_set()
    assert ranks.pids == before
    nothing_was_lost(ranks)


def test_a_frozen_rank_is_stopped_when_it_thaws(ranks: Cluster) -> None:
    before = ranks.pids
    cell = ranks.run("for i in range(1000): time.sleep(0.05); dist.barrier()", detach=True)
    time.sleep(0.5)
    with frozen(before[1]):
        ranks.request_stop()
        time.sleep(1.5)
        assert not cell.finished.is_set()
    with pytest.raises(KeyboardInterrupt):
        cell.wait(10)
    assert ranks.pids == before
    nothing_was_lost(ranks)


def test_a_rank_that_dies_while_it_is_being_replaced_is_told_and_can_be_replaced(ranks: Cluster) -> None:
    for _ in range(3):
        run(ranks, "time.sleep(60)", actions=[(0.1, end(ranks, 1))])
        ranks.repair()
    ready(ranks)
    nothing_was_lost(ranks)


DIES_BEFORE_IT_COMES = "if rank == 1: process_group.open_store = lambda *_: os.kill(os.getpid(), 9)"
DIES_BEFORE_IT_CONNECTS = """
def wait(self, keys, *limit, usual=store.LocalStore.wait):
    if "came" not in keys[0]:
        os.kill(os.getpid(), 9)
    usual(self, keys, *limit)
if rank == 1: store.LocalStore.wait = wait
"""


@pytest.mark.parametrize("moment", [DIES_BEFORE_IT_COMES, DIES_BEFORE_IT_CONNECTS], ids=["comes", "connects"])
def test_a_death_while_the_group_is_formed_leaves_nobody_waiting(
    ranks: Cluster, moment: str, capfd: pytest.CaptureFixture[str]
) -> None:
    ranks.run("from nbdist.engine.world import process_group, store")
    outcome = run(ranks, f"{moment}\ndist.destroy_process_group()")
    assert outcome.error is None
    assert outcome.seconds < NAMED + 1
    assert (
        "killed by signal 9 (SIGKILL): often out of memory. Replace it with %cluster repair." in capfd.readouterr().err
    )
    began = time.monotonic()
    assert ranks.repair() == "rank 1 replaced by an empty one; rank 0 kept its state."
    assert time.monotonic() - began < REPAIRED
    assert ranks.evaluate("globals().get('kept')") == [100, None]
    group_is_whole(ranks)


def test_stop_ends_the_forming_of_the_group_while_a_rank_is_frozen(ranks: Cluster) -> None:
    before = ranks.pids
    freeze = (
        "from nbdist.engine.world import process_group\n"
        "def freeze(*arguments, open_store=process_group.open_store):\n"
        "    process_group.open_store = open_store\n"
        "    os.kill(os.getpid(), 19)\n"
        "    return open_store(*arguments)\n"
        "if rank == 1: process_group.open_store = freeze\n"
        "dist.destroy_process_group()"
    )
    outcome = run(ranks, freeze, actions=[(1.0, stop)])
    os.kill(before[1], signal.SIGCONT)
    assert isinstance(outcome.error, KeyboardInterrupt), outcome.text
    assert outcome.seconds < 1.0 + NAMED + 1
    assert ranks.pids == before
    nothing_was_lost(ranks)


def test_deaths_are_replaced_without_asking_where_that_was_wanted(ranks: Cluster) -> None:
    ranks.repair_mode = "auto"
    try:
        outcome = run(ranks, "dist.barrier(); time.sleep(60)", actions=[(0.3, end(ranks, 1))])
        assert outcome.lines[0] == "rank 1 failed"
        assert ranks.evaluate("globals().get('kept')") == [100, None]
        group_is_whole(ranks)
    finally:
        ranks.repair_mode = "ask"


def test_no_process_is_left_of_the_dead(ranks: Cluster) -> None:
    source = (
        "class Items(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 1000\n"
        "    def __getitem__(self, i): time.sleep(0.05); return i\n"
        "for batch in torch.utils.data.DataLoader(Items(), num_workers=2): dist.all_reduce(batch)"
    )
    ranks.run("import psutil")
    before = ranks.pids[1]
    run(ranks, source, actions=[(1.0, end(ranks, 1))])
    deadline = time.monotonic() + 5
    while of_session(before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert of_session(before) == []
    ranks.repair()


def of_session(leader: int) -> list[int]:
    """Processes of the session that a rank led."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if os.getsid(int(name)) == leader:
                    found.append(int(name))
            except ProcessLookupError:
                continue
    return found


def test_a_signal_that_a_rank_handles_is_no_death(ranks: Cluster) -> None:
    before = ranks.pids
    os.kill(before[1], signal.SIGINT)  # idle: nothing to interrupt
    nothing_was_lost(ranks)
    assert ranks.pids == before
