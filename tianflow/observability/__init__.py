"""What can be seen of a run: rates, diagnosis, the run document, Prometheus metrics, sinks."""
