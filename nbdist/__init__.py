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
    "ParallelDims": "nbdist.engine.dims",
    "RankInfo": "nbdist.records",
    "Trainer": "nbdist.engine.training",
    "WorldError": "nbdist.errors",
    "accumulate": "nbdist.engine.accumulate",
    "all_ranks": "nbdist.engine.agreement",
    "any_rank": "nbdist.engine.agreement",
    "check_sync": "nbdist.engine.sync",
    "clip_grad_norm": "nbdist.engine.norms",
    "comm_hook": "nbdist.engine.hooks",
    "distributed_loader": "nbdist.engine.data",
    "load_checkpoint": "nbdist.engine.checkpoint",
    "local_cache": "nbdist.engine.cache",
    "log": "nbdist.engine.meters",
    "mean": "nbdist.engine.meters",
    "mesh": "nbdist.engine.dims",
    "parallelize": "nbdist.engine.parallel",
    "pipeline": "nbdist.engine.pipeline",
    "rank_info": "nbdist.engine.process_group",
    "save_checkpoint": "nbdist.engine.checkpoint",
    "scale_lr": "nbdist.engine.lr",
    "seed": "nbdist.engine.data",
    "span": "nbdist.engine.meters",
    "track": "nbdist.engine.meters",
    "warmup": "nbdist.engine.lr",
    "zero1": "nbdist.engine.zero",
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
