"""Completion inside ``%%distributed`` cells: names that live on rank 0, also while it is busy."""

from __future__ import annotations

from typing import Any

__all__ = ["install"]

ANSWER_S = 0.8


def install(ipython: Any) -> None:
    """Add a matcher to IPython's completer."""
    from IPython.core.completer import context_matcher

    @context_matcher()  # type: ignore[untyped-decorator]  # IPython is not typed
    def ranks_matcher(context: Any) -> dict[str, Any]:
        return _match(context.full_text, context.cursor_position, context.cursor_line)

    ranks_matcher.matcher_identifier = "nbdist.ranks"
    matchers = ipython.Completer.custom_matchers
    matchers[:] = [m for m in matchers if getattr(m, "matcher_identifier", "") != "nbdist.ranks"]
    matchers.append(ranks_matcher)


def _match(text: str, column: int, line: int) -> dict[str, Any]:
    from IPython.core.completer import SimpleCompletion

    from nbdist.cluster import active

    nothing: dict[str, Any] = {"completions": [], "suppress": False}
    cluster = active()
    first = text.lstrip().splitlines()[:1]
    if (
        cluster is None
        or not cluster.running
        or not first
        or not first[0].startswith(("%%distributed", "%distributed"))
    ):
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
