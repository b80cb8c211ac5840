"""Connections: how bytes become HTTP requests and WebSocket messages, and replies become bytes.

It runs in the event loop of the front. It accepts connections, limits their number, time and
memory, and reads bodies. Only the server on the port for health checks runs in threads.
"""
