"""Datasets and loaders: the only room that imports torch."""
