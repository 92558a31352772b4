"""Run the ``captum-ssm`` command as ``python -m captum_ssm``."""

from .cli import main

raise SystemExit(main())
