"""The quickstart as a person runs it: a real JupyterLab, real ranks, a curve that moves while they train."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.browser.test_panel import shoot

QUICKSTART = Path(__file__).parents[2] / "notebooks" / "00_quickstart.ipynb"

pytestmark = pytest.mark.timeout(240)


def code_cells() -> list[str]:
    cells = json.loads(QUICKSTART.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def position(cells: list[str], start: str) -> int:
    return next(i for i, cell in enumerate(cells) if cell.startswith(start))


@pytest.fixture
def quickstart(lab):
    """The quickstart up to its panel, run; a cell that trains on in the background was added before the end."""
    cells = code_cells()
    stop = position(cells, "%cluster stop")
    cells[stop:stop] = [
        "%train 600 --detach",
        "cluster.cell and cluster.cell.wait()\nprint(cluster.telemetry.current.step)",
    ]
    lab.open(*cells)
    lab.cells = cells
    lab.run(*range(position(cells, "%train 400")))
    yield lab
    lab.run(len(cells) - 1)


def test_the_curves_move_while_the_quickstart_trains_and_stop_keeps_what_was_learnt(quickstart):
    lab, cells = quickstart, quickstart.cells
    training = position(cells, "%train 400")
    lab.start(training)
    early = lab.wait_panel("p.drawn.loss > 10", timeout=60)
    late = lab.wait_panel(f"p.drawn.loss > {early['drawn']['loss'] + 10}")
    assert late["last"]["loss"] > early["last"]["loss"]
    assert late["gaps"] == 0
    shoot(lab, "quickstart")
    lab.page.get_by_role("button", name="Stop", exact=True).click()
    lab.wait_cell(training, timeout=10)
    error = next(o for o in lab.outputs(training) if o["output_type"] == "error")
    assert error["ename"] == "KeyboardInterrupt"
    assert "stopped after step" in error["evalue"]
    lab.run(position(cells, "%%distributed\ndef is_right"))
    assert "360 test images" in lab.text(position(cells, "%%distributed\ndef is_right"))


def test_a_reload_in_mid_run_finds_every_point(quickstart):
    lab, cells = quickstart, quickstart.cells
    lab.run(position(cells, "%train 600"))
    lab.wait_panel("p.drawn.loss > 20", timeout=60)
    lab.save()
    lab.reload()
    panel = lab.wait_panel("p.drawn.loss > 40", timeout=60)
    assert panel["points"]["loss"] == panel["last"]["loss"]
    waiting = position(cells, "cluster.cell and")
    lab.run(waiting)
    assert lab.text(waiting).strip() == "600"
    lab.page.wait_for_selector(".jp-RenderedHTMLCommon img")  # the picture that stays, in the place of the panel
