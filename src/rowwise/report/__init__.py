"""From a run folder to one HTML file that needs nothing else, and the same for several runs beside each other.

`write` and `compare` are all there is to call. A run folder is read as it is found: a file that is missing or cut
costs its section, never the report. No tensor library is loaded.
"""

from rowwise.report.compare import compare as compare
from rowwise.report.page import write as write
