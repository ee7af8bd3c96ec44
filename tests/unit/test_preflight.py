"""Gate 2 against what people met in the field: the facts of each report, and the finding it must give."""

from __future__ import annotations

import copy

import pytest
from gpu_slices import preflight
from gpu_slices.cluster import DRA_RESOURCES, PLUGIN_NAMESPACE, TRAINER_CRDS

SETTINGS = {
    "nodes": ["gpu-a"],
    "stages": ["preflight", "enable-driver", "smoke", "sft"],
    "namespace": "train",
    "namespace_create": True,
    "driver_install": False,
    "driver_namespace": "dra-driver-nvidia-gpu",
    "mig_manage": True,
    "profiles": ["1g.6gb"],
}
PLUGIN = {
    "namespace": "dra-driver-nvidia-gpu",
    "name": "dra-driver-nvidia-gpu-kubelet-plugin",
    "role": "dra",
    "containers": ["gpus"],
    "images": ["x"],
    "node_selector": {},
    "affinity_terms": [],
}
NODE = {
    "name": "gpu-a",
    "labels": {"nvidia.com/gpu.present": "true"},
    "added_labels": "",
    "ready": True,
    "not_ready_reason": "",
    "unschedulable": False,
    "taints": [],
    "kubelet": "v1.36.3",
    "runtime": "containerd://2.3.7",
    "allocatable": {},
}
FACTS = {
    "version": {"git": "v1.36.3", "url": "https://10.0.0.1:6443"},
    "apis": {"groups": {"resource.k8s.io": ["v1"]}, "dra_v1_resources": list(DRA_RESOURCES)},
    "nodes": {"gpu-a": NODE},
    "daemonsets": [PLUGIN],
    "slices": {"devices": [], "pools": [], "incomplete": []},
    "namespace": {"name": "train", "found": True, "terminating": False, "labels": {}},
    "access": [{"verb": "list", "group": "", "resource": "nodes", "namespace": "", "allowed": True}],
    "objects": {item["id"]: None for item in preflight.named_objects(SETTINGS)},
    "trainer": {
        **{key: {"found": True, "versions": ["v1alpha1"], "established": True} for key in TRAINER_CRDS},
        "features": {
            "torch_num_proc_per_node": False,
            "ml_policy_torch": True,
            "pod_overrides": "runtimePatches",
        },
    },
    "errors": {},
}


def judge(change=None, settings=None):
    facts = copy.deepcopy(FACTS)
    if change:
        change(facts)
    checks = preflight.preflight_checks(facts, {**SETTINGS, **(settings or {})})
    return {check["id"]: check for check in checks}


def test_a_healthy_cluster_passes_every_check():
    checks = judge()
    assert {check["status"] for check in checks.values()} == {"pass"}
    assert len(checks) == 11


def test_every_check_asks_something_and_every_failure_says_what_to_do():
    def ruin(facts):
        facts["apis"]["groups"]["resource.k8s.io"] = ["v1beta1", "v1beta2"]
        facts["nodes"] = {}
        facts["daemonsets"] = []
        facts["trainer"]["trainjobs"]["found"] = False
        facts["access"][0]["allowed"] = False

    for check in judge(ruin).values():
        assert check["asked"].endswith("?")
        if check["status"] in ("fail", "warn"):
            assert check["needed"]
            assert check["fix"]
            assert f"[{check['evidence']['finding']}]" in check["found"]


def _apis(served, resources=()):
    def change(facts):
        facts["version"]["git"] = "v1.33.5"
        facts["apis"] = {"groups": {"resource.k8s.io": served}, "dra_v1_resources": list(resources)}

    return change


def _node(**values):
    return lambda facts: facts["nodes"]["gpu-a"].update(values)


def _daemonsets(*items):
    return lambda facts: facts.update(daemonsets=[{**PLUGIN, **item} for item in items])


DEVICE_PLUGIN = {
    "namespace": "gpu-operator",
    "name": "nvidia-device-plugin-daemonset",
    "role": "device_plugin",
}


@pytest.mark.parametrize(
    ("change", "identity", "status", "finding", "says"),
    [
        # F01: the group is there, the version is not
        (
            _apis(["v1beta1", "v1beta2"]),
            "dra_api",
            "fail",
            "api_v1_missing",
            "v1.33.5 serves v1beta1 and v1beta2",
        ),
        (_apis([]), "dra_api", "fail", "api_v1_missing", "no version of it"),
        (_apis(["v1"], ["deviceclasses"]), "dra_api", "fail", "api_v1_missing", "without resourceclaims"),
        # F04: what to check of CDI depends on the runtime
        (_node(runtime="containerd://1.7.24"), "runtimes", "warn", "runtime_cdi", "enable_cdi"),
        (_node(runtime="docker://29.4.0"), "runtimes", "fail", "runtime_cdi", "docker"),
        # F05: versions
        (_node(kubelet="v1.34.1"), "kubelets", "warn", "version_floor", "v1.34.1"),
        (_node(kubelet="v1.33.9"), "kubelets", "fail", "version_floor", "v1.33.9"),
        # F21: the chart serves compute domains only
        (
            _daemonsets({"containers": ["compute-domains"]}),
            "driver",
            "fail",
            "chart_gpus_disabled",
            "no container gpus",
        ),
        # F22: two owners of one GPU
        (
            _node(allocatable={"nvidia.com/gpu": "0", "nvidia.com/mig-1g.10gb": "7"}),
            "gpu_owners",
            "warn",
            "double_owner",
            "nvidia.com/mig-1g.10gb=7",
        ),
        (_daemonsets({}, DEVICE_PLUGIN), "gpu_owners", "warn", "double_owner", "nvidia-device-plugin"),
        # F23: nothing to be found by label
        (_daemonsets(), "driver", "fail", "plugin_not_found", "any namespace"),
        (_daemonsets({}, {"name": "second"}), "driver", "fail", "plugin_twice", "second"),
        # nodes
        (lambda facts: facts.update(nodes={}), "nodes", "fail", "node_missing", "gpu-a"),
        (
            _node(ready=False, not_ready_reason="kubelet stopped"),
            "nodes",
            "fail",
            "node_not_ready",
            "kubelet stopped",
        ),
        # rights
        (
            lambda facts: facts["access"][0].update(allowed=False),
            "rights",
            "fail",
            "rights_missing",
            "list nodes",
        ),
        # namespace and names
        (
            lambda facts: facts["namespace"].update(terminating=True),
            "namespace",
            "fail",
            "namespace_terminating",
            "being deleted",
        ),
        (
            lambda facts: facts["objects"].update({"ResourceClaimTemplate/mig-1g-6gb": {"metadata": {}}}),
            "names",
            "fail",
            "name_taken",
            "train/mig-1g-6gb",
        ),
        # Trainer
        (
            lambda facts: facts["trainer"]["jobsets"].update(found=False),
            "trainer",
            "fail",
            "trainer_missing",
            "JobSet",
        ),
        (
            lambda facts: facts["trainer"]["trainjobs"].update(established=False),
            "trainer",
            "fail",
            "trainer_missing",
            "not established",
        ),
        (
            lambda facts: facts["trainer"]["features"].update(ml_policy_torch=False),
            "trainer",
            "fail",
            "trainer_schema",
            "v1alpha1",
        ),
        # DynamicMIG owns the layout
        (
            lambda facts: facts["slices"].update(devices=[{"node": "gpu-a", "partitionable": True}]),
            "static_mig",
            "fail",
            "dynamic_mig",
            "gpu-a",
        ),
        # a question that was refused
        (
            lambda facts: facts.pop("nodes"),
            "nodes",
            "fail",
            "facts_unreadable",
            "nothing could be read",
        ),
    ],
)
def test_each_report_gives_its_finding(change, identity, status, finding, says):
    check = judge(change)[identity]
    assert check["status"] == status
    assert check["evidence"]["finding"] == finding
    assert says in check["found"]


def test_zero_allocatable_and_an_extended_resource_name_are_no_second_owner():
    assert judge(_node(allocatable={"nvidia.com/gpu": "0"}))["gpu_owners"]["status"] == "pass"


def test_a_device_plugin_that_selects_other_nodes_is_no_second_owner():
    other = {**DEVICE_PLUGIN, "node_selector": {"pool": "classic"}}
    assert judge(_daemonsets({}, other))["gpu_owners"]["status"] == "pass"


def test_a_missing_driver_is_fine_when_this_run_installs_it():
    assert judge(_daemonsets(), {"driver_install": True})["driver"]["status"] == "pass"
    alone = {"driver_install": True, "stages": ["smoke"]}
    assert judge(_daemonsets(), alone)["driver"]["status"] == "fail"


def test_a_missing_namespace_is_fine_when_it_may_be_created():
    def gone(facts):
        facts["namespace"]["found"] = False

    assert judge(gone)["namespace"]["status"] == "pass"
    assert judge(gone, {"namespace_create": False})["namespace"]["evidence"]["finding"] == "namespace_missing"


def test_our_own_objects_are_no_collision():
    labels = {"app.kubernetes.io/managed-by": "gpu-slices"}

    def ours(facts):
        facts["objects"]["ResourceClaimTemplate/mig-1g-6gb"] = {"metadata": {"labels": labels}}

    assert judge(ours)["names"]["status"] == "pass"


def test_names_of_every_kind_are_looked_up():
    paths = {item["id"]: item["path"] for item in preflight.named_objects(SETTINGS)}
    assert paths == {
        "ConfigMap/gpu-slices-sft": "/api/v1/namespaces/train/configmaps/gpu-slices-sft",
        "ConfigMap/gpu-slices-smoke": "/api/v1/namespaces/train/configmaps/gpu-slices-smoke",
        "ResourceClaimTemplate/mig-1g-6gb": (
            "/apis/resource.k8s.io/v1/namespaces/train/resourceclaimtemplates/mig-1g-6gb"
        ),
        "TrainingRuntime/gpu-slices-sft": (
            "/apis/trainer.kubeflow.org/v1alpha1/namespaces/train/trainingruntimes/gpu-slices-sft"
        ),
    }


def test_names_that_could_not_be_read_are_no_pass():
    assert judge(lambda facts: facts["objects"].popitem())["names"]["status"] == "skip"


def test_stages_decide_what_is_checked():
    assert "trainer" not in judge(settings={"stages": ["smoke"]})
    assert "static_mig" not in judge(settings={"stages": ["smoke"]})
    assert set(judge(settings={"stages": ["preflight"]})) == {
        "dra_api",
        "nodes",
        "kubelets",
        "runtimes",
        "rights",
    }


def rights(**settings):
    return {
        (right["verb"], right["resource"], right["namespace"])
        for right in preflight.needed_rights({**SETTINGS, **settings})
    }


def test_rights_follow_the_stages():
    assert ("patch", "nodes", "") in rights()
    assert ("patch", "nodes", "") not in rights(stages=["smoke"])
    assert ("create", "trainjobs", "train") in rights(stages=["sft"])
    assert ("create", "trainjobs", "train") not in rights(stages=["smoke"])
    assert ("create", "namespaces", "") in rights(stages=["smoke"])
    assert ("create", "namespaces", "") not in rights(stages=["smoke"], namespace_create=False)
    assert ("create", "daemonsets", "dra-driver-nvidia-gpu") in rights(driver_install=True)
    assert ("create", "daemonsets", "dra-driver-nvidia-gpu") not in rights(driver_install=False)
    assert ("delete", "pods", "dra-driver-nvidia-gpu") in rights(driver_install=True)
    assert ("delete", "pods", PLUGIN_NAMESPACE) in rights(driver_install=False)
    assert ("list", "nodes", "") in rights(stages=[])


def test_each_right_is_asked_once():
    asked = [
        tuple(sorted(right.items()))
        for right in preflight.needed_rights({**SETTINGS, "driver_install": True})
    ]
    assert len(asked) == len(set(asked))


def test_the_other_callers_need_jobs_and_cronjobs():
    asked = rights(stages=["callers"])
    assert {("create", kind, "train") for kind in ("pods", "jobs", "cronjobs")} <= asked
    assert ("create", "trainjobs", "train") not in asked
    wanted = {item["id"] for item in preflight.named_objects({**SETTINGS, "stages": ["callers"]})}
    assert {"CronJob/gpu-slices-callers", "ConfigMap/gpu-slices-callers"} <= wanted


@pytest.mark.parametrize(("installed", "status"), [(False, "pass"), (True, "fail")])
def test_nothing_is_asked_of_volcano_where_it_is_not(installed, status):
    def change(facts):
        if installed:
            facts["apis"]["groups"]["batch.volcano.sh"] = ["v1alpha1"]
        right = {"verb": "create", "group": "batch.volcano.sh", "resource": "jobs", "namespace": "train"}
        facts["access"].append({**right, "allowed": False})

    assert judge(change)["rights"]["status"] == status


# ---------------------------------------------------------------------------------------- sharing one GPU

SHARING = {"stages": ["shared"], "mode": "shared", "strategy": "TimeSlicing"}
CHART = {"chart": "dra-driver-nvidia-gpu-0.4.1", "release": "dra"}


@pytest.mark.parametrize(
    ("plugin", "settings", "status", "part"),
    [
        ({"feature_gates": "TimeSlicingSettings=true,"}, {}, "pass", "TimeSlicingSettings is on in"),
        ({"feature_gates": "AllAlpha=true"}, {}, "pass", "TimeSlicingSettings is on"),
        ({}, {}, "fail", "TimeSlicingSettings is off in dra-driver-nvidia-gpu/"),
        ({"feature_gates": "MPSSupport=true,"}, {}, "fail", "gates that are on: MPSSupport"),
        ({"feature_gates": "TimeSlicingSettings=true,"}, {"strategy": "MPS"}, "fail", "MPSSupport is off"),
        (
            {"feature_gates": "MPSSupport=true,"},
            {"strategy": "MPS"},
            "warn",
            "TimeSlicingSettings is off: the",
        ),
        (
            {"feature_gates": "MPSSupport=true,TimeSlicingSettings=true,"},
            {"strategy": "MPS"},
            "pass",
            "MPSSupport is on",
        ),
        (
            {"feature_gates": "MPSSupport=true,TimeSlicingSettings=true,DynamicMIG=true"},
            {"strategy": "MPS"},
            "warn",
            "DynamicMIG is on as well",
        ),
        ({"chart": "nvidia-dra-driver-gpu-25.3.2"}, {}, "pass", "driver 25.3.2 has no gate for it"),
        ({"chart": "nvidia-dra-driver-gpu-25.8.0"}, {}, "fail", "driver 25.8.0; gates that are on: none"),
        ({"chart": ""}, {}, "fail", "driver of unknown version"),
        (
            {},
            {"stages": ["enable-driver", "shared"], "driver_install": True},
            "pass",
            "this run switches it on",
        ),
        (
            {},
            {"stages": ["enable-driver", "shared"], "driver_install": True, "mode": "mig"},
            "fail",
            "TimeSlicingSettings is off",
        ),
    ],
)
def test_the_gate_for_sharing(plugin, settings, status, part):
    check = judge(_daemonsets({**CHART, **plugin}), {**SHARING, **settings})["sharing_gate"]
    assert check["status"] == status
    assert part in check["found"]


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        (
            {},
            "helm upgrade dra CHART --namespace dra-driver-nvidia-gpu --reuse-values --set "
            "featureGates.TimeSlicingSettings=true",
        ),
        ({"driver_install": True}, "run with --tags enable-driver,shared"),
        (
            {"driver_install": True, "mode": "mig"},
            "featureGates: {TimeSlicingSettings: true} in dra_driver_values",
        ),
    ],
)
def test_how_the_gate_is_switched_on_depends_on_who_installs_the_driver(settings, part):
    check = judge(_daemonsets(CHART), {**SHARING, **settings})["sharing_gate"]
    assert part in check["fix"]
    assert check["evidence"]["finding"] == "gate_off"


@pytest.mark.parametrize(("installs", "status"), [(True, "pass"), (False, "skip")])
def test_without_a_driver_there_is_no_gate_yet(installs, status):
    settings = {**SHARING, "stages": ["enable-driver", "shared"], "driver_install": installs}
    assert judge(_daemonsets(), settings)["sharing_gate"]["status"] == status


def test_the_gate_is_asked_for_only_where_a_gpu_is_to_be_shared():
    assert "sharing_gate" not in judge()


def test_sharing_needs_to_write_claims_and_with_mps_to_see_the_drivers_deployments():
    def asked(strategy):
        rights = preflight.needed_rights({**SETTINGS, **SHARING, "strategy": strategy})
        return {(right["verb"], right["resource"], right["namespace"]) for right in rights}

    assert ("create", "resourceclaims", "train") in asked("TimeSlicing")
    assert ("list", "deployments", PLUGIN_NAMESPACE) in asked("MPS") - asked("TimeSlicing")
    names = {item["id"] for item in preflight.named_objects({**SETTINGS, **SHARING})}
    assert {"ResourceClaim/gpu-slices-shared", "TrainingRuntime/gpu-slices-shared"} <= names
