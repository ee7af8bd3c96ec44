"""Which labels a GPU node needs so that the DRA driver's DaemonSet runs on it, and what to patch.

Pure functions over trimmed nodes and DaemonSets (:mod:`cluster`). What we set is recorded in a node
annotation as JSON ``{label: {"set": value, "was": former value or null}}``, so that it can be taken back
exactly.
"""

from __future__ import annotations

import json
from typing import Any, Dict, Iterable, Mapping

from .cluster import LABELS_ANNOTATION, affinity_terms

Object = Dict[str, Any]
Labels = Dict[str, str]

# Labels that node-feature-discovery writes and takes away by itself: the last ones to choose.
_OWNED_BY_OTHERS = "feature.node.kubernetes.io/"


class LabelError(ValueError):
    """No labels can make the node fit; the message says why and what to do."""


def expression_holds(expression: Object, labels: Mapping[str, str]) -> bool:
    """Whether a node selector requirement holds for these labels."""
    key, operator = str(expression["key"]), str(expression["operator"])
    values = [str(value) for value in expression.get("values") or []]
    present = key in labels
    if operator == "In":
        return present and labels[key] in values
    if operator == "NotIn":
        return not present or labels[key] not in values
    if operator == "Exists":
        return present
    if operator == "DoesNotExist":
        return not present
    if operator in ("Gt", "Lt") and present and values:
        try:
            left, right = int(labels[key]), int(values[0])
        except ValueError:
            return False
        return left > right if operator == "Gt" else left < right
    return False


def selects(daemonset: Object, labels: Mapping[str, str]) -> bool:
    """Whether a DaemonSet's node selector and required affinity admit a node with these labels."""
    if any(labels.get(key) != value for key, value in daemonset["node_selector"].items()):
        return False
    terms = daemonset["affinity_terms"]
    return not terms or any(all(expression_holds(item, labels) for item in term) for term in terms)


def _labels_for_term(term: Iterable[Object], labels: Mapping[str, str]) -> Labels | None:
    """Labels that make a term hold, or None if labels alone cannot."""
    chosen: Labels = {}
    for expression in term:
        merged = {**labels, **chosen}
        if expression_holds(expression, merged):
            continue
        key, operator = str(expression["key"]), str(expression["operator"])
        values = [str(value) for value in expression.get("values") or []]
        if operator == "In" and values:
            chosen[key] = values[0]
        elif operator == "Exists":
            chosen[key] = "true"
        elif operator in ("Gt", "Lt") and values and values[0].lstrip("-").isdigit():
            chosen[key] = str(int(values[0]) + (1 if operator == "Gt" else -1))
        else:
            return None
        if not expression_holds(expression, {**labels, **chosen}):
            return None
    merged = {**labels, **chosen}
    return chosen if all(expression_holds(item, merged) for item in term) else None


def wanted_labels(labels: Mapping[str, str], base: Mapping[str, str], daemonset: Object | None) -> Labels:
    """All labels a node is to have: ``base`` (from the inventory) plus what the DaemonSet asks for.

    ``labels`` are those the node has without us. Of the OR-ed affinity terms one that already holds is kept;
    else the one that needs the fewest new labels is chosen, with those that other software maintains last.
    Raises LabelError when the inventory contradicts the DaemonSet, or no term can be met by labels.
    """
    wanted = {str(key): str(value) for key, value in base.items()}
    if daemonset is None:
        return wanted
    name = f"DaemonSet {daemonset['namespace']}/{daemonset['name']}"
    for key, value in daemonset["node_selector"].items():
        if wanted.get(key, value) != value:
            raise LabelError(
                f"gpu_nodes_labels sets {key}={wanted[key]}, and {name} runs only where {key}={value}: "
                "change one of them"
            )
        wanted[key] = value
    terms = daemonset["affinity_terms"]
    merged = {**labels, **wanted}
    if not terms or any(all(expression_holds(item, merged) for item in term) for term in terms):
        return wanted
    choices = [choice for choice in (_labels_for_term(term, merged) for term in terms) if choice is not None]
    choices = [choice for choice in choices if not any(wanted.get(k, v) != v for k, v in choice.items())]
    if not choices:
        raise LabelError(
            f"no label can satisfy the node affinity of {name}: change kubeletPlugin.affinity in the chart's "
            "values"
        )
    wanted.update(sorted(choices, key=_cost)[0])
    return wanted


def labels_to_obey(
    labels: Mapping[str, str], base: Mapping[str, str], live: Object | None, planned: Object | None
) -> Labels:
    """As :func:`wanted_labels`, for a driver that runs (``live``) and one that is to follow (``planned``).

    Both are obeyed, so that the one that runs keeps its nodes until the other one is there. Where they
    contradict each other the planned one counts.
    """
    if planned is None:
        return wanted_labels(labels, base, live)
    wanted = wanted_labels(labels, base, planned)
    try:
        return wanted_labels(labels, wanted, live)
    except LabelError:
        return wanted


def former_labels(node: Object) -> Labels:
    """The labels of a node without those that we set.

    Only these may decide which labels to set: else one of ours would look as if it were there anyway.
    """
    labels: Labels = dict(node["labels"])
    for key, item in read_record(node["added_labels"]).items():
        if labels.get(key) == item["set"]:
            del labels[key]
            if item.get("was") is not None:
                labels[key] = str(item["was"])
    return labels


def _cost(choice: Labels) -> tuple[int, int]:
    return sum(key.startswith(_OWNED_BY_OTHERS) for key in choice), len(choice)


def read_record(annotation: str) -> dict[str, Object]:
    """Our record on a node; a damaged one counts as empty, for it cannot be trusted to restore anything."""
    try:
        record = json.loads(annotation) if annotation else {}
    except ValueError:
        return {}
    if not isinstance(record, dict):
        return {}
    return {str(key): item for key, item in record.items() if isinstance(item, dict) and "set" in item}


def plan_node(node: Object, wanted: Labels) -> Object:
    """What to patch so that a node has exactly the ``wanted`` labels of ours.

    ``node`` is a trimmed node. A label we set earlier and no longer want gets its former value back, unless
    somebody has changed it since. Returns ``{"labels": {key: value or None}, "record": {…}}``, both empty of
    meaning when ``labels`` is empty and the record is what the node already carries.
    """
    current: Labels = node["labels"]
    record = read_record(node["added_labels"])
    changes: dict[str, str | None] = {}
    after = dict(record)
    for key, value in wanted.items():
        if key in record:
            after[key] = {"set": value, "was": record[key].get("was")}
        elif current.get(key) != value:
            after[key] = {"set": value, "was": current.get(key)}
        if current.get(key) != value:
            changes[key] = value
    for key in set(record) - set(wanted):
        del after[key]
        if current.get(key) == record[key]["set"]:
            was = record[key].get("was")
            if was != current.get(key):
                changes[key] = was
    return {"labels": changes, "record": after}


def patch_for(node: Object, plan: Object) -> Object:
    """The merge patch for a plan, or an empty dict when the node is as it should be."""
    record = plan["record"]
    same = record == read_record(node["added_labels"]) and bool(record) == bool(node["added_labels"])
    if not plan["labels"] and same:
        return {}
    annotation = json.dumps(record, sort_keys=True, separators=(",", ":")) if record else None
    metadata: Object = {"annotations": {LABELS_ANNOTATION: annotation}}
    if plan["labels"]:
        metadata["labels"] = plan["labels"]
    return {"metadata": metadata}


def show_labels(node: Object, plan: Object, *, after: bool) -> str:
    """What a plan touches of a node, as lines for a diff, before or after it."""
    labels = {**node["labels"], **plan["labels"]} if after else node["labels"]
    lines = [f'{key}: "{labels[key]}"' for key in sorted(plan["labels"]) if labels.get(key) is not None]
    return "\n".join([f"node {node['name']}", *lines]) + "\n"


def pick_nodes(known: Mapping[str, Object], names: Iterable[str]) -> dict[str, Object]:
    """The named nodes. Raises LabelError when the cluster lacks one."""
    wanted = list(names)
    missing = [name for name in wanted if name not in known]
    if missing:
        raise LabelError(
            f"the cluster has no node {', '.join(missing)} (it has: {', '.join(sorted(known)) or 'none'}); "
            "correct the inventory, or set gpu_slices_node_name"
        )
    return {name: known[name] for name in wanted}


def planned_daemonset(chart_values: Mapping[str, Any]) -> Object | None:
    """What a driver still to be installed or upgraded will ask of nodes, by its chart values, or None."""
    plugin = chart_values.get("kubeletPlugin")
    if not isinstance(plugin, Mapping):
        return None
    asked, affinity = plugin.get("nodeSelector"), plugin.get("affinity")
    selector = {str(k): str(v) for k, v in asked.items()} if isinstance(asked, Mapping) else {}
    terms = affinity_terms({"affinity": affinity}) if isinstance(affinity, Mapping) else []
    if not selector and not terms:
        return None
    return {"namespace": "chart", "name": "values", "node_selector": selector, "affinity_terms": terms}
