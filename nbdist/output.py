"""What ranks print, as one readable text: whole lines under their ranks, equal ones folded, bounded on the page.

Pure bookkeeping: it is told of each message and of the time, and gives back what to show. ``cells`` does the rest.
"""

from __future__ import annotations

import json
import re
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from nbdist.page import Page
from nbdist.ranks import spell

__all__ = ["Output"]

HOLD_S = 0.25  # how long a rank's line waits for the other ranks to print the same
HOLD_ALONE_S = 0.03  # the same for a rank of which the last lines were its own
ALONE_AFTER = 2  # lines
PARTIAL_S = 0.5  # after which an unfinished line is shown as it is
LIVE_S = 0.2  # between two updates of the progress lines
HEAD_LINES = 1000
HEAD_BYTES = 256 * 1024
TAIL_BYTES = 16 * 1024
LONG_LINE = 8 * 1024
LONG_VALUE = 2 * 1024
MOST_HELD_LINES = 50_000  # of one rank that wait for the other ranks to print the same
MOST_LIVE_LINES = 64
MOST_ROWS = 16
WIDGET = "application/vnd.jupyter.widget-view+json"
CONTROL = re.compile(r"(\n\r|\n|\r|\x1b\[\d*A)|\x1b\[\d*K")


@dataclass(slots=True)
class _Item:
    """One line, or one display, of one rank."""

    key: str
    stream: str = "stdout"
    text: str | None = None
    bundle: dict[str, Any] | None = None
    at: float = 0.0


@dataclass(slots=True)
class _Row:
    text: str = ""
    overwritten: bool = False


@dataclass(slots=True)
class _Screen:
    """The end of a rank's stream that may still change: an unfinished line, or progress bars under each other."""

    rows: list[_Row] = field(default_factory=lambda: [_Row()])
    at: int = 0  # the row of the cursor
    returned: bool = False  # the cursor is at the begin of its row: the next text replaces it
    since: float | None = None  # when the unfinished line began
    shown: bool = False  # the unfinished line has waited long, and is on the page already

    @property
    def live(self) -> bool:
        return self.shown or len(self.rows) > 1 or self.rows[0].overwritten

    def take_plain(self, text: str) -> str | None:
        """Take text that is lines and nothing else; give the whole ones. None: it has to be fed."""
        if self.live or self.returned or CONTROL.search(text.replace("\n", "")):
            return None
        whole, newline, self.rows[0].text = (self.rows[0].text + text).rpartition("\n")
        return whole + newline

    def feed(self, text: str) -> Iterator[tuple[str, bool]]:
        """Take text; give each line that will change no more, and whether it was shown as a live one."""
        plain = self.take_plain(text)
        if plain is not None:
            yield from ((line, False) for line in plain.split("\n")[:-1])
            return
        for token in CONTROL.split(text):
            if not token:
                continue
            row = self.rows[self.at]
            if token[0] == "\n":
                self.returned = token == "\n\r"
                if self.at + 1 < len(self.rows):
                    self.at += 1
                    self.returned = True
                elif row.overwritten or (self.returned and not row.text.strip()):
                    # the end of a bar, or the way down to one below it
                    self.rows.append(_Row())
                    self.at += 1
                    if len(self.rows) > MOST_ROWS:
                        self.at -= 1
                        yield self.rows.pop(0).text, True
                else:
                    yield from self.finish()
            elif token == "\r":
                if row.text.isspace():  # a bar that took itself away
                    self.rows[self.at] = _Row()
                else:
                    self.returned = True
            elif token.endswith("A") and token.startswith("\x1b["):
                self.at = max(0, self.at - int(token[2:-1] or 1))
                self.returned = True
            elif self.returned:
                self.rows[self.at] = _Row(token, overwritten=True)
                self.returned = False
            else:
                row.text += token

    def finish(self) -> Iterator[tuple[str, bool]]:
        """Give what is left, and begin anew."""
        *above, last = self.rows
        if not above and not last.overwritten:
            yield last.text, self.shown
        else:
            yield from ((row.text, True) for row in above)
            yield last.text, last.overwritten
        self.rows, self.at, self.since, self.shown = [_Row()], 0, None, False


@dataclass(slots=True)
class _Rank:
    """What a rank has said that is not shown yet."""

    items: deque[_Item] = field(default_factory=deque)
    keys: Counter[str] = field(default_factory=Counter)
    screens: dict[str, _Screen] = field(default_factory=dict)
    emitted: int = 0
    emitted_bytes: int = 0
    alone: int = 0  # how many of its lines in a row no other rank had
    done: bool = False
    overflowed: bool = False
    history: list[str] = field(default_factory=list)  # all lines until the overflow
    clear: bool = False
    last_display: str | None = None
    displays: dict[str, str] = field(default_factory=dict)  # the rank's display id -> ours
    tail: deque[str] = field(default_factory=deque)
    tail_bytes: int = 0
    left_out: int = 0
    file: IO[str] | None = None


class Output:
    """Merges the output of ranks onto a page.

    Parameters
    ----------
    page : Page
        Where it is shown.
    ranks : sequence of int
        Who runs the cell.
    mode : {"fold", "all", "none"}
    log : Path
        Folder for the full text, made only when not all of it fits on the page.
    """

    def __init__(self, page: Page, ranks: Sequence[int], mode: str, log: Path) -> None:
        self.page = page
        self.mode = mode
        self.log = log
        self.ranks = {rank: _Rank() for rank in ranks}
        self.most_lines = max(50, HEAD_LINES // max(1, len(ranks)))  # a rank's share of the page
        self.most_bytes = HEAD_BYTES // max(1, len(ranks))
        self.live_id: str | None = None
        self.live_done: list[tuple[int, str]] = []  # lines that were live; the newest of them stay
        self.live_at = 0.0
        self.live_dirty = False
        self.warned = False

    # -- what comes in -----------------------------------------------------------------------------------------------

    def receive(self, rank: int, message: dict[str, Any], now: float) -> None:
        """Take one iopub message of a rank."""
        if self.mode == "none":
            return
        kind, content, state = message["msg_type"], message["content"], self.ranks[rank]
        if kind == "stream":
            self._text(rank, state, content["name"], content["text"], now)
        elif kind in ("display_data", "execute_result"):
            self._finish(rank, state, now)
            content["data"].pop(WIDGET, None)  # its model lives on the rank: no front end could draw it
            key = json.dumps(content["data"], sort_keys=True, default=str)
            if _display_id(content):
                key = f"{rank} {key}"  # what will be updated is equal on the ranks for a moment only
            state.items.append(_Item(key=key, bundle=content, at=now))
            state.keys[key] += 1
        elif kind == "update_display_data":
            self._update(state, content)
        elif kind == "clear_output":
            state.clear = True

    def rank_done(self, rank: int) -> None:
        """Nothing more comes from this rank: nobody waits for it."""
        self.ranks[rank].done = True

    def _text(self, rank: int, state: _Rank, stream: str, text: str, now: float) -> None:
        screen = state.screens.setdefault(stream, _Screen())
        plain = screen.take_plain(text) if state.overflowed else None
        if plain:  # a flood: not line by line
            self._leave_out(state, plain)
        elif plain is None:
            for line, live in screen.feed(text):
                self._line(rank, state, stream, line, live, now)
        if screen.live:
            self.live_dirty = True
        elif not screen.rows[0].text:
            screen.since = None
        elif screen.since is None:
            screen.since = now
        if len(state.items) > MOST_HELD_LINES:
            self.flush(now, hold=0.0)

    def _line(self, rank: int, state: _Rank, stream: str, line: str, live: bool, now: float) -> None:
        if live:
            line = line.rstrip()
            self.live_dirty = True
            if not line:
                return
            self.live_done.append((rank, line))
            del self.live_done[:-MOST_LIVE_LINES]
        if state.overflowed and not live:
            self._leave_out(state, f"{line}\n")
        elif state.file is not None:
            self._keep(state, f"{line}\n")
        elif not state.overflowed:
            state.history.append(f"{line}\n")
        if not live and not state.overflowed:
            key = f"{stream}\n{line}"
            state.items.append(_Item(key=key, stream=stream, text=line, at=now))
            state.keys[key] += 1

    def _finish(self, rank: int, state: _Rank, now: float) -> None:
        """No more comes of the lines that are unfinished."""
        for stream, screen in state.screens.items():
            if screen.live or screen.rows[0].text:
                for line, live in screen.finish():
                    if line or live:
                        self._line(rank, state, stream, line, live, now)

    def _update(self, state: _Rank, content: dict[str, Any]) -> None:
        theirs = _display_id(content)
        ours = state.displays.get(theirs)
        if ours is not None:
            self.page.update(ours, content["data"], content.get("metadata"))
            return
        for item in state.items:  # not on the page yet
            if item.bundle is not None and theirs and _display_id(item.bundle) == theirs:
                item.bundle = {**item.bundle, "data": content["data"], "metadata": content.get("metadata", {})}

    @property
    def holds_lines(self) -> bool:
        """Whether lines wait for other ranks to print the same."""
        return any(state.items for state in self.ranks.values())

    # -- what goes out -----------------------------------------------------------------------------------------------

    def flush(self, now: float, final: bool = False, hold: float = HOLD_S) -> None:
        """Show what is ready: folded lines, and lines that have waited longer than ``hold`` seconds."""
        for rank, state in self.ranks.items():
            if final:
                self._finish(rank, state, now)
            for screen in state.screens.values():
                if (
                    screen.since is not None
                    and now - screen.since > PARTIAL_S
                    and not (screen.live or state.overflowed)
                ):
                    screen.shown = self.live_dirty = True
        chunk: list[str] = []
        stream = "stdout"
        for ranks, item in self._ready(now, 0.0 if final else hold):
            if item.text is None:
                self._emit(chunk, stream)
                self._show(ranks, item)
                continue
            if item.stream != stream:
                self._emit(chunk, stream)
                stream = item.stream
            chunk.append(_labelled(ranks, item.text, LONG_LINE))
            if len(item.text) > LONG_LINE:
                self._write_down(ranks)
            full = self._full(ranks, len(chunk[-1]))
            if full:
                self._emit(chunk, stream)
                self._overflow(full)
        self._emit(chunk, stream)
        self._show_live(now, final)
        if final:
            self._show_tail()

    def _ready(self, now: float, hold: float) -> Iterator[tuple[tuple[int, ...], _Item]]:
        """Give what can be shown, with the ranks that said it at the same place."""
        while True:
            heads = {rank: state.items[0] for rank, state in self.ranks.items() if state.items}
            if not heads:
                return
            silent = [s for rank, s in self.ranks.items() if rank not in heads and not s.done and not s.overflowed]
            rank, ranks = self._choose(heads)
            item = heads[rank]
            if self.mode == "fold" and silent:
                alone = min(self.ranks[r].alone for r in ranks) >= ALONE_AFTER
                if now - item.at < (min(hold, HOLD_ALONE_S) if alone else hold):
                    return
            for r in ranks:
                state = self.ranks[r]
                state.alone = state.alone + 1 if len(ranks) == 1 else 0
                state.items.popleft()
                state.emitted += 1
                state.keys[item.key] -= 1
                if not state.keys[item.key]:
                    del state.keys[item.key]
            yield ranks, item

    def _choose(self, heads: dict[int, _Item]) -> tuple[int, tuple[int, ...]]:
        """Choose the line to show next: one that no other rank has further back, where it could still be folded."""
        if self.mode == "all":
            rank = min(heads, key=lambda r: (heads[r].at, r))
            return rank, (rank,)
        groups: dict[str, list[int]] = {}
        for rank, item in heads.items():
            groups.setdefault(item.key, []).append(rank)
        # of the lines that nobody else has further back, that of the rank that is least far: the others' may come yet
        alone = [
            ranks
            for key, ranks in groups.items()
            if not any(key in self.ranks[r].keys for r in heads if r not in ranks)
        ]
        chosen = min(alone or groups.values(), key=lambda ranks: (self.ranks[ranks[0]].emitted, ranks[0]))
        return chosen[0], tuple(chosen)

    def _emit(self, chunk: list[str], stream: str) -> None:
        if chunk:
            self.page.write("".join(chunk), stream)
            chunk.clear()

    def _full(self, ranks: Sequence[int], size: int) -> list[int]:
        """Count what was shown; give the ranks whose share of the page is used up."""
        full = []
        for rank in ranks:
            state = self.ranks[rank]
            state.emitted_bytes += size
            if state.emitted >= self.most_lines or state.emitted_bytes >= self.most_bytes:
                full.append(rank)
        return full

    def _show(self, ranks: tuple[int, ...], item: _Item) -> None:
        assert item.bundle is not None
        data, metadata = item.bundle["data"], item.bundle.get("metadata", {})
        theirs = _display_id(item.bundle)
        if set(data) <= {"text/plain"} and not theirs:
            most = LONG_LINE if len(ranks) == len(self.ranks) else LONG_VALUE
            text = _labelled(ranks, data.get("text/plain", ""), most)
            self.page.write(text)
            self._overflow(self._full(ranks, len(text)))
            return
        first = self.ranks[ranks[0]]
        if first.clear and first.last_display is not None and self.page.is_rich:
            ours = first.last_display
            self.page.update(ours, data, metadata)
        else:
            self.page.write(f"[{spell(ranks)}]\n")
            ours = self.page.display(data, metadata)
        for rank in ranks:
            state = self.ranks[rank]
            state.clear = False
            state.last_display = ours
            if theirs:
                state.displays[theirs] = ours

    def _show_live(self, now: float, final: bool) -> None:
        if not self.live_dirty or (not final and now - self.live_at < LIVE_S):
            return
        if not self.page.is_rich and not final:
            return
        lines = [f"[{rank}] {text}" for rank, text in self.live_done]
        for rank, state in self.ranks.items():
            screens = [screen for _, screen in sorted(state.screens.items()) if screen.live]
            lines += [f"[{rank}] {row.text}" for screen in screens for row in screen.rows if row.text.strip()]
        if not lines and self.live_id is None:
            return
        data = {"text/plain": "\n".join(line[:LONG_LINE] for line in lines)}
        if self.live_id is None:
            self.live_id = self.page.display(data, {})
        else:
            self.page.update(self.live_id, data)
        self.live_at, self.live_dirty = now, False

    # -- more than the page takes ------------------------------------------------------------------------------------

    def _overflow(self, ranks: Sequence[int]) -> None:
        """From here on the lines of these ranks go to files; the last ones are shown at the end."""
        self._write_down(ranks)
        for rank in ranks:
            state = self.ranks[rank]
            if not any(s.overflowed for s in self.ranks.values()):
                self.page.write(f"… more output than the page takes; all of it is written to {self.log}\n", "stderr")
            state.overflowed = True
            pending = "".join(f"{item.text}\n" for item in state.items if item.text is not None)
            state.items.clear()
            state.keys.clear()
            self._leave_out(state, pending, keep=False)

    def _write_down(self, ranks: Sequence[int]) -> None:
        """Write all that these ranks have said to files, and all that they will say."""
        for rank in ranks:
            state = self.ranks[rank]
            if state.file is not None or state.overflowed:
                continue
            try:
                self.log.mkdir(parents=True, exist_ok=True, mode=0o700)
                state.file = open(self.log / f"rank-{rank}.txt", "w", encoding="utf-8", errors="replace")  # noqa: SIM115
                state.file.writelines(state.history)
            except OSError as error:
                self._warn(error)
            state.history.clear()

    def _leave_out(self, state: _Rank, text: str, keep: bool = True) -> None:
        state.left_out += text.count("\n")
        state.tail.append(text)
        state.tail_bytes += len(text)
        while len(state.tail) > 1 and state.tail_bytes - len(state.tail[0]) > TAIL_BYTES:
            state.tail_bytes -= len(state.tail.popleft())
        if keep:
            self._keep(state, text)

    def _keep(self, state: _Rank, text: str) -> None:
        if state.file is not None:
            try:
                state.file.write(text)
            except OSError as error:  # a full disk costs the log, not the cell
                state.file = None
                self._warn(error)

    def _warn(self, error: OSError) -> None:
        if not self.warned:
            self.warned = True
            self.page.write(f"nbdist: the full output cannot be written to {self.log}: {error.strerror}\n", "stderr")

    def _show_tail(self) -> None:
        left_out = 0
        tails = []
        for rank, state in self.ranks.items():
            if state.file is not None:
                try:
                    state.file.close()
                except OSError as error:
                    self._warn(error)
            if not state.overflowed:
                continue
            text = "".join(state.tail)[-TAIL_BYTES:]
            lines = text.splitlines()
            if len(text) == TAIL_BYTES and len(lines) > 1:
                lines = lines[1:]  # the first one is cut
            left_out += max(0, state.left_out - len(lines))
            tails += [_labelled((rank,), line, LONG_LINE) for line in lines]
            state.tail.clear()
        if any(state.overflowed for state in self.ranks.values()):
            self.page.write(f"… {left_out:,} lines left out; full text in {self.log}\n", "stderr")
            self.page.write("".join(tails))
        elif any(state.file is not None for state in self.ranks.values()):
            self.page.write(f"… long lines were cut; full text in {self.log}\n", "stderr")


def _display_id(content: dict[str, Any]) -> str:
    return (content.get("transient") or {}).get("display_id") or ""


def _labelled(ranks: Sequence[int], text: str, most: int) -> str:
    """Put the ranks before each line, and cut what is too long for a page."""
    if len(text) > most:
        text = f"{text[: most - 200]} … ({len(text):,} characters) … {text[-100:]}"
    label = f"[{spell(ranks)}] "
    return "".join(f"{label}{line}\n" for line in text.split("\n"))
