"""What Kueue did with some TrainJobs: recorded while it happens, judged afterwards. Pure; controller only.

A *job record* holds what was seen of one TrainJob, in the order in which it was seen (``seq`` counts over all
jobs; what one watch tells is in the order in which it happened)::

    {"name", "uid", "queue", "priority", "workload", "workload_uid",
     "history": [{"seq", "at", "type", "status", "reason", "message"}],   conditions of Kueue's Workload
     "suspended": [{"seq", "at", "suspend": bool}],
     "pods": [{"seq", "name", "created", "gone"}],
     "claims": [{"seq", "name", "pod", "created", "devices": [...], "gone", "gone_seq"}],
     "look": {"at", "suspend", "pods", "claims"},                         a look at a job that has to wait
     "events": [{"at", "line"}]}

Times are RFC 3339 UTC: the cluster's own where it gives one, ours for what is only seen to be gone.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Callable, Container, Dict, Iterable, Mapping, Sequence

from .checks import Check, judged
from .workload_state import JOBSET_NAME, pods_of_claim

Job = Dict[str, Any]
Object = Mapping[str, Any]

_MESSAGE = 500
_HISTORY = 60
_EVENTS = 40
# Seconds by which the clocks of the API server and of Kueue's node may differ.
_SKEW = 5
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"

_BORROWER, _WAITING, _URGENT = "borrower", "waiting", "urgent"


class Recorder:
    """Keeps the records of some TrainJobs. ``say`` gets a line for each thing that a person wants to see."""

    def __init__(self, names: Iterable[str], say: Callable[[str, str], None]) -> None:
        self.jobs: dict[str, Job] = {
            name: {
                "name": name,
                "uid": "",
                "queue": "",
                "priority": None,
                "workload": "",
                "workload_uid": "",
                "history": [],
                "suspended": [],
                "pods": [],
                "claims": [],
                "look": {},
                "events": [],
            }
            for name in names
        }
        self._say = say
        self._seq = 0
        self._conditions: dict[tuple[str, str], tuple[str, str, str]] = {}
        self._uids: dict[str, str] = {}
        self._events: dict[tuple[str, str], dict[str, str]] = {}

    # -- what comes in; ``at`` is our clock

    def trainjob(self, item: Object, at: str) -> None:
        """A TrainJob as it is now: Kueue suspends and resumes it."""
        metadata = item["metadata"]
        job = self.jobs.get(str(metadata["name"]))
        if job is None:
            return
        job["uid"] = str(metadata.get("uid", ""))
        job["queue"] = str((metadata.get("labels") or {}).get(QUEUE_LABEL, ""))
        suspend = bool((item.get("spec") or {}).get("suspend"))
        if not job["suspended"] or job["suspended"][-1]["suspend"] != suspend:
            job["suspended"].append({"seq": self._next(), "at": at, "suspend": suspend})

    def workload(self, item: Object, at: str) -> None:
        """A Workload as it is now."""
        metadata = item["metadata"]
        job = self._job_of(metadata)
        # One that is going belongs to an earlier TrainJob of this name.
        if job is None or metadata.get("deletionTimestamp"):
            return
        if job["workload_uid"] != metadata.get("uid"):
            job["workload"], job["workload_uid"] = str(metadata["name"]), str(metadata.get("uid", ""))
            self._say(job["name"], f"Kueue made Workload {job['workload']}")
        job["priority"] = (item.get("spec") or {}).get("priority")
        for condition in (item.get("status") or {}).get("conditions") or []:
            self._condition(job, condition, at)

    def _condition(self, job: Job, condition: Object, at: str) -> None:
        kind = str(condition.get("type"))
        now = (
            str(condition.get("status")),
            str(condition.get("reason")),
            " ".join(str(condition.get("message") or "").split())[:_MESSAGE],
        )
        key = (job["name"], kind)
        before = self._conditions.get(key)
        if before == now:
            return
        self._conditions[key] = now
        changed = before is None or before[:2] != now[:2]
        # The wording of a wait may change often; its first and its last are enough.
        if not changed and job["history"] and job["history"][-1]["type"] == kind:
            job["history"][-1]["message"] = now[2]
        elif len(job["history"]) < _HISTORY:
            job["history"].append(
                {
                    "seq": self._next(),
                    "at": str(condition.get("lastTransitionTime") or at),
                    "type": kind,
                    "status": now[0],
                    "reason": now[1],
                    "message": now[2],
                }
            )
        if changed:
            self._say(job["name"], f"{kind}={now[0]} ({now[1]}): {now[2]}")

    def pod(self, item: Object, gone: bool, at: str) -> None:
        """A pod of one of the jobs."""
        metadata = item["metadata"]
        job = self.jobs.get(str((metadata.get("labels") or {}).get(JOBSET_NAME, "")))
        if job is None:
            return
        found = next((p for p in job["pods"] if p["uid"] == metadata.get("uid")), None)
        if found is None:
            found = {
                "seq": self._next(),
                "name": str(metadata["name"]),
                "uid": str(metadata.get("uid", "")),
                "created": str(metadata.get("creationTimestamp", "")),
                "gone": "",
            }
            job["pods"].append(found)
        if gone and not found["gone"]:
            self._gone(job, found, at)

    def claim(self, item: Object, gone: bool, at: str, devices: Sequence[Object] = ()) -> None:
        """A claim of a pod of one of the jobs; ``devices`` are those it was given."""
        metadata = item["metadata"]
        pod = next(iter(pods_of_claim(dict(item))), "")
        job = next((j for name, j in self.jobs.items() if pod.startswith(f"{name}-")), None)
        if job is None:
            return
        found = next((c for c in job["claims"] if c["uid"] == metadata.get("uid")), None)
        if found is None:
            found = {
                "seq": self._next(),
                "name": str(metadata["name"]),
                "uid": str(metadata.get("uid", "")),
                "pod": pod,
                "created": str(metadata.get("creationTimestamp", "")),
                "devices": [],
                "allocated_seq": 0,
                "gone": "",
                "gone_seq": 0,
            }
            job["claims"].append(found)
        if devices and not found["devices"]:
            found["devices"] = [
                {k: d.get(k) for k in ("node", "pool", "device", "uuid", "profile")} for d in devices
            ]
            found["allocated_seq"] = self._next()
        if gone and not found["gone"]:
            self._gone(job, found, at)

    def event(self, item: Object) -> None:
        """An event about anything; whose it is may be known only later."""
        target = item.get("involvedObject") or item.get("regarding") or {}
        kind, uid = str(target.get("kind")), str(target.get("uid"))
        if kind in ("TrainJob", "Workload"):
            self._events.setdefault((kind, uid), {})[event_line(item)] = event_time(item)

    def close(self) -> None:
        """Give each job the events about it and its Workload. Names are used again, UIDs are not."""
        for job in self.jobs.values():
            lines = {
                **self._events.get(("TrainJob", job["uid"]), {}),
                **self._events.get(("Workload", job["workload_uid"]), {}),
            }
            ordered = sorted(lines.items(), key=lambda entry: entry[1])[:_EVENTS]
            job["events"] = [{"at": at, "line": line} for line, at in ordered]

    def missing(self, kind: str, uids: Container[str], at: str) -> None:
        """A list that was read anew, by UIDs: of what we know and it lacks, the end was missed."""
        for job in self.jobs.values():
            for found in job["pods" if kind == "pod" else "claims"]:
                if found["uid"] not in uids and not found["gone"]:
                    self._gone(job, found, at)

    def note(self, name: str, text: str) -> None:
        """Something to say about a job."""
        self._say(name, text)

    def _gone(self, job: Job, found: dict[str, Any], at: str) -> None:
        found["gone"] = at
        if "devices" not in found:
            self._say(job["name"], f"pod {found['name']} is gone")
            return
        found["gone_seq"] = self._next()
        held = ", ".join(str(d.get("uuid") or d.get("device")) for d in found["devices"])
        self._say(job["name"], f"claim {found['name']} is gone" + (f", {held} is free" if held else ""))

    def look(self, name: str, at: str, *, suspend: bool, pods: int, claims: int) -> None:
        """What a look at a job that has to wait found."""
        self.jobs[name]["look"] = {"at": at, "suspend": suspend, "pods": pods, "claims": claims}

    def _job_of(self, metadata: Object) -> Job | None:
        """The record of the TrainJob that a Workload belongs to."""
        for owner in metadata.get("ownerReferences") or []:
            if owner.get("kind") == "TrainJob":
                return self.jobs.get(str(owner.get("name")))
        return None

    def _next(self) -> int:
        self._seq += 1
        return self._seq


def event_time(event: Object) -> str:
    """When an event last happened, to the second."""
    series = event.get("series") or {}
    stamps = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
    return next((str(stamp)[:19] + "Z" for stamp in stamps if stamp), "")


def event_line(event: Object) -> str:
    """``2026-12-01T12:00:00Z Warning Pending Workload/trainjob-x-1a2b3: couldn't assign flavors ...``."""
    target = event.get("involvedObject") or event.get("regarding") or {}
    message = " ".join(str(event.get("message") or event.get("note") or "").split())
    return (
        f"{event_time(event)} {event.get('type')} {event.get('reason')} "
        f"{target.get('kind')}/{target.get('name')}: {message[:_MESSAGE]}"
    )


# ------------------------------------------------------------------------------------------ reading a record


def state(job: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The conditions of the Workload as they are at the end of its history: type -> entry."""
    return {entry["type"]: entry for entry in job["history"]}


def holds_quota(job: Mapping[str, Any]) -> bool:
    """Whether the job's Workload has its quota now."""
    now = state(job)
    return _true(now.get("QuotaReserved")) and not _true(now.get("Finished"))


def was_admitted(job: Mapping[str, Any]) -> bool:
    """Whether the job's Workload ever got its quota."""
    return _first(job, "QuotaReserved") is not None


def waits(job: Mapping[str, Any]) -> dict[str, Any] | None:
    """Kueue's reason why the job waits now, or None."""
    entry = state(job).get("QuotaReserved")
    return entry if entry and entry["status"] == "False" and entry["message"] else None


def most_at_once(jobs: Sequence[Mapping[str, Any]]) -> int:
    """The largest number of jobs that held quota at once; the order is that of one watch."""
    steps = sorted(
        (
            (entry["seq"], job["name"], entry)
            for job in jobs
            for entry in job["history"]
            if entry["type"] in ("QuotaReserved", "Finished")
        ),
        key=lambda step: step[0],
    )
    holding: set[str] = set()
    most = 0
    for _, name, entry in steps:
        if entry["type"] == "QuotaReserved" and entry["status"] == "True":
            holding.add(name)
        else:
            holding.discard(name)
        most = max(most, len(holding))
    return most


def events(jobs: Iterable[Mapping[str, Any]]) -> list[str]:
    """The event lines of all jobs in the order of their times."""
    found = [(entry["at"], entry["line"]) for job in jobs for entry in job["events"]]
    return [line for _, line in sorted(found, key=lambda entry: entry[0])]


def strangers(workloads: Iterable[Object], ours: Container[str]) -> list[str]:
    """Whose Workloads wait or run in our queues, beside those of the TrainJobs ``ours``."""
    found = []
    for item in workloads:
        queue = str((item.get("spec") or {}).get("queueName") or "")
        conditions = (item.get("status") or {}).get("conditions") or []
        done = any(c.get("type") == "Finished" and c.get("status") == "True" for c in conditions)
        owners = item["metadata"].get("ownerReferences") or [{"kind": "Workload", **item["metadata"]}]
        owner = f"{owners[0]['kind']} {owners[0]['name']}"
        mine = owners[0]["kind"] == "TrainJob" and owners[0]["name"] in ours
        if queue.startswith("gpu-slices-quota-") and not done and not mine:
            found.append(f"{owner} ({queue})")
    return sorted(found)


def _before(early: str, late: str) -> bool:
    """Whether a time of the API server is before one of Kueue, by more than their clocks may differ."""
    try:
        first, second = (datetime.strptime(t, "%Y-%m-%dT%H:%M:%SZ") for t in (early, late))
    except ValueError:
        return True
    return (second - first).total_seconds() > _SKEW


def _true(entry: Mapping[str, Any] | None) -> bool:
    return bool(entry and entry["status"] == "True")


def _first(job: Mapping[str, Any], kind: str, status: str = "True", after: int = 0) -> dict[str, Any] | None:
    return next(
        (e for e in job["history"] if e["type"] == kind and e["status"] == status and e["seq"] > after), None
    )


# --------------------------------------------------------------------------------------------------- judging


def judge(members: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> list[Check]:
    """What the jobs prove together; each member has a ``record`` and an ``id`` that begins with its part.

    ``arguments``: ``resource`` (the name that Kueue counts), ``limit`` (devices of all queues together).
    """
    jobs = {str(member["id"]): member["record"] for member in members}
    parts = {
        part: [job for name, job in jobs.items() if name.split("-")[0] == part]
        for part in (_BORROWER, _WAITING, _URGENT)
    }
    resource, limit = str(arguments["resource"]), int(arguments["limit"])
    waiting, urgent = parts[_WAITING][0], parts[_URGENT][0]
    everyone = list(jobs.values())
    return [
        _pending(waiting, resource),
        _admitted(waiting, everyone),
        *_preempted(parts[_BORROWER], urgent, waiting),
        _limit(everyone, limit, resource),
    ]


def _pending(job: Job, resource: str) -> Check:
    """The job beyond the quota was suspended for the quota's sake, without pod and claim."""
    admitted, look = _first(job, "Admitted"), job["look"]
    entry = _wait(job, resource, admitted)
    message = entry["message"] if entry else ""
    early = [
        f"pod {pod['name']} was made at {pod['created']}"
        for pod in job["pods"]
        if admitted is None or _before(pod["created"], admitted["at"])
    ] + [
        f"claim {claim['name']} was made at {claim['created']}"
        for claim in job["claims"]
        if admitted is None or _before(claim["created"], admitted["at"])
    ]
    resumed = next((step for step in job["suspended"] if not step["suspend"]), None)
    faults = list(early)
    if entry is None:
        faults.append("Kueue never said that it has to wait")
    elif resource not in message or "insufficient" not in message:
        faults.append(f"Kueue's reason is another: '{message}'")
    if not look:
        faults.append("nobody looked while it waited")
    elif not look["suspend"] or look["pods"] or look["claims"]:
        faults.append(
            f"at {look['at']} it had suspend={look['suspend']}, {look['pods']} pods, {look['claims']} claims"
        )
    if entry and resumed and resumed["seq"] < entry["seq"]:
        faults.append(f"it was resumed at {resumed['at']}, before Kueue had decided")
    said = f"at {entry['at']} '{message}'; suspended, no pod, no claim" if entry else ""
    return judged(
        "pending",
        not faults,
        asked="A TrainJob beyond the slice quota stays suspended",
        found="; ".join(faults) or f"{job['name']}: {said} at {look['at']}",
        needed=f"Kueue's reason about {resource}, spec.suspend true, neither pod nor claim",
        fix="read the event lines in the evidence; nothing else may use these queues",
        evidence=_told(job, ("QuotaReserved",), look=look),
    )


def _wait(job: Job, resource: str, admitted: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Kueue's word about the wait for this resource, else the first about any wait."""
    said = [
        entry
        for entry in job["history"]
        if entry["type"] == "QuotaReserved"
        and entry["status"] == "False"
        and (admitted is None or entry["seq"] < admitted["seq"])
    ]
    return next((entry for entry in said if resource in entry["message"]), said[0] if said else None)


def _admitted(job: Job, everyone: Sequence[Job]) -> Check:
    """It was admitted when somebody gave quota back."""
    waited, admitted = _first(job, "QuotaReserved", "False"), _first(job, "Admitted")
    finished = _first(job, "Finished")
    freed = [
        (entry, other)
        for other in everyone
        if other is not job
        for entry in other["history"]
        if (
            (entry["type"] == "Finished" and entry["status"] == "True")
            or (entry["type"] == "QuotaReserved" and entry["status"] == "False")
        )
        and waited
        and admitted
        and waited["seq"] < entry["seq"] < admitted["seq"]
    ]
    faults = []
    if not admitted:
        faults.append("it was never admitted")
    elif not freed:
        faults.append(f"it was admitted at {admitted['at']} though nobody had given quota back")
    if admitted and not finished:
        faults.append("it did not finish")
    elif finished and finished["reason"] != "Succeeded":
        faults.append(f"it finished as {finished['reason']}: {finished['message']}")
    found = ""
    if not faults and admitted and finished:
        # The last that gave something back before it was admitted.
        entry, other = max(freed, key=lambda pair: pair[0]["seq"])
        found = (
            f"{job['name']}: admitted at {admitted['at']}, after {other['name']} gave its quota back at "
            f"{entry['at']} ({entry['type']}, {entry['reason']}); finished at {finished['at']}"
        )
    return judged(
        "admitted",
        not faults,
        asked="The waiting TrainJob is admitted when quota frees, and completes",
        found="; ".join(faults) or found,
        needed="Admitted after another job gave quota back, then Finished (Succeeded)",
        fix="read the event lines in the evidence",
        evidence=_told(job, ("Admitted", "Finished")),
    )


def _preempted(borrowers: Sequence[Job], urgent: Job, waiting: Job) -> list[Check]:
    """The urgent job had a borrower evicted, got a slice and completed; the borrower came back."""
    evicted = [(job, entry) for job in [*borrowers, waiting] if (entry := _first(job, "Evicted"))]
    asked = "A job of high priority preempts a borrower, whose pod and claim go"
    if len(evicted) != 1:
        names = "".join(f"; {job['name']}" for job, _ in evicted)
        got = _first(urgent, "QuotaReserved")
        done = [_first(job, "Finished") for job in borrowers]
        early = got and any(entry and entry["seq"] < got["seq"] for entry in done)
        return [
            judged(
                "preempted",
                False,
                asked=asked,
                found=f"{len(evicted)} jobs were evicted{names}"
                + (" (a borrower had finished before)" if early and not evicted else ""),
                needed="just one, a borrower",
                fix="raise quota_hold_seconds: the borrowers have to train until the urgent job comes"
                if not evicted
                else "nothing else may use these queues; run again",
                evidence={"events": events([*borrowers, urgent])},
            )
        ]
    job, entry = evicted[0]
    return [
        _eviction(job, entry, urgent, asked),
        _urgent(job, entry, urgent),
        _return(job, entry),
    ]


def _eviction(job: Job, entry: Mapping[str, Any], urgent: Job, asked: str) -> Check:
    preempted = _first(job, "Preempted")
    before = [pod for pod in job["pods"] if pod["seq"] < entry["seq"]]
    held = [claim for claim in job["claims"] if claim["seq"] < entry["seq"]]
    faults = []
    if entry["reason"] != "Preempted":
        faults.append(f"it was evicted for another reason: {entry['reason']}: {entry['message']}")
    elif not urgent["workload_uid"] or urgent["workload_uid"] not in entry["message"]:
        faults.append(f"it was preempted for somebody else: {entry['message']}")
    if preempted is None:
        faults.append("its Workload has no condition Preempted")
    if not before or not any(claim["devices"] for claim in held):
        faults.append("it had no pod with a slice when it was evicted")
    faults += [f"pod {pod['name']} was not seen to go" for pod in before if not pod["gone"]]
    faults += [f"claim {claim['name']} was not seen to go" for claim in held if not claim["gone"]]
    gave = ", ".join(f"{d['uuid']}" for claim in held for d in claim["devices"])
    gone = "; ".join(
        [f"pod {pod['name']} gone at {pod['gone']}" for pod in before]
        + [f"claim {claim['name']} gone at {claim['gone']}" for claim in held]
    )
    return judged(
        "preempted",
        not faults,
        asked=asked,
        found="; ".join(faults)
        or f"{job['name']}: evicted at {entry['at']}, '{entry['message']}'; {gone}; it gave back {gave}",
        needed="Evicted and Preempted for the urgent job's Workload, then neither pod nor claim",
        fix="read the event lines in the evidence",
        evidence=_told(job, ("Evicted", "Preempted"), claims=held),
    )


def _urgent(job: Job, entry: Mapping[str, Any], urgent: Job) -> Check:
    admitted, finished = _first(urgent, "Admitted"), _first(urgent, "Finished")
    given = [d for claim in urgent["claims"] for d in claim["devices"]]
    lost = {d["uuid"] for claim in job["claims"] if claim["seq"] < entry["seq"] for d in claim["devices"]}
    faults = []
    if not admitted:
        faults.append("it was never admitted")
    elif admitted["seq"] < entry["seq"]:
        faults.append(f"it was admitted at {admitted['at']}, before anybody was evicted")
    if not given:
        faults.append("it got no slice")
    if admitted and (not finished or finished["reason"] != "Succeeded"):
        faults.append(f"it finished as {finished['reason']}" if finished else "it did not finish")
    if (urgent["priority"] or 0) <= (job["priority"] or 0):
        faults.append(f"its priority {urgent['priority']} is not above {job['priority']}")
    found = ""
    if not faults and admitted and finished:
        same = " (the one given back)" if given[0]["uuid"] in lost else ""
        found = (
            f"{urgent['name']} (priority {urgent['priority']}, {urgent['queue']}): admitted at "
            f"{admitted['at']}, {given[0]['uuid']}{same}, finished at {finished['at']}"
        )
    return judged(
        "reclaimed",
        not faults,
        asked="The job of high priority gets its slice and completes",
        found="; ".join(faults) or found,
        needed="Admitted after the eviction, a device, Finished (Succeeded)",
        fix="read the event lines in the evidence",
        evidence=_told(urgent, ("QuotaReserved", "Admitted", "Finished"), claims=urgent["claims"]),
    )


def _return(job: Job, entry: Mapping[str, Any]) -> Check:
    again, finished = _first(job, "Admitted", after=entry["seq"]), _first(job, "Finished")
    old = {pod["name"] for pod in job["pods"] if pod["seq"] < entry["seq"]}
    pods = [
        pod
        for pod in job["pods"]
        if again and pod["name"] not in old and not _before(pod["created"], again["at"])
    ]
    given = [d for claim in job["claims"] if claim["pod"] not in old for d in claim["devices"]]
    faults = []
    if not again:
        faults.append("it was never admitted again")
    elif not pods or not given:
        faults.append("it got no new pod with a slice")
    if again and (not finished or finished["reason"] != "Succeeded"):
        faults.append(f"it finished as {finished['reason']}" if finished else "it did not finish")
    found = ""
    if not faults and again and finished:
        found = (
            f"{job['name']}: admitted again at {again['at']}, pod {pods[-1]['name']} in "
            f"{given[-1]['uuid']}, finished at {finished['at']}"
        )
    return judged(
        "readmitted",
        not faults,
        asked="The preempted borrower is admitted again and completes",
        found="; ".join(faults) or found,
        needed="Admitted once more, a new pod with a slice, Finished (Succeeded)",
        fix="read the event lines in the evidence",
        evidence=_told(job, ("QuotaReserved", "Admitted", "Finished"), claims=job["claims"]),
    )


def _limit(jobs: Sequence[Job], limit: int, resource: str) -> Check:
    most = most_at_once(jobs)
    return judged(
        "limit",
        most == limit,
        asked=f"The queues never hold more than their quota of {resource}",
        found=f"at most {most} of {len(jobs)} jobs held quota at once",
        needed=f"{limit}, and no more",
        fix="check the quotas of the ClusterQueues: kubectl get clusterqueues -o yaml",
        evidence={"events": events(jobs)},
    )


def _told(job: Job, kinds: Sequence[str], **more: Any) -> dict[str, Any]:
    """What Kueue said about a job, as the evidence of a check."""
    return {
        "workload": job["workload"],
        "conditions": [
            f"{e['at']} {e['type']}={e['status']} {e['reason']}: {e['message']}"
            for e in job["history"]
            if e["type"] in kinds
        ],
        "events": [entry["line"] for entry in job["events"]],
        **more,
    }
