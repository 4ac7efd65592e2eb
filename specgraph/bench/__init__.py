"""``python -m specgraph bench``: measures times, and compares them with the time that moving the bytes takes."""
