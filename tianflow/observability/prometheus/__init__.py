"""Numbers of runs for machines to scrape."""
