"""The state of the front process that all connections share.

It contains the client of the engine, the supervisor that restarts the engine, the pool of worker
processes, the limit of the queue, API keys, quarantine and metrics. All of it runs in the event
loop of the front process.
"""
