"""Datasets and loaders: the only package that imports torch."""
