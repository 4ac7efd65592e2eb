"""A dump and a trace as one HTML file: what every pass did, the graphs, the weights, every draft, and the step time.

``difference`` compares two versions of graphs and ``values`` what they compute, for the command ``diff``. ``reading``
reads the dump and ``drafts`` the trace; ``changes``, ``weights``, ``sizes`` and ``times`` say what follows
from them; ``page`` puts all of it into one file. The folder ``page`` holds the HTML, CSS and JavaScript, and ``vendor``
the libraries that draw. The file needs no network, and its scripts put every text into it as text, never as HTML.
"""

from specgraph.explore.page import explore
from specgraph.explore.times import Bandwidth

__all__ = ["Bandwidth", "explore"]
