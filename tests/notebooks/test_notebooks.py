"""Every notebook runs top to bottom in a kernel; the quickstart, run by ``nbdist demo``, keeps what it promises."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import pytest

from nbdist.__main__ import NOTEBOOK, notebook_client, texts_of

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_committed_without_outputs_and_stops_its_cluster(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
    assert code[-1].source == "%cluster stop"
    assert notebook.cells[0].cell_type == "markdown", "a notebook opens with what the reader will see"
    assert notebook.metadata.kernelspec.name == "python3"
    assert code[0].source.startswith("%load_ext nbdist\ncluster = %cluster start -n ")
    nbformat.validate(notebook)
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)


@pytest.mark.timeout(240)  # each is meant for less than a minute on two free cores
@pytest.mark.parametrize("path", [path for path in NOTEBOOKS if path.name != NOTEBOOK], ids=lambda path: path.stem)
def test_notebook_runs_top_to_bottom_and_its_own_asserts_hold(path: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    notebook_client(notebook, tmp_path, timeout=110).execute()
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")
    assert not list(tmp_path.iterdir()), "a notebook leaves nothing in the reader's folder"


@dataclass
class Demo:
    """What ``nbdist demo`` printed and left."""

    printed: str
    notebook: Any
    page: str


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    folder = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-m", "nbdist", "demo", "--output", str(folder)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for name in (NOTEBOOK, "00_quickstart.html"):
        assert str(folder / name) in ran.stdout
    notebook = nbformat.read(folder / NOTEBOOK, as_version=4)
    return Demo(ran.stdout, notebook, (folder / "00_quickstart.html").read_text(encoding="utf-8"))


def test_quickstart_reads_97_percent_of_the_digits(demo: Demo) -> None:
    (summary,) = texts_of(demo.notebook, tag="summary")
    accuracy = re.search(r"test accuracy +(\d+\.\d+)% of 360 images", summary)
    assert accuracy and float(accuracy[1]) >= 97, summary
    assert re.search(r"final loss +0\.\d+", summary), summary
    rate = re.search(r"throughput +([\d,]+) samples/s", summary)
    assert rate and int(rate[1].replace(",", "")) > 100, summary


def test_demo_prints_what_the_executed_notebook_says(demo: Demo) -> None:
    (summary,) = texts_of(demo.notebook, tag="summary")
    assert summary in demo.printed


def test_equal_results_of_the_two_ranks_fold_in_the_saved_notebook(demo: Demo) -> None:
    outputs = [output.get("text", "") for cell in demo.notebook.cells for output in cell.get("outputs", ())]
    text = "".join(outputs)
    assert "[0-1] 3.0" in text
    assert "[0] I am rank 0 of 2" in text and "[1] I am rank 1 of 2" in text


def test_saved_page_shows_the_run_without_kernel_browser_or_internet(demo: Demo) -> None:
    assert "<svg" in demo.page or "image/png" in demo.page
    assert not re.search(r"""<(script|link|img)[^>]+(src|href)=["']?https?:""", demo.page)
