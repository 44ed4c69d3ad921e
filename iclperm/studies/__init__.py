"""The kinds of study, one file each: its statistics and its section of the report."""
