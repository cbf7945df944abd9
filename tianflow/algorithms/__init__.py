"""Algorithms: for each a policy that acts and a learner that turns batches into updates. One file
each; what they share beside them.
"""
