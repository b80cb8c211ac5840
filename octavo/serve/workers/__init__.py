"""The worker processes: they handle input that is large, slow or not trusted.

The front starts a few of them (`octavo.serve.front.worker_pool`) and kills one that exceeds its
limits. The event loop of the front runs the same handlers itself when the input is small.
"""
