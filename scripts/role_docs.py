"""Write docs/roles.md from the roles' argument specs and docs/rights.md from what gate 2 asks for.

With --check nothing is written; stale pages are named and the exit status is 1.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "plugins" / "module_utils"))
from gpu_slices.preflight import RIGHTS

ROOT = Path(__file__).resolve().parents[1]
HEAD = """# Roles and their variables

Made from `roles/*/meta/argument_specs.yml` by `make docs`; edit those files, not this one.
"""


RIGHTS_HEAD = """# Rights

Made by `make docs` from what gate 2 asks the API server for with SelfSubjectAccessReviews, for the
stages that the tags select.
"""
# Groups of rights that are asked for only under a condition.
CONDITIONS = {
    "preflight": "always",
    "driver_install": "enable-driver, with `dra_driver_install`",
    "namespace_create": "any stage that runs pods, with `gpu_slices_namespace_create`",
    "crowd_root": "crowd, with `crowd_isolation_namespace` and `gpu_slices_namespace_create`",
    "shared_mps": "shared, with `shared_strategy: MPS`",
    "kueue_configure": "quota, with `quota_kueue_configure`",
}
PLACES = {
    "": "cluster-wide",
    "own": "the workloads' namespace",
    "driver": "the driver's namespace",
    "kueue": "Kueue's namespace",
    "isolation": "the namespace of the root pod",
}


def text(value: Any) -> str:
    """A description (a string or a list of paragraphs) as one line fit for a table cell."""
    parts = value if isinstance(value, list) else [value or ""]
    return " ".join(" ".join(str(part).split()) for part in parts).replace("|", "\\|")


def default(option: dict[str, Any]) -> str:
    """How the default is shown: YAML in one line, or a word where there is none."""
    if option.get("required"):
        return "required"
    if "default" not in option:
        return "-"
    flow = yaml.safe_dump(option["default"], default_flow_style=True, width=10_000).strip()
    flow = flow.removesuffix("...").strip()
    return f"`{flow}`".replace("|", "\\|")


def rows(options: dict[str, Any], prefix: str = "") -> list[str]:
    """One table row an option; nested options follow with a dotted name."""
    lines = []
    for name, option in options.items():
        kind = option.get("type", "str")
        if option.get("elements"):
            kind = f"{kind} of {option['elements']}"
        meaning = text(option.get("description"))
        if option.get("choices"):
            meaning += f" One of {', '.join(f'`{choice}`' for choice in option['choices'])}."
        lines.append(f"| `{prefix}{name}` | {kind} | {default(option)} | {meaning} |")
        lines += rows(option.get("options") or {}, f"{prefix}{name}.")
    return lines


def section(role: str, entries: dict[str, Any]) -> list[str]:
    """The part of the page that describes one role."""
    lines: list[str] = []
    for entry, spec in entries.items():
        title = role if entry == "main" else f"{role}, tasks_from: {entry}"
        lines += ["", f"## {title}", "", text(spec.get("short_description"))]
        if spec.get("description"):
            lines += ["", text(spec["description"])]
        options = spec.get("options") or {}
        if options:
            lines += ["", "| Variable | Type | Default | Meaning |", "|---|---|---|---|", *rows(options)]
    return lines


def page() -> str:
    """The page of the roles."""
    lines = [HEAD.rstrip()]
    for path in sorted(ROOT.glob("roles/*/meta/argument_specs.yml")):
        lines += section(path.parents[1].name, yaml.safe_load(path.read_text())["argument_specs"])
    return "\n".join(lines) + "\n"


def rights_page() -> str:
    """The table of rights: a row for each group and place."""
    lines = [RIGHTS_HEAD.rstrip(), "", "| Stage | Where | Rights |", "|---|---|---|"]
    for group, rights in RIGHTS.items():
        for place, name in PLACES.items():
            by_verbs: dict[str, list[str]] = {}
            for verbs, api_group, resource, where in rights:
                if where == place:
                    title = f"{resource}.{api_group}" if api_group else resource
                    by_verbs.setdefault(", ".join(dict.fromkeys(verbs)), []).append(title)
            if by_verbs:
                told = "; ".join(f"{verbs} {', '.join(names)}" for verbs, names in by_verbs.items())
                lines.append(f"| {CONDITIONS.get(group, group)} | {name} | {told} |")
    return "\n".join(lines) + "\n"


PAGES = {"docs/roles.md": page, "docs/rights.md": rights_page}


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a page is stale")
    arguments = parser.parse_args()
    stale = False
    for name, make in PAGES.items():
        target, wanted = ROOT / name, make()
        if not arguments.check:
            target.write_text(wanted)
        elif not target.exists() or target.read_text() != wanted:
            print(f"{name} is stale: run `make docs`", file=sys.stderr)
            stale = True
    return int(stale)


if __name__ == "__main__":
    sys.exit(main())
