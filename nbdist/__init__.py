"""A JupyterLab notebook that drives a whole training cluster of torch.distributed ranks.

::

    %load_ext nbdist
    %cluster start -n 2
    %dashboard

Names are imported when they are first used: the extension loads in a moment, the notebook's kernel never needs torch,
and a rank never needs the notebook's packages.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "Cluster": "nbdist.cluster",
    "ClusterError": "nbdist.errors",
    "CollectiveMismatch": "nbdist.errors",
    "CollectiveTimeout": "nbdist.errors",
    "Dashboard": "nbdist.dashboard",
    "DistributedError": "nbdist.errors",
    "NbdistError": "nbdist.errors",
    "ParallelDims": "nbdist.engine.strategies.dims",
    "RankInfo": "nbdist.records",
    "Trainer": "nbdist.engine.steps.training",
    "WorldError": "nbdist.errors",
    "accumulate": "nbdist.engine.steps.accumulate",
    "all_ranks": "nbdist.engine.steps.agreement",
    "any_rank": "nbdist.engine.steps.agreement",
    "check_sync": "nbdist.engine.strategies.sync",
    "clip_grad_norm": "nbdist.engine.strategies.norms",
    "comm_hook": "nbdist.engine.strategies.hooks",
    "distributed_loader": "nbdist.engine.loading.data",
    "load_checkpoint": "nbdist.engine.saving.checkpoint",
    "local_cache": "nbdist.engine.loading.cache",
    "log": "nbdist.engine.telemetry.meters",
    "mean": "nbdist.engine.telemetry.meters",
    "mesh": "nbdist.engine.strategies.dims",
    "parallelize": "nbdist.engine.strategies.parallel",
    "pipeline": "nbdist.engine.strategies.pipeline",
    "rank0_first": "nbdist.engine.world.first",
    "rank_info": "nbdist.engine.world.process_group",
    "save_checkpoint": "nbdist.engine.saving.checkpoint",
    "scale_lr": "nbdist.engine.steps.lr",
    "seed": "nbdist.engine.loading.data",
    "span": "nbdist.engine.telemetry.meters",
    "track": "nbdist.engine.telemetry.meters",
    "warmup": "nbdist.engine.steps.lr",
    "zero1": "nbdist.engine.strategies.zero",
}

__all__ = [
    "Cluster",
    "ClusterError",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "Dashboard",
    "DistributedError",
    "NbdistError",
    "ParallelDims",
    "RankInfo",
    "Trainer",
    "WorldError",
    "accumulate",
    "all_ranks",
    "any_rank",
    "check_sync",
    "clip_grad_norm",
    "comm_hook",
    "distributed_loader",
    "load_checkpoint",
    "local_cache",
    "log",
    "mean",
    "mesh",
    "parallelize",
    "pipeline",
    "rank0_first",
    "rank_info",
    "save_checkpoint",
    "scale_lr",
    "seed",
    "span",
    "track",
    "warmup",
    "zero1",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'nbdist' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})


def load_ipython_extension(ipython: Any) -> None:
    """Register the magics; what ``%load_ext nbdist`` calls."""
    from nbdist.magics import register

    register(ipython)


def unload_ipython_extension(ipython: Any) -> None:
    """Stop the active cluster; what ``%unload_ext nbdist`` calls."""
    from nbdist.cluster import active

    cluster = active()
    if cluster is not None:
        cluster.stop()
