"""Plug-ins are found by entry point, each by itself, and say what is wrong with them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from lantern_accel.cli import main
from lantern_accel.device import plugins
from lantern_accel.device.backend import DeviceFacts
from lantern_accel.device.entry_points import why
from lantern_accel.errors import BackendError, LanternWarning

PLUGIN = """
from lantern_accel.device.hookspecs import hookimpl

@hookimpl
def lantern_accel_backends():
    import torch
    from lantern_accel.device.backend import Backend, DeviceFacts
    from lantern_accel.device.spec import BackendSpec, Probe

    class Opened(Backend):
        name, version = "{name}", "1.0"
        def facts(self):
            return DeviceFacts(backend=self.name, device="cpu", name="Abacus", torch="?")
        def synchronize(self):
            pass

    class Spec(BackendSpec):
        name, summary, api_version, priority = "{name}", "beads", {api_version}, {priority}
        def prepare(self, environ):
            {prepare}
        def processes(self, index):
            {processes}
        def probe(self):
            {probe}
        def open(self, index, options):
            {open}

    return {returns}
"""
DEFAULTS = {
    "name": "abacus",
    "api_version": "1",
    "priority": "50",
    "prepare": "pass",
    "processes": "return None",
    "probe": "return Probe.of_devices('rods', 'rods')",
    "open": "return Opened(torch.device('cpu'))",
    "returns": "[Spec()]",
}
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a stranger's package: a module and the metadata that pip would write."""
    made: list[str] = []

    def write(module: str = "stranger", point: str = "", source: str = "", **parts: str) -> None:
        (tmp_path / f"{module}.py").write_text(source or PLUGIN.format(**{**DEFAULTS, **parts}))
        info = tmp_path / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[lantern_accel]\n{point or f'abacus = {module}'}")
        made.append(module)
        plugins.load_plugins.cache_clear()

    monkeypatch.syspath_prepend(str(tmp_path))
    yield write
    for module in made:
        sys.modules.pop(module, None)
    plugins.load_plugins.cache_clear()


def test_the_backends_of_this_repository_are_found_by_entry_point() -> None:
    assert {"cpu", "cuda", "hpu", "null"} <= set(plugins.backend_specs())
    assert plugins.broken_plugins() == {}


def test_a_strangers_backend_is_found_opened_and_preferred(install: Install) -> None:
    install()
    assert plugins.backend_specs()["abacus"].summary == "beads"
    assert plugins.open_backend("abacus:1").facts().name == "Abacus"
    assert plugins.open_backend("auto").name == "abacus"
    assert [one.name for one in plugins.devices_report() if one.automatic] == ["abacus"]


def test_a_negative_priority_is_never_automatic(install: Install) -> None:
    install(priority="-1")
    assert plugins.open_backend("auto").name != "abacus"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"source": "import no_such_sdk"}, "ModuleNotFoundError: No module named 'no_such_sdk'"),
        ({"source": "raise SystemExit(3)"}, "SystemExit: 3"),
        ({"source": "x = ("}, "SyntaxError"),
        (
            {"source": "x = 1"},
            "stranger has no hook lantern_accel_backends or lantern_accel_families",
        ),
        ({"point": "abacus = stranger:name", "source": "name = 'x'"}, "names a str; let it name"),
        ({"point": "abacus = stranger:nobody"}, "AttributeError"),
        ({"api_version": "0"}, "written for backend API 0, this lantern-accel has 1; upgrade the"),
        ({"api_version": "2"}, "API 2, this lantern-accel has 1; upgrade lantern-accel"),
        ({"api_version": "None"}, "API None"),
        ({"returns": "None and []"}, "returned no backend; return a list"),
        ({"returns": "[]"}, "returned no backend"),
        ({"returns": "Spec()"}, "returned a Spec, not a list"),
        ({"returns": "[Spec]"}, "returned a Spec, not an instance of BackendSpec"),
        ({"returns": "['abacus']"}, "returned a str, not an instance of BackendSpec"),
        ({"returns": "1 / 0"}, "ZeroDivisionError"),
        ({"name": "Abacus!"}, "named 'Abacus!'; use lower-case letters"),
        ({"name": "auto"}, "named 'auto'"),
        ({"name": "cpu"}, "another plug-in already has a backend named 'cpu'"),
    ],
)
def test_a_broken_plugin_is_reported_and_harms_no_other(
    install: Install, arguments: dict[str, str], says: str
) -> None:
    install(**{"module": "stranger", **arguments})
    (name, reason), *others = plugins.broken_plugins().items()
    assert (name, others) == ("abacus", [])
    assert says in reason
    assert plugins.open_backend("cpu").name == "cpu"
    assert [one.reason for one in plugins.devices_report() if one.state == "broken"] == [reason]
    with pytest.raises(BackendError, match=r"'abacus' failed to load: .*; reinstall or uninstall"):
        plugins.open_backend("abacus")


def test_a_second_plugin_of_the_same_name_does_not_hide_the_first(install: Install) -> None:
    install(module="zz_stranger", point="cpu = zz_stranger", source="import no_such_sdk")
    assert plugins.open_backend("cpu").name == "cpu"
    assert list(plugins.broken_plugins()) == ["cpu (zz_stranger)"]


@pytest.mark.parametrize("hook", ["prepare", "probe", "processes", "open"])
def test_a_hook_that_raises_names_backend_and_hook(install: Install, hook: str) -> None:
    install(**{hook: "raise OSError('no beads')"})
    says = rf"backend 'abacus' failed in {hook}: OSError: no beads; \w+"
    with pytest.raises(BackendError, match=says) as caught:
        chosen = plugins.choose_device("abacus")
        chosen.processes(2)
        chosen.open()
    assert isinstance(caught.value.__cause__, OSError)
    report = {one.name: one for one in plugins.devices_report()}
    assert report["abacus"].state == ("ready" if hook in ("processes", "open") else "broken")
    assert report["cpu"].state == "ready"


@pytest.mark.parametrize("hook", ["prepare", "probe"])
def test_auto_warns_when_it_skips_a_better_backend(install: Install, hook: str) -> None:
    install(**{hook: "raise OSError('no beads')"})
    with pytest.warns(LanternWarning, match=f"auto skips a backend: .*'abacus' failed in {hook}"):
        assert plugins.open_backend("auto").name != "abacus"


BARE = "return Opened(torch.device('cpu'))"
#: What a stranger's backend does, the device that is asked for, and fragments of the refusal.
REFUSED: list[tuple[dict[str, str], str, tuple[str, ...]]] = [
    ({"probe": "return 7"}, "abacus", ("failed in probe", "a int")),
    ({"open": "return 7"}, "abacus", ("failed in open", "a int")),
    ({"open": f"Opened.name = 'slate'; {BARE}"}, "abacus", ("failed in open", "must have name")),
    ({"open": f"del Opened.version; {BARE}"}, "abacus", ("failed in open", "must have name")),
    ({"probe": "return Probe(available=True)"}, "abacus", ("failed in probe", "description each")),
    ({"probe": "return Probe.missing('no beads', 'buy some')"}, "abacus",
     ("not available: no beads; buy some", "lantern-accel devices")),
    ({}, "abacus:2", ("out of range", "has 2, abacus:0 (rods), abacus:1")),
    ({}, "cpuu", ("did you mean cpu", "lantern-accel devices")),
    *(({}, device, ("write auto, a name, or a name and an index",))
      for device in ("", " ", ":", ":0", "cpu:", "cpu:x", "cpu:-1", "cpu:0:0", "auto:1", f"cpu:{9**99}")),
]  # fmt: skip


@pytest.mark.parametrize(("parts", "device", "says"), REFUSED, ids=range(len(REFUSED)))
def test_a_device_is_refused(
    install: Install, parts: dict[str, str], device: str, says: tuple[str, ...]
) -> None:
    install(**parts)
    with pytest.raises(BackendError) as caught:
        plugins.open_backend(device)
    assert all(part in str(caught.value) for part in says), str(caught.value)
    if "missing" in parts.get("probe", ""):
        assert plugins.open_backend("auto").name != "abacus"


ENDS = [("probe", "sys.exit(3)"), ("probe", "raise KeyboardInterrupt"), ("open", "sys.exit(3)")]


@pytest.mark.parametrize(("hook", "end"), ENDS)
def test_a_plugin_that_ends_the_process_is_named(install: Install, hook: str, end: str) -> None:
    install(**{hook: f"import sys; {end}"})
    with pytest.raises(BackendError, match=rf"'abacus' failed in {hook}: .*(3|KeyboardInterrupt)"):
        plugins.open_backend("abacus")


@pytest.mark.parametrize(
    "said, jobs, places",
    [
        ("None", 3, [{}, {}, {}]),
        ("[{'ROD': '0'}, {'ROD': '1'}]", 3, [{"ROD": "0"}, {"ROD": "1"}]),
        ("[{'ROD': '0'}, {'ROD': '1'}]", 1, [{}]),  # one need not choose
        ("[{}]", 3, [{}]),
    ],
)
def test_a_device_says_how_many_processes_may_hold_it(
    install: Install, said: str, jobs: int, places: object
) -> None:
    install(processes=f"return {said}")
    assert plugins.choose_device("abacus").processes(jobs) == places


def test_prepare_comes_before_probe(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ABACUS_MODE", raising=False)
    install(
        prepare="environ.setdefault('ABACUS_MODE', 'eager')",
        probe="import os; return Probe.of_devices(os.environ['ABACUS_MODE'])",
    )
    assert plugins.open_backend("abacus").name == "abacus"


def test_no_backend_at_all_says_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: ())
    plugins.load_plugins.cache_clear()
    try:
        for device in ("auto", "cpu"):
            with pytest.raises(BackendError, match="no backend is installed; install lantern-acc"):
                plugins.open_backend(device)
    finally:
        plugins.load_plugins.cache_clear()


def test_the_cli_prints_a_plugins_warning_as_one_line(
    install: Install, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    install(probe="raise OSError('no\\nbeads')")
    assert main(["devices", "auto"]) == 0
    assert capsys.readouterr().err == (
        "warning: device auto skips a backend: backend 'abacus' failed in probe: OSError: "
        "no beads; report it to the plug-in's author\n"
    )


def test_the_documented_example_runs() -> None:
    import doctest

    from lantern_accel.device import hookspecs

    assert doctest.testmod(hookspecs) == doctest.TestResults(failed=0, attempted=7)


@pytest.mark.long
def test_listing_and_importing_load_no_vendor_sdk_and_the_kit_no_pytest() -> None:
    code = (
        "import sys, time, torch\n"
        "start = time.process_time()\n"
        "import lantern_accel\n"
        "assert time.process_time() - start < 0.6\n"
        "from lantern_accel.device import plugins\n"
        "plugins.devices_report()\n"
        "sdks = {'habana_frameworks', 'pynvml', 'torch_xla', 'jax'} & set(sys.modules)\n"
        "assert not sdks, sdks\n"
        "import lantern_accel.testing\n"
        "assert 'pytest' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


FAILING = {
    "open": {"open": "raise RuntimeError('no kernel image')"},
    "first allocation": {
        "open": "b = Opened(torch.device('cpu')); b.device = 'beads:0'; return b",
    },
    "synchronisation": {
        "open": "b = Opened(torch.device('cpu')); b.synchronize = lambda: 1 / 0; return b",
    },
}


@pytest.mark.parametrize("parts", FAILING.values(), ids=FAILING)
def test_auto_goes_on_where_opening_fails_and_a_name_does_not(
    install: Install, parts: dict[str, str]
) -> None:
    install(**parts)
    with pytest.warns(LanternWarning, match="device auto: cpu serves in place of abacus") as said:
        assert plugins.open_backend("auto").name == "cpu"
    assert len(said) == 1
    with pytest.raises(BackendError, match="abacus"):
        plugins.open_backend("abacus")


def test_options_of_the_device_that_failed_are_left_out_for_the_next(install: Install) -> None:
    install(open="raise RuntimeError('no beads')")
    with pytest.warns(LanternWarning, match=r"serves in place of abacus, without rods .backend"):
        assert plugins.open_backend("auto", {"rods": 3}).name == "cpu"


def test_what_the_backend_explains_is_what_the_user_reads(install: Install) -> None:
    install(
        open="b = Opened(torch.device('cpu')); b.device = 'beads:0'; "
        "from lantern_accel.errors import BackendError; "
        "b.explain = lambda error: BackendError('the rods are bent; straighten them'); return b"
    )
    with pytest.raises(BackendError, match=r"^the rods are bent; straighten them$"):
        plugins.open_backend("abacus")


def test_gpu_is_the_best_backend_that_says_it_is_one(install: Install) -> None:
    with pytest.raises(BackendError, match=r"no device 'gpu' is available \(cuda: .*list what is"):
        plugins.open_backend("gpu")
    install(prepare="pass", name="abacus", returns="[setattr(Spec, 'aliases', ('gpu',)) or Spec()]")
    assert plugins.open_backend("gpu:1").name == "abacus"
    assert not plugins.choose_device("gpu").automatic
    with pytest.raises(BackendError, match=r"no backend is named 'gpus'; did you mean gpu"):
        plugins.open_backend("gpus")


def test_wrong_fields_are_named_one_by_one() -> None:
    with pytest.raises(ValidationError) as caught:
        DeviceFacts(backnd="a", device="cpu", name="A", torch="?")  # type: ignore[call-arg]  # the misspelling
    assert why(caught.value) == (
        "DeviceFacts: backend: field required; backnd: extra inputs are not permitted"
    )
