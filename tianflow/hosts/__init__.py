"""Inside a host process: its main loop, its compute thread, and the factory of its components."""
