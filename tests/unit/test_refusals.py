"""What is refused before any work: one table of inputs, each with its error, its field and a fragment.

A fragment is what a user acts on, never the whole sentence.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lantern_accel.cli import main
from lantern_accel.errors import LanternError, RequestError, StrategyError
from lantern_accel.generation.request import build_request
from lantern_accel.models.bundle import bundled_models, read_manifest

LONG = "9" * 5000

#: Keywords of ``generate``, the error, the field that it carries, and a fragment of its message.
CALLS: list[tuple[dict[str, Any], type[LanternError], str | None, str]] = [
    ({"prompt": "  "}, RequestError, "prompt", "empty"),
    ({"prompt": []}, RequestError, "prompt", "at least one"),
    ({"prompt": None}, RequestError, "prompt", "give text"),
    ({"prompt": ["red heart", 1.5]}, RequestError, "prompt", "1.5 is not a prompt"),
    ({"prompt": True}, RequestError, "prompt", "not a prompt"),
    ({"prompt": b"red heart"}, RequestError, "prompt", "not a prompt"),
    ({"prompt": ["pizza", "\udcff"]}, RequestError, "prompt", "half a surrogate pair"),
    ({"prompt": 10**19}, RequestError, "prompt", "not a class id"),
    ({"prompt": "x" * 9000}, RequestError, "prompt", "9,000 characters"),
    ({"nonsense": 1}, RequestError, None, "takes no 'nonsense'"),
    ({"seed": -1}, RequestError, "seed", "0 or more"),
    ({"sede": 3}, RequestError, None, "did you mean seed"),
    ({"seed": [True, 2], "num_images": 2}, RequestError, "seed", "True is not a number"),
    ({"num_images": True}, RequestError, "num_images", "True is not a number"),
    ({"seed": {1, 2}}, RequestError, "seed", "a set has no order"),
    ({"seed": (1, 2), "num_images": 3}, RequestError, "seed", "2 seeds for 3 images"),
    ({"num_images": 0}, RequestError, "num_images", "1 or more"),
    ({"batch_size": 10**25}, RequestError, "batch_size", "1024 or less"),
    ({"size": "huge"}, RequestError, None, "WIDTHxHEIGHT"),
    ({"size": "²x²"}, RequestError, None, "not possible"),
    ({"size": "0x5"}, RequestError, None, "not possible"),
    ({"size": (0, 8)}, RequestError, "size", "1 or more"),
    ({"seed": "7_0"}, RequestError, "seed", "seed: '7_0' is not a number; give an integer"),
    ({"seed": 1.5}, RequestError, "seed", "takes an integer, not 1.5"),
    ({"seed": (1, -2), "num_images": 2}, RequestError, "seed", "0 or more"),
    ({"temperature": "hot"}, RequestError, "temperature", "takes a number"),
    ({"relaxed": "perhaps"}, RequestError, "relaxed", "takes true or false"),
    ({"preset": "none"}, RequestError, None, "unknown preset"),
    ({"preset": 3}, RequestError, "preset", "preset cannot be 3"),
    ({"strategy": 3}, RequestError, "strategy", "strategy cannot be 3"),
    ({"strategy": ""}, StrategyError, "strategy", "unknown strategy"),
    ({"strategy": "vanilla", "drafts": "chain:4"}, StrategyError, None, "cannot have the drafts"),
    ({"strategy": "eagle", "drafts": "none"}, StrategyError, None, "use 'vanilla' for none"),
    ({"strategy": "lantrn"}, StrategyError, "strategy", "did you mean lantern"),
    ({"strategy": "lantern++", "relaxed": False}, StrategyError, "strategy", "is relaxed"),
    ({"strategy": "lantern", "delta": 0}, StrategyError, "delta", "delta"),
    ({"strategy": "lantern++", "lam": 0.5}, StrategyError, "lam", "lambda"),
    ({"lam": 2.0}, StrategyError, "lam", "name a strategy that does"),
    ({"k": 3}, StrategyError, "k", "'lantern++'"),
    ({"delta": 0.1}, StrategyError, "delta", "'lantern'"),
    ({"window": 8}, StrategyError, "window", "'scd'"),
    ({"residual": "optimal"}, StrategyError, "residual", "'lantern++'"),
    ({"drafts": "0,1"}, StrategyError, "drafts", "such as 'eagle'"),
    ({"coupling": "maximal"}, StrategyError, "coupling", "such as 'sjd'"),
    ({"relaxed": False, "tv_budget": 0.1}, StrategyError, "tv_budget", "leave tv_budget out"),
    ({"strategy": "eagle", "lam": 2.0}, StrategyError, "lam", "has no lambda"),
    ({"strategy": "eagle", "residual": "best"}, RequestError, "residual", "aggregate"),
    ({"strategy": "eagle", "drafts": "1,2"}, StrategyError, "drafts", "no sibling of rank 0"),
    ({"strategy": "eagle", "drafts": ""}, StrategyError, "drafts", "unknown tree ''"),
    ({"strategy": "eagle", "drafts": "chain:²"}, StrategyError, "drafts", "it has length=..."),
    ({"strategy": "eagle", "drafts": LONG}, StrategyError, "drafts", "64 are the most"),
    ({"strategy": "lantern", "accept": "lantern:delta=0"}, StrategyError, "accept", "delta"),
    ({"accept": "lantern++:lambda=2"}, StrategyError, "accept", "name a strategy that does"),
    ({"temperature": -1.0}, RequestError, "temperature", "0 or more"),
    ({"temperature": 1e39}, RequestError, "temperature", "100 or less"),
    ({"top_p": 0.0}, RequestError, "top_p", "above 0"),
    ({"cfg_scale": 99999.0}, RequestError, "cfg_scale", "1000 or less"),
]

#: Words of the command and a fragment of what standard error says; each ends with exit code 2.
COMMANDS: list[tuple[list[str], str]] = [
    (["generate", "x", "--strategy", "eagle,scd"], "name one of them"),
    (["generate", "x", "--strategy", ""], "no strategy is named"),
    (["generate", "x", "--strategy", "plain"], "did you mean vanilla?"),
    (["generate", "x", "--strategy", "auto:tv_budget=2"], "NAME:tv_budget must be below 1, not 2"),
    (["generate", "x", "--strategy", "lantern++:k=x"], "takes an integer, not 'x'"),
    (["generate", "x", "--strategy", "scd:drafts=window:4,passes=x"], "passes takes an integer"),
    (["generate", "x", "--tv-budget", "0.1"], "--strategy NAME:tv_budget=VALUE"),
    (["generate", "x", "--frobnicate"], "option: --frobnicate; `lantern-accel generate --help`"),
    (["generate", "x", "--top-p", "0"], "--top-p must be above 0, not 0"),
    (["generate", "x", "--batch", "9" * 25], "--batch must be 1024 or less"),
    (["generate", "x", "--size", f"{LONG}x{LONG}"], "not possible"),
    (["generate", "x", "-s", f"eagle:drafts=chain:{LONG}"], "has no field"),
    (["generate", "x", "-d", "cpu", "--option", "threads=²"], "got threads='²'; give a number"),
    (["generate", "x", "-d", "cpu", "--option", f"threads={LONG}"], "give a number"),
    (["generate", "x", "--temperature", "2000000"], "not 2000000"),
    (["generate", "x", "-o", "p.png", "--stats", "p.png"], "--stats and --output both name"),
    (["generate", "x", "-n", "2", "-o", "p.png", "--stats", "p-1.png"], "both name"),
    (["generate", "x", "-n", "2", "-o", "nul.png"], "on Windows"),
    (["generate", "x", "--stats", "12:30.json"], "on Windows"),
    (["bench", "--batch", "1025"], "1024"),
    (["profile", "-o", "r.json", "--strategy", ""], "no strategy is named"),
    (["stepcost", "--cfg-scale", "inf"], "--cfg-scale"),
    (["stepcost", "--nodes", f"8,{LONG}"], "--nodes takes numbers from 2 to 1024"),
    (["stepcost", "--size", "llamagen-xs-256"], "no size is named 'llamagen-xs-256'"),
    (["stepcost", "--strategy", "eagel"], "did you mean eagle"),
    (["stepcost", "--option", "speed=11", "-d", "cpu"], "backend 'cpu' has no option 'speed'"),
    (["models", "plan", "lantern-emoji", "--memory", ""], "'' is not a size"),
    (["models", "plan", "lantern-emoji", "--device", ""], "--device is empty"),
    (["generate", "x", "--strategy", "lantern++:kk=3"], "a strategy has no 'kk'"),
    (["generate", "x", "--strategy", "lantern++:k"], "write NAME:SETTING=VALUE"),
    (["generate", "x", "--strategy", "lantern++:k=-1"], "k must be 1 or more, not -1"),
    (["generate", "x", "--seed", "1e99"], "takes an integer"),
    (["generate", "x", "--use", "vqq=a.pt"], "did you mean vq"),
    (["generate", "x", "--use", "vq"], "NAME=PATH"),
    (["generate", "x", "-o", "x.h5"], "no image format"),
    (["generate", "x", "-o", "x"], "name it .png"),
    (["compare", "mine=none.json"], "none.json"),
    (["generate", "x", "--prompts", "/dev/zero"], "not a file of prompts"),
    (["generate", "--share", "1/2", "-o", "x"], "--prompts FILE -o FOLDER"),
    (["generate", "x", "--option", "threads"], "NAME=VALUE"),
    (["generate", "x", "--dtype", "float8"], "float8"),
    (["generate", "x", "--dtype", ""], "no dtype is named ''"),
    (["generate", "x", "--dtype", "half"], "did you mean float16"),
    (["generate", "x", "--device", ""], "device '' is not a device"),
    (["generate", "x", "--stats", ""], "is a folder; name a file in it"),
    (["generate", "x", "--device", "cpx"], "cpx"),
    (["generate", "x", "--model", "lantern-emojy"], "did you mean lantern-emoji"),
    (["generate", "x", "--model", ""], "name is empty"),
    (["generate", ""], "the prompt is empty"),
    (["generate", "--prompts", "gone.txt", "-o", "x"], "not a file of prompts; check"),
    (["serve", "--api-keys", "gone.txt"], "(No such file or directory); name a file"),
    (["serve", "--host", "none.invalid"], "not an address of this machine; name one"),
    (["bench", "--batch", ""], "--batch takes numbers from 1"),
    (["stepcost", "--batch", "1.5"], "takes integers, such as 1,4"),
    (["conform", "cpu", "--only", "rotary"], "known: accept, attention"),
    (["serve", "--port", "0", "--cors", "example.org"], "such as https://example.org"),
    (["serve", "--port", "0", "--root-path", "a b"], "--root-path takes a path"),
    (["conform"], "name the backend"),
    (["conform", "cpu", "--resume"], "name it with -o"),
    (["train", "head", "--model", "lantern-emoji", "--config", "none.toml"], "none.toml"),
    (["train", "head", "--model", "lantern-emoji", "--work", "/dev/null"], "cannot be written"),
    (["models", "plan", "lantern-emoji", "--memory", "1.2.3"], "is not a size"),
    (["hardware", ""], "no device profile is named"),
    (["devices", ""], "is not a device"),
]


def titles(table: list[Any]) -> list[str]:
    return [str(row[0])[:60] for row in table]


@pytest.mark.parametrize(("given", "kind", "field", "says"), CALLS, ids=titles(CALLS))
def test_a_call_is_refused_with_its_field(
    given: dict[str, Any], kind: type[LanternError], field: str | None, says: str
) -> None:
    manifest = read_manifest(bundled_models()["lantern-emoji"])
    settings = {"prompt": "red heart", **given}
    with pytest.raises(LanternError) as caught:
        build_request(manifest, settings.pop("prompt"), settings)
    assert type(caught.value) is kind and caught.value.exit_code == 2
    assert caught.value.field == field
    assert says in str(caught.value) and len(str(caught.value)) < 900
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("words", "says"), COMMANDS, ids=titles(COMMANDS))
def test_a_command_is_refused_before_any_work(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    out, told = capsys.readouterr()
    assert not out and says in told and "Traceback" not in told and len(told) < 900
    assert not list(tmp_path.iterdir())
