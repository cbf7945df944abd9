"""The HTTP server beside a run: state, control and metrics."""
