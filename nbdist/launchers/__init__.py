"""How the processes of a cluster are started: ipyparallel launchers, named by the profiles.

Every one of them starts one node agent per host (``nbdist.engine.agent``), which forks the ranks. ``local`` talks to it
through pipes; all others start a link beside it (``nbdist.engine.link``), which connects it to the cluster's exchange.
"""

from __future__ import annotations

from nbdist.launchers.kubernetes import KubernetesAgents
from nbdist.launchers.local import AgentLauncher, ControllerLauncher
from nbdist.launchers.mpi import MPIAgents
from nbdist.launchers.ray import RayAgents
from nbdist.launchers.remote import Plan, RemoteAgents, Slot
from nbdist.launchers.slurm import SlurmAgents
from nbdist.launchers.ssh import SSHAgents

__all__ = [
    "AgentLauncher",
    "ControllerLauncher",
    "KubernetesAgents",
    "MPIAgents",
    "Plan",
    "RayAgents",
    "RemoteAgents",
    "SSHAgents",
    "Slot",
    "SlurmAgents",
]
