"""What a card can be cut into: MIG profiles, where they may start, and the placement of a set of them.

Pure functions for Python 3.8+ (node and controller). Sizes and starts are memory slices, profile IDs are
nvidia-smi's. A geometry comes from the table of known cards, which is enough to judge an inventory, or from
`mig -lgip` and `mig -lgipp`, which is what the hardware really offers.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Mapping, Sequence

from .nvidia_smi import PlacementRow, ProfileRow

PROFILE_NAME = re.compile(
    r"^(?:(?P<c>\d+)c\.)?(?P<g>\d+)g\.(?P<gb>\d+)gb(?P<attributes>(?:[+-][a-z]+(?:\.[a-z]+)*)*)$"
)


class LayoutError(Exception):
    """A layout that cannot be used; ``faults`` holds every reason as one sentence each."""

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = list(faults)


@dataclass(frozen=True)
class Profile:
    """A GPU instance profile: ``size`` memory slices from one of ``starts``, at most ``max_count`` of it."""

    name: str
    profile_id: int
    size: int
    max_count: int
    starts: tuple[int, ...]

    @property
    def compute_slices(self) -> int:
        found = PROFILE_NAME.match(self.name)
        return int(found.group("g")) if found else 0

    @property
    def media_extensions(self) -> bool:
        return "+me" in self.name


def _same_but_rounded(name: str, other: str) -> bool:
    found, known = PROFILE_NAME.match(name), PROFILE_NAME.match(other)
    if not found or not known:
        return False
    if any(found.group(part) != known.group(part) for part in ("c", "g", "attributes")):
        return False
    size = int(known.group("gb"))
    return abs(int(found.group("gb")) - size) <= size * 3 // 100


@dataclass(frozen=True)
class Geometry:
    """What one card can be cut into."""

    card: str
    profiles: tuple[Profile, ...]
    # drivers round the gigabytes of a name differently (3g.39gb, 3g.40gb); a table must not refuse either
    rounded_names: bool = field(default=False, compare=False)

    def profile(self, name: str) -> Profile | None:
        exact = next((profile for profile in self.profiles if profile.name == name), None)
        if exact or not self.rounded_names:
            return exact
        return next((profile for profile in self.profiles if _same_but_rounded(name, profile.name)), None)

    @property
    def memory_slices(self) -> int:
        return max((start + p.size for p in self.profiles for start in p.starts), default=0)

    @property
    def names(self) -> list[str]:
        return [profile.name for profile in self.profiles]


@dataclass(frozen=True)
class Placed:
    """A GPU instance to create: profile and the memory slice it starts at."""

    profile: Profile
    start: int


def normal_device_id(text: str) -> str:
    """One spelling of a PCI device id (`0x20b710de` -> `0x20B710DE`), for comparing."""
    return f"0x{text[2:].upper()}"


def _card(label: str, pattern: str, device_ids: Sequence[str], profiles: Sequence[Profile]) -> KnownCard:
    ids = frozenset(normal_device_id(device_id) for device_id in device_ids)
    return KnownCard(
        re.compile(pattern, re.IGNORECASE), ids, Geometry(label, tuple(profiles), rounded_names=True)
    )


@dataclass(frozen=True)
class KnownCard:
    pattern: re.Pattern[str]
    device_ids: frozenset[str]
    geometry: Geometry


def _seven_slices(gb1: int, gb2: int, gb4: int, gb8: int) -> list[Profile]:
    """Cards with 7 compute and 8 memory slices; gbN = the gigabytes in the name for N memory slices."""
    return [
        Profile(f"1g.{gb1}gb", 19, 1, 7, (0, 1, 2, 3, 4, 5, 6)),
        Profile(f"1g.{gb1}gb+me", 20, 1, 1, (0, 1, 2, 3, 4, 5, 6)),
        Profile(f"1g.{gb2}gb", 15, 2, 4, (0, 2, 4, 6)),
        Profile(f"2g.{gb2}gb", 14, 2, 3, (0, 2, 4)),
        Profile(f"3g.{gb4}gb", 9, 4, 2, (0, 4)),
        Profile(f"4g.{gb4}gb", 5, 4, 1, (0,)),
        Profile(f"7g.{gb8}gb", 0, 8, 1, (0,)),
    ]


KNOWN_CARDS: tuple[KnownCard, ...] = (
    _card(
        "A30",
        r"\bA30\b",
        ["0x20B710DE"],
        [
            Profile("1g.6gb", 14, 1, 4, (0, 1, 2, 3)),
            Profile("1g.6gb+me", 21, 1, 1, (0, 1, 2, 3)),
            Profile("2g.12gb", 5, 2, 2, (0, 2)),
            Profile("2g.12gb+me", 6, 2, 1, (0, 2)),
            Profile("4g.24gb", 0, 4, 1, (0,)),
        ],
    ),
    _card("A100 40GB", r"\bA100\b.*\b40GB", ["0x20B010DE", "0x20F110DE"], _seven_slices(5, 10, 20, 40)),
    _card("A100 80GB", r"\bA100\b.*\b80GB", ["0x20B210DE", "0x20B510DE"], _seven_slices(10, 20, 40, 80)),
    _card("H100 80GB", r"\bH100\b(?!.*\b(NVL|96GB|64GB))", ["0x233010DE"], _seven_slices(10, 20, 40, 80)),
    _card("H200 141GB", r"\bH200\b(?!.*\bNVL)", ["0x233510DE"], _seven_slices(18, 35, 71, 141)),
    _card("B200 180GB", r"(?<![A-Z])B200\b", ["0x290110DE"], _seven_slices(23, 45, 90, 180)),
)


def find_card(product: str) -> KnownCard | None:
    """The card of a product name (`NVIDIA A30`), or None if it is not known."""
    return next((card for card in KNOWN_CARDS if card.pattern.search(product)), None)


def hardware_geometry(
    gpu: int, card: str, profiles: Sequence[ProfileRow], placements: Sequence[PlacementRow]
) -> Geometry:
    """Join `mig -lgip` and `mig -lgipp` of one GPU. Raises ``LayoutError`` if a profile has no placements."""
    places = {row.profile_id: row for row in placements if row.gpu == gpu}
    joined: list[Profile] = []
    for row in profiles:
        if row.gpu != gpu:
            continue
        place = places.get(row.profile_id)
        if place is None or place.size < 1:
            raise LayoutError(
                [
                    f"GPU {gpu} ({card}): nvidia-smi lists profile {row.name} (ID {row.profile_id}) but no"
                    " placement for it; compare `nvidia-smi mig -lgip` with `nvidia-smi mig -lgipp`."
                ]
            )
        joined.append(Profile(row.name, row.profile_id, place.size, row.total, place.starts))
    return Geometry(card, tuple(joined))


def nearest_profiles(name: str, geometry: Geometry) -> list[str]:
    """Names of this card closest to ``name``: those with as many compute slices, else similar ones."""
    shape = PROFILE_NAME.match(name)
    same: list[str] = []
    if shape:
        same = [
            profile.name
            for profile in geometry.profiles
            if profile.compute_slices == int(shape.group("g"))
            and profile.media_extensions == ("+me" in shape.group("attributes"))
        ]
    return same or difflib.get_close_matches(name, geometry.names, 3, 0.5)


def solve(
    geometry: Geometry, taken: Sequence[tuple[int, int]], counts: Mapping[str, int]
) -> tuple[Placed, ...] | None:
    """Place ``counts`` beside the ``taken`` (start, size) intervals; None if impossible.

    Largest first, lowest start first, backtracking: 1g instances must not take the only places of a 3g or 4g.
    Every profile in ``counts`` must be known to the geometry.
    """
    found = [geometry.profile(name) for name in Counter(counts).elements()]
    order = sorted(
        (profile for profile in found if profile is not None),
        key=lambda profile: (-profile.size, len(profile.starts), profile.profile_id),
    )
    occupied = 0
    for start, size in taken:
        occupied |= _mask(start, size)
    return _place(order, occupied, ())


def _place(order: Sequence[Profile], occupied: int, done: tuple[Placed, ...]) -> tuple[Placed, ...] | None:
    if len(done) == len(order):
        return done
    profile = order[len(done)]
    # equal profiles are interchangeable: only ever place the next one further right
    least = done[-1].start + 1 if done and done[-1].profile == profile else 0
    for start in profile.starts:
        mask = _mask(start, profile.size)
        if start < least or occupied & mask:
            continue
        solution = _place(order, occupied | mask, (*done, Placed(profile, start)))
        if solution is not None:
            return solution
    return None


def _mask(start: int, size: int) -> int:
    return ((1 << size) - 1) << start
