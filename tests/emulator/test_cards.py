"""What each card can be cut into."""

from __future__ import annotations

import math
import re

import pytest
from silicon_node import MakeNode, Node

# name, ID, memory (MiB), SMs, most, starts, size in memory slices: from real cards and NVIDIA's MIG guide.
SEVENTHS = [(0, 1, 2, 3, 4, 5, 6), (0, 2, 4), (0, 4), (0,), (0, 2, 4, 6)]
Row = tuple[str, int, int, int, int, tuple[int, ...], int]


def eight(names: list[str], mib: list[int], sm: list[int]) -> list[Row]:
    """The seven profiles of a card with eight memory slices."""
    shape = [
        (19, 7, SEVENTHS[0], 1),
        (20, 1, SEVENTHS[0], 1),
        (15, 4, SEVENTHS[4], 2),
        (14, 3, SEVENTHS[1], 2),
        (9, 2, SEVENTHS[2], 4),
        (5, 1, SEVENTHS[3], 4),
        (0, 1, SEVENTHS[3], 8),
    ]
    return [
        (n, i, m, s, most, starts, size)
        for (i, most, starts, size), n, m, s in zip(shape, names, mib, sm, strict=True)
    ]


CARDS: dict[str, tuple[str, int, list[Row]]] = {
    "A30": (
        "NVIDIA A30",
        24576,
        [
            ("1g.6gb", 14, 5952, 14, 4, (0, 1, 2, 3), 1),
            ("1g.6gb+me", 21, 5952, 14, 1, (0, 1, 2, 3), 1),
            ("2g.12gb", 5, 11968, 28, 2, (0, 2), 2),
            ("2g.12gb+me", 6, 11968, 28, 1, (0, 2), 2),
            ("4g.24gb", 0, 24000, 56, 1, (0,), 4),
        ],
    ),
    "A100-40": (
        "NVIDIA A100-SXM4-40GB",
        40960,
        eight(
            ["1g.5gb", "1g.5gb+me", "1g.10gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb"],
            [4864, 4864, 9856, 9856, 19968, 19968, 40192],
            [14, 14, 14, 28, 42, 56, 98],
        ),
    ),
    "A100-80": (
        "NVIDIA A100-SXM4-80GB",
        81920,
        eight(
            ["1g.10gb", "1g.10gb+me", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"],
            [9728, 9728, 19968, 19968, 40192, 40192, 80640],
            [14, 14, 14, 28, 42, 56, 98],
        ),
    ),
    "H100": (
        "NVIDIA H100 80GB HBM3",
        81559,
        eight(
            ["1g.10gb", "1g.10gb+me", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"],
            [9984, 9984, 20096, 20096, 40448, 40448, 81152],
            [16, 16, 26, 32, 60, 64, 132],
        ),
    ),
    "H200": (
        "NVIDIA H200",
        143771,
        eight(
            ["1g.18gb", "1g.18gb+me", "1g.35gb", "2g.35gb", "3g.71gb", "4g.71gb", "7g.141gb"],
            [16384, 16384, 33280, 33280, 71424, 71424, 143360],
            [16, 16, 26, 32, 60, 64, 132],
        ),
    ),
}
ROW = re.compile(r"MIG (\S+)\s+(\d+)\s+(\d+)/(\d+)\s+([\d.]+)\s+(Yes|No)\s+(\d+)\s+(\d+)\s+(\d+)")
PLACE = re.compile(r"Profile ID +(\d+) Placements?\s*: \{([\d,]+)\}:(\d+)")


@pytest.fixture(params=CARDS)
def card(request: pytest.FixtureRequest, make_node: MakeNode) -> tuple[Node, str, int, list[Row]]:
    return (make_node(request.param), *CARDS[request.param])


def gib(mib: int) -> str:
    return f"{mib / 1024:.2f}"


def test_profiles_and_placements(card: tuple[Node, str, int, list[Row]]) -> None:
    node, name, total, rows = card
    query = node.ok("--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
    assert query == f"{name}, {total}\n"
    table = node.ok("mig", "-lgip")
    assert {len(line) for line in table.splitlines()} == {81}
    assert ROW.findall(table) == [
        (profile, str(number), str(most), str(most), gib(mib), "No", str(sm), *ROW.findall(table)[i][7:])
        for i, (profile, number, mib, sm, most, _, _) in enumerate(rows)
    ]
    found = [
        (int(i), tuple(map(int, starts.split(","))), int(size))
        for i, starts, size in PLACE.findall(node.ok("mig", "-lgipp"))
    ]
    assert found == [(number, starts, size) for _, number, _, _, _, starts, size in rows]


def test_names_follow_from_memory_as_the_driver_computes_them(card: tuple[Node, str, int, list[Row]]) -> None:
    """NVIDIA's DRA driver makes "1g.6gb" of the memory sizes: eighths of the card, rounded up."""
    _, _, total, rows = card
    for name, _, mib, *_ in rows:
        gigabytes = math.floor(math.ceil(mib / total * 8) / 8 * math.ceil(total / 1024) + 0.5)
        assert re.fullmatch(rf"\dg\.{gigabytes}gb(\+me)?", name), name


def test_every_profile_fills_every_placement_and_no_more(card: tuple[Node, str, int, list[Row]]) -> None:
    node, _, _, rows = card
    node.ok("-mig", "1")
    for name, number, mib, _, most, starts, size in rows:
        for start in starts[:most]:
            said = node.ok("mig", "-cgi", f"{number}:{start}", "-C")
            assert f"using profile MIG {name} (ID {number:2d})" in said
        left = next(row for row in ROW.findall(node.ok("mig", "-lgip")) if int(row[1]) == number)
        assert (left[2], left[3]) == ("0", str(most))
        refused = node.smi("mig", "-cgi", name)
        assert refused.returncode == 23
        assert refused.stdout == (
            f"Unable to create a GPU instance on GPU  0 using profile {number}: Insufficient Resources\n"
            "Failed to create GPU instances: Insufficient Resources\n"
        )
        listed = node.ok("mig", "-lgi")
        assert sorted(re.findall(r"(\d):(\d) ", listed)) == sorted((str(s), str(size)) for s in starts[:most])
        ids = re.findall(rf"MIG \S+ +{number} +(\d+) ", listed)
        assert len(set(ids)) == most
        assert ids == sorted(ids, key=int)
        lines = node.mig_lines()
        assert [re.sub(r"UUID: MIG-[0-9a-f-]{36}", "UUID", line) for line in lines] == [
            f"  MIG {name:11s} Device {i:2d}: (UUID)" for i in range(most)
        ]
        assert len({line.split("UUID: ")[1] for line in lines}) == most
        table = node.ok().splitlines()
        assert len([line for line in table if f"MiB / {mib:5d}MiB  " in line]) == most
        assert {len(line) for line in table[1:] if line} == {91}
        node.ok("mig", "-dci")
        node.ok("mig", "-dgi")


def test_an_illegal_start_is_an_invalid_argument(card: tuple[Node, str, int, list[Row]]) -> None:
    node, _, _, rows = card
    node.ok("-mig", "1")
    name, number, _, _, _, starts, _ = rows[-2]
    assert 1 not in starts
    for tuple_ in (f"{name}:1", f"{number}:1", f"{number}:x"):
        refused = node.smi("mig", "-cgi", tuple_)
        assert refused.returncode == 2
        assert f"using profile {number}: Invalid Argument" in refused.stdout


@pytest.mark.parametrize("card_name", ["A100-40", "A100-80", "H100", "H200"])
def test_instance_numbers_of_eight_slice_cards(make_node: MakeNode, card_name: str) -> None:
    """As NVIDIA numbers them: 1g at 0..3 is 11..14, at 4..6 it is 7..9."""
    node: Node = make_node(card_name)
    node.ok("-mig", "1")
    made = node.ok("mig", "-cgi", ",".join(["19"] * 7))
    assert re.findall(r"instance ID +(\d+)", made) == ["11", "12", "13", "14", "7", "8", "9"]
    node.ok("mig", "-dgi")
    made = node.ok("mig", "-cgi", "9,9")
    assert re.findall(r"instance ID +(\d+)", made) == ["2", "1"]
    node.ok("mig", "-dgi")
    assert re.findall(r"instance ID +(\d+)", node.ok("mig", "-cgi", "14,14,14")) == ["5", "6", "3"]


def test_order_matters(make_node: MakeNode) -> None:
    """Three sevenths first leave no place for the half that only fits at the start."""
    node: Node = make_node("A100-80")
    node.ok("-mig", "1")
    done = node.smi("mig", "-cgi", "1g.10gb,1g.10gb,1g.10gb,4g.40gb", "-C")
    assert done.returncode == 23
    assert "GPU instance ID 11 on GPU  0 using profile MIG 1g.10gb (ID 19)" in done.stdout
    assert len(node.mig_lines()) == 3
    node.ok("mig", "-dci")
    node.ok("mig", "-dgi")
    node.ok("mig", "-cgi", "4g.40gb,1g.10gb,1g.10gb,1g.10gb", "-C")
    assert len(node.mig_lines()) == 4


def test_one_media_instance_only(a30: Node) -> None:
    a30.ok("-mig", "1")
    a30.ok("mig", "-cgi", "1g.6gb+me")
    assert a30.smi("mig", "-cgi", "2g.12gb+me").returncode == 23
    a30.ok("mig", "-cgi", "2g.12gb,1g.6gb")


def test_a_card_without_mig(make_node: MakeNode) -> None:
    node: Node = make_node("T4")
    assert node.mode() == ("[N/A]", "[N/A]")
    done = node.smi("-mig", "1")
    assert (done.returncode, done.stdout.splitlines()[0]) == (
        0,
        "Unable to enable MIG Mode for GPU 00000000:00:06.0: Not Supported",
    )
    assert node.smi("mig", "-lgip").returncode == 6
    assert node.mode() == ("[N/A]", "[N/A]")


def test_many_cards_and_unknown_ones(make_node: MakeNode) -> None:
    node: Node = make_node(",".join(["H200"] * 16 + ["A30"] * 4))
    lines = node.ok("-L").splitlines()
    assert len(lines) == 20
    assert len({line.split("UUID: ")[1] for line in lines}) == 20
    buses = node.ok("--query-gpu=pci.bus_id", "--format=csv,noheader").split()
    assert len(set(buses)) == 20
    uuid = lines[17].split("UUID: ")[1].rstrip(")")
    for name in (uuid, "17", buses[17], buses[17].lower().replace("00000000", "0000")):
        assert node.ok("-i", name, "--query-gpu=uuid", "--format=csv,noheader") == f"{uuid}\n"
    refused = node.silicon("init", "--cards", "A30,B999", check=False)
    assert refused.returncode == 2
    assert "unknown card 'B999'; known: A30" in refused.stderr
    assert len(node.ok("-L").splitlines()) == 20
