"""nvidia-smi against what a real H200 with driver 580.159.04 printed."""

from __future__ import annotations

import re
import shlex

import pytest
from silicon_node import FIXTURES, MakeNode, Node

CAPTURES = FIXTURES / "nvidia-smi"
COMMAND = re.compile(r"^\$ (nvidia-smi.*?)\n(.*?)^(?:--rc=|\[rc )(\d+)\]?\n", re.S | re.M)


def commands(name: str) -> list[tuple[str, str, int]]:
    """(command, output, exit status) of a capture."""
    return [(m[1], m[2], int(m[3])) for m in COMMAND.finditer((CAPTURES / name).read_text())]


def identified(text: str) -> str:
    """Without what belongs to one machine and one moment: identifiers, the time, sensors."""
    text = re.sub(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "GPU-<uuid>", text)
    text = re.sub(r"\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4}", "<time>", text)
    text = re.sub(r"16500\d{8}\b", "<serial>", text)
    text = re.sub(r"0x[0-9a-f]{16}\b(?=$|<)", "<pdi>", text, flags=re.M)
    text = re.sub(r"\d\dC    P0 {12}\d{3}W", "<sensors>", text)
    text = re.sub(r"1\d\d\.\d\d W", "<watts>", text)
    return re.sub(r"\d+ KB/s", "<throughput>", text)


IDLE = commands("h200-580.txt")
BUSY = [c for c in commands("h200-580-busy.txt") if "pmon" not in c[0]]


@pytest.fixture
def captured(make_node: MakeNode) -> Node:
    """One H200 as it was captured: MIG off, that driver."""
    node: Node = make_node("H200", "--driver-version", "580.159.04")
    return node


def test_the_captures_are_all_read() -> None:
    assert len(IDLE) == 19
    assert len(BUSY) == 5


@pytest.mark.parametrize(("command", "output", "status"), IDLE, ids=[c[0] for c in IDLE])
def test_idle_card(captured: Node, command: str, output: str, status: int) -> None:
    done = captured.smi(*shlex.split(command)[1:])
    assert identified(done.stdout) == identified(output)
    assert done.returncode == status


def test_details_as_text(captured: Node) -> None:
    assert identified(captured.ok("-q")) == identified((CAPTURES / "h200-580-q.txt").read_text())


def test_details_as_xml(captured: Node) -> None:
    assert identified(captured.ok("-q", "-x")) == identified((CAPTURES / "h200-580-q.xml").read_text())


@pytest.mark.parametrize(("command", "output", "status"), BUSY, ids=[c[0] for c in BUSY])
def test_card_with_one_process(captured: Node, command: str, output: str, status: int) -> None:
    argv = ["bash", "-c", "exec -a python3 lab-silicon hold --gpu 0 --memory 1634"]
    child = captured.popen(argv)
    assert child.stdout is not None
    child.stdout.readline()
    done = captured.smi(*shlex.split(command)[1:])
    # The process has another pid here; columns stay where they are.
    found = re.sub(rf" *\b{child.pid}\b", lambda m: "441".rjust(max(len(m[0]), 3)), done.stdout)
    wanted, found = identified(output), identified(found)
    if "csv" in command or "-d PIDS" in command:
        wanted, found = (re.sub(r" *\b441\b", " 441", text) for text in (wanted, found))
    if "temperature" in command:
        wanted, found = (re.sub(r", \d\d, <watts>", ", <sensors>", text) for text in (wanted, found))
    assert found == wanted
    assert done.returncode == status


def test_every_field_of_a_real_card_can_be_queried(captured: Node) -> None:
    """All at once, by their last names; the header gives each its first."""
    listed = (CAPTURES / "h200-580-busy.txt").read_text().split("# properties", 1)[1].splitlines()[1:]
    fields = [line.split() for line in listed if line and not re.match(r"\d:", line)]
    assert len(fields) > 200
    names = ",".join(f[-1] for f in fields)
    header, values = captured.ok(f"--query-gpu={names}", "--format=csv").splitlines()
    assert [name.split(" [")[0] for name in header.split(", ")] == [f[0] for f in fields]
    assert len(values.split(", ")) == len(fields)


def test_format_switches(captured: Node) -> None:
    query = "--query-gpu=memory.total,gpu_name"
    assert captured.ok(query, "--format=csv") == "memory.total [MiB], name\n143771 MiB, NVIDIA H200\n"
    assert captured.ok(query, "--format=csv,noheader,nounits") == "143771, NVIDIA H200\n"
    refused = captured.smi(query, "--format=json")
    assert refused.returncode == 2
    assert '"json"' in refused.stdout
