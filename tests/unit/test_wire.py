"""Values between notebook and ranks, by value."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from nbdist import wire


def again(value: Any) -> Any:
    """The value as it comes out on the other side: through bytes, as ZeroMQ carries them."""
    return wire.load([bytes(part) for part in wire.dump(value)])


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.uint8,
        torch.bool,
        torch.complex64,
    ],
    ids=str,
)
def test_a_tensor_of_any_type_comes_out_as_it_was(dtype: torch.dtype) -> None:
    tensor = torch.arange(6).reshape(2, 3).to(dtype)
    copy = again(tensor)
    assert copy.dtype == dtype
    assert torch.equal(copy, tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.zeros(0, 4),
        torch.arange(12.0).reshape(3, 4).T,
        torch.arange(12.0)[::3],
        torch.zeros(1).expand(5),
        torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.tensor([1.0, 2.0]), (3,), check_invariants=True),
    ],
    ids=["scalar", "empty", "transposed", "strided", "expanded", "sparse"],
)
def test_a_tensor_of_any_layout_comes_out_as_it_was(tensor: torch.Tensor) -> None:
    copy = again(tensor)
    assert copy.shape == tensor.shape
    assert torch.equal(copy.to_dense() if copy.is_sparse else copy, tensor.to_dense() if tensor.is_sparse else tensor)


def test_a_copy_can_be_written_to_and_is_not_the_original() -> None:
    tensor = torch.zeros(3)
    copy = again(tensor)
    copy += 1
    assert tensor.sum() == 0


def test_whether_a_gradient_is_wanted_is_kept() -> None:
    assert again(torch.ones(2, requires_grad=True)).requires_grad
    assert not again(torch.ones(2)).requires_grad


def test_a_result_of_a_computation_can_be_sent() -> None:
    weight = torch.ones(2, requires_grad=True)
    copy = again((weight * 3).sum())
    assert copy.item() == 6.0


def test_a_part_of_a_large_tensor_does_not_carry_the_whole() -> None:
    large = torch.zeros(1000, 1000)
    assert sum(len(memoryview(part)) for part in wire.dump(large[0])) < 10_000


def test_a_parameter_that_two_layers_share_is_shared_afterwards() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    copy = again(model)
    assert copy[1].weight is copy[0].weight
    assert isinstance(copy[0].weight, nn.Parameter)
    assert len(list(copy.parameters())) == 3
    assert torch.equal(copy.get_parameter("0.weight"), model.get_parameter("0.weight"))


def test_a_tensor_that_is_sent_twice_is_one_afterwards() -> None:
    tensor = torch.ones(2)
    first, second = again((tensor, tensor))
    assert first is second


@pytest.mark.parametrize("value", [torch.zeros(100_000), np.zeros(100_000, dtype=np.float32)], ids=["torch", "numpy"])
def test_large_memory_travels_beside_the_pickle(value: Any) -> None:
    pickled, *buffers = wire.dump(value)
    assert len(memoryview(pickled)) < 1000
    assert [memoryview(buffer).nbytes for buffer in buffers] == [400_000]
    assert np.array_equal(np.asarray(again(value)), np.asarray(value))


def test_classes_and_functions_of_a_notebook_are_sent_with_their_code(tmp_path: Path) -> None:
    program = """
import sys
import torch
from torch import nn
from nbdist import wire

scale = 3

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)
    def forward(self, x):
        return scale * self.layer(x)

torch.manual_seed(0)
net = Net()
parts = wire.dump({"Net": Net, "net": net, "apply": lambda x: scale * x})
print(sum(p.sum().item() for p in net.parameters()), flush=True)
with open(sys.argv[1], "wb") as file:
    import pickle
    pickle.dump([bytes(part) for part in parts], file)
"""
    file = tmp_path / "parts"
    sender = subprocess.run(
        [sys.executable, "-c", program, str(file)], capture_output=True, text=True, timeout=60, check=True
    )
    received = wire.load(pickle.loads(file.read_bytes()))
    net = received["net"]
    assert type(net).__name__ == "Net"
    assert isinstance(net, received["Net"])
    assert sum(p.sum().item() for p in net.parameters()) == pytest.approx(float(sender.stdout))
    x = torch.ones(1, 2)
    assert torch.equal(net(x), 3 * net.layer(x))
    assert received["apply"](2) == 6


def test_a_function_of_a_rank_is_named_and_not_imported() -> None:
    call = pickle.loads(pickle.dumps(wire.RemoteCall("operator:add")))
    assert call(2, 3) == 5
