"""The scripts that run in the pods, as far as they need neither torch nor a GPU; running them proves more."""

from __future__ import annotations

import ctypes
import importlib
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
for folder in ("roles/smoke/files", "roles/sft/files"):
    sys.path.insert(0, str(ROOT / folder))

slice_device: Any = importlib.import_module("slice_device")
smoke: Any = importlib.import_module("smoke")
train_lora: Any = importlib.import_module("train_lora")

MIG = {
    "kind": "mig",
    "name": "NVIDIA A30 MIG 1g.6gb",
    "uuid": "MIG-1",
    "parent_uuid": "GPU-1",
    "memory_bytes": 5952 * 2**20,
}
GPU = {
    "kind": "gpu",
    "name": "NVIDIA A30",
    "uuid": "GPU-1",
    "parent_uuid": "",
    "memory_bytes": 24 * 2**30,
    "sharing": {
        "compute_mode": "Exclusive_Process",
        "timeslice": "Long",
        "mps_pipe_directory": "",
        "mps_daemon": False,
    },
}
POLICIES = (
    (Path(__file__).resolve().parents[1] / "fixtures/nvidia-smi/h200-580-compute-policy.txt")
    .read_text()
    .replace("Default ", "{}")
)


class Library:
    """NVML with one GPU in MIG mode and one MIG device at index 2; return codes can be changed by name."""

    def __init__(self, **codes: int) -> None:
        self.codes = codes
        self.closed = False
        self.nvmlErrorString = lambda code: b"Driver says no"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            return self._ok

        def call(*arguments: Any) -> int:
            return self.codes.get(name) or int(getattr(self, f"_{name}")(*arguments))

        call.restype = None  # type: ignore[attr-defined]
        return call

    @staticmethod
    def _ok(*_: Any) -> int:
        return 0

    def _nvmlShutdown(self) -> int:
        self.closed = True
        return 0

    @staticmethod
    def _set(pointer: Any, value: int) -> int:
        pointer._obj.value = value
        return 0

    def _nvmlDeviceGetCount_v2(self, count: Any) -> int:
        return self._set(count, 1)

    def _nvmlDeviceGetHandleByIndex_v2(self, _index: int, handle: Any) -> int:
        return self._set(handle, 100)

    def _nvmlDeviceGetMigMode(self, _gpu: Any, current: Any, _pending: Any) -> int:
        return self._set(current, 1)

    def _nvmlDeviceGetMaxMigDeviceCount(self, _gpu: Any, count: Any) -> int:
        return self._set(count, 4)

    def _nvmlDeviceGetMigDeviceHandleByIndex(self, _gpu: Any, index: int, handle: Any) -> int:
        return self._set(handle, 200) if index == 2 else 6

    @staticmethod
    def _nvmlDeviceGetUUID(device: Any, text: Any, _size: int) -> int:
        text.value = b"MIG-1" if device.value == 200 else b"GPU-1"
        return 0

    @staticmethod
    def _nvmlDeviceGetName(device: Any, text: Any, _size: int) -> int:
        text.value = b"NVIDIA A30 MIG 1g.6gb" if device.value == 200 else b"NVIDIA A30"
        return 0

    @staticmethod
    def _nvmlDeviceGetAttributes_v2(_device: Any, attributes: Any) -> int:
        attributes._obj.memory_mib = 5952
        return 0

    def _nvmlDeviceGetComputeMode(self, _gpu: Any, mode: Any) -> int:
        return self._set(mode, 3)

    @staticmethod
    def _nvmlDeviceGetMemoryInfo(_device: Any, memory: Any) -> int:
        memory._obj.total = 24 * 2**30
        return 0


def opened(monkeypatch: pytest.MonkeyPatch, **codes: int) -> tuple[Any, Library]:
    library = Library(**codes)
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: library)
    return slice_device.Nvml(), library


class TestNvml:
    def test_a_mig_device_with_its_parent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        nvml, library = opened(monkeypatch)
        assert nvml.devices() == [MIG]
        nvml.close()
        assert library.closed

    def test_a_gpu_without_mig(self, monkeypatch: pytest.MonkeyPatch) -> None:
        nvml, _ = opened(monkeypatch, nvmlDeviceGetMigMode=3)
        monkeypatch.setattr(slice_device, "time_slice", lambda: "Long")
        assert nvml.devices() == [GPU]

    def test_how_a_gpu_is_shared_by_mps(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        nvml, _ = opened(monkeypatch, nvmlDeviceGetMigMode=3)
        monkeypatch.setattr(slice_device, "time_slice", lambda: "")
        monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
        seen = nvml.devices()[0]["sharing"]
        assert (seen["mps_pipe_directory"], seen["mps_daemon"]) == (str(tmp_path), False)
        (tmp_path / "control").touch()
        assert nvml.devices()[0]["sharing"]["mps_daemon"] is True

    def test_a_compute_mode_that_is_not_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        nvml, _ = opened(monkeypatch, nvmlDeviceGetMigMode=3, nvmlDeviceGetComputeMode=3)
        monkeypatch.setattr(slice_device, "time_slice", lambda: "")
        assert nvml.devices()[0]["sharing"]["compute_mode"] == ""

    @pytest.mark.parametrize(
        ("code", "value", "told"),
        [
            (0, "Long        ", "Long"),
            (0, "MEDIUM      ", "Medium"),
            (0, "Default     |\n|   1     Timeslice        Long        ", ""),
            (0, "", ""),
            (255, "Long        ", ""),
        ],
    )
    def test_the_time_slice(self, tmp_path: Path, code: int, value: str, told: str) -> None:
        program = tmp_path / "nvidia-smi"
        text = POLICIES.format(value) if value else "No devices were found\n"
        program.write_text(
            f"#!/bin/sh\n[ \"$*\" = 'compute-policy --list' ] || exit 2\ncat <<'.'\n{text}.\nexit {code}\n"
        )
        program.chmod(0o755)
        assert slice_device.time_slice(str(program)) == told

    def test_no_nvidia_smi_tells_no_time_slice(self, tmp_path: Path) -> None:
        assert slice_device.time_slice(str(tmp_path / "none")) == ""

    def test_memory_where_a_driver_knows_no_attributes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        nvml, _ = opened(monkeypatch, nvmlDeviceGetAttributes_v2=3)
        assert nvml.devices()[0]["memory_bytes"] == 24 * 2**30

    @pytest.mark.parametrize("function", ["nvmlDeviceGetCount_v2", "nvmlDeviceGetMigDeviceHandleByIndex"])
    def test_an_error_is_told_by_name(self, monkeypatch: pytest.MonkeyPatch, function: str) -> None:
        nvml, _ = opened(monkeypatch, **{function: 999})
        with pytest.raises(slice_device.DeviceError, match=f"{function}: Driver says no \\(code 999\\)"):
            nvml.devices()

    def test_no_library_means_no_device(self) -> None:
        with pytest.raises(slice_device.DeviceError, match="given no GPU device"):
            slice_device.Nvml("libno-such-nvml.so")


@pytest.mark.parametrize(
    ("devices", "profile", "message"),
    [
        ([], "", "found 0 devices \\(none\\)"),
        ([MIG, GPU], "", "found 2 devices \\(MIG-1, GPU-1\\)"),
        ([GPU], "1g.6gb", "found gpu device 'NVIDIA A30'; needed a MIG device of 1g.6gb"),
        ([MIG], "g.6gb", "needed a MIG device of g.6gb"),
    ],
)
def test_any_other_device_is_refused(devices: list[Any], profile: str, message: str) -> None:
    with pytest.raises(slice_device.DeviceError, match=message):
        slice_device.only_device(devices, profile)


def test_the_one_device_is_taken() -> None:
    assert slice_device.only_device([MIG], "1g.6gb") is MIG
    assert slice_device.only_device([GPU]) is GPU


class TestTraining:
    def test_settings_from_the_command_line(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GPU_SLICES_PROFILE", "1g.6gb")
        settings = train_lora.parse(["--steps=9", "--learning-rate=0.1", "--out=/x"])
        assert (settings.steps, settings.learning_rate, settings.out) == (9, 0.1, "/x")
        assert settings.profile == "1g.6gb"
        assert settings.batch == train_lora.Settings().batch

    @pytest.mark.parametrize(
        ("environment", "group"),
        [
            ({}, (0, 1)),
            ({"PET_NNODES": "1"}, (0, 1)),
            ({"RANK": "1", "WORLD_SIZE": "2", "PET_NNODES": "2"}, (1, 2)),
        ],
    )
    def test_the_group(self, environment: dict[str, str], group: tuple[int, int]) -> None:
        found = train_lora.Group.from_environment(environment)
        assert (found.rank, found.world) == group

    def test_several_nodes_without_torchrun_would_train_alone(self) -> None:
        with pytest.raises(train_lora.ProofError, match="PET_NNODES=2 without RANK"):
            train_lora.Group.from_environment({"PET_NNODES": "2"})

    def test_the_loss_must_fall_far_enough(self) -> None:
        settings = train_lora.Settings(loss_factor=0.4)
        train_lora.check_loss(settings, 5.0, 2.0)
        for last in (2.01, 5.0, float("nan")):
            with pytest.raises(train_lora.ProofError, match=r"needed at most 2\.0000"):
                train_lora.check_loss(settings, 5.0, last)

    def test_knowing_only_which_tokens_occur_is_not_enough(self) -> None:
        from math import log  # noqa: PLC0415

        share = log(train_lora.CYCLE) / log(train_lora.VOCABULARY)
        assert train_lora.Settings().loss_factor < share

    def test_the_peak_must_fit(self) -> None:
        train_lora.check_peak(100, 100)
        with pytest.raises(train_lora.ProofError, match=r"found a peak of 2\.00 GiB"):
            train_lora.check_peak(2 * 2**30, 2**30)

    @pytest.mark.parametrize(("available", "count", "backend"), [(False, 0, "cpu"), (True, 1, "cuda")])
    def test_backend(self, available: bool, count: int, backend: str) -> None:
        cuda = types.SimpleNamespace(is_available=lambda: available, device_count=lambda: count)
        assert train_lora.choose_backend(types.SimpleNamespace(cuda=cuda)) == backend

    def test_several_cuda_devices_are_refused(self) -> None:
        cuda = types.SimpleNamespace(is_available=lambda: True, device_count=lambda: 2)
        with pytest.raises(slice_device.DeviceError, match="torch sees 2 CUDA devices"):
            train_lora.choose_backend(types.SimpleNamespace(cuda=cuda))

    def test_defaults_of_role_and_script_agree(self) -> None:
        import yaml  # noqa: PLC0415

        role = yaml.safe_load((ROOT / "roles/sft/defaults/main.yml").read_text())
        settings = train_lora.Settings()
        for name in ("steps", "batch", "learning_rate", "loss_factor", "seed"):
            assert role[f"sft_{name}"] == getattr(settings, name)

    @pytest.mark.parametrize(
        ("fault", "last"),
        [
            (None, "DRA LoRA SFT on GPU slice: OK"),
            (
                train_lora.ProofError("found x; needed y"),
                "DRA LoRA SFT on GPU slice: FAILED: found x; needed y",
            ),
        ],
    )
    def test_the_last_line_and_the_exit_status(
        self,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        fault: Exception | None,
        last: str,
    ) -> None:
        library = Library()
        monkeypatch.setattr(ctypes, "CDLL", lambda _name: library)
        monkeypatch.delenv("RANK", raising=False)
        monkeypatch.delenv("PET_NNODES", raising=False)

        def run(*_: Any) -> None:
            assert not library.closed, "the device must be held while training"
            if fault:
                raise fault

        monkeypatch.setattr(train_lora, "run", run)
        assert train_lora.main([]) == (1 if fault else 0)
        assert capsys.readouterr().out.splitlines()[-1] == last
        assert library.closed


@pytest.mark.parametrize(
    ("script", "last"),
    [
        (
            "roles/sft/files/train_lora.py",
            "DRA LoRA SFT on GPU slice: FAILED: libnvidia-ml.so.1 cannot be loaded",
        ),
        ("roles/smoke/files/smoke.py", "matmul_on_slice: FAILED: nvidia-smi is not in the container"),
    ],
)
def test_without_a_device_a_script_ends_with_the_reason(script: str, last: str) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / script)],
        env={"PYTHONPATH": str(ROOT / "roles/smoke/files"), "PATH": "/nonexistent", "LD_LIBRARY_PATH": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith(last)
    assert done.stderr == ""
