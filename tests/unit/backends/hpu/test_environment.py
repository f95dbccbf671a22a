"""What is decided before torch and the SDK are imported, and what each refusal says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from lantern_accel.device.plugins import choose_device
from lantern_accel.errors import BackendError, LanternWarning
from lantern_accel_hpu import cards, environment
from lantern_accel_hpu.environment import Settings
from lantern_accel_hpu.spec import Spec


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Put an SDK, cards and a torch on this machine, as far as files and versions tell."""

    def make(
        *,
        sdk: bool = True,
        needs: str = "2.11.0",
        torch: str = "2.11.0",
        cards: int = 1,
        software: str = "1.24.1",
    ) -> None:
        folder = tmp_path / "habana_frameworks"
        (folder / "torch").mkdir(parents=True, exist_ok=True)
        (folder / "torch/required_version.txt").write_text(f"{needs}\n")
        monkeypatch.setattr(environment, "sdk_folder", lambda: folder if sdk else None)
        monkeypatch.setattr(environment, "installed_torch", lambda: torch)
        monkeypatch.setattr(environment, "sdk_version", lambda: software)
        names = [f"Gaudi at /dev/accel/accel{n}" for n in range(cards)]
        monkeypatch.setattr(environment, "devices", lambda: names)
        (library := tmp_path / "libtpc_kernels.so").touch()
        monkeypatch.setenv("GC_KERNEL_PATH", str(library))

    return make


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch):
    """Let this process have loaded the bridge already, in a mode."""

    def make(lazy: bool) -> None:
        internal = ModuleType("habana_frameworks.torch.utils.internal")
        vars(internal)["is_lazy"] = lambda: lazy
        for module in (ModuleType("habana_frameworks.torch"), internal):
            monkeypatch.setitem(sys.modules, module.__name__, module)

    return make


# --- the environment ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "lazy"), [("auto", "0"), ("compile", "0"), ("eager", "0"), ("graph", "1")]
)
def test_the_mode_sets_the_bridges_variable(mode: str, lazy: str) -> None:
    environ: dict[str, str] = {}
    Spec(Settings(mode=mode)).prepare(environ)
    assert "recipes" in environ.pop("PT_HPU_RECIPE_CACHE_CONFIG")
    assert environ == {
        "PT_HPU_LAZY_MODE": lazy,
        "PT_HPU_ENABLE_CACHE_METRICS": "1",
        "PT_HPU_USE_EAGER_FALLBACK": "0",
        # Products of float32 are IEEE's before the SDK reads its flags.
        "GAUDI2_FORCE_MME_FP32_IEEE": "1",
        "ENABLE_EXPERIMENTAL_FLAGS": "1",
        # Quotients are rounded as the host's, and recipes of single operators are kept.
        "PT_HPU_ENABLE_DIV_PRECISE": "1",
        "PT_HPU_ENABLE_EAGER_CACHE": "1",
    }


MOUNTS = """overlay / overlay rw 0 0
server:/home /home nfs4 rw 0 0
/dev/sda1 /home/local\\040disk ext4 rw 0 0
mons:/ /shared ceph rw 0 0
pool /data fuse.juicefs rw 0 0
10.0.0.1@tcp:/fs /scratch lustre rw 0 0
tmpfs /home/own tmpfs rw 0 0
"""


def test_the_file_system_of_a_folder_is_its_nearest_mounts(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(MOUNTS)
    for folder, kind in (
        ("/var/cache", "overlay"),
        ("/home/someone/.cache", "nfs4"),
        ("/home/local disk/cache", "ext4"),
        ("/home/ownother", "nfs4"),
        ("/home/own/x", "tmpfs"),
        ("/shared/a", "ceph"),
        ("/data", "fuse.juicefs"),
        ("/scratch/b", "lustre"),
    ):
        assert environment.file_system(Path(folder), mounts) == kind, folder
    assert environment.file_system(tmp_path, tmp_path / "none") == ""


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("home", kind) for kind in ("nfs4", "ceph", "fuse.sshfs", "lustre")),
        # Release 1.24 ends the process while torch is imported.
        *((name, "ext4") for name in ("a b", "it's", "a;b", "~me", "x$HOME", "[1]", "a,b", 'q"q')),
    ],
)
def test_recipes_are_kept_elsewhere_where_the_cache_cannot_have_them(
    machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, kind: str
) -> None:
    machine()
    cache = tmp_path / name
    monkeypatch.setenv("LANTERN_ACCEL_CACHE", str(cache))
    monkeypatch.setattr(environment.tempfile, "gettempdir", lambda: str(tmp_path / "disk"))
    monkeypatch.setattr(
        environment, "file_system", lambda at: kind if at.is_relative_to(cache) else "ext4"
    )
    says = kind if name == "home" else "a character in its name"
    with pytest.warns(LanternWarning, match=says):
        Spec().prepare(environ := {})
    folder, settings = environ[environment.RECIPES].split(",", 1)
    assert folder == f"{tmp_path}/disk/lantern-accel-{os.getuid()}/recipes"
    assert Path(folder).is_dir() and not environment.unfit_recipes(environ)
    # Release 1.24 has a fourth setting: whether they lie on a network file system.
    assert settings == "False,8192,False"
    # Who names a place gets it, without a word.
    Spec().prepare(environ := {environment.RECIPES: "/mine,False,1"})
    assert environ[environment.RECIPES] == "/mine,False,1"
    # Where there is no other place, they are not kept.
    (tmp_path / "file").touch()
    for place in ("file", "a disk"):
        environment._local.cache_clear()
        monkeypatch.setattr(environment.tempfile, "gettempdir", lambda at=place: f"{tmp_path}/{at}")
        with pytest.warns(LanternWarning, match="not kept"):
            Spec().prepare(environ := {})
        assert environment.RECIPES not in environ


def test_what_the_user_set_stays_and_what_we_set_may_change() -> None:
    environ = {"PT_HPU_LAZY_MODE": "1"}
    Spec().prepare(environ)
    assert environ["PT_HPU_LAZY_MODE"] == "1"
    environ = {}
    Spec().prepare(environ)  # as when all devices are listed
    Spec(Settings(mode="graph")).prepare(environ)
    assert environ["PT_HPU_LAZY_MODE"] == "1"


def test_the_software_hpu_keeps_a_real_bridge_from_loading_itself() -> None:
    environ = {"LANTERN_HPU_SOFTWARE": "1"}
    Spec().prepare(environ)
    assert environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"
    assert "PT_HPU_LAZY_MODE" not in environ


def test_only_the_mode_is_fixed_where_the_bridge_is_loaded(loaded) -> None:
    loaded(lazy=False)
    environ: dict[str, str] = {}
    Spec(Settings(mode="graph")).prepare(environ)
    assert "PT_HPU_LAZY_MODE" not in environ
    assert environ.items() >= environment.WANTED.items() and "PT_HPU_RECIPE_CACHE_CONFIG" in environ


def test_what_comes_too_late_for_the_card_is_told_once(
    loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded(lazy=False)
    monkeypatch.setattr(cards, "has_card", lambda: True)
    environ = {"PT_HPU_ENABLE_DIV_PRECISE": "1"}
    with pytest.warns(
        LanternWarning, match="before lantern_accel could set .*IEEE.*RECIPE"
    ) as told:
        Spec().prepare(environ)
    assert "PRECISE" not in str(told[0].message) and len(environ) == 1
    Spec().prepare(environ)  # in silence
    # Nor is anything said of a card that was acquired after all was set.
    monkeypatch.setattr(environment, "_settled", [])
    monkeypatch.setattr(cards, "has_card", lambda: False)
    Spec().prepare(environ := {"PT_RECIPE_CACHE_PATH": "/mine"})
    monkeypatch.setattr(cards, "has_card", lambda: True)
    del environ["PT_RECIPE_CACHE_PATH"]
    Spec().prepare(environ)


def test_recipes_of_the_users_own_are_refused_before_torch_is_imported(
    machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By the rules of release 1.24's source."""
    machine()
    (there := tmp_path / "there").mkdir()
    (link := tmp_path / "link").symlink_to(there)
    (closed := tmp_path / "closed").mkdir(mode=0o500)
    for right in (f"{there},False,8192,False", f"{there},true", ",true", f"{there}/new,False,1"):
        assert not environment.unfit_recipes({environment.RECIPES: right}), right
    for wrong, says in (
        (f"{there} x,False,8192,False", "not of the form"),
        (f"{link},False,8192,False", "symbolic link"),
        (f"{closed},False,8192,False", "not a folder that can be written"),
        (f"{there},no,8192,False", "not of the form"),
        (f"{there},False,8GB,False", "not of the form"),
        (f"{there},False,1,False,1", "not of the form"),
    ):
        monkeypatch.setenv(environment.RECIPES, wrong)
        refusal = _refused()
        assert says in refusal and "would end this process" in refusal, wrong
    machine(software="1.23.0")  # which takes it as it is
    assert choose_device("hpu").index == 0


@pytest.mark.parametrize(
    ("settings", "variable", "lazy", "runner"),
    [
        (Settings(), None, "0", "compile"),
        (Settings(), None, "1", "graph"),
        (Settings(), "eager", "0", "eager"),
        (Settings(mode="compile"), "eager", "0", "compile"),
        (Settings(mode="graph"), None, "1", "graph"),
        (Settings(software=True), None, "0", "eager"),
        (Settings(software=True, mode="graph"), None, "0", "graph"),
    ],
)
def test_the_option_comes_before_the_variable_and_both_before_the_bridges(
    settings: Settings, variable: str | None, lazy: str, runner: str
) -> None:
    environ = {"PT_HPU_LAZY_MODE": lazy, **({"LANTERN_HPU_MODE": variable} if variable else {})}
    assert environment.runner(settings, environ) == runner
    assert Settings(software=False).is_software({"LANTERN_HPU_SOFTWARE": "1"}) is False


@pytest.mark.parametrize(
    ("software", "torch", "mode"),
    [
        ("1.21.0.555", "2.6.0+hpu.git603340c", "graph"),
        ("1.22.1.6", "2.7.1+hpu_1.22.1-6.gite5ac8fb", "graph"),
        ("1.23.0.695", "2.9.0+hpu_1.23.0-695.git1f2c", "compile"),
        ("1.24.1.100", "2.11.0+cpu", "compile"),
        ("1.9.0.1", "2.7.1a0+git6fc067b", "graph"),  # numbers, not letters, are put in order
        ("", "2.7.1a0+git6fc067b", "compile"),
    ],
)
def test_the_default_mode_is_what_that_software_decodes_in(
    machine, software: str, torch: str, mode: str
) -> None:
    machine(software=software, torch=torch, needs=torch)
    assert environment.usual() == mode
    environ: dict[str, str] = {}
    assert environment.runner(Settings(), environ) == mode
    Spec().prepare(environ)
    assert environ["PT_HPU_LAZY_MODE"] == str(int(mode == "graph"))
    assert environment.runner(Settings(), environ) == mode
    recipes = environ["PT_HPU_RECIPE_CACHE_CONFIG"].split(",", 1)[1]
    assert recipes == ("False,8192,False" if software == "1.24.1.100" else "False,8192")


# --- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"speed": 11}, "backend 'hpu' has no option 'speed'; it takes mode: how a step runs"),
        ({"mode": "graphs"}, "got mode='graphs'; did you mean graph"),
        ({"fused": "maybe"}, "got fused='maybe'; it is true or false"),
        ({"software": 2}, "got software=2; it is true or false"),
        ({}, "got LANTERN_HPU_MODE='fast'; known: auto, compile"),
    ],
)
def test_a_wrong_option_is_told_before_anything_is_looked_for(
    options: dict[str, object], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LANTERN_HPU_MODE", "fast")  # which an option comes before
    with pytest.raises(BackendError, match=says):
        choose_device("hpu", options)


def test_the_software_hpu_is_never_chosen_automatically(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Spec().priority == 30
    for value in ("1", "what?"):
        monkeypatch.setenv("LANTERN_HPU_SOFTWARE", value)
        assert Spec().priority == -1
        assert choose_device("auto").spec.name != "hpu"


def test_without_a_checkout_the_software_hpu_says_where_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "lantern_accel_hpu.software", None)  # as in a wheel
    with pytest.raises(BackendError, match="run it from a checkout"):
        choose_device("hpu", {"software": True})


# --- refusals -----------------------------------------------------------------------------------


def _refused(**options: object) -> str:
    with pytest.raises(BackendError) as caught:
        choose_device("hpu", options)
    text = str(caught.value)
    assert text.startswith("device 'hpu' is not available: ")
    assert text.endswith("run 'lantern-accel devices' to list what is there")
    assert "\n" not in text
    return text


OLDER = {"software": "1.22.1.6", "needs": "2.7.1", "torch": "2.7.1+cpu"}
OWN = {**OLDER, "torch": "2.7.1+git123"}
LAZY = "PT_HPU_LAZY_MODE"


@pytest.mark.parametrize(
    ("there", "environ", "mode", "says"),
    [
        ({"sdk": False}, {}, "auto", "habana_frameworks is not installed; install it by working"),
        ({"cards": 0}, {}, "auto", "the driver shows no Gaudi; check that hl-smi lists one"),
        ({"torch": "2.13.0+cpu"}, {}, "auto", "built for torch 2.11.0, and torch 2.13.0+cpu is"),
        ({"torch": "2.11.0+cpu"}, {}, "graph", "torch 2.11.0+cpu is not one; unset"),
        ({"torch": "2.11.0+git123"}, {LAZY: "1"}, "compile", f"{LAZY}=1 selects lazy mode"),
        *((OLDER, {}, mode, "2.7.1+cpu takes int64 alone") for mode in ("auto", "compile")),
        (OLDER, {}, "eager", "2.7.1+cpu takes int64 alone"),
        (OWN, {LAZY: "0"}, "auto", "LANTERN_HPU_MODE=graph"),
        # Kernels that the compiler does not find.
        ({}, {"GC_KERNEL_PATH": "/gone.so"}, "auto", "/gone.so' names no file, so that no graph"),
        ({}, {"GC_KERNEL_PATH": ""}, "auto", "GC_KERNEL_PATH='' names no file"),
        # What can be had. The bridge compares major and minor of torch.
        ({"needs": "2.13.1", "torch": "2.13.0+cpu"}, {}, "auto", ""),
        ({"needs": "2.5.1", "torch": "2.5.1a0+git6fc067b"}, {}, "graph", ""),
        (OWN, {}, "auto", ""),
    ],
)
def test_what_cannot_be_had_here_is_refused_with_a_way_out(
    machine,
    monkeypatch: pytest.MonkeyPatch,
    there: dict[str, object],
    environ: dict[str, str],
    mode: str,
    says: str,
) -> None:
    machine(**there)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    if says:
        assert says in _refused(mode=mode)
    else:
        assert choose_device("hpu", {"mode": mode}).index == 0


def test_a_mode_against_what_the_process_has_loaded(machine, loaded) -> None:
    machine(torch="2.11.0+git123")
    loaded(lazy=False)
    assert "loaded habana_frameworks before lantern_accel in eager mode" in _refused(mode="graph")
    # What was loaded still works: the mode is then the one that goes with it.
    assert choose_device("hpu").index == 0
    assert environment.runner(Settings(), {"PT_HPU_LAZY_MODE": "1"}) == "compile"
    loaded(lazy=True)
    assert environment.runner(Settings(), {}) == "graph"


# --- what is read -------------------------------------------------------------------------------


def test_torchs_version_is_read_without_importing_it() -> None:
    import torch

    assert environment.installed_torch() == torch.__version__
    assert environment.numbers("2.5.1a0+git6fc067b") == (2, 5)


def test_only_gaudis_are_listed(tmp_path: Path) -> None:
    for node, vendor in (("accel0", "0x8086"), ("accel1", "0x1da3"), ("accel2", "")):
        (tmp_path / "dev/accel").mkdir(parents=True, exist_ok=True)
        (tmp_path / "dev/accel" / node).touch()
        if vendor:
            folder = tmp_path / "sys/class/accel" / node / "device"
            folder.mkdir(parents=True)
            (folder / "vendor").write_text(vendor + "\n")
    assert environment.devices(tmp_path) == [
        "Gaudi at /dev/accel/accel1",
        "Gaudi at /dev/accel/accel2",
    ]
    assert environment.devices(tmp_path / "nothing") == []


# --- without torch ------------------------------------------------------------------------------


WITHOUT_TORCH = """
import sys
import lantern_accel
from lantern_accel.cli import main
for words in ("generate x -o x.png --device", "bench --device", "tune --device", "conform", "devices"):
    assert main([*words.split(), "hpu"]) == 4
    assert "torch" not in sys.modules, words
try:
    lantern_accel.load(device="hpu", options={"mode": "graph"})
except lantern_accel.BackendError as error:
    assert "not available" in str(error)
else:
    raise AssertionError("it was opened")
assert "torch" not in sys.modules
"""


def test_the_refusal_comes_before_torch_is_imported(tmp_path: Path) -> None:
    """Importing torch is what would take longer than the second that a refusal may take."""
    if Spec().probe().available:
        pytest.skip("the device is there")
    call = [sys.executable, "-c", WITHOUT_TORCH]
    subprocess.run(call, check=True, timeout=60, cwd=tmp_path)


@pytest.mark.parametrize(
    "index, environ, known, held, found",
    [
        (0, {}, [0, 1, 2], (), ["0", "1", "2"]),
        (0, {}, [2, 0, 1], (1,), ["0", "2"]),
        (0, {}, [0, 1], (1,), [None]),  # the driver gives the free one
        (0, {}, [0], (), [None]),
        (2, {}, [0, 1, 2], (), [None]),
        (0, {"HLS_MODULE_ID": "1"}, [0, 1, 2], (), [None]),
        (0, {"HABANA_VISIBLE_MODULES": "4,6"}, [4, 6], (), ["4", "6"]),
        (0, {}, [4, 6], (), [None, None]),  # a container's own numbers begin at 0
        (0, {}, [None, None], (), [None, None]),
        (0, {}, [0, 1], (0, 1), ["0", "1"]),  # all are held, and opening says by whom
    ],
)
def test_a_process_holds_a_module(index, environ, known, held, found) -> None:
    places = cards.places(index, environ, known, lambda module: module in held)
    assert [place.get("HABANA_VISIBLE_MODULES") for place in places] == found


def test_as_many_processes_as_there_are_cards_may_hold_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lantern_accel_hpu.faults.holders", lambda module: [])
    chosen = choose_device("hpu", {"software": True})
    for modules, count in (("1", 1), ("3", 3)):
        monkeypatch.setenv("LANTERN_HPU_SOFTWARE_MODULES", modules)
        assert len(chosen.processes(5)) == count
