"""Kueue's configuration: reading it, and adding to its text without touching the rest. Controller only.

Kueue reads one YAML document, once, at its start. An administrator's comments and order are worth keeping,
so additions are put into the text at the place where they belong, and the result is read again and compared
with what was meant; a text that cannot be edited that way is left alone (:class:`ConfigError`).
"""

from __future__ import annotations

import copy
import json
from typing import Any, Dict, Mapping, Sequence

import yaml

FRAMEWORK = "trainer.kubeflow.org/trainjob"
# What Kueue serves when the configuration names no framework.
_DEFAULT_FRAMEWORKS = ["batch/job"]
# Kueue refuses to start with more.
MOST_MAPPINGS, MOST_CLASSES = 16, 8

Config = Dict[str, Any]


class ConfigError(Exception):
    """The configuration cannot be read or edited; the message says why and what to do."""


def parse(text: str) -> Config:
    """The configuration as data. Raises ConfigError for what is no YAML mapping."""
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"it is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"it is a {type(data).__name__}; needed is a mapping of kind Configuration")
    return data


def mappings(config: Mapping[str, Any]) -> dict[str, str]:
    """DeviceClass -> the name under which Kueue counts its devices."""
    found: dict[str, str] = {}
    for entry in _mapping_list(config):
        for name in entry.get("deviceClassNames") or []:
            found.setdefault(str(name), str(entry.get("name", "")))
    return found


def counted_otherwise(config: Mapping[str, Any], resource: str) -> bool:
    """Whether a mapping counts counters or capacity (Kueue 0.18 and later) instead of devices."""
    return any(entry.get("sources") for entry in _mapping_list(config) if entry.get("name") == resource)


def gates(config: Mapping[str, Any]) -> dict[str, bool]:
    """The feature gates that the configuration sets."""
    given = config.get("featureGates")
    return {str(k): v is True for k, v in given.items()} if isinstance(given, dict) else {}


def frameworks(config: Mapping[str, Any]) -> list[str]:
    """The kinds of jobs that Kueue looks after."""
    integrations = config.get("integrations")
    listed = integrations.get("frameworks") if isinstance(integrations, dict) else None
    return [str(item) for item in listed] if listed else list(_DEFAULT_FRAMEWORKS)


def excluded(config: Mapping[str, Any], resource: str) -> bool:
    """Whether Kueue leaves a resource out of all quotas."""
    resources = config.get("resources")
    prefixes = (resources.get("excludeResourcePrefixes") if isinstance(resources, dict) else None) or []
    return any(resource.startswith(str(prefix)) for prefix in prefixes)


def _mapping_list(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    resources = config.get("resources")
    listed = resources.get("deviceClassMappings") if isinstance(resources, dict) else None
    return [entry for entry in listed or [] if isinstance(entry, dict)]


# ------------------------------------------------------------------------------------------------- adding


def with_mapping(text: str, resource: str, device_class: str) -> str:
    """The text with ``device_class`` counted as ``resource``; unchanged if it is mapped already."""
    config = parse(text)
    if device_class in mappings(config):
        return text
    entries = _mapping_list(config)
    same = next((i for i, entry in enumerate(entries) if entry.get("name") == resource), None)
    if same is not None:
        if len(entries[same].get("deviceClassNames") or []) >= MOST_CLASSES:
            raise ConfigError(
                f"{resource} already stands for {MOST_CLASSES} classes, the most that Kueue takes: "
                "map the class under another name"
            )
        path: list[Any] = ["resources", "deviceClassMappings", same, "deviceClassNames"]
        return _add(text, path, device_class)
    if len(entries) >= MOST_MAPPINGS:
        raise ConfigError(f"it holds {MOST_MAPPINGS} mappings, the most that Kueue takes: remove one")
    entry = {"name": resource, "deviceClassNames": [device_class]}
    return _add(text, ["resources", "deviceClassMappings"], entry)


def with_gate(text: str, gate: str) -> str:
    """The text with a feature gate on; unchanged if it is on already."""
    config = parse(text)
    if gates(config).get(gate):
        return text
    if gate in gates(config):
        raise ConfigError(f"featureGates.{gate} is switched off there: somebody meant that; switch it on")
    return _add(text, ["featureGates", gate], True)


def _add(text: str, path: Sequence[Any], value: Any) -> str:
    """Put a value at a path: append it to the list that is there, or set the key that is missing."""
    # Ansible hands out tagged subclasses of str, which YAML does not write; JSON makes them plain.
    value = json.loads(json.dumps(value))
    meant = copy.deepcopy(parse(text))
    where = _meant(meant, path, value)
    made = _insert(text, where["path"], where["value"])
    try:
        same = parse(made) == meant
    except ConfigError:
        same = False
    if not same:
        raise ConfigError(
            "its text is written in a way that cannot be added to safely; add by hand, at "
            f"{'.'.join(str(step) for step in path)}: {_flow(value)}"
        )
    return made


def _meant(config: Any, path: Sequence[Any], value: Any) -> dict[str, Any]:
    """Change the data; returns the deepest path that was there, and what is to be put there."""
    spot = config
    done: list[Any] = []
    *steps, last = path
    for number, step in enumerate(steps):
        below = spot[step] if isinstance(step, int) else spot.get(step)
        if below is None:
            rest = [*steps[number + 1 :], last]
            made = _nest(rest, value)
            spot[step] = made
            return {"path": done, "value": {step: made}}
        spot, done = below, [*done, step]
        if not isinstance(spot, (dict, list)):
            raise ConfigError(f"{'.'.join(str(s) for s in done)} is a {type(spot).__name__}, no mapping")
    if isinstance(spot, dict) and isinstance(spot.get(last), list):
        spot[last].append(value)
        return {"path": [*done, last], "value": value}
    if not isinstance(spot, dict) or spot.get(last) is not None:
        raise ConfigError(f"{'.'.join(str(s) for s in path)} holds something else already")
    spot[last] = _nest([last], value)[last]
    return {"path": done, "value": {last: spot[last]}}


def _nest(path: Sequence[Any], value: Any) -> Any:
    """``value`` under the keys of ``path``; where it is an element of a list, in a new list."""
    listed = path[-1] in ("deviceClassMappings", "deviceClassNames")
    made: Any = [value] if listed else value
    for step in reversed(path):
        made = {step: made}
    return made


def _insert(text: str, path: Sequence[Any], value: Any) -> str:
    """Add ``value`` (a mapping to a mapping, an element to a list) to the collection at ``path``."""
    root: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    node = root
    for step in path:
        node = _child(node, step)
    added: Any = value
    if isinstance(node, yaml.MappingNode):
        for k in list(value):
            # A key without a value: what is added goes below it.
            found = next((pair for pair in node.value if pair[0].value == k), None)
            if found is not None:
                return _below_key(text, found[0], found[1], value[k])
    if node.flow_style:
        data = yaml.safe_load(text[node.start_mark.index : node.end_mark.index])
        joined = {**data, **added} if isinstance(node, yaml.MappingNode) else [*data, added]
        return text[: node.start_mark.index] + _flow(joined) + text[node.end_mark.index :]
    block = _block(added if isinstance(node, yaml.MappingNode) else [added], node.start_mark.column)
    if node is root:
        # At the very end, behind remarks that belong to what is there.
        return _joined(text, block, "")
    return _after(text, _last(node), block)


def _child(node: Any, step: Any) -> Any:
    if isinstance(step, int):
        return node.value[step]
    return next(value for key, value in node.value if key.value == step)


def _below_key(text: str, key: Any, empty: Any, value: Any) -> str:
    """``resources:`` without a value: put the block below; ``resources: null`` and ``~`` likewise."""
    indent = key.start_mark.column + 2
    block = _block(value, indent)
    start, end = empty.start_mark.index, empty.end_mark.index
    if isinstance(value, (dict, list)):
        return _after(text[:start].rstrip(" ") + text[end:] if end > start else text, key, block)
    return text[:start] + (" " if text[start - 1 : start] == ":" else "") + _flow(value) + text[end:]


def _last(node: Any) -> Any:
    """The last scalar or flow collection inside a block collection."""
    while isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        if isinstance(last, tuple):
            key, value = last
            node = key if _empty(value) else value
        else:
            node = last
    return node


def _empty(node: Any) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.start_mark.index == node.end_mark.index


def _after(text: str, node: Any, block: str) -> str:
    """Put whole lines after the line in which a node ends."""
    if isinstance(node, yaml.ScalarNode) and node.style in ("|", ">"):
        # Such a scalar ends where the next thing begins.
        spot = node.end_mark.index - node.end_mark.column
        return _joined(text[:spot], block, text[spot:])
    line_end = text.find("\n", node.end_mark.index)
    spot = len(text) if line_end < 0 else line_end + 1
    return _joined(text[:spot], block, text[spot:])


def _joined(head: str, block: str, tail: str) -> str:
    return head + ("" if not head or head.endswith("\n") else "\n") + block + tail


def _block(value: Any, indent: int) -> str:
    # Lists of names stay on one line, which keeps the addition short.
    lines = yaml.safe_dump(value, sort_keys=False, default_flow_style=None, width=10**6).splitlines()
    if lines and lines[0].startswith(("{", "[")):
        lines = yaml.safe_dump(value, sort_keys=False, default_flow_style=False, width=10**6).splitlines()
    return "".join(" " * indent + line + "\n" for line in lines)


def _flow(value: Any) -> str:
    if not isinstance(value, (dict, list)):
        return yaml.safe_dump(value).split("\n", maxsplit=1)[0]
    return yaml.safe_dump(value, sort_keys=False, default_flow_style=True, width=10**6).strip()


# --------------------------------------------------------------------------------- gates on the command line


def argument_gates(arguments: Sequence[str]) -> dict[str, bool] | None:
    """The gates of ``--feature-gates``, or None if the flag is not there."""
    found: dict[str, bool] | None = None
    for index, argument in enumerate(arguments):
        value = None
        if argument.startswith("--feature-gates="):
            value = argument.split("=", 1)[1]
        elif argument == "--feature-gates" and index + 1 < len(arguments):
            value = arguments[index + 1]
        if value is not None:
            found = found or {}
            for part in value.split(","):
                name, _, state = part.partition("=")
                if name.strip():
                    found[name.strip()] = state.strip().lower() in ("true", "1", "t")
    return found


def with_argument_gate(arguments: Sequence[str], gate: str) -> list[str]:
    """The arguments with one more gate in their last ``--feature-gates``."""
    made = list(arguments)
    if (argument_gates(made) or {}).get(gate):
        return made
    for index in reversed(range(len(made))):
        if made[index].startswith("--feature-gates="):
            made[index] = f"{made[index].rstrip(',')},{gate}=true".replace("=,", "=")
            return made
        if made[index] == "--feature-gates" and index + 1 < len(made):
            made[index + 1] = f"{made[index + 1].rstrip(',')},{gate}=true".lstrip(",")
            return made
    return [*made, f"--feature-gates={gate}=true"]
