"""Judging the driver: what is amiss, what to do next, and when waiting cannot help."""

from __future__ import annotations

import calendar
import time

import pytest
from gpu_slices import driver_state as driver
from gpu_slices.cluster import digest

NOW = float(calendar.timegm((2026, 12, 1, 12, 0, 0)))
OLD, YOUNG = "2026-12-01T11:00:00Z", "2026-12-01T11:59:59Z"
CEL = "device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == '{}'"


def device(uuid, node="a30", profile="1g.6gb", **more):
    base = {"device": uuid.lower(), "type": "mig", "parent_uuid": "GPU-0", "memory_bytes": 6 * 2**30}
    base["attributes"] = {"driverVersion": "580.95.5"}
    return {**base, "uuid": uuid, "node": node, "profile": profile, "partitionable": False, **more}


def gpu(*uuids):
    instances = [{"uuid": uuid, "profile": "1g.6gb"} for uuid in uuids]
    return {"uuid": "GPU-0", "mig_mode_current": "Enabled", "mig_devices": instances}


def pod(node="a30", ready=True, since=OLD, **more):
    container = {
        "name": "gpus",
        "ready": ready,
        "restarts": 0,
        "state": "running",
        "reason": "",
        "message": "",
    }
    base = {"name": f"plugin-{node}", "namespace": "n", "phase": "Running", "deleting": False}
    return {**base, "node": node, "ready": ready, "ready_since": since, "containers": [container], **more}


def facts(**change):
    base = {
        "nodes": {"a30": {"labels": {"gpu": "true"}}},
        "daemonsets": [
            {
                "namespace": "n",
                "name": "d",
                "role": "dra",
                "containers": ["gpus"],
                "images": ["i"],
                "node_selector": {"gpu": "true"},
                "affinity_terms": [],
                "desired": 1,
                "ready": 1,
                "generation": 1,
                "observed_generation": 1,
            }
        ],
        "device_classes": {"gpu.nvidia.com": [CEL.format("gpu")], "mig.nvidia.com": [CEL.format("mig")]},
        "slices": {
            "pools": [{"name": "a30", "node": "a30", "complete": True}],
            "devices": [device("MIG-1")],
            "incomplete": [],
        },
        "plugin_pods": [pod()],
    }
    base.update(change)
    return base


HARDWARE = {"a30": [gpu("MIG-1")]}
STALE = {"a30": [gpu("MIG-2")]}


def judge(given, hardware=HARDWARE):
    return {check["id"]: check for check in driver.driver_checks(given, ["a30"], hardware)}


def test_a_healthy_driver_passes():
    assert {check["status"] for check in judge(facts()).values()} == {"pass"}


def without_plugin(**change):
    given = facts()
    given["daemonsets"][0].update(change)
    return given


def slices(**change):
    return facts(slices={**facts()["slices"], **change})


@pytest.mark.parametrize(
    ("given", "identity", "finding"),
    [
        (facts(daemonsets=[]), "plugin", "plugin_not_found"),
        (without_plugin(containers=["compute-domains"]), "plugin", "plugin_not_found"),
        # F06: nought of nought is not ready
        (without_plugin(desired=0, ready=0), "plugin", "plugin_no_nodes"),
        (facts(nodes={"a30": {"labels": {}}}), "plugin", "plugin_no_nodes"),
        (facts(plugin_pods=[]), "plugin", "plugin_not_ready"),
        (facts(plugin_pods=[pod(ready=False)]), "plugin", "plugin_not_ready"),
        (
            facts(device_classes={"gpu.nvidia.com": [CEL.format("gpu")]}),
            "device_classes",
            "deviceclass_missing",
        ),
        (
            facts(device_classes={name: [CEL.format("gpu")] for name in driver.CLASSES}),
            "device_classes",
            "deviceclass_changed",
        ),
        # F24: a slice is there and empty
        (slices(devices=[]), "slices", "slice_empty"),
        (slices(pools=[], devices=[]), "slices", "slice_missing"),
        (slices(incomplete=["pool a30: 1 of 2"]), "slices", "pool_incomplete"),
        # F25: instances made after the plugin started
        (slices(devices=[device("MIG-9")]), "slices_match", "slice_stale"),
    ],
)
def test_each_fault_gives_its_finding(given, identity, finding):
    check = judge(given)[identity]
    assert check["status"] == "fail"
    assert check["evidence"]["finding"] == finding
    assert check["fix"]


@pytest.mark.parametrize(
    ("version", "status"), [("580.95.5", "pass"), ("565.57.1", "pass"), ("560.35.3", "warn"), ("", "skip")]
)
def test_an_old_kernel_driver_is_a_warning(version, status):
    given = slices(devices=[device("MIG-1", attributes={"driverVersion": version})])
    assert judge(given)["nvidia_driver"]["status"] == status


def test_nodes_elsewhere_that_are_not_ready_only_warn():
    given = without_plugin(desired=3, ready=2)
    given["nodes"].update({name: {"labels": {"gpu": "true"}} for name in ("b", "c")})
    check = judge(given)["plugin"]
    assert (check["status"], check["evidence"]["finding"]) == ("warn", "plugin_not_ready")


TAINTS = [
    {"key": "team", "value": "x", "effect": "NoSchedule"},
    {"key": "slow", "effect": "PreferNoSchedule"},
    {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"},
    {"key": "known", "effect": "NoExecute"},
]


@pytest.mark.parametrize(
    ("desired", "labelled", "served", "status", "says"),
    [
        (
            1,
            ["a30", "b"],
            ["a30"],
            "warn",
            "wants 1 nodes and its selector picks 2 (a30, b); no plugin pod on b",
        ),
        (1, ["a30", "b"], ["b"], "fail", "no plugin pod on a30 (team:NoSchedule)"),
        (2, ["a30"], ["a30"], "warn", "wants 2 nodes and its selector picks 1 (a30)"),
    ],
)
def test_the_daemonset_wants_just_the_nodes_that_its_selector_picks(desired, labelled, served, status, says):
    given = without_plugin(
        desired=desired, ready=desired, tolerations=[{"key": "known", "operator": "Exists"}]
    )
    given["nodes"] = {name: {"labels": {"gpu": "true"}, "taints": TAINTS} for name in labelled}
    given["plugin_pods"] = [pod(name) for name in served]
    check = judge(given)["plugin"]
    assert (check["status"], check["evidence"]["finding"]) == (status, "plugin_nodes_differ")
    assert says in check["found"]
    assert "tolerations" in check["fix"]


@pytest.mark.parametrize(
    ("container", "advice"),
    [
        ({"name": "init-container", "state": "running"}, "nvidiaDriverRoot"),
        ({"name": "gpus", "state": "waiting", "reason": "ImagePullBackOff"}, "image"),
        ({"name": "gpus", "state": "waiting", "reason": "CrashLoopBackOff"}, "log of container gpus"),
    ],
)
def test_a_plugin_pod_that_hangs_is_explained_by_where_it_hangs(container, advice):
    stuck = {"ready": False, "restarts": 3, "reason": "", "message": "", **container}
    check = judge(facts(plugin_pods=[pod(ready=False, containers=[stuck])]))["plugin"]
    assert advice in check["fix"]
    assert container["name"] in check["found"]


def test_unread_hardware_is_a_skip_with_its_reason():
    check = judge(facts(), {})["slices_match"]
    assert check["status"] == "skip"
    assert "hardware was not read" in check["found"]


def test_devices_the_driver_cuts_itself_are_not_compared():
    given = slices(devices=[device("", partitionable=True)])
    assert judge(given, STALE)["slices_match"]["status"] == "skip"
    assert driver.waiting_for(given, ["a30"], STALE) == {}


# ------------------------------------------------------------------------------------------------- next step


def step(given, hardware=HARDWARE, restarted=()):
    return driver.next_step(given, ["a30"], hardware, restarted=restarted, now=NOW)


@pytest.mark.parametrize(
    ("given", "hardware", "restarted", "expected"),
    [
        (facts(), HARDWARE, [], ("done", [])),
        (facts(), {}, [], ("done", [])),
        (facts(), STALE, [], ("restart", ["a30"])),
        (facts(plugin_pods=[pod(since=YOUNG)]), STALE, [], ("wait", [])),
        (facts(), STALE, ["a30"], ("wait", [])),
        (facts(plugin_pods=[]), HARDWARE, [], ("wait", [])),
        (facts(plugin_pods=[pod(deleting=True)]), STALE, [], ("wait", [])),
        (facts(plugin_pods=[pod(ready=False)]), STALE, [], ("wait", [])),
        (slices(pools=[], devices=[]), HARDWARE, [], ("wait", [])),
        (slices(pools=[{"name": "a30", "node": "a30", "complete": False}]), HARDWARE, [], ("wait", [])),
        (facts(daemonsets=[]), {}, [], ("done", [])),
        (facts(daemonsets=[], plugin_pods=[]), HARDWARE, [], ("stop", [])),
        (facts(nodes={"a30": {"labels": {}}}, plugin_pods=[]), HARDWARE, [], ("stop", [])),
    ],
)
def test_the_next_step(given, hardware, restarted, expected):
    assert step(given, hardware, restarted) == expected


def test_a_pod_is_restarted_once_it_has_had_time_to_publish():
    seen = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(NOW - driver.SETTLE - 1))
    assert step(facts(plugin_pods=[pod(since=seen)]), STALE) == ("restart", ["a30"])


# --------------------------------------------------------------------------------------------------- verdict


def test_in_check_mode_a_real_run_may_mend_it():
    state = {"checks": driver.driver_checks(facts(), ["a30"], STALE), "restarted": ["a30"]}
    real = {check["id"]: check for check in driver.verdict(state)}
    dry = {check["id"]: check for check in driver.verdict(state, check_mode=True)}
    assert real["slices_match"]["status"] == "fail"
    assert "was restarted on a30" in real["slices_match"]["found"]
    assert dry["slices_match"]["status"] == "warn"
    assert "would be restarted on a30" in dry["slices_match"]["found"]


RELEASE = {"found": True, "status": "deployed", "version": "0.4.1", "values": digest({"a": {"b": 1}})}


@pytest.mark.parametrize(
    ("release", "differs"),
    [
        (RELEASE, False),
        ({**RELEASE, "version": "v0.4.1"}, False),
        ({**RELEASE, "version": "0.4.0"}, True),
        ({**RELEASE, "status": "failed"}, True),
        ({**RELEASE, "values": digest({"a": {"b": 2}})}, True),
        ({**RELEASE, "found": False}, True),
        (None, True),
    ],
)
def test_helm_runs_only_when_its_own_record_differs(release, differs):
    given = {} if release is None else {"helm_release": release}
    assert driver.release_differs(given, "0.4.1", {"a": {"b": 1}}) is differs


@pytest.mark.parametrize(
    ("change", "damaged"),
    [
        ({"helm_release": RELEASE}, False),
        ({"helm_release": RELEASE, "daemonsets": []}, True),
        ({"helm_release": RELEASE, "device_classes": {"gpu.nvidia.com": []}}, True),
        ({"helm_release": {**RELEASE, "found": False}, "daemonsets": []}, False),
        ({"daemonsets": []}, False),
    ],
)
def test_a_release_that_lost_objects_is_found(change, damaged):
    assert driver.release_damaged(facts(**change)) is damaged


def test_what_could_not_be_read_is_not_taken_for_lost():
    given = {"helm_release": RELEASE, "errors": {"daemonsets": {"message": "403"}}}
    assert not driver.release_damaged(given)


@pytest.mark.parametrize(
    ("of_pod", "rolling", "waits"),
    [("A=true,", True, False), ("", True, True), ("", False, False), (None, True, False)],
)
def test_a_pod_that_is_about_to_be_replaced_for_its_gates_is_waited_for(of_pod, rolling, waits):
    given = facts(plugin_pods=[pod(**({} if of_pod is None else {"feature_gates": of_pod}))])
    given["daemonsets"][0].update(feature_gates="A=true,", rolling=rolling)
    lacking = driver.waiting_for(given, ["a30"], {})
    assert lacking == ({"a30": "the plugin pod has the former feature gates"} if waits else {})
    step = driver.next_step(given, ["a30"], {}, restarted=[], now=NOW)
    assert step == (("wait" if waits else "done"), [])
