"""The HTTP server of one run: state, control and metrics."""
