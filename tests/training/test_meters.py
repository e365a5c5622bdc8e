"""What a rank records, and how it leaves the rank."""

from __future__ import annotations

import json
import signal
import statistics
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import Dataset

from nbdist.engine.cells import gate
from nbdist.engine.loading.data import distributed_loader
from nbdist.engine.steps.accumulate import accumulate
from nbdist.engine.steps.training import Trainer
from nbdist.engine.telemetry import meters
from nbdist.engine.telemetry import recorder as recorders
from nbdist.engine.telemetry.recorder import recorder
from tests.training.models import loss_fn, net, samples, sgd


class Published(list):
    """All payloads so far, looked at from different sides."""

    def flushed(self):
        meters.flush()
        return self

    @property
    def steps(self):
        return [record for payload in self.flushed() if payload["kind"] == "steps" for record in payload["records"]]

    @property
    def events(self):
        return [SimpleNamespace(**payload["event"]) for payload in self.flushed() if payload["kind"] == "event"]

    @property
    def order(self):
        """The kinds in order, one word for each record."""
        words = []
        for payload in self.flushed():
            words += [payload["event"]["kind"]] if payload["kind"] == "event" else ["step"] * len(payload["records"])
        return words


@pytest.fixture
def published():
    meters.end_cell("done")
    meters.flush()
    payloads = Published()
    meters.start(payloads.append, rank=1, world_size=2)
    meters.begin_cell("cell 7")
    yield payloads
    meters.end_cell("done")
    recorder.publish = None
    recorder.queue.clear()
    recorder.dropped = 0


def batches(count, size=4):
    return [(torch.zeros(size, 2), torch.zeros(size)) for _ in range(count)]


def test_a_tracked_loop_is_a_run_with_one_record_a_step(published):
    for number, _ in enumerate(meters.track(batches(3))):
        time.sleep(0.01)
        meters.log(loss=torch.tensor(2.0), temperature=number)
    meters.end_cell("done")
    assert published.order == ["begin", "step", "step", "step", "end"]
    json.dumps(published)
    begin, end = published.events
    assert (begin.run, begin.rank, begin.world_size, begin.step, begin.total) == ("cell 7", 1, 2, 0, 3)
    assert (end.step, end.reason) == (3, "done")
    for number, record in enumerate(published.steps):
        assert (record["run"], record["rank"], record["step"], record["epoch"]) == ("cell 7", 1, number + 1, 0)
        assert record["values"] == {"temperature": number}
        assert (record["loss"], record["samples"]) == (2.0, 4)
        assert 0.01 <= record["step_time"] < 0.1
        assert 0 <= record["data_wait"] < record["step_time"]
        assert record["samples_per_s"] == pytest.approx(4 / record["step_time"])


def test_the_time_of_all_steps_is_the_time_of_the_loop(published):
    def slow():
        for batch in batches(4):
            time.sleep(0.01)
            yield batch

    began = time.perf_counter()
    for _ in meters.track(slow(), total=4):
        time.sleep(0.005)
    whole = time.perf_counter() - began
    assert sum(record["step_time"] for record in published.steps) == pytest.approx(whole, abs=0.002)
    assert all(record["data_wait"] >= 0.01 for record in published.steps)
    assert published.events[0].total == 4


def test_another_pass_over_the_same_loader_continues_the_run(published):
    loader, others = batches(2), batches(1)
    for _ in range(2):
        list(meters.track(loader))
        list(meters.track(others))
    meters.end_cell("done")
    steps = [(record["run"], record["step"], record["epoch"]) for record in published.steps]
    assert steps == [
        ("cell 7", 1, 0),
        ("cell 7", 2, 0),
        ("cell 7.2", 1, 0),
        ("cell 7", 3, 1),
        ("cell 7", 4, 1),
        ("cell 7.2", 2, 1),
    ]
    assert [(e.run, e.step, e.total) for e in published.events if e.kind == "begin"] == [
        ("cell 7", 0, 2),
        ("cell 7.2", 0, 1),
        ("cell 7", 2, 4),
        ("cell 7.2", 1, 2),
    ]
    assert [e.run for e in published.events if e.kind == "end"] == ["cell 7", "cell 7.2"]


def test_the_partial_step_of_a_break_is_no_step(published):
    for number, _ in enumerate(meters.track(batches(5))):
        if number == 2:
            break
    meters.end_cell("done")
    assert published.order == ["begin", "step", "step", "end"]
    assert not gate.current_gate().active


@pytest.mark.parametrize(("error", "reason"), [(KeyError, "failed"), (KeyboardInterrupt, "stopped")])
def test_the_partial_step_of_an_error_is_no_step_and_the_run_ends(published, error, reason):
    with pytest.raises(error):
        for number, _ in enumerate(meters.track(batches(5))):
            meters.log(loss=1.0)
            if number == 1:
                raise error
    meters.end_cell(reason)
    assert published.order == ["begin", "step", "end"]
    assert published.events[-1].reason == reason
    meters.begin_cell("cell 8")
    meters.log(loss=3.0)
    assert (published.steps[-1]["run"], published.steps[-1]["step"]) == ("cell 8", 1)


def test_outside_of_loops_each_log_is_a_step(published):
    for number in range(3):
        meters.log(loss=float(number), n=8)
        time.sleep(0.01)
    meters.end_cell("done")
    assert published.order == ["begin", "step", "step", "step", "end"]
    assert [(record["step"], record["loss"], record["samples"]) for record in published.steps] == [
        (1, 0.0, 8),
        (2, 1.0, 8),
        (3, 2.0, 8),
    ]
    first, second, _ = published.steps
    assert "step_time" not in first and "samples_per_s" not in first
    assert second["samples_per_s"] == pytest.approx(8 / second["step_time"])


def test_log_takes_the_users_own_step(published):
    meters.log(loss=1.0, step=100)
    meters.log(loss=1.0, step=200)
    assert [record["step"] for record in published.steps] == [100, 200]


def test_a_log_after_the_loop_is_put_at_its_last_step(published):
    loader = batches(2)
    for _ in range(2):
        list(meters.track(loader))
        meters.log(accuracy=0.9)
    assert [(r["run"], r["step"]) for r in published.steps if r.get("values")] == [("cell 7", 2), ("cell 7", 4)]
    assert {record["run"] for record in published.steps} == {"cell 7"}


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        (dict(loss=torch.zeros(3)), ValueError, r"log\(loss=...\) takes one number, got a tensor of shape \(3,\)"),
        (dict(name="net"), TypeError, r"log\(name=...\) takes a number, got str"),
        (dict(rank=1), ValueError, "log\\(\\) fills 'rank' itself"),
    ],
)
def test_what_is_no_number_is_refused(values, error, message):
    with pytest.raises(error, match=message):
        meters.log(**values)


def test_spans_add_up_within_a_step(published):
    for _ in meters.track(batches(2)):
        for _ in range(2):
            with meters.span("augment"):
                time.sleep(0.005)
    for record in published.steps:
        assert 0.01 <= record["values"]["augment"] < 0.05
    with pytest.raises(ValueError, match="would overwrite a column"), meters.span("loss"):
        pass


def test_phases_of_an_own_loop_fill_the_columns_of_a_trainers(published):
    for _ in meters.track(batches(1)):
        with meters.span("forward"):
            time.sleep(0.005)
    assert 0.005 <= published.steps[0]["forward"] < 0.05


def test_a_window_of_batches_counts_as_their_samples(published):
    model = torch.nn.Linear(1, 1)
    for window in meters.track(accumulate(model, [torch.zeros(3, 1), torch.zeros(2, 1), torch.zeros(1, 1)], 2)):
        for batch in window:
            model(batch)
    assert [record["samples"] for record in published.steps] == [5, 1]


def test_the_mean_takes_a_loss_as_it_is():
    assert meters.mean(torch.tensor(2.0, requires_grad=True) * 1.0) == 2.0


def test_records_are_sent_without_a_flush(published):
    meters.log(loss=1.0)
    deadline = time.monotonic() + 2
    while len(published) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [payload["kind"] for payload in published] == ["event", "steps"]
    assert [thread.name for thread in threading.enumerate()].count("nbdist-meters") == 1


def test_the_oldest_records_go_when_nobody_takes_them_and_are_counted(published, monkeypatch):
    monkeypatch.setattr(recorders, "CAPACITY", 10)
    with recorder._draining:  # a channel that is stuck
        for number in range(31):
            meters.log(loss=float(number))
    assert [record["loss"] for record in published.steps] == [float(n) for n in range(21, 31)]
    assert sum(payload["dropped"] for payload in published if payload["kind"] == "steps") == 22  # begin event, 21 steps


def test_a_broken_channel_does_not_stop_the_run(published, caplog):
    def broken(payload):
        raise OSError("closed")

    meters.start(broken, rank=1, world_size=2)
    meters.log(loss=1.0)
    meters.flush()
    assert "could not be sent" in caplog.text
    meters.start(published.append, rank=1, world_size=2)
    meters.log(loss=2.0)
    meters.flush()
    assert published[-1]["dropped"] == 2
    assert [record["loss"] for record in published.steps] == [2.0]


def test_without_a_notebook_records_are_discarded():
    assert recorder.publish is None
    meters.log(loss=1.0)
    for _ in meters.track(batches(2)):
        meters.log(loss=1.0)
    meters.end_cell("done")
    assert not recorder.queue


class Logging(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        meters.log(read=1.0)
        return torch.tensor(index)


def test_a_data_set_logs_for_the_step_of_its_batch_and_in_workers_for_nobody(published):
    list(meters.track(distributed_loader(Logging(), batch_size=2)))
    assert [record["values"] for record in published.steps] == [{"read": 1.0}] * 2
    list(meters.track(distributed_loader(Logging(), batch_size=2, num_workers=1)))
    assert ["values" in record for record in published.steps] == [True, True, False, False]


def test_stop_ends_a_tracked_loop_at_the_agreed_step(published):
    seen = 0
    with pytest.raises(gate.StepStop):
        for _ in meters.track(batches(10)):
            seen += 1
            if seen == 2:
                assert gate.current_gate().request_stop() == {"active": True, "step": 2}
                gate.current_gate().stop_at(4)
    meters.end_cell("stopped")
    assert seen == 4
    assert published.order == ["begin", *["step"] * 4, "end"]


def test_mean_over_ranks_is_weighted(ranks):
    def means():
        import torch.distributed as dist

        loss, n = [(1.0, 3), (5.0, 1)][dist.get_rank()]
        empty = meters.mean(float("nan") if dist.get_rank() else 4.0, weight=[2, 0][dist.get_rank()])
        return meters.mean(loss, weight=n), meters.mean(torch.tensor(loss)), empty

    assert ranks.run(means) == [(2.0, 3.0, 4.0)] * 2


def test_mean_of_one_process_is_its_value():
    assert meters.mean(torch.tensor(2.5), weight=3) == 2.5


def make_trainer(loader=None, **options):
    model = net()
    return Trainer(model, sgd(model.parameters()), loss_fn, loader or [samples(8), samples(6)], **options)


def test_a_trainer_keeps_its_run_over_several_calls(published):
    trainer = make_trainer(accumulate=2, clip_grad_norm=1.0)
    trainer.train(2)
    trainer.train(1)
    assert published.order == ["begin", "step", "step", "end", "begin", "step", "end"]
    begin, end, again, _ = published.events
    assert begin.run == again.run == end.run == trainer._run.name
    assert begin.run.startswith("train ")
    assert (begin.total, begin.epochs, again.step, again.total, end.reason) == (2, 2.0, 2, 3, "done")
    assert begin.note == "8 per rank × 1 ranks × 2 accumulated = 16 samples"
    assert [(r["step"], r["epoch"], r["samples"]) for r in published.steps] == [(1, 0, 14), (2, 1, 14), (3, 2, 14)]
    for record in published.steps:
        phases = [record[name] for name in ("data_wait", "h2d", "forward", "backward", "optimizer", "other")]
        assert sum(phases) == pytest.approx(record["step_time"])
        assert all(seconds >= 0 for seconds in phases)
        assert record["lr"] == 0.1
        assert record["grad_norm"] > 0


def test_the_recorded_loss_is_the_mean_over_the_windows_samples(published):
    losses = iter([1.0, 5.0])
    trainer = make_trainer([samples(3), samples(1)], accumulate=2)
    trainer.loss_fn = lambda outputs, targets: outputs.sum() * 0 + next(losses)
    trainer.train(1)
    assert published.steps[0]["loss"] == 2.0


def test_a_log_in_the_users_loss_joins_the_trainers_step(published):
    def logged(outputs, targets):
        with meters.span("loss_fn"):
            loss = loss_fn(outputs, targets)
        meters.log(spread=outputs.std())
        return loss

    trainer = make_trainer()
    trainer.loss_fn = logged
    trainer.train(2)
    assert [set(record["values"]) for record in published.steps] == [{"loss_fn", "spread"}] * 2


@pytest.mark.parametrize(("raised", "reason"), [(KeyError, "failed"), (KeyboardInterrupt, "stopped")])
def test_a_run_that_is_cut_off_says_so_and_goes_on(published, raised, reason):
    trainer = make_trainer()

    def failing(outputs, targets):
        if trainer.global_step == 2:
            raise raised
        return loss_fn(outputs, targets)

    trainer.loss_fn = failing
    with pytest.raises(raised):
        trainer.train(5)
    trainer.loss_fn = loss_fn
    trainer.train(1)
    assert published.order == ["begin", "step", "step", "end", "begin", "step", "end"]
    assert [event.reason for event in published.events if event.kind == "end"] == [reason, "done"]
    assert [record["step"] for record in published.steps] == [1, 2, 3]


def test_own_steps_of_a_trainer_are_recorded_and_end_with_the_cell(published):
    trainer = make_trainer()
    for batch in trainer.loader:
        trainer.step(batch)
    meters.end_cell("done")
    assert published.order == ["begin", "step", "step", "end"]
    assert "data_wait" not in published.steps[0]


def test_exposed_communication_is_read_from_ddp(ranks):
    def train():
        from nbdist.engine.steps.agreement import all_ranks
        from nbdist.engine.strategies.parallel import parallelize

        payloads = Published()
        meters.start(payloads.append, rank=0, world_size=2)
        model = parallelize(net())
        trainer = Trainer(model, sgd(model.parameters()), loss_fn, [samples(8)])
        until = time.monotonic() + 0.6
        while all_ranks(time.monotonic() < until):
            trainer.train(20)
        recorders.recorder.publish = None
        return [record["exposed_comm"] for record in payloads.steps if "exposed_comm" in record], len(payloads.steps)

    for exposed, steps in ranks.run(train):
        assert 1 <= len(exposed) <= 8 < steps
        assert all(0 <= seconds < 1 for seconds in exposed)


def test_a_record_costs_the_training_thread_at_most_five_microseconds(published):
    loader = batches(4000)
    loss = torch.tensor(1.0)

    def seconds(iterable):
        times = []
        for _ in iterable:
            began = time.perf_counter()
            meters.log(loss=loss, n=8)
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    assert seconds(meters.track(loader)) < 5e-6
    meters.end_cell("done")
    assert seconds(range(4000)) < 8e-6


def test_sigint_in_a_flush_leaves_the_recorder_usable(published):
    def interrupting(payload):
        signal.raise_signal(signal.SIGINT)

    meters.start(interrupting, rank=0, world_size=1)
    meters.log(loss=1.0)
    with pytest.raises(KeyboardInterrupt):
        meters.flush()
    meters.start(published.append, rank=0, world_size=1)
    meters.log(loss=2.0)
    assert published.steps[-1]["loss"] == 2.0
