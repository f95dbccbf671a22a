"""Write a model's tokens per step by window length from what `lantern-accel tune -o` has measured.

They depend on the model and the temperature, not on the device, so they ship with the package:

    lantern-accel tune --dtype float32 --batch 1 -o tune.json
    python tools/ship_payoff.py tune.json profiles/choices/lantern-emoji.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from lantern_accel.files import write_record
from lantern_accel.strategy.choices import Payoff
from lantern_accel_profiles.tuning.auto import AutoEvidence


def payoff_of(evidence: AutoEvidence, prompts: str) -> Payoff:
    """Return the record that ships; lengths that were not counted are left out."""
    key = evidence.settings["key"]
    assert isinstance(key, dict)
    return Payoff(
        model=key["model"],
        weights_hash=key["weights_hash"],
        temperature=key["temperature"],
        prompts=prompts,
        tokens_per_step={n: round(v, 3) for n, v in sorted(evidence.tokens_per_step().items())},
    )


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("evidence", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--prompts", default="the tuning half of the built-in prompts")
    given = parser.parse_args(words)
    data = json.loads(given.evidence.read_text(encoding="utf-8"))
    data.pop("choices", None)
    worth = payoff_of(AutoEvidence.model_validate(data), given.prompts)
    write_record(given.out, worth.model_dump(mode="json"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
