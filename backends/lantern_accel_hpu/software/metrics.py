"""Stands in for ``habana_frameworks.torch.hpu.metrics`` on the software HPU."""

from __future__ import annotations


class Metric:
    """A counter with the bridge's form: ``stats()`` lists names and values."""

    def __init__(self) -> None:
        self._total = 0

    def stats(self) -> list[tuple[str, int]]:
        """Return the count since the process began."""
        return [("TotalNumber", self._total)]

    def add(self) -> None:
        """Own addition: count one."""
        self._total += 1


#: Graphs that the stand-in for ``hpu_backend`` compiled, and captures of HPUGraph.
graph_compilation = Metric()


class Recipes(Metric):
    """Recipes of single operators that were compiled, and those that were there: misses and hits."""

    def stats(self) -> list[tuple[str, int]]:
        """Return the counts since the process began."""
        import torch

        misses, hits = torch.ops.lantern_software_hpu.recipes()
        return [("TotalMiss", int(misses)), ("TotalHit", int(hits))]


recipe_cache = Recipes()


def metric_global(name: str) -> Metric | None:
    """Return a counter; None for those that say nothing here.

    ``cpu_fallback`` is one: every operator of the software HPU runs on the CPU, by design.
    """
    counters = {"graph_compilation": graph_compilation, "recipe_cache": recipe_cache}
    return counters.get(name)
