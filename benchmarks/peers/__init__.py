"""Peers: the same tasks in other libraries, each in an environment of its own, at the settings that
its project publishes.
"""
