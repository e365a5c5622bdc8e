"""Copies of data on the node's own disk: made once, by one rank, whole or not at all."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import time

import pytest

from nbdist.engine.loading.cache import local_cache


@pytest.fixture
def data(tmp_path):
    source = tmp_path / "shared" / "data"
    (source / "train").mkdir(parents=True)
    (source / "train" / "0.txt").write_text("zero")
    (source / "1.bin").write_bytes(b"\x01" * 1000)
    return source


def test_a_folder_is_copied_once_and_again_when_it_changes(data, tmp_path):
    first = local_cache(data, folder=tmp_path / "cache")
    assert (first / "train" / "0.txt").read_text() == "zero"
    stamp = (first / "1.bin").stat().st_ino
    assert local_cache(data, folder=tmp_path / "cache") == first
    assert (first / "1.bin").stat().st_ino == stamp
    (data / "train" / "0.txt").write_text("another")
    second = local_cache(data, folder=tmp_path / "cache")
    assert second != first
    assert (second / "train" / "0.txt").read_text() == "another"


def test_a_file_keeps_its_name(data, tmp_path):
    copy = local_cache(data / "1.bin", folder=tmp_path / "cache")
    assert copy.name.endswith("-1.bin")
    assert copy.read_bytes() == b"\x01" * 1000


def _fetch_slowly(folder, log, results):
    def fetch(target):
        with open(log, "a") as file:
            file.write("fetched\n")
        time.sleep(0.3)
        target.write_text("data")

    results.put(local_cache("https://example.org/data", folder=folder, fetch=fetch).read_text())


def test_the_ranks_of_a_node_fetch_once_and_wait_for_it(tmp_path):
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    log = tmp_path / "log"
    workers = [context.Process(target=_fetch_slowly, args=(tmp_path / "cache", log, results)) for _ in range(4)]
    for worker in workers:
        worker.start()
    assert [results.get(timeout=20) for _ in workers] == ["data"] * 4
    for worker in workers:
        worker.join()
    assert log.read_text() == "fetched\n"


def test_a_copy_that_was_cut_off_is_made_anew(data, tmp_path):
    kept = tmp_path / "cache"
    target = local_cache(data, folder=kept)
    partial = target.with_name(f"{target.name}.4711.part")
    target.rename(partial)
    assert (local_cache(data, folder=kept) / "1.bin").exists()
    assert not partial.exists()


def test_what_fails_leaves_nothing_and_can_be_tried_again(tmp_path):
    def broken(target):
        target.write_text("half")
        raise ConnectionError("the network is down")

    with pytest.raises(ConnectionError):
        local_cache("x", folder=tmp_path, fetch=broken)
    assert [name for name in os.listdir(tmp_path) if not name.endswith(".lock")] == []
    assert local_cache("x", folder=tmp_path, fetch=lambda target: target.write_text("whole")).read_text() == "whole"


def test_too_little_space_is_told_with_both_numbers(data, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 100))
    with pytest.raises(OSError, match=r"needs .* GB, .*cache has 1e-07 GB free"):
        local_cache(data, folder=tmp_path / "cache")


def test_a_missing_source_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"No .*nothing on this node"):
        local_cache(tmp_path / "nothing", folder=tmp_path / "cache")


def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 4242)
    with pytest.raises(PermissionError, match="belongs to another user"):
        local_cache("x", folder=tmp_path, fetch=lambda target: None)
