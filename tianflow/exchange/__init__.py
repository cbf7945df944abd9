"""The broker between actors, replay shards and the learner: grants out, trajectories and
draws in.
"""
