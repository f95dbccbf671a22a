"""``python tools/lantern-emoji STAGE``: train and evaluate the bundled model."""

from __future__ import annotations

import sys

from lantern_emoji.app import main

sys.exit(main())
