"""Prepare, follow and judge the workloads of one stage. Controller only.

A *member* is one workload and what is known of it::

    {"kind", "name", "id", "profile", "result": succeeded | failed | stuck | timeout | gone, "end": text,
     "seconds": float | None, "note": "" | "not run again: ...",
     "pods": [{"name", "node", "uid", "log", "end", "devices", "times", "waited"}]}

``times`` {created, scheduled, started, finished} are RFC 3339 or "", ``waited`` is what the scheduler said
while the pod was pending. Devices, times and waits are kept on the workload in the annotation
``gpu-slices.dev/evidence``, for claims are gone when their pods end: a second run judges the same facts.
"""

from __future__ import annotations

import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, Mapping, Sequence

import yaml

from . import judges, workload_log, workload_state
from .checks import Check, judged
from .kube_api import MERGE_PATCH, ApiFault, KubeApi
from .report import now, write_atomic
from .resource_slices import merge_slices
from .workload_follow import RESOURCE, Follower, Hub, Outcome, Target, read_log

EVIDENCE = "gpu-slices.dev/evidence"
COMPONENT = "app.kubernetes.io/component"
MANAGED_BY = "app.kubernetes.io/managed-by"
PREFIX = "gpu-slices-"
_JOBSETS = "/apis/jobset.x-k8s.io/v1alpha2"
_DELETE_SECONDS = 120
_PATCH_SECONDS, _PATCH_PAUSE, _SERVER_ERROR = 30, 2.0, 500

Member = Dict[str, Any]
Object = Dict[str, Any]
Say = Callable[[str, str], None]


class RunFault(Exception):
    """A run that cannot go on; the message says found, needed and what to do."""


class Run:
    """The workloads of one stage and what is to be done with them.

    ``settings``: stage, part (of the stage: its files carry the name), namespace, workloads [{kind, name,
    container, profile, judge, world, ok, id}], manifests, clear [{kind, namespace}], together, judge,
    judge_arguments, require_cuda, timeout and schedule_timeout (s). ``say`` gets ("note", text) and
    ("log", line).
    """

    def __init__(self, api: KubeApi, settings: Mapping[str, Any], artifacts: Path, say: Say) -> None:
        self.api, self.settings, self.artifacts, self.say = api, settings, artifacts, say
        self.stage = str(settings["stage"])
        # How the files of this run are called: a stage may follow several groups of workloads.
        self.files = "-".join(text for text in (self.stage, str(settings.get("part") or "")) if text)
        self.namespace = str(settings["namespace"])
        self.workloads: list[dict[str, Any]] = [dict(item) for item in settings["workloads"]]
        self.targets = [
            Target(
                kind=item["kind"],
                namespace=self.namespace,
                name=item["name"],
                container=item["container"],
                profile=item.get("profile") or "",
            )
            for item in self.workloads
        ]
        # One of several that are chosen from (it has an id) is told like one of several.
        self.several = len(self.workloads) > 1 or any(item.get("id") for item in self.workloads)
        self.together = bool(settings.get("together", True))

    # -- prepare

    def prepare(self, check_mode: bool) -> dict[str, Any]:
        """See what is there, judge or remove it, and keep the rendered manifests."""
        manifests = json.loads(json.dumps(self.settings.get("manifests") or []))
        text = yaml.safe_dump_all(manifests, sort_keys=False)
        items, others, published = self._read()
        for target, item in zip(self.targets, items):
            if item and not _labelled(item):
                raise RunFault(
                    f"{target.kind} {target.namespace}/{target.name} is there and was not made by this "
                    f"project: it has no label {MANAGED_BY}=gpu-slices. Needed: that name free, or an object "
                    "of ours. Rename or delete it, or set gpu_slices_namespace to another namespace."
                )
        members = [
            self._recorded(index, item, published) if item else None for index, item in enumerate(items)
        ]
        judged = [self.judge_member(index, m) if m else [] for index, m in enumerate(members)]
        holds = [bool(m and m["pods"]) and not _failed(c) for m, c in zip(members, judged)]
        checks = [check for one in judged for check in one]
        settled = all(holds)
        if settled:
            checks += self.judge_stage([m for m in members if m])
            settled = not _failed(checks)
        running = [bool(item) and not workload_state.finished(item) and not _deleting(item) for item in items]
        keep = self._kept(holds, running, settled)
        stale = [i for i, item in enumerate(items) if item and not keep[i]]
        for index, member in enumerate(members):
            if member and keep[index] and holds[index]:
                name = f"{member['kind']} {member['name']}"
                self.say("note", f"{member['note'].replace(':', f': {name},', 1)}, holds")
                for pod in member["pods"]:
                    self.say("log", workload_log.last_line(pod["log"] or ""))
        gone = [(self.targets[i], items[i]) for i in stale] + others
        if not any(keep):
            gone += self._unfinished()
        if not check_mode:
            write_atomic(self.artifacts / "manifests" / f"{self.files}.yaml", text)
            self._delete([(target, item) for target, item in gone if item])
        missing = not settled and not all(keep)
        result: dict[str, Any] = {
            "changed": bool(gone) or (check_mode and missing),
            "settled": settled,
            "exists": any(keep[i] and running[i] for i in range(len(items))),
            "checks": checks if settled else [],
            "pods": [pod for m in members if m for pod in _brief(m["pods"])] if settled else [],
            "removed": [item["metadata"]["name"] for _, item in gone if item],
        }
        if check_mode and missing:
            result["diff"] = {"before": "", "after": text, "after_header": f"{self.stage} in the cluster"}
        if settled and not check_mode:
            result["invocation"] = {"gpu_report": self._payload([m for m in members if m], published)}
        return result

    def _kept(self, holds: list[bool], running: list[bool], settled: bool) -> list[bool]:
        """Which workloads stay: proved ones and running ones; of those that belong together all or none."""
        if settled:
            return [True] * len(holds)
        if all(holds):  # each by itself, and not what they prove together
            return [False] * len(holds)
        if not self.together or not self.several:
            return [(held and (self.several or settled)) or runs for held, runs in zip(holds, running)]
        return [all(running)] * len(holds)

    def _read(self) -> tuple[list[Any], list[tuple[Target, Object]], list[Object]]:
        """The workloads by index (None: not there), ours of other names, and what is published."""
        api, selector = self.api, {"labelSelector": f"{COMPONENT}={self.stage}"}
        questions: dict[str, Callable[[], Any]] = {
            "slices": lambda: api.find(f"{RESOURCE}/resourceslices") or {}
        }
        kinds = {target.kind: target for target in self.targets}
        for kind, target in kinds.items():
            questions[f"list {kind}"] = partial(api.find, target.collection, selector)
        for target in self.targets:
            questions[target.path] = partial(api.find, target.path)
        answers, faults = api.parallel(questions)
        for fault in faults.values():
            raise fault
        items = []
        for target in self.targets:
            item = answers[target.path]
            items.append({**item, "kind": target.kind} if item else None)
        wanted = {(target.kind, target.name) for target in self.targets}
        others = [
            (target, item)
            for kind, target in kinds.items()
            for item in (answers[f"list {kind}"] or {}).get("items") or []
            if (kind, item["metadata"]["name"]) not in wanted and _ours(item)
        ]
        return items, others, merge_slices(answers["slices"].get("items") or [])["devices"]

    def _unfinished(self) -> list[tuple[Target, Object]]:
        """What else of this stage still runs, or waits, and so holds slices that are counted as free."""
        found = []
        for place in self.settings.get("clear") or []:
            target = Target(place["kind"], place["namespace"], name="", container="")
            listing = self.api.find(target.collection, {"labelSelector": f"{COMPONENT}={self.stage}"}) or {}
            for item in listing.get("items") or []:
                if _ours(item) and not workload_state.finished({**item, "kind": target.kind}):
                    found.append((target, item))
        return found

    def _recorded(self, index: int, item: Object, published: Sequence[Object]) -> Member | None:
        """A workload that succeeded, with its logs, if what it was given is still published."""
        if workload_state.finished(item) != "succeeded":
            return None
        workload, target = self.workloads[index], self.targets[index]
        member: Member = {
            **self._identity(workload),
            "result": "succeeded",
            "end": workload_state.end_text(item, target.container),
            "seconds": None,
            "note": f"not run again: done {_completed(item)}",
            "pods": [],
        }
        try:
            evidence = json.loads((item["metadata"].get("annotations") or {}).get(EVIDENCE, ""))
            facts = {(d["pool"], d["device"], d["uuid"]): d for d in published}
            member["pods"] = [
                {
                    "name": pod["name"],
                    "node": pod["node"],
                    "uid": pod.get("uid", ""),
                    "at": evidence["at"],
                    "log": read_log(self.api, target, pod["name"]),
                    "end": "",
                    "devices": [{**facts[d["pool"], d["device"], d["uuid"]], **d} for d in pod["devices"]],
                    "times": dict(pod.get("times") or {}),
                    "waited": str(pod.get("waited") or ""),
                }
                for pod in evidence["pods"]
            ]
        except (ValueError, KeyError, TypeError):
            member["pods"] = []
        return member

    def _identity(self, workload: Mapping[str, Any]) -> Member:
        return {k: str(workload.get(k) or "") for k in ("kind", "name", "id", "profile")}

    def _delete(self, gone: Sequence[tuple[Target, Object]]) -> None:
        """Delete, and wait until they and their pods are gone: their slices are free only then.

        In the background: Trainer makes the JobSet of a TrainJob anew as long as the TrainJob is there, so
        one that waits for its dependents is never gone while it still runs.
        """
        body = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
        paths = {}
        for target, item in gone:
            name = item["metadata"]["name"]
            path = paths[f"{target.kind} {name}"] = f"{target.collection}/{name}"
            self.say("note", f"removing {target.kind} {name} of an earlier run")
            try:
                self.api.request("DELETE", path, body)
            except ApiFault as fault:
                if fault.kind != "not_found":
                    raise
        limit = time.monotonic() + _DELETE_SECONDS
        left: dict[str, Callable[[], Any]] = {
            name: partial(self.api.find, path) for name, path in paths.items()
        }
        for target in (replace(target, name=item["metadata"]["name"]) for target, item in gone):
            if target.kind == "TrainJob":
                path = f"{_JOBSETS}/namespaces/{target.namespace}/jobsets/{target.name}"
                left[f"JobSet {target.name}"] = partial(self.api.find, path)
            if target.kind != "Pod":
                left[f"a pod of {target.kind} {target.name}"] = partial(self._pods_of, target)
        for name, look in left.items():
            while look():
                if time.monotonic() > limit:
                    raise RunFault(
                        f"{name} is still there {_DELETE_SECONDS} s after its deletion; needed: gone, for "
                        "its slice is free only then; see its finalizers and pods: a pod whose DRA driver is "
                        "gone cannot end."
                    )
                time.sleep(0.3)

    def _pods_of(self, target: Target) -> list[Any]:
        return list((self.api.find(target.pods, target.pod_selector) or {}).get("items") or [])

    # -- follow

    def follow(self) -> dict[str, Any]:
        """Follow to the end, judge, and record the evidence."""
        self._clear()
        before: list[Member | None] = [None] * len(self.workloads)
        if not self.together:
            items, _, published = self._read()
            before = [
                self._recorded(index, item, published) if item else None for index, item in enumerate(items)
            ]
            before = [
                m if m and m["pods"] and not _failed(self.judge_member(i, m)) else None
                for i, m in enumerate(before)
            ]
        open_ones = [index for index, member in enumerate(before) if member is None]
        outcomes = dict(zip(open_ones, self._outcomes(open_ones)))
        members = [before[i] or self._member(i, outcomes[i]) for i in range(len(before))]
        judged = []
        for index, member in enumerate(members):
            checks = self.judge_member(index, member, outcomes.get(index))
            if index in outcomes:
                self._keep(index, outcomes[index], checks)
            judged.append(checks)
        checks = [check for one in judged for check in one]
        if not _failed(checks):
            checks += self.judge_stage(members)
        for index, outcome in outcomes.items():
            if not _failed(judged[index] if not self.together else checks):
                self._annotate(index, outcome)
        published = next((o.published for o in outcomes.values() if o.published), [])
        seconds = max((outcome.seconds for outcome in outcomes.values()), default=0.0)
        if self.several and checks:
            # They ran side by side: a sum over the rows would count the same time again and again.
            checks = [{**check, "seconds": None} for check in checks]
            checks[0]["seconds"] = seconds
        return {
            "changed": False,
            "settled": False,
            "checks": checks,
            "pods": [pod for member in members for pod in _brief(member["pods"])],
            "seconds": seconds,
            "invocation": {"gpu_report": self._payload(members, published)},
        }

    def _outcomes(self, indexes: Sequence[int]) -> list[Outcome]:
        """Follow these workloads side by side; what they all look at is watched once."""
        hub = Hub(self.api)
        followers: list[Follower] = []

        def others(index: int) -> bool:
            return any(one.at_work for one in followers if one is not followers[index])

        followers += [
            Follower(
                self.api,
                self.targets[index],
                self._saying(index),
                timeout=float(self.settings["timeout"]),
                schedule_timeout=float(self.settings["schedule_timeout"]),
                hub=hub,
                others=partial(others, place),
            )
            for place, index in enumerate(indexes)
        ]
        hub.start()
        try:
            with ThreadPoolExecutor(max_workers=max(1, len(followers))) as pool:
                return list(pool.map(Follower.run, followers))
        finally:
            hub.stop()

    def _saying(self, index: int) -> Say:
        """How a workload's lines are shown: one alone in full, of several the notes and the last line."""
        if not self.several:
            return self.say
        label = self.label(index)

        def say(kind: str, text: str) -> None:
            if kind == "note":
                self.say(kind, f"{label}: {text}")

        return say

    def label(self, index: int) -> str:
        """A workload's short name among several."""
        return str(self.workloads[index].get("id") or index + 1)

    def _member(self, index: int, outcome: Outcome) -> Member:
        done = workload_state.end_text(outcome.item, self.targets[index].container) if outcome.item else ""
        return {
            **self._identity(self.workloads[index]),
            "result": outcome.result,
            "end": done,
            "seconds": outcome.seconds,
            "note": "",
            "pods": outcome.pods,
        }

    def _clear(self) -> None:
        """Drop logs and evidence of this stage's earlier runs: the report is about this one."""
        for path in (self.artifacts / "logs").glob(f"{self.files}-{PREFIX}*.log"):
            path.unlink()
        for path in (self.artifacts / "evidence").glob(f"{self.files}-{PREFIX}*"):
            shutil.rmtree(path)

    def _keep(self, index: int, outcome: Outcome, checks: list[Check]) -> None:
        """Write the logs, and after a failure all that a person wants to see."""
        for pod in outcome.pods:
            if pod["log"]:
                write_atomic(self.artifacts / "logs" / f"{self.files}-{pod['name']}.log", pod["log"])
        if self.several and outcome.pods:
            last = workload_log.last_line(outcome.pods[0]["log"] or "")
            self.say("log", f"{self.label(index)}: {last}")
        if _failed(checks):
            checks[0]["evidence"]["files"] = self._save(self.targets[index], outcome)

    # -- judging

    def judge_member(self, index: int, member: Member, outcome: Outcome | None = None) -> list[Check]:
        """The checks of one workload. Of several each is one row, unless something is wrong with it."""
        checks = [self._judge_end(index, member, outcome)]
        if member["result"] == "succeeded":
            checks += self._judge_pods(index, member)
        if not self.several:
            return checks
        label = self.label(index)
        wrong = [check for check in checks if check["status"] == "fail"]
        if wrong:
            return [{**check, "id": f"{label}-{check['id']}"} for check in wrong]
        where = "; ".join(
            f"{pod['name']} on {pod['node']}: "
            + (", ".join(_device(d) for d in pod["devices"]) or "no claim of it was seen")
            for pod in member["pods"]
        )
        note = f" ({member['note']})" if member["note"] else ""
        return [
            {
                "id": label,
                "status": "pass",
                "asked": f"{member['kind']} {member['name']} succeeds"
                + (" and proves its device" if any(pod["devices"] for pod in member["pods"]) else ""),
                "found": f"{where}{note}",
                "needed": "",
                "fix": "",
                "evidence": {
                    "seconds": member["seconds"],
                    "checks": [f"{check['id']}: {check['found']}" for check in checks],
                    "pods": [{k: pod[k] for k in ("name", "node", "times")} for pod in member["pods"]],
                },
            }
        ]

    def judge_stage(self, members: Sequence[Member]) -> list[Check]:
        """What the workloads prove together."""
        name = str(self.settings.get("judge") or "")
        return judges.STAGE[name](members, self.settings.get("judge_arguments") or {}) if name else []

    def _judge_end(self, index: int, member: Member, outcome: Outcome | None) -> Check:
        trouble = (outcome.trouble if outcome else None) or {}
        good = member["result"] == "succeeded"
        target = self.targets[index]
        last = "; ".join(_end(target, pod) for pod in member["pods"] if pod["node"])
        found = f"{member['end']}, not run again" if member["note"] else member["end"]
        check: Check = {
            "id": "completed" if good else trouble.get("id", "completed"),
            "status": "pass" if good else "fail",
            "asked": f"{target.kind} {target.name} succeeds",
            "found": found if good else f"{trouble.get('found')}" + (f"; {last}" if last else ""),
            "needed": "success",
            "fix": f"raise limits.memory in {self.stage}_resources"
            if not good and "OOMKilled" in f"{trouble.get('found')} {last}"
            else trouble.get("fix", ""),
            "evidence": {},
        }
        if outcome:
            check["seconds"] = outcome.seconds
            check["evidence"] = {
                "pods": [{k: p[k] for k in ("name", "node", "end", "times")} for p in outcome.pods],
                **({} if good else {"tail": _tail(outcome)}),
            }
        return check

    def _judge_pods(self, index: int, member: Member) -> list[Check]:
        workload, pods = self.workloads[index], member["pods"]
        world = int(workload.get("world") or 1)
        if len(pods) != world:
            return [
                judged(
                    "pods",
                    False,
                    asked=f"the logs of {world} pods can be judged",
                    found=f"{len(pods)} pods ({', '.join(p['name'] for p in pods) or 'none'})",
                    needed=f"{world} pods",
                    fix="run again; nothing else may delete the pods meanwhile",
                )
            ]
        judge = judges.WORKLOAD[str(workload["judge"])]
        cuda = bool(self.settings.get("require_cuda"))
        checks: list[Check] = []
        for position, pod in enumerate(pods):
            rows = judge(pod["log"], pod["devices"], cuda, workload)
            for check in rows:
                check["id"] += f"-{position}" if len(pods) > 1 else ""
                check["evidence"].update(
                    {
                        "pod": pod["name"],
                        "node": pod["node"],
                        **({"note": member["note"]} if member["note"] else {}),
                    }
                )
            checks += rows
        return checks

    # -- what is kept

    def _annotate(self, index: int, outcome: Outcome) -> None:
        """Keep the allocation on the workload, for a second run: the claims are gone by then."""
        evidence = {
            "at": now(),
            "pods": [
                {
                    **{k: pod[k] for k in ("name", "node", "uid", "times", "waited")},
                    "devices": [
                        {k: d[k] for k in ("pool", "device", "uuid", "claim")} for d in pod["devices"]
                    ],
                }
                for pod in outcome.pods
            ],
        }
        body = {"metadata": {"annotations": {EVIDENCE: json.dumps(evidence, sort_keys=True)}}}
        target = self.targets[index]
        limit = time.monotonic() + _PATCH_SECONDS
        while True:
            try:
                self.api.request(
                    "PATCH",
                    target.path,
                    body,
                    params={"fieldManager": "gpu-slices-evidence"},
                    content_type=MERGE_PATCH,
                )
            except ApiFault as fault:
                # A webhook whose controller just restarts, say Kueue's, refuses for some seconds.
                if (not fault.status or fault.status >= _SERVER_ERROR) and time.monotonic() < limit:
                    time.sleep(_PATCH_PAUSE)
                    continue
                # What was proved stays proved.
                self.say(
                    "note",
                    f"what {target.kind} {target.name} proved cannot be recorded on it, so a second run will "
                    f"run it again: {fault.message}",
                )
            return

    def _save(self, target: Target, outcome: Outcome) -> list[str]:
        """Everything a person wants to see after a failure, as files; returns their names."""
        folder = self.artifacts / "evidence" / f"{self.files}-{target.name}"
        wanted: dict[str, Callable[[], Any]] = {
            "workload.yaml": lambda: self.api.find(target.path),
            "pods.yaml": lambda: self.api.get(target.pods, target.pod_selector),
            "claims-now.yaml": lambda: self.api.get(f"{RESOURCE}/resourceclaims"),
            "slices.yaml": lambda: self.api.get(f"{RESOURCE}/resourceslices"),
        }
        answers, faults = self.api.parallel(wanted)
        texts = {name: yaml.safe_dump(answer, sort_keys=False) for name, answer in answers.items() if answer}
        texts["claims-recorded.yaml"] = yaml.safe_dump_all(outcome.claims, sort_keys=False)
        texts["events.txt"] = "\n".join([*outcome.events, *(f.message for f in faults.values())]) + "\n"
        for pod in [*outcome.pods, *outcome.helpers]:
            texts[f"log-{pod['name']}.txt"] = pod["log"] or "the log could not be read\n"
        for name, text in texts.items():
            write_atomic(folder / name, text)
        self.say("note", f"evidence: {folder}")
        return [str((folder / name).relative_to(self.artifacts)) for name in sorted(texts)]

    def _payload(self, members: Sequence[Member], published: Sequence[Object]) -> dict[str, Any]:
        pods = [pod for member in members for pod in member["pods"]]
        held = [
            {
                **{k: device.get(k) for k in ("node", "pool", "device", "uuid", "claim")},
                "namespace": self.namespace,
                "pod": pod["name"],
                "stage": self.stage,
                "at": pod.get("at") or now(),
            }
            for pod in pods
            for device in pod["devices"]
        ]
        payload: dict[str, Any] = {"allocations": held, "header": {"cluster": self.api.server}}
        for pod in pods:
            payload["header"]["versions"] = workload_log.versions(pod["log"] or "")
        if published:
            payload["devices"] = [workload_state.picture_device(d) for d in published]
        return payload


def _failed(checks: Sequence[Check]) -> bool:
    return any(check["status"] == "fail" for check in checks)


def _ours(item: Object) -> bool:
    """Ours, of the same component, under another name: made from other inputs than now."""
    return _labelled(item) and not item["metadata"].get("ownerReferences")


def _labelled(item: Object) -> bool:
    return (item["metadata"].get("labels") or {}).get(MANAGED_BY) == "gpu-slices"


def _device(device: Mapping[str, Any]) -> str:
    return f"{device.get('profile') or device.get('type')} {device.get('uuid')}"


def _end(target: Target, pod: Mapping[str, Any]) -> str:
    """How a pod ended, where the workload does not say so itself, and its last words."""
    end = "" if target.kind == "Pod" else f"pod {pod['name']} on {pod['node']} {pod['end']}, "
    line = workload_log.last_line(pod["log"] or "")
    return end + (f"last line of its log: {line}" if line else "no log")


def _tail(outcome: Outcome, lines: int = 20) -> list[str]:
    pods: list[Any] = [*outcome.pods, *outcome.helpers]
    return [line for pod in pods[:1] for line in (pod["log"] or "").splitlines()[-lines:]]


def _brief(pods: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    keys = ("node", "pool", "device", "uuid", "profile", "claim")
    return [
        {"name": p["name"], "node": p["node"], "devices": [{k: d.get(k) for k in keys} for d in p["devices"]]}
        for p in pods
    ]


def _deleting(item: Object) -> bool:
    return bool(item["metadata"].get("deletionTimestamp"))


def _completed(item: Object) -> str:
    entry = workload_state.condition(item, "Complete") or {}
    for status in (item.get("status") or {}).get("containerStatuses") or []:
        ended = (status.get("state") or {}).get("terminated") or {}
        if ended.get("finishedAt"):
            return str(ended["finishedAt"])
    return str(entry.get("lastTransitionTime") or "earlier")
