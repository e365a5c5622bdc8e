"""Every notebook runs top to bottom in a kernel, ends without a rank, and says what it promised."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

from nbdist.__main__ import as_page, kernel_of_this_interpreter, main, texts_of

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


def execute(path: Path, folder: Path) -> Any:
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook,
        timeout=110,
        km=kernel_of_this_interpreter(),
        resources={"metadata": {"path": str(folder)}},
        store_widget_state=False,
    )
    client.execute()
    return notebook


def outputs_of(notebook: Any, first_line: str) -> str:
    """The text under the cell that starts with this line."""
    (cell,) = (c for c in notebook.cells if c.cell_type == "code" and c.source.startswith(first_line))
    texts = [o.text if o.output_type == "stream" else o.get("data", {}).get("text/plain", "") for o in cell.outputs]
    return "\n".join(texts)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_committed_without_outputs_and_stops_its_cluster(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
    assert code[-1].source == "%cluster stop"
    assert notebook.cells[0].cell_type == "markdown", "a notebook opens with what the reader will see"
    assert notebook.metadata.kernelspec.name == "python3"


def test_quickstart_reads_97_percent_of_the_digits(tmp_path: Path) -> None:
    notebook = execute(next(path for path in NOTEBOOKS if path.stem == "00_quickstart"), tmp_path)

    assert "[0-1] 3.0" in outputs_of(notebook, "%%distributed\nx = torch.full")
    (summary,) = texts_of(notebook, tag="summary")
    accuracy = re.search(r"test accuracy +(\d+\.\d+)% of 360 images", summary)
    assert accuracy and float(accuracy[1]) >= 97, summary
    assert re.search(r"final loss +0\.\d+", summary), summary
    rate = re.search(r"throughput +([\d,]+) samples/s", summary)
    assert rate and int(rate[1].replace(",", "")) > 100, summary

    # The saved page shows the run without a kernel, without a browser having been there, without the internet.
    page = as_page(notebook)
    assert "<svg" in page or "image/png" in page
    assert not re.search(r"""<(script|link|img)[^>]+(src|href)=["']?https?:""", page)


@pytest.mark.parametrize("path", [p for p in NOTEBOOKS if p.stem != "00_quickstart"], ids=lambda path: path.stem)
def test_notebook_runs_top_to_bottom(path: Path, tmp_path: Path) -> None:
    execute(path, tmp_path)


def test_demo_leaves_notebook_and_page_and_prints_what_they_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--output", str(tmp_path / "demo")]) == 0
    printed = capsys.readouterr().out
    for name in ("00_quickstart.ipynb", "00_quickstart.html"):
        assert str(tmp_path / "demo" / name) in printed
        assert (tmp_path / "demo" / name).stat().st_size > 10_000
    (summary,) = texts_of(nbformat.read(tmp_path / "demo" / "00_quickstart.ipynb", as_version=4), tag="summary")
    assert summary in printed
