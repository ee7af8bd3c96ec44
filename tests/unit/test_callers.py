"""The other callers: a KFP executor's pod, the Job of a CronJob, what runs, what is judged."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from gpu_slices import callers
from gpu_slices.callers import CallerError

FILES = Path(__file__).resolve().parents[2] / "roles/callers/files"
TEMPLATE = "mig-1g-6gb"
ARGUMENTS: dict[str, Any] = {
    "image": "registry.example/train:1",
    "profile": "1g.6gb",
    "claim": {"resourceClaimTemplateName": TEMPLATE},
    "scripts": "gpu-slices-callers",
    "hold": 8,
    "tolerations": [],
}
CLAIM = {"profile": "1g.6gb", "template": TEMPLATE, "free": 9, "predicted": False}
SCHEMA = json.loads((FILES / "volcano-job.json").read_text())
SCRIPTS = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "gpu-slices-callers"}, "data": {}}


def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FILES / "pipeline.yaml").read_text()))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"callers_enabled": []}, "callers_enabled is empty"),
        ({"callers_hold": -1}, "callers_hold is -1"),
        ({"callers_hold": "400"}, "less than half of callers_timeout (300)"),
        ({"callers_hold": 8, "callers_timeout": 16}, "less than half of callers_timeout (16)"),
        ({"callers_volcano_queue": "My queue"}, "callers_volcano_queue is 'My queue'"),
        ({"callers_resources": {"limits": {"nvidia.com/gpu": 1}}}, "holds limits.nvidia.com/gpu"),
        ({"callers_resources": {"claims": [{"name": "x"}]}}, "holds claims"),
        ({"callers_resources": {"requests": {"cpu": "x1"}}}, "callers_resources.requests.cpu: 'x1' is not"),
        ({"callers_enabled": " ,"}, "callers_enabled is empty"),
    ],
)
def test_gate_1_refuses(given: dict[str, Any], says: str) -> None:
    (fault,) = callers.faults(given)
    assert says in fault


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"callers_enabled": ["kfp"], "callers_hold": 0, "callers_volcano_queue": "team-a.gpu"},
        {"callers_resources": {"limits": {"cpu": "1", "ephemeral-storage": "1Gi"}}},
        {"callers_resources": {}, "callers_hold": "abc"},
        {"callers_resources": ["cpu"], "callers_enabled": "pod,job"},
        {"callers_resources": {"requests": "cpu"}},
    ],
)
def test_gate_1_takes(given: dict[str, Any]) -> None:
    assert callers.faults(given) == []


def platform(read: list[dict[str, Any]]) -> dict[str, Any]:
    return dict_of(read[1]["platforms"]["kubernetes"]["deploymentSpec"]["executors"], "exec-prove")


def executor(read: list[dict[str, Any]]) -> dict[str, Any]:
    return dict_of(read[0]["deploymentSpec"]["executors"], "exec-prove")["container"]


def dict_of(parent: dict[str, Any], key: str) -> dict[str, Any]:
    found: dict[str, Any] = parent[key]
    return found


class TestExecutorPod:
    def test_it_has_both_hooks_named_as_kfp_names_them(self) -> None:
        spec = callers.executor_pod(documents(), ARGUMENTS)
        assert spec["resourceClaims"] == [{"name": TEMPLATE, "resourceClaimTemplateName": TEMPLATE}]
        (container,) = spec["containers"]
        assert container["resources"]["claims"] == [{"name": TEMPLATE}]
        assert callers.hook_faults(spec, TEMPLATE) == []

    def test_the_container_is_the_component_with_its_inputs(self) -> None:
        (container,) = callers.executor_pod(documents(), ARGUMENTS)["containers"]
        assert container["name"] == "main"
        assert container["image"] == "registry.example/train:1"
        assert container["command"] == ["python3", "/opt/gpu-slices/caller.py"]
        assert container["args"] == ["--caller=kfp", "--profile", "1g.6gb", "--hold", "8"]
        assert container["env"] == [{"name": "PYTHONUNBUFFERED", "value": "1"}]
        assert container["resources"]["limits"] == {"cpu": "1", "memory": "1Gi"}
        assert container["resources"]["requests"] == {"cpu": "100m", "memory": "128Mi"}

    def test_the_platform_settings_become_the_pods(self) -> None:
        toleration = {"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}
        spec = callers.executor_pod(documents(), {**ARGUMENTS, "tolerations": [toleration]})
        (container,) = spec["containers"]
        assert spec["tolerations"] == [toleration]
        volume = {
            "name": "gpu-slices-callers",
            "configMap": {"name": "gpu-slices-callers", "optional": False},
        }
        assert spec["volumes"] == [volume]
        assert container["volumeMounts"] == [{"name": "gpu-slices-callers", "mountPath": "/opt/gpu-slices"}]
        assert container["imagePullPolicy"] == "IfNotPresent"
        # Strings in the compiled file: they are 64-bit numbers there.
        assert container["securityContext"]["runAsUser"] == 1000
        assert container["securityContext"]["runAsNonRoot"] is True

    def test_a_claim_that_the_compiler_knew_and_several_claims(self) -> None:
        read = documents()
        platform(read)["podResourceClaims"] = [{"resourceClaimTemplateName": "fixed"}]
        assert callers.hook_faults(callers.executor_pod(read, ARGUMENTS), "fixed") == []
        read = documents()
        read[0]["root"]["inputDefinitions"]["parameters"]["claim"]["parameterType"] = "LIST"
        two = [{"resourceClaimTemplateName": name} for name in ("one", "two")]
        spec = callers.executor_pod(read, {**ARGUMENTS, "claim": two})
        assert [c["name"] for c in spec["containers"][0]["resources"]["claims"]] == ["one", "two"]

    def test_constants_and_defaults(self) -> None:
        read = documents()
        read[0]["root"]["inputDefinitions"]["parameters"]["profile"]["defaultValue"] = "2g.12gb"
        given = {k: v for k, v in ARGUMENTS.items() if k != "profile"}
        assert callers.executor_pod(read, given)["containers"][0]["args"][2] == "2g.12gb"
        inputs = read[0]["root"]["dag"]["tasks"]["prove"]["inputs"]["parameters"]
        inputs["profile"] = {"runtimeValue": {"constant": "4g.24gb"}}
        assert callers.executor_pod(read, given)["containers"][0]["args"][2] == "4g.24gb"

    @pytest.mark.parametrize(
        ("change", "fault"),
        [
            (lambda r: r.pop(0), "none of the documents is a pipeline"),
            (lambda r: platform(r).update(pvcMount=[]), "the platform setting pvcMount is not handled"),
            (lambda r: executor(r).update(lifecycle={}), "the executor's setting lifecycle is not handled"),
            (lambda r: executor(r)["resources"].update(accelerator={"count": 1}), "asks for no other device"),
            (lambda r: executor(r)["args"].append("{{$}}"), "only KFP's launcher can fill"),
            (lambda r: executor(r)["args"].append("{{$.inputs.parameters['other']}}"), "the input other"),
            (
                lambda r: platform(r).update(podResourceClaims=[{"resourceClaimTemplateName": ""}]),
                "has no resourceClaimTemplateName",
            ),
            (lambda r: platform(r)["podResourceClaims"].append(platform(r)["podResourceClaims"][0]), "twice"),
            (lambda r: r[0]["root"]["dag"]["tasks"].update(other={}), "has 2 tasks; needed exactly one"),
            (
                lambda r: r[0]["root"]["dag"]["tasks"]["prove"]["inputs"]["parameters"].update(
                    profile={"taskOutputParameter": {}}
                ),
                "neither a parameter nor a constant",
            ),
        ],
    )
    def test_what_would_get_lost_is_refused(self, change: Any, fault: str) -> None:
        read = documents()
        change(read)
        with pytest.raises(CallerError, match=fault):
            callers.executor_pod(read, ARGUMENTS)

    @pytest.mark.parametrize(
        ("arguments", "fault"),
        [
            ({**ARGUMENTS, "imag": "x"}, "no parameter imag"),
            ({k: v for k, v in ARGUMENTS.items() if k != "image"}, "image has no value"),
            ({**ARGUMENTS, "claim": "mig"}, "claim is 'mig'; needed is a STRUCT"),
        ],
    )
    def test_wrong_arguments_are_refused(self, arguments: Any, fault: str) -> None:
        with pytest.raises(CallerError, match=fault):
            callers.executor_pod(documents(), arguments)

    def test_the_object_says_what_it_is_made_of(self) -> None:
        made = callers.executor_manifest(documents(), ARGUMENTS, "ns", ["secret"], "Never")
        assert made["metadata"]["annotations"][callers.ORIGIN] == "pipeline gpu-slice, task prove, kfp-2.17.3"
        assert made["metadata"]["namespace"] == "ns"
        assert made["spec"]["imagePullSecrets"] == [{"name": "secret"}]
        assert made["spec"]["containers"][0]["imagePullPolicy"] == "Never"


def pod(name: str = "x") -> dict[str, Any]:
    spec = {
        "resourceClaims": [{"name": "gpu-slice", "resourceClaimTemplateName": TEMPLATE}],
        "containers": [{"name": "caller", "image": "i", "resources": {"claims": [{"name": "gpu-slice"}]}}],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "ns"}, "spec": spec}


def job() -> dict[str, Any]:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "x", "namespace": "ns"},
        "spec": {"completions": 2, "template": {"spec": pod()["spec"]}},
    }


def cronjob() -> dict[str, Any]:
    return {
        "apiVersion": "batch/v1",
        "kind": "CronJob",
        "metadata": {"name": "nightly", "namespace": "ns"},
        "spec": {
            "suspend": True,
            "jobTemplate": {
                "metadata": {"labels": {"a": "b"}, "annotations": {"c": "d"}},
                "spec": {"backoffLimit": 0, "template": {"spec": pod()["spec"]}},
            },
        },
    }


def volcano() -> dict[str, Any]:
    return {
        "apiVersion": "batch.volcano.sh/v1alpha1",
        "kind": "Job",
        "metadata": {"name": "x", "namespace": "ns"},
        "spec": {
            "schedulerName": "volcano",
            "minAvailable": 1,
            "tasks": [{"name": "slice", "replicas": 1, "template": {"spec": pod()["spec"]}}],
        },
    }


def test_the_job_of_a_cronjob_is_kubectls() -> None:
    made = callers.job_of_cronjob(cronjob(), "by-hand", "uid-1")
    assert made["metadata"] == {
        "name": "by-hand",
        "namespace": "ns",
        "labels": {"a": "b"},
        "annotations": {"cronjob.kubernetes.io/instantiate": "manual", "c": "d"},
        "ownerReferences": [
            {
                "apiVersion": "batch/v1",
                "kind": "CronJob",
                "name": "nightly",
                "controller": True,
                "uid": "uid-1",
            }
        ],
    }
    assert made["spec"] == cronjob()["spec"]["jobTemplate"]["spec"]


def planned(enabled: Any = callers.CALLERS, served: bool = False, **changed: Any) -> dict[str, Any]:
    kfp = callers.executor_manifest(documents(), ARGUMENTS, "ns")
    drafts = {"pod": pod(), "job": job(), "cronjob": cronjob(), "kfp": kfp, "volcano": volcano()}
    drafts.update(changed.pop("drafts", {}))
    settings = {"volcano_served": served, "schema": SCHEMA, **changed}
    claim = settings.pop("claim", CLAIM)
    return callers.plan(enabled, drafts, SCRIPTS, claim, **settings)


def rows(made: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in made["rows"]}


class TestPlan:
    def test_all_but_volcano_where_it_is_not_installed(self) -> None:
        made = planned()
        assert [w["id"] for w in made["workloads"]] == ["pod", "job", "cronjob", "kfp"]
        assert [w["kind"] for w in made["workloads"]] == ["Pod", "Job", "Job", "Pod"]
        assert [w["world"] for w in made["workloads"]] == [1, 2, 1, 1]
        assert {w["ok"] for w in made["workloads"]} == {
            f"slice claimed by {caller}: OK" for caller in ("pod", "job", "cronjob", "kfp")
        }
        assert rows(made)["volcano"]["status"] == "skip"
        assert rows(made)["volcano"]["found"] == callers.VOLCANO_ABSENT
        assert {
            name: row["status"] for name, row in rows(made).items() if name != "volcano"
        } == dict.fromkeys(("hooks", "cronjob-job", "kfp-pod", "volcano-schema"), "pass")

    def test_volcano_runs_where_it_is_installed(self) -> None:
        made = planned(served=True)
        assert made["workloads"][-1]["kind"] == "VolcanoJob"
        assert made["callers"][-1]["apiVersion"] == "batch.volcano.sh/v1alpha1"
        assert "volcano" not in rows(made)
        assert rows(made)["volcano-schema"]["status"] == "pass"

    def test_only_what_is_enabled(self) -> None:
        made = planned(["kfp", "pod"])
        assert [w["id"] for w in made["workloads"]] == ["pod", "kfp"]
        assert [m["kind"] for m in made["ground"] + made["callers"]] == ["ConfigMap", "Pod", "Pod"]
        assert made["manual"] == {}

    def test_a_string_names_callers_too(self) -> None:
        """``-e callers_enabled=pod,job`` is one."""
        assert [w["id"] for w in planned("pod, job")["workloads"]] == ["pod", "job"]

    def test_nothing_to_run_is_no_success(self) -> None:
        with pytest.raises(callers.CallerError, match="no caller is named"):
            planned("")

    def test_the_cronjob_keeps_its_name_and_its_job_is_followed(self) -> None:
        made = planned(["cronjob"])
        assert made["ground"][1]["metadata"]["name"] == "nightly"
        assert made["callers"] == []
        assert made["manual"]["metadata"]["name"] == made["workloads"][0]["name"]
        assert "uid" not in made["manual"]["metadata"]["ownerReferences"][0]

    def test_names_follow_what_is_rendered_each_for_itself(self) -> None:
        changed = job()
        changed["spec"]["completions"] = 3
        first, second = planned()["names"], planned(drafts={"job": changed})["names"]
        assert first["job"] != second["job"]
        assert {k: v for k, v in first.items() if k != "job"} == {
            k: v for k, v in second.items() if k != "job"
        }
        assert all(len(name) < 50 for name in first.values())

    @pytest.mark.parametrize(("free", "runs"), [(0, False), (1, False), (2, True)])
    def test_the_indexed_job_needs_two_slices(self, free: int, runs: bool) -> None:
        made = planned(claim={**CLAIM, "free": free})
        assert ("job" in [w["id"] for w in made["workloads"]]) is runs
        assert (rows(made).get("job") or {}).get("status") == (None if runs else "skip")
        if not runs:
            assert rows(made)["job"]["found"] == f"free slices of 1g.6gb: {free}"

    def test_a_finished_indexed_job_stays_though_slices_are_few(self) -> None:
        done = {
            "metadata": {"name": planned()["names"]["job"]},
            "status": {"conditions": [{"type": "Complete", "status": "True"}]},
        }
        claim = {**CLAIM, "free": 1}
        assert "job" in [w["id"] for w in planned(claim=claim, finished_jobs=[done])["workloads"]]
        done["status"]["conditions"][0]["type"] = "Failed"
        assert "job" not in [w["id"] for w in planned(claim=claim, finished_jobs=[done])["workloads"]]

    def test_a_missing_hook_is_found(self) -> None:
        broken = job()
        broken["spec"]["template"]["spec"]["containers"][0]["resources"] = {}
        row = rows(planned(drafts={"job": broken}))["hooks"]
        assert row["status"] == "fail"
        assert row["found"] == "job: no container has gpu-slice in resources.claims"
        broken["spec"]["template"]["spec"]["resourceClaims"] = []
        row = rows(planned(drafts={"job": broken}))["hooks"]
        assert row["found"] == f"job: spec.resourceClaims has no claim from the template {TEMPLATE}"

    def test_a_pipeline_without_the_claim_is_found(self) -> None:
        kfp = callers.executor_manifest(documents(), ARGUMENTS, "ns")
        kfp["spec"]["resourceClaims"] = []
        assert rows(planned(drafts={"kfp": kfp}))["kfp-pod"]["status"] == "fail"


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda s: s.update(replicas=1), "'replicas' was unexpected"),
        (lambda s: s.update(minAvailable="one"), "'one' is not of type 'integer'"),
        (lambda s: s.update(minAvailable=-1), "less than the minimum"),
        (lambda s: s.update(tasks=[]), "[] should be non-empty"),
        (lambda s: s["tasks"][0].update(name="Slice"), "does not match"),
        (lambda s: s["tasks"][0]["template"]["spec"].update(resourceClaim=[]), "'resourceClaim'"),
        (
            lambda s: s["tasks"][0]["template"]["spec"]["containers"][0]["resources"].update(claims=["x"]),
            "'x' is not of type 'object'",
        ),
        (
            lambda s: s["tasks"][0]["template"]["spec"]["resourceClaims"][0].pop("name"),
            "'name' is a required",
        ),
        (lambda s: s.update(policies=[{"event": 1}]), "1 is not of type 'string'"),
    ],
)
def test_volcanos_types_refuse(change: Any, fault: str) -> None:
    made = volcano()
    assert callers.schema_faults(made, SCHEMA) == []
    change(made["spec"])
    assert any(fault in text for text in callers.schema_faults(made, SCHEMA))


def member(*logs: list[str] | None, name: str = "job") -> dict[str, Any]:
    def log(uuids: list[str] | None) -> str | None:
        return None if uuids is None else "[proof] " + json.dumps({"devices": [{"uuid": u} for u in uuids]})

    return {
        "id": name,
        "pods": [{"name": f"{name}-{i}", "log": log(uuids), "devices": []} for i, uuids in enumerate(logs)],
    }


@pytest.mark.parametrize(
    ("logs", "status"),
    [
        ([["a"], ["b"]], "pass"),
        ([["a"], ["a"]], "fail"),
        ([["a"]], "fail"),
        ([["a"], None], "fail"),
        ([["a"], []], "fail"),
        ([["a", "b"], ["b"]], "fail"),
        ([], "fail"),
    ],
)
def test_the_jobs_pods_must_be_in_different_slices(logs: Any, status: str) -> None:
    (row,) = callers.judge([member(["a"], name="pod"), member(*logs)], {})
    assert (row["id"], row["status"]) == ("job-slices", status)
    assert bool(row["fix"]) is (status == "fail")


def test_nothing_is_said_of_a_job_that_did_not_run() -> None:
    assert callers.judge([member(["a"], name="pod")], {}) == []


def test_drafts_are_not_changed() -> None:
    drafts = {"pod": pod(), "job": job()}
    before = copy.deepcopy(drafts)
    callers.plan(["pod", "job"], drafts, SCRIPTS, CLAIM, volcano_served=False, schema=SCHEMA)
    assert drafts == before
