"""Prove the slice this pod was given: one device, its identity and memory, and a right matrix product.

Prints lines for people and one ``[proof]`` line of JSON; the last line is ``matmul_on_slice: OK``. Exit
status 1 and a reason otherwise. Environment: GPU_SLICES_PROFILE, the MIG profile the device must have.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import Any

from slice_device import DeviceError, Nvml, gib, only_device

SIZE = 768
# What a container without the claim saw before this one began.
WITHOUT_CLAIM = "/tmp/without-claim.json"  # noqa: S108 - an emptyDir of this pod


def list_devices() -> None:
    """Print what nvidia-smi lists, as the guide does."""
    print("===== nvidia-smi -L =====", flush=True)
    program = shutil.which("nvidia-smi")
    if program is None:
        raise DeviceError("nvidia-smi is not in the container: the driver's CDI spec should have mounted it")
    listed = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=60, check=False)
    print((listed.stdout + listed.stderr).rstrip(), flush=True)
    if listed.returncode != 0:
        raise DeviceError(f"nvidia-smi -L ended with {listed.returncode}")


def without_claim(path: str = WITHOUT_CLAIM) -> dict[str, Any]:
    """What the container without the claim wrote down; {} where there was none."""
    try:
        with open(path, encoding="utf-8") as stream:
            return dict(json.load(stream))
    except (OSError, ValueError):
        return {}


def cuda_facts(torch: Any) -> dict[str, Any]:
    """What torch says of its one CUDA device; {} where torch has no CUDA."""
    if not torch.cuda.is_available():
        return {}
    count = torch.cuda.device_count()
    if count != 1:
        raise DeviceError(f"torch sees {count} CUDA devices; needed exactly one")
    properties = torch.cuda.get_device_properties(0)
    return {"name": str(properties.name), "memory_bytes": int(properties.total_memory)}


def multiply(torch: Any, backend: str, size: int = SIZE) -> dict[str, Any]:
    """Multiply two matrices of small whole numbers on the device and compare with integer arithmetic.

    Such products are exact in float32 and in TF32 alike, so the tolerance is 0.
    """
    generator = torch.Generator().manual_seed(2026)
    left = torch.randint(-3, 4, (size, size), generator=generator)
    right = torch.randint(-3, 4, (size, size), generator=generator)
    product = (left.float().to(backend) @ right.float().to(backend)).cpu()
    error = (product - (left.double() @ right.double()).float()).abs().max().item()
    # A wrong product of zeros would agree with itself: the sum of one row is checked in whole numbers.
    row = (left[0].unsqueeze(0) * right.t()).sum(dim=1)
    error = max(error, (product[0] - row.float()).abs().max().item())
    return {"size": size, "max_error": error, "tolerance": 0.0}


def main() -> int:
    """Run the proof."""
    nvml = None
    try:
        list_devices()
        nvml = Nvml()
        devices = nvml.devices()
        import torch  # noqa: PLC0415 - slow, and not needed to say that there is no device

        cuda = cuda_facts(torch)
        backend = "cuda" if cuda else "cpu"
        print(f"cuda_available: {bool(cuda)}", flush=True)
        device = only_device(devices, os.environ.get("GPU_SLICES_PROFILE", ""))
        print(f"device: {cuda.get('name') or device['name']}")
        print(f"slice_total_mem_GiB: {gib(cuda.get('memory_bytes') or device['memory_bytes'])}")
        if not cuda:
            print("note: this image's torch has no CUDA; the product below runs on the CPU")
        product = multiply(torch, backend)
        proof = {
            "devices": devices,
            "driver": nvml.driver_version(),
            "backend": backend,
            "torch": str(torch.__version__),
            "cuda_memory_bytes": cuda.get("memory_bytes", 0),
            "matmul": product,
            "without_claim": without_claim(),
        }
        print("[proof] " + json.dumps(proof, sort_keys=True), flush=True)
        if product["max_error"] > product["tolerance"]:
            raise DeviceError(f"the product is wrong by up to {product['max_error']}")
    except ImportError as fault:
        print(f"matmul_on_slice: FAILED: the image lacks a Python package: {fault}", flush=True)
        return 1
    except DeviceError as fault:
        print(f"matmul_on_slice: FAILED: {fault}", flush=True)
        return 1
    finally:
        if nvml is not None:
            nvml.close()
    print("matmul_on_slice: OK", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
