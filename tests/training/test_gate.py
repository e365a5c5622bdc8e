"""Stopping at an agreed step."""

from __future__ import annotations

import random
import signal
import threading
import time

import pytest

from nbdist.engine.cells.gate import StepGate


def test_steps_begin_freely_until_a_stop_is_requested():
    gate = StepGate()
    with gate.run(7):
        assert all(gate.enter() for _ in range(3))
        assert gate.request_stop() == {"active": True, "step": 10}
    assert not gate.active


def test_a_rank_that_is_behind_goes_on_to_the_agreed_step():
    gate = StepGate()
    with gate.run(0):
        gate.enter()
        gate.request_stop()
        gate.stop_at(3)
        assert [gate.enter() for _ in range(4)] == [True, True, False, False]


def test_a_rank_that_was_not_in_its_loop_yet_stops_at_the_same_step():
    gate = StepGate()
    assert gate.request_stop() == {"active": False, "step": 0}
    gate.stop_at(2)
    with gate.run(0):
        assert [gate.enter() for _ in range(3)] == [True, True, False]
    gate.reset()
    with gate.run(2):
        assert gate.enter()


def test_no_step_begins_between_request_and_decision():
    gate = StepGate()
    with gate.run(0):
        gate.enter()
        gate.request_stop()
        threading.Timer(0.3, gate.stop_at, [2]).start()
        began = time.monotonic()
        assert gate.enter()
        assert time.monotonic() - began >= 0.25
        assert not gate.enter()


def test_sigint_breaks_a_rank_that_waits_for_the_decision():
    gate = StepGate()
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.2, signal.pthread_kill, [main, signal.SIGINT])
    with gate.run(0):
        gate.request_stop()
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            gate.enter()
    timer.join()
    assert not gate.active


def test_a_loop_left_half_way_in_an_earlier_cell_does_not_hold_the_gate():
    gate = StepGate()
    leaked = gate.run(0)
    leaked.__enter__()
    gate.reset()
    with gate.run(5):
        leaked.__exit__(None, None, None)
        assert gate.active
        assert gate.request_stop() == {"active": True, "step": 5}


@pytest.mark.parametrize("seed", range(40))
def test_ranks_stop_at_the_same_step_whenever_the_requests_arrive(seed):
    chance = random.Random(seed)
    world = chance.choice([2, 3, 4])
    gates = [StepGate() for _ in range(world)]
    meeting = threading.Barrier(world)  # each step ends with a collective
    ended: list[int] = [-1] * world
    late = chance.randrange(world)

    def train(rank: int) -> None:
        if rank == late:
            time.sleep(chance.random() * 0.004)
        with gates[rank].run(0):
            step = 0
            while gates[rank].enter():
                meeting.wait(10)
                step += 1
        ended[rank] = step

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    answers = []
    for rank in chance.sample(range(world), world):
        time.sleep(chance.random() * 0.003)
        answers.append(gates[rank].request_stop())
    stop = max(int(answer["step"]) for answer in answers)
    for rank in chance.sample(range(world), world):
        time.sleep(chance.random() * 0.003)
        gates[rank].stop_at(stop)
    for thread in threads:
        thread.join(10)
    assert ended == [stop] * world


def test_entering_costs_less_than_a_microsecond():
    gate = StepGate()
    with gate.run(0):
        best = min(_seconds(gate) for _ in range(20))
    assert best < 1e-6


def _seconds(gate: StepGate) -> float:
    began = time.perf_counter()
    for _ in range(1000):
        gate.enter()
    return (time.perf_counter() - began) / 1000
