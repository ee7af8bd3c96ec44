"""Following a workload against an API that plays a script: what is seen, said and concluded."""

from __future__ import annotations

import json
import threading
import time
from typing import Any, Iterator

import pytest
from gpu_slices import workload_follow, workload_state
from gpu_slices.kube_api import ApiFault

NS = "gpu-slices"
T0 = "2026-12-01T07:00:00Z"
POD_PATH = f"/api/v1/namespaces/{NS}/pods"
JOB_PATH = f"/apis/trainer.kubeflow.org/v1alpha1/namespaces/{NS}/trainjobs"
CLAIM_PATH = f"/apis/resource.k8s.io/v1/namespaces/{NS}/resourceclaims"
EVENT_PATH = f"/api/v1/namespaces/{NS}/events"


def pod(name: str = "smoke", phase: str = "Pending", uid: str = "u1", **status: Any) -> dict[str, Any]:
    return {
        "kind": "Pod",
        "metadata": {"name": name, "uid": uid, "creationTimestamp": T0, "labels": {}},
        "spec": {"nodeName": "a30"} if phase != "Pending" else {},
        "status": {"phase": phase, **status},
    }


def state(**kind: Any) -> dict[str, Any]:
    return {"containerStatuses": [{"name": "smoke", "image": "i:1", "state": kind}]}


RUNNING = pod(phase="Running", **state(running={"startedAt": T0}))
DONE = pod(phase="Succeeded", **state(terminated={"exitCode": 0, "reason": "Completed"}))
CLAIM = {
    "metadata": {
        "name": "smoke-gpu-slice-x",
        "namespace": NS,
        "uid": "c1",
        "ownerReferences": [{"kind": "Pod", "name": "smoke"}],
    },
    "status": {
        "allocation": {
            "devices": {
                "results": [
                    {
                        "driver": "gpu.nvidia.com",
                        "pool": "a30",
                        "device": "gpu-0-mig-1g6gb-14-0",
                        "request": "r",
                    }
                ]
            }
        },
        "reservedFor": [{"resource": "pods", "name": "smoke"}],
    },
}
SLICE = {
    "spec": {
        "driver": "gpu.nvidia.com",
        "nodeName": "a30",
        "pool": {"name": "a30", "generation": 1, "resourceSliceCount": 1},
        "devices": [
            {
                "name": f"gpu-0-mig-1g6gb-14-{i}",
                "attributes": {
                    "type": {"string": "mig"},
                    "profile": {"string": "1g.6gb"},
                    "uuid": {"string": f"MIG-{i}"},
                },
                "capacity": {"memory": {"value": "5952Mi"}, f"memorySlice{i}": {"value": "1"}},
            }
            for i in range(2)
        ],
    }
}


class Script:
    """An API server that knows lists and plays events; objects and logs can be changed while it runs."""

    def __init__(self) -> None:
        self.lists: dict[str, list[dict[str, Any]]] = {"/apis/resource.k8s.io/v1/resourceslices": [SLICE]}
        self.events: dict[str, list[dict[str, Any]]] = {}
        self.logs: dict[str, str] = {}
        self.faults: dict[str, list[ApiFault]] = {}
        self.lock = threading.Lock()
        self.listed: list[str] = []

    def get(self, path: str, params: dict[str, str] | None = None) -> dict[str, Any]:
        self._fault(path)
        self.listed.append(path)
        with self.lock:
            return {"items": list(self.lists.get(path, [])), "metadata": {"resourceVersion": "1"}}

    def text(self, path: str, params: dict[str, str] | None = None) -> str:
        self._fault(path)
        name = path.split("/")[-2]
        if name not in self.logs:
            raise ApiFault("not_found", "no log", 404)
        return self.logs[name]

    def stream_lines(
        self, path: str, params: dict[str, str] | None = None, read_timeout: float | None = None
    ) -> Iterator[str]:
        self._fault(path + "?stream")
        if path.endswith("/log"):
            since = (params or {}).get("sinceTime", "")
            for number, line in enumerate(self.logs.get(path.split("/")[-2], "").splitlines()):
                stamp = f"2026-12-01T07:00:{number:02}.5Z"
                if stamp[:19] + "Z" >= since:
                    yield f"{stamp} {line}"
            return
        for _ in range(40):
            with self.lock:
                queued = self.events.pop(path, [])
            for event in queued:
                time.sleep(0.02)
                yield json.dumps(event)
            time.sleep(0.02)

    def play(self, path: str, kind: str, *objects: dict[str, Any]) -> None:
        with self.lock:
            self.events.setdefault(path, []).extend({"type": kind, "object": item} for item in objects)

    def _fault(self, path: str) -> None:
        with self.lock:
            queued = self.faults.get(path)
            if queued:
                raise queued.pop(0)


def follow(
    api: Script,
    kind: str = "Pod",
    timeout: float = 5.0,
    schedule_timeout: float = 1.0,
    container: str = "smoke",
) -> tuple[workload_follow.Outcome, list[tuple[str, str]]]:
    said: list[tuple[str, str]] = []
    target = workload_follow.Target(kind, NS, "smoke", container, "1g.6gb")
    follower = workload_follow.Follower(
        api,
        target,
        lambda kind, text: said.append((kind, text)),
        timeout=timeout,
        schedule_timeout=schedule_timeout,
    )
    return follower.run(), said


def test_a_pod_that_runs_and_ends() -> None:
    api = Script()
    api.lists[POD_PATH] = [pod()]
    api.logs["smoke"] = "one\n[proof] {}\nmatmul_on_slice: OK"
    api.play(CLAIM_PATH, "MODIFIED", CLAIM)
    api.play(CLAIM_PATH, "DELETED", CLAIM)
    api.play(POD_PATH, "MODIFIED", pod(), pod(), pod(), RUNNING, DONE)

    def finish() -> None:
        time.sleep(0.05)
        api.lists[POD_PATH] = [DONE]

    threading.Thread(target=finish).start()
    outcome, said = follow(api)
    assert outcome.result == "succeeded"
    assert [(p["name"], p["node"], p["log"]) for p in outcome.pods] == [("smoke", "a30", api.logs["smoke"])]
    given = outcome.pods[0]["devices"]
    assert [(d["uuid"], d["memory_bytes"], d["claim"]) for d in given] == [
        ("MIG-0", 5952 * 2**20, "smoke-gpu-slice-x")
    ]
    assert [text for kind, text in said if kind == "log"] == ["one", "matmul_on_slice: OK"]


def test_the_claim_of_an_earlier_pod_of_that_name_is_not_this_pods() -> None:
    def claim(uid: str, owner: str, device: str) -> dict[str, Any]:
        made = json.loads(json.dumps(CLAIM))
        made["metadata"].update(name=f"claim-{uid}", uid=uid)
        made["metadata"]["ownerReferences"][0]["uid"] = owner
        made["status"]["allocation"]["devices"]["results"][0]["device"] = device
        return dict(made)

    api = Script()
    api.lists[POD_PATH] = [DONE]
    api.lists[CLAIM_PATH] = [
        claim("c0", "u0", "gpu-0-mig-1g6gb-14-1"),
        claim("c1", "u1", "gpu-0-mig-1g6gb-14-0"),
    ]
    follower = workload_follow.Follower(
        api,
        workload_follow.Target("Pod", NS, "smoke", "smoke"),
        lambda *_: None,
        timeout=5,
        schedule_timeout=1,
    )
    for item in api.lists[CLAIM_PATH]:
        follower._record(item)
    outcome = follower.run()
    assert [d["claim"] for d in outcome.pods[0]["devices"]] == ["claim-c1"]


def test_a_pod_that_fails_says_with_what() -> None:
    api = Script()
    api.lists[POD_PATH] = [pod(phase="Failed", **state(terminated={"exitCode": 137, "reason": "OOMKilled"}))]
    event = {
        "metadata": {"name": "e"},
        "type": "Warning",
        "reason": "Whatever",
        "message": "the node was shut down",
        "lastTimestamp": T0,
        "involvedObject": {"kind": "Pod", "name": "smoke"},
    }
    api.lists[EVENT_PATH] = [event]
    api.play(POD_PATH, "MODIFIED", api.lists[POD_PATH][0])
    outcome, _ = follow(api)
    assert outcome.result == "failed"
    assert outcome.trouble is not None
    assert outcome.trouble["found"].startswith("Failed: exit code 137 (OOMKilled) by the memory limit")
    assert outcome.pods[0]["log"] is None


@pytest.mark.parametrize(
    ("waiting", "trouble"),
    [
        ({"reason": "ErrImageNeverPull", "message": "not present"}, "image"),
        ({"reason": "InvalidImageName", "message": "bad"}, "image"),
    ],
)
def test_an_image_that_cannot_come_ends_it_at_once(waiting: dict[str, Any], trouble: str) -> None:
    api = Script()
    api.lists[POD_PATH] = [pod(**state(waiting=waiting))]
    started = time.monotonic()
    outcome, _ = follow(api, timeout=30)
    assert (outcome.result, outcome.trouble and outcome.trouble["id"]) == ("stuck", trouble)
    assert time.monotonic() - started < 5


def blocked(message: str = "0/3 nodes are available: 3 cannot allocate all claims.") -> dict[str, Any]:
    entry = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return {"conditions": [entry]}


def test_events_without_end_do_not_hide_the_time_limit() -> None:
    class Busy(Script):
        """A namespace in which something happens all the time."""

        over = False

        def stream_lines(
            self, path: str, params: dict[str, str] | None = None, read_timeout: float | None = None
        ) -> Iterator[str]:
            while not self.over:
                yield json.dumps({"type": "ADDED", "object": {"metadata": {"name": "another"}}})

    api = Busy()
    api.lists[POD_PATH] = [pod()]
    try:
        outcome, _ = follow(api, timeout=0.5, schedule_timeout=30)
    finally:
        api.over = True
    assert outcome.result == "timeout"
    assert outcome.seconds < 5


def test_no_free_slice_names_the_holders() -> None:
    api = Script()
    api.lists[POD_PATH] = [pod(**blocked())]
    others = []
    for i in range(2):
        other = json.loads(json.dumps(CLAIM))
        other["metadata"] |= {"name": f"other-{i}", "namespace": "team", "uid": f"o{i}"}
        other["status"]["allocation"]["devices"]["results"][0]["device"] = f"gpu-0-mig-1g6gb-14-{i}"
        other["status"]["reservedFor"] = [{"resource": "pods", "name": f"notebook-{i}"}]
        others.append(other)
    api.lists["/apis/resource.k8s.io/v1/resourceclaims"] = others
    outcome, said = follow(api, schedule_timeout=1)
    assert outcome.result == "stuck"
    assert outcome.trouble is not None
    needed = "all 2 published devices of profile 1g.6gb are held by team/notebook-0; team/notebook-1"
    assert needed in outcome.trouble["found"]
    assert any(needed in text for _, text in said)


def test_one_waits_as_long_as_others_are_at_work_and_then_no_longer_than_it_may() -> None:
    api = Script()
    api.lists[POD_PATH] = [pod(**blocked())]
    target = workload_follow.Target("Pod", NS, "smoke", "smoke", "1g.6gb")
    began = time.monotonic()
    follower = workload_follow.Follower(
        api,
        target,
        lambda *_: None,
        timeout=20,
        schedule_timeout=0.4,
        others=lambda: time.monotonic() - began < 1.5,
    )
    assert follower.at_work
    outcome = follower.run()
    assert (outcome.result, outcome.trouble and outcome.trouble["id"]) == ("stuck", "unschedulable")
    assert 1.5 < outcome.seconds < 10
    assert not follower.at_work


def test_the_last_words_on_a_pod_that_waits_are_about_what_is_now() -> None:
    """Cordoned while others still ran: what was held then is free now."""
    api = Script()
    api.lists[POD_PATH] = [pod(**blocked())]
    held = json.loads(json.dumps(CLAIM))
    held["metadata"] |= {"name": "other", "namespace": "team", "uid": "o"}
    held["status"]["reservedFor"] = [{"resource": "pods", "name": "notebook"}]
    api.lists["/apis/resource.k8s.io/v1/resourceclaims"] = [held]
    cordoned = "0/3 nodes are available: 1 node(s) were unschedulable, 2 cannot allocate all claims."

    def say(_: str, text: str) -> None:
        if "1 of 2 devices" in text:
            api.lists["/apis/resource.k8s.io/v1/resourceclaims"] = []
            api.play(POD_PATH, "MODIFIED", pod(**blocked(cordoned)))

    target = workload_follow.Target("Pod", NS, "smoke", "smoke", "1g.6gb")
    outcome = workload_follow.Follower(api, target, say, timeout=20, schedule_timeout=2).run()
    assert outcome.trouble is not None
    assert "2 of 2 devices of profile 1g.6gb are free" in outcome.trouble["found"]
    assert "cordon" in outcome.trouble["fix"]


def test_a_trouble_that_passes_is_no_failure() -> None:
    api = Script()
    waiting = pod(**state(waiting={"reason": "ImagePullBackOff", "message": "slow registry"}))
    api.lists[POD_PATH] = [waiting]
    api.logs["smoke"] = "OK"
    api.play(POD_PATH, "MODIFIED", waiting, RUNNING, DONE)
    outcome, said = follow(api)
    assert outcome.result == "succeeded"
    assert any("ImagePullBackOff" in text for _, text in said)


def test_a_device_that_cannot_be_prepared_is_named_in_the_time_out() -> None:
    api = Script()
    api.lists[POD_PATH] = [pod()]
    api.lists[EVENT_PATH] = [
        {
            "metadata": {"name": "e1"},
            "reason": "FailedPrepareDynamicResources",
            "message": "rpc error: DRA driver gpu.nvidia.com is not registered",
            "lastTimestamp": T0,
            "involvedObject": {"kind": "Pod", "name": "smoke"},
        },
        {
            "metadata": {"name": "e0"},
            "reason": "FailedPrepareDynamicResources",
            "message": "of an earlier pod of that name",
            "lastTimestamp": "2026-11-30T07:00:00Z",
            "involvedObject": {"kind": "Pod", "name": "smoke"},
        },
    ]
    outcome, said = follow(api, timeout=1)
    assert outcome.result == "timeout"
    assert outcome.trouble is not None
    assert "is not registered" in outcome.trouble["found"]
    assert "plugin pod" in outcome.trouble["fix"]
    assert not any("earlier pod" in text for _, text in said)


def test_a_workload_that_is_deleted_or_never_there() -> None:
    api = Script()
    api.lists[POD_PATH] = [pod()]
    api.play(POD_PATH, "DELETED", pod())
    assert follow(api)[0].result == "gone"
    outcome, _ = follow(Script(), timeout=0.5)
    assert outcome.result == "timeout"
    assert outcome.trouble is not None
    assert "was not seen" in outcome.trouble["found"]


def test_a_watch_that_expires_or_breaks_lists_again() -> None:
    api = Script()
    api.lists[POD_PATH] = [pod()]
    api.logs["smoke"] = "OK"
    api.faults[POD_PATH + "?stream"] = [
        ApiFault("server", "too old resource version", 410),
        ApiFault("unreachable", "connection reset"),
    ]
    api.play(POD_PATH, "ERROR", {"code": 410})

    def finish() -> None:
        time.sleep(0.4)
        api.lists[POD_PATH] = [DONE]

    threading.Thread(target=finish).start()
    outcome, said = follow(api, timeout=10)
    assert outcome.result == "succeeded"
    assert api.listed.count(POD_PATH) >= 3
    assert any("connection reset" in text for _, text in said)


def test_the_log_is_taken_up_where_it_broke() -> None:
    api = Script()
    api.lists[POD_PATH] = [RUNNING]
    api.logs["smoke"] = "one\ntwo"

    def go_on() -> None:
        time.sleep(0.8)
        api.logs["smoke"] = "one\ntwo\nthree"
        time.sleep(0.6)
        api.lists[POD_PATH] = [DONE]
        api.play(POD_PATH, "MODIFIED", DONE)

    threading.Thread(target=go_on).start()
    outcome, said = follow(api)
    assert outcome.result == "succeeded"
    assert [text for kind, text in said if kind == "log"] == ["one", "two", "three"]


def job(*conditions: dict[str, Any]) -> dict[str, Any]:
    return {
        "metadata": {"name": "smoke", "uid": "j1", "creationTimestamp": T0},
        "status": {"conditions": list(conditions)} if conditions else {},
    }


def job_pod(name: str, phase: str, created: str, uid: str) -> dict[str, Any]:
    made = pod(
        name, phase, uid, containerStatuses=[{"name": "node", "state": {"running": {"startedAt": T0}}}]
    )
    made["metadata"]["creationTimestamp"] = created
    return made


def test_a_trainjob_whose_pod_was_replaced_is_judged_by_the_newer_one() -> None:
    api = Script()
    old = job_pod("smoke-node-0-0-aaaaa", "Running", "2026-12-01T07:00:01Z", "p1")
    new = job_pod("smoke-node-0-0-bbbbb", "Running", "2026-12-01T07:00:09Z", "p2")
    api.lists[JOB_PATH] = [job()]
    api.lists[POD_PATH] = [old]
    api.logs = {"smoke-node-0-0-aaaaa": "first", "smoke-node-0-0-bbbbb": "second\nOK"}

    def go_on() -> None:
        time.sleep(0.6)
        api.lists[POD_PATH] = [old, new]
        api.play(POD_PATH, "ADDED", new)
        time.sleep(0.6)
        api.play(
            JOB_PATH, "MODIFIED", job({"type": "Complete", "status": "True", "reason": "AllJobsCompleted"})
        )

    threading.Thread(target=go_on).start()
    outcome, said = follow(api, kind="TrainJob", container="node")
    assert outcome.result == "succeeded"
    assert [p["name"] for p in outcome.pods] == ["smoke-node-0-0-bbbbb"]
    assert ("note", "pod smoke-node-0-0-aaaaa was replaced by smoke-node-0-0-bbbbb") in said
    assert [text for kind, text in said if kind == "log"] == ["first", "second", "OK"]


def test_a_failed_trainjob_stays_failed() -> None:
    api = Script()
    api.lists[JOB_PATH] = [
        job({"type": "Failed", "status": "True", "reason": "FailedJobs", "message": "jobset failed"})
    ]
    outcome, _ = follow(api, kind="TrainJob", container="node")
    assert outcome.result == "failed"
    assert outcome.trouble is not None
    assert outcome.trouble["found"] == "Failed (FailedJobs): jobset failed"


def test_a_trainjob_without_conditions_is_not_done() -> None:
    api = Script()
    api.lists[JOB_PATH] = [job()]
    outcome, _ = follow(api, kind="TrainJob", timeout=0.5, container="node")
    assert outcome.result == "timeout"
    assert outcome.trouble is not None
    assert "it has no pod yet" in outcome.trouble["found"]


def test_claims_that_may_not_be_read_leave_the_allocation_open() -> None:
    api = Script()
    api.lists[POD_PATH] = [DONE]
    api.logs["smoke"] = "OK"
    api.faults[CLAIM_PATH] = [ApiFault("forbidden", "Not allowed (403)", 403)] * 9
    outcome, _said = follow(api)
    assert outcome.result == "succeeded"
    assert outcome.pods[0]["devices"] == []


class Choosy(Script):
    """A script that minds selectors by one label or by name."""

    def get(self, path: str, params: dict[str, str] | None = None) -> dict[str, Any]:
        listing = super().get(path, params)
        wanted = (params or {}).get("labelSelector") or (params or {}).get("fieldSelector")
        if wanted:
            key, _, value = wanted.partition("=")
            listing["items"] = [
                item
                for item in listing["items"]
                if value in (item["metadata"].get("labels", {}).get(key), item["metadata"]["name"])
            ]
        return listing


JOBS = "/apis/batch/v1/namespaces/gpu-slices/jobs"


def test_jobs_side_by_side_share_their_watches_and_a_named_claim() -> None:
    api = Choosy()
    claim = json.loads(json.dumps(CLAIM))
    claim["metadata"]["ownerReferences"] = []
    claim["status"]["reservedFor"] = [{"resource": "pods", "name": f"{name}-x"} for name in ("one", "two")]
    api.lists[CLAIM_PATH] = [claim]
    ended = {"type": "Complete", "status": "True", "reason": "CompletionsReached"}
    targets = [workload_follow.Target("Job", NS, name, "smoke") for name in ("one", "two")]
    api.lists[JOBS] = [
        {"metadata": {"name": t.name, "uid": t.name}, "status": {"conditions": [ended]}} for t in targets
    ]
    for target in targets:
        ran = pod(f"{target.name}-x", "Succeeded", **state(terminated={"startedAt": T0, "finishedAt": T0}))
        ran["metadata"]["labels"] = {"batch.kubernetes.io/job-name": target.name}
        ran["spec"]["resourceClaims"] = [
            {"name": "gpu-slice", "resourceClaimName": claim["metadata"]["name"]}
        ]
        api.lists.setdefault(POD_PATH, []).append(ran)
    hub = workload_follow.Hub(api)
    followers = [
        workload_follow.Follower(api, t, lambda *_: None, timeout=5, schedule_timeout=1, hub=hub)
        for t in targets
    ]
    for follower in followers:
        follower._record(claim)
    hub.start()
    outcomes = [follower.run() for follower in followers]
    hub.stop()
    assert [o.result for o in outcomes] == ["succeeded", "succeeded"]
    assert [[d["uuid"] for d in o.pods[0]["devices"]] for o in outcomes] == [["MIG-0"], ["MIG-0"]]
    assert outcomes[0].pods[0]["times"]["finished"] == T0
    time.sleep(0.2)
    assert [api.listed.count(path) for path in (CLAIM_PATH, EVENT_PATH, JOBS)] == [1, 1, 2]


def test_a_failed_initializer_is_named_with_its_last_words() -> None:
    api = Script()
    bad = {"type": "Failed", "status": "True", "reason": "FailedJobs", "message": "m"}
    api.lists[JOB_PATH] = [{"metadata": {"name": "smoke", "uid": "j"}, "status": {"conditions": [bad]}}]
    helper = pod("smoke-model-initializer-0", "Failed")
    helper["metadata"]["labels"] = {workload_state.REPLICATED_JOB: "model-initializer"}
    api.lists[POD_PATH] = [helper]
    api.logs["smoke-model-initializer-0"] = "one\nno such model"
    outcome, _ = follow(api, "TrainJob")
    assert outcome.result == "failed"
    assert "smoke-model-initializer-0 failed: no such model" in str(outcome.trouble)
    assert outcome.pods == []


class TestState:
    @pytest.mark.parametrize(
        ("kind", "status", "end"),
        [
            ("Job", {"conditions": [{"type": "Complete", "status": "True"}]}, "succeeded"),
            ("Job", {"conditions": [{"type": "Failed", "status": "True"}]}, "failed"),
            ("Job", {"conditions": [{"type": "Complete", "status": "False"}]}, ""),
            ("VolcanoJob", {"state": {"phase": "Completed"}}, "succeeded"),
            ("VolcanoJob", {"state": {"phase": "Aborted", "message": "m"}}, "failed"),
            ("VolcanoJob", {"state": {"phase": "Running"}}, ""),
            ("VolcanoJob", {}, ""),
        ],
    )
    def test_ends(self, kind: str, status: dict[str, Any], end: str) -> None:
        item = {"kind": kind, "status": status}
        assert workload_state.finished(item) == end
        assert workload_state.end_text(item)

    def test_pods_newest_attempt_of_each_index(self) -> None:
        pods = []
        for name, index, attempt, created in (
            ("a", "1", "0", "2"),
            ("b", "0", "0", "3"),
            ("c", "0", "1", "1"),
            ("d", "1", "0", "4"),
        ):
            labels = {workload_state.COMPLETION_INDEX: index, workload_state.RESTART_ATTEMPT: attempt}
            pods.append({"metadata": {"name": name, "labels": labels, "creationTimestamp": created}})
        assert [p["metadata"]["name"] for p in workload_state.newest_pods(pods)] == ["c", "d"]

    @pytest.mark.parametrize(
        ("reason", "message", "trouble"),
        [
            ("FailedResourceClaimCreation", 'template "x": not found', "template-missing"),
            ("TrainJobResourcesCreationFailed", "admission webhook denied", "trainjob-resources"),
            ("FailedPrepareDynamicResources", "rpc error", "prepare-failed"),
            ("FailedCreate", "forbidden: violates PodSecurity", "pod-refused"),
            ("Pulled", "fine", None),
        ],
    )
    def test_events(self, reason: str, message: str, trouble: str | None) -> None:
        found = workload_state.event_trouble({"reason": reason, "message": message})
        assert (found and found["id"]) == trouble

    def test_unresolvable_cdi_device(self) -> None:
        waiting = {
            "reason": "CreateContainerError",
            "message": "unresolvable CDI devices k8s.gpu.nvidia.com/x",
        }
        found = workload_state.pod_trouble(pod(**state(waiting=waiting)))
        assert found is not None
        assert found["id"] == "cdi-unresolvable"

    @pytest.mark.parametrize(
        ("profile", "message", "text"),
        [
            (
                "3g.40gb",
                "cannot allocate",
                "no device of profile 3g.40gb is published; published are 2 x 1g.6gb",
            ),
            ("1g.6gb", "node(s) had untolerated taint", "the scheduler may not use the node"),
            ("1g.6gb", "1 untolerated taint(s), 2 Insufficient cpu", "the node lacks something else"),
            ("1g.6gb", "1 node(s) had volume node affinity conflict", "finds no volume it can use"),
            ("1g.6gb", "didn't find available persistent volumes to bind", "finds no volume it can use"),
            ("1g.6gb", "1 cannot allocate all claims, 2 volume node affinity conflict", "are free"),
            (
                "1g.6gb",
                "1 cannot allocate all claims, 2 Insufficient cpu",
                "2 of 2 devices of profile 1g.6gb are",
            ),
            (
                "",
                "cannot allocate all claims",
                "no device of type gpu is published; published are 2 x 1g.6gb",
            ),
            ("", "1 resourceclaim not available on the node, 1 Insufficient cpu", "not what is missing"),
        ],
    )
    def test_why_a_pod_is_not_placed(self, profile: str, message: str, text: str) -> None:
        devices = workload_follow.merge_slices([SLICE])["devices"]
        why, fix = workload_state.explain_unschedulable(message, profile, devices, [])
        assert text in why
        assert fix

    def test_a_device_for_the_picture(self) -> None:
        devices = workload_follow.merge_slices([SLICE])["devices"]
        drawn = [workload_state.picture_device(d) for d in devices]
        assert [(d["uuid"], d["slices"]) for d in drawn] == [("MIG-0", [0]), ("MIG-1", [1])]

    @pytest.mark.parametrize(("target", "mine"), [("smoke", True), ("smoke-node-0", True), ("smokes", False)])
    def test_whose_event(self, target: str, mine: bool) -> None:
        assert workload_state.about({"involvedObject": {"name": target}}, ["smoke"]) is mine
