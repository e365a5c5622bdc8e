"""Cells that do what a cell should not: the rank and the group survive."""

from __future__ import annotations

import pytest

from nbdist import Cluster
from tests.faults.faults import fails, group_is_whole, nothing_was_lost, ready, run, stop, stopped
from tests.faults.test_errors import told_by_all


@pytest.mark.parametrize(
    "source", ["raise SystemExit(3)", "exit()", "quit()", "sys.exit()", "exit", "get_ipython().ask_exit()"]
)
def test_to_exit_ends_the_cell_and_not_the_rank(ranks: Cluster, source: str) -> None:
    before = ranks.pids
    outcome = run(ranks, f"reached = 1\n{source}\nreached = 2")
    if outcome.error is not None:
        assert "SystemExit" in told_by_all(outcome, 2)
        assert ranks.pull("reached") == [1, 1]
    assert ranks.pids == before
    nothing_was_lost(ranks)


def test_to_exit_on_one_rank_brings_the_others_out(ranks: Cluster) -> None:
    outcome = fails(ranks, "if rank == 0: sys.exit('enough')\ndist.barrier()")
    assert outcome.lines[0] == "rank 0 failed"
    assert "SystemExit: enough: the cell ended, the rank did not" in outcome.text
    nothing_was_lost(ranks)


@pytest.mark.parametrize(
    ("child", "status"),
    [("pass", 0), ("print('from the child')", 0), ("os._exit(5)", 5 << 8), ("raise ValueError('child')", 1 << 8)],
    ids=["runs on", "prints", "exits", "raises"],
)
def test_a_forked_process_is_no_second_rank(
    ranks: Cluster, child: str, status: int, capfd: pytest.CaptureFixture[str]
) -> None:
    outcome = run(
        ranks,
        f"pid = os.fork()\nif pid == 0:\n    {child}\nelse:\n    status = os.waitpid(pid, 0)[1]; time.sleep(0.3)",
    )
    assert outcome.error is None
    assert ranks.pull("status") == [status, status]
    told = capfd.readouterr()
    if "print" in child:
        assert "from the child" in told.out
    if "raise" in child:
        assert "forked in a cell of rank 0" in told.err
        assert "ValueError" in told.err
    nothing_was_lost(ranks)


def test_a_forked_process_that_outlives_the_cell_disturbs_nobody(ranks: Cluster) -> None:
    ranks.run("pid = os.fork()\nif pid == 0: time.sleep(2)")
    nothing_was_lost(ranks)
    stopped(ranks, "while True: dist.all_reduce(torch.ones(1))", after=0.3)
    nothing_was_lost(ranks)
    assert ranks.evaluate("os.waitpid(pid, 0)[1]") == [0, 0]


def test_processes_of_pythons_own_kind_work(ranks: Cluster) -> None:
    ranks.run(
        "import multiprocessing\n"
        "def square(x): return x * x\n"
        "with multiprocessing.get_context('fork').Pool(2) as pool: squares = pool.map(square, range(4))\n"
        "sleeper = multiprocessing.get_context('fork').Process(target=time.sleep, args=(60,))\n"
        "sleeper.start(); time.sleep(0.3); sleeper.terminate(); sleeper.join(5)",
        timeout=20,
    )
    assert ranks.pull("squares") == [[0, 1, 4, 9]] * 2
    assert ranks.evaluate("sleeper.exitcode") == [-15, -15]
    nothing_was_lost(ranks)


@pytest.mark.parametrize("source", ["input('name? ')", "breakpoint()", "import pdb; pdb.set_trace()"])
def test_what_asks_a_person_does_not_wait_for_one(ranks: Cluster, source: str) -> None:
    outcome = run(ranks, source)
    assert outcome.seconds < 5
    if outcome.error is not None:
        assert "cannot ask for input" in outcome.text
        assert "runner.py" not in outcome.text
    nothing_was_lost(ranks)


@pytest.mark.parametrize("way", ["__repr__", "_repr_html_"])
def test_an_error_while_a_value_is_shown_is_an_error_of_the_cell(ranks: Cluster, way: str) -> None:
    outcome = run(ranks, f"class Bad:\n    def {way}(self): raise ZeroDivisionError('shown')\nBad()")
    assert outcome.error is not None
    assert "ZeroDivisionError: shown" in outcome.text
    nothing_was_lost(ranks)


def test_an_error_whose_text_fails_is_an_error_of_the_cell(ranks: Cluster) -> None:
    outcome = fails(ranks, "class Bad(Exception):\n    def __str__(self): raise KeyError('text')\nraise Bad")
    assert "Bad" in outcome.text
    nothing_was_lost(ranks)


def test_a_collective_while_a_value_is_shown_is_released_too(ranks: Cluster) -> None:
    fails(ranks, "class Waits:\n    def __repr__(self): dist.barrier(); return 'x'\nWaits() if rank else 1 / 0")
    nothing_was_lost(ranks)


@pytest.mark.parametrize("name", ["all_reduce", "barrier", "broadcast", "all_gather", "is_initialized"])
def test_a_replaced_function_of_torch_does_not_keep_the_group_from_being_formed(ranks: Cluster, name: str) -> None:
    ranks.run(f"theirs = dist.{name}; dist.{name} = lambda *args, **kwargs: None")
    try:
        generation = ranks.world.generation
        outcome = fails(ranks, "if rank == 0: raise ValueError('x')\ndist.recv(torch.ones(1), 0)")
        assert outcome.lines[0] == "rank 0 failed"
        assert ranks.world.generation > generation
    finally:
        ranks.run(f"dist.{name} = theirs")
    nothing_was_lost(ranks)


@pytest.mark.parametrize("who", ["True", "rank == 0"])
def test_a_script_that_ends_its_group_leaves_a_new_one(ranks: Cluster, who: str) -> None:
    assert run(ranks, f"if {who}: dist.destroy_process_group()").error is None
    nothing_was_lost(ranks)


def test_a_handler_of_ones_own_does_not_outlive_its_cell(ranks: Cluster) -> None:
    ranks.run("import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)")
    stopped(ranks, "time.sleep(60)", after=0.3)
    nothing_was_lost(ranks)


def test_an_emptied_namespace_does_not_end_the_rank(ranks: Cluster) -> None:
    before = ranks.pids
    ranks.run("%reset -f")
    run(ranks, "exit()")
    assert ranks.pids == before
    ranks.world.form()
    ready(ranks)
    nothing_was_lost(ranks)


def test_a_stop_during_an_import_leaves_no_half_made_module(ranks: Cluster, tmp_path: object) -> None:
    ranks.run(
        f"import pathlib; sys.path.insert(0, {str(tmp_path)!r})\n"
        f"folder = pathlib.Path({str(tmp_path)!r}) / f'slow_{{rank}}'; folder.mkdir(exist_ok=True)\n"
        "(folder / '__init__.py').write_text('from . import first\\nfrom . import second\\nwhole = True')\n"
        "(folder / 'first.py').write_text('import time; time.sleep(1.5)')\n"
        "(folder / 'second.py').write_text('import time; time.sleep(0.2)')"
    )
    ranks.run("import importlib")
    outcome = stopped(ranks, "slow = importlib.import_module(f'slow_{rank}')\ntime.sleep(60)", after=0.5)
    assert outcome.seconds > 1.4
    assert ranks.evaluate("importlib.import_module(f'slow_{rank}').whole") == [True, True]
    nothing_was_lost(ranks)


def test_an_import_that_never_ends_is_interrupted_by_a_second_stop(ranks: Cluster, tmp_path: object) -> None:
    ranks.run(
        f"import pathlib; sys.path.insert(0, {str(tmp_path)!r})\n"
        f"if rank == 0: (pathlib.Path({str(tmp_path)!r}) / 'endless.py').write_text('import time; time.sleep(60)')\n"
        "dist.barrier()"
    )
    outcome = fails(ranks, "import endless", within=8, actions=[(0.5, stop), (3.0, stop)])
    assert isinstance(outcome.error, KeyboardInterrupt)
    nothing_was_lost(ranks)


def test_threads_of_a_cell_go_on_and_disturb_nobody(ranks: Cluster) -> None:
    ranks.run(
        "import threading\nticks = 0\n"
        "def tick():\n    global ticks\n    while ticks < 20: time.sleep(0.1); ticks += 1\n"
        "threading.Thread(target=tick, daemon=True).start()"
    )
    fails(ranks, "if rank == 1: raise ValueError('x')\ndist.barrier()")
    group_is_whole(ranks)
    assert all(ticks > 0 for ticks in ranks.pull("ticks"))
