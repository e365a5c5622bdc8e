"""Bad input: a clear one-line error with the next step, and nothing lost."""

from __future__ import annotations

import os
import sys

import pytest

from nbdist import Cluster
from tests.cluster.checks import fails, group_is_whole, pids, value
from tests.kernel import Cell, Kernel

CORES = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def one_line(cell: Cell) -> str:
    """The error of a cell, which is one line, shown without frames of ours."""
    assert cell.error is not None
    assert len(cell.error[1].splitlines()) == 1, cell
    shown = [line for line in cell.text.splitlines() if "starting the controller" not in line]  # how far a start came
    assert len(shown) == 1, cell
    return cell.error[1]


# -- before a cluster runs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        "%%distributed\nx = 1",
        "%distributed rank",
        "%push x",
        "%pull x",
        "%train 5",
        "%dashboard",
        "%cluster status",
        "%cluster interrupt",
        "%cluster logs",
        "import nbdist; nbdist.Dashboard()",
    ],
)
def test_without_a_cluster_the_message_says_how_to_start_one(idle_kernel: Kernel, code: str) -> None:
    cell = fails(idle_kernel, code, within=5)
    assert cell.error[0] == "ClusterError"
    assert "%cluster start" in one_line(cell)


def test_to_stop_what_does_not_run_is_no_error(idle_kernel: Kernel) -> None:
    assert "No cluster is running" in idle_kernel.check("%cluster stop").text


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("-n 0", ["-n 0", "at least 1 rank"]),
        ("-n -2", ["-2"]),
        ("-n x", ["-n", "'x'"]),
        ("-n 2.5", ["-n", "'2.5'"]),
        ("-n", ["-n", "expected one argument"]),
        (f"-n {500 * CORES}", [f"{500 * CORES} ranks on {CORES} core", "--oversubscribe"]),
        ("--backend mpi", ["--backend", "mpi", "gloo"]),
        ("--bogus", ["--bogus", "Usage: %cluster start"]),
        ("--timeout soon", ["--timeout", "soon"]),
        ("--profile locla", ["No profile 'locla'", "local"]),
        ('--name "unclosed', ["quotation"]),
    ],
)
def test_wrong_arguments_of_a_start_are_told_and_nothing_starts(
    idle_kernel: Kernel, arguments: str, told: list[str]
) -> None:
    cell = fails(idle_kernel, f"%cluster start {arguments}", within=4)
    assert cell.error[0] in ("UsageError", "ClusterError")
    message = one_line(cell)
    for text in told:
        assert text in message
    assert idle_kernel.processes() == []


@pytest.mark.parametrize("line", ["%cluster", "%cluster strat", "%cluster stop now"])
def test_an_unknown_command_names_those_that_there_are(idle_kernel: Kernel, line: str) -> None:
    cell = fails(idle_kernel, line, within=2)
    assert cell.error[0] == "UsageError"
    assert "%cluster" in one_line(cell)
    if line != "%cluster stop now":
        assert "start" in one_line(cell) and "stop" in one_line(cell)


def test_nccl_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ValueError, match=r"--backend nccl needs a GPU and there is none here\. Use --backend gloo\."):
        Cluster(2, backend="nccl")


def test_nccl_with_more_ranks_than_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(ValueError, match=r"2 ranks, 1 GPU.*: use -n 1, or --backend gloo to share\."):
        Cluster(2, backend="nccl")


def test_a_gpu_for_each_rank_gives_nccl_and_one_too_few_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert Cluster().n == 2
    assert Cluster(2).backend == "nccl"
    assert Cluster(3).backend == "gloo"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert (Cluster().n, Cluster().backend) == (2, "gloo")


@pytest.mark.parametrize("n", [0, -1, 10_000_000])
def test_a_number_of_ranks_that_cannot_be_is_refused_in_python(n: int) -> None:
    with pytest.raises(ValueError, match=f"{n}"):
        Cluster(n, backend="gloo")


def test_many_ranks_are_allowed_when_asked_for() -> None:
    assert Cluster(500 * CORES, backend="gloo", oversubscribe=True).n == 500 * CORES


# -- while a cluster runs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("--ranks 7", "No rank 7 in a world of 2."),
        ("--ranks 0-7", "No rank 7 in a world of 2."),
        ("--ranks a", "write ranks like 0,2-3"),
        ("--bogus", "--bogus"),
        ("--timeout soon", "soon"),
        ("--output loud", "loud"),
    ],
)
def test_wrong_arguments_of_a_cell_are_told_and_nothing_runs(shared_notebook: Kernel, line: str, told: str) -> None:
    shared_notebook.check("%%distributed\nran = False")
    cell = fails(shared_notebook, f"%%distributed {line}\nran = True", within=1)
    assert cell.error[0] == "UsageError"
    assert told in one_line(cell)
    assert shared_notebook.check("%%distributed\nran").text == "[0-1] False\n"


@pytest.mark.parametrize("code", ["ran = True\nif rank == 0\n    x = 1", "ran = True\nx = (1,", "ran = True\n  y = 2"])
def test_a_syntax_error_is_one_report_and_nothing_ran(shared_notebook: Kernel, code: str) -> None:
    shared_notebook.check("%%distributed\nran = False")
    cell = fails(shared_notebook, f"%%distributed\n{code}", within=1)
    number = cell.reply["execution_count"]
    assert cell.text.count("SyntaxError") == 1 or cell.text.count("IndentationError") == 1
    assert f"Cell In[{number}], line 3" in cell.text
    assert "Nothing ran on any rank." in cell.text
    assert "nbdist/" not in cell.text
    assert shared_notebook.check("%%distributed\nran").text == "[0-1] False\n"


def test_a_return_outside_a_function_is_a_syntax_error_too(shared_notebook: Kernel) -> None:
    cell = fails(shared_notebook, "%%distributed\nreturn 5", within=2)
    assert "'return' outside function" in cell.text
    assert "Nothing ran on any rank." in cell.text


def test_an_empty_cell_is_no_error(shared_notebook: Kernel) -> None:
    assert shared_notebook.check("%%distributed\n\n").text == ""
    assert shared_notebook.check("%%distributed\n# only a comment").text == ""


def test_push_of_an_undefined_name_names_it_and_pushes_nothing(shared_notebook: Kernel) -> None:
    shared_notebook.check("defined_here = 3")
    cell = fails(shared_notebook, "%push defined_here not_defined_here", within=1)
    assert cell.error[0] == "UsageError"
    assert "'not_defined_here' is not defined in the notebook" in one_line(cell)
    assert shared_notebook.check("%%distributed\n'defined_here' in globals()").text == "[0-1] False\n"


def test_push_of_what_cannot_be_copied_names_it_and_says_what_to_do(shared_notebook: Kernel) -> None:
    shared_notebook.check("import threading\nlock = threading.Lock()\nfine = 1")
    cell = fails(shared_notebook, "%push fine lock", within=2)
    message = one_line(cell)
    assert message.startswith("'lock' cannot be copied to ranks")
    assert "%%distributed" in message
    group_is_whole(shared_notebook)


def test_pull_of_a_name_that_some_ranks_lack_says_which(shared_notebook: Kernel) -> None:
    shared_notebook.check("%%distributed --ranks 1\nonly_on_1 = 5")
    assert "'only_on_1' is not defined on rank 0." in one_line(fails(shared_notebook, "%pull only_on_1", within=1))
    shared_notebook.check("%pull only_on_1 --ranks 1")
    assert value(shared_notebook, "only_on_1") == 5
    assert "'nowhere' is not defined on any rank." in one_line(fails(shared_notebook, "%pull nowhere", within=1))
    cell = fails(shared_notebook, "%pull only_on_1 --ranks 7", within=1)
    assert "No rank 7 in a world of 2." in one_line(cell)


def test_pull_of_what_cannot_be_copied_names_it(shared_notebook: Kernel) -> None:
    shared_notebook.check("%%distributed\nimport threading\nlock_there = threading.Lock()")
    message = one_line(fails(shared_notebook, "%pull lock_there", within=2))
    assert message.startswith("'lock_there' on rank 0 cannot be copied")
    group_is_whole(shared_notebook)


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("%push", "names"),
        ("%pull", "names"),
        ("%pull x --bogus", "--bogus"),
        ("%push x --bogus", "--bogus"),
        ("%distributed", "give an expression"),
        ("%train", "%train 500"),
        ("%train many", "many"),
        ("%train 0", "at least one step"),
        ("%train 5 --epochs 2", "%train 500"),
        ("%train 5 --name 1x", "1x"),
        ("%train 5 --name no_trainer_of_that_name", "no_trainer_of_that_name"),
    ],
)
def test_wrong_arguments_of_other_magics_are_told(shared_notebook: Kernel, code: str, told: str) -> None:
    before = pids(shared_notebook)
    shared_notebook.check("x = 1")
    cell = fails(shared_notebook, code, within=2)
    assert told in cell.error[1], cell
    assert cell.error[0] in ("UsageError", "NbdistError", "ClusterError", "DistributedError"), cell
    assert pids(shared_notebook) == before


def test_the_users_own_init_of_the_group_is_told_that_there_is_one(shared_notebook: Kernel) -> None:
    cell = fails(shared_notebook, '%%distributed\ndist.init_process_group("gloo")', within=3)
    assert "nbdist has formed the process group already" in cell.text
    assert "dist.is_initialized()" in cell.text
    group_is_whole(shared_notebook)


def test_a_pasted_init_that_is_guarded_runs_unchanged(shared_notebook: Kernel) -> None:
    cell = shared_notebook.check(
        "%%distributed\n"
        "import os\n"
        'if not dist.is_initialized():\n    dist.init_process_group("gloo")\n'
        'int(os.environ["RANK"]) == dist.get_rank() and int(os.environ["WORLD_SIZE"]) == dist.get_world_size()'
    )
    assert cell.text == "[0-1] True\n"
