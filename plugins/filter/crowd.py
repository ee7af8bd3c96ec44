"""Filters for a crowd of jobs and for isolation. Each only calls the function of the same purpose."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Callable

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "module_utils"))
from gpu_slices import crowd, isolation


class FilterModule:
    """Planning a crowd, and showing what it and the isolation pods proved."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Names and functions."""
        return {
            "crowd_plan": crowd.plan,
            "crowd_plan_checks": crowd.plan_checks,
            "crowd_held": crowd.held,
            "crowd_released": crowd.released_check,
            "crowd_table": crowd.table_lines,
            "isolation_root_reason": isolation.root_reason,
            "isolation_root_rows": isolation.root_rows,
            "isolation_skipped": isolation.skipped,
            "isolation_nodes": isolation.neighbour_nodes,
            "isolation_table": isolation.table_lines,
        }
