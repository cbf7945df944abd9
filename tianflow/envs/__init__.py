"""Gymnasium seen from the system: spaces as named arrays, vector environments that all reset alike, slots and their layout."""
