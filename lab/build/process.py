"""Run the outside programs that the builder needs, so that none outlives it.

Every child is started through `setpriv --pdeathsig KILL`: when the builder is killed, even by
SIGKILL, the kernel ends its children. Those that make mounts or daemons run in namespaces of their own,
which the kernel takes down with their first process.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

TAIL_LINES = 15

# A private mount and process namespace: mounts made inside are unseen outside and vanish with it.
NAMESPACES = (
    "unshare",
    "--mount",
    "--pid",
    "--fork",
    "--mount-proc",
    "--kill-child",
    "--propagation",
    "private",
)


class BuildError(Exception):
    """A step failed; the text says what and shows the end of its output."""


class Children:
    """The running children, so that an interrupted builder can end exactly those."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopping = False

    def add(self, child: subprocess.Popen[bytes]) -> None:
        """Remember a child; one that comes while everything is being stopped is killed at once."""
        with self._lock:
            self._running.add(child)
            if self._stopping:
                child.kill()

    def remove(self, child: subprocess.Popen[bytes]) -> None:
        """Forget a child that has ended."""
        with self._lock:
            self._running.discard(child)

    def stop(self) -> None:
        """Kill what is running and whatever is started later."""
        with self._lock:
            self._stopping = True
            for child in self._running:
                child.kill()

    def allow(self) -> None:
        """Let children be started again, once those that were stopped have been waited for."""
        with self._lock:
            self._stopping = False


CHILDREN = Children()


def run(
    argv: Sequence[str],
    log: Path,
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: Path | None = None,
) -> None:
    """Run a program, its output appended to `log`; raise BuildError when it fails."""
    with log.open("ab") as sink:
        sink.write(f"$ {' '.join(argv)}\n".encode())
        sink.flush()
        with (stdin or Path("/dev/null")).open("rb") as source:
            child = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *argv],
                cwd=cwd,
                env=None if env is None else dict(env),
                stdin=source,
                stdout=sink,
                stderr=subprocess.STDOUT,
            )
        CHILDREN.add(child)
        try:
            status = child.wait()
        finally:
            CHILDREN.remove(child)
    if status:
        raise BuildError(f"`{argv[0]}` ended with status {status}:\n{tail(log)}")


def output(argv: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """What a short program printed, without the closing newline; raise BuildError when it fails."""
    done = subprocess.run(
        list(argv),
        cwd=cwd,
        env=None if env is None else dict(env),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise BuildError(f"`{' '.join(argv)}` ended with status {done.returncode}:\n{done.stderr.strip()}")
    return done.stdout.strip()


def tail(log: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log, indented for a message."""
    text = log.read_text(errors="replace").splitlines()
    return "\n".join(f"    {line}" for line in text[-lines:])
