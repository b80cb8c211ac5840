"""The worker processes handle input that is large, slow to process or not trusted.

The front process starts a few of them (`octavo.serve.front.worker_pool`) and kills one that
exceeds its limits. When the input is small, the event loop of the front process runs the same
handlers itself.
"""
