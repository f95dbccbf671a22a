"""What a model is worth: likelihood, ambiguity, interchangeable codes, and what relaxation costs."""
