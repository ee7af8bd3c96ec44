"""The callers' manifests: valid for the server, with both hooks, under Pod Security restricted."""

from __future__ import annotations

import json
from typing import Any

import pytest
from gpu_slices.callers import hook_faults, pod_spec, schema_faults

from .conftest import CLAIM, ROOT, Render
from .schemas import faults

GROUPS = {"batch": ["v1"], "batch.volcano.sh": ["v1alpha1"]}
CLUSTER = {"facts": {"apis": {"groups": GROUPS}}}
FREE = {**CLAIM, "free": 4, "predicted": False}
KINDS = ["ConfigMap", "CronJob", "Pod", "Job", "Pod", "Job", "Job"]
VARIANTS: list[dict[str, Any]] = [
    {},
    {"gpu_slices_image_pull_secrets": ["one", "two"], "gpu_slices_image_pull_policy": "Never"},
    {"gpu_slices_tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]},
    {"callers_resources": {}, "callers_volcano_queue": "gpu"},
    {"gpu_slices_namespace": "1234", "slice_claim_result": {**FREE, "profile": "1g.10gb+me"}},
]


def rendered(render: Render, **changed: Any) -> list[dict[str, Any]]:
    return render("callers", **{"__callers_cluster": CLUSTER, "slice_claim_result": FREE, **changed})


@pytest.mark.parametrize("variant", VARIANTS)
class TestEveryVariant:
    def test_the_server_would_take_it(self, render: Render, variant: dict[str, Any]) -> None:
        schema = json.loads((ROOT / "roles/callers/files/volcano-job.json").read_text())
        made = rendered(render, **variant)
        assert [m["kind"] for m in made] == KINDS
        # Its owner's uid is known only once the CronJob is there.
        made[-1]["metadata"]["ownerReferences"][0]["uid"] = "1"
        for manifest in made:
            volcano = manifest["apiVersion"].startswith("batch.volcano.sh/")
            assert (schema_faults(manifest, schema) if volcano else faults(manifest)) == []

    def test_it_is_ours_and_in_our_namespace(self, render: Render, variant: dict[str, Any]) -> None:
        for manifest in rendered(render, **variant):
            metadata = manifest["metadata"]
            assert metadata["labels"]["app.kubernetes.io/managed-by"] == "gpu-slices"
            assert metadata["labels"]["app.kubernetes.io/component"] == "callers"
            assert metadata["namespace"] == variant.get("gpu_slices_namespace", "gpu-slices")
            assert metadata["name"].startswith("gpu-slices-callers")
            assert len(metadata["name"]) < 50

    def test_both_hooks_and_pod_security_restricted(self, render: Render, variant: dict[str, Any]) -> None:
        for manifest in rendered(render, **variant)[1:]:
            spec = pod_spec(manifest)
            assert hook_faults(spec, CLAIM["template"]) == []
            assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            assert spec["automountServiceAccountToken"] is False
            assert spec["restartPolicy"] == "Never"
            assert not any(spec.get(k) for k in ("hostNetwork", "hostPID", "hostIPC", "initContainers"))
            assert {next(iter(set(v) - {"name"})) for v in spec["volumes"]} == {"configMap"}
            (container,) = spec["containers"]
            security = {**spec["securityContext"], **container["securityContext"]}
            assert security["runAsNonRoot"] is True
            assert security["runAsUser"] == 1000
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert not any("nvidia.com" in key for key in container["resources"].get("limits") or {})

    def test_site_settings_reach_every_pod(self, render: Render, variant: dict[str, Any]) -> None:
        for manifest in rendered(render, **variant)[1:]:
            spec = pod_spec(manifest)
            secrets = variant.get("gpu_slices_image_pull_secrets", [])
            assert [s["name"] for s in spec.get("imagePullSecrets", [])] == secrets
            assert spec.get("tolerations", []) == variant.get("gpu_slices_tolerations", [])
            policy = variant.get("gpu_slices_image_pull_policy", "IfNotPresent")
            assert spec["containers"][0]["imagePullPolicy"] == policy


def test_each_names_itself_in_its_last_line(render: Render) -> None:
    said = [
        next(a for a in pod_spec(m)["containers"][0]["args"] if a.startswith("--caller="))
        for m in rendered(render)[1:]
    ]
    assert said == [f"--caller={who}" for who in ("cronjob", "pod", "job", "kfp", "volcano", "cronjob")]


def test_the_indexed_job_and_the_suspended_cronjob(render: Render) -> None:
    made = rendered(render)
    job = made[3]["spec"]
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 2, 2)
    assert made[1]["spec"]["suspend"] is True
    manual = made[-1]
    assert manual["spec"] == made[1]["spec"]["jobTemplate"]["spec"]
    assert manual["metadata"]["annotations"] == {"cronjob.kubernetes.io/instantiate": "manual"}
    assert manual["metadata"]["ownerReferences"][0]["name"] == made[1]["metadata"]["name"]


def test_without_volcano_its_job_is_not_among_them(render: Render) -> None:
    made = rendered(render, __callers_cluster={"facts": {"apis": {"groups": {"batch": ["v1"]}}}})
    assert not any(m["apiVersion"].startswith("batch.volcano") for m in made)


def test_the_scripts_compile_and_change_every_name(render: Render) -> None:
    made = rendered(render)
    assert set(made[0]["data"]) == {"slice_device.py", "caller.py"}
    for name, text in made[0]["data"].items():
        compile(text, name, "exec")
    other = rendered(render, gpu_slices_image="registry.example/train:2")
    for one, two in zip(made[1:], other[1:]):
        assert (one["metadata"]["name"] != two["metadata"]["name"]) or one["kind"] == "CronJob"
