"""The numeric bounds of requests, in one place for the library, the commands and the plans."""

from __future__ import annotations

#: Images decoded together.
MOST_BATCH = 1024
#: Images per prompt of one request.
MOST_IMAGES = 10_000
#: Seeds are below this.
SEEDS = 2**63
#: Temperatures and guidance scales above this overflow float32 sooner or later, and mean nothing below.
MOST_SCALE = 1e6
#: Pixels on a side.
MOST_PIXELS = 1 << 16
