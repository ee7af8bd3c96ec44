"""The script of the isolation pods, as far as it needs no GPU: what it tries, and what it makes of it."""

from __future__ import annotations

import errno
import importlib
import json
import os
import stat
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "roles/smoke/files"
sys.path.insert(0, str(FOLDER))
script: Any = importlib.import_module("isolation")
MINE = [
    {"path": "/dev/nvidia-caps/nvidia-cap30", "major": 236, "minor": 30},
    {"path": "/dev/nvidia0", "major": 195, "minor": 0},
    {"path": "/dev/nvidiactl", "major": 195, "minor": 255},
]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-B", str(FOLDER / "isolation.py"), *arguments],
        env={"PATH": "/nonexistent", "LD_LIBRARY_PATH": "", **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def proof(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    line = next(line for line in done.stdout.splitlines() if line.startswith("[proof] "))
    return dict(json.loads(line[len("[proof] ") :]))


def test_without_a_device_the_bare_role_sees_none(tmp_path: Path) -> None:
    done = run("bare", str(tmp_path / "seen.json"), NVIDIA_VISIBLE_DEVICES="void")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == script.DONE
    seen = proof(done)
    assert (seen["nodes"], seen["nvml"]["devices"], seen["smi"]["listed"], seen["cuda"]["count"]) == (
        [],
        [],
        [],
        0,
    )
    assert seen["visible_devices"] == "void"
    assert json.loads((tmp_path / "seen.json").read_text()) == seen


@pytest.mark.parametrize("arguments", [(), ("root",), ("neighbour",), ("neighbour", "--"), ("slice", "long")])
def test_what_cannot_be_tried_is_a_failure(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith("isolation attempts: FAILED: ")


def test_the_neighbour_becomes_its_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys\nprint('trained', sys.argv[1:])\nsys.exit(3)\n")
    done = run("neighbour", "--", str(tmp_path / "train.py"), "--min-seconds=1")
    assert done.returncode == 3
    assert done.stdout.splitlines()[-1] == "trained ['--min-seconds=1']"
    assert proof(done) == {"nodes": []}


def test_only_character_devices_count(tmp_path: Path) -> None:
    (tmp_path / "nvidia-caps").mkdir()
    (tmp_path / "nvidia0").touch()
    assert script.device_nodes(str(tmp_path)) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="makes device nodes")
def test_device_nodes_with_their_numbers(tmp_path: Path) -> None:
    (tmp_path / "nvidia-caps").mkdir()
    try:
        os.mknod(tmp_path / "nvidia0", stat.S_IFCHR | 0o600, os.makedev(195, 0))
        os.mknod(tmp_path / "nvidia-caps/nvidia-cap30", stat.S_IFCHR | 0o600, os.makedev(236, 30))
    except PermissionError:
        pytest.skip("this container may not make device nodes")
    found = script.device_nodes(str(tmp_path))
    assert [(Path(n["path"]).name, n["major"], n["minor"]) for n in found] == [
        ("nvidia-cap30", 236, 30),
        ("nvidia0", 195, 0),
    ]
    assert len(script.own(found, "cap")) == len(script.own(found, "gpu")) == 1


def test_everything_foreign_is_tried_and_nothing_of_ones_own() -> None:
    numbers = script.foreign(MINE)
    assert len(numbers) == len(script.CAP_MINORS) - 1 + len(script.GPU_MINORS) - 1
    assert (236, 30) not in numbers.values()
    assert (195, 0) not in numbers.values()
    # The capabilities of a neighbour on the same GPU, the configuration of MIG, and the last slice of GPU 15.
    assert {(236, 39), (236, 1), (236, 2162), (195, 1)} <= set(numbers.values())


def test_without_a_capability_of_its_own_only_gpus_can_be_tried() -> None:
    assert {major for major, _ in script.foreign([]).values()} == {195}


def test_paths_that_are_not_there(tmp_path: Path) -> None:
    tried = script.by_path([], str(tmp_path))
    assert tried["answers"] == {"ENOENT": len(script.CAP_MINORS) + len(script.GPU_MINORS)}
    assert tried["reached"] == []
    (tmp_path / "nvidia7").touch()
    assert script.by_path([], str(tmp_path))["reached"] == [f"{tmp_path}/nvidia7: OK"]


@pytest.mark.parametrize(
    ("made", "opened", "answer"),
    [
        (errno.EPERM, 0, "mknod EPERM"),
        (errno.EACCES, 0, "mknod EACCES"),
        (errno.EROFS, 0, "mknod EROFS"),
        (0, errno.EPERM, "EPERM"),
        (0, errno.ENXIO, "ENXIO"),
        (0, errno.EACCES, "EACCES"),
        (0, 0, "OK"),
    ],
)
def test_only_a_refusal_counts_as_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, made: int, opened: int, answer: str
) -> None:
    def mknod(path: str, mode: int, _device: int) -> None:
        assert stat.S_ISCHR(mode)
        if made:
            raise OSError(made, os.strerror(made))
        Path(path).write_text("")

    def opening(_path: str, _flags: int) -> int:
        if opened:
            raise OSError(opened, os.strerror(opened))
        return os.dup(0)

    monkeypatch.setattr(script, "GPU_MINORS", range(2))
    monkeypatch.setattr(script, "CAP_MINORS", range(30, 32))
    monkeypatch.setattr(script.os, "mknod", mknod)
    monkeypatch.setattr(script, "open_node", lambda path: script.answer(lambda: os.close(opening(path, 0))))
    tried = script.by_mknod(MINE, str(tmp_path))
    assert tried["answers"] == {answer: 2}
    refused = answer in {"EPERM", "mknod EPERM", "mknod EACCES"}
    assert tried["reached"] == ([] if refused else [f"cap 31: {answer}", f"gpu 1: {answer}"])
    assert tried["control"] == {node["path"]: answer for node in MINE}
    assert list(tmp_path.iterdir()) == []


class Torch:
    """A torch whose device has room for some pieces."""

    uint8 = "uint8"

    def __init__(self, total: int, room: int, kind: type[Exception] = RuntimeError) -> None:
        self.room, self.kind, self.emptied = room, kind, False
        properties = types.SimpleNamespace(total_memory=total)
        self.cuda = types.SimpleNamespace(get_device_properties=lambda _: properties, empty_cache=self._empty)

    def _empty(self) -> None:
        self.emptied = True

    def empty(self, size: int, dtype: str, device: str) -> bytes:
        assert (dtype, device) == ("uint8", "cuda")
        if self.room < size:
            raise self.kind("CUDA out of memory. Tried to allocate 64.00 MiB.\nmore")
        self.room -= size
        return b""


class OutOfMemoryError(RuntimeError):
    """As torch names it."""


def test_allocation_until_it_is_refused() -> None:
    torch = Torch(1000, 950, OutOfMemoryError)
    assert script.over_allocate(torch, 100, hold=0) == {
        "got_bytes": 900,
        "error": "OutOfMemoryError: CUDA out of memory. Tried to allocate 64.00 MiB.",
        "total_bytes": 1000,
    }
    assert torch.emptied


def test_an_allocation_that_is_never_refused_ends_all_the_same() -> None:
    assert script.over_allocate(Torch(1000, 10**9), 100, hold=0) == {
        "got_bytes": 2000,
        "error": "",
        "total_bytes": 1000,
    }


def rounds(monkeypatch: pytest.MonkeyPatch, answers: list[dict[str, Any]]) -> dict[str, Any]:
    """What attempts() makes of these rounds."""
    base = {
        "nodes": MINE,
        "path": {"tried": 1, "answers": {"ENOENT": 1}, "reached": []},
        "mknod": {
            "tried": 1,
            "answers": {"EPERM": 1},
            "reached": [],
            "folder": "/dev",
            "control": {"x": "OK"},
        },
        "nvml": {"loaded": True, "devices": [], "error": ""},
    }
    left = iter(answers)
    clock = iter(range(1000))
    monkeypatch.setattr(script, "attempt", lambda _torch: {**base, **next(left), "span": [1.0, 2.0]})
    monkeypatch.setattr(script.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(script.time, "sleep", lambda _seconds: None)
    return dict(script.attempts(str(len(answers) - 0.5)))


def test_rounds_that_are_all_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = rounds(monkeypatch, [{}, {}, {}])
    assert (len(seen["spans"]), seen["differing"]) == (3, 0)


def test_a_round_that_reaches_something_is_the_one_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    hole = {"path": {"tried": 1, "answers": {"OK": 1}, "reached": ["/dev/nvidia1: OK"]}}
    seen = rounds(monkeypatch, [{}, hole, {}])
    assert seen["differing"] >= 1
    assert seen["path"]["reached"] == ["/dev/nvidia1: OK"]


def test_the_last_line_is_the_one_that_the_judges_wait_for() -> None:
    from gpu_slices import isolation  # noqa: PLC0415

    assert script.DONE == isolation.DONE
