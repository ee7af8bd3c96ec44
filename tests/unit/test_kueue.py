"""Kueue as it is installed: what its objects say, and what has to be set before devices of claims count."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import yaml
from gpu_slices import kueue, kueue_config, preflight
from gpu_slices.cluster import KUEUE_NAMESPACE, _placed

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests/fixtures/kueue"
DEPLOYMENT = yaml.safe_load((FIXTURES / "deployment-0.17.yaml").read_text())
CONFIG_MAP = yaml.safe_load((FIXTURES / "config-0.17.yaml").read_text())
KEY = "controller_manager_config.yaml"
CLASS, RESOURCE = "mig-1g-18gb.nvidia.com", "gpu-slices.dev/mig-1g-18gb"
WANTED = {CLASS: RESOURCE}
TRAINER = {"pod_overrides": "runtimePatches"}


def _filters() -> Any:
    spec = importlib.util.spec_from_file_location("quota_filters", ROOT / "plugins/filter/quota.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


quota_filter = _filters()


def deployment(**changed: Any) -> dict[str, Any]:
    """The installed Deployment; ``image``, ``args``, ``labels``, ``name`` changed."""
    made = copy.deepcopy(DEPLOYMENT)
    container = made["spec"]["template"]["spec"]["containers"][0]
    for key in ("image", "args", "command"):
        if key in changed:
            container[key] = changed[key]
    for key in ("labels", "name"):
        if key in changed:
            made["metadata"][key] = changed[key]
    if "status" in changed:
        made["status"] = changed["status"]
    return made


def facts(text: str | None = None, **changed: Any) -> dict[str, Any]:
    """Facts of an installation with this configuration."""
    config = copy.deepcopy(CONFIG_MAP)
    if text is not None:
        config["data"][KEY] = text
    return {
        "served": ["v1beta2", "v1beta1"],
        "managers": [kueue.trim_manager(deployment(**changed))],
        "config": kueue.trim_config(config, KEY),
        "started": "2026-12-01T12:00:30Z",
    }


def text_without(*lines: str) -> str:
    """The installed configuration without the mapping of our class, or without other lines."""
    text = str(CONFIG_MAP["data"][KEY])
    for line in lines:
        assert line in text
        text = text.replace(line, "")
    return text


UNMAPPED = text_without(f"  - deviceClassNames:\n    - {CLASS}\n    name: {RESOURCE}\n")
NO_GATE = ["--config=/controller_manager_config.yaml", "--zap-log-level=2"]


def found(checks: list[dict[str, Any]]) -> dict[str, str]:
    return {check["id"]: check["status"] for check in checks}


class TestTrimming:
    def test_the_installed_one(self) -> None:
        made = kueue.trim_manager(DEPLOYMENT)
        assert (made["version"], made["version_from"]) == ("v0.17.0", "the image's tag")
        assert (made["config_map"], made["config_key"]) == ("kueue-manager-config", KEY)
        assert made["ready"]
        assert made["selector"]["control-plane"] == "controller-manager"

    @pytest.mark.parametrize(
        ("image", "labels", "version", "source"),
        [
            ("registry.k8s.io/kueue/kueue:v0.18.2", {}, "v0.18.2", "the image's tag"),
            ("r/kueue:v0.16.1@sha256:aa", {}, "v0.16.1", "the image's tag"),
            ("r:5000/kueue@sha256:aa", {"app.kubernetes.io/version": "v0.15.0"}, "v0.15.0", "version"),
            ("r/kueue:main", {"helm.sh/chart": "kueue-0.14.4"}, "0.14.4", "helm.sh/chart"),
            ("r/kueue:release-0.17", {"app.kubernetes.io/version": "main"}, "", ""),
        ],
    )
    def test_the_version(self, image: str, labels: dict[str, str], version: str, source: str) -> None:
        made = kueue.trim_manager(deployment(image=image, labels=labels))
        assert made["version"] == version
        assert source in made["version_from"]

    @pytest.mark.parametrize(
        ("changed", "is_one"),
        [
            ({}, True),
            ({"name": "queueing", "labels": {}}, True),
            (
                {"image": "own.example/queue-controller:1", "labels": {"app.kubernetes.io/name": "kueue"}},
                True,
            ),
            ({"image": "own.example/queue-controller:1", "labels": {}}, False),
            (
                {
                    "image": "r/kueueviz-backend:v0.17.0",
                    "labels": {"app.kubernetes.io/name": "kueue"},
                    "args": [],
                },
                False,
            ),
            ({"image": "r/kueue-exporter:1", "labels": {}}, False),
        ],
    )
    def test_which_deployment_it_is(self, changed: dict[str, Any], is_one: bool) -> None:
        assert kueue.is_manager(deployment(**changed)) is is_one

    def test_the_configuration_by_another_mount(self) -> None:
        item = deployment(args=["--config", "/etc/kueue/own.yaml"])
        pod = item["spec"]["template"]["spec"]
        pod["volumes"].append({"name": "more", "configMap": {"name": "other"}})
        pod["containers"][0]["volumeMounts"].append({"name": "more", "mountPath": "/etc/kueue"})
        made = kueue.trim_manager(item)
        assert (made["config_map"], made["config_key"]) == ("other", "own.yaml")

    @pytest.mark.parametrize(
        ("status", "done"),
        [
            ({"replicas": 1, "updatedReplicas": 1, "availableReplicas": 1, "observedGeneration": 1}, True),
            ({"replicas": 2, "updatedReplicas": 1, "availableReplicas": 1, "observedGeneration": 1}, False),
            ({"replicas": 1, "updatedReplicas": 1, "availableReplicas": 1, "observedGeneration": 0}, False),
            ({"replicas": 1, "updatedReplicas": 1, "observedGeneration": 1}, False),
            ({}, False),
        ],
    )
    def test_rolled_out(self, status: dict[str, int], done: bool) -> None:
        assert kueue.rolled_out(deployment(status=status)) is done

    def test_when_the_configuration_was_last_edited(self) -> None:
        config = copy.deepcopy(CONFIG_MAP)
        config["metadata"]["managedFields"] += [
            {"time": "2026-12-01T12:30:00Z", "fieldsV1": {"f:data": {}}},
            {"time": "2026-12-01T12:45:00Z", "fieldsV1": {"f:metadata": {}}},
        ]
        assert kueue.trim_config(config, KEY)["edited"] == "2026-12-01T12:30:00Z"
        assert kueue.trim_config(None, KEY) == {"found": False, "text": "", "edited": "", "version": ""}

    def test_when_it_started(self) -> None:
        pods = [
            {"status": {"phase": "Running", "startTime": "2026-12-01T12:00:30Z"}},
            {"status": {"phase": "Running", "startTime": "2026-12-01T12:00:10Z"}},
            {"metadata": {"deletionTimestamp": "x"}, "status": {"phase": "Running", "startTime": "2026-01"}},
            {"status": {"phase": "Pending"}},
        ]
        assert kueue.started(pods) == "2026-12-01T12:00:10Z"
        assert kueue.started([]) == ""


class TestGate:
    @pytest.mark.parametrize(
        ("version", "name"),
        [
            ("v0.13.9", ""),
            ("0.14.0", "DynamicResourceAllocation"),
            ("v0.17.3", "DynamicResourceAllocation"),
            ("v0.18.0-rc.1", "KueueDRAIntegration"),
            ("1.0", "KueueDRAIntegration"),
            ("main", "DynamicResourceAllocation"),
        ],
    )
    def test_its_name(self, version: str, name: str) -> None:
        assert kueue.gate_name(version) == name

    @pytest.mark.parametrize(
        ("version", "arguments", "config", "on", "where"),
        [
            ("v0.17.0", ["--feature-gates=DynamicResourceAllocation=true"], {}, True, "arguments"),
            ("v0.17.0", ["--feature-gates=DynamicResourceAllocation=false"], {}, False, "arguments"),
            ("v0.17.0", ["--feature-gates=KueueDRAIntegration=true"], {}, False, "default"),
            (
                "v0.17.0",
                [],
                {"featureGates": {"DynamicResourceAllocation": True}},
                True,
                "configuration",
            ),
            ("v0.17.0", [], {}, False, "default"),
            ("v0.18.1", [], {}, True, "default"),
            ("v0.18.1", [], {"featureGates": {"KueueDRAIntegration": False}}, False, "configuration"),
            ("", ["--feature-gates=KueueDRAIntegration=true"], {}, True, "arguments"),
            ("", [], {}, False, "default"),
        ],
    )
    def test_whether_it_is_on(
        self, version: str, arguments: list[str], config: dict[str, Any], on: bool, where: str
    ) -> None:
        manager = {"version": version, "arguments": arguments, "command": ["/manager"]}
        state = kueue.gate(manager, config)
        assert (state["on"], state["where"]) == (on, where)


class TestPairing:
    @pytest.mark.parametrize(
        ("version", "field", "ok"),
        [
            ("v0.14.2", "podSpecOverrides", True),
            ("v0.14.2", "podTemplateOverrides", False),
            ("v0.15.0", "podTemplateOverrides", True),
            ("v0.16.4", "podTemplateOverrides", True),
            ("v0.16.4", "runtimePatches", False),
            ("v0.17.0", "runtimePatches", True),
            ("v0.17.0", "podTemplateOverrides", False),
            ("v0.19.2", "runtimePatches", True),
            ("v0.17.0", "", False),
        ],
    )
    def test_what_goes_together(self, version: str, field: str, ok: bool) -> None:
        verdict = kueue.pairing(version, field)
        assert (verdict["ok"], verdict["known"]) == (ok, True)
        assert ok or "install Trainer" in verdict["fix"]

    def test_the_fix_names_both_ways(self) -> None:
        verdict = kueue.pairing("v0.17.0", "podTemplateOverrides")
        assert "Trainer 2.2 or later" in verdict["fix"]
        assert "Kueue 0.15 or 0.16" in verdict["fix"]

    @pytest.mark.parametrize(("field", "ok"), [("runtimePatches", True), ("podSpecOverrides", False)])
    def test_an_unknown_release_is_taken_for_a_new_one(self, field: str, ok: bool) -> None:
        verdict = kueue.pairing("", field)
        assert (verdict["ok"], verdict["known"]) == (ok, False)


class TestChecks:
    def test_the_installed_one_is_right(self) -> None:
        checks = kueue.checks(facts(), TRAINER, WANTED)
        assert found(checks) == dict.fromkeys(
            ("kueue", "kueue_trainer", "kueue_integration", "kueue_gate", "kueue_mapping"), "pass"
        )
        assert "v0.17.0 (by the image's tag), v1beta2" in checks[0]["found"]

    @pytest.mark.parametrize("nothing", [{"served": [], "managers": []}, {}])
    def test_without_kueue_there_is_nothing_to_prove(self, nothing: dict[str, Any]) -> None:
        checks = kueue.checks(nothing, TRAINER, WANTED)
        assert found(checks) == {"kueue": "skip"}

    @pytest.mark.parametrize(
        ("changed", "classes", "identity", "finding", "said"),
        [
            (facts(UNMAPPED), WANTED, "kueue_mapping", "kueue_deviceclass_unmapped", "deviceClassMappings"),
            (facts(args=NO_GATE), WANTED, "kueue_gate", "kueue_gate_off", "DynamicResourceAllocation=true"),
            (
                facts(text_without("  - trainer.kubeflow.org/trainjob\n")),
                WANTED,
                "kueue_integration",
                "kueue_integration",
                "past every quota",
            ),
            (
                facts(image="r/kueue:v0.16.0"),
                WANTED,
                "kueue_trainer",
                "kueue_trainer_pair",
                "install Trainer",
            ),
            (facts(image="r/kueue:v0.13.0"), WANTED, "kueue", "kueue_version", "upgrade Kueue"),
            (facts(status={}), WANTED, "kueue", "kueue_not_ready", "describe deployment"),
            ({**facts(), "managers": []}, WANTED, "kueue", "kueue_controller", "install Kueue"),
            ({**facts(), "served": ["v1alpha1"]}, WANTED, "kueue", "kueue_api", "0.14"),
            (facts("a: ["), WANTED, "kueue_config", "kueue_config_unread", "correct it"),
            (
                {**facts(), "config": kueue.trim_config(None, KEY)},
                WANTED,
                "kueue_config",
                "kueue_config_unread",
                "right to read",
            ),
            (
                facts("resources: {excludeResourcePrefixes: [gpu-slices.dev/]}\n"),
                WANTED,
                "kueue_mapping",
                "kueue_mapping_excluded",
                "prefix",
            ),
            (
                facts(
                    f"resources: {{deviceClassMappings: [{{name: {RESOURCE}, deviceClassNames: [{CLASS}], "
                    "sources: [{counter: {name: memory}}]}]}"
                ),
                WANTED,
                "kueue_mapping",
                "kueue_mapping_sources",
                "quota_device_class",
            ),
        ],
    )
    def test_what_is_wrong_is_said_with_what_to_do(
        self, changed: dict[str, Any], classes: dict[str, str], identity: str, finding: str, said: str
    ) -> None:
        checks = {check["id"]: check for check in kueue.checks(changed, TRAINER, classes)}
        assert checks[identity]["status"] == "fail"
        assert checks[identity]["evidence"]["finding"] == finding
        assert f"[{finding}]" in checks[identity]["found"]
        assert said in checks[identity]["fix"]
        assert checks[identity]["needed"]

    def test_an_edited_configuration_that_was_not_read(self) -> None:
        stale = {**facts(), "started": "2026-12-01T11:00:00Z"}
        checks = {check["id"]: check for check in kueue.checks(stale, TRAINER, WANTED)}
        assert checks["kueue_restart"]["status"] == "warn"
        assert "rollout restart" in checks["kueue_restart"]["fix"]
        assert found(kueue.checks(stale, TRAINER, WANTED, configure=True))["kueue_restart"] == "pass"

    def test_beforehand_one_mapped_class_is_enough(self) -> None:
        several = {CLASS: RESOURCE, "mig-9g.example": "x/y"}
        assert found(kueue.checks(facts(), TRAINER, several, whole=False))["kueue_mapping"] == "pass"
        assert found(kueue.checks(facts(), TRAINER, several))["kueue_mapping"] == "fail"
        assert found(kueue.checks(facts(), TRAINER, {}))["kueue_mapping"] == "skip"

    def test_what_this_run_sets_itself_is_no_fault(self) -> None:
        checks = found(kueue.checks(facts(UNMAPPED, args=NO_GATE), TRAINER, WANTED, configure=True))
        assert (checks["kueue_gate"], checks["kueue_mapping"]) == ("pass", "pass")

    def test_an_image_without_a_version_is_a_warning(self) -> None:
        changed = facts(image="r/kueue:main", labels={"app.kubernetes.io/name": "kueue"})
        checks = kueue.checks(changed, TRAINER, WANTED)
        assert checks[0]["status"] == "warn"
        assert found(kueue.checks(changed, {"pod_overrides": ""}, WANTED))["kueue_trainer"] == "warn"


class TestChanges:
    def test_nothing_is_to_be_done(self) -> None:
        plan = kueue.changes(facts(), WANTED, True)
        assert plan == {"text": "", "arguments": [], "restart": False, "said": [], "fault": ""}
        assert kueue.changes(facts(UNMAPPED), WANTED, False)["said"] == []

    def test_a_gate_joins_those_on_the_command_line(self) -> None:
        plan = kueue.changes(facts(args=[*NO_GATE, "--feature-gates=A=true"]), WANTED, True)
        assert plan["arguments"][-1] == "--feature-gates=A=true,DynamicResourceAllocation=true"
        assert plan["text"] == ""

    def test_otherwise_it_goes_into_the_configuration(self) -> None:
        plan = kueue.changes(facts(UNMAPPED, args=NO_GATE), WANTED, True)
        config = kueue_config.parse(plan["text"])
        assert plan["arguments"] == []
        assert config["featureGates"] == {"DynamicResourceAllocation": True}
        assert kueue_config.mappings(config)[CLASS] == RESOURCE
        assert plan["restart"]

    def test_a_gate_that_somebody_switched_off_stays_off(self) -> None:
        off = [*NO_GATE, "--feature-gates=DynamicResourceAllocation=false"]
        plan = kueue.changes(facts(args=off), WANTED, True)
        assert "somebody meant that" in plan["fault"]
        assert plan["said"] == []
        checks = {c["id"]: c for c in kueue.checks(facts(args=off), TRAINER, WANTED, configure=True)}
        assert checks["kueue_gate"]["status"] == "fail"

    def test_what_was_edited_unread_needs_a_restart(self) -> None:
        plan = kueue.changes({**facts(), "started": "2026-12-01T11:00:00Z"}, WANTED, True)
        assert plan["restart"]
        assert plan["text"] == ""
        assert "restart" in plan["said"][0]


class TestNames:
    def test_class_and_selector(self) -> None:
        assert kueue.class_name("1g.5gb+me") == "mig-1g-5gb-me.nvidia.com"
        assert kueue.resource_name("3g.71gb") == "gpu-slices.dev/mig-3g-71gb"
        expression = kueue.class_expression("1g.18gb")
        assert "device.driver == 'gpu.nvidia.com'" in expression
        assert ".type == 'mig'" in expression
        assert ".profile == '1g.18gb'" in expression

    def test_the_name_that_kueue_has_counts(self) -> None:
        assert kueue.counted_as(facts(), CLASS) == RESOURCE
        assert kueue.counted_as(facts(), "other") == ""
        assert kueue.counted_as({}, CLASS) == ""

    @pytest.mark.parametrize(
        ("served", "version"),
        [(["v1beta1"], "v1beta1"), (["v1beta1", "v1beta2"], "v1beta2"), ([], "v1beta2")],
    )
    def test_the_api_version(self, served: list[str], version: str) -> None:
        assert kueue.api_version({"served": served}) == f"kueue.x-k8s.io/{version}"


class TestPreflight:
    SETTINGS = {  # noqa: RUF012 - read only
        "nodes": [],
        "stages": ["quota"],
        "namespace": "ns",
        "profiles": ["1g.18gb"],
        "driver_namespace": "d",
    }

    def test_rights_are_asked_where_kueue_is(self) -> None:
        rights = preflight.needed_rights(self.SETTINGS)
        asked = {(r["verb"], r["resource"], r["namespace"]) for r in rights}
        assert ("create", "clusterqueues", "") in asked
        assert ("create", "localqueues", "ns") in asked
        assert ("get", "configmaps", KUEUE_NAMESPACE) in asked
        assert ("patch", "deployments", KUEUE_NAMESPACE) not in asked
        more = preflight.needed_rights({**self.SETTINGS, "kueue_configure": True})
        assert ("patch", "deployments", KUEUE_NAMESPACE) in {
            (r["verb"], r["resource"], r["namespace"]) for r in more
        }

    def test_without_kueue_nothing_is_needed_there(self) -> None:
        rights = [{"verb": "get", "namespace": KUEUE_NAMESPACE}, {"verb": "get", "namespace": "own"}]
        assert _placed(rights, KUEUE_NAMESPACE, []) == [{"verb": "get", "namespace": "own"}]
        assert _placed(rights, KUEUE_NAMESPACE, [{"namespace": "k"}])[0]["namespace"] == "k"

    def test_names(self) -> None:
        named = {item["id"]: item for item in preflight.named_objects(self.SETTINGS)}
        assert named["DeviceClass/mig-1g-18gb.nvidia.com"]["path"] == (
            "/apis/resource.k8s.io/v1/deviceclasses/mig-1g-18gb.nvidia.com"
        )
        assert named["LocalQueue/gpu-slices-quota-team-a"]["path"].startswith(
            "/apis/kueue.x-k8s.io/v1beta2/namespaces/ns/localqueues/"
        )
        own = preflight.named_objects({**self.SETTINGS, "kueue_class": "mine"})
        assert not any(item["kind"] == "DeviceClass" for item in own)

    def test_the_checks_of_the_stage(self) -> None:
        known = {"kueue": facts(), "trainer": {"features": TRAINER}}
        made = found(preflight._quota(known, self.SETTINGS))
        assert set(made.values()) == {"pass"}
        wrong = preflight._quota({**known, "kueue": facts(UNMAPPED)}, self.SETTINGS)
        assert found(wrong)["kueue_mapping"] == "fail"
        own = {**self.SETTINGS, "kueue_class": "mine.example", "kueue_resource": "x/y"}
        assert "mine.example" in preflight._quota(known, own)[-1]["found"]

    def test_facts_that_could_not_be_read(self) -> None:
        made = preflight._quota({"errors": {"kueue": {"message": "403"}}}, self.SETTINGS)
        assert (made[0]["status"], made[0]["found"]) == ("fail", "403 [facts_unreadable]")


class TestOthers:
    """What is somebody else's is named and left alone."""

    def queue(self, name: str, **more: Any) -> dict[str, Any]:
        labels = {"app.kubernetes.io/managed-by": "gpu-slices"} if more.pop("ours", False) else {}
        return {"metadata": {"name": name, "labels": labels}, "spec": more}

    def test_a_queue_in_our_cohort(self) -> None:
        queues = [
            self.queue("ours", cohortName="ns-quota", ours=True),
            self.queue("far", cohortName="research"),
            self.queue("alone"),
            self.queue("old", cohort="ns-quota"),
            self.queue("new", cohortName="ns-quota"),
        ]
        assert kueue.guests(queues, "ns") == ["new", "old"]
        assert kueue.guests(queues, "other") == []
        made = kueue.checks({**facts(), "guests": ["new"]}, TRAINER, WANTED)
        assert made[-1]["status"] == "fail"
        assert "ClusterQueue new is in our cohort" in made[-1]["found"]
        assert "kueue_cohort" not in found(kueue.checks({**facts(), "guests": []}, TRAINER, WANTED))

    def test_every_name_is_looked_up_where_it_would_be(self) -> None:
        manifests = [
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "ns"}},
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c", "namespace": "ns"}},
            {"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": "d"}},
            {
                "apiVersion": "kueue.x-k8s.io/v1beta1",
                "kind": "LocalQueue",
                "metadata": {"name": "q", "namespace": "ns"},
            },
        ]
        named = quota_filter.named(manifests)
        assert [item["path"] for item in named] == [
            "/api/v1/namespaces/ns/configmaps/c",
            "/apis/resource.k8s.io/v1/deviceclasses/d",
            "/apis/kueue.x-k8s.io/v1beta1/namespaces/ns/localqueues/q",
        ]
        theirs = {**dict.fromkeys(item["id"] for item in named), "DeviceClass/d": {"metadata": {}}}
        made = preflight.names_check(named, theirs)
        assert made["found"].startswith("DeviceClass d exists and is not ours")
        assert "gpu_slices_namespace" not in made["fix"]

    def test_what_cannot_be_read_is_no_skip(self) -> None:
        (made,) = quota_filter.checks({"errors": {"kueue": {"message": "Not allowed (403)"}}}, WANTED)
        assert (made["id"], made["status"], made["found"][:17]) == ("kueue", "fail", "Not allowed (403)")

    def test_a_class_of_ones_own_has_to_be_there(self) -> None:
        read = {"kueue": facts(), "trainer": {"features": TRAINER}, "device_classes": ["mig.nvidia.com"]}
        assert found(quota_filter.checks(read, WANTED))["kueue_mapping"] == "pass"
        made = quota_filter.checks(read, WANTED, False, CLASS)
        assert (made[-1]["id"], made[-1]["status"]) == ("class", "fail")
        assert "class" not in found(
            quota_filter.checks({**read, "device_classes": [CLASS]}, WANTED, False, CLASS)
        )

    @pytest.mark.parametrize(
        ("there", "labels", "ours"),
        [
            (False, {}, True),
            (True, {"app.kubernetes.io/managed-by": "gpu-slices"}, True),
            (True, {"team": "theirs"}, False),
        ],
    )
    def test_a_namespace_of_somebody_else_gets_no_label(
        self, there: bool, labels: dict[str, str], ours: bool
    ) -> None:
        assert quota_filter.usable({"found": there, "labels": labels}) is ours


class TestInputs:
    def test_what_is_fine(self) -> None:
        assert kueue.input_faults({}) == []
        good = {
            "quota_device_class": "mig-1g.example.com",
            "quota_resource": "slices",
            "quota_resources": {"requests": {"cpu": 1, "memory": "1Gi"}, "limits": {}},
            "quota_hold_seconds": 20,
        }
        assert kueue.input_faults(good) == []

    @pytest.mark.parametrize(
        ("name", "value", "said"),
        [
            ("quota_device_class", "Mig_1g", "name of a DeviceClass"),
            ("quota_resource", "a/b/", "resource's name"),
            ("quota_resource", "UPPER.example/x", "resource's name"),
            ("quota_resources", {"requests": {"cpu": "lots"}}, "quota_resources.requests.cpu: 'lots'"),
            ("quota_resources", {"requests": ["cpu"]}, "no mapping"),
            ("quota_resources", {"request": {}}, "has request"),
            ("quota_resources", {"limits": {"nvidia.com/gpu": 1}}, "limits holds nvidia.com/gpu"),
            ("quota_shared_memory", "lots", "'lots' is not a Kubernetes quantity"),
            ("quota_hold_seconds", 600, "have to end within it"),
        ],
    )
    def test_what_is_wrong_names_the_variable(self, name: str, value: Any, said: str) -> None:
        (fault,) = kueue.input_faults({name: value})
        assert name in fault
        assert said in fault
