"""Batches: how samples become one, where it lies in memory, and how it travels with its ticket.

Nothing here knows where samples come from.
"""
