"""Filters from cluster facts to checks and choices. Each only calls the function of the same purpose."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Callable

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "module_utils"))
from gpu_slices import claim, preflight


class FilterModule:
    """Judging facts, choosing a slice, planning the claim."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Names and functions."""
        return {
            "preflight_rights": preflight.needed_rights,
            "preflight_objects": preflight.named_objects,
            "preflight_checks": preflight.preflight_checks,
            "slice_choice": claim.choice,
            "slice_check": claim.choice_check,
            "slice_name": claim.template_name,
            "slice_template_plan": claim.template_plan,
            "slice_result": claim.result,
        }
