"""What a launcher runs on each host: ``python -m nbdist.engine``; see ``nbdist.engine.link``.

Under torchrun, or with ``--join`` in an allocation, it makes a cluster of the job that it is part of, which
``%cluster attach`` finds; see ``nbdist.engine.job``.
"""

from __future__ import annotations

import argparse
import os
import sys

from nbdist.engine import job
from nbdist.engine.agent import read_line


def main() -> int:
    """Read what to join, and join it."""
    parser = argparse.ArgumentParser(prog="python -m nbdist.engine", description=__doc__)
    parser.add_argument("--orders", metavar="FILE", help="what to read, where this host has it; else standard input")
    parser.add_argument("--lifeline", action="store_true", help="end when standard input ends")
    parser.add_argument("--join", action="store_true", help="make a cluster of the job that this is part of")
    parser.add_argument("--name", default="", help="under which %%cluster attach finds that cluster")
    parser.add_argument("--address", default="", help="of the host of rank 0, for the others")
    options = parser.parse_args()
    os.umask(0o077)
    if options.join or job.is_rank_of_torchrun():
        return job.join(options.name, options.address)
    if options.orders and os.path.exists(options.orders):
        # mpiexec passes its input to other hosts, but not to processes of its own
        descriptor = os.open(options.orders, os.O_RDONLY)
        os.dup2(descriptor, 0)
        options.lifeline = False
    first = read_line()
    if not first:
        return 1
    from nbdist.engine import link

    joined = link.Link(first, lifeline=options.lifeline)
    second = read_line()  # comes when the controller runs; torch is imported meanwhile
    if not second:
        joined.end()
        return 1
    return link.serve(joined, second)


if __name__ == "__main__":
    sys.exit(main())
