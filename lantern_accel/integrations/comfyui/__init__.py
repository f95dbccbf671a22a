"""Nodes for ComfyUI, which finds them by entry point or by a link to this folder in ``custom_nodes``."""

from lantern_accel.integrations.comfyui.nodes import (
    NODE_CLASS_MAPPINGS,
    NODE_DISPLAY_NAME_MAPPINGS,
)

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
