"""Channels: how things move between components. Four shapes, because the needs differ.

1. Trajectories wait (`exchange`): bounded, ordered by ticket, pulled by the learner.
2. Latest is overwritten (`latest`, weights in `memory` and `shm`): newest value only.
3. Events are dropped and counted (`broadcast`).
4. Grants are leased (`exchange`): a grant comes back when its holder dies.

Every shape has an in-memory form (`memory`, one loop) and a shared-memory form (`shm`, one machine)
behind the same ends.
"""
