"""The numeric bounds of requests and options, in one place for the library, the commands and the plans.

Nothing is imported, so that ``--help`` stays quick.
"""

from __future__ import annotations

import re

#: Characters of a prompt; a model reads tens to some hundreds of words.
MOST_PROMPT = 8000
#: Images decoded together.
MOST_BATCH = 1024
#: Images per prompt of one request.
MOST_IMAGES = 10_000
#: Seeds are below this.
SEEDS = 2**63
MOST_SEED = SEEDS - 1
#: Guidance scales; published ones are below 20.
MOST_SCALE = 1000.0
#: Temperatures; every code is nearly as likely as any other long before.
MOST_TEMPERATURE = 100.0
#: Pixels on a side.
MOST_PIXELS = 1 << 16
#: Samples of one measured cell, seconds that one may take, and threads.
MOST_SAMPLES = 100_000
MOST_SECONDS = 1e6
MOST_THREADS = 4096
#: Codes that one filter or rule may name; no codebook has as many.
MOST_CODES = 1 << 24
#: Class ids are below their model's number of classes; what is above this is none anywhere.
MOST_CLASS_ID = 10**18
#: Layers of a network, and tokens along one side of an image.
MOST_LAYERS = 1024
MOST_GRID = 4096
#: Nodes of a tree that a request may have, its levels, and steps of a training run.
MOST_NODES = 1024
MOST_DEPTH = 64
MOST_STEPS = 10**9

_WHOLE = re.compile(r"0*[0-9]{1,18}")


def whole(text: str, least: int = 0, most: int = 10**18) -> int | None:
    """Return the integer that ASCII digits write, None for other text and outside of the bounds.

    Python's own ``int`` takes digits of every script, spaces and underscores, and fails on thousands of
    digits.
    """
    if len(text) > 64 or not _WHOLE.fullmatch(text):
        return None
    value = int(text)
    return value if least <= value <= most else None
