"""Run a cell's top-level await on a rank whose main thread already runs ipykernel's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["run_nested"]

T = TypeVar("T")


def run_nested(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run the coroutine on a loop of its own while the surrounding loop looks as if it were not running.

    asyncio refuses a second loop in a thread; ipyparallel's ``execute`` would never reply to a cell with a top-level
    await. The surrounding task is put aside and restored, so that the engine's loop goes on afterwards.
    """
    outer = asyncio._get_running_loop()
    task = asyncio.current_task(outer) if outer is not None else None
    loop = asyncio.new_event_loop()
    if outer is not None and task is not None:
        asyncio.tasks._leave_task(outer, task)
    asyncio._set_running_loop(None)
    try:
        return loop.run_until_complete(coroutine)
    finally:
        try:
            pending = asyncio.all_tasks(loop)
            for left in pending:
                left.cancel()
            if pending:
                loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        finally:
            loop.close()
            asyncio._set_running_loop(outer)
            if outer is not None and task is not None:
                asyncio.tasks._enter_task(outer, task)
