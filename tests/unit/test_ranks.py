"""Sets of ranks as people write and read them."""

from __future__ import annotations

import pytest
from IPython.lib.pretty import pretty

from nbdist import ranks
from nbdist.ranks import PerRank


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("0", (0,)),
        ("0,2-3", (0, 2, 3)),
        ("3,1", (1, 3)),
        ("1,1,1-2", (1, 2)),
        (" 0 , 3 ", (0, 3)),
        ("0-3", (0, 1, 2, 3)),
    ],
)
def test_ranks_are_read_as_people_write_them(text: str, chosen: tuple[int, ...]) -> None:
    assert ranks.parse(text, 4) == chosen


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("7", "No rank 7 in a world of 4."),
        ("0-4", "No rank 4 in a world of 4."),
        ("a", "--ranks a: write ranks like 0,2-3."),
        ("", "--ranks : write ranks like 0,2-3."),
        ("-1", "--ranks -1: write ranks like 0,2-3."),
        ("1-", "--ranks 1-: write ranks like 0,2-3."),
        ("3-1", "--ranks 3-1: write ranks like 0,2-3."),
        ("0-99999999999", "No rank 99999999999 in a world of 4."),
    ],
)
def test_ranks_that_are_none_are_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        ranks.parse(text, 4)
    assert str(caught.value) == message


def test_no_rank_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match=r"No rank chosen\."):
        ranks.check([], 4)


@pytest.mark.parametrize(
    ("chosen", "text"),
    [([0], "0"), ([0, 1], "0-1"), ([3, 0, 2], "0,2-3"), ([0, 2, 4], "0,2,4"), (range(64), "0-63"), ([], "")],
)
def test_ranks_are_written_shortly(chosen: list[int], text: str) -> None:
    assert ranks.spell(chosen) == text


def test_what_is_written_can_be_read_again() -> None:
    for chosen in [(0,), (1, 2), (0, 2, 3, 5, 6, 7)]:
        assert ranks.parse(ranks.spell(chosen), 8) == chosen


def test_ranks_are_named_in_a_sentence() -> None:
    assert ranks.named([1]) == "rank 1"
    assert ranks.named([0, 2, 3]) == "ranks 0, 2-3"


def test_equal_texts_fold_in_the_order_of_their_lowest_rank() -> None:
    assert ranks.fold({2: "b", 0: "a", 1: "b", 3: "a"}) == [((0, 3), "a"), ((1, 2), "b")]


def test_values_of_ranks_are_a_list_that_shows_equal_values_once() -> None:
    values = PerRank([10.0, 10.0, 3.5], ranks=(0, 1, 3))
    assert values == [10.0, 10.0, 3.5]
    assert pretty(values) == "[0-1] 10.0\n[3] 3.5"
