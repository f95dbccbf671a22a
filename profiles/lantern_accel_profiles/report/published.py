"""The JSON Schemas of what profiling writes, as they are published with the package.

``python -m lantern_accel_profiles.report.published`` writes them again after a change of the records;
a test keeps the files in step. A change that older files do not fit needs a new version.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel

from lantern_accel.files import write_json
from lantern_accel_profiles.measure.record import Run
from lantern_accel_profiles.report.record import Comparison

FOLDER = Path(__file__).parent / "schema"
MODELS: dict[str, type[BaseModel]] = {"run-2.json": Run, "comparison-2.json": Comparison}


def schema_of(name: str) -> dict[str, object]:
    """Return the schema of ``run-2.json`` or ``comparison-2.json``, made from the records."""
    made = MODELS[name].model_json_schema(mode="serialization")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": name} | made


if __name__ == "__main__":
    for each in MODELS:
        write_json(FOLDER / each, schema_of(each))
