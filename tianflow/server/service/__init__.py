"""``tianflow serve``: a service over many runs, each in a process of its own.

    submission -> RunStore (SQLite) -> RunManager (queue) -> RunProcess (``tianflow train``)

Each run serves its own API on its own port, and the service forwards requests to it. The store
holds what a restarted service needs to continue.
"""
