"""``python -m tests.benchmarks [NAME ...] [--repeats R]``: measure and print tables; without names, all of them."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time

NAMES = (
    "start",
    "cell",
    "stream",
    "train",
    "trainer",
    "records",
    "faults",
    "checkpoint",
    "strategies",
    "hosts",
    "scale",
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", default=["all"], help=", ".join(NAMES))
    parser.add_argument("--repeats", type=int, help="how often each side is measured (default: each benchmark's own)")
    options = parser.parse_args()
    names = NAMES if options.names == ["all"] else options.names
    if unknown := set(names) - set(NAMES):
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")

    # One thread for each rank, on all sides alike: more would measure how two thread pools fight for the cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    met = True
    for name in names:
        module = importlib.import_module(f"tests.benchmarks.{name}")
        began = time.perf_counter()
        table = module.run(**({"repeats": options.repeats} if options.repeats else {}))
        print(
            f"\n{table}\n({os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {time.perf_counter() - began:.0f} s)",
            flush=True,
        )
        met &= table.met
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
