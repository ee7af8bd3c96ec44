"""Read, plan and change the MIG layout of one node through nvidia-smi.

Runs on the node (Python 3.8+). Reading, planning and changing are separate functions, so that a caller can
look at a plan before anything happens. A change that fails half-way is taken back as far as the hardware lets
it, and the error says what was made, what was lost and what the node looks like now.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from typing import Any, Iterable, Iterator, Mapping, Sequence

from .gpu_holders import Holder, find_holders, library_users
from .mig_geometry import Geometry, LayoutError, hardware_geometry, normal_device_id
from .mig_layout import (
    ComputeInstance,
    GpuPlan,
    GpuState,
    Instance,
    Step,
    Want,
    parse_entries,
    plan_gpu,
    resolve,
    satisfied,
    want_of,
)
from .nvidia_smi import (
    MODE_DISABLED,
    MODE_ENABLED,
    GpuRow,
    NvidiaSmi,
    NvidiaSmiError,
    RunCommand,
    UnreadableOutput,
    known_failure,
)

RECORD_FILE = "mig-layout.json"


class BusyError(Exception):
    """GPUs that cannot be changed because something holds them; nothing was changed."""

    def __init__(self, reasons: Sequence[str]) -> None:
        super().__init__("\n".join(reasons))
        self.reasons = list(reasons)


class RecordError(Exception):
    """The record of former layouts, or the folder it is in, cannot be used."""


class ChangeError(Exception):
    """A change that failed on the way.

    done: steps that were carried out; failed: the step and its reason; made and lost: instances that exist
    now and did not before, and the reverse, as found on the hardware right after the failure; restored:
    whether the former layout is back; restore_error: why not; gpus: the state at the end.
    """

    def __init__(self, failed: str, fix: str = "") -> None:
        super().__init__(failed)
        self.failed = failed
        self.fix = fix
        self.done: list[str] = []
        self.made: list[str] = []
        self.lost: list[str] = []
        self.restored = False
        self.restore_error = ""
        self.gpus: list[GpuState] = []


@dataclass(frozen=True)
class Claim:
    """A device that pods hold by a ResourceClaim, with or without a process on it.

    ``uuid`` is that of a MIG device, of a whole GPU, or "" where only the node is known; ``holder`` names
    claim and pods.
    """

    uuid: str
    holder: str


@dataclass
class NodePlan:
    """The change of a node: one plan per GPU that the layout speaks of."""

    gpus: list[GpuState]
    plans: list[GpuPlan]
    geometries: dict[int, Geometry] = field(default_factory=dict)
    holders: list[Holder] = field(default_factory=list)
    claims: Sequence[Claim] = ()

    @property
    def pending(self) -> list[GpuPlan]:
        return [plan for plan in self.plans if plan.steps]


# ----------------------------------------------------------------------------------------------------
# Running nvidia-smi


def runner(program: str, timeout: float) -> RunCommand:
    """Return a function that runs ``program``; raises ``NvidiaSmiError`` if it is missing or does not end."""
    path = shutil.which(program)
    if path is None:
        raise NvidiaSmiError(
            f"{program} was not found on this node",
            fix="Install the NVIDIA driver, or set mig_nvidia_smi to where nvidia-smi is.",
            kind="missing",
        )
    # nvidia-smi writes for people: keep the locale from changing a word
    environment = {**os.environ, "LC_ALL": "C", "LANG": "C"}

    def run(args: Sequence[str]) -> tuple[int, str]:
        command = [path, *args]
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
            )
        except OSError as error:
            raise NvidiaSmiError(f"{path} cannot be run: {error.strerror}", kind="missing") from error
        try:
            output, _none = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired as error:
            process.kill()
            # a process stuck in the driver cannot be killed: do not wait for it for ever
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=5)
            raise NvidiaSmiError(
                f"`{' '.join(('nvidia-smi', *args))}` did not end within {timeout:g} s",
                fix="Check the kernel log for Xid messages; a GPU that hangs needs a reset or a reboot.",
                kind="timeout",
            ) from error
        return process.returncode, output.decode("utf-8", "replace")

    return run


# ----------------------------------------------------------------------------------------------------
# Reading


def read_gpus(smi: NvidiaSmi) -> list[GpuState]:
    """Return the state of every GPU of the node, by index."""
    rows = smi.gpus()
    if not rows:
        raise NvidiaSmiError(
            "nvidia-smi lists no GPU on this node",
            fix="Check the card (lspci -d 10de:) and the driver, or take the node out of the GPU group.",
            kind="no_devices",
        )
    instances: dict[int, tuple[Instance, ...]] = {}
    if any(row.mig_mode_current == MODE_ENABLED for row in rows):
        instances = _read_instances(smi)
    return [_state(row, instances.get(row.index, ())) for row in sorted(rows, key=lambda row: row.index)]


def _read_instances(smi: NvidiaSmi) -> dict[int, tuple[Instance, ...]]:
    compute = sorted(smi.compute_instances(), key=lambda row: (row.gpu, row.gi_id, row.ci_id))
    listed = {gpu.index: gpu.mig for gpu in smi.listing()}
    uuids: dict[tuple[int, int, int], str] = {}
    for gpu in sorted({*listed, *(row.gpu for row in compute)}):
        # -L gives no instance ids, but lists devices in the order of GPU instance and compute instance
        owners = [row for row in compute if row.gpu == gpu]
        lines = listed.get(gpu, ())
        if [row.profile for row in owners] != [line.profile for line in lines]:
            raise UnreadableOutput(
                "nvidia-smi -L",
                "; ".join(f"{line.profile} {line.uuid}" for line in lines) or "no MIG device",
                f"the compute instances of `mig -lci` on GPU {gpu}:"
                f" {', '.join(row.profile for row in owners) or 'none'}",
            )
        uuids.update({(row.gpu, row.gi_id, row.ci_id): line.uuid for row, line in zip(owners, lines)})
    found: dict[int, list[Instance]] = {}
    for row in sorted(smi.gpu_instances(), key=lambda item: (item.gpu, item.start)):
        inside = tuple(
            ComputeInstance(ci.ci_id, ci.profile, uuids[(ci.gpu, ci.gi_id, ci.ci_id)])
            for ci in compute
            if (ci.gpu, ci.gi_id) == (row.gpu, row.gi_id)
        )
        found.setdefault(row.gpu, []).append(
            Instance(row.gi_id, row.profile, row.profile_id, row.start, row.size, inside)
        )
    return {gpu: tuple(items) for gpu, items in found.items()}


def _state(row: GpuRow, instances: tuple[Instance, ...]) -> GpuState:
    return GpuState(
        index=row.index,
        uuid=row.uuid,
        name=row.name,
        pci_bus_id=row.pci_bus_id,
        pci_device_id=row.pci_device_id,
        memory_mib=row.memory_mib,
        mode_current=row.mig_mode_current,
        mode_pending=row.mig_mode_pending,
        instances=instances,
    )


# ----------------------------------------------------------------------------------------------------
# Planning


def wants_from_layout(layout: str, raw: Any, gpus: Sequence[GpuState]) -> dict[int, Want]:
    """Turn an entry list into one wish per GPU. Raises ``LayoutError`` with every fault."""
    entries, faults = parse_entries(layout, raw)
    if faults:
        raise LayoutError(faults)
    known = [(gpu.index, frozenset([normal_device_id(gpu.pci_device_id)])) for gpu in gpus]
    wants, faults = resolve(layout, entries, known)
    if faults:
        raise LayoutError(faults)
    return wants


def plan_node(
    smi: NvidiaSmi, gpus: Sequence[GpuState], wants: Mapping[int, Want], claims: Sequence[Claim] = ()
) -> NodePlan:
    """Plan every GPU. Raises ``LayoutError`` with the faults of all GPUs; asks only what the plan needs."""
    open_wants = {gpu.index for gpu in gpus if gpu.index in wants and not satisfied(gpu, wants[gpu.index])}
    geometries: dict[int, Geometry] = {}
    holders: list[Holder] = []
    if open_wants:
        geometries = read_geometries(smi, [gpu for gpu in gpus if gpu.index in open_wants])
        holders = find_holders(smi, gpus)
    plans: list[GpuPlan] = []
    faults: list[str] = []
    for gpu in gpus:
        if gpu.index not in wants:
            continue
        in_use = {holder.gi_id for holder in holders if holder.gpu == gpu.index and holder.gi_id is not None}
        in_use.update(owner for owner in (_instance_of(gpu, claim) for claim in claims) if owner is not None)
        try:
            geometry = geometries.get(gpu.index) or Geometry(gpu.name, ())
            plans.append(plan_gpu(gpu, wants[gpu.index], geometry, in_use))
        except LayoutError as error:
            faults.extend(error.faults)
    if faults:
        raise LayoutError(faults)
    return NodePlan(list(gpus), plans, geometries, holders, claims)


def read_geometries(smi: NvidiaSmi, gpus: Iterable[GpuState]) -> dict[int, Geometry]:
    """Return what each MIG-capable GPU of ``gpus`` can be cut into, from the hardware."""
    capable = [gpu for gpu in gpus if gpu.capable]
    if not capable:
        return {}
    profiles, placements = smi.profiles(), smi.placements()
    return {gpu.index: hardware_geometry(gpu.index, gpu.name, profiles, placements) for gpu in capable}


def blockers(plan: NodePlan) -> list[str]:
    """Say, per GPU, which processes and claims keep the plan from being carried out ([] = none known).

    A mode change needs the whole GPU idle and unclaimed; destroying an instance needs that of this instance
    only.
    """
    reasons: list[str] = []
    for item in plan.pending:
        here = [holder for holder in plan.holders if holder.gpu == item.state.index]
        if item.mode_changes:
            mode = "on" if item.want.enabled else "off"
            holding = [holder for holder in here if not holder.passive]
            action = f"switch MIG {mode}"
        else:
            holding = [holder for holder in here if holder.gi_id in item.destroyed_gi_ids]
            action = "destroy GPU instance " + ", ".join(
                str(gi_id) for gi_id in sorted(item.destroyed_gi_ids)
            )
        claimed = [held for held in (_held_by(item, claim) for claim in plan.claims) if held]
        if holding or claimed:
            fixes = [_how_to_free(holding)] if holding else []
            if claimed:
                fixes.append(
                    "Delete the pod that has the claim (or the workload behind it), or wait until it has"
                    " ended, then run again."
                )
            reasons.append(
                f"{item.state.label} is in use, so this run will not {action}:"
                f" {'; '.join([*map(str, holding), *claimed])}."
                f" {' '.join(fixes)}"
            )
    return reasons


def _instance_of(gpu: GpuState, claim: Claim) -> int | None:
    """The GPU instance of ``gpu`` that a claim holds."""
    for item in gpu.instances:
        if any(compute.uuid == claim.uuid for compute in item.compute):
            return item.gi_id
    return None


def _held_by(plan: GpuPlan, claim: Claim) -> str:
    """What a claim holds of that which the plan would take away; "" if nothing."""
    if not plan.mode_changes and not plan.destroyed_gi_ids:
        return ""
    if not claim.uuid:
        return f"{claim.holder}, holds a device of this node that is not published, so it may be this one"
    if claim.uuid == plan.state.uuid:
        return f"{claim.holder}, holds this GPU"
    owner = _instance_of(plan.state, claim)
    if owner is None or not (plan.mode_changes or owner in plan.destroyed_gi_ids):
        return ""
    return f"{claim.holder}, holds {claim.uuid} (GPU instance {owner})"


def _how_to_free(holders: Sequence[Holder]) -> str:
    pods = sorted({holder.pod for holder in holders if holder.pod})
    if pods:
        return f"Delete or drain the pod {', '.join(pods)} (or the workload behind it), then run again."
    return "Stop these processes (DCGM, exporters and device plugins count too), then run again."


# ----------------------------------------------------------------------------------------------------
# Changing


def apply_plan(smi: NvidiaSmi, plan: NodePlan, may_reset: bool) -> tuple[list[GpuState], list[str]]:
    """Carry out a plan; returns the new state and the steps done.

    Raises ``BusyError`` before anything is changed, ``ChangeError`` after a step failed (see there).
    """
    reasons = blockers(plan)
    if reasons:
        raise BusyError(reasons)
    done: list[str] = []
    try:
        for item in plan.pending:
            for step in item.steps:
                _run_step(smi, plan, item.state, step, may_reset)
                done.append(str(step))
        after = read_gpus(smi)
        _verify(plan, after)
    except (ChangeError, NvidiaSmiError) as error:
        failure = error if isinstance(error, ChangeError) else ChangeError(str(error), error.fix)
        failure.done = done
        _take_back(smi, plan, may_reset, failure)
        raise failure from error
    return after, done


def _verify(plan: NodePlan, after: Sequence[GpuState]) -> None:
    now = {gpu.uuid: gpu for gpu in after}
    for item in plan.plans:
        gpu = now.get(item.state.uuid)
        if gpu is None:
            raise ChangeError(
                f"{item.state.label} is gone after the change", "Check the kernel log for Xid 79."
            )
        if not satisfied(gpu, item.want):
            found = ", ".join(instance.profile for instance in gpu.instances) or "no instance"
            raise ChangeError(
                f"nvidia-smi reported success, but {gpu.label} shows MIG {gpu.mode_current} (pending"
                f" {gpu.mode_pending}) with {found}"
            )


def _run_step(smi: NvidiaSmi, plan: NodePlan, gpu: GpuState, step: Step, may_reset: bool) -> None:
    if step.kind in ("mode_on", "mode_off"):
        _change_mode(smi, plan, gpu, step, may_reset)
        return
    if step.kind == "create":
        report = smi.create(gpu.index, [(item.profile.profile_id, item.start) for item in step.placed])
    elif step.kind == "create_ci":
        report = smi.create_compute(gpu.index, step.gi_ids)
    elif step.kind == "destroy_ci":
        report = smi.destroy_compute(gpu.index, step.gi_ids)
    else:
        report = smi.destroy(gpu.index, step.gi_ids)
    if not report.errors:
        return
    text = "; ".join(report.errors)
    fix = ""
    known = known_failure("nvidia-smi mig", text)
    if known is not None:
        fix = known.fix
    elif "In use by another client" in text:
        suspects = "; ".join(str(holder) for holder in library_users())
        fix = f"Stop what holds the instance (processes with the driver loaded: {suspects or 'none seen'})."
    elif "Insufficient Resources" in text:
        fix = (
            "Something else may have created instances on this GPU meanwhile; look at `nvidia-smi mig -lgi`."
        )
    raise ChangeError(f"{step}: {text}", fix)


def _change_mode(smi: NvidiaSmi, plan: NodePlan, gpu: GpuState, step: Step, may_reset: bool) -> None:
    enabled = step.kind == "mode_on"
    wanted = MODE_ENABLED if enabled else MODE_DISABLED
    report = smi.set_mode(gpu.index, enabled)
    said = [*report.pending.values(), *report.notes]
    row = _query(smi, gpu)
    if row.mig_mode_pending != wanted:
        text = "; ".join(said) or "no explanation"
        known = known_failure("nvidia-smi -mig", text)
        raise ChangeError(f"{step}: refused ({text})", known.fix if known else "")
    if row.mig_mode_current != wanted:
        # Ampere, and a GPU in a VM, switches only at a reset; that loses all instances, but none are left
        if may_reset and not any(holder.passive for holder in plan.holders if holder.gpu == gpu.index):
            said.append(smi.reset(gpu.index))
            row = _query(smi, gpu)
        if row.mig_mode_current != wanted:
            smi.set_mode(gpu.index, not enabled)
            raise _still_pending(plan, gpu, step, said, may_reset)


def _still_pending(
    plan: NodePlan, gpu: GpuState, step: Step, said: Sequence[str], may_reset: bool
) -> ChangeError:
    holding = [holder for holder in plan.holders if holder.gpu == gpu.index] or library_users()
    who = "; ".join(str(holder) for holder in holding) or "no process that can be seen from here"
    if not may_reset:
        fix = "Allow a reset (mig_reset: true), or reboot the node with the mode set."
    elif holding:
        fix = f"{_how_to_free(holding)} nvidia-persistenced counts as a holder: stop it for the change."
    elif any("In use by another client" in text for text in said):
        fix = "Stop what holds it unseen (another container, the host of a VM), or reboot the node."
    else:
        fix = "Reset the GPU from the host that owns it, or reboot the node."
    return ChangeError(
        f"{step}: it stays pending and was taken back; held by: {who}; nvidia-smi said: {' '.join(said)}", fix
    )


def _query(smi: NvidiaSmi, gpu: GpuState) -> GpuRow:
    for row in smi.gpus():
        if row.uuid == gpu.uuid:
            return row
    raise ChangeError(f"{gpu.label} is no longer listed by nvidia-smi", "Check the kernel log for Xid 79.")


def _take_back(smi: NvidiaSmi, plan: NodePlan, may_reset: bool, failure: ChangeError) -> None:
    """Put the former layout back and note in ``failure`` what was found and whether that worked."""
    before = {gpu.uuid: gpu for gpu in plan.gpus}
    try:
        failure.gpus = read_gpus(smi)
        for gpu in failure.gpus:
            former = before.get(gpu.uuid, gpu)
            failure.made += _difference(gpu, former)
            failure.lost += _difference(former, gpu)
        for gpu in failure.gpus:
            if gpu.uuid not in before:
                continue
            geometry = plan.geometries.get(gpu.index) or Geometry(gpu.name, ())
            back = plan_gpu(gpu, want_of(before[gpu.uuid]), geometry)
            for step in back.steps:
                _run_step(smi, plan, gpu, step, may_reset)
        failure.gpus = read_gpus(smi)
        failure.restored = all(
            gpu.uuid not in before or satisfied(gpu, want_of(before[gpu.uuid])) for gpu in failure.gpus
        )
        if not failure.restored:
            failure.restore_error = "the GPUs do not show the former layout"
    except (ChangeError, LayoutError, NvidiaSmiError) as error:
        failure.restore_error = str(error)
        with contextlib.suppress(NvidiaSmiError):
            failure.gpus = read_gpus(smi)


def _difference(gpu: GpuState, other: GpuState) -> list[str]:
    known = {(item.gi_id, item.profile, item.start, item.compute) for item in other.instances}
    return [
        f"GPU {gpu.index}: {item.profile} at {item.start}:{item.size} (GPU instance {item.gi_id}"
        f"{'' if item.compute else ', without a compute instance'})"
        for item in gpu.instances
        if (item.gi_id, item.profile, item.start, item.compute) not in known
    ]


# ----------------------------------------------------------------------------------------------------
# The record of the layouts from before the first change


def record_path(folder: str) -> str:
    return os.path.join(folder, RECORD_FILE)


@contextlib.contextmanager
def locked(folder: str, timeout: float) -> Iterator[None]:
    """Hold this node's layout for one run; makes the folder. Raises ``RecordError`` after ``timeout`` s."""
    try:
        os.makedirs(folder, mode=0o755, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise RecordError(f"the folder {folder} cannot be used: {error.strerror}") from error
    try:
        deadline = time.monotonic() + timeout
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise RecordError(
                        f"another run has been changing this node's GPUs for {timeout:g} s (it holds"
                        f" {folder}); wait for it or end it, then run again"
                    ) from None
                time.sleep(0.2)
        yield
    finally:
        os.close(handle)


def add_to_record(folder: str, gpus: Sequence[GpuState]) -> list[str]:
    """Record the layout of GPUs that are about to change for the first time; returns the UUIDs that were new.

    What is recorded stays: a GPU keeps the layout it had before this project first changed it.
    """
    rows = _read_rows(folder) or []
    known = {str(row.get("uuid")) for row in rows}
    fresh = [gpu for gpu in gpus if gpu.uuid not in known]
    if fresh:
        moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        rows += [
            {
                "uuid": gpu.uuid,
                "index": gpu.index,
                "name": gpu.name,
                "recorded": moment,
                "mig_enabled": gpu.mode_current == MODE_ENABLED,
                "instances": [{"profile": item.profile, "start": item.start} for item in gpu.instances],
            }
            for gpu in fresh
        ]
        _write_rows(folder, rows)
    return [gpu.uuid for gpu in fresh]


def drop_from_record(folder: str, uuids: Iterable[str]) -> None:
    """Take GPUs out of the record; the file goes with the last of them."""
    gone = set(uuids)
    rows = [row for row in _read_rows(folder) or [] if row.get("uuid") not in gone]
    if rows:
        _write_rows(folder, rows)
    else:
        remove_record(folder)


def read_record(folder: str) -> dict[str, Want] | None:
    """Return the recorded wish per GPU UUID, or None when there is no record."""
    rows = _read_rows(folder)
    if rows is None:
        return None
    path = record_path(folder)
    wants: dict[str, Want] = {}
    try:
        for row in rows:
            fixed = tuple((str(item["profile"]), int(item["start"])) for item in row["instances"])
            names = [name for name, _start in fixed]
            devices = tuple((name, names.count(name)) for name in sorted(set(names)))
            wants[str(row["uuid"])] = Want(bool(row["mig_enabled"]), devices, fixed, f"the record {path}")
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(_unreadable(path, error)) from error
    return wants


def remove_record(folder: str) -> None:
    """Remove the record if there is one."""
    try:
        os.unlink(record_path(folder))
    except FileNotFoundError:
        return
    except OSError as error:
        raise RecordError(f"the record {record_path(folder)} cannot be removed: {error.strerror}") from error


def _read_rows(folder: str) -> list[dict[str, Any]] | None:
    path = record_path(folder)
    try:
        with open(path, encoding="utf-8") as stream:
            content = json.load(stream)
        rows = content["gpus"]
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise TypeError("its gpus are no list of maps")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordError(_unreadable(path, error)) from error
    return rows


def _write_rows(folder: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Replace the record at once: nobody, not even a run after a crash, sees half of one."""
    path = record_path(folder)
    try:
        os.makedirs(folder, mode=0o755, exist_ok=True)
        handle, scratch = tempfile.mkstemp(prefix=f".{RECORD_FILE}.", dir=folder)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                json.dump({"version": 1, "gpus": list(rows)}, stream, indent=2)
                stream.write("\n")
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(scratch, path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(scratch)
            raise
    except OSError as error:
        raise RecordError(
            f"the layout of this node cannot be recorded in {path}: {error.strerror}"
        ) from error


def _unreadable(path: str, error: Exception) -> str:
    return f"the record {path} cannot be read ({error}); mend or remove it by hand."
