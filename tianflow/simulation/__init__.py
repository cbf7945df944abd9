"""Simulations: the ledger, exchange and controllers of a run in virtual time, with any number of
actors and measured durations.

`tianflow.simulation.simulation.Simulation` is one simulation; `tianflow.cli.simulate` is the
command.
"""
