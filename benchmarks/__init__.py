"""Benchmarks: ratios measured side by side in one run, as JSON and as a table. Run by ``make
bench``.

`harness` alternates the sides of a benchmark and keeps every sample, `results` writes them down,
`machine` says on what, `child` starts processes. One benchmark is one file with a function
``make(plan)``.
"""
