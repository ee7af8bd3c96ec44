"""Filters around models: which slice holds a fine-tune of one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Callable

from ansible.errors import AnsibleFilterError

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "module_utils"))
from gpu_slices import model_size, recipe


def slice_for_model(model: Any, profiles: Any = None, **options: Any) -> dict[str, Any]:
    """The estimate of a fine-tune and the smallest profile that holds it."""
    try:
        return model_size.slice_for_model(model, profiles, **options)
    except model_size.ModelSizeError as fault:
        raise AnsibleFilterError(f"slice_for_model: {fault}") from None


def recipe_size(parameters: Any, config: Any, training: Any) -> dict[str, Any]:
    """The estimate of a recipe; {} when neither parameters nor config is given."""
    try:
        return recipe.size(parameters, config, training)
    except model_size.ModelSizeError as fault:
        raise AnsibleFilterError(f"recipe_size: {fault}") from None


class FilterModule:
    """The filters of this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Names and functions."""
        return {
            "slice_for_model": slice_for_model,
            "recipe_size": recipe_size,
            "recipe_size_check": recipe.size_check,
        }
