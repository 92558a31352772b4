"""``python -m captum_ssm_bench`` is ``captum-ssm-bench``, for launchers that start modules."""

from .cli import main

raise SystemExit(main())
