"""Child processes of benchmarks: modules that a suite starts with ``python -m``.

The last line of a worker's output is its answer, as JSON. A worker that several suites start has a
function ``measure`` that starts it.
"""
