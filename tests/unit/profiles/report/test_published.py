"""The published schemas are those of the records, and what is written fits them."""

from __future__ import annotations

from typing import Any

import pytest
from support.runs import invented_run

from lantern_accel.files import read_json_file
from lantern_accel_profiles.report import published
from lantern_accel_profiles.report.comparison import compare


def _plain(schema: Any) -> Any:
    """Leave out what pydantic releases write differently and means the same."""
    if isinstance(schema, dict):
        return {
            key: _plain(value)
            for key, value in schema.items()
            if not (key == "additionalProperties" and value is True)
        }
    return [_plain(one) for one in schema] if isinstance(schema, list) else schema


@pytest.mark.parametrize("name", published.MODELS)
def test_the_published_schema_is_the_records(name: str) -> None:
    assert _plain(read_json_file(published.FOLDER / name)) == _plain(published.schema_of(name)), (
        "run `python -m lantern_accel_profiles.report.published`, and think of the version"
    )


def test_what_is_written_fits_the_schema_and_what_is_not_does_not() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    run = invented_run()
    check = jsonschema.Draft202012Validator(read_json_file(published.FOLDER / "run-2.json"))
    data = run.model_dump(mode="json")
    check.validate(data)
    report = jsonschema.Draft202012Validator(read_json_file(published.FOLDER / "comparison-2.json"))
    report.validate(compare([run]).model_dump(mode="json"))
    data["cells"][0]["cold_seconds"] = "unknown"
    assert not check.is_valid(data)
