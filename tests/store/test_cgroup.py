"""Memory limits of control groups, in trees of files as the kernel shows them."""

import pytest

from offload.store.cgroup import cgroup_headrooms

MIB = 1 << 20
V1_UNLIMITED = 9223372036854771712
V1_MOUNT = "35 31 0:32 {root} {at} rw,relatime - cgroup cgroup rw,memory"
V2_MOUNT = "38 31 0:37 {root} {at} rw shared:9 master:2 - cgroup2 cgroup2 rw,nsdelegate"


class System:
    """A file system with `proc` and control groups."""

    def __init__(self, root):
        self.root = root
        self.write("proc/self/cgroup", "")
        self.write("proc/self/mountinfo", "")

    def write(self, path, text):
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def member_of(self, *lines):
        self.write("proc/self/cgroup", "\n".join(lines))

    def mounts(self, *lines):
        self.write("proc/self/mountinfo", "\n".join(lines))

    def v2(self, folder, limit, used, inactive=0, high="max"):
        self.write(f"{folder}/memory.max", limit)
        self.write(f"{folder}/memory.high", high)
        self.write(f"{folder}/memory.current", used)
        self.write(f"{folder}/memory.stat", f"anon 1\ninactive_file {inactive}\nactive_file 7")

    def v1(self, folder, limit, used, inactive=0, hierarchical=1):
        self.write(f"{folder}/memory.limit_in_bytes", limit)
        self.write(f"{folder}/memory.usage_in_bytes", used)
        self.write(
            f"{folder}/memory.stat", f"inactive_file 1\ntotal_inactive_file {inactive}\ncache 5"
        )
        self.write(f"{folder}/memory.use_hierarchy", hierarchical)

    def found(self):
        """What each limit leaves in MiB, by its file."""
        return {
            headroom.source.removeprefix("the cgroup limit ").removesuffix(" leaves"): (
                headroom.nbytes / MIB
            )
            for headroom in cgroup_headrooms(self.root)
        }


@pytest.fixture
def system(tmp_path):
    return System(tmp_path)


def v2_system(system, group, *, mount_root="/", at="/sys/fs/cgroup"):
    system.member_of(f"0::{group}")
    system.mounts(
        "24 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw",
        V2_MOUNT.format(root=mount_root, at=at),
    )
    return at


def test_version_2_leaves_the_limit_less_what_is_used_and_not_reclaimable(system):
    top = v2_system(system, "/job")
    system.v2(f"{top}/job", 1000 * MIB, 300 * MIB, inactive=100 * MIB)
    assert system.found() == {"/sys/fs/cgroup/job/memory.max": 800}


def test_every_group_up_to_the_root_limits_and_is_named(system):
    top = v2_system(system, "/user.slice/user-1.slice/job.scope")
    system.v2(f"{top}/user.slice", 500 * MIB, 400 * MIB)
    system.v2(f"{top}/user.slice/user-1.slice", "max", 400 * MIB)
    system.v2(f"{top}/user.slice/user-1.slice/job.scope", 900 * MIB, 100 * MIB)
    system.v2(f"{top}/other.slice", 1 * MIB, 0)
    assert system.found() == {
        "/sys/fs/cgroup/user.slice/user-1.slice/job.scope/memory.max": 800,
        "/sys/fs/cgroup/user.slice/memory.max": 100,
    }


def test_memory_high_counts_as_a_limit(system):
    top = v2_system(system, "/job")
    system.v2(f"{top}/job", 1000 * MIB, 200 * MIB, high=600 * MIB)
    assert system.found() == {
        "/sys/fs/cgroup/job/memory.max": 800,
        "/sys/fs/cgroup/job/memory.high": 400,
    }


def test_a_group_beyond_its_limit_leaves_nothing(system):
    top = v2_system(system, "/job")
    system.v2(f"{top}/job", 100 * MIB, 200 * MIB)
    assert system.found() == {"/sys/fs/cgroup/job/memory.max": 0}


def test_reclaimable_pages_never_leave_more_than_the_limit(system):
    top = v2_system(system, "/job")
    system.v2(f"{top}/job", 100 * MIB, 10 * MIB, inactive=50 * MIB)
    assert system.found() == {"/sys/fs/cgroup/job/memory.max": 100}


def test_a_container_with_its_own_namespace_reads_the_mount_point(system):
    top = v2_system(system, "/")
    system.v2(top, 64 * MIB, 14 * MIB)
    assert system.found() == {"/sys/fs/cgroup/memory.max": 50}


def test_a_container_in_the_hosts_namespace_finds_its_group_at_the_mount_point(system):
    system.member_of("4:memory:/docker/abc/job", "0::/docker/abc/job")
    system.mounts(V1_MOUNT.format(root="/docker/abc", at="/sys/fs/cgroup/memory"))
    system.v1("/sys/fs/cgroup/memory", 100 * MIB, 0)
    system.v1("/sys/fs/cgroup/memory/job", 50 * MIB, 0)
    assert system.found() == {
        "/sys/fs/cgroup/memory/job/memory.limit_in_bytes": 50,
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": 100,
    }


def test_a_group_that_is_not_below_the_mount_has_no_limit_there(system):
    top = v2_system(system, "/docker/abcd", mount_root="/docker/abc")
    system.v2(top, 1 * MIB, 0)
    assert system.found() == {}


@pytest.mark.parametrize(
    ("mount_root", "group", "found"),
    [
        ("/..", "/", {"/sys/fs/cgroup/memory.max": 9}),
        ("/../..", "/../job", {"/sys/fs/cgroup/memory.max": 9}),
        (
            "/..",
            "/../job",
            {"/sys/fs/cgroup/job/memory.max": 5, "/sys/fs/cgroup/memory.max": 9},
        ),
        ("/", "/../job", {}),
        ("/../x", "/", {}),
    ],
)
def test_a_mount_from_outside_the_namespace_is_read_as_far_as_it_can_be_named(
    system, mount_root, group, found
):
    top = v2_system(system, group, mount_root=mount_root)
    system.v2(top, 9 * MIB, 0)
    system.v2(f"{top}/job", 5 * MIB, 0)
    assert system.found() == found


def test_missing_folders_are_passed_over(system):
    top = v2_system(system, "/a/b/c (deleted)")
    system.v2(f"{top}/a", 8 * MIB, 0)
    assert system.found() == {"/sys/fs/cgroup/a/memory.max": 8}


def test_version_1_takes_the_total_of_reclaimable_pages(system):
    system.member_of("4:cpu,memory:/job")
    system.mounts(V1_MOUNT.format(root="/", at="/sys/fs/cgroup/memory"))
    system.v1("/sys/fs/cgroup/memory/job", 1000 * MIB, 300 * MIB, inactive=200 * MIB)
    assert system.found() == {"/sys/fs/cgroup/memory/job/memory.limit_in_bytes": 900}


@pytest.mark.parametrize("unlimited", [V1_UNLIMITED, 9223372036854710272, (1 << 64) - 1])
def test_huge_numbers_of_version_1_are_no_limit(system, unlimited):
    system.member_of("4:memory:/")
    system.mounts(V1_MOUNT.format(root="/", at="/sys/fs/cgroup/memory"))
    system.v1("/sys/fs/cgroup/memory", unlimited, 0)
    assert system.found() == {}


def test_a_version_1_group_without_hierarchy_limits_itself_alone(system):
    system.member_of("4:memory:/a/b/c")
    system.mounts(V1_MOUNT.format(root="/", at="/cg"))
    system.v1("/cg/a/b/c", 30 * MIB, 0, hierarchical=0)
    system.v1("/cg/a/b", 20 * MIB, 0, hierarchical=1)
    system.v1("/cg/a", 10 * MIB, 0, hierarchical=0)
    system.v1("/cg", 5 * MIB, 0, hierarchical=1)
    assert system.found() == {
        "/cg/a/b/c/memory.limit_in_bytes": 30,
        "/cg/a/b/memory.limit_in_bytes": 20,
    }


def test_a_hybrid_system_is_read_in_both_versions(system):
    system.member_of("9:name=systemd:/s", "4:memory:/m", "0::/u")
    system.mounts(
        V1_MOUNT.format(root="/", at="/sys/fs/cgroup/memory"),
        V2_MOUNT.format(root="/", at="/sys/fs/cgroup/unified"),
        "36 31 0:33 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu",
    )
    system.v1("/sys/fs/cgroup/memory/m", 7 * MIB, 0)
    system.v1("/sys/fs/cgroup/cpu/m", 1 * MIB, 0)
    system.write("/sys/fs/cgroup/unified/u/cgroup.procs", "1")
    assert system.found() == {"/sys/fs/cgroup/memory/m/memory.limit_in_bytes": 7}


def test_paths_with_spaces_and_colons_are_read(system):
    top = v2_system(system, "/a:b/c d", at="/sys/fs/my\\040groups")
    assert top == "/sys/fs/my\\040groups"
    system.v2("/sys/fs/my groups/a:b/c d", 3 * MIB, 0)
    assert system.found() == {"/sys/fs/my groups/a:b/c d/memory.max": 3}


@pytest.mark.parametrize("content", ["", "nonsense", "-5", "12 kB"])
def test_what_is_no_number_is_no_limit(system, content):
    top = v2_system(system, "/job")
    system.v2(f"{top}/job", content, 0)
    system.mounts("broken", "1 2 3 - cgroup2", V2_MOUNT.format(root="/", at=top))
    assert system.found() == {}


def test_without_control_groups_there_is_no_limit(tmp_path):
    assert cgroup_headrooms(tmp_path / "missing") == []


def test_the_groups_of_this_process_can_be_read():
    assert all(headroom.nbytes >= 0 for headroom in cgroup_headrooms())
