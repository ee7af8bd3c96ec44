"""What is done with workloads that are there already, and how everything of ours is removed."""

from __future__ import annotations

import copy
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any, Callable

import pytest
from gpu_slices import managed, workload_follow
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


action = load("plugins/action/workload_follow.py")


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
    annotations = {action.EVIDENCE: json.dumps(found) if evidence is True else evidence} if evidence else {}
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
    work = action._Work(
        {
            "stage": "smoke",
            "kind": "Pod",
            "name": "mine",
            "namespace": NS,
            "container": "smoke",
            "profile": "1g.6gb",
            "manifests": [{"kind": "Pod"}],
            "require_cuda": False,
            "world": 1,
        },
        folder,
    )
    work.api = server
    return dict(work.prepare(check_mode))


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


@pytest.mark.parametrize(("stage", "world"), [("smoke", 1), ("sft", 2)])
def test_a_success_without_its_pods_proves_nothing(stage: str, world: int, tmp_path: Path) -> None:
    arguments = {"stage": stage, "kind": "Pod", "name": "mine", "namespace": NS, "container": "c"}
    work = action._Work({**arguments, "profile": "", "require_cuda": False, "world": world}, tmp_path)
    (check,) = work._judge([])
    assert (check["id"], check["status"]) == ("pods", "fail")


def test_logs_and_evidence_of_earlier_runs_go_and_nothing_else(tmp_path: Path) -> None:
    for name in ("logs/smoke-gpu-slices-smoke-1.log", "logs/sft-gpu-slices-sft-1.log", "logs/mine.log"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "evidence/smoke-gpu-slices-smoke-1").mkdir(parents=True)
    arguments = {
        "stage": "smoke",
        "kind": "Pod",
        "name": "n",
        "namespace": NS,
        "container": "c",
        "profile": "",
    }
    action._Work(arguments, tmp_path)._clear()
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert left == ["logs/mine.log", "logs/sft-gpu-slices-sft-1.log"]
    assert list((tmp_path / "evidence").iterdir()) == []


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
    work = action._Work(
        {
            "stage": "smoke",
            "kind": "Pod",
            "name": "mine",
            "namespace": NS,
            "container": "smoke",
            "profile": "",
        },
        tmp_path,
    )
    work.api = server
    devices = [{**GIVEN, "claim": "c"}]
    outcome = workload_follow.Outcome(
        "succeeded", 1.0, {}, pods=[{"name": "mine", "node": "a30", "devices": devices}]
    )
    work._annotate(outcome)
    text = patched["metadata"]["annotations"][action.EVIDENCE]
    assert prepare(Server(pod(evidence=text)), tmp_path)["settled"]


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

    def add(self, plural: str, name: str, **more: Any) -> None:
        metadata = {"name": name, "namespace": NS, "uid": name, **more}
        self.objects.setdefault(plural, []).append({"metadata": metadata})

    def find(self, path: str, params: dict[str, str]) -> dict[str, Any] | None:
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

    def request(self, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        assert method == "DELETE"
        assert body["preconditions"]["uid"]
        plural, name = path.split("/")[-2:]
        self.order.append(f"{plural}/{name}")
        self.going[f"{plural}/{name}"] = self.linger
        return {}

    parallel = staticmethod(Server.parallel)


def remove_all(module: Any, cluster: Cluster, timeout: int = 5) -> list[str]:
    params = {"namespace": NS, "timeout": timeout}
    found = [module._list(cluster, step, NS) for step in managed.STEPS]
    for step, items in zip(managed.STEPS, found):
        module._remove(cluster, step, items, params)
    return [managed.describe(kind, item) for step in found for kind, item in step]


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
            if path != f"/api/v1/namespaces/{NS}":
                return super().find(path, params or {})
            gone = self.going or not self.objects.get("namespaces")
            return None if gone else self.objects["namespaces"][0]

    cluster = Narrow()
    cluster.objects["namespaces"] = [{"metadata": {"name": NS, "uid": "n", "labels": labels}}]
    assert remove_all(module, cluster) == ([f"Namespace {NS}"] if goes else [])
    assert cluster.order == ([f"namespaces/{NS}"] if goes else [])


def test_a_second_time_there_is_nothing_to_do(module: Any) -> None:
    cluster = Cluster()
    assert remove_all(module, cluster) == []
    assert cluster.order == []
