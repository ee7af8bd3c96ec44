"""Read what nvidia-smi prints.

Runs on the node (Python 3.8+, standard library only). Every parser takes the text of one command and returns
typed records; text it cannot account for raises ``UnreadableOutput`` with the command and the line. Tables
are read by their tokens, never by column positions, because the width differs between driver branches.

Memory is in MiB where a field name ends in ``_mib``; GPU, instance and profile numbers are nvidia-smi's own.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field
from typing import Callable, Iterator, Sequence, Tuple

MODE_ENABLED = "Enabled"
MODE_DISABLED = "Disabled"
MODE_UNSUPPORTED = "N/A"

_BUS_ID = r"[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f]"
_NOT_AVAILABLE = re.compile(r"^\[?(N/A|Not Supported|Requested functionality has been deprecated)\]?$")
_BORDER = re.compile(r"^[+|][-=+|]+[+|]$")
_NOTHING_LISTED = (
    re.compile(r"^No MIG-(enabled|supported) devices found\.?$"),
    re.compile(r"^No (GPU|compute) instances found\b.*$"),
)


class NvidiaSmiError(Exception):
    """nvidia-smi could not be used; ``str()`` is one readable sentence, ``fix`` says what to do."""

    def __init__(self, message: str, fix: str = "", kind: str = "failed") -> None:
        super().__init__(message)
        self.fix = fix
        self.kind = kind


class UnreadableOutput(NvidiaSmiError):
    """A line of nvidia-smi's output that no rule of this file explains."""

    def __init__(self, command: str, line: str, expected: str) -> None:
        super().__init__(
            f"`{command}` printed a line that cannot be read: {line!r} (expected {expected})",
            fix="Check by hand what the command prints; a new driver branch may have changed it.",
            kind="unreadable",
        )
        self.command = command
        self.line = line


@dataclass(frozen=True)
class MigLine:
    """A MIG device as `nvidia-smi -L` lists it below its GPU."""

    profile: str
    index: int
    uuid: str


@dataclass(frozen=True)
class GpuLine:
    """A GPU as `nvidia-smi -L` lists it."""

    index: int
    name: str
    uuid: str
    mig: tuple[MigLine, ...] = ()


@dataclass(frozen=True)
class GpuRow:
    """One GPU of `--query-gpu` with the fields of ``GPU_FIELDS``."""

    index: int
    uuid: str
    name: str
    pci_bus_id: str
    pci_device_id: str
    memory_mib: int
    mig_mode_current: str
    mig_mode_pending: str
    driver_version: str


@dataclass(frozen=True)
class ProfileRow:
    """A GPU instance profile of `mig -lgip`."""

    gpu: int
    name: str
    profile_id: int
    free: int
    total: int
    memory_gib: float
    multiprocessors: int


@dataclass(frozen=True)
class PlacementRow:
    """Where a profile may start (`mig -lgipp`), in memory slices."""

    gpu: int
    profile_id: int
    starts: tuple[int, ...]
    size: int


@dataclass(frozen=True)
class GpuInstanceRow:
    """A GPU instance of `mig -lgi`; start and size in memory slices."""

    gpu: int
    gi_id: int
    profile: str
    profile_id: int
    start: int
    size: int


@dataclass(frozen=True)
class ComputeInstanceRow:
    """A compute instance of `mig -lci`; start and size in compute slices."""

    gpu: int
    gi_id: int
    ci_id: int
    profile: str
    profile_id: int
    start: int
    size: int


@dataclass(frozen=True)
class ComputeApp:
    """A process of `--query-compute-apps`; ``used_mib`` is None where the driver does not say."""

    gpu_uuid: str
    pid: int
    name: str
    used_mib: int | None


@dataclass(frozen=True)
class GpuProcess:
    """A process of `-q -x`; ``gi_id`` is None when it holds the whole GPU."""

    pid: int
    name: str
    gi_id: int | None


@dataclass(frozen=True)
class GpuDetail:
    """What only `-q -x` tells: the /dev/nvidia<minor> number and which process sits in which instance."""

    uuid: str
    minor: int | None
    architecture: str
    processes: tuple[GpuProcess, ...] = ()


@dataclass
class ModeReport:
    """What `-mig 0|1` claims. Never a proof: the mode must be queried again."""

    changed: dict[str, str] = field(default_factory=dict)
    pending: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass
class InstanceReport:
    """What a creating or destroying `mig` command claims; ids are (gpu, gi) or (gpu, gi, ci)."""

    gpu_instances: list[tuple[int, int]] = field(default_factory=list)
    compute_instances: list[tuple[int, int, int]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


GPU_FIELDS = (
    "index",
    "uuid",
    "name",
    "pci.bus_id",
    "pci.device_id",
    "memory.total",
    "mig.mode.current",
    "mig.mode.pending",
    "driver_version",
)
COMPUTE_APP_FIELDS = ("gpu_uuid", "pid", "process_name", "used_memory")

# (pattern over the whole output, kind, what it means, what to do); the first that matches wins
_FAILURES: Sequence[tuple[str, str, str, str]] = (
    (
        r"Driver/library version mismatch",
        "driver_mismatch",
        "the loaded kernel module and the user-space driver have different versions",
        "Reboot the node, or unload and reload the nvidia kernel modules, after a driver update.",
    ),
    (
        r"couldn't communicate with the NVIDIA driver",
        "driver_not_loaded",
        "the NVIDIA kernel driver is not loaded",
        "Install the driver for the running kernel and load it (modprobe nvidia).",
    ),
    (
        r"GPU is lost|GPU is lost\.|has fallen off the bus",
        "gpu_lost",
        "a GPU has fallen off the bus",
        "Look for Xid 79 in the kernel log; drain and reboot the node, or replace the card.",
    ),
    (
        r"GPU requires reset|requires a reset",
        "reset_required",
        "a GPU must be reset before it can be used",
        "Stop what uses it and run `nvidia-smi -i <index> --gpu-reset`, or reboot the node.",
    ),
    (
        r"Insufficient Permissions",
        "permission",
        "the user that runs nvidia-smi may not do this",
        "Run the task as root (become: true).",
    ),
    (
        r"No devices were found",
        "no_devices",
        "nvidia-smi sees no such GPU",
        "Check the device index, the card (lspci -d 10de:) and whether the GPU is bound to another driver.",
    ),
    (
        r"Failed to initialize NVML: (?P<why>.+)",
        "nvml",
        "the driver library cannot start",
        "Check the kernel log and that /dev/nvidia* exist and are readable here.",
    ),
    (
        r"Unable to determine the device handle for (?P<why>.+)",
        "gpu_unreachable",
        "a GPU does not answer",
        "Check the kernel log for Xid messages; drain and reboot the node.",
    ),
    (
        r"Field \"(?P<why>[^\"]+)\" is not a valid field to query",
        "old_driver",
        "this driver is too old to know a queried field",
        "Update the NVIDIA driver (565 or newer for DRA).",
    ),
)


def known_failure(command: str, text: str) -> NvidiaSmiError | None:
    """Return the error that ``text`` stands for, or None when it shows no failure this file knows."""
    for pattern, kind, meaning, fix in _FAILURES:
        found = re.search(pattern, text)
        if found:
            line = next((row.strip() for row in text.splitlines() if found.group(0) in row), found.group(0))
            return NvidiaSmiError(f"`{command}`: {meaning} ({line})", fix=fix, kind=kind)
    return None


def parse_list(text: str) -> list[GpuLine]:
    """Read `nvidia-smi -L`."""
    gpus: list[GpuLine] = []
    for line in _lines(text):
        gpu = re.match(r"^GPU\s+(\d+):\s+(.+?)\s+\(UUID:\s*(GPU-[0-9A-Fa-f-]+)\)$", line)
        if gpu:
            gpus.append(GpuLine(int(gpu.group(1)), gpu.group(2), gpu.group(3)))
            continue
        mig = re.match(r"^MIG\s+(\S+)\s+Device\s+(\d+):\s+\(UUID:\s*(MIG-\S+?)\)$", line.strip())
        if mig and gpus:
            last = gpus[-1]
            device = MigLine(mig.group(1), int(mig.group(2)), mig.group(3))
            gpus[-1] = GpuLine(last.index, last.name, last.uuid, (*last.mig, device))
            continue
        raise UnreadableOutput(
            "nvidia-smi -L", line, "`GPU n: name (UUID: …)` or `MIG profile Device n: (UUID: …)`"
        )
    return gpus


def parse_gpus(text: str) -> list[GpuRow]:
    """Read `--query-gpu=<GPU_FIELDS> --format=csv,noheader,nounits`, one GPU a line."""
    command = "nvidia-smi --query-gpu"
    rows: list[GpuRow] = []
    for line in _lines(text):
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(GPU_FIELDS):
            raise UnreadableOutput(command, line, f"{len(GPU_FIELDS)} values")
        index, uuid, name, bus_id, device_id, memory, current, pending, driver = cells
        size = re.match(r"^(\d+)(\s*MiB)?$", memory)
        if not index.isdigit() or not uuid.startswith("GPU-"):
            raise UnreadableOutput(command, line, "an index and a GPU UUID first")
        if not size:
            raise UnreadableOutput(command, line, "the total memory in MiB")
        rows.append(
            GpuRow(
                index=int(index),
                uuid=uuid,
                name=name,
                pci_bus_id=bus_id,
                pci_device_id=device_id,
                memory_mib=int(size.group(1)),
                mig_mode_current=_mode(command, line, current),
                mig_mode_pending=_mode(command, line, pending),
                driver_version=driver,
            )
        )
    return rows


def parse_profiles(text: str) -> list[ProfileRow]:
    """Read `mig -lgip`; its second row per profile (engines) is not needed and only checked for shape."""
    first = re.compile(
        r"^\|\s*(\d+)\s+MIG (\S+)\s+(\d+)\s+(\d+)/(\d+)\s+([\d.]+)\s+(?:Yes|No)\s+(\d+)\s+\d+\s+\d+\s*\|$"
    )
    second = re.compile(r"^\|\s+\d+\s+\d+\s+\d+\s*\|$")
    rows: list[ProfileRow] = []
    for line in _table("nvidia-smi mig -lgip", text):
        found = first.match(line)
        if found:
            gpu, name, profile_id, free, total, memory, sm = found.groups()
            rows.append(
                ProfileRow(int(gpu), name, int(profile_id), int(free), int(total), float(memory), int(sm))
            )
        elif not (second.match(line) and rows):
            raise UnreadableOutput(
                "nvidia-smi mig -lgip", line, "`GPU MIG name ID free/total GiB P2P SM DEC ENC`"
            )
    return rows


def parse_placements(text: str) -> list[PlacementRow]:
    """Read `mig -lgipp`."""
    shape = re.compile(r"^GPU\s+(\d+)\s+Profile ID\s+(\d+)\s+Placements?\s*:\s*\{([\d,\s]*)\}:(\d+)$")
    rows: list[PlacementRow] = []
    for line in _lines(text):
        if _lists_nothing(line):
            continue
        found = shape.match(line.strip())
        if not found:
            raise UnreadableOutput(
                "nvidia-smi mig -lgipp", line, "`GPU n Profile ID n Placements: {starts}:size`"
            )
        gpu, profile_id, starts, size = found.groups()
        listed = tuple(sorted(int(start) for start in starts.replace(" ", "").split(",") if start))
        rows.append(PlacementRow(int(gpu), int(profile_id), listed, int(size)))
    return rows


def parse_gpu_instances(text: str) -> list[GpuInstanceRow]:
    """Read `mig -lgi`; empty when MIG is off or no instance exists."""
    shape = re.compile(r"^\|\s*(\d+)\s+MIG (\S+)\s+(\d+)\s+(\d+)\s+(\d+):(\d+)\s*\|$")
    rows: list[GpuInstanceRow] = []
    for line in _table("nvidia-smi mig -lgi", text):
        found = shape.match(line)
        if not found:
            raise UnreadableOutput(
                "nvidia-smi mig -lgi", line, "`GPU MIG name profile-ID instance-ID start:size`"
            )
        gpu, name, profile_id, gi_id, start, size = found.groups()
        rows.append(GpuInstanceRow(int(gpu), int(gi_id), name, int(profile_id), int(start), int(size)))
    return rows


def parse_compute_instances(text: str) -> list[ComputeInstanceRow]:
    """Read `mig -lci`; empty when MIG is off or no instance exists."""
    shape = re.compile(r"^\|\s*(\d+)\s+(\d+)\s+MIG (\S+)\s+(\d+)\s+(\d+)\s+(\d+):(\d+)\s*\|$")
    rows: list[ComputeInstanceRow] = []
    for line in _table("nvidia-smi mig -lci", text):
        found = shape.match(line)
        if not found:
            raise UnreadableOutput(
                "nvidia-smi mig -lci", line, "`GPU GI-ID MIG name profile-ID instance-ID start:size`"
            )
        gpu, gi_id, name, profile_id, ci_id, start, size = found.groups()
        rows.append(
            ComputeInstanceRow(int(gpu), int(gi_id), int(ci_id), name, int(profile_id), int(start), int(size))
        )
    return rows


def parse_compute_apps(text: str) -> list[ComputeApp]:
    """Read `--query-compute-apps=<COMPUTE_APP_FIELDS> --format=csv,noheader`; names may hold commas."""
    rows: list[ComputeApp] = []
    for line in _lines(text):
        found = re.match(r"^(GPU-\S+|MIG-\S+),\s*(\d+),\s*(.*),\s*(?:(\d+)(?:\s*MiB)?|(\[.*\]))$", line)
        if not found:
            raise UnreadableOutput("nvidia-smi --query-compute-apps", line, "`UUID, pid, name, memory`")
        uuid, pid, name, used, _unknown = found.groups()
        rows.append(ComputeApp(uuid, int(pid), name.strip(), int(used) if used else None))
    return rows


def parse_details(text: str) -> list[GpuDetail]:
    """Read `-q -x`: minor number, architecture and processes of every GPU."""
    command = "nvidia-smi -q -x"
    try:
        root = ET.fromstring(text.strip())  # noqa: S314 - written by the local driver, without external entities
    except ET.ParseError as error:
        first = next(iter(_lines(text)), "")
        raise UnreadableOutput(command, first, f"XML ({error})") from error
    details: list[GpuDetail] = []
    for gpu in root.findall("gpu"):
        uuid = (gpu.findtext("uuid") or "").strip()
        if not uuid:
            raise UnreadableOutput(command, f"<gpu id={gpu.get('id')!r}>", "a <uuid> in every <gpu>")
        minor = (gpu.findtext("minor_number") or "").strip()
        processes = []
        for process in gpu.iterfind("processes/process_info"):
            pid = (process.findtext("pid") or "").strip()
            instance = (process.findtext("gpu_instance_id") or "").strip()
            if not pid.isdigit():
                raise UnreadableOutput(command, f"<pid>{pid}</pid>", "a process number")
            processes.append(
                GpuProcess(
                    pid=int(pid),
                    name=(process.findtext("process_name") or "").strip(),
                    gi_id=int(instance) if instance.isdigit() else None,
                )
            )
        details.append(
            GpuDetail(
                uuid=uuid,
                minor=int(minor) if minor.isdigit() else None,
                architecture=(gpu.findtext("product_architecture") or "").strip(),
                processes=tuple(processes),
            )
        )
    return details


def parse_mode_change(text: str) -> ModeReport:
    """Read `-i n -mig 0|1`. ``changed``: bus id -> mode; ``pending``: bus id -> why not yet effective."""
    report = ModeReport()
    for line in _lines(text):
        changed = re.match(rf"^(Enabled|Disabled) MIG Mode for GPU ({_BUS_ID})\.?$", line)
        pending = re.match(
            rf"^Warning: MIG mode is in pending (?:enable|disable) state for GPU ({_BUS_ID}):\s*(.*)$", line
        )
        if changed:
            report.changed[changed.group(2)] = changed.group(1)
        elif pending:
            report.pending[pending.group(1)] = pending.group(2)
        elif line.strip() != "All done.":
            report.notes.append(line.strip())
    return report


def parse_instance_change(text: str) -> InstanceReport:
    """Read the output of `mig -cgi`, `-cci`, `-dci` or `-dgi`."""
    report = InstanceReport()
    done = r"^Successfully (?:created|destroyed)"
    place = r"(?:on|from) GPU\s+(\d+)"
    done_ci = re.compile(rf"{done} compute instance ID\s+(\d+) {place} GPU instance ID\s+(\d+)")
    done_gi = re.compile(rf"{done} GPU instance ID\s+(\d+) {place}")
    for line in _lines(text):
        compute = done_ci.match(line)
        whole = done_gi.match(line)
        if compute:
            ci_id, gpu, gi_id = (int(part) for part in compute.groups())
            report.compute_instances.append((gpu, gi_id, ci_id))
        elif whole:
            gi_id, gpu = (int(part) for part in whole.groups())
            report.gpu_instances.append((gpu, gi_id))
        elif re.match(r"^(Unable|Failed) to |^Invalid |^ERROR:|^Option ", line):
            report.errors.append(line.strip())
        else:
            report.notes.append(line.strip())
    return report


RunCommand = Callable[[Sequence[str]], Tuple[int, str]]  # typing.Tuple: evaluated at run time on Python 3.8


class NvidiaSmi:
    """The commands this project uses, over a function that runs one and returns (exit status, output).

    Reading commands raise ``NvidiaSmiError`` on a failure. Changing commands return a report of what
    nvidia-smi claims, because its exit status and closing line do not tell whether the change happened.
    """

    def __init__(self, run: RunCommand) -> None:
        self._run = run

    def _read(self, args: Sequence[str]) -> str:
        rc, text = self._run(args)
        command = " ".join(("nvidia-smi", *args))
        # an empty list is reported with exit status 0 or 6, depending on the list
        if any(_lists_nothing(line) for line in _lines(text)):
            return text
        error = known_failure(command, text)
        if error is not None:
            raise error
        if rc != 0:
            shown = "; ".join(line.strip() for line in _lines(text)) or "no output"
            raise NvidiaSmiError(f"`{command}` ended with exit status {rc}: {shown}")
        return text

    def gpus(self) -> list[GpuRow]:
        query = f"--query-gpu={','.join(GPU_FIELDS)}"
        return parse_gpus(self._read([query, "--format=csv,noheader,nounits"]))

    def listing(self) -> list[GpuLine]:
        return parse_list(self._read(["-L"]))

    def details(self) -> list[GpuDetail]:
        return parse_details(self._read(["-q", "-x"]))

    def compute_apps(self) -> list[ComputeApp]:
        query = f"--query-compute-apps={','.join(COMPUTE_APP_FIELDS)}"
        return parse_compute_apps(self._read([query, "--format=csv,noheader"]))

    def profiles(self) -> list[ProfileRow]:
        return parse_profiles(self._read(["mig", "-lgip"]))

    def placements(self) -> list[PlacementRow]:
        return parse_placements(self._read(["mig", "-lgipp"]))

    def gpu_instances(self) -> list[GpuInstanceRow]:
        return parse_gpu_instances(self._read(["mig", "-lgi"]))

    def compute_instances(self) -> list[ComputeInstanceRow]:
        return parse_compute_instances(self._read(["mig", "-lci"]))

    def set_mode(self, gpu: int, enabled: bool) -> ModeReport:
        _rc, text = self._run(["-i", str(gpu), "-mig", "1" if enabled else "0"])
        return parse_mode_change(text)

    def reset(self, gpu: int) -> str:
        """Reset one GPU and return what nvidia-smi said; whether it worked shows in the mode."""
        _rc, text = self._run(["-i", str(gpu), "--gpu-reset"])
        return " ".join(line.strip() for line in _lines(text))

    def create(self, gpu: int, wanted: Sequence[tuple[int, int]]) -> InstanceReport:
        """Create GPU instances with a full compute instance each; ``wanted``: (profile id, start)."""
        tuples = ",".join(f"{profile_id}:{start}" for profile_id, start in wanted)
        return self._change(["mig", "-i", str(gpu), "-cgi", tuples, "-C"])

    def create_compute(self, gpu: int, gi_ids: Sequence[int]) -> InstanceReport:
        return self._change(["mig", "-i", str(gpu), "-gi", _csv(gi_ids), "-cci"])

    def destroy_compute(self, gpu: int, gi_ids: Sequence[int]) -> InstanceReport:
        return self._change(["mig", "-i", str(gpu), "-gi", _csv(gi_ids), "-dci"])

    def destroy(self, gpu: int, gi_ids: Sequence[int]) -> InstanceReport:
        return self._change(["mig", "-i", str(gpu), "-gi", _csv(gi_ids), "-dgi"])

    def _change(self, args: Sequence[str]) -> InstanceReport:
        rc, text = self._run(args)
        report = parse_instance_change(text)
        if rc != 0 and not report.errors:
            said = "; ".join(report.notes) or "no output"
            report.errors.append(f"`{' '.join(('nvidia-smi', *args))}` ended with exit status {rc}: {said}")
        return report


def _csv(numbers: Sequence[int]) -> str:
    return ",".join(str(number) for number in numbers)


def _lines(text: str) -> Iterator[str]:
    for line in text.splitlines():
        if line.strip():
            yield line.rstrip()


def _lists_nothing(line: str) -> bool:
    return any(pattern.match(line.strip()) for pattern in _NOTHING_LISTED)


def _table(command: str, text: str) -> Iterator[str]:
    """Yield the body lines of a boxed table: those after its `|===|` rule that are no border."""
    body = False
    for line in _lines(text):
        row = line.strip()
        if _lists_nothing(row):
            continue
        if _BORDER.match(row):
            body = body or "=" in row
            continue
        if not row.startswith("|") or not row.endswith("|"):
            raise UnreadableOutput(command, line, "a table row")
        if body:
            yield row


def _mode(command: str, line: str, value: str) -> str:
    if _NOT_AVAILABLE.match(value):
        return MODE_UNSUPPORTED
    if value in (MODE_ENABLED, MODE_DISABLED):
        return value
    raise UnreadableOutput(command, line, "a MIG mode of Enabled, Disabled or [N/A]")
