"""A check: the answer to one question, as every stage hands it over and report.make_row takes it.

``{id, asked, found, needed, fix, evidence, status}``; ``status`` is pass, warn, skip or fail. One that says
what is wrong has its diagnosis id in ``evidence["finding"]`` and, in brackets, in ``found``.
"""

from __future__ import annotations

from typing import Any, Dict, Mapping

Check = Dict[str, Any]


def check(
    identity: str,
    asked: str,
    found: str,
    status: str = "pass",
    *,
    needed: str = "",
    fix: str = "",
    finding: str = "",
    evidence: Mapping[str, Any] | None = None,
) -> Check:
    """Build one check; ``finding`` is the diagnosis id when something is wrong."""
    proof = dict(evidence or {})
    if finding:
        proof["finding"] = finding
        found = f"{found} [{finding}]"
    return {
        "id": identity,
        "asked": asked,
        "found": found,
        "needed": needed,
        "fix": fix,
        "evidence": proof,
        "status": status,
    }


def judged(
    identity: str,
    good: bool,
    *,
    asked: str,
    found: str,
    needed: str = "",
    fix: str = "",
    evidence: Mapping[str, Any] | None = None,
) -> Check:
    """A check that passes or fails; what to do is said only of one that fails, what was needed always."""
    return check(
        identity,
        asked,
        found,
        "pass" if good else "fail",
        needed=needed or asked,
        fix="" if good else fix,
        evidence=evidence,
    )
