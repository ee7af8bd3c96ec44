"""The emulated silicon, built once, and nodes made of it."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from silicon_node import REPO, MakeNode, Node


@pytest.fixture(scope="session")
def programs() -> Path:
    """Directory with nvidia-smi, lab-silicon and the library; readable by any user, keyed by the sources."""
    digest = hashlib.sha256()
    for part in ("silicon", "nvml", "nvidia_smi"):
        for source in sorted((REPO / "lab" / part).iterdir()):
            digest.update(source.read_bytes())
    out = Path(tempfile.gettempdir()) / f"gpu-slices-silicon-{os.getuid()}-{digest.hexdigest()[:16]}"
    out.mkdir(mode=0o755, exist_ok=True)
    with (out / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run(
            ["make", "-C", str(REPO / "lab" / "silicon"), f"OUT={out}"],
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture
def make_node(programs: Path) -> Iterator[MakeNode]:
    """Makes nodes: make_node("A30,H200")."""
    made: list[tuple[Node, Path]] = []

    def make(cards: str, *more: str) -> Node:
        home = Path(tempfile.mkdtemp(prefix="gpu-slices-node-"))
        home.chmod(0o755)  # other users' processes are clients too
        node = Node(programs, home)
        made.append((node, home))
        node.init(cards, *more)
        return node

    yield make
    for node, home in made:
        node.stop()
        shutil.rmtree(home)


@pytest.fixture
def a30(make_node: MakeNode) -> Node:
    return make_node("A30")


@pytest.fixture
def h200(make_node: MakeNode) -> Node:
    return make_node("H200")
