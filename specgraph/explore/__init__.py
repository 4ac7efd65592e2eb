"""A dump and a trace as one HTML file: what every pass did, the graphs, the weights, every draft, and the step time.

``dump_files`` reads the dump and ``trace_file`` the trace. ``changes``, ``weights``, ``sizes`` and ``times`` compute
what follows from them, and ``page`` puts all of it into one file. For the command ``diff``, ``difference`` compares two
versions of graphs, and ``values`` what they compute. The folder ``page`` holds the HTML, CSS and JavaScript, and
``vendor`` the libraries that draw. The file needs no network, and its scripts put every text into it as text, never as
HTML.
"""

from specgraph.explore.page import explore
from specgraph.explore.times import Bandwidth

__all__ = ["Bandwidth", "explore"]
