"""Benchmark suites: one module with a function ``make(plan)`` for each benchmark."""
