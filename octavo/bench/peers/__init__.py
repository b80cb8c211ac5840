"""Other engines, for `octavo bench compare`. Each runs in a process and an environment of its own.

    prepare_models.py  converts the embedded model into the formats of the peers
    peer_worker.py     runs one engine, and generates the tokens that are requested

Both are programs that run with the Python of the peers' environment (`make peers`), where Octavo is
not installed. They import nothing of Octavo but, for the engine `octavo`, its public API.
"""
