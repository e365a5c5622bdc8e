"""A private JupyterLab or Notebook 7 server, and a page of it driven in headless Chromium."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import nbformat

ROOT = Path(__file__).parents[2]
CHROME_FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking")
CURRENT = "window.jupyterapp.shell.currentWidget"


@dataclass(frozen=True)
class Server:
    url: str
    token: str
    root: Path
    app: str


@contextmanager
def serve(folder: Path, app: str = "lab") -> Iterator[Server]:
    """Run a server over `folder`; it and its kernels are gone afterwards."""
    root = folder / "notebooks"
    root.mkdir()
    _settings(folder / "settings")
    port, token = _free_port(), secrets.token_hex(8)
    _kernels(folder / "jupyter")
    environ = {
        **os.environ,
        "JUPYTER_PATH": str(folder / "jupyter"),
        "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }
    expose = "--expose-app-in-browser" if app == "lab" else "--JupyterNotebookApp.expose_app_in_browser=True"
    command = [
        *(sys.executable, "-m", "jupyter", app, "--no-browser", "--ip=127.0.0.1", f"--port={port}"),
        *("--allow-root", "--ServerApp.port_retries=0", f"--IdentityProvider.token={token}"),
        *(f"--ServerApp.root_dir={root}", "--ServerApp.log_level=WARN", expose),
    ]
    with open(folder / "server.log", "wb") as log:
        process = subprocess.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT, cwd=root)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_for(f"{url}/api/status?token={token}", process, folder / "server.log")
        yield Server(url, token, root, app)
    finally:
        process.terminate()  # once: the server ends its kernels
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Page:
    """One notebook, opened in a browser context of its own."""

    def __init__(self, browser, server: Server, *, dark: bool = False) -> None:
        self.server = server
        self.context = browser.new_context(viewport={"width": 1280, "height": 900})
        self.page = self.context.new_page()
        self.errors: list[str] = []
        self.elsewhere: list[str] = []  # requests to any other host
        ours = (server.url, server.url.replace("http", "ws"), "data:", "blob:")
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda r: None if r.url.startswith(ours) else self.elsewhere.append(r.url))
        self.name = ""

    def open(self, *cells: str, name: str | None = None, kernel: str = "python3") -> Page:
        """Write a notebook with these cells, open it, wait for its kernel."""
        self.name = name or f"{secrets.token_hex(4)}.ipynb"
        if cells:
            write_notebook(self.server.root / self.name, *cells, kernel=kernel)
        route = "doc/tree" if self.server.app == "lab" else "notebooks"
        self.page.goto(f"{self.server.url}/{route}/{self.name}?token={self.server.token}")
        self.wait_ready()
        return self

    def wait_ready(self) -> None:
        """Until the notebook is there and its kernel idle."""
        self.page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
        self.page.wait_for_function(
            f"() => {{ const k = window.jupyterapp && {CURRENT}?.sessionContext?.session?.kernel;"
            " return k && k.status === 'idle' && k.connectionStatus === 'connected' }",
            timeout=60_000,
        )

    def reload(self) -> None:
        self.page.reload()
        self.page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)

    def command(self, name: str, **args: object) -> None:
        """Run a command of the application, to its end."""
        self.page.evaluate("async ([n, a]) => { await window.jupyterapp.commands.execute(n, a) }", [name, args])

    def run(self, *indices: int) -> None:
        """Run these cells one after the other, each to its end."""
        for index in indices:
            self.start(index)
            self.wait_cell(index)

    def start(self, index: int) -> None:
        """Run a cell, and come back at once."""
        self.page.evaluate(
            f"i => {{ const nb = {CURRENT}.content; nb.activeCellIndex = i; nb.deselectAll();"
            " nb.widgets[i].model.executionCount = null;"
            " window.jupyterapp.commands.execute('notebook:run-cell') }",
            index,
        )

    def wait_cell(self, index: int, timeout: float = 60) -> None:
        """Until a cell's reply came. A kernel's status would not do: a button's message sets it to idle too."""
        self.page.wait_for_function(
            f"i => {CURRENT}.content.widgets[i].model.executionCount != null", arg=index, timeout=timeout * 1000
        )

    def outputs(self, index: int):
        """The outputs of a cell, from the notebook's model."""
        return self.page.evaluate(f"i => {CURRENT}.content.widgets[i].model.toJSON().outputs", index)

    def text(self, index: int) -> str:
        return "".join("".join(out.get("text", "")) for out in self.outputs(index))

    def save(self):
        """Save, and give the notebook as it is on disk."""
        self.command("docmanager:save")
        return nbformat.read(self.server.root / self.name, as_version=4)

    def panels(self):
        """What the panels of this page say of themselves."""
        return self.page.evaluate("() => window.__nbdist ? Object.values(window.__nbdist.panels) : []")

    def wait_panel(self, condition: str, timeout: float = 30):
        """Until a JavaScript condition on `p`, a panel, holds; gives the panel."""
        self.page.wait_for_function(
            f"() => Object.values(window.__nbdist?.panels ?? {{}}).some(p => {condition})", timeout=timeout * 1000
        )
        return self.page.evaluate(f"() => Object.values(window.__nbdist.panels).find(p => {condition})")

    def close(self) -> None:
        """End the notebook's kernel and the page."""
        self.page.evaluate(f"async () => {{ await {CURRENT}?.sessionContext?.shutdown() }}")
        self.context.close()


def write_notebook(path: Path, *cells: str, kernel: str = "python3") -> None:
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(cell.strip("\n")) for cell in cells],
        metadata={"kernelspec": {"name": kernel, "display_name": kernel, "language": "python"}},
    )
    nbformat.write(notebook, path)


def chromium() -> str | None:
    """Debian's browser, or None for Playwright's own."""
    return os.environ.get("CHROMIUM") or shutil.which("chromium")


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _settings(folder: Path) -> None:
    for plugin, name, values in (
        ("apputils-extension", "notification", {"fetchNews": "false", "checkForUpdates": False}),
        ("notebook-extension", "tracker", {"windowingMode": "none"}),  # cells out of sight have no DOM otherwise
        ("docmanager-extension", "plugin", {"autosave": False}),
    ):
        path = folder / "@jupyterlab" / plugin / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))


def other_ipykernels() -> list[str]:
    """Further versions to test with: folders from `pip install --no-deps --target DIR ipykernel==…`, by variable."""
    return list(filter(None, os.environ.get("NBDIST_TEST_IPYKERNELS", "").split(os.pathsep)))


def _kernels(folder: Path) -> None:
    for path in other_ipykernels():
        spec = {
            "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
            "display_name": f"ipykernel {Path(path).name}",
            "language": "python",
            "env": {"PYTHONPATH": os.pathsep.join((path, str(ROOT)))},
        }
        file = folder / "kernels" / f"ipykernel-{Path(path).name}" / "kernel.json"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(spec))


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path, timeout: float = 60) -> None:
    deadline = time.monotonic() + timeout
    while True:
        try:
            urllib.request.urlopen(url, timeout=2).close()
            return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"The server did not come up:\n{log.read_text()}") from None
            time.sleep(0.1)
