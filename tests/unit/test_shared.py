"""Sharing one GPU: inputs, the choice of the GPU, the claim, and what the jobs prove together."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from gpu_slices import shared
from hypothesis import given
from hypothesis import strategies as st

GIB = 2**30
UUID = "GPU-1c0cfcde-971b-4bbf-a218-cd281e38f90c"


# -------------------------------------------------------------------------------------------------- inputs


@pytest.mark.parametrize(
    ("values", "mode", "profile", "parts"),
    [
        ({}, "mig", "auto", []),
        ({}, "shared", "auto", []),
        ({"shared_strategy": "TimeSlicing", "shared_interval": "Long"}, "shared", "auto", []),
        (
            {"shared_strategy": "MPS", "shared_mps": {"defaultActiveThreadPercentage": 50}},
            "shared",
            "auto",
            [],
        ),
        ({"shared_jobs": 256}, "shared", "auto", []),
        # The role checks its own settings also where only the tag asks for the stage.
        ({}, "mig", "1g.6gb", []),
        ({}, "shared", "1g.6gb", ["gpu_slices_profile is 1g.6gb", "cannot be applied to a MIG device"]),
        (
            {"shared_claim_kind": "ResourceClaimTemplate"},
            "mig",
            "auto",
            ["shared_claim_kind is ResourceClaimTemplate", "a GPU, of its own, and nothing is shared"],
        ),
        (
            {"shared_strategy": "MPS", "shared_interval": "Short"},
            "mig",
            "auto",
            ["shared_interval is Short and shared_strategy is MPS"],
        ),
        (
            {"shared_mps": {"defaultPinnedDeviceMemoryLimit": "1Gi"}},
            "mig",
            "auto",
            ["shared_mps sets defaultPinnedDeviceMemoryLimit and shared_strategy is TimeSlicing"],
        ),
        ({"shared_jobs": 1}, "mig", "auto", ["shared_jobs is 1: needed are at least 2"]),
        ({"shared_jobs": 257}, "mig", "auto", ["shared_jobs is 257", "at most 256"]),
    ],
)
def test_settings_that_contradict_each_other_are_refused_by_name(values, mode, profile, parts):
    faults = shared.input_faults(values, mode, profile)
    assert len(faults) == (1 if parts else 0)
    assert all(part in faults[0] for part in parts)


@pytest.mark.parametrize(
    ("mps", "part"),
    [
        ({"defaultActiveThreadPercentage": 0}, "defaultActiveThreadPercentage is 0: needed is 1 to 100"),
        ({"defaultActiveThreadPercentage": 101}, "defaultActiveThreadPercentage is 101"),
        ({"defaultPinnedDeviceMemoryLimit": "a lot"}, "'a lot' is not a Kubernetes quantity"),
        (
            {"defaultPinnedDeviceMemoryLimit": "512Ki"},
            "defaultPinnedDeviceMemoryLimit is 512Ki: needed is at",
        ),
        ({"defaultPerDevicePinnedMemoryLimit": {"1": "1Gi"}}, "names device '1': needed is 0"),
        ({"defaultPerDevicePinnedMemoryLimit": {"0": "1K"}}, "defaultPerDevicePinnedMemoryLimit[0]"),
    ],
)
def test_settings_of_mps_that_the_driver_refuses_are_refused_first(mps, part):
    (fault,) = shared.input_faults({"shared_strategy": "MPS", "shared_mps": mps}, "shared", "auto")
    assert fault.startswith("shared_mps.")
    assert part in fault


@pytest.mark.parametrize("values", [{"shared_jobs": "many"}, {"shared_mps": []}, {"shared_mps": None}])
def test_wrong_types_are_left_to_the_type_check(values):
    assert shared.input_faults(values, "shared", "auto") == []


@pytest.mark.parametrize(
    ("mode", "named", "faults"),
    [("mig", False, 0), ("shared", False, 0), ("vgpu", False, 1), ("vgpu", True, 0), ("", False, 1)],
)
def test_an_unknown_mode_of_the_environment_is_refused_by_the_name_of_its_variable(mode, named, faults):
    found = shared.mode_faults(mode, named)
    assert len(found) == faults
    assert all("DRA_SLICE_MODE" in fault and "mig or shared" in fault for fault in found)


def gates(**given: Any) -> dict[str, Any]:
    return {"dra_driver_values": {"featureGates": given}}


@pytest.mark.parametrize(
    ("values", "mode", "part"),
    [
        ({}, "shared", ""),
        (gates(TimeSlicingSettings=True), "shared", ""),
        (gates(TimeSlicingSettings=False), "mig", ""),
        (gates(TimeSlicingSettings="false"), "shared", "featureGates.TimeSlicingSettings off"),
        ({**gates(MPSSupport=False), "shared_strategy": "MPS"}, "shared", "featureGates.MPSSupport off"),
        ({**gates(DynamicMIG=True), "shared_strategy": "MPS"}, "shared", "both DynamicMIG and MPSSupport"),
        (gates(DynamicMIG=True), "shared", ""),
        # Told with the user's own values.
        ({**gates(DynamicMIG=True, MPSSupport=True), "shared_strategy": "MPS"}, "shared", ""),
        (
            {**gates(MPSSupport=False), "shared_strategy": "MPS", "dra_driver_chart_version": "25.3.2"},
            "shared",
            "",
        ),
        ({"dra_driver_values": {"featureGates": None}}, "shared", ""),
        ({"dra_driver_values": None}, "shared", ""),
    ],
)
def test_chart_values_that_keep_the_driver_from_sharing(values, mode, part):
    faults = shared.gate_faults(values, mode)
    assert len(faults) == (1 if part else 0)
    assert part in "".join(faults)


@pytest.mark.parametrize(
    ("arguments", "made"),
    [
        (("TimeSlicing",), {"strategy": "TimeSlicing"}),
        # An empty timeSlicingConfig would stop the driver's plugin.
        (("TimeSlicing", ""), {"strategy": "TimeSlicing"}),
        (("TimeSlicing", "Long"), {"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Long"}}),
        (("TimeSlicing", "", {"defaultActiveThreadPercentage": 5}), {"strategy": "TimeSlicing"}),
        (("MPS", "", {}), {"strategy": "MPS"}),
        (
            (
                "MPS",
                "",
                {
                    "defaultActiveThreadPercentage": "50",
                    "defaultPinnedDeviceMemoryLimit": "10Gi",
                    "defaultPerDevicePinnedMemoryLimit": {0: "5Gi"},
                },
            ),
            {
                "strategy": "MPS",
                "mpsConfig": {
                    "defaultActiveThreadPercentage": 50,
                    "defaultPinnedDeviceMemoryLimit": "10Gi",
                    "defaultPerDevicePinnedMemoryLimit": {"0": "5Gi"},
                },
            },
        ),
        (("MPS", "", {"defaultActiveThreadPercentage": None}), {"strategy": "MPS"}),
    ],
)
def test_the_config_holds_what_is_set_and_nothing_else(arguments, made):
    assert shared.sharing(*arguments) == made


# -------------------------------------------------------------------------------------------------- the GPU


def gpu(name: str = "gpu-0", node: str = "h200", **more: Any) -> dict[str, Any]:
    return {
        "driver": "gpu.nvidia.com",
        "pool": node,
        "node": node,
        "device": name,
        "type": "gpu",
        "profile": "",
        "uuid": UUID,
        "parent_uuid": "",
        "memory_bytes": 140 * GIB,
        "product": "NVIDIA H200",
        "attributes": {"productName": "NVIDIA H200"},
        "capacity": {},
        "taints": [],
        "holder": None,
        **more,
    }


MIG = gpu("gpu-0-mig-1g6gb-14-0", "a30", type="mig", profile="1g.6gb", memory_bytes=6 * GIB)
SETTINGS = {"mode": "shared", "strategy": "TimeSlicing", "driver_install": False}
NODE = {"ready": True, "unschedulable": False, "taints": []}


def holder(claim: str, namespace: str = "team", pods: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"namespace": namespace, "claim": claim, "pods": list(pods)}


def facts(*devices: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "errors": {},
        "slices": {"devices": list(devices), "pools": [{"name": "h200"}], "incomplete": []},
        "claims": [],
        "nodes": {"h200": NODE, "a30": NODE},
        "namespace": {"name": "gpu-slices", "found": True, "labels": {}, "terminating": False},
        "device_classes": {"gpu.nvidia.com": []},
        "daemonsets": [],
        **more,
    }


def test_a_free_gpu_is_chosen_and_slices_are_not():
    made = shared.choose(facts(MIG, gpu()), SETTINGS)
    assert [device["device"] for device in made["gpus"]] == ["gpu-0"]
    check = shared.choice_check(made, True)
    assert check["status"] == "pass"
    assert check["found"] == "gpu-0 on h200 (NVIDIA H200, 140 GiB)"


def test_what_our_own_claim_holds_is_free_for_it():
    made = shared.choose(facts(gpu(holder=holder("gpu-slices-shared", "gpu-slices", ("a-0",)))), SETTINGS)
    assert "held by our own claim" in shared.choice_check(made, True)["found"]


@pytest.mark.parametrize(
    ("given", "kind", "part"),
    [
        (facts(MIG), "no_gpu", "no device of type gpu is published; published are 1 x 1g.6gb (6 GiB)"),
        (facts(), "slice_empty", "hold no device"),
        (
            facts(slices={"devices": [], "pools": [], "incomplete": []}),
            "no_driver",
            "no ResourceSlice of gpu.nvidia.com is published",
        ),
        (
            facts(slices={"devices": [], "pools": [{}], "incomplete": ["pool h200: 1 of 2"]}),
            "pool_incomplete",
            "pool h200: 1 of 2",
        ),
        (facts(gpu(), device_classes={}), "no_class", "no DeviceClass gpu.nvidia.com"),
        (
            facts(gpu(holder=holder("c", pods=("p", "q")))),
            "gpus_taken",
            "gpu-0 on h200 is held by claim team/c (pods p, q)",
        ),
        # Of the same name, in somebody else's namespace.
        (facts(gpu(holder=holder("gpu-slices-shared"))), "gpus_taken", "claim team/gpu-slices-shared"),
        (
            facts(gpu(taints=[{"key": "gpu.nvidia.com/xid", "value": "79", "effect": "NoSchedule"}])),
            "gpus_taken",
            "device taint gpu.nvidia.com/xid=79:NoSchedule",
        ),
        (
            facts(gpu(), nodes={"h200": {**NODE, "unschedulable": True}}),
            "node_excluded",
            "the node is cordoned",
        ),
    ],
)
@pytest.mark.parametrize("required", [True, False])
def test_without_a_free_gpu_it_is_said_why_at_once(given, kind, part, required):
    made = shared.choose(given, SETTINGS)
    assert (made["gpus"], made["kind"]) == ([], kind)
    check = shared.choice_check(made, required)
    assert check["status"] == ("fail" if required else "skip")
    assert part in check["found"]
    assert check["fix"]
    assert check["needed"] == "a published device of type gpu that no other claim holds"


def test_a_tolerated_node_can_be_used():
    taint = {"key": "gpu", "value": "", "effect": "NoSchedule"}
    given = facts(gpu(), nodes={"h200": {**NODE, "taints": [taint]}})
    assert shared.choose(given, SETTINGS)["kind"] == "node_excluded"
    assert shared.choose(given, SETTINGS, tolerations=[{"key": "gpu", "operator": "Exists"}])["gpus"]


def test_facts_that_cannot_be_read_fail_in_any_case():
    given = facts(gpu())
    del given["claims"]
    given["errors"] = {"claims": {"kind": "forbidden", "message": "claims are forbidden"}}
    check = shared.choice_check(shared.choose(given, SETTINGS), False)
    assert check["status"] == "fail"
    assert "claims are forbidden" in check["found"]


@pytest.mark.parametrize(
    ("given", "predicted"),
    [(facts(MIG), True), (facts(), True), (facts(gpu(holder=holder("c"))), False), (facts(gpu()), False)],
)
def test_check_mode_takes_for_granted_what_a_run_may_bring(given, predicted):
    made = shared.choose(given, SETTINGS, predict=True)
    assert made["predicted"] is predicted
    if predicted:
        check = shared.choice_check(made, True)
        assert (check["status"], "a real run may bring one" in check["found"]) == ("skip", True)


PLUGIN = {
    "namespace": "dra",
    "name": "plugin",
    "role": "dra",
    "release": "dra",
    "chart": "dra-driver-nvidia-gpu-0.4.1",
    "containers": ["gpus"],
    "images": [],
}


@pytest.mark.parametrize(
    ("gates_now", "predict", "kind", "status"),
    [
        ("TimeSlicingSettings=true,", False, "", "pass"),
        ("", False, "gate_off", "skip"),
        ("", True, "gate_off", "skip"),
    ],
)
def test_a_gate_that_is_off_stops_the_stage_also_without_gate_2(gates_now, predict, kind, status):
    # Also in a run that was to switch it on: by now it had its chance.
    settings = {**SETTINGS, "driver_install": True}
    given = facts(gpu(), daemonsets=[{**PLUGIN, "feature_gates": gates_now}])
    made = shared.choose(given, settings, predict=predict)
    assert (made["kind"], bool(made["gpus"]), made["predicted"]) == (kind, not kind, predict)
    check = shared.choice_check(made, False)
    assert check["status"] == status
    if kind and not predict:
        assert check["found"] == (
            "TimeSlicingSettings is off in dra/plugin (driver 0.4.1; gates that are on: none) [gate_off]"
        )
        assert "run with --tags enable-driver,shared" in check["fix"]


# ------------------------------------------------------------------------------------------------ the claim

OURS = {"app.kubernetes.io/managed-by": "gpu-slices"}
SPACE = {"kind": "Namespace", "metadata": {"name": "gpu-slices", "labels": OURS}}
CLAIM = {
    "kind": "ResourceClaim",
    "metadata": {"name": "gpu-slices-shared", "namespace": "gpu-slices", "labels": OURS},
    "spec": {"devices": {"config": [{"strategy": "MPS"}]}},
}


def cluster(claim: dict[str, Any] | None, found: bool = True) -> dict[str, Any]:
    return {
        "namespace": {"name": "gpu-slices", "found": found, "labels": OURS if found else {}},
        "objects": {"claim": claim},
    }


def live(
    users: tuple[str, ...] = (), strategy: str = "MPS", labels: dict[str, str] | None = None
) -> dict[str, Any]:
    claim = copy.deepcopy(CLAIM)
    claim["spec"] = {"devices": {"config": [{"strategy": strategy, "added": "by the server"}]}}
    claim["metadata"]["labels"] = OURS if labels is None else labels
    return {**claim, "status": {"reservedFor": [{"name": user} for user in users]}}


@pytest.mark.parametrize(
    ("there", "check_mode", "apply", "replace", "status"),
    [
        (cluster(None, found=False), False, ["Namespace", "ResourceClaim"], False, "pass"),
        (cluster(None, found=False), True, ["Namespace"], False, "pass"),
        (cluster(None), False, ["ResourceClaim"], False, "pass"),
        (cluster(live()), False, [], False, "pass"),
        (cluster(live(("foreign",))), False, [], False, "pass"),
        (cluster(live(strategy="TimeSlicing")), False, ["ResourceClaim"], True, "pass"),
        (cluster(live(strategy="TimeSlicing")), True, [], True, "pass"),
        (
            cluster(live(("gpu-slices-shared-abc-1-node-0-0-x",), strategy="TimeSlicing")),
            False,
            ["ResourceClaim"],
            True,
            "pass",
        ),
        (cluster(live(("foreign",), strategy="TimeSlicing")), False, [], False, "fail"),
        (cluster(live(labels={})), False, [], False, "fail"),
        (cluster(live(labels={**OURS, "x": "y"})), False, [], False, "pass"),
    ],
)
def test_the_claim_is_applied_replaced_or_left(there, check_mode, apply, replace, status):
    plan = shared.claim_plan(there, [SPACE, CLAIM], check_mode=check_mode)
    assert [manifest["kind"] for manifest in plan["apply"]] == apply
    assert plan["replace"] is replace
    check = shared.claim_check(plan, "gpu-slices")
    assert check["status"] == status
    assert bool(check["fix"]) is (status == "fail")
    if status == "pass":
        missing = there["objects"]["claim"] is None
        said = "is replaced" if replace else "is applied" if missing or apply else "is there"
        assert check["found"] == f"it {said}"


def test_whoever_holds_the_claim_is_named():
    plan = shared.claim_plan(cluster(live(("b", "a"), strategy="TimeSlicing")), [CLAIM])
    check = shared.claim_check(plan, "gpu-slices")
    assert "is held by pod a, pod b, not by jobs of ours" in check["found"]
    assert check["evidence"]["finding"] == "claim_in_use"


# ------------------------------------------------------------------------------------------------ the proof

SEEN = {"compute_mode": "Default", "timeslice": "Default", "mps_pipe_directory": "", "mps_daemon": False}
MPS_SEEN = {
    "compute_mode": "Exclusive_Process",
    "timeslice": "",
    "mps_pipe_directory": "/pipes",
    "mps_daemon": True,
}


def member(
    number: int,
    start: float | None = 100.0,
    end: float | None = 130.0,
    *,
    logged: str = UUID,
    allocated: str = UUID,
    claim: str = "gpu-slices-shared",
    seen: dict[str, Any] | None = None,
    peak: int | None = GIB,
) -> dict[str, Any]:
    visible = {"kind": "gpu", "uuid": logged, "sharing": SEEN if seen is None else seen}
    proof: dict[str, Any] = {"devices": [visible], "peak_kind": "cuda"}
    for key, value in (("started_at", start), ("ended_at", end), ("peak_bytes", peak)):
        if value is not None:
            proof[key] = value
    return {
        "name": f"gpu-slices-shared-abc-{number}",
        "pods": [
            {
                "name": f"pod-{number}",
                "node": "h200",
                "log": f"[proof] {json.dumps(proof)}\nOK\n",
                "devices": [gpu(uuid=allocated, claim=claim, namespace="gpu-slices")],
            }
        ],
    }


def judged(
    members: list[dict[str, Any]], strategy: str = "TimeSlicing", interval: str = ""
) -> dict[str, Any]:
    arguments = {"namespace": "gpu-slices", "strategy": strategy, "interval": interval}
    return {check["id"]: check for check in shared.judge(members, arguments)}


def test_three_jobs_on_one_gpu_at_one_moment():
    checks = judged([member(1), member(2, 110, 140), member(3, 120, 150)])
    assert {name: check["status"] for name, check in checks.items()} == {
        "one-gpu": "pass",
        "overlap": "pass",
        "strategy": "pass",
        "memory": "pass",
    }
    assert UUID in checks["one-gpu"]["found"]
    assert (
        "in all 3 logs and allocations, by claim gpu-slices/gpu-slices-shared" in checks["one-gpu"]["found"]
    )
    assert "for 10.0 s, from 00:02:00.0 to 00:02:10.0 UTC" in checks["overlap"]["found"]
    assert "memory is not isolated between these jobs" in checks["memory"]["found"]
    assert "The peaks add up to 3 GiB of the card's 140 GiB" in checks["memory"]["found"]
    table = checks["one-gpu"]["evidence"]["jobs"]
    assert [row["started"] for row in table] == ["00:01:40.0", "00:01:50.0", "00:02:00.0"]


@pytest.mark.parametrize(
    "odd",
    [
        {"logged": "GPU-2"},
        {"allocated": "GPU-2"},
        {"logged": "GPU-2", "allocated": "GPU-2"},
        {"claim": "gpu-slices-shared-x7k2p"},
    ],
)
def test_another_gpu_or_another_claim_is_no_sharing(odd):
    check = judged([member(1), member(2, **odd)])["one-gpu"]
    assert check["status"] == "fail"
    assert check["evidence"]["finding"] == "not_one_gpu"
    assert "gpu-slices-shared-abc-2: log" in check["found"]


@pytest.mark.parametrize("broken", ["devices", "log", "pods"])
def test_a_job_that_tells_nothing_proves_nothing(broken):
    second = member(2)
    if broken == "pods":
        second["pods"] = []
    else:
        second["pods"][0][broken] = [] if broken == "devices" else None
    checks = judged([member(1), second])
    assert checks["one-gpu"]["status"] == "fail"
    if broken != "devices":
        assert checks["overlap"]["status"] == "fail"


def test_no_jobs_prove_nothing():
    assert {check["status"] for check in judged([]).values()} <= {"fail", "warn"}


@pytest.mark.parametrize("spans", [[(100, 110), (110, 120)], [(100, 110), (120, 130), (105, 125)]])
def test_jobs_after_one_another_do_not_share(spans):
    check = judged([member(i, *span) for i, span in enumerate(spans, 1)])["overlap"]
    assert check["status"] == "fail"
    assert "raise shared_seconds by more than" in check["fix"]


@given(st.lists(st.tuples(st.floats(0, 1e9), st.floats(0, 1e6)), min_size=1, max_size=6))
def test_an_overlap_is_a_moment_that_lies_in_every_span(spans):
    members = [member(i, start, start + length) for i, (start, length) in enumerate(spans, 1)]
    status = judged(members)["overlap"]["status"]
    latest = max(start for start, _ in spans)
    common = all(start <= latest < start + length for start, length in spans)
    assert (status == "pass") is common


@pytest.mark.parametrize(
    ("strategy", "interval", "seen", "status", "part"),
    [
        ("TimeSlicing", "", SEEN, "pass", "compute mode Default and time slice Default"),
        ("TimeSlicing", "Long", {**SEEN, "timeslice": "Long"}, "pass", "time slice Long"),
        ("TimeSlicing", "Long", SEEN, "fail", "saw time slice Default"),
        ("TimeSlicing", "", {**SEEN, "timeslice": ""}, "pass", "the time slice cannot be read"),
        ("TimeSlicing", "Long", {**SEEN, "timeslice": ""}, "warn", "the time slice cannot be read"),
        ("TimeSlicing", "", {**SEEN, "compute_mode": "Exclusive_Process"}, "fail", "compute mode Exclusive"),
        ("TimeSlicing", "", MPS_SEEN, "fail", "has CUDA_MPS_PIPE_DIRECTORY"),
        ("MPS", "", MPS_SEEN, "pass", "the control daemon in /pipes"),
        ("MPS", "", {**MPS_SEEN, "mps_daemon": False}, "fail", "found no control daemon"),
        ("MPS", "", {**MPS_SEEN, "mps_pipe_directory": ""}, "fail", "has no CUDA_MPS_PIPE_DIRECTORY"),
        ("MPS", "", {**MPS_SEEN, "compute_mode": ""}, "warn", "the compute mode cannot be read"),
        ("MPS", "", SEEN, "fail", "saw compute mode Default"),
        ("MPS", "", {}, "fail", "has no CUDA_MPS_PIPE_DIRECTORY"),
    ],
)
def test_the_strategy_is_what_the_pods_saw(strategy, interval, seen, status, part):
    good = MPS_SEEN if strategy == "MPS" else {**SEEN, "timeslice": interval or "Default"}
    check = judged([member(1, seen=good), member(2, seen=seen)], strategy, interval)["strategy"]
    assert check["status"] == status
    assert part in check["found"]


def test_peaks_that_do_not_fit_together_are_a_warning():
    check = judged([member(1, peak=100 * GIB), member(2, peak=60 * GIB)])["memory"]
    assert check["status"] == "warn"
    assert "add up to 160 GiB of the card's 140 GiB" in check["found"]
    assert "shared_jobs" in check["fix"]


def test_memory_that_nobody_told_is_not_called_fine():
    assert judged([member(1), member(2, peak=None)])["memory"]["status"] == "warn"


# ------------------------------------------------------------------------------------------------ the daemon


def deployment(name: str, ready: int = 1) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "dra"}, "status": {"readyReplicas": ready}}


@pytest.mark.parametrize(
    ("deployments", "status"),
    [
        ([deployment("mps-control-daemon-u1-ab123")], "pass"),
        ([deployment("mps-control-daemon-u1-ab123"), deployment("mps-control-daemon-u2-ab123")], "pass"),
        ([deployment("mps-control-daemon-u1-ab123", 0)], "fail"),
        ([deployment("mps-control-daemon-u2-ab123")], "fail"),
        ([deployment("mps-control-daemon-u1-ab123"), deployment("mps-control-daemon-u1-cd456")], "fail"),
        ([], "fail"),
    ],
)
def test_the_daemon_of_the_claim(deployments, status):
    check = shared.daemon_check(shared.daemons_of(deployments, "u1"))
    assert check["status"] == status
    assert bool(check["fix"]) is (status == "fail")


def test_a_claim_without_a_uid_has_no_daemon():
    assert shared.daemons_of([deployment("mps-control-daemon--ab123")], "") == []
