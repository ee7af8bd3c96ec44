"""The report as one self-contained page with a picture of every GPU. Controller only, standard library only.

Positions on a GPU are memory slices; a published MIG device names those it covers (capacity
``memorySlice<i>``).
"""

from __future__ import annotations

import json
import re
from html import escape
from typing import Any, Mapping, Sequence

_STYLE = """
body{font:15px/1.45 system-ui,sans-serif;max-width:68rem;margin:2rem auto;padding:0 1rem;
color:#1b1f24;background:#fff}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem}
table{border-collapse:collapse;width:100%}th,td{text-align:left;vertical-align:top;padding:.35rem .6rem;
border-bottom:1px solid #d8dee4}th{background:#f6f8fa}td.s{white-space:nowrap;font-weight:600}
.pass{color:#1a7f37}.warn{color:#9a6700}.skip{color:#57606a}.fail{color:#cf222e}
pre{white-space:pre-wrap;word-break:break-word;background:#f6f8fa;padding:.5rem;
margin:.3rem 0;font-size:12.5px}
.silicon{display:inline-block;padding:.1rem .6rem;border-radius:1rem;background:#fff8c5;
border:1px solid #d4a72c}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.1rem 1rem}dt{color:#57606a}dd{margin:0}
svg text{font:12px system-ui,sans-serif}
"""
_FREE, _NOW = "#e6ebf1", "#f4b183"
_STAGE_COLOURS = {
    "smoke": "#9ecbff",
    "sft": "#a5d6a7",
    "crowd": "#ffe082",
    "shared": "#ffcc80",
    "quota": "#ce93d8",
    "callers": "#80deea",
    "recipe": "#c5e1a5",
}
_WIDTH, _CELL, _LINE = 860, 46, 16


def html(report: Mapping[str, Any]) -> str:
    """The whole page."""
    header = report["header"]
    silicon = header.get("silicon") or "not stated"
    facts = {
        "date": header.get("date"),
        "finished": header.get("finished"),
        "cluster": header.get("cluster"),
        "playbook": header.get("playbook"),
        **dict(sorted(header.get("versions", {}).items())),
    }
    items = "".join(f"<dt>{_e(k)}</dt><dd>{_e(v)}</dd>" for k, v in facts.items() if v)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>GPU slices: report</title><style>{_STYLE}</style></head><body>"
        f'<h1>GPU slices: report</h1><p><span class="silicon">silicon: {_e(silicon)}</span></p>'
        f"<dl>{items}</dl>"
        f"<h2>GPUs</h2>{pictures(report['devices'], report['allocations'])}"
        f"<h2>Checks</h2>{_table(report['checks'], str(header.get('date') or ''))}"
        f"<h2>Who held what</h2>{_holders(report['allocations'], report['devices'])}"
        "</body></html>\n"
    )


def pictures(devices: Sequence[Mapping[str, Any]], allocations: Sequence[Mapping[str, Any]]) -> str:
    """One inline SVG a GPU; a sentence when no device was ever read."""
    cards: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for device in devices:
        parent = str(device.get("parent_uuid") or device.get("uuid") or device.get("device"))
        cards.setdefault((str(device.get("node")), parent), []).append(device)
    if not cards:
        return "<p>No published device was read.</p>"
    return "".join(_card(node, gpu, cards[node, gpu], allocations) for node, gpu in sorted(cards))


def slice_count(devices: Sequence[Mapping[str, Any]]) -> int:
    """Memory slices of the GPU these devices are parts of: 4 on an A30, 8 on other MIG cards, 1 undivided."""
    if all(device.get("type") != "mig" for device in devices):
        return 1
    highest = max((max(d["slices"]) + 1 for d in devices if d.get("slices")), default=0)
    known = 4 if "A30" in str(devices[0].get("product")) else 8
    return max(highest, known)


def placements(devices: Sequence[Mapping[str, Any]]) -> list[tuple[int, int, Mapping[str, Any]]]:
    """(start, size, device) in memory slices, by position, from the slices covered or the device's name."""
    placed = []
    for device in devices:
        slices = device.get("slices")
        match = re.search(r"-mig-.+-\d+-(\d+)$", str(device.get("device")))
        if slices:
            placed.append((min(slices), len(slices), device))
        elif match:
            placed.append((int(match.group(1)), 1, device))
        else:
            placed.append((0, slice_count(devices), device))
    return sorted(placed, key=lambda p: p[0])


def _card(
    node: str, gpu: str, devices: Sequence[Mapping[str, Any]], allocations: Sequence[Mapping[str, Any]]
) -> str:
    total = slice_count(devices)
    unit = _WIDTH / total
    product = str(devices[0].get("product") or "GPU")
    boxes, notes, row = [], [], 0
    for i in range(total):
        boxes.append(
            f'<rect x="{i * unit:.1f}" y="24" width="{unit:.1f}" height="{_CELL}" fill="none" '
            'stroke="#d0d7de" stroke-dasharray="3 3"/>'
        )
    for start, size, device in placements(devices):
        holders = [a for a in allocations if _same(a, device)]
        colour = _FREE
        for holder in holders:
            colour = _NOW if holder.get("now") else _STAGE_COLOURS.get(str(holder.get("stage")), _NOW)
        x, width = start * unit, size * unit
        label = str(device.get("profile") or "full GPU")
        used = "held by " + ", ".join(_who(h) for h in holders) if holders else "not used in this run"
        title = f"{device.get('device')} {device.get('uuid')}: {used}"
        boxes.append(
            f'<g><title>{_e(title)}</title><rect x="{x + 1:.1f}" y="25" width="{width - 2:.1f}" '
            f'height="{_CELL - 2}" rx="5" fill="{colour}" stroke="#57606a"/>'
            f'<text x="{x + width / 2:.1f}" y="44" text-anchor="middle" font-weight="600">{_e(label)}</text>'
            f'<text x="{x + width / 2:.1f}" y="61" text-anchor="middle">{_e(_memory(device))}</text></g>'
        )
        for holder in holders:
            row += 1
            y = 24 + _CELL + 4 + row * _LINE
            notes.append(f'<text x="0" y="{y}">{_e(label)} at slice {start}: {_e(_who(holder))}</text>')
    height = 24 + _CELL + 12 + row * _LINE
    return (
        f'<svg role="img" viewBox="0 0 {_WIDTH} {height}" width="100%" aria-label="{_e(node)} {_e(product)}">'
        f'<text x="0" y="15" font-weight="600">{_e(node)}: {_e(product)}</text>'
        f'<text x="{_WIDTH}" y="15" text-anchor="end" fill="#57606a">{_e(gpu)}</text>'
        f"{''.join(boxes)}{''.join(notes)}</svg>"
    )


def _table(rows: Sequence[Mapping[str, Any]], started: str) -> str:
    if not rows:
        return "<p>Nothing was checked.</p>"
    body = []
    for row in rows:
        details = ""
        at = str(row.get("at") or "")
        old = f"<div>earlier run, {_e(at)}</div>" if at < started else ""
        if row.get("needed"):
            details += f"<div>needed: {_e(row['needed'])}</div>"
        if row.get("fix") and row["status"] in {"fail", "warn", "skip"}:
            details += f"<div>do: {_e(row['fix'])}</div>"
        if row.get("evidence"):
            text = json.dumps(row["evidence"], indent=1, default=str)
            details += f"<details><summary>evidence</summary><pre>{_e(text)}</pre></details>"
        seconds = "" if row.get("seconds") is None else f"{row['seconds']:.1f}"
        body.append(
            f"<tr><td>{_e(row['stage'])}{old}</td><td>{_e(row['id'])}</td><td>{_e(row.get('asked'))}</td>"
            f"<td>{_e(row.get('found'))}{details}</td><td>{seconds}</td>"
            f'<td class="s {_e(row["status"])}">{_e(row["status"])}</td></tr>'
        )
    head = "".join(f"<th>{h}</th>" for h in ("stage", "check", "asked", "found", "seconds", "verdict"))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def _holders(allocations: Sequence[Mapping[str, Any]], devices: Sequence[Mapping[str, Any]]) -> str:
    if not allocations:
        return "<p>No allocation was recorded.</p>"
    body = []
    for held in allocations:
        device = next((d for d in devices if _same(held, d)), {})
        cells = (
            held.get("node"),
            held.get("device"),
            device.get("profile"),
            device.get("uuid"),
            _who(held),
            held.get("claim"),
            held.get("at"),
        )
        body.append("<tr>" + "".join(f"<td>{_e(c)}</td>" for c in cells) + "</tr>")
    titles = ("node", "device", "profile", "uuid", "held by", "claim", "recorded")
    head = "".join(f"<th>{h}</th>" for h in titles)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def _same(held: Mapping[str, Any], device: Mapping[str, Any]) -> bool:
    same_device = (held.get("pool"), held.get("device")) == (device.get("pool"), device.get("device"))
    return same_device and held.get("uuid", device.get("uuid")) == device.get("uuid")


def _who(held: Mapping[str, Any]) -> str:
    stage = "now" if held.get("now") else held.get("stage")
    return f"{stage}: pod {held.get('namespace')}/{held.get('pod')}"


def _memory(device: Mapping[str, Any]) -> str:
    size = device.get("memory_bytes") or 0
    return f"{size / 2**30:.2f} GiB" if size else ""


def _e(value: Any) -> str:
    return escape(str("" if value is None else value), quote=True)
