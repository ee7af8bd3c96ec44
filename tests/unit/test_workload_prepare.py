"""What is done with workloads that are there already, and how everything of ours is removed."""

from __future__ import annotations

import copy
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any, Callable

import pytest
from gpu_slices import judges, managed, workload_follow, workload_run
from gpu_slices.kube_api import ApiFault
from test_workload_log import GIVEN, smoke_log

ROOT = Path(__file__).resolve().parents[2]
NS = "gpu-slices"
PODS = f"/api/v1/namespaces/{NS}/pods"
SLICES = "/apis/resource.k8s.io/v1/resourceslices"


def load(path: str) -> Any:
    spec = importlib.util.spec_from_file_location(Path(path).stem + "_under_test", ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_of(server: Any, folder: Path, *workloads: dict[str, Any], **more: Any) -> workload_run.Run:
    one = {"kind": "Pod", "name": "mine", "container": "smoke", "judge": "smoke", "profile": "1g.6gb"}
    settings = {"stage": "smoke", "namespace": NS, "manifests": [{"kind": "Pod"}], "require_cuda": False}
    chosen = [{**one, **workload} for workload in workloads or ({},)]
    return workload_run.Run(server, {**settings, "workloads": chosen, **more}, folder, lambda *_: None)


def published(uuid: str = "MIG-1") -> dict[str, Any]:
    attributes = {
        "type": "mig",
        "profile": "1g.6gb",
        "uuid": uuid,
        "parentUUID": "GPU-1",
        "productName": "NVIDIA A30",
    }
    return {
        "spec": {
            "driver": "gpu.nvidia.com",
            "nodeName": "a30",
            "pool": {"name": "a30", "generation": 1, "resourceSliceCount": 1},
            "devices": [
                {
                    "name": GIVEN["device"],
                    "attributes": {k: {"string": v} for k, v in attributes.items()},
                    "capacity": {"memory": {"value": "5952Mi"}},
                }
            ],
        }
    }


def pod(name: str = "mine", phase: str = "Succeeded", evidence: Any = True, **more: Any) -> dict[str, Any]:
    device = {"pool": "a30", "device": GIVEN["device"], "uuid": "MIG-1", "claim": "c"}
    found = {"at": "t", "pods": [{"name": name, "node": "a30", "devices": [device]}]}
    annotations = (
        {workload_run.EVIDENCE: json.dumps(found) if evidence is True else evidence} if evidence else {}
    )
    return {
        "metadata": {
            "name": name,
            "uid": f"uid-{name}",
            "labels": {"app.kubernetes.io/managed-by": "gpu-slices", "app.kubernetes.io/component": "smoke"},
            "annotations": annotations,
            **more,
        },
        "status": {"phase": phase},
    }


class Server:
    """Objects by path, logs by pod; remembers what was deleted and patched."""

    server = "https://lab:6443"

    def __init__(self, *pods: dict[str, Any], log: str = "", slices: dict[str, Any] | None = None) -> None:
        self.pods = {p["metadata"]["name"]: p for p in pods}
        self.log = log or smoke_log()
        self.slices = slices or published()
        self.deleted: list[str] = []

    def find(self, path: str, params: dict[str, str] | None = None) -> dict[str, Any] | None:
        if path == PODS:
            return {"items": [copy.deepcopy(p) for p in self.pods.values()]}
        if path == SLICES:
            return {"items": [self.slices]}
        return copy.deepcopy(self.pods.get(path.rsplit("/", 1)[1]))

    def text(self, path: str, params: dict[str, str] | None = None) -> str:
        if path.split("/")[-2] not in self.pods:
            raise ApiFault("not_found", "no pod", 404)
        return self.log

    def request(self, method: str, path: str, *_: Any, **__: Any) -> dict[str, Any]:
        assert method == "DELETE"
        name = path.rsplit("/", 1)[1]
        self.deleted.append(name)
        self.pods.pop(name)
        return {}

    @staticmethod
    def parallel(questions: dict[str, Callable[[], Any]]) -> tuple[dict[str, Any], dict[str, ApiFault]]:
        return {name: ask() for name, ask in questions.items()}, {}


def prepare(server: Server, folder: Path, check_mode: bool = False) -> dict[str, Any]:
    return dict(run_of(server, folder).prepare(check_mode))


def test_nothing_there(tmp_path: Path) -> None:
    server = Server()
    result = prepare(server, tmp_path)
    assert (result["settled"], result["exists"], result["changed"]) == (False, False, False)
    assert (tmp_path / "manifests/smoke.yaml").read_text() == "kind: Pod\n"


def test_an_earlier_proof_that_holds_settles_it(tmp_path: Path) -> None:
    server = Server(pod())
    result = prepare(server, tmp_path)
    assert (result["settled"], result["changed"], server.deleted) == (True, False, [])
    assert {c["status"] for c in result["checks"]} == {"pass"}
    assert all("not run again" in c["evidence"]["note"] for c in result["checks"][1:])
    assert (result["checks"][0]["id"], "not run again" in result["checks"][0]["found"]) == ("completed", True)
    payload = result["invocation"]["gpu_report"]
    assert [a["uuid"] for a in payload["allocations"]] == ["MIG-1"]


@pytest.mark.parametrize(
    ("server", "why"),
    [
        (Server(pod(), slices=published("MIG-other")), "the device was cut anew"),
        (Server(pod(), log="matmul_on_slice: OK"), "the log proves nothing"),
        (Server(pod(evidence=False)), "nothing was recorded"),
        (Server(pod(evidence="{damaged")), "the record is damaged"),
        (Server(pod(evidence="[]")), "the record is of another form"),
        (Server(pod(phase="Failed")), "it failed"),
        (Server(pod(phase="Running", deletionTimestamp="t")), "it is going away"),
    ],
)
def test_a_proof_that_does_not_hold_is_removed(server: Server, why: str, tmp_path: Path) -> None:
    result = prepare(server, tmp_path)
    assert (result["settled"], result["changed"], server.deleted) == (False, True, ["mine"]), why


@pytest.mark.parametrize("phase", ["Running", "Pending"])
def test_one_that_runs_is_followed_not_restarted(phase: str, tmp_path: Path) -> None:
    server = Server(pod(phase=phase, evidence=False))
    result = prepare(server, tmp_path)
    assert (result["exists"], result["changed"], server.deleted) == (True, False, [])


def test_ours_of_other_inputs_go_and_nobody_elses(tmp_path: Path) -> None:
    foreign = pod("foreign")
    foreign["metadata"]["labels"]["app.kubernetes.io/managed-by"] = "someone"
    owned = pod("owned", ownerReferences=[{"kind": "Job"}])
    server = Server(pod(), pod("former", phase="Running"), foreign, owned)
    result = prepare(server, tmp_path)
    assert server.deleted == ["former"]
    assert (result["settled"], result["changed"]) == (True, True)


@pytest.mark.parametrize(("first", "deleted"), [("Failed", ["mine", "probe"]), ("Running", [])])
def test_what_else_of_the_stage_holds_slices_goes_before_a_new_run(
    first: str, deleted: list[str], tmp_path: Path
) -> None:
    probes = {p["metadata"]["name"]: p for p in (pod("probe", "Pending"), pod("ended"))}
    probes["theirs"] = pod("theirs", "Running", labels={"app.kubernetes.io/component": "smoke"})
    server = Server(pod(phase=first, evidence=False), *probes.values())
    inner = server.find

    def find(path: str, params: Any = None) -> Any:
        if path.endswith("/namespaces/second/pods"):
            return {"items": [probes[name] for name in probes if name in server.pods]}
        return {"items": []} if path == PODS else inner(path, params)

    server.find = find  # type: ignore[method-assign]
    run = run_of(server, tmp_path, clear=[{"kind": "Pod", "namespace": "second"}])
    result = run.prepare(False)
    assert (server.deleted, result["removed"]) == (deleted, deleted)


def test_a_trainjob_is_gone_only_with_its_jobset_and_pods(tmp_path: Path) -> None:
    """And in the background: Trainer makes the JobSet anew as long as the TrainJob is there."""
    looks: list[str] = []
    bodies: list[Any] = []
    lingering = {"jobsets/former": 1, "pods": 2}

    class Trainer(Server):
        def find(self, path: str, params: dict[str, str] | None = None) -> dict[str, Any] | None:
            if path == SLICES:
                return {"items": [self.slices]}
            if path.endswith("/trainjobs"):
                return {"items": list(self.pods.values())}
            name = next((name for name in lingering if path.endswith(name)), "")
            if not name:
                return self.pods.get(path.rsplit("/", 1)[1])
            looks.append(name)
            if name == "pods":
                assert params == {"labelSelector": "jobset.sigs.k8s.io/jobset-name=former"}
            lingering[name] -= 1
            return (
                {"items": [{}] if lingering[name] >= 0 else []}
                if name == "pods" or lingering[name] >= 0
                else None
            )

        def request(self, method: str, path: str, *rest: Any, **more: Any) -> dict[str, Any]:
            bodies.append(rest[0])
            return super().request(method, path)

    server = Trainer(pod("former", labels={"app.kubernetes.io/managed-by": "gpu-slices"}))
    run_of(server, tmp_path, {"kind": "TrainJob"}).prepare(False)
    assert server.deleted == ["former"]
    assert [body["propagationPolicy"] for body in bodies] == ["Background"]
    assert (looks.count("jobsets/former"), looks.count("pods")) == (2, 3)


@pytest.mark.parametrize("labels", [None, {}, {"app.kubernetes.io/managed-by": "someone"}])
def test_nobody_elses_of_the_same_name_is_touched_or_believed(labels: Any, tmp_path: Path) -> None:
    server = Server(pod(labels=labels))
    with pytest.raises(workload_run.RunFault, match=f"Pod {NS}/mine is there and was not made by"):
        prepare(server, tmp_path)
    assert server.deleted == []


@pytest.mark.parametrize(("stage", "world"), [("smoke", 1), ("sft", 2)])
def test_a_success_without_its_pods_proves_nothing(stage: str, world: int, tmp_path: Path) -> None:
    run = run_of(None, tmp_path, {"judge": stage, "world": world})
    member = {"result": "succeeded", "pods": [], "note": "", "end": "", "kind": "Pod", "name": "mine"}
    check = run.judge_member(0, member)[-1]
    assert (check["id"], check["status"]) == ("pods", "fail")


def test_logs_and_evidence_of_earlier_runs_go_and_nothing_else(tmp_path: Path) -> None:
    for name in ("logs/smoke-gpu-slices-smoke-1.log", "logs/sft-gpu-slices-sft-1.log", "logs/mine.log"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "evidence/smoke-gpu-slices-smoke-1").mkdir(parents=True)
    run_of(None, tmp_path)._clear()
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert left == ["logs/mine.log", "logs/sft-gpu-slices-sft-1.log"]
    assert list((tmp_path / "evidence").iterdir()) == []


def test_a_part_of_a_stage_has_files_of_its_own(tmp_path: Path) -> None:
    for name in ("logs/smoke-gpu-slices-1.log", "logs/smoke-root-gpu-slices-1.log"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    run = run_of(None, tmp_path)
    run.files = "smoke-root"
    run._clear()
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["smoke-gpu-slices-1.log"]


def test_check_mode_shows_and_touches_nothing(tmp_path: Path) -> None:
    server = Server(pod(phase="Failed"), pod("former"))
    result = prepare(server, tmp_path, check_mode=True)
    assert server.deleted == []
    assert not (tmp_path / "manifests").exists()
    assert result["changed"]
    assert result["diff"]["after"] == "kind: Pod\n"


def test_the_evidence_of_a_run_is_what_a_second_run_reads(tmp_path: Path) -> None:
    server = Server(pod(evidence=False))
    patched: dict[str, Any] = {}

    def request(method: str, path: str, body: Any, **_: Any) -> dict[str, Any]:
        assert method == "PATCH"
        patched.update(body)
        return {}

    server.request = request  # type: ignore[method-assign]
    devices = [{**GIVEN, "claim": "c"}]
    ran = {"name": "mine", "node": "a30", "uid": "u", "times": {}, "waited": "", "devices": devices}
    outcome = workload_follow.Outcome("succeeded", 1.0, {}, pods=[ran])
    run_of(server, tmp_path)._annotate(0, outcome)
    text = patched["metadata"]["annotations"][workload_run.EVIDENCE]
    assert prepare(Server(pod(evidence=text)), tmp_path)["settled"]


@pytest.mark.parametrize(
    ("faults", "seconds", "expected"),
    [([500, 0, 503], 60, (4, 0)), ([403], 60, (1, 1)), ([500] * 9, -1, (1, 1))],
)
def test_a_record_that_cannot_be_written_does_not_undo_the_proof(
    faults: list[int],
    seconds: int,
    expected: tuple[int, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workload_run, "_PATCH_PAUSE", 0)
    monkeypatch.setattr(workload_run, "_PATCH_SECONDS", seconds)
    server, asks, notes, left = Server(), [], [], list(faults)

    def request(*arguments: Any, **_: Any) -> dict[str, Any]:
        asks.append(arguments)
        if left:
            raise ApiFault("refused", "failed calling webhook", left.pop(0))
        return {}

    server.request = request  # type: ignore[method-assign]
    run = run_of(server, tmp_path)
    run.say = lambda kind, text: notes.append(text)
    run._annotate(0, workload_follow.Outcome("succeeded", 1.0, {}))
    assert (len(asks), len(notes)) == expected


def test_a_pod_that_was_too_large_says_which_variable_to_raise(tmp_path: Path) -> None:
    end = "Failed: exit code 137 (OOMKilled) by the memory limit"
    trouble = {"id": "workload-failed", "found": end, "fix": "read the log"}
    outcome = workload_follow.Outcome("failed", 1.0, {}, trouble=trouble)
    member = {"result": "failed", "pods": [], "note": "", "end": end, "kind": "Pod", "name": "mine"}
    (check,) = run_of(None, tmp_path).judge_member(0, member, outcome)
    assert check["fix"] == "raise limits.memory in smoke_resources"


# --------------------------------------------------------------------------------------------------- several


def test_of_several_each_is_one_row_and_a_stage_judge_sees_them_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def judge(members: Any, arguments: Any) -> list[dict[str, Any]]:
        seen.append(([m["name"] for m in members], arguments))
        return [{"id": "all", "status": "pass", "asked": "", "found": "", "evidence": {}}]

    monkeypatch.setitem(judges.STAGE, "crowd", judge)
    run = run_of(
        Server(pod(), pod("two")),
        tmp_path,
        {"id": "one"},
        {"name": "two"},
        judge="crowd",
        judge_arguments={"n": 2},
    )
    result = run.prepare(False)
    assert result["settled"]
    assert [(c["id"], c["status"]) for c in result["checks"]] == [
        ("one", "pass"),
        ("2", "pass"),
        ("all", "pass"),
    ]
    assert seen == [(["mine", "two"], {"n": 2})]


@pytest.mark.parametrize(
    ("together", "first", "second", "deleted"),
    [
        (True, {}, {"phase": "Failed"}, ["mine", "two"]),
        (False, {}, {"phase": "Failed"}, ["two"]),
        (True, {}, {"phase": "Running"}, ["mine", "two"]),
        (False, {}, {"phase": "Running"}, []),
        (True, {"phase": "Running"}, {"phase": "Running"}, []),
    ],
)
def test_what_proves_something_only_together_runs_again_together(
    together: bool, first: dict[str, Any], second: dict[str, Any], deleted: list[str], tmp_path: Path
) -> None:
    server = Server(pod(**first), pod("two", **second))
    result = run_of(server, tmp_path, {}, {"name": "two"}, together=together).prepare(False)
    assert (server.deleted, result["settled"]) == (deleted, False)


@pytest.mark.parametrize("together", [True, False])
def test_a_stage_that_does_not_hold_runs_all_again(
    together: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = {"id": "all", "status": "fail", "asked": "", "found": "", "evidence": {}}
    monkeypatch.setitem(judges.STAGE, "crowd", lambda *_: [bad])
    server = Server(pod(), pod("two"))
    result = run_of(server, tmp_path, {}, {"name": "two"}, judge="crowd", together=together).prepare(False)
    assert (server.deleted, result["settled"], result["checks"]) == (["mine", "two"], False, [])


# ---------------------------------------------------------------------------------------------------- removal


@pytest.fixture(name="module")
def module_fixture() -> Any:
    """The module as Ansible loads it: its imports live under ansible.module_utils."""
    import gpu_slices  # noqa: PLC0415

    name = "ansible.module_utils.gpu_slices"
    before = sys.modules.get(name)
    sys.modules[name] = gpu_slices
    for part in ("kube_api", "managed"):
        sys.modules[f"{name}.{part}"] = importlib.import_module(f"gpu_slices.{part}")
    yield load("plugins/modules/managed_objects.py")
    sys.modules.pop(name)
    if before is not None:
        sys.modules[name] = before


class Cluster:
    """Objects by kind's path; what is deleted goes after ``linger`` looks."""

    def __init__(self, linger: int = 0) -> None:
        self.objects: dict[str, list[dict[str, Any]]] = {}
        self.going: dict[str, int] = {}
        self.linger = linger
        self.order: list[str] = []
        self.kueue: list[str] = []

    def add(self, plural: str, name: str, **more: Any) -> None:
        metadata = {"name": name, "namespace": NS, "uid": name, **more}
        self.objects.setdefault(plural, []).append({"metadata": metadata})

    def find(self, path: str, params: dict[str, str] | None = None) -> dict[str, Any] | None:
        if path == "/apis/kueue.x-k8s.io":
            return {"versions": [{"version": version} for version in self.kueue]} if self.kueue else None
        assert params == {"labelSelector": "app.kubernetes.io/managed-by=gpu-slices"}
        plural = path.rsplit("/", 1)[1]
        if plural == "trainingruntimes" and plural not in self.objects:
            return None
        for name in [n for n in self.going if n.startswith(plural + "/")]:
            self.going[name] -= 1
            if self.going[name] < 0:
                del self.going[name]
                left = [o for o in self.objects[plural] if f"{plural}/{o['metadata']['name']}" != name]
                self.objects[plural] = left
        return {"items": list(self.objects.get(plural, []))}

    def get(self, path: str, accept: str) -> dict[str, Any]:
        if path in ("/api", "/apis"):
            assert "APIGroupDiscoveryList" in accept
            return {
                "items": [group(n, kinds) for n, kinds in DISCOVERED.items() if bool(n) == (path == "/apis")]
            }
        assert accept.startswith("application/json;as=PartialObjectMetadataList")
        return {"items": list(self.objects.get(path.rsplit("/", 1)[1], []))}

    def request(self, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        assert method == "DELETE"
        assert body["preconditions"]["uid"]
        plural, name = path.split("/")[-2:]
        self.order.append(f"{plural}/{name}")
        self.going[f"{plural}/{name}"] = self.linger
        return {}

    parallel = staticmethod(Server.parallel)


DISCOVERED = {
    "": [("v1", "pods", "Pod"), ("v1", "secrets", "Secret"), ("v1", "configmaps", "ConfigMap")],
    "example.org": [("v2", "notebooks", "Notebook"), ("v1", "notebooks", "Notebook")],
}


def group(name: str, kinds: list[tuple[str, str, str]]) -> dict[str, Any]:
    """As the API server tells it: newest version first, each with its resources."""
    return {
        "metadata": {"name": name} if name else {},
        "versions": [
            {
                "version": version,
                "resources": [
                    {
                        "resource": plural,
                        "responseKind": {"kind": kind, "version": version},
                        "scope": "Namespaced",
                        "verbs": ["create", "delete", "list"],
                    }
                ],
            }
            for version, plural, kind in kinds
        ],
    }


def remove_all(module: Any, cluster: Cluster, timeout: int = 5, check_mode: bool = False) -> list[str]:
    return list(clear(module, cluster, timeout, check_mode)[0])


def clear(
    module: Any, cluster: Cluster, timeout: int = 5, check_mode: bool = False
) -> tuple[list[str], list[dict[str, str]]]:
    names, kept = module._clear(
        cluster, {"namespaces": [NS, f"{NS}-isolation"], "timeout": timeout}, check_mode
    )
    return names, kept


def test_workloads_go_before_what_they_use(module: Any) -> None:
    cluster = Cluster(linger=1)
    cluster.add("configmaps", "scripts")
    cluster.add("resourceclaimtemplates", "template")
    cluster.add("trainjobs", "job")
    cluster.add("pods", "smoke")
    cluster.objects["namespaces"] = [{"metadata": {"name": NS, "uid": "n"}}]
    names = remove_all(module, cluster)
    assert names[0] == f"TrainJob {NS}/job"
    assert names[-1] == f"Namespace {NS}"
    places = {name: place for place, name in enumerate(cluster.order)}
    assert places["pods/smoke"] < places["resourceclaimtemplates/template"] < places[f"namespaces/{NS}"]
    assert not any(cluster.objects.values())


@pytest.mark.parametrize(
    ("served", "version"), [(["v1beta1"], "v1beta1"), (["v1beta2", "v1beta1"], "v1beta2")]
)
def test_queues_go_before_their_flavor_by_the_version_that_is_served(
    module: Any, served: list[str], version: str
) -> None:
    paths = []

    class Watched(Cluster):
        def request(self, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
            paths.append(path)
            return super().request(method, path, body)

    cluster = Watched()
    cluster.kueue = served
    for plural in ("resourceflavors", "clusterqueues", "workloadpriorityclasses", "deviceclasses"):
        cluster.objects[plural] = [{"metadata": {"name": "x", "uid": "u"}}]
    cluster.add("localqueues", "x")
    cluster.add("trainjobs", "job")
    remove_all(module, cluster)
    order = [path.split("/")[-2] for path in paths]
    assert order[:2] == ["trainjobs", "localqueues"]
    assert order.index("clusterqueues") < order.index("resourceflavors") == len(order) - 1
    assert f"/apis/kueue.x-k8s.io/{version}/clusterqueues/x" in paths
    assert "/apis/resource.k8s.io/v1/deviceclasses/x" in paths


def test_who_may_not_list_queues_has_made_none(module: Any) -> None:
    class Narrow(Cluster):
        def find(self, path: str, params: dict[str, str] | None = None) -> dict[str, Any] | None:
            if "clusterqueues" in path or "deviceclasses" in path:
                raise ApiFault("forbidden", "no", 403)
            return super().find(path, params)

    cluster = Narrow()
    cluster.add("configmaps", "scripts")
    assert remove_all(module, cluster) == [f"ConfigMap {NS}/scripts"]


def test_what_is_owned_goes_with_its_owner_and_is_waited_for(module: Any) -> None:
    cluster = Cluster()
    cluster.add("pods", "of-a-job", ownerReferences=[{"kind": "Job"}])
    cluster.add("trainjobs", "job")
    with pytest.raises(
        module.RemovalError, match=r"Still there 0 s after their deletion: Pod gpu-slices/of-a-job"
    ):
        remove_all(module, cluster, timeout=0)
    assert cluster.order == ["trainjobs/job"]


@pytest.mark.parametrize(("labels", "goes"), [({managed.LABEL: managed.MANAGER}, True), ({}, False)])
def test_who_may_not_list_namespaces_still_removes_the_own_one(
    module: Any, labels: dict[str, str], goes: bool
) -> None:
    class Narrow(Cluster):
        """Namespaces can be read by name and not listed."""

        def find(self, path: str, params: dict[str, str] | None = None) -> dict[str, Any] | None:
            if path == "/api/v1/namespaces":
                raise ApiFault("forbidden", "no list", 403)
            if path == f"/api/v1/namespaces/{NS}-isolation":
                return None
            if path != f"/api/v1/namespaces/{NS}":
                return super().find(path, params or {})
            gone = self.going or not self.objects.get("namespaces")
            return None if gone else self.objects["namespaces"][0]

    cluster = Narrow()
    cluster.objects["namespaces"] = [{"metadata": {"name": NS, "uid": "n", "labels": labels}}]
    assert remove_all(module, cluster) == ([f"Namespace {NS}"] if goes else [])
    assert cluster.order == ([f"namespaces/{NS}"] if goes else [])


def collected(questions: dict[str, Callable[[], Any]]) -> tuple[dict[str, Any], dict[str, ApiFault]]:
    """The answers, and the faults of those that have none."""
    answers, faults = {}, {}
    for name, ask in questions.items():
        try:
            answers[name] = ask()
        except ApiFault as fault:
            faults[name] = fault
    return answers, faults


class Tight(Cluster):
    """Nothing may be listed cluster-wide but claims; namespaces can be read, with ``may`` deleted."""

    def __init__(self, may: bool, blind: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.may, self.blind = may, blind
        for name in (NS, f"{NS}-isolation"):
            labels = {managed.LABEL: managed.MANAGER}
            self.objects.setdefault(f"{name}", []).append(
                {"metadata": {"name": name, "uid": name, "labels": labels}}
            )
            for plural in ("pods", "configmaps", "cronjobs"):
                metadata = {"name": plural, "namespace": name, "uid": "u"}
                self.objects[f"{name}/{plural}"] = [{"metadata": metadata}]

    def find(self, path: str, params: dict[str, str] | None = None) -> dict[str, Any] | None:
        parts = path.split("/")
        if parts[-2] == "namespaces":
            return next(iter(self.objects.get(parts[-1], [])), None)
        if "namespaces" not in parts[:-1]:
            if parts[-1] in ("kueue.x-k8s.io", "resourceclaims"):
                return None
            raise ApiFault("forbidden", f"list of {parts[-1]} is not allowed (403).", 403)
        place, plural = parts[-2:]
        if plural in self.blind and not (plural == "configmaps" and place == NS):
            raise ApiFault("forbidden", f"list of {plural} is not allowed (403).", 403)
        return {"items": list(self.objects.get(f"{place}/{plural}", []))}

    def get(self, path: str, accept: str) -> dict[str, Any]:
        return super().get(path, accept) if path in ("/api", "/apis") else self.find(path) or {}

    def request(self, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        parts = path.split("/")
        if parts[-2] == "namespaces" and not self.may:
            raise ApiFault("forbidden", "delete is not allowed (403).", 403)
        self.order.append("/".join(parts[-3:]))
        self.objects.pop("/".join(parts[-3:-1]) if parts[-4] == "namespaces" else parts[-1])
        return {}

    parallel = staticmethod(collected)


def test_who_may_list_only_in_namespaces_clears_both_of_them(module: Any) -> None:
    cluster = Tight(may=True, blind=("persistentvolumeclaims", "trainjobs", "trainingruntimes"))
    names, kept = clear(module, cluster)
    assert kept == []
    for place in (NS, f"{NS}-isolation"):
        assert {f"Pod {place}/pods", f"CronJob {place}/cronjobs"} < set(names)
        assert f"Namespace {place}" in names
    assert cluster.objects == {}


def test_what_another_user_of_the_project_made_is_left_alone(module: Any) -> None:
    """Classes and claims can be listed by everybody; deleting another's is refused."""
    uids = {"classes": "mig.theirs", "claims": "shared"}

    class Crowded(Tight):
        def find(self, path: str, params: dict[str, str] | None = None) -> dict[str, Any] | None:
            if path.endswith("/deviceclasses"):
                return {"items": [{"metadata": {"name": "mig.theirs", "uid": uids["classes"]}}]}
            if path.endswith("/resourceclaims"):
                metadata = {"name": "shared", "namespace": "theirs", "uid": uids["claims"]}
                return {"items": [{"metadata": metadata}]}
            return super().find(path, params)

        def request(self, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
            if path.endswith(tuple(uids.values())):
                raise ApiFault("forbidden", "delete is not allowed (403).", 403)
            return super().request(method, path, body)

    names, kept = clear(module, Crowded(may=True))
    assert kept == []
    assert not any("theirs" in name for name in names)
    assert f"Namespace {NS}" in names


def test_namespaces_that_may_not_be_deleted_or_seen_stay_with_the_reason(module: Any) -> None:
    cluster = Tight(may=False, blind=("configmaps",))
    names, kept = clear(module, cluster)
    because = {item["namespace"]: item["because"] for item in kept}
    assert "may not delete it: delete is not allowed" in because[NS]
    assert "cannot be listed: list of configmaps is not allowed" in because[f"{NS}-isolation"]
    assert f"Pod {NS}-isolation/pods" in names
    assert not any(name.startswith("Namespace") for name in names)


def test_a_second_time_there_is_nothing_to_do(module: Any) -> None:
    cluster = Cluster()
    assert remove_all(module, cluster) == []
    assert cluster.order == []


def with_namespace(plural: str, name: str, **more: Any) -> Cluster:
    cluster = Cluster()
    cluster.add(plural, name, **more)
    cluster.objects["namespaces"] = [{"metadata": {"name": NS, "uid": "n"}}]
    return cluster


@pytest.mark.parametrize("check_mode", [False, True])
@pytest.mark.parametrize(
    ("plural", "name", "holder"),
    [
        ("secrets", "regcred", f"Secret {NS}/regcred"),
        ("notebooks", "mine", f"Notebook {NS}/mine"),
    ],
)
def test_a_namespace_with_somebody_elses_objects_stays(
    module: Any, plural: str, name: str, holder: str, check_mode: bool
) -> None:
    cluster = with_namespace(plural, name)
    for _ in range(2):
        names, kept = clear(module, cluster, timeout=0, check_mode=check_mode)
        assert names == []
        assert cluster.order == []
        ((namespace, because),) = [(item["namespace"], item["because"]) for item in kept]
        assert namespace == NS
        assert holder in because


@pytest.mark.parametrize(
    ("plural", "name", "more"),
    [
        ("secrets", "regcred", {"labels": {managed.LABEL: managed.MANAGER}}),
        ("secrets", "t", {"annotations": {"kubernetes.io/service-account.name": "default"}}),
        ("notebooks", "mine", {"ownerReferences": [{"kind": "Profile"}]}),
        ("notebooks", "mine", {"deletionTimestamp": "2026-12-01T00:00:00Z"}),
    ],
)
def test_what_nobody_would_miss_goes_with_the_namespace(
    module: Any, plural: str, name: str, more: dict[str, Any]
) -> None:
    cluster = with_namespace(plural, name, **more)
    assert clear(module, cluster) == ([f"Namespace {NS}"], [])
    assert cluster.order == [f"namespaces/{NS}"]


@pytest.mark.parametrize(
    ("kind", "name", "missed"),
    [
        ("ConfigMap", "kube-root-ca.crt", False),
        ("ConfigMap", "settings", True),
        ("ServiceAccount", "default", False),
        ("ServiceAccount", "robot", True),
        ("RoleBinding", "system:deployers", False),
        ("RoleBinding", "team", True),
        ("PersistentVolumeClaim", "default", True),
    ],
)
def test_what_kubernetes_makes_by_itself_is_nobodys(kind: str, name: str, missed: bool) -> None:
    item = {"metadata": {"name": name, "namespace": NS}}
    assert managed.foreign(managed.Kind("/api/v1", "x", kind), item) is missed


def test_a_namespace_that_cannot_be_looked_into_stays(module: Any) -> None:
    class Blind(Cluster):
        """Secrets may not be listed."""

        def get(self, path: str, accept: str) -> dict[str, Any]:
            if path.endswith("/secrets"):
                raise ApiFault("forbidden", "Not allowed (403).", 403)
            return super().get(path, accept)

        parallel = staticmethod(collected)

    cluster = Blind()
    cluster.objects["namespaces"] = [{"metadata": {"name": NS, "uid": "n"}}]
    names, ((stays),) = clear(module, cluster)
    assert (names, cluster.order) == ([], [])
    assert "Not allowed" in stays["because"]


def test_a_server_that_tells_no_kinds_is_not_taken_for_an_empty_namespace(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "DISCOVERED", {})
    cluster = with_namespace("secrets", "regcred")
    assert clear(module, cluster)[1][0]["namespace"] == NS
    assert cluster.order == []


def test_the_kinds_asked_about_are_those_that_can_be_put_there() -> None:
    document = {"items": [group("example.org", DISCOVERED["example.org"]), group("", DISCOVERED[""])]}
    resources = document["items"][0]["versions"][0]["resources"]
    resources += [
        {**resources[0], "resource": "metrics", "verbs": ["get", "list"]},
        {**resources[0], "resource": "classes", "scope": "Cluster"},
        {**resources[0], "resource": "events", "responseKind": {"kind": "Event"}},
    ]
    paths = [kind.path(NS) for kind in managed.holdable([document])]
    assert paths == [
        f"/apis/example.org/v2/namespaces/{NS}/notebooks",
        PODS,
        f"/api/v1/namespaces/{NS}/secrets",
        f"/api/v1/namespaces/{NS}/configmaps",
    ]
