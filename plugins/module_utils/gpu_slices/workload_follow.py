"""Follow a workload to its end: log lines as they come, the claim's allocation while it lasts.

Controller only. Watches of the workload, its pods, claims and events, and the followed log, run in threads
and put what they see on one queue; the main loop alone holds state and decides. A watch that breaks lists
again. Workloads that are followed side by side share the watches they have in common (:class:`Hub`).
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Callable, Iterator, Mapping, Protocol

from . import workload_state as state
from .kube_api import ApiFault
from .resource_slices import merge_slices
from .workload_log import PROOF, last_line

TRAINER = "/apis/trainer.kubeflow.org/v1alpha1"
RESOURCE = "/apis/resource.k8s.io/v1"
# Kinds of workloads: where the API has them, and the label by which their pods name them.
KINDS = {
    "Pod": ("/api/v1", "pods", ""),
    "TrainJob": (TRAINER, "trainjobs", state.JOBSET_NAME),
    "Job": ("/apis/batch/v1", "jobs", "batch.kubernetes.io/job-name"),
    "VolcanoJob": ("/apis/batch.volcano.sh/v1alpha1", "jobs", "volcano.sh/job-name"),
}
_WATCH_SECONDS = 20
_TICK = 0.25
_STUCK_NOTICE = 15.0


class Api(Protocol):
    """What is used of kube_api.KubeApi."""

    def get(self, path: str, params: dict[str, str] | None = None) -> dict[str, Any]:
        """GET a JSON object."""

    def text(self, path: str, params: dict[str, str] | None = None) -> str:
        """GET a text."""

    def stream_lines(
        self, path: str, params: dict[str, str] | None = None, read_timeout: float | None = None
    ) -> Iterator[str]:
        """GET a text line by line as it comes."""


@dataclass(frozen=True)
class Target:
    """The workload: ``kind`` is one of KINDS, ``job`` the replicated job of a TrainJob whose pods count."""

    kind: str
    namespace: str
    name: str
    container: str
    profile: str = ""
    job: str = "node"

    @property
    def collection(self) -> str:
        """API path of the workload's kind in its namespace."""
        base, plural, _ = KINDS[self.kind]
        return f"{base}/namespaces/{self.namespace}/{plural}"

    @property
    def path(self) -> str:
        """API path of the workload."""
        return f"{self.collection}/{self.name}"

    @property
    def pods(self) -> str:
        """API path of the namespace's pods."""
        return f"/api/v1/namespaces/{self.namespace}/pods"

    @property
    def pod_selector(self) -> dict[str, str]:
        """Query that finds the workload's own pods and no others."""
        label = KINDS[self.kind][2]
        if not label:
            return {"fieldSelector": f"metadata.name={self.name}"}
        return {"labelSelector": f"{label}={self.name}"}

    def counts(self, pod: Mapping[str, Any]) -> bool:
        """Whether a pod of the workload is one whose log and devices count, and no initializer."""
        labels = (pod.get("metadata") or {}).get("labels") or {}
        return self.kind != "TrainJob" or labels.get(state.REPLICATED_JOB, self.job) == self.job


@dataclass
class Outcome:
    """How it ended.

    ``result``: succeeded, failed, stuck (a trouble outlasted its grace), timeout or gone. ``trouble`` says
    why for all but the first. ``pods``: {name, node, uid, log (None if unreadable), end, devices [with all
    that is published about them], times {created, scheduled, started, finished}, waited (what the scheduler
    said while it was pending)}, by completion index. ``helpers``: {name, log} of failed initializers.
    """

    result: str
    seconds: float
    item: dict[str, Any]
    pods: list[dict[str, Any]] = field(default_factory=list)
    helpers: list[dict[str, Any]] = field(default_factory=list)
    trouble: dict[str, Any] | None = None
    published: list[dict[str, Any]] = field(default_factory=list)
    claims: list[dict[str, Any]] = field(default_factory=list)
    events: list[str] = field(default_factory=list)


class Hub:
    """The watches of several followers: each list is watched once and told to all that asked for it.

    Make the followers first, then start(), then run them; stop() when all are done.
    """

    def __init__(self, api: Api) -> None:
        self._api = api
        self._asked: dict[str, tuple[str, dict[str, str], list[tuple[str, queue.Queue[Any]]]]] = {}
        self._stop = threading.Event()

    def ask(self, name: str, path: str, params: dict[str, str], out: queue.Queue[Any]) -> None:
        """Put what happens to the objects at this path on ``out``, under this name."""
        key = json.dumps([path, params], sort_keys=True)
        self._asked.setdefault(key, (path, params, []))[2].append((name, out))

    def start(self) -> None:
        """Begin to watch."""
        for path, params, takers in self._asked.values():
            threading.Thread(
                target=_watch,
                args=(self._api, path, params),
                kwargs={"out": takers, "stop": self._stop},
                daemon=True,
            ).start()

    def stop(self) -> None:
        """Let the watches end."""
        self._stop.set()


class Follower:
    """Follows one workload; make one, call run() once.

    ``say`` gets each line for the console: ("log", text) or ("note", text). A ``hub`` is shared with others
    and started by its owner. While ``others`` says that others are at work, waiting for a slice is no reason
    to give up: it may become free when they end. ``at_work`` is what this one is to the others.
    """

    def __init__(
        self,
        api: Api,
        target: Target,
        say: Callable[[str, str], None],
        *,
        timeout: float,
        schedule_timeout: float,
        hub: Hub | None = None,
        others: Callable[[], bool] = lambda: False,
    ) -> None:
        self._api, self._target, self._say = api, target, say
        self._others, self._alone_since = others, 0.0
        self.at_work = True
        self._timeout, self._schedule_timeout = timeout, schedule_timeout
        self._queue: queue.Queue[tuple[str, str, Any]] = queue.Queue()
        self._stop = threading.Event()
        self._item: dict[str, Any] = {}
        self._seen = False
        self._pods: dict[str, dict[str, Any]] = {}
        self._helpers: dict[str, dict[str, Any]] = {}
        self._waited: dict[str, str] = {}
        self._claims: dict[str, dict[str, Any]] = {}
        self._published: list[dict[str, Any]] = []
        self._events: dict[str, dict[str, Any]] = {}
        self._troubles: dict[str, tuple[float, dict[str, Any]]] = {}
        self._said: set[str] = set()
        self._log: _LogThread | None = None
        self._printed = 0
        self._own_hub = Hub(api) if hub is None else None
        self._ask(hub or self._own_hub)

    def run(self) -> Outcome:
        """Follow to the end, the time limit, or a trouble that does not pass."""
        started = time.monotonic()
        if self._own_hub:
            self._own_hub.start()
        try:
            while True:
                self._take()
                verdict = self._verdict(time.monotonic() - started)
                if verdict:
                    return self._close(verdict[0], verdict[1], started)
        finally:
            self.at_work = False
            self._stop.set()
            if self._own_hub:
                self._own_hub.stop()

    # -- what comes in

    def _ask(self, hub: Any) -> None:
        target = self._target
        watches: dict[str, tuple[str, dict[str, str]]] = {
            "item": (target.collection, {"fieldSelector": f"metadata.name={target.name}"}),
            "claim": (f"{RESOURCE}/namespaces/{target.namespace}/resourceclaims", {}),
            "event": (f"/api/v1/namespaces/{target.namespace}/events", {}),
        }
        if target.kind != "Pod":
            watches["pod"] = (target.pods, target.pod_selector)
        for name, (path, params) in watches.items():
            hub.ask(name, path, params, self._queue)

    def _take(self) -> None:
        for message in arrived(self._queue, _TICK):
            self._handle(*message)

    def _handle(self, source: str, what: str, value: Any) -> None:
        if source == "log":
            self._print(value)
        elif what == "FAULT":
            self._note(f"the API does not answer well, trying again: {value}")
        elif what == "SYNC":
            self._synchronise(source, value)
        else:
            self._update(source, what, value)

    def _synchronise(self, source: str, items: list[dict[str, Any]]) -> None:
        if source == "item" and not items and self._seen:
            self._update(source, "DELETED", self._item)
        if source == "pod" or (source == "item" and self._target.kind == "Pod"):
            self._pods.clear()
            self._helpers.clear()
        for item in items:
            self._update(source, "ADDED", item)

    def _update(self, source: str, what: str, value: dict[str, Any]) -> None:
        metadata = value.get("metadata") or {}
        name, gone = str(metadata.get("name")), what == "DELETED"
        if source == "item":
            value = {**value, "kind": self._target.kind}
            # The first end seen counts: a Failed TrainJob can come back to life when its JobSet is removed.
            if not state.finished(self._item) or metadata.get("uid") != self._uid():
                self._item = value
            self._seen = True
            if gone:
                self._item = {**self._item, "gone": True}
            if self._target.kind == "Pod":
                source = "pod"
        if source == "pod":
            self._take_pod(name, value, gone)
        elif source == "claim" and not gone:
            self._record(value)
        elif source == "event" and not gone:
            self._events[name] = value

    def _take_pod(self, name: str, pod: dict[str, Any], gone: bool) -> None:
        known = self._pods if self._target.counts(pod) else self._helpers
        if gone:
            known.pop(name, None)
        else:
            known[name] = pod
            trouble = state.pod_trouble(pod)
            if trouble and trouble["id"] == "unschedulable":
                self._waited[str(pod["metadata"].get("uid"))] = trouble["found"]
        if known is self._pods:
            self._pick()
        else:
            self._note(_describe(pod))

    def _uid(self) -> str:
        return str((self._item.get("metadata") or {}).get("uid", ""))

    def _pick(self) -> None:
        """Follow the newest attempt of the first pod, once it has a log."""
        pods = state.newest_pods(self._pods.values())
        if not pods:
            return
        pod = pods[0]
        metadata = pod["metadata"]
        self._note(_describe(pod))
        if self._log is not None and self._log.uid != metadata["uid"]:
            self._note(f"pod {self._log.name} was replaced by {metadata['name']}")
            self._log.leave.set()
            self._log = None
        if self._log is None and state.readable(pod, self._target.container):
            self._printed = 0
            self._log = _LogThread(self._api, self._target, pod, out=self._queue, stop=self._stop)
            self._log.start()
        if self._log is not None:
            self._log.ended = bool(state.finished({**pod, "kind": "Pod"}))

    def _record(self, claim: dict[str, Any]) -> None:
        """Keep a claim's allocation: the claim goes when its pod ends."""
        if not (claim.get("status") or {}).get("allocation"):
            return
        uid, name = claim["metadata"]["uid"], self._target.name
        users = [pod for pod in state.pods_of_claim(claim) if pod == name or pod.startswith(name + "-")]
        if not users or uid in self._claims:
            return
        pod = users[0]
        devices = state.claimed_devices(claim, self._published)
        if not self._published or any("uuid" not in d for d in devices):
            try:
                items = self._api.get(f"{RESOURCE}/resourceslices").get("items") or []
                self._published = merge_slices(items)["devices"]
            except ApiFault as fault:
                self._note(f"the ResourceSlices cannot be read: {fault.message}")
            devices = state.claimed_devices(claim, self._published)
        self._claims[uid] = {"claim": claim, "devices": devices}
        for device in devices:
            self._note(
                f"pod {pod} holds {device['device']} ({device.get('profile') or device.get('type')}, "
                f"{device.get('uuid')}) on {device.get('node') or device['pool']}, claim {device['claim']}"
            )

    def _print(self, line: str) -> None:
        self._printed += 1
        if not line.startswith(PROOF):
            self._say("log", line)

    def _note(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._say("note", text)

    # -- what it means

    def _verdict(self, seconds: float) -> tuple[str, dict[str, Any] | None] | None:
        end = state.finished(self._item)
        if end == "succeeded":
            return "succeeded", None
        if end == "failed":
            return "failed", _trouble("workload-failed", state.end_text(self._item, self._target.container))
        if self._item.get("gone"):
            return "gone", _trouble(
                "workload-gone", f"{self._target.kind} {self._target.name} was deleted meanwhile"
            )
        stuck = self._stuck()
        if stuck:
            return "stuck", stuck
        if seconds > self._timeout:
            return "timeout", self._late(seconds)
        return None

    def _stuck(self) -> dict[str, Any] | None:
        """The first trouble that has lasted longer than it may."""
        current: dict[str, dict[str, Any]] = {}
        pods = state.newest_pods(self._pods.values())
        starting = [pod for pod in pods if not state.readable(pod, self._target.container)]
        for pod in [*starting, *(pod for pod in self._helpers.values() if not state.readable(pod))]:
            trouble = state.pod_trouble(pod)
            if trouble:
                current[trouble["id"]] = trouble
        if starting or not pods:
            for event in self._own_events():
                trouble = state.event_trouble(event)
                if trouble and trouble["id"] == "template-missing" and _claims_made(starting):
                    continue
                if trouble and trouble["id"] not in current:
                    current[trouble["id"]] = trouble
        now = time.monotonic()
        self._troubles = {k: v for k, v in self._troubles.items() if k in current}
        self.at_work = "unschedulable" not in current
        if self._others():
            self._alone_since = now
        for name, trouble in current.items():
            since = self._troubles.setdefault(name, (now, trouble))[0]
            self._note(trouble["found"])
            if name != "unschedulable":
                grace, reported = trouble["grace"], trouble
            else:
                grace, reported = self._schedule_timeout, trouble
                if now - since > min(_STUCK_NOTICE, grace / 2):
                    reported = self._explained(trouble)
                    self._note(reported["found"])
                since = max(since, self._alone_since)
                if now - since > grace:
                    return self._explained(trouble, again=True)
            if now - since > grace:
                return reported
        return None

    def _explained(self, trouble: dict[str, Any], again: bool = False) -> dict[str, Any]:
        """Why it waits, asked once for each thing that the scheduler says."""
        known = self._troubles[trouble["id"]]
        if known[1].get("explained") == trouble["found"] and not again:
            return known[1]
        try:
            devices = merge_slices(self._api.get(f"{RESOURCE}/resourceslices").get("items") or [])["devices"]
            claims = self._api.get(f"{RESOURCE}/resourceclaims").get("items") or []
        except ApiFault as fault:
            why, fix = f"the holders cannot be read: {fault.message}", trouble["fix"]
        else:
            why, fix = state.explain_unschedulable(trouble["found"], self._target.profile, devices, claims)
        found = f"{why} (scheduler: {trouble['found']})"
        explained = {**trouble, "found": found, "fix": fix, "explained": trouble["found"]}
        self._troubles[trouble["id"]] = (known[0], explained)
        return explained

    def _own_events(self) -> list[dict[str, Any]]:
        """Events about this workload and younger than it: names are reused when a failed run is repeated."""
        born = str((self._item.get("metadata") or {}).get("creationTimestamp") or "")
        names = [self._target.name]
        return [
            event
            for event in self._events.values()
            if state.about(event, names) and _event_time(event) >= born
        ]

    def _late(self, seconds: float) -> dict[str, Any]:
        if not self._seen:
            found = f"{self._target.kind} {self._target.name} was not seen within {seconds:.0f} s"
            return _trouble("timeout", found, "check that it was created and that the API server answers")
        trouble = next((t for _, t in self._troubles.values()), None)
        if trouble:
            return {**trouble, "found": f"not done after {seconds:.0f} s; {trouble['found']}"}
        pods = state.newest_pods(self._pods.values())
        what = "; ".join(_describe(pod) for pod in pods) or "it has no pod yet"
        fix = "raise the stage's timeout, or read the log in the evidence for what it waits for"
        return _trouble("timeout", f"not done after {seconds:.0f} s: {what}", fix)

    # -- the end

    def _close(self, result: str, trouble: dict[str, Any] | None, started: float) -> Outcome:
        self._final_pods()
        if self._log is not None:
            self._log.ended = True
            self._log.join(5)
            for message in arrived(self._queue, 0):
                self._handle(*message)
        pods = state.newest_pods(self._pods.values())
        found = []
        for pod in pods:
            name = pod["metadata"]["name"]
            log = read_log(self._api, self._target, name)
            if log is not None and self._log is not None and name == self._log.name:
                for line in log.splitlines()[self._printed :]:
                    self._print(line)
            elif log is not None and pod is pods[0]:
                for line in log.splitlines():
                    self._print(line)
            found.append(
                {
                    "name": name,
                    "node": (pod.get("spec") or {}).get("nodeName", ""),
                    "uid": pod["metadata"]["uid"],
                    "log": log,
                    "end": state.end_text(pod, self._target.container),
                    "devices": [
                        d
                        for c in self._claims.values()
                        if state.made_for(c["claim"], pod)
                        for d in c["devices"]
                    ],
                    "times": state.times(pod, self._target.container),
                    "waited": self._waited.get(str(pod["metadata"]["uid"]), ""),
                }
            )
        helpers = [
            {"name": name, "log": read_log(self._api, self._target, name, "")}
            for name, pod in sorted(self._helpers.items())
            if state.phase(pod) == "Failed"
        ]
        if trouble and helpers:
            said = [f"pod {h['name']} failed: {last_line(h['log'] or '') or 'no log'}" for h in helpers]
            trouble = {**trouble, "found": "; ".join([str(trouble["found"]), *said])}
        warnings = [event for event in self._own_events() if event.get("type") == "Warning"]
        if trouble and result in {"failed", "gone"} and warnings and not any(pod["log"] for pod in found):
            last = max(warnings, key=_event_time)
            trouble = {**trouble, "found": f"{trouble['found']}; last event: {last.get('message')}"}
        return Outcome(
            result=result,
            seconds=round(time.monotonic() - started, 2),
            item=self._item,
            pods=found,
            helpers=helpers,
            trouble=trouble,
            published=self._published,
            claims=[c["claim"] for c in self._claims.values()],
            events=[_event_line(event) for event in self._own_events()],
        )

    def _final_pods(self) -> None:
        """The watch of the pods may lag behind that of the workload: read them once more."""
        try:
            items = self._api.get(self._target.pods, self._target.pod_selector).get("items") or []
        except ApiFault as fault:
            self._note(f"the pods cannot be read: {fault.message}")
            return
        for pod in items:
            known = self._pods if self._target.counts(pod) else self._helpers
            known[pod["metadata"]["name"]] = pod


def arrived(messages: queue.Queue[Any], wait: float) -> Iterator[Any]:
    """What has come by now; waits so many seconds for the first.

    No more than that: in a busy namespace more may come for ever, and the time limit is to be looked at.
    """
    with contextlib.suppress(queue.Empty):
        yield messages.get(timeout=wait)
    for _ in range(messages.qsize()):
        yield messages.get_nowait()


def read_log(api: Api, target: Target, pod: str, container: str | None = None) -> str | None:
    """The whole log of the pod's container, or None when it cannot be read. "" means its only container."""
    name = target.container if container is None else container
    try:
        return api.text(f"{target.pods}/{pod}/log", {"container": name} if name else {})
    except ApiFault:
        return None


class _LogThread(threading.Thread):
    """Follows one pod's log. A broken stream is taken up where it broke, without a line twice."""

    def __init__(
        self,
        api: Api,
        target: Target,
        pod: Mapping[str, Any],
        *,
        out: queue.Queue[Any],
        stop: threading.Event,
    ) -> None:
        super().__init__(daemon=True)
        self.name, self.uid = str(pod["metadata"]["name"]), str(pod["metadata"]["uid"])
        self.leave = threading.Event()
        self.ended = False
        self._api, self._target, self._out, self._stopped = api, target, out, stop

    def run(self) -> None:
        last: tuple[str, str] = ("", "")
        path = f"{self._target.pods}/{self.name}/log"
        while not (self._stopped.is_set() or self.leave.is_set()):
            ending = self.ended
            params = {"container": self._target.container, "follow": "true", "timestamps": "true"}
            if last[0]:
                params["sinceTime"] = last[0] + "Z"
            try:
                for line in self._api.stream_lines(path, params, read_timeout=10):
                    stamp, _, text = line.partition(" ")
                    if _stamp(stamp) <= last:
                        continue
                    last = _stamp(stamp)
                    if self.leave.is_set():
                        return
                    self._out.put(("log", "LINE", text))
            except ApiFault as fault:
                if fault.kind == "not_found":
                    return
            if ending:
                return
            self._stopped.wait(_TICK)


def _watch(
    api: Api,
    path: str,
    params: dict[str, str],
    *,
    out: list[tuple[str, queue.Queue[Any]]],
    stop: threading.Event,
) -> None:
    """List, then watch from there; list again when the watch cannot go on (410, broken stream, error)."""

    def tell(what: str, value: Any) -> None:
        for name, taker in out:
            taker.put((name, what, value))

    pause = 0.5
    while not stop.is_set():
        try:
            listing = api.get(path, params)
            tell("SYNC", listing.get("items") or [])
            version = str((listing.get("metadata") or {}).get("resourceVersion", ""))
            while not stop.is_set():
                query = {
                    **params,
                    "watch": "true",
                    "resourceVersion": version,
                    "allowWatchBookmarks": "true",
                    "timeoutSeconds": str(_WATCH_SECONDS),
                }
                for line in api.stream_lines(path, query, read_timeout=_WATCH_SECONDS + 10):
                    event = json.loads(line)
                    value = event.get("object") or {}
                    if event.get("type") == "ERROR":
                        raise _Expired
                    version = str((value.get("metadata") or {}).get("resourceVersion") or version)
                    if event.get("type") != "BOOKMARK":
                        tell(str(event.get("type")), value)
                    pause = 0.5
                    if stop.is_set():
                        return
        except _Expired:
            pass
        except (ApiFault, ValueError) as fault:
            if isinstance(fault, ApiFault) and fault.status == 410:
                continue
            text = fault.message if isinstance(fault, ApiFault) else f"{path}: {fault}"
            tell("FAULT", text)
            if isinstance(fault, ApiFault) and fault.kind in {"forbidden", "not_found", "unauthorized"}:
                return
        stop.wait(pause)
        pause = min(pause * 2, 5)


class _Expired(Exception):
    """The watch's resourceVersion is too old."""


def _stamp(stamp: str) -> tuple[str, str]:
    """A log line's time as (seconds, fraction of full width), for the API drops trailing zeros."""
    seconds, _, fraction = stamp.rstrip("Z").partition(".")
    return seconds, fraction.ljust(9, "0")


def _describe(pod: Mapping[str, Any]) -> str:
    node = (pod.get("spec") or {}).get("nodeName")
    return f"pod {pod['metadata']['name']} is {state.phase(dict(pod))}" + (f" on {node}" if node else "")


def _claims_made(pods: list[dict[str, Any]]) -> bool:
    """Have all these pods their claims by now? Then events about missing ones are of the past."""
    return all((pod.get("status") or {}).get("resourceClaimStatuses") for pod in pods)


def _event_time(event: Mapping[str, Any]) -> str:
    series = event.get("series") or {}
    stamps = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
    return next((str(stamp)[:19] + "Z" for stamp in stamps if stamp), "")


def _event_line(event: Mapping[str, Any]) -> str:
    target = event.get("involvedObject") or {}
    return (
        f"{_event_time(event)} {event.get('type')} {target.get('kind')}/{target.get('name')} "
        f"{event.get('reason')}: {event.get('message')}"
    )


def _trouble(
    name: str, found: str, fix: str = "read the log and the events in the evidence"
) -> dict[str, Any]:
    return {"id": name, "found": found, "fix": fix, "grace": 0}
