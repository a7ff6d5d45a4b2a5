"""A benchmark's protocol: when a run evaluates, when it stops, what it logs and what it is compared with."""
