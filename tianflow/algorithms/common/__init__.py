"""Machinery that algorithms share."""
