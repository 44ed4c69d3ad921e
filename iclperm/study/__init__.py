"""What to run: the keys of a study, the kinds there are, and the strict YAML that they are read from."""
