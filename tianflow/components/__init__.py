"""Components: one coroutine each. Cancelling its task stops it; ``__init__`` gets open
resources.
"""
