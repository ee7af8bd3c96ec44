"""Gate 1: faults that an inventory shows by itself."""

from __future__ import annotations

import pytest
from gpu_slices import inputs
from hypothesis import given
from hypothesis import strategies as st

KNOWN = ["gpu_slices_memory", "gpu_slices_profile", "mig_config", "mig_configs", "smoke_timeout", "sft_steps"]


@pytest.mark.parametrize(
    ("tags", "skipped", "stages"),
    [
        (["all"], [], ["preflight", "enable-driver", "smoke", "sft"]),
        (["all"], ["sft"], ["preflight", "enable-driver", "smoke"]),
        (["smoke"], [], ["smoke"]),
        (["sft", "preflight"], [], ["preflight", "sft"]),
        (["preflight"], [], ["preflight", "enable-driver", "smoke", "sft"]),
        (["preflight"], ["sft"], ["preflight", "enable-driver", "smoke"]),
        (["mig"], [], []),
        ([], [], ["preflight", "enable-driver", "smoke", "sft"]),
    ],
)
def test_tags_choose_stages(tags, skipped, stages):
    assert inputs.chosen_stages(tags, skipped) == stages


@pytest.mark.parametrize(
    ("tags", "skipped", "asked", "stages"),
    [
        (["all"], [], [], ["preflight", "enable-driver", "shared"]),
        (["all"], ["shared"], [], ["preflight", "enable-driver"]),
        (["preflight"], [], [], ["preflight", "enable-driver", "shared"]),
        (["sft"], [], [], ["sft"]),
        (["shared"], [], [], ["shared"]),
        (["all"], [], ["smoke"], ["preflight", "enable-driver", "smoke", "shared"]),
    ],
)
def test_in_mode_shared_a_whole_run_shares_a_gpu_and_asks_for_no_slice(tags, skipped, asked, stages):
    assert inputs.chosen_stages(tags, skipped, asked, "shared") == stages


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("gpu_slices_memroy", "gpu_slices_memory"),
        ("gpu_slice_memory", "gpu_slices_memory"),
        ("mig_confg", "mig_config"),
        ("sft_step", "sft_steps"),
        ("gpu_slices_zzz", ""),
    ],
)
def test_a_misspelt_name_is_refused_with_the_nearest_known_one(name, nearest):
    faults = inputs.unknown_variables({"a30": [name], "h200": [name]}, KNOWN)
    assert len(faults) == 1
    assert f"{name} (a30, h200)" in faults[0]
    assert (f"did you mean {nearest}?" if nearest else "did you mean") in faults[0]


@pytest.mark.parametrize(
    "name",
    ["a30_mig_config", "my_smoke_timeout", "ansible_host", "lab_instance", "mig_gpus", "smoke_timeout"],
)
def test_names_of_other_people_and_our_own_facts_pass(name):
    assert inputs.unknown_variables({"a30": [name]}, KNOWN) == []


def test_a_user_may_declare_variables_of_his_own():
    names = {"a30": ["mig_site_note", "smoke_x"]}
    assert inputs.unknown_variables(names, KNOWN, ["mig_site_*", "smoke_x"]) == []
    assert len(inputs.unknown_variables(names, KNOWN, ["mig_site_*"])) == 1


@given(st.sampled_from(KNOWN), st.integers(0, 30))
def test_dropping_one_letter_never_passes_unnoticed(name, position):
    index = position % len(name)
    wrong = name[:index] + name[index + 1 :]
    if wrong not in KNOWN:
        assert inputs.unknown_variables({"h": [wrong]}, KNOWN)


def test_the_node_group_must_exist_and_have_hosts():
    assert inputs.node_group_faults("gpu_nodes", {"gpu_nodes": ["a"]}) == []
    assert (
        "did you mean gpu_nodes?" in inputs.node_group_faults("gpu_node", {"all": [], "gpu_nodes": ["a"]})[0]
    )
    assert "no host" in inputs.node_group_faults("gpu_nodes", {"gpu_nodes": []})[0]
    assert "groups: none" in inputs.node_group_faults("gpu_nodes", {"all": [], "ungrouped": []})[0]


def test_two_hosts_must_not_be_one_node():
    assert inputs.duplicate_node_faults({"a": "n1", "b": "n2"}) == []
    assert "a, b" in inputs.duplicate_node_faults({"a": "n1", "b": "n1"})[0]


GOOD = {
    "gpu_slices_profile": "auto",
    "gpu_slices_memory": "5Gi",
    "gpu_slices_namespace": "gpu-slices",
    "gpu_slices_image": "x",
}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"gpu_slices_profile": "1g6gb"}, "a MIG profile"),
        ({"gpu_slices_profile": "1g.10GB"}, "a MIG profile"),
        ({"gpu_slices_memory": "5GB"}, "not a Kubernetes quantity"),
        ({"gpu_slices_memory": "0"}, "more than nothing"),
        ({"gpu_slices_namespace": "GPU_slices"}, "Kubernetes name"),
        ({"gpu_slices_image": ""}, "smoke and sft need an image"),
        ({"gpu_slices_image": "bad tag:1"}, "an image reference"),
        ({"gpu_slices_image": "docker.io/LAB/train:1"}, "an image reference"),
    ],
)
def test_values_that_types_do_not_catch(change, says):
    faults = inputs.value_faults({**GOOD, **change}, ["smoke", "sft"])
    assert len(faults) == 1
    assert says in faults[0]


@pytest.mark.parametrize("profile", ["auto", "1g.6gb", "1g.5gb+me", "7g.141gb"])
def test_good_values_pass(profile):
    assert inputs.value_faults({**GOOD, "gpu_slices_profile": profile}, ["smoke"]) == []
    assert inputs.value_faults({**GOOD, "gpu_slices_image": ""}, ["enable-driver"]) == []


LAYOUTS = {
    "four": [{"devices": "all", "mig-enabled": True, "mig-devices": {"1g.6gb": 4}}],
    "mixed": [{"devices": [0], "mig-enabled": True, "mig-devices": {"3g.71gb": 1, "1g.18gb": 2}}],
    "broken": ["what"],
}


def test_profiles_are_read_from_layouts():
    wanted = inputs.wanted_profiles(LAYOUTS, {"a": "four", "b": "mixed", "c": "", "d": "broken", "e": "none"})
    assert wanted == {"a": ["1g.6gb"], "b": ["1g.18gb", "3g.71gb"], "c": [], "d": [], "e": []}


@pytest.mark.parametrize(
    ("profile", "memory", "wanted", "says"),
    [
        ("auto", "5Gi", {"a": ["1g.6gb"]}, ""),
        ("auto", "60Gi", {"a": ["1g.6gb"], "b": ["3g.71gb"]}, ""),
        ("auto", "60Gi", {"a": ["1g.6gb"]}, "at most 6 GiB"),
        ("2g.12gb", "5Gi", {"a": ["1g.6gb"]}, "cut only 1g.6gb"),
        ("1g.6gb", "60Gi", {"a": ["1g.6gb"]}, ""),
        ("2g.12gb", "5Gi", {"a": ["1g.6gb"], "b": []}, ""),
        ("2g.12gb", "5Gi", {}, ""),
        ("auto", "rubbish", {"a": ["1g.6gb"]}, ""),
    ],
)
def test_layouts_must_yield_the_profile_that_is_asked_for(profile, memory, wanted, says):
    faults = inputs.profile_faults(profile, memory, wanted)
    assert bool(faults) == bool(says)
    if says:
        assert says in faults[0]


@pytest.mark.parametrize(
    ("host", "managed", "faults"),
    [
        ({"mig_config": "four"}, True, 0),
        ({"mig_config": "four", "mig_manage": False}, False, 0),
        ({"mig_config": "four", "mig_manage": "no"}, False, 0),
        ({"gpu_slices_nodes_reachable": False}, False, 0),
        ({"mig_config": "four", "gpu_slices_nodes_reachable": "false"}, False, 1),
    ],
)
def test_a_layout_needs_nodes_that_can_be_reached(host, managed, faults):
    assert inputs.manages_layout(host) is managed
    assert len(inputs.reach_faults({"a30": host})) == faults


@pytest.mark.parametrize(
    ("values", "namespace", "says"),
    [
        ({}, "dra", []),
        ({"resources": {"gpus": {"enabled": False}}}, "dra", ["resources.gpus.enabled"]),
        ({"featureGates": {"DynamicMIG": True}}, "dra", ["layouts of a30"]),
        (
            {"featureGates": {"DynamicMIG": True, "MPSSupport": "true"}},
            "dra",
            ["layouts", "excludes MPSSupport"],
        ),
        ({"featureGates": {"MPSSupport": True}}, "dra", []),
        ({}, "default", ["dra_driver_namespace"]),
        ({"allowDefaultNamespace": True}, "default", []),
        ("rubbish", "dra", []),
        ({"resources": None, "featureGates": []}, "dra", []),
    ],
)
def test_chart_values_that_cannot_work_are_refused(values, namespace, says):
    faults = inputs.driver_faults(values, namespace, ["a30"])
    assert len(faults) == len(says)
    for fault, text in zip(faults, says):
        assert text in fault


def test_all_faults_make_one_message():
    assert inputs.compose([]) == ""
    text = inputs.compose(["One.", "Two."])
    assert text.splitlines() == [
        "The inventory has 2 faults; nothing was asked or changed:",
        "  1. One.",
        "  2. Two.",
    ]


@pytest.mark.parametrize(
    "image",
    [
        "train",
        "docker.io/lab/train:1.13",
        "localhost:5000/a/b_c/d-e:V1.2_x",
        "registry.example.com/team/train@sha256:" + "0" * 64,
    ],
)
def test_image_references_pass(image):
    assert inputs.value_faults({**GOOD, "gpu_slices_image": image}, ["sft"]) == []


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"sft_steps": -3}, "sft_steps is -3: needed is more than 0."),
        ({"sft_nodes": "0"}, "sft_nodes is 0: needed is more than 0."),
        ({"sft_learning_rate": "nan"}, "sft_learning_rate is nan: needed is more than 0."),
        ({"smoke_timeout": 0}, "smoke_timeout is 0: needed is more than 0."),
        ({"sft_loss_factor": 1.5}, "sft_loss_factor is 1.5: needed is more than 0 and less than 1."),
    ],
)
def test_numbers_that_no_run_can_work_with(given, says):
    assert inputs.number_faults(given) == [says]


def test_good_numbers_and_wrong_types_are_left_alone():
    assert inputs.number_faults({"sft_steps": 40, "sft_loss_factor": "0.4", "smoke_timeout": "abc"}) == []


@pytest.mark.parametrize(
    ("resources", "says"),
    [
        ({"requests": {"cpu": "50m", "memory": "1Gi"}, "limits": {"cpu": 1, "memory": "1024Mi"}}, []),
        ({}, []),
        ("{{ of_ours }}", []),
        ({"request": {"cpu": 1}}, ["crowd_resources.request: needed are requests and limits"]),
        ({"limits": 4}, ["crowd_resources.limits: needed are requests and limits"]),
        (
            {"requests": {"cpu": "lots"}},
            ["crowd_resources.requests.cpu: 'lots' is not a Kubernetes quantity"],
        ),
        ({"limits": {"nvidia.com/gpu": 1}}, ["crowd_resources.limits has nvidia.com/gpu: leave it out"]),
        (
            {"requests": {"memory": "2Gi"}, "limits": {"memory": "1500Mi"}},
            ["requests.memory is 2Gi, more than limits.memory (1500Mi)"],
        ),
    ],
)
def test_resources_that_no_pod_can_have(resources, says):
    faults = inputs.resource_faults({"crowd_resources": resources, "my_resources": {"request": 1}})
    assert len(faults) == len(says)
    assert all(text in fault for text, fault in zip(says, faults))


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        ({"a/b/c": "x"}, "the name 'a/b/c'"),
        ({"/gpu": "x"}, "the name '/gpu'"),
        ({"nvidia.com/": "x"}, "the name 'nvidia.com/'"),
        ({"gpu": "\u00e4 \u00f6"}, "gives gpu the value"),
        ({"gpu": "x" * 64}, "at most 63"),
    ],
)
def test_labels_that_the_api_would_refuse(labels, says):
    faults = inputs.label_faults(labels)
    assert len(faults) == 1
    assert says in faults[0]


def test_good_labels_pass():
    assert inputs.label_faults({"nvidia.com/gpu.present": "true", "plain": ""}) == []


@pytest.mark.parametrize(("value", "expected"), [({}, True), ({"gpu_slices_nodes_reachable": "no"}, False)])
def test_a_host_may_be_reached_unless_it_says_no(value, expected):
    assert inputs.may_be_reached(value) is expected
    assert inputs.manages_layout(value) is expected
