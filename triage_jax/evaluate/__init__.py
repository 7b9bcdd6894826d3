"""Benchmarks: sampling with either engine, verdicts, intervals, and the comparison of two runs (docs/evaluate.md)."""
