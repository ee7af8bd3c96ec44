"""Merging slices, counting free devices, choosing a profile, comparing with hardware."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import yaml
from gpu_slices.resource_slices import (
    allocations,
    choose_slice,
    claimed_devices,
    compare_with_hardware,
    describe_profiles,
    merge_slices,
    profile_slug,
    with_holders,
)
from hypothesis import given
from hypothesis import strategies as st

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures/resourceslices"
GIB = 2**30


def published(name):
    return yaml.safe_load((FIXTURES / f"{name}.yaml").read_text())["items"]


def make_slice(node="a30", generation=1, count=1, devices=(), driver="gpu.nvidia.com", **spec):
    return {
        "metadata": {"name": f"{node}-{generation}-{len(devices)}"},
        "spec": {
            "driver": driver,
            "nodeName": node,
            "pool": {"name": node, "generation": generation, "resourceSliceCount": count},
            "devices": list(devices),
            **spec,
        },
    }


def make_device(name, profile="1g.6gb", memory="5952Mi", uuid=None, parent="GPU-0", **more):
    return {
        "name": name,
        "attributes": {
            "type": {"string": "mig"},
            "profile": {"string": profile},
            "uuid": {"string": uuid or f"MIG-{name}"},
            "parentUUID": {"string": parent},
            "productName": {"string": "NVIDIA A30"},
        },
        "capacity": {"memory": {"value": memory}, "memorySlice0": {"value": "1"}},
        **more,
    }


def claim(device, pool="a30", name="c", **result):
    results = [{"driver": "gpu.nvidia.com", "pool": pool, "device": device, "request": "gpu-slice", **result}]
    return {
        "metadata": {"namespace": "train", "name": name},
        "status": {"allocation": {"devices": {"results": results}}, "reservedFor": [{"name": "pod-1"}]},
    }


@pytest.mark.parametrize(
    ("name", "listing"),
    [
        ("7x1g", "7 x 1g.18gb (16 GiB)"),
        ("2x3g", "2 x 3g.71gb (69.5 GiB)"),
        ("fullgpu", "1 x gpu (140.4 GiB)"),
        ("h200-real-full", "1 x gpu (140.4 GiB)"),
    ],
)
def test_captured_slices_are_read(name, listing):
    merged = merge_slices(published(name))
    assert merged["incomplete"] == []
    assert describe_profiles(merged["devices"]) == listing


def test_a_captured_mig_device_is_flattened():
    device = merge_slices(published("2x3g"))["devices"][0]
    assert device["device"] == "gpu-0-mig-3g71gb-9-0"
    assert (device["type"], device["profile"]) == ("mig", "3g.71gb")
    assert device["parent_uuid"] == "GPU-8a6bf8f4-6b0c-4d8e-9a5e-000000000000"
    assert device["memory_bytes"] == 71168 * 2**20
    assert device["slices"] == [0, 1, 2, 3]
    assert device["attributes"]["resource.kubernetes.io/pciBusID"] == "0000:19:00.0"
    assert not device["partitionable"]


def test_counters_only_slices_carry_no_device_and_mark_the_others():
    merged = merge_slices(published("dynmig"))
    assert merged["pools"][0]["complete"]
    assert len(merged["devices"]) == 26
    assert all(device["partitionable"] for device in merged["devices"])


def test_the_older_shape_is_read_too():
    raw = make_device("d")
    old = make_slice(devices=[{"name": "d", "basic": {k: raw[k] for k in ("attributes", "capacity")}}])
    assert merge_slices([old])["devices"][0]["profile"] == "1g.6gb"


def test_only_the_newest_generation_counts():
    merged = merge_slices(
        [
            make_slice(generation=1, devices=[make_device("old")]),
            make_slice(generation=2, devices=[make_device("new")]),
        ]
    )
    assert [device["device"] for device in merged["devices"]] == ["new"]


def test_an_incomplete_newest_generation_hides_the_older_one():
    merged = merge_slices(
        [
            make_slice(generation=1, devices=[make_device("old")]),
            make_slice(generation=2, count=2, devices=[make_device("new")]),
        ]
    )
    assert merged["devices"] == []
    assert merged["incomplete"] == ["pool a30: 1 of 2 ResourceSlices of generation 2 are there"]


def test_missing_devices_and_other_drivers_do_not_count():
    empty = make_slice()
    empty["spec"]["devices"] = None
    other = make_slice(node="b", driver="compute-domain.nvidia.com", devices=[make_device("d")])
    merged = merge_slices([empty, other])
    assert [pool["name"] for pool in merged["pools"]] == ["a30"]
    assert merged["devices"] == []


@given(st.permutations(range(4)))
def test_the_order_of_slices_does_not_matter(order):
    slices = [
        make_slice("a", 1, 1, [make_device("a1")]),
        make_slice("b", 3, 2, [make_device("b1")]),
        make_slice("b", 3, 2, [make_device("b2")]),
        make_slice("b", 2, 1, [make_device("b0")]),
    ]
    merged = merge_slices([slices[index] for index in order])
    assert [(device["node"], device["device"]) for device in merged["devices"]] == [
        ("a", "a1"),
        ("b", "b1"),
        ("b", "b2"),
    ]


def test_holders_are_found_in_every_namespace_but_admin_access_holds_nothing():
    claims = [claim("d0"), claim("d1", adminAccess=True), {"metadata": {"name": "new"}, "status": {}}]
    devices = merge_slices([make_slice(devices=[make_device("d0"), make_device("d1")])])["devices"]
    held = with_holders(devices, claims)
    assert held[0]["holder"] == {"namespace": "train", "claim": "c", "pods": ["pod-1"]}
    assert held[1]["holder"] is None
    assert list(allocations(claims)) == [("gpu.nvidia.com", "a30", "d0")]


# ------------------------------------------------------------------------------------------------- choosing


def reserved(made, *pods, **allocation):
    made["status"]["reservedFor"] = [{"resource": "pods", "name": pod, "uid": pod} for pod in pods]
    made["status"]["allocation"].update(allocation)
    return made


def test_what_pods_hold_is_named_with_claim_and_pods():
    whole = {"name": "gpu-0", "attributes": {"type": {"string": "gpu"}, "uuid": {"string": "GPU-7"}}}
    devices = merge_slices([make_slice(devices=[make_device("d0"), make_device("d1")]), make_slice("h")])
    devices["devices"] += merge_slices([make_slice("b", devices=[whole])])["devices"]
    claims = [
        reserved(claim("d0", name="one"), "p"),
        reserved(claim("gpu-0", pool="b", name="two"), "q", "r"),
    ]
    assert claimed_devices(devices["devices"], claims) == [
        {"node": "a30", "uuid": "MIG-d0", "holder": "claim train/one, pod train/p"},
        {"node": "b", "uuid": "GPU-7", "holder": "claim train/two, pods train/q, train/r"},
    ]


def test_a_claim_that_no_pod_has_reserved_blocks_nothing():
    devices = merge_slices([make_slice(devices=[make_device("d0"), make_device("d1")])])["devices"]
    others = [
        reserved(claim("d0")),
        reserved(claim("d0", adminAccess=True), "monitor"),
        reserved(claim("d0", driver="compute-domain.nvidia.com"), "p"),
        {"metadata": {"name": "new", "namespace": "train"}, "status": {}},
    ]
    assert claimed_devices(devices, others) == []
    # one device, two claims: that of the pod counts, in either order
    both = [reserved(claim("d1", name="used"), "p"), reserved(claim("d1", name="idle"))]
    assert len(claimed_devices(devices, both)) == len(claimed_devices(devices, both[::-1])) == 1


def test_a_held_device_that_is_not_published_counts_for_its_node():
    bound = {
        "nodeSelector": {
            "nodeSelectorTerms": [
                {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["a30"]}]}
            ]
        }
    }
    claims = [reserved(claim("d9", pool="pool-4"), "p", **bound), reserved(claim("d9", pool="h200"), "p")]
    assert [(item["node"], item["uuid"]) for item in claimed_devices([], claims)] == [
        ("a30", ""),
        ("h200", ""),
    ]


MIXED = [
    make_slice("a30", devices=[make_device(f"s{n}") for n in range(2)]),
    make_slice(
        "h200",
        devices=[make_device("m", "1g.18gb", "16Gi"), make_device("l", "3g.71gb", "71424Mi")],
    ),
]


def choose(slices=MIXED, claims=(), nodes=None, **wish):
    return choose_slice(merge_slices(copy.deepcopy(slices))["devices"], claims, nodes or {}, **wish)


@pytest.mark.parametrize(
    ("wish", "profile", "free"),
    [
        ({}, "1g.6gb", 2),
        ({"memory": "6Gi"}, "1g.18gb", 1),
        ({"memory": "16Gi"}, "1g.18gb", 1),
        ({"memory": "17Gi"}, "3g.71gb", 1),
        ({"profile": "3g.71gb", "memory": "1Gi"}, "3g.71gb", 1),
    ],
)
def test_the_smallest_profile_that_is_large_enough_is_taken(wish, profile, free):
    made = choose(**wish)
    assert (made["profile"], made["free"], made["kind"]) == (profile, free, "")


def test_auto_moves_on_when_the_smallest_is_taken():
    made = choose(claims=[claim("s0"), claim("s1")])
    assert made["profile"] == "1g.18gb"


@pytest.mark.parametrize(
    ("case", "kind", "says"),
    [
        ({"slices": []}, "slice_empty", "hold no device"),
        ({"slices": published("fullgpu")}, "no_mig", "NVIDIA H200"),
        ({"profile": "2g.12gb"}, "profile_not_published", "2 x 1g.6gb"),
        ({"memory": "100Gi"}, "none_big_enough", "1 x 3g.71gb"),
        ({"profile": "1g.6gb", "claims": [claim("s0"), claim("s1")]}, "devices_exhausted", "train/c"),
        (
            {"profile": "1g.18gb", "nodes": {"h200": {"ready": True, "unschedulable": True, "taints": []}}},
            "node_excluded",
            "h200: the node is cordoned",
        ),
        (
            {
                "profile": "1g.6gb",
                "nodes": {
                    "a30": {"ready": True, "taints": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]}
                },
            },
            "node_excluded",
            "node taint nvidia.com/gpu:NoSchedule",
        ),
    ],
)
def test_each_reason_for_no_slice_is_its_own(case, kind, says):
    made = choose(**case)
    assert made["profile"] == ""
    assert made["kind"] == kind
    assert says in made["reason"]


GPU_TAINT = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}


@pytest.mark.parametrize(
    ("tolerations", "free"),
    [
        ([], 0),
        ([{"key": "nvidia.com/gpu", "operator": "Exists"}], 2),
        ([{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoExecute"}], 0),
        ([{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}], 2),
        ([{"key": "nvidia.com/gpu", "value": "absent"}], 0),
        ([{"key": "other", "operator": "Exists"}], 0),
        ([{"operator": "Exists"}], 2),
        ([{"value": "present"}], 0),
    ],
)
def test_a_tainted_node_counts_for_pods_that_tolerate_it(tolerations, free):
    nodes = {"a30": {"ready": True, "taints": [GPU_TAINT]}}
    assert choose(profile="1g.6gb", nodes=nodes, tolerations=tolerations)["free"] == free


def test_without_any_slice_the_driver_is_named():
    made = choose_slice([], [], {}, driver_found=False)
    assert made["kind"] == "no_driver"


def test_a_tainted_device_is_not_free():
    sick = make_device("s", taints=[{"key": "gpu.nvidia.com/xid", "value": "79", "effect": "NoSchedule"}])
    watched = make_device("w", taints=[{"key": "gpu.nvidia.com/unmonitored", "effect": "None"}])
    made = choose([make_slice(devices=[sick, watched])])
    assert [device["device"] for device in made["devices"]] == ["w"]
    assert "gpu.nvidia.com/xid=79:NoSchedule" in choose([make_slice(devices=[sick])])["reason"]


@given(st.integers(0, 90), st.sets(st.sampled_from(["s0", "s1", "m", "l"])))
def test_a_chosen_slice_is_free_and_large_enough(memory, taken):
    claims = [claim(name, pool="a30" if name.startswith("s") else "h200", name=f"c-{name}") for name in taken]
    made = choose(claims=claims, memory=f"{memory}Gi")
    for device in made["devices"]:
        assert device["device"] not in taken
        assert device["memory_bytes"] >= memory * GIB
    if not made["profile"]:
        assert made["kind"] in ("devices_exhausted", "none_big_enough")


@pytest.mark.parametrize(
    ("profile", "slug"), [("1g.6gb", "1g-6gb"), ("1g.10gb+me", "1g-10gb-me"), ("7g.141gb", "7g-141gb")]
)
def test_a_profile_becomes_part_of_a_name(profile, slug):
    assert profile_slug(profile) == slug


# ------------------------------------------------------------------------------------------------- hardware


def gpu(uuid="GPU-0", mode="Enabled", devices=()):
    return {
        "uuid": uuid,
        "mig_mode_current": mode,
        "mig_devices": [{"uuid": f"MIG-{name}", "profile": profile} for name, profile in devices],
    }


def compare(slices, gpus):
    return compare_with_hardware(merge_slices(slices)["devices"], gpus, "a30")


def test_equal_sides_differ_in_nothing():
    slices = [make_slice(devices=[make_device("s0"), make_device("s1")])]
    assert compare(slices, [gpu(devices=[("s0", "1g.6gb"), ("s1", "1g.6gb")])]) == []


def test_other_nodes_are_not_looked_at():
    slices = [make_slice("a30", devices=[make_device("s0")]), make_slice("b", devices=[make_device("x")])]
    assert compare(slices, [gpu(devices=[("s0", "1g.6gb")])]) == []


@pytest.mark.parametrize(
    ("slices", "gpus", "says"),
    [
        ([make_slice()], [gpu(devices=[("s0", "1g.6gb")])], "is on the hardware and not published"),
        ([make_slice(devices=[make_device("s0")])], [gpu()], "is published and not on the hardware"),
        (
            [make_slice(devices=[make_device("s0")])],
            [gpu(devices=[("s0", "2g.12gb")])],
            "MIG device 2g.12gb MIG-s0 is published as 1g.6gb",
        ),
        (
            [make_slice(devices=[make_device("s0", parent="GPU-9")])],
            [gpu(devices=[("s0", "1g.6gb")])],
            "published with parent GPU-9",
        ),
        ([make_slice(devices=[make_device("s0")])], [gpu(mode="Disabled")], "GPU GPU-0 is on the hardware"),
    ],
)
def test_each_difference_is_named(slices, gpus, says):
    assert any(says in line for line in compare(slices, gpus))


def test_a_gpu_out_of_mig_mode_publishes_itself():
    device = make_device("gpu-0", uuid="GPU-0")
    device["attributes"]["type"] = {"string": "gpu"}
    assert compare([make_slice(devices=[device])], [gpu(mode="Disabled")]) == []


def test_the_same_number_of_other_devices_is_a_difference():
    slices = [make_slice(devices=[make_device("old0"), make_device("old1")])]
    assert len(compare(slices, [gpu(devices=[("new0", "1g.6gb"), ("new1", "1g.6gb")])])) == 4
