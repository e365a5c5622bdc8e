"""Refuse a cell that is no Python before any rank has seen it."""

from __future__ import annotations

import ast
import warnings

from nbdist.errors import NbdistError

__all__ = ["CellSyntaxError", "check_syntax"]


class CellSyntaxError(NbdistError):
    """A cell that is no Python: it was not sent to any rank."""

    def __init__(self, error: SyntaxError, label: str) -> None:
        self.error = error
        self.label = label
        super().__init__(f"{error.msg} ({label}, line {error.lineno}); nothing ran on any rank")

    def _render_traceback_(self) -> list[str]:
        error = self.error
        lines = [f"  Cell {self.label}, line {error.lineno}"]
        if error.text:
            lines.append("    " + error.text.strip())
            lines.append("    " + " " * max(0, (error.offset or 1) - 1 - _indent(error.text)) + "^")
        return [*lines, f"\x1b[31mSyntaxError\x1b[0m: {error.msg}", "Nothing ran on any rank."]


def check_syntax(source: str, label: str) -> None:
    """Refuse a cell that is no Python, before any rank has seen it."""
    from IPython.core.inputtransformer2 import TransformerManager

    try:
        code = TransformerManager().transform_cell(source)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the ranks will give them
            compile(code, "<cell>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    except SyntaxError as error:
        raise CellSyntaxError(error, label) from None


def _indent(text: str) -> int:
    return len(text) - len(text.lstrip())
