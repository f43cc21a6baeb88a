"""Doors to other frameworks, each an optional extra. Nothing else in the package imports them."""
