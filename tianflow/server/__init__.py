"""The HTTP servers: `run` for one run, `service` for many, `common` for both."""
