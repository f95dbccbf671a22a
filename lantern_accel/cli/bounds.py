"""The bounds of numeric options, in one place: what a request may have, no command takes more of.

Nothing is imported, so that ``--help`` stays quick; a test holds the figures to the request's own.
"""

MOST_BATCH = 1024
MOST_SEED = 2**63 - 1
MOST_SAMPLES = 100_000
MOST_IMAGES = 10_000
MOST_SECONDS = 1e6
MOST_TEMPERATURE = 1e3
MOST_THREADS = 4096
