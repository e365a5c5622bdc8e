"""What ranks print, as one readable text."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tqdm import tqdm

from nbdist.output import HOLD_S, LIVE_S, PARTIAL_S, Output
from nbdist.page import Page


class Paper(Page):
    """A page that keeps what a reader sees at the end."""

    def __init__(self) -> None:
        self.outputs: list[tuple[str, Any]] = []  # (stream, text), or (display id, mime bundle)
        self.updates = 0

    @property
    def is_rich(self) -> bool:
        return True

    def write(self, text: str, stream: str = "stdout") -> None:
        if self.outputs and self.outputs[-1][0] == stream:
            self.outputs[-1] = (stream, self.outputs[-1][1] + text)
        else:
            self.outputs.append((stream, text))

    def display(self, data: dict[str, Any], metadata: dict[str, Any], display_id: str | None = None) -> str:
        display_id = display_id or f"display {len(self.outputs)}"
        self.outputs.append((display_id, data))
        return display_id

    def update(self, display_id: str, data: dict[str, Any], metadata: dict[str, Any] | None = None) -> None:
        self.updates += 1
        self.outputs = [(name, data if name == display_id else old) for name, old in self.outputs]

    @property
    def text(self) -> str:
        parts = (x if isinstance(x, str) else x.get("text/plain", str(x)) + "\n" for _, x in self.outputs if x)
        return "".join(parts)

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    def of(self, stream: str) -> str:
        return "".join(text for name, text in self.outputs if name == stream)


class Ranks:
    """Ranks that print at times which the test sets."""

    def __init__(self, size: int, log: Path, mode: str = "fold") -> None:
        self.page = Paper()
        self.output = Output(self.page, range(size), mode, log)
        self.now = 100.0

    def say(self, rank: int | Sequence[int], text: str, stream: str = "stdout") -> None:
        for each in [rank] if isinstance(rank, int) else rank:
            self._send(each, "stream", {"name": stream, "text": text})

    def show(self, rank: int, data: dict[str, str], display_id: str | None = None, kind: str = "display_data") -> None:
        transient = {"display_id": display_id} if display_id else {}
        self._send(rank, kind, {"data": data, "metadata": {}, "transient": transient})

    def clear(self, rank: int) -> None:
        self._send(rank, "clear_output", {"wait": True})

    def _send(self, rank: int, kind: str, content: dict[str, Any]) -> None:
        self.output.receive(rank, {"msg_type": kind, "content": content}, self.now)

    def wait(self, seconds: float) -> list[str]:
        self.now += seconds
        self.output.flush(self.now)
        return self.page.lines

    def end(self) -> list[str]:
        self.output.flush(self.now, final=True)
        return self.page.lines


@pytest.fixture
def two(tmp_path: Path) -> Ranks:
    return Ranks(2, tmp_path / "log")


@pytest.fixture
def four(tmp_path: Path) -> Ranks:
    return Ranks(4, tmp_path / "log")


# -- lines -----------------------------------------------------------------------------------------------------------


def test_equal_output_of_ranks_folds_to_one_line(four: Ranks) -> None:
    four.say(range(4), "10.0\n")
    assert four.wait(0) == ["[0-3] 10.0"]


def test_unequal_output_stands_under_its_ranks(four: Ranks) -> None:
    for rank in range(4):
        four.say(rank, f"{rank % 2}\n")
    assert four.end() == ["[0,2] 0", "[1,3] 1"]


def test_a_line_waits_a_moment_for_the_other_ranks(two: Ranks) -> None:
    two.say(0, "loaded\n")
    assert two.wait(HOLD_S / 2) == []
    two.say(1, "loaded\n")
    assert two.wait(0) == ["[0-1] loaded"]


def test_a_line_that_the_others_do_not_print_is_shown_soon(two: Ranks) -> None:
    two.say(0, "loaded\n")
    assert two.wait(HOLD_S * 1.1) == ["[0] loaded"]


def test_nobody_waits_for_a_rank_that_has_ended(two: Ranks) -> None:
    two.output.rank_done(1)
    two.say(0, "loaded\n")
    assert two.wait(0) == ["[0] loaded"]


def test_ranks_that_print_at_different_speed_still_fold(two: Ranks) -> None:
    two.say(0, "a\nb\nc\n")
    two.say(1, "a\n")
    two.wait(0)
    two.say(1, "b\nc\n")
    assert two.wait(0) == ["[0-1] a", "[0-1] b", "[0-1] c"]


def test_lines_around_one_that_differs_fold(two: Ranks) -> None:
    for rank in (0, 1):
        two.say(rank, f"start\nrank {rank}\nend\n")
    assert two.wait(0) == ["[0-1] start", "[0] rank 0", "[1] rank 1", "[0-1] end"]


def test_a_line_that_one_rank_has_more_does_not_unfold_the_rest(two: Ranks) -> None:
    two.say(0, "start\nonly rank 0\nend\n")
    two.say(1, "start\nend\n")
    assert two.wait(0) == ["[0-1] start", "[0] only rank 0", "[0-1] end"]


def test_the_order_of_each_ranks_lines_is_kept(four: Ranks) -> None:
    for rank in range(4):
        four.say(rank, "".join(f"{(i * (rank + 1)) % 3} of {i}\n" for i in range(20)))
    lines = four.end()
    for rank in range(4):
        own = [line.partition("] ")[2] for line in lines if rank in _ranks_of(line)]
        assert own == [f"{(i * (rank + 1)) % 3} of {i}" for i in range(20)]


def test_a_line_that_comes_in_pieces_is_shown_whole(two: Ranks) -> None:
    two.say(0, "los")
    two.say(1, "other\n")
    two.say(0, "s 0.")
    two.say(0, "5\n")
    assert two.end() == ["[0] loss 0.5", "[1] other"]


def test_an_unfinished_line_is_shown_after_a_moment_and_once_in_the_end(two: Ranks) -> None:
    two.say(0, "Loading ... ")
    assert two.wait(PARTIAL_S * 0.9) == []
    assert two.wait(PARTIAL_S) == ["[0] Loading ... "]
    two.say(0, "done\n")
    assert two.end() == ["[0] Loading ... done"]


def test_a_last_line_without_newline_is_not_lost(two: Ranks) -> None:
    two.say((0, 1), "the end")
    assert two.end() == ["[0-1] the end"]


def test_empty_lines_are_kept(two: Ranks) -> None:
    two.say((0, 1), "a\n\nb\n")
    assert two.end() == ["[0-1] a", "[0-1] ", "[0-1] b"]


def test_stderr_is_kept_apart(two: Ranks) -> None:
    two.say((0, 1), "step 7\n")
    two.say((0, 1), "warn\n", stream="stderr")
    two.end()
    assert two.page.of("stdout") == "[0-1] step 7\n"
    assert two.page.of("stderr") == "[0-1] warn\n"


def test_the_same_text_on_stdout_and_stderr_does_not_fold(two: Ranks) -> None:
    two.say(0, "text\n")
    two.say(1, "text\n", stream="stderr")
    two.end()
    assert (two.page.of("stdout"), two.page.of("stderr")) == ("[0] text\n", "[1] text\n")


def test_all_shows_every_line_under_its_rank(tmp_path: Path) -> None:
    ranks = Ranks(2, tmp_path, "all")
    ranks.say((0, 1), "10.0\n")
    assert ranks.wait(0) == ["[0] 10.0", "[1] 10.0"]


def test_none_shows_nothing(tmp_path: Path) -> None:
    ranks = Ranks(2, tmp_path, "none")
    ranks.say((0, 1), "10.0\n")
    ranks.show(0, {"text/plain": "10.0"})
    assert ranks.end() == []


def test_a_cell_of_one_rank_names_it(tmp_path: Path) -> None:
    page = Paper()
    output = Output(page, (3,), "fold", tmp_path)
    output.receive(3, {"msg_type": "stream", "content": {"name": "stdout", "text": "hi\n"}}, 0.0)
    output.flush(0.0)
    assert page.lines == ["[3] hi"]


# -- progress bars ---------------------------------------------------------------------------------------------------


def test_a_progress_bar_is_one_line_a_rank_in_its_last_state(two: Ranks) -> None:
    for i in range(201):
        for rank in (0, 1):
            two.say(rank, f"\r{i // 2}%|{'#' * (i // 20)}| {i}/200", stream="stderr")
        two.wait(0.01)
    two.say((0, 1), "\n", stream="stderr")
    lines = two.end()
    assert lines == [f"[{rank}] 100%|##########| 200/200" for rank in (0, 1)]


def test_a_bar_moves_while_it_runs_at_a_bounded_rate(two: Ranks) -> None:
    two.say(0, "\r10%")
    assert two.wait(LIVE_S) == ["[0] 10%"]
    for i in range(11, 90):
        two.say(0, f"\r{i}%")
        two.wait(0.001)
    assert two.wait(LIVE_S) == ["[0] 89%"]
    assert two.page.updates <= 2


def test_a_bar_as_tqdm_draws_it_ends_as_one_line(two: Ranks) -> None:
    for rank in (0, 1):
        drawn = io.StringIO()
        for _ in tqdm(range(200), file=drawn, mininterval=0, ncols=60):
            pass
        for piece in re.findall(r".{1,37}", drawn.getvalue(), flags=re.DOTALL):
            two.say(rank, piece, stream="stderr")
            two.wait(0.02)
    lines = two.end()
    assert len(lines) == 2
    assert all(re.fullmatch(rf"\[{rank}\] 100%\|#+\| 200/200 \[.*\]", lines[rank]) for rank in (0, 1))


def test_a_bar_that_takes_itself_away_leaves_nothing(two: Ranks) -> None:
    drawn = io.StringIO()
    for _ in tqdm(range(5), file=drawn, mininterval=0, ncols=60, leave=False):
        pass
    two.say(0, drawn.getvalue(), stream="stderr")
    two.say(0, "after\n")
    two.wait(1)
    assert two.end() == ["[0] after"]


def test_nested_bars_are_one_line_each(two: Ranks) -> None:
    drawn = io.StringIO()
    for _ in tqdm(range(3), desc="epoch", file=drawn, mininterval=0, ncols=60, position=0):
        for _ in tqdm(range(50), desc="batch", file=drawn, mininterval=0, ncols=60, position=1, leave=False):
            pass
    two.say(0, drawn.getvalue(), stream="stderr")
    two.wait(1)
    lines = two.end()
    assert len(lines) == 1
    assert "epoch: 100%" in lines[0] and "3/3" in lines[0]


def test_nested_bars_show_both_while_they_run(two: Ranks) -> None:
    two.say(0, "\repoch: 33%| 1/3", stream="stderr")
    two.say(0, "\n\rbatch: 50%| 25/50\x1b[A", stream="stderr")
    two.wait(1)
    assert two.wait(1) == ["[0] epoch: 33%| 1/3", "[0] batch: 50%| 25/50"]


def test_text_after_a_bar_is_a_line_of_its_own(two: Ranks) -> None:
    two.say(0, "\r50%", stream="stderr")
    two.wait(1)
    two.say(0, "epoch 1 done\n")
    two.say(0, "\r100%\n", stream="stderr")
    assert sorted(two.end()) == ["[0] 100%", "[0] epoch 1 done"]


def test_a_bar_costs_no_memory_while_it_runs(two: Ranks) -> None:
    for i in range(20_000):
        two.say(0, f"\r{i:100}", stream="stderr")
    assert sum(map(len, two.output.ranks[0].history)) < 10_000


def test_windows_line_ends_are_line_ends(two: Ranks) -> None:
    two.say(0, "a\r\nb\r")
    two.say(0, "\n")
    two.say(1, "a\nb\n")
    assert two.end() == ["[0-1] a", "[0-1] b"]


# -- displays --------------------------------------------------------------------------------------------------------


def test_equal_values_fold_and_unequal_ones_do_not(four: Ranks) -> None:
    for rank in range(4):
        four.show(rank, {"text/plain": "7"}, kind="execute_result")
    for rank in range(4):
        four.show(rank, {"text/plain": str(rank // 3)}, kind="execute_result")
    assert four.end() == ["[0-3] 7", "[0-2] 0", "[3] 1"]


def test_a_value_of_several_lines_has_its_ranks_on_each(two: Ranks) -> None:
    for rank in (0, 1):
        two.show(rank, {"text/plain": "tensor([[0.],\n        [0.]])"})
    assert two.end() == ["[0-1] tensor([[0.],", "[0-1]         [0.]])"]


def test_a_picture_is_shown_under_its_ranks(two: Ranks) -> None:
    two.show(0, {"text/plain": "<Figure>", "image/png": "AAAA"})
    two.show(1, {"text/plain": "<Figure>", "image/png": "BBBB"})
    two.end()
    shown = [data for _, data in two.page.outputs]
    assert shown == [
        "[0]\n",
        {"text/plain": "<Figure>", "image/png": "AAAA"},
        "[1]\n",
        {"text/plain": "<Figure>", "image/png": "BBBB"},
    ]


def test_equal_pictures_are_one(two: Ranks) -> None:
    for rank in (0, 1):
        two.show(rank, {"text/html": "<b>same</b>"})
    two.end()
    assert [data for _, data in two.page.outputs] == ["[0-1]\n", {"text/html": "<b>same</b>"}]


def test_a_figure_that_is_drawn_again_after_clear_output_takes_the_place_of_the_old_one(two: Ranks) -> None:
    for i in range(5):
        for rank in (0, 1):
            two.clear(rank)
            two.show(rank, {"image/png": f"picture {i} of {rank}"})
        two.wait(1)
    two.end()
    assert [data["image/png"] for _, data in two.page.outputs if isinstance(data, dict)] == [
        "picture 4 of 0",
        "picture 4 of 1",
    ]


def test_text_before_a_display_comes_before_it(two: Ranks) -> None:
    two.say((0, 1), "before")
    for rank in (0, 1):
        two.show(rank, {"text/html": "<b>same</b>"})
    two.say((0, 1), "after\n")
    two.end()
    assert [data for _, data in two.page.outputs] == [
        "[0-1] before\n[0-1]\n",
        {"text/html": "<b>same</b>"},
        "[0-1] after\n",
    ]


def test_a_display_is_updated_in_place(two: Ranks) -> None:
    two.show(0, {"text/html": "step 1"}, display_id="a")
    two.wait(1)
    two.show(0, {"text/html": "step 2"}, display_id="a", kind="update_display_data")
    two.end()
    assert [data for _, data in two.page.outputs] == ["[0]\n", {"text/html": "step 2"}]


def test_an_update_that_comes_before_the_display_is_on_the_page_is_not_lost(two: Ranks) -> None:
    two.show(0, {"text/html": "step 1"}, display_id="a")
    two.show(0, {"text/html": "step 2"}, display_id="a", kind="update_display_data")
    two.end()
    assert [data for _, data in two.page.outputs] == ["[0]\n", {"text/html": "step 2"}]


def test_displays_that_will_differ_are_not_folded(two: Ranks) -> None:
    for rank in (0, 1):
        two.show(rank, {"text/html": "step 0"}, display_id=f"of rank {rank}")
    two.wait(1)
    for rank in (0, 1):
        two.show(rank, {"text/html": f"at {rank}"}, display_id=f"of rank {rank}", kind="update_display_data")
    two.end()
    assert [data["text/html"] for _, data in two.page.outputs if isinstance(data, dict)] == ["at 0", "at 1"]


def test_a_widget_of_a_rank_is_shown_as_text(two: Ranks) -> None:
    two.show(0, {"text/plain": "IntSlider()", "application/vnd.jupyter.widget-view+json": "{}"})
    assert two.end() == ["[0] IntSlider()"]


# -- more than the page takes ----------------------------------------------------------------------------------------


def test_a_flood_keeps_head_and_tail_and_tells_where_the_rest_is(two: Ranks, tmp_path: Path) -> None:
    for start in range(0, 50_000, 500):
        for rank in (0, 1):
            two.say(rank, "".join(f"{'x' * 100} {i} of {rank}\n" for i in range(start, start + 500)))
        two.wait(0.05)
    lines = two.end()
    assert len(two.page.text) < 1_000_000
    for rank in (0, 1):
        own = [line for line in lines if line.startswith(f"[{rank}] ")]
        assert own[0].endswith(f"x 0 of {rank}")
        assert own[-1].endswith(f"x 49999 of {rank}")
        whole = (tmp_path / "log" / f"rank-{rank}.txt").read_text().splitlines()
        assert [line.split()[1] for line in whole] == [str(i) for i in range(50_000)]
    told = next(line for line in lines if "left out" in line)
    found = re.fullmatch(r"… ([\d,]+) lines left out; full text in (.*)", told)
    assert found is not None
    shown = sum(line.startswith("[") for line in lines)
    assert int(found[1].replace(",", "")) == 100_000 - shown
    assert found[2] == str(tmp_path / "log")


def test_a_rank_that_floods_costs_the_others_no_line(two: Ranks) -> None:
    two.say(0, "".join(f"line {i}\n" for i in range(10_000)))
    two.say(1, "".join(f"other {i}\n" for i in range(300)))
    lines = two.end()
    assert [line for line in lines if line.startswith("[1]")] == [f"[1] other {i}" for i in range(300)]
    assert lines[-1] == "[0] line 9999"


def test_a_line_that_was_unfinished_at_the_overflow_is_whole(two: Ranks, tmp_path: Path) -> None:
    two.say(0, "".join(f"line {i}\n" for i in range(5000)) + "begun ")
    two.wait(PARTIAL_S / 2)
    two.say(0, "and ended\nlast\n")
    lines = two.end()
    assert lines[-2:] == ["[0] begun and ended", "[0] last"]
    assert (tmp_path / "log" / "rank-0.txt").read_text().splitlines()[-2:] == ["begun and ended", "last"]


def test_a_bar_after_the_overflow_is_one_line_in_its_last_state(two: Ranks) -> None:
    two.say(0, "".join(f"line {i}\n" for i in range(5000)))
    two.wait(1)
    for i in range(101):
        two.say(0, f"\r{i}%", stream="stderr")
    two.say(0, "\n", stream="stderr")
    lines = two.end()
    assert [line for line in lines if "%" in line] == ["[0] 100%"]


def test_no_file_is_made_for_what_fits_on_the_page(two: Ranks, tmp_path: Path) -> None:
    two.say((0, 1), "".join(f"line {i}\n" for i in range(100)))
    two.end()
    assert not (tmp_path / "log").exists()


def test_a_very_long_line_is_cut_and_its_length_told_and_is_whole_in_the_log(two: Ranks) -> None:
    two.say((0, 1), "first\n" + "x" * 1_000_000 + "\n")
    two.wait(0.0)
    two.say((0, 1), "last\n")
    first, long, last, told = two.end()
    assert (first, last) == ("[0-1] first", "[0-1] last")
    assert len(long) < 10_000
    assert "(1,000,000 characters)" in long
    assert told == f"… long lines were cut; full text in {two.output.log}"
    for rank in (0, 1):
        text = (two.output.log / f"rank-{rank}.txt").read_text()
        assert text == "first\n" + "x" * 1_000_000 + "\nlast\n"


def test_lines_that_differ_on_every_rank_do_not_wait_long_for_each_other(two: Ranks) -> None:
    for step in range(3):
        two.say(0, f"a{step}\n")
        two.wait(0.3)
    two.say(0, "a3\n")
    assert two.wait(0.0)[-1] == "[0] a2"
    assert two.wait(0.04)[-1] == "[0] a3"


def test_a_line_that_all_print_makes_ranks_wait_for_each_other_again(two: Ranks) -> None:
    for step in range(3):
        two.say(0, f"a{step}\n")
        two.wait(0.3)
    two.say((0, 1), "all\n")
    two.wait(0.0)
    two.say(0, "again\n")
    assert two.wait(0.1)[-1] == "[0-1] all"
    two.say(1, "again\n")
    assert two.wait(0.0)[-1] == "[0-1] again"


def test_unequal_values_are_shown_with_at_most_2_kb_each(two: Ranks) -> None:
    for rank in (0, 1):
        two.show(rank, {"text/plain": f"{rank}" * 10_000})
    lines = two.end()
    assert len(lines) == 2
    assert all(len(line) <= 2048 + 10 for line in lines)


def test_a_log_that_cannot_be_written_is_told_once_and_costs_nothing_else() -> None:
    ranks = Ranks(2, Path("/proc/nowhere/log"))
    for rank in (0, 1):
        ranks.say(rank, "".join(f"line {i} of {rank}\n" for i in range(5000)))
    lines = ranks.end()
    assert sum("cannot be written" in line for line in lines) == 1
    assert lines[-1] == "[1] line 4999 of 1"


def _ranks_of(line: str) -> set[int]:
    from nbdist.ranks import parse

    return set(parse(line[1 : line.index("]")], 64))
