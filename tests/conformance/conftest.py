"""The software HPU, for scripts in processes of their own."""

from __future__ import annotations

from support.processes import on_software_hpu

__all__ = ["on_software_hpu"]
