"""Controllers of balance: pure state machines from events to directives, one file each."""
