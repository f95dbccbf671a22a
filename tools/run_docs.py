"""Run the commands of README and docs on this machine: python tools/run_docs.py [--page PAGE].

Every line of a code block that begins with a program is a command. It is run as it stands, or with
smaller settings (SMALLER), or left out with the reason (LEFT_OUT): what needs a card, a network, files of
the reader's own or hours. A page's commands share a folder, in the page's order, so that later ones find
what earlier ones wrote. The exit code is 1 where one fails.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from lantern_accel.files import cache_dir

ROOT = Path(__file__).resolve().parents[1]
#: What a command begins with; other lines of code blocks are drawings and output.
PROGRAMS = ("lantern-accel", "python", "pip", "git", "curl", "pytest", "docker", "aiperf", "vllm",
            "accelerate", "grep", "serve")  # fmt: skip
#: Commands that are not run here, and why; every pattern is searched for in the whole command.
LEFT_OUT = {
    r"^(git|pip) ": "fetches; the environment that runs this has what it brings",
    r"^python -m venv|^cd |^\. ": "makes an environment",
    r"^pytest|pytest -m": "the tests themselves",
    r"^(curl|aiperf|vllm|python -m sglang)|profiles\.load|load\.json": "needs a server that runs; "
    "tests/end_to_end/test_serve_process.py starts one",
    r"^serve run": "runs until it is stopped; tests/end_to_end/test_ray.py",
    r"^lantern-accel serve": "runs until it is stopped; tests/end_to_end/test_serve_process.py",
    r"SLURM_|JOB_COMPLETION": "needs a scheduler of jobs",
    r"^(docker|accelerate) |keep-torch|habana_frameworks": "needs a vendor's image or several devices",
    r"(--device|conform|devices) (cuda|hpu -o|hpu$)|on_device\.py|measure.*cuda": "needs a card",
    r"--device xla|conform xla": "needs torch_xla, in an environment of its own",
    r"abacus|tokens_sha256": "the scaffold's package; tests/unit/porting/test_scaffold.py installs it",
    r"--model (llamagen-t2i-stage1|llamagen-(b|l)-256|anole-7b|Lumina)"
    r"(?! --weights)": "fetches gigabytes",
    r"captions_val2017|PartiPrompts|pretrained_models|ckpts/|path/to/beach|CLONE|FOLDER": "needs the "
    "reader's files",
    r"^lantern-accel train|^python tools/lantern-emoji|--model (M |NEW$)": "trains for hours; "
    "tests/end_to_end/test_train.py trains tiny ones",
    r"gpu=a\.json": "needs runs of two devices; tests/unit/profiles/report",
    r"-o profiles/measured/|report_picture": "writes committed files; tests/unit/profiles/report, and "
    "tests/end_to_end/test_profile_page.py with a browser",
    r"profiles add run\.json|compare run\.json": "goes on with the run of a card",
    r"^lantern-accel tune": "takes minutes; tests/end_to_end/test_tune.py",
    r"custom_nodes": "needs ComfyUI; tests/end_to_end/test_comfyui.py",
    r"kills|mutants\.py": "takes an hour or the whole machine",
    r"race_llama|publish": "measures, for which the machine must be idle",
}  # fmt: skip
#: What is run with smaller settings: where, and what takes which place ("": it is added).
SMALLER = (
    (r"^lantern-accel bench", r"--repeats \d+", ""),
    (r"^lantern-accel bench", "", "--repeats 1"),
    (r"^lantern-accel bench", r"--batch \S+", "--batch 1"),
    (r"^lantern-accel bench(?!.*--strategy)", "", "--strategy auto,scd"),
    (r"^lantern-accel stepcost", r"--size (janus-pro-7b|glm-image)", "--size llamagen-b-256"),
    (r"^lantern-accel profile", "", "--samples 2 --quality-images 2 --strategy vanilla,scd"),
    (r"^lantern-accel evaluate", r"--quick", ""),
    (r"^lantern-accel evaluate(?!.*--grid)", "", "--quick --part distances"),
    (r"^lantern-accel evaluate.*--grid", "", "--prompt ghost --strategy vanilla"),
    (r"^lantern-accel conform", r"--only \S+", ""),
    (r"^lantern-accel conform", "", "--only kv.round_trip"),
    (r"tests/soak\.py", r"--images \d+", "--images 6"),
)  # fmt: skip
#: Seconds that one command may take.
LIMIT = 480


@dataclass(frozen=True)
class Command:
    """One command of a page: its line, what is run of it, and why it is left out ("": it is not)."""

    page: str
    text: str
    smaller: str
    left_out: str


def pages() -> list[Path]:
    """Return README and every written page of docs/ and dev/."""
    made = {"commands.md", "api.md", "values.md", "device.md", "testing.md"}
    found = sorted((ROOT / "docs").rglob("*.md"))
    site = [path for path in found if path.parent.name != "reference" or path.name not in made]
    return [ROOT / "README.md", *site, *sorted((ROOT / "dev").glob("*.md"))]


def commands(page: Path) -> Iterator[Command]:
    """Yield the commands of a page in their order."""
    fenced = re.findall(r"^ *```(\w*)[^\n]*\n(.*?)^ *```", page.read_text("utf-8"), re.S | re.M)
    for language, block in fenced:
        if language not in ("", "bash", "sh", "console"):
            continue
        for line in re.sub(r"\\\n", " ", block).splitlines():
            for part in line.strip().removeprefix("$ ").split(" && "):
                text = re.sub(r"\s+#.*$", "", part).strip()
                words = [word for word in text.split() if not re.fullmatch(r"[A-Z_]+=\S+", word)]
                if words and words[0] in PROGRAMS:
                    name = str(page.relative_to(ROOT))
                    yield Command(name, text, smaller(text), reason(text))


def reason(text: str) -> str:
    """Return why a command is left out; empty where it is run."""
    return next((why for pattern, why in LEFT_OUT.items() if re.search(pattern, text)), "")


def smaller(text: str) -> str:
    """Return what is run of a command."""
    plain = re.sub(r"^([A-Z_]+=\S+ )+", "", text)
    for where, what, put in SMALLER:
        if re.search(where, plain):
            text = re.sub(what, put, text) if what else f"{text} {put}"
    return text


def run(command: Command, folder: Path) -> tuple[bool, float, str]:
    """Run a command in ``folder``; return whether it worked, its seconds, and the end of its output."""
    words = shlex.split(command.smaller)
    environ = {**os.environ, "LANTERN_ACCEL_CACHE": str(folder.parent / "cache")}
    environ.setdefault("LANTERN_ACCEL_CPU_LIBRARIES", str(cache_dir() / "native"))  # compiled once
    while re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        name, _, value = words.pop(0).partition("=")
        environ[name] = value
    if words[0] == "lantern-accel":
        words = [sys.executable, "-m", "lantern_accel", *words[1:]]
    elif words[0] == "python":
        words[0] = sys.executable
    words = [word for one in words for word in _expand(one, folder)]
    if "generate" in words[:4]:  # another run of the page
        words.append("--resume" if "--prompts" in words else "--overwrite")
    began = time.perf_counter()
    try:
        done = subprocess.run(words, cwd=folder, env=environ, capture_output=True, text=True,
                              timeout=LIMIT, check=False)  # fmt: skip
    except subprocess.TimeoutExpired:
        return False, LIMIT, f"took longer than {LIMIT} s"
    told = (done.stdout + done.stderr)[-800:]
    return done.returncode == 0, time.perf_counter() - began, told


def _expand(word: str, folder: Path) -> list[str]:
    if "*" not in word:
        return [word]
    return sorted(str(path.relative_to(folder)) for path in folder.glob(word)) or [word]


def furnish(folder: Path) -> None:
    """Make a page's folder look like the clone that its reader stands in."""
    for name in ("profiles", "tools", "docs", "tests", "lantern_accel", "backends"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "prompts.jsonl").write_text('{"prompt": "ghost"}\n', encoding="utf-8")


def sample_commands(found: Sequence[Command], count: int, seed: int) -> list[Command]:
    """Return about ``count`` of the commands that are run, over all pages; others by seed.

    None goes on with what an earlier command of its page has written.
    """
    able, written = [], set[tuple[str, str]]()
    for one in found:
        words = shlex.split(one.text)
        made = {word for before, word in pairwise(words) if before == "-o"}
        goes_on = any((one.page, word) in written for word in words if word not in made)
        if not one.left_out and not goes_on:
            able.append(one)
        written |= {(one.page, word) for word in made}
    every = max(1, len(able) // max(count, 1))
    return able[seed % every :: every]


def main(argv: Sequence[str] | None = None) -> int:
    """Run what was asked for and say how each command ended."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page", action="append", help="only this page, such as docs/auto.md")
    parser.add_argument("--sample", type=int, help="only about so many commands")
    parser.add_argument("--seed", type=int, default=0, help="which of them")
    parser.add_argument("--list", action="store_true", help="only say what would be run")
    given = parser.parse_args(argv)
    found = [one for page in pages() for one in commands(page)]
    if given.page:
        found = [one for one in found if one.page in given.page]
    if given.sample:
        found = sample_commands(found, given.sample, given.seed)
    failed = 0
    with tempfile.TemporaryDirectory(prefix="run-docs-") as base:
        for command in found:
            label = f"{command.page}: {command.text[:90]}"
            if command.left_out or given.list:
                print(f"{'left out' if command.left_out else 'runs'}  {label}"
                      f"{'  (' + command.left_out + ')' if command.left_out else ''}")  # fmt: skip
                continue
            folder = Path(base, re.sub(r"\W", "-", command.page))
            if not folder.exists():
                folder.mkdir()
                furnish(folder)
            works, seconds, told = run(command, folder)
            failed += not works
            print(f"{'works' if works else 'FAILED'}  {seconds:5.1f} s  {label}", flush=True)
            if not works:
                print(f"  as {command.smaller}\n{told}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
