"""Evaluates a model: likelihood, ambiguity, interchangeable codes, and what relaxation costs."""
