"""Completion and inspection inside ``%%distributed`` cells: names that live on rank 0, also while it is busy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbdist.cluster import Cluster

__all__ = ["install"]

ANSWER_S = 0.5  # what the notebook itself knows is looked up after it, and all of it within a second


def install(ipython: Any) -> None:
    """Add a matcher to IPython's completer, and let the kernel ask rank 0 what a name is."""
    from IPython.core.completer import context_matcher

    @context_matcher()  # type: ignore[untyped-decorator]  # IPython is not typed
    def ranks_matcher(context: Any) -> dict[str, Any]:
        return _match(context.full_text, context.cursor_position, context.cursor_line)

    ranks_matcher.matcher_identifier = "nbdist.ranks"
    matchers = ipython.Completer.custom_matchers
    matchers[:] = [m for m in matchers if getattr(m, "matcher_identifier", "") != "nbdist.ranks"]
    matchers.append(ranks_matcher)
    kernel = getattr(ipython, "kernel", None)
    if kernel is not None and not hasattr(kernel.do_inspect, "__wrapped__"):
        kernel.do_inspect = _inspecting(kernel.do_inspect)


def _inspecting(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the kernel's inspection (Shift-Tab): in a ``%%distributed`` cell a rank knows better."""

    @functools.wraps(plain)
    def do_inspect(code: str, cursor_pos: int, *args: Any, **kwargs: Any) -> Any:
        cluster = _cluster_of(code)
        if cluster is not None:
            engine = cluster.world.engines[0]
            reply = cluster.client.ask([engine], "describe", ANSWER_S, code=code, cursor=cursor_pos).get(engine)
            if reply and reply["text"]:
                return {"status": "ok", "found": True, "data": {"text/plain": reply["text"]}, "metadata": {}}
        return plain(code, cursor_pos, *args, **kwargs)

    return do_inspect


def _cluster_of(text: str) -> Cluster | None:
    """Give the running cluster when ``text`` is a cell, or a line, for its ranks."""
    from nbdist.cluster import active

    cluster = active()
    first = text.lstrip().splitlines()[:1]
    if cluster is None or not cluster.running or not first:
        return None
    return cluster if first[0].startswith(("%%distributed", "%distributed")) else None


def _match(text: str, column: int, line: int) -> dict[str, Any]:
    from IPython.core.completer import SimpleCompletion

    nothing: dict[str, Any] = {"completions": [], "suppress": False}
    cluster = _cluster_of(text)
    if cluster is None:
        return nothing
    lines = text.splitlines(keepends=True)
    cursor = sum(len(each) for each in lines[:line]) + column
    engine = cluster.world.engines[0]
    reply = cluster.client.ask([engine], "complete", ANSWER_S, code=text, cursor=cursor).get(engine)
    if not reply or not reply["matches"]:
        return nothing
    prefix = text[reply["start"] : cursor]
    token = _token_before(text, cursor)
    head = token[: len(token) - len(prefix)]
    return {
        "completions": [SimpleCompletion(text=head + match, type="rank 0") for match in reply["matches"]],
        "suppress": True,
        "matched_fragment": token,
        "ordered": True,
    }


def _token_before(text: str, cursor: int) -> str:
    """Give what IPython regards as the token at the cursor: it replaces the whole of it."""
    start = cursor
    while start and (text[start - 1].isalnum() or text[start - 1] in "_."):
        start -= 1
    return text[start:cursor]
