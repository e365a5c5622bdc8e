"""Stop, wherever the ranks are: all come back to the prompt, and the next cell runs."""

from __future__ import annotations

import re
import time

import pytest

from nbdist import Cluster
from tests.cluster.checks import group_is_whole as notebooks_group_is_whole
from tests.cluster.checks import pids, value
from tests.faults.faults import fails, nothing_was_lost, run, stop, stopped
from tests.kernel import Kernel

LOADER = (
    "class Slow(torch.utils.data.Dataset):\n"
    "    def __len__(self): return 1000\n"
    "    def __getitem__(self, i): time.sleep(1); return i\n"
    "for batch in torch.utils.data.DataLoader(Slow(), num_workers=2): dist.all_reduce(batch)"
)

WHERE = {
    "python": "while True: pass",
    "sleep": "time.sleep(60)",
    "all_reduce": "while True: dist.all_reduce(torch.ones(1000))",
    "large": "x = torch.ones(4_000_000)\nwhile True: dist.all_reduce(x)",
    "ddp": "ddp = DDP(nn.Linear(4, 1))\nwhile True: ddp(torch.ones(2, 4)).sum().backward()",
    "loader": LOADER,
    "one rank in a collective": "if rank == 0: dist.all_reduce(torch.ones(1))\nelse: time.sleep(60)",
    "one rank in a receive": "if rank == 0: dist.recv(torch.ones(1), 1)\nelse: time.sleep(60)",
    "async_op": "if rank == 0: dist.all_reduce(torch.ones(1), async_op=True).wait()\nelse: time.sleep(60)",
    "one rank in new_group": "if rank == 0: dist.new_group([0, 1])\nelse: time.sleep(60)",
    "receive without a frame of torch": (
        "if rank == 0:\n    work = dist.irecv(torch.ones(1), 1)\n    work.wait()\nelse: time.sleep(60)"
    ),
    "await": "import asyncio\nawait asyncio.sleep(60)",
    "child": "import subprocess\nsubprocess.run(['sleep', '60'])",
    "native": "a = torch.randn(1500, 1500)\nwhile True: a = (a @ a).clamp(-1, 1)",
}


@pytest.mark.parametrize("source", WHERE.values(), ids=WHERE)
def test_stop_brings_all_ranks_back(ranks: Cluster, source: str) -> None:
    outcome = stopped(ranks, source, after=0.6, within=30 if "DDP" in source else 5)
    assert outcome.lines[0] == "KeyboardInterrupt"
    assert re.search(r"(interrupted|released from \S.*) at Cell In\[\d+\], line \d", outcome.text)
    nothing_was_lost(ranks)


def test_the_cell_says_where_each_rank_was(ranks: Cluster) -> None:
    outcome = stopped(ranks, "def step(): time.sleep(60)\nif rank == 0:\n    dist.barrier()\nelse:\n    step()")
    assert re.fullmatch(r"rank 0: released from barrier at Cell In\[\d+\], line 3", outcome.lines[1])
    assert re.fullmatch(r"rank 1: interrupted at Cell In\[\d+\], line 1", outcome.lines[2])
    nothing_was_lost(ranks)


@pytest.mark.parametrize("after", [0.002, 0.005, 0.01, 0.02, 0.05])
def test_a_stop_right_after_the_start_of_a_cell_is_not_lost(ranks: Cluster, after: float) -> None:
    outcome = run(ranks, "while True: pass", actions=[(after, stop)])
    assert isinstance(outcome.error, KeyboardInterrupt)
    assert outcome.seconds < 5
    nothing_was_lost(ranks)


@pytest.mark.parametrize("gap", [0.0, 0.01, 0.1, 0.5])
def test_stop_pressed_twice_loses_nothing(ranks: Cluster, gap: float) -> None:
    source = "while True: dist.all_reduce(torch.ones(1000))"
    outcome = fails(ranks, source, actions=[(0.5, stop), (0.5 + gap, stop)])
    assert isinstance(outcome.error, KeyboardInterrupt)
    nothing_was_lost(ranks)


def test_a_second_stop_says_that_it_insists(ranks: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    source = (
        "caught = 0\nwhile True:\n    try: time.sleep(60)\n    except KeyboardInterrupt:\n"
        "        caught += 1\n        if caught == 2: raise"
    )
    outcome = fails(ranks, source, actions=[(0.5, stop), (1.5, stop)])
    assert isinstance(outcome.error, KeyboardInterrupt)
    told = capfd.readouterr().err
    assert "ranks 0-1 interrupted again; one more Stop ends the process" in told
    assert ranks.pull("caught") == [2, 2]
    nothing_was_lost(ranks)


def test_code_that_cannot_be_stopped_is_ended_by_force_and_replaced(ranks: Cluster) -> None:
    source = "while rank == 1:\n    try: time.sleep(1)\n    except KeyboardInterrupt: print('no', rank)\ndist.barrier()"
    before = ranks.pids
    outcome = run(ranks, source, actions=[(0.5, stop), (3.5, stop), (6.5, stop)])
    assert isinstance(outcome.error, KeyboardInterrupt)
    assert outcome.seconds < 6.5 + 5
    assert re.search(r"rank 1: did not come back", outcome.text)
    assert re.search(r"rank 0: released from barrier at Cell In\[\d+\], line 4", outcome.text)
    assert ranks.pids[0] == before[0]
    assert ranks.pids[1] != before[1]
    assert ranks.evaluate("globals().get('kept')") == [100, None]
    ranks.run("x_ = torch.ones(1); dist.all_reduce(x_); assert x_.item() == 2.0")


def test_what_a_cell_does_when_it_is_interrupted_is_done(ranks: Cluster) -> None:
    outcome = stopped(ranks, "try: time.sleep(60)\nexcept KeyboardInterrupt: time.sleep(1); cleaned = True")
    assert "ranks 0-1: had finished the cell" in outcome.text
    assert ranks.pull("cleaned") == [True, True]
    nothing_was_lost(ranks)


def test_a_stop_while_an_error_is_shown_does_not_lose_the_reply(ranks: Cluster) -> None:
    # the traceback goes through files that take a while to read, and through a text that takes its time
    source = "class Slow(Exception):\n    def __str__(self): time.sleep(1); return 'slow'\nraise Slow"
    outcome = fails(ranks, source, within=10, actions=[(0.5, stop)])
    assert outcome.name in ("DistributedError", "KeyboardInterrupt")
    nothing_was_lost(ranks)


def test_loader_workers_are_gone_after_a_stop_and_do_not_add_up(ranks: Cluster) -> None:
    ranks.run("import psutil")
    for _ in range(3):
        outcome = stopped(ranks, LOADER, after=1.0)
        assert len(outcome.lines) <= 3
    deadline = time.monotonic() + 10
    children = "len(psutil.Process().children(recursive=True))"
    while any(ranks.evaluate(children)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert ranks.evaluate(children) == [0, 0]
    nothing_was_lost(ranks)


def test_a_trainer_stops_at_the_same_step_on_every_rank_and_goes_on(ranks: Cluster) -> None:
    ranks.run(
        "data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))\n"
        "loader = nbdist.distributed_loader(data, batch_size=4)\n"
        "model = nbdist.parallelize(nn.Linear(4, 1))\n"
        "trainer = nbdist.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), F.mse_loss, loader)"
    )
    outcome = stopped(ranks, "trainer.train(1_000_000)", after=1.5)
    assert re.match(r"stopped after step \d+ on ranks 0-1", outcome.lines[1])
    steps = ranks.evaluate("trainer.global_step")
    assert steps[0] == steps[1] > 0
    ranks.train(3)
    assert ranks.evaluate("trainer.global_step") == [steps[0] + 3] * 2
    nothing_was_lost(ranks)


def test_the_panels_stop_and_the_magic_stop_too(ranks: Cluster) -> None:
    outcome = fails(ranks, "while True: dist.all_reduce(torch.ones(1))", actions=[(0.5, ranks.request_stop)])
    assert isinstance(outcome.error, KeyboardInterrupt)
    nothing_was_lost(ranks)
    cell = ranks.run("time.sleep(60)", detach=True)
    time.sleep(0.5)
    with pytest.raises(KeyboardInterrupt):
        ranks.interrupt()
    assert cell.finished.is_set()
    nothing_was_lost(ranks)


def test_stop_without_a_cell_does_nothing(ranks: Cluster) -> None:
    ranks.interrupt()
    ranks.request_stop()
    nothing_was_lost(ranks)


def test_a_cell_of_some_ranks_is_stopped_and_the_others_never_notice(ranks: Cluster) -> None:
    stopped(ranks, "time.sleep(60)", after=0.5, ranks=[0])
    generation = ranks.world.generation
    nothing_was_lost(ranks)
    assert ranks.world.generation == generation


def test_the_group_is_the_same_after_a_stop_that_touched_no_collective(ranks: Cluster) -> None:
    ranks.run("ddp = DDP(nn.Linear(4, 1)); ddp(torch.ones(2, 4)).sum().backward()")
    generation = ranks.world.generation
    stopped(ranks, "time.sleep(60)", after=0.5)
    assert ranks.world.generation == generation
    ranks.run("ddp(torch.ones(2, 4)).sum().backward()")


# -- in a real notebook ----------------------------------------------------------------------------------------------


def test_the_notebooks_stop_ends_a_training_loop(shared_notebook: Kernel) -> None:
    before = pids(shared_notebook)
    shared_notebook.check(
        "%%distributed\nfrom torch.nn.parallel import DistributedDataParallel as DDP\n"
        "ddp = DDP(nn.Linear(4, 1)); kept = 5"
    )
    cell = shared_notebook.run(
        "%%distributed\nwhile True: ddp(torch.ones(2, 4)).sum().backward()",
        timeout=30,
        actions=[(1.0, shared_notebook.interrupt)],
    )
    assert cell.error[0] == "KeyboardInterrupt"
    assert cell.seconds < 6
    assert re.search(r"at Cell In\[\d+\], line 2", cell.text)
    assert pids(shared_notebook) == before
    notebooks_group_is_whole(shared_notebook)
    assert shared_notebook.check("%%distributed\nkept").text == "[0-1] 5\n"


def test_cells_that_were_queued_behind_a_stopped_one_do_not_run_and_the_next_one_does(shared_notebook: Kernel) -> None:
    shared_notebook.check("reached = 0")
    cells = shared_notebook.run_all(
        ["%%distributed\nimport time; time.sleep(60)", "reached = 1"],
        timeout=30,
        actions=[(1.0, shared_notebook.interrupt)],
    )
    assert [cell.status for cell in cells] == ["error", "aborted"]
    assert value(shared_notebook, "reached") == 0
    notebooks_group_is_whole(shared_notebook)
