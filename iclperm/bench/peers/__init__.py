"""The contenders of the benchmark, each a script that serves one scorer; peers import nothing of iclperm."""
