"""Decides what to compute: scheduler, blocks and engine. It is plain Python without tensors."""
