"""Starting a port: a backend package of its own, made from the one in ``template/``."""
