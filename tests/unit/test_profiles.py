"""Where profiles and logs are."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbdist import profiles
from nbdist.errors import ClusterError


@pytest.fixture(autouse=True)
def ask_anew() -> Iterator[None]:
    profiles.state_dir.cache_clear()
    yield
    profiles.state_dir.cache_clear()


def test_the_profile_of_one_machine_is_the_default() -> None:
    assert profiles.locate(None) == profiles.locate("local")
    assert (profiles.locate("local") / "ipcluster_config.py").is_file()


def test_a_folder_is_a_profile(tmp_path: Path) -> None:
    assert profiles.locate(tmp_path) == tmp_path


def test_an_unknown_profile_names_those_that_there_are() -> None:
    with pytest.raises(ClusterError, match=r"No profile 'locla'\. There are: .*local.*; or give a folder\."):
        profiles.locate("locla")


def test_logs_lie_in_a_private_folder_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBDIST_HOME", str(tmp_path / "home"))
    folder = profiles.state_dir(tmp_path / "nbdist-abc")
    assert folder.parent == tmp_path / "home"
    assert folder.name.endswith("-abc")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_home_that_cannot_be_written_leaves_logs_in_the_clusters_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NBDIST_HOME", "/proc/nowhere")
    assert profiles.state_dir(tmp_path) == tmp_path
