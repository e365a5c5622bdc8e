"""State as plain data: JSON for values, named tensors beside it, and nothing that would have to be executed to be read.

Numbers, strings, bytes, None, lists, tuples, sets and dicts keep their type; tensors and NumPy arrays become
references to named tensors. Anything else is refused with its place and its class.
"""

from __future__ import annotations

import base64
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["decode", "encode", "inline_tensor", "read_inline"]

MARK = "$"
SEQUENCES: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset}
MAPPINGS: dict[str, type] = {"dict": dict, "Counter": Counter, "OrderedDict": OrderedDict}


def encode(value: Any, place: str, put: Callable[[str, torch.Tensor], Any]) -> Any:
    """Give ``value`` as what JSON can hold.

    Parameters
    ----------
    place : str
        Name of the value, for messages and for its tensors: ``optimizer.state.fc.weight``.
    put : callable
        ``put(place, tensor)`` keeps a tensor and gives the reference to it, something that JSON can hold.

    Raises
    ------
    TypeError
        For a value that is not plain data; the message has its place and class.
    """
    if value is None or isinstance(value, (bool, str)) or type(value) in (int, float):
        return value
    if isinstance(value, torch.Tensor):
        return {MARK: "tensor", "of": put(place, value)}
    if isinstance(value, bytes):
        return {MARK: "bytes", "of": base64.b64encode(value).decode()}
    if isinstance(value, (torch.dtype, torch.device)):
        return {MARK: type(value).__name__, "of": str(value).removeprefix("torch.")}
    if isinstance(value, torch.Size):
        return {MARK: "tuple", "of": list(value)}
    if type(value) is complex:
        return {MARK: "complex", "of": [value.real, value.imag]}
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        return encode(value.item(), place, put)
    if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype != object:
        return {MARK: "array", "of": put(place, torch.from_numpy(numpy.ascontiguousarray(value)))}
    kind = type(value)
    if kind is list:
        return [encode(part, f"{place}.{i}", put) for i, part in enumerate(value)]
    if SEQUENCES.get(kind.__name__) is kind:
        return {MARK: kind.__name__, "of": [encode(part, f"{place}.{i}", put) for i, part in enumerate(value)]}
    if kind is dict and all(isinstance(key, str) and key != MARK for key in value):
        return {key: encode(part, f"{place}.{key}", put) for key, part in value.items()}
    if MAPPINGS.get(kind.__name__) is kind or (hasattr(value, "_metadata") and isinstance(value, OrderedDict)):
        pairs = [[encode(k, place, put), encode(part, f"{place}.{k}", put)] for k, part in value.items()]
        return {MARK: kind.__name__, "of": pairs}
    raise TypeError(
        f"{place} is a {kind.__module__}.{kind.__qualname__}: a checkpoint holds tensors and plain data (numbers, "
        "strings, lists, dicts), which any program can read. Save its attributes, e.g. vars(...)."
    )


def decode(tree: Any, get: Callable[[Any], Any]) -> Any:
    """Rebuild what ``encode`` took apart; ``get`` gives the tensor of a reference."""
    if isinstance(tree, list):
        return [decode(part, get) for part in tree]
    if not isinstance(tree, dict):
        return tree
    kind = tree.get(MARK)
    if kind is None:
        return {key: decode(part, get) for key, part in tree.items()}
    of = tree["of"]
    if kind == "tensor":
        return get(of)
    if kind == "array":
        return get(of).numpy()
    if kind == "bytes":
        return base64.b64decode(of)
    if kind == "complex":
        return complex(*of)
    if kind == "dtype":
        return getattr(torch, of)
    if kind == "device":
        return torch.device(of)
    if kind in SEQUENCES:
        return SEQUENCES[kind](decode(part, get) for part in of)
    if kind in MAPPINGS:
        pairs = {decode(key, get): decode(part, get) for key, part in of}
        return MAPPINGS[kind](pairs)
    raise ValueError(f"unknown kind of value {kind!r}")


def inline_tensor(place: str, tensor: torch.Tensor) -> Any:
    """Keep a small tensor within the JSON itself: a ``put`` for ``encode``."""
    flat = tensor.detach().cpu().contiguous()
    raw = flat.reshape(-1).view(torch.uint8).numpy().tobytes()
    return [str(flat.dtype).removeprefix("torch."), list(flat.shape), base64.b64encode(raw).decode()]


def read_inline(reference: Any) -> torch.Tensor:
    """Give the tensor that ``inline_tensor`` kept: a ``get`` for ``decode``."""
    dtype, shape, text = reference
    raw = bytearray(base64.b64decode(text))
    if not raw:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return torch.frombuffer(raw, dtype=getattr(torch, dtype)).reshape(shape)
