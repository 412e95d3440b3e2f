"""`python -m akv_demo`: the same as `akv demo`."""

import sys

from akv_demo.main import main

sys.exit(main())
