"""Prove the slice that this pod's caller asked for. Runs in the pod; standard library only.

    caller.py --caller NAME [--profile PROFILE] [--hold SECONDS]

Says which device NVML shows, uses memory of it where the CUDA driver is there, and prints one ``[proof]``
line of JSON; the last line is ``slice claimed by NAME: OK``. Exit status 1 and a reason otherwise.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import time
from typing import Any

from slice_device import DeviceError, Nvml, gib, only_device

_WORDS = 4 * 1024 * 1024
_PATTERN = 0x51CE2026


class Cuda:
    """The CUDA driver's own interface: an image need not hold torch, nor anything else of CUDA."""

    def __init__(self, library: str = "libcuda.so.1") -> None:
        try:
            self._library = ctypes.CDLL(library)
        except OSError:
            self._library = None

    def prove(self) -> dict[str, Any]:
        """{} without the driver; else {memory_bytes} of the only device, after its memory was used."""
        if self._library is None:
            return {}
        self._call("cuInit", 0)
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        if count.value != 1:
            raise DeviceError(f"CUDA shows {count.value} devices; needed exactly the one that was claimed")
        device, total = ctypes.c_int(), ctypes.c_size_t()
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuDeviceTotalMem_v2", ctypes.byref(total), device)
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        try:
            self._call("cuCtxSetCurrent", context)
            self._fill()
        finally:
            self._call("cuDevicePrimaryCtxRelease_v2", device)
        return {"memory_bytes": int(total.value)}

    def _fill(self) -> None:
        """Let the device fill memory, and compare all of it."""
        address, back = ctypes.c_uint64(), (ctypes.c_uint32 * _WORDS)()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(4 * _WORDS))
        try:
            self._call("cuMemsetD32_v2", address, ctypes.c_uint(_PATTERN), ctypes.c_size_t(_WORDS))
            self._call("cuMemcpyDtoH_v2", ctypes.byref(back), address, ctypes.c_size_t(4 * _WORDS))
        finally:
            self._call("cuMemFree_v2", address)
        if bytes(back) != _PATTERN.to_bytes(4, sys.byteorder) * _WORDS:
            raise DeviceError("what was written to the device's memory is not what was read back")

    def _call(self, function: str, *arguments: Any) -> None:
        code = getattr(self._library, function)(*arguments)
        if code != 0:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            raise DeviceError(f"{function}: {(text.value or b'unknown error').decode()} (code {code})")


def main(arguments: list[str] | None = None) -> int:
    """Run the proof."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--caller", required=True)
    parser.add_argument("--profile", default="")
    parser.add_argument("--hold", type=float, default=0.0)
    options = parser.parse_args(arguments)
    nvml = None
    try:
        nvml = Nvml()
        devices = nvml.devices()
        device = only_device(devices, options.profile)
        index = os.environ.get("JOB_COMPLETION_INDEX", "")
        print(f"caller: {options.caller}" + (f", completion index {index}" if index else ""))
        print(f"device: {device['name']}, {gib(device['memory_bytes'])} GiB, {device['uuid']}")
        cuda = Cuda().prove()
        if cuda:
            print(f"cuda: memory written and read back on a device of {gib(cuda['memory_bytes'])} GiB")
        else:
            print("note: no CUDA driver in this container; nothing was computed on the device")
        proof = {
            "devices": devices,
            "driver": nvml.driver_version(),
            "backend": "cuda" if cuda else "cpu",
            "cuda_memory_bytes": cuda.get("memory_bytes", 0),
        }
        print("[proof] " + json.dumps(proof, sort_keys=True), flush=True)
        # The claim goes with the pod: keep it until it was seen, and until other pods have theirs as well.
        time.sleep(options.hold)
    except DeviceError as fault:
        print(f"slice claimed by {options.caller}: FAILED: {fault}", flush=True)
        return 1
    finally:
        if nvml is not None:
            nvml.close()
    print(f"slice claimed by {options.caller}: OK", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
