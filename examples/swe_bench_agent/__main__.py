"""`python -m swe_bench_agent`: see `--help` and the README beside this file."""

import sys

from swe_bench_agent.main import main

sys.exit(main())
