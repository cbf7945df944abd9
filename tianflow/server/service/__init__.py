"""``tianflow serve``: a service that holds many runs, each in a process of its own.

    submission -> Store (SQLite) -> House (queue) -> Child (``tianflow train``) <- requests, routed

A run's coordinator is a child of the service and answers for itself on a port of its own; the
service asks it on behalf of whoever asks the service. What the service has to remember lies in its
store, so that it goes on where it was after it was killed.
"""
