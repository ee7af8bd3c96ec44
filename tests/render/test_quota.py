"""The manifests of the slice quota: valid for Kueue and for the server, and within what Kueue can count."""

from __future__ import annotations

import copy
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from gpu_slices import kueue

from .conftest import render
from .schemas import faults

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures/kueue"
RESOURCE = "gpu-slices.dev/mig-1g-18gb"


def cluster(**changed: Any) -> dict[str, Any]:
    """What the role has read: a Kueue that maps 1g.18gb, and two profiles published."""
    text = yaml.safe_load((FIXTURES / "config-0.17.yaml").read_text())["data"]
    return {
        "facts": {
            "kueue": {
                "served": ["v1beta2", "v1beta1"],
                "managers": [],
                "config": {"text": next(iter(text.values()))},
                **changed,
            },
            "namespace": {"found": False, "labels": {}, "terminating": False},
            "slices": {
                "devices": [{"type": "mig", "profile": p} for p in ("1g.18gb", "3g.71gb")] + [{"type": "gpu"}]
            },
        }
    }


def quota(**changed: Any) -> list[dict[str, Any]]:
    """The manifests with these variables; rendered once for each set of them."""
    return copy.deepcopy(_rendered(json.dumps(changed, sort_keys=True)))


@lru_cache(maxsize=None)
def _rendered(text: str) -> list[dict[str, Any]]:
    changed = json.loads(text)
    kueue = changed.pop("kueue", {})
    variables = {
        "__quota_cluster": cluster(**kueue),
        "__quota_choice": {"profile": "1g.18gb", "predicted": False, "reason": ""},
        **changed,
    }
    return render("quota", **variables)


VARIANTS: list[dict[str, Any]] = [
    {},
    {"kueue": {"served": ["v1beta1"]}},
    {"quota_team_a": 3, "quota_team_b": 2, "quota_hold_seconds": 1},
    {"quota_device_class": "slices.example.com", "quota_resource": "example.com/slice"},
    {"gpu_slices_tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}], "quota_resources": {}},
    {"gpu_slices_namespace_create": False, "gpu_slices_namespace": "1234"},
    {"__quota_choice": {"profile": "1g.5gb+me", "predicted": False, "reason": ""}},
]


def of_kind(manifests: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [manifest for manifest in manifests if manifest["kind"] == kind]


def pod(manifests: list[dict[str, Any]]) -> dict[str, Any]:
    job = of_kind(manifests, "TrainingRuntime")[0]["spec"]["template"]["spec"]["replicatedJobs"][0]
    return dict(job["template"]["spec"]["template"]["spec"])


@pytest.mark.parametrize("variant", VARIANTS)
class TestEveryVariant:
    def test_the_server_would_take_it(self, variant: dict[str, Any]) -> None:
        for manifest in quota(**variant):
            assert faults(manifest) == [], manifest["kind"]

    def test_all_is_ours(self, variant: dict[str, Any]) -> None:
        for manifest in quota(**variant):
            labels = manifest["metadata"]["labels"]
            assert labels["app.kubernetes.io/managed-by"] == "gpu-slices"
            if manifest["kind"] != "Namespace":
                assert labels["app.kubernetes.io/component"] == "quota"
            if "namespace" in manifest["metadata"]:
                assert manifest["metadata"]["namespace"] == variant.get("gpu_slices_namespace", "gpu-slices")
            elif manifest["kind"] == "ClusterQueue":
                namespace = variant.get("gpu_slices_namespace", "gpu-slices")
                assert manifest["metadata"]["name"].startswith(f"{namespace}-quota-team-")
            elif manifest["kind"] not in {"Namespace", "DeviceClass"}:
                assert manifest["metadata"]["name"].startswith("gpu-slices-quota")
            assert len(manifest["metadata"]["name"]) < 50

    def test_kueue_can_count_the_claim(self, variant: dict[str, Any]) -> None:
        manifests = quota(**variant)
        template = of_kind(manifests, "ResourceClaimTemplate")[0]
        devices = template["spec"]["spec"]["devices"]
        assert set(devices) == {"requests"}
        exactly = devices["requests"][0]["exactly"]
        assert set(exactly) == {"deviceClassName", "allocationMode", "count"}
        classes = [item["metadata"]["name"] for item in of_kind(manifests, "DeviceClass")]
        if not variant.get("quota_device_class"):
            assert exactly["deviceClassName"] in classes
        assert pod(manifests)["resourceClaims"] == [
            {"name": "gpu-slice", "resourceClaimTemplateName": template["metadata"]["name"]}
        ]

    def test_whatever_the_pods_ask_for_is_covered(self, variant: dict[str, Any]) -> None:
        manifests = quota(**variant)
        resources = pod(manifests)["containers"][0]["resources"]
        asked = {*resources["requests"], *resources["limits"]}
        for queue in of_kind(manifests, "ClusterQueue"):
            group = queue["spec"]["resourceGroups"][0]
            assert asked < set(group["coveredResources"])
            assert [r["name"] for r in group["flavors"][0]["resources"]] == group["coveredResources"]

    def test_the_jobs_wait_for_kueue(self, variant: dict[str, Any]) -> None:
        jobs = of_kind(quota(**variant), "TrainJob")
        assert all(job["spec"]["suspend"] is True for job in jobs)
        queues = [job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] for job in jobs]
        slices = variant.get("quota_team_a", 1) + variant.get("quota_team_b", 1)
        assert queues == ["gpu-slices-quota-team-b"] * (slices + 1) + ["gpu-slices-quota-team-a"]
        held = [job["spec"]["trainer"].get("args") for job in jobs]
        seconds = variant.get("quota_hold_seconds", 15)
        assert held == [[f"--min-seconds={seconds}"]] * slices + [None, None]


class TestSetup:
    def test_one_class_for_each_profile_with_its_selector(self) -> None:
        classes = {c["metadata"]["name"]: c["spec"] for c in of_kind(quota(), "DeviceClass")}
        assert list(classes) == ["mig-1g-18gb.nvidia.com", "mig-3g-71gb.nvidia.com"]
        expression = classes["mig-3g-71gb.nvidia.com"]["selectors"][0]["cel"]["expression"]
        assert ".profile == '3g.71gb'" in expression

    def test_a_class_of_ones_own_makes_none(self) -> None:
        manifests = quota(quota_device_class="slices.example.com", quota_resource="example.com/slice")
        assert of_kind(manifests, "DeviceClass") == []
        covered = of_kind(manifests, "ClusterQueue")[0]["spec"]["resourceGroups"][0]["coveredResources"]
        assert covered[0] == "example.com/slice"

    def test_the_name_that_kueue_counts_by_wins(self) -> None:
        manifests = quota(quota_resource="example.com/slice")
        covered = of_kind(manifests, "ClusterQueue")[0]["spec"]["resourceGroups"][0]["coveredResources"]
        assert covered[0] == RESOURCE

    def test_two_queues_of_a_cohort_of_our_own(self) -> None:
        queues = {q["metadata"]["name"]: q["spec"] for q in of_kind(quota(quota_team_a=2), "ClusterQueue")}
        assert set(queues) == {"gpu-slices-quota-team-a", "gpu-slices-quota-team-b"}
        for spec in queues.values():
            assert spec["cohortName"] == "gpu-slices-quota"
            assert spec["preemption"]["reclaimWithinCohort"] == "LowerPriority"
            assert spec["cohortName"] == kueue.cohort("gpu-slices")
            assert spec["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "gpu-slices"}
        slices = {
            name: spec["resourceGroups"][0]["flavors"][0]["resources"][0] for name, spec in queues.items()
        }
        assert slices["gpu-slices-quota-team-a"] == {
            "name": RESOURCE,
            "nominalQuota": "2",
            "borrowingLimit": "1",
        }

    def test_there_is_enough_of_the_rest(self) -> None:
        spec = of_kind(quota(), "ClusterQueue")[0]["spec"]["resourceGroups"][0]["flavors"][0]["resources"]
        assert {r["name"]: r["nominalQuota"] for r in spec[1:]} == {"cpu": "1", "memory": "4Gi"}

    def test_an_older_kueue_calls_the_cohort_otherwise(self) -> None:
        manifests = quota(kueue={"served": ["v1beta1"]})
        spec = of_kind(manifests, "ClusterQueue")[0]["spec"]
        assert (spec["cohort"], "cohortName" in spec) == ("gpu-slices-quota", False)

    def test_priorities(self) -> None:
        classes = {c["metadata"]["name"]: c["value"] for c in of_kind(quota(), "WorkloadPriorityClass")}
        assert classes["gpu-slices-quota-high"] > classes["gpu-slices-quota-low"]

    def test_a_preempted_pod_ends_soon(self) -> None:
        assert pod(quota(quota_grace=3))["terminationGracePeriodSeconds"] == 3


@pytest.mark.parametrize(
    "change",
    [
        {"quota_team_a": 2},
        {"quota_hold_seconds": 20},
        {"quota_grace": 1},
        {"gpu_slices_image": "other:2"},
        {"quota_shared_memory": "1Gi"},
        {"kueue": {"served": ["v1beta1"]}},
    ],
)
def test_another_rendering_is_another_name(change: dict[str, Any]) -> None:
    names = {job["metadata"]["name"] for job in of_kind(quota(), "TrainJob")}
    assert names.isdisjoint(job["metadata"]["name"] for job in of_kind(quota(**change), "TrainJob"))
