"""HTML reports, each a single file: of a run (`write`), of several runs (`compare`), of a tuning study (`write_study`).

A missing or truncated file of a run omits its section, never the report. No tensor library is loaded.
"""

from rowwise.report.compare import compare as compare
from rowwise.report.page import write as write
from rowwise.report.tuning import write_study as write_study
