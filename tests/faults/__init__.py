"""The fault machine: it kills, refuses, damages and lies, and checks after each time that what was promised was kept.

The promise, after every fault: the digest is that of an undisturbed run, after at most the same command again, or there
is one line with a remedy and a documented exit code; nothing outside the folder changed; no request is uncounted; the
key is nowhere. ``python benchmarks/faults.py`` runs it, `tests/test_faults.py` a small fixed part.
"""
