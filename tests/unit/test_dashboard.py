"""Frames, figures and pictures without a page; executed notebooks and terminals without a front end."""

from __future__ import annotations

import base64
import io
import json
import math
import os
import struct
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import nbformat
import pytest

from nbdist.dashboard import Dashboard, panels, static
from nbdist.dashboard.frames import Frames, head
from nbdist.errors import ClusterError
from nbdist.telemetry import Telemetry
from tests.browser.feed import FeedCluster

ROOT = Path(__file__).parents[2]
SETUP = "from tests.browser.feed import FeedCluster\nfrom nbdist.dashboard import Dashboard\ncluster = FeedCluster()"
WIDGET = "application/vnd.jupyter.widget-view+json"


def fill(telemetry, first, last, run="train 1", **values):
    for step in range(first, last + 1):
        for rank in range(telemetry.world_size):
            record = {"run": run, "step": step, "rank": rank, "time": 1000 + step / 10, "loss": step + rank}
            record |= {"samples": 8, "values": values}
            telemetry.receive({"kind": "steps", "rank": rank, "dropped": 0, "records": [record]})
    return telemetry


class PageStandIn:
    """Applies frames as the page does."""

    def __init__(self):
        self.seq = 0
        self.columns = {}

    def take(self, frame):
        header, data = frame
        if header["whole"]:
            self.columns = {}
        elif header["seq"] <= self.seq:
            return
        else:
            assert header["seq"] == self.seq + 1
        self.seq = header["seq"]
        numbers = struct.unpack(f"{len(data) // 8}d", data)
        at = 0
        for series, start, count in header["series"]:
            old = self.columns.get(series, [[], [], [], []])
            assert all(len(column) >= start for column in old)
            self.columns[series] = [
                column[:start] + list(numbers[at + i * count : at + (i + 1) * count]) for i, column in enumerate(old)
            ]
            at += 4 * count

    def shows(self, run):
        return self.columns == {
            name: [list(c.x), list(c.mean), list(c.low), list(c.high)] for name, c in run.curves.items()
        }


def test_frame_after_frame_the_page_has_all_points_through_any_thinning():
    telemetry = Telemetry(2)
    frames, page = Frames(telemetry), PageStandIn()
    page.take(frames.next(telemetry.current))
    for first in range(1, 2600, 37):
        fill(telemetry, first, first + 36)
        page.take(frames.next(telemetry.current))
    assert page.shows(telemetry.current)
    fill(telemetry, 1, 5, run="train 2")
    page.take(frames.next(telemetry.current))
    assert page.shows(telemetry.current)


def test_a_page_that_joins_late_goes_on_from_a_whole_frame():
    telemetry = fill(Telemetry(2), 1, 50)
    frames, page = Frames(telemetry), PageStandIn()
    frames.next(telemetry.current)
    fill(telemetry, 51, 80)
    page.take(frames.whole(telemetry.current))
    fill(telemetry, 81, 90)
    page.take(frames.next(telemetry.current))
    assert page.shows(telemetry.current)


def test_a_frame_holds_only_what_is_new():
    telemetry = fill(Telemetry(2), 1, 900)
    frames = Frames(telemetry)
    frames.next(telemetry.current)
    fill(telemetry, 901, 903)
    header, data = frames.next(telemetry.current)
    assert not header["whole"]
    assert len(data) < 500


def test_the_first_step_says_which_ranks_it_waits_for():
    telemetry = Telemetry(2)
    event = {"kind": "begin", "run": "a", "rank": 0, "world_size": 2, "time": 1000.0, "step": 0, "total": 9}
    telemetry.receive({"kind": "event", "event": event})
    telemetry.receive({"kind": "steps", "records": [{"run": "a", "step": 1, "rank": 0, "time": 1001.0}]})
    status = head(telemetry.current, [(0, "waiting", "all_reduce"), (1, "running", "cell 3")])["status"]
    assert status == "first step… waiting for rank 1 (running cell 3)"


def test_throughput_is_labelled_for_the_world_and_per_rank():
    telemetry = fill(Telemetry(2), 1, 20)
    assert "samples/s: 160 (80 per rank)" in head(telemetry.current, [])["facts"]


@pytest.mark.parametrize(("series", "label"), [("loss", "loss"), ("samples_per_s", "samples/s"), ("acc", "acc")])
def test_a_figure_has_axis_labels_and_takes_the_pages_background(series, label):
    text = json.dumps(panels.panel(series, 4))
    assert f'"axis_label": "{label}"' in text
    assert '"axis_label": "step"' in text
    assert '"background_fill_color": null' in text
    assert len(text) < 20_000


def test_the_legend_says_of_how_many_ranks_the_curve_is_the_mean():
    assert [text for _, _, text in panels.panel("loss", 2)["legend"]] == ["mean of 2 ranks", "lowest to highest rank"]


def test_the_picture_is_small_well_formed_and_asks_nothing_of_anyone():
    telemetry = fill(Telemetry(2), 1, 3000, accuracy=0.5)
    data = static.bundle(telemetry, telemetry.current)
    assert sum(map(len, data.values())) < 300_000
    for forbidden in ("<script", "http:", "https:", "<svg", "onload"):
        assert forbidden not in data["text/html"]
    assert "mean of 2 ranks" in static.svg(telemetry.current)
    ElementTree.fromstring(static.svg(telemetry.current))
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")
    assert "train 1" in data["text/plain"]


def test_the_png_is_transparent_between_its_lines():
    from PIL import Image

    telemetry = fill(Telemetry(2), 1, 100)
    image = Image.open(io.BytesIO(static.png(telemetry.current))).convert("RGBA")
    assert image.getchannel("A").getpixel((image.width - 2, 2)) == 0
    assert image.getchannel("A").getextrema()[1] == 255


@pytest.mark.parametrize("losses", [[1.0], [1.0, 1.0], [math.nan], [math.nan, 2.0, math.inf, 1e300, -1e300]])
def test_any_numbers_can_be_drawn(losses):
    telemetry = Telemetry(1)
    for step, loss in enumerate(losses):
        record = {"run": "<a & b>", "step": step, "rank": 0, "time": 1000.0 + step, "loss": loss}
        telemetry.receive({"kind": "steps", "records": [record]})
    (run,) = telemetry.runs
    ElementTree.fromstring(static.svg(run))
    assert static.png(run)
    assert "&lt;a &amp; b&gt;" in static.html_of(telemetry, run)


def test_without_a_cluster_the_dashboard_names_the_next_call(monkeypatch):
    import nbdist.cluster

    monkeypatch.setattr(nbdist.cluster, "active", lambda: None)
    with pytest.raises(ClusterError, match="%cluster start"):
        Dashboard()


def test_a_dashboards_repr_is_one_line_and_sends_nothing():
    assert repr(Dashboard(FeedCluster())) == "<Dashboard of 2 ranks, no run yet, new>"


def execute(tmp_path, *cells):
    from nbclient import NotebookClient

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    client = NotebookClient(notebook, timeout=60, resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env=environ)
    return notebook


def test_an_executed_notebook_holds_the_picture_of_each_panel_and_stays_small(tmp_path):
    notebook = execute(tmp_path, SETUP, "Dashboard(cluster)", "cluster.train(40)", "cluster.train(20)")
    (output,) = notebook.cells[1].outputs
    assert "text/html" in output.data
    assert WIDGET not in output.data
    assert "train 2" in output.data["text/plain"]
    assert len(nbformat.writes(notebook)) < 300_000


def test_the_picture_survives_the_conversion_to_html_without_any_address(tmp_path):
    from nbconvert import HTMLExporter

    notebook = execute(tmp_path, SETUP, "cluster.train(20)", "Dashboard(cluster)")
    html, _ = HTMLExporter(embed_images=True).from_notebook_node(notebook)
    assert 'src="data:image/svg+xml;base64,' in html
    assert "Error displaying widget" not in html


def test_a_terminal_prints_the_table_when_a_run_ends():
    script = f"{SETUP}\ndashboard = Dashboard(cluster)\ndashboard\n_ = cluster.train(10)\nx = 1\n"
    result = subprocess.run(
        [sys.executable, "-m", "IPython", "--simple-prompt", "--no-banner", "--colors=NoColor"],
        input=script,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    )
    rows = [line for line in result.stdout.splitlines() if "train 1" in line]
    assert len(rows) == 1
    assert "10/10" in rows[0]
