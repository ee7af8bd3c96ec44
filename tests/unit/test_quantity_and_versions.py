"""Quantities and version strings, good and bad."""

from __future__ import annotations

from fractions import Fraction

import pytest
from gpu_slices import kube_version as versions
from gpu_slices.quantity import format_bytes, format_quantity, parse_bytes, parse_quantity
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("5Gi", 5 * 2**30),
        ("71168Mi", 71168 * 2**20),
        ("6241124352", 6241124352),
        ("1e3", 1000),
        ("1E3", 1000),
        ("0.5Gi", 2**29),
        (".5Ki", 512),
        ("3k", 3000),
        ("1500m", Fraction(3, 2)),
        ("-1", -1),
        (2, 2),
    ],
)
def test_a_quantity_is_the_number_kubernetes_reads(text, number):
    assert parse_quantity(text) == number


@pytest.mark.parametrize("text", ["", "5GB", "5gi", "Gi", "five", "1 Gi", "1e", "--1", True, None, "5Gi5"])
def test_anything_else_is_refused_by_name(text):
    with pytest.raises(ValueError, match="is not a Kubernetes quantity"):
        parse_quantity(text)


@given(st.integers(min_value=0, max_value=2**60), st.sampled_from(["Ki", "Mi", "Gi"]))
def test_binary_suffixes_multiply(number, suffix):
    factor = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}[suffix]
    assert parse_bytes(f"{number}{suffix}") == number * factor


def test_bytes_round_up_and_print_short():
    assert parse_bytes("1500m") == 2
    assert format_bytes(5952 * 2**20) == "5.81 GiB"
    assert format_bytes(16 * 2**30) == "16 GiB"
    assert format_bytes(12) == "12 B"


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("v1.34.10", "pass"),
        ("v1.34.2-gke.1", "pass"),
        ("v1.34.4+k3s1", "pass"),
        ("v1.36.0-gke.1379000", "pass"),
        ("v2.0", "pass"),
        ("v1.34.1", "warn"),
        ("v1.34.0-eks-ab12", "warn"),
        ("v1.33.9", "fail"),
        ("v1.9.0", "fail"),
        ("", "fail"),
        ("unknown", "fail"),
    ],
)
def test_kubernetes_versions_compare_as_numbers(text, verdict):
    assert versions.kubernetes_verdict(text) == verdict


@pytest.mark.parametrize(("text", "holds"), [("580.95.05", True), ("565.57.01", True), ("560.35.03", False)])
def test_driver_versions_compare_as_numbers(text, holds):
    assert versions.at_least(text, (565,)) is holds


@given(
    st.lists(st.integers(0, 99), min_size=1, max_size=4),
    st.sampled_from(["", "-gke.5", "+k3s1", "-eks-a1b2"]),
)
def test_a_vendor_suffix_never_changes_the_order(parts, suffix):
    plain = ".".join(map(str, parts))
    assert versions.parse_version(f"v{plain}{suffix}") == tuple(parts)


@pytest.mark.parametrize(
    ("runtime", "verdict"),
    [
        ("containerd://1.7.24", "warn"),
        ("containerd://2.4.0", "pass"),
        ("containerd://2.0.0-rc.1", "pass"),
        ("containerd://1.6.20~ds1", "fail"),
        ("cri-o://1.34.1", "pass"),
        ("cri-o://1.22.0", "fail"),
        ("docker://29.4.0", "fail"),
        ("", "fail"),
        ("containerd://", "fail"),
        ("containerd://abc", "fail"),
    ],
)
def test_cdi_is_judged_by_the_runtime(runtime, verdict):
    found, reason = versions.runtime_cdi(runtime)
    assert found == verdict
    assert reason


@pytest.mark.parametrize(
    ("value", "times", "written"),
    [
        ("250m", 4, "1"),
        ("250m", 3, "750m"),
        ("1Gi", 4, "4Gi"),
        ("512Mi", 3, "1536Mi"),
        ("512Mi", 4, "2Gi"),
        ("1000", 1, "1k"),
        ("4G", 3, "12G"),
        ("512", 2, "1024"),
        ("1Ki", 0, "0"),
        ("0.5Ki", 1, "512"),
        (2, 3, "6"),
    ],
)
def test_sums_are_written_as_the_server_writes_them_back(value: object, times: int, written: str) -> None:
    amount = parse_quantity(value) * times
    assert format_quantity(amount, value) == written
    assert parse_quantity(written) == amount
