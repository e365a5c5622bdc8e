"""What the ranks do is told within a second, whatever they do."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest

from nbdist import Cluster
from tests.faults.faults import frozen, nothing_was_lost
from tests.kernel import Kernel

BUSY = {
    "python": "while True: pass",
    "collective": "if rank == 0: dist.barrier()\nelse:\n    while True: time.sleep(1)",
    "native": "a = torch.randn(1500, 1500)\nwhile True: a = (a @ a).clamp(-1, 1)",
    "output": "while True: print('x' * 200)",
}
# called so, C's sleep lets no other thread of its process run
KEEPS_THE_INTERPRETER = "import ctypes; ctypes.PyDLL(None).sleep(6)"


@pytest.fixture
def busy(request: pytest.FixtureRequest, ranks: Cluster) -> Iterator[Cluster]:
    cell = ranks.run(request.param, detach=True, output="none")
    time.sleep(0.7)
    yield ranks
    with pytest.raises(KeyboardInterrupt):
        ranks.interrupt()
    assert cell.finished.is_set()
    nothing_was_lost(ranks)


@pytest.mark.parametrize("busy", BUSY.values(), ids=BUSY, indirect=True)
def test_status_says_where_busy_ranks_are(busy: Cluster) -> None:
    began = time.monotonic()
    rows = busy.status()
    assert time.monotonic() - began < 1
    for row in rows:
        assert re.match(r"running In\[\d+\], line \d", row.state), row
        assert row.memory


def test_a_rank_in_a_collective_is_said_to_be_in_it(ranks: Cluster) -> None:
    ranks.run("if rank == 0:\n    dist.all_reduce(torch.ones(1))\nelse:\n    time.sleep(60)", detach=True)
    time.sleep(0.7)
    assert re.match(r"running In\[\d+\], line 2, in all_reduce for \d+ s", ranks.status()[0].state)
    assert re.match(r"running In\[\d+\], line 4 for \d+ s", ranks.status()[1].state)
    with pytest.raises(KeyboardInterrupt):
        ranks.interrupt()
    nothing_was_lost(ranks)


def test_of_a_rank_that_does_not_answer_the_last_known_state_is_told(ranks: Cluster) -> None:
    assert [row.state for row in ranks.status()] == ["idle", "idle"]
    with frozen(ranks.pids[1]):
        time.sleep(1)
        began = time.monotonic()
        rows = ranks.status()
        assert time.monotonic() - began < 1
        assert re.fullmatch(r"no answer in .*: in a long native call, or stopped; idle [12] s ago", rows[1].state)
        cell = ranks.run("time.sleep(60)", detach=True)
        time.sleep(0.2)
        assert re.search(rf"no answer in .*; given In\[{cell.label}\] [01] s ago", ranks.status()[1].state)
    with pytest.raises(KeyboardInterrupt):
        ranks.interrupt()
    nothing_was_lost(ranks)


@pytest.mark.parametrize("code", [*BUSY.values(), KEEPS_THE_INTERPRETER], ids=[*BUSY, "keeps the interpreter"])
def test_completion_and_help_answer_while_ranks_are_busy(shared_notebook: Kernel, code: str) -> None:
    shared_notebook.check('%%distributed\nimport time\ndef learning_rate_of_ranks(x):\n    """Says how fast."""')
    shared_notebook.complete("%%distributed\nno_such_na")  # IPython imports its completer of Python code
    shared_notebook.check(f"%%distributed --detach --output none\n{code}")
    time.sleep(0.7)
    keeps = code == KEEPS_THE_INTERPRETER
    began = time.monotonic()
    matches = shared_notebook.complete("%%distributed\nlearning_rate_of")
    assert time.monotonic() - began < 1
    assert keeps or matches == ["learning_rate_of_ranks"]
    began = time.monotonic()
    shared_notebook.inspect("%%distributed\nlearning_rate_of_ranks")
    assert time.monotonic() - began < 1
    began = time.monotonic()
    status = shared_notebook.check("%cluster status")
    assert status.seconds < 1.2
    assert ("no answer" if keeps else "running In[") in status.text
    shared_notebook.run("%cluster interrupt", timeout=30)
    shared_notebook.check("%%distributed\nx_ = torch.ones(1); dist.all_reduce(x_); assert x_.item() == 2.0")
