"""Networks: an observation in, action parameters and a value out, for actors and learner."""

from __future__ import annotations

from tianflow.networks.base import Network, Output, make_network
from tianflow.networks.builtin import ImpalaResnet, Mlp, NatureCnn

__all__ = ["ImpalaResnet", "Mlp", "NatureCnn", "Network", "Output", "make_network"]
