"""Which GPU device this process was given, from NVML. Runs in the pod; standard library only.

Loads libnvidia-ml.so.1, which the driver puts into every container with a device, through ctypes: an image
need not hold nvidia-ml-py. Works on Python 3.8 and newer.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from typing import Any

_OK, _NOT_SUPPORTED, _NOT_FOUND, _INVALID = 0, 3, 6, 2
_MIB = 1024 * 1024
# As nvidia-smi prints them, by NVML's number.
_COMPUTE_MODES = ("Default", "Exclusive_Thread", "Prohibited", "Exclusive_Process")


class DeviceError(RuntimeError):
    """NVML is not there, or it refused; the message says what it said."""


class _Attributes(ctypes.Structure):
    _fields_ = [
        ("multiprocessors", ctypes.c_uint),
        ("copy_engines", ctypes.c_uint),
        ("decoders", ctypes.c_uint),
        ("encoders", ctypes.c_uint),
        ("jpeg_engines", ctypes.c_uint),
        ("ofa_engines", ctypes.c_uint),
        ("gpu_instance_slices", ctypes.c_uint),
        ("compute_instance_slices", ctypes.c_uint),
        ("memory_mib", ctypes.c_ulonglong),
    ]


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class Nvml:
    """NVML for as long as the object is open: the process counts as a user of its devices until close()."""

    def __init__(self, library: str = "libnvidia-ml.so.1") -> None:
        try:
            self._library = ctypes.CDLL(library)
        except OSError as fault:
            raise DeviceError(
                f"{library} cannot be loaded ({fault}): the container was given no GPU device. Check that it "
                "lists the claim in resources.claims and that the DRA driver prepared it."
            ) from fault
        self._call("nvmlInit_v2")

    def close(self) -> None:
        """Let go of the devices."""
        self._library.nvmlShutdown()

    def driver_version(self) -> str:
        """Version of the GPU driver, "580.95.05"."""
        text = ctypes.create_string_buffer(96)
        self._call("nvmlSystemGetDriverVersion", text, 96)
        return text.value.decode()

    def devices(self) -> list[dict[str, Any]]:
        """What the process can use: MIG devices, and GPUs that are not in MIG mode.

        Each is {kind: mig|gpu, name, uuid, parent_uuid ("" for a GPU), memory_bytes}; a GPU has sharing too.
        """
        count = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        found = []
        for index in range(count.value):
            gpu = ctypes.c_void_p()
            self._call("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(gpu))
            if not self._mig_mode(gpu):
                found.append({**self._describe("gpu", gpu, ""), "sharing": self._sharing(gpu)})
                continue
            parent = self._text("nvmlDeviceGetUUID", gpu)
            found += [self._describe("mig", device, parent) for device in self._mig_devices(gpu)]
        return found

    def _mig_mode(self, gpu: ctypes.c_void_p) -> bool:
        current, pending = ctypes.c_uint(), ctypes.c_uint()
        code = self._library.nvmlDeviceGetMigMode(gpu, ctypes.byref(current), ctypes.byref(pending))
        if code == _NOT_SUPPORTED:
            return False
        self._require("nvmlDeviceGetMigMode", code)
        return bool(current.value)

    def _mig_devices(self, gpu: ctypes.c_void_p) -> list[ctypes.c_void_p]:
        count = ctypes.c_uint()
        self._call("nvmlDeviceGetMaxMigDeviceCount", gpu, ctypes.byref(count))
        found = []
        for index in range(count.value):
            device = ctypes.c_void_p()
            code = self._library.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index, ctypes.byref(device))
            if code in {_NOT_FOUND, _INVALID}:
                continue
            self._require("nvmlDeviceGetMigDeviceHandleByIndex", code)
            found.append(device)
        return found

    def _describe(self, kind: str, device: ctypes.c_void_p, parent: str) -> dict[str, Any]:
        return {
            "kind": kind,
            "name": self._text("nvmlDeviceGetName", device),
            "uuid": self._text("nvmlDeviceGetUUID", device),
            "parent_uuid": parent,
            "memory_bytes": self._memory(kind, device),
        }

    def _sharing(self, gpu: ctypes.c_void_p) -> dict[str, Any]:
        """How several processes may use the GPU, as far as a container can see; "" where it cannot."""
        mode = ctypes.c_uint()
        code = self._library.nvmlDeviceGetComputeMode(gpu, ctypes.byref(mode))
        known = code == _OK and mode.value < len(_COMPUTE_MODES)
        pipes = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "")
        return {
            "compute_mode": _COMPUTE_MODES[mode.value] if known else "",
            "timeslice": time_slice(),
            "mps_pipe_directory": pipes,
            "mps_daemon": bool(pipes) and os.path.exists(os.path.join(pipes, "control")),
        }

    def _memory(self, kind: str, device: ctypes.c_void_p) -> int:
        if kind == "mig":
            attributes = _Attributes()
            code = self._library.nvmlDeviceGetAttributes_v2(device, ctypes.byref(attributes))
            if code == _OK:
                return int(attributes.memory_mib) * _MIB
        memory = _Memory()
        self._call("nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory))
        return int(memory.total)

    def _text(self, function: str, device: ctypes.c_void_p) -> str:
        text = ctypes.create_string_buffer(96)
        self._call(function, device, text, 96)
        return text.value.decode()

    def _call(self, function: str, *arguments: Any) -> None:
        self._require(function, getattr(self._library, function)(*arguments))

    def _require(self, function: str, code: int) -> None:
        if code == _OK:
            return
        self._library.nvmlErrorString.restype = ctypes.c_char_p
        text = self._library.nvmlErrorString(code) or b"unknown error"
        raise DeviceError(f"{function}: {text.decode()} (code {code})")


def time_slice(program: str = "nvidia-smi") -> str:
    """The time slice of the one GPU here, "Default" to "Long", which NVML does not tell; "" if unknown."""
    try:
        done = subprocess.run(
            [program, "compute-policy", "--list"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    told = re.findall(r"\bTimeslice\s+(\w+)", done.stdout) if done.returncode == 0 else []
    return told[0].capitalize() if len(told) == 1 else ""


def only_device(devices: list[dict[str, Any]], profile: str = "") -> dict[str, Any]:
    """The one device; raises DeviceError when there are none or several, or it is of another profile."""
    if len(devices) != 1:
        names = ", ".join(str(device["uuid"]) for device in devices) or "none"
        raise DeviceError(f"found {len(devices)} devices ({names}); needed exactly the one that was claimed")
    device = devices[0]
    if profile and not (device["kind"] == "mig" and str(device["name"]).endswith(f" MIG {profile}")):
        found = f"{device['kind']} device '{device['name']}'"
        raise DeviceError(f"found {found}; needed a MIG device of {profile}")
    return device


def gib(size: float) -> str:
    """Bytes as GiB with two digits."""
    return f"{size / 1024**3:.2f}"
