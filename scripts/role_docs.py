"""Write docs/roles.md from the roles' argument specs; with --check only say whether it is up to date."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs" / "roles.md"
HEAD = """# Roles and their variables

Made from `roles/*/meta/argument_specs.yml` by `make docs`; edit those files, not this one.
"""


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
    """The whole page."""
    lines = [HEAD.rstrip()]
    for path in sorted(ROOT.glob("roles/*/meta/argument_specs.yml")):
        lines += section(path.parents[1].name, yaml.safe_load(path.read_text())["argument_specs"])
    return "\n".join(lines) + "\n"


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the page is stale")
    arguments = parser.parse_args()
    wanted = page()
    if arguments.check:
        if not TARGET.exists() or TARGET.read_text() != wanted:
            print(f"{TARGET.relative_to(ROOT)} is stale: run `make docs`", file=sys.stderr)
            return 1
        return 0
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
