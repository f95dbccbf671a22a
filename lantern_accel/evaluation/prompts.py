"""The forty prompts that the bundled model is judged by, fixed before any picture of them was seen."""

from __future__ import annotations

SEEN = (
    "red heart", "grinning face", "dog face", "cat face", "pizza", "sunflower", "rocket",
    "red apple", "fish", "star", "house", "evergreen tree", "automobile", "panda", "strawberry",
    "birthday cake", "ghost", "smiling face with sunglasses", "blue heart", "frog",
)  # fmt: skip
"""Concepts that training shows often."""

HELD_OUT_CONCEPTS = (
    "green book", "tropical fish", "mouse face", "black bird", "kissing face with smiling eyes",
    "bus", "broccoli", "volcano", "balloon", "hedgehog",
)  # fmt: skip
"""Concepts that no training image shows (``tools/lantern-emoji: catalogue.split_of``)."""

HELD_OUT_COMPOSITIONS = (
    "rabbit face on yellow", "fish on yellow", "green apple on blue", "blue cat face",
    "purple house", "orange fish", "cat face left of house", "red apple left of evergreen tree",
    "star above umbrella", "red heart above ghost",
)  # fmt: skip
"""Pairings that no training scene shows (``tools/lantern-emoji: scenes.scene_split``)."""

FORTY = (*SEEN, *HELD_OUT_CONCEPTS, *HELD_OUT_COMPOSITIONS)
