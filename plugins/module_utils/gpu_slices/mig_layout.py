"""MIG layouts: what is wanted, whether it is possible, and the smallest change that gets there.

Pure functions for Python 3.8+ (node and controller). A layout is an entry list of mig-parted's
``mig-configs``. ``resolve`` turns entries into one ``Want`` per GPU, ``faults_of`` tells why a card cannot be
cut so, ``plan_gpu`` yields the ordered steps from a GPU's state to a ``Want``, ``layout_faults`` judges an
inventory without hardware. Starts and sizes are memory slices.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from dataclasses import dataclass
from itertools import combinations
from typing import AbstractSet, Any, Iterable, Mapping, Sequence

from .mig_geometry import (
    KNOWN_CARDS,
    PROFILE_NAME,
    Geometry,
    LayoutError,
    Placed,
    find_card,
    nearest_profiles,
    normal_device_id,
    solve,
)
from .nvidia_smi import MODE_DISABLED, MODE_ENABLED, MODE_UNSUPPORTED

_DEVICE_ID = re.compile(r"^0[xX][0-9A-Fa-f]{8}$")
_ENTRY_KEYS = ("device-filter", "devices", "mig-enabled", "mig-devices")


@dataclass(frozen=True)
class ComputeInstance:
    """A compute instance; ``uuid`` is the MIG device's, as `nvidia-smi -L` shows it."""

    ci_id: int
    profile: str
    uuid: str = ""


@dataclass(frozen=True)
class Instance:
    """An existing GPU instance and the compute instances in it."""

    gi_id: int
    profile: str
    profile_id: int
    start: int
    size: int
    compute: tuple[ComputeInstance, ...] = ()

    @property
    def whole(self) -> bool:
        """One compute instance that spans the GPU instance: the form this project creates."""
        return len(self.compute) == 1 and self.compute[0].profile == self.profile


@dataclass(frozen=True)
class GpuState:
    """A GPU as it is now."""

    index: int
    uuid: str
    name: str
    pci_bus_id: str
    pci_device_id: str
    memory_mib: int
    mode_current: str
    mode_pending: str
    instances: tuple[Instance, ...] = ()

    @property
    def capable(self) -> bool:
        return self.mode_current != MODE_UNSUPPORTED

    @property
    def label(self) -> str:
        return f"GPU {self.index} ({self.name})"


@dataclass(frozen=True)
class Want:
    """What one GPU shall be. ``devices``: (profile, count) in the order written.

    ``fixed`` holds (profile, start) pairs when exact places are asked for (putting a recorded layout back);
    ``origin`` says where the wish is written, for messages.
    """

    enabled: bool
    devices: tuple[tuple[str, int], ...] = ()
    fixed: tuple[tuple[str, int], ...] | None = None
    origin: str = ""

    @property
    def counts(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for name, count in self.devices:
            counts[name] += count
        return counts


@dataclass(frozen=True)
class Step:
    """One nvidia-smi command.

    kind: ``mode_off``, ``mode_on``, ``destroy_ci``, ``destroy_gi``, ``create_ci`` (both use ``gi_ids``) or
    ``create`` (uses ``placed``, in this order).
    """

    kind: str
    gpu: int
    gi_ids: tuple[int, ...] = ()
    placed: tuple[Placed, ...] = ()

    def __str__(self) -> str:
        ids = ", ".join(str(gi_id) for gi_id in self.gi_ids)
        return {
            "mode_on": f"GPU {self.gpu}: enable MIG mode",
            "mode_off": f"GPU {self.gpu}: disable MIG mode",
            "destroy_ci": f"GPU {self.gpu}: destroy the compute instances of GPU instance {ids}",
            "destroy_gi": f"GPU {self.gpu}: destroy GPU instance {ids}",
            "create_ci": f"GPU {self.gpu}: create a compute instance in GPU instance {ids}",
            "create": f"GPU {self.gpu}: create "
            + ", ".join(f"{item.profile.name} at {item.start}:{item.profile.size}" for item in self.placed),
        }[self.kind]


@dataclass(frozen=True)
class GpuPlan:
    """The change of one GPU: what stays, what goes, what comes, and the steps in order."""

    state: GpuState
    want: Want
    keep: tuple[Instance, ...] = ()
    destroy: tuple[Instance, ...] = ()
    create: tuple[Placed, ...] = ()
    steps: tuple[Step, ...] = ()

    @property
    def mode_changes(self) -> bool:
        return any(step.kind in ("mode_on", "mode_off") for step in self.steps)

    @property
    def destroyed_gi_ids(self) -> frozenset[int]:
        """GPU instances whose compute instances go, whether or not the GPU instance itself stays."""
        return frozenset(gi_id for step in self.steps if step.kind == "destroy_ci" for gi_id in step.gi_ids)


# ----------------------------------------------------------------------------------------------------
# Entries of a layout


@dataclass(frozen=True)
class Entry:
    """One entry of a layout. ``devices`` None = all; an empty ``device_filter`` matches every card."""

    number: int
    device_filter: frozenset[str]
    devices: tuple[int, ...] | None
    enabled: bool
    mig_devices: tuple[tuple[str, int], ...]

    def matches(self, index: int, device_ids: AbstractSet[str]) -> bool:
        if self.device_filter and not self.device_filter & device_ids:
            return False
        return self.devices is None or index in self.devices

    @property
    def precision(self) -> tuple[bool, bool]:
        return (self.devices is not None, bool(self.device_filter))


def parse_entries(layout: str, raw: Any) -> tuple[list[Entry], list[str]]:
    """Check the shape of one layout; returns the usable entries and every fault."""
    where = f"layout {layout!r}" if layout else "the layout"
    if not isinstance(raw, Sequence) or isinstance(raw, (str, bytes)) or not raw:
        return [], [f"{where} must be a list with at least one entry, found {_shown(raw)}."]
    entries: list[Entry] = []
    faults: list[str] = []
    for number, item in enumerate(raw, start=1):
        entry, found = _parse_entry(f"{where}, entry {number}", number, item)
        faults.extend(found)
        if entry is not None:
            entries.append(entry)
    return entries, faults


def _parse_entry(where: str, number: int, raw: Any) -> tuple[Entry | None, list[str]]:
    if not isinstance(raw, Mapping):
        return None, [f"{where} must be a map with devices and mig-enabled, found {_shown(raw)}."]
    faults: list[str] = []
    for key in raw:
        if key not in _ENTRY_KEYS:
            near = difflib.get_close_matches(str(key), _ENTRY_KEYS, 1)
            hint = f" Did you mean {near[0]}?" if near else ""
            faults.append(f"{where} has the unknown key {key!r}; known are {', '.join(_ENTRY_KEYS)}.{hint}")
    faults.extend(f"{where} lacks the key {key}." for key in ("devices", "mig-enabled") if key not in raw)

    devices = raw.get("devices", "all")
    indexes: tuple[int, ...] | None = None
    if isinstance(devices, Sequence) and not isinstance(devices, (str, bytes)):
        if devices and all(_is_count(index) for index in devices):
            indexes = tuple(sorted(set(devices)))
        else:
            faults.append(f"{where}: devices must hold GPU indexes (0, 1, …), found {_shown(devices)}.")
    elif devices != "all":
        faults.append(f"{where}: devices must be `all` or a list of GPU indexes, found {_shown(devices)}.")

    enabled = raw.get("mig-enabled", False)
    if not isinstance(enabled, bool):
        faults.append(f"{where}: mig-enabled must be true or false, found {_shown(enabled)}.")

    filters = raw.get("device-filter", [])
    filters = [filters] if isinstance(filters, str) else filters
    device_filter: frozenset[str] = frozenset()
    if isinstance(filters, Sequence) and all(
        isinstance(item, str) and _DEVICE_ID.match(item) for item in filters
    ):
        device_filter = frozenset(normal_device_id(item) for item in filters)
    else:
        faults.append(
            f"{where}: device-filter must be PCI device ids such as 0x20B710DE, found {_shown(filters)}."
        )

    wanted = raw.get("mig-devices")
    mig_devices: list[tuple[str, int]] = []
    if wanted is None:
        if enabled is True:
            faults.append(f"{where}: mig-enabled is true, so mig-devices is needed ({{}} for none).")
    elif not isinstance(wanted, Mapping):
        faults.append(f"{where}: mig-devices must map profile names to counts, found {_shown(wanted)}.")
    else:
        if wanted and enabled is False:
            faults.append(f"{where}: mig-enabled is false, so mig-devices must be left out or empty.")
        for name, count in wanted.items():
            fault = _profile_fault(name, count)
            if fault:
                faults.append(f"{where}: {fault}")
            elif count > 0:
                mig_devices.append((str(name), int(count)))
    if faults:
        return None, faults
    return Entry(number, device_filter, indexes, enabled, tuple(mig_devices)), []


def _profile_fault(name: Any, count: Any) -> str:
    shape = PROFILE_NAME.match(name) if isinstance(name, str) else None
    if not shape:
        return f"{_shown(name)} is not a MIG profile name (such as 1g.6gb or 1g.5gb+me)."
    if shape.group("c"):
        return (
            f"{name} asks for a part of a GPU instance; give the GPU instance profile"
            f" ({name.split('.', 1)[1]}), it gets one compute instance of full size."
        )
    if not _is_count(count):
        return f"the number of {name} must be a whole number, found {_shown(count)}."
    return ""


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"


def resolve(
    layout: str, entries: Sequence[Entry], gpus: Sequence[tuple[int, AbstractSet[str]]]
) -> tuple[dict[int, Want], list[str]]:
    """Decide which entry holds for each GPU, given as (index, PCI device ids it may have, normal spelling).

    The last matching entry wins, as in mig-parted. A GPU that no entry matches is left out (and left alone).
    Faults: an index that no GPU has, a layout that matches nothing, and a later entry that hides an earlier
    one which is just as precise (almost certainly not meant).
    """
    where = f"layout {layout!r}" if layout else "the layout"
    faults: list[str] = []
    present = sorted(index for index, _ids in gpus)
    for entry in entries:
        if entry.device_filter and not any(entry.device_filter & ids for _index, ids in gpus):
            continue
        unknown = [index for index in entry.devices or () if index not in present]
        if unknown:
            have = ", ".join(map(str, present)) or "none"
            missing = ", ".join(map(str, unknown))
            faults.append(f"{where}, entry {entry.number}: there is no GPU {missing}; GPUs here: {have}.")
    faults.extend(_conflicts(where, entries, gpus))
    wants: dict[int, Want] = {}
    for index, ids in gpus:
        matching = [entry for entry in entries if entry.matches(index, ids)]
        if matching:
            last = matching[-1]
            wants[index] = Want(last.enabled, last.mig_devices, origin=f"{where}, entry {last.number}")
    if entries and not wants and not faults:
        seen = ", ".join(sorted({device_id for _index, ids in gpus for device_id in ids})) or "none"
        faults.append(
            f"{where} matches none of the GPUs here (PCI device ids: {seen});"
            " check device-filter and devices."
        )
    return wants, faults


def _conflicts(
    where: str, entries: Sequence[Entry], gpus: Sequence[tuple[int, AbstractSet[str]]]
) -> list[str]:
    faults: list[str] = []
    for index, ids in gpus:
        matching = [entry for entry in entries if entry.matches(index, ids)]
        for earlier in matching[:-1]:
            last = matching[-1]
            same = earlier.enabled == last.enabled and dict(earlier.mig_devices) == dict(last.mig_devices)
            if not same and not last.precision > earlier.precision:
                faults.append(
                    f"{where}: entries {earlier.number} and {last.number} want different things for GPU"
                    f" {index} and the later one is no more precise; put the general entry first or drop one."
                )
    return faults


# ----------------------------------------------------------------------------------------------------
# What is possible


def faults_of(want: Want, geometry: Geometry) -> list[str]:
    """Return every reason why this card cannot be cut as wanted ([] = it can)."""
    faults: list[str] = []
    counts = want.counts
    for name, count in counts.items():
        profile = geometry.profile(name)
        if profile is None:
            near = nearest_profiles(name, geometry)
            hint = f" Nearest: {', '.join(near)}." if near else ""
            faults.append(f"{geometry.card} has no profile {name}; it has {', '.join(geometry.names)}.{hint}")
        elif count > profile.max_count:
            faults.append(
                f"{geometry.card} holds at most {profile.max_count} x {name}, {count} are asked for."
            )
    media = [name for name in counts.elements() if "+me" in name]
    if len(media) > 1 and not faults:
        faults.append(
            f"{geometry.card} has one set of media extensions, so one +me instance;"
            f" asked for: {', '.join(media)}."
        )
    if faults:
        return faults
    if want.fixed is not None:
        return _fixed_faults(want.fixed, geometry)
    if solve(geometry, [], counts) is None:
        faults.append(_no_placement(counts, geometry))
    return faults


def _fixed_faults(fixed: Sequence[tuple[str, int]], geometry: Geometry) -> list[str]:
    faults: list[str] = []
    used: set[int] = set()
    for name, start in fixed:
        profile = geometry.profile(name)
        if profile is None or start not in profile.starts:
            faults.append(f"{geometry.card} cannot place {name} at memory slice {start}.")
            continue
        covered = set(range(start, start + profile.size))
        if covered & used:
            faults.append(f"{geometry.card}: {name} at memory slice {start} overlaps another instance.")
        used |= covered
    return faults


def _no_placement(counts: Counter[str], geometry: Geometry) -> str:
    profiles = {name: geometry.profile(name) for name in counts}
    asked = " + ".join(f"{count} x {name}" for name, count in counts.items())
    needed = sum(profile.size * counts[name] for name, profile in profiles.items() if profile)
    if needed > geometry.memory_slices:
        return (
            f"{geometry.card} has {geometry.memory_slices} memory slices, but {asked} take {needed};"
            " ask for fewer or smaller instances."
        )
    places = "; ".join(
        f"{name} starts at {', '.join(map(str, profile.starts))} and takes {profile.size}"
        for name, profile in profiles.items()
        if profile
    )
    return (
        f"{geometry.card} has no placement for {asked} together, although they take {needed} of"
        f" {geometry.memory_slices} memory slices: {places}."
    )


# ----------------------------------------------------------------------------------------------------
# The plan


def satisfied(state: GpuState, want: Want) -> bool:
    """True when the GPU already is as wanted; needs no geometry."""
    if not state.capable:
        return not want.enabled
    mode = MODE_ENABLED if want.enabled else MODE_DISABLED
    if (state.mode_current, state.mode_pending) != (mode, mode):
        return False
    if not all(instance.whole for instance in state.instances):
        return False
    if want.fixed is not None:
        return Counter(want.fixed) == Counter((item.profile, item.start) for item in state.instances)
    return want.counts == Counter(instance.profile for instance in state.instances)


def plan_gpu(state: GpuState, want: Want, geometry: Geometry, in_use: Iterable[int] = ()) -> GpuPlan:
    """Return the smallest change from ``state`` to ``want``.

    As many existing instances as possible stay, those in use (``in_use``: GPU instance ids) before others.
    Raises ``LayoutError`` when the card cannot be cut as wanted.
    """
    if satisfied(state, want):
        return GpuPlan(state, want, keep=state.instances)
    if want.enabled:
        if not state.capable:
            raise LayoutError(
                [f"{state.label} cannot do MIG, but {want.origin or 'the layout'} wants it on."]
            )
        faults = faults_of(want, geometry)
        if faults:
            raise LayoutError([f"GPU {state.index}: {fault}" for fault in faults])
    keep, create = _choose(state, want, geometry, frozenset(in_use))
    destroy = tuple(item for item in state.instances if item not in keep)
    mend = tuple(item for item in keep if not item.whole)
    return GpuPlan(state, want, keep, destroy, create, tuple(_steps(state, want, destroy, mend, create)))


def _choose(
    state: GpuState, want: Want, geometry: Geometry, in_use: frozenset[int]
) -> tuple[tuple[Instance, ...], tuple[Placed, ...]]:
    if not want.enabled:
        return (), ()

    def worth(kept: Sequence[Instance]) -> tuple[int, int, int, int, tuple[int, ...]]:
        return (
            sum(1 for item in kept if item.gi_id in in_use),
            len(kept),
            sum(1 for item in kept if item.whole),
            sum(item.size for item in kept),
            tuple(-item.start for item in kept),
        )

    # at most 7 instances: every subset that fits the wish can be tried, best first
    subsets = [
        kept
        for size in range(len(state.instances) + 1)
        for kept in combinations(sorted(state.instances, key=lambda item: item.start), size)
        if _fits(kept, want)
    ]
    for kept in sorted(subsets, key=worth, reverse=True):
        create = _complete(kept, want, geometry)
        if create is not None:
            return kept, create
    raise LayoutError([f"GPU {state.index}: {_no_placement(want.counts, geometry)}"])


def _fits(kept: Sequence[Instance], want: Want) -> bool:
    if want.fixed is not None:
        return not Counter((item.profile, item.start) for item in kept) - Counter(want.fixed)
    return not Counter(item.profile for item in kept) - want.counts


def _complete(kept: Sequence[Instance], want: Want, geometry: Geometry) -> tuple[Placed, ...] | None:
    if want.fixed is None:
        missing = want.counts - Counter(item.profile for item in kept)
        return solve(geometry, [(item.start, item.size) for item in kept], missing)
    rest = Counter(want.fixed) - Counter((item.profile, item.start) for item in kept)
    placed: list[Placed] = []
    for name, start in rest.elements():
        profile = geometry.profile(name)
        if profile is None:
            return None
        placed.append(Placed(profile, start))
    return tuple(sorted(placed, key=lambda item: (-item.profile.size, item.start)))


def _steps(
    state: GpuState,
    want: Want,
    destroy: Sequence[Instance],
    mend: Sequence[Instance],
    create: Sequence[Placed],
) -> list[Step]:
    steps: list[Step] = []
    gpu = state.index
    emptied = tuple(item.gi_id for item in (*destroy, *mend) if item.compute)
    if emptied:
        steps.append(Step("destroy_ci", gpu, gi_ids=emptied))
    if destroy:
        steps.append(Step("destroy_gi", gpu, gi_ids=tuple(item.gi_id for item in destroy)))
    mode = MODE_ENABLED if want.enabled else MODE_DISABLED
    if (state.mode_current, state.mode_pending) != (mode, mode):
        steps.append(Step("mode_on" if want.enabled else "mode_off", gpu))
    if mend:
        steps.append(Step("create_ci", gpu, gi_ids=tuple(item.gi_id for item in mend)))
    if create:
        steps.append(Step("create", gpu, placed=tuple(create)))
    return steps


def want_of(state: GpuState) -> Want:
    """The wish that describes a GPU as it is, places included (used to put a layout back)."""
    fixed = tuple((item.profile, item.start) for item in state.instances)
    counts = Counter(name for name, _start in fixed)
    return Want(
        enabled=state.mode_current == MODE_ENABLED,
        devices=tuple(sorted(counts.items())),
        fixed=fixed,
        origin="the recorded layout",
    )


def describe(state: GpuState) -> str:
    """Several lines: mode and instances of a GPU, for the `before` of a diff."""
    lines = [_heading(state, state.mode_current, state.mode_pending)]
    for item in sorted(state.instances, key=lambda instance: instance.start):
        lines.append(_instance_line(item))
    return "\n".join(lines) + "\n"


def describe_after(plan: GpuPlan) -> str:
    """The same lines for what the GPU will be once the plan is applied."""
    state = plan.state
    mode = MODE_ENABLED if plan.want.enabled else MODE_DISABLED
    if not state.capable:
        mode = MODE_UNSUPPORTED
    rows = [(item.start, _instance_line(item, mended=not item.whole)) for item in plan.keep]
    rows += [(p.start, f"  {p.profile.name} at {p.start}:{p.profile.size} (new)") for p in plan.create]
    return "\n".join([_heading(state, mode, mode), *(text for _start, text in sorted(rows))]) + "\n"


def _heading(state: GpuState, current: str, pending: str) -> str:
    mode = current if current == pending else f"{current}, pending {pending}"
    return f"GPU {state.index} {state.name} {state.uuid}: MIG {mode}"


def _instance_line(item: Instance, mended: bool = False) -> str:
    if mended:
        inside = "new compute instance"
    elif item.whole:
        inside = item.compute[0].uuid or f"compute instance {item.compute[0].ci_id}"
    else:
        inside = ", ".join(f"{ci.profile} {ci.uuid}".strip() for ci in item.compute) or "no compute instance"
    return f"  {item.profile} at {item.start}:{item.size} (GPU instance {item.gi_id}: {inside})"


# ----------------------------------------------------------------------------------------------------
# An inventory, judged without hardware


def merge_configs(inline: Any, file_content: Any = None, file_name: str = "") -> dict[str, Any]:
    """Join the layouts of the inventory with those of a mig-parted file (its parsed YAML; None = no file).

    A name in both must mean the same. Raises ``LayoutError`` with all faults.
    """
    faults: list[str] = []
    if not isinstance(inline, Mapping):
        faults.append(f"mig_configs must map layout names to entry lists, found {_shown(inline)}.")
        inline = {}
    merged = dict(inline)
    if file_content is not None:
        named = file_name or "the layout file"
        found = file_content.get("mig-configs") if isinstance(file_content, Mapping) else None
        if not isinstance(found, Mapping) or not found:
            faults.append(
                f"{named} must be a mig-parted file with a map `mig-configs`, found {_shown(file_content)}."
            )
            found = {}
        elif file_content.get("version") != "v1":
            faults.append(f"{named} must say `version: v1`, found {_shown(file_content.get('version'))}.")
        for name, entries in found.items():
            if name in merged and merged[name] != entries:
                faults.append(
                    f"layout {name!r} is in mig_configs and, different, in {named}; keep one of them."
                )
            merged[name] = entries
    if faults:
        raise LayoutError(faults)
    return merged


def layout_faults(
    configs: Any,
    assignments: Mapping[str, Any],
    models: Mapping[str, Sequence[str]] | None = None,
) -> list[str]:
    """Return every fault of the layouts that hosts use, each once, led by the hosts it concerns.

    configs: layout name -> entry list. assignments: host -> layout name ("" = not managed). models: host ->
    product names in index order; a known product is held against its own geometry, an unknown one is left to
    the hardware, and without a list a layout must be possible on at least one known card.
    """
    if not isinstance(configs, Mapping):
        return [f"mig_configs must map layout names to entry lists, found {_shown(configs)}."]
    hosts_of: dict[str, list[str]] = {}
    for host, layout in assignments.items():
        if layout:
            for fault in _host_faults(configs, layout, list((models or {}).get(host) or [])):
                hosts_of.setdefault(fault, []).append(host)
    return [f"{', '.join(hosts)}: {fault}" for fault, hosts in hosts_of.items()]


def _host_faults(configs: Mapping[str, Any], layout: Any, products: Sequence[str]) -> list[str]:
    if layout not in configs:
        near = difflib.get_close_matches(str(layout), [str(name) for name in configs], 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        known = ", ".join(sorted(str(name) for name in configs)) or "none"
        return [f"mig_config names the layout {layout!r}, which is not defined; defined are: {known}.{hint}"]
    entries, faults = parse_entries(str(layout), configs[layout])
    if faults:
        return faults
    if products:
        return _faults_on(str(layout), entries, products)
    return [*_faults_anywhere(str(layout), entries), *_hidden_entries(str(layout), entries)]


def _faults_on(layout: str, entries: Sequence[Entry], products: Sequence[str]) -> list[str]:
    cards = {index: find_card(product) for index, product in enumerate(products)}
    known = {index: card for index, card in cards.items() if card is not None}
    if len(known) < len(cards):
        # an unknown card may match any filter: only its neighbours can be judged
        entries = [entry for entry in entries if entry.devices is None or set(entry.devices) <= set(cards)]
    wants, faults = resolve(layout, entries, [(index, card.device_ids) for index, card in known.items()])
    if len(known) < len(cards) and not wants:
        faults = []
    for index, want in wants.items():
        faults.extend(
            f"{want.origin}, GPU {index}: {fault}" for fault in faults_of(want, known[index].geometry)
        )
    return faults


def _faults_anywhere(layout: str, entries: Sequence[Entry]) -> list[str]:
    """Judge entries when the cards are not named: by their device filter, else against every known card."""
    faults: list[str] = []
    for entry in entries:
        want = Want(entry.enabled, entry.mig_devices)
        where = f"layout {layout!r}, entry {entry.number}"
        if entry.device_filter:
            for card in KNOWN_CARDS:
                if card.device_ids & entry.device_filter:
                    faults.extend(f"{where}: {fault}" for fault in faults_of(want, card.geometry))
            continue
        by_card = {card.geometry.card: faults_of(want, card.geometry) for card in KNOWN_CARDS}
        if not all(by_card.values()):
            continue
        speaking = [
            card.geometry.card
            for card in KNOWN_CARDS
            if all(card.geometry.profile(name) for name in want.counts)
        ]
        if speaking:
            faults.extend(f"{where}: {fault}" for card in speaking for fault in by_card[card])
        else:
            asked = ", ".join(want.counts)
            per_card = "; ".join(
                f"{card.geometry.card}: {', '.join(card.geometry.names)}" for card in KNOWN_CARDS
            )
            faults.append(
                f"{where}: no known card has all of {asked} ({per_card}). If the card is another one, name"
                " it in mig_gpu_models and its own nvidia-smi decides."
            )
    return faults


def _hidden_entries(layout: str, entries: Sequence[Entry]) -> list[str]:
    """Conflicts between entries that show whatever the hardware is."""
    indexes = sorted({index for entry in entries for index in entry.devices or ()} | {0})
    filters = sorted({item for entry in entries for item in entry.device_filter} | {""})
    faults: list[str] = []
    for device_id in filters:
        gpus = [(index, frozenset([device_id])) for index in indexes]
        for fault in _conflicts(f"layout {layout!r}", entries, gpus):
            if fault not in faults:
                faults.append(fault)
    return faults
