"""The manifests of the crowd and of the isolation pods: valid, small, and no more rights than each needs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ansible.template import trust_as_template

from .conftest import _templar
from .schemas import faults

DEVICES = [{"pool": "a30", "device": f"gpu-0-mig-{n}", "node": "a30", "uuid": f"MIG-{n}"} for n in range(4)]
PLAN: dict[str, Any] = {
    "profile": "1g.6gb",
    "count": 4,
    "card": "",
    "devices": DEVICES,
    "isolation": {"card": "GPU-1", "node": "a30", "free": 4, "reason": ""},
}
NAMES = ("__crowd_name", "__crowd_isolation_name")
VARIANTS: list[dict[str, Any]] = [
    {},
    {"gpu_slices_image_pull_secrets": ["one", "two"], "gpu_slices_image_pull_policy": "Never"},
    {"gpu_slices_tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]},
    {"crowd_resources": {}, "crowd_isolation_seconds": 7.5, "crowd_seconds": 3},
    {"gpu_slices_namespace": "1234", "__crowd_plan": {**PLAN, "profile": "1g.10gb+me", "card": "GPU-2"}},
]


def rendered(name: str, **changed: Any) -> Any:
    """A variable of the role, made plain. The role keeps the two names as facts."""
    names = {name: trust_as_template(f"{{{{ {name}_rendered }}}}") for name in NAMES}
    templar = _templar("crowd", **{"__crowd_plan": PLAN, **names, **changed})
    return json.loads(json.dumps(templar.template(trust_as_template(f"{{{{ {name} }}}}"))))


def everything(**changed: Any) -> list[dict[str, Any]]:
    names = ("__crowd_manifests", "__crowd_isolation_manifests", "__crowd_root_manifests")
    return [manifest for name in names for manifest in rendered(name, **changed)]


def kind(manifests: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [manifest for manifest in manifests if manifest["kind"] == name]


@pytest.mark.parametrize("variant", VARIANTS)
class TestEveryVariant:
    def test_the_server_would_take_it(self, variant: dict[str, Any]) -> None:
        for manifest in everything(**variant):
            assert faults(manifest) == []

    def test_it_is_ours(self, variant: dict[str, Any]) -> None:
        own = variant.get("gpu_slices_namespace", "gpu-slices")
        for manifest in everything(**variant):
            metadata = manifest["metadata"]
            assert metadata["labels"]["app.kubernetes.io/managed-by"] == "gpu-slices"
            assert metadata["labels"]["app.kubernetes.io/component"] == "crowd"
            assert metadata["namespace"] in (own, f"{own}-isolation")
            assert len(metadata["name"]) < 50

    def test_one_pod_alone_is_root_and_in_a_namespace_of_its_own(self, variant: dict[str, Any]) -> None:
        own = variant.get("gpu_slices_namespace", "gpu-slices")
        pods = kind(everything(**variant), "Pod")
        assert len(pods) == 4
        for pod in pods:
            spec, (container,) = pod["spec"], pod["spec"]["containers"]
            assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            assert not any(spec.get(k) for k in ("hostNetwork", "hostPID", "hostIPC", "initContainers"))
            assert {next(iter(set(v) - {"name"})) for v in spec["volumes"]} == {"configMap", "emptyDir"}
            if pod["metadata"]["namespace"] == own:
                assert spec["securityContext"]["runAsNonRoot"] is True
                assert container["securityContext"] == {
                    "allowPrivilegeEscalation": False,
                    "capabilities": {"drop": ["ALL"]},
                }
            else:
                assert pod["metadata"]["name"].endswith("-root")
                assert spec["securityContext"]["runAsUser"] == 0
                assert container["securityContext"] == {"capabilities": {"add": ["MKNOD"]}}

    def test_all_but_one_claim_a_slice_by_a_template_that_is_there(self, variant: dict[str, Any]) -> None:
        manifests = everything(**variant)
        templates = {
            (m["metadata"]["namespace"], m["metadata"]["name"])
            for m in kind(manifests, "ResourceClaimTemplate")
        }
        without = []
        for pod in kind(manifests, "Pod"):
            spec, (container,) = pod["spec"], pod["spec"]["containers"]
            claims = [c["resourceClaimTemplateName"] for c in spec.get("resourceClaims", [])]
            if not claims:
                without.append(pod["metadata"]["name"])
                assert "claims" not in container["resources"]
                (term,) = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
                    "nodeSelectorTerms"
                ]
                assert term["matchFields"] == [{"key": "metadata.name", "operator": "In", "values": ["a30"]}]
                continue
            assert container["resources"]["claims"] == [{"name": "gpu-slice"}]
            assert (pod["metadata"]["namespace"], claims[0]) in templates
        assert [name.endswith("-no-claim") for name in without] == [True]

    def test_every_script_is_there_and_whole(self, variant: dict[str, Any]) -> None:
        for manifest in kind(everything(**variant), "ConfigMap"):
            for name, text in manifest["data"].items():
                compile(text, name, "exec")
        for pod in kind(everything(**variant), "Pod"):
            command = pod["spec"]["containers"][0]["command"]
            assert command[:2] == ["python3", "/opt/gpu-slices/isolation.py"]


def test_one_job_more_than_slices_are_free() -> None:
    manifests = rendered("__crowd_manifests")
    jobs = [job["metadata"]["name"] for job in kind(manifests, "TrainJob")]
    assert len(set(jobs)) == len(jobs) == 5
    assert [item["name"] for item in rendered("__crowd_workloads")] == jobs
    (template,), (runtime,) = kind(manifests, "ResourceClaimTemplate"), kind(manifests, "TrainingRuntime")
    (job,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]["template"]["spec"]
    assert spec["resourceClaims"] == [
        {"name": "gpu-slice", "resourceClaimTemplateName": template["metadata"]["name"]}
    ]
    assert (
        "--min-seconds=8"
        in rendered("__crowd_manifests", gpu_slices_silicon="emulated")[2]["spec"]["template"]["spec"][
            "replicatedJobs"
        ][0]["template"]["spec"]["template"]["spec"]["containers"][0]["command"]
    )


def selectors(manifests: list[dict[str, Any]]) -> list[str]:
    (template,) = kind(manifests, "ResourceClaimTemplate")
    (request,) = template["spec"]["spec"]["devices"]["requests"]
    return [selector["cel"]["expression"] for selector in request["exactly"]["selectors"]]


def test_only_where_there_are_too_many_slices_the_claim_is_bound_to_a_card() -> None:
    assert len(selectors(rendered("__crowd_manifests"))) == 1
    bound = selectors(rendered("__crowd_manifests", __crowd_plan={**PLAN, "card": "GPU-2"}))
    assert bound[1] == (
        '"parentUUID" in device.attributes["gpu.nvidia.com"] && '
        'device.attributes["gpu.nvidia.com"].parentUUID == "GPU-2"'
    )
    # Neighbours are neighbours on one card in any case.
    assert '"GPU-1"' in selectors(rendered("__crowd_isolation_manifests"))[1]


@pytest.mark.parametrize(
    "change",
    [
        {"gpu_slices_image": "registry.example/train:2"},
        {"__crowd_plan": {**PLAN, "count": 3}},
        {"__crowd_plan": {**PLAN, "card": "GPU-2"}},
        {"__crowd_plan": {**PLAN, "profile": "2g.12gb"}},
        {"crowd_seconds": 9},
        {"crowd_resources": {"limits": {"cpu": "3"}}},
    ],
)
def test_the_names_follow_what_is_rendered(change: dict[str, Any]) -> None:
    assert rendered("__crowd_name") == rendered("__crowd_name")
    assert rendered("__crowd_name") != rendered("__crowd_name", **change)


@pytest.mark.parametrize(
    "change",
    [
        {"gpu_slices_image": "registry.example/train:2"},
        {"crowd_isolation_seconds": 9},
        {"__crowd_plan": {**PLAN, "isolation": {**PLAN["isolation"], "card": "GPU-2"}}},
        {"__crowd_plan": {**PLAN, "isolation": {**PLAN["isolation"], "node": "h200"}}},
    ],
)
def test_the_names_of_the_isolation_pods_too(change: dict[str, Any]) -> None:
    assert rendered("__crowd_isolation_name") != rendered("__crowd_isolation_name", **change)


def test_what_another_slice_holds_does_not_change_the_isolation_pods() -> None:
    assert rendered("__crowd_isolation_name") == rendered(
        "__crowd_isolation_name", __crowd_plan={**PLAN, "count": 3}
    )


def test_the_second_namespace_is_ours_and_laxer() -> None:
    made = rendered("__crowd_root_namespace_draft")
    assert faults(made) == []
    assert made["metadata"]["name"] == "gpu-slices-isolation"
    assert made["metadata"]["labels"] == {
        "app.kubernetes.io/managed-by": "gpu-slices",
        "pod-security.kubernetes.io/enforce": "baseline",
    }
