"""Whole runs in which something fails: the final state is an undisturbed run's, bit for bit."""

import pytest

from tests.faults.faults import FAULTS, problems, train


@pytest.fixture(scope="session")
def undisturbed(tiny_team, tmp_path_factory, repository):
    """The state of a run without a fault, by its overrides."""
    states = {}

    def run(*overrides):
        if overrides not in states:
            found = train(tmp_path_factory.mktemp("runs") / "undisturbed", tiny_team, repository, *overrides)
            assert found.code == 0, found.said
            states[overrides] = found.state()
        return states[overrides]

    return run


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name.replace(" ", "_") for fault in FAULTS])
def test_a_fault_changes_no_bit_or_stops_the_run_by_name(fault, undisturbed, tiny_team, tmp_path, repository):
    found = problems(fault, tmp_path / "faulty", tiny_team, repository, undisturbed(*fault.undisturbed))
    assert not found, "\n".join(found)
