"""Ranks of a process group that step together: votes, and batches that one sends to others, over gloo.

Nothing here knows what a lease is.
"""
