"""Strict validation against the schemas that an API server and Trainer's CRDs serve."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import jsonschema

FOLDER = Path(__file__).resolve().parents[1] / "fixtures/schemas"


@lru_cache(maxsize=None)
def _load(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return loaded


def _strict(schema: Any) -> Any:
    """Unknown fields are errors, as with strict decoding; OpenAPI's nullable in JSON Schema's words."""
    if isinstance(schema, list):
        return [_strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: _strict(value) for key, value in schema.items()}
    closed = "properties" in made and "additionalProperties" not in made
    if closed and not made.get("x-kubernetes-preserve-unknown-fields"):
        made["additionalProperties"] = False
    if made.pop("nullable", False) and isinstance(made.get("type"), str):
        made["type"] = [made["type"], "null"]
    return made


@lru_cache(maxsize=None)
def _validator(api_version: str, kind: str) -> jsonschema.Validator:
    if api_version.startswith("trainer."):
        schema = _strict(_load(f"{kind.lower()}s")["schema"])
        # The API machinery adds these to every custom resource.
        schema["properties"]["metadata"] = {"type": "object"}
        return jsonschema.Draft202012Validator(schema)
    if api_version.startswith("kueue."):
        schema = _strict(_load("kueue")["schemas"][f"{api_version.split('/')[1]}/{kind}"])
        schema["properties"]["metadata"] = {"type": "object"}
        return jsonschema.Draft202012Validator(schema)
    source = _load("core" if api_version == "v1" else api_version.split("/", maxsplit=1)[0])
    group, _, version = api_version.rpartition("/")
    wanted = {"group": group, "kind": kind, "version": version}
    name = next(
        n for n, s in source["schemas"].items() if wanted in s.get("x-kubernetes-group-version-kind", [])
    )
    document = {"$ref": f"#/components/schemas/{name}", "components": {"schemas": _strict(source["schemas"])}}
    return jsonschema.Draft202012Validator(document)


def faults(manifest: dict[str, Any]) -> list[str]:
    """What the server would refuse about the form of an object; [] if nothing."""
    errors = _validator(manifest["apiVersion"], manifest["kind"]).iter_errors(manifest)
    return [f"{error.json_path}: {error.message}" for error in errors]
