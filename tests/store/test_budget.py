import resource

import pytest

from offload.store import budget
from offload.store.budget import HostBudget
from tests.store.test_cgroup import System, v2_system
from tests.store.test_limits import STATUS, rlimits

GIB = 1 << 30
NO_LIMIT = rlimits()


@pytest.fixture
def system(tmp_path):
    """A machine with 100 GiB available."""
    system = System(tmp_path)
    system.write("proc/meminfo", f"MemTotal:  1 kB\nMemAvailable:   {100 << 20} kB")
    return system


def test_the_default_is_a_share_of_what_the_kernel_estimates(system):
    assert budget.default_budget(system.root, NO_LIMIT) == HostBudget(
        int(70 * GIB), "70 % of the 100.0 GiB that this machine has available"
    )


def test_without_an_estimate_half_of_the_memory_counts(tmp_path):
    found = budget.default_budget(tmp_path, NO_LIMIT)
    assert found.cap_bytes == int(budget.physical_bytes() // 2 * 0.7)
    assert found.reason.endswith("that is half of this machine's memory")


def test_a_control_group_lowers_the_default_and_is_named(system):
    top = v2_system(system, "/user.slice")
    system.v2(f"{top}/user.slice", 16 * GIB, 6 * GIB)
    assert budget.default_budget(system.root, NO_LIMIT) == HostBudget(
        int(7 * GIB),
        "70 % of the 10.0 GiB that the cgroup limit /sys/fs/cgroup/user.slice/memory.max leaves",
    )


def test_a_control_group_larger_than_the_machine_does_not_raise_the_default(system):
    top = v2_system(system, "/")
    system.v2(top, 500 * GIB, 0)
    assert "this machine" in budget.default_budget(system.root, NO_LIMIT).reason


@pytest.mark.parametrize(("name", "letter"), [("AS", "v"), ("DATA", "d")])
def test_ulimit_lowers_the_default_and_is_named(system, name, letter):
    system.write("proc/self/status", STATUS)
    found = budget.default_budget(system.root, rlimits(**{name: GIB}))
    assert GIB * 0.69 < found.cap_bytes < GIB * 0.7
    assert f"`ulimit -{letter}`" in found.reason


def test_as_much_is_reserved_as_the_machine_has_unless_ulimit_leaves_less(system):
    system.write("proc/self/status", STATUS)
    everything = budget.reservable(system.root, NO_LIMIT)
    assert everything.cap_bytes == budget.physical_bytes()
    assert budget.reservable(system.root, rlimits(AS=1 << 60)) == everything
    little = budget.reservable(system.root, rlimits(AS=GIB))
    assert little.cap_bytes == 704 << 20  # whole steps
    assert little.reason.startswith("70 % of the 1022.0 MiB that the limit on address space")


def test_a_named_cap_counts_as_asked_and_says_when_a_limit_leaves_less(system):
    reserved = HostBudget(200 * GIB, "the 200.0 GiB that this machine has")
    asked = budget.named_budget(GIB, reserved, 0, system.root, NO_LIMIT)
    assert asked == HostBudget(GIB, "Policy.host_bytes")
    much = budget.named_budget(150 * GIB, reserved, 0, system.root, NO_LIMIT)
    assert much == HostBudget(
        150 * GIB, "Policy.host_bytes, more than the 100.0 GiB that this machine has available"
    )
    held = budget.named_budget(150 * GIB, reserved, 50 * GIB, system.root, NO_LIMIT)
    assert held == HostBudget(150 * GIB, "Policy.host_bytes")


def test_a_named_cap_beyond_what_can_be_reserved_is_lowered_and_says_so(system):
    reserved = HostBudget(200 * GIB, "the 200.0 GiB that this machine has")
    assert budget.named_budget(300 * GIB, reserved, 0, system.root, NO_LIMIT) == HostBudget(
        200 * GIB,
        "the 200.0 GiB that this machine has, where Policy.host_bytes asks for 300.0 GiB",
    )


def test_the_default_of_this_machine_leaves_room():
    assert 0 < budget.default_budget().cap_bytes < budget.physical_bytes()
    assert budget.tightest_headroom(getrlimit=resource.getrlimit).nbytes > 0
