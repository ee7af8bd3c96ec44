"""Filters about the run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Callable

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "module_utils"))
from gpu_slices import inputs


class FilterModule:
    """``gpu_slices_stages``: the stages that the tags of a run select."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Names and functions."""
        return {"gpu_slices_stages": inputs.chosen_stages}
