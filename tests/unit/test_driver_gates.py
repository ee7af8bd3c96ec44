"""The driver's feature gates: what is needed, what is on, and from which release on."""

from __future__ import annotations

import pytest
from gpu_slices import driver_gates as gates
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("", {}),
        ("TimeSlicingSettings=true,", {"TimeSlicingSettings": True}),
        ("MPSSupport=false,TimeSlicingSettings=true,", {"MPSSupport": False, "TimeSlicingSettings": True}),
        (" A = true , B=0", {"A": True, "B": False}),
        ("A,B=perhaps,=true", {"": True}),
    ],
)
def test_gates_are_read_as_the_driver_reads_them(text, parsed):
    assert gates.parse_gates(text) == parsed


@given(st.text())
def test_no_text_breaks_the_reader(text):
    assert all(isinstance(value, bool) for value in gates.parse_gates(text).values())


@pytest.mark.parametrize(
    ("given", "name", "on"),
    [
        ({}, "MPSSupport", False),
        ({"MPSSupport": True}, "MPSSupport", True),
        ({"AllAlpha": True}, "MPSSupport", True),
        ({"AllAlpha": True, "MPSSupport": False}, "MPSSupport", False),
    ],
)
def test_all_alpha_gates_can_be_on_together(given, name, on):
    assert gates.is_on(given, name) is on


@pytest.mark.parametrize(
    ("chart", "images", "version"),
    [
        ("dra-driver-nvidia-gpu-0.4.1", [], "0.4.1"),
        ("nvidia-dra-driver-gpu-25.3.2", ["x:y"], "25.3.2"),
        ("nvidia-dra-driver-gpu-25.8.0-rc.2", [], "25.8.0-rc.2"),
        ("", ["docker.io/lab/dra-driver-nvidia-gpu:v0.4.1"], "0.4.1"),
        (
            "",
            ["registry.example.com:5000/k8s-dra-driver-gpu:v25.12.0-ubi9@sha256:" + "0" * 64],
            "25.12.0-ubi9",
        ),
        ("", ["registry.example.com:5000/driver@sha256:" + "0" * 64], ""),
        ("", ["registry.example.com:5000/driver"], ""),
        ("", ["driver:latest"], ""),
        ("", [], ""),
    ],
)
def test_the_version_comes_from_the_chart_else_from_the_image(chart, images, version):
    assert gates.driver_version(chart, images) == version


@pytest.mark.parametrize(
    ("version", "has"),
    [
        ("25.3.0", False),
        ("25.3.2", False),
        ("25.8.0", True),
        ("25.12.0", True),
        ("0.4.1", True),
        ("0.5.0-dev", True),
        ("24.9.1", False),
        ("", True),
        ("latest", True),
    ],
)
def test_gates_came_with_25_8_and_0_4_follows_25_12(version, has):
    assert gates.has_gates(version) is has


@pytest.mark.parametrize(
    ("mode", "strategy", "version", "values"),
    [
        ("mig", "MPS", "0.4.1", {}),
        ("shared", "TimeSlicing", "0.4.1", {"featureGates": {"TimeSlicingSettings": True}}),
        ("shared", "TimeSlicing", "v25.8.1", {"featureGates": {"TimeSlicingSettings": True}}),
        ("shared", "MPS", "0.4.1", {"featureGates": {"MPSSupport": True, "TimeSlicingSettings": True}}),
        ("shared", "MPS", "25.3.1", {}),
        ("shared", "Turns", "0.4.1", {}),
    ],
)
def test_helm_gets_the_gates_of_the_mode(mode, strategy, version, values):
    assert gates.helm_gates(mode, strategy, version) == values


def test_a_daemonset_tells_version_and_gates():
    plugin = {
        "chart": "dra-driver-nvidia-gpu-0.4.1",
        "images": ["docker.io/lab/x:v9.9.9"],
        "feature_gates": "MPSSupport=true,",
    }
    assert gates.read_gates(plugin) == {"version": "0.4.1", "has_gates": True, "gates": {"MPSSupport": True}}
    assert gates.read_gates({}) == {"version": "", "has_gates": True, "gates": {}}
