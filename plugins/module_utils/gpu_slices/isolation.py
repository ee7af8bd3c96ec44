"""What containers could reach of GPUs that they were not given. Pure functions; controller only.

The pods run roles/smoke/files/isolation.py, which tries and tells; here it is judged. Each check is one row
of a table: ``asked`` is the attempt, ``needed`` what is expected, ``found`` what was seen.
``evidence["proved"]`` says whether it was seen on real or on emulated silicon, or is the same on both because
the kernel or the runtime alone decides. Members are those of :mod:`workload_run`, known by their ``id``.
"""

from __future__ import annotations

from typing import Any, Iterable, Mapping, Sequence

from .checks import Check, check
from .quantity import format_bytes
from .workload_log import proof

Member = Mapping[str, Any]
Seen = Mapping[str, Any]

DONE = "isolation attempts: done"
# The pods by what they are; among the workloads of the stage each is called "pod-" and this.
ROLES = ("no-claim", "neighbour", "slice")
# What CUDA and the driver keep of a slice for themselves is at most this part of it.
_OVERHEAD = 0.25


def judge(members: Sequence[Member], arguments: Mapping[str, Any]) -> list[Check]:
    """The pod without a claim, the slice and its neighbour. ``arguments["silicon"]`` is real or emulated."""
    silicon = str(arguments.get("silicon") or "real")
    pods = {str(m["id"])[len("pod-") :]: m["pods"][0] for m in members if m["pods"]}
    missing = [role for role in ROLES if role not in pods or not proof(pods[role]["log"] or "")]
    if missing:
        return [
            _row(
                "attempts",
                "The isolation pods tell what they reached",
                "a proof line in the log of each",
                f"none of {', '.join(missing)}",
                "fail",
                fix="read the logs in the evidence; run again",
            )
        ]
    seen = {role: proof(pods[role]["log"] or "") for role in ROLES}
    given = list(pods["slice"]["devices"])
    return [
        bare_check(
            seen["no-claim"],
            f"A pod without a claim on node {pods['no-claim']['node']} looks for a GPU",
            same_node=pods["no-claim"]["node"] == pods["slice"]["node"],
        ),
        _listed(seen["slice"], seen["neighbour"]),
        _by_path(seen["slice"], seen["neighbour"]),
        _by_mknod(seen["slice"]),
        _nvml(seen["slice"], given, pods["neighbour"]["devices"], silicon),
        _over_allocation(seen["slice"], given, silicon),
        _neighbour(seen, pods, silicon),
    ]


def judge_root(members: Sequence[Member], arguments: Mapping[str, Any]) -> list[Check]:
    """A root pod that may make device nodes; ``arguments["neighbour"]`` are the neighbour's own nodes."""
    silicon = str(arguments.get("silicon") or "real")
    (member,) = members
    pod = member["pods"][0]
    seen = proof(pod["log"] or "")
    made = seen.get("mknod") or {}
    control = dict(made.get("control") or {})
    theirs = [node for node in arguments.get("neighbour") or [] if _is(node, "cap")]
    asked = "Root with the capability MKNOD in a slice makes the device nodes of all others and opens them"
    needed = "each refused by the device rules of the cgroup (EPERM); those of its own slice are not"
    evidence = {
        "node": pod["node"],
        "uid": seen.get("uid"),
        "answers": made.get("answers"),
        "own": control,
        "neighbour": theirs,
        "slice": [device.get("uuid") for device in (seen.get("nvml") or {}).get("devices") or []],
    }
    caps = [path for path in control if _is({"path": path}, "cap")]
    if seen.get("uid") != 0 or not caps or not made.get("tried"):
        found = (
            f"uid {seen.get('uid')}, {len(caps)} capability nodes of its own, {made.get('tried')} attempts"
        )
        return [
            _row(
                "device-rules",
                asked,
                needed,
                found,
                "fail",
                fix="the attempt was not made as it should be: read the log in the evidence",
                evidence=evidence,
            )
        ]
    if all(text.startswith("mknod ") for text in control.values()):
        why = ", ".join(sorted(set(control.values())))
        found = (
            f"not even nodes of its own slice can be made ({why}), as in a user namespace: nothing was "
            "reached, and the device rules were not asked"
        )
        return [_row("device-rules", asked, needed, found, "skip", evidence=evidence)]
    reached = list(made.get("reached") or [])
    refused = [f"{path} {text}" for path, text in control.items() if "EPERM" in text]
    mine = ", ".join(sorted(set(control.values())))
    found = f"{made['tried']} others: {_answers(made)}"
    if reached:
        found += f"; reached: {', '.join(reached[:6])}"
    found += f"; {len(control)} of its own: {mine}"
    if refused:
        found += f"; refused of its own: {', '.join(refused[:4])}"
    if theirs:
        found += f"; those of the neighbour are minors {_minors(theirs)} of {theirs[0]['major']}"
    if silicon != "real" and "ENXIO" in mine:
        found += " (ENXIO: allowed, and no kernel driver behind it, for the silicon is emulated)"
    return [
        _row(
            "device-rules",
            asked,
            needed,
            found,
            "pass" if not reached and not refused else "fail",
            fix="something gave the container more devices than its claim (privileged mode, a runtime hook, "
            "a device plugin): look for it on the node"
            if reached
            else "its own device is refused: restart the driver's plugin pod on that node",
            proved="the kernel's device rules, the same on real and emulated silicon",
            evidence=evidence,
        )
    ]


def bare_check(seen: Seen, asked: str, same_node: bool = True, wrong_is: str = "fail") -> Check:
    """A container without a claim must see no GPU at all; ``seen`` is its proof."""
    nodes, smi = [str(n.get("path")) for n in seen.get("nodes") or []], seen.get("smi") or {}
    nvml, cuda = seen.get("nvml") or {}, seen.get("cuda") or {}
    wrong = []
    if nodes:
        wrong.append(f"device nodes {', '.join(nodes)}")
    if nvml.get("devices"):
        wrong.append(f"NVML shows {', '.join(str(d.get('uuid')) for d in nvml['devices'])}")
    if smi.get("listed"):
        wrong.append(f"nvidia-smi lists {smi['listed'][0]}")
    if cuda.get("count"):
        wrong.append(f"CUDA finds {cuda['count']} devices")
    if not same_node:
        wrong.append("it ran on another node than the slice, which proves nothing about that one")
    if "nodes" not in seen:
        wrong.append("it did not tell what it saw")
    library = "shows none" if nvml.get("loaded") else "cannot be loaded"
    tool = "lists none" if smi.get("path") else "is not there"
    visible = str(seen.get("visible_devices") or "")
    finds = "finds none" if cuda.get("loaded") else "is not there"
    nothing = f"no /dev/nvidia*; NVML {library}; nvidia-smi {tool}; CUDA {finds}"
    found = "; ".join(wrong) or nothing
    return _row(
        "no-claim",
        asked,
        "no device node, nothing through NVML, nvidia-smi or CUDA",
        found,
        wrong_is if wrong else "pass",
        fix="something besides the claim hands out GPUs: the NVIDIA runtime as default runtime with "
        f"NVIDIA_VISIBLE_DEVICES={visible or '(unset)'}, a device plugin, or a privileged pod",
        proved="real: what the runtime puts into the container",
        evidence={"seen": dict(seen)},
    )


def _listed(seen: Seen, other: Seen) -> Check:
    mine, theirs = _nodes(seen, "cap"), _nodes(other, "cap")
    gpus = _nodes(seen, "gpu")
    shared = {(n["major"], n["minor"]) for n in mine} & {(n["major"], n["minor"]) for n in theirs}
    good = len(mine) == 2 and len(theirs) == 2 and len(gpus) == 1 and not shared
    found = (
        f"GPU {_minors(gpus)} and its own capabilities {_minors(mine)}; the neighbour has {_minors(theirs)}"
    )
    if shared:
        found += f"; both have {sorted(shared)}"
    return _row(
        "other-nodes-listed",
        "A pod in a slice lists the device nodes in its /dev",
        "one GPU node and the two capability nodes of its own slice, none of the neighbour's",
        found,
        "pass" if good else "fail",
        fix="compare the CDI specs of both claims (/var/run/cdi on the node) with the claims' devices",
        proved="real: what the driver and the runtime put into the container",
        evidence={"own": list(seen.get("nodes") or []), "neighbour": list(other.get("nodes") or [])},
    )


def _by_path(seen: Seen, other: Seen) -> Check:
    paths = seen.get("path") or {}
    reached = list(paths.get("reached") or [])
    theirs = _nodes(other, "cap")
    tried = int(paths.get("tried") or 0)
    good = tried > 0 and not reached and bool(theirs)
    named = ", ".join(str(n["path"]) for n in theirs) or "no capability node of the neighbour is known"
    found = f"{tried} paths: {_answers(paths)}; among them {named}"
    return _row(
        "other-nodes-by-path",
        "It opens the device nodes of all other slices and GPUs by their paths",
        "ENOENT for each",
        found + (f"; reached: {', '.join(reached[:6])}" if reached else ""),
        "pass" if good else "fail",
        fix="a device of others is in the container: look for hostPath mounts, runtime hooks",
        proved="real: what the runtime puts into the container",
        evidence={"answers": paths.get("answers"), "neighbour": theirs},
    )


def _by_mknod(seen: Seen) -> Check:
    made = seen.get("mknod") or {}
    reached, tried, uid = list(made.get("reached") or []), int(made.get("tried") or 0), seen.get("uid")
    good = tried > 0 and not reached and uid not in (0, None)
    return _row(
        "other-nodes-by-mknod",
        f"It makes the device nodes of all others as user {uid} and opens them",
        "mknod EPERM for each",
        f"{tried} nodes in {made.get('folder')}: {_answers(made)}"
        + (f"; reached: {', '.join(reached[:6])}" if reached else ""),
        "pass" if good else "fail",
        fix="the pod has a capability too many: look for webhooks that change its securityContext",
        proved="real: the kernel refuses a process without CAP_MKNOD",
        evidence={"answers": made.get("answers"), "uid": uid},
    )


def _nvml(
    seen: Seen, given: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]], silicon: str
) -> Check:
    nvml = seen.get("nvml") or {}
    shown = list(nvml.get("devices") or [])
    uuids, mine = [str(d.get("uuid")) for d in shown], [str(d.get("uuid")) for d in given]
    good = len(mine) == 1 and uuids == mine
    listed = ", ".join(f"{d.get('name')} {d.get('uuid')}" for d in shown) or str(
        nvml.get("error") or "nothing"
    )
    theirs = ", ".join(str(d.get("uuid")) for d in others)
    return _row(
        "nvml-view",
        "It asks NVML for devices",
        f"its own slice alone: {', '.join(mine) or 'no recorded allocation'}",
        f"{listed}; the neighbour's is {theirs}",
        "pass" if good else "fail",
        fix="the pod sees another device than it was given: compare the capability nodes of both pods",
        proved=f"{silicon} silicon",
        evidence={"shown": shown, "given": mine, "neighbour": theirs},
    )


def _over_allocation(seen: Seen, given: Sequence[Mapping[str, Any]], silicon: str) -> Check:
    asked = "It allocates more memory than its slice has, while the neighbour trains"
    size = int((given[0] if given else {}).get("memory_bytes") or 0)
    needed = f"an out-of-memory error at about the slice's {format_bytes(size)}"
    over, cuda = seen.get("over"), seen.get("cuda") or {}
    shown = (seen.get("nvml") or {}).get("devices") or []
    if not over and silicon == "emulated":
        memory = int(shown[0]["memory_bytes"]) if shown else 0
        return _row(
            "over-allocation",
            asked,
            needed,
            f"silicon is emulated: no CUDA to allocate with; NVML shows {format_bytes(memory)} of memory",
            "skip" if memory == size else "fail",
            fix="NVML shows another size than the slice's: compare the capability nodes of both pods",
            proved="emulated: only that NVML shows the slice's own size",
            evidence={"shown_bytes": memory, "slice_bytes": size},
        )
    if not over:
        return _row(
            "over-allocation",
            asked,
            needed,
            f"nothing was allocated; CUDA: {cuda.get('said')}, {cuda.get('count')} devices",
            "fail",
            fix="use an image whose torch has CUDA; on emulated silicon set gpu_slices_silicon: emulated",
            evidence={"cuda": dict(cuda)},
        )
    got, error = int(over.get("got_bytes") or 0), str(over.get("error") or "")
    refused = "OutOfMemoryError" in error or "out of memory" in error
    fits = size * (1 - _OVERHEAD) <= got <= size
    return _row(
        "over-allocation",
        asked,
        needed,
        f"{format_bytes(got)} were granted, then {error or 'it was never refused'}",
        "pass" if refused and fits else "fail",
        fix="memory of another slice or GPU was granted, or the slice was not the pod's alone",
        proved=f"{silicon} silicon",
        evidence={"got_bytes": got, "slice_bytes": size, "error": error},
    )


def _neighbour(seen: Mapping[str, Seen], pods: Mapping[str, Any], silicon: str) -> Check:
    other, mine = seen["neighbour"], seen["slice"]
    began, ended = other.get("started_at"), other.get("ended_at")
    spans, differing = list(mine.get("spans") or []), mine.get("differing")
    if isinstance(began, (int, float)) and isinstance(ended, (int, float)):
        inside = [span for span in spans if began < span[0] and span[1] < ended]
        loss = f"loss {other.get('loss_first')} -> {other.get('loss_last')} in {other.get('steps')} steps"
        found = (
            f"{len(inside)} of {len(spans)} rounds lay inside its training of {ended - began:.1f} s; "
            f"it ended OK, {loss}"
        )
    else:
        inside, found = [], "its log does not say when it trained"
    if differing:
        found += f"; {differing} rounds went otherwise than the first"
    devices = [str(d.get("uuid")) for role in ("slice", "neighbour") for d in pods[role]["devices"]]
    cards = {str(d.get("parent_uuid")) for role in ("slice", "neighbour") for d in pods[role]["devices"]}
    apart = len(devices) == 2 and len(set(devices)) == 2 and len(cards) == 1
    if not apart:
        found += f"; the two were given {', '.join(devices) or 'nothing'} on {len(cards)} GPUs"
    return _row(
        "neighbour",
        "Its neighbour on the same GPU trains on meanwhile",
        "a round of attempts while it trained, all rounds alike, and OK at its end",
        found,
        "pass" if inside and differing == 0 and apart else "fail",
        fix="let both run longer (crowd_isolation_seconds), and run again",
        proved=f"{silicon} silicon",
        evidence={"devices": devices, "gpu": sorted(cards), "training": [began, ended], "rounds": spans},
    )


# -------------------------------------------------------------------------------------------------- showing

TABLE = (
    *("no-claim", "other-nodes-listed", "other-nodes-by-path", "other-nodes-by-mknod", "device-rules"),
    *("nvml-view", "over-allocation", "neighbour"),
)


def table_lines(checks: Iterable[Check]) -> list[str]:
    """The rows as lines for people: attempt, expected, seen, and on what it was proved."""
    lines = []
    for row in checks:
        if row["id"] in TABLE:
            lines += [
                f"{row['status'].upper():4}  {row['asked']}",
                f"      expected: {row['needed']}",
                f"      seen:     {row['found']}",
                f"      proved:   {(row.get('evidence') or {}).get('proved') or 'nothing'}",
            ]
    return lines


def neighbour_nodes(checks: Iterable[Check]) -> list[dict[str, Any]]:
    """The neighbour's device nodes, from the checks of :func:`judge`; none where they are not known."""
    for row in checks:
        if row["id"] == "other-nodes-listed":
            return [dict(node) for node in row["evidence"].get("neighbour") or []]
    return []


def root_reason(
    namespace: Mapping[str, Any], create: bool, pull_secrets: Sequence[str] = (), ours: bool = False
) -> str:
    """Why the root pod cannot be made; empty if it can. ``namespace`` is the trimmed one it would run in."""
    name = namespace.get("name")
    if not create:
        return f"gpu_slices_namespace_create is false: no namespace {name} with Pod Security baseline"
    if namespace.get("terminating"):
        return f"namespace {name} is being deleted"
    if namespace.get("found") and not ours:
        return f"namespace {name} exists and is not ours: set crowd_isolation_namespace to another name"
    if pull_secrets:
        return f"the image needs {', '.join(pull_secrets)}, and namespace {name} has no such secret"
    return ""


def root_rows(checks: Iterable[Check]) -> list[Check]:
    """The checks of the root pod as rows: what is no attempt of the table is called after the pod."""
    known = (*TABLE, "pod-root")
    return [row if row["id"] in known else {**row, "id": f"root-{row['id']}"} for row in checks]


def skipped(reason: str) -> Check:
    """The row of the root pod where it cannot be made."""
    return _row(
        "device-rules",
        "Root with the capability MKNOD in a slice makes the device nodes of all others and opens them",
        "each refused by the device rules of the cgroup (EPERM); those of its own slice are not",
        reason,
        "skip",
    )


def _row(
    name: str,
    asked: str,
    needed: str,
    found: str,
    status: str,
    *,
    fix: str = "",
    proved: str = "",
    evidence: Mapping[str, Any] | None = None,
) -> Check:
    return check(
        name,
        asked,
        found,
        status,
        needed=needed,
        fix=fix if status in ("fail", "warn") else "",
        evidence={**(evidence or {}), "proved": proved or "nothing"},
    )


def _nodes(seen: Seen, kind: str) -> list[dict[str, Any]]:
    return [node for node in seen.get("nodes") or [] if _is(node, kind)]


def _is(node: Mapping[str, Any], kind: str) -> bool:
    """Is it a capability node ("cap") or that of a GPU ("gpu")?"""
    name = str(node.get("path")).rsplit("/", 1)[-1]
    stem = {"cap": "nvidia-cap", "gpu": "nvidia"}[kind]
    return name.startswith(stem) and name[len(stem) :].isdigit()


def _minors(nodes: Iterable[Mapping[str, Any]]) -> str:
    return ", ".join(str(node["minor"]) for node in nodes) or "none"


def _answers(tally: Mapping[str, Any]) -> str:
    counted = tally.get("answers") or {}
    return ", ".join(f"{text} {number} times" for text, number in sorted(counted.items())) or "no answer"
