"""Programs that measure Telamon against what people use today: one file for each claim.

`make bench ID=P1` runs one. It prints one table and, as its last line, JSON; the same goes into `benchmarks/results/`, in one
template. Machines are shared and noisy, so both sides take turns within one run and ratios come from medians over rounds.
"""
