"""HTML reports, each a single file: of a run (`write`), and of several runs side by side (`compare`).

A missing or truncated file of a run costs its section, never the report. No tensor library is loaded.
"""

from rowwise.report.compare import compare as compare
from rowwise.report.page import write as write
