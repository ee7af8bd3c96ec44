"""Trimming API objects, and reading a cluster through a made-up API."""

from __future__ import annotations

import base64
import gzip
import json
import os

import pytest
from gpu_slices import cluster
from gpu_slices.kube_api import ApiFault


def daemonset(name="x-kubelet-plugin", labels=None, containers=("gpus",), image="r/x:1", **pod):
    return {
        "metadata": {"name": name, "namespace": "ns", "generation": 2, "labels": labels or {}},
        "spec": {
            "selector": {"matchLabels": {"a": "b"}},
            "template": {
                "spec": {"containers": [{"name": c, "image": image} for c in containers], **pod},
            },
        },
        "status": {"desiredNumberScheduled": 2, "numberReady": 1, "observedGeneration": 2},
    }


@pytest.mark.parametrize(
    ("item", "role"),
    [
        (daemonset(labels={"dra-driver-nvidia-gpu-component": "kubelet-plugin"}), "dra"),
        (
            daemonset(
                "nvidia-dra-driver-gpu-kubelet-plugin", {"nvidia-dra-driver-gpu-component": "kubelet-plugin"}
            ),
            "dra",
        ),
        (
            daemonset("own-name", image="registry.k8s.io/dra-driver-nvidia/dra-driver-nvidia-gpu:v0.4.1"),
            "dra",
        ),
        (
            daemonset(
                labels={"dra-driver-nvidia-gpu-component": "kubelet-plugin"}, containers=("compute-domains",)
            ),
            "dra",
        ),
        (
            daemonset("nvidia-device-plugin-daemonset", containers=("p",), image="nvcr.io/k8s-device-plugin"),
            "device_plugin",
        ),
        (
            daemonset("hami-device-plugin", containers=("device-plugin",), image="projecthami/hami"),
            "device_plugin",
        ),
        (daemonset("nvidia-mig-manager", containers=("m",)), "mig_manager"),
        (daemonset("kube-proxy", containers=("kube-proxy",)), ""),
        (daemonset("intel-gpu", containers=("gpus",), image="intel/x"), ""),
    ],
)
def test_a_daemonset_is_known_by_label_and_container_not_by_name(item, role):
    assert cluster.trim_daemonset(item)["role"] == role


def test_selectors_and_counts_of_a_daemonset_are_kept():
    term = {"matchExpressions": [{"key": "k", "operator": "Exists"}]}
    affinity = {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
    }
    trimmed = cluster.trim_daemonset(daemonset(nodeSelector={"pool": "gpu"}, affinity=affinity))
    assert trimmed["node_selector"] == {"pool": "gpu"}
    assert trimmed["affinity_terms"] == [[{"key": "k", "operator": "Exists"}]]
    assert (trimmed["desired"], trimmed["ready"], trimmed["generation"]) == (2, 1, 2)


def test_the_gates_come_from_the_container_that_serves_gpus():
    item = daemonset(containers=("compute-domains", "gpus"))
    for container, gates in zip(item["spec"]["template"]["spec"]["containers"], ("A=true,", "B=true,")):
        container["env"] = [{"name": "X", "value": "y"}, {"name": "FEATURE_GATES", "value": gates}]
    assert cluster.trim_daemonset(item)["feature_gates"] == "B=true,"
    assert cluster.trim_daemonset(daemonset())["feature_gates"] == ""
    assert cluster.trim_daemonset(daemonset())["rolling"] is True
    item["spec"]["updateStrategy"] = {"type": "OnDelete"}
    assert cluster.trim_daemonset(item)["rolling"] is False


def test_a_bare_daemonset_is_no_trouble():
    bare = {"metadata": {"name": "d", "namespace": "n"}, "spec": {}}
    assert cluster.trim_daemonset(bare)["affinity_terms"] == []


def test_a_node_keeps_only_what_matters():
    node = {
        "metadata": {"name": "a", "labels": {"x": "y"}, "annotations": {cluster.LABELS_ANNOTATION: "{}"}},
        "spec": {"taints": [{"key": "k", "effect": "NoSchedule"}]},
        "status": {
            "conditions": [{"type": "Ready", "status": "False", "message": "no CNI"}],
            "nodeInfo": {"kubeletVersion": "v1.36.3", "containerRuntimeVersion": "containerd://2.3.7"},
            "allocatable": {"cpu": "2", "nvidia.com/gpu": "1"},
            "images": [{"names": ["big"]}],
        },
    }
    trimmed = cluster.trim_node(node)
    assert trimmed["not_ready_reason"] == "no CNI"
    assert trimmed["allocatable"] == {"nvidia.com/gpu": "1"}
    assert "images" not in trimmed
    assert cluster.trim_node({"metadata": {"name": "b"}})["ready"] is False


def crd(properties, *, version="v1alpha1", established="True"):
    schema = {"openAPIV3Schema": {"properties": {"spec": {"properties": properties}}}}
    return {
        "spec": {"versions": [{"name": version, "served": True, "schema": schema}]},
        "status": {"conditions": [{"type": "Established", "status": established}]},
    }


def test_trainer_releases_are_told_apart_by_their_schema():
    def runtime(**torch):
        return crd({"mlPolicy": {"properties": {"torch": {"properties": torch}}}})

    old_job = crd(
        {
            "podTemplateOverrides": {},
            "trainer": {"properties": {"numProcPerNode": {"x-kubernetes-int-or-string": True}}},
        }
    )
    new_job = crd(
        {
            "runtimePatches": {},
            "trainer": {"properties": {"numProcPerNode": {"type": "integer"}}},
        }
    )
    old = cluster.trainer_features({"trainjobs": old_job, "trainingruntimes": runtime(numProcPerNode={})})
    new = cluster.trainer_features({"trainjobs": new_job, "trainingruntimes": runtime()})
    assert old["features"]["torch_num_proc_per_node"]
    assert old["features"]["job_num_proc_per_node"] == "int_or_string"
    assert old["features"]["pod_overrides"] == "podTemplateOverrides"
    assert new["features"] == {
        "torch_num_proc_per_node": False,
        "job_num_proc_per_node": "integer",
        "pod_overrides": "runtimePatches",
        "ml_policy_torch": True,
    }
    assert not new["jobsets"]["found"]
    assert new["trainjobs"] == {"found": True, "versions": ["v1alpha1"], "established": True}


def helm_secret(revision, status, values, version="0.4.1"):
    release = {
        "name": "x",
        "version": revision,
        "info": {"status": status},
        "chart": {"metadata": {"name": "dra-driver-nvidia-gpu", "version": version}},
        "config": values,
    }
    packed = base64.b64encode(gzip.compress(json.dumps(release).encode()))
    return {
        "metadata": {"labels": {"version": str(revision), "status": status}},
        "data": {"release": base64.b64encode(packed).decode()},
    }


def test_the_newest_helm_revision_is_read():
    found = cluster.latest_release(
        [
            helm_secret(2, "superseded", {"a": 1}),
            helm_secret(10, "deployed", {"a": 2}),
            helm_secret(9, "superseded", {"a": 3}),
        ]
    )
    assert found["revision"] == 10
    assert found["status"] == "deployed"
    assert found["values"] == cluster.digest({"a": 2})
    assert found["version"] == "0.4.1"


def test_a_missing_or_damaged_helm_release_is_no_traceback():
    assert cluster.latest_release([])["found"] is False
    damaged = {"metadata": {"labels": {"version": "1"}}, "data": {"release": "!!"}}
    assert cluster.latest_release([damaged])["status"] == "unreadable"


class FakeApi:
    """Answers from a dict of paths; a fault in it is raised."""

    def __init__(self, answers):
        self.answers = answers
        self.server = "https://10.0.0.1:6443"
        self.asked = []

    def get(self, path, params=None, accept=""):
        self.asked.append(path)
        answer = self.answers.get(path)
        if isinstance(answer, Exception):
            raise answer
        if answer is None:
            raise ApiFault("not_found", f"GET {path} failed (404)", 404)
        return answer

    def find(self, path, params=None):
        try:
            return self.get(path)
        except ApiFault as fault:
            if fault.kind == "not_found":
                return None
            raise

    def request(self, method, path, body=None, **_):
        self.asked.append((method, path, body["spec"]["resourceAttributes"]))
        allowed = self.answers[path](body["spec"]["resourceAttributes"])
        return {"status": {"allowed": allowed}}

    def parallel(self, questions):
        answers, faults = {}, {}
        for name, question in questions.items():
            try:
                answers[name] = question()
            except ApiFault as fault:
                faults[name] = fault
        return answers, faults


def test_a_refused_question_is_explained_and_the_others_are_answered():
    api = FakeApi({"/api/v1/nodes": ApiFault("forbidden", "no", 403), "/version": {"gitVersion": "v1.36.3"}})
    facts = cluster.read(api, ["nodes", "version"])
    assert facts["version"]["git"] == "v1.36.3"
    assert facts["errors"] == {"nodes": {"kind": "forbidden", "message": "no"}}


@pytest.mark.parametrize("kind", ["unreachable", "tls", "unauthorized"])
def test_a_cluster_that_does_not_talk_to_us_is_a_fault(kind):
    api = FakeApi({"/api/v1/nodes": ApiFault(kind, "no"), "/version": {"gitVersion": "v1.36.3"}})
    with pytest.raises(ApiFault):
        cluster.read(api, ["nodes", "version"])


def test_v1_resources_are_asked_for_only_where_v1_is_served():
    groups = {"groups": [{"name": "resource.k8s.io", "versions": [{"version": "v1beta2"}]}]}
    api = FakeApi({"/apis": groups})
    apis = cluster.read(api, ["apis"])["apis"]
    assert apis == {"groups": {"resource.k8s.io": ["v1beta2"]}, "dra_v1_resources": []}
    assert api.asked == ["/apis"]


REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
RIGHTS = [
    {"verb": "get", "group": "", "resource": "pods/log", "namespace": "n"},
    {"verb": "patch", "group": "", "resource": "nodes", "namespace": ""},
]


def test_an_administrator_is_asked_one_question():
    api = FakeApi({REVIEWS: lambda attributes: True})
    answer = cluster.read(api, ["access"], {"rights": RIGHTS})["access"]
    assert [right["allowed"] for right in answer] == [True, True]
    assert len(api.asked) == 1


def test_others_are_asked_for_each_right_and_subresources_are_split():
    api = FakeApi({REVIEWS: lambda attributes: attributes.get("subresource") == "log"})
    answer = cluster.read(api, ["access"], {"rights": RIGHTS})["access"]
    assert [right["allowed"] for right in answer] == [True, False]
    assert answer[0]["resource"] == "pods/log"


@pytest.mark.parametrize(("present", "expected"), [(True, ["ns"]), (False, [])])
def test_rights_are_asked_for_where_the_driver_really_is(present, expected):
    item = daemonset(labels={"dra-driver-nvidia-gpu-component": "kubelet-plugin"})
    api = FakeApi(
        {
            REVIEWS: lambda attributes: attributes["verb"] != "*",
            "/apis/apps/v1/daemonsets": {"items": [item] if present else []},
        }
    )
    rights = [{"verb": "delete", "group": "", "resource": "pods", "namespace": cluster.PLUGIN_NAMESPACE}]
    answer = cluster.read(api, ["access"], {"rights": rights})["access"]
    assert [right["namespace"] for right in answer] == expected


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster.tempfile, "gettempdir", lambda: str(tmp_path))
    path = tmp_path / f"k8srcp-{cluster._cache_id('https://10.0.0.1:6443')}.json"
    cached = {"resources": {"apis": {"batch": {"v1": {}}, "trainer.kubeflow.org": {"v1alpha1": {}}}}}
    path.write_text(json.dumps(cached))
    return path


GROUPS = {"batch": ["v1"], "trainer.kubeflow.org": ["v1alpha1"]}
BORN = {"/api/v1/namespaces/kube-system": {"metadata": {"creationTimestamp": "2026-01-01T00:00:00Z"}}}


def test_a_discovery_cache_that_is_right_stays(cache):
    assert cluster.drop_stale_discovery(FakeApi(BORN), GROUPS) == ""
    assert cache.exists()


def test_a_discovery_cache_with_an_api_that_went_away_is_dropped(cache):
    assert cluster.drop_stale_discovery(FakeApi(BORN), {"batch": ["v1"]}) == str(cache)
    assert not cache.exists()


def test_a_discovery_cache_older_than_the_cluster_is_dropped(cache):
    os.utime(cache, (1.0, 1.0))
    assert cluster.drop_stale_discovery(FakeApi(BORN), GROUPS) == str(cache)
    assert cluster.drop_stale_discovery(FakeApi(BORN), GROUPS) == ""
