"""Model families: everything about a kind of model that decoding does not need to know."""
