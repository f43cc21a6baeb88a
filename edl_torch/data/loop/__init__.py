"""Passes of an `ElasticDataLoader`: what a loop gets, when, and who hears of it.

Alone, padded, in lock-step or as part of a model; the inner `DataLoader`; notices that the job is to end.
Nothing here reads a record or speaks to the master: the session does that.
"""
