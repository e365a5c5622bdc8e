"""Records in, runs and tables out; no process and no torch."""

from __future__ import annotations

import json
import logging
import math
import threading
import time

import psutil
import pytest

from nbdist import runs
from nbdist.records import STEP_COLUMNS, RunEvent, StepRecord, to_wire
from nbdist.runs import Curve
from nbdist.telemetry import Telemetry


def send(telemetry, *records, rank=None, dropped=0):
    for record in records:
        wire = to_wire(record)
        if isinstance(record, RunEvent):
            telemetry.receive({"kind": "event", "event": wire})
        else:
            payload = {"kind": "steps", "rank": record.rank if rank is None else rank, "records": [wire]}
            telemetry.receive({**payload, "dropped": dropped})


def step(number, rank, loss=None, *, run="train", at=None, **more):
    return StepRecord(run=run, step=number, rank=rank, time=1000.0 + number if at is None else at, loss=loss, **more)


def begin(rank, *, run="train", at=1000.0, world=2, **more):
    return RunEvent(kind="begin", run=run, rank=rank, world_size=world, time=at, step=0, **more)


def end(rank, *, run="train", at=2000.0, world=2, reason="done", **more):
    return RunEvent(kind="end", run=run, rank=rank, world_size=world, time=at, step=0, reason=reason, **more)


def test_the_curve_is_the_mean_over_ranks_and_the_band_their_range():
    telemetry = Telemetry(2)
    for i in range(1, 11):
        send(telemetry, step(i, 0, 0.0), step(i, 1, 2.0))
    curve = telemetry.current.curves["loss"]
    assert list(curve.mean) == [1.0] * 10
    assert list(curve.low) == [0.0] * 10
    assert list(curve.high) == [2.0] * 10
    assert telemetry.current.losses == {0: 0.0, 1: 2.0}


def test_loss_and_own_values_are_weighted_by_samples():
    telemetry = Telemetry(2)
    send(
        telemetry,
        step(1, 0, 1.0, samples=3, values={"accuracy": 1.0}),
        step(1, 1, 5.0, samples=1, values={"accuracy": 0.0}),
    )
    assert telemetry.current.loss == 2.0
    assert telemetry.current.values == {"accuracy": 0.75}


def test_a_rank_without_samples_has_no_say_in_the_mean():
    telemetry = Telemetry(2)
    send(telemetry, step(1, 0, 1.0, samples=4), step(1, 1, math.nan, samples=0))
    assert telemetry.current.loss == 1.0


def test_a_step_counts_when_all_ranks_have_reported_it():
    telemetry = Telemetry(2)
    send(telemetry, step(1, 0, 1.0), step(2, 0, 1.0), step(3, 0, 1.0), step(1, 1, 3.0))
    assert (telemetry.current.step, telemetry.current.steps) == (1, 1)
    assert telemetry.current.waiting_for == [1]
    send(telemetry, step(2, 1, 3.0), step(3, 1, 3.0))
    assert (telemetry.current.step, telemetry.current.steps) == (3, 3)


def test_a_silent_rank_holds_the_curve_up_once_only(monkeypatch):
    monkeypatch.setattr(runs, "LATE_AFTER", 0.1)
    telemetry = Telemetry(2)
    send(telemetry, step(1, 0, 1.0), step(2, 0, 1.0))
    assert telemetry.current.steps == 0
    time.sleep(0.15)
    telemetry.poll()
    assert telemetry.current.steps == 2
    send(telemetry, step(3, 0, 1.0))
    assert telemetry.current.steps == 3  # rank 1 is not waited for any more
    send(telemetry, step(3, 1, 9.0), step(4, 0, 1.0))
    assert telemetry.current.late == 1
    assert len(telemetry.to_frame()) == 5  # late, yet in the table
    send(telemetry, step(4, 1, 3.0))
    assert telemetry.current.loss == 2.0


def test_throughput_is_the_worlds_in_every_point_and_leaves_out_the_first_step():
    telemetry = Telemetry(2)
    send(telemetry, begin(0), begin(1))
    for i in range(50):
        for rank in range(2):
            send(telemetry, step(i + 1, rank, 1.0, samples=8, at=1005.0 + i * 0.1 + rank * 0.002))
    run = telemetry.current
    curve = run.curves["samples_per_s"]
    assert len(curve) >= 8
    assert all(rate == pytest.approx(160, rel=0.05) for rate in curve.mean)
    assert run.mean_samples_per_s == pytest.approx(160, rel=0.01)
    assert run.samples_per_s == pytest.approx(160, rel=0.05)
    assert run.first_step_time == pytest.approx(5.002)


def test_one_rank_alone_gives_half_the_throughput():
    telemetry = Telemetry(1)
    for i in range(20):
        send(telemetry, step(i, 0, 1.0, samples=8, at=1000 + i * 0.1))
    assert telemetry.current.mean_samples_per_s == pytest.approx(80)


def test_a_run_shorter_than_one_window_still_has_a_throughput():
    telemetry = Telemetry(1)
    send(telemetry, *(step(i, 0, 1.0, samples=8, at=1000 + i * 0.01) for i in range(5)), end(0, world=1))
    assert list(telemetry.current.curves["samples_per_s"].mean) == [pytest.approx(800)]


def test_time_to_go_comes_from_the_speed_without_the_first_step():
    telemetry = Telemetry(1)
    send(telemetry, begin(0, world=1, total=100), step(1, 0, at=1060.0), step(2, 0, at=1061.0), step(3, 0, at=1062.0))
    assert telemetry.current.eta == pytest.approx(97.0)


def test_a_run_ends_when_it_has_on_all_ranks_with_the_worst_reason():
    telemetry = Telemetry(2)
    send(telemetry, begin(0), begin(1), step(1, 0, 1.0), step(1, 1, 1.0), end(0))
    assert telemetry.current.ended is None
    send(telemetry, end(1, reason="stopped", at=2001.0))
    assert telemetry.current.reason == "stopped"
    assert telemetry.current.ended == 2001.0
    assert telemetry.current.elapsed == pytest.approx(1001.0)


def test_a_run_that_dies_on_one_rank_still_ends(monkeypatch):
    monkeypatch.setattr(runs, "LATE_AFTER", 0.05)
    telemetry = Telemetry(2)
    send(telemetry, begin(0), begin(1), step(1, 0, 1.0), end(0, reason="failed"))
    time.sleep(0.1)
    assert telemetry.current.reason == "failed"
    assert telemetry.current.steps == 1


def test_a_run_goes_on_after_its_end_and_the_pause_is_not_its_own():
    telemetry = Telemetry(2)
    for rank in range(2):
        send(telemetry, begin(rank, total=2), *(step(i, rank, 1.0, samples=1, at=1000 + i) for i in (1, 2)))
        send(telemetry, end(rank, at=1002.0))
    send(telemetry, begin(0, at=1900.0, total=4))
    assert telemetry.current.ended is None
    send(telemetry, begin(1, at=1900.0, total=4))
    for rank in range(2):
        send(telemetry, *(step(i, rank, 1.0, samples=1, at=1900 + i) for i in (3, 4)), end(rank, at=1904.0))
    run = telemetry.current
    assert (len(telemetry.runs), run.steps, run.reason) == (1, 4, "done")
    assert run.elapsed == pytest.approx(6.0)
    assert run.mean_samples_per_s == pytest.approx(2.0)


def test_an_end_that_comes_after_another_ranks_next_beginning_does_not_end_the_run_again():
    telemetry = Telemetry(2)
    send(telemetry, begin(0), begin(1), end(0), begin(0, at=3000.0), end(1))
    assert telemetry.current.ended is None
    send(telemetry, begin(1, at=3000.0), end(0, at=3001.0), end(1, at=3001.0))
    assert telemetry.current.reason == "done"


def test_what_rank_0_logs_after_the_loop_is_drawn_at_the_last_step():
    telemetry = Telemetry(2)
    send(telemetry, step(1, 0, 1.0), step(1, 1, 1.0), step(1, 0, values={"accuracy": 0.97}), end(0), end(1))
    assert telemetry.current.values == {"accuracy": 0.97}
    assert telemetry.current.steps == 1


def test_a_new_run_ends_one_that_was_forgotten():
    telemetry = Telemetry(1)
    send(telemetry, step(1, 0, run="a"), step(1, 0, run="b"))
    assert [run.reason for run in telemetry.runs] == ["lost", None]
    telemetry.finish("failed", "rank 0 died")
    assert telemetry.current.reason == "failed"


@pytest.mark.parametrize("steps", [1, 999, 1000, 1001, 12_345, 200_000])
def test_a_curve_spans_the_whole_run_and_keeps_its_spikes(steps):
    curve = Curve(1000)
    for i in range(steps):
        value = 50.0 if i == steps // 3 else float(i % 2)
        curve.append(i, value, value, value)
    assert len(curve) <= 1000
    assert len(curve) >= min(steps, 500)
    assert curve.x[0] < curve.stride
    assert curve.x[-1] == steps - 1
    assert max(curve.high) == 50.0
    assert curve.count == steps
    weight = sum(curve._weight)
    mean = sum(m * w for m, w in zip(curve.mean, curve._weight, strict=True)) / weight
    assert mean == pytest.approx((50 + sum(i % 2 for i in range(steps) if i != steps // 3)) / steps)


def test_nan_is_a_gap_and_spoils_no_neighbour():
    curve = Curve(4)
    for i, value in enumerate([1.0, math.nan, 3.0, 5.0, 7.0]):
        curve.append(i, value, value, value)
    assert list(curve.mean) == [1.0, 4.0, 7.0]
    assert list(curve.low) == [1.0, 3.0, 7.0]


def test_200_000_records_take_less_than_20_megabytes_and_give_200_000_rows():
    telemetry = Telemetry(1)
    process = psutil.Process()
    records = [{"run": "r", "step": i, "rank": 0, "time": 1000.0 + i, "loss": 1.0} for i in range(1000)]
    telemetry.receive({"kind": "steps", "rank": 0, "dropped": 0, "records": records})
    before = process.memory_info().rss
    for k in range(1, 200):
        for i, record in enumerate(records):
            record["step"] = k * 1000 + i
        telemetry.receive({"kind": "steps", "rank": 0, "dropped": 0, "records": records})
    assert process.memory_info().rss - before < 20e6
    assert len(telemetry.to_frame()) == 200_000


def test_the_table_has_the_documented_columns_and_the_users_own():
    telemetry = Telemetry(2)
    send(telemetry, step(1, 0, 0.5, samples=8, epoch=0), step(1, 1, values={"accuracy": 0.25}))
    frame = telemetry.to_frame()
    assert tuple(frame.columns) == (*STEP_COLUMNS, "accuracy")
    assert frame["run"].tolist() == ["train", "train"]
    assert frame["rank"].tolist() == [0, 1]
    assert frame["loss"].tolist()[0] == 0.5
    assert math.isnan(frame["loss"].tolist()[1])
    assert frame["accuracy"].tolist()[1] == 0.25
    assert frame["grad_norm"].isna().all()


def test_an_empty_table_has_all_columns():
    assert tuple(Telemetry(2).to_frame().columns) == STEP_COLUMNS


@pytest.mark.parametrize(
    "payload",
    [
        {},
        None,
        {"kind": "steps"},
        {"kind": "steps", "records": [None]},
        {"kind": "steps", "records": [{"run": "a", "step": "x", "rank": 0, "time": 0}]},
        {"kind": "steps", "records": [{"run": "a", "step": 1, "rank": 10**30, "time": 0}]},
        {"kind": "event", "event": {"kind": "party", "run": "a", "rank": 0, "time": 0}},
        {"kind": "weather"},
    ],
)
def test_odd_data_is_counted_and_reported_and_raises_nothing(payload, caplog):
    telemetry = Telemetry(2)
    with caplog.at_level(logging.WARNING):
        telemetry.receive(payload)
    assert telemetry.dropped == 1
    assert "malformed" in caplog.text
    send(telemetry, step(1, 0, 1.0), step(1, 1, 1.0))
    assert telemetry.current.loss == 1.0
    assert len(telemetry.to_frame()) == 2


def test_records_that_ranks_left_out_are_added_up():
    telemetry = Telemetry(1)
    send(telemetry, step(1, 0), dropped=3)
    send(telemetry, step(2, 0), dropped=2)
    assert telemetry.dropped == 5
    assert "5 records were lost" in telemetry.table()


def test_subscribers_hear_of_changes_until_they_leave():
    telemetry = Telemetry(1)
    heard = []
    leave = telemetry.subscribe(lambda: heard.append(telemetry.version))
    send(telemetry, step(1, 0))
    leave()
    leave()
    send(telemetry, step(2, 0))
    assert heard == [1]


def test_the_run_log_has_one_line_a_record(tmp_path):
    telemetry = Telemetry(1, tmp_path / "logs")
    send(telemetry, begin(0, run="Cell In[3]/train", world=1), step(1, 0, 0.5, run="Cell In[3]/train"))
    send(telemetry, end(0, run="Cell In[3]/train", world=1))
    path = telemetry.log_path("Cell In[3]/train")
    telemetry.close()
    assert path.parent == tmp_path / "logs"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["event", "step", "event"]
    assert lines[1]["loss"] == 0.5
    assert lines[2]["event"] == "end"


def test_the_run_log_is_on_disk_a_second_later(tmp_path):
    telemetry = Telemetry(1, tmp_path)
    send(telemetry, step(1, 0))
    deadline = time.monotonic() + 5
    while not (path := telemetry.log_path("train")).exists() or not path.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    telemetry.close()
    assert not [t for t in threading.enumerate() if t.name == "nbdist-run-log"]


def test_a_log_that_cannot_be_written_warns_once_and_training_goes_on(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    telemetry = Telemetry(1, tmp_path / "file" / "logs")
    send(telemetry, step(1, 0, run="a"), step(1, 0, run="b"))
    telemetry.close()
    assert sum("run log" in record.message for record in caplog.records) == 1
    assert telemetry.log_path("a") is None
    assert len(telemetry.to_frame()) == 2


def test_the_text_table_names_run_steps_loss_speed_and_end():
    telemetry = Telemetry(1)
    send(telemetry, begin(0, world=1, total=3), *(step(i, 0, 0.25, samples=10) for i in (1, 2, 3)), end(0, world=1))
    header, row = telemetry.table().splitlines()
    assert header.split() == ["run", "steps", "loss", "samples/s", "first", "step", "time", "end"]
    assert row.split()[:4] == ["train", "3/3", "0.25", "10"]
    assert row.endswith("done")
