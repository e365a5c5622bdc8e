"""The public names: importable one by one, documented, all there at first sight."""

from __future__ import annotations

import importlib.metadata
import inspect

import pytest

import nbdist

NAMES = [name for name in nbdist.__all__ if name != "__version__"]


def test_all_names_are_there_at_first_sight() -> None:
    assert len(set(nbdist.__all__)) == len(nbdist.__all__)
    assert set(nbdist.__all__) <= set(dir(nbdist))


@pytest.mark.parametrize("name", NAMES)
def test_public_name_can_be_imported_and_has_a_docstring(name: str) -> None:
    thing = getattr(nbdist, name)
    doc = inspect.getdoc(thing) or ""
    assert doc.strip(), f"nbdist.{name} has no docstring"
    if inspect.isclass(thing) or inspect.isfunction(thing):
        # a dataclass without a docstring is given its signature as one
        assert not doc.startswith(f"{name}("), f"nbdist.{name} has no docstring"


def test_unknown_name_raises_the_usual_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'nbdist' has no attribute 'Clutser'"):
        nbdist.Clutser  # noqa: B018


def test_version_is_that_of_the_installed_package() -> None:
    assert nbdist.__version__ == importlib.metadata.version("nbdist")
