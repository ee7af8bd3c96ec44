"""The recipe's manifests: valid for the server, as Trainer's initializers need them, with the two hooks."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from .conftest import CLAIM, Render
from .schemas import faults

BASE: dict[str, Any] = {
    "recipe_model": "hf://org/model",
    "recipe_dataset": "file:///data/rows",
    "__recipe_volume": {"uid": "u-1", "nodes": ["h200"]},
}
VARIANTS: list[dict[str, Any]] = [
    {},
    {"gpu_slices_image_pull_secrets": ["one"], "gpu_slices_tolerations": [{"operator": "Exists"}]},
    {"recipe_hf_token_secret": "token", "recipe_hf_endpoint": "http://hub:8080"},
    {"recipe_model": "pvc://models/base", "recipe_claim": "mine", "recipe_claim_folder": "team/run"},
    {"recipe_model": "pvc://mine/base", "recipe_claim": "mine"},
    {"recipe_model_initializer_image": "ghcr.example/model-initializer:1"},
    {
        "recipe_resources": {},
        "recipe_initializer_resources": {},
        "recipe_environment": {"HTTPS_PROXY": "http://p:1"},
    },
    {"recipe_training": {"lora_rank": 16, "quantization_bit": 4}, "recipe_dataset_files": {"train": "a*"}},
    {"__recipe_volume": {"uid": "", "nodes": []}},
]


def made(render: Render, **changed: Any) -> list[dict[str, Any]]:
    return render("recipe", **{**BASE, **changed})


def jobs(manifests: list[dict[str, Any]]) -> dict[str, Any]:
    found = manifests[1]["spec"]["template"]["spec"]["replicatedJobs"]
    return {job["name"]: job for job in found}


def spec(job: dict[str, Any]) -> dict[str, Any]:
    return dict(job["template"]["spec"]["template"]["spec"])


def env(container: dict[str, Any]) -> dict[str, Any]:
    names = [entry["name"] for entry in container["env"]]
    assert len(names) == len(set(names)), "the server refuses a name twice"
    return {entry["name"]: entry.get("value") for entry in container["env"]}


@pytest.mark.parametrize("variant", VARIANTS)
class TestEveryVariant:
    def test_the_server_would_take_it(self, render: Render, variant: dict[str, Any]) -> None:
        for manifest in made(render, **variant):
            assert faults(manifest) == []
            assert manifest["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "gpu-slices"
            assert manifest["metadata"]["labels"]["app.kubernetes.io/component"] == "recipe"

    def test_pod_security_restricted(self, render: Render, variant: dict[str, Any]) -> None:
        for job in jobs(made(render, **variant)).values():
            pod = spec(job)
            assert pod["securityContext"]["runAsNonRoot"] is True
            assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            kinds = {next(iter(set(v) - {"name"})) for v in pod["volumes"]}
            assert kinds <= {"configMap", "emptyDir", "persistentVolumeClaim"}
            for container in pod["containers"] + pod.get("initContainers", []):
                assert container["securityContext"] == {
                    "allowPrivilegeEscalation": False,
                    "capabilities": {"drop": ["ALL"]},
                }

    def test_trainers_names_and_order(self, render: Render, variant: dict[str, Any]) -> None:
        found = jobs(made(render, **variant))
        assert list(found) == ["dataset-initializer", "model-initializer", "node"]
        steps = {
            n: j["template"]["metadata"]["labels"]["trainer.kubeflow.org/trainjob-ancestor-step"]
            for n, j in found.items()
        }
        assert steps == {
            "dataset-initializer": "dataset-initializer",
            "model-initializer": "model-initializer",
            "node": "trainer",
        }
        assert found["node"]["dependsOn"] == [
            {"name": "dataset-initializer", "status": "Complete"},
            {"name": "model-initializer", "status": "Complete"},
        ]
        for name, job in found.items():
            assert spec(job)["containers"][0]["name"] == name
            assert spec(job)["restartPolicy"] == "Never"

    def test_only_the_training_has_a_slice(self, render: Render, variant: dict[str, Any]) -> None:
        for name, job in jobs(made(render, **variant)).items():
            pod = spec(job)
            (container,) = pod["containers"]
            for part in ("requests", "limits"):
                assert not any("nvidia.com" in key for key in container["resources"].get(part, {}))
            if name == "node":
                assert pod["resourceClaims"] == [
                    {"name": CLAIM["request"], "resourceClaimTemplateName": CLAIM["template"]}
                ]
                assert container["resources"]["claims"] == [{"name": CLAIM["request"]}]
            else:
                assert "resourceClaims" not in pod
                assert "claims" not in container["resources"]

    def test_all_see_one_volume_as_workspace(self, render: Render, variant: dict[str, Any]) -> None:
        seen = set()
        for job in jobs(made(render, **variant)).values():
            pod = spec(job)
            claims = {
                v["name"]: v["persistentVolumeClaim"]["claimName"]
                for v in pod["volumes"]
                if "persistentVolumeClaim" in v
            }
            # A claim in two volumes of a pod, one of them read-only, is read-only in both.
            assert len(claims.values()) == len(set(claims.values()))
            volumes = {v["name"] for v in pod["volumes"]}
            for container in pod["containers"] + pod.get("initContainers", []):
                assert {m["name"] for m in container["volumeMounts"]} <= volumes
                (mount,) = (m for m in container["volumeMounts"] if m["mountPath"] == "/workspace")
                # Trainer's webhook asks for this name.
                assert mount["name"] == "initializer"
                seen.add((claims["initializer"], mount["subPath"]))
        assert len(seen) == 1

    def test_scripts_are_python_and_what_they_read_is_there(
        self, render: Render, variant: dict[str, Any]
    ) -> None:
        data = made(render, **variant)[0]["data"]
        for name, text in data.items():
            if name.endswith(".py"):
                compile(text, name, "exec")
        settings, training = json.loads(data["settings.json"]), yaml.safe_load(data["training.yaml"])
        assert settings["held_out_rows"] == 64
        assert training["stage"] == "sft"
        assert training["finetuning_type"] == "lora"
        assert training["template"] == "default"

    def test_environments_name_nothing_twice(self, render: Render, variant: dict[str, Any]) -> None:
        for name, job in jobs(made(render, **variant)).items():
            found = env(spec(job)["containers"][0])
            assert found["HF_HUB_OFFLINE"] == ("1" if name == "node" else "0")
            assert found.get("HTTPS_PROXY") == variant.get("recipe_environment", {}).get("HTTPS_PROXY")


class TestTrainJob:
    def test_initializers_and_trainer(self, render: Render) -> None:
        job = made(render)[2]
        assert job["spec"]["initializer"] == {
            "dataset": {"storageUri": "file:///data/rows"},
            "model": {"storageUri": "hf://org/model"},
        }
        assert job["spec"]["trainer"] == {"numNodes": 1, "numProcPerNode": 1}
        assert len(job["metadata"]["name"]) + len("-dataset-initializer-0-0-abcde") <= 63

    def test_a_token_is_named_only(self, render: Render) -> None:
        job = made(render, recipe_hf_token_secret="token")[2]  # noqa: S106 - the name of a Secret
        assert job["spec"]["initializer"]["model"]["secretRef"] == {"name": "token"}

    @pytest.mark.parametrize(
        "change",
        [
            {"recipe_model": "hf://org/other"},
            {"recipe_training": {"lora_rank": 4}},
            {"recipe_seed": 7},
            {"recipe_loss_factor": 0.5},
            {"recipe_image": "x/y:2"},
            {"recipe_claim_folder": "other"},
            {"recipe_template": "qwen"},
            {"__recipe_volume": {"uid": "u-2", "nodes": ["h200"]}},
        ],
    )
    def test_the_name_follows_what_is_rendered(self, render: Render, change: dict[str, Any]) -> None:
        assert made(render)[2]["metadata"]["name"] == made(render)[2]["metadata"]["name"]
        assert made(render)[2]["metadata"]["name"] != made(render, **change)[2]["metadata"]["name"]

    def test_the_name_does_not_follow_the_node(self, render: Render) -> None:
        elsewhere = made(render, __recipe_volume={"uid": "u-1", "nodes": ["a", "b"]})
        assert made(render)[2]["metadata"]["name"] == elsewhere[2]["metadata"]["name"]
        terms = spec(jobs(elsewhere)["node"])["affinity"]["nodeAffinity"][
            "requiredDuringSchedulingIgnoredDuringExecution"
        ]["nodeSelectorTerms"]
        assert [t["matchFields"][0]["values"] for t in terms] == [["a"], ["b"]]

    def test_a_claim_that_this_run_made_counts(self, render: Render) -> None:
        fresh = {"__recipe_volume": {"uid": "", "nodes": ["h200"]}}
        after = made(render, **fresh, __recipe_made={"result": {"metadata": {"uid": "u-1"}}})
        assert after[2]["metadata"]["name"] == made(render)[2]["metadata"]["name"]


class TestInitializers:
    def test_ours_and_trainers(self, render: Render) -> None:
        image = "ghcr.example/model-initializer:1"
        found = jobs(made(render, recipe_model_initializer_image=image))
        own, theirs = spec(found["dataset-initializer"]), spec(found["model-initializer"])
        assert own["containers"][0]["command"] == ["python3", "/opt/gpu-slices/initialize.py", "dataset"]
        assert "command" not in theirs["containers"][0]
        assert theirs["containers"][0]["image"] == image
        (prepare,) = theirs["initContainers"]
        assert prepare["command"][-2:] == ["model", "--only-prepare"]
        assert prepare["env"] == [{"name": "STORAGE_URI", "value": "hf://org/model"}]
        assert "initContainers" not in own

    def test_a_source_on_another_volume_is_read_only(self, render: Render) -> None:
        pod = spec(jobs(made(render, recipe_model="pvc://models/base"))["model-initializer"])
        (mount,) = (m for m in pod["containers"][0]["volumeMounts"] if m["mountPath"] == "/source/model")
        assert mount["readOnly"] is True
        (volume,) = (v for v in pod["volumes"] if v["name"] == mount["name"])
        assert volume["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}

    def test_a_source_on_the_same_volume_shares_it(self, render: Render) -> None:
        pod = spec(
            jobs(made(render, recipe_model="pvc://mine/base", recipe_claim="mine"))["model-initializer"]
        )
        (mount,) = (m for m in pod["containers"][0]["volumeMounts"] if m["mountPath"] == "/source/model")
        assert (mount["name"], mount["readOnly"], mount.get("subPath")) == ("initializer", True, None)
