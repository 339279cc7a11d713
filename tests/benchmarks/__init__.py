"""Speed, as ratios within one run on a quiet machine. `make bench` runs all and writes JSON and a table."""
