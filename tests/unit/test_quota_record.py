"""What Kueue did with some TrainJobs: recording it, and judging a real record and spoilt ones."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, Callable

import pytest
from gpu_slices import quota_record
from gpu_slices.quota_record import Recorder

# Recorded by the stage itself: Kueue 0.17.0, Trainer 2.3.0, two slices of 1g.18gb.
REAL = json.loads(
    (Path(__file__).resolve().parents[1] / "fixtures/kueue/record-0.17.json").read_text(encoding="utf-8")
)
RESOURCE = "gpu-slices.dev/mig-1g-18gb"
EVICTED = next(name for name, job in REAL.items() if any(e["type"] == "Evicted" for e in job["history"]))
Jobs = dict[str, dict[str, Any]]


def judge(jobs: Jobs, limit: int = 2) -> dict[str, dict[str, Any]]:
    order = ("borrower-1", "borrower-2", "waiting", "urgent")
    members = [{"id": name, "record": jobs[name]} for name in order]
    return {
        check["id"]: check for check in quota_record.judge(members, {"resource": RESOURCE, "limit": limit})
    }


def failed(checks: dict[str, dict[str, Any]]) -> set[str]:
    return {name for name, check in checks.items() if check["status"] == "fail"}


def test_the_real_record_proves_all() -> None:
    checks = judge(REAL)
    assert list(checks) == ["pending", "admitted", "preempted", "reclaimed", "readmitted", "limit"]
    assert failed(checks) == set()
    assert "insufficient unused quota for " + RESOURCE in checks["pending"]["found"]
    assert "no pod, no claim" in checks["pending"]["found"]
    assert "gone at" in checks["preempted"]["found"]
    assert any("EvictedDueToPreempted" in line for line in checks["preempted"]["evidence"]["events"])
    assert "priority 1000" in checks["reclaimed"]["found"]


def entry(job: dict[str, Any], kind: str, status: str = "True") -> dict[str, Any]:
    return next(e for e in job["history"] if (e["type"], e["status"]) == (kind, status))


def drop(kind: str, status: str = "True") -> Callable[[dict[str, Any]], None]:
    def spoil(job: dict[str, Any]) -> None:
        job["history"] = [e for e in job["history"] if (e["type"], e["status"]) != (kind, status)]

    return spoil


def change(kind: str, status: str, **values: Any) -> Callable[[dict[str, Any]], None]:
    def spoil(job: dict[str, Any]) -> None:
        entry(job, kind, status).update(values)

    return spoil


def early(field: str) -> Callable[[dict[str, Any]], None]:
    def spoil(job: dict[str, Any]) -> None:
        job[field][0]["created"] = "2000-01-01T00:00:00Z"

    return spoil


def look(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda job: job["look"].update(values)


def stay(field: str) -> Callable[[dict[str, Any]], None]:
    def spoil(job: dict[str, Any]) -> None:
        for item in job[field]:
            item["gone"] = ""

    return spoil


@pytest.mark.parametrize(
    ("name", "spoil", "check", "said"),
    [
        ("waiting", drop("QuotaReserved", "False"), "pending", "never said"),
        ("waiting", change("QuotaReserved", "False", message="queue stopped"), "pending", "another"),
        ("waiting", change("QuotaReserved", "False", message="insufficient quota for cpu"), "pending", "cpu"),
        ("waiting", early("pods"), "pending", "was made at 2000"),
        ("waiting", early("claims"), "pending", "was made at 2000"),
        ("waiting", look(pods=1), "pending", "1 pods"),
        ("waiting", look(claims=1), "pending", "1 claims"),
        ("waiting", look(suspend=False), "pending", "suspend=False"),
        ("waiting", lambda job: job.update(look={}), "pending", "nobody looked"),
        (
            "waiting",
            lambda job: job["suspended"].insert(0, {"seq": 0, "at": "t", "suspend": False}),
            "pending",
            "t",
        ),
        ("waiting", drop("Admitted"), "admitted", "never admitted"),
        ("waiting", change("Admitted", "True", seq=0.5), "admitted", "nobody had given quota back"),
        ("waiting", drop("Finished"), "admitted", "did not finish"),
        ("waiting", change("Finished", "True", reason="Failed", message="x"), "admitted", "Failed: x"),
        (EVICTED, change("Evicted", "True", reason="PodsReadyTimeout"), "preempted", "another reason"),
        (EVICTED, change("Evicted", "True", message="for somebody"), "preempted", "somebody else"),
        (EVICTED, drop("Preempted"), "preempted", "no condition Preempted"),
        (EVICTED, drop("Evicted"), "preempted", "0 jobs were evicted"),
        (EVICTED, stay("pods"), "preempted", "not seen to go"),
        (EVICTED, stay("claims"), "preempted", "not seen to go"),
        (EVICTED, lambda job: job.update(claims=job["claims"][1:]), "preempted", "no pod with a slice"),
        ("urgent", lambda job: job.update(workload_uid="other"), "preempted", "somebody else"),
        ("urgent", drop("Admitted"), "reclaimed", "never admitted"),
        ("urgent", change("Admitted", "True", seq=0.5), "reclaimed", "before anybody was evicted"),
        ("urgent", lambda job: job.update(claims=[]), "reclaimed", "got no slice"),
        ("urgent", lambda job: job.update(priority=100), "reclaimed", "not above 100"),
        ("urgent", drop("Finished"), "reclaimed", "did not finish"),
        (EVICTED, drop("Finished"), "readmitted", "did not finish"),
        (EVICTED, lambda job: job.update(pods=job["pods"][:1]), "readmitted", "no new pod"),
        (EVICTED, lambda job: job.update(claims=job["claims"][:1]), "readmitted", "no new pod"),
    ],
)
def test_a_spoilt_record_is_found_out(
    name: str, spoil: Callable[[dict[str, Any]], None], check: str, said: str
) -> None:
    jobs = copy.deepcopy(REAL)
    spoil(jobs[name])
    checks = judge(jobs)
    assert check in failed(checks)
    assert said in checks[check]["found"]
    assert checks[check]["fix"]
    assert checks[check]["needed"]


@pytest.mark.parametrize(
    ("early", "late", "before"),
    [
        ("2026-12-01T12:00:00Z", "2026-12-01T12:00:06Z", True),
        # Clocks differ a little, and times are rounded.
        ("2026-12-01T12:00:00Z", "2026-12-01T12:00:05Z", False),
        ("2026-12-01T12:00:09Z", "2026-12-01T12:00:05Z", False),
        ("", "2026-12-01T12:00:05Z", True),
    ],
)
def test_times_of_two_clocks(early: str, late: str, before: bool) -> None:
    assert quota_record._before(early, late) is before


def test_a_job_that_is_never_admitted_again() -> None:
    jobs = copy.deepcopy(REAL)
    job = jobs[EVICTED]
    evicted = entry(job, "Evicted")["seq"]
    job["history"] = [e for e in job["history"] if e["type"] != "Admitted" or e["seq"] < evicted]
    assert "never admitted again" in judge(jobs)["readmitted"]["found"]


@pytest.mark.parametrize("limit", [1, 3])
def test_another_number_at_once_than_the_quota(limit: int) -> None:
    assert failed(judge(REAL, limit)) == {"limit"}


def test_a_borrower_that_ended_too_early_is_told() -> None:
    jobs = copy.deepcopy(REAL)
    drop("Evicted")(jobs[EVICTED])
    other = "borrower-2" if EVICTED == "borrower-1" else "borrower-1"
    entry(jobs[other], "Finished")["seq"] = 0.5
    check = judge(jobs)["preempted"]
    assert "a borrower had finished before" in check["found"]
    assert "quota_hold_seconds" in check["fix"]


def test_two_evictions_are_no_proof() -> None:
    jobs = copy.deepcopy(REAL)
    jobs["waiting"]["history"].append({**entry(jobs[EVICTED], "Evicted"), "seq": 999})
    assert "2 jobs were evicted" in judge(jobs)["preempted"]["found"]


# ------------------------------------------------------------------------------------------------- recording


def workload(status: str, message: str, uid: str = "w1", **more: Any) -> dict[str, Any]:
    condition = {"type": "QuotaReserved", "status": status, "reason": "Pending", "message": message}
    return {
        "metadata": {
            "name": "trainjob-a-1",
            "uid": uid,
            "ownerReferences": [{"kind": "TrainJob", "name": "a", "uid": "u"}],
            **more,
        },
        "spec": {"priority": 5},
        "status": {"conditions": [{**condition, "lastTransitionTime": "2026-01-01T00:00:00Z"}]},
    }


def trainjob(suspend: bool = True) -> dict[str, Any]:
    return {
        "metadata": {"name": "a", "uid": "u", "labels": {quota_record.QUEUE_LABEL: "q"}},
        "spec": {"suspend": suspend},
    }


def pod(name: str = "a-node-0-0-x", uid: str = "p") -> dict[str, Any]:
    labels = {"jobset.sigs.k8s.io/jobset-name": "a"}
    return {
        "metadata": {"name": name, "uid": uid, "labels": labels, "creationTimestamp": "2026-01-01T00:00:01Z"}
    }


def claim(uid: str = "c", owner: str = "a-node-0-0-x") -> dict[str, Any]:
    owners = [{"kind": "Pod", "name": owner}]
    return {"metadata": {"name": "claim", "uid": uid, "ownerReferences": owners}}


def event(kind: str, uid: str, at: str = "2026-01-01T00:00:02Z", message: str = "m") -> dict[str, Any]:
    target = {"kind": kind, "name": "x", "uid": uid}
    return {
        "involvedObject": target,
        "type": "Normal",
        "reason": "Admitted",
        "message": message,
        "lastTimestamp": at,
    }


@pytest.fixture(name="recorder")
def recorder_fixture() -> Recorder:
    recorder = Recorder(["a"], lambda name, text: recorder_said.append(f"{name}: {text}"))
    recorder_said.clear()
    return recorder


recorder_said: list[str] = []


class TestRecorder:
    def test_conditions_are_kept_as_they_change(self, recorder: Recorder) -> None:
        for status, message in (("False", "one"), ("False", "two"), ("True", "ok"), ("True", "ok")):
            recorder.workload(workload(status, message), "now")
        history = recorder.jobs["a"]["history"]
        assert [(e["status"], e["message"]) for e in history] == [("False", "two"), ("True", "ok")]
        assert recorder.jobs["a"]["priority"] == 5
        assert quota_record.holds_quota(recorder.jobs["a"])
        assert len(recorder_said) == 3

    def test_a_workload_that_is_going_belongs_to_an_earlier_job(self, recorder: Recorder) -> None:
        recorder.workload(workload("True", "old", uid="old", deletionTimestamp="x"), "now")
        recorder.workload({**workload("True", "x"), "metadata": {"name": "of-somebody", "uid": "z"}}, "now")
        assert recorder.jobs["a"]["workload"] == ""

    def test_suspending_and_resuming(self, recorder: Recorder) -> None:
        for suspend in (True, True, False, True):
            recorder.trainjob(trainjob(suspend), "now")
        assert [s["suspend"] for s in recorder.jobs["a"]["suspended"]] == [True, False, True]
        assert recorder.jobs["a"]["queue"] == "q"
        recorder.trainjob({"metadata": {"name": "of-somebody"}}, "now")

    def test_pods_and_claims_come_and_go(self, recorder: Recorder) -> None:
        device = {"uuid": "MIG-1", "device": "d", "pool": "p", "node": "n", "profile": "1g", "more": 1}
        recorder.pod(pod(), False, "t1")
        recorder.claim(claim(), False, "t1")
        recorder.claim(claim(), False, "t2", [device])
        recorder.claim(claim(), True, "t3", [device])
        recorder.pod(pod(), True, "t4")
        recorder.pod(pod(), True, "t5")
        job = recorder.jobs["a"]
        assert [p["gone"] for p in job["pods"]] == ["t4"]
        assert job["claims"][0]["devices"] == [{k: v for k, v in device.items() if k != "more"}]
        assert job["claims"][0]["gone"] == "t3"
        assert 0 < job["claims"][0]["allocated_seq"] < job["claims"][0]["gone_seq"]
        assert "a: claim claim is gone, MIG-1 is free" in recorder_said

    def test_an_end_that_no_watch_told(self, recorder: Recorder) -> None:
        recorder.pod(pod(), False, "t1")
        recorder.claim(claim(), False, "t1")
        recorder.missing("pod", {"p"}, "t2")
        recorder.missing("claim", {"another"}, "t2")
        assert (recorder.jobs["a"]["pods"][0]["gone"], recorder.jobs["a"]["claims"][0]["gone"]) == ("", "t2")

    def test_what_belongs_to_others_is_left_out(self, recorder: Recorder) -> None:
        recorder.claim(claim(owner="ab-node-0-0-x"), False, "t")
        recorder.pod({"metadata": {"name": "x", "labels": {}}}, False, "t")
        assert recorder.jobs["a"]["claims"] == []
        assert recorder.jobs["a"]["pods"] == []

    def test_events_by_uid_in_the_order_of_their_times(self, recorder: Recorder) -> None:
        recorder.event(event("Workload", "w1", "2026-01-01T00:00:09Z"))
        recorder.event(event("Workload", "of-an-earlier-one"))
        recorder.event(event("TrainJob", "u", "2026-01-01T00:00:03Z", "first\nline"))
        recorder.event(event("Pod", "u"))
        recorder.trainjob(trainjob(), "now")
        recorder.workload(workload("True", "ok"), "now")
        recorder.close()
        assert quota_record.events(recorder.jobs.values()) == [
            "2026-01-01T00:00:03Z Normal Admitted TrainJob/x: first line",
            "2026-01-01T00:00:09Z Normal Admitted Workload/x: m",
        ]

    def test_waits(self, recorder: Recorder) -> None:
        assert quota_record.waits(recorder.jobs["a"]) is None
        recorder.workload(workload("False", "why"), "now")
        assert (quota_record.waits(recorder.jobs["a"]) or {})["message"] == "why"
        assert not quota_record.was_admitted(recorder.jobs["a"])
