"""Two real runs to report on."""

import pytest

import tiny_reports


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    return tiny_reports.real_runs(tmp_path_factory.mktemp("runs"))
