"""Layout entries, possibility and plans: tables for what people write, properties for everything else."""

from __future__ import annotations

import contextlib
from collections import Counter
from functools import lru_cache

import pytest
from fake_nvidia_smi import CARDS, FakeNvidiaSmi, new_gpu
from gpu_slices import gpu_holders
from gpu_slices.mig_geometry import (
    KNOWN_CARDS,
    Geometry,
    LayoutError,
    find_card,
    hardware_geometry,
    nearest_profiles,
)
from gpu_slices.mig_layout import (
    ComputeInstance,
    GpuState,
    Instance,
    Want,
    describe,
    describe_after,
    faults_of,
    layout_faults,
    merge_configs,
    parse_entries,
    plan_gpu,
    resolve,
    satisfied,
    want_of,
)
from gpu_slices.mig_node import apply_plan, plan_node, read_gpus
from gpu_slices.nvidia_smi import NvidiaSmi, parse_placements, parse_profiles
from hypothesis import given, settings
from hypothesis import strategies as st
from test_nvidia_smi import captured


@pytest.fixture(scope="module", autouse=True)
def no_real_processes():
    """The fake's GPUs are not those that processes of this machine may hold."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_holders, "_pids", lambda _proc: iter(()))
        yield


PRODUCTS = [product for product, card in CARDS.items() if card[3]]


def geometry_of(product: str) -> Geometry:
    """The geometry as read from a (fake) card, so that it does not come from the table under test."""
    smi = NvidiaSmi(FakeNvidiaSmi([new_gpu(0, product)]).run)
    return hardware_geometry(0, product, smi.profiles(), smi.placements())


# -- geometry


def test_the_known_h200_is_the_real_h200():
    real = hardware_geometry(
        0,
        "H200 141GB",
        parse_profiles(captured("nvidia-smi mig -lgip")[0]),
        parse_placements(captured("nvidia-smi mig -lgipp")[0]),
    )
    assert find_card("NVIDIA H200").geometry == real


@pytest.mark.parametrize(
    ("product", "card"),
    [
        ("NVIDIA A30", "A30"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA H100 80GB HBM3", "H100 80GB"),
        ("NVIDIA H100 PCIe", "H100 80GB"),
        ("NVIDIA H200", "H200 141GB"),
        ("NVIDIA B200", "B200 180GB"),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA GB200", None),
        ("NVIDIA A300", None),
        ("Tesla T4", None),
    ],
)
def test_cards_are_known_by_product_name(product, card):
    found = find_card(product)
    assert (found.geometry.card if found else None) == card


@pytest.mark.parametrize("product", [p for p in PRODUCTS if find_card(p)])
def test_the_table_and_the_card_agree(product):
    assert set(find_card(product).geometry.profiles) == set(geometry_of(product).profiles)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("3g.39gb", "3g.40gb"),
        ("7g.79gb", "7g.80gb"),
        ("1g.10gb", "1g.10gb"),
        ("1g.9gb", None),
        ("1g.12gb", None),
        ("3g.39gb+me", None),
    ],
)
def test_the_table_takes_names_that_a_driver_rounds_otherwise(name, known):
    found = find_card("NVIDIA A100-SXM4-80GB").geometry.profile(name)
    assert (found.name if found else None) == known
    exact = geometry_of("NVIDIA A100 80GB PCIe").profile(name)
    assert (exact.name if exact else None) == (known if known == name else None)


def test_a_profile_without_placements_is_refused():
    profiles = parse_profiles(captured("nvidia-smi mig -lgip")[0])
    placements = parse_placements(captured("nvidia-smi mig -lgipp")[0])[1:]
    with pytest.raises(LayoutError, match=r"1g\.18gb \(ID 19\) but no placement"):
        hardware_geometry(0, "H200", profiles, placements)


@pytest.mark.parametrize(
    ("product", "wrong", "near"),
    [
        ("NVIDIA A100 80GB PCIe", "1g.5gb", ["1g.10gb", "1g.20gb"]),
        ("NVIDIA H200", "3g.40gb", ["3g.71gb"]),
        ("NVIDIA A30", "1g.5gb+me", ["1g.6gb+me"]),
        ("NVIDIA A30", "2g.6gb", ["2g.12gb"]),
    ],
)
def test_the_nearest_name_has_as_many_compute_slices(product, wrong, near):
    assert nearest_profiles(wrong, find_card(product).geometry) == near


# -- entries

ALL_ON = {"devices": "all", "mig-enabled": True, "mig-devices": {"1g.6gb": 4}}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (None, "must be a list with at least one entry, found None"),
        ([], "must be a list with at least one entry"),
        ("all", "must be a list"),
        (["all"], "entry 1 must be a map"),
        ([{"devices": "all"}], "lacks the key mig-enabled"),
        ([{"mig-enabled": False}], "lacks the key devices"),
        ([{**ALL_ON, "mig-device": {}}], "unknown key 'mig-device'.*Did you mean mig-devices"),
        ([{**ALL_ON, "devices": "some"}], "devices must be `all` or a list of GPU indexes, found 'some'"),
        ([{**ALL_ON, "devices": [0, "1"]}], "devices must hold GPU indexes"),
        ([{**ALL_ON, "devices": [-1]}], "devices must hold GPU indexes"),
        ([{**ALL_ON, "devices": []}], "devices must hold GPU indexes"),
        ([{**ALL_ON, "mig-enabled": "yes"}], "mig-enabled must be true or false, found 'yes'"),
        ([{**ALL_ON, "device-filter": "A30"}], "device-filter must be PCI device ids such as 0x20B710DE"),
        ([{**ALL_ON, "device-filter": 0x20B710DE}], "device-filter must be PCI device ids"),
        ([{"devices": "all", "mig-enabled": True}], "mig-enabled is true, so mig-devices is needed"),
        ([{**ALL_ON, "mig-enabled": False}], "mig-enabled is false, so mig-devices must be left out"),
        ([{**ALL_ON, "mig-devices": ["1g.6gb"]}], "mig-devices must map profile names to counts"),
        ([{**ALL_ON, "mig-devices": {"1g6gb": 1}}], "'1g6gb' is not a MIG profile name"),
        ([{**ALL_ON, "mig-devices": {"1g.6GB": 1}}], "'1g.6GB' is not a MIG profile name"),
        ([{**ALL_ON, "mig-devices": {"1g.6gb": "4"}}], "the number of 1g.6gb must be a whole number"),
        ([{**ALL_ON, "mig-devices": {"1g.6gb": True}}], "the number of 1g.6gb must be a whole number"),
        ([{**ALL_ON, "mig-devices": {"1g.6gb": -1}}], "the number of 1g.6gb must be a whole number"),
        ([{**ALL_ON, "mig-devices": {"1c.3g.20gb": 1}}], r"give the GPU instance profile \(3g.20gb\)"),
    ],
)
def test_a_wrong_entry_is_named(raw, message):
    entries, faults = parse_entries("x", raw)
    assert entries == []
    assert len(faults) == 1
    with pytest.raises(LayoutError, match=message):
        raise LayoutError(faults)


def test_all_faults_of_a_layout_come_together():
    _entries, faults = parse_entries("x", [{"devices": "some", "mig-enabled": 1}, {"devicse": "all"}])
    assert len(faults) == 5


def test_zero_of_a_profile_is_none_of_it():
    (entry,), faults = parse_entries("x", [{**ALL_ON, "mig-devices": {"1g.6gb": 0, "2g.12gb": 2}}])
    assert faults == []
    assert entry.mig_devices == (("2g.12gb", 2),)


A30_ID, H200_ID = frozenset(["0x20B710DE"]), frozenset(["0x233510DE"])
MIXED = [(0, A30_ID), (1, H200_ID), (2, H200_ID)]


def resolved(raw, gpus=MIXED):
    entries, faults = parse_entries("x", raw)
    assert faults == []
    wants, faults = resolve("x", entries, gpus)
    return {index: (want.enabled, dict(want.devices)) for index, want in wants.items()}, faults


def test_the_last_matching_entry_wins_and_unmatched_gpus_are_left_alone():
    wants, faults = resolved(
        [
            {"devices": "all", "mig-enabled": False},
            {
                "devices": "all",
                "device-filter": "0x233510de",
                "mig-enabled": True,
                "mig-devices": {"1g.18gb": 7},
            },
            {"devices": [2], "mig-enabled": True, "mig-devices": {"3g.71gb": 2}},
        ]
    )
    assert faults == []
    assert wants == {0: (False, {}), 1: (True, {"1g.18gb": 7}), 2: (True, {"3g.71gb": 2})}
    wants, faults = resolved([{"devices": [1], "mig-enabled": False}])
    assert (wants, faults) == ({1: (False, {})}, [])


def test_a_filter_list_matches_any_of_its_cards():
    wants, faults = resolved(
        [
            {
                "devices": "all",
                "device-filter": ["0x20B710DE", "0x233510DE"],
                "mig-enabled": True,
                "mig-devices": {},
            }
        ]
    )
    assert faults == []
    assert set(wants) == {0, 1, 2}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ([{"devices": [0, 7, 9], "mig-enabled": False}], r"there is no GPU 7, 9; GPUs here: 0, 1, 2\."),
        (
            [{"devices": "all", "device-filter": "0x20B010DE", "mig-enabled": False}],
            "matches none of the GPUs here .*0x20B710DE, 0x233510DE",
        ),
        (
            [
                {"devices": [1], "mig-enabled": False},
                {"devices": "all", "mig-enabled": True, "mig-devices": {}},
            ],
            "entries 1 and 2 want different things for GPU 1",
        ),
        (
            [
                {"devices": [1, 2], "mig-enabled": False},
                {"devices": [0, 1], "mig-enabled": True, "mig-devices": {}},
            ],
            "entries 1 and 2 want different things for GPU 1",
        ),
    ],
)
def test_entries_that_cannot_be_meant_are_faults(raw, message):
    _wants, faults = resolved(raw)
    assert len(faults) == 1
    with pytest.raises(LayoutError, match=message):
        raise LayoutError(faults)


def test_an_index_of_another_card_is_no_fault():
    raw = [
        {"devices": [0, 1, 2, 3], "device-filter": "0x20B010DE", "mig-enabled": False},
        {"devices": "all", "mig-enabled": False},
    ]
    assert resolved(raw)[1] == []


def test_entries_that_agree_may_overlap():
    assert (
        resolved([{"devices": [1], "mig-enabled": False}, {"devices": "all", "mig-enabled": False}])[1] == []
    )


# -- what is possible


@pytest.mark.parametrize(
    ("product", "devices", "message"),
    [
        ("NVIDIA H200", {"1g.5gb": 1}, r"no profile 1g.5gb; it has 1g.18gb, .*Nearest: 1g.18gb, 1g.35gb"),
        ("NVIDIA A30", {"1g.6gb": 5}, "at most 4 x 1g.6gb, 5 are asked for"),
        ("NVIDIA A30", {"1g.6gb+me": 2}, r"at most 1 x 1g.6gb\+me, 2 are asked for"),
        ("NVIDIA A30", {"1g.6gb+me": 1, "2g.12gb+me": 1}, r"one set of media extensions"),
        ("NVIDIA A30", {"1g.6gb": 3, "2g.12gb": 1}, "4 memory slices, but 3 x 1g.6gb . 1 x 2g.12gb take 5"),
        ("NVIDIA A100-SXM4-40GB", {"3g.20gb": 2, "1g.5gb": 1}, "take 9"),
        ("NVIDIA A100-SXM4-40GB", {"2g.10gb": 3, "1g.10gb": 1, "1g.5gb": 0}, None),
        ("NVIDIA A100-SXM4-40GB", {"4g.20gb": 1, "1g.5gb": 4}, "no placement for .* together"),
        ("NVIDIA A100-SXM4-40GB", {"3g.20gb": 1, "1g.5gb": 4}, None),
        ("NVIDIA A100 80GB PCIe", {"4g.40gb": 1, "1g.10gb": 3}, None),
        ("NVIDIA H200", {"3g.71gb": 1, "2g.35gb": 2}, None),
        ("NVIDIA H200", {"7g.141gb": 1}, None),
    ],
)
def test_possible_or_not(product, devices, message):
    faults = faults_of(Want(True, tuple(devices.items())), geometry_of(product))
    if message is None:
        assert faults == []
    else:
        assert len(faults) == 1
        with pytest.raises(LayoutError, match=message):
            raise LayoutError(faults)


def test_every_fault_of_a_wish_is_told():
    faults = faults_of(Want(True, (("1g.5gb", 1), ("9g.9gb", 1), ("3g.71gb", 3))), geometry_of("NVIDIA H200"))
    assert len(faults) == 3


# -- all configurations of a card, found without the solver


@lru_cache(maxsize=None)
def configurations(product: str) -> dict[tuple[tuple[str, int], ...], list[frozenset[tuple[str, int]]]]:
    """Every legal set of (profile, start), grouped by its multiset of profiles."""
    _device, _memory, _arch, profiles = CARDS[product]
    pieces = [(name, start, size, total) for _id, name, size, starts, total in profiles for start in starts]
    grouped: dict[tuple[tuple[str, int], ...], list[frozenset[tuple[str, int]]]] = {}

    def extend(position: int, chosen: tuple[tuple[str, int], ...], used: frozenset[int]) -> None:
        if position == len(pieces):
            counts = Counter(name for name, _start in chosen)
            limits = {name: total for name, _start, _size, total in pieces}
            media = sum(count for name, count in counts.items() if "+me" in name)
            if media <= 1 and all(count <= limits[name] for name, count in counts.items()):
                grouped.setdefault(tuple(sorted(counts.items())), []).append(frozenset(chosen))
            return
        name, start, size, _total = pieces[position]
        extend(position + 1, chosen, used)
        cover = frozenset(range(start, start + size))
        if not cover & used:
            extend(position + 1, (*chosen, (name, start)), used | cover)

    extend(0, (), frozenset())
    return grouped


products = st.sampled_from(PRODUCTS)


@st.composite
def card_state_and_wish(draw):
    """A card, instances that can exist on it (some without compute instance) and a wish that fits it."""
    product = draw(products)
    groups = configurations(product)
    start = draw(st.sampled_from(sorted(groups)))
    cut = draw(st.sampled_from(sorted(groups[start], key=sorted)))
    whole = draw(st.lists(st.booleans(), min_size=len(cut), max_size=len(cut)))
    mode = draw(st.sampled_from(["Enabled", "Disabled"]))
    wish = draw(st.sampled_from(sorted(groups)))
    enabled = draw(st.booleans()) or bool(wish)
    used = draw(st.lists(st.booleans(), min_size=len(cut), max_size=len(cut)))
    return product, mode, list(zip(sorted(cut), whole, used)), Want(enabled, wish)


def build(product, mode, pieces):
    """A fake node with one such GPU and its client."""
    fake = FakeNvidiaSmi([new_gpu(0, product, mode=mode, pending=mode)])
    gpu = fake.gpus[0]
    for (name, start), whole, _used in pieces if mode == "Enabled" else []:
        profile = next(p for p in CARDS[product][3] if p[1] == name)
        item = {
            "gi": fake.free_id(gpu, profile[2]),
            "id": profile[0],
            "name": name,
            "start": start,
            "size": profile[2],
            "cis": [],
        }
        gpu["instances"].append(item)
        if whole:
            fake.add_compute(gpu, item)
    return fake, NvidiaSmi(fake.run)


@settings(max_examples=80, deadline=None)
@given(card_state_and_wish())
def test_a_plan_can_be_carried_out_and_then_nothing_is_left_to_do(case):
    product, mode, pieces, wish = case
    fake, smi = build(product, mode, pieces)
    after, _done = apply_plan(smi, plan_node(smi, read_gpus(smi), {0: wish}), may_reset=True)
    assert satisfied(after[0], wish)
    shown = Counter(line.profile for line in smi.listing()[0].mig)
    assert shown == wish.counts
    assert after[0].mode_current == ("Enabled" if wish.enabled else "Disabled")
    fake.log.clear()
    again = plan_node(smi, read_gpus(smi), {0: wish})
    assert again.pending == []
    assert apply_plan(smi, again, may_reset=True)[1] == []
    assert fake.log == []


@settings(max_examples=80, deadline=None)
@given(card_state_and_wish())
def test_a_plan_destroys_as_little_as_any_plan_could(case):
    product, mode, pieces, wish = case
    _fake, smi = build(product, mode, pieces)
    (state,) = read_gpus(smi)
    plan = plan_gpu(state, wish, geometry_of(product))
    present = {(item.profile, item.start) for item in state.instances}
    if not wish.enabled:
        assert len(plan.destroy) == len(present)
        return
    goals = configurations(product)[tuple(sorted(wish.counts.items()))]
    assert len(plan.keep) == max(len(goal & present) for goal in goals)
    assert len(plan.keep) + len(plan.create) == sum(wish.counts.values())
    assert {item.gi_id for item in plan.keep}.isdisjoint(item.gi_id for item in plan.destroy)


@settings(max_examples=80, deadline=None)
@given(card_state_and_wish())
def test_instances_in_use_are_the_last_to_go(case):
    product, mode, pieces, wish = case
    _fake, smi = build(product, mode, pieces)
    (state,) = read_gpus(smi)
    used_places = {place for place, _whole, used in pieces if used and mode == "Enabled"}
    used_ids = {item.gi_id for item in state.instances if (item.profile, item.start) in used_places}
    plan = plan_gpu(state, wish, geometry_of(product), used_ids)
    if wish.enabled:
        goals = configurations(product)[tuple(sorted(wish.counts.items()))]
        kept = sum(1 for item in plan.keep if item.gi_id in used_ids)
        assert kept == max(len(goal & used_places) for goal in goals)


@settings(max_examples=120, deadline=None)
@given(product=products, data=st.data())
def test_a_wish_has_faults_exactly_when_no_configuration_has_it(product, data):
    names = [profile[1] for profile in CARDS[product][3]]
    counts = data.draw(st.dictionaries(st.sampled_from(names), st.integers(1, 8), max_size=4))
    possible = tuple(sorted(counts.items())) in configurations(product)
    assert (faults_of(Want(True, tuple(counts.items())), geometry_of(product)) == []) == possible


@settings(max_examples=60, deadline=None)
@given(card_state_and_wish())
def test_a_recorded_layout_comes_back_place_by_place(case):
    product, mode, pieces, wish = case
    _fake, smi = build(product, mode, [(place, True, used) for place, _whole, used in pieces])
    before = read_gpus(smi)
    apply_plan(smi, plan_node(smi, before, {0: wish}), may_reset=True)
    recorded = want_of(before[0])
    after, _done = apply_plan(smi, plan_node(smi, read_gpus(smi), {0: recorded}), may_reset=True)
    places = [{(item.profile, item.start) for item in gpu.instances} for gpu in (before[0], after[0])]
    assert places[0] == places[1]
    assert after[0].mode_current == mode


class Killed(Exception):
    """Stands for kill -9 in the middle of a run: nothing gets to clean up."""


@settings(max_examples=60, deadline=None)
@given(case=card_state_and_wish(), survive=st.integers(0, 4))
def test_a_run_that_was_killed_is_finished_or_undone_by_the_next(case, survive):
    product, mode, pieces, wish = case
    fake, smi = build(product, mode, [(place, True, used) for place, _whole, used in pieces])
    before = read_gpus(smi)

    def run_until_killed(args):
        changes = len(fake.log)
        result = fake.run(args)
        if len(fake.log) > changes and len(fake.log) > survive:
            raise Killed
        return result

    with contextlib.suppress(Killed):
        apply_plan(NvidiaSmi(run_until_killed), plan_node(smi, before, {0: wish}), may_reset=True)
    goal = wish if survive % 2 else want_of(before[0])
    after, _done = apply_plan(smi, plan_node(smi, read_gpus(smi), {0: goal}), may_reset=True)
    assert satisfied(after[0], goal)


# -- single plans, readable


def gpu_state(mode="Enabled", pending=None, instances=()):
    return GpuState(
        0,
        "GPU-a",
        "NVIDIA A30",
        "00000000:01:00.0",
        "0x20B710DE",
        24576,
        mode,
        pending or mode,
        tuple(instances),
    )


def one_g(gi_id, start, compute=True):
    inside = (ComputeInstance(0, "1g.6gb", f"MIG-{gi_id}"),) if compute else ()
    return Instance(gi_id, "1g.6gb", 14, start, 1, inside)


A30 = find_card("NVIDIA A30").geometry
FOUR = Want(True, (("1g.6gb", 4),))


def steps(state, wish, in_use=()):
    return [str(step) for step in plan_gpu(state, wish, A30, in_use).steps]


def test_from_nothing_to_four_slices():
    assert steps(gpu_state("Disabled"), FOUR) == [
        "GPU 0: enable MIG mode",
        "GPU 0: create 1g.6gb at 0:1, 1g.6gb at 1:1, 1g.6gb at 2:1, 1g.6gb at 3:1",
    ]


def test_two_slices_stay_where_they_can():
    state = gpu_state(instances=[one_g(3, 0), one_g(4, 1), one_g(5, 2), one_g(6, 3)])
    assert steps(state, Want(True, (("2g.12gb", 1), ("1g.6gb", 2)))) == [
        "GPU 0: destroy the compute instances of GPU instance 5, 6",
        "GPU 0: destroy GPU instance 5, 6",
        "GPU 0: create 2g.12gb at 2:2",
    ]


def test_slices_in_use_decide_which_ones_stay():
    state = gpu_state(instances=[one_g(3, 0), one_g(4, 1), one_g(5, 2), one_g(6, 3)])
    assert steps(state, Want(True, (("2g.12gb", 1), ("1g.6gb", 2))), in_use=[5])[1:] == [
        "GPU 0: destroy GPU instance 3, 4",
        "GPU 0: create 2g.12gb at 0:2",
    ]


def test_an_instance_without_compute_instance_gets_one():
    state = gpu_state(instances=[one_g(3, 0, compute=False), one_g(4, 1), one_g(5, 2), one_g(6, 3)])
    assert steps(state, FOUR) == ["GPU 0: create a compute instance in GPU instance 3"]


def test_a_pending_mode_is_taken_back_or_confirmed():
    assert steps(gpu_state("Disabled", "Enabled"), Want(False)) == ["GPU 0: disable MIG mode"]
    state = gpu_state("Enabled", "Disabled", [one_g(3, 0), one_g(4, 1), one_g(5, 2), one_g(6, 3)])
    assert steps(state, FOUR) == ["GPU 0: enable MIG mode"]


def test_mode_off_destroys_first():
    assert steps(gpu_state(instances=[one_g(3, 0), one_g(4, 1, compute=False)]), Want(False)) == [
        "GPU 0: destroy the compute instances of GPU instance 3",
        "GPU 0: destroy GPU instance 3, 4",
        "GPU 0: disable MIG mode",
    ]


def test_a_card_without_mig():
    state = gpu_state("N/A")
    assert plan_gpu(state, Want(False), Geometry("T4", ())).steps == ()
    with pytest.raises(LayoutError, match=r"GPU 0 \(NVIDIA A30\) cannot do MIG, but layout 'x'"):
        plan_gpu(state, Want(True, origin="layout 'x', entry 1"), Geometry("T4", ()))


def test_large_instances_are_created_first():
    state = gpu_state("Disabled")
    geometry = geometry_of("NVIDIA A100-SXM4-40GB")
    plan = plan_gpu(state, Want(True, (("1g.5gb", 4), ("3g.20gb", 1))), geometry)
    assert [(item.profile.name, item.start) for item in plan.create] == [
        ("3g.20gb", 4),
        ("1g.5gb", 0),
        ("1g.5gb", 1),
        ("1g.5gb", 2),
        ("1g.5gb", 3),
    ]


def test_a_diff_shows_what_stays_and_what_comes():
    state = gpu_state(instances=[one_g(3, 0), one_g(5, 2, compute=False)])
    plan = plan_gpu(state, Want(True, (("1g.6gb", 2), ("2g.12gb", 1))), A30)
    assert describe(state) == (
        "GPU 0 NVIDIA A30 GPU-a: MIG Enabled\n"
        "  1g.6gb at 0:1 (GPU instance 3: MIG-3)\n"
        "  1g.6gb at 2:1 (GPU instance 5: no compute instance)\n"
    )
    assert describe_after(plan) == (
        "GPU 0 NVIDIA A30 GPU-a: MIG Enabled\n"
        "  1g.6gb at 0:1 (GPU instance 3: MIG-3)\n"
        "  1g.6gb at 1:1 (new)\n"
        "  2g.12gb at 2:2 (new)\n"
    )
    assert "Disabled, pending Enabled" in describe(gpu_state("Disabled", "Enabled"))


def test_a_record_that_no_card_could_have_had_is_refused():
    wrong = Want(True, (("2g.12gb", 2),), fixed=(("2g.12gb", 0), ("2g.12gb", 1)))
    with pytest.raises(LayoutError, match=r"cannot place 2g\.12gb at memory slice 1"):
        plan_gpu(gpu_state(), wrong, A30)
    overlap = Want(True, (("2g.12gb", 1), ("1g.6gb", 1)), fixed=(("2g.12gb", 0), ("1g.6gb", 1)))
    with pytest.raises(LayoutError, match="overlaps"):
        plan_gpu(gpu_state(), overlap, A30)


# -- an inventory without hardware

CONFIGS = {
    "four": [ALL_ON],
    "six": [{**ALL_ON, "mig-devices": {"1g.6gb": 6}}],
    "seven": [{**ALL_ON, "mig-devices": {"1g.18gb": 7}}],
    "unknown": [{**ALL_ON, "mig-devices": {"1g.12gb": 7}}],
    "crowded": [{**ALL_ON, "mig-devices": {"4g.71gb": 1, "1g.18gb": 4}}],
    "filtered": [
        {**ALL_ON, "device-filter": "0x20B710DE"},
        {**ALL_ON, "device-filter": ["0x233510DE"], "mig-devices": {"1g.6gb": 1}},
    ],
    "hidden": [{"devices": [0], "mig-enabled": False}, ALL_ON],
    "second": [{**ALL_ON, "devices": [1]}],
    "broken": [{"devices": "all"}],
}


@pytest.mark.parametrize(
    ("layout", "models", "message"),
    [
        ("", [], None),
        ("four", [], None),
        ("four", ["NVIDIA A30"], None),
        ("four", ["NVIDIA H200"], "h: layout 'four', entry 1, GPU 0: H200 141GB has no profile 1g.6gb"),
        ("four", ["NVIDIA A30", "NVIDIA H200"], "GPU 1: H200 141GB has no profile"),
        ("six", [], "A30 holds at most 4 x 1g.6gb, 6 are asked for"),
        ("seven", ["NVIDIA H200"], None),
        ("crowded", [], "H200 141GB has no placement for"),
        ("unknown", [], "no known card has all of 1g.12gb .*mig_gpu_models"),
        ("unknown", ["NVIDIA H100 NVL"], None),
        ("unknown", ["NVIDIA H100 NVL", "NVIDIA A30"], "GPU 1: A30 has no profile 1g.12gb"),
        ("filtered", [], "entry 2: H200 141GB has no profile 1g.6gb"),
        ("filtered", ["NVIDIA A30"], None),
        ("filtered", ["NVIDIA A100-SXM4-40GB"], "matches none of the GPUs here"),
        ("hidden", [], "entries 1 and 2 want different things for GPU 0"),
        ("second", ["NVIDIA A30"], "there is no GPU 1; GPUs here: 0"),
        ("broken", [], "lacks the key mig-enabled"),
        ("foru", [], "names the layout 'foru', which is not defined; .*Did you mean 'four'"),
    ],
)
def test_an_inventory_is_judged_without_hardware(layout, models, message):
    faults = layout_faults(CONFIGS, {"h": layout}, {"h": models})
    if message is None:
        assert faults == []
    else:
        assert len(faults) == 1
        with pytest.raises(LayoutError, match=message):
            raise LayoutError(faults)


def test_hosts_with_the_same_fault_share_a_line():
    assert layout_faults(CONFIGS, {"a": "broken", "b": "broken", "c": "six"}, None) == [
        "a, b: layout 'broken', entry 1 lacks the key mig-enabled.",
        "c: layout 'six', entry 1: A30 holds at most 4 x 1g.6gb, 6 are asked for.",
    ]


@pytest.mark.parametrize("configs", [None, [], "x", 5])
def test_configs_of_a_wrong_type_are_a_fault(configs):
    assert "must map layout names" in layout_faults(configs, {"h": "x"})[0]


@pytest.mark.parametrize("card", KNOWN_CARDS, ids=lambda card: card.geometry.card)
def test_the_largest_number_of_every_profile_is_possible_alone(card):
    for profile in card.geometry.profiles:
        assert faults_of(Want(True, ((profile.name, profile.max_count),)), card.geometry) == []


def test_layouts_of_a_file_are_added():
    file = {"version": "v1", "mig-configs": {"off": [{"devices": "all", "mig-enabled": False}]}}
    assert set(merge_configs({"four": [ALL_ON]}, file, "f.yaml")) == {"four", "off"}
    assert merge_configs({"off": file["mig-configs"]["off"]}, file) == file["mig-configs"]


@pytest.mark.parametrize(
    ("inline", "content", "message"),
    [
        ([], None, "mig_configs must map layout names"),
        ({}, ["x"], "f.yaml must be a mig-parted file"),
        ({}, {"version": "v1"}, "f.yaml must be a mig-parted file"),
        ({}, {"version": "v2", "mig-configs": {"a": []}}, "must say `version: v1`, found 'v2'"),
        (
            {"a": [1]},
            {"version": "v1", "mig-configs": {"a": []}},
            "layout 'a' is in mig_configs and, different,",
        ),
    ],
)
def test_layout_sources_that_do_not_fit_are_refused(inline, content, message):
    with pytest.raises(LayoutError, match=message):
        merge_configs(inline, content, "f.yaml")
