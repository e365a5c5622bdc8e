"""``%cluster check``: what could go wrong on these hosts, found before it does; one line per finding, with its fix."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbdist.errors import ClusterError
from nbdist.ranks import named

if TYPE_CHECKING:
    from nbdist.cluster import Cluster

__all__ = ["Check", "Finding", "check", "judge"]

ANSWER_S = 10.0
COLLECTIVE_S = 30.0
SHM_BYTES = 64 * 2**20  # loader workers pass batches through it; docker's default is too small
FILES = 1024
TMP_BYTES = 256 * 2**20
SKEW_S = 0.5
SLOW_S = 0.05
LOOPBACK = "127."


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line: whether it is well, what was found, and what to do where it is not."""

    ok: bool
    text: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{'ok  ' if self.ok else 'FIX '} {self.text}{f': {self.fix}' if self.fix else ''}"


class Check(tuple[Finding, ...]):
    """All findings; shown as one line each."""

    @property
    def ok(self) -> bool:
        return all(finding.ok for finding in self)

    def __repr__(self) -> str:
        return "\n".join(map(str, self))


def check(cluster: Cluster) -> Check:
    """Ask every rank for its facts, compare them, try the store and a small all_reduce."""
    world, client = cluster.world, cluster.client
    if cluster.cell is not None:
        raise ClusterError(f"In[{cluster.cell.label}] still runs on the ranks. First %cluster interrupt.")
    facts, skews = [], []
    for rank, engine in enumerate(world.engines):
        asked = time.time()
        fact = _result(client.submit(engine, "nbdist.engine.preflight:facts"), ANSWER_S, f"rank {rank}")
        answered = time.time()
        facts.append(fact)
        # a rank's clock was read somewhere in between: what that leaves open is no skew
        skews.append(max(0.0, fact["time"] - answered, asked - fact["time"]))
    findings = judge(facts, skews, world.backend)
    began = time.monotonic()
    futures = [client.submit(engine, "nbdist.engine.preflight:small_all_reduce") for engine in world.engines]
    times = [_result(future, COLLECTIVE_S, f"rank {rank}") for rank, future in enumerate(futures)]
    slowest = max(times)
    findings.append(
        Finding(
            ok=slowest < SLOW_S,
            text=f"all_reduce of 4 KiB over {world.size} ranks: median {slowest * 1000:.2g} ms",
            fix=""
            if slowest < SLOW_S
            else "slow for its size; look at the interface above, and at what else runs here",
        )
    )
    where = "a file of this host" if world.one_host else "the exchange of the controller, encrypted"
    findings.append(
        Finding(ok=True, text=f"store: {where}; group formed and verified in generation {world.generation}")
    )
    cluster.world.broken = cluster.world.broken or time.monotonic() - began > COLLECTIVE_S
    return Check(findings)


def judge(facts: Sequence[dict[str, Any]], skews: Sequence[float], backend: str) -> list[Finding]:
    """Compare what the ranks have said; ``facts`` and ``skews`` (seconds) are in order of rank."""
    findings = []
    for what in ("python", "torch", "nbdist", "nccl", "device"):
        values: dict[str, list[int]] = {}
        for rank, fact in enumerate(facts):
            values.setdefault(fact[what], []).append(rank)
        if len(values) > 1:
            text = "; ".join(f"{value or 'none'} on {named(ranks)}" for value, ranks in values.items())
            fix = "mixed GPUs: the slowest sets the pace" if what == "device" else "install the same everywhere"
            findings.append(Finding(ok=False, text=f"{what} differs: {text}", fix=fix))
        elif next(iter(values)):
            findings.append(Finding(ok=True, text=f"{what} {next(iter(values))} on every rank"))
    first = {fact["host"]: (rank, fact) for rank, fact in reversed(list(enumerate(facts)))}
    for host, (rank, fact) in reversed(first.items()):
        several = len(first) > 1
        place = f"{fact['address']} on {fact['interface'] or 'the interface that torch chooses'}"
        lost = several and (fact["address"].startswith(LOOPBACK) or fact["interface"] in ("lo", "lo0"))
        findings.append(
            Finding(
                ok=not lost,
                text=f"host {host}: {place}",
                fix="no other host reaches that; unset GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME" if lost else "",
            )
        )
        if several and not fact["interface"]:
            name = fact["resolved"]
            if not name or name.startswith(LOOPBACK):
                text = f"host {host}: its own name resolves to {name or 'nothing'}"
                findings.append(Finding(ok=False, text=text, fix="set GLOO_SOCKET_IFNAME, or mend /etc/hosts there"))
        findings += _limits(host, fact)
        skew = skews[rank]
        if skew > SKEW_S:
            text = f"host {host}: its clock differs by at least {skew:.1f} s"
            findings.append(
                Finding(ok=False, text=text, fix="start chrony or ntpd there; times in plots are corrected by that")
            )
    return findings


def _limits(host: str, fact: dict[str, Any]) -> list[Finding]:
    found = []
    if fact["shm"] is not None and fact["shm"] < SHM_BYTES:
        text = f"host {host}: {fact['shm'] / 2**20:.0f} MiB free in /dev/shm"
        found.append(Finding(ok=False, text=text, fix="docker run --shm-size=8g, or num_workers=0"))
    if fact["files"] < FILES:
        text = f"host {host}: at most {fact['files']} open files"
        found.append(Finding(ok=False, text=text, fix="ulimit -n 65536 before JupyterLab starts"))
    if fact["tmp"] < TMP_BYTES:
        text = f"host {host}: {fact['tmp'] / 2**20:.0f} MiB free for temporary files"
        found.append(Finding(ok=False, text=text, fix="make room, or set TMPDIR"))
    return found


def _result(future: Any, wait: float, who: str) -> Any:
    future.wait(wait)
    if not future.done():
        raise ClusterError(f"{who} does not answer in {wait:g} s. See %cluster status and %cluster logs.")
    result = future.result()
    if isinstance(result, BaseException):
        raise ClusterError(f"{who}: {type(result).__name__}: {result}")
    return result
