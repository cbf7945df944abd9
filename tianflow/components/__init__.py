"""Components: one coroutine each. Cancelling its task stops it; everything comes through
``__init__``, already open.
"""
