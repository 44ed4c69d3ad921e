"""Slow, obvious oracles. Nothing here imports the fast path, so that agreement with it means something."""
