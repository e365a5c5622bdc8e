"""What ranks log, as the notebook sees it: the whole world, in every point."""

from __future__ import annotations

import json
import re
import time
from itertools import pairwise

import pytest

from nbdist import Cluster
from tests.cluster.checks import value
from tests.kernel import Kernel

STEPS = """
import time
class Batches:
    def __len__(self): return {steps}
    def __iter__(self):
        for i in range({steps}): yield torch.zeros(8, 1)
due = time.monotonic()
for i, batch in enumerate(nbdist.track(Batches())):
    due += {first} if i == 0 else {period}
    time.sleep(max(0.0, due - time.monotonic()))
    nbdist.log(loss=1.0)
"""


def test_the_curve_is_the_mean_of_all_ranks_with_their_range(cluster: Cluster) -> None:
    cluster.run("for i in range(10): nbdist.log(loss=float(rank * 2))")
    run = cluster.telemetry.current
    assert run is not None
    curve = run.curves["loss"]
    assert len(curve) == 10
    assert list(curve.mean) == [1.0] * 10
    assert list(curve.low) == [0.0] * 10
    assert list(curve.high) == [2.0] * 10
    assert (run.loss, run.losses, run.world_size) == (1.0, {0: 0.0, 1: 2.0}, 2)


def test_the_mean_is_weighted_by_samples(cluster: Cluster) -> None:
    cluster.run("nbdist.log(loss=1.0 if rank == 0 else 5.0, n=3 if rank == 0 else 1)")
    assert cluster.telemetry.current.loss == 2.0
    assert cluster.evaluate("nbdist.mean(1.0 if rank == 0 else 5.0, weight=3 if rank == 0 else 1)") == [2.0, 2.0]


def test_nan_and_infinity_arrive_as_they_are_and_an_odd_loss_is_told_once(
    cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    cluster.run("for loss in (1.0, float('nan'), float('inf')): nbdist.log(loss=loss, most=float('inf'), least=-1e999)")
    last = cluster.telemetry.to_frame().iloc[-1]
    assert (last["loss"], last["most"], last["least"]) == (float("inf"), float("inf"), -float("inf"))
    (told,) = capfd.readouterr().err.splitlines()
    assert re.fullmatch(r"\[0-1\] nbdist: the loss of .+ is nan at step 2, and the weights may be too\. Load .*", told)


def test_the_batch_arithmetic_is_told_once_before_the_first_step(
    cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    cluster.run(
        "model = nbdist.parallelize(nn.Linear(2, 1))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "batches = [(torch.ones(8, 2), torch.ones(8, 1))] * 4\n"
        "trainer = nbdist.Trainer(model, optimizer, F.mse_loss, batches, accumulate=2)"
    )
    capfd.readouterr()
    cluster.train(2)
    assert capfd.readouterr().out == "[0-1] nbdist: 8 per rank × 2 ranks × 2 accumulated = 32 samples per step\n"
    cluster.train(2)
    assert capfd.readouterr().out == ""


def test_every_record_is_in_the_table_and_in_the_run_log(cluster: Cluster) -> None:
    cluster.run("for i in range(25): nbdist.log(loss=i + rank / 10, own=i)")
    run = cluster.telemetry.current
    frame = cluster.telemetry.to_frame()
    rows = frame[frame["run"] == run.name]
    assert len(rows) == 50
    assert sorted(rows[rows["rank"] == 1]["own"]) == list(range(25))
    path = cluster.telemetry.log_path(run.name)
    assert path is not None
    deadline = time.monotonic() + 5
    while not (path.exists() and path.read_text().count('"step"') >= 50) and time.monotonic() < deadline:
        time.sleep(0.1)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert sum(line["kind"] == "step" for line in lines) == 50


def test_records_arrive_while_the_cell_runs(cluster: Cluster) -> None:
    cell = cluster.run("import time\nfor i in range(30): nbdist.log(loss=i); time.sleep(0.1)", detach=True)
    seen = []
    while not cell.finished.wait(0.05):
        run = cluster.telemetry.current
        seen.append((time.monotonic(), run.step if run is not None and run.ended is None else 0))
    cell.wait()
    steps = sorted({step for _, step in seen})
    assert len(steps) > 6
    assert max(b - a for a, b in pairwise(steps)) <= 15


def test_throughput_is_that_of_the_whole_world_in_every_point(cluster: Cluster) -> None:
    cluster.run(STEPS.format(steps=50, first=0.1, period=0.1))
    run = cluster.telemetry.current
    points = list(run.curves["samples_per_s"].mean)
    assert len(points) >= 7
    assert points == pytest.approx([160.0] * len(points), rel=0.05)
    assert run.mean_samples_per_s == pytest.approx(160, rel=0.05)
    frame = cluster.telemetry.to_frame()
    own = frame[(frame["run"] == run.name) & (frame["step"] > 1)]["samples_per_s"]
    assert own.median() == pytest.approx(80, rel=0.05)


def test_one_rank_alone_has_half_the_throughput(no_cluster: None) -> None:
    with Cluster(1, backend="gloo").start() as cluster:
        cluster.run(STEPS.format(steps=20, first=0.1, period=0.1))
        assert cluster.telemetry.current.mean_samples_per_s == pytest.approx(80, rel=0.05)


def test_the_first_step_is_shown_apart_and_in_no_mean(cluster: Cluster) -> None:
    cluster.run(STEPS.format(steps=20, first=2.0, period=0.1))
    run = cluster.telemetry.current
    assert run.first_step_time == pytest.approx(2.0, abs=0.3)
    assert run.mean_samples_per_s == pytest.approx(160, rel=0.05)
    assert "2.0" in cluster.telemetry.table().splitlines()[-1]
    assert "first step" in cluster.telemetry.table().splitlines()[0]


def test_what_a_first_step_waits_for_is_told_while_it_runs(cluster: Cluster) -> None:
    cell = cluster.run(STEPS.format(steps=3, first=2.5, period=0.1), detach=True)
    time.sleep(1.2)
    run = cluster.telemetry.current
    assert run is not None and run.ended is None
    assert run.steps == 0
    assert run.waiting_for == [0, 1]
    assert all(f"In[{cell.label}], line 9" in row.state for row in cluster.status())
    cell.wait(10)


def test_a_data_set_class_of_a_cell_works_with_loader_workers(cluster: Cluster) -> None:
    cluster.run(
        "class Squares(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 12\n"
        "    def __getitem__(self, i): return i * i\n"
    )
    for context in (None, "fork"):
        options = "" if context is None else f", multiprocessing_context={context!r}"
        cluster.run(
            "loader = nbdist.distributed_loader(Squares(), batch_size=2, shuffle=False, num_workers=2" + options + ")\n"
            "got = [int(v) for batch in loader for v in batch]",
            timeout=40,
        )
        assert sorted(v for got in cluster.pull("got") for v in got) == [i * i for i in range(12)]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_data_set_class_of_a_cell_works_in_spawned_workers(cluster: Cluster, method: str) -> None:
    cluster.run(
        "class Squares(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 4\n"
        "    def __getitem__(self, i): return i * i\n"
        f"loader = nbdist.distributed_loader(Squares(), batch_size=2, shuffle=False, num_workers=1, "
        f"multiprocessing_context={method!r})\n"
        "got = [int(v) for batch in loader for v in batch]\n"
        "del loader",
        timeout=60,
    )
    assert sorted(v for got in cluster.pull("got") for v in got) == [0, 1, 4, 9]


def test_the_panel_shown_twenty_times_costs_what_one_costs(notebook: Kernel) -> None:
    code = "%dashboard\n%distributed [nbdist.log(loss=float(i)) for i in range(20)] and None"
    sizes, open_comms = [], set()
    for i in range(20):
        cell = notebook.check(code, timeout=30)
        for _, message in cell.messages:
            comm = message["content"].get("comm_id")
            if message["msg_type"] == "comm_open":
                open_comms.add(comm)
            elif message["msg_type"] == "comm_close":
                open_comms.discard(comm)
        sizes.append(len(json.dumps(cell.outputs)))
        if i == 1:
            threads = value(notebook, "__import__('threading').active_count()")
    assert max(sizes[1:]) <= 1.5 * max(sizes[0], 20_000)
    assert abs(value(notebook, "__import__('threading').active_count()") - threads) <= 1
    assert len(open_comms) <= 2 * 4
