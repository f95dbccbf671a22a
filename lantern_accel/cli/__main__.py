"""``python -m lantern_accel.cli``: what launchers of several processes start."""

from __future__ import annotations

import sys

from lantern_accel.cli import main

sys.exit(main())
