"""Faults that an inventory shows by itself, before any cluster or node is asked.

Pure functions; each returns a list of sentences, one fault each, that say what was found, what is needed and
what to do. An empty list means that nothing is wrong.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
import re
from typing import Any, Dict, Iterable, Mapping

from .quantity import format_bytes, parse_bytes, parse_quantity

PREFIXES = (
    "gpu_slices_",
    "gpu_nodes_",
    "mig_",
    "dra_driver_",
    "slice_claim_",
    "smoke_",
    "sft_",
    "crowd_",
    "shared_",
    "quota_",
    "callers_",
    "recipe_",
    "preflight_",
    "report_",
    "teardown_",
)
# Facts that our own roles set; they appear among the host variables of later plays.
RUNTIME_FACTS = ("mig_gpus", "mig_changed", "slice_claim_result")

STAGES = ("preflight", "enable-driver", "smoke", "sft", "crowd", "shared", "quota", "callers", "recipe")
# Stages that run only where they are asked for by name.
OPTIONAL = ("crowd", "shared", "quota", "callers", "recipe")
# Those of a whole run that ask for a slice.
SLICE_STAGES = ("smoke", "sft")
STAGES_WITH_IMAGE = ("smoke", "sft", "crowd", "shared", "quota", "callers")

_PROFILE = re.compile(r"^\d+g\.(\d+)gb(\+[a-z0-9.]+)*$")
# Numbers and what they must lie between, neither end included.
_NUMBERS = {
    **dict.fromkeys(
        (
            *("dra_driver_timeout", "mig_timeout", "teardown_timeout"),
            *("smoke_timeout", "smoke_schedule_timeout", "sft_timeout", "sft_schedule_timeout"),
            *("sft_nodes", "sft_steps", "sft_batch", "sft_learning_rate"),
            *("shared_timeout", "shared_schedule_timeout", "shared_steps", "shared_seconds"),
            *("crowd_timeout", "crowd_schedule_timeout", "crowd_seconds", "crowd_isolation_seconds"),
            *("callers_timeout", "callers_schedule_timeout"),
            *("quota_timeout", "quota_schedule_timeout", "quota_hold_seconds", "quota_grace"),
            *("quota_team_a", "quota_team_b"),
            *("recipe_timeout", "recipe_schedule_timeout", "recipe_held_out_rows"),
        ),
        (0.0, math.inf),
    ),
    # One job would be no crowd.
    "crowd_limit": (1.0, math.inf),
    **dict.fromkeys(("sft_loss_factor", "recipe_loss_factor"), (0.0, 1.0)),
}
_IMAGE = re.compile(
    r"^([A-Za-z0-9.-]+(:\d+)?/)?[a-z0-9]+([._/-]+[a-z0-9]+)*(:\w[\w.-]{0,127})?(@sha256:[0-9a-f]{64})?$",
    re.ASCII,
)
_LABEL = re.compile(r"^[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$")
_DOMAIN = re.compile(r"^(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$")
_NEAR = 0.92

Faults = Dict[str, Any]


def chosen_stages(
    run_tags: Iterable[str], skip_tags: Iterable[str], asked: Iterable[str] = (), mode: str = "mig"
) -> list[str]:
    """The stages that a run's tags select, in order. ``all`` selects every stage but the optional ones.

    So does ``preflight`` alone: it is asked what would stand in the way of a whole run. An optional stage is
    selected by its own tag, or by ``all`` in a play of its own (``asked``). In mode ``shared`` a whole run
    has stage shared in place of those that need a slice.
    """
    tags, skipped, named = set(run_tags), set(skip_tags), set(asked)
    left_out = set(OPTIONAL)
    if mode == "shared":
        left_out = (left_out | set(SLICE_STAGES)) - {"shared"}
    everything = not tags or bool(tags & {"all", "tagged"}) or tags == {"preflight"}
    return [
        stage
        for stage in STAGES
        if (stage in tags or (everything and (stage in named or stage not in left_out)))
        and stage not in skipped
    ]


def nearest_name(name: str, known: Iterable[str]) -> str:
    """The known name that a misspelt one most resembles, or "" if none comes close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return close[0] if close else ""


def unknown_variables(
    names_by_host: Mapping[str, Iterable[str]], known: Iterable[str], allowed: Iterable[str] = ()
) -> list[str]:
    """Variables with one of our prefixes that no role knows, and names that miss a known one by a letter.

    ``allowed`` holds names or shell patterns of variables that the user defines for himself.
    """
    known_names = set(known)
    patterns = [*allowed, *RUNTIME_FACTS]
    hosts_by_name: dict[str, list[str]] = {}
    for host, names in names_by_host.items():
        for name in names:
            if name not in known_names and not any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
                hosts_by_name.setdefault(name, []).append(host)
    faults = []
    for name in sorted(hosts_by_name):
        ours = name.startswith(PREFIXES)
        if not ours and not _misses_by_a_letter(name, known_names):
            continue
        nearest = nearest_name(name, known_names)
        where = _hosts(hosts_by_name[name])
        own = "list it in gpu_slices_extra_variables if it is a variable of your own."
        advice = f"did you mean {nearest}?" if nearest else own
        faults.append(f"Variable {name} ({where}) is not known: {advice}")
    return faults


def _misses_by_a_letter(name: str, known: Iterable[str]) -> bool:
    """Whether a name outside our prefixes is most likely one of ours, misspelt in the prefix."""
    for other in known:
        if abs(len(other) - len(name)) > 2 or other in name or "_" not in other:
            continue
        if difflib.SequenceMatcher(None, name, other).ratio() >= _NEAR:
            return True
    return False


def _hosts(hosts: list[str]) -> str:
    shown = sorted(hosts)
    return ", ".join(shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")


def node_group_faults(group: str, groups: Mapping[str, Iterable[str]]) -> list[str]:
    """The group of GPU nodes must exist and have a host."""
    if group not in groups:
        others = sorted(set(groups) - {"all", "ungrouped"})
        nearest = nearest_name(group, others)
        advice = f"did you mean {nearest}?" if nearest else "add it, or set gpu_slices_node_group."
        listed = ", ".join(others) or "none"
        return [f"The inventory has no group {group} (groups: {listed}): {advice}"]
    if not list(groups[group]):
        return [f"Group {group} has no host: list the GPU nodes in it."]
    return []


def duplicate_node_faults(node_names: Mapping[str, str]) -> list[str]:
    """Two inventory hosts must not stand for one Kubernetes node. ``node_names``: host -> node name."""
    by_node: dict[str, list[str]] = {}
    for host, node in node_names.items():
        by_node.setdefault(node, []).append(host)
    return [
        f"Hosts {_hosts(hosts)} are all the Kubernetes node {node}: correct gpu_slices_node_name."
        for node, hosts in sorted(by_node.items())
        if len(hosts) > 1
    ]


def value_faults(settings: Mapping[str, Any], stages: Iterable[str]) -> list[str]:
    """Faults of the shared variables that types alone do not show. ``settings``: variable -> value."""
    faults = []
    profile = str(settings.get("gpu_slices_profile", "auto"))
    if profile != "auto" and not _PROFILE.match(profile):
        faults.append(
            f"gpu_slices_profile is '{profile}': needed is auto or a MIG profile, as 1g.6gb or 1g.5gb+me."
        )
    memory = settings.get("gpu_slices_memory", "5Gi")
    try:
        if parse_bytes(memory) <= 0:
            faults.append(f"gpu_slices_memory is '{memory}': needed is more than nothing, as 5Gi.")
    except ValueError as error:
        faults.append(f"gpu_slices_memory: {error}.")
    namespace = str(settings.get("gpu_slices_namespace", ""))
    if not re.match(r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$", namespace):
        faults.append(
            f"gpu_slices_namespace is '{namespace}': needed is a Kubernetes name (lower case letters, "
            "digits, dashes, at most 63)."
        )
    needing = [stage for stage in stages if stage in STAGES_WITH_IMAGE]
    if needing and not str(settings.get("gpu_slices_image") or ""):
        faults.append(
            f"gpu_slices_image is empty: {' and '.join(needing)} need{'s' if len(needing) == 1 else ''} "
            "an image with torch, transformers and peft; name it, or leave this out with --skip-tags."
        )
    elif needing and not _IMAGE.match(str(settings["gpu_slices_image"])):
        faults.append(
            f"gpu_slices_image is '{settings['gpu_slices_image']}': needed is an image reference, as "
            "registry.example.com/team/train:1.0."
        )
    return faults


def number_faults(given: Mapping[str, Any]) -> list[str]:
    """Numbers of the right type that no run can work with. ``given``: the variables that are set."""
    faults = []
    for name in (name for name in _NUMBERS if name in given):
        least, most = _NUMBERS[name]
        try:
            number = float(given[name])
        except (TypeError, ValueError):
            continue  # The types are checked elsewhere.
        if not (least < number < most):
            bound = f"more than {least:g}" + ("" if most == math.inf else f" and less than {most:g}")
            faults.append(f"{name} is {given[name]}: needed is {bound}.")
    return faults


def resource_faults(given: Mapping[str, Any]) -> list[str]:
    """Resources of pods that the API server would refuse, or that ask for a GPU beside the claim."""
    faults = []
    for name, resources in given.items():
        if (
            not name.endswith("_resources")
            or not name.startswith(PREFIXES)
            or not isinstance(resources, Mapping)
        ):
            continue
        amounts: dict[tuple[str, str], Any] = {}
        for part, wanted in resources.items():
            if part not in ("requests", "limits") or not isinstance(wanted, Mapping):
                faults.append(
                    f"{name}.{part}: needed are requests and limits, each as {{cpu: 1, memory: 1Gi}}."
                )
                continue
            for resource, amount in wanted.items():
                if str(resource).startswith("nvidia.com/"):
                    faults.append(
                        f"{name}.{part} has {resource}: leave it out, for the GPU comes with the claim."
                    )
                    continue
                try:
                    amounts[part, str(resource)] = parse_quantity(amount)
                except ValueError as fault:
                    faults.append(f"{name}.{part}.{resource}: {fault}.")
        for (part, resource), amount in amounts.items():
            limit = amounts.get(("limits", resource))
            if part == "requests" and limit is not None and amount > limit:
                asked, bound = resources["requests"][resource], resources["limits"][resource]
                faults.append(
                    f"{name}: requests.{resource} is {asked}, more than limits.{resource} ({bound})."
                )
    return faults


def label_faults(labels: Any) -> list[str]:
    """Labels that the API server would refuse, after the GPUs were cut already."""
    if not isinstance(labels, Mapping):
        return []
    faults = []
    for name, value in labels.items():
        prefix, _, short = str(name).rpartition("/")
        good = (
            _LABEL.match(short) and (prefix == "" or _DOMAIN.match(prefix)) and not str(name).startswith("/")
        )
        if not good:
            faults.append(
                f"gpu_nodes_labels has the name '{name}': needed is a label's name, as example.com/gpu."
            )
        if str(value) and not _LABEL.match(str(value)):
            faults.append(
                f"gpu_nodes_labels gives {name} the value '{value}': needed are at most 63 letters, digits, "
                "dashes, dots and underscores, the first and last a letter or digit."
            )
    return faults


def is_true(value: Any) -> bool:
    """A boolean as Ansible reads it from YAML or the command line."""
    return str(value).strip().lower() in ("true", "yes", "on", "1", "y", "t")


def may_be_reached(host: Mapping[str, Any]) -> bool:
    """Whether Ansible may log in to a host (its variables)."""
    return is_true(host.get("gpu_slices_nodes_reachable", True))


def manages_layout(host: Mapping[str, Any]) -> bool:
    """Whether the MIG layout of a host (its variables) is ours to cut."""
    return is_true(host.get("mig_manage", True)) and may_be_reached(host)


def reach_faults(hosts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A layout cannot be cut on nodes that Ansible does not log in to."""
    wrong = [
        name
        for name, host in hosts.items()
        if host.get("mig_config") and is_true(host.get("mig_manage", True)) and not may_be_reached(host)
    ]
    if not wrong:
        return []
    return [
        f"mig_config asks for a layout on {_hosts(wrong)}, and gpu_slices_nodes_reachable is false: "
        "leave one of them out."
    ]


def wanted_profiles(configs: Mapping[str, Any], assignments: Mapping[str, str]) -> dict[str, list[str]]:
    """The MIG profiles each host is to get: host -> profiles, for layouts that can be read.

    ``configs`` is a mig-parted map, ``assignments`` host -> layout name.
    """
    answer: dict[str, list[str]] = {}
    for host, name in assignments.items():
        profiles: set[str] = set()
        for entry in configs.get(name) or [] if name else []:
            devices = entry.get("mig-devices") if isinstance(entry, Mapping) else None
            profiles.update(str(profile) for profile in devices or {})
        answer[host] = sorted(profiles)
    return answer


def profile_faults(profile: str, memory: str, wanted: Mapping[str, Iterable[str]]) -> list[str]:
    """The layouts must yield the profile that the claims will ask for.

    ``wanted`` is what :func:`wanted_profiles` returns, for hosts whose layout we manage. A host with no
    layout keeps what it has, so nothing can be said then.
    """
    layouts = {host: list(profiles) for host, profiles in wanted.items()}
    if not layouts or not all(layouts.values()):
        return []
    offered = sorted({name for names in layouts.values() for name in names})
    if profile != "auto":
        if profile in offered:
            return []
        return [
            f"gpu_slices_profile is {profile}, and the layouts cut only {', '.join(offered)}: "
            "change the layout (mig_config) or the profile."
        ]
    try:
        needed = parse_bytes(memory)
    except ValueError:
        return []
    # The number in a profile's name is its memory rounded up, so this is the most it can have.
    sizes = [int(match.group(1)) * 2**30 for match in map(_PROFILE.match, offered) if match]
    if sizes and max(sizes) < needed:
        return [
            f"gpu_slices_memory is {memory}, and the largest profile the layouts cut "
            f"({', '.join(offered)}) has at most {format_bytes(max(sizes))}: choose larger profiles "
            "(mig_config) or less memory."
        ]
    return []


_EXCLUDES_DYNAMIC_MIG = ("MPSSupport", "NVMLDeviceHealthCheck", "PassthroughSupport")


def driver_faults(values: Any, namespace: str, managed: Iterable[str]) -> list[str]:
    """Chart values that the driver, its chart or our layouts cannot live with.

    ``values`` are the user's chart values, ``managed`` the hosts whose MIG layout is ours to cut.
    """
    if not isinstance(values, Mapping):
        return []
    faults = []
    gpus = _at(values, "resources", "gpus").get("enabled", True)
    if not is_true(gpus):
        faults.append("dra_driver_values switches resources.gpus.enabled off: no GPU would be published.")
    gates = {str(name) for name, on in _at(values, "featureGates").items() if is_true(on)}
    if "DynamicMIG" in gates:
        hosts = list(managed)
        if hosts:
            faults.append(
                "dra_driver_values switches featureGates.DynamicMIG on, with which the driver destroys the "
                f"layouts of {_hosts(hosts)}: drop the gate, or set mig_manage: false."
            )
        clash = sorted(gates.intersection(_EXCLUDES_DYNAMIC_MIG))
        if clash:
            faults.append(f"featureGates.DynamicMIG excludes {', '.join(clash)}: keep one of them.")
    if namespace == "default" and not is_true(values.get("allowDefaultNamespace", False)):
        faults.append("dra_driver_namespace is default, which the chart refuses: choose another.")
    return faults


def _at(values: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    for step in path:
        below = values.get(step)
        values = below if isinstance(below, Mapping) else {}
    return values


def compose(faults: Iterable[str]) -> str:
    """All faults as one message."""
    listed = list(faults)
    if not listed:
        return ""
    count = "one fault" if len(listed) == 1 else f"{len(listed)} faults"
    return f"The inventory has {count}; nothing was asked or changed:\n" + "\n".join(
        f"  {number}. {fault}" for number, fault in enumerate(listed, 1)
    )
