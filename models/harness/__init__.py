"""Benchmarks through lm-eval: what answers a task's questions, which tasks there are, what is reported of them."""
