"""What can be said about other hosts when a cluster starts, or when a profile is installed."""

from __future__ import annotations

import argparse
from typing import Any

__all__ = ["OPTIONS", "add_options", "take_options"]

# name -> (type, help); each is a setting of the launchers that have it
OPTIONS: dict[str, tuple[type, str]] = {
    "hosts": (str, "gpu1:8,gpu2:8"),
    "nodes": (int, "number of hosts"),
    "gpus_per_node": (int, "GPUs, and so ranks, of each host"),
    "ranks_per_node": (int, "ranks of each host, where that is not the number of GPUs"),
    "cpus_per_rank": (int, "CPU cores of each rank"),
    "partition": (str, "Slurm partition"),
    "account": (str, "Slurm account"),
    "time": (str, "time limit as sbatch takes it"),
    "extra": (str, "a further option of sbatch; may be given several times"),
    "image": (str, "container image"),
    "namespace": (str, "Kubernetes namespace"),
    "ray_address": (str, "address of the Ray cluster: 10.0.0.1:6379"),
    "address": (str, "address of this host that the others reach"),
    "python": (str, "the hosts' Python"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add an option for each setting."""
    for name, (kind, text) in OPTIONS.items():
        action = "append" if name == "extra" else "store"
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, action=action, help=text)


def take_options(parsed: dict[str, Any]) -> dict[str, Any]:
    """Take out of what was parsed what was said about other hosts."""
    values = {name: parsed.pop(name) for name in OPTIONS}
    return {name: value for name, value in values.items() if value is not None}
