"""The script in the callers' pods, with NVML and the CUDA driver played by plain objects."""

from __future__ import annotations

import ctypes
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from gpu_slices import judges
from gpu_slices.resource_slices import merge_slices

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests/fixtures"
for folder in ("roles/smoke/files", "roles/callers/files"):
    sys.path.insert(0, str(ROOT / folder))

caller: Any = importlib.import_module("caller")
device_error: Any = importlib.import_module("slice_device").DeviceError

MIG = {
    "kind": "mig",
    "name": "NVIDIA A30 MIG 1g.6gb",
    "uuid": "MIG-1",
    "parent_uuid": "GPU-1",
    "memory_bytes": 5952 * 2**20,
}


class Library:
    """A CUDA driver with one device whose memory is host memory."""

    def __init__(self, count: int = 1, flip: bool = False, **codes: int) -> None:
        self.count, self.flip, self.codes = count, flip, codes
        self.calls: list[str] = []
        self.memory: Any = None

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name in self.codes:
                return self.codes[name]
            getattr(self, f"do_{name}", lambda *_: None)(*arguments)
            return 0

        if name.startswith("do_"):
            raise AttributeError(name)
        return call

    def do_cuGetErrorString(self, _code: int, text: Any) -> None:
        text._obj.value = b"out of memory"

    def do_cuDeviceGetCount(self, count: Any) -> None:
        count._obj.value = self.count

    def do_cuDeviceTotalMem_v2(self, total: Any, _device: Any) -> None:
        total._obj.value = 5900 * 2**20

    def do_cuMemsetD32_v2(self, _address: Any, value: Any, words: Any) -> None:
        self.memory = (value.value & 0xFFFFFFFF).to_bytes(4, sys.byteorder) * words.value

    def do_cuMemcpyDtoH_v2(self, back: Any, _address: Any, size: Any) -> None:
        data = bytearray(self.memory)
        data[-1] ^= self.flip
        ctypes.memmove(back, bytes(data), size.value)


def cuda(library: Any) -> Any:
    made = caller.Cuda("no such library")
    made._library = library
    return made


def test_without_the_driver_nothing_is_claimed_of_cuda() -> None:
    assert caller.Cuda("no such library").prove() == {}


def test_memory_is_used_and_given_back() -> None:
    library = Library()
    assert cuda(library).prove() == {"memory_bytes": 5900 * 2**20}
    assert library.calls.count("cuMemFree_v2") == 1
    assert library.calls[-1] == "cuDevicePrimaryCtxRelease_v2"


@pytest.mark.parametrize(
    ("library", "fault"),
    [
        (Library(count=0), "CUDA shows 0 devices"),
        (Library(count=2), "CUDA shows 2 devices"),
        (Library(flip=True), "not what was read back"),
        (Library(cuInit=100), r"cuInit: out of memory \(code 100\)"),
        (Library(cuMemAlloc_v2=2), r"cuMemAlloc_v2: out of memory \(code 2\)"),
    ],
)
def test_what_goes_wrong_is_said(library: Any, fault: str) -> None:
    with pytest.raises(device_error, match=fault):
        cuda(library).prove()
    if "cuDevicePrimaryCtxRetain" in library.calls:
        assert library.calls[-1] == "cuDevicePrimaryCtxRelease_v2"


class FakeNvml:
    """What NVML says; ``found`` is set by the tests."""

    found: list[dict[str, Any]] = []  # noqa: RUF012 - one list for the test at hand
    closed = 0

    def devices(self) -> list[dict[str, Any]]:
        return self.found

    def driver_version(self) -> str:
        return "580.1"

    def close(self) -> None:
        FakeNvml.closed += 1


def run(monkeypatch: Any, capsys: Any, devices: list[dict[str, Any]]) -> tuple[int, list[str]]:
    monkeypatch.setattr(caller, "Nvml", FakeNvml)
    monkeypatch.setattr(caller.Cuda, "prove", lambda _self: {})
    FakeNvml.found = devices
    code = caller.main(["--caller=job", "--profile=1g.6gb"])
    return code, capsys.readouterr().out.splitlines()


def test_the_last_line_names_the_caller(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    code, lines = run(monkeypatch, capsys, [MIG])
    assert (code, lines[0], lines[-1]) == (0, "caller: job, completion index 1", "slice claimed by job: OK")
    (proof,) = [json.loads(line[8:]) for line in lines if line.startswith("[proof] ")]
    assert proof["devices"] == [MIG]
    assert proof["backend"] == "cpu"


@pytest.mark.parametrize("devices", [[], [MIG, MIG], [{**MIG, "name": "NVIDIA A30 MIG 2g.12gb"}]])
def test_any_other_device_fails(monkeypatch: Any, capsys: Any, devices: Any) -> None:
    closed = FakeNvml.closed
    code, lines = run(monkeypatch, capsys, devices)
    assert code == 1
    assert lines[-1].startswith("slice claimed by job: FAILED: found ")
    assert FakeNvml.closed == closed + 1


def test_a_pod_without_a_device_fails(capsys: Any) -> None:
    assert caller.main(["--caller=pod"]) == 1
    assert "libnvidia-ml.so.1 cannot be loaded" in capsys.readouterr().out


def test_what_a_real_gpu_printed_is_judged_by_what_the_real_driver_published() -> None:
    """The script on a real H200, without torch: the CUDA driver alone satisfies a judge that wants CUDA."""
    log = (FIXTURES / "logs/caller-h200-cuda.txt").read_text()
    published = yaml.safe_load((FIXTURES / "resourceslices/h200-real-full.yaml").read_text())
    (device,) = merge_slices(published.get("items", [published]))["devices"]
    judge = judges.WORKLOAD["device"]
    checks = judge(log, [device], True, {"ok": "slice claimed by pod: OK"})
    assert [check["id"] for check in checks if check["status"] != "pass"] == []
    assert next(c for c in checks if c["id"] == "backend")["found"].startswith("on cuda, which counts")
    assert any(
        check["status"] == "fail" for check in judge(log, [device], True, {"ok": "slice claimed by job: OK"})
    )
    without = log.replace('"backend": "cuda"', '"backend": "cpu"')
    failing = [
        c["id"] for c in judge(without, [device], True, {"ok": "slice claimed by pod: OK"}) if c["fix"]
    ]
    assert failing == ["backend"]
