"""The panel in a real JupyterLab and Notebook 7, fed without ranks."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest

from tests.browser.lab import other_ipykernels

SETUP = """
from tests.browser.feed import FeedCluster
from nbdist.dashboard import Dashboard
cluster = FeedCluster()
"""
SHOW = "dashboard = Dashboard(cluster); dashboard"


def shoot(page, name):
    """Keep a picture for people, in the folder that NBDIST_SHOTS names."""
    if folder := os.environ.get("NBDIST_SHOTS"):
        page.page.screenshot(path=f"{folder}/{name}.png")


def drawn_pixels(lab):
    """How many pixels of the first figure's canvas are not transparent."""
    return lab.page.evaluate(
        """() => {
            const find = node => node.querySelector?.('canvas')
                ?? [...node.querySelectorAll('*')].map(n => n.shadowRoot && find(n.shadowRoot)).find(Boolean);
            const canvas = find(document.querySelector('.nbdist-plot'));
            const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
            let count = 0;
            for (let i = 3; i < data.length; i += 4) count += data[i] > 0;
            return count;
        }"""
    )


def test_the_curve_moves_while_the_cell_runs_and_stop_ends_it(lab):
    lab.open(SETUP, SHOW, "print(cluster.train(3000))")
    lab.run(0, 1)
    assert lab.page.locator(".nbdist-stop").is_disabled()
    lab.start(2)
    early = lab.wait_panel("p.drawn.loss > 20")
    late = lab.wait_panel(f"p.drawn.loss > {early['drawn']['loss'] + 20}")
    assert late["last"]["loss"] > early["last"]["loss"]
    assert late["gaps"] == 0
    assert drawn_pixels(lab) > 1000
    assert "mean of 2 ranks" in lab.page.locator(".nbdist-legend").first.text_content()
    shoot(lab, "light")
    lab.page.get_by_role("button", name="Stop", exact=True).click()
    lab.wait_cell(2, timeout=5)
    assert 0 < int(lab.text(2)) < 3000


def test_while_the_first_step_runs_the_panel_says_what_it_waits_for(lab):
    lab.open(SETUP, SHOW, "print(cluster.train(5, first=3))")
    lab.run(0, 1)
    lab.start(2)
    status = lab.page.locator(".nbdist-status")
    status.filter(has_text="first step… waiting for rank 0 (running cell 3, line 1), rank 1").wait_for(timeout=5000)
    assert lab.page.locator(".nbdist-chip").first.get_attribute("aria-label") == "rank 0: running, cell 3, line 1"
    lab.wait_cell(2)


def test_the_dark_theme_keeps_everything_readable(lab):
    lab.open(SETUP, SHOW, "print(cluster.train(150))")
    lab.command("apputils:change-theme", theme="JupyterLab Dark")
    lab.page.wait_for_selector("body[data-jp-theme-light=false]", state="attached")
    lab.run(0, 1)
    lab.start(2)
    lab.wait_panel("p.drawn.loss > 50")
    shoot(lab, "dark")
    lab.wait_cell(2)
    lab.page.wait_for_selector(".jp-RenderedHTMLCommon img")
    lab.page.wait_for_timeout(300)
    shoot(lab, "dark-static")
    lab.command("apputils:change-theme", theme="JupyterLab Light")


def test_a_reload_in_mid_run_finds_every_point_and_stop_still_works(lab):
    lab.open(SETUP, SHOW, "cluster.start(5000)")
    lab.run(0, 1, 2)
    before = lab.wait_panel("p.drawn.loss > 30")
    lab.save()
    lab.reload()
    after = lab.wait_panel(f"p.drawn.loss > {before['drawn']['loss']}")
    assert after["points"]["loss"] == after["last"]["loss"] == after["steps"]  # step n is point n: none is missing
    later = lab.wait_panel(f"p.drawn.loss > {after['drawn']['loss'] + 20}")
    assert later["points"]["loss"] == later["last"]["loss"]
    assert later["gaps"] == 0
    lab.page.get_by_role("button", name="Stop", exact=True).click()
    lab.wait_panel("!p.running", timeout=5)


def test_a_second_view_has_all_points(lab):
    lab.open(SETUP, SHOW, "cluster.start(5000)", "dashboard")
    lab.run(0, 1, 2)
    lab.wait_panel("p.drawn.loss > 20")
    lab.run(3)
    panel = lab.wait_panel("p.views === 2 && p.drawn.loss > 40")
    assert panel["points"]["loss"] == panel["last"]["loss"]
    assert len(lab.panels()) == 1
    assert lab.page.evaluate("() => Object.values(window.__nbdist.bokeh).map(b => b.loads)") == [1]


def test_a_long_run_keeps_its_whole_length_in_a_thousand_points(lab):
    lab.open(
        SETUP,
        "cluster = FeedCluster(rate=1e6)",
        SHOW,
        "cluster.start(3000)",
        "cluster._thread.join(); cluster.telemetry.current.curves['loss'].x[0]",
    )
    lab.run(0, 1, 2, 3)
    panel = lab.wait_panel("p.last.loss === 3000")
    assert 500 <= panel["points"]["loss"] <= 1000


def test_the_saved_notebook_holds_a_picture_and_a_table(lab):
    lab.open(SETUP, SHOW, "cluster.train(100)", "cluster.start(100000)")
    lab.run(0, 1, 2)
    lab.page.wait_for_selector(".jp-RenderedHTMLCommon img")
    saved = lab.save()
    (output,) = saved.cells[1].outputs
    assert set(output.data) == {"text/html", "text/plain", "image/png"}
    assert len(nbformat.writes(saved)) < 300_000
    assert "script" not in output.data["text/html"]
    assert "http" not in output.data["text/html"]
    assert "train 1" in output.data["text/plain"]
    # the next run brings the live panel back to the same place
    lab.run(3)
    lab.wait_panel("p.run === 'train 2' && p.drawn.loss > 10")
    assert lab.page.locator(".jp-Cell").nth(1).locator(".nbdist-panel").count() == 1
    assert lab.page.locator(".jp-RenderedHTMLCommon img").count() == 0


def test_a_reopened_notebook_shows_the_picture_without_a_kernel(lab):
    lab.open(SETUP, SHOW, "cluster.train(60)")
    lab.run(0, 1, 2)
    lab.page.wait_for_selector(".jp-RenderedHTMLCommon img")
    lab.save()
    lab.page.evaluate("async () => { await window.jupyterapp.shell.currentWidget.sessionContext.shutdown() }")
    lab.reload()
    picture = lab.page.wait_for_selector(".jp-RenderedHTMLCommon img")
    assert picture.evaluate("image => image.decode().then(() => image.naturalWidth)") > 300
    assert "Error displaying widget" not in lab.page.content()


def test_running_the_panel_cell_twenty_times_grows_nothing(lab):
    count = "import threading, ipywidgets\nprint(threading.active_count(), len(ipywidgets.widgets.widget._instances))"
    lab.open(SETUP, SHOW, "cluster.train(20)", count)
    lab.run(0, 1, 2, 3)
    threads, widgets = map(int, lab.text(3).split())
    size = len(nbformat.writes(lab.save()))
    for _ in range(20):
        lab.run(1, 2)
    lab.run(3)
    assert list(map(int, lab.text(3).split())) == [threads, widgets]
    assert len(nbformat.writes(lab.save())) <= 1.5 * size
    assert len(lab.panels()) == 1


def test_an_old_panel_freezes_when_a_new_one_is_made(lab):
    lab.open(SETUP, SHOW, "cluster.train(30)", "Dashboard(cluster)", "cluster.start(100000)")
    lab.run(0, 1, 2, 3, 4)
    lab.wait_panel("p.drawn.loss > 10")
    cells = lab.page.locator(".jp-Cell")
    assert cells.nth(1).locator("img").count() == 1
    assert cells.nth(3).locator(".nbdist-panel").count() == 1
    assert lab.page.locator(".nbdist-panel").count() == 1


def test_an_earlier_run_can_be_picked(lab):
    lab.open(SETUP, SHOW, "cluster.train(30)", "cluster.start(100000)")
    lab.run(0, 1, 2, 3)
    lab.wait_panel("p.run === 'train 2' && p.drawn.loss > 5")
    lab.page.locator(".nbdist-runs").select_option("train 1")
    panel = lab.wait_panel("p.run === 'train 1' && p.drawn.loss === 30")
    assert panel["last"]["loss"] == 30


def test_the_panel_works_in_notebook_7(notebook7):
    notebook7.open(SETUP, SHOW, "print(cluster.train(3000))")
    notebook7.run(0, 1)
    notebook7.start(2)
    early = notebook7.wait_panel("p.drawn.loss > 10")
    notebook7.wait_panel(f"p.drawn.loss > {early['drawn']['loss'] + 10}")
    notebook7.page.get_by_role("button", name="Stop", exact=True).click()
    notebook7.wait_cell(2, timeout=5)
    notebook7.page.wait_for_selector(".jp-RenderedHTMLCommon img")


@pytest.mark.parametrize("kernel", [f"ipykernel-{Path(path).name}" for path in other_ipykernels()])
def test_curve_and_stop_work_in_a_busy_cell_of_other_kernels(lab, kernel):
    run = "try: print(cluster.train(3000))\nexcept KeyboardInterrupt: cluster.request_stop(); print('interrupted')"
    lab.open("import ipykernel; print(ipykernel.__version__)", SETUP, SHOW, run, kernel=kernel)
    lab.run(0, 1)
    assert lab.text(0).strip() == kernel.removeprefix("ipykernel-")
    # the panel and the busy cell at once, as Run All has them: a kernel without subshells hears nothing of the page
    lab.start(2)
    lab.start(3)
    lab.wait_panel("p.drawn.loss > 50")
    lab.page.get_by_role("button", name="Stop", exact=True).click()
    lab.wait_cell(3, timeout=6)
    assert lab.text(3).strip() in ("interrupted", *map(str, range(3000)))
