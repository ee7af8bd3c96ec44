"""What a workload's log proves. Pure functions; controller only.

A workload prints for people, and one line for us: ``[proof] `` followed by a JSON object::

    {"devices": [{"kind": "mig", "uuid": "MIG-…", "parent_uuid": "GPU-…", "name": "NVIDIA A30 MIG 1g.6gb",
                  "memory_bytes": 6241124352}],
     "backend": "cuda" | "cpu", "torch": "2.4.0", "driver": "580.95.05", "cuda_memory_bytes": 0,
     "matmul": {"size": 512, "max_error": 0.0},                                               (smoke)
     "rank": 0, "world": 1, "steps": 60, "loss_first": 5.5, "loss_last": 0.4, "loss_factor": 0.5,
     "trainable": 1000, "peak_bytes": 1, "peak_kind": "cuda" | "rss"}                         (sft)

Several such lines add up. Allocated devices are those of resource_slices.merge_slices. Checks
are as in checks.py.
"""

from __future__ import annotations

import json
from typing import Any, Iterable, Mapping, Sequence

from .checks import Check, judged

SMOKE_OK = "matmul_on_slice: OK"
SFT_OK = "DRA LoRA SFT on GPU slice: OK"
PROOF = "[proof] "

# What torch calls the memory of a device is the published one less what the driver keeps for itself.
_CUDA_SHARE = 0.85

Device = Mapping[str, Any]


def last_line(log: str) -> str:
    """The last line that is not blank, without surrounding white space; "" if there is none."""
    return next((line.strip() for line in reversed(log.splitlines()) if line.strip()), "")


def proof(log: str) -> dict[str, Any]:
    """All proof lines of a log merged, later over earlier; lines that are no JSON object are left out."""
    merged: dict[str, Any] = {}
    for line in log.splitlines():
        if not line.startswith(PROOF):
            continue
        try:
            value = json.loads(line[len(PROOF) :])
        except ValueError:
            continue
        if isinstance(value, dict):
            merged.update(value)
    return merged


def judge_end(log: str | None, wanted: str) -> Check:
    """The last non-blank line. ``None``: the log could not be read, which proves nothing either way."""
    if log is None:
        return judged(
            "log",
            False,
            asked=f"the log ends with '{wanted}'",
            found="the log could not be read",
            fix="see the pod's state and events in the evidence; run again",
        )
    last = last_line(log)
    return judged(
        "log",
        last == wanted,
        asked=f"the log ends with '{wanted}'",
        found=f"'{last}'" if last else "an empty log",
        fix="read the log in the evidence: it ends before the work was done",
        evidence={"tail": log.splitlines()[-20:]},
    )


def judge_device(log: str, allocated: Sequence[Device], cuda_required: bool) -> list[Check]:
    """Does the log show exactly the one device that the claim was given?

    ``allocated`` are the devices of the pod's own claim, recorded while it ran. Compares number, kind, name,
    UUID and memory, and what the work ran on.
    """
    seen = proof(log)
    visible = [d for d in seen.get("devices") or [] if isinstance(d, dict)]
    checks = [
        judged(
            "allocation",
            len(allocated) == 1,
            asked="the pod's claim was allocated one device while it ran",
            found=_names(allocated) or "no recorded allocation",
            needed="one device",
            fix="run again: without the allocation the log cannot be compared with anything",
            evidence={"allocated": [_brief(d) for d in allocated]},
        ),
        judged(
            "one-device",
            len(visible) == 1,
            asked="the container sees exactly one device",
            found=f"{len(visible)} devices" + (f": {_names(visible)}" if visible else " in the proof line"),
            needed="1 device",
            fix="check that the container lists the claim in resources.claims; nothing else may mount GPUs",
            evidence={"visible": visible},
        ),
    ]
    if len(allocated) != 1 or len(visible) != 1:
        return checks
    given, got = allocated[0], visible[0]
    facts = dict(given.get("attributes") or {})
    name = str(facts.get("productName") or "")
    if given.get("profile"):
        name = f"{name} MIG {given['profile']}".strip()
    checks += [
        _equal("kind", "the device is of the allocated kind", str(got.get("kind")), str(given.get("type"))),
        _equal("name", "the device is the published product and profile", str(got.get("name")), name),
        _equal("uuid", "the device is the allocated one", str(got.get("uuid")), str(given.get("uuid"))),
        _equal(
            "memory",
            "the device's memory is the published capacity",
            _size(got.get("memory_bytes")),
            _size(given.get("memory_bytes")),
            same=got.get("memory_bytes") == given.get("memory_bytes"),
        ),
    ]
    if given.get("parent_uuid"):
        checks.append(
            _equal(
                "parent",
                "the device is a part of the published GPU",
                str(got.get("parent_uuid")),
                str(given["parent_uuid"]),
            )
        )
    checks.append(_judge_backend(seen, given, cuda_required))
    return checks


def judge_smoke(log: str | None, allocated: Sequence[Device], cuda_required: bool) -> list[Check]:
    """All checks of a smoke pod's log."""
    end = judge_end(log, SMOKE_OK)
    if log is None:
        return [end]
    seen = proof(log)
    product = seen.get("matmul") or {}
    error = product.get("max_error")
    checks = judge_device(log, allocated, cuda_required)
    checks.append(
        judged(
            "matmul",
            isinstance(error, (int, float)) and error <= float(product.get("tolerance", 0)),
            asked="a matrix product on the slice has the right result",
            found=f"size {product.get('size')} on {seen.get('backend')}, largest error {error}"
            if product
            else "no product in the proof line",
            needed=f"an error of at most {product.get('tolerance')}" if product else "a product",
            fix="read the log in the evidence",
            evidence={"matmul": product, "torch": seen.get("torch")},
        )
    )
    listed = [str(d.get("uuid")) for d in allocated]
    checks.append(
        judged(
            "nvidia-smi",
            bool(listed) and all(f"(UUID: {uuid})" in log for uuid in listed),
            asked="nvidia-smi -L in the container lists the allocated device",
            found="; ".join(_smi_lines(log)) or "nothing listed",
            needed=", ".join(listed),
            fix="check that the driver's CDI spec mounts nvidia-smi of the driver root into the pod",
        )
    )
    return [*checks, end]


def judge_sft(
    log: str | None, allocated: Sequence[Device], cuda_required: bool, world: int = 1
) -> list[Check]:
    """All checks of one training pod's log; ``world`` is the number of processes that train together."""
    end = judge_end(log, SFT_OK)
    if log is None:
        return [end]
    seen = proof(log)
    checks = judge_device(log, allocated, cuda_required)
    first, last, factor = seen.get("loss_first"), seen.get("loss_last"), seen.get("loss_factor")
    numbers = all(isinstance(n, (int, float)) for n in (first, last, factor))
    checks += [
        judged(
            "loss",
            numbers and float(last or 0) <= float(first or 0) * float(factor or 0),
            asked="the training loss fell by the stated factor",
            found=f"{first} -> {last} in {seen.get('steps')} steps"
            if numbers
            else "no losses in the proof line",
            needed=f"at most {factor} of the first loss" if numbers else "losses",
            fix="raise sft_steps or sft_learning_rate; read the log in the evidence",
            evidence={k: seen.get(k) for k in ("steps", "seed", "loss_first", "loss_last", "trainable")},
        ),
        judged(
            "world",
            seen.get("world") == world,
            asked="all processes trained together",
            found=f"rank {seen.get('rank')} of {seen.get('world')}",
            needed=f"{world} in one group",
            fix="check that the TrainJob has spec.trainer: without it Trainer sets no PET_* variables",
        ),
    ]
    if len(allocated) == 1:
        peak, limit = seen.get("peak_bytes"), int(allocated[0].get("memory_bytes") or 0)
        kind = {"cuda": "allocated on the device", "rss": "resident memory of the process (no CUDA)"}
        checks.append(
            judged(
                "peak-memory",
                isinstance(peak, int) and 0 < peak <= limit,
                asked="the peak memory stayed inside the slice",
                found=f"{_size(peak)} {kind.get(str(seen.get('peak_kind')), '')}".strip(),
                needed=f"at most {_size(limit)}",
                fix="ask for a larger slice (gpu_slices_memory) or train a smaller batch",
            )
        )
    return [*checks, end]


def versions(log: str) -> dict[str, str]:
    """Versions of what the workload ran on, for the report's header."""
    seen = proof(log)
    names = {"torch": "torch", "driver": "gpu-driver"}
    return {label: str(seen[key]) for key, label in names.items() if seen.get(key)}


def _judge_backend(seen: Mapping[str, Any], given: Device, cuda_required: bool) -> Check:
    backend = seen.get("backend")
    found = (f"torch {seen['torch']} " if seen.get("torch") else "") + f"on {backend}"
    total, limit = seen.get("cuda_memory_bytes") or 0, int(given.get("memory_bytes") or 0)
    fits = backend == "cpu" or limit * _CUDA_SHARE <= total <= limit
    if backend == "cuda":
        found += f", which counts {_size(total)}"
    fix = "use an image whose torch has CUDA; on emulated silicon set gpu_slices_silicon: emulated"
    if backend == "cuda" and not fits:
        fix = (
            "the container's CUDA device is not the slice it was given: look for another GPU in the container"
        )
    return judged(
        "backend",
        fits and backend in {"cpu", "cuda"} and (backend == "cuda" or not cuda_required),
        asked="the work ran on the slice" if cuda_required else "it is said what the work ran on",
        found=found,
        needed=f"CUDA with at most {_size(limit)}" if cuda_required else "cuda or cpu",
        fix=fix,
    )


def _equal(name: str, asked: str, found: str, needed: str, same: bool | None = None) -> Check:
    ok = found == needed if same is None else same
    return judged(
        name,
        ok,
        asked=asked,
        found=found,
        needed=needed,
        fix="the pod sees another device than it was allocated: restart the driver's plugin pod on that node",
    )


def _names(devices: Iterable[Device]) -> str:
    return ", ".join(str(d.get("device") or d.get("uuid")) for d in devices)


def _brief(device: Device) -> dict[str, Any]:
    keys = (
        "node",
        "pool",
        "device",
        "type",
        "profile",
        "uuid",
        "parent_uuid",
        "memory_bytes",
        "claim",
        "pod",
    )
    return {k: device[k] for k in keys if k in device}


def _size(value: Any) -> str:
    return f"{value} bytes ({value / 2**30:.2f} GiB)" if isinstance(value, (int, float)) else str(value)


def _smi_lines(log: str) -> list[str]:
    return [" ".join(line.split()) for line in log.splitlines() if "(UUID: " in line][:9]
