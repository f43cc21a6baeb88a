"""Arrow tables as numpy columns and as rows, for every columnar reader."""
