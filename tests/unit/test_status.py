"""What ranks do, in words."""

from __future__ import annotations

from typing import Any

from nbdist.status import RankStatus, Status, describe


def reply(**given: Any) -> dict[str, Any]:
    return {
        "running": True,
        "label": "In[7]",
        "seconds": 12.3,
        "line": "Cell In[7], line 4",
        "called": "",
        "progress": {"0": (3, 3)},
        **given,
    }


def test_a_rank_without_a_cell_is_idle() -> None:
    assert describe({"running": False, "progress": {}}) == "idle"


def test_a_busy_rank_is_where_its_cell_is() -> None:
    assert describe(reply()) == "running In[7], line 4 for 12 s"


def test_a_rank_in_a_collective_names_it() -> None:
    assert (
        describe(reply(called="all_reduce", progress={"0": (4, 3)})) == "running In[7], line 4, in all_reduce for 12 s"
    )


def test_a_collective_that_no_function_shows_is_told() -> None:
    assert "waiting in a collective" in describe(reply(progress={"0": (4, 3)}))


def test_the_table_has_a_row_a_rank_in_text_and_on_a_page() -> None:
    row = dict(host="node<1>", device="cpu", memory=200 * 2**20, threads=2)
    status = Status(
        [
            RankStatus(rank=0, pid=11, state="idle", **row),  # type: ignore[arg-type]
            RankStatus(rank=1, pid=12, state="dead: (pid 12) exited with code 3", **{**row, "memory": None}),  # type: ignore[arg-type]
        ]
    )
    lines = str(status).splitlines()
    assert lines[0].split() == ["rank", "host", "device", "pid", "memory", "threads", "state"]
    assert lines[1].split() == ["0", "node<1>", "cpu", "11", "200", "MiB", "2", "idle"]
    assert lines[2].endswith("dead: (pid 12) exited with code 3")
    html = status._repr_html_()
    assert html.count("<tr>") == 3
    assert "node&lt;1&gt;" in html
