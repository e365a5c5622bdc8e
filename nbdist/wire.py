"""Values between notebook and ranks: by value, notebook classes included, tensors without a second copy."""

from __future__ import annotations

import io
import pickle
import sys
from importlib import import_module
from typing import Any

import cloudpickle

__all__ = ["RemoteCall", "dump", "load"]


class RemoteCall:
    """A function of a rank, named and not imported: the notebook can send it without torch."""

    __slots__ = ("target",)

    def __init__(self, target: str) -> None:
        self.target = target

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, _, name = self.target.partition(":")
        return getattr(import_module(module), name)(*args, **kwargs)

    def __getstate__(self) -> str:
        return self.target

    def __setstate__(self, target: str) -> None:
        self.target = target


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle is not typed
    """cloudpickle, with the memory of CPU tensors out of band; a GPU tensor travels as a CPU one."""

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and type(obj) is torch.Tensor and _plain(torch, obj):
            flat = obj.detach().cpu().contiguous()
            raw = flat.reshape(-1).view(torch.uint8).numpy()
            state = pickle.PickleBuffer(raw)
            return _rebuild_tensor, (state, str(obj.dtype).removeprefix("torch."), tuple(obj.shape), obj.requires_grad)
        return super().reducer_override(obj)


def dump(value: Any) -> list[bytes | memoryview]:
    """Pickle by value: the pickle itself, then its large buffers, not copied."""
    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    _Pickler(file, protocol=5, buffer_callback=buffers.append).dump(value)
    return [file.getbuffer(), *(buffer.raw() for buffer in buffers)]


def load(parts: list[bytes | memoryview]) -> Any:
    """Rebuild what ``dump`` gave. Only for parts that came over the cluster's own signed channel."""
    return pickle.loads(parts[0], buffers=parts[1:])


def _plain(torch: Any, tensor: Any) -> bool:
    return (
        tensor.layout == torch.strided
        and tensor.is_leaf
        and not tensor.is_quantized
        and tensor.numel() > 0
        and not tensor.is_complex()
        and tensor.device.type in ("cpu", "cuda")
    )


def _rebuild_tensor(raw: Any, dtype: str, shape: tuple[int, ...], requires_grad: bool) -> Any:
    import torch

    # a bytearray, since a tensor over read-only memory would warn, and crash when written to
    memory = bytearray(raw)
    tensor = torch.frombuffer(memory, dtype=getattr(torch, dtype)).reshape(shape)
    return tensor.requires_grad_(requires_grad) if requires_grad else tensor
