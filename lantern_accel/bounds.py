"""The numeric bounds of requests and options, in one place for the library, the commands and the plans.

Nothing is imported, so that ``--help`` stays quick.
"""

from __future__ import annotations

#: Images decoded together.
MOST_BATCH = 1024
#: Images per prompt of one request.
MOST_IMAGES = 10_000
#: Seeds are below this.
SEEDS = 2**63
MOST_SEED = SEEDS - 1
#: Temperatures and guidance scales above this overflow float32 sooner or later, and mean nothing below.
MOST_SCALE = 1e6
MOST_TEMPERATURE = MOST_SCALE
#: Pixels on a side.
MOST_PIXELS = 1 << 16
#: Samples of one measured cell, seconds that one may take, and threads.
MOST_SAMPLES = 100_000
MOST_SECONDS = 1e6
MOST_THREADS = 4096
