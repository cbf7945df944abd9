"""Balance controllers: pure state machines from events to directives, one file each."""
