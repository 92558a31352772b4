"""The fixtures and hooks of all tests serve the experiments, too."""

from tests.conftest import (  # noqa: F401
    one_thread,
    private_registry,
    pytest_make_collect_report,
    pytest_runtest_makereport,
    seed,
)
