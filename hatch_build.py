"""Hatchling's hook: compile the shaders before a wheel, or an editable install, is put together."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ShaderBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Fills `src/xinfer/shaders/_bin`; pyproject's `artifacts` takes it along although git ignores it."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before each wheel."""
        del version, build_data
        sys.path.insert(0, str(Path(self.root) / "tools"))
        from build_shaders import build

        count = build()
        self.app.display_info(f"{count} shaders compiled")
