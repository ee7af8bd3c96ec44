"""Who holds a GPU: processes that keep it, or one of its instances, from being changed.

Runs on the node (Python 3.8+). Three sources: what nvidia-smi lists, open files under /dev/nvidia*, and, as
suspects only, processes that have the driver library loaded. Everything read from /proc is best effort:
processes come and go while it is read.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Iterator, Sequence

from .mig_layout import GpuState
from .nvidia_smi import NvidiaSmi

# a daemon that only keeps the driver loaded: named when a change stays pending, no reason to refuse one
PASSIVE = ("nvidia-persiste",)

_GPU_FILE = re.compile(r"/dev/nvidia(\d+)$")
_CAP_FILE = re.compile(r"/dev/nvidia-caps/nvidia-cap(\d+)$")
_POD_UID = re.compile(r"pod([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12})")
_MIG_MINOR = re.compile(r"^gpu(\d+)/gi(\d+)/(?:ci\d+/)?access (\d+)$", re.MULTILINE)


@dataclass(frozen=True)
class Holder:
    """A process that holds GPU ``gpu`` (its index), or only GPU instance ``gi_id`` of it.

    ``pod`` is `namespace/name` or a pod UID, empty outside pods; ``evidence`` says how it was found.
    """

    gpu: int
    pid: int
    name: str
    evidence: str
    gi_id: int | None = None
    pod: str = ""

    @property
    def passive(self) -> bool:
        return self.name.startswith(PASSIVE)

    def __str__(self) -> str:
        where = f", pod {self.pod}" if self.pod else ""
        instance = f" in GPU instance {self.gi_id}" if self.gi_id is not None else ""
        return f"process {self.pid} ({self.name}{where}){instance} [{self.evidence}]"


def find_holders(
    smi: NvidiaSmi, gpus: Sequence[GpuState], proc: str = "/proc", pod_logs: str = "/var/log/pods"
) -> list[Holder]:
    """Return every holder of every GPU, each process once per GPU, the most telling source first."""
    index_of = {gpu.uuid: gpu.index for gpu in gpus}
    minors: dict[int, int] = {}
    found: dict[tuple[int, int], Holder] = {}

    def add(gpu: int, pid: int, name: str, evidence: str, gi_id: int | None = None) -> None:
        known = found.get((gpu, pid))
        if known is None or (known.gi_id is None and gi_id is not None):
            found[(gpu, pid)] = Holder(
                gpu=gpu,
                pid=pid,
                name=process_name(pid, proc) or name,
                evidence=known.evidence if known else evidence,
                gi_id=gi_id,
                pod=pod_of(pid, proc, pod_logs),
            )

    for detail in smi.details():
        gpu = index_of.get(detail.uuid)
        if gpu is None:
            continue
        if detail.minor is not None:
            minors[detail.minor] = gpu
        for process in detail.processes:
            add(gpu, process.pid, process.name, "listed by nvidia-smi", process.gi_id)
    for app in smi.compute_apps():
        if app.gpu_uuid in index_of:
            add(index_of[app.gpu_uuid], app.pid, app.name, "listed by nvidia-smi")
    for pid, files in _open_device_files(proc):
        for minor, gi_id in _held_devices(files, proc):
            if minor in minors:
                add(minors[minor], pid, "", "holds its device file open", gi_id)
    return sorted(found.values(), key=lambda holder: (holder.gpu, holder.pid))


def library_users(proc: str = "/proc", pod_logs: str = "/var/log/pods") -> list[Holder]:
    """Processes that have the driver library loaded: suspects when a GPU is held and nobody else shows."""
    suspects: list[Holder] = []
    for pid in _pids(proc):
        if pid == os.getpid():
            continue
        try:
            with open(f"{proc}/{pid}/maps", encoding="utf-8", errors="replace") as maps:
                loaded = any("/libnvidia-ml.so" in line or "/libcuda.so" in line for line in maps)
        except OSError:
            continue
        name = process_name(pid, proc)
        if loaded and name != "nvidia-smi":
            suspects.append(
                Holder(-1, pid, name, "has the driver library loaded", pod=pod_of(pid, proc, pod_logs))
            )
    return suspects


def process_name(pid: int, proc: str = "/proc") -> str:
    """The short name of a process, or "" when it is gone."""
    try:
        with open(f"{proc}/{pid}/comm", encoding="utf-8", errors="replace") as comm:
            return comm.read().strip()
    except OSError:
        return ""


def pod_of(pid: int, proc: str = "/proc", pod_logs: str = "/var/log/pods") -> str:
    """`namespace/name` of the pod a process runs in, its UID where the name is not on this node, or ""."""
    try:
        with open(f"{proc}/{pid}/cgroup", encoding="utf-8", errors="replace") as cgroup:
            found = _POD_UID.search(cgroup.read())
    except OSError:
        return ""
    if not found:
        return ""
    uid = found.group(1).replace("_", "-")
    try:
        # the kubelet keeps a folder <namespace>_<name>_<uid> per pod
        names = [entry for entry in os.listdir(pod_logs) if entry.endswith(uid)]
    except OSError:
        names = []
    return "/".join(names[0].split("_")[:2]) if names else f"uid {uid}"


def _pids(proc: str) -> Iterator[int]:
    try:
        entries = os.listdir(proc)
    except OSError:
        return
    for entry in entries:
        if entry.isdigit():
            yield int(entry)


def _open_device_files(proc: str) -> Iterator[tuple[int, list[str]]]:
    for pid in _pids(proc):
        files: list[str] = []
        try:
            descriptors = os.listdir(f"{proc}/{pid}/fd")
        except OSError:
            continue
        for descriptor in descriptors:
            try:
                target = os.readlink(f"{proc}/{pid}/fd/{descriptor}")
            except OSError:
                continue
            if "/dev/nvidia" in target:
                files.append(target)
        if files and process_name(pid, proc) != "nvidia-smi":
            yield pid, files


def _held_devices(files: Sequence[str], proc: str) -> Iterator[tuple[int, int | None]]:
    """Turn open device files into (GPU minor, GPU instance or None)."""
    for path in files:
        gpu = _GPU_FILE.search(path)
        if gpu:
            yield int(gpu.group(1)), None
        cap = _CAP_FILE.search(path)
        if cap and int(cap.group(1)) > 2:  # 1 and 2 are the config and monitor capabilities
            yield _instance_of_cap(int(cap.group(1)), proc)


def _instance_of_cap(number: int, proc: str) -> tuple[int, int]:
    try:
        with open(f"{proc}/driver/nvidia-caps/mig-minors", encoding="utf-8") as table:
            for gpu, gi_id, minor in _MIG_MINOR.findall(table.read()):
                if int(minor) == number:
                    return int(gpu), int(gi_id)
    except OSError:
        pass
    # without the table: 15 instances a GPU, 9 numbers each (its own and eight compute instances), from 3
    return (number - 3) // 135, (number - 3) % 135 // 9
