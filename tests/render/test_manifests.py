"""The rendered manifests: valid for the server, and as slices, Pod Security and Trainer need them."""

from __future__ import annotations

import copy
from typing import Any, Callable

import pytest

from .conftest import CLAIM, Render, render_template
from .schemas import faults

VARIANTS: list[dict[str, Any]] = [
    {},
    {"gpu_slices_image_pull_secrets": ["one", "two"], "gpu_slices_image_pull_policy": "Never"},
    {"gpu_slices_tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]},
    {"sft_nodes": 3, "sft_resources": {}, "smoke_resources": {"limits": {"cpu": "1"}}},
    {"gpu_slices_namespace": "1234", "slice_claim_result": {**CLAIM, "profile": "1g.10gb+me"}},
]


def pod_specs(manifests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for manifest in manifests:
        if manifest["kind"] == "Pod":
            found.append(manifest["spec"])
        if manifest["kind"] == "TrainingRuntime":
            jobs = manifest["spec"]["template"]["spec"]["replicatedJobs"]
            found += [job["template"]["spec"]["template"]["spec"] for job in jobs]
    return found


def kind(manifests: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(m for m in manifests if m["kind"] == name)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("role", ["smoke", "sft"])
class TestEveryVariant:
    def test_the_server_would_take_it(self, render: Render, role: str, variant: dict[str, Any]) -> None:
        for manifest in render(role, **variant):
            assert faults(manifest) == []

    def test_it_is_ours_and_in_our_namespace(
        self, render: Render, role: str, variant: dict[str, Any]
    ) -> None:
        for manifest in render(role, **variant):
            metadata = manifest["metadata"]
            assert metadata["labels"]["app.kubernetes.io/managed-by"] == "gpu-slices"
            assert metadata["labels"]["app.kubernetes.io/component"] == role
            assert metadata["namespace"] == variant.get("gpu_slices_namespace", "gpu-slices")
            assert len(metadata["name"]) < 50

    def test_pod_security_restricted(self, render: Render, role: str, variant: dict[str, Any]) -> None:
        for spec in pod_specs(render(role, **variant)):
            security = spec["securityContext"]
            assert security["runAsNonRoot"] is True
            assert security["runAsUser"] > 0
            assert security["seccompProfile"] == {"type": "RuntimeDefault"}
            assert not any(spec.get(k) for k in ("hostNetwork", "hostPID", "hostIPC"))
            assert {next(iter(set(v) - {"name"})) for v in spec["volumes"]} <= {"configMap", "emptyDir"}
            for container in [*spec["containers"], *spec.get("initContainers", [])]:
                assert container["securityContext"] == {
                    "allowPrivilegeEscalation": False,
                    "capabilities": {"drop": ["ALL"]},
                }

    def test_the_claim_is_declared_and_consumed(
        self, render: Render, role: str, variant: dict[str, Any]
    ) -> None:
        for spec in pod_specs(render(role, **variant)):
            declared = [(c["name"], c["resourceClaimTemplateName"]) for c in spec["resourceClaims"]]
            assert declared == [(CLAIM["request"], CLAIM["template"])]
            for container in spec["containers"]:
                assert container["resources"]["claims"] == [{"name": CLAIM["request"]}]
                for part in ("requests", "limits"):
                    assert not any("nvidia.com" in key for key in container["resources"][part])

    def test_what_runs_before_has_no_claim(self, render: Render, role: str, variant: dict[str, Any]) -> None:
        for spec in pod_specs(render(role, **variant)):
            for container in spec.get("initContainers", []):
                assert "claims" not in container["resources"]

    def test_every_mount_has_its_volume_and_every_script_its_file(
        self, render: Render, role: str, variant: dict[str, Any]
    ) -> None:
        manifests = render(role, **variant)
        scripts = kind(manifests, "ConfigMap")["data"]
        for spec in pod_specs(manifests):
            volumes = {v["name"] for v in spec["volumes"]}
            for container in [*spec["containers"], *spec.get("initContainers", [])]:
                assert {m["name"] for m in container["volumeMounts"]} == volumes
                script = next(a for a in container["command"] if a.startswith("/opt/gpu-slices/"))
                assert script.rsplit("/", 1)[1] in scripts
        for name, text in scripts.items():
            compile(text, name, "exec")


class TestTrainJob:
    def test_trainer_is_always_there_with_one_process_a_node(self, render: Render) -> None:
        job = kind(render("sft", sft_nodes=2), "TrainJob")
        assert job["spec"]["trainer"] == {"numNodes": 2, "numProcPerNode": 1}
        assert "resourcesPerNode" not in job["spec"]["trainer"]
        runtime = kind(render("sft", sft_nodes=2), "TrainingRuntime")
        assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]

    def test_the_runtime_keeps_the_log_of_a_failure(self, render: Render) -> None:
        runtime = kind(render("sft"), "TrainingRuntime")
        assert runtime["spec"]["mlPolicy"] == {"numNodes": 1, "torch": {}}
        (job,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
        assert job["name"] == "node"
        template = job["template"]
        assert template["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
        assert template["spec"]["backoffLimit"] == 0
        assert template["spec"]["template"]["spec"]["restartPolicy"] == "Never"
        assert [c["name"] for c in template["spec"]["template"]["spec"]["containers"]] == ["node"]

    @pytest.mark.parametrize(("nodes", "launched"), [(1, False), (2, True)])
    def test_several_nodes_are_started_by_torchrun(self, render: Render, nodes: int, launched: bool) -> None:
        (spec,) = pod_specs(render("sft", sft_nodes=nodes))
        assert ("torch.distributed.run" in spec["containers"][0]["command"]) is launched


def name_of(manifests: list[dict[str, Any]]) -> str:
    return str(next(m for m in manifests if m["kind"] in {"Pod", "TrainJob"})["metadata"]["name"])


@pytest.mark.parametrize("role", ["smoke", "sft"])
@pytest.mark.parametrize(
    "change",
    [
        lambda v: {"gpu_slices_image": "registry.example/train:2"},
        lambda v: {"slice_claim_result": {**CLAIM, "template": "other", "profile": "2g.12gb"}},
        lambda v: {f"{v}_resources": {"limits": {"cpu": "3"}}},
        lambda v: {"gpu_slices_image_pull_policy": "Never"},
    ],
)
def test_the_name_follows_what_is_rendered(
    render: Render, role: str, change: Callable[[str], dict[str, Any]]
) -> None:
    assert name_of(render(role)) == name_of(render(role))
    assert name_of(render(role)) != name_of(render(role, **change(role)))


def test_the_name_follows_the_training(render: Render) -> None:
    names = {
        name_of(render("sft", **{k: v})) for k, v in (("sft_seed", 1), ("sft_steps", 9), ("sft_nodes", 2))
    }
    assert len(names | {name_of(render("sft"))}) == 4


@pytest.mark.parametrize(
    ("break_it", "fault"),
    [
        (lambda m: m["spec"]["mlPolicy"]["torch"].update(numProcPerNode=1), "numProcPerNode"),
        (lambda m: m["spec"].update(mlPolicies={}), "mlPolicies"),
        (lambda m: m["spec"]["mlPolicy"].update(numNodes="two"), "two"),
    ],
)
def test_the_schemas_refuse_what_trainer_refuses(
    render: Render, break_it: Callable[[dict[str, Any]], Any], fault: str
) -> None:
    runtime = copy.deepcopy(kind(render("sft"), "TrainingRuntime"))
    break_it(runtime)
    assert any(fault in text for text in faults(runtime))


def test_the_schemas_refuse_a_misspelt_field_deep_in_a_pod(render: Render) -> None:
    pod = copy.deepcopy(kind(render("smoke"), "Pod"))
    pod["spec"]["containers"][0]["resources"]["claim"] = []
    assert any("'claim' was unexpected" in text for text in faults(pod))


@pytest.mark.parametrize("template", ["namespace", "resourceclaimtemplate"])
def test_namespace_and_claim_template(template: str) -> None:
    made = render_template(
        "slice_claim",
        f"{template}.yaml.j2",
        __slice_claim_choice={"profile": "1g.6gb"},
        __slice_claim_template=CLAIM["template"],
    )
    assert faults(made) == []
    assert made["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "gpu-slices"
