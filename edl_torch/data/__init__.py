"""Datasets and loaders, over torch."""
