"""The command line: ``nbdist demo`` executes the quickstart, ``lab`` opens it, ``check`` tries out this machine."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nbdist import launch

NOTEBOOK = "00_quickstart.ipynb"

# nbconvert's page loads require.js, MathJax and mermaid from the internet. Ours has to open on a machine without one.
PAGE = """\
{%- extends 'lab/index.html.j2' -%}
{%- block html_head_js -%}{%- endblock -%}
{%- block jupyter_widgets -%}{%- endblock -%}
{%- block html_head_js_mathjax -%}{%- endblock -%}
{%- block html_head_js_mermaidjs -%}{%- endblock -%}
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; gives the exit status."""
    parser = argparse.ArgumentParser(prog="nbdist", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    demo = commands.add_parser("demo", help="execute the quickstart on local ranks; keep it as notebook and page")
    demo.add_argument("--output", type=Path, default=Path("demo"), metavar="DIR", help="where to (default: ./demo)")
    demo.set_defaults(run=lambda options: run_demo(options.output))

    lab = commands.add_parser("lab", help="open JupyterLab on the quickstart")
    lab.add_argument("arguments", nargs=argparse.REMAINDER, help="what follows goes to `jupyter lab`")
    lab.set_defaults(run=lambda options: run_lab(options.arguments))

    check = commands.add_parser("check", help="start ranks, form a group, verify it, stop")
    check.add_argument("-n", type=int, default=2, help="number of ranks (default: 2)")
    check.set_defaults(run=lambda options: run_check(options.n))

    profile = commands.add_parser("profile", help="profiles: where and how ranks are started")
    verbs = profile.add_subparsers(dest="verb", required=True)
    install = verbs.add_parser("install", help="copy a profile to your own, with your settings")
    install.add_argument("name")
    install.add_argument("--from", dest="source", default="", help="the profile to copy (default: the one called NAME)")
    launch.add_options(install)
    install.set_defaults(run=run_install)
    listed = verbs.add_parser("list", help="the profiles that there are")
    listed.set_defaults(run=lambda options: run_list())
    show = verbs.add_parser("show", help="a profile's settings")
    show.add_argument("name")
    show.set_defaults(run=lambda options: run_show(options.name))
    tried = verbs.add_parser("check", help="start it, look for what could go wrong on its hosts, stop it")
    tried.add_argument("name")
    tried.add_argument("-n", type=int)
    launch.add_options(tried)
    tried.set_defaults(run=run_profile_check)

    options = parser.parse_args(argv)
    try:
        return int(options.run(options))
    except KeyboardInterrupt:
        return 130


# -- demo ------------------------------------------------------------------------------------------------------------


def run_demo(output: Path) -> int:
    """Execute the quickstart; leave it as ``.ipynb`` and ``.html`` in ``output`` and print what it says of itself."""
    import nbformat  # type: ignore[import-untyped,unused-ignore]
    from nbclient.exceptions import CellExecutionError

    source = notebooks_folder() / NOTEBOOK
    notebook = nbformat.read(source, as_version=4)
    output.mkdir(parents=True, exist_ok=True)
    executed, page = output / NOTEBOOK, (output / NOTEBOOK).with_suffix(".html")

    cells = sum(cell.cell_type == "code" for cell in notebook.cells)
    done = 0

    def progress(cell: Any, **_: object) -> None:
        nonlocal done
        done += 1
        first = next(iter(cell.source.splitlines()), "")
        print(f"  [{done}/{cells}] {first if not first.startswith('%%') else cell.source.splitlines()[1]}", flush=True)

    print(f"Running {NOTEBOOK} on local ranks ...", flush=True)
    client = notebook_client(notebook, output, timeout=300, on_cell_execute=progress)
    began = time.perf_counter()
    failure: CellExecutionError | None = None
    try:
        # what a kernel has to say besides its cells would go to the terminal of a server
        with open(output / "kernel.log", "wb") as log:
            client.execute(stderr=log)
    except CellExecutionError as error:
        failure = error
    took = time.perf_counter() - began

    nbformat.write(notebook, executed)
    page.write_text(as_page(notebook), encoding="utf-8")
    print(f"\nexecuted notebook  {executed.resolve()}\nweb page           {page.resolve()}")
    if failure is not None:
        print(f"\nA cell failed after {took:.0f} s:\n{failure}", file=sys.stderr)
        return 1
    for text in texts_of(notebook, tag="summary"):
        print(f"\n{text}")
    print(f"\n{cells} cells in {took:.0f} s")
    return 0


def notebook_client(notebook: Any, folder: Path, **options: Any) -> Any:
    """Give nbclient's client, set to execute in ``folder`` with the Python that runs this."""
    from nbclient import NotebookClient
    from traitlets.config import Config

    # Without kernel folders there is one kernel, that of this interpreter: not what somebody installed as python3.
    own_kernel = Config({"KernelSpecManager": {"kernel_dirs": []}})
    resources = {"metadata": {"path": str(folder)}}
    return NotebookClient(notebook, config=own_kernel, resources=resources, store_widget_state=False, **options)


def texts_of(notebook: Any, *, tag: str) -> Iterator[str]:
    """Give the plain text of what the cells with this tag printed or displayed."""
    for cell in notebook.cells:
        if tag in cell.metadata.get("tags", ()):
            for output in cell.get("outputs", ()):
                text = output.text if output.output_type == "stream" else output.get("data", {}).get("text/plain", "")
                if text.strip():
                    yield text.strip()


def as_page(notebook: Any) -> str:
    """Render a notebook as one HTML page that needs nothing from anywhere."""
    from jinja2 import DictLoader
    from nbconvert import HTMLExporter

    exporter = HTMLExporter(extra_loaders=[DictLoader({"offline.html.j2": PAGE})], template_file="offline.html.j2")
    exporter.exclude_input_prompt = exporter.exclude_output_prompt = True
    body, _ = exporter.from_notebook_node(notebook, resources={"metadata": {"name": "nbdist quickstart"}})
    return str(body)


def notebooks_folder() -> Path:
    """Find the notebooks: beside the package in a checkout, inside it when installed."""
    package = Path(__file__).resolve().parent
    for folder in (package.parent / "notebooks", package / "notebooks"):
        if (folder / NOTEBOOK).is_file():
            return folder
    raise SystemExit(f"nbdist: {NOTEBOOK} is not in this installation; clone the repository and run `make demo` there")


# -- lab and check ---------------------------------------------------------------------------------------------------


def run_lab(arguments: Sequence[str]) -> int:
    """Open JupyterLab on the quickstart."""
    folder = notebooks_folder()
    command = [sys.executable, "-m", "jupyter", "lab", f"--ServerApp.root_dir={folder}"]
    if os.geteuid() == 0:
        command.append("--allow-root")  # in a container one is root; the server still listens on loopback, with a token
    return subprocess.call([*command, *arguments, str(folder / NOTEBOOK)])


def run_check(n: int) -> int:
    """Start ``n`` ranks, form and verify a group, stop; print each fact as it is known."""
    import nbdist

    print(f"python {sys.version.split()[0]} · nbdist {nbdist.__version__} · {os.cpu_count()} cores", flush=True)
    try:
        with nbdist.Cluster(n).start() as cluster:
            print(cluster)
            print(cluster.status())
    except nbdist.NbdistError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


# -- profile ---------------------------------------------------------------------------------------------------------


def run_install(options: argparse.Namespace) -> int:
    """Copy a profile to the user's own."""
    from nbdist import NbdistError, profiles

    try:
        folder = profiles.install(options.name, launch.take_options(vars(options)), options.source)
    except NbdistError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{folder}\nStart it with: %cluster start --profile {options.name}")
    return 0


def run_list() -> int:
    """Print each profile with its folder."""
    from nbdist import profiles

    for name, folder in sorted(profiles.known().items()):
        print(f"{name:12} {folder}")
    return 0


def run_show(name: str) -> int:
    """Print a profile's README and settings."""
    from nbdist import NbdistError, profiles

    try:
        print(profiles.describe(name))
    except NbdistError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def run_profile_check(options: argparse.Namespace) -> int:
    """Start a profile's ranks, check their hosts, stop."""
    import nbdist

    settings = launch.take_options(vars(options))
    try:
        with nbdist.Cluster(options.n, profile=options.name, options=settings).start(print) as cluster:
            print(cluster)
            checked = cluster.check()
            print(checked)
    except (nbdist.NbdistError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0 if checked.ok else 1


if __name__ == "__main__":
    sys.exit(main())
