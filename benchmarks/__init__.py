"""Benchmarks: ratios measured side by side in one run, as JSON and as a table.

``python -m benchmarks NAME`` runs one of `suites`, and `make bench` runs most of them. `workers`
are the child processes that suites start. `studies` are long matrices of runs. `peers` are scripts
of other projects. `lib` holds the harness.
"""
