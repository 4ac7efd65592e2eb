"""The program and what every part of the compiler does to its graphs."""
