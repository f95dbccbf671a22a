"""Run the vendor's own Python wrappers of fused kernels.

    python -m lantern_accel_hpu.software.wrappers CLONE

``CLONE`` is a clone of HabanaAI/gaudi-pytorch-bridge. The files of FusedSDPA, FusedRMSNorm and the rotary
positions are loaded from it as they are; the kernels that they call (``torch.ops.hpu``) are stood in for
by torch's operators on the CPU. What is shown: that the backend calls the wrappers as they want to be
called, that their numbers are those of the plain operators, and that a step stays one graph of Dynamo.
What a Gaudi's kernels compute is not shown.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import typer
from torch import Tensor
from torch.nn import functional as F

from lantern_accel.cli import run_single
from lantern_accel.cli.console import say
from lantern_accel.errors import LanternError, RequestError

PACKAGE = "python_packages/habana_frameworks/torch"
FILES = {
    "FusedSDPA": "hpex/kernels/FusedSDPA.py",
    "RotaryPosEmbeddingHelper": "hpex/kernels/RotaryPosEmbeddingHelper.py",
    "FusedRMSNorm": "hpex/normalization/FusedRMSNorm.py",
}
#: The checks of the backend that need nothing but its kernels.
CHECKS = ("kernels.attention", "kernels.norm", "kernels.rotary", "kernels.traced")
#: Signatures of the operators that the wrappers call, and what stands in for them.
SCHEMAS = {
    "sdpa_recomp_fwd": "(Tensor q, Tensor k, Tensor v, Tensor? mask, float dropout, float scale, "
    "bool causal, bool backward, str softmax, Tensor? valid, str side) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    "rms_norm": "(Tensor x, Tensor gamma, float eps) -> (Tensor, Tensor)",
    "rotary_pos_embedding": "(Tensor p, Tensor sin, Tensor cos, Tensor? ids, int offset, int mode) "
    "-> Tensor",
}


def _sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    dropout: float,
    scale: float,
    causal: bool,
    *rest: Any,
) -> tuple[Tensor, ...]:
    out = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal, scale=scale)
    return out, q.new_empty(0), q.new_empty(0), q.new_empty(0)


def _rms_norm(x: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return (x.float() * scale * gamma.float()).to(x.dtype), scale


def _rotary(
    p: Tensor, sin: Tensor, cos: Tensor, ids: Tensor | None, offset: int, mode: int
) -> Tensor:
    if mode != 1 or ids is not None or offset:
        raise RuntimeError("adjacent pairs are turned by PAIRWISE, without positions")
    turned = torch.stack((-p[..., 1::2], p[..., ::2]), dim=-1).flatten(-2)
    return p * cos + turned * sin


STANDS_IN = {"sdpa_recomp_fwd": _sdpa, "rms_norm": _rms_norm, "rotary_pos_embedding": _rotary}


def define() -> torch.library.Library:
    """Register what stands in for the kernels; they are there as long as what is returned."""
    made = torch.library.Library("hpu", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name, schema in SCHEMAS.items():
        made.define(name + schema)  # type: ignore[no-untyped-call]
        made.impl(name, STANDS_IN[name], "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    return made


def wrappers(clone: Path) -> dict[str, ModuleType]:
    """Load the vendor's files; raises RequestError where the clone does not have them."""
    folder = next((f for f in (clone / PACKAGE, clone) if (f / FILES["FusedSDPA"]).is_file()), None)
    if folder is None:
        raise RequestError(
            f"{clone} has no {PACKAGE}/{FILES['FusedSDPA']}; give a clone of "
            "HabanaAI/gaudi-pytorch-bridge with its files checked out"
        )
    hpu = ModuleType("habana_frameworks.torch.hpu")
    # Its real module asks the bridge's C++; Dynamo does not trace it.
    vars(hpu)["recompute_sdp_enabled"] = torch.compiler.disable(lambda: True)  # type: ignore[no-untyped-call]
    parents = [ModuleType("habana_frameworks"), ModuleType("habana_frameworks.torch"), hpu]
    vars(parents[0])["torch"], vars(parents[1])["hpu"] = parents[1], hpu
    sys.modules.update({one.__name__: one for one in parents})
    found = {}
    for name, path in FILES.items():
        spec = importlib.util.spec_from_file_location(f"gaudi_bridge_{name}", folder / path)
        if spec is None or spec.loader is None or not (folder / path).is_file():
            raise RequestError(f"{folder} has no {path}")
        found[name] = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found[name])
    return found


def gaudi_wrappers(
    clone: Path = typer.Argument(..., help="A clone of HabanaAI/gaudi-pytorch-bridge."),
) -> None:
    """Run the vendor's wrappers of fused kernels through the backend's own calls."""
    from lantern_accel.testing import run_check
    from lantern_accel_hpu.backend import DeviceBackend
    from lantern_accel_hpu.bridge import Kernels

    files = wrappers(clone)
    registered = define()
    rotary = files["RotaryPosEmbeddingHelper"]
    backend = DeviceBackend.for_tracing()
    backend.device = torch.device("cpu")
    backend.kernels = Kernels(
        files["FusedSDPA"].FusedSDPA,
        files["FusedRMSNorm"].FusedRMSNorm,
        rotary.apply_rotary_pos_emb,
        rotary.RotaryPosEmbeddingMode.PAIRWISE,
    )
    checks = backend.conformance().checks
    failed = []
    for name in CHECKS:
        outcome = run_check(backend, name, checks[name])
        say(f"{name}: {outcome.detail}", label=outcome.state)
        if outcome.state != "passed":
            failed.append(name)
    del registered
    if failed:
        raise LanternError(f"the vendor's wrappers are not served: {', '.join(failed)}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; 0, or 2 with one sentence."""
    return run_single(gaudi_wrappers, argv)


if __name__ == "__main__":
    sys.exit(main())
