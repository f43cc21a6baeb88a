"""Tar shards, as the `webdataset` package writes and groups them: their index, and the reader."""
