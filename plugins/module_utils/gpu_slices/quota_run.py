"""Play the proof of a slice quota: create TrainJobs in turn and watch what Kueue makes of them.

The parts: *borrowers* fill the quota of both teams from the queue of one; a *waiting* job of that queue is
one too many; an *urgent* job of the other team has higher priority and a right to what was lent. Each job is
followed as in workload_follow; Kueue's Workloads and the comings and goings of pods and claims are recorded
beside it (quota_record) and kept on the TrainJobs with the rest of the evidence. Controller only.
"""

from __future__ import annotations

import json
import queue
import time
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, Mapping, Sequence

from . import quota_record, workload_state
from .checks import Check, judged
from .kube_api import APPLY_PATCH, MERGE_PATCH, ApiFault, KubeApi
from .quota_record import Recorder
from .report import write_atomic
from .resource_slices import merge_slices
from .workload_follow import RESOURCE, Follower, Hub, Outcome, arrived
from .workload_run import EVIDENCE, Run, RunFault, Say

KUEUE = "/apis/kueue.x-k8s.io"
_TICK = 0.2
# Seconds: until Kueue has made a Workload, until it has decided, and until its last word about an ended job.
_MADE, _DECIDED, _LAST_WORD = 20.0, 45.0, 8.0
_INADMISSIBLE = 8.0
_CREATE_RETRY = 60.0

Member = Dict[str, Any]
Trouble = Dict[str, Any]


class QuotaRun(Run):
    """The TrainJobs of the proof. ``settings`` as for Run, and:

    ``jobs`` {name: TrainJob manifest}, ``resource`` (what Kueue counts), ``limit`` (devices of both teams),
    ``kueue_version`` (of its API, as v1beta2). Ids of the workloads begin with their part: borrower-1,
    waiting, urgent.
    """

    def __init__(self, api: KubeApi, settings: Mapping[str, Any], artifacts: Path, say: Say) -> None:
        super().__init__(api, settings, artifacts, say)
        self._recorder: Recorder | None = None

    # -- what Run asks for

    def _recorded(self, index: int, item: Any, published: Any) -> Member | None:
        """As Run has it, with Kueue's part of the evidence."""
        member = super()._recorded(index, item, published)
        if member is None:
            return None
        try:
            text = (item["metadata"].get("annotations") or {}).get(EVIDENCE, "")
            member["record"] = dict(json.loads(text)["kueue"])
        except (ValueError, KeyError, TypeError):
            member["pods"] = []
        return member

    def _kept(self, holds: list[bool], running: list[bool], settled: bool) -> list[bool]:
        """All or none: what Kueue did with the jobs of a run that was broken off has not been recorded."""
        return [settled] * len(holds)

    def _member(self, index: int, outcome: Outcome) -> Member:
        assert self._recorder is not None  # noqa: S101 - there are outcomes only after a play
        return {**super()._member(index, outcome), "record": self._recorder.jobs[self.targets[index].name]}

    def judge_stage(self, members: Sequence[Member]) -> list[Check]:
        """What the jobs prove together."""
        try:
            return quota_record.judge(members, self.settings)
        except (KeyError, IndexError, TypeError) as fault:
            return [
                judged(
                    "record",
                    False,
                    asked="Kueue's part of the evidence can be read",
                    found=f"{type(fault).__name__}: {fault}",
                    needed="a record of each job",
                    fix="remove the TrainJobs of this stage and run it again",
                )
            ]

    def _annotate(self, index: int, outcome: Outcome) -> None:
        super()._annotate(index, outcome)
        assert self._recorder is not None  # noqa: S101
        path, name = self.targets[index].path, self.targets[index].name
        item = self.api.get(path)
        evidence = json.loads(item["metadata"]["annotations"][EVIDENCE])
        evidence["kueue"] = self._recorder.jobs[name]
        body = {"metadata": {"annotations": {EVIDENCE: json.dumps(evidence, sort_keys=True)}}}
        params = {"fieldManager": "gpu-slices-evidence"}
        self.api.request("PATCH", path, body, params=params, content_type=MERGE_PATCH)

    def follow(self) -> dict[str, Any]:
        """As Run has it, where the queues are ours alone."""
        path = f"{KUEUE}/{self.settings['kueue_version']}/namespaces/{self.namespace}/workloads"
        others = quota_record.strangers(self.api.get(path).get("items") or [], self.settings["jobs"])
        if others:
            raise RunFault(
                f"In the queues of this stage there is a job of somebody else: {', '.join(others)}. Needed: "
                "these queues for the proof alone, which would preempt it. Wait until it has ended, or give "
                f"it another queue ({quota_record.QUEUE_LABEL}), and run again."
            )
        return super().follow()

    def _outcomes(self, indexes: Sequence[int]) -> list[Outcome]:
        """Play, with a follower for each job."""
        hub = Hub(self.api)
        director = Director(self, hub)
        self._recorder = director.recorder
        followers = [
            _Follower(
                self.api,
                self.targets[index],
                self._saying(index),
                timeout=float(self.settings["timeout"]),
                schedule_timeout=float(self.settings["schedule_timeout"]),
                hub=hub,
            )
            for index in indexes
        ]
        for follower in followers:
            follower.director = director
        hub.start()
        try:
            with ThreadPoolExecutor(max_workers=len(followers)) as pool:
                running = [pool.submit(follower.run) for follower in followers]
                director.play(running)
                outcomes = [future.result() for future in running]
                director.last_words(outcomes)
                director.recorder.close()
        finally:
            hub.stop()
        lines = quota_record.events(director.recorder.jobs.values())
        write_atomic(self.artifacts / "logs" / f"{self.stage}-gpu-slices-events.log", "\n".join([*lines, ""]))
        return outcomes

    def _save(self, target: Any, outcome: Outcome) -> list[str]:
        """After a failure also what Kueue holds."""
        files = super()._save(target, outcome)
        version = self.settings["kueue_version"]
        folder = self.artifacts / "evidence" / f"{self.stage}-{target.name}"
        wanted: dict[str, Callable[[], Any]] = {
            "workloads.json": partial(
                self.api.get, f"{KUEUE}/{version}/namespaces/{self.namespace}/workloads"
            ),
            "clusterqueues.json": partial(self.api.get, f"{KUEUE}/{version}/clusterqueues"),
        }
        answers, _ = self.api.parallel(wanted)
        for name, answer in answers.items():
            write_atomic(folder / name, json.dumps(answer, indent=1))
            files.append(str((folder / name).relative_to(self.artifacts)))
        return files


class _Follower(Follower):
    """A follower that gives up when the play does."""

    director: Director

    def _verdict(self, seconds: float) -> tuple[str, Trouble | None] | None:
        found = super()._verdict(seconds)
        if found is None and self.director.trouble:
            return "stuck", self.director.trouble
        return found


class Director:
    """Creates the jobs in their turn and keeps the record."""

    def __init__(self, run: QuotaRun, hub: Hub) -> None:
        self._api, self._namespace = run.api, run.namespace
        self._manifests: Mapping[str, Any] = run.settings["jobs"]
        self._names = {str(w["id"]): str(w["name"]) for w in run.workloads}
        self._labels = {name: label for label, name in self._names.items()}
        self.recorder = Recorder(self._labels, self._told(run.say))
        self.trouble: Trouble | None = None
        self._queue: queue.Queue[tuple[str, str, Any]] = queue.Queue()
        self._published: list[dict[str, Any]] = []
        self._running: dict[str, bool] = {}
        self._created: dict[str, float] = {}
        space = f"namespaces/{self._namespace}"
        component = {"labelSelector": f"app.kubernetes.io/component={run.stage}"}
        version = str(run.settings["kueue_version"])
        for name, path, params in (
            ("trainjob", f"/apis/trainer.kubeflow.org/v1alpha1/{space}/trainjobs", component),
            ("workload", f"{KUEUE}/{version}/{space}/workloads", {}),
            ("pod", f"/api/v1/{space}/pods", component),
            # These two are watched for the followers already.
            ("claim", f"{RESOURCE}/{space}/resourceclaims", {}),
            ("event", f"/api/v1/{space}/events", {}),
        ):
            hub.ask(name, path, params, self._queue)

    def _told(self, say: Say) -> Callable[[str, str], None]:
        return lambda name, text: say("note", f"{self._labels[name]}: {text}")

    # -- the play

    def play(self, running: Sequence[Future[Outcome]]) -> None:
        """Go on from scene to scene until every job has ended, or a trouble ends it all."""
        try:
            self._scenes(running)
        except ApiFault as fault:
            self.trouble = _trouble("api", fault.message, "see whether the API server and Kueue answer")
        while not all(future.done() for future in running):
            self._take()
            self._look_for_trouble()

    def _scenes(self, running: Sequence[Future[Outcome]]) -> None:
        borrowers = [name for label, name in self._names.items() if label.startswith("borrower")]
        waiting, urgent = self._names["waiting"], self._names["urgent"]
        for name in borrowers:
            self._create(name)
        jobs = self.recorder.jobs
        self._until(lambda: all(quota_record.holds_quota(jobs[name]) for name in borrowers), running)
        self._create(waiting)
        self._until(
            lambda: (
                quota_record.waits(jobs[waiting]) is not None
                and all(self._running.get(name) and self._has_slice(name) for name in borrowers)
            ),
            running,
        )
        if self.trouble or any(future.done() for future in running):
            return
        self._look(waiting)
        self._create(urgent)

    def _until(self, reached: Callable[[], bool], running: Sequence[Future[Outcome]]) -> None:
        while not reached():
            if self.trouble:
                return
            if any(future.done() for future in running):
                ended = [n for n, f in zip(self._names.values(), running) if f.done()]
                self.trouble = _trouble(
                    "ended-early",
                    f"{', '.join(ended)} ended before the urgent job was there",
                    "raise quota_hold_seconds, or see in its log why it failed",
                )
                return
            self._take()
            self._look_for_trouble()

    def _create(self, name: str) -> None:
        """Apply a TrainJob; just after an installation webhooks answer a moment late."""
        if self.trouble:
            return
        path = f"/apis/trainer.kubeflow.org/v1alpha1/namespaces/{self._namespace}/trainjobs/{name}"
        limit = time.monotonic() + _CREATE_RETRY
        while True:
            try:
                self._api.request(
                    "PATCH",
                    path,
                    self._manifests[name],
                    params={"fieldManager": "gpu-slices"},
                    content_type=APPLY_PATCH,
                )
            except ApiFault as fault:
                late = "failed calling webhook" in fault.message or "must be created before" in fault.message
                if not late or time.monotonic() > limit:
                    raise
                time.sleep(2)
            else:
                self._created[name] = time.monotonic()
                return

    def _look(self, name: str) -> None:
        """What is there of the job that waits, asked of the API and not of the watches."""
        space = f"/api/v1/namespaces/{self._namespace}"
        answers, faults = self._api.parallel(
            {
                "job": partial(
                    self._api.get,
                    f"/apis/trainer.kubeflow.org/v1alpha1/namespaces/{self._namespace}/trainjobs/{name}",
                ),
                "pods": partial(
                    self._api.get,
                    f"{space}/pods",
                    {"labelSelector": f"{workload_state.JOBSET_NAME}={name}"},
                ),
                "claims": partial(self._api.get, f"{RESOURCE}/namespaces/{self._namespace}/resourceclaims"),
            }
        )
        for fault in faults.values():
            raise fault
        claims = [
            claim
            for claim in answers["claims"].get("items") or []
            if any(pod.startswith(f"{name}-") for pod in workload_state.pods_of_claim(claim))
        ]
        suspend = bool(answers["job"]["spec"].get("suspend"))
        pods = len(answers["pods"].get("items") or [])
        self.recorder.look(name, stamp(), suspend=suspend, pods=pods, claims=len(claims))
        self.recorder.note(
            name, f"while it waits: suspend={str(suspend).lower()}, {pods} pods, {len(claims)} claims"
        )

    def last_words(self, outcomes: Sequence[Outcome]) -> None:
        """Kueue marks a Workload as finished a moment after its TrainJob is."""
        limit = time.monotonic() + _LAST_WORD
        done = [job for job, o in zip(self.recorder.jobs.values(), outcomes) if o.result == "succeeded"]
        while time.monotonic() < limit:
            self._take()
            if all("Finished" in quota_record.state(job) for job in done) and self._queue.empty():
                return

    # -- what comes in

    def _take(self) -> None:
        for message in arrived(self._queue, _TICK):
            self._handle(*message)

    def _handle(self, source: str, what: str, value: Any) -> None:
        if what == "FAULT":
            return
        if what != "SYNC":
            self._one(source, value, what == "DELETED")
            return
        for item in value:
            self._one(source, item, False)
        if source in ("pod", "claim"):
            self.recorder.missing(source, {str(item["metadata"].get("uid")) for item in value}, stamp())

    def _one(self, source: str, item: dict[str, Any], gone: bool) -> None:
        at = stamp()
        if source == "trainjob" and not gone:
            self.recorder.trainjob(item, at)
        elif source == "workload" and not gone:
            self.recorder.workload(item, at)
        elif source == "pod":
            self.recorder.pod(item, gone, at)
            name = str((item["metadata"].get("labels") or {}).get(workload_state.JOBSET_NAME, ""))
            self._running[name] = not gone and workload_state.readable(item)
        elif source == "claim":
            self.recorder.claim(item, gone, at, self._devices(item))
        elif source == "event" and not gone:
            self.recorder.event(item)

    def _devices(self, claim: dict[str, Any]) -> list[dict[str, Any]]:
        """What a claim was given, with what is published about it."""
        if not (claim.get("status") or {}).get("allocation"):
            return []
        found = workload_state.claimed_devices(claim, self._published)
        if any("uuid" not in device for device in found):
            items = self._api.get(f"{RESOURCE}/resourceslices").get("items") or []
            self._published = merge_slices(items)["devices"]
            found = workload_state.claimed_devices(claim, self._published)
        return found

    def _has_slice(self, name: str) -> bool:
        return any(c["devices"] and not c["gone"] for c in self.recorder.jobs[name]["claims"])

    # -- what keeps it from going on

    def _look_for_trouble(self) -> None:
        if self.trouble:
            return
        now = time.monotonic()
        for name, begun in self._created.items():
            job, age = self.recorder.jobs[name], now - begun
            if not job["workload"] and age > _MADE:
                self.trouble = _trouble(
                    "kueue-no-workload",
                    f"Kueue made no Workload for TrainJob {name} within {age:.0f} s",
                    "check that its LocalQueue exists, that integrations.frameworks of Kueue's configuration "
                    "holds trainer.kubeflow.org/trainjob, and that managedJobsNamespaceSelector admits "
                    f"namespace {self._namespace}",
                )
                return
            wait = quota_record.waits(job)
            if wait and wait["reason"] == "Inadmissible" and age > _INADMISSIBLE:
                self.trouble = explain(name, wait["message"])
                return
            borrower = self._labels[name].startswith("borrower")
            if borrower and age > _DECIDED and not quota_record.was_admitted(job):
                said = f": {wait['message']}" if wait else ", and gives no reason"
                self.trouble = _trouble(
                    "kueue-not-admitted",
                    f"Kueue has not admitted {name} within {age:.0f} s{said}",
                    "see kubectl describe of its Workload and of the ClusterQueues of its LocalQueue",
                )
                return


def explain(name: str, message: str) -> Trouble:
    """What to do about a Workload that Kueue will not consider."""
    fixes = (
        (
            "is not mapped",
            "kueue_deviceclass_unmapped",
            "add it to resources.deviceClassMappings of Kueue's configuration and restart Kueue, or "
            "set quota_kueue_configure: true",
        ),
        (
            "CEL selectors are not supported",
            "kueue_cel_selector",
            "name a DeviceClass that holds the selector, and leave selectors out of the claim template",
        ),
        (
            "feature gate",
            "kueue_gate_off",
            "switch on the gate that counts devices of claims (docs/quota.md)",
        ),
        ("does not support use of resource claims", "kueue_named_claim", "use a ResourceClaimTemplate"),
        (
            "doesn't exist",
            "kueue_queue_missing",
            "check the LocalQueue, its ClusterQueue and the ResourceFlavor",
        ),
        (
            "inactive",
            "kueue_queue_inactive",
            "see kubectl describe clusterqueue: its condition Active says why",
        ),
    )
    for part, identity, fix in fixes:
        if part in message:
            return _trouble(identity, f"Kueue will not consider {name}: {message}", fix)
    return _trouble(
        "kueue_inadmissible", f"Kueue will not consider {name}: {message}", "read the message: it is Kueue's"
    )


def stamp() -> str:
    """Our clock, as the API writes times."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _trouble(name: str, found: str, fix: str) -> Trouble:
    return {"id": name, "found": " ".join(found.split()), "fix": fix, "grace": 0}
