"""Grids: models x tasks x kinds x seeds, each cell an ordinary run in a folder of its own."""
