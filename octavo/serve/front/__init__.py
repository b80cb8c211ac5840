"""The state of the front process that all connections share.

It runs in the event loop of the front: the client of the engine, the supervisor that restarts the
engine, the pool of worker processes, the queue's bound, API keys, quarantine and metrics.
"""
