"""Who may import whom: the layers of the package, checked on the source and in a fresh interpreter."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "nbdist"
ENGINE = sorted((PACKAGE / "engine").rglob("*.py"))
KERNEL = sorted(set(PACKAGE.rglob("*.py")) - set(ENGINE))

# on ranks and in the notebook alike
SHARED = {"channel", "errors", "host", "profiles", "ranks", "records", "report", "skew", "wire"}

LIGHT = {"platformdirs", "zmq"}

# From the bottom up: a module imports from its own layer and from those before it, wherever in the file it does so.
LAYERS = (
    {"channel", "launch", "records", "ranks", "skew"},
    {"hangs", "report"},
    {"errors"},
    {"host", "profiles", "runlog", "syntax", "wire"},
    {"exchange", "lines"},
    {"client", "controller", "kept", "launchers", "page", "progress", "runs", "verdicts"},
    {"ipcluster", "output", "processes", "telemetry"},
    {"release", "watch"},
    {"cells", "check", "hosts", "membership", "startup", "status", "values", "world"},
    {"cluster"},
    {"assist", "dashboard"},
    {"magics"},
    {"", "__main__"},
)

# A tensor that the notebook pulls is rebuilt with the torch of the notebook, if it has one.
TORCH_IN_KERNEL = {("wire.py", "_rebuild_tensor")}


class Imports(ast.NodeVisitor):
    """The modules that a file imports, wherever in the file, except for type checkers only."""

    def __init__(self, path: Path) -> None:
        self.found: list[tuple[int, str]] = []
        self._path = path
        self._package = ["nbdist", *path.relative_to(PACKAGE).parent.parts]
        self.visit(ast.parse(path.read_text(), str(path)))

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) not in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        before = len(self.found)
        self.generic_visit(node)
        if (self._path.name, node.name) in TORCH_IN_KERNEL:
            self.found[before:] = [entry for entry in self.found[before:] if entry[1] != "torch"]

    def visit_Import(self, node: ast.Import) -> None:
        self.found += [(node.lineno, alias.name) for alias in node.names]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = self._package[: len(self._package) - node.level + 1] if node.level else []
        module = ".".join([*base, *([node.module] if node.module else [])])
        # `from nbdist import cells` names a module, `from nbdist.cells import run` a function: keep both readings
        self.found += [(node.lineno, f"{module}.{alias.name}") for alias in node.names]


def imports(path: Path) -> Iterator[tuple[str, str]]:
    for line, module in Imports(path).found:
        yield f"{path.relative_to(PACKAGE.parent)}:{line}", module


def is_in(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def layer_of(module: str) -> int | None:
    parts = module.split(".")
    name = parts[1] if len(parts) > 1 else ""
    for index, layer in enumerate(LAYERS):
        if name in layer:
            return index
    return None  # a public name of the package (`from nbdist import Cluster`), or the engine side


def test_kernel_side_never_imports_torch_or_the_engine_side() -> None:
    wrong = [
        f"{where} imports {module}"
        for path in KERNEL
        for where, module in imports(path)
        if is_in(module, "torch", "nbdist.engine")
    ]
    assert not wrong, "\n".join(wrong)


def test_engine_side_imports_nothing_of_the_kernel_side() -> None:
    front_end = (
        "anywidget",
        "bokeh",
        "ipywidgets",
        "jupyterlab",
        "pandas",
        "ipyparallel.client",
        "ipyparallel.cluster",
    )
    wrong = []
    for path in ENGINE:
        for where, module in imports(path):
            ours = is_in(module, "nbdist") and module != "nbdist"
            allowed = ("nbdist.engine", "nbdist.__version__", *(f"nbdist.{name}" for name in SHARED))
            if is_in(module, *front_end) or (ours and not is_in(module, *allowed)):
                wrong.append(f"{where} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_layers_import_downwards_only() -> None:
    wrong = []
    for path in KERNEL:
        here = ".".join(["nbdist", *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__")
        own = layer_of(here)
        assert own is not None, f"{here} has no layer: add it to LAYERS"
        for where, module in imports(path):
            other = layer_of(module) if is_in(module, "nbdist") and module != "nbdist" else None
            if other is not None and other > own:
                wrong.append(f"{where} imports {module}, a layer above its own")
    assert not wrong, "\n".join(wrong)


def test_what_both_sides_import_needs_neither_torch_nor_the_front_end() -> None:
    wrong = [
        f"{where} imports {module}"
        for name in SHARED
        for where, module in imports(PACKAGE / f"{name}.py")
        if module.split(".")[0] not in {*sys.stdlib_module_names, "nbdist", "cloudpickle", "IPython", *LIGHT}
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("source", "absent"),
    [
        (
            "import nbdist; nbdist.load_ipython_extension",
            {"torch", "bokeh", "ipywidgets", "anywidget", "ipyparallel", "pandas", "IPython"},
        ),
        (
            "from IPython.core.interactiveshell import InteractiveShell\n"
            "InteractiveShell().run_line_magic('load_ext', 'nbdist')",
            {"torch", "bokeh"},
        ),
        ("import nbdist; nbdist.Cluster, nbdist.Dashboard", {"torch"}),
    ],
    ids=["import", "load_ext", "cluster and dashboard"],
)
def test_what_is_not_needed_yet_is_not_imported(source: str, absent: set[str], tmp_path: Path) -> None:
    program = f"import sys\n{source}\nprint(*sorted({absent!r} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "", f"imported: {ran.stdout}"


def test_ranks_send_each_other_no_pickled_objects() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)}:{node.lineno} {node.attr}"
        for path in ENGINE
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and re.fullmatch(r"\w+_object(_list)?", node.attr)
        if ast.unparse(node.value) in ("dist", "c10d", "torch.distributed")
    ]
    assert not wrong, "\n".join(wrong)
