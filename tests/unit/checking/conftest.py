"""Marks the folder, so that `checked_readers` can be imported, here and in worker processes."""
