"""Scripts that developers use: what is timed of kernels and options, a soak, real models, and lines of code."""
