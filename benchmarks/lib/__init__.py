"""Library of the benchmarks: harness, machine, results, child processes, run matrices, and
environments that take a set time.
"""
