"""The messages between the processes of the server.

All processes import this package. It defines the messages between the front process and the engine
process, the jobs of the worker processes, and the sockets that transport both.
"""
