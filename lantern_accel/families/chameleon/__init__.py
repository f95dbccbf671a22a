"""The chameleon family."""
