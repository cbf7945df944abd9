"""Channels: how things move between components. Four shapes, because the needs differ.

1. Trajectories wait: bounded, ordered by ticket, pulled by the learner (`tianflow.exchange`).
2. Latest is overwritten: newest value only (`latest`, and weights in `memory` and `shm`).
3. Events are dropped and counted (`broadcast`).
4. Grants are leased: a grant comes back when its holder dies (`tianflow.exchange`).

Every shape has a form in memory (`memory`, one loop) and one in shared memory (`shm`, one machine),
behind the same ends. Between processes, `link` carries the classes of `messages`.
"""
