"""The emulated MPS control daemon, as the DRA driver's deployment uses it."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from silicon_node import Node

PROGRAM = "nvidia-cuda-mps-control"
UUID = "GPU-00000000-0000-0000-0000-000000000000"


class Mps:
    """A control daemon with directories of its own."""

    def __init__(self, node: Node) -> None:
        self.pipes, self.logs = node.home / "pipes", node.home / "logs"
        self.env = {
            **node.env,
            "CUDA_MPS_PIPE_DIRECTORY": str(self.pipes),
            "CUDA_MPS_LOG_DIRECTORY": str(self.logs),
            "CUDA_VISIBLE_DEVICES": UUID,
        }

    def run(self, *args: str, text: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [PROGRAM, *args],
            env=self.env,
            input=text,
            capture_output=True,
            text=True,
            check=False,
            timeout=20,
        )

    def log(self) -> str:
        return (self.logs / "control.log").read_text()


@pytest.fixture
def mps(a30: Node) -> Iterator[Mps]:
    daemon = Mps(a30)
    yield daemon
    daemon.run(text="quit\n")


def test_it_lies_in_the_driver_root_beside_nvidia_smi(a30: Node) -> None:
    program = a30.root / "usr" / "bin" / PROGRAM
    assert program.is_file()
    assert program.stat().st_mode & 0o111


def test_it_starts_takes_settings_and_ends(mps: Mps) -> None:
    assert mps.run("-d").returncode == 0
    assert (mps.pipes / "control").is_socket()
    assert mps.run(text="set_default_active_thread_percentage 30\n").stdout == "30.0\n"
    assert mps.run(text="get_default_active_thread_percentage\n").stdout == "30.0\n"
    assert mps.run(text=f"set_default_device_pinned_mem_limit {UUID} 2048M\n").stdout == ""
    assert mps.run(text=f"get_default_device_pinned_mem_limit {UUID}\n").stdout == "2048M\n"
    assert mps.run(text="get_server_list\n").stdout == ""
    log = mps.log()
    assert f"CUDA_VISIBLE_DEVICES={UUID}" in log
    assert "percentage set to 30.0" in log
    assert f"device {UUID} set to 2048M" in log
    assert mps.run(text="quit\n").returncode == 0
    _gone(mps.pipes / "control")
    done = mps.run(text="get_server_list\n")
    assert (done.returncode, done.stderr) == (1, "Cannot find MPS control daemon process\n")


def test_it_says_that_it_is_emulated(mps: Mps) -> None:
    assert "no real hardware is involved" in mps.run("-h").stdout
    mps.run("-d")
    # It answers only once it has written that.
    mps.run(text="get_server_list\n")
    assert "emulated silicon of the lab: no CUDA client is served" in mps.log()


def test_a_second_one_is_refused(mps: Mps) -> None:
    mps.run("-d")
    second = mps.run("-d")
    assert (second.returncode, second.stderr) == (1, "An instance of this daemon is already running\n")


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("set_default_active_thread_percentage 0", "Invalid percentage: 0"),
        ("set_default_active_thread_percentage 101", "Invalid percentage: 101"),
        ("set_default_active_thread_percentage many", "Invalid percentage: many"),
        (f"set_default_device_pinned_mem_limit {UUID} 0M", "Invalid limit: 0M"),
        (f"set_default_device_pinned_mem_limit {UUID} 2", "Invalid limit: 2"),
        ("make_tea", "Unknown or incomplete command: make_tea"),
        (
            "set_default_device_pinned_mem_limit",
            "Unknown or incomplete command: set_default_device_pinned_mem_limit",
        ),
    ],
)
def test_wrong_orders_are_answered_and_change_nothing(mps: Mps, line: str, answer: str) -> None:
    mps.run("-d")
    assert mps.run(text=line + "\n").stdout == answer + "\n"
    assert mps.run(text="get_default_active_thread_percentage\n").stdout == "100.0\n"
    assert mps.run(text=f"get_default_device_pinned_mem_limit {UUID}\n").stdout == "no limit\n"


def test_an_unknown_option_is_refused(mps: Mps) -> None:
    assert mps.run("--version").returncode == 2


def _gone(path: Path) -> None:
    limit = time.monotonic() + 5
    while path.exists():
        assert time.monotonic() < limit, f"{path} is still there"
        time.sleep(0.05)
