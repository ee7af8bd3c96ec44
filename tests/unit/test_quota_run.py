"""The play of the slice quota against a made-up Kueue, and the writing of Kueue's configuration."""

from __future__ import annotations

import copy
import importlib.util
import json
import queue
import sys
from pathlib import Path
from typing import Any, Callable

import pytest
import yaml
from gpu_slices import kueue, quota_record, quota_run
from gpu_slices.kube_api import ApiFault
from gpu_slices.quota_run import Director, QuotaRun, explain
from gpu_slices.workload_run import EVIDENCE, RunFault

ROOT = Path(__file__).resolve().parents[2]
IDS = ("borrower-1", "borrower-2", "waiting", "urgent")
SETTINGS = {
    "stage": "quota",
    "namespace": "ns",
    "workloads": [
        {"id": i, "kind": "TrainJob", "name": f"x-{i}", "container": "node", "judge": "sft"} for i in IDS
    ],
    "jobs": {f"x-{i}": {"metadata": {"name": f"x-{i}"}} for i in IDS},
    "kueue_version": "v1beta2",
    "resource": "r",
    "limit": 2,
}


class Done:
    """A follower's future."""

    def __init__(self, world: World, name: str) -> None:
        self._world, self._name = world, name

    def done(self) -> bool:
        return self._name in self._world.ended or self._world.over()


class World:
    """API, Kueue and cluster in one: what a job leads to is decided when it is created."""

    def __init__(self, react: Callable[[World, str], None]) -> None:
        self.react = react
        self.created: list[str] = []
        self.ended: set[str] = set()
        self.out: queue.Queue[Any] = queue.Queue()
        self.faults: list[ApiFault] = []
        self.director: Director | None = None
        self.suspended = True

    # -- the hub

    def ask(self, name: str, path: str, params: dict[str, str], out: queue.Queue[Any]) -> None:
        assert path.startswith(("/apis/", "/api/v1/"))
        self.out = out

    # -- the API

    def request(self, method: str, path: str, body: Any, **more: Any) -> dict[str, Any]:
        assert method == "PATCH"
        assert more["content_type"] == "application/apply-patch+yaml"
        if self.faults:
            raise self.faults.pop(0)
        name = path.rsplit("/", 1)[1]
        assert body["metadata"]["name"] == name
        self.created.append(name)
        self.react(self, name)
        return {}

    def get(self, path: str, params: Any = None) -> dict[str, Any]:
        if path.endswith("resourceslices"):
            return {"items": []}
        if "trainjobs" in path:
            return {"spec": {"suspend": self.suspended}}
        return {"items": []}

    @staticmethod
    def parallel(questions: dict[str, Callable[[], Any]]) -> tuple[dict[str, Any], dict[str, ApiFault]]:
        return {name: question() for name, question in questions.items()}, {}

    # -- what Kueue and the cluster do

    def workload(self, name: str, reserved: str, reason: str = "x", message: str = "m") -> None:
        condition = {"type": "QuotaReserved", "status": reserved, "reason": reason, "message": message}
        owner = [{"kind": "TrainJob", "name": name}]
        metadata = {"name": f"w-{name}", "uid": f"w-{name}", "ownerReferences": owner}
        self.out.put(("workload", "MODIFIED", {"metadata": metadata, "status": {"conditions": [condition]}}))

    def runs(self, name: str) -> None:
        pod, labels = f"{name}-node-0-0-a", {"jobset.sigs.k8s.io/jobset-name": name}
        status = {"containerStatuses": [{"name": "node", "state": {"running": {}}}]}
        self.out.put(
            ("pod", "ADDED", {"metadata": {"name": pod, "uid": pod, "labels": labels}, "status": status})
        )
        results = [{"driver": "gpu.nvidia.com", "pool": "p", "device": "d"}]
        metadata = {"name": "c", "uid": f"c-{name}", "ownerReferences": [{"kind": "Pod", "name": pod}]}
        allocation = {"allocation": {"devices": {"results": results}}}
        self.out.put(("claim", "ADDED", {"metadata": metadata, "status": allocation}))

    def over(self) -> bool:
        return bool(self.director and self.director.trouble)

    def play(self) -> Director:
        run = QuotaRun(self, SETTINGS, Path("/nowhere"), lambda *_: None)  # type: ignore[arg-type]
        self.director = Director(run, self)  # type: ignore[arg-type]
        self.director.play([Done(self, f"x-{i}") for i in IDS])  # type: ignore[misc]
        return self.director


def kueue_as_it_should(world: World, name: str) -> None:
    if "borrower" in name:
        world.workload(name, "True")
        world.runs(name)
    elif "waiting" in name:
        world.workload(name, "False", "Pending", "insufficient unused quota for r")
    else:
        world.workload(name, "True")
        world.ended.update(f"x-{i}" for i in IDS)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_TICK", "_MADE", "_DECIDED", "_INADMISSIBLE"):
        monkeypatch.setattr(quota_run, name, 0.02)
    monkeypatch.setattr(quota_run.time, "sleep", lambda _: None)


class TestPlay:
    def test_the_jobs_come_in_their_turn(self) -> None:
        world = World(kueue_as_it_should)
        director = world.play()
        assert director.trouble is None
        assert world.created == [f"x-{i}" for i in IDS]
        look = director.recorder.jobs["x-waiting"]["look"]
        assert {k: look[k] for k in ("suspend", "pods", "claims")} == {
            "suspend": True,
            "pods": 0,
            "claims": 0,
        }

    def test_the_urgent_job_comes_only_when_the_quota_is_in_use(self) -> None:
        def slow(world: World, name: str) -> None:
            if "borrower" in name:
                world.workload(name, "True")
            elif "waiting" in name:
                world.workload(name, "False", "Pending", "insufficient")
                world.runs("x-borrower-1")
                # The second is never seen to run, and ends.
                world.ended.add("x-borrower-2")

        world = World(slow)
        director = world.play()
        assert "x-urgent" not in world.created
        assert (director.trouble or {})["id"] == "ended-early"
        assert "quota_hold_seconds" in (director.trouble or {})["fix"]

    def test_a_webhook_that_answers_late(self) -> None:
        world = World(kueue_as_it_should)
        world.faults = [
            ApiFault("server", 'failed calling webhook "x": connection refused', 500),
            ApiFault("invalid", "specified trainingRuntime must be created before the TrainJob", 422),
        ]
        assert world.play().trouble is None
        assert world.created[0] == "x-borrower-1"

    def test_a_refusal_ends_it(self) -> None:
        world = World(kueue_as_it_should)
        world.faults = [ApiFault("forbidden", "Not allowed (403): trainjobs", 403)]
        director = world.play()
        assert (director.trouble or {})["id"] == "api"
        assert "403" in (director.trouble or {})["found"]

    @pytest.mark.parametrize(
        ("react", "identity", "said"),
        [
            (lambda *_: None, "kueue-no-workload", "integrations.frameworks"),
            (
                lambda world, name: world.workload(
                    name, "False", "Inadmissible", "class c is not mapped in x"
                ),
                "kueue_deviceclass_unmapped",
                "deviceClassMappings",
            ),
            (
                lambda world, name: world.workload(name, "False", "Pending", "no quota"),
                "kueue-not-admitted",
                "ClusterQueues",
            ),
        ],
    )
    def test_what_keeps_it_from_going_on_is_told(
        self, react: Callable[[World, str], None], identity: str, said: str
    ) -> None:
        trouble = World(react).play().trouble or {}
        assert trouble["id"] == identity
        assert said in trouble["fix"]

    def test_a_borrower_that_was_evicted_is_no_trouble(self) -> None:
        def late(world: World, name: str) -> None:
            kueue_as_it_should(world, name)
            if "urgent" in name:
                world.ended.clear()
                world.workload("x-borrower-1", "False", "Pending", "preempted")
                world.runs("x-borrower-2")

        world = World(late)
        run = QuotaRun(world, SETTINGS, Path("/nowhere"), lambda *_: None)  # type: ignore[arg-type]
        world.director = Director(run, world)  # type: ignore[arg-type]
        ticks = iter(range(20))

        class Later:
            def done(self) -> bool:
                return next(ticks, None) is None

        world.director.play([Later()])  # type: ignore[list-item]
        assert world.director.trouble is None


@pytest.mark.parametrize(
    ("message", "identity"),
    [
        ("DeviceClass c is not mapped in DRA configuration for podset node", "kueue_deviceclass_unmapped"),
        ("ResourceClaimTemplate t: CEL selectors are not supported", "kueue_cel_selector"),
        ("the KueueDRAIntegration feature gate is not enabled", "kueue_gate_off"),
        ("DynamicResourceAllocation feature does not support use of resource claims", "kueue_named_claim"),
        ("LocalQueue gpu-slices-quota-team-b doesn't exist", "kueue_queue_missing"),
        ("ClusterQueue gpu-slices-quota-team-b is inactive", "kueue_queue_inactive"),
        ("something new", "kueue_inadmissible"),
    ],
)
def test_every_refusal_of_kueue_has_advice(message: str, identity: str) -> None:
    trouble = explain("job", message)
    assert trouble["id"] == identity
    assert message in trouble["found"]
    assert trouble["fix"]


class TestEvidence:
    """An earlier proof is read from what was kept on the jobs."""

    REAL = json.loads((ROOT / "tests/fixtures/kueue/record-0.17.json").read_text(encoding="utf-8"))

    def run_of(self, monkeypatch: pytest.MonkeyPatch) -> QuotaRun:
        settings = {**SETTINGS, "resource": "gpu-slices.dev/mig-1g-18gb"}
        run = QuotaRun(World(kueue_as_it_should), settings, Path("/nowhere"), lambda *_: None)  # type: ignore[arg-type]
        monkeypatch.setattr("gpu_slices.workload_run.read_log", lambda *_: "log")
        return run

    def item(self, evidence: Any) -> dict[str, Any]:
        conditions = [{"type": "Complete", "status": "True"}]
        annotations = {EVIDENCE: json.dumps(evidence)}
        return {
            "kind": "TrainJob",
            "metadata": {"name": "x", "annotations": annotations},
            "status": {"conditions": conditions},
        }

    def test_with_kueues_part_it_is_judged_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        run = self.run_of(monkeypatch)
        members = []
        for index, name in enumerate(IDS):
            pods = [{"name": "p", "node": "n", "devices": []}]
            evidence = {"at": "t", "pods": pods, "kueue": self.REAL[name]}
            member = run._recorded(index, self.item(evidence), [])
            assert member is not None
            assert member["pods"]
            members.append(member)
        assert {check["status"] for check in run.judge_stage(members)} == {"pass"}

    def test_without_it_nothing_is_proved(self, monkeypatch: pytest.MonkeyPatch) -> None:
        run = self.run_of(monkeypatch)
        item = self.item({"at": "t", "pods": [{"name": "p", "node": "n", "devices": []}]})
        member = run._recorded(0, item, [])
        assert member is not None
        assert member["pods"] == []

    def test_a_damaged_record_is_a_failure_and_no_crash(self, monkeypatch: pytest.MonkeyPatch) -> None:
        run = self.run_of(monkeypatch)
        members = [{"id": name, "record": {}} for name in IDS]
        assert [(c["id"], c["status"]) for c in run.judge_stage(members)] == [("record", "fail")]

    def test_jobs_of_a_run_that_was_broken_off_are_not_taken_up(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """They are all there and unfinished, but what Kueue did with them meanwhile was not seen."""
        run = self.run_of(monkeypatch)
        assert run._kept([False] * 4, [True] * 4, settled=False) == [False] * 4
        assert run._kept([True] * 4, [False] * 4, settled=True) == [True] * 4

    @pytest.mark.parametrize(
        ("owner", "queue_name", "finished", "said"),
        [
            ("theirs", "gpu-slices-quota-team-b", False, True),
            ("theirs", "gpu-slices-quota-team-b", True, False),
            ("theirs", "research", False, False),
            ("x-waiting", "gpu-slices-quota-team-b", False, False),
        ],
    )
    def test_nobody_elses_job_is_played_with(
        self, owner: str, queue_name: str, finished: bool, said: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        conditions = [{"type": "Finished", "status": "True"}] if finished else []
        item = {
            "metadata": {"name": "w", "ownerReferences": [{"kind": "TrainJob", "name": owner}]},
            "spec": {"queueName": queue_name},
            "status": {"conditions": conditions},
        }
        run = self.run_of(monkeypatch)
        monkeypatch.setattr(run.api, "get", lambda *_: {"items": [item]})
        monkeypatch.setattr("gpu_slices.workload_run.Run.follow", lambda _: {"played": True})
        if said:
            with pytest.raises(RunFault, match=r"TrainJob theirs \(gpu-slices-quota-team-b\)"):
                run.follow()
        else:
            assert run.follow() == {"played": True}

    def test_a_job_that_failed_is_no_proof(self, monkeypatch: pytest.MonkeyPatch) -> None:
        item = self.item({})
        item["status"]["conditions"] = [{"type": "Failed", "status": "True"}]
        assert self.run_of(monkeypatch)._recorded(0, item, []) is None


# ------------------------------------------------------------------------------------- Kueue's configuration


def load(path: str) -> Any:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class Manager:
    """The API around Kueue's Deployment; ``comes_up`` for each restart."""

    def __init__(self, *comes_up: bool) -> None:
        self.comes_up = list(comes_up)
        folder = ROOT / "tests/fixtures/kueue"
        self.deployment = yaml.safe_load((folder / "deployment-0.17.yaml").read_text())
        self.config_map = yaml.safe_load((folder / "config-0.17.yaml").read_text())
        self.restarts: list[Any] = []
        self.writes: list[Any] = []

    @property
    def text(self) -> str:
        return str(self.config_map["data"]["controller_manager_config.yaml"])

    def facts(self) -> dict[str, Any]:
        return {
            "served": ["v1beta2"],
            "managers": [kueue.trim_manager(self.deployment)],
            "config": kueue.trim_config(self.config_map, "controller_manager_config.yaml"),
            "started": "2026-12-01T12:00:30Z",
        }

    def request(self, method: str, path: str, body: Any, **more: Any) -> dict[str, Any]:
        assert method == "PATCH"
        if "configmaps" in path:
            self.writes.append(copy.deepcopy(body))
            self.config_map["data"].update(body["data"])
        else:
            assert more["content_type"] == "application/strategic-merge-patch+json"
            self.restarts.append(body["spec"]["template"])
            up = self.comes_up.pop(0)
            self.deployment["status"].update(availableReplicas=1 if up else 0)
        return {}

    def get(self, path: str) -> dict[str, Any]:
        return dict(self.config_map if "configmaps" in path else self.deployment)


class TestConfigure:
    @pytest.fixture(name="module")
    def module_fixture(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        module = load("plugins/action/quota_configure.py")
        monkeypatch.setattr(module, "_PAUSE", 0)
        return module

    def change(self, module: Any, manager: Manager, wanted: dict[str, str]) -> Any:
        plan = kueue.changes(manager.facts(), wanted, True)
        return module._Change(manager, manager.facts(), plan, 0)

    def test_write_restart_and_wait(self, module: Any) -> None:
        manager = Manager(True)
        self.change(module, manager, {"new.example": "x/new"}).make()
        assert manager.writes[0]["metadata"]["resourceVersion"] == "712"
        assert "name: x/new" in manager.text
        assert len(manager.restarts) == 1
        assert set(manager.restarts[0]) == {"metadata"}

    def test_arguments_of_the_one_container(self, module: Any) -> None:
        manager = Manager(True)
        container = manager.deployment["spec"]["template"]["spec"]["containers"][0]
        container["args"][-1] = "--feature-gates=A=true"
        self.change(module, manager, {}).make()
        assert manager.writes == []
        given = manager.restarts[0]["spec"]["containers"][0]
        assert given["name"] == "manager"
        assert given["args"][-1] == "--feature-gates=A=true,DynamicResourceAllocation=true"

    def test_what_does_not_come_up_is_put_back(self, module: Any) -> None:
        manager = Manager(False, True)
        before = manager.text
        with pytest.raises(module.AnsibleActionFail, match="Its former configuration was put back"):
            self.change(module, manager, {"new.example": "x/new"}).make()
        assert manager.text == before
        assert len(manager.restarts) == 2


def test_nothing_recorded_holds_no_quota() -> None:
    job = quota_record.Recorder(["a"], lambda *_: None).jobs["a"]
    assert not quota_record.holds_quota(job)
    assert quota_record.most_at_once([job]) == 0
