"""The commands that measure, by their entry points in ``lantern_accel.commands``."""
