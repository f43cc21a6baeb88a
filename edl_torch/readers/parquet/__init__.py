"""Parquet files, here or behind an fsspec URL."""
