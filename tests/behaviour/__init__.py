"""What users see, recorded: `record_behaviour.py` writes it down and compares, `test_behaviour.py` keeps it so.

Only the command line, the public names and the files of a run folder are looked at, so that modules may move.
"""
