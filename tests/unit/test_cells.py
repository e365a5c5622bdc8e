"""What can be said of a cell before any rank has seen it, and of how a process ended."""

from __future__ import annotations

import pytest

from nbdist.magics import _numbered
from nbdist.report import describe_end
from nbdist.syntax import CellSyntaxError, check_syntax
from tests.kernel import plain


@pytest.mark.parametrize(
    "source",
    ["x = 1", "%timeit 1 + 1", "!ls", "files = !ls", "await f()", "async for x in y: pass", "x?", "%%time\nx = 1", ""],
)
def test_whatever_ipython_takes_is_a_cell(source: str) -> None:
    check_syntax(source, "In[7]")


@pytest.mark.parametrize("source", ["x = (1,", "if rank == 0\n    x = 1", "x = 1\n  y = 2", "return 5"])
def test_what_is_no_python_is_refused(source: str) -> None:
    with pytest.raises(CellSyntaxError) as caught:
        check_syntax(source, "In[7]")
    assert "In[7], line" in str(caught.value)
    assert "nothing ran on any rank" in str(caught.value)


def test_a_syntax_error_points_at_its_place() -> None:
    with pytest.raises(CellSyntaxError) as caught:
        check_syntax("x = 1\n    \nif x:\n    y = = 2\n", "In[7]")
    lines = [plain(line) for line in caught.value._render_traceback_()]
    assert lines[0] == "  Cell In[7], line 4"
    assert lines[1].strip() == "y = = 2"
    assert lines[1][lines[2].index("^")] == "="
    assert lines[3].startswith("SyntaxError: ")
    assert lines[4] == "Nothing ran on any rank."


def test_lines_are_those_of_the_notebooks_cell() -> None:
    assert _numbered("--ranks 0", "x = 1\n").splitlines() == ["# %%distributed --ranks 0", "x = 1"]
    assert _numbered("", "x = 1\n").splitlines() == ["# %%distributed", "x = 1"]


def test_a_cell_magic_stays_the_first_line() -> None:
    assert _numbered("", "%%time\nx = 1\n") == "%%time\nx = 1\n"


@pytest.mark.parametrize(
    ("death", "text"),
    [
        ({"pid": 7, "code": 3, "signal": None}, "(pid 7) exited with code 3"),
        ({"pid": 7, "signal": 9}, "(pid 7) was killed by signal 9 (SIGKILL): often out of memory"),
        ({"pid": 7, "signal": 11}, "(pid 7) was killed by signal 11 (SIGSEGV)"),
        ({"pid": 7, "signal": 99}, "(pid 7) was killed by signal 99"),
    ],
)
def test_the_end_of_a_process_is_told_in_words(death: dict[str, int], text: str) -> None:
    assert describe_end(death) == text
