"""Measurements: each file measures one thing and returns numbers. `octavo bench` prints them."""
