"""A node with emulated silicon, for the tests beside this file."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
FIXTURES = REPO / "tests" / "fixtures"


class Node:
    """One node's silicon: a driver root in a directory of its own."""

    def __init__(self, programs: Path, home: Path) -> None:
        self.programs = programs
        self.home = home
        self.root = home / "root"
        self.state = self.root / "run" / "nvidia-persistenced" / "socket"
        self.env = {
            "PATH": f"{programs}:/usr/sbin:/usr/bin:/sbin:/bin",
            "LD_LIBRARY_PATH": str(programs),
            "LAB_SILICON_ROOT": str(self.root),
            "LC_ALL": "C.UTF-8",
            "HOME": str(home),
        }
        self.children: list[subprocess.Popen[str]] = []

    def silicon(self, *args: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run lab-silicon."""
        done = subprocess.run(
            ["lab-silicon", *args], env=self.env, capture_output=True, text=True, check=False
        )
        assert not check or done.returncode == 0, done.stderr
        return done

    def init(self, cards: str, *more: str) -> None:
        self.silicon("init", "--cards", cards, "--boot-id", "boot-1", "--seed", "test", *more)

    def show(self) -> dict[str, Any]:
        shown: dict[str, Any] = json.loads(self.silicon("show", "--json").stdout)
        return shown

    def smi(self, *args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run nvidia-smi; everything it says goes to stdout."""
        done = subprocess.run(
            ["nvidia-smi", *args], env=env or self.env, capture_output=True, text=True, check=False
        )
        assert done.stderr == ""
        return done

    def ok(self, *args: str) -> str:
        """nvidia-smi that must succeed; its output."""
        done = self.smi(*args)
        assert done.returncode == 0, done.stdout
        return done.stdout

    def mode(self, gpu: int = 0) -> tuple[str, str]:
        query = "--query-gpu=mig.mode.current,mig.mode.pending"
        current, pending = self.ok("-i", str(gpu), query, "--format=csv,noheader").strip().split(", ")
        return current, pending

    def mig_lines(self) -> list[str]:
        return [line for line in self.ok("-L").splitlines() if line.startswith("  MIG ")]

    def popen(self, argv: list[str], env: dict[str, str] | None = None, **how: Any) -> subprocess.Popen[str]:
        child = subprocess.Popen(argv, env=env or self.env, stdout=subprocess.PIPE, text=True, **how)
        self.children.append(child)
        return child

    def hold(self, *args: str, env: dict[str, str] | None = None, **how: Any) -> subprocess.Popen[str]:
        """A compute process; returns once it holds."""
        child = self.popen(["lab-silicon", "hold", *args], env, **how)
        assert child.stdout is not None
        assert child.stdout.readline().startswith("held by pid")
        return child

    def python(self, script: str, env: dict[str, str] | None = None) -> str:
        """Run a Python script with nvidia-ml-py over the emulated library; its output."""
        done = subprocess.run(
            [sys.executable, "-c", script], env=env or self.env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def pod(self, name: str, *nodes: str) -> dict[str, str]:
        """Environment of a pod that was given these device nodes, such as "nvidia0"."""
        dev = self.home / name
        for node in nodes:
            (dev / node).parent.mkdir(parents=True, exist_ok=True)
            (dev / node).touch()
        dev.mkdir(exist_ok=True)
        env = {key: value for key, value in self.env.items() if key != "LAB_SILICON_ROOT"}
        return {**env, "LAB_SILICON_STATE": str(self.state), "LAB_SILICON_DEV": str(dev)}

    def stop(self) -> None:
        for child in self.children:
            if child.poll() is None:
                child.kill()
            child.wait()
            if child.stdout:
                child.stdout.close()


MakeNode = Callable[..., Node]
