"""The exchange: the broker between actors, replay shards and the learner. Grants go out,
trajectories and draws come in.
"""
