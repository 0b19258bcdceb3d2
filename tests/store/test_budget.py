from offload.store import budget


def test_available_bytes_reads_the_kernels_estimate(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  100 kB\nMemFree: 10 kB\nMemAvailable:   42 kB\n")
    assert budget.available_bytes(meminfo) == 42 * 1024


def test_without_an_estimate_half_of_the_memory_counts(tmp_path):
    assert budget.available_bytes(tmp_path / "missing") == budget.physical_bytes() // 2


def test_the_default_cap_leaves_room():
    assert 0 < budget.default_cap_bytes() < budget.physical_bytes()
