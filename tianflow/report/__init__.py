"""A run on one page of HTML that needs nothing else: no network, no script."""
