"""%%distributed: IPython on all ranks, and a failed cell that is a failed cell."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
from psutil import pid_exists

from nbdist import Cluster
from nbdist.errors import CollectiveTimeout, DistributedError
from tests.cluster.checks import fails, group_is_whole, pids, value
from tests.kernel import Kernel

# -- what a cell can hold --------------------------------------------------------------------------------------------


def test_a_rank_has_its_names_from_the_start(shared_notebook: Kernel) -> None:
    cell = shared_notebook.check(
        "%%distributed\n"
        "assert nn is torch.nn and F is torch.nn.functional and dist is torch.distributed\n"
        "print(rank, world_size, local_rank, node_rank, device, nbdist.__name__)"
    )
    assert cell.text.splitlines() == ["[0] 0 2 0 0 cpu nbdist", "[1] 1 2 1 0 cpu nbdist"]


def test_the_last_expression_is_shown_and_equal_values_fold(shared_notebook: Kernel) -> None:
    assert shared_notebook.check("%%distributed\nx = 7\nx").text == "[0-1] 7\n"
    assert shared_notebook.check("%%distributed\nrank * 2").text == "[0] 0\n[1] 2\n"
    assert shared_notebook.check("%%distributed\nx = 7").text == ""
    assert shared_notebook.check("%%distributed\nx;").text == ""
    assert shared_notebook.check("%%distributed\nNone").text == ""


def test_the_example_of_the_front_page(shared_notebook: Kernel) -> None:
    cell = shared_notebook.check(
        "%%distributed\nx = torch.full((1,), rank + 1.0, device=device)\ndist.all_reduce(x)\nx.item()"
    )
    assert cell.text == "[0-1] 3.0\n"


def test_state_stays_on_the_ranks_between_cells(shared_notebook: Kernel) -> None:
    shared_notebook.check("%%distributed\ndef double(v):\n    return 2 * v\nkept = double(rank)")
    assert shared_notebook.check("%%distributed\ndouble(kept)").text == "[0] 0\n[1] 4\n"


def test_magics_and_shell_commands_run_on_the_ranks(shared_notebook: Kernel) -> None:
    assert shared_notebook.check("%%distributed\n!echo from $((20 + 3))").text == "[0-1] from 23\n"
    assert shared_notebook.check("%%distributed\nlines = !echo a\nlines").text.strip() == "[0-1] ['a']"
    timed = shared_notebook.check("%%distributed\n%time total = sum(range(1000))\ntotal").text
    assert "Wall time" in timed
    assert "[0-1] 499500" in timed
    assert "per loop" in shared_notebook.check("%%distributed\n%timeit -n1 -r1 pass").text


def test_a_cell_magic_may_be_the_first_line_of_the_cell(shared_notebook: Kernel) -> None:
    cell = shared_notebook.check("%%distributed\n%%bash\necho from bash")
    assert cell.text == "[0-1] from bash\n"


def test_top_level_await_works_and_the_next_cell_too(shared_notebook: Kernel) -> None:
    cell = shared_notebook.check("%%distributed\nimport asyncio\nawait asyncio.sleep(0.01)\nawait asyncio.sleep(0, 5)")
    assert cell.text == "[0-1] 5\n"
    group_is_whole(shared_notebook)


def test_a_question_mark_shows_the_help_of_a_name_on_the_ranks(shared_notebook: Kernel) -> None:
    shared_notebook.check('%%distributed\ndef helped(a, b=2):\n    """Adds what it is given."""')
    cell = shared_notebook.check("%%distributed\nhelped?")
    assert "Adds what it is given." in cell.text
    assert "helped(a, b=2)" in cell.text
    assert cell.text.count("Adds what it is given.") == 1


def test_names_of_rank_0_are_completed_inside_a_distributed_cell(shared_notebook: Kernel) -> None:
    shared_notebook.check("%%distributed\nlearning_rate_of_ranks = 0.1\nlayer_of_ranks = nn.Linear(2, 1)")
    complete = shared_notebook.complete
    assert complete("%%distributed\nprint(learning_rate_of") == ["learning_rate_of_ranks"]
    assert "layer_of_ranks.weight" in complete("%%distributed --ranks 0\nx = 1\nlayer_of_ranks.wei")
    assert "learning_rate_of_ranks" not in complete("learning_rate_of")
    assert any(match.endswith("all_reduce") for match in complete("%%distributed\ndist.all_redu"))


def test_names_are_completed_while_the_ranks_are_busy(shared_notebook: Kernel) -> None:
    shared_notebook.check("%%distributed\nlearning_rate_of_ranks = 0.1")
    shared_notebook.check("%%distributed --detach\nimport time; time.sleep(2)")
    began = time.monotonic()
    assert shared_notebook.complete("%%distributed\nlearning_rate_of") == ["learning_rate_of_ranks"]
    assert time.monotonic() - began < 1
    assert "running" in shared_notebook.check("%cluster status").text
    shared_notebook.check("import nbdist.cluster; nbdist.cluster.active().cell.wait()")


def test_the_line_form_gives_the_value_on_each_rank(shared_notebook: Kernel) -> None:
    assert shared_notebook.check("%distributed rank * 2").text.splitlines() == ["[0] 0", "[1] 2"]
    assert value(shared_notebook, "list(cluster.evaluate('world_size'))") == [2, 2]
    shared_notebook.check("twice = %distributed rank * 2")
    assert value(shared_notebook, "list(twice)") == [0, 2]


def test_chosen_ranks_run_the_cell_and_the_others_do_not(shared_notebook: Kernel) -> None:
    shared_notebook.check("%%distributed\nran = False")
    assert shared_notebook.check("%%distributed --ranks 1\nran = True; print(rank)").text == "[1] 1\n"
    assert shared_notebook.check("%%distributed\nran").text == "[0] False\n[1] True\n"
    group_is_whole(shared_notebook)


def test_local_runs_the_cell_in_the_notebook_too(shared_notebook: Kernel) -> None:
    shared_notebook.check("%%distributed --local\nlocal_too = 41 + 1")
    assert value(shared_notebook, "local_too") == 42
    assert shared_notebook.check("%%distributed\nlocal_too").text == "[0-1] 42\n"
    shared_notebook.check("%%distributed\nranks_only = 1")
    assert value(shared_notebook, "'ranks_only' in globals()") is False


def test_a_local_cell_that_fails_is_a_failed_cell(shared_notebook: Kernel) -> None:
    cell = fails(shared_notebook, "%%distributed --local\nworld_size")
    assert cell.error == ("NameError", "name 'world_size' is not defined")
    assert "[0-1] 2" in cell.text


def test_nothing_is_put_into_the_notebooks_namespace(shared_notebook: Kernel) -> None:
    before = value(shared_notebook, "sorted(globals())")
    shared_notebook.check("%%distributed\nmade_on_ranks = 1\nprint(rank)")
    shared_notebook.check("%cluster status")
    after = value(shared_notebook, "sorted(globals())")
    assert [name for name in after if name not in before and not name.startswith("_")] == []


def test_values_that_were_shown_are_not_kept_on_the_ranks(shared_notebook: Kernel) -> None:
    shared_notebook.check(
        "%%distributed\nimport gc, weakref\nclass Big: pass\nbig = Big(); seen = weakref.ref(big)\nbig"
    )
    assert shared_notebook.check("%%distributed\ndel big; gc.collect(); seen() is None").text == "[0-1] True\n"


# -- ends badly ------------------------------------------------------------------------------------------------------


def test_a_traceback_names_the_notebooks_cell_and_line(shared_notebook: Kernel) -> None:
    cell = fails(shared_notebook, "%%distributed\nx = 1\ndef step():\n    raise KeyError('label')\n\nstep()")
    number = cell.reply["execution_count"]
    assert cell.error[0] == "DistributedError"
    assert re.fullmatch(r"rank \d: KeyError: 'label'", cell.error[1])
    assert cell.text.startswith("ranks 0-1 failed\n")
    assert f"Cell In[{number}], line 6" in cell.text
    assert f"Cell In[{number}], line 4" in cell.text
    assert "----> 4     raise KeyError('label')" in cell.text
    assert cell.text.count("Traceback") == 1
    for ours in ("ipyparallel", "nbdist/", "runner.py"):
        assert ours not in cell.text


def test_code_of_an_earlier_cell_keeps_its_number_in_a_traceback(shared_notebook: Kernel) -> None:
    defined = shared_notebook.check("%%distributed\n\ndef inner():\n    return 1 / 0")
    cell = fails(shared_notebook, "%%distributed\ninner()")
    assert f"Cell In[{defined.reply['execution_count']}], line 4" in cell.text
    assert f"Cell In[{cell.reply['execution_count']}], line 2" in cell.text


def test_run_all_stops_at_a_failed_cell(shared_notebook: Kernel) -> None:
    shared_notebook.check("reached = False")
    cells = shared_notebook.run_all(["%%distributed\n1 / 0", "reached = True"])
    assert [cell.status for cell in cells] == ["error", "aborted"]
    assert value(shared_notebook, "reached") is False


def test_an_error_on_one_rank_is_shown_at_once_and_ends_the_cell_on_the_others(shared_notebook: Kernel) -> None:
    cell = fails(
        shared_notebook,
        '%%distributed\nimport time\nif rank == 1: raise ValueError("bad shard 17")\ntime.sleep(20)',
        within=5,
    )
    assert cell.seconds_until(r"ValueError: bad shard 17") < 2
    assert cell.text.startswith("rank 1 failed\n")
    assert 'raise ValueError("bad shard 17")' in cell.text
    assert cell.text.count("Traceback") == 1
    assert "ipyparallel" not in cell.text
    assert re.search(r"rank 0: interrupted at Cell In\[\d+\], line 4", cell.text)
    group_is_whole(shared_notebook)


def test_the_error_in_the_notebook_knows_its_rank(cluster: Cluster) -> None:
    with pytest.raises(DistributedError) as caught:
        cluster.run("if rank == 1: raise KeyError('label')")
    assert caught.value.rank == 1
    assert [error.ename for error in caught.value.errors] == ["KeyError"]


@pytest.mark.parametrize("output", ["fold", "all"])
def test_what_a_rank_printed_before_it_failed_is_kept_before_the_error(shared_notebook: Kernel, output: str) -> None:
    cell = fails(
        shared_notebook,
        f"%%distributed --output {output}\n"
        'print("step 7", rank); import sys; print("warn", rank, file=sys.stderr)\n'
        'raise RuntimeError("stop")',
    )
    kinds = [(o["output_type"], o.get("name")) for o in cell.outputs]
    assert kinds[-1] == ("error", None)
    streams = {name: "".join(o["text"] for o in cell.outputs if o.get("name") == name) for name in ("stdout", "stderr")}
    for rank in (0, 1):
        assert f"[{rank}] step 7 {rank}\n" in streams["stdout"]
        assert f"[{rank}] warn {rank}\n" in streams["stderr"]
        assert "warn" not in streams["stdout"]


def test_output_none_shows_the_error_only(shared_notebook: Kernel) -> None:
    cell = fails(shared_notebook, '%%distributed --output none\nprint("step 7")\nraise RuntimeError("stop")')
    assert [o["output_type"] for o in cell.outputs] == ["error"]
    assert "RuntimeError: stop" in cell.text


def test_a_rank_that_waits_in_a_collective_is_released_when_another_fails(shared_notebook: Kernel) -> None:
    before = pids(shared_notebook)
    cell = fails(
        shared_notebook,
        "%%distributed\nkept = 123; import time\n"
        'if rank == 1: time.sleep(0.5); raise ValueError("bad batch")\n'
        "dist.all_reduce(torch.ones(1))",
    )
    assert cell.text.startswith("rank 1 failed\n")
    assert "ValueError: bad batch" in cell.text
    assert re.search(r"rank 0: released from all_reduce at Cell In\[\d+\], line 4", cell.text)
    assert pids(shared_notebook) == before
    group_is_whole(shared_notebook)
    assert shared_notebook.check("%%distributed\nkept").text == "[0-1] 123\n"


def test_an_error_leaves_no_tensor_behind(shared_notebook: Kernel) -> None:
    fails(
        shared_notebook,
        "%%distributed\n"
        "def step():\n"
        "    big = torch.zeros(1000); import weakref; global w; w = weakref.ref(big); raise MemoryError('sim')\n"
        "step()",
    )
    assert shared_notebook.check("%%distributed\nimport gc; gc.collect(); print(w() is None)").text == "[0-1] True\n"


def test_exit_ends_the_cell_and_not_the_rank(shared_notebook: Kernel) -> None:
    before = pids(shared_notebook)
    shared_notebook.run("%%distributed\nexit()")
    shared_notebook.run("%%distributed\nimport sys; sys.exit(3)")
    assert pids(shared_notebook) == before
    group_is_whole(shared_notebook)


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("input('name? ')", "rank 0 cannot ask for input"),
        ("breakpoint()", "has no prompt"),
        ("import pdb; pdb.set_trace()", "has no prompt"),
    ],
)
def test_what_asks_a_person_never_hangs_a_rank(shared_notebook: Kernel, code: str, told: str) -> None:
    cell = shared_notebook.run(f"%%distributed\n{code}", timeout=10)
    assert cell.seconds < 5
    assert told in cell.text
    group_is_whole(shared_notebook)


# -- timeout, stop ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    ["import time; time.sleep(60)", "import time\nif rank == 0: dist.all_reduce(torch.ones(1))\nelse: time.sleep(60)"],
)
def test_a_timeout_brings_the_ranks_back(shared_notebook: Kernel, code: str) -> None:
    before = pids(shared_notebook)
    cell = fails(shared_notebook, f"%%distributed --timeout 1\n{code}", within=6)
    assert cell.error[0] == "CollectiveTimeout"
    assert "timeout of 1 s" in cell.error[1]
    assert "line 2" in cell.error[1] or "line 3" in cell.error[1]
    assert pids(shared_notebook) == before
    group_is_whole(shared_notebook)


def test_a_timeout_has_its_own_error_in_python_too(cluster: Cluster) -> None:
    with pytest.raises(CollectiveTimeout, match=r"timeout of 0\.5 s"):
        cluster.run("import time; time.sleep(60)", timeout=0.5)
    cluster.run("x_ = torch.ones(1); dist.all_reduce(x_); assert x_.item() == 2.0")


def test_stop_ends_plain_python_on_the_ranks(shared_notebook: Kernel) -> None:
    before = pids(shared_notebook)
    cell = shared_notebook.run(
        "%%distributed\nimport time\nfor i in range(600): time.sleep(.1)",
        timeout=20,
        actions=[(1.0, shared_notebook.interrupt)],
    )
    assert cell.error[0] == "KeyboardInterrupt"
    assert cell.seconds < 6
    assert re.search(r"ranks 0-1: interrupted at Cell In\[\d+\], line 3", cell.text)
    after = shared_notebook.check('%%distributed\nprint("alive", i < 100)')
    assert after.text == "[0-1] alive True\n"
    assert after.seconds < 2
    assert pids(shared_notebook) == before


def test_stop_releases_a_rank_that_is_blocked_in_a_collective(shared_notebook: Kernel) -> None:
    before = pids(shared_notebook)
    cell = shared_notebook.run(
        "%%distributed\nkept = 5; import time\nif rank == 0: dist.all_reduce(torch.ones(1))\nelse: time.sleep(300)",
        timeout=30,
        actions=[(1.5, shared_notebook.interrupt)],
    )
    assert cell.error[0] == "KeyboardInterrupt"
    assert cell.seconds < 6.5
    assert pids(shared_notebook) == before
    group_is_whole(shared_notebook)
    assert shared_notebook.check("%%distributed\nkept").text == "[0-1] 5\n"


def test_code_that_swallows_the_interrupt_is_ended_by_insisting(notebook: Kernel) -> None:
    before = pids(notebook)
    ends: list[float] = []

    def third() -> None:
        ends.append(time.monotonic())
        notebook.interrupt()

    cell = notebook.run(
        "%%distributed\n"
        "import time\n"
        "while True:\n"
        "    try: time.sleep(1)\n"
        "    except KeyboardInterrupt: print('no', rank)",
        timeout=40,
        actions=[(1, notebook.interrupt), (4, notebook.interrupt), (7, third)],
    )
    assert cell.ended - ends[0] < 5 if ends else cell.seconds < 9
    assert cell.status == "error"
    assert "ranks 0-1 still running; interrupt again to force" in cell.text
    for rank in (0, 1):
        assert f"[{rank}] no {rank}" in cell.text
    assert re.search(r"ranks 0-1 .*replaced", cell.text)
    assert not any(pid_exists(pid) for pid in before.values())
    group_is_whole(notebook)  # the ranks were replaced
    assert not set(before.values()) & set(pids(notebook).values())


# -- detached cells --------------------------------------------------------------------------------------------------


def test_a_detached_cell_returns_at_once_and_its_output_goes_on(shared_notebook: Kernel) -> None:
    cell = shared_notebook.check(
        "%%distributed --detach\nimport time\nfor i in range(3): print('tick', i); time.sleep(0.3)\nrank"
    )
    assert cell.seconds < 0.5
    assert "running" in cell.text  # the value of the cell says what it is
    late = shared_notebook.late_messages(2.5)
    text = "".join(
        m["content"]["text"]
        for m in late
        if m["msg_type"] == "stream" and m["parent_header"]["msg_id"] == cell.message_id
    )
    already = cell.stream_text
    assert [line for line in (already + text).splitlines() if "]" in line] == [
        *(f"[0-1] tick {i}" for i in range(3)),
        "[0] 0",
        "[1] 1",
    ]
    group_is_whole(shared_notebook)


def test_a_second_cell_is_refused_while_a_detached_one_runs(shared_notebook: Kernel) -> None:
    detached = shared_notebook.check("%%distributed --detach\nimport time; time.sleep(60)")
    number = detached.reply["execution_count"]
    cell = fails(shared_notebook, "%%distributed\n1", within=1)
    assert cell.error[0] == "ClusterError"
    assert f"In[{number}] still runs" in cell.error[1]
    assert "%cluster interrupt" in cell.error[1]
    stopped = shared_notebook.run("%cluster interrupt", timeout=10)
    assert stopped.seconds < 5
    group_is_whole(shared_notebook)


def test_the_error_of_a_detached_cell_is_shown_in_its_output_and_raised_by_wait(cluster: Cluster) -> None:
    cell = cluster.run("if rank == 1: raise KeyError('label')", detach=True)
    with pytest.raises(DistributedError, match="rank 1: KeyError: 'label'"):
        cell.wait(10)
    cluster.run("x_ = torch.ones(1); dist.all_reduce(x_); assert x_.item() == 2.0")


# -- a rank dies -----------------------------------------------------------------------------------------------------


def test_a_rank_that_is_killed_in_a_cell_ends_it_and_is_named(notebook: Kernel) -> None:
    before = pids(notebook)
    killed: list[float] = []

    def kill() -> None:
        killed.append(time.monotonic())
        os.kill(before[1], signal.SIGKILL)

    cell = notebook.run("%%distributed\nimport time; time.sleep(60)", timeout=30, actions=[(1, kill)])
    assert cell.status == "error"
    assert cell.ended - killed[0] < 5
    died = rf"rank 1 \(pid {before[1]}.*\) was killed by signal 9 \(SIGKILL\): often out of memory"
    assert re.search(died, cell.text)
    assert re.search(r"rank 0: interrupted at Cell In\[\d+\], line 2", cell.text)
    assert "%cluster repair" in cell.text
    status = notebook.check("%cluster status").text.splitlines()
    assert "idle" in status[1]
    assert "dead" in status[2]
    refused = fails(notebook, "%%distributed\n1", within=2)
    assert "rank 1 dead" in refused.error[1]
    assert "%cluster repair" in refused.error[1]


def test_what_a_dying_rank_wrote_is_in_the_report(notebook: Kernel) -> None:
    cell = fails(
        notebook,
        "%%distributed\nimport os\nif rank == 1:\n    os.write(2, b'native library: fatal 42\\n'); os._exit(3)",
    )
    assert "exited with code 3" in cell.text
    assert "native library: fatal 42" in cell.text


def test_a_stopped_rank_is_not_dead(shared_notebook: Kernel) -> None:
    pid = pids(shared_notebook)[1]
    os.kill(pid, signal.SIGSTOP)
    try:
        status = shared_notebook.check("%cluster status").text.splitlines()
        time.sleep(2)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert "no answer" in status[2]
    assert "idle" in status[1]
    group_is_whole(shared_notebook)
