"""A failed cell as a person reads it."""

from __future__ import annotations

from nbdist.errors import DistributedError, NbdistError
from nbdist.records import RankError, from_wire, to_wire
from tests.kernel import plain


def error(rank: int, **given: object) -> RankError:
    fields = {"ename": "ValueError", "evalue": "bad shard 17", "time": 10.0 + rank, "location": "Cell In[7], line 4"}
    return RankError(rank=rank, **{**fields, **given})  # type: ignore[arg-type]


def report(*errors: RankError) -> list[str]:
    return [plain(line) for line in DistributedError(errors)._render_traceback_()]


def test_root_cause_comes_first_and_what_followed_from_it_is_one_line() -> None:
    lines = report(
        error(0, released="all_reduce", ename="RuntimeError", evalue="Connection closed by peer", time=9.0),
        error(1, traceback=("Traceback of the user's cell", "ValueError: bad shard 17")),
        error(2, released="", ename="KeyboardInterrupt", evalue="", location="Cell In[7], line 9"),
    )
    assert lines == [
        "rank 1 failed",
        "Traceback of the user's cell",
        "ValueError: bad shard 17",
        "rank 0: released from all_reduce at Cell In[7], line 4",
        "rank 2: interrupted at Cell In[7], line 9",
    ]


def test_equal_errors_fold_to_one_traceback() -> None:
    lines = report(*(error(rank, traceback=(f"traceback of rank {rank}",)) for rank in range(4)))
    assert lines == ["ranks 0-3 failed", "traceback of rank 0"]


def test_ranks_that_followed_fold_to_one_line() -> None:
    lines = report(error(2, traceback=("the traceback",)), *(error(r, released="barrier") for r in (0, 1, 3)))
    assert lines[-1] == "ranks 0-1, 3: released from barrier at Cell In[7], line 4"
    assert len(lines) == 3


def test_other_errors_are_shown_by_their_first_line_only() -> None:
    lines = report(error(0, traceback=("the traceback",)), error(1, evalue="another\nC++ frame\nC++ frame"))
    assert lines == ["rank 0 failed", "the traceback", "rank 1: ValueError: another at Cell In[7], line 4"]


def test_the_earlier_of_two_errors_is_the_root_cause() -> None:
    failed = DistributedError([error(0, time=20.0, evalue="late"), error(1, time=19.5, evalue="early")])
    assert failed.rank == 1
    assert str(failed) == "rank 1: ValueError: early"
    assert [e.rank for e in failed.errors] == [1, 0]


def test_a_rank_that_was_only_released_is_no_root_cause_however_early() -> None:
    failed = DistributedError([error(0, time=1.0, released="all_reduce"), error(1, time=2.0)])
    assert failed.rank == 1


def test_a_hint_says_what_to_do_next() -> None:
    lines = report(error(1, traceback=("the traceback",), hint="Use ddp.module."))
    assert lines == ["rank 1 failed", "the traceback", "Next: Use ddp.module."]


def test_an_error_without_traceback_is_named_with_its_place() -> None:
    assert report(error(1)) == ["rank 1 failed", "ValueError: bad shard 17 at Cell In[7], line 4"]


def test_an_error_without_text_is_named_alone() -> None:
    assert str(DistributedError([error(0, ename="AssertionError", evalue="")])) == "rank 0: AssertionError"


def test_an_error_of_nbdist_is_one_line_without_frames() -> None:
    assert [plain(line) for line in NbdistError("No cluster.")._render_traceback_()] == ["NbdistError: No cluster."]


def test_an_error_survives_the_wire() -> None:
    sent = error(3, traceback=("a", "b"), released=None, hint="h")
    again = from_wire(RankError, to_wire(sent))
    assert to_wire(again) == to_wire(sent)
    assert from_wire(RankError, {**to_wire(sent), "added_later": 1}) == again
