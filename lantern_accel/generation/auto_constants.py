"""The tuned constants of ``auto``: what is tried, how it is timed, and what decides.

The lengths that it tries are in :mod:`~lantern_accel.strategy.values`.
"""

from __future__ import annotations

#: Tokens of an image's passes that are timed, and lengths that windows may have.
TOKENS = (1, 2, 4, 8, 16, 32, 64)
#: A shorter window than this keeps no drafts, where nobody chose its length.
SHORTEST_WINDOW = 4
#: Nodes of a drafter's tree, the root included, where nobody chose one: those among which costs decide.
TREE_SIZES = (3, 5, 8, 13, 21, 34)
#: Drafts of a copy in a step: among these, and windows of the copy's own, the best are predicted.
COPY_DRAFTS = (2, 4, 6, 8, 12, 16, 24, 32)
#: Tokens of the longest of the copy's own windows that is tried in any case.
SHORT_COPY_WINDOW = 8
#: Weights from which on reading them decides a step, so that a quantized copy may be a fast drafter.
LEAST_WEIGHTS = 1 << 23

#: How often a copy's draft is kept: on the bundled model, activations in 8 bits.
USUAL_RATES = {"int8": 0.975, "int6": 0.96, "int4": 0.9}
#: What is kept of the drafts of a copy's windows, next to as many that it guessed one by one: some of a
#: window have not settled when its passes are over. Measured: 0.94 to 1.05 for windows of 2 to 8.
SETTLED = 0.96
#: By how much the odds of acceptance are better than usual, as a logarithm, on an easy prompt.
EASY = 1.0

#: Milliseconds that are timed at least, by as many short steps in a row, and the most steps.
STEP_MS, MOST_STEPS = 5.0, 8
#: Rounds and milliseconds of all lengths in turns at least, and the most rounds.
ROUNDS, ROUNDS_MS, MOST_ROUNDS = 3, 700.0, 10
#: The same at least, where a later request times a source once more, and for costs of rows.
LATER_ROUNDS, LATER_MS = 1, 250.0
ROW_ROUNDS, ROW_MS = 2, 150.0
#: How often a length that looks hopeless is timed again before it is left out.
SECOND_LOOKS = 2
#: Weights whose matmuls are timed, as many as no cache holds or all of a small model's; and the rounds.
PRODUCT_WEIGHTS, PRODUCT_ROUNDS = 1 << 26, 5
#: Steps over which drafts are counted: drafts of a draft head or drafter, and of a copy.
DRAFTER_STEPS, COPY_STEPS = 48, 12
#: Requests that time the candidates of their kind at most, while other programs use the machine.
REQUESTS = 4

#: The predicted speed-up that drafts need: costs of a few steps are uncertain by a tenth.
ENOUGH = 1.15
#: A length whose predicted speed is below this share of the best one's is not timed again.
HOPELESS = 0.8
#: The share of the best predicted speed that a source needs to be timed once more.
NEAR = 0.7
#: The share of the best tree's predicted speed with which a larger one is taken.
NEARLY = 0.95
