"""Plain data that every package shares: payloads, events, directives, statistics, layouts."""
