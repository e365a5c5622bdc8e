"""The magics: each parses its line, then makes one call."""

from __future__ import annotations

import argparse
import functools
import shlex
from typing import Any, NoReturn

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, line_magic, magics_class

from nbdist import launch
from nbdist import ranks as rank_sets
from nbdist.errors import ClusterError

__all__ = ["ClusterMagics", "register"]


class _Parser(argparse.ArgumentParser):
    """argparse that raises a one-line UsageError instead of ending the kernel."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog=prog, add_help=False, allow_abbrev=False, **options)

    def parse(self, line: str) -> argparse.Namespace:
        try:
            words = shlex.split(line)
        except ValueError as error:  # an open quotation mark
            self.error(str(error))
        return self.parse_args(words)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}. Usage: {' '.join(self.format_usage().split()[1:])}")


@functools.cache
def _cluster_parser() -> _Parser:
    parser = _Parser("%cluster")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Sub)
    start = commands.add_parser("start")
    start.add_argument("-n", type=int)
    start.add_argument("--profile")
    start.add_argument("--backend", default="auto", choices=("auto", "nccl", "gloo"))
    start.add_argument("--timeout", type=float)
    start.add_argument("--collective-timeout", type=float, default=1800.0)
    start.add_argument("--keep", action="store_true")
    start.add_argument("--name", default="")
    start.add_argument("--repair", default="ask", choices=("auto", "ask"))
    start.add_argument("--oversubscribe", action="store_true")
    start.add_argument("--min", type=int, dest="min_ranks", metavar="K")
    start.add_argument("--dry-run", action="store_true")
    launch.add_options(start)
    for name in ("status", "interrupt", "check"):
        commands.add_parser(name)
    stop = commands.add_parser("stop")
    stop.add_argument("--all", action="store_true", dest="everything")
    attach = commands.add_parser("attach")
    attach.add_argument("name", nargs="?", default="")
    attach.add_argument("--ipcluster", metavar="PROFILE", nargs="?", const="default")
    commands.add_parser("detach")
    repair = commands.add_parser("repair")
    repair.add_argument("--copy")
    repair.add_argument("--shrink", action="store_true")
    resize = commands.add_parser("resize")
    resize.add_argument("-n", type=int, required=True)
    debug = commands.add_parser("debug")
    debug.add_argument("state", choices=("on", "off"))
    logs = commands.add_parser("logs")
    logs.add_argument("--ranks")
    return parser


class _Sub(_Parser):
    """A command's own parser, which tells of what it does not know with its own usage."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return options, unknown


@functools.cache
def _cell_parser(prog: str) -> _Parser:
    parser = _Parser(prog)
    parser.add_argument("--ranks")
    parser.add_argument("--local", action="store_true")
    parser.add_argument("--timeout", type=float)
    parser.add_argument("--detach", action="store_true")
    parser.add_argument("--output", default="fold", choices=("fold", "all", "none"))
    return parser


@magics_class
class ClusterMagics(Magics):
    """``%cluster``, ``%%distributed``, ``%push``, ``%pull``, ``%train``, ``%dashboard``."""

    shell: Any

    @line_magic
    def cluster(self, line: str) -> Any:
        """Start, look at, mend and stop the cluster: ``%cluster start -n 2``, ``status``, ``repair``, ``stop`` …"""
        from nbdist import cluster as clusters

        options = vars(_cluster_parser().parse(line))
        command = options.pop("command")
        if command == "start":
            return _start(options)
        if command == "attach":
            return clusters.Cluster.attach(**options)
        running = clusters.active()
        if command == "stop":
            if running is None:
                print("No cluster is running.")
            else:
                troubles = "" if running.defunct else running.status().troubles
                stays = running.is_visited and not options["everything"]
                running.stop(everything=options["everything"])
                if stays:
                    print("Let go of ranks that were started without this notebook; --all would end them.")
                elif troubles:
                    print(f"Ended all ranks, also {troubles}.")
            return None
        running = clusters.require()
        if command == "status":
            return running.status()
        if command == "check":
            return running.check()
        if command == "logs":
            print(running.logs(_ranks(options["ranks"], running)))
            return None
        if command == "detach":
            if not running.keep:
                raise ClusterError("This cluster ends with its notebook. Start one that does not with --keep.")
            running.detach()
            return None
        if command == "debug":
            running.debug(options["state"] == "on")
            return None
        if command == "repair":
            print(running.repair(options["copy"], shrink=options["shrink"]))
            return None
        if command == "resize":
            try:
                print(running.resize(options["n"]))
            except ValueError as error:
                raise UsageError(f"%cluster resize: {error}") from None
            return None
        running.interrupt()
        return None

    @line_cell_magic
    def distributed(self, line: str, cell: str | None = None) -> Any:
        """Run a cell on the ranks: ``%%distributed [--ranks 0,2-3] [--local] [--timeout S] [--detach] [--output all]``.

        As a line, ``%distributed rank * 2`` gives the value of an expression on each rank.
        """
        from nbdist.cluster import require

        if cell is None:
            return require().evaluate(line)
        options = _cell_parser("%%distributed").parse(line)
        cluster = require()
        ran = cluster.run(
            _numbered(line, cell),
            _ranks(options.ranks, cluster),
            options.timeout,
            output=options.output,
            detach=options.detach,
        )
        if options.local:
            result = self.shell.run_cell(cell)
            result.raise_error()
        return ran if options.detach else None

    @line_magic
    def push(self, line: str) -> None:
        """Copy names of the notebook to the ranks, by value: ``%push lr Net [--ranks 0]``."""
        from nbdist.cluster import require

        parser = _Parser("%push")
        parser.add_argument("names", nargs="+")
        parser.add_argument("--ranks")
        options = parser.parse(line)
        cluster = require()
        names = _names(options.names)
        for name in names:
            if name not in self.shell.user_ns:
                raise UsageError(f"%push: {name!r} is not defined in the notebook.")
        values = {name: self.shell.user_ns[name] for name in names}
        cluster.push(_ranks(options.ranks, cluster), **values)

    @line_magic
    def pull(self, line: str) -> None:
        """Copy names of the ranks into the notebook: ``%pull accuracy`` (a list) or ``%pull accuracy --ranks 0``."""
        from nbdist.cluster import require

        parser = _Parser("%pull")
        parser.add_argument("names", nargs="+")
        parser.add_argument("--ranks")
        options = parser.parse(line)
        cluster = require()
        ranks = _ranks(options.ranks, cluster)
        for name in _names(options.names):
            value = cluster.pull(name, ranks[0] if ranks is not None and len(ranks) == 1 else ranks)
            self.shell.user_ns[name.rpartition(".")[2]] = value

    @line_magic
    def train(self, line: str) -> Any:
        """Run synchronized steps of the ranks' trainer: ``%train 500``, ``%train --epochs 2``, ``--detach``."""
        from nbdist.cluster import require

        parser = _Parser("%train")
        parser.add_argument("steps", nargs="?", type=int)
        parser.add_argument("--epochs", type=float)
        parser.add_argument("--name", default="trainer")
        parser.add_argument("--checkpoint-every", type=int)
        parser.add_argument("--checkpoint-dir")
        parser.add_argument("--detach", action="store_true")
        options = parser.parse(line)
        try:
            ran = require().train(**vars(options))
        except ValueError as error:
            raise UsageError(str(error)) from None
        return ran if options.detach else None

    @line_magic
    def dashboard(self, line: str) -> Any:
        """Show the live panel here; it follows every run of the cluster."""
        from nbdist.cluster import require
        from nbdist.dashboard import Dashboard

        return Dashboard(require())


def register(ipython: Any) -> None:
    """Register the magics, and completion of the ranks' names in ``%%distributed`` cells."""
    from nbdist.assist import install

    ipython.register_magics(ClusterMagics)
    install(ipython)


def _start(options: dict[str, Any]) -> Any:
    from nbdist.cluster import Cluster, active
    from nbdist.progress import StartProgress

    options["options"] = launch.take_options(options)
    if options.pop("dry_run"):
        from nbdist.processes import dry_run

        print(dry_run(options["profile"], options["n"], options["options"]))
        return None
    running = active()
    if running is not None and not running.defunct:
        n = options["n"]
        if n not in (None, running.n) or options["backend"] not in ("auto", running.backend):
            raise ClusterError(
                f"A cluster of {running.n} ranks ({running.backend}) is running already. "
                "Replace it with %cluster stop, then %cluster start."
            )
        print("already running")
        return running
    try:
        cluster = Cluster(options.pop("n"), **options)
    except ValueError as error:
        raise UsageError(f"%cluster start: {error}") from None
    with StartProgress() as progress:
        try:
            return cluster.start(progress)
        except KeyboardInterrupt:
            from nbdist.cells import Stopped

            raise Stopped(["The start was stopped; nothing is left of it."]) from None


def _ranks(text: str | None, cluster: Any) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return rank_sets.parse(text, cluster.world_size)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _names(words: list[str]) -> list[str]:
    """Take ``lr, Net`` for two names, as people write them."""
    return [name for word in words for name in word.split(",") if name]


def _numbered(line: str, cell: str) -> str:
    """Put a comment where the magic's own line is, so that line numbers are those of the notebook's cell."""
    if cell.startswith("%%"):
        return cell  # a cell magic must be the first line
    return f"# %%distributed {line}".rstrip() + "\n" + cell
