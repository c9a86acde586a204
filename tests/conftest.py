"""Settings for all tests: one thread each, since the networks are tiny and spinning threads slow each other down."""

import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell starts background jobs with Ctrl-C ignored, and what they start inherits that; these tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)
