"""Filing a run: what is refused, what is only said, and where it goes."""

from __future__ import annotations

import pytest
from support.runs import invented_run

from lantern_accel.cli import main
from lantern_accel.device.datasheets import DeviceProfile, Figure
from lantern_accel.errors import RequestError
from lantern_accel.files import write_json
from lantern_accel_profiles.report.filing import examine, file_name, file_run


def profile(name: str, bandwidth: float = 1e12, flops: float = 1e15) -> DeviceProfile:
    def figure(value: float) -> Figure:
        return Figure(value=value, kind="datasheet", source="a test")

    return DeviceProfile(
        name="card",
        backend="cpu",
        vendor="somebody",
        model="Card",
        reports_as=(name,),
        peak_flops={"float32": figure(flops), "bfloat16": figure(flops)},
        bandwidth_bytes_per_s=figure(bandwidth),
    )


def test_a_whole_run_is_filed_under_its_device(tmp_path):
    run = invented_run()
    assert not examine(run, []).faults
    path = file_run(run, tmp_path)
    assert path.name == file_name(run)
    with pytest.raises(RequestError, match="--overwrite"):
        file_run(run, tmp_path)
    assert file_run(run, tmp_path, overwrite=True) == path


def test_rates_above_the_datasheet_are_refused():
    run = invented_run()
    name = run.environment.device.name
    backend = run.environment.device.backend
    sheet = profile(name).model_copy(update={"backend": backend})
    assert not examine(run, [sheet]).faults
    narrow = profile(name, bandwidth=1e6).model_copy(update={"backend": backend})
    assert any("GB/s" in one for one in examine(run, [narrow]).faults)
    slow = profile(name, flops=1e6).model_copy(update={"backend": backend})
    assert any("TFLOP/s" in one for one in examine(run, [slow]).faults)
    # What somebody measured is no limit.
    measured = narrow.bandwidth_bytes_per_s.model_copy(update={"kind": "measured"})
    open_ = narrow.model_copy(update={"bandwidth_bytes_per_s": measured})
    assert not examine(run, [open_]).faults


def test_an_unfinished_run_names_the_command_that_completes_it():
    run = invented_run().model_copy(update={"state": "interrupted"})
    (fault,) = examine(run, []).faults
    assert "--resume" in fault


def test_clocks_that_disagree_are_refused():
    run = invented_run()
    clock = run.clock.model_copy(update={"ratio": 0.4})
    assert any("0.40" in one for one in examine(run.model_copy(update={"clock": clock}), []).faults)


def test_the_command_files_a_run_and_says_what_it_is_worth(tmp_path, capsys):
    write_json(tmp_path / "run.json", invented_run().model_dump(mode="json"))
    words = ["profiles", "add", str(tmp_path / "run.json"), "--out", str(tmp_path / "filed")]
    assert main(words) == 0
    assert len(list((tmp_path / "filed").glob("*.json"))) == 1
    told = capsys.readouterr()
    assert "filed" in told.out and "note" in told.err
    assert main(words) == 2
    assert "--overwrite" in capsys.readouterr().err


def test_measured_runs_are_listed(capsys):
    assert main(["profiles"]) == 0
    assert "lantern-emoji" in capsys.readouterr().out
