"""The library against NVML of a real H200, and through nvidia-ml-py and nvitop."""

from __future__ import annotations

import ctypes
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from silicon_node import FIXTURES, MakeNode, Node

CAPTURE: dict[str, Any] = json.loads((FIXTURES / "nvml" / "h200-580.json").read_text())
CAPTURE.pop("nvmlDeviceGetAddressingMode")  # was asked with a wrong structure version

ASK = """
import ctypes, json
import pynvml as n
n.nvmlInit()
lib = n.nvmlLib
device = n.nvmlDeviceGetHandleByIndex(0)
def numbers(name, count):
    values = [ctypes.c_int() for _ in range(count)]
    rc = getattr(lib, name)(device, *[ctypes.byref(v) for v in values])
    return [rc, *[v.value for v in values]]
memory = n.nvmlDeviceGetMemoryInfo(device)
found = {"memory": {k: getattr(memory, k) for k in ("total", "free", "used")},
         "cuda_cc": numbers("nvmlDeviceGetCudaComputeCapability", 2),
         "nvmlDeviceGetMigMode": numbers("nvmlDeviceGetMigMode", 2)}
for name in %s:
    rc, value = numbers(name, 1)
    found[name] = value if rc == 0 else {"rc": rc}
handle = ctypes.c_void_p()
found["nvmlDeviceGetMigDeviceHandleByIndex(0)"] = lib.nvmlDeviceGetMigDeviceHandleByIndex(
    device, 0, ctypes.byref(handle))
found["nvmlDeviceGetGpuInstanceById(1)"] = lib.nvmlDeviceGetGpuInstanceById(device, 1, ctypes.byref(handle))
found["profiles"] = {}
for index in range(20):
    info = n.c_nvmlGpuInstanceProfileInfo_v2_t()
    rc = lib.nvmlDeviceGetGpuInstanceProfileInfoV(device, index, ctypes.byref(info))
    if rc:
        found["profiles"][str(index)] = {"rc": rc}
        continue
    row = {field[0]: getattr(info, field[0]) for field in info._fields_ if field[0] != "version"}
    row["name"] = info.name
    count = ctypes.c_uint()
    lib.nvmlDeviceGetGpuInstancePossiblePlacements_v2(device, info.id, None, ctypes.byref(count))
    places = (n.c_nvmlGpuInstancePlacement_t * count.value)()
    row["placements_rc"] = lib.nvmlDeviceGetGpuInstancePossiblePlacements_v2(
        device, info.id, places, ctypes.byref(count))
    row["placements"] = [[p.start, p.size] for p in places]
    row["remaining_rc"] = lib.nvmlDeviceGetGpuInstanceRemainingCapacity(device, info.id, ctypes.byref(count))
    row["remaining"] = count.value
    found["profiles"][str(index)] = row
print(json.dumps(found))
"""


def test_an_idle_h200_answers_as_the_real_one(h200: Node) -> None:
    single = [name for name in CAPTURE if re.fullmatch(r"nvml\w+", name) and name != "nvmlDeviceGetMigMode"]
    assert len(single) == 12
    assert json.loads(h200.python(ASK % single)) == CAPTURE


def test_every_symbol_the_driver_calls_is_there(programs: Path) -> None:
    symbols = (FIXTURES / "nvml" / "driver-0.4.1-symbols.txt").read_text().split()
    assert len(symbols) == 43
    library = ctypes.CDLL(str(programs / "libnvidia-ml.so.1"))
    assert [name for name in symbols if not hasattr(library, name)] == []


def test_the_library_needs_libc_only_and_shows_only_nvml(programs: Path) -> None:
    dynamic = subprocess.run(
        ["readelf", "-dW", "--dyn-syms", str(programs / "libnvidia-ml.so.1")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert re.findall(r"NEEDED.*\[(.*)\]", dynamic) == ["libc.so.6"]
    assert re.findall(r"SONAME.*\[(.*)\]", dynamic) == ["libnvidia-ml.so.1"]
    defined = re.findall(r"(?:FUNC|OBJECT)\s+GLOBAL\s+DEFAULT\s+\d+\s+(\w+)", dynamic)
    assert len(defined) > 100
    assert [name for name in defined if not name.startswith("nvml")] == []


def test_nvidia_smi_runs_where_there_is_no_library(h200: Node, programs: Path) -> None:
    """The driver's own start-up check: an empty environment, the library preloaded."""
    env = {"LD_PRELOAD": str(programs / "libnvidia-ml.so.1"), "LAB_SILICON_ROOT": str(h200.root)}
    done = subprocess.run(
        [str(h200.root / "usr/bin/nvidia-smi"), "--version"],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert "DRIVER version      : 580.95.05" in done.stdout


LIST = """
import json
import pynvml as n
n.nvmlInit()
found = []
for i in range(n.nvmlDeviceGetCount()):
    device = n.nvmlDeviceGetHandleByIndex(i)
    migs = []
    for k in range(n.nvmlDeviceGetMaxMigDeviceCount(device)):
        try:
            mig = n.nvmlDeviceGetMigDeviceHandleByIndex(device, k)
        except n.NVMLError_NotFound:
            continue
        a = n.nvmlDeviceGetAttributes(mig)
        parent = n.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(mig)
        migs.append({"name": n.nvmlDeviceGetName(mig), "uuid": n.nvmlDeviceGetUUID(mig),
                     "gi": n.nvmlDeviceGetGpuInstanceId(mig), "ci": n.nvmlDeviceGetComputeInstanceId(mig),
                     "mib": n.nvmlDeviceGetMemoryInfo(mig).total >> 20, "sm": a.multiprocessorCount,
                     "attribute_mib": a.memorySizeMB, "index": n.nvmlDeviceGetIndex(mig),
                     "parent": n.nvmlDeviceGetUUID(parent),
                     "is_mig": n.nvmlDeviceIsMigDeviceHandle(mig).value,
                     "by_uuid": n.nvmlDeviceGetIndex(n.nvmlDeviceGetHandleByUUID(n.nvmlDeviceGetUUID(mig)))})
    found.append({"name": n.nvmlDeviceGetName(device), "uuid": n.nvmlDeviceGetUUID(device), "migs": migs,
                  "pci": n.nvmlDeviceGetPciInfo(device).busId, "mode": n.nvmlDeviceGetMigMode(device)})
print(json.dumps(found))
"""


def test_nvidia_ml_py_lists_gpus_and_mig_devices(make_node: MakeNode) -> None:
    node: Node = make_node("A30,H200")
    node.ok("-i", "0", "-mig", "1")
    node.ok("mig", "-i", "0", "-cgi", "2g.12gb,1g.6gb,1g.6gb", "-C")
    a30, h200 = json.loads(node.python(LIST))
    assert (a30["name"], a30["mode"], h200["mode"]) == ("NVIDIA A30", [1, 1], [0, 0])
    assert h200["migs"] == []
    assert [(m["name"], m["gi"], m["ci"], m["mib"], m["sm"]) for m in a30["migs"]] == [
        ("NVIDIA A30 MIG 2g.12gb", 1, 0, 11968, 28),
        ("NVIDIA A30 MIG 1g.6gb", 5, 0, 5952, 14),
        ("NVIDIA A30 MIG 1g.6gb", 6, 0, 5952, 14),
    ]
    for index, mig in enumerate(a30["migs"]):
        assert mig["parent"] == a30["uuid"]
        assert (mig["index"], mig["by_uuid"], mig["is_mig"]) == (index, index, 1)
        assert mig["attribute_mib"] == mig["mib"]
    listed = node.ok("-L")
    assert re.findall(r"UUID: (MIG-[^)]+)", listed) == [m["uuid"] for m in a30["migs"]]
    assert re.findall(r"UUID: (GPU-[^)]+)", listed) == [a30["uuid"], h200["uuid"]]


def test_nvitop_lists_gpus_mig_devices_and_processes(make_node: MakeNode) -> None:
    node: Node = make_node("A30,H200")
    node.ok("-i", "0", "-mig", "1")
    node.ok("mig", "-cgi", "1g.6gb,1g.6gb", "-C")
    holder = node.hold("--gpu", "0", "--gi", "4", "--memory", "321")
    done = subprocess.run(
        [str(Path(sys.executable).with_name("nvitop")), "-1"],
        env=node.env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Driver Version: 580.95.05" in done.stdout
    assert re.search(r"0 +A30 .*\n.*24.00GiB", done.stdout)
    assert re.search(r"1 +H200 .*\n.*140.4GiB", done.stdout)
    assert re.search(r"0:0 +1g.6gb @ GI/CI: 3/0 .* 5952MiB", done.stdout)
    assert re.search(r"0:1 +1g.6gb @ GI/CI: 4/0 .*333.0MiB / +5952MiB", done.stdout)
    assert re.search(rf"{holder.pid} .*321", done.stdout)


@pytest.mark.parametrize("version", [1, 2])
def test_memory_structures(h200: Node, version: int) -> None:
    which = "None" if version == 1 else "n.nvmlMemory_v2"
    script = f"""
import pynvml as n
n.nvmlInit()
m = n.nvmlDeviceGetMemoryInfo(n.nvmlDeviceGetHandleByIndex(0), version={which})
print(m.total, m.free, m.used, getattr(m, "reserved", 0))
"""
    total, free, used, reserved = map(int, h200.python(script).split())
    assert total == free + used + reserved == 150754820096
    assert (used, reserved) == ((644939776, 0) if version == 1 else (0, 644939776))


def test_wrong_structure_versions_and_arguments(h200: Node) -> None:
    script = """
import ctypes
import pynvml as n
n.nvmlInit()
lib = n.nvmlLib
device = n.nvmlDeviceGetHandleByIndex(0)
memory = n.c_nvmlMemory_v2_t(); memory.version = 7
mode = n.c_nvmlDeviceAddressingMode_t()
small = ctypes.create_string_buffer(4)
print(lib.nvmlDeviceGetMemoryInfo_v2(device, ctypes.byref(memory)),
      lib.nvmlDeviceGetAddressingMode(device, ctypes.byref(mode)), mode.value,
      lib.nvmlDeviceGetName(device, small, 4),
      lib.nvmlDeviceGetName(ctypes.c_void_p(64), small, 4),
      lib.nvmlDeviceGetHandleByIndex_v2(5, ctypes.byref(ctypes.c_void_p())),
      lib.nvmlDeviceGetHandleByUUID(b"GPU-none", ctypes.byref(ctypes.c_void_p())))
n.nvmlShutdown()
print(lib.nvmlDeviceGetName(device, small, 4), lib.nvmlShutdown())
n.nvmlInit(); n.nvmlInit(); n.nvmlShutdown()
print(n.nvmlDeviceGetCount())
"""
    assert h200.python(script).split() == ["25", "0", "0", "7", "2", "2", "6", "1", "1", "1"]


def test_without_silicon_the_driver_is_not_loaded(h200: Node) -> None:
    env = {**h200.env, "LAB_SILICON_ROOT": str(h200.home / "nowhere")}
    assert (
        h200.python(
            """
import pynvml as n
try:
    n.nvmlInit()
except n.NVMLError_DriverNotLoaded as e:
    print(e)
""",
            env,
        )
        == "Driver Not Loaded\n"
    )
    done = h200.smi("-L", env=env)
    assert done.returncode == 9
    assert done.stdout.startswith(
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
    )


def test_xid_events_arrive(h200: Node) -> None:
    h200.ok("-mig", "1")
    h200.ok("mig", "-cgi", "1g.18gb", "-C")
    script = """
import subprocess
import pynvml as n
n.nvmlInit()
device = n.nvmlDeviceGetHandleByIndex(0)
events = n.nvmlEventSetCreate()
n.nvmlDeviceRegisterEvents(device, n.nvmlEventTypeXidCriticalError, events)
try:
    n.nvmlEventSetWait_v2(events, 150)
except n.NVMLError_Timeout:
    print("nothing yet")
subprocess.run(["lab-silicon", "fault", "xid:79", "--gpu", "0", "--gi", "11", "--ci", "0"], check=True)
subprocess.run(["lab-silicon", "fault", "xid:13", "--gpu", "0"], check=True)
for _ in range(2):
    e = n.nvmlEventSetWait_v2(events, 3000)
    print(e.eventType, e.eventData, e.gpuInstanceId, e.computeInstanceId)
n.nvmlEventSetFree(events)
"""
    assert h200.python(script).splitlines() == ["nothing yet", "8 79 11 0", "8 13 4294967295 4294967295"]
