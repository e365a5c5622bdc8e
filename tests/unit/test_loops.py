"""A top-level await inside a loop that runs already."""

from __future__ import annotations

import asyncio

import pytest

from nbdist.engine.cells.loops import run_nested


async def double(value: int) -> int:
    await asyncio.sleep(0)
    return 2 * value


def test_a_coroutine_runs_without_a_loop() -> None:
    assert run_nested(double(2)) == 4


def test_a_coroutine_runs_inside_a_running_loop_which_goes_on_afterwards() -> None:
    async def outer() -> tuple[int, int, bool]:
        task = asyncio.current_task()
        nested = run_nested(double(2))
        return nested, await double(3), asyncio.current_task() is task

    assert asyncio.run(outer()) == (4, 6, True)


def test_an_error_comes_out_and_the_outer_loop_goes_on() -> None:
    async def fail() -> None:
        raise KeyError("label")

    async def outer() -> int:
        with pytest.raises(KeyError, match="label"):
            run_nested(fail())
        return await double(4)

    assert asyncio.run(outer()) == 8


def test_tasks_that_the_cell_left_are_ended() -> None:
    ended = []

    async def background() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    async def cell() -> None:
        task = asyncio.create_task(background())
        await asyncio.sleep(0)
        assert not task.done()

    run_nested(cell())
    assert ended == [True]
