"""A run on one self-contained page of HTML: no network, no other files."""
