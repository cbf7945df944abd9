"""Algorithms: one file each, with a policy for actors and a learner. Shared code is in `common`."""
