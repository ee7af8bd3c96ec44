"""Make tests/fixtures/schemas/ anew from a running API server and from the CRDs of Trainer and Kueue.

    capture_schemas.py KUBECONFIG TRAINER_CRDS TRAINER_VERSION KUEUE_CRDS KUEUE_VERSION

Keeps what validation needs of the kinds our roles render, and leaves out descriptions.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "plugins/module_utils"))
from gpu_slices.kube_api import KubeApi

FOLDER = Path(__file__).resolve().parents[1] / "fixtures/schemas"
KINDS = {
    "/openapi/v3/api/v1": ("Pod", "ConfigMap", "Namespace"),
    "/openapi/v3/apis/batch/v1": ("Job", "CronJob"),
    "/openapi/v3/apis/resource.k8s.io/v1": ("DeviceClass", "ResourceClaim", "ResourceClaimTemplate"),
}
CRDS = ("trainjobs", "trainingruntimes")
KUEUE_CRDS = ("clusterqueues", "localqueues", "resourceflavors", "workloadpriorityclasses")


def bare(value: Any, inside_properties: bool = False) -> Any:
    """Without descriptions and defaults; a property may well be called description."""
    if isinstance(value, dict):
        return {
            key: bare(item, inside_properties=key == "properties")
            for key, item in value.items()
            if inside_properties or key not in {"description", "default", "x-kubernetes-validations"}
        }
    if isinstance(value, list):
        return [bare(item) for item in value]
    return value


def references(value: Any) -> set[str]:
    """Names of all schemas this one points to."""
    if isinstance(value, dict):
        found = {value["$ref"].rsplit("/", 1)[1]} if isinstance(value.get("$ref"), str) else set()
        return found.union(*(references(item) for item in value.values()))
    if isinstance(value, list):
        return set().union(*(references(item) for item in value))
    return set()


def main() -> None:
    """Read, trim, write."""
    kubeconfig, crds, trainer, kueue_crds, kueue = sys.argv[1:6]
    api = KubeApi.from_kubeconfig(kubeconfig)
    version = api.get("/version")["gitVersion"]
    for path, kinds in KINDS.items():
        schemas = api.get(path)["components"]["schemas"]
        wanted = [
            name
            for name, schema in schemas.items()
            if any(g["kind"] in kinds for g in schema.get("x-kubernetes-group-version-kind", []))
        ]
        kept: dict[str, Any] = {}
        while wanted:
            name = wanted.pop()
            if name not in kept:
                kept[name] = bare(schemas[name])
                wanted += references(kept[name])
        write(path.rsplit("/", 2)[1] if "apis" in path else "core", version, {"schemas": kept})
    for plural in CRDS:
        crd = yaml.safe_load((Path(crds) / f"trainer.kubeflow.org_{plural}.yaml").read_text())
        served = next(v for v in crd["spec"]["versions"] if v["name"] == "v1alpha1")
        schema = bare(served["schema"]["openAPIV3Schema"])
        write(plural, trainer, {"kind": crd["spec"]["names"]["kind"], "schema": schema})
    write("kueue", kueue, {"schemas": kueue_schemas(Path(kueue_crds))})


def kueue_schemas(folder: Path) -> dict[str, Any]:
    """``v1beta2/ClusterQueue`` and so on, each served version of the kinds that we render."""
    found = {}
    for plural in KUEUE_CRDS:
        crd = yaml.safe_load((folder / f"kueue.x-k8s.io_{plural}.yaml").read_text())
        for version in crd["spec"]["versions"]:
            schema = bare(version["schema"]["openAPIV3Schema"])
            # What the controller writes is not ours to render.
            schema["properties"].pop("status", None)
            found[f"{version['name']}/{crd['spec']['names']['kind']}"] = schema
    return found


def write(name: str, version: str, content: dict[str, Any]) -> None:
    """One compact file a source."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"version": version, **content}, separators=(",", ":"), sort_keys=True)
    (FOLDER / f"{name}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
