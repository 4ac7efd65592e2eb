"""The memory of a decoder: pages, slots and snapshots, and how many of each there are."""
