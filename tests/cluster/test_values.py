"""%push and %pull: by value, and what a notebook defines goes along."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from nbdist import Cluster, NbdistError
from tests.cluster.checks import value
from tests.kernel import Kernel


def test_values_go_to_the_ranks_and_come_back_one_per_rank(shared_notebook: Kernel) -> None:
    shared_notebook.check("lr, names = 0.1, {'a': [1, 2]}\n%push lr names")
    assert shared_notebook.check("%%distributed\nlr, names").text == "[0-1] (0.1, {'a': [1, 2]})\n"
    shared_notebook.check("%%distributed\naccuracy = 0.5 + rank / 4")
    shared_notebook.check("%pull accuracy")
    assert value(shared_notebook, "list(accuracy)") == [0.5, 0.75]
    assert shared_notebook.check("accuracy").text == "[0] 0.5\n[1] 0.75\n"
    shared_notebook.check("%pull accuracy --ranks 1")
    assert value(shared_notebook, "accuracy") == 0.75


def test_several_names_with_commas_are_pushed(shared_notebook: Kernel) -> None:
    shared_notebook.check("one, two = 1, 2\n%push one, two")
    assert shared_notebook.check("%%distributed\none + two").text == "[0-1] 3\n"
    shared_notebook.check("%pull one, two")
    assert value(shared_notebook, "(list(one), list(two))") == ([1, 1], [2, 2])


def test_chosen_ranks_get_the_value(shared_notebook: Kernel) -> None:
    shared_notebook.check("%%distributed\nchosen = 0")
    shared_notebook.check("chosen = 9\n%push chosen --ranks 1")
    assert shared_notebook.check("%%distributed\nchosen").text == "[0] 0\n[1] 9\n"


def test_a_copy_is_a_copy(cluster: Cluster) -> None:
    original = {"a": [1]}
    cluster.push(original=original)
    cluster.run("original['a'].append(rank)")
    assert original == {"a": [1]}
    assert cluster.pull("original") == [{"a": [1, 0]}, {"a": [1, 1]}]


def test_a_class_of_the_notebook_and_its_instance_work_on_the_ranks(shared_notebook: Kernel) -> None:
    shared_notebook.check(
        "import torch\nfrom torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = nn.Linear(3, 2)\n"
        "    def forward(self, x):\n"
        "        return self.layer(x)\n"
        "net = Net()\n"
        "%push Net net",
        timeout=60,
    )
    here = value(shared_notebook, "sum(p.sum().item() for p in net.parameters())")
    code = (
        "%%distributed\nassert isinstance(net, Net)\n"
        "print(type(net).__name__, sum(p.sum().item() for p in net.parameters()))"
    )
    assert shared_notebook.check(code).text == f"[0-1] Net {here}\n"

    shared_notebook.check("Net.double = lambda self, x: 2 * self(x)\n%push Net net")
    cell = shared_notebook.check("%%distributed\nx = torch.ones(1, 3)\ntorch.equal(net.double(x), 2 * net(x))")
    assert cell.text == "[0-1] True\n"
    shared_notebook.check(
        "class Net(Net):\n"
        "    def describe(self):\n"
        "        return 'edited'\n"
        "import nbdist.cluster; nbdist.cluster.active().push(Net=Net, net=Net())"
    )
    assert shared_notebook.check("%%distributed\nnet.describe()").text == "[0-1] 'edited'\n"


def test_a_class_defined_on_the_ranks_comes_back(cluster: Cluster) -> None:
    cluster.run("class Config:\n    def __init__(self): self.depth = rank\nconfig = Config()")
    assert [config.depth for config in cluster.pull("config")] == [0, 1]


def test_a_trained_model_comes_back_with_its_weights(cluster: Cluster) -> None:
    model = nn.Linear(3, 1)
    cluster.push(model=model)
    cluster.run("with torch.no_grad(): model.weight += rank")
    first, second = cluster.pull("model")
    assert torch.equal(first.weight, model.weight)
    assert torch.equal(second.weight, model.weight + 1)
    assert torch.equal(cluster.pull("model.weight", ranks=1), model.weight + 1)


def test_a_loss_with_its_graph_can_be_pulled(cluster: Cluster) -> None:
    cluster.run("loss = (torch.ones(2, requires_grad=True) * 3).sum()")
    assert [loss.item() for loss in cluster.pull("loss")] == [6.0, 6.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_tensors_go_both_ways(cluster: Cluster, dtype: torch.dtype) -> None:
    tensor = torch.arange(12).reshape(3, 4).to(dtype)
    cluster.push(tensor=tensor)
    cluster.run("tensor = tensor.T.contiguous() + rank")
    for rank, back in enumerate(cluster.pull("tensor")):
        assert back.dtype == dtype
        assert torch.equal(back, tensor.T + rank)
        back += 1  # it is the notebook's own, and can be written to


def test_a_large_tensor_takes_a_moment(cluster: Cluster) -> None:
    tensor = torch.zeros(32 * 2**20 // 4)
    began = time.monotonic()
    cluster.push(tensor=tensor)
    back = cluster.pull("tensor", ranks=0)
    assert time.monotonic() - began < 5
    assert back.shape == tensor.shape
    cluster.run("del tensor")


def test_a_name_with_dots_pulls_an_attribute(cluster: Cluster) -> None:
    cluster.run("class Box: pass\nbox = Box(); box.inner = Box(); box.inner.value = rank + 1")
    assert cluster.pull("box.inner.value") == [1, 2]
    with pytest.raises(NbdistError, match=r"'box\.nothing' is not defined on any rank\."):
        cluster.pull("box.nothing")


def test_a_value_that_fails_to_unpickle_on_the_ranks_is_named(cluster: Cluster) -> None:
    class Fragile:
        def __reduce__(self) -> tuple[object, ...]:
            return int, ("not a number",)

    with pytest.raises(NbdistError, match=r"rank 0 could not take fragile: ValueError: invalid literal"):
        cluster.push(fragile=Fragile())
    cluster.run("x_ = torch.ones(1); dist.all_reduce(x_); assert x_.item() == 2.0")


def test_an_evaluated_expression_that_fails_is_a_failed_cell(cluster: Cluster) -> None:
    with pytest.raises(NbdistError, match=r"rank \d: ZeroDivisionError: division by zero"):
        cluster.evaluate("1 / 0")
    assert cluster.evaluate("rank + 1", ranks=[1]) == [2]
