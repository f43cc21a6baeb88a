"""Records of leased slices: read, seeded, transformed and counted, here, in threads or in a loader worker.

Nothing here knows when a record has been trained on.
"""
