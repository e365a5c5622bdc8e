"""The exchange: a store whose readers wait, lines to nodes, and who is let in."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq

from nbdist.channel import LINE, STORE, ExchangeAddress, connect
from nbdist.exchange import Exchange, KeyValues, Switchboard
from nbdist.lines import ExchangeLine


def ask(store: KeyValues, operation: str, *arguments: bytes, wait: float = 10.0) -> list[tuple[bytes, ...]]:
    replies: list[tuple[bytes, ...]] = []
    store.handle(operation.encode(), wait, list(arguments), lambda *values: replies.append(values))
    return replies


def test_a_reader_gets_what_is_set_after_it_asked() -> None:
    store = KeyValues()
    early = ask(store, "get", b"a")
    both = ask(store, "wait", b"a", b"b")
    assert early == [] and both == []
    assert ask(store, "set", b"a", b"1") == [()]
    assert early == [(b"1",)] and both == []
    ask(store, "add", b"b", b"2")
    assert both == [()]


def test_the_store_counts_appends_compares_and_forgets() -> None:
    store = KeyValues()
    assert ask(store, "add", b"n", b"2") == [(b"2",)]
    assert ask(store, "add", b"n", b"-1") == [(b"1",)]
    assert ask(store, "append", b"s", b"x") == [()]
    ask(store, "append", b"s", b"y")
    assert ask(store, "get", b"s") == [(b"xy",)]
    assert ask(store, "compare_set", b"c", b"", b"1") == [(b"1",)]
    assert ask(store, "compare_set", b"c", b"0", b"2") == [(b"1",)]
    assert ask(store, "compare_set", b"c", b"1", b"2") == [(b"2",)]
    assert ask(store, "check", b"c", b"none") == [(b"",)]
    assert ask(store, "delete", b"c") == [(b"1",)] and ask(store, "delete", b"c") == [(b"",)]
    ask(store, "set", b"gen1/a", b"1")
    ask(store, "drop", b"gen1/")
    assert ask(store, "count") == [(b"2",)]


def test_who_has_given_up_is_not_answered_any_more() -> None:
    store = KeyValues()
    late = ask(store, "get", b"a", wait=1.0)
    store.expire(time.monotonic() + 2)
    ask(store, "set", b"a", b"1")
    assert late == []


def board(lost_after: float = 10.0) -> tuple[Switchboard, list[tuple[bytes, dict[str, Any]]]]:
    sent: list[tuple[bytes, dict[str, Any]]] = []
    switchboard = Switchboard(lambda receiver, line: sent.append((receiver, line)), lost_after)
    switchboard.handle(b"notebook", {"op": "listen"})
    switchboard.handle(b"n0", {"event": "hello", "node": 0, "host": "gpu1"})
    return switchboard, sent


def test_a_silent_node_is_lost_and_told_to_end_when_it_speaks_again() -> None:
    switchboard, sent = board()
    switchboard.expire(time.monotonic() + 9)
    assert sent[-1][1]["event"] == "hello"
    switchboard.expire(time.monotonic() + 11)
    assert sent[-1] == (b"notebook", {"event": "lost", "node": 0, "host": "gpu1", "seconds": 10.0})
    switchboard.handle(b"n0", {"op": "ping", "greeted": True})
    assert sent[-1] == (b"n0", {"op": "bye"})


def test_a_controller_that_slept_does_not_lose_its_nodes() -> None:
    switchboard, sent = board()
    switchboard.forgive(60)
    switchboard.expire(time.monotonic() + 60)
    assert sent[-1][1]["event"] == "hello"


def test_a_later_notebook_learns_of_nodes_and_engines() -> None:
    switchboard, sent = board()
    for pid in (1, 2):
        switchboard.handle(b"n0", {"event": "forked", "node": 0, "pid": pid, "id": pid})
    switchboard.handle(b"n0", {"event": "exited", "node": 0, "pid": 1})
    sent.clear()
    switchboard.handle(b"later", {"op": "listen"})
    assert [(to, line["event"], line.get("pid")) for to, line in sent] == [
        (b"later", "hello", None),
        (b"later", "forked", 2),
    ]


@pytest.fixture
def exchange() -> Iterator[Exchange]:
    served = Exchange("127.0.0.1")
    yield served
    served.close()


def try_store(address: ExchangeAddress, wait_ms: int = 500) -> bool:
    context: zmq.Context[Any] = zmq.Context()
    client = connect(context, address)
    try:
        client.send_multipart([STORE, b"1", b"count", b"0"])
        return bool(client.poll(wait_ms))
    finally:
        client.close()
        context.term()


def test_only_who_has_the_key_gets_an_answer(exchange: Exchange) -> None:
    assert try_store(exchange.address, 5000)
    public, secret = (key.decode() for key in zmq.curve_keypair())
    # a stranger may learn the server's key, which is no secret, and still is not let in
    assert not try_store(replace(exchange.address, public_key=public, secret_key=secret))
    plain: zmq.Socket[Any] = zmq.Context.instance().socket(zmq.DEALER)
    plain.linger = 0
    plain.connect(exchange.address.url)
    plain.send_multipart([LINE, b'{"op": "listen"}'])
    assert not plain.poll(300)
    plain.close()


def test_lines_go_to_the_node_and_back(exchange: Exchange) -> None:
    heard: list[dict[str, Any]] = []
    context: zmq.Context[Any] = zmq.Context()
    node = connect(context, exchange.address)
    node.send_multipart([LINE, b'{"event": "hello", "node": 3, "host": "gpu3"}'])
    line = ExchangeLine(exchange.address, heard.append)
    deadline = time.monotonic() + 5
    while not heard and time.monotonic() < deadline:
        time.sleep(0.01)
    assert heard[0]["host"] == "gpu3"
    line.tell(op="fork", node=3)
    assert node.poll(5000) and b'"fork"' in node.recv_multipart()[1]
    line.close()
    node.close()
    context.term()


def test_the_file_with_the_keys_is_its_owners(exchange: Exchange, tmp_path: Path) -> None:
    path = tmp_path / "security" / "exchange.json"
    exchange.address.write(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert ExchangeAddress.read(path) == exchange.address
    assert exchange.address.secret_key not in repr(exchange.address)
