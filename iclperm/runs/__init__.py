"""One run of a study: what it will compute, the loop that computes it, its folder, and what is read back."""
