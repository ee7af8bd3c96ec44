"""A crowd: as many TrainJobs as slices are free, and one more. Pure functions; controller only.

:func:`plan` says how many and where, :func:`judge` what the jobs prove together: each on a slice of its own,
all at one moment, and the one too many waiting for a slice until another had ended.
"""

from __future__ import annotations

import re
from datetime import datetime, timezone
from typing import Any, Dict, Iterable, Mapping, Sequence

from . import claim
from .checks import Check, check, judged
from .resource_slices import describe_profiles
from .workload_log import proof

Object = Dict[str, Any]
Member = Mapping[str, Any]

# What this stage makes, by the names of pods and claims.
OURS = ("gpu-slices-crowd-", "gpu-slices-isolation-")
LEAST = 2
NO_DEVICE = "cannot allocate all claims"
# How far the clocks of scheduler and node may be apart; times of the API have whole seconds besides.
_SKEW = 2.0

_NAME = re.compile(r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")
_FIXES = {"too_few_free": "wait until more slices are free, or cut more of one profile (mig_config)"}


# -------------------------------------------------------------------------------------------------- inputs


def faults(settings: Mapping[str, Any]) -> list[str]:
    """What gate 1 says of this stage's variables, those that the user set and the shared ones."""
    found = []
    own = str(settings.get("gpu_slices_namespace") or "")
    name = settings.get("crowd_isolation_namespace")
    if name is not None and not _NAME.match(str(name)):
        found.append(
            f"crowd_isolation_namespace is '{name}': needed is a Kubernetes name (lower case letters, "
            "digits, dashes, at most 63)."
        )
    elif name is None and len(f"{own}-isolation") > 63:
        found.append(
            f"gpu_slices_namespace is '{own}', too long for one with -isolation at its end: set "
            "crowd_isolation_namespace, of at most 63 characters."
        )
    elif name == own:
        found.append(
            f"crowd_isolation_namespace is {name}, as gpu_slices_namespace: choose another, for Pod Security "
            "is laxer there."
        )
    usual = 30 if settings.get("gpu_slices_silicon", "real") == "real" else 8
    try:
        timeout = float(settings.get("crowd_timeout", 900))
        seconds = float(settings.get("crowd_seconds", usual))
    except (TypeError, ValueError):
        return found
    if timeout <= 2 * seconds:
        found.append(
            f"crowd_timeout is {timeout:g}, crowd_seconds {seconds:g}: needed is more than twice as much, "
            "for one job trains after the others."
        )
    return found


# ------------------------------------------------------------------------------------------------ planning


def plan(
    facts: Object,
    profile: str,
    memory: str,
    limit: int,
    layouts: Mapping[str, Iterable[str]] | None = None,
    *,
    tolerations: Iterable[Object] = (),
    predict: bool = False,
    second: str = "",
) -> Object:
    """How many jobs, of which profile, and on which card.

    What earlier pods of this stage hold counts as free, for they are taken up again or removed; some of them
    are in the namespace ``second``. Returns
    ``{profile, count, devices, card, cards, reason, kind, published, predicted, isolation}``. ``card`` is the
    GPU that the claims are bound to: set where more than ``limit`` slices are free. ``isolation`` is the
    {card, node, free} on which neighbours can be looked at, or {reason}.
    """
    namespace = str((facts.get("namespace") or {}).get("name", ""))
    others = [one for one in facts.get("claims") or [] if not ours(one, namespace, second)]
    seen = {**facts, "claims": others} if "claims" in facts else facts
    made = claim.choice(seen, profile, memory, layouts, tolerations=tolerations, predict=predict, count=LEAST)
    devices = sorted(made["devices"], key=lambda d: (d["node"], d["parent_uuid"], d["device"]))
    cards: dict[str, list[Object]] = {}
    for device in devices:
        cards.setdefault(device["parent_uuid"], []).append(device)
    fullest = max(sorted(cards), key=lambda card: len(cards[card])) if cards else ""
    chosen, card = devices, ""
    if len(devices) > limit:
        chosen, card = cards[fullest], fullest
    isolation: Object = {"card": "", "node": "", "free": 0}
    if fullest and len(cards[fullest]) >= LEAST:
        isolation = {"card": fullest, "node": cards[fullest][0]["node"], "free": len(cards[fullest])}
    elif made["predicted"]:
        isolation["reason"] = "the slices are not published yet"
    else:
        isolation["reason"] = "no GPU has two free slices, so there is no neighbour"
    isolation.setdefault("reason", "")
    return {
        "profile": made["profile"],
        # Nothing is published yet where a run is only foreseen: the least crowd is shown then.
        "count": LEAST if made["predicted"] else len(chosen),
        "devices": [
            {k: d[k] for k in ("node", "pool", "device", "uuid", "parent_uuid", "memory_bytes")}
            for d in chosen
        ],
        "free": len(devices),
        "cards": {name: len(found) for name, found in cards.items()},
        "card": card,
        "kind": made["kind"],
        "reason": made["reason"],
        "published": made["published"],
        "predicted": made["predicted"],
        "isolation": isolation,
        "choice": made,
    }


def plan_checks(made: Object, profile: str, memory: str, limit: int, required: bool) -> list[Check]:
    """The plan as checks: are there two free slices, and which of them are used."""
    choice = claim.choice_check(made["choice"], profile, memory, required, LEAST)
    if choice["status"] != "pass":
        fix = _FIXES.get(made["kind"])
        return [{**choice, "fix": fix if fix and choice["fix"] else choice["fix"]}]
    if not made["card"]:
        found = f"all {made['count']} free slices of {made['profile']}, on {_on(made['devices'])}"
    else:
        found = (
            f"{made['free']} slices of {made['profile']} are free on {len(made['cards'])} GPUs, more than "
            f"crowd_limit ({limit}): only the {made['count']} of {_on(made['devices'])} are used"
        )
        if made["count"] > limit:
            found += ", for a GPU is never divided"
    asked = "Which slices are filled?"
    return [
        choice,
        check("crowd", asked, found, evidence={"cards": made["cards"], "devices": made["devices"]}),
    ]


def _on(devices: Sequence[Object]) -> str:
    cards = sorted({(d["node"], d["parent_uuid"]) for d in devices})
    named = ", ".join(f"{node} ({card})" for node, card in cards[:4])
    return named + (f" and {len(cards) - 4} more GPUs" if len(cards) > 4 else "")


def ours(item: Object, *namespaces: str) -> bool:
    """Whether a claim was made for a pod of this stage in one of these namespaces; by its label and name."""
    metadata = item["metadata"]
    if (metadata.get("labels") or {}).get("app.kubernetes.io/managed-by") != "gpu-slices":
        return False
    return metadata.get("namespace") in namespaces and str(metadata["name"]).startswith(OURS)


def held(facts: Object, *namespaces: str) -> list[str]:
    """Claims of this stage that still hold a device. ``facts`` hold the allocated claims of the cluster."""
    return [
        f"{one['metadata']['namespace']}/{one['metadata']['name']}"
        for one in facts["claims"]
        if ours(one, *namespaces)
    ]


def released_check(facts: Object, made: Object, *namespaces: str) -> Check:
    """At the end every claim of the stage must have given its device back."""
    left = held(facts, *namespaces)
    wanted = {(d["pool"], d["device"]) for d in made["devices"]}
    there = [d for d in facts["slices"]["devices"] if (d["pool"], d["device"]) in wanted]
    free = [d for d in there if d["holder"] is None]
    taken = "".join(
        f"; {d['device']} is held by {d['holder']['namespace']}/{d['holder']['claim']}"
        for d in there
        if d["holder"]
    )
    return check(
        "released",
        "Has every claim of this stage given its slice back?",
        f"{len(left)} claims still hold one: {', '.join(left[:6])}"
        if left
        else f"yes; {len(free)} of the {len(wanted)} slices are free{taken}",
        "fail" if left else "pass",
        needed="no claim of ours that holds a device",
        fix="see the pods of these claims: a claim is given back when its pod ends" if left else "",
        finding="claims_held" if left else "",
        evidence={"held": left, "published": describe_profiles(there)},
    )


# ------------------------------------------------------------------------------------------------- judging


def judge(members: Sequence[Member], arguments: Mapping[str, Any]) -> list[Check]:
    """What all jobs prove together. ``arguments["free"]`` is the number of slices that were free.

    The jobs have all succeeded, each on the one device that it was given: that is judged before. Here: which
    one had to wait and why, and whether the others were at work at one moment and on different devices.
    """
    free = int(arguments["free"])
    rows, faults = _rows(members)
    if faults:
        return [
            judged(
                "together",
                False,
                asked="The jobs say when they trained, and on what",
                found="; ".join(faults),
                needed="for each job one pod, its device, its times, and the span in its log",
                fix="run again; read the logs in the evidence",
            )
        ]
    late = [row for row in rows if _waited(row, rows)]
    early = [row for row in rows if row not in late]
    table = {"table": [_public(row) for row in rows], "free": free}
    checks = [_one_more(rows, late, free, table)]
    if len(late) == 1:
        checks += [_reason(late[0]), _served(late[0], early)]
    return [_different(early, free, rows), _at_once(early, table), *checks]


def _rows(members: Sequence[Member]) -> tuple[list[Object], list[str]]:
    """A row a job: what the judge looks at; and what is missing for it."""
    rows, faults = [], []
    for member in members:
        job = str(member["name"])
        if len(member["pods"]) != 1:
            faults.append(f"{job} has {len(member['pods'])} pods")
            continue
        pod = member["pods"][0]
        seen, times = proof(pod["log"] or ""), pod.get("times") or {}
        visible = [str(d.get("uuid")) for d in seen.get("devices") or [] if isinstance(d, dict)]
        given = [str(d.get("uuid")) for d in pod["devices"]]
        span = [seen.get("started_at"), seen.get("ended_at")]
        try:
            row = {
                "job": job,
                "id": str(member.get("id") or job),
                "pod": str(pod["name"]),
                "node": str(pod["node"]),
                "uuid": _only(given),
                "seen": _only(visible),
                "device": str(pod["devices"][0].get("device")),
                "start": float(span[0]),  # type: ignore[arg-type]
                "end": float(span[1]),  # type: ignore[arg-type]
                "created": _epoch(times["created"]),
                "scheduled": _epoch(times["scheduled"]),
                "finished": _epoch(times["finished"]),
                "said": str(pod.get("waited") or ""),
            }
        except (KeyError, TypeError, ValueError, IndexError) as fault:
            faults.append(f"{job}: {fault.__class__.__name__} {fault}; given {given}, span {span}, {times}")
            continue
        rows.append(row)
    return rows, faults


def _only(names: Sequence[str]) -> str:
    (name,) = names
    return name


def _waited(row: Object, rows: Sequence[Object]) -> bool:
    """Was its pod given a node only after another job's pod had ended?"""
    ends = [other["finished"] for other in rows if other is not row]
    return bool(ends) and row["scheduled"] >= min(ends) - _SKEW


def _different(early: Sequence[Object], free: int, rows: Sequence[Object]) -> Check:
    uuids = {row["uuid"] for row in early}
    disagree = [
        f"{row['id']} was given {row['uuid']} and saw {row['seen']}"
        for row in rows
        if row["uuid"] != row["seen"]
    ]
    good = not disagree and len(uuids) == len(early) == free
    agree = f"{len(rows) - len(disagree)} of {len(rows)} logs agree with the claims"
    found = f"{len(early)} jobs on {len(uuids)} different UUIDs; {agree}"
    return judged(
        "devices",
        good,
        asked="Each of the jobs had a slice of its own, by its log and by its claim",
        found="; ".join([found, *disagree]),
        needed=f"{free} jobs on {free} UUIDs, logs and recorded allocations alike",
        fix="somebody else took or gave back a slice meanwhile: run again"
        if len(uuids) == len(early)
        else "a device was handed out twice: run again; if it stays so restart the driver's plugin pod",
        evidence={"uuids": {row["job"]: row["uuid"] for row in early}},
    )


def _at_once(early: Sequence[Object], table: Object) -> Check:
    first, last = max((r["start"] for r in early), default=0.0), min((r["end"] for r in early), default=0.0)
    good = len(early) >= LEAST and first < last
    if good:
        span = f"from {_clock(first, 1)} to {_clock(last, 1)} UTC, {last - first:.1f} s"
        found = f"{len(early)} trained at once {span}"
    elif early:
        found = f"the last began at {_clock(first, 1)}, the first had ended at {_clock(last, 1)} UTC"
    else:
        found = "no job was scheduled before another had ended"
    return judged(
        "at-once",
        good,
        asked="All of them trained at one moment, by their own logs",
        found=found,
        needed="a moment at which every one of them was training",
        fix="let them train longer (crowd_seconds): some started late, for want of CPU or of the image",
        evidence=table,
    )


def _one_more(rows: Sequence[Object], late: Sequence[Object], free: int, table: Object) -> Check:
    good = len(late) == 1 and len(rows) == free + 1
    slices = f"{free} slices were free for {len(rows)} jobs"
    if len(late) == 1:
        seconds = late[0]["scheduled"] - late[0]["created"]
        found = f"{late[0]['id']} stayed Pending for {seconds:.0f} s; {slices}"
    else:
        said = "".join(f"; {row['id']}: {row['said'] or 'no message of the scheduler'}" for row in late)
        found = f"{len(late)} jobs had to wait{said}; {slices}"
    why = "another slice of the profile became free meanwhile, or crowd_seconds is too short"
    if late:
        why = (
            "somebody else took a slice meanwhile, or something else than slices is scarce (crowd_resources)"
        )
    return judged(
        "one-more",
        good,
        asked="Exactly one more stayed Pending while all slices were taken",
        found=found,
        needed=f"{free} jobs at once and one that waits",
        fix=f"{why}; run again when nobody else uses the profile",
        evidence=table,
    )


def _reason(row: Object) -> Check:
    """Was it the device for which it waited, and nothing else?"""
    said = row["said"]
    device, other = NO_DEVICE in said, "Insufficient" in said
    status = "pass" if device and not other else "warn" if device else "fail"
    found = f"the scheduler said: {said}" if said else "no message of the scheduler was seen"
    fix = ""
    if other:
        found += "; so on some nodes something else than the device was missing too"
        fix = "ask for less (crowd_resources), so that the slices alone are scarce"
    elif not device:
        fix = "read the message: something else than the slices kept the pod from its node; run again"
    return {
        **judged(
            "reason",
            device,
            asked="It waited for want of a device",
            found=found,
            needed=f"'{NO_DEVICE}', and no lack of CPU or memory",
            fix="",
            evidence={"job": row["job"], "pod": row["pod"], "message": said},
        ),
        "status": status,
        "fix": fix,
    }


def _served(row: Object, early: Sequence[Object]) -> Check:
    """It took the slice that another had left, after that one had trained."""
    before = [other for other in early if other["uuid"] == row["uuid"]]
    good = len(before) == 1 and before[0]["end"] < row["start"]
    if good:
        other = before[0]
        found = (
            f"{other['id']} trained until {_clock(other['end'], 1)}, its pod ended at "
            f"{_clock(other['finished'])}; {row['id']} was scheduled at {_clock(row['scheduled'])} UTC on "
            f"the same slice {row['uuid']} and ended OK"
        )
    else:
        who = ", ".join(f"{o['id']} until {_clock(o['end'], 1)}" for o in before) or "none of the others"
        found = f"{row['id']} trained on {row['uuid']} from {_clock(row['start'], 1)}; there before it: {who}"
    return judged(
        "served",
        good,
        asked="It ran when one of the others had ended, on the slice that this one left",
        found=found,
        needed="a slice that one of the others had, after that one's training",
        fix="a slice that was not free at the start became free, or a slice was handed out twice; run again, "
        "and see the ResourceClaims of the profile",
    )


# -------------------------------------------------------------------------------------------------- showing


def _public(row: Object) -> Object:
    return {
        "job": row["job"],
        "uuid": row["uuid"],
        "node": row["node"],
        "start": _clock(row["start"], 1),
        "end": _clock(row["end"], 1),
        "waited": round(row["scheduled"] - row["created"]),
    }


def table_lines(checks: Iterable[Check]) -> list[str]:
    """The table of a crowd's checks as lines for people; none where there is no table."""
    rows: list[Object] = next(
        (c["evidence"]["table"] for c in checks if (c.get("evidence") or {}).get("table")), []
    )
    if not rows:
        return []
    head = {
        "job": "job",
        "uuid": "UUID",
        "node": "node",
        "start": "start (UTC)",
        "end": "end (UTC)",
        "waited": "waited",
    }
    cells = [head, *({**row, "waited": f"{row['waited']} s"} for row in rows)]
    width = {key: max(len(str(cell[key])) for cell in cells) for key in head}
    return ["  ".join(f"{cell[key]!s:{width[key]}}" for key in head).rstrip() for cell in cells]


def _epoch(stamp: str) -> float:
    """An RFC 3339 time of the API in epoch seconds."""
    return datetime.strptime(stamp, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc).timestamp()


def _clock(epoch: float, digits: int = 0) -> str:
    """``12:00:05.1``, in UTC. Tenths are cut, not rounded, as a clock shows them."""
    text = datetime.fromtimestamp(epoch, timezone.utc).strftime("%H:%M:%S.%f")
    return text[: 9 + digits] if digits else text[:8]
