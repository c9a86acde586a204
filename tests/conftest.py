"""Settings for all tests: one thread each, since the networks are tiny and spinning threads slow each other down."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
