"""Who did not come to the collective, told from counters and the last collective of each rank."""

from __future__ import annotations

from typing import Any

import pytest

from nbdist.hangs import describe, diagnose, is_waiting, stuck
from nbdist.records import HangReport


def last(op: str = "all_reduce", *, shape: tuple[int, ...] = (4,), dtype: str = "float32", count: int = 1) -> Any:
    """The last collective of a group, as a rank reports it."""
    return {"op": op, "shape": [list(shape)], "dtype": [dtype], "seq": 7, "count": count, "ranks": [0, 1]}


def state(entry: Any = None, *, line: int = 3, called: str = "all_reduce", running: bool = True, **more: Any) -> Any:
    """What a rank answers when it is asked for its collectives."""
    return {
        "running": running,
        "line": f"Cell In[7], line {line}" if running else "",
        "called": called if running else "",
        "inside": "wait" if running else "",
        "groups": {} if entry is None else {"0": entry},
        **more,
    }


def counters(*enqueued_and_completed: tuple[int, int]) -> dict[int, dict[str, tuple[int, int]]]:
    return {rank: {"0": counts} for rank, counts in enumerate(enqueued_and_completed)}


def found(report: HangReport | None) -> HangReport:
    assert report is not None
    return report


def test_a_rank_waits_while_what_it_enqueued_is_not_complete() -> None:
    assert is_waiting({"0": (7, 6)})
    assert is_waiting({"0": (7, 7), "1": (2, 1)})
    assert not is_waiting({"0": (7, 7)})
    assert not is_waiting({})


def test_only_ranks_that_run_the_cell_can_be_stuck() -> None:
    assert stuck(counters((7, 6), (6, 6)), {0, 1}, set())
    assert not stuck(counters((7, 6), (6, 6)), {1}, set())
    assert not stuck(counters((7, 7), (7, 7)), {0, 1}, set())


def test_a_rank_in_a_receive_is_stuck_although_no_counter_says_so() -> None:
    assert stuck(counters((7, 7), (7, 7)), {0, 1}, {0})
    assert not stuck(counters((7, 7), (7, 7)), {1}, {0})


def test_nothing_is_wrong_with_ranks_that_are_all_in_the_same_collective() -> None:
    assert diagnose({0: state(last()), 1: state(last())}, counters((7, 6), (7, 6))) is None


def test_nothing_is_wrong_where_nobody_waits() -> None:
    working = state(last(), called="", inside="")
    assert diagnose({0: working, 1: working}, counters((7, 7), (7, 7))) is None


def test_a_rank_that_has_not_come_is_named_with_collective_and_places() -> None:
    states = {0: state(last()), 1: state(last(), line=5, called="load")}
    report = found(diagnose(states, counters((7, 6), (6, 6))))
    assert report.kind == "missing"
    assert not report.is_fatal
    assert (report.waiting, report.missing) == ((0,), (1,))
    assert (report.op, report.shape, report.dtype, report.seq) == ("all_reduce", "[4]", "float32", 7)
    assert report.lines == (
        "rank 1 has not come to all_reduce [4] float32 (collective 7 of its group)",
        "rank 0 waits at Cell In[7], line 3, in all_reduce",
        "rank 1 is at Cell In[7], line 5, in load",
    )


def test_a_rank_that_does_not_answer_is_missing_and_not_taken_for_finished() -> None:
    report = found(diagnose({0: state(last())}, {0: {"0": (7, 6)}, 1: {}}))
    assert report.kind == "missing"
    assert report.missing == (1,)
    assert report.lines[-1] == "rank 1 does not answer: frozen, or in a native call"


def test_many_waiting_ranks_fold_into_one_line() -> None:
    entry = {**last(), "ranks": [0, 1, 2, 3]}
    states = {rank: state(entry) for rank in (0, 2, 3)} | {1: state(entry, line=9, called="")}
    report = found(diagnose(states, counters((7, 6), (6, 6), (7, 6), (7, 6))))
    assert report.lines[1:] == (
        "ranks 0, 2-3 wait at Cell In[7], line 3, in all_reduce",
        "rank 1 is at Cell In[7], line 9",
    )


def test_uneven_steps_are_counted() -> None:
    states = {0: state(last(count=3), called="backward"), 1: state(last(count=2), running=False)}
    report = found(diagnose(states, counters((9, 8), (8, 8))))
    assert report.kind == "finished"
    assert report.is_fatal
    assert report.missing == (1,)
    assert report.lines[0].startswith(
        "rank 1 finished, rank 0 waits in all_reduce [4] float32: uneven number of steps (3 vs 2)"
    )
    assert report.lines[1] == "rank 0 waits at Cell In[7], line 3, in backward"


def test_a_rank_outside_of_the_cell_is_told_apart_from_one_that_made_fewer_steps() -> None:
    states = {0: state(last("barrier", count=1)), 1: state(last("all_reduce", count=0), running=False)}
    report = found(diagnose(states, counters((9, 8), (8, 8))))
    assert report.kind == "finished"
    assert "on a group of 2 ranks, and rank 1 is past the cell or not in it" in report.lines[0]
    assert "ddp.module" in report.lines[-1]


@pytest.mark.parametrize(
    "other", [last("broadcast"), last(shape=(8,)), last(dtype="float64")], ids=["op", "shape", "dtype"]
)
def test_ranks_that_called_different_things_are_a_mismatch(other: Any) -> None:
    states = {0: state(last()), 1: state(other, line=4)}
    report = found(diagnose(states, counters((7, 6), (7, 6))))
    assert report.kind == "mismatch"
    assert report.is_fatal
    assert report.lines == (
        "ranks called different collectives: rank 0: all_reduce [4] float32 at Cell In[7], line 3; "
        f"rank 1: {describe(other)} at Cell In[7], line 4",
    )


@pytest.mark.parametrize("op", ["scatter", "all_to_all"])
def test_shapes_that_may_differ_between_ranks_are_no_mismatch(op: str) -> None:
    states = {0: state(last(op, shape=(8,))), 1: state(last(op, shape=()))}
    assert diagnose(states, counters((7, 6), (7, 6))) is None


def test_a_group_of_some_ranks_does_not_wait_for_the_others() -> None:
    entry = {**last(), "ranks": [0, 2]}
    states = {0: state(entry), 1: state(running=False), 2: state({**entry, "seq": 6}, line=8, called="")}
    progress = {0: {"0": (7, 6)}, 1: {}, 2: {"0": (6, 6)}}
    assert found(diagnose(states, progress)).missing == (2,)


def test_a_receive_from_a_rank_that_has_finished_never_ends() -> None:
    states = {0: state(last(), called="recv", inside="recv"), 1: state(last(), running=False)}
    report = found(diagnose(states, counters((7, 7), (7, 7))))
    assert report.kind == "finished"
    assert report.lines[0] == "rank 0 waits in recv at Cell In[7], line 3, and rank 1 is past the cell or not in it"


def test_a_receive_from_a_rank_that_is_at_work_may_still_end() -> None:
    states = {0: state(last(), called="recv", inside="recv"), 1: state(last(), line=5, called="", inside="")}
    report = found(diagnose(states, counters((7, 7), (7, 7))))
    assert report.kind == "missing"
    assert report.lines == ("rank 0 waits in recv at Cell In[7], line 3", "rank 1 is at Cell In[7], line 5")


def test_ranks_that_all_send_and_receive_are_at_work() -> None:
    states = {rank: state(last(), called="step", inside="_wait_batch_p2p") for rank in (0, 1)}
    assert diagnose(states, counters((7, 7), (7, 7))) is None


def test_a_collective_is_written_with_shape_and_dtype() -> None:
    assert describe(last()) == "all_reduce [4] float32"
    assert describe({"op": "barrier", "shape": [], "dtype": []}) == "barrier"
    assert (
        describe({"op": "all_gather", "shape": [[2], [3]], "dtype": ["int64", "int64"]}) == "all_gather [2], [3] int64"
    )
