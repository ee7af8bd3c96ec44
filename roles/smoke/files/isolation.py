"""What a container can reach of GPUs that it was not given. Runs in the pod; standard library only.

It tries and tells; whether that is as it should be is judged by who reads the log. Roles::

    bare       [FILE]: has no claim: looks for device nodes, NVML, nvidia-smi and CUDA, and writes what it saw
               to the file too, for another container of the pod to tell
    neighbour  -- SCRIPT ARGUMENTS: prints its own device nodes, then becomes that Python script
    slice      [SECONDS]: has a slice: tries to reach every other one, by path and by making device nodes,
               looks through NVML, and where there is CUDA allocates until the device refuses; again and
               again for so long, because it cannot know when a neighbour is at work

Prints lines for people, one ``[proof]`` line of JSON, and ``isolation attempts: done`` as the last line.
Works on Python 3.8 and newer.
"""

from __future__ import annotations

import ctypes
import errno
import glob
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any, Callable, Iterable

from slice_device import DeviceError, Nvml, gib

DONE = "isolation attempts: done"
GPU_MAJOR = 195
# Minors of /dev/nvidia<n>; above them are nvidia-modeset and nvidiactl, which all GPUs share.
GPU_MINORS = range(254)
# Minors of /dev/nvidia-caps: 1 configures, 2 monitors, then 135 for each GPU. Enough for 16 GPUs.
CAP_MINORS = range(1, 3 + 135 * 16)
_MIB = 1024 * 1024


def device_nodes(root: str = "/dev") -> list[dict[str, Any]]:
    """The character devices of NVIDIA in a /dev: [{path, major, minor}], by path."""
    found = []
    for path in sorted([*glob.glob(f"{root}/nvidia*"), *glob.glob(f"{root}/nvidia-caps/*")]):
        with suppress(OSError):
            status = os.stat(path)
            if stat.S_ISCHR(status.st_mode):
                number = status.st_rdev
                found.append({"path": path, "major": os.major(number), "minor": os.minor(number)})
    return found


def own(nodes: Iterable[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Those nodes that are a GPU ("gpu") or a capability of a slice ("cap")."""
    patterns = {"gpu": r"/nvidia\d+$", "cap": r"/nvidia-caps/nvidia-cap\d+$"}
    return [node for node in nodes if re.search(patterns[kind], node["path"])]


def answer(attempt: Callable[[], Any]) -> str:
    """ "OK", or the name of the error: "EPERM"."""
    try:
        attempt()
    except OSError as fault:
        return errno.errorcode.get(fault.errno or 0, str(fault.errno))
    return "OK"


def open_node(path: str) -> str:
    """Open a device node for reading, which a capability allows at most, and close it."""
    return answer(lambda: os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)))


def tally(answers: dict[str, str], refusals: Iterable[str]) -> dict[str, Any]:
    """Answers by name, counted, and the names that gave another answer than a refusal.

    {"tried": 2161, "answers": {"EPERM": 2161}, "reached": ["cap 12: ENXIO"]}
    """
    counted: dict[str, int] = {}
    for text in answers.values():
        counted[text] = counted.get(text, 0) + 1
    reached = [f"{name}: {text}" for name, text in answers.items() if text not in refusals]
    return {"tried": len(answers), "answers": counted, "reached": reached[:20]}


def by_path(nodes: list[dict[str, Any]], root: str = "/dev") -> dict[str, Any]:
    """Open every device node of other slices and GPUs by the path it has on the host."""
    mine = {node["path"] for node in nodes}
    paths = [f"{root}/nvidia-caps/nvidia-cap{minor}" for minor in CAP_MINORS]
    paths += [f"{root}/nvidia{minor}" for minor in GPU_MINORS]
    # Not even the name is there.
    return tally({path: open_node(path) for path in paths if path not in mine}, ("ENOENT",))


def foreign(nodes: list[dict[str, Any]]) -> dict[str, tuple[int, int]]:
    """Name -> (major, minor) of every device that is not ours: capabilities and GPUs."""
    majors = {node["major"] for node in own(nodes, "cap")}
    mine = {(node["major"], node["minor"]) for node in nodes}
    found = {f"cap {minor}": (major, minor) for major in majors for minor in CAP_MINORS}
    found.update({f"gpu {minor}": (GPU_MAJOR, minor) for minor in GPU_MINORS})
    return {name: number for name, number in found.items() if number not in mine}


def make_and_open(number: tuple[int, int], folder: str) -> str:
    """Make a device node and open it: "mknod EPERM", or what open said. The node is gone afterwards."""
    path = os.path.join(folder, f"gpu-slices-probe-{number[0]}-{number[1]}")
    made = answer(lambda: os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(*number)))
    if made != "OK":
        return f"mknod {made}"
    try:
        return open_node(path)
    finally:
        os.unlink(path)


def by_mknod(nodes: list[dict[str, Any]], folder: str) -> dict[str, Any]:
    """Make the device nodes of all others, and of our own slice as a control, and open them."""
    control = {node["path"]: make_and_open((node["major"], node["minor"]), folder) for node in nodes}
    others = {name: make_and_open(number, folder) for name, number in foreign(nodes).items()}
    # A node without a driver behind it gives ENXIO when opened: that is no refusal.
    refusals = ("EPERM", "mknod EPERM", "mknod EACCES")
    return {**tally(others, refusals), "folder": folder, "control": control}


def probe_folder() -> str:
    """Where this process may make files: /dev if it can, for elsewhere the flag nodev would refuse too."""
    return "/dev" if os.access("/dev", os.W_OK) else "/tmp"  # noqa: S108 - an emptyDir of this pod


def nvml_view() -> dict[str, Any]:
    """What NVML shows: {"loaded", "devices", "error"}."""
    try:
        nvml = Nvml()
    except DeviceError as fault:
        return {"loaded": "cannot be loaded" not in str(fault), "devices": [], "error": str(fault)}
    try:
        return {"loaded": True, "devices": nvml.devices(), "error": ""}
    except DeviceError as fault:
        return {"loaded": True, "devices": [], "error": str(fault)}
    finally:
        nvml.close()


def smi_view() -> dict[str, Any]:
    """What nvidia-smi lists: {"path", "listed" [lines with a UUID], "said"}."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {"path": "", "listed": [], "said": "not found"}
    try:
        done = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError) as fault:
        return {"path": program, "listed": [], "said": str(fault)}
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return {
        "path": program,
        "listed": [line for line in lines if "UUID:" in line],
        "said": " / ".join(lines[:3]),
    }


def cuda_view(library: str = "libcuda.so.1") -> dict[str, Any]:
    """Whether CUDA finds a device: {"loaded", "count", "said"}."""
    try:
        cuda = ctypes.CDLL(library)
    except OSError as fault:
        return {"loaded": False, "count": 0, "said": str(fault)}
    code, count = int(cuda.cuInit(0)), ctypes.c_int(0)
    if code == 0:
        code = int(cuda.cuDeviceGetCount(ctypes.byref(count)))
    return {"loaded": True, "count": count.value if code == 0 else 0, "said": f"code {code}"}


def over_allocate(torch: Any, step: int = 64 * _MIB, hold: float = 1.0) -> dict[str, Any]:
    """Take memory of the device until it refuses, hold it a moment, and give it back.

    {"got_bytes", "error", "total_bytes"}; ``error`` is the class and text of what torch raised.
    """
    kept: list[Any] = []
    total = int(torch.cuda.get_device_properties(0).total_memory)
    # Twice the device: an allocator that never refuses must not run for ever.
    while len(kept) * step < 2 * total:
        try:
            kept.append(torch.empty(step, dtype=torch.uint8, device="cuda"))
        except RuntimeError as fault:
            # What was asked for and what was left; advice about settings follows.
            error = f"{type(fault).__name__}: {'. '.join(str(fault).splitlines()[0].split('. ')[:3])}"
            break
    else:
        error = ""
    got = len(kept) * step
    time.sleep(hold)
    kept.clear()
    torch.cuda.empty_cache()
    return {"got_bytes": got, "error": error, "total_bytes": total}


def bare(file: str = "") -> dict[str, Any]:
    """Everything a pod without a claim must not have."""
    nodes, nvml, smi, cuda = device_nodes(), nvml_view(), smi_view(), cuda_view()
    print(f"device nodes: {', '.join(n['path'] for n in nodes) or 'none'}")
    print(f"NVML: {nvml['error'] or [d['uuid'] for d in nvml['devices']]}")
    print(f"nvidia-smi: {smi['said']}")
    print(f"CUDA: {cuda['said']}; {cuda['count']} devices")
    visible = os.environ.get("NVIDIA_VISIBLE_DEVICES", "")
    seen = {"nodes": nodes, "nvml": nvml, "smi": smi, "cuda": cuda, "visible_devices": visible}
    if file:
        with open(file, "w", encoding="utf-8") as stream:
            json.dump(seen, stream)
    return seen


def attempt(torch: Any) -> dict[str, Any]:
    """Everything a pod with a slice may try against the others, once."""
    nodes, started = device_nodes(), time.time()
    seen = {
        "nodes": nodes,
        "path": by_path(nodes),
        "mknod": by_mknod(nodes, probe_folder()),
        "nvml": nvml_view(),
    }
    if torch is not None:
        seen["over"] = over_allocate(torch)
    return {**seen, "span": [round(started, 3), round(time.time(), 3)]}


def attempts(duration: str = "0", pause: float = 1.0) -> dict[str, Any]:
    """Try for so many seconds. What one round reached counts; else the first round speaks for all."""
    began, cuda, torch, seconds = time.monotonic(), cuda_view(), None, float(duration)
    if cuda["count"] and os.getuid() != 0:
        import torch  # noqa: PLC0415 - slow, and needed only where there is CUDA
    first = attempt(torch)
    show(first)
    spans, differing = [first.pop("span")], 0
    while time.monotonic() - began < seconds:
        time.sleep(pause)
        again = attempt(torch)
        spans.append(again.pop("span"))
        if outcome(again) != outcome(first):
            differing += 1
            if differing == 1:
                print(f"round {len(spans)} went otherwise:")
                show(again)
                first = again if outcome(again)[0] else first
    print(
        f"{len(spans)} rounds in {time.monotonic() - began:.0f} s, {differing} of them unlike the first",
        flush=True,
    )
    return {**first, "cuda": cuda, "uid": os.getuid(), "spans": spans, "differing": differing}


def outcome(seen: dict[str, Any]) -> tuple[Any, ...]:
    """What of a round must not change: reached names, answers, devices, and the text of the refusal."""
    made, nvml = seen["mknod"], seen["nvml"]
    return (
        [*seen["path"]["reached"], *made["reached"]],
        seen["path"]["answers"],
        made["answers"],
        made["control"],
        [device["uuid"] for device in nvml["devices"]],
        bool(seen.get("over", {}).get("error")),
    )


def show(seen: dict[str, Any]) -> None:
    """A round, for people."""
    nodes, made, nvml = seen["nodes"], seen["mknod"], seen["nvml"]
    print(f"device nodes: {', '.join('{path} ({major}:{minor})'.format(**n) for n in nodes) or 'none'}")
    print(f"others by path: {seen['path']['answers']}")
    control = sorted(set(made["control"].values()))
    print(f"others by mknod in {made['folder']}: {made['answers']}; our own by mknod: {control}")
    shown = ", ".join(f"{d['name']} {d['uuid']} {gib(d['memory_bytes'])} GiB" for d in nvml["devices"])
    print(f"NVML: {nvml['error'] or shown}", flush=True)
    if "over" in seen:
        print(f"allocated {gib(seen['over']['got_bytes'])} GiB, then: {seen['over']['error']}", flush=True)


def main(arguments: list[str]) -> int:
    """Exit status 0 whatever was reached, 1 where an attempt could not be made."""
    role = arguments[0] if arguments else ""
    if role == "neighbour" and len(arguments) > 2 and arguments[1] == "--":
        print("[proof] " + json.dumps({"nodes": device_nodes()}, sort_keys=True), flush=True)
        os.execv(sys.executable, [sys.executable, *arguments[2:]])  # noqa: S606
    roles = {"bare": bare, "slice": attempts}
    if role not in roles:
        print(f"isolation attempts: FAILED: found role '{role}'; needed bare, slice, or neighbour -- SCRIPT")
        return 1
    try:
        proof = roles[role](*arguments[1:2])
    except (ImportError, RuntimeError, OSError, ValueError) as fault:
        print(f"isolation attempts: FAILED: {type(fault).__name__}: {fault}", flush=True)
        return 1
    print("[proof] " + json.dumps(proof, sort_keys=True), flush=True)
    print(DONE, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
