"""`python -m akv_bench`: the same as `akv bench`."""

import sys

from akv_bench.main import main

sys.exit(main())
