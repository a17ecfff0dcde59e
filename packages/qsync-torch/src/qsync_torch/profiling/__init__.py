"""Measuring what a model's operators, casts, buckets and optimizer cost on one device.

See docs/design/cost-mapper.md#profiled-costs.
"""

import os as _os

# The profiler's library writes two lines to standard error each time it is used (torch 2.13).  It reads this variable when it is
# used first; a value that the user has set is kept.
_os.environ.setdefault("KINETO_LOG_LEVEL", "99")
