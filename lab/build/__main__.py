"""Run the builder as `python3 lab/build`, from whatever directory."""

from __future__ import annotations

import sys
from pathlib import Path

if sys.version_info < (3, 11):
    sys.exit(f"lab/build: found Python {sys.version.split()[0]}, needed 3.11 or newer; use a newer one")

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lab.build.cli import main

sys.exit(main(sys.argv[1:]))
