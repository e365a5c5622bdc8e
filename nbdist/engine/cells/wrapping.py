"""torch's own ``DistributedDataParallel`` built in a cell: the model is compared over the ranks first.

torch compares shapes only, and tells one rank; the others see their connection closed.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from nbdist.engine.strategies.sameness import same_on_all_ranks

__all__ = ["compare_models"]


@functools.cache
def compare_models() -> None:
    """From now on, name on every rank the first parameter that differs, before a DDP model is built."""
    build = DDP.__init__
    signature = inspect.signature(build)

    @functools.wraps(build)
    def compare_then_build(self: DDP, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        options = signature.bind_partial(self, module, *args, **kwargs).arguments
        whole_world = options.get("process_group") is None and options.get("device_mesh") is None
        if whole_world and options.get("init_sync", True) and dist.is_initialized() and isinstance(module, nn.Module):
            same_on_all_ranks(module)
        build(self, module, *args, **kwargs)

    DDP.__init__ = compare_then_build  # type: ignore[method-assign]
