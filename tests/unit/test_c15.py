"""The end-to-end case c15: which exit status a run gets."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "c15"
loader = SourceFileLoader("c15", str(SCRIPT))
spec = importlib.util.spec_from_loader("c15", loader)
assert spec is not None
c15: Any = importlib.util.module_from_spec(spec)
loader.exec_module(c15)


def row(identity: str, status: str = "pass", stage: str = "sft") -> dict[str, str]:
    return {"id": identity, "stage": stage, "status": status, "found": f"found {identity}", "needed": "n"}


@pytest.mark.parametrize(
    ("rows", "stage", "status", "code", "text"),
    [
        ([row("slice"), row("completed"), row("log")], "sft", 0, 0, "PASS: sft, 3 checks"),
        ([row("job-1", stage="shared")], "shared", 0, 0, "PASS: shared, 1 checks"),
        ([row("slice", "skip")], "sft", 0, 77, "SKIP: found slice"),
        ([row("smoke", "skip", "smoke")], "sft", 0, 1, "nothing was run"),
        ([row("completed", "fail")], "sft", 2, 1, "FAIL: completed: found found completed; needed n"),
        ([row("slice", "skip"), row("log", "fail")], "sft", 0, 1, "FAIL: log"),
        ([row("slice", "skip")], "sft", 2, 1, "ansible-playbook ended with 2"),
        ([row("completed")], "sft", 4, 1, "ansible-playbook ended with 4"),
        ([row("slice")], "sft", 0, 1, "nothing was run"),
        ([], "sft", 0, 1, "nothing was run"),
    ],
)
def test_verdict(rows: list[dict[str, str]], stage: str, status: int, code: int, text: str) -> None:
    got, line = c15.verdict({"checks": rows}, stage, status)
    assert got == code
    assert text in line


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({}, "GPU_NAMESPACE is not set"),
        ({"GPU_NAMESPACE": ""}, "GPU_NAMESPACE is not set"),
        (
            {"GPU_NAMESPACE": "x", "DRA_SLICE_MODE": "mps"},
            "DRA_SLICE_MODE is 'mps'; needed is one of mig, shared",
        ),
        ({"GPU_NAMESPACE": "x"}, ""),
        ({"GPU_NAMESPACE": "x", "DRA_SLICE_MODE": ""}, ""),
        ({"GPU_NAMESPACE": "x", "DRA_SLICE_MODE": "shared"}, ""),
    ],
)
def test_what_the_environment_lacks(environment: dict[str, str], reason: str) -> None:
    assert reason in c15.reason_to_skip(environment)
    assert bool(c15.reason_to_skip(environment)) is bool(reason)


def test_the_program_ends_with_77_and_asks_nothing() -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("GPU_NAMESPACE", "DRA_SLICE_MODE")}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (
        77,
        "SKIP: GPU_NAMESPACE is not set; needed is the namespace where the fine-tune may run\n",
    )


def test_arguments_cannot_lead_the_report_astray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last value of a variable counts, so the case's own come after what was given."""
    calls: list[list[str]] = []

    def started(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        return subprocess.CompletedProcess(command, 2)

    monkeypatch.setattr(c15, "ROOT", tmp_path)
    monkeypatch.setattr(c15.subprocess, "run", started)
    monkeypatch.setenv("GPU_NAMESPACE", "mine")
    monkeypatch.delenv("DRA_SLICE_MODE", raising=False)
    assert c15.main(["-e", "gpu_slices_artifacts_dir=/elsewhere"]) == 1
    (command,) = calls
    assert command.index("gpu_slices_artifacts_dir=/elsewhere") < command.index(
        '{"gpu_slices_namespace": "mine"}'
    )
