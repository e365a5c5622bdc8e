"""Which network interface the process group uses: the one on the route to the other hosts.

gloo and NCCL otherwise take what the host's own name resolves to. On Debian that is 127.0.1.1, on a host with several
interfaces it may be one that no other host can reach; either way the ranks wait for each other until they time out.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence

import psutil

from nbdist.channel import local_address

__all__ = ["choose_interface", "in_use", "interface_of"]

VARIABLES = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}

_chosen: dict[str, str] = {}  # what we have set: a value that differs is the user's


def choose_interface(peers: Sequence[str], backend: str) -> None:
    """Set the variables that gloo and NCCL read, unless the user has.

    Parameters
    ----------
    peers : sequence of str
        Addresses of the other hosts; with none the ranks of this host talk over loopback, where gloo does not listen on
        any other interface then.
    """
    if peers:
        interface = interface_of(local_address(peers[0]))
        wanted = dict.fromkeys(VARIABLES.values(), interface) if interface else {}
    elif backend == "gloo":
        wanted = {VARIABLES["gloo"]: "lo" if platform.system() == "Linux" else "lo0"}
    else:
        wanted = {}
    for variable in VARIABLES.values():
        ours = os.environ.get(variable) == _chosen.get(variable)
        if variable in os.environ and not ours:
            continue
        if variable in wanted:
            os.environ[variable] = _chosen[variable] = wanted[variable]
        elif variable in os.environ:
            del os.environ[variable], _chosen[variable]


def in_use(backend: str) -> str:
    """Give the interface that the group uses, or nothing where torch chooses."""
    return os.environ.get(VARIABLES.get(backend, ""), "")


def interface_of(address: str) -> str:
    """Give the name of the interface that has an address; nothing where none has."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return name
    return ""
