"""Run the builder as `python3 lab/build`, from whatever directory."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lab.build.cli import main

sys.exit(main(sys.argv[1:]))
