"""One rank raises: the root cause is on the page, the others are brought out, and nobody loses anything."""

from __future__ import annotations

import re

import pytest

from nbdist import Cluster
from tests.faults.faults import Outcome, errors, fails, group_is_whole, nothing_was_lost, run, stop

UNUSED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 1), nn.Linear(4, 1)
    def forward(self, x): return self.a(x)
"""


def told_by_all(outcome: Outcome, lines: int) -> str:
    """The text of an error that all ranks make, shown once; a rank that lagged behind may have been brought out."""
    own = {(error.ename, error.evalue) for error in errors(outcome) if error.released is None}
    assert len(own) == 1, outcome.text
    assert len(outcome.lines) <= lines + 1
    return outcome.text


def test_a_rank_in_backward_is_released_when_another_raises(ranks: Cluster) -> None:
    outcome = fails(
        ranks,
        "ddp = DDP(nn.Linear(4, 1)); kept_too = 123\n"
        "for i in range(5):\n"
        "    if rank == 1 and i == 2: raise ValueError('bad batch')\n"
        "    ddp(torch.ones(2, 4)).sum().backward()",
        within=30,  # the first DDP model of a process imports for some seconds
    )
    assert outcome.lines[0] == "rank 1 failed"
    assert "ValueError: bad batch" in outcome.text
    assert "----> 3     if rank == 1 and i == 2: raise ValueError('bad batch')" in outcome.text
    assert outcome.text.count("Traceback") == 1
    assert re.fullmatch(r"rank 0: released from backward at Cell In\[\d+\], line 4", outcome.lines[-1])
    nothing_was_lost(ranks)
    assert ranks.pull("kept_too") == [123, 123]


def test_the_first_error_ends_the_cell_also_where_nobody_waits(ranks: Cluster) -> None:
    outcome = fails(ranks, "if rank == 1: raise ValueError('bad shard 17')\ntime.sleep(20)", within=2)
    assert outcome.lines[0] == "rank 1 failed"
    assert re.fullmatch(r"rank 0: interrupted at Cell In\[\d+\], line 2", outcome.lines[-1])
    nothing_was_lost(ranks)


def test_the_root_cause_comes_first_and_its_consequences_are_one_line(four_ranks: Cluster) -> None:
    four_ranks.run("ddp = DDP(nn.Linear(4, 1))")
    outcome = fails(
        four_ranks,
        "for i in range(5):\n"
        "    if rank == 2 and i == 3: raise KeyError('label')\n"
        "    ddp(torch.ones(2, 4)).sum().backward()",
    )
    assert outcome.lines[0] == "rank 2 failed"
    assert outcome.error.rank == 2
    assert re.search(r"Cell In\[\d+\], line 2", outcome.text)
    assert outcome.text.count("Traceback") == 1
    assert re.fullmatch(r"ranks 0-1, 3: released from backward at Cell In\[\d+\], line 3", outcome.lines[-1])
    assert {e.rank: e.released for e in errors(outcome)} == {2: None, 0: "backward", 1: "backward", 3: "backward"}
    nothing_was_lost(four_ranks)


@pytest.mark.parametrize(
    "source",
    [
        "g = dist.new_group([0, 1])\nif rank == 1: raise ValueError('x')\ndist.all_reduce(torch.ones(1), group=g)",
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "mesh = init_device_mesh('cpu', (2,), mesh_dim_names=('dp',))\n"
        "if rank == 1: raise ValueError('x')\n"
        "dist.all_reduce(torch.ones(1), group=mesh.get_group('dp'))",
        "if rank == 1: raise ValueError('x')\ndist.all_gather_object([None, None], kept)",
        "if rank == 1: raise ValueError('x')\ndist.recv(torch.ones(1), 1)",
        "if rank == 1: raise ValueError('x')\nwork = dist.all_reduce(torch.ones(1), async_op=True)\nwork.wait()",
        "if rank == 1: raise ValueError('x')\nimport asyncio\nawait asyncio.sleep(0)\ndist.barrier()",
    ],
    ids=["new_group", "device_mesh", "object", "receive", "async_op", "await"],
)
def test_a_rank_is_released_whatever_it_waits_in(ranks: Cluster, source: str) -> None:
    outcome = fails(ranks, source)
    assert outcome.lines[0] == "rank 1 failed"
    assert "ValueError: x" in outcome.text
    assert [e.rank for e in errors(outcome) if e.released is None] == [1]
    nothing_was_lost(ranks)


def test_a_rank_in_a_sharded_model_is_released(ranks: Cluster) -> None:
    ranks.run(
        "from torch.distributed.fsdp import fully_shard\n"
        "torch.manual_seed(0); net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)); model = fully_shard(net)"
    )
    outcome = fails(
        ranks,
        "for i in range(4):\n    if rank == 1 and i == 2: raise ValueError('x')\n"
        "    model(torch.ones(2, 4)).sum().backward()",
        within=15,
    )
    assert outcome.lines[0] == "rank 1 failed"
    nothing_was_lost(ranks)
    stale = fails(ranks, "model(torch.ones(2, 4)).sum().backward()", within=15)
    assert "belongs to generation" in told_by_all(stale, 2)
    nothing_was_lost(ranks)


def test_a_rank_that_waits_for_a_loader_is_interrupted(ranks: Cluster) -> None:
    outcome = fails(
        ranks,
        "class Slow(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 100\n"
        "    def __getitem__(self, i): time.sleep(5); return i\n"
        "if rank == 1: raise ValueError('x')\n"
        "for batch in torch.utils.data.DataLoader(Slow(), num_workers=2): dist.all_reduce(batch)",
    )
    assert outcome.lines[0] == "rank 1 failed"
    assert re.fullmatch(r"rank 0: interrupted at Cell In\[\d+\], line 5", outcome.lines[-1])
    nothing_was_lost(ranks)


def test_equal_errors_of_all_ranks_are_shown_once(four_ranks: Cluster) -> None:
    outcome = fails(four_ranks, "dist.barrier()\n1 / 0")
    assert told_by_all(outcome, 8).count("ZeroDivisionError: division by zero") == 1
    nothing_was_lost(four_ranks)


def test_an_error_that_speaks_of_connections_is_an_error_of_its_own(ranks: Cluster) -> None:
    outcome = fails(ranks, "if rank == 0: raise RuntimeError('no gloo today')\ndist.barrier()")
    assert outcome.lines[0] == "rank 0 failed"
    assert "RuntimeError: no gloo today" in outcome.text
    nothing_was_lost(ranks)


# -- models of an earlier generation ---------------------------------------------------------------------------------


def test_a_stale_model_says_at_once_how_to_wrap_it_and_five_rounds_leave_nothing(ranks: Cluster) -> None:
    count = "[len(os.listdir('/proc/self/fd')), len(os.listdir('/proc/self/task'))]"
    ranks.run("net = nn.Linear(4, 1); ddp = DDP(net); ddp(torch.ones(2, 4)).sum().backward()")
    counts = []
    for _ in range(5):
        outcome = fails(ranks, "if rank == 1: raise ValueError('x')\nddp(torch.ones(2, 4)).sum().backward()")
        assert outcome.lines[0] == "rank 1 failed"
        group_is_whole(ranks)
        stale = fails(ranks, "ddp(torch.ones(2, 4)).sum().backward()", within=2)
        assert re.search(
            r"WorldError: .*DDP model.* belongs to generation \d+ .* are in generation \d+ now\. .*parallelize\(",
            told_by_all(stale, 2),
        )
        ranks.run("ddp = DDP(net); ddp(torch.ones(2, 4)).sum().backward()")
        counts.append(ranks.evaluate(count)[0])
    assert all(abs(last - first) <= 3 for first, last in zip(counts[0], counts[-1], strict=True)), counts
    nothing_was_lost(ranks)


def test_a_stale_model_is_told_also_after_collectives_of_the_new_group(ranks: Cluster) -> None:
    ranks.run("ddp = DDP(nn.Linear(4, 1))")
    ranks.world.form()
    outcome = fails(ranks, "dist.all_reduce(torch.ones(1))\nddp(torch.ones(2, 4)).sum().backward()", within=2)
    assert "belongs to generation" in told_by_all(outcome, 2)
    nothing_was_lost(ranks)


def test_a_group_of_an_earlier_generation_is_told_too(ranks: Cluster) -> None:
    ranks.run("g = dist.new_group([0, 1]); dist.all_reduce(torch.ones(1), group=g)")
    ranks.world.form()
    outcome = fails(ranks, "dist.all_reduce(torch.ones(1), group=g)", within=3)
    assert re.search(r"belongs to .*generation", told_by_all(outcome, 2))
    nothing_was_lost(ranks)


def test_a_model_that_nbdist_wrapped_goes_on_by_itself(ranks: Cluster) -> None:
    ranks.run("model = nbdist.parallelize(nn.Linear(4, 1)); model(torch.ones(2, 4)).sum().backward()")
    fails(ranks, "if rank == 1: raise ValueError('x')\nmodel(torch.ones(2, 4)).sum().backward()")
    ranks.run("model.zero_grad(); model(torch.full((2, 4), rank + 1.0)).sum().backward()")
    assert ranks.evaluate("model.module.weight.grad.mean().item()") == [3.0, 3.0]  # the mean of 2 and 4
    nothing_was_lost(ranks)


# -- errors of torch that do not say what to do ----------------------------------------------------------------------


@pytest.mark.parametrize("wrap", ["DDP", "nbdist.parallelize"])
def test_parameters_without_a_part_in_the_loss_are_named(ranks: Cluster, wrap: str) -> None:
    outcome = fails(ranks, UNUSED + f"ddp = {wrap}(Net())\nfor i in range(2): ddp(torch.ones(2, 4)).sum().backward()")
    assert re.search(
        r"b\.weight, b\.bias took no part in the loss\. .*find_unused_parameters=True", told_by_all(outcome, 2)
    )
    nothing_was_lost(ranks)
    ranks.run(
        "ddp = DDP(Net(), find_unused_parameters=True)\nfor i in range(2): ddp(torch.ones(2, 4)).sum().backward()"
    )


@pytest.mark.parametrize("wrap", ["DDP", "nbdist.parallelize"])
@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("nn.Linear(4, 1 + rank)", "weight is (1, 4) float32 on rank 0, parameter weight is (2, 4) float32 on rank 1"),
        ("nn.Sequential(*[nn.Linear(4, 4)] * 1, *([nn.Linear(4, 4)] * rank))", "parameter 1.weight is (4, 4)"),
        ("nn.ModuleDict({'p' if rank else 'q': nn.Linear(4, 4)})", "q.weight is (4, 4) float32 on rank 0"),
    ],
    ids=["shape", "number", "name"],
)
def test_models_that_differ_between_ranks_are_one_message(ranks: Cluster, wrap: str, model: str, told: str) -> None:
    outcome = fails(ranks, f"{wrap}({model});")
    assert "The model is not the same on all ranks" in told_by_all(outcome, 12)
    assert told in outcome.text
    assert "rank 1" in outcome.text
    assert outcome.text.count("Traceback") == 1
    nothing_was_lost(ranks)


def test_a_second_group_of_ones_own_is_refused_by_its_reason(ranks: Cluster) -> None:
    outcome = fails(ranks, "dist.init_process_group('gloo')")
    assert "nbdist has formed the process group already" in told_by_all(outcome, 2)
    nothing_was_lost(ranks)


# -- what a failed cell leaves ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        "def step():\n    big = Big(); global seen; seen = weakref.ref(big); raise MemoryError('sim')\nstep()",
        "def step():\n    big = Big(); global seen; seen = weakref.ref(big); return big\nstep()",
        "def step():\n    big = Big(); global seen; seen = weakref.ref(big)\n"
        "    if rank == 1: raise ValueError('x')\n    dist.barrier()\nstep()",
        "def step():\n    big = Big(); global seen; seen = weakref.ref(big)\n    try: 1 / 0\n"
        "    finally: raise KeyError('y')\nstep()",
        "def step():\n    big = Big(); global seen; seen = weakref.ref(big); input()\nstep()",
    ],
    ids=["error", "value", "released", "chained", "refused"],
)
def test_nothing_that_a_cell_made_stays_referenced(ranks: Cluster, source: str) -> None:
    ranks.run("import gc, weakref\nclass Big: pass")
    run(ranks, source)
    assert ranks.evaluate("(gc.collect(), seen() is None)[1]") == [True, True]
    nothing_was_lost(ranks)


def test_an_interrupted_cell_leaves_nothing_referenced(ranks: Cluster) -> None:
    ranks.run("import gc, weakref\nclass Big: pass")
    source = "def step():\n    big = Big(); global seen; seen = weakref.ref(big); time.sleep(60)\nstep()"
    run(ranks, source, actions=[(0.5, stop)])
    assert ranks.evaluate("(gc.collect(), seen() is None)[1]") == [True, True]
