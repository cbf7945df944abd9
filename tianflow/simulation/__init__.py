"""A run in virtual time: the real ledger, controllers and balancer against any number of actors,
from measured rates.

`tianflow.simulation.simulation.Simulation` is one; `tianflow.cli.simulate` is the command.
"""
