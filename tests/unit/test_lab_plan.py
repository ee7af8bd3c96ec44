from __future__ import annotations

import json
from pathlib import Path

import lab_import
import pytest
import yaml

plan = lab_import.lab_plan()

NODES = (
    plan.Node("control", 2, control=True),
    plan.Node("a30", 3, cards=("A30",)),
    plan.Node("h200", 4, cards=("H200", "H200")),
)


def lab(**changes):
    settings = {
        "instance": "test",
        "subnet": "10.78.0.0/24",
        "image": "localhost/node:1",
        "run_dir": "/run/lab",
        "nodes": NODES,
        "limits": plan.Limits(nofile=20000, nproc=32768),
        "silicon_dir": "/build/silicon",
        "pause_image": "docker.io/lab/pause:1",
    }
    return plan.Lab(**{**settings, **changes})


def found(name="gpu-slices-test-a30", config="c", state="running", alive=True, watched=True):
    return plan.Found(name, "id", config, state, alive, watched)


def inspected(pid=100, conmon=99, status="running"):
    return {
        "Name": "gpu-slices-test-a30",
        "Id": "abc",
        "State": {"Status": status, "Pid": pid, "ConmonPid": conmon},
        "Config": {"Labels": {"gpu-slices.config": "c"}},
    }


def test_addresses_follow_from_the_node_number():
    assert [lab().address(node) for node in NODES] == ["10.78.0.2", "10.78.0.3", "10.78.0.4"]
    assert [lab().pod_cidr(node) for node in NODES] == ["10.244.2.0/24", "10.244.3.0/24", "10.244.4.0/24"]
    assert lab().gateway() == "10.78.0.1"


def test_every_template_of_the_node_has_all_its_values():
    for node in NODES:
        for path in (lab_import.ROOT / "lab/node").rglob("*.in"):
            text = plan.render(path.read_text(), plan.values(lab(), node))
            assert "@" not in text.replace("@LAB", ""), path
            if path.name.endswith(".yaml.in"):
                assert yaml.safe_load(text)["kind"].endswith("Configuration")
            if path.name.endswith(".conflist.in"):
                assert json.loads(text)["plugins"][0]["ipam"]["ranges"][0][0]["subnet"] == lab().pod_cidr(
                    node
                )


def test_only_the_control_node_is_tainted_and_runs_the_control_plane():
    control, gpu = (plan.values(lab(), node) for node in NODES[:2])
    assert json.loads(control["TAINTS"])[0]["effect"] == "NoSchedule"
    assert json.loads(gpu["TAINTS"]) == []
    assert "etcd" in control["SERVICES"].split()
    assert gpu["SERVICES"].split() == ["containerd", "kubelet", "kube-proxy"]
    assert "sa.key" not in plan.credentials(NODES[1]).values()
    assert "kubelet-a30.conf" in plan.credentials(NODES[1]).values()


def test_each_node_routes_to_the_pods_of_all_others():
    assert plan.values(lab(), NODES[0])["ROUTES"] == "10.244.3.0/24=10.78.0.3 10.244.4.0/24=10.78.0.4"


def test_cards_are_started_at_boot_in_index_order():
    assert "--cards H200,H200 " in plan.values(lab(), NODES[2])["BOOT"]
    assert plan.values(lab(), NODES[0])["BOOT"] == ""


def test_bare_nodes_run_no_service_and_get_no_cluster_volumes():
    bare = lab(kubernetes=False, nodes=NODES[1:])
    assert plan.services(bare, NODES[1]) == ()
    assert not any("containerd" in argument for argument in plan.run_arguments(bare, NODES[1], "x"))
    assert plan.values(bare, NODES[1])["API"] == ""


def test_unknown_placeholder_is_refused_by_name():
    with pytest.raises(plan.PlanError, match="@NOSUCH@ has no value"):
        plan.render("x @NOSUCH@", {"NAME": "a"})


def test_limits_are_asked_for_only_where_podman_cannot_have_its_own():
    assert plan.limits(20000, 96363, can_raise=False) == plan.Limits(20000, 32768)
    assert plan.limits(20000, 1000, can_raise=False).nproc == 1000
    assert not plan.limits(1024, 1024, can_raise=True).asked
    arguments = plan.run_arguments(lab(), NODES[0], "x")
    assert "--ulimit=nofile=20000:20000" in arguments
    free = lab(limits=plan.limits(1024, 1024, can_raise=True))
    assert not [a for a in plan.run_arguments(free, NODES[0], "x") if "ulimit" in a]


@pytest.mark.parametrize(
    ("items", "fault"),
    [
        ([], "no nodes are given"),
        ([{"name": "a", "number": 2}], "found 0 control nodes"),
        ([{"name": "A_b", "number": 2, "control": True}], "'A_b' is not a DNS label"),
        ([{"name": "a", "number": 1, "control": True}], "number 1; needed: 2 to 254"),
        ([{"name": "a", "number": 2, "control": True}, {"name": "b", "number": 2}], "number 2 is used by 2"),
    ],
)
def test_impossible_nodes_are_refused_with_the_reason(items, fault):
    with pytest.raises(plan.PlanError, match=fault):
        plan.nodes_from(items, kubernetes=True)


def test_all_faults_of_the_nodes_are_reported_together():
    with pytest.raises(plan.PlanError) as error:
        plan.nodes_from([{"name": "x", "number": 2}, {"name": "x", "number": 300}], kubernetes=True)
    assert all(word in str(error.value) for word in ("name x", "number 300", "0 control"))


def test_nothing_to_do_for_containers_as_wanted():
    assert plan.plan({"gpu-slices-test-a30": "c"}, [found()]) == []


@pytest.mark.parametrize(
    ("container", "reason"),
    [
        (found(state="exited", alive=False, watched=False), "is exited"),
        (found(state="created"), "is created"),
        (found(alive=False), "first process is gone"),
        (found(watched=False), "conmon"),
        (found(config="old"), "another configuration"),
    ],
)
def test_damaged_or_outdated_containers_are_made_anew(container, reason):
    steps = plan.plan({"gpu-slices-test-a30": "c"}, [container])
    assert [step.action for step in steps] == ["remove", "create"]
    assert all(reason in step.reason for step in steps)


def test_only_the_damaged_node_is_touched():
    wanted = {"gpu-slices-test-a30": "c", "gpu-slices-test-h200": "c"}
    steps = plan.plan(wanted, [found(), found(name="gpu-slices-test-h200", state="exited")])
    assert {step.container for step in steps} == {"gpu-slices-test-h200"}


def test_missing_are_made_and_unwanted_removed():
    steps = plan.plan({"gpu-slices-test-b": "c"}, [found()])
    assert [(s.action, s.container) for s in steps] == [
        ("remove", "gpu-slices-test-a30"),
        ("create", "gpu-slices-test-b"),
    ]


def test_a_reason_to_begin_afresh_remakes_everything():
    steps = plan.plan({"gpu-slices-test-a30": "c"}, [found()], fresh="restarted")
    assert [step.reason for step in steps] == ["restarted", "restarted"]


def test_found_knows_whether_process_and_monitor_live():
    assert plan.Found.of(inspected(), {99, 100}) == plan.Found(
        "gpu-slices-test-a30", "abc", "c", "running", True, True
    )
    assert not plan.Found.of(inspected(), {99}).alive
    assert not plan.Found.of(inspected(), {100}).watched
    assert not plan.Found.of({"Name": "x", "Id": "y", "State": {}}, {1}).alive


def test_overlapping_networks_are_found_and_the_default_route_is_not_one():
    taken = {"0.0.0.0/0": "eth0", "10.77.0.128/25": "vpn", "192.0.2.0/24": "eth0", "10.0.0.0/8": "corp"}
    assert plan.overlaps("10.77.0.0/24", taken) == ["10.77.0.128/25 (vpn)", "10.0.0.0/8 (corp)"]


def test_routes_are_read_in_network_byte_order():
    text = (
        "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"
        "eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"
        "podman1\t00004D0A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n"
    )
    assert plan.routes(text) == {"0.0.0.0/0": "eth0", "10.77.0.0/24": "podman1"}


def test_the_config_hash_changes_with_what_the_node_is_made_from():
    first = plan.fingerprint(plan.run_arguments(lab(), NODES[0], ""))
    assert first == plan.fingerprint(plan.run_arguments(lab(), NODES[0], ""))
    assert first != plan.fingerprint(plan.run_arguments(lab(image="localhost/node:2"), NODES[0], ""))


def test_inventory_describes_nodes_that_can_be_made():
    folder = Path(lab_import.ROOT / "inventory/lab/host_vars")
    items = [
        yaml.safe_load((folder / f"{name}.yml").read_text())["lab_node"]
        for name in ("control", "a30", "h200")
    ]
    nodes = plan.nodes_from(items, kubernetes=True)
    assert {node.name for node in nodes} == {"control", "a30", "h200"}


host = lab_import.lab_host()


def test_a_planted_store_links_blobs_copies_databases_and_leaves_layers_to_be_mounted(tmp_path):
    seed, target = tmp_path / "seed", tmp_path / "node" / "containerd"
    layer = seed / plan.SNAPSHOTS / "1" / "fs" / "usr"
    layer.mkdir(parents=True)
    (layer / "file").write_text("layer")
    (seed / "blobs").mkdir()
    (seed / "blobs/a").write_text("blob")
    (seed / "meta.db").write_text("database")
    target.parent.mkdir()
    host.plant_seed(seed, target, ["meta.db"])
    assert (target / "blobs/a").samefile(seed / "blobs/a")
    assert not (target / "meta.db").samefile(seed / "meta.db")
    assert (target / "meta.db").read_text() == "database"
    assert list((target / plan.SNAPSHOTS).iterdir()) == [target / plan.SNAPSHOTS / "1"]
    assert list((target / plan.SNAPSHOTS / "1").iterdir()) == []
    assert host.snapshot_names(seed) == ("1",)


def test_planting_again_replaces_what_is_there(tmp_path):
    seed, target = tmp_path / "seed", tmp_path / "containerd"
    seed.mkdir()
    (seed / "new").write_text("")
    target.mkdir()
    (target / "old").write_text("")
    host.plant_seed(seed, target, [])
    assert [path.name for path in target.iterdir()] == ["new"]


def test_every_layer_of_the_seed_is_mounted_read_only():
    arguments = plan.run_arguments(lab(seed="/seed", layers=("1", "12")), NODES[0], "x")
    mounts = [a for a in arguments if a.startswith("--volume=/seed/")]
    assert [m.split(":")[1].rsplit("/", 1)[1] for m in mounts] == ["1", "12"]
    assert all(m.split(":")[2].startswith("ro,") for m in mounts)


def test_the_last_mount_on_a_path_decides_its_file_system(tmp_path):
    assert host.file_system(tmp_path / "not" / "there") == host.file_system(tmp_path)
    assert host.file_system(Path("/proc/self")) == "proc"


def test_a_command_that_fails_is_reported_with_its_last_words():
    with pytest.raises(host.HostError, match=r"sh -c .* failed \(3\): no luck"):
        host.run(["sh", "-c", "echo no luck >&2; exit 3"])
    with pytest.raises(host.HostError, match="not installed"):
        host.run(["/nonexistent/program"])
