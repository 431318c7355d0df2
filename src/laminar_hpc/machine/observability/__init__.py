"""What a run writes for people: console lines, metrics, traces, and mirrors of them."""
