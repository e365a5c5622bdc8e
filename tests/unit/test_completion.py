"""Names of a rank that continue what was typed."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from nbdist.engine.cells.completion import MOST, complete


def names(namespace: dict[str, Any], code: str) -> list[str]:
    return list(complete(namespace, code, len(code))["matches"])


def test_names_are_continued() -> None:
    assert names({"learning_rate": 0.1, "learn": 1, "other": 2}, "x = lea") == ["learn", "learning_rate"]


def test_attributes_are_continued() -> None:
    assert names({"math": math}, "math.sq") == ["sqrt"]


def test_members_of_a_module_are_continued() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_module("head", nn.Linear(2, 2))
    assert names({"model": model}, "model.head.we") == ["weight"]
    assert names({"model": model}, "model.hea") == ["head"]


def test_a_modules_submodules_are_followed() -> None:
    assert "all_reduce" in names({"torch": torch}, "torch.distributed.all_re")


def test_the_start_of_the_replaced_name_is_given() -> None:
    reply = complete({"value": 1}, "print(val", 9)
    assert reply == {"matches": ["value"], "start": 6}


def test_only_what_is_before_the_cursor_counts() -> None:
    assert complete({"value": 1}, "val + other", 3) == {"matches": ["value"], "start": 0}


def test_private_names_are_offered_only_when_asked_for() -> None:
    class Thing:
        _hidden = 1
        shown = 2

    assert names({"thing": Thing(), "_secret": 1}, "thing.") == ["shown"]
    assert names({"thing": Thing()}, "thing._hid") == ["_hidden"]


def test_no_code_of_the_user_is_run() -> None:
    class Trap:
        @property
        def value(self) -> object:
            raise AssertionError("a property was run")

        def __getattr__(self, name: str) -> object:
            raise AssertionError(f"__getattr__ was run for {name}")

    assert names({"trap": Trap()}, "trap.value.re") == []
    assert names({"trap": Trap()}, "trap.va") == ["value"]


def test_unknown_names_and_nothing_at_all_give_nothing() -> None:
    assert names({}, "nothing.at") == []
    assert names({"a": 1}, "") == []
    assert names({"a": 1}, "a + ") == []


def test_a_large_namespace_is_cut() -> None:
    assert len(names({f"name_{i}": i for i in range(2 * MOST)}, "name_")) == MOST
