"""Decides what to compute: scheduler, blocks, engine. Plain Python, no torch: it never sees a tensor."""
