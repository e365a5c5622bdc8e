"""Clocks of hosts that differ: how far, and what becomes of the times in records."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import zmq

from nbdist.channel import LINE, connect
from nbdist.exchange import Exchange
from nbdist.skew import Skew
from nbdist.telemetry import Telemetry


def test_the_shortest_round_trip_decides() -> None:
    skew = Skew()
    skew.add(sent=100.0, there=107.9, received=103.0)  # the way there took nearly all of it
    skew.add(sent=200.0, there=205.01, received=200.02)
    skew.add(sent=300.0, there=305.5, received=301.0)
    assert skew.seconds == pytest.approx(5.0)


def test_what_the_round_trip_leaves_open_is_no_difference() -> None:
    skew = Skew()
    assert skew.seconds == 0.0
    skew.add(sent=100.0, there=100.9, received=101.0)
    assert skew.seconds == 0.0
    skew.add(sent=100.0, there=90.0, received=99.0)  # our own clock was set back meanwhile: no trip
    assert skew.seconds == 0.0


def test_a_clock_that_is_put_right_is_followed() -> None:
    skew = Skew()
    skew.add(sent=0.0, there=60.0, received=0.001)
    for second in range(1, 9):
        skew.add(sent=second, there=second + 0.05, received=second + 0.1)
    assert skew.seconds == 0.0


def test_round_trips_to_an_exchange_find_a_clock_that_is_off() -> None:
    exchange = Exchange("127.0.0.1")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    client = connect(context, exchange.address)
    right, wrong = Skew(), Skew()
    try:
        for _ in range(5):
            client.send_multipart([LINE, json.dumps({"op": "ping", "sent": time.time()}).encode()])
            assert client.poll(5000)
            pong, now = json.loads(client.recv_multipart()[1]), time.time()
            right.add(pong["sent"], pong["time"], now)
            wrong.add(pong["sent"] - 3.0, pong["time"], now - 3.0)  # as a host whose clock is three seconds slow
    finally:
        client.close()
        context.term()
        exchange.close()
    assert right.seconds == pytest.approx(0.0, abs=0.05)
    assert wrong.seconds == pytest.approx(3.0, abs=0.05)


def test_times_of_ranks_are_the_notebooks_in_table_curve_and_log(tmp_path: Path) -> None:
    telemetry = Telemetry(2, log_dir=tmp_path, behind=lambda rank: 5.0 * rank)
    for rank, now in ((0, 1000.0), (1, 995.0)):
        begin = {"kind": "begin", "run": "a", "rank": rank, "world_size": 2, "time": now, "step": 0}
        telemetry.receive({"kind": "event", "event": begin})
        records = [{"run": "a", "step": s, "rank": rank, "time": now + s, "step_time": 1.0} for s in (1, 2)]
        telemetry.receive({"kind": "steps", "rank": rank, "dropped": 0, "records": records})
        telemetry.receive({"kind": "event", "event": {**begin, "kind": "end", "time": now + 2}})
    frame = telemetry.to_frame()
    assert frame["time"].tolist() == [1001.0, 1002.0, 1001.0, 1002.0]
    assert telemetry.current is not None and telemetry.current.elapsed == pytest.approx(2.0)
    telemetry.close()
    again = Telemetry(2, behind=lambda rank: 5.0 * rank)
    again.replay(tmp_path)
    assert again.to_frame()["time"].tolist() == frame["time"].tolist()
