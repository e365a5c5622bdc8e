"""The check at the end of the run sees what it is there to see."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from pathlib import Path

from tests.leaks import SHM, Baseline

TAG = "NBDIST_TEST_LEAK"


def test_process_is_named_with_its_port_until_it_has_ended(tmp_path: Path) -> None:
    value = secrets.token_hex(8)
    baseline = Baseline(TAG, value, tmp_path)
    program = (
        "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); print('up', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program]
    env = {**os.environ, TAG: value}
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        (leak,) = [line for line in baseline.leaks(patience=0) if line.startswith("process")]
        assert f"process {process.pid}," in leak and "listening on [" in leak
        baseline.end_processes()
        process.wait(timeout=5)
    assert not [line for line in baseline.leaks(patience=0) if line.startswith("process")]


def test_same_program_without_the_tag_is_nobodys_leak(tmp_path: Path) -> None:
    baseline = Baseline(TAG, secrets.token_hex(8), tmp_path)
    with subprocess.Popen(["sleep", "60"], env={**os.environ, TAG: "of another run"}) as process:
        assert not [line for line in baseline.leaks(patience=0) if line.startswith("process")]
        process.kill()


def test_port_folder_and_shared_memory_are_named(tmp_path: Path) -> None:
    baseline = Baseline(TAG, secrets.token_hex(8), tmp_path)
    name = f"nbdist-test-{secrets.token_hex(8)}"
    (tmp_path / "nbdist-abc").mkdir()
    (SHM / name).touch()
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            leaks = "\n".join(baseline.leaks(patience=0))
            assert f"port {server.getsockname()[1]}," in leaks
        assert str(tmp_path / "nbdist-abc") in leaks
        assert str(SHM / name) in leaks
    finally:
        (SHM / name).unlink()
