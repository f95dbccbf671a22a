"""Profiling runs, comparison reports and projections.

``protocol`` measures a run, ``record`` is what it writes, ``reading`` takes files back, ``comparison``
puts runs side by side, ``projection`` says what a roofline expects, ``render`` prints all of it.
"""
