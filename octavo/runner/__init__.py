"""Executes plans: batch slots and KV on the device, batch preparation, forward pass, sampling.

A runner has no queues and no policy.
"""
