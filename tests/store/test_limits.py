"""Limits of the process: what is found, how it is named, what to set."""

import resource

import pytest

from offload.store import limits

UNLIMITED = resource.RLIM_INFINITY
MIB = 1 << 20
INITIAL_USERS = "         0          0 4294967295\n"


@pytest.fixture
def proc(tmp_path):
    """Writes files below a `proc` of its own; returns the root."""

    def write(**files):
        for name, text in files.items():
            path = tmp_path / "proc" / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


def rlimits(**limited):
    """A getrlimit with these soft limits, or pairs, and no others."""

    def getrlimit(which):
        for name, value in limited.items():
            if which == getattr(resource, f"RLIMIT_{name}"):
                return value if isinstance(value, tuple) else (value, value)
        return UNLIMITED, UNLIMITED

    return getrlimit


STATUS = "Name:\tpython\nVmPeak:\t  999 kB\nVmSize:\t 2048 kB\nVmData:\t 1024 kB\nThreads:\t3\n"


def test_ulimits_leave_what_is_not_used_yet(proc):
    root = proc(self__status=STATUS)
    found = limits.process_headrooms(root, rlimits(AS=10 * MIB, DATA=5 * MIB))
    assert [(h.nbytes, h.source) for h in found] == [
        (8 * MIB, "the limit on address space (`ulimit -v`) leaves"),
        (4 * MIB, "the limit on data (`ulimit -d`) leaves"),
    ]


def test_a_limit_that_is_exceeded_leaves_nothing(proc):
    root = proc(self__status=STATUS)
    found = limits.process_headrooms(root, rlimits(AS=MIB, DATA=MIB // 2))
    assert [h.nbytes for h in found] == [0, 0]


def test_without_limits_nothing_is_found(proc):
    root = proc(self__status=STATUS, sys__vm__overcommit_memory="1\n", meminfo="CommitLimit: 1 kB")
    assert limits.process_headrooms(root, rlimits()) == []
    assert limits.address_space_headroom(root, rlimits()) is None


def test_strict_overcommit_leaves_what_is_not_committed(proc):
    root = proc(
        sys__vm__overcommit_memory="2\n",
        meminfo="MemTotal: 9 kB\nCommitLimit:   5120 kB\nCommitted_AS:  1024 kB\n",
    )
    (found,) = limits.process_headrooms(root, rlimits())
    assert found.nbytes == 4 * MIB
    assert "vm.overcommit_memory = 2" in found.source


@pytest.mark.parametrize(
    ("files", "wsl"),
    [
        ({"sys__kernel__osrelease": "5.15.167.4-microsoft-standard-WSL2\n"}, True),
        ({"version": "Linux version 4.4.0-19041-Microsoft (Microsoft@Microsoft.com)\n"}, True),
        ({"sys__kernel__osrelease": "6.8.0-45-generic\n", "version": "Linux version 6.8\n"}, False),
        ({}, False),
    ],
)
def test_wsl_is_told_by_its_kernel(proc, files, wsl):
    assert limits.is_wsl(proc(**files)) is wsl


def test_a_memlock_limit_is_named_with_its_hard_limit_and_what_to_set(proc):
    found = limits.pinning_limits(proc(), rlimits(MEMLOCK=(64 << 10, 8 * MIB)))
    assert (found.memlock_bytes, found.memlock_hard_bytes) == (64 << 10, 8 * MIB)
    assert found.found() == "RLIMIT_MEMLOCK 64.0 KiB (hard limit 8.0 MiB)"
    assert "`ulimit -l unlimited`" in found.remedies(0)
    assert "`--ulimit memlock=-1`" in found.remedies(0)
    assert "Policy(tier='device')" in found.remedies(0)
    raisable = limits.pinning_limits(proc(), rlimits(MEMLOCK=(0, UNLIMITED)))
    assert raisable.found() == "RLIMIT_MEMLOCK 0 B (no hard limit)"


def test_wsl_is_named_and_the_size_that_works_is_told(proc):
    root = proc(sys__kernel__osrelease="6.6-microsoft-standard-WSL2")
    found = limits.pinning_limits(root, rlimits())
    assert found.found() == "WSL2"
    remedies = found.remedies(896 * MIB)
    assert "however much is free" in remedies
    assert "Policy.host_bytes of at most 896.0 MiB" in remedies
    assert "ulimit" not in remedies


@pytest.mark.parametrize(
    ("capabilities", "users", "binds"),
    [
        ("000001ffffffffff", INITIAL_USERS, False),
        ("0000000000004000", INITIAL_USERS, False),
        ("0000000000000000", INITIAL_USERS, True),
        ("000001ffffffbfff", INITIAL_USERS, True),
        ("000001ffffffffff", "0 1000 1\n", True),
    ],
)
def test_memlock_binds_unless_a_capability_of_the_initial_users_lifts_it(
    proc, capabilities, users, binds
):
    root = proc(self__status=f"Name:\tx\nCapEff:\t{capabilities}\n", self__uid_map=users)
    found = limits.pinning_limits(root, rlimits(MEMLOCK=8 * MIB))
    assert (found.memlock_bytes is not None) is binds
    assert found.found() == (
        "RLIMIT_MEMLOCK 8.0 MiB (hard limit 8.0 MiB)" if binds else "none known"
    )


def test_two_limits_are_named_together(proc):
    root = proc(version="microsoft")
    found = limits.pinning_limits(root, rlimits(MEMLOCK=MIB))
    assert found.found() == "WSL2 and RLIMIT_MEMLOCK 1.0 MiB (hard limit 1.0 MiB)"


def test_the_limits_of_this_process_can_be_read():
    assert limits.pinning_limits().found()
    assert all(h.nbytes >= 0 for h in limits.process_headrooms())
