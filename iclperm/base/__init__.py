"""What every layer may use: files written whole, large arrays, processes that can be killed, threads and heap."""
