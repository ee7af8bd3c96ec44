"""From facts to the claim template."""

from __future__ import annotations

import copy

import pytest
from gpu_slices import claim

DEVICE = {
    "driver": "gpu.nvidia.com",
    "pool": "a30",
    "node": "a30",
    "device": "gpu-0-mig-1g6gb-14-0",
    "type": "mig",
    "profile": "1g.6gb",
    "uuid": "MIG-1",
    "parent_uuid": "GPU-0",
    "memory_bytes": 5952 * 2**20,
    "product": "NVIDIA A30",
    "slices": [0],
    "attributes": {"profile": "1g.6gb"},
    "capacity": {"memory": "5952Mi"},
    "taints": [],
    "holder": None,
}
FACTS = {
    "slices": {"devices": [DEVICE], "pools": [{"name": "a30"}], "incomplete": []},
    "claims": [],
    "nodes": {},
    "namespace": {"found": True, "labels": {"app.kubernetes.io/managed-by": "gpu-slices"}},
    "claim_templates": {},
    "errors": {},
}
EMPTY = {**FACTS, "slices": {"devices": [], "pools": [], "incomplete": []}}
LAYOUTS = {"a30": ["1g.6gb"], "h200": ["1g.18gb", "3g.71gb"]}


def test_the_choice_is_handed_on_with_its_devices():
    made = claim.choice(FACTS, "auto", "5Gi")
    told = claim.result(made)
    assert told["template"] == "mig-1g-6gb"
    assert told["devices"][0]["uuid"] == "MIG-1"
    assert told["devices"][0]["memory_bytes"] == 5952 * 2**20
    assert told["skip_reason"] == ""
    assert claim.choice_check(made, "auto", "5Gi", True)["status"] == "pass"


def test_no_slice_is_a_skip_and_a_failure_when_one_is_required():
    made = claim.choice(EMPTY, "auto", "5Gi")
    assert claim.choice_check(made, "auto", "5Gi", False)["status"] == "skip"
    check = claim.choice_check(made, "auto", "5Gi", True)
    assert check["status"] == "fail"
    assert check["evidence"]["finding"] == "no_driver"
    assert claim.result(made)["skip_reason"] == made["reason"]


def test_slices_without_their_device_class_are_a_skip_at_once():
    made = claim.choice({**FACTS, "device_classes": {"gpu.nvidia.com": []}}, "auto", "5Gi")
    check = claim.choice_check(made, "auto", "5Gi", False)
    assert (check["status"], check["evidence"]["finding"]) == ("skip", "class_missing")
    assert "DeviceClass mig.nvidia.com does not exist" in check["found"]
    assert claim.choice({**FACTS, "device_classes": {"mig.nvidia.com": []}}, "auto", "5Gi")["profile"]


def test_what_could_not_be_read_is_never_a_skip():
    facts = {"errors": {"slices": {"kind": "forbidden", "message": "Not allowed (403)."}}, "claims": []}
    made = claim.choice(facts, "auto", "5Gi")
    check = claim.choice_check(made, "auto", "5Gi", False)
    assert check["status"] == "fail"
    assert "Not allowed (403)." in check["found"]


@pytest.mark.parametrize("question", ["slices", "claims", "namespace", "claim_templates"])
def test_whatever_was_refused_is_told_and_nothing_is_planned(question):
    facts = {key: value for key, value in FACTS.items() if key != question}
    facts["errors"] = {question: {"kind": "forbidden", "message": "Not allowed (403)."}}
    made = claim.choice(facts, "auto", "5Gi")
    assert (made["profile"], made["kind"], made["reason"]) == ("", "facts_unreadable", "Not allowed (403).")
    assert claim.template_plan(facts, [])["apply"] == []


def test_an_incomplete_pool_is_named():
    facts = copy.deepcopy(EMPTY)
    facts["slices"].update(incomplete=["pool a30: 1 of 2"], pools=[{"name": "a30"}])
    assert claim.choice(facts, "auto", "5Gi")["kind"] == "pool_incomplete"


@pytest.mark.parametrize(
    ("profile", "memory", "foreseen"),
    [
        ("auto", "5Gi", "1g.6gb"),
        ("auto", "7Gi", "1g.18gb"),
        ("auto", "30Gi", "3g.71gb"),
        ("auto", "99Gi", ""),
        ("3g.71gb", "5Gi", "3g.71gb"),
        ("2g.12gb", "5Gi", ""),
    ],
)
def test_check_mode_foresees_what_the_layouts_will_yield(profile, memory, foreseen):
    made = claim.choice(EMPTY, profile, memory, LAYOUTS, predict=True)
    assert (made["profile"], made["predicted"]) == (foreseen, bool(foreseen))
    assert claim.result(made)["devices"] == []


def test_check_mode_does_not_foresee_slices_that_are_there_and_taken():
    result = {key: DEVICE[key] for key in ("driver", "pool", "device")}
    taken = {
        "metadata": {"name": "c", "namespace": "other"},
        "status": {"allocation": {"devices": {"results": [result]}}, "reservedFor": [{"name": "p"}]},
    }
    facts = {**FACTS, "claims": [taken]}
    made = claim.choice(facts, "1g.6gb", "5Gi", LAYOUTS, predict=True)
    assert (made["kind"], made["predicted"]) == ("devices_exhausted", False)


def test_what_is_published_goes_before_what_is_foreseen():
    assert not claim.choice(FACTS, "auto", "5Gi", LAYOUTS, predict=True)["predicted"]


LABELS = {"app.kubernetes.io/managed-by": "gpu-slices"}
SPEC = {"spec": {"devices": {"requests": [{"name": "gpu-slice", "exactly": {"count": 1}}]}}}
SERVED = {
    "spec": {"devices": {"requests": [{"name": "gpu-slice", "exactly": {"count": 1, "allocationMode": "x"}}]}}
}
OTHER = {"spec": {"devices": {"requests": [{"name": "gpu-slice", "exactly": {"count": 2}}]}}}
TEMPLATE = {
    "kind": "ResourceClaimTemplate",
    "metadata": {"name": "mig-1g-6gb", "namespace": "gpu-slices", "labels": LABELS},
    "spec": SPEC,
}
NAMESPACE = {"kind": "Namespace", "metadata": {"name": "gpu-slices", "labels": LABELS}}


def plan(namespace=True, template=None, labels=None, **options):
    templates = {} if template is None else {"mig-1g-6gb": {"spec": template, "labels": labels or LABELS}}
    facts = {
        "namespace": {"found": namespace, "labels": LABELS if namespace else {}},
        "claim_templates": templates,
    }
    made = claim.template_plan(facts, [NAMESPACE, TEMPLATE], **options)
    return [manifest["kind"] for manifest in made["apply"]], made["replace"], bool(made["foreign"])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"namespace": False}, (["Namespace", "ResourceClaimTemplate"], False, False)),
        ({"namespace": False, "check_mode": True}, (["Namespace"], False, False)),
        ({}, (["ResourceClaimTemplate"], False, False)),
        ({"template": SERVED}, ([], False, False)),
        ({"template": OTHER}, (["ResourceClaimTemplate"], True, False)),
        ({"template": OTHER, "check_mode": True}, ([], True, False)),
        ({"template": SERVED, "labels": {"own": "er"}}, ([], False, True)),
    ],
)
def test_only_what_differs_is_applied(given, expected):
    assert plan(**given) == expected


@pytest.mark.parametrize(
    ("given", "status", "says"),
    [
        ({"template": SERVED}, "pass", "it is there"),
        ({}, "pass", "it is applied"),
        ({"template": OTHER}, "pass", "it is replaced"),
        ({"template": SERVED, "labels": {"own": "er"}}, "fail", "not ours"),
    ],
)
def test_the_template_is_a_check_of_its_own(given, status, says):
    template = given.get("template")
    templates = (
        {} if template is None else {"mig-1g-6gb": {"spec": template, "labels": given.get("labels", LABELS)}}
    )
    facts = {**FACTS, "claim_templates": templates}
    made = claim.choice(facts, "auto", "5Gi")
    planned = claim.template_plan(facts, [NAMESPACE, TEMPLATE])
    checks = claim.claim_checks(made, planned, "auto", "5Gi", False)
    assert [check["id"] for check in checks] == ["slice", "template"]
    assert checks[1]["status"] == status
    assert says in checks[1]["found"]


def test_without_a_slice_there_is_no_template_to_speak_of():
    made = claim.choice(EMPTY, "auto", "5Gi")
    planned = claim.template_plan({**EMPTY}, [])
    assert [check["id"] for check in claim.claim_checks(made, planned, "auto", "5Gi", False)] == ["slice"]


def test_a_namespace_of_somebody_else_is_left_alone():
    facts = {"namespace": {"found": True, "labels": {}}, "claim_templates": {}}
    made = claim.template_plan(facts, [NAMESPACE, TEMPLATE])
    assert [manifest["kind"] for manifest in made["apply"]] == ["ResourceClaimTemplate"]


def cut(*shape, claims=()):
    """Facts with devices of these (profile, GiB) and claims of (device number, namespace, pod)."""
    devices = [
        {**DEVICE, "device": f"d{n}", "uuid": f"MIG-{n}", "profile": profile, "memory_bytes": size * 2**30}
        for n, (profile, size) in enumerate(shape)
    ]
    held = [
        {
            "metadata": {"namespace": namespace, "name": f"claim-{n}"},
            "status": {
                "allocation": {
                    "devices": {"results": [{"driver": "gpu.nvidia.com", "pool": "a30", "device": f"d{n}"}]}
                },
                "reservedFor": [{"resource": "pods", "name": pod}],
            },
        }
        for n, namespace, pod in claims
    ]
    slices = {**FACTS["slices"], "devices": devices}
    return {**FACTS, "slices": slices, "claims": held, "namespace": {"name": "ns", **FACTS["namespace"]}}


SMALL, LARGE = ("1g.6gb", 6), ("2g.12gb", 12)
MIXED = (SMALL, SMALL, LARGE, LARGE, LARGE)


@pytest.mark.parametrize(
    ("profile", "memory", "count", "chosen", "free"),
    [
        ("auto", "5Gi", 1, "1g.6gb", 2),
        ("auto", "5Gi", 2, "1g.6gb", 2),
        ("auto", "5Gi", 3, "2g.12gb", 3),
        ("auto", "8Gi", 1, "2g.12gb", 3),
        ("2g.12gb", "5Gi", 3, "2g.12gb", 3),
    ],
)
def test_several_slices_are_of_the_smallest_profile_with_enough(profile, memory, count, chosen, free):
    made = claim.choice(cut(*MIXED), profile, memory, count=count, stage="sft")
    assert (made["profile"], made["free"], made["kind"]) == (chosen, free, "")
    assert {device["profile"] for device in made["devices"]} == {chosen}
    assert made["published"] == "2 x 1g.6gb (6 GiB), 3 x 2g.12gb (12 GiB)"
    assert claim.choice_check(made, profile, memory, True, count)["status"] == "pass"


@pytest.mark.parametrize(
    ("profile", "count", "says"),
    [
        ("1g.6gb", 3, "free are 2 of 1g.6gb, and 3 slices of profile 1g.6gb are needed"),
        ("auto", 4, "free are 2 of 1g.6gb, 3 of 2g.12gb, and 4 slices of one profile with at least 5Gi are"),
    ],
)
def test_too_few_free_slices_are_told_at_the_choice(profile, count, says):
    made = claim.choice(cut(*MIXED), profile, "5Gi", count=count, stage="sft")
    assert made["kind"] == "too_few_free"
    assert says in claim.result(made)["skip_reason"]
    assert claim.choice_check(made, profile, "5Gi", False, count)["status"] == "skip"
    check = claim.choice_check(made, profile, "5Gi", True, count)
    assert (check["status"], check["evidence"]["finding"]) == ("fail", "too_few_free")
    assert "sft_nodes" in check["fix"]
    assert f"{count} free slices" in check["needed"]


@pytest.mark.parametrize(
    ("namespace", "pod", "enough"),
    [
        ("ns", "gpu-slices-sft-0123456789-node-0-0-abcde", True),
        ("ns", "gpu-slices-smoke-0123456789", False),
        ("other", "gpu-slices-sft-0123456789-node-0-0-abcde", False),
        ("ns", "somebody", False),
    ],
)
def test_what_an_earlier_run_of_the_stage_holds_counts(namespace, pod, enough):
    facts = cut(SMALL, SMALL, SMALL, claims=[(0, namespace, pod)])
    made = claim.choice(facts, "auto", "5Gi", count=3, stage="sft")
    assert bool(made["profile"]) is enough
    check = claim.choice_check(made, "auto", "5Gi", False, 3)
    assert check["status"] == ("pass" if enough else "skip")
    assert ("2 free of 1g.6gb (6 GiB) and 1 held by earlier pods" in check["found"]) is enough


@pytest.mark.parametrize(("published", "predicted"), [(SMALL, False), (LARGE, True)])
def test_check_mode_foresees_nothing_of_too_few_that_are_there_already(published, predicted):
    made = claim.choice(cut(published), "auto", "5Gi", LAYOUTS, predict=True, count=2, stage="sft")
    assert (made["predicted"], bool(made["profile"])) == (predicted, predicted)
