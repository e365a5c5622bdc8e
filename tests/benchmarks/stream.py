"""Output on its way to the page: floods of lines, one long line, and the time from ``print`` to the front end.

For nbdist a line counts as there if it is whole on the page or in the log that the page names: what the page itself
gets is bounded on purpose.
"""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from tests.benchmarks.private import private
from tests.benchmarks.table import Table, interleave, percentile
from tests.kernel import Cell, Kernel

FLOOD = """
for i in range({lines}):
    print(f"<{{place}}:{{i:06d}}>")
"""
LONG = "print('<' + 'x' * 1_000_000 + '>')"
TICKS = """
import time
for i in range({ticks}):
    print(f"<{{time.monotonic()}}>")
    time.sleep(0.1)
"""

STOCK = """
import ipyparallel as ipp
stock = ipp.Cluster(n=2, log_level=40)
client = stock.start_and_connect_sync(activate=True)
_ = client[:].scatter("place", [0, 1], flatten=True, block=True)
"""


def latencies(cell: Cell) -> list[float]:
    """Seconds between a time stamp's print and its arrival (one clock: CLOCK_MONOTONIC is the machine's)."""
    found: dict[str, float] = {}
    for at, message in cell.messages:
        content = message["content"]
        text = content.get("text") or str(content.get("data", {}).get("text/plain", ""))
        for stamp in re.findall(r"<(\d+\.\d+)>", text):
            found.setdefault(stamp, at - float(stamp))
    return list(found.values())


def run(repeats: int = 5) -> Table:
    table = Table(
        "stream: output of 2 ranks",
        ["output", "nbdist", "%%px", "ratio", "lost", "bytes to the page", "bytes to the page, %%px"],
    )
    with TemporaryDirectory(prefix="bench-") as home, Kernel(cwd=home, env=private(Path(home))) as kernel:
        kernel.check("%load_ext nbdist\ncluster = %cluster start -n 2 --backend gloo", timeout=120)
        kernel.check("%%distributed\nplace = rank")
        kernel.check(STOCK, timeout=120)
        last: dict[str, Cell] = {}

        def seconds(side: str, code: str) -> float:
            magic = {"ours": "%%distributed", "px": "%%px"}[side]
            last[side] = kernel.check(f"{magic}\n{code}", timeout=300)
            return last[side].seconds

        rates = {}
        for lines in (20_000, 40_000):
            code = FLOOD.format(lines=lines)
            values = interleave({side: lambda s=side, c=code: seconds(s, c) for side in ("ours", "px")}, repeats)  # type: ignore[misc]
            rate, px_rate = (2 * lines / median(values[side]) for side in ("ours", "px"))
            rates[lines] = rate
            lost = 2 * lines - len(set(re.findall(r"<\d:\d{6}>", written(last["ours"]))))
            table.add(
                f"2 × {lines:,} lines",
                table.verdict(rate, " lines/s", at_least=100_000),
                f"{px_rate:,.0f} lines/s",
                f"{rate / px_rate:.2f}",
                table.verdict(lost, at_most=0),
                f"{last['ours'].wire_bytes:,}",
                f"{last['px'].wire_bytes:,}",
            )
        growth = table.verdict(rates[20_000] / rates[40_000], at_most=1.3)
        table.notes.append(f"time per line, 40,000 against 20,000 lines: {growth} (1 is linear)")

        values = interleave({side: lambda s=side: seconds(s, LONG) for side in ("ours", "px")}, repeats)  # type: ignore[misc]
        lost = 2 - len(re.findall("<x{1000000}>", written(last["ours"])))
        table.add(
            "one line of 1 MB",
            f"{1e3 * median(values['ours']):.0f} ms",
            f"{1e3 * median(values['px']):.0f} ms",
            f"{median(values['ours']) / median(values['px']):.2f}",
            table.verdict(lost, at_most=0),
            f"{last['ours'].wire_bytes:,}",
            f"{last['px'].wire_bytes:,}",
        )

        ticks = TICKS.format(ticks=50)
        for side in ("ours", "px"):
            seconds(side, ticks)
        ours, px = (latencies(last[side]) for side in ("ours", "px"))
        table.add(
            "print → front end, 10 lines/s",
            f"{1e3 * median(ours):.0f} ms, p95 {table.verdict(1e3 * percentile(ours, 0.95), ' ms', at_most=100)}",
            f"{1e3 * median(px):.0f} ms, p95 {1e3 * percentile(px, 0.95):.0f} ms",
            f"{median(ours) / median(px):.2f}",
            table.verdict(100 - len(ours), at_most=0),
            f"{last['ours'].wire_bytes:,}",
            f"{last['px'].wire_bytes:,}",
        )
        kernel.check("client.shutdown(targets='all', block=True)\nstock.stop_cluster_sync()\n%cluster stop", timeout=60)
    table.notes.append(f"medians of {repeats}, alternating in one kernel")
    return table


def written(cell: Cell) -> str:
    """Give everything that the ranks printed: from the log where the page says there is one, else from the page."""
    log = re.search(r"full text in (\S+)", cell.text)
    if log is None:
        return cell.text
    return "".join(path.read_text() for path in sorted(Path(log[1]).glob("rank-*.txt")))
