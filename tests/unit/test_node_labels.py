"""Which labels a node needs, what is patched, and that it can be taken back."""

from __future__ import annotations

import json

import pytest
from gpu_slices.node_labels import (
    LabelError,
    expression_holds,
    former_labels,
    labels_to_obey,
    patch_for,
    pick_nodes,
    plan_node,
    planned_daemonset,
    read_record,
    selects,
    show_labels,
    wanted_labels,
)
from hypothesis import given
from hypothesis import strategies as st

PRESENT = {"nvidia.com/gpu.present": "true"}


def term(key, operator="In", *values):
    return {"key": key, "operator": operator, "values": list(values)}


def plugin(selector=None, *terms):
    return {"namespace": "n", "name": "d", "node_selector": selector or {}, "affinity_terms": list(terms)}


CHART = plugin(
    None,
    [term("feature.node.kubernetes.io/pci-10de.present", "In", "true")],
    [term("feature.node.kubernetes.io/cpu-model.vendor_id", "In", "NVIDIA")],
    [term("nvidia.com/gpu.present", "In", "true")],
)


@pytest.mark.parametrize(
    ("expression", "labels", "holds"),
    [
        (term("k", "In", "a", "b"), {"k": "b"}, True),
        (term("k", "In", "a"), {}, False),
        (term("k", "NotIn", "a"), {}, True),
        (term("k", "NotIn", "a"), {"k": "a"}, False),
        (term("k", "Exists"), {"k": ""}, True),
        (term("k", "DoesNotExist"), {"k": "x"}, False),
        (term("k", "Gt", "5"), {"k": "10"}, True),
        (term("k", "Lt", "5"), {"k": "10"}, False),
        (term("k", "Gt", "5"), {"k": "x"}, False),
        (term("k", "Near", "5"), {"k": "5"}, False),
    ],
)
def test_requirements_hold_as_the_scheduler_sees_them(expression, labels, holds):
    assert expression_holds(expression, labels) is holds


def test_the_inventorys_label_satisfies_the_chart():
    assert wanted_labels({}, PRESENT, CHART) == PRESENT


def test_a_term_that_already_holds_needs_nothing_more():
    found = {"feature.node.kubernetes.io/pci-10de.present": "true"}
    assert wanted_labels(found, {}, CHART) == {}


def test_labels_of_other_software_are_chosen_last():
    assert wanted_labels({}, {}, CHART) == PRESENT


def test_the_node_selector_is_obeyed_as_text():
    site = plugin({"nvidia-device-enable": "pgpu-dra", "slots": "2"})
    assert wanted_labels({}, {"on": True}, site) == {
        "nvidia-device-enable": "pgpu-dra",
        "slots": "2",
        "on": "True",
    }


@pytest.mark.parametrize(
    ("expressions", "labels"),
    [
        ([term("k", "Exists")], {"k": "true"}),
        ([term("k", "Gt", "3")], {"k": "4"}),
        ([term("k", "Lt", "3")], {"k": "2"}),
        ([term("k", "In", "a", "b"), term("z", "Exists")], {"k": "a", "z": "true"}),
    ],
)
def test_each_operator_that_labels_can_meet_is_met(expressions, labels):
    assert wanted_labels({}, {}, plugin(None, expressions)) == labels


@pytest.mark.parametrize(
    ("node", "base", "daemonset", "says"),
    [
        ({}, {"pool": "a"}, plugin({"pool": "b"}), "change one of them"),
        ({"k": "x"}, {}, plugin(None, [term("k", "DoesNotExist")]), "no label can satisfy"),
        ({}, {"k": "x"}, plugin(None, [term("k", "In", "y")]), "no label can satisfy"),
        ({}, {}, plugin(None, [term("k", "In", "a"), term("k", "NotIn", "a")]), "no label can satisfy"),
    ],
)
def test_what_labels_cannot_meet_is_refused(node, base, daemonset, says):
    with pytest.raises(LabelError, match=says):
        wanted_labels(node, base, daemonset)


def node(labels=None, record=None):
    return {"labels": dict(labels or {}), "added_labels": json.dumps(record) if record is not None else ""}


def apply(item, wanted):
    """Apply the planned patch the way the API server merges it."""
    patch = patch_for(item, plan_node(item, wanted)).get("metadata", {})
    labels = {**item["labels"], **patch.get("labels", {})}
    annotation = item["added_labels"]
    if "annotations" in patch:
        annotation = next(iter(patch["annotations"].values())) or ""
    return {"labels": {k: v for k, v in labels.items() if v is not None}, "added_labels": annotation}


def test_a_second_run_changes_nothing():
    after = apply(node(), PRESENT)
    assert after["labels"] == PRESENT
    assert patch_for(after, plan_node(after, PRESENT)) == {}


def test_a_label_that_was_there_is_not_ours():
    item = node(PRESENT)
    assert patch_for(item, plan_node(item, PRESENT)) == {}
    assert apply(item, {})["labels"] == PRESENT


def test_drift_is_corrected_and_the_first_value_is_remembered():
    after = apply(node({"nvidia.com/gpu.present": "no"}), PRESENT)
    after["labels"]["nvidia.com/gpu.present"] = "maybe"
    again = apply(after, PRESENT)
    assert again["labels"] == PRESENT
    assert apply(again, {})["labels"] == {"nvidia.com/gpu.present": "no"}


def test_a_label_somebody_changed_since_is_left_alone_at_the_end():
    after = apply(node(), PRESENT)
    after["labels"]["nvidia.com/gpu.present"] = "theirs"
    gone = apply(after, {})
    assert gone == {"labels": {"nvidia.com/gpu.present": "theirs"}, "added_labels": ""}


def test_a_label_no_longer_wanted_goes():
    after = apply(node(), {"old": "1", **PRESENT})
    assert apply(after, PRESENT)["labels"] == PRESENT


@pytest.mark.parametrize("text", ["{", "[]", '"x"', '{"k": 1}'])
def test_a_damaged_record_is_dropped(text):
    assert read_record(text) == {}
    item = {"labels": PRESENT, "added_labels": text}
    assert apply(item, PRESENT)["added_labels"] == ""


def test_a_diff_shows_only_what_is_touched():
    item = {"name": "a30", "labels": {"x": "1", "y": "2"}, "added_labels": ""}
    plan = plan_node(item, {"x": "3", "z": "4"})
    assert show_labels(item, plan, after=False) == 'node a30\nx: "1"\n'
    assert show_labels(item, plan, after=True) == 'node a30\nx: "3"\nz: "4"\n'


def test_a_node_that_is_not_there_is_named():
    with pytest.raises(LabelError, match="no node b"):
        pick_nodes({"a": {}}, ["a", "b"])
    assert pick_nodes({"a": {}, "c": {}}, ["a"]) == {"a": {}}


@pytest.mark.parametrize(
    ("chart_values", "selector"),
    [
        ({"kubeletPlugin": {"nodeSelector": {"pool": "gpu", "n": 1}}}, {"pool": "gpu", "n": "1"}),
        ({"kubeletPlugin": {"nodeSelector": {}}}, None),
        ({"kubeletPlugin": None}, None),
        ({}, None),
    ],
)
def test_a_driver_still_to_be_installed_is_obeyed_by_its_values(chart_values, selector):
    found = planned_daemonset(chart_values)
    assert (found and found["node_selector"]) == selector


def test_the_affinity_of_a_driver_still_to_be_installed_is_obeyed_too():
    needed = {"nodeSelectorTerms": [{"matchExpressions": [term("pool", "In", "gpu")]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": needed}}
    planned = planned_daemonset({"kubeletPlugin": {"affinity": affinity}})
    assert wanted_labels({}, PRESENT, planned) == {**PRESENT, "pool": "gpu"}


values = st.dictionaries(st.sampled_from("abcd"), st.sampled_from(["1", "2"]))


@given(values, st.lists(values, min_size=1, max_size=4))
def test_whatever_was_wanted_in_between_the_first_state_comes_back(first, wishes):
    item = node(first)
    for wish in wishes:
        item = apply(item, wish)
        assert wish.items() <= item["labels"].items()
        assert patch_for(item, plan_node(item, wish)) == {}
    assert apply(item, {}) == {"labels": first, "added_labels": ""}


@given(
    values,
    st.lists(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(["In", "Exists"])), max_size=3)),
)
def test_whatever_is_chosen_the_daemonset_then_runs_there(labels, shape):
    terms = [[term(key, operator, "1") for key, operator in expressions] for expressions in shape]
    daemonset = plugin({"a": "1"}, *terms)
    assert selects(daemonset, {**labels, **wanted_labels(labels, {}, daemonset)})


def test_an_upgrade_that_moves_the_driver_keeps_both_and_then_only_the_new():
    live, planned = plugin({"old": "a"}), planned_daemonset({"kubeletPlugin": {"nodeSelector": {"new": "b"}}})
    item = apply(node(), labels_to_obey({}, PRESENT, live, planned))
    assert item["labels"] == {**PRESENT, "old": "a", "new": "b"}
    assert selects(live, item["labels"])
    assert selects(planned, item["labels"])
    again = apply(item, labels_to_obey(former_labels(item), PRESENT, planned, planned))
    assert again["labels"] == {**PRESENT, "new": "b"}


@pytest.mark.parametrize(
    ("base", "live"),
    [
        (PRESENT, plugin({"pool": "a"})),
        (PRESENT, plugin(None, [term("pool", "In", "a")])),
        ({"pool": "b"}, plugin({"pool": "a"})),
    ],
)
def test_where_the_two_drivers_contradict_each_other_the_planned_one_counts(base, live):
    planned = plugin({"pool": "b"})
    assert labels_to_obey({}, base, live, planned) == {**base, "pool": "b"}


def test_a_running_driver_that_stays_may_not_be_contradicted():
    with pytest.raises(LabelError, match="change one of them"):
        labels_to_obey({}, {"pool": "b"}, plugin({"pool": "a"}), None)


def test_without_any_driver_only_the_inventory_counts():
    assert labels_to_obey({}, PRESENT, None, None) == PRESENT


def test_a_label_of_ours_that_meets_the_affinity_stays():
    item = node({"nvidia.com/gpu.present": "no"})
    for _ in range(2):
        item = apply(item, labels_to_obey(former_labels(item), {}, CHART, None))
        assert item["labels"] == PRESENT
    assert former_labels(item) == {"nvidia.com/gpu.present": "no"}
    item["labels"]["nvidia.com/gpu.present"] = "maybe"
    assert former_labels(item) == {"nvidia.com/gpu.present": "maybe"}
