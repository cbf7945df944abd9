"""The HTTP servers: `run` beside one run, `service` over many, `common` for both."""
