"""What others do with the same task, each in a process of its own, at settings its own project
publishes.
"""
