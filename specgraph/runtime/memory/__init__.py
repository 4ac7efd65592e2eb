"""The memory of a decoder: pages, state rows and snapshots, and how many of each there are."""
