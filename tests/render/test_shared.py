"""The shared claim and the jobs that name it: valid for the server, one claim, no GPU besides."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import Render, render_template
from .schemas import faults
from .test_manifests import kind, pod_specs

VARIANTS: list[dict[str, Any]] = [
    {},
    {"shared_interval": "Long", "shared_jobs": 2},
    {"shared_strategy": "MPS", "shared_mps": {"defaultActiveThreadPercentage": 30}},
    {"shared_strategy": "MPS", "shared_mps": {"defaultPerDevicePinnedMemoryLimit": {"0": "5Gi"}}},
    {"gpu_slices_tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}], "shared_resources": {}},
]


def claim(**variant: Any) -> dict[str, Any]:
    defaults = {"shared_strategy": "TimeSlicing", "shared_interval": "", "shared_mps": {}}
    return render_template("shared", "resourceclaim.yaml.j2", **{**defaults, **variant})


@pytest.mark.parametrize("variant", VARIANTS)
class TestEveryVariant:
    def test_the_server_would_take_it(self, render: Render, variant: dict[str, Any]) -> None:
        for manifest in [claim(**variant), *render("shared", **variant)]:
            assert faults(manifest) == []
            labels = manifest["metadata"]["labels"]
            assert labels["app.kubernetes.io/managed-by"] == "gpu-slices"
            assert labels["app.kubernetes.io/component"] == "shared"
            assert len(manifest["metadata"]["name"]) < 50

    def test_all_jobs_name_the_one_claim(self, render: Render, variant: dict[str, Any]) -> None:
        manifests = render("shared", **variant)
        (spec,) = pod_specs(manifests)
        assert spec["resourceClaims"] == [
            {"name": "gpu-slice", "resourceClaimName": claim(**variant)["metadata"]["name"]}
        ]
        (container,) = spec["containers"]
        assert container["resources"]["claims"] == [{"name": "gpu-slice"}]
        assert not any("nvidia.com" in key for key in container["resources"]["limits"])
        jobs = [manifest for manifest in manifests if manifest["kind"] == "TrainJob"]
        assert len(jobs) == variant.get("shared_jobs", 3)
        runtime = kind(manifests, "TrainingRuntime")["metadata"]["name"]
        assert {job["spec"]["runtimeRef"]["name"] for job in jobs} == {runtime}
        assert len({job["metadata"]["name"] for job in jobs}) == len(jobs)

    def test_a_full_gpu_is_asked_for_with_the_drivers_config(
        self, render: Render, variant: dict[str, Any]
    ) -> None:
        devices = claim(**variant)["spec"]["devices"]
        (request,) = devices["requests"]
        assert request["exactly"]["deviceClassName"] == "gpu.nvidia.com"
        assert request["exactly"]["count"] == 1
        (config,) = devices["config"]
        assert config["requests"] == [request["name"]]
        assert config["opaque"]["driver"] == "gpu.nvidia.com"
        parameters = config["opaque"]["parameters"]
        assert (parameters["apiVersion"], parameters["kind"]) == ("resource.nvidia.com/v1beta1", "GpuConfig")
        assert parameters["sharing"]["strategy"] == variant.get("shared_strategy", "TimeSlicing")
        assert {} not in parameters["sharing"].values()

    def test_the_script_trains_long_enough_and_knows_no_profile(
        self, render: Render, variant: dict[str, Any]
    ) -> None:
        (spec,) = pod_specs(render("shared", **variant))
        (container,) = spec["containers"]
        assert "--min-seconds=30" in container["command"]
        profile = next(item for item in container["env"] if item["name"] == "GPU_SLICES_PROFILE")
        assert profile["value"] == ""


def test_the_names_follow_claim_jobs_and_training(render: Render) -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"shared_interval": "Short"},
        {"shared_strategy": "MPS"},
        {"shared_jobs": 4},
        {"shared_seconds": 31},
        {"gpu_slices_image": "registry.example/train:2"},
    ]
    names = [kind(render("shared", **change), "TrainJob")["metadata"]["name"] for change in changes]
    assert len(set(names)) == len(changes)
    assert names[0] == kind(render("shared"), "TrainJob")["metadata"]["name"]


def test_the_names_are_numbered(render: Render) -> None:
    jobs = [m["metadata"]["name"] for m in render("shared", shared_jobs=3) if m["kind"] == "TrainJob"]
    assert [name.rsplit("-", 1)[1] for name in jobs] == ["1", "2", "3"]
    assert len({name.rsplit("-", 1)[0] for name in jobs}) == 1
