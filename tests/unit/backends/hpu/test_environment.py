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

VARIABLES = (
    "PT_HPU_LAZY_MODE",
    "PT_HPU_ENABLE_CACHE_METRICS",
    "PT_HPU_USE_EAGER_FALLBACK",
    "GAUDI2_FORCE_MME_FP32_IEEE",
    "ENABLE_EXPERIMENTAL_FLAGS",
    "PT_HPU_ENABLE_DIV_PRECISE",
    "PT_HPU_ENABLE_EAGER_CACHE",
    "PT_HPU_RECIPE_CACHE_CONFIG",
    "GC_KERNEL_PATH",
    "LANTERN_HPU_MODE",
    "LANTERN_HPU_SOFTWARE",
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start from an environment in which nobody chose anything, and leave none behind."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that whatever a test sets is undone
        del os.environ[name]
    monkeypatch.setattr(environment, "_ours", {})
    monkeypatch.setattr(environment, "_settled", [])


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


@pytest.mark.parametrize("kind", ["nfs4", "ceph", "fuse.sshfs", "lustre"])
def test_recipes_are_kept_on_a_local_disk_where_the_cache_is_none(
    machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    machine()
    monkeypatch.setenv("LANTERN_ACCEL_CACHE", str(tmp_path / "home"))
    monkeypatch.setattr(environment.tempfile, "gettempdir", lambda: str(tmp_path / "disk"))
    remote = str(tmp_path / "home")
    monkeypatch.setattr(
        environment, "file_system", lambda at: kind if str(at).startswith(remote) else "ext4"
    )
    environ: dict[str, str] = {}
    with pytest.warns(LanternWarning, match=f"lies on a network file system .{kind}"):
        Spec().prepare(environ)
    folder, *rest = environ["PT_HPU_RECIPE_CACHE_CONFIG"].split(",")
    assert folder == f"{tmp_path}/disk/lantern-accel-{os.getuid()}/recipes"
    assert Path(folder).is_dir()
    # Release 1.24 has a fourth setting: whether they lie on a network file system.
    assert rest == ["False", "8192", "False"]
    # Who names a place gets it, without a word.
    environ = {"PT_HPU_RECIPE_CACHE_CONFIG": "/mine,False,1"}
    Spec().prepare(environ)
    assert environ["PT_HPU_RECIPE_CACHE_CONFIG"] == "/mine,False,1"


@pytest.mark.parametrize(
    ("software", "settings"), [("1.23.0.695", "False,8192"), ("1.24.0.9", "False,8192,False")]
)
def test_the_recipe_caches_settings_are_the_releases(machine, software: str, settings: str) -> None:
    machine(software=software)
    environ: dict[str, str] = {}
    Spec().prepare(environ)
    assert environ["PT_HPU_RECIPE_CACHE_CONFIG"].split(",", 1)[1] == settings


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
    monkeypatch.setattr(cards, "acquired", lambda: True)
    environ = {"PT_HPU_ENABLE_DIV_PRECISE": "1"}
    with pytest.warns(
        LanternWarning, match="before lantern_accel could set .*IEEE.*RECIPE"
    ) as told:
        Spec().prepare(environ)
    assert "PRECISE" not in str(told[0].message) and len(environ) == 1
    Spec().prepare(environ)  # in silence
    # Nor is anything said of a card that was acquired after all was set.
    monkeypatch.setattr(environment, "_settled", [])
    monkeypatch.setattr(cards, "acquired", lambda: False)
    Spec().prepare(environ := {"PT_RECIPE_CACHE_PATH": "/mine"})
    monkeypatch.setattr(cards, "acquired", lambda: True)
    del environ["PT_RECIPE_CACHE_PATH"]
    Spec().prepare(environ)


@pytest.mark.parametrize("name", ["a b", "it's", "a;b", "~me", "x$HOME", "[1]", "a,b", 'q"q'])
def test_recipes_are_kept_elsewhere_where_the_caches_name_is_refused(
    machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """Release 1.24 ends the process while torch is imported."""
    machine()
    monkeypatch.setenv("LANTERN_ACCEL_CACHE", str(tmp_path / name))
    monkeypatch.setattr(environment.tempfile, "gettempdir", lambda: str(tmp_path / "disk"))
    monkeypatch.setattr(environment, "file_system", lambda at: "ext4")
    environ: dict[str, str] = {}
    with pytest.warns(LanternWarning, match="a character in its name"):
        Spec().prepare(environ)
    assert environ["PT_HPU_RECIPE_CACHE_CONFIG"].startswith(f"{tmp_path}/disk/lantern-accel-")
    assert not environment.unfit_recipes(environ)
    # Where there is no other place, nothing is kept.
    environment._local.cache_clear()
    monkeypatch.setattr(environment.tempfile, "gettempdir", lambda: str(tmp_path / "no where"))
    with pytest.warns(LanternWarning, match="recipes are not kept"):
        Spec().prepare(environ := {})
    assert "PT_HPU_RECIPE_CACHE_CONFIG" not in environ


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
        (f"{there} x,False,8192,False", "character ' '"),
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


def test_kernels_that_the_compiler_does_not_find_are_told_of(
    machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine()
    monkeypatch.setenv("GC_KERNEL_PATH", str(tmp_path / "gone.so"))
    assert "names no file, so that no graph can be compiled; set it to" in _refused()
    monkeypatch.delenv("GC_KERNEL_PATH")
    assert "GC_KERNEL_PATH is not set" in _refused()


@pytest.mark.parametrize(
    ("option", "variable", "lazy", "runner"),
    [
        ("auto", None, "0", "compile"),
        ("auto", None, "1", "graph"),
        ("auto", "eager", "0", "eager"),
        ("compile", "eager", "0", "compile"),
        ("graph", None, "1", "graph"),
    ],
)
def test_the_option_comes_before_the_variable_and_both_before_the_bridges(
    option: str, variable: str | None, lazy: str, runner: str
) -> None:
    environ = {"PT_HPU_LAZY_MODE": lazy, **({"LANTERN_HPU_MODE": variable} if variable else {})}
    assert environment.runner(Settings(mode=option), environ) == runner


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
    # Who names another gets it.
    other = {"PT_HPU_LAZY_MODE": "0"}
    assert environment.runner(Settings(), other) == "compile"


def test_int64_outside_lazy_mode_is_refused_by_name(
    machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(software="1.22.1.6", torch="2.7.1+cpu", needs="2.7.1")
    says = "torch 2.7.1+cpu takes int64 alone for indices, and which of Gaudi's kernels take it"
    for mode in ("auto", "compile", "eager"):
        assert says in _refused(mode=mode)
    machine(software="1.22.1.6", torch="2.7.1+git123", needs="2.7.1")
    assert choose_device("hpu").index == 0
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "0")
    assert "LANTERN_HPU_MODE=graph" in _refused()


def test_the_software_hpu_runs_eagerly_unless_told_otherwise() -> None:
    assert environment.runner(Settings(software=True), {}) == "eager"
    assert environment.runner(Settings(software=True, mode="graph"), {}) == "graph"
    assert Settings(software=False).is_software({"LANTERN_HPU_SOFTWARE": "1"}) is False


# --- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"speed": 11}, "backend 'hpu' has no option 'speed'; it takes mode: how a step runs"),
        ({"mode": "graphs"}, "no mode 'graphs'; did you mean graph.; its modes are auto, compile"),
        ({"fused": "maybe"}, "got fused='maybe'; it is true or false"),
        ({"software": 2}, "got software=2; it is true or false"),
    ],
)
def test_a_wrong_option_is_told_before_anything_is_looked_for(options, says: str) -> None:
    with pytest.raises(BackendError, match=says):
        choose_device("hpu", options)


def test_a_wrong_variable_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANTERN_HPU_MODE", "fast")
    with pytest.raises(BackendError, match=r"^LANTERN_HPU_MODE is 'fast'.*unset it or choose"):
        choose_device("hpu")


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


def test_no_sdk(machine) -> None:
    machine(sdk=False)
    assert "habana_frameworks is not installed; install it by working in Intel's" in _refused()


def test_an_sdk_without_a_card(machine) -> None:
    machine(cards=0)
    assert "installed but the driver shows no Gaudi; check that hl-smi lists one" in _refused()


def test_an_sdk_for_another_torch(machine) -> None:
    machine(needs="2.11.0", torch="2.13.0+cpu")
    says = "was built for torch 2.11.0, and torch 2.13.0+cpu is installed; install both from one"
    assert says in _refused()
    machine(needs="2.13.1", torch="2.13.0+cpu")  # the bridge compares major and minor
    assert choose_device("hpu").index == 0


def test_lazy_mode_where_it_is_gone(machine) -> None:
    machine(torch="2.11.0+cpu")
    says = "lazy mode needs Habana's own build of torch, and torch 2.11.0+cpu is not one; unset"
    assert says in _refused(mode="graph")
    machine(needs="2.5.1", torch="2.5.1a0+git6fc067b")
    assert choose_device("hpu", {"mode": "graph"}).index == 0


def test_a_mode_against_the_users_variable(machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(torch="2.11.0+git123")
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "1")
    says = "PT_HPU_LAZY_MODE=1 selects lazy mode, and the mode 'compile' needs eager mode; unset"
    assert says in _refused(mode="compile")


def test_a_mode_against_what_the_process_has_loaded(machine, loaded) -> None:
    machine(torch="2.11.0+git123")
    loaded(lazy=False)
    says = "loaded habana_frameworks in eager mode before lantern_accel, and the mode 'graph' needs"
    assert says in _refused(mode="graph")
    # What was loaded still works: the mode is then the one that goes with it.
    assert choose_device("hpu").index == 0
    assert environment.runner(Settings(), {"PT_HPU_LAZY_MODE": "1"}) == "compile"
    loaded(lazy=True)
    assert environment.runner(Settings(), {}) == "graph"


# --- what is read -------------------------------------------------------------------------------


def test_torchs_version_is_read_without_importing_it() -> None:
    import torch

    assert environment.installed_torch() == torch.__version__
    assert environment.release("2.5.1a0+git6fc067b") == ("2", "5")


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


CALLS = (
    "main(['generate', 'x', '--device', 'hpu', '-o', 'never.png']) == 4",
    "main(['bench', '--device', 'hpu']) == 4",
    "main(['tune', '--device', 'hpu']) == 4",
    "main(['conform', 'hpu']) == 4",
    "main(['devices', 'hpu']) == 4",
    "refused()",
)


def test_the_refusal_comes_before_torch_is_imported(tmp_path: Path) -> None:
    """Importing torch is what would take longer than the second that a refusal may take."""
    if Spec().probe().available:
        pytest.skip("the device is there")
    code = (
        "import sys\n"
        "import lantern_accel\n"
        "from lantern_accel.cli import main\n"
        "def refused():\n"
        "    try:\n"
        "        lantern_accel.load(device='hpu', options={'mode': 'graph'})\n"
        "    except lantern_accel.BackendError as error:\n"
        "        return 'not available' in str(error)\n"
    )
    for call in CALLS:
        code += f"assert {call}\nassert 'torch' not in sys.modules, {call!r}\n"
    environ = {k: v for k, v in os.environ.items() if k not in VARIABLES}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=environ, cwd=tmp_path)


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
    for name in ("HABANA_VISIBLE_MODULES", "HLS_MODULE_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("lantern_accel_hpu.faults.holders", lambda module: [])
    chosen = choose_device("hpu", {"software": True})
    for modules, count in (("1", 1), ("3", 3)):
        monkeypatch.setenv("LANTERN_HPU_SOFTWARE_MODULES", modules)
        assert len(chosen.processes(5)) == count
