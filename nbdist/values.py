"""Copy values between notebook and ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from nbdist import ranks as rank_sets
from nbdist import wire
from nbdist.errors import NbdistError
from nbdist.ranks import PerRank, named

if TYPE_CHECKING:
    from nbdist.cluster import Cluster

__all__ = ["copy", "evaluate", "pull", "push"]

RESULT = "_nbdist_value"


def push(cluster: Cluster, ranks: Iterable[int] | None, names: Mapping[str, Any]) -> None:
    """Put values into the ranks' namespaces, pickled once for all of them.

    Raises
    ------
    NbdistError
        Naming the value that cannot be pickled.
    """
    chosen = _chosen(cluster, ranks)
    try:
        parts = wire.dump(dict(names))
    except Exception as error:  # pickling runs the values' own code
        raise NbdistError(_unpicklable(names, error)) from None
    world = cluster.world
    futures = {
        rank: cluster.client.submit(world.engines[rank], "nbdist.engine.bootstrap:push", parts) for rank in chosen
    }
    for rank, result in _results(cluster, futures).items():
        if isinstance(result, BaseException):
            raise NbdistError(f"rank {rank} could not take {', '.join(names)}: {_first_line(result)}")


def pull(cluster: Cluster, name: str, ranks: Iterable[int] | int | None = None) -> Any:
    """Give the ranks' values of a name; one number as ``ranks`` gives the value itself.

    Raises
    ------
    NbdistError
        Naming the ranks where the name is missing, or the value that cannot be pickled.
    """
    chosen = _chosen(cluster, [ranks] if isinstance(ranks, int) else ranks)
    world = cluster.world
    futures = {
        rank: cluster.client.submit(world.engines[rank], "nbdist.engine.bootstrap:pull", name) for rank in chosen
    }
    results = _results(cluster, futures)
    missing = [rank for rank, result in results.items() if isinstance(result, list) and result[0] == "missing"]
    if missing:
        where = "any rank" if len(missing) == len(chosen) == cluster.world_size else named(missing)
        raise NbdistError(f"{name!r} is not defined on {where}.")
    for rank, result in results.items():
        if isinstance(result, BaseException):
            raise NbdistError(f"rank {rank} did not give {name!r}: {_first_line(result)}")
        if result[0] == "unpicklable":
            raise NbdistError(f"{name!r} on rank {rank} cannot be copied ({result[1]}). Pull a part of it that can.")
    values = [wire.load(results[rank][1:]) for rank in chosen]
    return values[0] if isinstance(ranks, int) else PerRank(values, chosen)


def evaluate(cluster: Cluster, expression: str, ranks: Iterable[int] | None = None) -> Any:
    """Give the value of an expression on each rank, run there as a cell of its own."""
    from nbdist import cells

    chosen = _chosen(cluster, ranks)
    text = expression.strip()
    if not text:
        raise NbdistError("%distributed: give an expression, such as %distributed rank * 2.")
    cells.run(cluster, f"{RESULT} = ({text}\n)", chosen)
    try:
        return pull(cluster, RESULT, chosen)
    except NbdistError as error:
        raise NbdistError(str(error).replace(repr(RESULT), repr(text))) from None


def copy(cluster: Cluster, name: str, source: int, targets: Iterable[int]) -> None:
    """Copy a value from one rank to others as it was pickled: the notebook need not have what it is made of."""
    world = cluster.world
    parts = _results(
        cluster, {source: cluster.client.submit(world.engines[source], "nbdist.engine.bootstrap:pull", name)}
    )[source]
    if isinstance(parts, BaseException) or parts[0] != "ok":
        why = _first_line(parts) if isinstance(parts, BaseException) else " ".join(map(str, parts))
        raise NbdistError(f"{name!r} could not be copied from rank {source}: {why}.")
    futures = {
        rank: cluster.client.submit(world.engines[rank], "nbdist.engine.bootstrap:push", parts[1:], name)
        for rank in targets
    }
    for rank, result in _results(cluster, futures).items():
        if isinstance(result, BaseException):
            raise NbdistError(f"rank {rank} could not take {name!r}: {_first_line(result)}")


def _chosen(cluster: Cluster, ranks: Iterable[int] | None) -> tuple[int, ...]:
    size = cluster.world.size
    return tuple(range(size)) if ranks is None else rank_sets.check(ranks, size)


def _results(cluster: Cluster, futures: Mapping[int, Any]) -> dict[int, Any]:
    for future in futures.values():
        future.wait()
    return {rank: future.result() for rank, future in futures.items()}


def _unpicklable(names: Mapping[str, Any], error: Exception) -> str:
    for name, value in names.items():
        try:
            wire.dump(value)
        except Exception as own:  # pickling runs the value's own code
            return f"{name!r} cannot be copied to ranks ({_first_line(own)}). Build it there in a %%distributed cell."
    return f"cannot be copied to ranks: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    # an error of a rank comes as ipyparallel's RemoteError, which holds the rank's own
    name = getattr(error, "ename", type(error).__name__)
    text = str(getattr(error, "evalue", error)).strip()
    return f"{name}: {text.splitlines()[0]}" if text else str(name)
